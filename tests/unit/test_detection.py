"""The detector on logs made entry by entry: what each rule says, when exactly, about whom, and what it must not say."""

from __future__ import annotations

from typing import Any

import pytest

from robustrl.core import events as ev
from robustrl.core.detection import Detector, judge
from robustrl.core.roles import RoleId, RoleKind
from robustrl.core.rules import RULES
from robustrl.core.thresholds import PATHS, Relative, Thresholds

LAB = Thresholds.lab().replace("rollout.heartbeat", "2s")
AGENT = {"trainer": "node_agent-1", "rollout": "node_agent-2"}


class Log:
    """Writes entries at given times and judges each instant as it ends."""

    def __init__(self, *roles: str, thresholds: Thresholds = LAB, steps: int = 100) -> None:
        self.detector = Detector(thresholds)
        self.entries: list[ev.Entry] = []
        self.verdicts: list[ev.Verdict] = []
        self.t = 0.0
        self.add(0.0, ev.RunStarted(schema=1, run="r", name="n", wall=0.0, host_pid=1, config={"steps": steps}, machine={}))
        for role in ("supervisor", "node_agent-1", "node_agent-2", *roles):
            self.start(role, 0.0)

    def add(self, t: float, event: ev.Event, source: str = ev.HOST, incarnation: int = 1) -> list[ev.Verdict]:
        """The verdicts of this instant."""
        entry = ev.Entry(len(self.entries) + 1, t, source, incarnation, len(self.entries) + 1, 1000.0 + t, event)
        self.entries.append(entry)
        self.detector.feed(entry)
        said = self.detector.advance(t)
        self.verdicts += said
        self.t = t
        return said

    def start(self, role: str, t: float, incarnation: int = 1, ready: bool = True) -> None:
        self.add(t, ev.RoleStarted(role=role, incarnation=incarnation, node=f"node-{role[-1]}", pid=7, start_ticks=1))
        if ready:
            self.add(t, ev.RoleReady(role=role, incarnation=incarnation, seconds=1.0))

    def sample(self, t: float, role: str, phase: str, incarnation: int = 1, **fields: Any) -> list[ev.Verdict]:
        values: dict[str, Any] = {"progress": 5, "pending": 2, "step": 3, "version": 1, "loop_age": 0.0, "cpu": 1.0, "process": "S"}
        values |= {"phase_age": 50.0} | fields
        values["lag"] = max(values.get("lag", 0.0), values["loop_age"])
        kind = RoleId.parse(role).kind.value
        return self.add(t, ev.RoleSample(role=role, incarnation=incarnation, phase=phase, **values), AGENT.get(kind, "node_agent-1"))

    def tick(self, t: float, incarnation: int = 1) -> list[ev.Verdict]:
        return self.add(t, ev.Tick(), "supervisor", incarnation)

    def beat(self, t: float, role: str = "rollout-0", number: int = 1, incarnation: int = 1) -> list[ev.Verdict]:
        return self.add(t, ev.HeartbeatSent(role=role, incarnation=1, number=number), "supervisor", incarnation)

    def answer(self, t: float, role: str = "rollout-0", number: int = 1) -> list[ev.Verdict]:
        return self.add(t, ev.HeartbeatAnswered(role=role, incarnation=1, number=number), role)

    def said(self) -> list[tuple[str, str, str]]:
        return [(v.role, v.kind, v.rule) for v in self.verdicts]


def exited(role: str, incarnation: int = 1, **fields: Any) -> ev.ProcessExited:
    return ev.ProcessExited(role=role, incarnation=incarnation, pid=7, cause="pidfd", last_lines=["a", "b"], **fields)


# -- the end of a process ---


@pytest.mark.parametrize("role", [k.value if k.value in ("task_runner", "request_manager") else f"{k.value}-0" for k in RoleKind
                                  if k not in (RoleKind.SUPERVISOR, RoleKind.ROLLOUT_MANAGER)])  # fmt: skip
def test_the_end_of_any_role_is_said_at_once_and_once(role):
    log = Log(role)
    (verdict,) = log.add(20.0, exited(role))
    assert (verdict.role, verdict.incarnation, verdict.kind, verdict.rule) == (role, 1, "failed", "exited")
    assert (verdict.due, verdict.seen) == (20.0, 20.0) and verdict.onset <= 20.0
    assert verdict.evidence["last_lines"] == ["a", "b"] and verdict.blind_spot
    assert log.add(20.1, exited(role)) == []


def test_an_error_goes_before_the_exit_that_follows():
    log = Log("trainer-0")
    log.add(20.0, ev.ErrorRaised(role="trainer-0", incarnation=1, error="OSError", text="no space"))
    log.add(20.1, exited("trainer-0"))
    assert log.said() == [("trainer-0", "failed", "exception")]
    assert log.verdicts[0].evidence["text"] == "no space"


def test_a_loss_that_is_no_number_is_reported_and_only_the_exit_fails():
    log = Log("trainer-0")
    log.add(20.0, ev.ErrorRaised(role="trainer-0", incarnation=1, error="TrainingError", text="loss = nan"))
    assert log.said() == [("trainer-0", "reported", "non_finite")]
    log.add(20.1, exited("trainer-0"))
    assert log.said()[1:] == [("trainer-0", "failed", "exited")]
    other = Log("trainer-0")
    other.add(20.0, ev.StepMetrics(step=1, values={"loss": float("inf"), "reward": 1.0}, phase_seconds={}))
    assert other.said() == [("trainer-0", "reported", "non_finite")] and "loss" in other.verdicts[0].evidence["text"]


