"""A job on somebody else's Ray cluster: it takes its place there, and leaves the cluster as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import robustrl
from robustrl.job import Job
from robustrl.runtime import registry
from tests.live.conftest import assert_clean

_CLUSTER = """
import time
from ray.cluster_utils import Cluster
options = dict(num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False)
cluster = Cluster(initialize_head=True, head_node_args=options)
cluster.add_node(**options)
print(cluster.address, flush=True)
time.sleep(3600)
"""
_SITE = "import sys; sys.modules['rfc3987_syntax'] = None"
"""See runtime/ray_worker.py: Ray aborts a node whose agents are not up within 15 s, which they otherwise miss on a busy machine."""
_ALIVE = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print(sum(node['Alive'] for node in ray.nodes()))"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of a process that can reach the cluster; RAY_ADDRESS names it."""
    folder = Path("/tmp") / f"rr-test-{os.getpid()}"  # short: Ray puts sockets below it
    folder.mkdir()
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(_SITE)
    environment = os.environ | {"RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    started = environment | {"PYTHONPATH": str(site)}
    process = subprocess.Popen([sys.executable, "-c", _CLUSTER], env=started, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "Ray's own cluster did not come up: see its output above"
        yield environment | {"RAY_ADDRESS": address}
    finally:
        subprocess.run(["pkill", "-KILL", "-f", str(folder)], check=False)
        process.kill()
        process.wait(10)
        subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.fixture
def address(cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("RAY_TMPDIR", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, cluster[name])
    return cluster["RAY_ADDRESS"]


def test_a_job_runs_there_and_leaves_the_cluster_alive(address: str, launch: Callable[..., Job], cluster: dict[str, str]) -> None:
    job = launch(name="guest", address=address, engine="torch", steps=100_000, evaluation_prompts=0)
    job.wait(step=1, timeout=180)
    assert {handle.node for handle in job.roles.values()} == {"node-0", "node-1"}
    again = launch(name="guest", address=address, engine="torch", steps=100_000, evaluation_prompts=0)
    assert again.run == job.run, "an equal configuration attaches to the live job"
    entry = registry.find("guest")
    assert entry is not None and robustrl.attach("guest").config.outlives_owner
    job.stop()
    assert_clean(job.run)
    alive = subprocess.run([sys.executable, "-c", _ALIVE, address], env=cluster, capture_output=True, text=True, timeout=60, check=True)
    assert alive.stdout.split()[-1] == "2"
