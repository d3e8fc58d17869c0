"""How near each signal is to its threshold: what the detector knows already, as numbers to look at. It decides nothing.

A signal's level is its value over its limit, both in the setting's own unit; from 1 on its rule may trip. It is given only where the rule
is armed: a rollout that waits for requests has no ``rollout.no_tokens``.
"""

from __future__ import annotations

from typing import NamedTuple

from .detection import Detector
from .roles import Phase, RoleKind
from .signals import GENERATING, Life
from .thresholds import OVERDUE, SECTION


class Level(NamedTuple):
    role: str
    value: float
    limit: float


def levels(detector: Detector, now: float) -> dict[str, Level]:
    """Path of a setting -> its nearest role. ``now``: the log's time, not before the detector's last entry."""
    nearest: dict[str, Level] = {}
    if stall := detector.stall_level(now):
        nearest["job.stall"] = Level("", *stall)
    for life in (life for kind in RoleKind for life in detector.of_kind(kind) if not life.down):
        for path, value in _values(life, now):
            limit = detector.limit(life, path)
            if path.startswith(("trainer.", "rollout.")) and life.warming and path.split(".")[1] in _GRACED:
                limit = max(limit, detector.limit(life, f"{SECTION[life.kind]}.grace"))
            if limit > 0 and (path not in nearest or value / limit > nearest[path].value / nearest[path].limit):
                nearest[path] = Level(life.role, value, limit)
    return nearest


_GRACED = ("no_compute", "no_marks", "silent", "no_tokens", "wedged")


def _values(life: Life, now: float) -> list[tuple[str, float]]:
    if life.ready is None:
        return [("job.start", now - life.started)]
    found = []
    if life.kind is RoleKind.NODE_AGENT:
        return [("node.silent", now - life.heard)] if life.heard is not None else []
    sample = life.sample
    if sample is None:
        return []
    section = SECTION.get(life.kind, "management")
    if life.kind is RoleKind.TRAINER:
        found.append(("trainer.silent", sample.loop_age))
        if sample.phase == Phase.TRAIN:
            found += [("trainer.no_compute", min(sample.active_age, sample.phase_age)), ("trainer.no_marks", sample.progress_age)]
        elif sample.phase in OVERDUE:
            found.append((f"trainer.{sample.phase}", sample.phase_age))
    elif life.kind is RoleKind.ROLLOUT:
        found.append(("rollout.wedged", sample.loop_age))
        if sample.phase in GENERATING and sample.pending:
            found.append(("rollout.no_tokens", sample.progress_age))
        if life.beat is not None:
            found.append(("rollout.heartbeat", now - life.beat.sent))
        if life.pull is not None:
            found.append(("rollout.pull", now - life.pull[0]))
    else:
        found.append((f"{section}.silent", sample.loop_age))
        if life.kind is not RoleKind.SUPERVISOR:  # the host judges it, by that alone
            found.append((f"{section}.lag", sample.lag))
    return found
