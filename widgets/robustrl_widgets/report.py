"""One recovery as one HTML file: what was seen, what was done, the board as it was, with a time scrubber. For a chat, a slide, a paper.

The file is self-contained, needs no Python and fetches nothing; it stays below a megabyte. The views in it are the live ones, played from
pictures that were taken along the log. What comes from the run is data in it, never markup.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robustrl.core import events as ev
from robustrl.core.audit import RULES, audit
from robustrl.core.run_state import RunState
from robustrl.errors import ConfigError

from . import assets, recovery_text, static
from .channel import difference
from .episodes import Episode
from .ghost import Ghost
from .ghost_files import find, folder_of
from .lanes import Lanes
from .scene import Scene
from .words import cut, seconds

if TYPE_CHECKING:
    from robustrl.job import Job
    from robustrl.replay.run import Run

LIMIT = 1_000_000
"""Bytes."""
_VIEWS = ("recovery", "board")
_BEFORE, _AFTER, _FRAMES, _LEAST = 3.0, 4.0, 150, 0.2
_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 18px auto; padding: 0 14px;
  background: light-dark(#eef1f4, #0b0d0f); }
.bar { display: flex; gap: 10px; align-items: center; margin: 12px 0; } .bar input { flex: 1; }
section { margin: 12px 0; overflow-x: auto; } footer { font-size: 12px; opacity: .75; }
"""


def save_html(run: Job | Run | str | Path, path: str | Path, number: int | None = None) -> Path:
    """Write recovery ``number`` (None: the last one) of a job or a recorded run to ``path``. Returns it. Raises ConfigError, OSError.

    ``run``: a live job, a `robustrl.Run`, or the path of a recorded one. `job.recoveries[i].save_html(path)` is the same.
    """
    from robustrl.replay.run import Run

    from .sources import load_entries

    if isinstance(run, str | Path):
        return write_html(load_entries(run), run, path, number)
    if isinstance(run, Run):
        return write_html(run.entries, None, path, number)
    return write_html(run.events, run.run_dir, path, number, live=not run.over)


def write_html(entries: Sequence[ev.Entry], place: str | Path | None, path: str | Path, number: int | None, live: bool = False) -> Path:
    """``place``: the run's directory or file, beside which its ghosts are; None: it has none, or nobody knows where. ``live``: its job goes
    on.
    """
    ghost = find(RunState.of(entries[:1]).config, folder_of(place) if place else None)
    target = Path(path).expanduser()
    target.write_text(html_of(entries, number, ghost, live), encoding="utf-8")
    return target


def html_of(entries: Sequence[ev.Entry], number: int | None = None, ghost: Ghost | None = None, live: bool = False) -> str:
    """``live``: more entries are to come. Raises ConfigError if there is no such recovery."""
    end, episode = _find(entries, number, ghost)
    end.length = 0.0 if live else end.t
    record, t0 = episode.record, end.state.t0
    start = max(0.0, episode.onset - t0 - _BEFORE)
    stop = min(end.t, (record.until if record.until is not None else end.state.t) - t0 + _AFTER)
    every = max(_LEAST, (stop - start) / _FRAMES)
    frames, words = _frames(entries, start, stop, every), _outcome(episode, end, live)
    if stop >= end.t and not live:  # in the last moment that is known nothing goes on any more
        for drawn in frames[-1]["roles"].values():
            if drawn.get("stages", {}).get("on"):
                drawn["stages"]["cut_off"] = True
    data = {
        "start": round(start, 3), "every": round(every, 3), "first": frames[0],
        "patches": [difference(before, after) for before, after in zip(frames, frames[1:], strict=False)],
        "recovery": recovery_text.picture(episode, end) | ({} if episode.healed else {"standing": words}),
        "history": {role: list(lines) for role, lines in end.history.items()},
    }
    title = f"{record.role}: {words}"
    text = _page(title, end, data, (start, stop), _audited(entries))
    if len(text.encode()) > LIMIT:  # many roles: fewer moments of them
        data["first"], data["patches"], data["every"] = frames[0], [difference(frames[0], frames[-1])], round(stop - start, 3)
        text = _page(title, end, data, (start, stop), _audited(entries))
    return text


def _outcome(episode: Episode, end: Scene, live: bool) -> str:
    """In words: what is kept in a file does not change any more."""
    if episode.healed:
        return f"recovered in {seconds(episode.record.total or 0.0)}"
    if not episode.stage:
        return recovery_text.standing(episode, end)
    return f"{'recovery under way when this was written' if live else 'not recovered when the log ended'} ({episode.stage})"


def _find(entries: Sequence[ev.Entry], number: int | None, ghost: Ghost | None) -> tuple[Scene, Episode]:
    scene = Scene()
    scene.race.ghost = ghost
    scene.lanes = Lanes(None)  # its stretch is drawn from the whole log, however long ago it was
    for entry in entries:
        scene.apply(entry)
    found = [episode for episode in scene.episodes.all if number in (None, episode.record.number)]
    if not found:
        numbers = ", ".join(str(episode.record.number) for episode in scene.episodes.all)
        raise ConfigError("number", number, f"there is no such recovery in this run; there are: {numbers or 'none'}")
    return scene, found[-1]


def _frames(entries: Sequence[ev.Entry], start: float, stop: float, every: float) -> list[dict[str, Any]]:
    scene, frames, t0, moment = Scene(), [], entries[0].t, start
    scene.length = math.inf  # a recording, of whose end `_audited` tells
    for entry in entries:
        while entry.t - t0 > moment and moment <= stop:
            frames.append(scene.picture("board", moment))
            moment += every
        scene.apply(entry)
    while moment <= stop + every / 2 or not frames:
        frames.append(scene.picture("board", moment))
        moment += every
    return frames


def _audited(entries: Sequence[ev.Entry]) -> str:
    if not isinstance(entries[-1].event, ev.RunEnded):
        return "The run had not ended when this was written: its log was not audited yet."
    findings = audit(list(entries))
    if findings:
        return f"The audit of the whole run's log found {len(findings)} violations, the first: {findings[0]}"
    return f"The audit of the whole run's log found it in order: {len(entries)} entries satisfy all {len(RULES)} rules."


def _page(title: str, scene: Scene, data: dict[str, Any], stretch: tuple[float, float], audited: str) -> str:
    encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    run = f"{scene.state.name}, run {scene.state.run}, optimizer step {scene.state.step} of {scene.state.steps}"
    views = "".join(f'<script type="module">{_module(view)}\nwindow.robustrl_views.{view}(VIEW);</script>' for view in _VIEWS)
    player, (start, stop) = assets.text("report.js"), stretch
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_text(title)}</title><style>{_STYLE}</style>'
        f'<h1>{_text(title)}</h1><p>{_text(run)}</p><div id="recovery"></div>'
        '<div class="bar"><button id="play">play</button>'
        '<input id="slider" type="range" min="0" value="0" aria-label="moment of the run">'
        '<span id="clock"></span></div><div id="board"></div>'
        f"<section><h2>Timeline from {start:.0f} s to {stop:.0f} s of the run</h2>{static.timeline_svg(scene, stop, start)}</section>"
        f"<footer>{_text(audited)}</footer>"
        f'<script id="data" type="application/json">{encoded}</script><script>{player}</script>{views}</html>'
    )


def _module(view: str) -> str:
    return assets.esm(view).replace("export default { render };", "const VIEW = { render };")


def _text(value: str) -> str:
    return html.escape(cut(value, 1000))
