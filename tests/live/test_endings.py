"""However a job ends, it says why, and nothing of it is left: no process, no shared memory, no folder."""

from __future__ import annotations

import os
import shutil
import signal
import socket
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

pytestmark = pytest.mark.timeout(400)
Launch = Callable[..., Job]
_LONG = {"steps": 100_000, "evaluation_prompts": 0, "rollouts": 1, "agent_workers": 1}


def closing(run_dir: Path) -> ev.RunEnded:
    last = read_log(run_dir / "events.jsonl")[-1].event
    assert isinstance(last, ev.RunEnded)
    return last


def test_stop_while_starting(launch: Launch) -> None:
    job = launch(**_LONG)
    time.sleep(2.0)
    job.stop()
    assert_clean(job.run)
    assert job.status == "stopped"


def test_stop_while_joining_a_cluster_that_never_answers(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        job = launch(address=f"127.0.0.1:{deaf.getsockname()[1]}", keep_alive=False, **_LONG)
        wait_for("Ray's import", lambda: "_raylet" in Path(f"/proc/{job._entry.host_pid}/maps").read_text())
        time.sleep(2.0)  # for the connection
        begin = time.monotonic()
        job.stop()
        assert time.monotonic() - begin < 6.0 and job.status == "stopped"
        assert_clean(job.run)


@pytest.mark.parametrize(
    "role",
    [
        "rollout-0",
        "trainer-0",
        "supervisor",
        *(
            pytest.param(role, marks=pytest.mark.soak)
            for role in ("state_keeper-0", "node_agent-0", "task_runner", "rollout_manager", "request_manager", "agent_worker-0")
        ),
    ],
)
def test_without_restarts_a_killed_role_ends_the_job_with_its_name(launch: Launch, role: str) -> None:
    job = launch(restarts=0, **_LONG)
    job.wait(step=1, timeout=120)
    os.kill(job.roles[role].pid, signal.SIGKILL)
    with pytest.raises(JobFailed, match=role):
        job.wait(timeout=30)
    assert_clean(job.run)
    assert closing(job.run_dir).status == "failed"
    assert audit(read_log(job.run_dir / "events.jsonl")) == []


_KERNEL = """
import robustrl, time
job = robustrl.launch(name="orphan", profile="class", steps=100000, evaluation_prompts=0, rollouts=1, agent_workers=1,
                      run_dir={folder!r}, keep_alive={keep_alive})
job.wait(step=1, timeout=120)
print(job.run, job.run_dir, flush=True)
time.sleep(600)
"""


def _killed_kernel(folder: Path, *, keep_alive: bool) -> tuple[str, Path]:
    """Run and run directory of a job whose kernel was killed at its first optimizer step."""
    code = _KERNEL.format(folder=str(folder), keep_alive=keep_alive)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as kernel:
        assert kernel.stdout is not None
        run, run_dir = kernel.stdout.readline().split()
        kernel.kill()
    return run, Path(run_dir)


def test_sigkill_of_the_kernel_ends_the_job(tmp_path: Path) -> None:
    run, run_dir = _killed_kernel(tmp_path, keep_alive=False)
    assert_clean(run)
    assert closing(run_dir).status == "stopped" and "owner" in closing(run_dir).reason
    assert audit(read_log(run_dir / "events.jsonl")) == []


def test_a_job_kept_alive_outlives_its_kernel_and_sigkill_of_its_host_leaves_nothing(tmp_path: Path) -> None:
    run, _ = _killed_kernel(tmp_path, keep_alive=True)
    time.sleep(3.0)  # several times the host's look at its owner
    job = robustrl.attach("orphan")
    assert job.run == run
    job.wait(step=job.step + 2, timeout=60)
    host = registry.find("orphan")
    assert host is not None
    os.kill(host.host_pid, signal.SIGKILL)
    assert_clean(run)
    with pytest.raises(JobFailed, match="host"):
        job.wait(timeout=30)


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


def test_two_jobs_go_on_beside_each_other_a_new_launch_replaces_one_and_a_removed_run_directory_ends_none(launch: Launch) -> None:
    first, second = launch(name="first", **_LONG), launch(name="second", **_LONG)
    first.wait(step=1, timeout=180)
    second.wait(step=1, timeout=180)
    first.stop()
    assert_clean(first.run)
    assert first.status == "stopped"
    assert audit(read_log(first.run_dir / "events.jsonl")) == []

    second.wait(step=second.step + 2, timeout=60)
    assert second.status == "running"
    third = launch(name="second", **_LONG)
    third.wait(step=1, timeout=180)
    assert second.status == "stopped" and third.run in second.reason
    assert_clean(second.run)

    shutil.rmtree(third.run_dir, ignore_errors=True)  # a checkpoint may come into being meanwhile
    third.wait(step=third.step + 2, timeout=60)
    late = robustrl.attach("second")
    late.wait(step=third.step, timeout=60)
    told = [e.event.text for e in late.events if isinstance(e.event, ev.WarningRaised) and "was removed while the job runs" in e.event.text]
    assert len(told) == 1 and str(third.run_dir) in told[0] and late.config.steps == _LONG["steps"]
    third.stop()
    assert third.status == "stopped" and audit(third.events) == []
