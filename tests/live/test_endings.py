"""However a job ends, it says why, and nothing of it is left: no process, no shared memory, no folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import robustrl
from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.errors import JobFailed
from robustrl.job import Job
from robustrl.runtime import registry
from robustrl.runtime.event_log import read_log
from tests.live.conftest import assert_clean, wait_for

Launch = Callable[..., Job]
_LONG = {"steps": 100_000, "evaluation_prompts": 0}


def closing(run_dir: Path) -> ev.RunEnded:
    last = read_log(run_dir / "events.jsonl")[-1].event
    assert isinstance(last, ev.RunEnded)
    return last


def test_stop_ends_a_running_job_and_its_log_balances(launch: Launch) -> None:
    job = launch(**_LONG)
    job.wait(step=1, timeout=120)
    job.stop()
    assert_clean(job.run)
    assert job.status == "stopped"
    assert audit(read_log(job.run_dir / "events.jsonl")) == []


def test_stop_while_starting(launch: Launch) -> None:
    job = launch(**_LONG)
    time.sleep(2.0)
    job.stop()
    assert_clean(job.run)
    assert job.status == "stopped"


@pytest.mark.parametrize("role", ["rollout-1", "trainer-0", "request_manager", "state_keeper-0", "supervisor", "node_agent-0"])
def test_a_killed_role_ends_the_job_with_its_name(launch: Launch, role: str) -> None:
    job = launch(**_LONG)
    job.wait(step=1, timeout=120)
    os.kill(job.roles[role].pid, signal.SIGKILL)
    with pytest.raises(JobFailed, match=role):
        job.wait(timeout=30)
    assert_clean(job.run)
    assert closing(job.run_dir).status == "failed"
    assert audit(read_log(job.run_dir / "events.jsonl")) == []


def test_sigkill_of_the_host_leaves_nothing(launch: Launch) -> None:
    job = launch(**_LONG)
    job.wait(step=1, timeout=120)
    host = registry.find(job.name)
    assert host is not None
    os.kill(host.host_pid, signal.SIGKILL)
    assert_clean(job.run)
    with pytest.raises(JobFailed, match="host"):
        job.wait(timeout=30)


_KERNEL = """
import robustrl, time
job = robustrl.launch(name="orphan", profile="class", steps=100000, evaluation_prompts=0, run_dir={folder!r}, keep_alive={keep_alive})
job.wait(step=1, timeout=120)
print(job.run, job.run_dir, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("keep_alive", [False, True])
def test_sigkill_of_the_kernel_ends_the_job_unless_it_is_kept_alive(tmp_path: Path, keep_alive: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _KERNEL.format(folder=str(tmp_path), keep_alive=keep_alive)], stdout=subprocess.PIPE, text=True
    ) as kernel:
        assert kernel.stdout is not None
        run, run_dir = kernel.stdout.readline().split()
        kernel.kill()
    if keep_alive:
        time.sleep(3.0)
        job = robustrl.attach("orphan")
        step = job.wait(step=job.step + 1, timeout=60).step
        assert step > 1
        job.stop()
    assert_clean(run)
    assert closing(Path(run_dir)).status == "stopped"


def test_ctrl_c_of_the_demo_stops_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "robustrl", "demo", "--profile", "class", "--steps", "100000"]
    demo = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    entry = wait_for("the demo's job", lambda: next((job for job in registry.live_jobs() if job.owner_pid == demo.pid), None))
    job = robustrl.attach(entry.name)
    job.wait(step=1, timeout=120)
    os.killpg(demo.pid, signal.SIGINT)
    output, _ = demo.communicate(timeout=30)
    assert_clean(entry.run)
    assert demo.returncode == 130, output


def test_two_jobs_do_not_disturb_each_other(launch: Launch) -> None:
    first, second = launch(**_LONG), launch(**_LONG)
    first.wait(step=1, timeout=180)
    second.wait(step=1, timeout=180)
    first.stop()
    assert_clean(first.run)
    second.wait(step=second.step + 2, timeout=60)
    assert second.status == "running"


def test_launching_again_replaces_the_job_of_this_process(launch: Launch) -> None:
    first = launch(name="again", **_LONG)
    first.wait(step=1, timeout=120)
    second = launch(name="again", **_LONG)
    second.wait(step=1, timeout=180)
    assert first.status == "stopped" and second.run in first.reason
    assert_clean(first.run)
