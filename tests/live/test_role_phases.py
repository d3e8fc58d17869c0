"""Each role is killed in each of its phases, and a role is killed while another one recovers: the job goes on, and the log is right."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import robustrl
from robustrl.core.audit import audit
from robustrl.core.roles import PHASES, Phase, RoleId, RoleKind
from robustrl.errors import WaitTimeout
from robustrl.faults import Kill
from robustrl.job import Job
from tests.live.conftest import assert_clean, wait_for

_RARE = {Phase.WAITING_TOOL, Phase.TAKING_OVER, Phase.WARMING}
"""Phases that this job's roles do not come to by themselves."""
_CASES = [
    (str(RoleId(kind)), phase)
    for kind in RoleKind
    if kind is not RoleKind.STANDBY
    for phase in sorted(PHASES[kind] - _RARE)
]  # fmt: skip

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    settings = {"profile": "class", "steps": 100_000, "prompts_per_step": 4, "agent_workers": 1, "evaluation_prompts": 0, "restarts": 99}
    with robustrl.launch(name="phases", run_dir=str(tmp_path_factory.mktemp("runs")), **settings) as job:
        job.wait(step=2, timeout=240)
        yield job
    assert_clean(job.run)


@pytest.mark.parametrize(("role", "phase"), _CASES)
def test_a_role_is_killed_in_a_phase(job: Job, role: str, phase: Phase) -> None:
    step, incarnation = job.step, job.roles[role].incarnation
    fault = job.inject(Kill(role, phase=phase))
    try:
        wait_for("the kill", lambda: job.roles[role].incarnation > incarnation, 90)
    except pytest.fail.Exception:
        fault.abort()
        pytest.skip(f"{role} was never seen in phase {phase}")
    wait_for("its next life", lambda: job.roles[role].state == "healthy", 120)
    try:
        job.wait(step=max(step, job.step) + 2, timeout=180)
    except WaitTimeout as error:
        pytest.fail(f"after a kill of {role} in phase {phase}: {error}")


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
