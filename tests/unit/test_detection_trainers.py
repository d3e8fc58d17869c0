"""Rules about trainer ranks: idleness, marks, who waits for whom, loops that stand still."""

from __future__ import annotations

import pytest
from detection_log import LAB, Log, exited


def test_a_trainer_without_compute_is_said_when_a_sample_shows_it_and_due_is_exact():
    log = Log("trainer-0")
    log.sample(10.0, "trainer-0", "train", active_age=0.0)
    assert log.sample(12.95, "trainer-0", "train", active_age=2.95) == []
    (verdict,) = log.sample(13.06, "trainer-0", "train", active_age=3.05, process="T")
    assert verdict.kind == "failed" and verdict.rule == "no_compute" and verdict.threshold == 3.0
    assert verdict.onset == pytest.approx(10.0) and verdict.due == pytest.approx(13.0) and verdict.seen == 13.06
    assert verdict.evidence["process"] == "T" and verdict.evidence["chosen_by"] == "only rank"


@pytest.mark.parametrize("phase", ["waiting_batch", "advantage", "optimizer", "snapshot", "publish"])
def test_idleness_outside_the_train_phase_is_no_fault(phase):
    log = Log("trainer-0")
    log.sample(30.0, "trainer-0", phase, active_age=200.0, phase_age=5.0, progress_age=200.0)
    assert log.said() == []


def test_the_window_lies_in_the_train_phase():
    log = Log("trainer-0")
    assert log.sample(30.0, "trainer-0", "train", active_age=20.0, phase_age=2.9) == []
    assert log.tick(30.15) == [], "only a sample can show it"
    (verdict,) = log.sample(30.2, "trainer-0", "train", active_age=20.2, phase_age=3.1)
    assert verdict.onset == pytest.approx(27.1)


def test_a_busy_trainer_that_ends_no_micro_batch():
    log = Log("trainer-0")
    assert log.sample(30.0, "trainer-0", "train", active_age=0.0, progress_age=9.9) == []
    (verdict,) = log.sample(30.2, "trainer-0", "train", active_age=0.0, progress_age=10.1)
    assert (verdict.kind, verdict.rule, verdict.threshold) == ("failed", "no_marks", 10.0)


def test_until_its_first_micro_batch_a_trainer_has_grace():
    log = Log("trainer-0")
    assert log.sample(30.0, "trainer-0", "train", active_age=29.0, progress_age=29.0, progress=0) == []
    (verdict,) = log.sample(31.5, "trainer-0", "train", active_age=30.5, progress_age=30.5, progress=0)
    assert verdict.threshold == LAB.trainer.grace


def test_a_trainer_that_waits_for_its_first_batch_has_no_grace():
    log = Log("trainer-0", "trainer-1")
    log.sample(20.0, "trainer-0", "waiting_batch", progress=0, loop_age=LAB.trainer.silent + 0.05)
    log.sample(20.0, "trainer-1", "train", progress=0, loop_age=LAB.trainer.silent + 0.05)
    assert log.said() == [("trainer-0", "failed", "silent")]


def test_a_stopped_process_alone_is_no_reason():
    log = Log("trainer-0", "rollout-0")
    log.sample(10.0, "trainer-0", "train", active_age=2.0, loop_age=2.0, process="T")
    log.sample(10.0, "rollout-0", "decode", progress_age=2.0, loop_age=2.0, process="T")
    assert log.said() == []


def test_of_idle_ranks_the_one_with_the_most_micro_batches_left_is_to_blame():
    log = Log("trainer-0", "trainer-1", "trainer-2")
    log.sample(13.0, "trainer-1", "train", active_age=2.9, pending=4)
    log.sample(13.0, "trainer-2", "train", active_age=2.8, pending=3)
    (waiting,) = log.sample(13.1, "trainer-0", "train", active_age=3.01, pending=3)
    assert waiting.kind == "waiting_on_peer"
    assert (waiting.evidence["peer"], waiting.evidence["chosen_by"]) == ("trainer-1", "micro-batch counter")
    (failed,) = log.sample(13.2, "trainer-1", "train", active_age=3.1, pending=4)
    assert (failed.role, failed.kind) == ("trainer-1", "failed")
    (second,) = log.sample(13.3, "trainer-2", "train", active_age=3.1, pending=3)
    assert (second.kind, second.evidence["peer"], second.evidence["chosen_by"]) == ("waiting_on_peer", "trainer-1", "ended")


