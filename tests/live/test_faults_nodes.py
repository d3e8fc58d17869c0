"""The loss of a whole node: its raylet, every process there and the files of its roles are gone, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from robustrl.core.audit import audit
from robustrl.errors import ConfigError, RobustRLError
from robustrl.faults import NodeLoss
from robustrl.job import Job
from robustrl.runtime import registry
from tests.live.conftest import wait_for

pytestmark = pytest.mark.timeout(300)


@pytest.mark.soak
def test_a_rollouts_node_is_lost_and_nothing_else(launch: Callable[..., Job]) -> None:
    job = launch(steps=100_000, nodes=4, rollouts=2, evaluation_prompts=0, agent_workers=1, thresholds="lab")
    job.wait(step=1, timeout=240)
    with pytest.raises(ConfigError, match="node-0 has the head of Ray"):
        job.inject(NodeLoss("supervisor"))
    lost = job.roles["rollout-1"].node
    pids = {name: role.pid for name, role in job.roles.items()}
    there = {name for name, role in job.roles.items() if role.node == lost}
    assert there == {"rollout-1", next(name for name in there if name.startswith("node_agent"))}
    fault = job.inject(NodeLoss(lost)).wait("injected", timeout=30)
    assert {hit.role for hit in fault.view.hits} <= there
    wait_for("both proofs", lambda: {hit.role for hit in fault.view.hits} == there)
    proof = fault.view.hits[0].proof
    assert proof["process"] == "gone" and proof["processes"] >= 3 and not Path(f"/proc/{proof['raylet']}").exists()
    gone = {name for name, pid in pids.items() if not Path(f"/proc/{pid}").exists()}
    assert gone == there
    left = [path.name for folder in (registry.temp_dir(job.run), registry.shm_dir(job.run)) for path in folder.iterdir()]
    assert not [name for name in left if name.startswith("rollout-1.")]
    with pytest.raises(RobustRLError, match="is the last live rollout"):
        job.inject(NodeLoss("rollout-0"))
    fault.wait("confirmed", timeout=150)
    assert fault.view.detected is not None and fault.view.detected.rule in ("node_lost", "exited")
    job.wait(step=job.step + 1, timeout=120)
    job.stop()
    assert audit(job.events) == []
