"""What the proof of each kind of fault must show, and what else a log holds if it was really done.

Pure, a part of core/audit_faults.py. The injector's word is not enough: a process that it stopped, or whose loop it made stick, does no
work meanwhile; what it killed dies after that; what it was to delay is not over before its time. Leaves out what no entry can show, such as
bytes that nobody read before they were written over.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from robustrl.core import events as ev
from robustrl.core.audit_log import Found, Log
from robustrl.core.fault_times import FaultTimes

_Check = Callable[[Any], bool]
_MOST = 1e15
"""No number in a proof or in evidence is larger."""


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _not_below_0(value: Any) -> bool:
    return is_number(value) and value >= 0


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is(wanted: object) -> _Check:
    return lambda value: type(value) is type(wanted) and value == wanted


_KILLED: dict[str, _Check] = {"signal": _is("SIGKILL"), "process": _is("gone"), "ago": _not_below_0}
_STOPPED: dict[str, _Check] = {"signal": _is("SIGSTOP"), "process": _is("T"), "ago": _not_below_0}
_INSIDE: dict[str, _Check] = {"thread": is_text, "place": is_text}
_DELAYED: dict[str, _Check] = {**_INSIDE, "seconds": _positive}
_DAMAGED: dict[str, _Check] = {"bytes": _positive, "at": _not_below_0, "of": _positive}
PROOFS: dict[str, dict[str, _Check]] = {
    "kill": _KILLED,
    "node_loss": _KILLED | {"raylet": _positive, "processes": _positive},
    "partition": {"link": is_text, "answers": _is(False), "ago": _not_below_0},
    "delay": {"link": is_text, "milliseconds": _positive, "ago": _not_below_0},
    "hang": _STOPPED,
    "freeze": _STOPPED,
    "slow": _STOPPED | {"share": _positive, "period": _positive},
    "wedge": _INSIDE | {"busy": lambda value: isinstance(value, bool)},
    "exception": _INSIDE | {"raised": is_text},
    "memory_exhaustion": {"thread": is_text, "raised": _is("MemoryError"), "limit": _positive, "allocated": _not_below_0},
    "clean_exit": _INSIDE | {"exit": _is(0)},
    "corrupt_weights": _DAMAGED,
    "corrupt_snapshot": _DAMAGED,
    "full_disk": {"full": _positive, "folder": is_text, "thread": is_text},
    "long_first_token": {"held": _is("tokens")},
    "idle_rollout": {"held": _is("requests")},
    "slow_tool": _DELAYED | {"place": _is("tool")},
    "long_advantage": _DELAYED | {"place": _is("advantage")},
    "long_checkpoint": _DELAYED | {"place": _is("snapshot")},
    "first_compile": _DELAYED,
}
"""Kind -> each field that its proof must have, and what it must be like."""
BENIGN = (
    "freeze", "slow_tool", "long_advantage", "long_checkpoint", "long_first_token", "first_compile", "idle_rollout"
)  # fmt: skip
"""Kinds that nothing is to be done about; accounts leave them out."""
_KILLING = ("kill", "clean_exit")
"""Kinds that end the very process, at once."""
_STOPPING, _STICKING = ("hang", "freeze"), ("wedge", "long_advantage", "long_checkpoint", "first_compile")
"""Kinds that stop the process, or the work that it does."""
_ASKED = ("share", "period", "milliseconds", "busy", "seconds")
"""What a proof says of the order, and must say as it was ordered."""
_SETTLES = 2.5
"""Seconds after which what is told of a process is no longer from before: a sample is logged once a second, and may be late."""
_EARLY = 5.0
"""Seconds by which a death may be in the log before the word of who caused it."""
_SHARE = 0.9
"""Of its time, that a fault must have lasted by one and the same clock."""


def lacks(order: ev.FaultPlanned, proof: dict[str, Any]) -> str:
    """The first field that shows nothing of the kind; empty: all do."""
    fields = PROOFS.get(order.kind, _INSIDE)
    for field, good in fields.items():
        if not good(proof.get(field)):
            return f"{field} = {proof.get(field)!r}"
    for field in _ASKED:
        if field in fields and field in order.options and proof[field] != order.options[field]:
            return f"{field} = {proof[field]!r}, and {order.options[field]!r} was asked for"
    if fields is _DAMAGED and proof["at"] + proof["bytes"] > proof["of"]:
        return f"{proof['bytes']} bytes at {proof['at']} of {proof['of']}"
    return ""


class _Done(NamedTuple):
    seq: int
    order: ev.FaultPlanned
    hit: ev.FaultInjected
    entry: ev.Entry
    since: float
    """When it was done, on the log's clock."""
    until: float
    """When it was over, was called off, or its target ended; infinite: never."""

    def __str__(self) -> str:
        return f"fault {self.hit.fault} ({self.order.kind}) on {self.hit.role} incarnation {self.hit.incarnation}"


