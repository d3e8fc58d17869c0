"""The form of the views where nothing can be live: a saved notebook, nbconvert, a mail. SVG and HTML, no script, nothing to fetch.

Everything that comes from a run is escaped. Colours and words are those of the live views.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Sequence
from typing import Any

from robustrl.core.fault_book import STAGES
from robustrl.timeline import COLOURS

from . import bars, recovery_text
from .bars import CODES, Bar, thinned
from .scene import Scene
from .words import LONG, PHASES, cut, headline, seconds

FILL = {bars.WORK: "#b7d8cd", bars.IDLE: "#ffffff", bars.DETECT: COLOURS["detect"], bars.RESTART: COLOURS["restart"],
        bars.RECONNECT: COLOURS["reconnect"], bars.START: "#eef2f5"}
INK, LINE = "#1b1f24", "#d9dee4"
HEAD = 'fill="#5c6570" font-size="10.5"'
"""Of what stands above bars."""
_WIDTH, _LEFT, _LANE = 960, 130, 22
_LEAST_BAR = 0.7
_MARK = "#d55e00"
"""A fault or a failure: a triangle, as in the live timeline."""
_GHOST = "the ghost"
_SHOWN, _SHOWN_IN_ALL, _LEAST_SHOWN = 400, 3000, 40
"""Bars of one lane, and of all: a saved notebook should stay small."""


def timeline_svg(scene: Scene, now: float, start: float = 0.0) -> str:
    """One lane per role from ``start`` until ``now``, with a legend. Empty before the first role has started."""
    picture = scene.picture("timeline", now)
    order: list[str] = picture["order"]
    if not order:
        return ""
    ghost, bars_of = picture.get("ghost"), dict(picture["lanes"])
    if ghost:
        order, bars_of[_GHOST] = [_GHOST, *order], ghost["lane"]
    end = max(now, start + 1.0)
    scale = (_WIDTH - _LEFT - 10) / (end - start)
    most = max(_LEAST_SHOWN, min(_SHOWN, _SHOWN_IN_ALL // len(order)))
    parts, height = [], 24 + _LANE * len(order)
    tick = next(step for step in (1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600, 36000) if (end - start) / step <= 10 or step == 36000)
    for mark in range(-int(-start // tick) * tick, int(end) + 1, tick):
        x = _LEFT + (mark - start) * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{height - 6}" stroke="#d9dee4"/>'
                     f'<text x="{x:.1f}" y="11" text-anchor="middle" fill="#5c6570" font-size="10.5">{mark} s</text>')
    for place, role in enumerate(order):
        y = 18 + _LANE * place
        parts.append(f'<text x="0" y="{y + 14}" font-size="12" fill="#1b1f24">{text(role)}</text>')
        drawn = "".join(_bar(bar, y, scale, start, end) for bar in thinned(_between(bars_of[role], start, end), most))
        parts.append(f'<g opacity=".5">{drawn}</g>' if role == _GHOST else drawn)
    for t, role, _, words in picture["marks"].values():
        if role in order and start <= t <= end:
            y = 18 + _LANE * order.index(role)
            parts.append(f'<path d="M{_LEFT + (t - start) * scale - 6:.1f},{y - 3}h12l-6,10z" fill="{_MARK}" stroke="#ffffff">'
                         f"<title>{text(words)}</title></path>")
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    return (f'<svg role="img" aria-label="timeline of {len(order)} roles over {end - start:.0f} seconds" {size} '
            f'style="max-width:100%;background:#fff;font-family:sans-serif">{"".join(parts)}</svg>{_legend()}{_race(ghost)}')


def _between(chunks: dict[str, Any], start: float, end: float) -> list[Bar]:
    found = [Bar(float(low), float(high), str(code), str(phase)) for chunk in chunks.values() for low, high, code, phase in chunk]
    return [bar for bar in found if bar.start <= end and (bar.end < 0 or bar.end >= start)]


def _bar(bar: Bar, y: int, scale: float, start: float, now: float) -> str:
    code, phase, stop = bar.code, bar.phase, now if bar.end < 0 else bar.end
    low, high = max(bar.start, start), min(stop, now)
    width = max(_LEAST_BAR, (high - low) * scale)
    edge = ' stroke="#d9dee4"' if code in (bars.IDLE, bars.START) else ""
    title = f"{CODES.get(code, code)}{', ' + PHASES.get(phase, phase) if phase else ''}, {seconds(max(0.0, stop - bar.start))}"
    return (f'<rect x="{_LEFT + (low - start) * scale:.1f}" y="{y}" width="{width:.1f}" height="{_LANE - 5}" '
            f'fill="{FILL.get(code, "#ddd")}"{edge}><title>{text(title)}</title></rect>')


def _race(ghost: dict[str, Any] | None) -> str:
    return f'<div style="font-size:12px"><b>{text(ghost["words"])}</b> {text(ghost["label"])}</div>' if ghost else ""


def _legend() -> str:
    box = "display:inline-block;width:11px;height:11px;margin:0 5px 0 14px;border:1px solid #d9dee4;vertical-align:-1px"
    words = {code: word for code, word in CODES.items() if code in FILL}
    items = "".join(f'<i style="{box};background:{FILL[code]}"></i>{word}' for code, word in words.items())
    return f'<div style="font-size:12px">{items} &nbsp; <b style="color:{_MARK}">&#9660;</b> fault or failure</div>'


def recoveries_html(scene: Scene) -> str:
    """Each recovery in words, newest last."""
    rows = []
    for episode in scene.episodes.all[-recovery_text.SHOWN:]:
        took = ", ".join(f"{name} {seconds(value)}" for name, value in episode.seconds().items() if value is not None)
        total = f" in {seconds(episode.record.total)}" if episode.record.total is not None else ""
        words = [recovery_text.seen(episode), episode.noticed, recovery_text.done(episode, scene), recovery_text.moved(episode),
                 recovery_text.meanwhile(episode), recovery_text.full_cost(episode, scene)]
        outcome = recovery_text.standing(episode, scene) or episode.record.outcome
        rows.append(f"<li><b>{text(episode.record.role)}: {text(outcome)}{total}</b> ({took}). "
                    f"{text(' '.join(word for word in words if word))}</li>")
    return f"<div>Failures and what was done about them:</div><ul>{''.join(rows)}</ul>" if rows else ""


def board_html(scene: Scene, now: float) -> str:
    from robustrl.display import html_job

    why = scene.lost or scene.state.reason
    reason, more = headline(why), cut(why, LONG)
    details = f"<details><summary>details</summary><pre>{html.escape(more)}</pre></details>" if more != reason else ""
    return html_job(scene.state, scene.status, reason, cut(scene.state.run)) + details + recoveries_html(scene)


def faults_html(scene: Scene, now: float) -> str:
    rows = []
    for card in scene.picture("faults", now)["cards"].values():
        if card.get("masked"):
            rows.append([card["n"], "hidden", "", "", ""])
            continue
        reached = [f"{stage} at {card[stage]:.1f} s" for stage in STAGES if card[stage] is not None]
        rows.append([card["n"], f"{card['kind']}{' (benign)' if card['benign'] else ''}", card["target"], ", ".join(reached),
                     card["rule"] or card["outcome"].replace("_", " ")])
    return table(("fault", "kind", "target", "stages", "rule or end"), rows, "No fault was ordered so far.")


def thresholds_html(scene: Scene, now: float) -> str:
    rows = [[path, row["words"], row["set"], f"{row['value']:.2f} ({row['role']})" if "value" in row else ""]
            for path, row in scene.picture("thresholds", now)["rows"].items() if row["words"]]
    return table(("threshold", "what it is for", "limit", "signal now"), rows, "")


def metrics_html(scene: Scene, now: float) -> str:
    shown = scene.picture("metrics", now)
    ledger, rewards = shown["head"]["ledger"], [reward for reward in shown["reward"] if reward is not None]
    rows = [["optimizer step", f"{shown['head']['step']} of {shown['head']['steps']}"]]
    if rewards:
        rows.append(["reward, first to last step", f"{rewards[0]:.3f} to {rewards[-1]:.3f}"])
    if shown["accuracy"]:
        rows.append(["held-out accuracy, first to last", f"{shown['accuracy'][0][1]:.3f} to {shown['accuracy'][-1][1]:.3f}"])
    if shown["ettrs"]:
        _, strict, paper = shown["ettrs"][-1]
        rows.append(["effective training time, strict and by the paper's rule", f"{strict:.3f}, {paper:.3f}"])
    if early := shown["head"]["ettr_early"]:
        rows.append(["", early])
    rows.append(["answers", f"{ledger['started']} started = {ledger['consumed']} used + {ledger['dropped']} dropped + "
                            f"{ledger['in_flight']} in flight"])
    if shown["race"]:
        rows.append(["against the ghost", shown["race"]["words"]])
    return table(("figure", "value"), rows, "")


def trajectories_html(scene: Scene, now: float) -> str:
    rows = [[row["id"], row["prompt"], row["text"], row["reward"], ", ".join(f"{n} by v{v}" for v, n in row["versions"]), row["at"]]
            for row in list(scene.picture("trajectories", now)["rows"].values())[-12:]]
    return table(("#", "prompt", "answer", "reward", "tokens, by weight version", "rollout"), rows, "No answer yet.")


def table(names: Sequence[str], rows: list[list[Any]], without_rows: str) -> str:
    if not rows:
        return f"<div>{without_rows}</div>"
    cell = "text-align:left;padding:1px 12px 1px 0;vertical-align:top"
    head = "".join(f'<th style="{cell}">{name}</th>' for name in names)
    body = "".join("<tr>" + "".join(f'<td style="{cell}">{text(value)}</td>' for value in row) + "</tr>" for row in rows)
    return f'<table style="font-family:sans-serif;font-size:13px"><tr>{head}</tr>{body}</table>'


FORMS: dict[str, Callable[[Scene, float], str]] = {
    "board": board_html, "timeline": timeline_svg, "faults": faults_html, "thresholds": thresholds_html, "metrics": metrics_html,
    "trajectories": trajectories_html,
    "recovery": lambda scene, now: recoveries_html(scene) or "<div>Nothing had to be recovered yet.</div>",
    "player": lambda scene, now: f"<div>A recording of {seconds(scene.length)}.</div>",
}
"""View -> its form, as it stands at ``now``."""


def form(view: str, scene: Scene, now: float) -> str:
    """The form of a view; of a job that is gone, and of a log that breaks off, it says so, as the live views do."""
    if scene.gone is None:
        return (f"<div><b>{text(scene.broken)}</b></div>" if scene.broken else "") + FORMS[view](scene, now)
    since = time.strftime("%H:%M:%S", time.localtime(scene.gone))
    return f"<div><b>The job is gone since {since}: what you see is its last state.</b></div>{FORMS[view](scene, now)}"


def text(value: object) -> str:
    return html.escape(cut(value, 1000))
