"""Whom a whole job waits for when work remains and no optimizer step is committed: from the trainer back to whoever holds the work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .roles import QUIET, Phase, RoleKind
from .signals import GENERATING, Life


class Waited(NamedTuple):
    life: Life
    why: str
    since: float | None
    """From when on it has had work of its own that does not move; None: it has none."""


def waited_for(lives: Iterable[Life]) -> Waited | None:
    """None: nobody who could be named is known."""
    by_kind: dict[RoleKind, list[Life]] = {}
    for life in sorted(lives, key=lambda life: life.role):
        if life.down and not life.muted:
            return Waited(life, "it has ended and was not replaced", None)
        if not life.muted:
            by_kind.setdefault(life.kind, []).append(life)

    def at_work(kind: RoleKind) -> list[Life]:
        return [life for life in by_kind.get(kind, []) if life.sample and Phase(life.sample.phase) not in QUIET]

    if ranks := at_work(RoleKind.TRAINER):
        last = min(ranks, key=lambda life: (_step(life), life.since("phase_age")))
        return Waited(last, f"it is in step {_step(last)}", max(last.since("phase_age"), last.since("progress_age")))
    holding = [life for life in by_kind.get(RoleKind.ROLLOUT, []) if life.sample and life.sample.pending]
    if working := [life for life in holding if life.sample and Phase(life.sample.phase) in GENERATING | {Phase.PULL}]:
        return _slowest(working, "it has unfinished trajectories")
    if holding and (workers := at_work(RoleKind.AGENT_WORKER) or by_kind.get(RoleKind.AGENT_WORKER)):
        return _slowest(workers, "trajectories wait for its tools")
    if busy := [life for life in by_kind.get(RoleKind.AGENT_WORKER, []) if life.sample and life.sample.pending]:
        return _slowest(busy, "it has work that does not end")
    for kind, why in (
        (RoleKind.ROLLOUT_MANAGER, "it has unfinished groups"),
        (RoleKind.REQUEST_MANAGER, "it has open trajectories"),
    ):
        if busy := [life for life in by_kind.get(kind, []) if life.sample and life.sample.pending]:
            return Waited(busy[0], why, None)
    runner = by_kind.get(RoleKind.TASK_RUNNER)
    return Waited(runner[0], "nobody else has work", None) if runner else None


def _slowest(lives: list[Life], why: str) -> Waited:
    last = min(lives, key=lambda life: life.since("progress_age"))
    stuck = last.sample is not None and last.sample.pending > 0
    return Waited(last, why, last.since("progress_age") if stuck else None)


def _step(life: Life) -> int:
    return life.sample.step if life.sample else 0
