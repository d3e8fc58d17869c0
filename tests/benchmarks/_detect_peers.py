"""Ours and the detectors of others on the same drawn jobs: curves of delay against mistakes, and the published settings on the incidents.

The log of a trial holds every look of the node agents, so that no peer lacks what ours would have asked for. In the peers' favour are left
out: trials in which a watcher (node agent, host, supervisor) is disturbed, start-up, and all that follows the first right verdict.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import msgspec
from detection_world import Scenario, World
from world_scenario import make_world

from robustrl.core import events as ev
from robustrl.core.detection import judge
from robustrl.core.thresholds import LEAST, Thresholds
from robustrl.replay.peers import JOB, PUBLISHED, TUNABLE, Peer
from robustrl.replay.quality import Quality, Truth, dominates, judge_quality, total
from tests.benchmarks._detect_trials import LAB, SUITE, onset, run_scenario

OURS = "ours"
_AS_PUBLISHED = "published: "
SCALES = (0.1, 0.2, 0.4, 0.7, 1.0, 2.0)
"""Multiples of the lab's thresholds: the curve of ours."""
_SCALED = ("trainer.no_compute", "trainer.no_marks", "trainer.silent", "rollout.no_tokens", "rollout.wedged", "rollout.heartbeat",
           "management.silent", "management.lag", "keeper.silent", "keeper.lag", "job.stall")  # fmt: skip
_WATCHERS = ("node_agent", "supervisor", "host")
_DOWN = ("kill", "exit", "exception", "freeze", "hang", "wedge", "dry")
"""Kinds of faults that keep a role from working; without an end, for good."""
_LONGEST = 110.0
Point = tuple[str, float]


def ours(scale: float) -> Thresholds:
    """The lab's, times ``scale``; a stall counts from 25 s, for the trials are short."""
    base = LAB.replace("job.stall", 25.0)
    values = {path: max(LEAST, scale * base.get(path)) for path in _SCALED}
    return base.updated({**values, "job.hysteresis": 0.0 if scale < 0.5 else base.job.hysteresis})


def draw(count: int, seed: int) -> list[tuple[str, int]]:
    dice = random.Random(seed)
    names = [name for name in SUITE if _comparable(SUITE[name](0))]
    return [(dice.choice(names), dice.getrandbits(32)) for _ in range(count)]


def _comparable(scenario: Scenario) -> bool:
    disturbed = any(fault.role.startswith(_WATCHERS) or fault.kind in ("node_loss", "late_start") for fault in scenario.faults)
    failed = [must for must in scenario.must if must.kind == "failed"]
    return len(failed) <= 1 and scenario.restarts is None and scenario.seconds <= _LONGEST and not disturbed


def curves(item: tuple[str, int]) -> dict[Point, Quality]:
    """(detector, setting) -> what it made of one drawn job; empty if a fault could not be injected."""
    name, seed = item
    scenario = SUITE[name](seed)
    world = _run(scenario, seed, ours(1.0), every_look=True)
    if (truth := _truth(scenario, world)) is None:
        return {}
    found: dict[Point, Quality] = {}
    for peer, (make, settings) in TUNABLE.items():
        for setting in settings:
            found[peer, setting] = judge_quality(_said(make(setting), world.entries), truth, JOB)
    for peer, as_published in PUBLISHED.items():
        found[_AS_PUBLISHED + peer, 0.0] = judge_quality(_said(as_published(), world.entries), truth, JOB)
    for scale in SCALES:
        own = _run(scenario, seed, ours(scale))
        if (truth := _truth(scenario, own)) is None:
            return {}
        found[OURS, scale] = judge_quality(own.verdicts, truth)
        raised = [msgspec.structs.replace(v, kind="failed") if v.kind == "suspect" else v for v in own.verdicts]
        found["ours, suspicions", scale] = judge_quality(raised, truth)
    return found


def tuned(trials: list[dict[Point, Quality]]) -> dict[str, float]:
    """Per detector the setting with the fewest mistakes, and of those the one with the least delay."""
    sums = _sums(trials)
    best: dict[str, float] = {}
    for name in {name for name, _ in sums if not name.startswith(_AS_PUBLISHED)}:
        settings = [setting for other, setting in sums if other == name]
        best[name] = min(settings, key=lambda setting: (sums[name, setting].mistakes, *_point(sums[name, setting])))
    return best


