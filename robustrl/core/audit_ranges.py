"""The audit's rules on single values: every number and every word lies in its domain, and nothing lasted longer than the log itself.

Pure, like all of core/audit.py, which has them in its table. A field has one meaning, and so one domain, in whatever event it stands; the
exceptions are by event. Leaves out whether a value within its domain is true.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from robustrl.core import events as ev
from robustrl.core.audit_log import Found, Log
from robustrl.core.guard import RULE_UNSEEN
from robustrl.core.lifecycle import DONE, FAILED, STOPPED
from robustrl.core.recovery import FULL, ISOLATED
from robustrl.core.roles import Phase, RoleKind
from robustrl.core.rules import RULES

_LEAST: dict[str, float] = {
    **dict.fromkeys(("seconds", "commit_seconds", "probe_gap", "loop_age", "cpu", "phase_age", "active_age", "progress_age"), 0),
    **dict.fromkeys(("lag", "threshold", "limit", "pending", "step", "progress", "bytes", "done", "kept", "tokens", "tool_turns"), 0),
    **dict.fromkeys(("batch", "group", "old", "to", "dropped_bytes", "lease", "prompts", "version", "start_ticks", "evaluated"), 0),
    **dict.fromkeys(("chunks", "incarnation", "source_incarnation", "pid", "host_pid", "fault", "number"), 1),
}
"""The least that a number of this name can be, alone or in a list."""
_LEAST_IN: dict[tuple[type, str], float] = {
    **dict.fromkeys(((ev.RoleSample, "version"), (ev.TrajectoriesStarted, "version"), (ev.TrajectoriesMoved, "version")), -1),
    (ev.ProcessExited, "progress"): -1,
}
_WORDS: dict[tuple[type, str], tuple[str, ...]] = {
    (ev.RestartDecided, "mode"): (ISOLATED, FULL),
    (ev.EndDecided, "status"): (DONE, STOPPED, FAILED),
    (ev.RoleOrdered, "action"): ("restart", "drain"),
    (ev.SnapshotRestored, "source"): ("local", "peer", "disk"),
    (ev.SnapshotRefused, "source"): ("local", "peer", "disk"),
    (ev.RoleSample, "process"): ("", *"RSDTtZXxKWPI"),
    (ev.Verdict, "rule"): (*(rule.name for rule in RULES), RULE_UNSEEN),
    (ev.NodeStarted, "kinds"): tuple(RoleKind),
}
_SHARE = (0.0, 1.0)
_METRICS: dict[str, tuple[float, float]] = {
    "clip_fraction": _SHARE, "accuracy": _SHARE, "importance_weight": (0.0, float("inf")), "importance_weight_max": (0.0, float("inf")),
    "kl": (-1e-4, float("inf")), "kl_reference": (-1e-4, float("inf")), "entropy": (-1e-4, float("inf")),
    "grad_norm": (0.0, float("inf")), "learning_rate": (0.0, float("inf")), "length": (0.0, float("inf")),
    "snapshot_blocked": (0.0, float("inf")),
}  # fmt: skip
"""Of a step; the estimates that are never negative but for rounding have room for it."""


def ranges(log: Log) -> Found:
    """Every number and every word of every event is one that can be."""
    for entry in log.entries:
        event = entry.event
        what = type(event).__struct_config__.tag
        for name in event.__struct_fields__:
            value = getattr(event, name)
            least = _LEAST_IN.get((type(event), name), _LEAST.get(name))
            if least is not None and (low := [x for x in _numbers(value) if not x >= least]):
                yield entry.seq, f"{what}.{name} = {low[0]:g}: must be at least {least:g}"
            if words := _WORDS.get((type(event), name)):
                yield from (
                    (entry.seq, f"{what}.{name} = {word!r}: must be one of {', '.join(map(repr, map(str, words)))}")
                    for word in (value if isinstance(value, list) else [value])
                    if word not in words
                )
        if isinstance(event, ev.StepMetrics):
            yield from ((entry.seq, f"step {event.step} has {text}") for text in _metrics(log, event))
        elif isinstance(event, ev.RoleSample) and event.step > log.config.steps:
            yield entry.seq, f"{event.role} was seen at step {event.step} of {log.config.steps}"


def _numbers(value: Any) -> list[float]:
    """NaN is none: it compares with nothing."""
    return [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, int | float) and x == x]


def _metrics(log: Log, event: ev.StepMetrics) -> Iterator[str]:
    caps = dict.fromkeys(("importance_weight", "importance_weight_max"), log.config.grpo.importance_cap * (1 + 1e-6))
    for name, value in event.values.items():
        least, most = _METRICS.get(name, (-float("inf"), float("inf")))
        most = min(most, caps.get(name, most))
        if value < least or value > most:
            yield f"{name} {value:g}: must be from {least:g} to {most:g}"
    for phase, seconds in event.phase_seconds.items():
        if phase not in set(Phase):
            yield f"seconds of a phase {phase!r}, which does not exist"
        elif seconds < 0:
            yield f"{seconds:g} s of the phase {phase}"


_AGES = ("loop_age", "phase_age", "active_age", "progress_age", "lag")
_SLACK, _DRIFT = 5.0, 0.01
"""Seconds, and share of them, by which two clocks may disagree."""


def durations(log: Log) -> Found:
    """Nothing lasted longer than the log until then; the phases of all steps together neither; a pull no longer than from the commit
    before to its own, and no shorter than from its only beginning to its last progress.
    """
    if not log.entries:
        return
    begun, spent = log.entries[0].t, 0.0
    pull: dict[tuple[str, int], list[ev.Entry]] = {}
    for entry in log.entries:
        event = entry.event
        most = (entry.t - begun) * (1 + _DRIFT) + _SLACK
        match event:
            case ev.RoleReady() | ev.SnapshotCopied() | ev.SnapshotRestored() | ev.ClockGap():
                named = {"seconds": event.seconds}
            case ev.PullCommitted():
                named = {"seconds": event.seconds, "commit_seconds": event.commit_seconds}
            case ev.RoleSample():
                named = {name: getattr(event, name) for name in _AGES}
            case ev.StepMetrics():
                total = sum(event.phase_seconds.values())
                spent += max(0.0, total)
                named = {**event.phase_seconds, "all phases": total, "all phases of all steps so far": spent}
                named["snapshot_blocked"] = event.values.get("snapshot_blocked", 0.0)
            case _:
                named = {}
        for name, seconds in named.items():
            if seconds > most:
                yield entry.seq, f"{name}: {seconds:g} s, and the log began {entry.t - begun:.1f} s before"
        life = (entry.source, entry.incarnation)
        if isinstance(event, ev.PullStarted | ev.PullProgress | ev.VersionRefused):
            if isinstance(event, ev.VersionRefused):
                pull[life] = [entry]
            else:
                pull.setdefault(life, []).append(entry)
        elif isinstance(event, ev.PullCommitted):
            yield from ((entry.seq, text) for text in _pull(entry, event, pull.get(life, [])))
            pull[life] = [entry]


_INSTANT = 0.05
"""Seconds between a reading of the clock and the event that tells of it."""


def _pull(entry: ev.Entry, event: ev.PullCommitted, told: list[ev.Entry]) -> Iterator[str]:
    """``told``: what that life said since the commit before, which comes first if there was one; all by one clock."""
    what = f"{event.target} pulled version {event.version} for {event.seconds:g} s and committed it for {event.commit_seconds:g} s"
    if told and not isinstance(told[0].event, ev.PullStarted | ev.PullProgress):
        room = entry.at - told[0].at
        if event.seconds + event.commit_seconds > room + _INSTANT:
            yield f"{what}; the commit before was {room:.3f} s ago"
    begun = [one.at for one in told if isinstance(one.event, ev.PullStarted)]
    seen = [one.at for one in told if isinstance(one.event, ev.PullProgress)]
    if len(begun) == 1 and seen and event.seconds < seen[-1] - begun[0] - _INSTANT:
        yield f"{what}; {seen[-1] - begun[0]:.3f} s lay between its beginning and its last progress"
