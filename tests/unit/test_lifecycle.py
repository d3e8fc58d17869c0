"""The supervisor's decisions on a log that is made up entry by entry."""

from __future__ import annotations

import pytest

from robustrl.core import events as ev
from robustrl.core.lifecycle import Lifecycle


class Log:
    """Feeds a Lifecycle, its own decisions included, as the live supervisor does."""

    def __init__(self, steps: int = 2, evaluation_prompts: int = 8, restarts: int = 0, standbys: int = 0) -> None:
        self.entries: list[ev.Entry] = []
        self.lifecycle = Lifecycle()
        config = {"steps": steps, "evaluation_prompts": evaluation_prompts, "restarts": restarts, "standbys": standbys}
        self.add(ev.RunStarted(schema=1, run="r", name="n", wall=0.0, host_pid=1, config=config, machine={}))

    def add(self, event: ev.Event) -> list[ev.Event]:
        self._feed(event)
        return self.decide()

    def decide(self) -> list[ev.Event]:
        due = self.lifecycle.decide()
        for decision in due:
            self._feed(decision)
        return due

    def _feed(self, event: ev.Event) -> None:
        entry = ev.Entry(len(self.entries) + 1, float(len(self.entries)), "host", 1, len(self.entries) + 1, 0.0, event)
        self.entries.append(entry)
        self.lifecycle.feed(entry)

    def start(self, role: str, incarnation: int = 1) -> list[ev.Event]:
        self.add(ev.RoleStarted(role=role, incarnation=incarnation, node="node-0", pid=7, start_ticks=1))
        return self.add(ev.RoleReady(role=role, incarnation=incarnation, seconds=1.0))

    def committed(self, role: str, version: int = 0, incarnation: int = 1) -> list[ev.Event]:
        return self.add(
            ev.PullCommitted(
                source="state_keeper-0",
                target=role,
                incarnation=incarnation,
                version=version,
                digest="d",
                bytes=1,
                seconds=0.1,
                commit_seconds=0.1,
                transport="tcp",
                lag=1,
                probe_gap=0.0,
                address="",
            )
        )

    def step(self, step: int) -> list[ev.Event]:
        return self.add(
            ev.OptimizerStepCommitted(
                step=step,
                version=step,
                digest="d",
                snapshot_digest="s",
                consumed=[],
                batch=step,
                bytes=1,
                holder="state_keeper-0",
                incarnation=1,
            )
        )

    def measured(self, step: int) -> list[ev.Event]:
        return self.add(ev.StepMetrics(step=step, values={}, phase_seconds={}))

    def evaluated(self, version: int) -> list[ev.Event]:
        return self.add(ev.EvaluationDone(version=version, prompts=8, accuracy=0.5, samples=[]))


def states(events: list[ev.Event]) -> list[tuple[str, str, str]]:
    return [(e.role, e.old, e.new) for e in events if isinstance(e, ev.RoleStateChanged)]


def test_a_rollout_is_stale_until_it_committed_a_version() -> None:
    log = Log()
    assert states(log.start("rollout-0")) == [("rollout-0", "starting", "stale")]
    assert states(log.committed("rollout-0")) == [("rollout-0", "stale", "healthy")]
    assert log.committed("rollout-0", 1) == []


def test_other_roles_are_healthy_when_ready() -> None:
    assert states(Log().start("trainer-0")) == [("trainer-0", "starting", "healthy")]


@pytest.mark.parametrize("phase", ["decode", ""])
def test_a_death_fails_the_role_and_ends_the_job_with_its_reason(phase: str) -> None:
    log = Log()
    log.start("rollout-1")
    if phase:
        log.add(
            ev.RoleSample(role="rollout-1", incarnation=1, phase=phase, progress=0, pending=0, step=0, version=0, loop_age=0.0, cpu=0.0)
        )
    changed, end = log.add(ev.ProcessExited(role="rollout-1", incarnation=1, pid=7, cause="pidfd", last_lines=["boom"]))
    assert states([changed]) == [("rollout-1", "stale", "failed")]
    assert end.status == "failed"
    assert "rollout-1" in end.reason and "boom" in end.reason and (phase or "while starting") in end.reason
    assert log.step(1) == [], "after the end nothing more is decided"