def compare(train: list[dict[Point, Quality]], test: list[dict[Point, Quality]]) -> dict[str, Any]:
    """On the test seeds: each peer as published and as tuned, curves, and the points of each peer that ours does not dominate."""
    best, sums = tuned(train), _sums(test)
    curve = {name: {setting: _point(q) for (other, setting), q in sums.items() if other == name} for name in best}
    return {
        "published": {peer: sums[_AS_PUBLISHED + peer, 0.0].table() for peer in PUBLISHED},
        "tuned": {name: {"setting": best[name], **sums[name, best[name]].table()} for name in sorted(best)},
        "curves": {name: [[setting, *point] for setting, point in sorted(points.items())] for name, points in sorted(curve.items())},
        "not_dominated": {name: dominates(list(curve[OURS].values()), list(curve[name].values())) for name in TUNABLE},
        "trials": [sum(map(bool, train)), sum(map(bool, test))],
    }


def incident(item: tuple[str, int]) -> dict[str, Any]:
    """One incident: what ours says of it, and what each published setting says in the ten minutes after it."""
    name, seed = item
    scenario = SUITE[name](seed)
    first = next((must for must in scenario.must if must.kind == "failed"), scenario.must[0] if scenario.must else None)
    live, wrong = run_scenario(scenario, seed)
    said = [v for v in live.verdicts if first and (v.role, v.kind) == (first.role, first.kind) and v.seen >= onset(live, first) - 0.02]
    row: dict[str, Any] = {"name": name, "wrong": wrong, "expected": f"{first.role} {first.kind}" if first else "nothing",
                           "rule": said[0].rule if said else "", "after_s": round(said[0].seen - onset(live, first), 3) if said else None}
    long = dataclasses.replace(scenario, restarts=None, seconds=min(scenario.seconds, 120.0) + 620.0)
    world = _run(long, seed, LAB)  # published limits are long enough for changes and keep-alives
    at = onset(world, first) if first else 0.0
    truth = Truth({first.role: at} if first and at < world.now else {}, frozenset(scenario.may), len(world.roles), 0.0, world.now)
    row["published_that_miss"] = {}
    for peer, make in PUBLISHED.items():
        got = judge_quality(_said(make(), world.entries), truth, JOB)
        if truth.faults and not got.delays:
            row["published_that_miss"][peer] = "nothing in ten minutes"
        elif got.mistakes:
            row["published_that_miss"][peer] = "condemns a healthy role"
        elif got.delays and got.delays[0] > 60.0:
            row["published_that_miss"][peer] = f"after {got.delays[0]:.0f} s"
    return row


def _sums(trials: list[dict[Point, Quality]]) -> dict[Point, Quality]:
    whole = [trial for trial in trials if trial]
    return {point: total([trial[point] for trial in whole]) for point in (whole[0] if whole else {})}


def _point(quality: Quality) -> tuple[float, float]:
    """(mistakes per hour, restricted mean of the delay)."""
    return 3600 * quality.mistakes / quality.watched, sum(quality.restricted) / max(1, len(quality.restricted))


def _run(scenario: Scenario, seed: int, thresholds: Thresholds, every_look: bool = False) -> World:
    world = make_world(scenario, seed, thresholds, every_look)
    world.run(scenario.seconds)
    return world


def _truth(scenario: Scenario, world: World) -> Truth | None:
    """A role that is down for good may be called failed by anyone, also where the suite expects no more than a report of it."""
    if len(world.injected) < len(scenario.faults):
        return None
    faults = {must.role: onset(world, must) for must in scenario.must if must.kind == "failed"}
    down: set[str] = {fault.role for fault in scenario.faults if fault.kind in _DOWN and fault.seconds is None} - set(faults)
    down |= {JOB} if down else set()
    return Truth(faults, frozenset(down.union(scenario.may)), len(world.roles), 0.0, world.now)


def _said(peer: Peer, entries: list[ev.Entry]) -> list[ev.Verdict]:
    return list(judge(peer, entries))
