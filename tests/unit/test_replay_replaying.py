"""Replays: with a run's own settings exactly its live verdicts; with others what a job of those settings really says, and its worth."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from detection_log import Log
from detection_world import Fault, Shape, World

import robustrl
from robustrl import Run
from robustrl.core import events as ev
from robustrl.core.detection import Detector
from robustrl.core.thresholds import Thresholds
from robustrl.errors import ConfigError
from robustrl.replay import peers
from robustrl.replay.driving import Said
from robustrl.replay.outcomes import Truths, match
from robustrl.replay.replaying import Replay, replay

LAB = Thresholds.lab().replace("job.stall", 40.0)
SCALED = ("trainer.no_compute", "trainer.no_marks", "trainer.silent", "rollout.no_tokens", "rollout.wedged", "rollout.heartbeat",
          "management.silent", "keeper.silent", "job.stall")  # fmt: skip


def scaled(factor: float) -> Thresholds:
    return LAB.updated({path: factor * LAB.get(path) for path in SCALED})


PATIENT = LAB.updated({"rollout.no_tokens": 30.0, "rollout.wedged": 30.0})


def make(seed: int, *faults: Fault, thresholds: Thresholds = LAB, seconds: float = 40.0, restarts: float | None = None) -> World:
    world = World(Shape.draw(random.Random(seed)), seed, thresholds, restarts=restarts)
    world.plan(*faults)
    world.run(seconds)
    return world


def recorded(world: World, kind: str = "", **options: Any) -> Run:
    """The world's log, with the injector's word of the first fault in it."""
    if not world.injected or not kind:
        return Run.of(world.entries)
    at, fault = world.injected[0]
    benign = kind in ("freeze", "slow_tool")
    plan = ev.FaultPlanned(fault=1, kind=kind, target=fault.role, when="now", benign=benign, options=options)
    hit = ev.FaultInjected(fault=1, role=fault.role, incarnation=1, node="", pid=1, phase="", step=0, proof={})
    place = next((i for i, entry in enumerate(world.entries) if entry.t > at), len(world.entries))
    extra = [ev.Entry(0, at, ev.HOST, 1, 0, at, event) for event in (plan, hit)]
    return Run.of([*world.entries[:place], *extra, *world.entries[place:]])


def said(verdicts: Any) -> list[tuple[str, str, str]]:
    return sorted((v.role, v.kind, v.rule) for v in verdicts if v.kind in ("failed", "suspect"))


@pytest.mark.parametrize("seed", range(4))
def test_its_own_settings_give_exactly_what_was_said_live(seed: int) -> None:
    fault = [Fault("freeze", "trainer-0", phase="train"), Fault("wedge", "rollout-0"), Fault("kill", "rollout-0"),
             Fault("freeze", "request_manager")][seed]  # fmt: skip
    world = World(Shape.draw(random.Random(seed)), seed, LAB, restarts=2.0)
    world.plan(fault)
    world.set_threshold(9.0, "rollout.no_tokens", 4.0)
    world.set_threshold(9.5, "trainer.no_compute", 2.0)
    world.run(35.0)
    found = robustrl.replay(Run.of(world.entries))
    assert list(found.verdicts) == world.verdicts and world.verdicts
    assert found.as_live and len(found.run.thresholds) == 3


FAULTS = (
    *(Fault(kind, "trainer-0", phase="train") for kind in ("freeze", "wedge", "hang")),
    *(Fault(kind, "rollout-0", phase="decode") for kind in ("freeze", "wedge", "dry")),
    Fault("freeze", "rollout_manager"), Fault("wedge", "state_keeper-0"), Fault("kill", "rollout-0"), Fault("freeze", "node_agent-2"),
    Fault("long_token", "rollout-0", seconds=5.0, phase="decode"), Fault("freeze", "rollout-0", seconds=4.0),
)  # fmt: skip


@pytest.mark.parametrize("place", range(len(FAULTS)))
def test_other_settings_say_what_a_job_with_them_really_says(place: int) -> None:
    """The same virtual job lived under three settings: what the replay of the one predicts is what the others do."""
    fault, seed = FAULTS[place], 100 + place
    run = Run.of(make(seed, fault).entries)
    for role in run.roles:  # this world restarts nobody, so nobody is to be watched anew
        run = run.annotate(role, 0.0, run.seconds, expect="anything")
    end = 40.0 - 2.0
    for factor in (0.6, 1.7):
        there = make(seed, fault, thresholds=scaled(factor))
        predicted = replay(run, scaled(factor))
        early = [v for v in predicted.verdicts if v.seen < end]
        real = [v for v in there.verdicts if v.seen < end]
        assert said(early) == said(real), factor
        slack = 0.1 + 20 * there.shape.delay + 5 * there.shape.jitter  # one look, and the words' way
        for a, b in zip(sorted(early, key=_key), sorted(real, key=_key), strict=False):
            if a.kind == "failed":
                one, other = a.seen - a.onset, b.seen - b.onset  # the two worlds' dice fall apart before the fault comes
                rounds = LAB.rollout.answers if a.rule == "unproductive" else 1
                assert abs(one - other) <= rounds * slack, f"{a.role} {a.rule}: predicted after {one:.3f} s, really {other:.3f} s"


def _key(verdict: ev.Verdict) -> tuple[str, str, str, float]:
    return verdict.kind, verdict.role, verdict.rule, verdict.seen


def test_the_driver_with_the_same_settings_agrees_with_the_log() -> None:
    run = recorded(make(7, Fault("freeze", "rollout-0", phase="decode"), restarts=3.0), "hang")
    own, again = replay(run), replay(run, detector=lambda: Detector(LAB))
    assert [(o.outcome, o.role) for o in own.outcomes] == [(o.outcome, o.role) for o in again.outcomes]
    assert own.delays == pytest.approx(again.delays, abs=0.25)


@pytest.mark.parametrize("seed", range(1, 7))
def test_where_the_live_job_stepped_in_a_slower_setting_goes_on_alone(seed: int) -> None:
    trials = (Fault("freeze", "trainer-0", phase="train"), 3.0, 9.0), (Fault("wedge", "rollout-0", phase="decode"), 2.0, 12.0)
    for fault, factor, expected in trials:
        world = make(seed, fault, restarts=1.0)
        run = recorded(world, "hang" if fault.kind == "freeze" else "wedge")
        (found,) = replay(run, scaled(factor)).detected
        assert found.beyond and found.delay == pytest.approx(expected, abs=0.8)
        assert not replay(run, scaled(1.0)).detected[0].beyond


def test_a_fault_that_is_over_first_is_missed() -> None:
    world = make(12, Fault("freeze", "rollout-0", seconds=4.0, phase="decode"), thresholds=scaled(3.0))
    run = recorded(world, "hang", seconds=4.0)
    ended = ev.Entry(0, world.injected[0][0] + 4.0, ev.HOST, 1, 0, 0.0, ev.FaultEnded(fault=1, outcome="over", reason=""))
    run = Run.of(sorted([*run.entries, ended], key=lambda entry: entry.t))
    (missed,) = replay(run).missed
    assert missed.lasted == 4.0 and not replay(run).detected
    (found,) = replay(run, scaled(0.5)).detected
    assert found.delay is not None and 1.5 <= found.delay <= 4.0


def test_a_disturbance_called_failed_is_a_false_alarm_each_time_that_it_is() -> None:
    world = make(13, Fault("freeze", "rollout-0", seconds=20.0, phase="decode"), thresholds=PATIENT, seconds=50.0)
    run = recorded(world, "freeze", seconds=20.0)
    assert [o.outcome for o in replay(run).outcomes] == ["left alone"]
    alarms = replay(run, scaled(0.5)).false_alarms
    assert {o.kind for o in alarms} == {"freeze"} and {o.role for o in alarms} == {"rollout-0"}
    assert len(alarms) == 2, "it is watched anew after the restart that each alarm would have cost"
    marked = Run.of(world.entries).annotate("rollout-0", world.injected[0][0], world.injected[0][0] + 20.0, expect="anything")
    assert not replay(marked, scaled(0.5)).false_alarms


def test_an_end_that_nobody_injected_is_a_consequence() -> None:
    run = Run.of(make(14, Fault("kill", "rollout-0")).entries)
    assert [o.outcome for o in replay(run, scaled(0.5)).outcomes] == ["consequence"]


def test_who_was_ended_for_a_restart_and_is_then_said_to_have_exited_is_a_consequence() -> None:
    """A full restart that a new supervisor finds under way: it sees processes that have ended."""
    entries = make(14, Fault("kill", "rollout-0")).entries
    place = next(i for i, entry in enumerate(entries) if isinstance(entry.event, ev.ProcessExited))
    decided = ev.RestartDecided(role="rollout-0", incarnation=1, mode="full", reason="owing to trainer-0")
    run = Run.of([*entries[:place], msgspec.structs.replace(entries[place], seq=0, event=decided), *entries[place:]])
    verdict = next(entry.event for entry in entries if isinstance(entry.event, ev.Verdict) and entry.event.kind == "failed")
    truths, recording = Truths(run), run.recording
    for rule, outcome in (("exited", "consequence"), ("no_tokens", "false alarm")):
        words = Said([msgspec.structs.replace(verdict, rule=rule)], [])
        assert [found.outcome for found in match(truths, recording, words, lambda role: 10.0)] == [outcome]


def test_a_hang_that_was_called_off_lasted_until_then() -> None:
    run = recorded(make(15, Fault("freeze", "trainer-0", phase="train"), Fault("kill", "trainer-0", at=30.0), restarts=1.0), "hang")
    start = next(entry.t for entry in run.entries if isinstance(entry.event, ev.FaultInjected))
    place = next(i for i, entry in enumerate(run.entries) if entry.t > start + 0.5)
    over = ev.Entry(0, start + 0.5, ev.HOST, 1, 0, start + 0.5, ev.FaultEnded(fault=1, outcome="aborted", reason="called off"))
    (mark,) = [mark for mark in Run.of([*run.entries[:place], over, *run.entries[place:]]).truth if mark.fault == 1]
    assert (mark.lasts, mark.end - mark.start) == (pytest.approx(0.5), pytest.approx(0.5))


def test_a_window_counts_only_what_falls_into_it() -> None:
    world = make(15, Fault("freeze", "trainer-0", phase="train"))
    run, at = recorded(world, "hang"), world.injected[0][0]
    assert len(replay(run.cut(0.0, at + 1.0)).missed) == 1
    assert not replay(run.cut(at + 5.0)).outcomes
    (found,) = replay(run.cut(at - 1.0)).detected
    assert found.delay == replay(run).detected[0].delay


def test_replays_are_deterministic_and_tabular() -> None:
    run = recorded(make(16, Fault("freeze", "trainer-0", phase="train"), restarts=1.0), "hang")
    one, two = replay(run, {"trainer.no_compute": "1s"}), replay(run, {"trainer.no_compute": "1s"})
    assert one.verdicts == two.verdicts and one.outcomes == two.outcomes
    (row,) = [row for row in one.table() if row["outcome"] == "detected"]
    assert row["rule"] == "no_compute" and row["threshold"] == 1.0 and row["evidence"]["chosen_by"]
    assert isinstance(one, Replay) and "1 of 1 faults detected" in repr(one)


def test_the_package_is_the_function_whatever_was_imported_first() -> None:
    for first in ("import robustrl.replay.peers", "pass"):
        program = [first, "import robustrl", "from robustrl import replay, Run", "assert callable(replay) and replay is robustrl.replay",
                   "import robustrl.replay.quality", "robustrl.replay.quality, robustrl.Run"]  # fmt: skip
        subprocess.run([sys.executable, "-c", "\n".join(program)], check=True)


def test_other_detectors_are_driven_the_same_way() -> None:
    run = recorded(make(17, Fault("freeze", "rollout-0", phase="decode")), "hang")
    (found,) = replay(run, detector=lambda: peers.Heartbeat(2.0)).detected
    assert found.rule == "heartbeat" and found.delay == pytest.approx(2.5, abs=1.5)
    with pytest.raises(ConfigError, match="thresholds"):
        replay(run, LAB, detector=lambda: peers.Heartbeat(2.0))
    with pytest.raises(ConfigError, match="rollout.no_token"):
        replay(run, {"rollout.no_token": 3.0})


def test_what_the_supervisor_said_and_asked_that_day_is_not_heard_again() -> None:
    world = make(18, Fault("freeze", "rollout-0", phase="decode"))
    run = recorded(world, "hang")
    bare = [entry for entry in run.entries if not isinstance(entry.event, ev.Verdict | ev.Tick | ev.HeartbeatSent | ev.HeartbeatAnswered)]
    assert len(bare) < len(run.entries)
    again = Run.of([msgspec.structs.replace(entry, seq=i) for i, entry in enumerate(bare, 1)])
    assert replay(again, scaled(1.7)).verdicts == replay(run, scaled(1.7)).verdicts


@pytest.mark.parametrize("grown", [1.0, 1.004])
def test_a_limit_that_was_passed_right_after_a_sample_is_seen_then(grown: float) -> None:
    """A sample's way is a few milliseconds longer or shorter than that of the one before. By the later one the limit seemed passed before
    the earlier one came, which had not shown it: it was seen with the later one, a whole second late.
    """
    log = Log("rollout-0", thresholds=PATIENT)
    log.sample(10.0, "rollout-0", "decode")
    for second, age in ((11.0, 1.0), (12.0, 1.999), (13.0, 1.999 + grown)):
        log.sample(second, "rollout-0", "decode", progress_age=age, loop_age=age)
    said = replay(Run.of(log.entries), LAB.updated({"rollout.no_tokens": 2.001, "rollout.heartbeat": 1.0})).verdicts
    assert [(v.kind, v.rule, v.seen) for v in said][:1] == [("suspect", "no_tokens", pytest.approx(12.0, abs=0.01))]
