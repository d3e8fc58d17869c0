"""Watchers, stalls of the whole job, and what is only reported."""

from __future__ import annotations

import msgspec
import pytest
from detection_log import LAB, Log, exited

from robustrl.core import events as ev


def test_an_agent_that_watches_and_says_nothing():
    log = Log("trainer-0")
    assert log.detector.next_deadline() == LAB.job.stall, "it watches nobody yet"
    log.sample(10.0, "trainer-0", "waiting_batch")
    (verdict,) = log.tick(15.0)
    assert (verdict.role, verdict.rule, verdict.due) == ("node_agent-1", "agent_silent", 15.0)


@pytest.mark.parametrize("first", ["agent", "role"])
def test_an_agent_that_never_says_a_word_is_judged_once_there_is_somebody_to_tell_of(first):
    log = Log("trainer-0")
    order = ["node_agent-7", "rollout-7"] if first == "agent" else ["rollout-7", "node_agent-7"]
    for role in order:
        log.start(role, 10.0, node="node-7", ready=False)
    for t, role in zip((20.0, 22.0), order, strict=True):
        assert log.add(t, ev.RoleReady(role=role, incarnation=1, seconds=1.0)) == []
    assert log.tick(26.9) == [], "it has node.silent for its first word, as for any"
    (verdict,) = log.tick(27.0)
    assert (verdict.role, verdict.rule, verdict.onset, verdict.due) == ("node_agent-7", "agent_silent", 22.0, 27.0)


def test_before_its_first_word_an_agent_is_not_judged_by_what_it_cannot_tell_of():
    log = Log("trainer-0")
    log.start("node_agent-7", 10.0, node="node-7")
    log.start("rollout-7", 10.0, node="node-7", ready=False)
    assert log.tick(60.0) == [], "nobody on its node is ready: the rule start is in charge of those"
    log.add(61.0, exited("rollout-7"))
    assert [v.role for v in log.verdicts] == ["rollout-7"]
    log.start("rollout-7", 61.5, incarnation=2, node="node-7")
    log.add(64.0, ev.ClockGap(seconds=2.0))
    assert log.tick(68.4) == [], "nor for the time in which the host did not run"
    assert [v.due for v in log.tick(68.5)] == [pytest.approx(68.5)]


def test_an_agents_later_life_that_stops_before_its_first_word_is_judged():
    log = Log()
    log.start("node_agent-7", 0.0, node="node-7")
    log.start("rollout-7", 0.0, node="node-7")
    words = {"progress": 5, "pending": 0, "step": 3, "version": 1, "loop_age": 0.0, "cpu": 1.0, "process": "S", "lag": 0.0}
    sample = ev.RoleSample(role="rollout-7", incarnation=1, phase="waiting_request", phase_age=1.0, **words)
    log.add(1.0, sample, "node_agent-7")
    log.add(2.0, exited("node_agent-7"))
    log.start("node_agent-7", 4.0, incarnation=2, node="node-7")
    assert [v.rule for v in log.tick(9.0)] == ["agent_silent"] and log.verdicts[-1].incarnation == 2
    log.start("node_agent-7", 10.0, incarnation=3, node="node-7")
    log.add(10.5, sample, "node_agent-7", 3)
    assert log.tick(15.4) == [] and [v.due for v in log.tick(15.5)] == [pytest.approx(15.5)]


@pytest.mark.parametrize("order", [1, -1])
def test_an_agent_that_stopped_while_its_only_role_was_replaced_is_judged_once_that_is_ready(order):
    log = Log()
    log.start("node_agent-7", 0.0, node="node-7")
    log.start("rollout-7", 0.0, node="node-7")
    words = {"progress": 5, "pending": 0, "step": 3, "version": 1, "loop_age": 0.0, "cpu": 1.0, "process": "S", "lag": 0.0}
    log.add(8.0, ev.RoleSample(role="rollout-7", incarnation=1, phase="waiting_request", phase_age=1.0, **words), "node_agent-7")
    log.add(8.5, exited("rollout-7"))
    log.start("rollout-7", 10.0, incarnation=2, ready=False, node="node-7")
    assert log.tick(60.0) == [], "there is nobody yet of whom it has to tell"
    log.add(61.0, ev.RoleReady(role="rollout-7", incarnation=2, seconds=1.0))
    words_of_host = [ev.ClockGap(seconds=2.0), ev.WarningRaised(text="w")][::order]
    for word in words_of_host:
        log.add(64.0, word)
    assert log.tick(67.9) == [], "it has node.silent for it, and the time in which the host did not run does not count"
    assert [(v.role, v.rule, v.due) for v in log.tick(68.1)] == [("node_agent-7", "agent_silent", pytest.approx(68.0))]


