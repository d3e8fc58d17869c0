"""The TuningLab where nothing can be live: what one setting says of the run that is shown, beside its signals, its limits and its worth.

Pure, from the picture that the pages get. What comes from a run is escaped. Left out: the other settings' points.
"""

from __future__ import annotations

from typing import Any

from .static import HEAD, INK, LINE, table, text
from .words import seconds

_WIDTH, _LEFT, _LANE, _TOP = 900, 130, 30, 1.6
_MARKS = {"detected": ("&#9660;", "#009e73", "found"), "false alarm": ("&#9650;", "#d55e00", "FALSE ALARM"),
          "missed": ("&#10005;", "#d55e00", "missed"), "consequence": ("&#9661;", "#5c6570", "had ended by itself")}  # fmt: skip
_LEAST = 0.03
"""A share of a limit that is less than half a pixel high."""


def tuning_html(picture: dict[str, Any]) -> str:
    """``picture``: as a Tuner sends it."""
    side = picture.get("a")
    if side is None:
        return "<div>No run was loaded yet: the sliders need a kernel.</div>"
    sides = [side, *([picture["b"]] if "b" in picture else [])]
    names = ["worth on all runs" if len(picture["runs"]) > 1 else "worth", "now", *(["kept"] if len(sides) > 1 else [])]
    limits = [[row["path"], row["words"], f"{row['base']:g} s", f"{side['values'][row['path']]:g} s"] for row in picture["sliders"]]
    return (f"<div><b>{text(picture['runs'][picture['shown']])}</b></div>{_lanes(picture, side)}{_legend()}"
            f"{table(names, _worth([each['score'] for each in sides]), '')}<pre>{text(side['code'])}</pre>"
            f"{table(('limit', 'what it is for', 'began with', 'now'), limits, '')}")  # fmt: skip


def _worth(scores: list[dict[str, Any]]) -> list[list[Any]]:
    return [["found", *(f"{score['detected']} of {score['faults']}" for score in scores)],
            ["missed", *(score["missed"] for score in scores)], ["false alarms", *(score["false_alarms"] for score in scores)],
            ["delay, mean", *(seconds(score["mean"]) for score in scores)],
            ["delay, longest", *(seconds(score["max"]) for score in scores)], ["seconds lost", *(score["cost"] for score in scores)],
            ["nearest harmless", *(f"{100 * score['reach']:.0f} % {score['reach_of']}" for score in scores)]]  # fmt: skip


def _lanes(picture: dict[str, Any], side: dict[str, Any]) -> str:
    order, end = picture["order"], max(picture["seconds"], 1e-6)
    height = 20 + _LANE * len(order) + 6

    def x(t: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 8) * t / end

    def y(lane: int, share: float) -> float:
        return 16 + _LANE * (lane + 1) - 4 - (_LANE - 8) * min(share, _TOP) / _TOP

    parts = [f'<text x="{_LEFT}" y="11" {HEAD}>0 s</text><text x="{_WIDTH - 8}" y="11" text-anchor="end" {HEAD}>{end:.0f} s</text>']
    for place, role in enumerate(order):
        parts.append(f'<text x="0" y="{y(place, 0.4):.1f}" font-size="12" fill="{INK}">{text(role)}</text>')
        for start, stop, of, kind, expect in picture["truth"]:
            if of == role:
                edge = f' stroke="{INK}" stroke-dasharray="3 3"' if expect == "well" else ""
                fill = {"failed": "#d55e00", "well": "#009e73"}.get(expect, "#5c6570")
                parts.append(f'<rect x="{x(start):.1f}" y="{y(place, _TOP) - 2:.1f}" width="{max(2.0, x(stop) - x(start)):.1f}" '
                             f'height="{_LANE - 4}" fill="{fill}" fill-opacity=".22"{edge}><title>{text(kind)}, {seconds(stop - start)}'
                             f"</title></rect>")  # fmt: skip
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y(place, 1):.1f}" y2="{y(place, 1):.1f}" stroke="#d55e00" '
                     f'stroke-dasharray="3 4"/><line x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y(place, 0):.1f}" y2="{y(place, 0):.1f}" '
                     f'stroke="{LINE}"/>')  # fmt: skip
        stems = {True: "", False: ""}
        for path, points in picture["signals"].get(role, {}).items():
            for t, value in points:
                if (share := value / side["values"].get(path, float("inf"))) >= _LEAST:
                    stems[share >= 1] += f"M{x(t):.0f} {y(place, 0):.0f}V{y(place, share):.0f}"
        parts += [f'<path d="{stems[over]}" fill="none" stroke="{"#d55e00" if over else "#0072b2"}"/>' for over in stems if stems[over]]
        for t, of, outcome, rule, delay in side["marks"]:
            if of == role and outcome in _MARKS:
                sign, colour, words = _MARKS[outcome]
                late = "" if delay is None else f", after {seconds(delay)}"
                parts.append(f'<text x="{x(t):.1f}" y="{y(place, 1.15):.1f}" text-anchor="middle" font-size="15" fill="{colour}">{sign}'
                             f"<title>{text(f'{words}, rule {rule}' if rule else words)}{late}</title></text>")  # fmt: skip
    return (f'<svg role="img" aria-label="signals of {len(order)} roles over {end:.0f} seconds" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" style="max-width:100%;background:#fff;font-family:sans-serif">{"".join(parts)}</svg>')


def _legend() -> str:
    signs = " &nbsp; ".join(f'<span style="color:{colour}">{sign}</span> {words}' for sign, colour, words in _MARKS.values())
    return f'<div style="font-size:12px">{signs} &nbsp; shaded: a fault, dashed edge: harmless &nbsp; - - the limit</div>'
