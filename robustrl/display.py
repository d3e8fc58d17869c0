"""What a job looks like where nothing can be live: static HTML for a saved notebook, and a table for the terminal.

All is drawn from a RunState, so from the log alone. Colours are Okabe and Ito's, and never the only sign: the word stands beside each.
Everything that comes from a run is escaped. Left out: the live view in a notebook.
"""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from .core.roles import RoleKind, RoleState
from .core.run_state import RoleView, RunState
from .errors import counted

if TYPE_CHECKING:
    from rich.console import Group

    from .job import Job

_GREEN, _BLUE, _SKY, _ORANGE = "#009E73", "#0072B2", "#56B4E9", "#E69F00"
_VERMILION, _PURPLE, _YELLOW, _GREY = "#D55E00", "#CC79A7", "#F0E442", "#888888"
STATE_COLOURS = {
    RoleState.STARTING: _SKY, RoleState.RESTARTING: _PURPLE, RoleState.STALE: _ORANGE, RoleState.HEALTHY: _GREEN,
    RoleState.SUSPECT: _YELLOW,
    RoleState.FAILED: _VERMILION, RoleState.STOPPED: _GREY,
}
STATUS_COLOURS = {"starting": _SKY, "running": _GREEN, "paused": _ORANGE, "done": _BLUE, "stopped": _GREY, "failed": _VERMILION}
UPDATES_PER_SECOND = 4
_LINE_EVERY = 5.0
"""Seconds between two plain lines."""
_COLUMNS = ("node", "role", "state", "phase", "version", "progress", "pid")
_TERMINAL_COLUMNS = _COLUMNS[:-1]
_CELL_LIMIT = 200


def role_rows(state: RunState) -> list[tuple[RoleView, dict[str, str]]]:
    """Each role with the text of its columns, by node, then in the order in which they were started."""
    rates = state.tokens_per_second()
    order = {node: place for place, node in enumerate(state.nodes)}
    views = sorted(state.roles.values(), key=lambda view: order.get(view.node, len(order)))
    return [(view, {"node": view.node, "role": view.role, "state": str(view.state), "phase": _phase(view),
                    "version": _version(state, view), "progress": _progress(view, rates.get(view.role)),
                    "pid": f"{view.pid}, ended" if view.exited else str(view.pid)})
            for view in views]


def headline(state: RunState, status: str) -> str:
    """One line: status, step, reward, accuracy, trajectories."""
    parts = [f"{status}, step {state.step}/{state.steps or '?'}"]
    if rewards := _rewards(state):
        parts.append(f"reward {rewards[-1]:.2f}")
    if accuracy := _accuracy(state):
        parts.append(accuracy)
    return ", ".join([*parts, _ledger(state)])


# -- HTML -


def html_job(state: RunState, status: str, reason: str, run_dir: str) -> str:
    """A self-contained piece of HTML: no script, no style sheet, nothing to fetch."""
    colour = STATUS_COLOURS.get(status, _GREY)
    rows = "".join(_html_row(view, cells) for view, cells in role_rows(state))
    share = 100 * state.step / state.steps if state.steps else 0
    bar = ('<div style="height:4px;max-width:640px;background:rgba(128,128,128,.3);margin:4px 0">'
           f'<div style="height:4px;width:{share:.1f}%;background:{colour}"></div></div>')
    facts = " &middot; ".join(_text(part) for part in (_accuracy(state), _ledger(state), f"run directory {run_dir}") if part)
    why = f'<pre style="margin:4px 0;white-space:pre-wrap">{_text(reason)}</pre>' if reason else ""
    notes = "".join(f"<div>{_dot(_ORANGE)}{_text(text)}</div>" for _, text in state.warnings[-3:])
    head = "".join(f'<th style="text-align:left;padding:1px 10px 1px 0">{name}</th>' for name in _COLUMNS)
    table = f'<table style="border-collapse:collapse;margin:4px 0"><tr>{head}</tr>{rows}</table>'
    step = f"optimizer step {state.step} of {state.steps or '?'}"
    title = f"<b>{_text(state.name or 'job')}</b> {_dot(colour)}{_text(status)}, {step}"
    plot = _sparkline(_rewards(state))
    return (f'<div style="font-family:sans-serif;font-size:13px"><div>{title}</div>{bar}{why}{plot}<div>{facts}</div>'
            f"{table if rows else '<div>no role has started yet</div>'}{notes}</div>")


