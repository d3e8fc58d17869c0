"""Scenarios as data: what is done to a virtual job, what must be said, about whom, by when, and what must not be said.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from world_job import World
from world_shape import Fault, Shape

from robustrl.core.thresholds import Thresholds


@dataclass(frozen=True)
class Must:
    """Something that has to be said."""

    role: str
    kind: str = "failed"
    within: tuple[str, ...] | float = 0.1
    """Seconds after the first fault was injected, or thresholds (paths) that add up; two looks and the words' way come on top."""
    not_before: bool = False
    """Nor may it be said earlier than that."""


@dataclass(frozen=True)
class Scenario:
    """What is done to a job of a drawn shape, and what must be said. Whatever is not in ``must`` or ``may`` must not be said as failed
    (nor, where ``quiet``, as suspect or waiting_on_peer)."""

    name: str
    faults: tuple[Fault, ...]
    must: tuple[Must, ...] = ()
    may: tuple[str, ...] = ()
    """Roles of which anything may be said."""
    quiet: bool = False
    seconds: float = 40.0
    shape: dict[str, Any] = field(default_factory=dict)
    """Fields of Shape that are not drawn."""
    restarts: float | None = None


def run_scenario(scenario: Scenario, seed: int, thresholds: Thresholds | None = None) -> tuple[World, list[str]]:
    """The world after it, and what was wrong, in sentences; an injection that did not happen is wrong too."""
    thresholds = thresholds or Thresholds.lab()
    drawn = Shape.draw(random.Random(seed))
    world = World(Shape(**{**drawn.__dict__, **scenario.shape}), seed, thresholds, restarts=scenario.restarts)
    world.plan(*scenario.faults)
    world.run(scenario.seconds)
    wrong = []
    if len(world.injected) < len(scenario.faults):
        done = [fault.kind for _, fault in world.injected]
        wrong.append(f"only {done} of {len(scenario.faults)} faults were injected within {scenario.seconds} s")
        return world, wrong
    start = world.injected[0][0] if world.injected else 0.0
    for must in scenario.must:
        said = [v for v in world.verdicts if v.role == must.role and v.kind == must.kind and v.seen >= start - 0.02]
        limit = sum(thresholds.get(path) for path in must.within) if isinstance(must.within, tuple) else must.within
        if not said:
            wrong.append(f"{must.role} was never called {must.kind}")
            continue
        after = said[0].seen - start
        late = after > limit + 0.2 + 20 * world.shape.delay + 5 * world.shape.jitter
        if late or (must.not_before and after < limit):
            wrong.append(f"{must.role} was called {must.kind} ({said[0].rule}) {after:.3f} s after the fault; the limit is {limit:g} s")
    stated = {(must.role, must.kind) for must in scenario.must}
    bad = {"failed"} | ({"suspect", "waiting_on_peer"} if scenario.quiet else set())
    for v in world.verdicts:
        if v.kind in bad and (v.role, v.kind) not in stated and v.role not in scenario.may:
            wrong.append(f"{v.role} was called {v.kind} by rule {v.rule} at {v.seen:.2f} s: {v.evidence}")
    return world, wrong
