"""Warm processes take failed roles over: a standby, or a rollout that gives its place to the trainer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

import robustrl
from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.job import Job
from tests.live.conftest import assert_clean, wait_for

pytestmark = pytest.mark.timeout(600)

_SETTINGS = {"profile": "class", "steps": 100_000, "prompts_per_step": 4, "agent_workers": 1, "evaluation_prompts": 0, "restarts": 9}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with robustrl.launch(name="warm", run_dir=str(tmp_path_factory.mktemp("runs")), **_SETTINGS, standbys=1) as job:
        job.wait(step=2, timeout=240)
        yield job
    assert_clean(job.run)


def kill(job: Job, role: str) -> int:
    incarnation = job.roles[role].incarnation
    os.kill(job.roles[role].pid, signal.SIGKILL)
    return incarnation


def healthy(job: Job, role: str, incarnation: int) -> bool:
    return job.roles[role].incarnation == incarnation and job.roles[role].state == "healthy"


def warm(job: Job) -> bool:
    return all(handle.state == "healthy" and handle.phase == "ready" for name, handle in job.roles.items() if name.startswith("standby"))


@pytest.mark.parametrize("role", ["trainer-0", "rollout-0", "task_runner", "supervisor", "request_manager", "rollout_manager"])
def test_a_standby_takes_a_role_over_in_its_own_process_and_another_one_is_warmed(job: Job, role: str) -> None:
    wait_for("the standbys to be warm", lambda: "standby-1" in job.roles and warm(job), 120)
    standby = "standby-0" if role.startswith(("trainer", "rollout-")) else "standby-1"
    pid, life = job.roles[standby].pid, job.roles[standby].incarnation
    incarnation, step = kill(job, role), job.step
    wait_for(f"the next life of {role}", lambda: healthy(job, role, incarnation + 1), 60)
    assert job.roles[role].pid == pid
    job.wait(step=max(step, job.step) + 2, timeout=120)
    wait_for("a new standby", lambda: healthy(job, standby, life + 1), 120)
    assert job.roles[standby].pid != pid


def test_cold_is_cold_although_a_standby_is_there(job: Job) -> None:
    wait_for("the standbys to be warm", lambda: warm(job), 120)
    job.recovery.standbys = "cold"
    pid = job.roles["standby-0"].pid
    incarnation = kill(job, "rollout-1")
    wait_for("the next life", lambda: healthy(job, "rollout-1", incarnation + 1), 120)
    assert job.roles["standby-0"].pid == pid != job.roles["rollout-1"].pid
    job.recovery.standbys = "warm"


@pytest.mark.soak
def test_a_full_restart_takes_its_standbys_and_has_new_ones_warmed(job: Job) -> None:
    wait_for("the standbys to be warm", lambda: warm(job), 120)
    job.recovery.mode = "full"
    standbys = {name: (handle.pid, handle.incarnation) for name, handle in job.roles.items() if name.startswith("standby")}
    before = {name: handle.pid for name, handle in job.roles.items() if name not in standbys}
    step = job.step
    kill(job, "trainer-0")
    wait_for("all roles in other processes", lambda: all(
        job.roles[name].pid != pid and job.roles[name].state == "healthy" for name, pid in before.items()), 180)
    job.recovery.mode = "isolated"
    assert job.roles["trainer-0"].pid == standbys["standby-0"][0] and job.roles["supervisor"].pid == standbys["standby-1"][0]
    wait_for("new standbys", lambda: all(healthy(job, name, life + 1) for name, (_, life) in standbys.items()), 120)
    job.wait(step=max(step, job.step) + 2, timeout=120)


def test_the_log_of_the_takeovers_passes_the_audit(job: Job) -> None:
    job.pause()
    time.sleep(1.0)
    job.stop()
    assert audit(job.events) == []


def test_a_rollout_gives_its_place_to_the_trainer(launch: Callable[..., Job]) -> None:
    job = launch(**_SETTINGS, recovery={"standbys": "warm"})
    job.wait(step=2, timeout=240)
    pid = job.roles["rollout-1"].pid
    incarnation, step = kill(job, "trainer-0"), job.step
    wait_for("the trainer in the rollout's process", lambda: healthy(job, "trainer-0", incarnation + 1), 60)
    assert job.roles["trainer-0"].pid == pid
    wait_for("a rollout in its place", lambda: healthy(job, "rollout-1", 2), 120)
    job.wait(step=step + 3, timeout=120)
    given = [e.event for e in job.events if isinstance(e.event, ev.RestartDecided) and e.event.standby]
    assert [(event.role, event.standby) for event in given] == [("trainer-0", "rollout-1")]
    job.pause()
    time.sleep(1.0)
    job.stop()
    assert audit(job.events) == []