def test_of_ranks_that_are_level_the_stopped_one_is_to_blame_then_the_one_that_fell_idle_first():
    log = Log("trainer-0", "trainer-1")
    log.sample(13.0, "trainer-1", "train", active_age=2.0, process="T")
    (verdict,) = log.sample(13.1, "trainer-0", "train", active_age=3.1)
    assert (verdict.kind, verdict.evidence["peer"], verdict.evidence["chosen_by"]) == ("waiting_on_peer", "trainer-1", "process stopped")
    for ago, kind, how in ((2.4, "failed", "idle first"), (2.9, "failed", "idle together"), (2.99, "failed", "idle together")):
        log = Log("trainer-0", "trainer-1")
        log.sample(13.0, "trainer-1", "train", active_age=ago)
        (verdict,) = log.sample(13.1, "trainer-0", "train", active_age=3.05)
        assert (verdict.role, verdict.kind, verdict.evidence["chosen_by"]) == ("trainer-0", kind, how)
    log = Log("trainer-0", "trainer-1")
    log.sample(13.0, "trainer-0", "train", active_age=2.9)
    log.sample(13.0, "trainer-1", "train", active_age=2.9)
    log.sample(13.1, "trainer-1", "train", active_age=0.0)  # it works again
    (verdict,) = log.sample(13.15, "trainer-0", "train", active_age=3.05)
    assert (verdict.kind, verdict.evidence["chosen_by"]) == ("waiting_on_peer", "peer at work")
    log.sample(13.3, "trainer-1", "train", active_age=0.0, pending=1)
    assert log.said()[1:] == [], "what it waited for has come: it has as long again, for its own last sample may be old"
    assert log.detector.next_deadline() == pytest.approx(13.8), "the peer's word ended the wait"
    assert [v.kind for v in log.tick(16.25)] == ["cleared"]
    (verdict,) = [v for v in log.sample(16.3, "trainer-0", "train", active_age=6.2) if v.kind == "failed"]
    assert verdict.evidence["chosen_by"] == "micro-batch counter" and verdict.due == pytest.approx(16.15)


def test_a_rank_that_is_stopped_for_a_moment_while_it_waits_is_no_culprit():
    log = Log("trainer-0", "trainer-1")
    log.sample(13.0, "trainer-1", "advantage", active_age=0.0)
    (verdict,) = log.sample(13.1, "trainer-0", "train", active_age=3.05, loop_age=1.0, process="T")
    assert verdict.kind == "waiting_on_peer"
    (verdict,) = log.sample(15.2, "trainer-0", "train", active_age=5.15, loop_age=3.1, process="T")
    assert verdict.kind == "failed" and verdict.evidence["chosen_by"] == "process stopped"


def test_a_rank_that_waits_for_a_busy_one_that_never_ends_is_no_culprit():
    log = Log("trainer-0", "trainer-1")
    for second in range(1, 12):
        log.sample(20.0 + second, "trainer-1", "train", active_age=0.0, progress_age=float(second), pending=2)
        log.sample(20.0 + second, "trainer-0", "train", active_age=float(second), progress_age=float(second), pending=0)
    assert [v for v in log.said() if v[1] == "failed"] == [("trainer-1", "failed", "no_marks")]
    assert ("trainer-0", "waiting_on_peer", "no_compute") in log.said()


def test_a_rank_that_goes_on_is_cleared_after_the_hysteresis():
    log = Log("trainer-0", "trainer-1")
    log.sample(13.0, "trainer-1", "train", active_age=0.0, pending=4)
    log.sample(13.1, "trainer-0", "train", active_age=3.01, pending=0)
    assert log.sample(13.4, "trainer-0", "optimizer", phase_age=0.0) == []
    assert log.detector.next_deadline() == pytest.approx(13.9)
    (verdict,) = log.tick(13.9)
    assert (verdict.role, verdict.kind, verdict.rule, verdict.due) == ("trainer-0", "cleared", "no_compute", pytest.approx(13.9))


def test_a_control_loop_that_stands_still_is_said_in_any_phase():
    log = Log("trainer-0", "request_manager", "state_keeper-0")
    for role, phase in (("trainer-0", "snapshot"), ("request_manager", "idle"), ("state_keeper-0", "running")):
        log.sample(20.0, role, phase, loop_age=5.1, phase_age=6.0)
    assert [v for v in log.said() if v[1] == "failed"] == [
        (role, "failed", "silent") for role in ("trainer-0", "request_manager", "state_keeper-0")
    ]