def test_an_agent_whose_roles_have_all_ended_may_be_silent():
    log = Log("trainer-0")
    log.sample(10.0, "trainer-0", "waiting_batch")
    log.add(11.0, exited("trainer-0"))
    assert log.tick(40.0) == []


def test_a_host_that_slept_condemns_nobody():
    log = Log("trainer-0")
    log.sample(10.0, "trainer-0", "waiting_batch")
    log.add(30.0, ev.ClockGap(seconds=19.5))
    assert log.said() == []
    assert log.tick(34.4) == []
    assert log.tick(34.5)[0].due == pytest.approx(34.5)


def committed(step: int) -> ev.OptimizerStepCommitted:
    return ev.OptimizerStepCommitted(step=step, version=step, digest="d", snapshot_digest="s", consumed=[], batch=step, bytes=1,
                                     holder="state_keeper-0", incarnation=1)  # fmt: skip


STALL = LAB.replace("node.silent", 1000.0)


@pytest.mark.parametrize(("culprit", "kind", "samples"), [
    ("trainer-0", "failed", [("trainer-0", "snapshot", {"phase_age": 89.5, "progress_age": 90.0}),
                             ("rollout-0", "waiting_request", {"pending": 0})]),
    ("rollout-0", "failed", [("trainer-0", "waiting_batch", {}), ("rollout-0", "pull", {"pending": 3, "progress_age": 89.5})]),
    ("agent_worker-0", "failed", [("trainer-0", "waiting_batch", {}), ("rollout-0", "waiting_tool", {"pending": 3}),
                                  ("agent_worker-0", "running", {"pending": 3, "progress_age": 89.5})]),
    ("agent_worker-0", "failed", [("trainer-0", "waiting_batch", {}), ("rollout-0", "waiting_request", {"pending": 0}),
                                  ("agent_worker-0", "running", {"pending": 3, "progress_age": 89.5})]),
    ("rollout_manager", "reported", [("trainer-0", "waiting_batch", {}), ("rollout-0", "waiting_request", {"pending": 0}),
                                     ("agent_worker-0", "idle", {"pending": 0}), ("rollout_manager", "running", {"pending": 2})]),
    ("task_runner", "reported", [("trainer-0", "waiting_batch", {}), ("rollout-0", "waiting_request", {"pending": 0}),
                                 ("agent_worker-0", "idle", {"pending": 0}), ("rollout_manager", "idle", {"pending": 0})]),
])  # fmt: skip
def test_a_stall_names_the_role_that_all_wait_for(culprit, kind, samples):
    log = Log("trainer-0", "rollout-0", "agent_worker-0", "rollout_manager", "task_runner", thresholds=STALL)
    log.add(10.0, committed(1))
    for role, phase, fields in samples:
        log.sample(99.0, role, phase, **fields)
    verdicts = [v for v in log.tick(105.0) if v.rule == "stall"]
    assert [(v.role, v.kind) for v in verdicts] == [(culprit, kind)]
    assert verdicts[0].due == pytest.approx(100.0, abs=0.6) and verdicts[0].onset == pytest.approx(10.0, abs=0.6)


def test_a_stall_is_reported_before_the_one_waited_for_has_been_stuck_as_long():
    log = Log("trainer-0", thresholds=STALL)
    log.add(10.0, committed(1))
    log.sample(60.0, "trainer-0", "publish", phase_age=0.0, progress_age=0.0)
    log.tick(100.0)
    log.sample(150.5, "trainer-0", "publish", phase_age=90.5, progress_age=90.5)
    assert [v for v in log.said() if v[2] == "stall"] == [("trainer-0", "reported", "stall"), ("trainer-0", "failed", "stall")]
    assert log.verdicts[-1].due == pytest.approx(150.0)


