"""Each role is killed in a running job, one after the other: it alone comes back, and the job goes on as if nothing had been lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import robustrl
from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.job import Job
from tests.live.conftest import assert_clean, wait_for

_ROLES = [
    "rollout-0",
    "trainer-0",
    "state_keeper-0",
    "request_manager",
    "rollout_manager",
    "task_runner",
    "agent_worker-0",
    "supervisor",
    "node_agent-0",
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    settings = {
        "profile": "class",
        "steps": 100_000,
        "prompts_per_step": 4,
        "agent_workers": 1,
        "evaluation_prompts": 8,
        "evaluation_every": 5,
    }
    with robustrl.launch(name="mortal", run_dir=str(tmp_path_factory.mktemp("runs")), **settings) as job:
        job.wait(step=2, timeout=240)
        yield job
    assert_clean(job.run)


def kill(job: Job, role: str) -> dict[str, int]:
    """SIGKILL; returns the pids of all roles just before."""
    pids = {name: handle.pid for name, handle in job.roles.items()}
    os.kill(pids[role], signal.SIGKILL)
    return pids


@pytest.mark.parametrize("role", _ROLES)
def test_a_killed_role_comes_back_alone(job: Job, role: str) -> None:
    incarnation, step = job.roles[role].incarnation, job.step
    pids = kill(job, role)
    wait_for(f"the next life of {role}", lambda: job.roles[role].incarnation == incarnation + 1 and job.roles[role].state == "healthy", 120)
    job.wait(step=max(step, job.step) + 2, timeout=120)
    assert {name for name, handle in job.roles.items() if handle.pid != pids[name]} == {role}


def test_a_supervisor_that_is_stopped_for_good_is_found_and_replaced(job: Job) -> None:
    """It judges all others; the host judges it, by the same limit."""
    before = job.thresholds.management.silent
    job.thresholds.update({"management.lag": "2s", "management.silent": "4s"})
    handle = job.roles["supervisor"]
    incarnation, pid, stopped = handle.incarnation, handle.pid, time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    wait_for("its next life", lambda: handle.incarnation == incarnation + 1 and handle.state == "healthy", 60)
    said = [e for e in job.events if isinstance(e.event, ev.Verdict) and (e.event.role, e.event.incarnation) == ("supervisor", incarnation)]
    assert [(e.source, e.event.kind, e.event.rule) for e in said] == [("host", "failed", "silent")], "once, and by the host"
    assert stopped + 4.0 - 0.15 <= said[0].t < stopped + 6.0, "the last stamp is at most 0.1 s old"
    assert f"process {pid}, state T" in (job.run_dir / "evidence" / f"supervisor.{incarnation}.txt").read_text()
    job.wait(step=job.step + 1, timeout=120)
    job.thresholds.update({"management.silent": before, "management.lag": "5s"})


def test_the_second_death_of_the_same_role(job: Job) -> None:
    incarnation = job.roles["rollout-0"].incarnation
    kill(job, "rollout-0")
    wait_for("the next life of rollout-0", lambda: job.roles["rollout-0"].incarnation == incarnation + 1, 60)
    kill(job, "rollout-0")
    wait_for(
        "the life after that",
        lambda: job.roles["rollout-0"].incarnation == incarnation + 2 and job.roles["rollout-0"].state == "healthy",
        120,
    )
    job.wait(step=job.step + 2, timeout=120)


def test_two_roles_die_at_once(job: Job) -> None:
    step = job.step
    kill(job, "trainer-0")
    kill(job, "request_manager")
    wait_for(
        "both to be back",
        lambda: all(job.roles[role].state == "healthy" for role in ("trainer-0", "request_manager")) and job.step > step,
        150,
    )
    job.wait(step=job.step + 2, timeout=120)


def test_the_log_of_all_that_passes_the_audit(job: Job) -> None:
    job.pause()
    time.sleep(1.0)
    job.stop()
    entries = job.events
    assert audit(entries) == []
    steps = [e.event.step for e in entries if isinstance(e.event, ev.OptimizerStepCommitted)]
    assert steps == list(range(len(steps))), "each step is committed once, in order"
    restarts = {e.event.role for e in entries if isinstance(e.event, ev.RestartDecided)}
    assert restarts == set(_ROLES)
    assert {e.event.status for e in entries if isinstance(e.event, ev.RunEnded)} == {"stopped"}
    assert Path(job.run_dir, "summary.json").exists()


def test_the_model_goes_on_bit_for_bit_from_the_keepers_snapshot(launch: Callable[..., Job]) -> None:
    """The trainer's next life publishes the digest that the keeper had: nothing was lost or done twice."""
    job = launch(steps=100_000, evaluation_prompts=0, rollouts=1, agent_workers=1)
    job.wait(step=2, timeout=240)
    job.pause()
    time.sleep(1.0)
    before = [e.event for e in job.events if isinstance(e.event, ev.OptimizerStepCommitted)][-1]
    kill(job, "trainer-0")
    kill(job, "state_keeper-0")
    wait_for(
        "both to be back",
        lambda: all(job.roles[role].incarnation == 2 and job.roles[role].state == "healthy" for role in ("trainer-0", "state_keeper-0")),
        120,
    )
    again = [e.event for e in job.events if isinstance(e.event, ev.VersionAnnounced)][-1]
    assert (again.version, again.digest, again.incarnation) == (before.version, before.digest, 2)
    job.resume()
    job.wait(step=before.step + 2, timeout=120)


@pytest.mark.timeout(240)
def test_of_two_ranks_only_the_dead_one_is_replaced(launch: Callable[..., Job]) -> None:
    job = launch(steps=100_000, trainer_ranks=2, evaluation_prompts=0, rollouts=1, agent_workers=1)
    job.wait(step=2, timeout=240)
    for rank, other in (("trainer-1", "trainer-0"), ("trainer-0", "trainer-1")):
        step, incarnation = job.step, job.roles[rank].incarnation
        pids = kill(job, rank)
        wait_for(f"the next life of {rank}", lambda r=rank, n=incarnation + 1: job.roles[r].incarnation == n, 60)
        job.wait(step=step + 3, timeout=120)
        assert job.roles[other].pid == pids[other], "the surviving rank stays"
        assert job.roles[rank].state == job.roles[other].state == "healthy"
    restored = [e.event for e in job.events.of(ev.SnapshotRestored)]
    for one, two in zip(restored[::2], restored[1::2], strict=True):
        assert {one.role, two.role} == {"trainer-0", "trainer-1"}
        assert (one.step, one.digest) == (two.step, two.digest), "both go on from the same bytes"
    job.pause()
    time.sleep(1.0)
    job.stop()
    assert audit(job.events) == []