def test_a_lost_node_takes_its_roles_and_nobody_else():
    log = Log("rollout-0", "rollout-2", "agent_worker-0")
    log.add(9.0, ev.NodeLost(node="node-0", reason="health check"))
    assert {v.role for v in log.verdicts} == {"rollout-0", "agent_worker-0"} and {v.rule for v in log.verdicts} == {"node_lost"}


def test_words_of_an_earlier_life_condemn_nobody():
    log = Log("rollout-0")
    log.add(5.0, exited("rollout-0"))
    log.start("rollout-0", 6.0, incarnation=2)
    log.add(7.0, exited("rollout-0", incarnation=1))
    log.sample(7.5, "rollout-0", "decode", incarnation=1, progress_age=99.0)
    assert log.said() == [("rollout-0", "failed", "exited")]
    log.add(8.0, exited("rollout-0", incarnation=2))
    assert log.verdicts[-1].incarnation == 2, "two failures of one role in a row are two verdicts"


@pytest.mark.parametrize("state", ["stopped", "retired", "restarting"])
def test_an_end_that_was_wanted_is_no_failure(state):
    log = Log("rollout-0")
    log.add(5.0, ev.RoleStateChanged(role="rollout-0", incarnation=1, old="healthy", new=state, reason="drained"))
    assert log.add(6.0, exited("rollout-0")) == []


def test_after_the_end_of_the_job_nothing_is_said():
    log = Log("rollout-0")
    log.add(5.0, ev.EndDecided(status="done", reason="all steps"))
    assert log.add(6.0, exited("rollout-0")) == [] and log.detector.next_deadline() is None


def test_a_role_that_is_not_ready_in_time():
    log = Log()
    log.start("rollout-0", 10.0, ready=False)
    assert log.detector.next_deadline() == 10.0 + LAB.job.start
    (verdict,) = log.tick(10.0 + LAB.job.start)
    assert (verdict.role, verdict.rule, verdict.due) == ("rollout-0", "start", 250.0)


# -- trainers ---


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


# -- rollouts ---


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


# -- watchers, the whole job, reports ---


def test_an_agent_that_watches_and_says_nothing():
    log = Log("trainer-0")
    assert log.detector.next_deadline() == LAB.job.stall, "it watches nobody yet"
    log.sample(10.0, "trainer-0", "waiting_batch")
    (verdict,) = log.tick(15.0)
    assert (verdict.role, verdict.rule, verdict.due) == ("node_agent-1", "agent_silent", 15.0)


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


def test_a_broken_connection_is_reported_about_the_other_side():
    log = Log("rollout-0", "rollout-1")
    gone = ev.PeerGone(role="rollout-1", incarnation=1, peer="rollout-0", peer_incarnation=1, error="reset")
    (verdict,) = log.add(10.0, gone, "rollout-1")
    assert (verdict.role, verdict.kind, verdict.rule, verdict.evidence["seen_by"]) == ("rollout-0", "reported", "peer_gone", "rollout-1")


# -- settings, the log, the table ---


def changed(new: Thresholds) -> ev.ThresholdsChanged:
    return ev.ThresholdsChanged(thresholds=new.to_dict(), changes=LAB.changes(new))


def test_a_changed_setting_holds_from_its_entry_on():
    log = Log("rollout-0")
    log.sample(12.0, "rollout-0", "decode", progress_age=2.5)
    assert log.said() == []
    new = LAB.replace("rollout.heartbeat", "1s").replace("rollout.no_tokens", "2s")
    (verdict,) = log.add(12.1, changed(new))
    assert (verdict.rule, verdict.threshold) == ("no_tokens", 2.0)
    assert 2.0 in log.detector.marks()["rollout-0"]


def test_marks_are_the_limits_of_the_kind_with_grace_at_the_start():
    log = Log("trainer-0", "rollout-0", "task_runner")
    assert log.detector.marks()["rollout-0"] == (3.0, 5.0, 30.0)
    log.sample(10.0, "rollout-0", "decode")
    assert log.detector.marks()["rollout-0"] == (3.0, 5.0)
    assert log.detector.marks()["task_runner"] == (1.0, 5.0)
    assert log.detector.marks()["trainer-0"] == (3.0, 5.0, 10.0, 30.0)


def test_what_a_former_supervisor_did_not_write_is_known_to_the_next():
    log = Log("rollout-0", "trainer-0")
    log.add(10.0, exited("rollout-0"))
    log.add(10.1, log.verdicts[0], "supervisor")
    log.add(10.2, exited("trainer-0"))
    fresh = Detector(LAB)
    assert list(judge(fresh, log.entries)) == log.verdicts
    assert fresh.unrecorded() == log.verdicts[1:]


def test_time_does_not_run_backwards():
    log = Log("rollout-0")
    log.tick(10.0)
    with pytest.raises(ValueError, match="decided up to 10"):
        log.tick(9.0)


def test_the_table_of_rules_is_whole():
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule.blind_spot and rule.source and rule.sign.__doc__, rule.name
        if rule.setting and "*" not in rule.setting and "{" not in rule.setting:
            assert rule.setting in PATHS, rule.name
    covered: set[RoleKind] = set().union(*(rule.kinds for rule in RULES if rule.name in ("silent", "wedged", "agent_silent")))
    assert covered == set(RoleKind) - {RoleKind.SUPERVISOR}, "each role that lives and does nothing has a rule"


def test_relative_settings_start_from_their_floor():
    assert Thresholds.relative().job.stall == Relative(4.0, LAB.job.stall)
