"""A raylet and all processes of its node are killed: a new node takes its place, and its roles come back there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil
import pytest

from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.job import Job
from tests.live.conftest import wait_for

pytestmark = pytest.mark.timeout(600)


def kill_node(job: Job, node: str) -> None:
    """Its raylet and whatever the raylet started."""
    [raylet] = [
        p for p in psutil.process_iter(["name", "cmdline"])
        if p.info["name"] == "raylet" and any(f"/{job.run}/{node}" in part for part in p.info["cmdline"])
    ]
    for process in [raylet, *raylet.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # what the raylet started may end with it, or by itself
            process.kill()


@pytest.mark.parametrize("kind", ["trainer", pytest.param("rollout", marks=pytest.mark.soak)])
def test_the_roles_of_a_lost_node_come_back_on_a_new_one(launch: Callable[..., Job], kind: str) -> None:
    job = launch(nodes=3, steps=100_000, evaluation_prompts=0, agent_workers=1)
    job.wait(step=2, timeout=240)
    wait_for(
        "a copy at the peer",
        lambda: any(isinstance(e.event, ev.SnapshotCopied) and e.event.holder == "state_keeper-1" for e in job.events),
        60,
    )
    node = job.roles[f"{kind}-0"].node
    assert node != job.roles["supervisor"].node
    lost = {name: handle.pid for name, handle in job.roles.items() if handle.node == node}
    kept = {name: handle.pid for name, handle in job.roles.items() if name not in lost}
    kill_node(job, node)
    wait_for("the word that it is lost", lambda: any(isinstance(e.event, ev.NodeLost) for e in job.events), 30)
    wait_for("its roles", lambda: all(job.roles[name].pid != pid and job.roles[name].state == "healthy" for name, pid in lost.items()), 180)
    job.wait(step=job.step + 3, timeout=180)
    assert {name: job.roles[name].pid for name in kept} == kept
    if kind == "trainer":
        restored = [e.event for e in job.events if isinstance(e.event, ev.SnapshotRestored) and e.event.role == "trainer-0"]
        assert restored[-1].source == "peer"
    job.pause()
    time.sleep(1.0)
    job.stop()
    assert audit(job.events) == []
