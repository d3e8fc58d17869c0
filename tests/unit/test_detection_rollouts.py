"""Rules about rollouts: suspicion, heartbeat, answers without tokens."""

from __future__ import annotations

import pytest
from detection_log import LAB, Log, exited

from robustrl.core import events as ev


def suspected(log: Log, t: float = 13.05) -> None:
    log.sample(10.0, "rollout-0", "decode")
    (verdict,) = log.sample(t, "rollout-0", "decode", progress_age=t - 10.0, loop_age=t - 10.0)
    assert (verdict.kind, verdict.rule, verdict.threshold, verdict.due) == ("suspect", "no_tokens", 3.0, pytest.approx(13.0))


def test_a_suspect_fails_when_the_heartbeat_is_not_answered_in_time():
    log = Log("rollout-0")
    suspected(log)
    assert log.detector.heartbeats_due() == [("rollout-0", 1, 1)]
    log.beat(13.06)
    assert log.detector.heartbeats_due() == []
    assert log.detector.next_deadline() == pytest.approx(15.06)
    assert log.tick(15.05) == []
    (verdict,) = log.tick(15.06)
    assert (verdict.kind, verdict.rule, verdict.due, verdict.threshold) == ("failed", "heartbeat", pytest.approx(15.06), 2.0)
    assert verdict.evidence["suspected_by"] == ["no_tokens"] and verdict.onset == pytest.approx(10.0)


def test_an_answer_clears_and_the_next_suspicion_takes_as_long_again():
    log = Log("rollout-0")
    suspected(log)
    log.beat(13.06)
    log.answer(13.1)
    log.tick(13.7)
    assert log.said()[-1] == ("rollout-0", "cleared", "no_tokens")
    assert log.detector.next_deadline() == pytest.approx(16.1)
    log.sample(15.0, "rollout-0", "decode", progress_age=5.0)
    (verdict,) = log.tick(16.1)
    assert (verdict.kind, verdict.due) == ("suspect", pytest.approx(16.1))
    assert log.detector.heartbeats_due() == [("rollout-0", 1, 2)]


def test_one_that_answers_for_ever_and_makes_nothing_fails_in_the_end():
    log = Log("rollout-0", thresholds=LAB.replace("rollout.answers", 3))
    suspected(log)
    for number in range(1, 4):
        assert log.detector.heartbeats_due() == [("rollout-0", 1, number)]
        t = log.t + 0.1
        log.beat(t, number=number)
        log.answer(t + 0.05, number=number)
        for second in (1.0, 2.0, 3.0, 4.0):
            log.sample(t + second, "rollout-0", "decode", progress_age=t + second - 10.0)
    assert log.said()[-1] == ("rollout-0", "failed", "unproductive")
    assert log.verdicts[-1].evidence["answers"] == 3


def test_a_token_begins_the_count_of_answers_anew():
    log = Log("rollout-0", thresholds=LAB.replace("rollout.answers", 2))
    for round, progress in enumerate((5, 6)):
        start = 10.0 + 20 * round
        log.sample(start, "rollout-0", "decode", progress=progress)
        log.sample(start + 3.1, "rollout-0", "decode", progress=progress, progress_age=3.1)
        log.beat(start + 3.2, number=round + 1)
        log.answer(start + 3.3, number=round + 1)
        log.sample(start + 5.0, "rollout-0", "decode", progress=progress, progress_age=5.0)
        log.tick(start + 6.4)
    assert [v for v in log.said() if v[1] == "failed"] == [] and len([v for v in log.said() if v[1] == "suspect"]) == 4


def test_a_token_ends_the_suspicion_without_an_answer():
    log = Log("rollout-0")
    suspected(log)
    log.beat(13.06)
    log.sample(13.5, "rollout-0", "decode", progress=6, progress_age=0.0)
    assert log.tick(15.1)[0].kind == "cleared"
    assert log.tick(16.0) == []


def test_strikes():
    log = Log("rollout-0", thresholds=LAB.replace("rollout.strikes", 2))
    suspected(log)
    log.beat(13.06)
    assert log.tick(15.06) == [] and log.detector.heartbeats_due() == [("rollout-0", 1, 2)]
    log.beat(15.1, number=2)
    (verdict,) = log.tick(17.1)
    assert verdict.kind == "failed" and verdict.evidence["strikes"] == 2


