"""A trainer that is killed again and again ends with the weights of one that never was, bit for bit.

The run keeps the trajectories that it trained on; a learner of its own is fed the same in the same order, without any fault.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.core.roles import Phase
from robustrl.job import Job
from robustrl.rl.trajectory import Trajectory
from robustrl.runtime import registry
from robustrl.runtime.status_page import StatusPage
from tests.live.conftest import wait_for

_SETTINGS = {"evaluation_prompts": 0, "rollouts": 1, "agent_workers": 1, "prompts_per_step": 8, "restarts": 100, "seed": 3}


def kill_in(job: Job, phase: Phase, delay: float) -> None:
    """SIGKILL, ``delay`` seconds after the trainer is seen in ``phase``."""
    incarnation, pid = job.roles["trainer-0"].incarnation, job.roles["trainer-0"].pid
    page = registry.temp_dir(job.run) / "status" / f"trainer-0.{incarnation}"
    deadline = time.monotonic() + 60
    while StatusPage.read(page).phase is not phase:
        assert time.monotonic() < deadline, f"trainer-0 was not seen in phase {phase} for 60 s"
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    wait_for(
        "the trainer's next life",
        lambda: job.roles["trainer-0"].incarnation == incarnation + 1 and job.roles["trainer-0"].state == "healthy",
        90,
    )


def without_faults(job: Job, steps: int) -> str:
    """Digest of the weights after the run's own batches."""
    from robustrl.config import load_config
    from robustrl.rl.learner import Learner
    from robustrl.rl.models import resolve_model
    from robustrl.transport.manifest import build_manifest, fill, layout_of

    config = load_config(Path(job.run_dir, "config.json"))
    learner = Learner(resolve_model(config.model), config.grpo, seed=config.seed, temperature=config.sampling.temperature)
    layout = layout_of(learner.weights())
    with sqlite3.connect(f"file:{job.run_dir}/journal.sqlite?mode=ro", uri=True) as db:
        for step in range(1, steps + 1):
            rows = db.execute("select body from trajectories where batch = ? and state = 'consumed' order by id", (step,)).fetchall()
            learner.train_step([msgspec.msgpack.decode(body, type=Trajectory) for (body,) in rows])
    buffer = np.zeros(layout.nbytes, np.uint8)
    fill(layout, learner.weights(), buffer)
    return "".join(build_manifest(steps, layout, buffer).chunks)


def trained_weights(job: Job, steps: int) -> str:
    from robustrl.runtime.checkpoint import checkpoints, load

    kept, _ = load(checkpoints(Path(job.run_dir, "checkpoints"))[0])
    [committed] = [e.event for e in job.events if isinstance(e.event, ev.OptimizerStepCommitted) and e.event.step == steps]
    assert (kept.step, kept.digest) == (steps, committed.snapshot_digest)
    return "".join(kept.manifest.chunks)


def run(launch: Callable[..., Job], moments: list[tuple[Phase, float]]) -> None:
    steps = len(moments) + 2
    assert steps <= 16, "the journal keeps no more"
    job = launch(steps=steps, **_SETTINGS)
    job.wait(step=1, timeout=240)
    for phase, delay in moments:
        kill_in(job, phase, delay)
    job.wait(timeout=240)
    assert job.status == "done"
    assert len([e for e in job.events if isinstance(e.event, ev.SnapshotRestored)]) == len(moments)
    assert trained_weights(job, steps) == without_faults(job, steps)
    assert audit(job.events) == []


@pytest.mark.timeout(300)
def test_two_deaths_leave_no_trace_in_the_weights(launch: Callable[..., Job]) -> None:
    run(launch, [(Phase.TRAIN, 0.05), (Phase.SNAPSHOT, 0.002)])


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ten_deaths_at_random_moments_leave_no_trace_in_the_weights(launch: Callable[..., Job]) -> None:
    draw = random.Random(11)
    phases = [Phase.TRAIN, Phase.SNAPSHOT, Phase.PUBLISH, *(draw.choice(list(_PHASES)) for _ in range(7))]
    run(launch, [(phase, draw.uniform(0, 0.1 if phase is Phase.TRAIN else 0.005)) for phase in phases])


_PHASES = (Phase.TRAIN, Phase.OPTIMIZER, Phase.SNAPSHOT, Phase.PUBLISH, Phase.WAITING_BATCH)
