"""Each role is killed in each of its phases, and a role is killed while another one recovers: the job goes on, and the log is right."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import robustrl
from robustrl.core.audit import audit
from robustrl.core.roles import PHASES, Phase, RoleId, RoleKind
from robustrl.errors import WaitTimeout
from robustrl.faults import Hang, Kill
from robustrl.job import Job
from tests.live.conftest import assert_clean, wait_for

_CASES = [(str(RoleId(kind)), phase) for kind in RoleKind if kind is not RoleKind.STANDBY for phase in sorted(PHASES[kind])
          if (kind, phase) != (RoleKind.NODE_AGENT, Phase.IDLE)]  # once it is set up, an agent is never idle
_SEEN = 180.0
"""Seconds in which every phase of a role is met by a killer that looks out for it all the time."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    settings = {"profile": "class", "steps": 100_000, "prompts_per_step": 4, "agent_workers": 1, "evaluation_prompts": 0, "restarts": 99,
                "task": "arithmetic_tool", "task_options": {"tool_seconds": 0.05}, "standbys": 1,
                "recovery": {"standbys": "cold"}}  # fmt: skip
    with robustrl.launch(name="phases", run_dir=str(tmp_path_factory.mktemp("runs")), **settings) as job:
        job.wait(step=2, timeout=240)
        yield job
    assert_clean(job.run)


@pytest.mark.parametrize(("role", "phase"), _CASES)
def test_a_role_is_killed_in_a_phase(job: Job, role: str, phase: Phase) -> None:
    step, incarnation = job.step, job.roles[role].incarnation
    paused = (role, phase) == ("task_runner", Phase.IDLE)  # which it is only then
    if paused:
        job.pause()
    fault = job.inject(Kill(role, phase=phase))
    try:
        wait_for(f"{role} to be killed in phase {phase}", lambda: job.roles[role].incarnation > incarnation, _SEEN)
    except pytest.fail.Exception:
        fault.abort()
        raise
    wait_for("its next life", lambda: job.roles[role].state == "healthy", 120)
    if paused:
        job.resume()
    try:
        job.wait(step=max(step, job.step) + 2, timeout=180)
    except WaitTimeout as error:
        pytest.fail(f"after a kill of {role} in phase {phase}: {error}")


def test_a_standby_is_killed_while_it_is_ready_while_it_warms_up_and_while_it_takes_over(job: Job) -> None:
    for phase in (Phase.READY, Phase.WARMING):
        incarnation = job.roles["standby-0"].incarnation
        job.inject(Kill("standby-0", phase=phase))
        wait_for(f"the kill of a standby that is {phase}", lambda n=incarnation: job.roles["standby-0"].incarnation > n, 60)
    wait_for("the standby to be warm", lambda: job.roles["standby-0"].phase == Phase.READY, 60)
    job.recovery.standbys = "warm"
    fault = job.inject(Kill("standby-0", phase=Phase.TAKING_OVER))
    incarnation = job.roles["trainer-0"].incarnation
    job.roles["trainer-0"].kill()
    wait_for("the trainer, in whatever process", lambda: job.roles["trainer-0"].incarnation > incarnation
             and job.roles["trainer-0"].state == "healthy", 120)  # fmt: skip
    job.recovery.standbys = "cold"
    job.wait(step=job.step + 2, timeout=120)
    assert fault.view.hits and fault.view.hits[0].phase == Phase.TAKING_OVER


def test_a_supervisor_that_hangs_is_replaced(job: Job) -> None:
    job.thresholds.update({"management.lag": 1.0, "management.silent": 5.0})
    incarnation = job.roles["supervisor"].incarnation
    job.inject(Hang("supervisor"))
    wait_for("the next supervisor", lambda: job.roles["supervisor"].incarnation > incarnation, 60)
    job.wait(step=job.step + 2, timeout=120)
    job.thresholds.update({"management.lag": 5.0, "management.silent": 60.0})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("trainer-0", "rollout-0"),
        ("trainer-0", "state_keeper-0"),
        ("rollout-0", "rollout_manager"),
        ("request_manager", "task_runner"),
        ("supervisor", "trainer-0"),
    ],
)
def test_a_role_dies_while_another_one_recovers(job: Job, first: str, second: str) -> None:
    lives = {role: job.roles[role].incarnation for role in (first, second)}
    job.roles[first].kill()
    wait_for("the recovery", lambda: job.roles[first].state in ("failed", "restarting") or job.roles[first].incarnation > lives[first], 30)
    job.roles[second].kill()
    wait_for(
        "both to be back",
        lambda: all(job.roles[role].incarnation > life and job.roles[role].state == "healthy" for role, life in lives.items()),
        180,
    )
    job.wait(step=job.step + 2, timeout=180)


def test_the_log_of_all_that_passes_the_audit(job: Job) -> None:
    job.pause()
    time.sleep(1.0)
    job.stop()
    assert audit(job.events) == []
