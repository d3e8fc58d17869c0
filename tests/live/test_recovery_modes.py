"""How a failure is answered: by nobody, by the next life of the failed role, by a full restart; and what the user orders."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

import robustrl
from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.errors import ConfigError
from robustrl.faults import Kill
from robustrl.job import Job
from tests.live.conftest import assert_clean, wait_for

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    settings = {"profile": "class", "steps": 100_000, "prompts_per_step": 4, "agent_workers": 1, "evaluation_prompts": 0, "restarts": 9}
    with robustrl.launch(name="modes", run_dir=str(tmp_path_factory.mktemp("runs")), **settings) as job:
        job.wait(step=2, timeout=240)
        yield job
    assert_clean(job.run)


def kill(job: Job, role: str) -> None:
    os.kill(job.roles[role].pid, signal.SIGKILL)


def healthy(job: Job, role: str, incarnation: int) -> bool:
    return job.roles[role].incarnation == incarnation and job.roles[role].state == "healthy"


def test_observe_leaves_a_dead_rollout_dead_and_its_work_waits_or_goes_to_others(job: Job) -> None:
    job.recovery.mode = "observe"
    assert job.recovery.mode == "observe"
    with pytest.raises(ConfigError, match="isolated"):
        job.recovery.mode = "whatever"
    before = job.roles["rollout-0"].incarnation
    kill(job, "rollout-0")
    wait_for("the verdict", lambda: job.roles["rollout-0"].state == "failed", 60)
    job.wait(step=job.step + 3, timeout=120)
    assert job.roles["rollout-0"].incarnation == before
    job.recovery.mode = "isolated"
    wait_for("its next life, now that the mode allows it", lambda: healthy(job, "rollout-0", before + 1), 120)


def test_full_restarts_everything_from_the_last_snapshot(job: Job) -> None:
    job.recovery.mode = "full"
    pids = {name: handle.pid for name, handle in job.roles.items()}
    step = job.step
    fault = job.inject(Kill("rollout-1"))  # the agent that does it is ended by the restart that answers it
    wait_for("all roles in new processes", lambda: all(
        handle.pid != pids[name] and handle.state == "healthy" for name, handle in job.roles.items()), 180)
    job.recovery.mode = "isolated"
    job.wait(step=max(step, job.step) + 3, timeout=180)
    decided = [e.event for e in job.events if isinstance(e.event, ev.RestartDecided) and e.event.mode == "full"]
    assert {event.role for event in decided} == set(pids) and len(decided) == len(pids)
    assert [(hit.role, hit.pid) for hit in fault.view.hits] == [("rollout-1", pids["rollout-1"])], "its proof came before that"


def test_a_restart_and_a_drain_by_order(job: Job) -> None:
    before = job.roles["rollout-0"].incarnation
    assert job.roles["rollout-0"].restart() == before
    wait_for("the ordered life", lambda: healthy(job, "rollout-0", before + 1), 120)
    assert job.roles["rollout-1"].drain() == job.roles["rollout-1"].incarnation
    wait_for("the drained one to be stopped", lambda: job.roles["rollout-1"].state == "stopped", 60)
    with pytest.raises(robustrl.JobFailed, match="last rollout"):
        job.roles["rollout-0"].drain()
    job.wait(step=job.step + 2, timeout=120)
    incarnation = job.roles["rollout-1"].restart()
    wait_for("the drained one to be back", lambda: healthy(job, "rollout-1", incarnation + 1), 120)


def test_the_last_rollout_dies_and_the_job_waits_and_goes_on(job: Job) -> None:
    lives = {role: job.roles[role].incarnation for role in ("rollout-0", "rollout-1")}
    for role in lives:
        kill(job, role)
    wait_for("both to be back", lambda: all(healthy(job, role, life + 1) for role, life in lives.items()), 180)
    job.wait(step=job.step + 2, timeout=120)


def test_the_log_passes_the_audit(job: Job) -> None:
    job.pause()
    time.sleep(1.0)
    job.stop()
    assert audit(job.events) == []
