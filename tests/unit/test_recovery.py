"""What is done about failed roles: modes, escalation, budgets, standbys; on logs that are made up entry by entry."""

from __future__ import annotations

import pytest

from robustrl.core import events as ev
from robustrl.core.lifecycle import Lifecycle
from robustrl.core.recovery import Candidate, choose_standby
from robustrl.core.roles import RoleKind
from tests.unit.test_lifecycle import Log, killed, states

_ROLES = ("supervisor", "task_runner", "trainer-0", "rollout-0", "rollout-1")


def a_job(mode: str = "isolated", standbys: str = "cold", *, heavy: int = 0, steps: int = 1, restarts: int = 3) -> Log:
    log = Log(steps=99, restarts=restarts, standbys=heavy)
    log.add(ev.RecoverySettings(mode=mode, standbys=standbys))
    for role in (*_ROLES, *(f"standby-{i}" for i in range(heavy + 1 if heavy else 0))):
        log.start(role)
    for role in ("rollout-0", "rollout-1"):
        log.committed(role)
    for step in range(1, steps + 1):
        log.step(step)
    return log


def decisions(events: list[ev.Event]) -> dict[str, tuple[str, str]]:
    return {e.role: (e.mode, e.standby) for e in events if isinstance(e, ev.RestartDecided)}


def come_back(log: Log, role: str, incarnation: int) -> list[ev.Event]:
    due = log.start(role, incarnation)
    return due + (log.committed(role, incarnation=incarnation) if role.startswith("rollout") else [])


def test_observe_says_that_a_role_failed_and_leaves_it_dead_until_the_mode_is_another() -> None:
    log = a_job("observe")
    due = log.add(killed("rollout-0"))
    assert states(due) == [("rollout-0", "healthy", "failed")] and decisions(due) == {}
    assert decisions(log.add(ev.RecoverySettings(mode="isolated", standbys="cold"))) == {"rollout-0": ("isolated", "")}


def test_full_restarts_every_role_once_whoever_failed() -> None:
    log = a_job("full")
    assert decisions(log.add(killed("rollout-1"))) == dict.fromkeys(_ROLES, ("full", ""))
    assert decisions(log.add(killed("trainer-0"))) == {}, "the host ended it"


@pytest.mark.parametrize("steps", [0, 1])
def test_a_trainer_that_fails_in_the_first_step_has_everything_restarted(steps: int) -> None:
    due = decisions(a_job(steps=steps).add(killed("trainer-0")))
    assert due == (dict.fromkeys(_ROLES, ("full", "")) if steps == 0 else {"trainer-0": ("isolated", "")})


def test_a_rollout_that_fails_in_the_first_step_comes_back_alone() -> None:
    assert decisions(a_job(steps=0).add(killed("rollout-0"))) == {"rollout-0": ("isolated", "")}


def test_the_first_step_after_a_resumption_counts_as_a_first_one() -> None:
    log = a_job(steps=5)
    log.add(ev.RunResumed(wall=9.0, host_pid=2))
    for role in _ROLES:
        come_back(log, role, 2)
    assert set(decisions(log.add(killed("trainer-0", 2)))) == set(_ROLES)


def test_a_second_fault_in_the_same_step_has_everything_restarted_and_one_in_the_next_has_not() -> None:
    log = a_job(steps=3)
    log.add(killed("trainer-0"))
    come_back(log, "trainer-0", 2)
    assert decisions(log.add(killed("trainer-0", 2)))["rollout-0"] == ("full", "")
    log = a_job(steps=3)
    log.add(killed("trainer-0"))
    come_back(log, "trainer-0", 2)
    log.step(4)
    assert decisions(log.add(killed("trainer-0", 2))) == {"trainer-0": ("isolated", "")}


