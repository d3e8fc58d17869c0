"""The form of the views where nothing can be live: a saved notebook, nbconvert, a mail. SVG and HTML, no script, nothing to fetch.

Everything that comes from a run is escaped. Colours and words are those of the live views.
"""

from __future__ import annotations

import html
from typing import Any

from . import lanes, recovery_text
from .scene import Scene
from .words import cut, seconds

FILL = {lanes.WORK: "#b7d8cd", lanes.IDLE: "#ffffff", lanes.DETECT: "#e69f00", lanes.RESTART: "#cc79a7", lanes.RECONNECT: "#0072b2",
        lanes.START: "#eef2f5"}
_WIDTH, _LEFT, _LANE = 960, 130, 22
_LEAST_BAR = 0.7
_GHOST = "the ghost"
_SHOWN = 400
"""Bars of one lane: a saved notebook should stay small."""


def timeline_svg(scene: Scene, now: float) -> str:
    """One lane per role over the whole run, with a legend. Empty before the first role has started."""
    picture = scene.picture("timeline", now)
    order: list[str] = picture["order"]
    if not order:
        return ""
    ghost, bars_of = picture.get("ghost"), dict(picture["lanes"])
    if ghost:
        order, bars_of[_GHOST] = [_GHOST, *order], ghost["lane"]
    end = max(now, 1.0)
    scale = (_WIDTH - _LEFT - 10) / end
    parts, height = [], 24 + _LANE * len(order)
    tick = next(step for step in (1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600, 36000) if end / step <= 10 or step == 36000)
    for mark in range(0, int(end) + 1, tick):
        x = _LEFT + mark * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{height - 6}" stroke="#d9dee4"/>'
                     f'<text x="{x:.1f}" y="11" text-anchor="middle" fill="#5c6570" font-size="10.5">{mark} s</text>')
    for place, role in enumerate(order):
        y = 18 + _LANE * place
        parts.append(f'<text x="0" y="{y + 14}" font-size="12" fill="#1b1f24">{_text(role)}</text>')
        bars = [bar for chunk in bars_of[role].values() for bar in chunk][-_SHOWN:]
        drawn = "".join(_bar(bar, y, scale, now) for bar in bars)
        parts.append(f'<g opacity=".5">{drawn}</g>' if role == _GHOST else drawn)
    for t, role, _, words in picture["marks"].values():
        if role in order:
            y = 18 + _LANE * order.index(role)
            parts.append(f'<text x="{_LEFT + t * scale:.1f}" y="{y + 15}" text-anchor="middle" font-size="15" fill="#d55e00">'
                         f"&#9889;<title>{_text(words)}</title></text>")
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    return (f'<svg role="img" aria-label="timeline of {len(order)} roles over {end:.0f} seconds" {size} '
            f'style="max-width:100%;background:#fff;font-family:sans-serif">{"".join(parts)}</svg>{_legend()}{_race(ghost)}')


def _bar(bar: list[float | str], y: int, scale: float, now: float) -> str:
    start, end, code, phase = float(bar[0]), float(bar[1]), str(bar[2]), str(bar[3])
    stop = now if end < 0 else end
    width = max(_LEAST_BAR, (stop - start) * scale)
    edge = ' stroke="#d9dee4"' if code in (lanes.IDLE, lanes.START) else ""
    title = f"{lanes.CODES.get(code, code)}{', ' + phase if phase else ''}, {seconds(max(0.0, stop - start))}"
    return (f'<rect x="{_LEFT + start * scale:.1f}" y="{y}" width="{width:.1f}" height="{_LANE - 5}" fill="{FILL.get(code, "#ddd")}"{edge}>'
            f"<title>{_text(title)}</title></rect>")


def _race(ghost: dict[str, Any] | None) -> str:
    return f'<div style="font-size:12px"><b>{_text(ghost["words"])}</b> {_text(ghost["label"])}</div>' if ghost else ""


def _legend() -> str:
    box = "display:inline-block;width:11px;height:11px;margin:0 5px 0 14px;border:1px solid #d9dee4;vertical-align:-1px"
    words = {code: word for code, word in lanes.CODES.items() if code in FILL}
    items = "".join(f'<i style="{box};background:{FILL[code]}"></i>{word}' for code, word in words.items())
    return f'<div style="font-size:12px">{items} &nbsp; &#9889; fault or failure</div>'


def recoveries_html(scene: Scene) -> str:
    """Each recovery in words, newest last."""
    rows = []
    for episode in scene.episodes.all[-recovery_text.SHOWN:]:
        took = ", ".join(f"{name} {seconds(value)}" for name, value in episode.seconds().items() if value is not None)
        total = f" in {seconds(episode.record.total)}" if episode.record.total is not None else ""
        words = [recovery_text.seen(episode), recovery_text.done(episode), recovery_text.moved(episode), recovery_text.meanwhile(episode),
                 recovery_text.full_cost(episode, scene)]
        rows.append(f"<li><b>{_text(episode.record.role)}: {_text(episode.record.outcome)}{total}</b> ({took or 'under way'}). "
                    f"{_text(' '.join(word for word in words if word))}</li>")
    return f"<div>Failures and what was done about them:</div><ul>{''.join(rows)}</ul>" if rows else ""


def _text(value: object) -> str:
    return html.escape(cut(value, 1000))