def test_no_stall_in_a_pause_or_after_the_last_step_and_a_commit_ends_it():
    log = Log("trainer-0", "task_runner", thresholds=STALL, steps=3)
    log.add(10.0, committed(1))
    log.add(20.0, ev.Paused(step=1))
    assert log.tick(500.0) == []
    log.add(500.0, ev.Resumed(step=1))
    assert log.detector.next_deadline() == 590.0
    assert log.tick(590.0)[0].rule == "stall"
    log.add(600.0, committed(2))
    assert log.tick(600.5)[0].kind == "cleared"
    log.add(610.0, committed(3))
    assert log.detector.next_deadline() is None and log.tick(9999.0) == []


def test_a_phase_that_lasts_too_long_is_reported_never_failed():
    log = Log("trainer-0", thresholds=STALL)
    log.sample(20.0, "trainer-0", "snapshot", phase_age=10.05)
    log.sample(60.0, "trainer-0", "snapshot", phase_age=50.05)
    assert log.said() == [("trainer-0", "reported", "overdue")]


def test_a_multiple_follows_the_roles_own_history():
    log = Log("trainer-0", thresholds=LAB.replace("trainer.snapshot", "1s").replace("trainer.snapshot", "4x"))
    t = 10.0
    for _ in range(6):
        log.sample(t, "trainer-0", "snapshot", phase_age=0.0)
        log.sample(t + 0.8, "trainer-0", "waiting_batch", phase_age=0.0)
        t += 2.0
    log.sample(t, "trainer-0", "snapshot", phase_age=0.0)
    assert log.sample(t + 3.1, "trainer-0", "snapshot", phase_age=3.1) == []
    (verdict,) = log.sample(t + 3.3, "trainer-0", "snapshot", phase_age=3.3)
    assert verdict.threshold == pytest.approx(3.2) and verdict.due == pytest.approx(t + 3.2)
    assert pytest.approx(3.2) in log.detector.marks()["trainer-0"]


def pull(version: int) -> ev.PullStarted:
    return ev.PullStarted(source="state_keeper-0", source_incarnation=1, target="rollout-0", version=version, bytes=9, transport="tcp")


def test_a_pull_that_lasts_too_long_is_reported_with_its_source():
    log = Log("rollout-0")
    log.add(10.0, pull(1))
    assert log.detector.next_deadline() == 20.0
    (verdict,) = log.tick(20.0)
    assert (verdict.kind, verdict.rule, verdict.evidence["source"]) == ("reported", "slow_pull", "state_keeper-0")


@pytest.mark.parametrize(("slow", "said"), [(4.0, True), (2.0, False)])
def test_a_replica_much_slower_than_its_peers(slow, said):
    log = Log("rollout-0", "rollout-1")
    for second in range(20):
        log.sample(10.0 + second, "rollout-1", "decode", progress=1 + 100 * second, pending=8)
        log.sample(10.0 + second, "rollout-0", "decode", progress=1 + int(100 / slow) * second, pending=8)
    assert log.said() == ([("rollout-0", "reported", "straggler")] if said else [])


def test_a_replica_with_less_work_is_no_straggler():
    log = Log("rollout-0", "rollout-1")
    for second in range(20):
        log.sample(10.0 + second, "rollout-1", "decode", progress=1 + 100 * second, pending=16)
        log.sample(10.0 + second, "rollout-0", "decode", progress=1 + 10 * second, pending=1)
    assert log.said() == []


def test_who_fails_is_no_peer_of_those_that_are_judged_after_it_in_the_same_instant():
    log = Log("rollout-0", "rollout-1", "rollout-2")
    for second in range(20):
        for role, speed in (("rollout-0", 5), ("rollout-1", 100), ("rollout-2", 20)):
            log.sample(10.0 + second, role, "decode", progress=1 + speed * second, pending=8)
    assert log.said() == [("rollout-0", "reported", "straggler")]
    error = ev.ErrorRaised(role="rollout-0", incarnation=1, error="ValueError", text="t")
    last = msgspec.structs.replace(log.entries[-1], t=30.0, at=1030.0)
    for entry in (msgspec.structs.replace(last, source="rollout-0", event=error), last):
        log.detector.feed(entry)
    said = [(verdict.role, verdict.rule) for verdict in log.detector.advance(30.0)]
    assert ("rollout-0", "exception") in said and ("rollout-2", "straggler") in said