def test_a_late_word_of_an_earlier_life_changes_nothing() -> None:
    log = Log()
    log.start("rollout-0", incarnation=2)
    assert log.add(ev.ProcessExited(role="rollout-0", incarnation=1, pid=3, cause="pidfd", last_lines=[])) == []
    assert log.committed("rollout-0", incarnation=1) == []


def test_a_lost_node_fails_every_role_on_it() -> None:
    log = Log()
    log.start("trainer-0")
    log.start("state_keeper-0")
    due = log.add(ev.NodeLost(node="node-0", reason="raylet exited"))
    assert [new for _, _, new in states(due)] == ["failed", "failed"]
    assert due[-1].status == "failed" and "node-0" in due[-1].reason


def test_a_refused_version_ends_the_job_and_names_the_gap() -> None:
    log = Log()
    log.start("rollout-0")
    [end] = log.add(ev.VersionRefused(role="rollout-0", incarnation=1, version=3, probe_gap=0.6, limit=0.001))
    assert end.status == "failed" and "version 3" in end.reason and "0.6" in end.reason


def test_an_error_that_a_role_reports_before_it_exits_is_the_reason_of_the_end() -> None:
    log = Log(restarts=3)
    log.start("rollout_manager")
    assert log.add(ev.ErrorRaised(role="rollout_manager", incarnation=1, error="RewardError", text="reward function f raised")) == []
    *_, end = log.add(ev.ProcessExited(role="rollout_manager", incarnation=1, pid=7, cause="pidfd", last_lines=[]))
    assert end.status == "failed"
    first, second, *_ = end.reason.splitlines()
    assert (first, second) == ("reward function f raised", "RewardError, met by rollout_manager (pid 7, node-0)")  # who is not at fault


@pytest.mark.parametrize("cause", ["pidfd", "memory", "its address space is gone"])
def test_how_an_end_was_noticed_is_not_what_people_read(cause: str) -> None:
    log = Log(restarts=0)
    log.start("agent_worker-0")
    changed, end = log.add(ev.ProcessExited(role="agent_worker-0", incarnation=1, pid=7, cause=cause, last_lines=[]))
    assert changed.reason == "its process ended"
    assert end.reason.startswith("agent_worker-0 (pid 7, node-0) died while starting: its process ended\n")


def killed(role: str, incarnation: int = 1) -> ev.ProcessExited:
    return ev.ProcessExited(role=role, incarnation=incarnation, pid=7, cause="pidfd", last_lines=[])


def test_a_failed_role_is_restarted_alone_and_begins_its_next_life_restarting() -> None:
    log = Log(restarts=1)
    log.start("request_manager")
    changed, decided = log.add(killed("request_manager"))
    assert states([changed]) == [("request_manager", "healthy", "failed")]
    assert (decided.role, decided.incarnation) == ("request_manager", 1)
    assert states(log.start("request_manager", incarnation=2)) == [("request_manager", "restarting", "healthy")]


def test_the_restart_budget_is_per_role_and_then_the_job_ends() -> None:
    log = Log(restarts=1)
    for role in ("agent_worker-0", "agent_worker-1"):
        log.start(role)
        assert isinstance(log.add(killed(role))[-1], ev.RestartDecided)
    log.start("agent_worker-0", incarnation=2)
    end = log.add(killed("agent_worker-0", incarnation=2))[-1]
    assert end.status == "failed" and "budget of 1" in end.reason


def test_of_two_ranks_only_the_dead_one_is_replaced() -> None:
    log = Log(steps=9, restarts=3)
    log.start("trainer-0")
    log.start("trainer-1")
    log.step(1)
    assert [e.role for e in log.add(killed("trainer-1")) if isinstance(e, ev.RestartDecided)] == ["trainer-1"]


def test_a_role_that_never_became_healthy_is_not_restarted() -> None:
    log = Log(restarts=3)
    log.add(ev.RoleStarted(role="trainer-0", incarnation=1, node="node-0", pid=7, start_ticks=1))
    end = log.add(killed("trainer-0"))[-1]
    assert end.status == "failed" and "never became healthy" in end.reason


def test_every_role_of_a_lost_node_comes_back() -> None:
    log = Log(restarts=3)
    for role in ("state_keeper-0", "trainer-0", "node_agent-0"):
        log.start(role)
    log.step(1)
    due = log.add(ev.NodeLost(node="node-0", reason="raylet exited"))
    assert {e.role for e in due if isinstance(e, ev.RestartDecided)} == {"state_keeper-0", "trainer-0", "node_agent-0"}


