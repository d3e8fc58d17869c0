"""What holds for every log: no fault, no failure; order of the simultaneous, clocks and replay change nothing; no deadline is missed."""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Callable
from itertools import groupby
from typing import Any

import msgspec
import pytest
from detection_world import Fault, Must, Scenario, Shape, World, run_scenario
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from robustrl.core import events as ev
from robustrl.core.detection import Detector, judge
from robustrl.core.signals import Life
from robustrl.core.thresholds import Thresholds

LAB = Thresholds.lab()
SEEDS = st.integers(0, 2**32)
KINDS = ["kill", "exception", "freeze", "wedge", "hang", "dry", "slow", "lag", "long_token", "peer_gone"]

FEW = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
OF_MANY: list[Any] = []


def holds(*jobs: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A property of a few jobs, each of which is half a minute of ten roles; in the soak, of more."""

    def made(test: Callable[..., None]) -> Callable[..., None]:
        OF_MANY.append(pytest.param(settings(FEW, max_examples=40)(given(*jobs)(test)), id=test.__name__))
        return FEW(given(*jobs)(test))

    return made


def troubled(seed: int, seconds: float = 30.0, offsets: bool = False, changes: bool = True) -> World:
    """Several faults at random, benign or not, overlapping, and thresholds that change meanwhile."""
    dice = random.Random(seed)
    world = World(Shape.draw(dice), seed, LAB, restarts=dice.choice([None, 3.0]))
    if offsets:
        world.plan(*(Fault("offset", f"node-{i}", at=0.0, size=size) for i, size in ((1, 5.0), (2, -5.0), (3, 86400.0))))
    for _ in range(dice.randint(1, 4)):
        kind = dice.choice(KINDS)
        roles = [r for r in world.roles if r.startswith(("trainer", "rollout")) or (kind in ("kill", "freeze") and r != "host")]
        if kind in ("dry", "long_token"):
            roles = [r for r in roles if r.startswith("rollout-")]
        if kind == "peer_gone":
            roles = ["state_keeper-0"]
        world.plan(Fault(kind, dice.choice(roles), at=(3.0, seconds - 8.0), seconds=dice.choice([None, (0.3, 12.0)]) or (0.3, 12.0)))
    if changes:
        world.set_threshold(dice.uniform(5, 20), "rollout.no_tokens", dice.choice(["3.5s", "4s", "4.9s"]))
        world.set_threshold(dice.uniform(5, 20), "trainer.no_compute", dice.choice(["2s", "4x"]))
    world.run(seconds)
    return world


@holds(SEEDS, st.floats(0.0, 0.9))
def test_without_a_fault_and_within_the_thresholds_nobody_is_called_failed(seed, share):
    """Phases, tools, first steps, freezes and pauses each take up to ``share`` of what their thresholds allow."""
    dice = random.Random(seed)

    def some(limit: float) -> float:
        return dice.uniform(0.0, share * limit)

    faults = [
        Fault("long_phase", "trainer-0", at=(2.0, 10.0), seconds=some(10.0), phase="advantage"),
        Fault("long_phase", "trainer-0", at=(2.0, 10.0), seconds=some(10.0), phase="snapshot"),
        Fault("long_phase", "trainer-0", at=(2.0, 10.0), seconds=some(LAB.trainer.no_marks - 2.0), phase="train"),
        Fault("long_token", "rollout-0", at=(2.0, 12.0), seconds=some(LAB.rollout.answers * LAB.rollout.no_tokens)),
        Fault("compile", "rollout-0", at=0.0, seconds=some(LAB.rollout.grace)),
        Fault("compile", "trainer-0", at=0.0, seconds=some(LAB.trainer.grace - LAB.trainer.no_marks)),
        Fault("slow_pull", "rollout-0", at=5.0, seconds=some(30.0)),
        Fault("slow_tool", at=3.0, seconds=some(30.0)),
        Fault("freeze", "task_runner", at=(4.0, 20.0), seconds=0.01 + some(LAB.management.silent - 0.2)),
        Fault("freeze", "supervisor", at=(4.0, 20.0), seconds=0.01 + some(30.0)),
        Fault("freeze", "node_agent-1", at=(4.0, 20.0), seconds=0.01 + some(LAB.node.silent - 1.2)),
        Fault("freeze", "host", at=(21.0, 24.0), seconds=0.01 + some(10.0)),
        Fault("freeze", "rollout-0", at=(4.0, 9.0), seconds=0.01 + some(LAB.rollout.no_tokens)),
        Fault("starved", "node_agent-2", at=(4.0, 20.0), size=0.1 + some(3.0), seconds=8.0),
        Fault("offset", "node-2", at=0.0, size=5.0),
        Fault("pause", at=(5.0, 20.0), seconds=1.0 + some(20.0)),
        Fault("idle", "rollout-0", at=(4.0, 20.0), seconds=1.0 + some(20.0)),
        Fault("slow", "trainer-0", at=(4.0, 20.0), seconds=5.0, size=1.5),
    ]
    scenario = Scenario("benign", tuple(dice.sample(faults, dice.randint(1, 4))), seconds=45.0)
    world, wrong = run_scenario(scenario, seed)
    assert wrong == []
    assert world.dispatched > 0, "the job went on"


@holds(SEEDS)
def test_a_recorded_log_gives_the_live_verdicts(seed):
    world = troubled(seed)
    lines = [ev.encoder.encode(entry) for entry in world.entries]
    read = [ev.entry_decoder.decode(line) for line in lines]
    detector = Detector(LAB)
    again = list(judge(detector, read))
    live = [entry.event for entry in read if isinstance(entry.event, ev.Verdict)]
    on_its_way = detector.unrecorded()
    assert len(on_its_way) + len(live) == len(again), "nothing was written that a replay does not say"
    assert [verdict for verdict in again if verdict not in on_its_way] == sorted(live, key=again.index)


@holds(SEEDS, SEEDS)
def test_the_order_of_simultaneous_signals_changes_nothing(seed, order):
    """Times are made coarse, so that many entries share one; those of different sources then swap places."""
    movable = (ev.RoleSample, ev.ProcessExited, ev.ErrorRaised, ev.PeerGone, ev.NodeLost, ev.Tick, ev.StepMetrics, ev.PullCommitted,
               ev.HeartbeatSent, ev.HeartbeatAnswered)
    coarse = [msgspec.structs.replace(entry, t=entry.t // 0.2 * 0.2) for entry in troubled(seed).entries]
    dice = random.Random(order)
    shuffled: list[ev.Entry] = []
    for _, simultaneous in groupby(coarse, key=lambda entry: (entry.t, isinstance(entry.event, movable))):
        group = list(simultaneous)
        if isinstance(group[0].event, movable):
            sources = [entry.source for entry in group]
            dice.shuffle(sources)
            by_source = {source: [entry for entry in group if entry.source == source] for source in set(sources)}
            group = [by_source[source].pop(0) for source in sources]
        shuffled += group
    assert list(judge(Detector(LAB), shuffled)) == list(judge(Detector(LAB), coarse))


class Plain(Detector):
    """What is usual among a life's peers, asked of each of them every time."""

    asked = 0

    def usual_pace(self, life: Life) -> tuple[float, float] | None:
        peers = [rates for other in self.of_kind(life.kind) if other is not life and other.armed and (rates := other.pace.rates())]
        usual = (statistics.median_low(a for a, _ in peers), statistics.median_low(b for _, b in peers)) if peers else None
        assert super().usual_pace(life) == usual
        Plain.asked += len(peers) > 1
        return usual


def test_what_is_usual_among_peers_is_the_median_of_those_who_are_well_at_that_moment():
    """Instants of many entries: replicas work, fail amid the judgement of the others, end, are muted, are replaced; runs are resumed."""
    Plain.asked = 0
    for seed in range(60):
        dice, detector, made = random.Random(seed), Plain(LAB), 0
        lives = dict.fromkeys([f"rollout-{i}" for i in range(6)], 0)
        for t in map(float, range(60)):
            for role in dice.sample(sorted(lives), 6):
                what, life = dice.random(), {"role": role, "incarnation": lives[role]}
                made += dice.choice([0, 5, 5, 100])
                happened: list[ev.Event] = []
                if what < 0.04 or not lives[role]:
                    life["incarnation"] = lives[role] = lives[role] + 1
                    happened += [ev.RoleStarted(**life, node="node-2", pid=7, start_ticks=1), ev.RoleReady(**life, seconds=1.0)]
                elif what < 0.06:
                    happened.append(ev.ErrorRaised(**life, error="ValueError", text="t"))
                elif what < 0.07:
                    happened.append(ev.RoleStateChanged(**life, old="healthy", new=dice.choice(["restarting", "healthy"]), reason="r"))
                elif what < 0.08:
                    happened.append(ev.ProcessExited(**life, pid=7, cause="pidfd", last_lines=[]))
                elif what < 0.9:
                    happened.append(ev.RoleSample(**life, phase="decode", progress=made, pending=dice.choice([1, 8]), step=1, version=1,
                                                  loop_age=0.0, cpu=0.0))  # fmt: skip
                for event in happened:
                    detector.feed(ev.Entry(0, t, "node_agent-2", 1, 0, t, event))
            detector.advance(t)
            if dice.random() < 0.01:
                detector.feed(ev.Entry(0, t, ev.HOST, 1, 0, t, ev.RunResumed(wall=0.0, host_pid=2)))
                lives = dict.fromkeys(lives, 0)
    assert Plain.asked > 1000


@holds(SEEDS)
def test_clocks_that_are_wrong_change_no_verdict(seed):
    def said(world: World) -> list[tuple[str, int, str, str, float, float]]:
        return [(v.role, v.incarnation, v.kind, v.rule, round(v.due, 2), round(v.seen, 2)) for v in world.verdicts]

    assert said(troubled(seed, offsets=True)) == said(troubled(seed))


@holds(SEEDS)
@example(62370)  # the supervisor dies after a heartbeat was sent
def test_no_deadline_is_missed(seed):
    world = troubled(seed)
    assert all(v.onset <= v.due <= v.seen for v in world.verdicts)
    detector = Detector(LAB)
    dice = random.Random(seed)
    supervisor = 1
    for entry in world.entries:
        if isinstance(entry.event, ev.RoleStarted) and entry.event.role == "supervisor":
            supervisor = entry.event.incarnation
        detector.feed(entry)
        detector.advance(entry.t)
        deadline = detector.next_deadline()
        if deadline is None or dice.random() > 0.03:
            continue
        trial = copy.deepcopy(detector)
        t = max(deadline, trial.now)
        if t > trial.now:
            just_before = copy.deepcopy(trial)
            just_before.feed(ev.Entry(0, (trial.now + t) / 2, "supervisor", supervisor, 0, 0.0, ev.Tick()))
            assert just_before.advance((trial.now + t) / 2) == [], "nothing is said before it is due"
        trial.feed(ev.Entry(0, t, "supervisor", supervisor, 0, 0.0, ev.Tick()))
        said = trial.advance(t)
        later = trial.next_deadline()
        assert said or trial.heartbeats_due() or later is None or later > deadline, f"a deadline at {deadline} that led to nothing"
        assert all(v.due <= v.seen == t for v in said)


@pytest.mark.parametrize("seed", range(3))
def test_faults_are_found_in_time_and_only_they(seed):
    beat = ("rollout.no_tokens", "rollout.heartbeat")
    scenarios = [
        Scenario("kill", (Fault("kill", "rollout_manager", at=(5, 20)),), (Must("rollout_manager"),), quiet=True, seconds=22),
        Scenario("freeze trainer", (Fault("freeze", "trainer-0", at=(6, 12), phase="train", step=1),),
                 (Must("trainer-0", within=("trainer.no_compute",), not_before=True),),
                 shape={"lockstep": False}, seconds=60),  # in lockstep it may have waited, idle, before it was stopped
        Scenario("freeze rollout", (Fault("freeze", "rollout-0", at=(4, 9), phase="decode"),),
                 (Must("rollout-0", "suspect", beat[:1], not_before=True), Must("rollout-0", within=beat, not_before=True)),
                 shape={"tokens": 150, "staleness": 1}, seconds=25),
        Scenario("wedge trainer", (Fault("wedge", "trainer-0", at=(6, 12), phase="train", step=1),),
                 (Must("trainer-0", within=("trainer.no_marks",)),), seconds=60),
        Scenario("freeze management", (Fault("freeze", "request_manager", at=(6, 12)),),
                 (Must("request_manager", within=("management.silent",)),), seconds=22),
    ]  # fmt: skip
    for scenario in scenarios:
        world, wrong = run_scenario(scenario, 100 * seed + len(scenario.name))
        assert wrong == [], (scenario.name, seed, world.shape)


def test_a_trajectory_that_is_lost_stalls_the_job_and_is_reported():
    scenario = Scenario("lost group", (Fault("lost_group", "rollout_manager", at=10.0),), seconds=130.0)
    world, wrong = run_scenario(scenario, 3)
    stalls = [v for v in world.verdicts if v.rule == "stall"]
    assert wrong == [] and [v.kind for v in stalls] == ["reported"] and stalls[0].threshold == LAB.job.stall


def test_the_suite_itself_finds_what_is_wrong():
    kill = Fault("kill", "rollout-0", at=8.0)
    cases = [
        (Scenario("nothing", (), (Must("rollout-0"),)), "rollout-0 was never called failed"),
        (Scenario("not stated", (kill,)), "rollout-0 was called failed by rule exited"),
        (Scenario("too late", (kill,), (Must("rollout-0", within=-1.0),)), "the limit is -1 s"),
        (Scenario("too early", (kill,), (Must("rollout-0", within=5.0, not_before=True),)), "the limit is 5 s"),
        (Scenario("never", (Fault("kill", "rollout-0", at=8.0, phase="train"),)), "only [] of 1 faults were injected"),
    ]
    for scenario, words in cases:
        _, wrong = run_scenario(scenario, 5)
        assert len(wrong) == 1 and words in wrong[0], (scenario.name, wrong)
    with pytest.raises(ValueError, match="rollout-9: there is no such role"):
        run_scenario(Scenario("nobody", (Fault("kill", "rollout-9"),)), 5)


@pytest.mark.soak
@pytest.mark.parametrize("of_many", OF_MANY)
def test_also_of_many_jobs(of_many):
    of_many()
