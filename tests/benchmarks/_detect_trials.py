"""Drawn trials of the scenario suite in virtual time: what was said, how late, and what was wrong. A trial depends on its seed alone."""

from __future__ import annotations

import bisect
import dataclasses
import os
import random
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from detection_world import Fault, Shape, World, run_scenario
from scenario_suite import SUITE
from world_scenario import allowed, onset

from robustrl.core.thresholds import SAMPLING, Thresholds

LAB = Thresholds.lab()
_WORDS = 6
_RESPITE = 5.0
"""Seconds between two disturbances of one role."""


def spread_over_cores(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        return list(pool.map(function, items, chunksize=4))


def trial(item: tuple[str, int]) -> dict[str, Any]:
    """One drawn scenario. ``late``: of each statement whose limit is made of thresholds alone, seconds beyond it, and the looks that the
    role's node agent took meanwhile, less the mean way of `_WORDS` words (to the supervisor, the host, the role and back)."""
    name, seed = item
    scenario = SUITE[name](seed)
    world, wrong = run_scenario(scenario, seed)
    thresholds = LAB.updated(scenario.thresholds)
    late = []
    for must in scenario.must:
        exact = must.within == 0.1 or (isinstance(must.within, tuple) and not any(isinstance(part, float) for part in must.within))
        said = [v for v in world.verdicts if (v.role, v.kind) == (must.role, must.kind) and v.seen >= onset(world, must) - 0.02]
        if exact and said:
            limit = onset(world, must) + (0.0 if must.within == 0.1 else allowed(must, thresholds))
            late.append((said[0].seen - limit, _looks(world, must.role, limit, said[0].seen - _WORDS * world.shape.delay)))
    failed = [v for v in world.verdicts if v.kind == "failed"]
    stated = {must.role for must in scenario.must if must.kind == "failed"}
    found = [role for role in stated if any(v.role == role for v in failed)]
    false = [v.role for v in failed if v.role not in stated and v.role not in scenario.may]
    return {"name": name, "seed": seed, "wrong": wrong, "late": late, "stated": len(stated), "found": len(found), "false": len(false),
            "seconds": world.now, "rules": sorted({v.rule for v in failed if v.role in stated})}  # fmt: skip


def _looks(world: World, role: str, after: float, until: float) -> float:
    """Looks at the role in that time; without an agent that looks, what a good one would have taken."""
    looks = world.looks.get(world.roles[role].node, [])
    taken = bisect.bisect_right(looks, until) - bisect.bisect_right(looks, after)
    return taken if looks and looks[-1] > after else max(0.0, until - after) / SAMPLING


def noisy_hour(seed: int) -> dict[str, Any]:
    """An hour of a healthy job in which something harmless happens every 20 s or so. Each disturbance lies below the limits; one that would
    begin on a role while another holds it would lengthen that one past them, and is put off until the role has had time to work."""
    dice = random.Random(seed)
    world = World(Shape.draw(dice), seed, LAB)
    free: dict[str, float] = {}
    t = 10.0
    while t < 3580.0:
        drawn = _harmless(dice, t, world.shape)
        begins = max(t, free.get(drawn.role, 0.0))
        world.plan(dataclasses.replace(drawn, at=begins))
        free[drawn.role] = begins + float(drawn.seconds or 0.0) + _RESPITE
        t += dice.expovariate(1 / 20.0)
    world.run(3600.0)
    kinds = [v.kind for v in world.verdicts]
    false = [f"{v.role} {v.rule} at {v.seen:.1f} s: {v.evidence}" for v in world.verdicts if v.kind == "failed"]
    return {"failed": kinds.count("failed"), "suspect": kinds.count("suspect"), "reported": kinds.count("reported"), "steps": world.step,
            "disturbances": len(world.injected), "false": false[:3], "seed": seed}  # fmt: skip


def _harmless(dice: random.Random, t: float, shape: Shape) -> Fault:
    rank, rollout = f"trainer-{dice.randrange(shape.ranks)}", f"rollout-{dice.randrange(shape.rollouts)}"
    uniform = dice.uniform
    return dice.choice([
        Fault("long_phase", rank, t, uniform(1.0, 9.0), dice.choice(["advantage", "snapshot", "publish", "optimizer"])),
        Fault("long_phase", rank, t, uniform(0.5, 7.0), "train"),
        Fault("long_token", rollout, t, uniform(0.5, 20.0)),
        Fault("slow_pull", rollout, t, uniform(0.5, 8.0)),
        Fault("slow_disk", "state_keeper-0", t, uniform(0.5, 8.0)),
        Fault("slow_tool", "", t, uniform(0.1, 6.0)),
        Fault("freeze", dice.choice([rank, rollout]), t, uniform(0.1, 2.5)),
        Fault("freeze", dice.choice(["task_runner", "rollout_manager", "request_manager", "state_keeper-0"]), t, uniform(0.1, 4.5)),
        Fault("freeze", f"node_agent-{dice.randrange(4)}", t, uniform(0.1, 3.5)),
        Fault("freeze", dice.choice(["supervisor", "host"]), t, uniform(0.6, 8.0)),
        Fault("starved", f"node_agent-{dice.randrange(4)}", t, 10.0, size=uniform(0.2, 2.0)),
        Fault("slow", dice.choice([rank, rollout]), t, uniform(2.0, 10.0), size=uniform(1.1, 2.0)),
        Fault("idle", rollout, t, uniform(1.0, 15.0)),
        Fault("pause", "", t, uniform(1.0, 15.0)),
        Fault("lag", dice.choice(["task_runner", "request_manager"]), t, uniform(0.1, 4.0)),
    ])  # fmt: skip