def test_a_restart_of_the_trainer_that_fails_is_made_again_and_then_all_are() -> None:
    log = a_job(steps=3)
    log.add(killed("trainer-0"))
    log.add(ev.RoleStarted(role="trainer-0", incarnation=2, node="node-0", pid=8, start_ticks=1))
    assert decisions(log.add(killed("trainer-0", 2))) == {"trainer-0": ("isolated", "")}
    log.add(ev.RoleStarted(role="trainer-0", incarnation=3, node="node-0", pid=9, start_ticks=1))
    assert set(decisions(log.add(killed("trainer-0", 3)))) == set(_ROLES)


def test_the_budget_counts_a_roles_own_failures_only_and_its_end_is_the_jobs() -> None:
    log = a_job("full", restarts=1)
    log.add(killed("rollout-0"))
    for role in _ROLES:
        come_back(log, role, 2)
    assert set(decisions(log.add(killed("rollout-1", 2)))) == set(_ROLES)
    for role in _ROLES:
        come_back(log, role, 3)
    end = log.add(killed("rollout-0", 3))[-1]
    assert end.status == "failed" and "budget of 1" in end.reason


def test_several_at_once_are_each_restarted() -> None:
    log = a_job()
    log._feed(killed("rollout-0"))
    log._feed(killed("task_runner"))
    assert set(decisions(log.add(killed("trainer-0")))) == {"rollout-0", "task_runner", "trainer-0"}


def test_a_fault_during_a_recovery_is_a_recovery_of_its_own() -> None:
    log = a_job()
    assert set(decisions(log.add(killed("trainer-0")))) == {"trainer-0"}
    assert decisions(log.add(killed("rollout-0"))) == {"rollout-0": ("isolated", "")}
    log.add(ev.RoleStarted(role="rollout-0", incarnation=2, node="node-0", pid=8, start_ticks=1))
    assert decisions(log.add(killed("rollout-0", 2))) == {"rollout-0": ("isolated", "")}


def test_the_last_rollout_comes_back_like_any_other() -> None:
    log = a_job()
    log.add(killed("rollout-0"))
    assert decisions(log.add(killed("rollout-1"))) == {"rollout-1": ("isolated", "")}


def test_a_warm_standby_takes_over_and_the_next_one_is_warmed_once_the_role_is_at_work() -> None:
    log = a_job(standbys="warm", heavy=1)
    due = log.add(killed("trainer-0"))
    assert decisions(due) == {"trainer-0": ("isolated", "standby-0")}
    assert states(log.decide()) == [("standby-0", "healthy", "stopped")]
    assert decisions(log.add(ev.RoleStarted(role="trainer-0", incarnation=2, node="node-0", pid=7, start_ticks=1))) == {}
    due = log.add(ev.RoleReady(role="trainer-0", incarnation=2, seconds=1.0)) + log.decide()
    assert decisions(due) == {"standby-0": ("isolated", "")}
    assert states(log.start("standby-0", 2)) == [("standby-0", "restarting", "healthy")]


def test_management_roles_have_the_light_standby_and_a_second_failure_finds_none() -> None:
    log = a_job(standbys="warm", heavy=1)
    assert decisions(log.add(killed("task_runner"))) == {"task_runner": ("isolated", "standby-1")}
    assert decisions(log.add(killed("supervisor"))) == {"supervisor": ("isolated", "")}


def test_a_full_restart_gives_each_standby_to_a_role_that_can_take_it() -> None:
    """Agents are there before anybody could take over from a standby on their node."""
    log = Log(steps=99, restarts=3, standbys=1)
    log.add(ev.RecoverySettings(mode="full", standbys="warm"))
    for role in ("node_agent-0", *_ROLES, "standby-0", "standby-1"):
        log.start(role)
    due = decisions(log.add(killed("trainer-0")))
    assert {role: standby for role, (_, standby) in due.items() if standby} == {"trainer-0": "standby-0", "supervisor": "standby-1"}
    assert "standby-0" not in due