def test_a_broken_connection_is_reported_about_the_other_side():
    log = Log("rollout-0", "rollout-1")
    gone = ev.PeerGone(role="rollout-1", incarnation=1, peer="rollout-0", peer_incarnation=1, error="reset")
    (verdict,) = log.add(10.0, gone, "rollout-1")
    assert (verdict.role, verdict.kind, verdict.rule, verdict.evidence["seen_by"]) == ("rollout-0", "reported", "peer_gone", "rollout-1")


def test_a_rank_that_waits_for_another_is_not_overdue_but_one_that_all_have_joined_is():
    log = Log("trainer-0", "trainer-1", thresholds=STALL)
    log.sample(20.0, "trainer-1", "train", active_age=0.0)
    log.sample(20.0, "trainer-0", "optimizer", phase_age=15.0)
    log.sample(25.0, "trainer-1", "optimizer", phase_age=0.0)
    log.sample(25.1, "trainer-0", "optimizer", phase_age=20.1)
    assert log.said() == []
    log.sample(35.1, "trainer-0", "optimizer", phase_age=30.1)
    assert log.said() == [("trainer-0", "reported", "overdue")] and log.verdicts[0].due == pytest.approx(35.0)


def saved(step: int, seconds: float = 1.0) -> ev.SnapshotCopied:
    return ev.SnapshotCopied(step=step, source="state_keeper-0", holder="disk", digest="d", bytes=1, seconds=seconds)


def checkpointed(every: int) -> Log:
    log = Log("state_keeper-0", thresholds=STALL.replace("keeper.checkpoint", "5s"))
    config = {"steps": 99, "checkpoint_every": every}
    log.add(0.0, ev.RunStarted(schema=1, run="r", name="n", wall=0.0, host_pid=1, config=config, machine={}))
    return log


def test_a_checkpoint_that_does_not_reach_the_disk_is_reported():
    log = checkpointed(1)
    log.add(10.0, committed(1))
    assert log.tick(30.0) == [], "nothing says that checkpoints are written at all"
    log.add(31.0, saved(1))
    log.add(32.0, committed(2))
    log.add(34.0, committed(3))
    log.add(36.0, saved(2))
    assert log.said() == [] and log.detector.next_deadline() == 41.0, "that of step 3 had its turn when that of step 2 was written"
    (verdict,) = log.tick(41.0)
    assert (verdict.role, verdict.kind, verdict.rule) == ("state_keeper-0", "reported", "slow_checkpoint")
    assert verdict.evidence["last_on_disk"] == 2
    log.add(45.0, saved(3))
    assert [v.kind for v in log.tick(45.5)] == ["cleared"]


def test_steps_that_get_no_checkpoint_are_not_waited_for():
    log = checkpointed(10)
    log.add(10.0, committed(10))
    log.add(11.0, saved(10))
    log.add(12.0, committed(11))
    assert log.tick(40.0) == []
    log.add(41.0, committed(20))
    assert [v.rule for v in log.tick(46.0)] == ["slow_checkpoint"]


def test_a_slow_checkpoint_is_measured_by_the_keepers_own_history():
    log = checkpointed(1)
    relative = STALL.replace("keeper.checkpoint", "1s").replace("keeper.checkpoint", "3x")
    log.add(9.0, ev.ThresholdsChanged(thresholds=relative.to_dict(), changes={}))
    for step in range(1, 7):
        log.add(10.0 * step, committed(step))
        log.add(10.0 * step + 2.0, saved(step, 2.0))
    log.add(70.0, committed(7))
    assert log.tick(75.9) == []
    (verdict,) = log.tick(76.0)
    assert verdict.threshold == pytest.approx(6.0)