def test_a_late_loop_is_reported_and_cleared():
    log = Log("task_runner")
    log.sample(20.0, "task_runner", "idle", lag=1.4)
    log.sample(21.0, "task_runner", "idle", lag=0.1)
    log.tick(21.6)
    assert log.said() == [("task_runner", "reported", "loop_lag"), ("task_runner", "cleared", "loop_lag")]


def test_a_sign_that_comes_back_within_the_hysteresis_is_not_cleared():
    log = Log("task_runner")
    log.sample(20.0, "task_runner", "idle", lag=1.4)
    log.sample(21.0, "task_runner", "idle", lag=0.1)
    log.sample(21.3, "task_runner", "idle", lag=1.2)
    log.sample(22.0, "task_runner", "idle", lag=0.1)
    assert log.tick(22.4) == []
    assert [v.due for v in log.tick(22.6)] == [pytest.approx(22.5)]


def test_the_supervisor_is_not_judged_by_its_own_loop():
    log = Log()
    log.sample(20.0, "supervisor", "idle", loop_age=50.0)
    assert log.said() == []


def test_of_two_stopped_ranks_both_are_to_blame_though_one_was_waiting_when_it_was_stopped():
    log = Log("trainer-0", "trainer-1")
    log.sample(13.0, "trainer-0", "train", active_age=2.9, loop_age=2.9, process="T")
    log.sample(13.1, "trainer-1", "train", active_age=3.1, loop_age=2.98, process="T")
    assert log.said() == [], "no sample has shown yet that it is stopped for as long as the limit"
    log.sample(13.2, "trainer-1", "train", active_age=3.2, loop_age=3.08, process="T")
    log.sample(13.2, "trainer-0", "train", active_age=3.1, loop_age=3.1, process="T")
    assert log.said() == [("trainer-1", "failed", "no_compute"), ("trainer-0", "failed", "no_compute")]


# -- beside a rank that has ended and is not replaced (job.recovery.mode = "observe") ---


def beside_a_dead_one(*, mine: int, theirs: int) -> Log:
    """trainer-1 has ended at 10 s; micro-batches left."""
    log = Log("trainer-0", "trainer-1")
    log.sample(9.9, "trainer-0", "train", active_age=0.0, pending=mine, progress_age=0.1)
    log.sample(9.9, "trainer-1", "train", active_age=0.0, pending=theirs, progress_age=0.1)
    log.add(10.0, exited("trainer-1"))
    return log


def of(log: Log, role: str) -> list[tuple[str, str, str]]:
    return [(v.kind, v.rule, v.evidence.get("chosen_by", "")) for v in log.verdicts if v.role == role]


@pytest.mark.parametrize("phase", ["train", "optimizer", "snapshot", "waiting_batch"])
def test_a_rank_that_is_stopped_beside_one_that_has_ended_gets_its_own_verdict(phase):
    log = beside_a_dead_one(mine=2, theirs=2)
    for t in range(11, 30):
        log.sample(float(t), "trainer-0", phase, active_age=t - 10.0, progress_age=t - 10.0, phase_age=t - 10.0)
    assert "failed" not in [kind for kind, *_ in of(log, "trainer-0")]
    for t in range(30, 37):
        ages = dict.fromkeys(("active_age", "progress_age", "phase_age"), t - 10.0)
        log.sample(float(t), "trainer-0", phase, **ages, loop_age=t - 29.5, process="T")
    (failed,) = [v for v in log.verdicts if (v.role, v.kind) == ("trainer-0", "failed")]
    assert failed.onset == pytest.approx(29.5) and failed.due <= 29.5 + LAB.trainer.silent + 0.01


@pytest.mark.parametrize("busy", [True, False])
def test_a_rank_is_stuck_by_itself_where_the_one_that_has_ended_had_come_further(busy):
    log = beside_a_dead_one(mine=3, theirs=1)
    for t in range(11, 23):
        log.sample(float(t), "trainer-0", "train", active_age=0.0 if busy else t - 9.8, progress_age=t - 9.8, pending=3)
    assert of(log, "trainer-0")[-1] == ("failed", "no_marks" if busy else "no_compute", "on its own since the others ended")