@pytest.mark.parametrize(("phase", "fields"), [
    ("waiting_request", {"pending": 0}), ("waiting_tool", {}), ("decode", {"pending": 0}), ("decode", {"progress": 0}),
])  # fmt: skip
def test_no_tokens_is_no_fault_without_runnable_work_or_before_the_first(phase, fields):
    log = Log("rollout-0")
    log.sample(29.0, "rollout-0", phase, progress_age=28.0, active_age=28.0, **fields)
    assert log.said() == [] and log.detector.heartbeats_due() == []


def test_an_engine_loop_that_stands_still_is_suspect_in_any_phase():
    log = Log("rollout-0")
    log.sample(20.0, "rollout-0", "waiting_request", pending=0, loop_age=5.05)
    assert log.said() == [("rollout-0", "suspect", "wedged")]
    log.beat(20.1)
    log.tick(22.2)
    assert log.said()[-1] == ("rollout-0", "failed", "heartbeat")


def test_start_up_grace_is_for_the_first_work_not_for_one_that_waits_for_it():
    """It was given to whoever had made no token yet: one that stopped before its first request was found 25 s late."""
    log = Log("rollout-0", "rollout-1")
    log.sample(20.0, "rollout-0", "waiting_request", pending=0, progress=0, loop_age=5.05)
    log.sample(20.0, "rollout-1", "prefill", progress=0, loop_age=15.0)
    assert log.said() == [("rollout-0", "suspect", "wedged")]


def test_a_supervisor_that_slept_asks_again():
    log = Log("rollout-0")
    suspected(log)
    log.beat(13.06)
    log.sample(25.0, "rollout-0", "decode", progress_age=15.0)  # an agent's word: the supervisor itself has not spoken
    assert log.said() == [("rollout-0", "suspect", "no_tokens")]
    log.add(25.1, ev.ClockGap(seconds=12.0), "supervisor")
    assert log.said() == [("rollout-0", "suspect", "no_tokens")]
    assert log.detector.heartbeats_due() == [("rollout-0", 1, 2)]
    log.beat(25.2, number=2)
    assert log.tick(27.1) == []
    assert log.tick(27.2)[0].rule == "heartbeat"


def test_another_question_of_a_supervisor_that_slept_does_not_count_as_a_tick():
    log = Log("rollout-0", "rollout-1")
    suspected(log)
    log.beat(13.06)
    log.sample(25.0, "rollout-1", "decode", progress_age=4.0)
    log.beat(25.05, role="rollout-1")  # said before it noticed that it had slept
    assert [v for v in log.said() if v[1] == "failed"] == []


def test_a_new_supervisor_asks_again():
    log = Log("rollout-0")
    suspected(log)
    log.beat(13.06)
    log.add(13.5, exited("supervisor"))
    log.start("supervisor", 20.0, incarnation=2)
    assert log.tick(20.1, incarnation=2) == []
    assert log.detector.heartbeats_due() == [("rollout-0", 1, 2)]


@pytest.mark.parametrize("answer_first", [True, False])
def test_an_answer_at_the_moment_of_new_progress_counts_as_before_it(answer_first):
    """Two sources, one instant: their order in the log must decide nothing."""
    log = Log("rollout-0", thresholds=LAB.replace("rollout.answers", 2))
    log.sample(1.0, "rollout-0", "decode", progress=5, progress_age=0.0, active_age=0.0)
    for word in ("answer", "progress") if answer_first else ("progress", "answer"):
        if word == "answer":
            log.answer(5.0, number=1)
        else:
            log.sample(5.0, "rollout-0", "decode", progress=6, progress_age=3.1, active_age=0.0)
    log.beat(5.0, number=2)
    log.answer(5.1, number=2)
    log.sample(8.0, "rollout-0", "decode", progress=6, progress_age=6.1, active_age=0.0)
    log.tick(9.0)
    assert not [verdict for verdict in log.verdicts if verdict.kind == "failed"]
