"""A run as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show: Chrome's JSON trace format, from the log alone.

Tracks: one per role with its phases and start-ups as slices; one per role that failed, with the stages of its recoveries; the optimizer
steps. Marks: injected faults, verdicts, lost nodes, rollbacks, warnings. Phases are as fine as the log has them: prefill and decode count
as one spell, running and idle too. Times are microseconds from the first entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from .core import events as ev
from .core.recoveries import recoveries_of
from .core.roles import RoleId

_ROLES, _RECOVERIES, _JOB = 1, 2, 3
"""Process ids of the trace, which Perfetto shows as groups of tracks."""


class _Trace:
    def __init__(self, begin: float) -> None:
        self.begin = begin
        self.events: list[dict[str, Any]] = []
        self._tracks: dict[tuple[int, str], int] = {}
        for group, name in ((_ROLES, "roles"), (_RECOVERIES, "recoveries"), (_JOB, "job")):
            self.events.append({"ph": "M", "name": "process_name", "pid": group, "tid": 0, "args": {"name": name}})
            self.events.append({"ph": "M", "name": "process_sort_index", "pid": group, "tid": 0, "args": {"sort_index": 4 - group}})

    def slice(self, group: int, track: str, name: str, begin: float, end: float, **args: Any) -> None:
        if end >= begin:
            place = {"pid": group, "tid": self.track(group, track), "ts": self._us(begin), "dur": round(1e6 * (end - begin), 1)}
            self.events.append({"ph": "X", "name": name, **place, "args": args})

    def mark(self, group: int, track: str, name: str, t: float, **args: Any) -> None:
        place = {"pid": group, "tid": self.track(group, track)}
        self.events.append({"ph": "i", "s": "t", "name": name, "ts": self._us(t), **place, "args": args})

    def _us(self, t: float) -> float:
        return max(0.0, round(1e6 * (t - self.begin), 1))

    def track(self, group: int, name: str) -> int:
        if (group, name) not in self._tracks:
            self._tracks[group, name] = number = len(self._tracks) + 1
            self.events.append({"ph": "M", "name": "thread_name", "pid": group, "tid": number, "args": {"name": name}})
        return self._tracks[group, name]


class _Roles:
    """Which slice each role is in."""

    def __init__(self, trace: _Trace) -> None:
        self._trace = trace
        self._now: dict[str, tuple[str, float, dict[str, Any]]] = {}
        self.lives: dict[str, int] = {}

    def start(self, t: float, event: ev.RoleStarted) -> None:
        self.end(event.role, t)
        self.lives[event.role] = event.incarnation
        facts = {"incarnation": event.incarnation, "node": event.node, "pid": event.pid}
        self._now[event.role] = "starting", t, facts

    def sample(self, t: float, event: ev.RoleSample) -> None:
        if self.lives.get(event.role) != event.incarnation:
            return
        now = self._now.get(event.role)
        if now is None or now[0] in (event.phase, "starting"):
            return
        self._enter(event.role, event.phase, max(now[1], t - event.phase_age), step=event.step, incarnation=event.incarnation)

    def ready(self, t: float, event: ev.RoleReady) -> None:
        if (now := self._now.get(event.role)) and now[0] == "starting" and self.lives[event.role] == event.incarnation:
            self._enter(event.role, "ready", t, incarnation=event.incarnation)

    def end(self, role: str, t: float) -> None:
        if now := self._now.pop(role, None):
            self._trace.slice(_ROLES, role, now[0], now[1], t, **now[2])

    def exited(self, t: float, event: ev.ProcessExited) -> None:
        if self.lives.get(event.role) == event.incarnation:
            self.end(event.role, t)

    def end_all(self, t: float) -> None:
        for role in list(self._now):
            self.end(role, t)

    def _enter(self, role: str, name: str, t: float, **args: Any) -> None:
        self.end(role, t)
        self._now[role] = name, t, args


def perfetto(entries: Sequence[ev.Entry]) -> dict[str, Any]:
    """The trace as plain values, ready for JSON."""
    trace = _Trace(entries[0].t if entries else 0.0)
    roles = _Roles(trace)
    before: float | None = None
    for entry in entries:
        t, event = entry.t, entry.event
        match event:
            case ev.RoleSample():
                roles.sample(t, event)
            case ev.RoleStarted():
                roles.start(t, event)
            case ev.RoleReady():
                roles.ready(t, event)
            case ev.ProcessExited():
                roles.exited(t, event)
            case ev.OptimizerStepCommitted(step=step):
                if before is not None:
                    trace.slice(_JOB, "optimizer steps", f"step {step}", before, t)
                before = t
            case ev.FaultInjected():
                facts = {"incarnation": event.incarnation, "phase": event.phase, "proof": event.proof}
                trace.mark(_ROLES, event.role, f"fault {event.fault}", t, **facts)
            case ev.Verdict():
                trace.mark(_ROLES, event.role, f"{event.kind}: {event.rule}", t, onset=event.onset - trace.begin, evidence=event.evidence)
            case ev.NodeLost(node=node, reason=reason):
                trace.mark(_JOB, "events", f"{node} lost", t, reason=reason)
            case ev.RolledBack():
                trace.mark(_JOB, "events", f"rolled back from step {event.old} to {event.to}", t, reason=event.reason)
            case ev.WarningRaised(text=text):
                trace.mark(_JOB, "events", "warning", t, text=text)
    end = entries[-1].t if entries else 0.0
    roles.end_all(end)
    _recoveries(trace, entries, end)
    order = {kind: place for place, kind in enumerate(("trainer", "rollout", "standby", "state_keeper"))}
    names = sorted(roles.lives, key=lambda role: (order.get(RoleId.parse(role).kind, len(order)), role))
    for place, role in enumerate(names):
        number = trace.track(_ROLES, role)
        trace.events.append({"ph": "M", "name": "thread_sort_index", "pid": _ROLES, "tid": number, "args": {"sort_index": place}})
    return {"traceEvents": trace.events, "displayTimeUnit": "ms"}


def _recoveries(trace: _Trace, entries: Sequence[ev.Entry], end: float) -> None:
    for found in recoveries_of(entries):
        track = f"{found.role}: recoveries"
        facts = {"cause": found.cause, "mode": found.mode, "standby": found.standby, "roles": list(found.roles), "outcome": found.outcome}
        trace.slice(_RECOVERIES, track, f"recovery {found.number}", found.onset, found.until or end, **facts)
        times = [found.onset, found.detected, found.ready, found.back]
        for name, begin, until in zip(("detect", "restart", "reconnect"), times, times[1:], strict=False):
            if begin is not None:
                trace.slice(_RECOVERIES, track, name, begin, found.until or end if until is None else until)


def write_perfetto(run: str | Path, path: str | Path) -> int:
    """The trace of a run directory, or of its events.jsonl, into a file. Returns the number of trace events. Raises LogError, also for a
    log without entries, and OSError.
    """
    from .runtime.event_log import LogError, read_log

    run = Path(run)
    log = run / "events.jsonl" if run.is_dir() else run
    if not (entries := read_log(log, live=True)):
        raise LogError(f"{log}: holds no entries, so there is nothing to show")
    trace = perfetto(entries)
    Path(path).write_bytes(msgspec.json.encode(trace))
    return len(trace["traceEvents"])