def test_a_standby_that_dies_while_it_takes_over_is_followed_by_a_cold_start() -> None:
    log = a_job(standbys="warm", heavy=1)
    log.add(killed("trainer-0"))
    log.add(ev.RoleStarted(role="trainer-0", incarnation=2, node="node-0", pid=7, start_ticks=1))
    log.add(killed("standby-0"))
    due = log.add(killed("trainer-0", 2)) + log.decide()
    assert decisions(due)["trainer-0"] == ("isolated", "rollout-1"), "no standby is left: a rollout gives its place"
    assert decisions(due)["standby-0"] == ("isolated", "")


def test_a_rollout_gives_its_place_while_another_one_serves() -> None:
    log = a_job(standbys="warm")
    assert decisions(log.add(killed("trainer-0"))) == {"trainer-0": ("isolated", "rollout-1")}
    due = come_back(log, "trainer-0", 2) + log.decide()
    assert decisions(due) == {"rollout-1": ("isolated", "")}
    come_back(log, "rollout-1", 2)
    log.step(2)
    log.add(killed("rollout-0"))
    assert decisions(log.add(killed("trainer-0", 2))) == {"trainer-0": ("isolated", "")}, "the only one that serves stays"


def test_a_standby_that_dies_idle_is_replaced_within_its_budget_and_never_ends_the_job() -> None:
    log = a_job(heavy=1, restarts=1)
    assert decisions(log.add(killed("standby-0"))) == {"standby-0": ("isolated", "")}
    log.start("standby-0", 2)
    due = log.add(killed("standby-0", 2))
    assert decisions(due) == {} and not any(isinstance(e, ev.EndDecided) for e in due)


def test_what_the_user_orders() -> None:
    log = a_job()
    due = log.add(ev.RoleOrdered(role="rollout-0", incarnation=1, action="restart"))
    assert decisions(due) == {"rollout-0": ("isolated", "")}
    log = a_job()
    assert states(log.add(ev.RoleOrdered(role="rollout-0", incarnation=1, action="drain"))) == [("rollout-0", "healthy", "stopped")]
    assert log.add(killed("rollout-0")) == []
    [decided] = log.add(ev.RoleOrdered(role="rollout-0", incarnation=1, action="restart"))
    assert isinstance(decided, ev.RestartDecided) and decided.reason == "ordered by the user"
    log = a_job(restarts=0)
    assert decisions(log.add(ev.RoleOrdered(role="rollout-0", incarnation=1, action="restart"))) == {"rollout-0": ("isolated", "")}


def test_a_later_supervisor_decides_as_the_first_one_would_have() -> None:
    log = a_job(standbys="warm", heavy=1, steps=3)
    log.add(killed("trainer-0"))
    come_back(log, "trainer-0", 2)
    log.decide()
    second = Lifecycle()
    for entry in log.entries:
        second.feed(entry)
    assert second.decide() == []
    entry = ev.Entry(99, 99.0, "host", 1, 99, 0.0, killed("trainer-0", 2))
    second.feed(entry)
    log.lifecycle.feed(entry)
    assert second.decide() == log.lifecycle.decide()


_FREE = [
    Candidate("standby-0", RoleKind.STANDBY, "node-1", heavy=True),
    Candidate("standby-1", RoleKind.STANDBY, "node-2", heavy=True),
    Candidate("standby-2", RoleKind.STANDBY, "node-0"),
    Candidate("rollout-0", RoleKind.ROLLOUT, "node-2"),
    Candidate("rollout-1", RoleKind.ROLLOUT, "node-3"),
]


@pytest.mark.parametrize(
    ("kind", "node", "wanted"),
    [
        (RoleKind.TRAINER, "node-1", "standby-0"),
        (RoleKind.ROLLOUT, "node-2", "standby-1"),
        (RoleKind.ROLLOUT, "node-9", "standby-0"),
        (RoleKind.SUPERVISOR, "node-0", "standby-2"),
        (RoleKind.STATE_KEEPER, "node-1", ""),
        (RoleKind.STATE_KEEPER, "node-0", "standby-2"),
        (RoleKind.NODE_AGENT, "node-1", ""),
    ],
)
def test_who_takes_over(kind: RoleKind, node: str, wanted: str) -> None:
    assert choose_standby(kind, node, _FREE) == wanted
