"""Scenarios as data: what is done to a virtual job, what must be said, about whom, by when, and what must not be said.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from world_job import World
from world_shape import Fault, Shape

from robustrl.core import events as ev
from robustrl.core.thresholds import Thresholds


@dataclass(frozen=True)
class Must:
    """Something that has to be said."""

    role: str
    kind: str = "failed"
    within: tuple[str | float, ...] | float = 0.1
    """Seconds after the fault was injected, or thresholds (paths) and seconds that add up; two looks and the words' way come on top."""
    not_before: bool = False
    """Nor may it be said earlier than that."""
    fault: int | None = None
    """Which of the scenario's faults it follows; None: the first that was injected."""


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
    steps: int = 10_000
    never: tuple[tuple[str, str], ...] = ()
    """(role, kind) that must not be said besides, e.g. that it is reported."""
    thresholds: dict[str, Any] = field(default_factory=dict)
    """Settings other than those of the run, by path."""


_AFTERWARDS = 12.0
"""Seconds that a world runs on when all has been said that must be: something wrong may still follow."""


def make_world(scenario: Scenario, seed: int, thresholds: Thresholds, every_look: bool = False) -> World:
    """A job of the drawn shape with all faults planned, at time 0."""
    drawn = Shape.draw(random.Random(seed))
    world = World(Shape(**{**drawn.__dict__, **scenario.shape}), seed, thresholds, scenario.steps, scenario.restarts, every_look)
    world.plan(*scenario.faults)
    return world


def run_scenario(scenario: Scenario, seed: int, thresholds: Thresholds | None = None) -> tuple[World, list[str]]:
    """The world after it, and what was wrong, in sentences; an injection that did not happen is wrong too."""
    thresholds = (thresholds or Thresholds.lab()).updated(scenario.thresholds)
    world = make_world(scenario, seed, thresholds)
    end = scenario.seconds
    while world.now < end:
        world.run(min(end, world.now + 1.0))
        if end == scenario.seconds and scenario.must and all(_statements(world, must) for must in scenario.must):
            over = max([world.now, *(at + (fault.seconds or 0.0) for at, fault in world.injected)])  # type: ignore[operator]
            end = min(end, over + _AFTERWARDS) if len(world.injected) == len(scenario.faults) else end
    if len(world.injected) < len(scenario.faults):
        done = [fault.kind for _, fault in world.injected]
        return world, [f"only {done} of {len(scenario.faults)} faults were injected within {scenario.seconds} s"]
    wrong = []
    for must in scenario.must:
        said = _statements(world, must)
        limit = allowed(must, thresholds)
        if not said:
            wrong.append(f"{must.role} was never called {must.kind}")
            continue
        after = said[0].seen - onset(world, must)
        late = after > limit + 0.2 + 20 * world.shape.delay + 5 * world.shape.jitter
        if late or (must.not_before and after < limit):
            wrong.append(f"{must.role} was called {must.kind} ({said[0].rule}) {after:.3f} s after the fault; the limit is {limit:g} s")
    stated = Counter((must.role, must.kind) for must in scenario.must)
    bad = {"failed"} | ({"suspect", "waiting_on_peer"} if scenario.quiet else set())
    for v in world.verdicts:
        again = v.kind == "failed" and stated[v.role, v.kind] < sum(w.role == v.role and w.kind == v.kind for w in world.verdicts)
        loud = v.kind in bad and ((v.role, v.kind) not in stated or again) and v.role not in scenario.may
        if loud or (v.role, v.kind) in scenario.never:
            wrong.append(f"{v.role} was called {v.kind} by rule {v.rule} at {v.seen:.2f} s: {v.evidence}")
    return world, wrong


def allowed(must: Must, thresholds: Thresholds) -> float:
    """Seconds."""
    parts = must.within if isinstance(must.within, tuple) else (must.within,)
    return sum(thresholds.get(part) if isinstance(part, str) else part for part in parts)


def onset(world: World, must: Must) -> float:
    """When the fault that the statement follows was injected; infinite: not yet."""
    if must.fault is None:
        return world.injected[0][0] if world.injected else math.inf if world.planned else 0.0
    return next((at for at, fault in world.injected if fault is world.planned[must.fault]), math.inf)


def _statements(world: World, must: Must) -> list[ev.Verdict]:
    since = onset(world, must) - 0.02
    return [v for v in world.verdicts if v.role == must.role and v.kind == must.kind and v.seen >= since]
