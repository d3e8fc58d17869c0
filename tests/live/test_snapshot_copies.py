"""The copies of the trainer's state, each damaged in turn: the next one in the order is taken, aloud, and nothing is lost by it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import robustrl
from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.job import Job
from robustrl.runtime import registry
from tests.live.conftest import assert_clean, wait_for

_E = TypeVar("_E")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Three nodes, so that the peer keeper is on another one than the trainer."""
    settings = {"nodes": 3, "engine": "torch", "steps": 100_000, "prompts_per_step": 4, "agent_workers": 1, "evaluation_prompts": 0}
    with robustrl.launch(name="copies", run_dir=str(tmp_path_factory.mktemp("runs")), rollouts=1, restarts=9, **settings) as job:
        job.wait(step=2, timeout=240)
        yield job
    assert_clean(job.run)


def events(job: Job, kind: type[_E]) -> list[_E]:
    return [entry.event for entry in job.events if isinstance(entry.event, kind)]


def come_to_rest(job: Job) -> ev.OptimizerStepCommitted:
    """The last committed step, of which both copies are complete."""
    job.resume()
    job.wait(step=job.step + 2, timeout=120)
    job.pause()

    def rested() -> ev.OptimizerStepCommitted | None:
        last = events(job, ev.OptimizerStepCommitted)[-1]
        holders = {e.holder for e in events(job, ev.SnapshotCopied) if e.step == last.step and e.digest == last.snapshot_digest}
        return last if holders == {"state_keeper-1", "disk"} else None

    time.sleep(1.0)
    return wait_for("both copies of the last step", rested, 30)


def commits(job: Job, step: int) -> list[ev.OptimizerStepCommitted]:
    return [e for e in events(job, ev.OptimizerStepCommitted) if e.step == step]


def damage_slots(job: Job, keeper: str) -> None:
    for path in registry.shm_dir(job.run).glob(f"{keeper}.*.slot-*"):
        flip(path, 2_000_000)  # in the recovery state, behind the weights


def damage_checkpoints(job: Job) -> None:
    for path in Path(job.run_dir, "checkpoints").glob("step-*/*.distcp"):
        flip(path, path.stat().st_size // 2)


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def kill_trainer(job: Job) -> int:
    incarnation = job.roles["trainer-0"].incarnation
    os.kill(job.roles["trainer-0"].pid, signal.SIGKILL)
    return incarnation + 1


def restored(job: Job, incarnation: int) -> ev.SnapshotRestored:
    def found() -> ev.SnapshotRestored | None:
        return next((e for e in events(job, ev.SnapshotRestored) if e.role == "trainer-0" and e.incarnation == incarnation), None)

    return wait_for(f"trainer-0 incarnation {incarnation} to take up a state", found, 90)


def refused(job: Job, incarnation: int) -> list[str]:
    return [e.source for e in events(job, ev.SnapshotRefused) if e.role == "trainer-0" and e.incarnation == incarnation]


@pytest.mark.parametrize(("damaged", "source"), [([], "local"), (["local"], "peer"), (["local", "peer"], "disk")])
def test_a_damaged_copy_is_refused_and_the_next_one_taken(job: Job, damaged: list[str], source: str) -> None:
    last = come_to_rest(job)
    if "local" in damaged:
        damage_slots(job, "state_keeper-0")
    if "peer" in damaged:
        damage_slots(job, "state_keeper-1")
    incarnation = kill_trainer(job)
    state = restored(job, incarnation)
    assert (state.source, state.step, state.digest) == (source, last.step, last.snapshot_digest)
    assert refused(job, incarnation) == damaged
    wait_for("trainer-0", lambda: job.roles["trainer-0"].state == "healthy", 60)
    job.resume()
    job.wait(step=last.step + 3, timeout=120)
    assert not events(job, ev.RolledBack)


def test_a_keeper_without_shared_memory_refills_itself_from_its_peer(job: Job) -> None:
    last = come_to_rest(job)
    for path in registry.shm_dir(job.run).glob("state_keeper-0.*.slot-*"):
        path.unlink()
    incarnation = job.roles["state_keeper-0"].incarnation
    os.kill(job.roles["state_keeper-0"].pid, signal.SIGKILL)
    wait_for("state_keeper-0", lambda: job.roles["state_keeper-0"].incarnation == incarnation + 1, 60)
    wait_for("state_keeper-0", lambda: job.roles["state_keeper-0"].state == "healthy", 60)
    assert restored(job, kill_trainer(job)).source == "peer"
    job.resume()
    job.wait(step=last.step + 3, timeout=120)


def test_steps_that_no_copy_holds_are_done_again_from_the_journal(job: Job) -> None:
    """Only an older checkpoint is left: the trainer comes to the same weights, bit for bit."""
    last = come_to_rest(job)
    damage_slots(job, "state_keeper-0")
    damage_slots(job, "state_keeper-1")
    newest = sorted(Path(job.run_dir, "checkpoints").glob("step-*"))[-1]
    shutil.rmtree(newest)
    incarnation = kill_trainer(job)
    state = restored(job, incarnation)
    assert (state.source, state.step) == ("disk", last.step - 1)
    wait_for("trainer-0", lambda: job.roles["trainer-0"].state == "healthy", 60)
    [back] = events(job, ev.RolledBack)
    assert (back.old, back.to) == (last.step, last.step - 1)
    wait_for("the step's second commit", lambda: len(commits(job, last.step)) == 2, 60)
    assert {commit.snapshot_digest for commit in commits(job, last.step)} == {last.snapshot_digest}
    job.resume()
    job.wait(step=last.step + 2, timeout=120)


def test_a_disk_without_the_checkpoints_folder_costs_a_warning_and_no_step(job: Job) -> None:
    folder = Path(job.run_dir, "checkpoints")
    folder.rename(folder.with_name("moved away"))
    folder.write_bytes(b"")  # nothing can be written there
    try:
        job.wait(step=job.step + 3, timeout=120)
        assert any("copies in memory only" in e.text for e in events(job, ev.WarningRaised))
    finally:
        folder.unlink()
    job.wait(step=job.step + 3, timeout=120)
    wait_for("a checkpoint", lambda: list(folder.glob("step-*")), 30)


def test_when_every_copy_is_damaged_the_job_ends_and_says_what_is_wrong_with_each(job: Job) -> None:
    come_to_rest(job)
    damage_slots(job, "state_keeper-0")
    damage_slots(job, "state_keeper-1")
    damage_checkpoints(job)
    kill_trainer(job)
    wait_for("the end", lambda: job.status == "failed", 120)
    reason = events(job, ev.EndDecided)[-1].reason
    for word in ("cannot be restored", "local: the recovery state", "peer: the recovery state", "disk: ", "step-"):
        assert word in reason, reason
    assert audit(job.events) == []


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_the_job_goes_on_from_memory_without_its_run_directory(launch: Callable[..., Job]) -> None:
    job = launch(steps=100_000, evaluation_prompts=0, rollouts=1, agent_workers=1)
    job.wait(step=2, timeout=240)
    shutil.rmtree(job.run_dir)
    job.wait(step=job.step + 3, timeout=120)
    assert any("copies in memory only" in e.text for e in events(job, ev.WarningRaised))
    assert restored(job, kill_trainer(job)).source == "local"
    job.wait(step=job.step + 2, timeout=120)