def test_done_needs_every_step_and_the_last_evaluation() -> None:
    log = Log(steps=2)
    assert log.evaluated(0) == [] and log.step(1) == [] and log.step(2) == [] and log.measured(2) == []
    [end] = log.evaluated(2)
    assert end.status == "done"


def test_done_without_evaluations_needs_the_last_step_and_its_metrics() -> None:
    """The task runner's last word on a step comes after the keeper's: a job that ended between them would lack it."""
    log = Log(steps=1, evaluation_prompts=0)
    assert log.step(1) == []
    [end] = log.measured(1)
    assert end.status == "done"


def test_a_restarted_supervisor_decides_nothing_twice() -> None:
    log = Log()
    log.start("rollout-0")
    log.committed("rollout-0")
    log.start("trainer-0")
    second = Lifecycle()
    for entry in log.entries:
        second.feed(entry)
    assert second.decide() == []


def test_a_restarted_supervisor_makes_up_for_what_the_first_did_not_say() -> None:
    log = Log()
    log.start("trainer-0")
    second = Lifecycle()
    for entry in log.entries:
        if not isinstance(entry.event, ev.RoleStateChanged):
            second.feed(entry)
    assert states(second.decide()) == [("trainer-0", "starting", "healthy")]


def verdict(role: str, kind: str, rule: str = "no_tokens", incarnation: int = 1, was: str = "suspect") -> ev.Verdict:
    return ev.Verdict(
        role=role,
        incarnation=incarnation,
        kind=kind,
        rule=rule,
        evidence={"pending": 3, "was": was},
        threshold=3.0,
        due=1.0,
        seen=1.1,
        onset=0.0,
        blind_spot="",
    )


def test_a_suspect_is_only_asked_and_may_be_cleared() -> None:
    log = Log(restarts=3)
    log.start("rollout-0")
    log.committed("rollout-0")
    assert states(log.add(verdict("rollout-0", "suspect"))) == [("rollout-0", "healthy", "suspect")]
    assert log.add(verdict("rollout-0", "cleared", "straggler", was="reported")) == [], "another rule's end is no end of the suspicion"
    assert states(log.add(verdict("rollout-0", "cleared"))) == [("rollout-0", "suspect", "healthy")]


def test_a_condemned_role_is_restarted_although_its_process_lives_and_its_end_is_no_news() -> None:
    log = Log(restarts=3)
    log.start("rollout-0")
    log.committed("rollout-0")
    changed, decided = log.add(verdict("rollout-0", "failed"))
    assert states([changed]) == [("rollout-0", "healthy", "failed")]
    assert isinstance(decided, ev.RestartDecided) and "no_tokens" in decided.reason
    assert log.add(killed("rollout-0")) == [], "the host killed it on this decision"


def test_reports_and_late_verdicts_change_nothing() -> None:
    log = Log(restarts=3)
    log.start("trainer-0", incarnation=2)
    assert log.add(verdict("trainer-0", "reported", "straggler", incarnation=2)) == []
    assert log.add(verdict("trainer-0", "failed", incarnation=1)) == []


def test_ranks_that_die_in_one_moment_are_restarted_once() -> None:
    """Two ranks of one step: neither is the other's second fault."""
    log = Log(restarts=3)
    for role in ("trainer-0", "trainer-1", "rollout-0", "agent_worker-0"):
        log.start(role)
    log.committed("rollout-0")
    log.step(1)
    for role in ("trainer-0", "agent_worker-0"):
        log._feed(ev.ProcessExited(role=role, incarnation=1, pid=7, cause="pidfd", last_lines=[]))
    due = log.add(ev.ProcessExited(role="trainer-1", incarnation=1, pid=7, cause="pidfd", last_lines=[]))
    assert [e.role for e in due if isinstance(e, ev.RestartDecided)] == ["trainer-0", "trainer-1", "agent_worker-0"]
    assert log.add(ev.ProcessExited(role="trainer-1", incarnation=1, pid=7, cause="Ray", last_lines=[])) == []
    assert {role for role, _, new in states(due) if new == "failed"} == {"trainer-0", "trainer-1", "agent_worker-0"}
