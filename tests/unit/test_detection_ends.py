"""The end of a role: its process, its node, its own last word."""

from __future__ import annotations

import pytest
from detection_log import LAB, Log, exited

from robustrl.core import events as ev
from robustrl.core.roles import RoleKind


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


def test_who_is_ended_with_all_others_has_not_failed_but_the_one_that_they_end_for_has():
    """The successor of the supervisor, which is ended too, finds all their exits in the log."""
    log = Log("trainer-0", "rollout-0")
    log.add(20.0, exited("trainer-0"))
    for role in ("trainer-0", "rollout-0"):
        log.add(20.1, ev.RestartDecided(role=role, incarnation=1, reason="why", mode="full"))
    log.add(20.2, exited("rollout-0"))
    assert log.said() == [("trainer-0", "failed", "exited")]
    alone = Log("trainer-0", "rollout-0")
    alone.add(20.0, ev.RestartDecided(role="trainer-0", incarnation=1, reason="why"))
    alone.add(20.2, exited("rollout-0"))
    assert alone.said() == [("rollout-0", "failed", "exited")]


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