def undone(log: Log, planned: dict[int, ev.FaultPlanned]) -> Found:
    """Faults whose proof the rest of the log contradicts."""
    ends = {event.fault: entry for entry in log.entries if isinstance(event := entry.event, ev.FaultEnded)}
    exits: dict[tuple[str, int], tuple[float, ev.ProcessExited]] = {}
    over: dict[tuple[str, int], float] = {}
    for entry in log.entries:
        if isinstance(event := entry.event, ev.ProcessExited):
            exits.setdefault((event.role, event.incarnation), (entry.t, event))
        if isinstance(event, ev.ProcessExited | ev.RestartDecided | ev.RoleOrdered):
            over.setdefault((event.role, event.incarnation), entry.t)
    samples: dict[tuple[str, int], list[tuple[float, ev.RoleSample]]] = defaultdict(list)
    for entry in log.entries:
        if isinstance(event := entry.event, ev.RoleSample):
            samples[event.role, event.incarnation].append((entry.t, event))
    gaps = any(entry.source == ev.HOST and isinstance(entry.event, ev.ClockGap | ev.RunResumed) for entry in log.entries)
    times = FaultTimes()
    for entry in log.entries:
        times.feed(entry)
        if not isinstance(hit := entry.event, ev.FaultInjected) or (order := planned.get(hit.fault)) is None or lacks(order, hit.proof):
            continue
        if not _not_below_0(hit.proof.get("ago", 0)):
            continue
        life = hit.role, hit.incarnation
        end = ends.get(hit.fault)
        done = _Done(entry.seq, order, hit, entry, times.done(entry, hit), min(end.t if end else math.inf, over.get(life, math.inf)))
        if life in exits:
            yield from _death(done, *exits[life])
        if end is not None and isinstance(end.event, ev.FaultEnded) and end.event.outcome == "over":
            yield from _too_short(done, end)
        if not gaps:
            yield from _worked_on(done, samples[life])
    yield from _accepted(log, planned)


def _death(done: _Done, t: float, exited: ev.ProcessExited) -> Found:
    if done.order.kind in _KILLING and exited.pid != done.hit.pid:
        yield done.seq, f"{done}: pid {done.hit.pid} was hit, and the process that ended had pid {exited.pid}"
    if t < done.since - _EARLY:
        yield done.seq, f"{done}: that process had ended {done.since - t:.1f} s before"


def _too_short(done: _Done, end: ev.Entry) -> Found:
    """By the clock of who did it and told of its end."""
    seconds = done.order.options.get("seconds")
    if seconds is None or not _positive(seconds) or (end.source, end.incarnation) != (done.entry.source, done.entry.incarnation):
        return
    lasted = end.at - done.entry.at + float(done.hit.proof.get("ago", 0.0))
    if lasted < _SHARE * seconds:
        yield end.seq, f"{done} was over after {lasted:.2f} s; it was to last {seconds:g} s"


def _worked_on(done: _Done, samples: list[tuple[float, ev.RoleSample]]) -> Found:
    """A process that is stopped, or stuck in its work, shows it, and makes no progress."""
    if done.order.kind not in _STOPPING + _STICKING:
        return
    seconds = done.order.options.get("seconds")
    until = min(done.until, done.since + seconds) if seconds is not None and _positive(seconds) else done.until
    shown = [sample for t, sample in samples if done.since + _SETTLES < t < until]
    for sample in shown:
        if done.order.kind in _STOPPING and sample.process not in ("T", "t", "Z", "X"):
            yield done.seq, f"{done}: that process was seen later in the state {sample.process!r}"
            return
        if sample.progress != shown[0].progress:
            yield done.seq, f"{done}: that role made progress all the same, from {shown[0].progress} to {sample.progress}"
            return


def _accepted(log: Log, planned: dict[int, ev.FaultPlanned]) -> Found:
    """A recovery state with flipped bytes cannot have been restored from where they were flipped."""
    damaged: dict[str, tuple[int, ev.FaultInjected, int]] = {}
    """Keeper -> its damage, and the step that was committed last."""
    step = 0
    for entry in log.entries:
        match entry.event:
            case ev.OptimizerStepCommitted():
                step = entry.event.step
            case ev.FaultInjected() as hit if (order := planned.get(hit.fault)) and order.kind == "corrupt_snapshot":
                damaged[hit.role] = entry.seq, hit, step
            case ev.ProcessExited(role=role) | ev.RoleStarted(role=role):
                damaged.pop(role, None)
            case ev.SnapshotRefused():
                damaged.clear()
            case ev.SnapshotRestored(source="local") as restored:
                for seq, hit, at in damaged.values():
                    if restored.step == at == step:
                        yield seq, f"fault {hit.fault} (corrupt_snapshot) on {hit.role}: step {at} was restored from there all the same"
                damaged.clear()