@pytest.mark.parametrize("busy", [True, False])
def test_a_rank_that_went_on_long_after_the_other_had_ended_does_not_wait_for_it(busy):
    log = beside_a_dead_one(mine=20, theirs=20)
    for n, t in enumerate((11.0, 12.0, 13.0, 14.0)):
        log.sample(t, "trainer-0", "train", active_age=0.0, progress_age=0.1, progress=6 + n, pending=19 - n)
    for t in range(15, 26):
        log.sample(float(t), "trainer-0", "train", active_age=0.0 if busy else t - 14.0, progress_age=t - 13.9, progress=9, pending=16)
    assert of(log, "trainer-0") == [("failed", "no_marks" if busy else "no_compute", "on its own since the others ended")]


def test_a_rank_that_waited_for_one_that_has_ended_and_then_works_without_end_is_wedged_by_itself():
    log = beside_a_dead_one(mine=2, theirs=2)
    for t in range(11, 31):
        log.sample(float(t), "trainer-0", "train", active_age=t - 10.0, progress_age=t - 10.0)
    for t in range(31, 42):
        log.sample(float(t), "trainer-0", "train", active_age=0.0, progress_age=t - 10.0)
    assert of(log, "trainer-0")[-1] == ("failed", "no_marks", "at work after its wait")
    assert log.verdicts[-1].due == pytest.approx(40.0) and log.verdicts[-1].onset == pytest.approx(30.0)


@pytest.mark.parametrize("busy", [True, False])
def test_where_it_cannot_be_told_a_rank_waits_and_the_rule_says_that_it_is_blind_there(busy):
    """Stuck at the very micro-batch at which it may wait for the one that has ended: a wait, or a wait that spins, looks the same."""
    log = beside_a_dead_one(mine=2, theirs=2)
    for t in range(11, 60):
        log.sample(float(t), "trainer-0", "train", active_age=0.0 if busy else t - 10.0, progress_age=t - 10.0)
    (rule,) = {v.rule for v in log.verdicts if v.role == "trainer-0"}
    assert {v.kind for v in log.verdicts if v.role == "trainer-0"} == {"waiting_on_peer"}
    (spot,) = {v.blind_spot for v in log.verdicts if v.rule == rule}
    assert "beside a rank that has ended and is not replaced" in spot


def test_a_rank_that_waits_for_one_that_was_condemned_and_works_on_is_no_culprit():
    log = Log("trainer-0", "trainer-1")
    log.sample(9.8, "trainer-0", "train", active_age=0.0, pending=20, progress=5, progress_age=0.1)
    log.sample(9.9, "trainer-1", "train", active_age=0.0, pending=20, progress=5, progress_age=10.1)
    assert [kind for kind, *_ in of(log, "trainer-1")] == ["failed"]
    for n, t in enumerate((11.0, 12.0, 13.0, 14.0, 15.0)):
        for role in ("trainer-1", "trainer-0"):
            log.sample(t, role, "train", active_age=0.0, progress_age=0.1, progress=6 + n, pending=19 - n)
    for t in range(16, 26):
        log.sample(float(t), "trainer-0", "train", active_age=t - 15.0, progress_age=t - 15.0, progress=10, pending=15)
    assert {kind for kind, *_ in of(log, "trainer-0")} == {"waiting_on_peer"}


@pytest.mark.parametrize(("process", "reported"), [("S", []), ("T", ["trainer-1"])])
def test_a_rank_that_idles_in_train_waits_and_one_that_is_stopped_is_slow(process, reported):
    """Each ten seconds the first rank makes its micro-batches in two; the other one stands still for eight, then does as much."""
    log = Log("trainer-0", "trainer-1")
    for t in map(float, range(60)):
        cycle, second = divmod(int(t), 10)
        done, waits = 8 * cycle + 4 * max(0, second - 7), second < 8
        phase = "advantage" if waits else "train"
        log.sample(t, "trainer-0", phase, progress=done, active_age=0.0, phase_age=float(second), progress_age=0.0)
        age = min(2.5, float(second)) if waits else 0.0
        log.sample(t, "trainer-1", "train", progress=done, active_age=age, progress_age=age, phase_age=float(second),
                   process=process if waits else "R")  # fmt: skip
    assert sorted({v.role for v in log.verdicts if v.rule == "straggler"}) == reported