def html_table(rows: Sequence[dict[str, Any]], total: int) -> str:
    """Rows of any table, the last ones of ``total``."""
    if not rows:
        return "<div>no rows yet</div>"
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{_text(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(_td(_text(_short(row.get(name, "")))) for name in names) + "</tr>" for row in rows)
    return f"<div>the last {len(rows)} of {total} rows</div><table><tr>{head}</tr>{body}</table>"


def _sparkline(values: Sequence[float], width: int = 320, height: int = 48) -> str:
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    points = " ".join(f"{2 + (width - 4) * i / (len(values) - 1):.1f},{height - 2 - (height - 4) * (value - low) / span:.1f}"
                      for i, value in enumerate(values))
    label = f"mean reward per optimizer step, from {values[0]:.3f} to {values[-1]:.3f}"
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    line = f'<polyline fill="none" stroke="{_BLUE}" stroke-width="1.5" points="{points}"/>'
    return f'<div><svg role="img" aria-label="{label}" {size}>{line}</svg><div>{label}</div></div>'


def _html_row(view: RoleView, cells: dict[str, str]) -> str:
    marked = {name: (_dot(STATE_COLOURS[view.state]) if name == "state" else "") + _text(cells[name]) for name in _COLUMNS}
    return f'<tr style="background:none">{"".join(map(_td, marked.values()))}</tr>'


def _td(content: str) -> str:
    return f'<td style="text-align:left;padding:1px 10px 1px 0">{content}</td>'


def _dot(colour: str) -> str:
    return f'<span style="color:{colour}">&#9679;</span> '


def _text(value: str) -> str:
    return html.escape(str(value))


# -- terminal -


def watch(job: Job, stream: TextIO | None = None) -> None:
    """Shows the job on ``stream`` (stderr) until it has ended: a live table on a terminal where rich is there, else a line every 5 s."""
    stream = stream or sys.stderr
    if not stream.isatty():
        return _watch_lines(job, stream)
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        return _watch_lines(job, stream)
    period, shown = 1 / UPDATES_PER_SECOND, 0.0
    with Live(console=Console(file=stream), auto_refresh=False) as live:
        while not job.follow(period):
            live.update(job.read(lambda state: _terminal_table(state, job.status)), refresh=True)
            shown = time.monotonic()
        time.sleep(max(0.0, shown + period - time.monotonic()))
        live.update(job.read(lambda state: _terminal_table(state, job.status)))  # drawn as it is left, once


def _watch_lines(job: Job, stream: TextIO) -> None:
    over = False
    while not over:
        over = job.follow(_LINE_EVERY)
        print(job.read(lambda state: plain_line(state, job.status)), file=stream, flush=True)


def plain_line(state: RunState, status: str) -> str:
    """Time, headline, then trainer and rollouts one by one and the others by state."""
    shown = [view for view in state.roles.values() if view.kind in (RoleKind.TRAINER, RoleKind.ROLLOUT)]
    others = [str(view.state) for view in state.roles.values() if view.kind not in (RoleKind.TRAINER, RoleKind.ROLLOUT)]
    parts = [f"{view.role} {view.state}/{_phase(view)} version {_version(state, view)}" for view in shown]
    parts += [f"{others.count(word)} others {word}" for word in dict.fromkeys(others)]
    seconds = state.t - state.t0 if state.over or not state.wall else time.time() - state.wall
    return f"{seconds:7.1f} s  {headline(state, status)}" + "".join(f"; {part}" for part in parts)


def _terminal_table(state: RunState, status: str) -> Group:
    """Fits 80 columns: where it has to, ``progress`` alone gives way."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = role_rows(state)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in _TERMINAL_COLUMNS:
        widest = max([len(name), *(len(cells[name]) for _, cells in rows)])
        table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=widest if name != "progress" else None)
    for view, cells in rows:
        table.add_row(*(Text(cells[name], style=STATE_COLOURS[view.state] if name == "state" else "") for name in _TERMINAL_COLUMNS))
    return Group(Text(headline(state, status)), table)


# -- words -


def _version(state: RunState, view: RoleView) -> str:
    version = state.committed.get(view.role, view.version)
    return str(version) if version >= 0 else "-"


def _phase(view: RoleView) -> str:
    """The phase in which a role failed is of interest, that in which it was stopped is not."""
    return "-" if view.state is RoleState.STOPPED else view.phase or "-"


def _progress(view: RoleView, rate: float | None) -> str:
    if view.state is RoleState.STOPPED and view.kind in (RoleKind.TRAINER, RoleKind.ROLLOUT):
        return f"step {view.step}" if view.kind is RoleKind.TRAINER else f"{view.progress} tokens"
    if view.kind is RoleKind.TRAINER:
        return f"step {view.step}, {view.pending} micro-batches left"
    if view.kind is RoleKind.ROLLOUT:
        return f"{view.progress} tokens, {rate or 0:.0f}/s, {view.pending} open"
    return counted(view.progress, "request")


def _rewards(state: RunState) -> list[float]:
    return [row["reward"] for row in state.metrics if "reward" in row]


def _accuracy(state: RunState) -> str:
    if not state.evaluations:
        return ""
    first, last = state.evaluations[0], state.evaluations[-1]
    after = f" -> {last.accuracy:.1%} (version {last.version})" if last is not first else ""
    return f"accuracy {first.accuracy:.1%} (version {first.version}){after} on {counted(last.prompts, 'held-out prompt')}"


def _ledger(state: RunState) -> str:
    balance = state.ledger.balance()
    dropped = "".join(f", {count} dropped ({reason})" for reason, count in balance.dropped.items())
    return f"trajectories: {balance.started} started = {balance.consumed} consumed + {balance.in_flight} in flight{dropped}"


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _CELL_LIMIT else text[:_CELL_LIMIT] + "..."
