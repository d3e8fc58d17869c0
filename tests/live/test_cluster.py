"""The Ray cluster of a job, with real raylets: each test's driver is a process of its own (cluster_processes.py), as a host is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from robustrl.config import JobConfig
from robustrl.core.placement import plan_nodes
from robustrl.errors import ConfigError
from robustrl.runtime.cluster import LocalCluster
from robustrl.runtime.processes import MARK, find_marked, kill_marked, pss_bytes, wait_exit

_SCRIPT = Path(__file__).with_name("cluster_processes.py")


class _Driver:
    def __init__(self, what: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.run, self.temp = f"cl-{secrets.token_hex(3)}", Path(tempfile.mkdtemp(prefix="rrl-", dir="/tmp"))
        self.process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), what, self.run, str(self.temp), *arguments], env=os.environ | {MARK: self.run} | (env or {}),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.told = self.hear()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        pytest.fail(f"the driver ended with {self.process.wait(10)}")

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def marked(self) -> set[int]:
        return {process.pid for process in find_marked(self.run)}

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        kill_marked(self.run, 20)
        shutil.rmtree(self.temp, ignore_errors=True)


def _gone(driver: _Driver, within: float) -> None:
    end = time.monotonic() + within
    while driver.marked() or driver.temp.exists():
        assert time.monotonic() < end, (driver.marked(), driver.temp.exists())
        time.sleep(0.1)


def _shared_files() -> dict[str, float]:
    """What Ray writes where it is not told otherwise."""
    return {str(path): path.stat().st_mtime for path in Path("/tmp/ray").glob("*")}


@pytest.fixture(scope="module")
def driver():
    """One cluster of three nodes with a role on each; the tests below run in order, and the last ones lose a node and stop it."""
    before = _shared_files()
    made = _Driver("local", "3")
    made.told["shared before"] = before
    yield made
    made.close()


def test_nodes_are_up_and_roles_are_where_they_were_put(driver):
    print(f"cluster up in {driver.told['seconds']:.1f} s, {pss_bytes(driver.run) >> 20} MiB with driver and three roles")
    assert [node[0] for node in driver.told["nodes"]] == ["node-0", "node-1", "node-2"]
    assert len({node[1] for node in driver.told["nodes"]}) == 3
    assert [node[3] for node in driver.told["nodes"]] == [["management"], ["trainer"], ["rollout"]]
    parents = [psutil.Process(role["pid"]).ppid() for role in driver.told["roles"].values()]
    assert parents == driver.told["raylets"][1:]  # the first is the GCS


def test_every_process_has_the_mark(driver):
    children = {process.pid for process in psutil.Process(driver.process.pid).children(recursive=True)}
    assert children | {driver.process.pid} == driver.marked()
    assert {role["pid"] for role in driver.told["roles"].values()} < children


def test_nothing_is_written_outside_and_nobody_else_can_connect(driver):
    assert _shared_files() == driver.told["shared before"]
    listening = [c.laddr.ip for pid in driver.marked() for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"]
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
    ask = f"from ray._raylet import GcsClient; print(GcsClient(address={driver.told['address']!r}).internal_kv_keys(b'', None, timeout=5))"
    own = (driver.temp / "ray.token").read_text()
    for token, status in ((own, 0), ("0" * 64, 1)):
        env = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_TMPDIR": str(driver.temp)}
        asked = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, timeout=120)
        assert asked.returncode == status, asked.stderr[-500:]
    assert "uthenticat" in asked.stderr, asked.stderr[-500:]
    assert (driver.temp / "ray.token").stat().st_mode & 0o777 == 0o600


def test_a_second_job_beside_it_stops_alone(driver):
    second = _Driver("local", "1")
    try:
        before = driver.marked()
        assert second.ask("stop")["seconds"] < 10
        assert second.process.wait(10) == 0
        assert second.marked() == set()
        assert driver.marked() == before
    finally:
        second.close()


def test_a_lost_node_is_noticed(driver):
    assert driver.ask("lost")["seconds"] < 15


def test_stop_leaves_nothing_even_of_stopped_processes(driver):
    os.kill(driver.told["raylets"][1], signal.SIGSTOP)
    os.kill(driver.told["roles"]["agent_worker-1"]["pid"], signal.SIGSTOP)
    seconds = driver.ask("stop")["seconds"]
    assert seconds < 10
    assert driver.process.wait(10) == 0
    assert driver.marked() == set()


def test_a_killed_driver_leaves_nothing():
    killed = _Driver("local", "2")
    try:
        killed.process.kill()
        killed.process.wait(10)
        _gone(killed, within=15.0)
    finally:
        killed.close()


_FAILING = """
import sys
from pathlib import Path
from robustrl.config import JobConfig
from robustrl.core.placement import plan_nodes
from robustrl.runtime import cluster
fault, run, temp = sys.argv[1], sys.argv[2], Path(sys.argv[3])
made = cluster.LocalCluster(temp, run, plan_nodes(JobConfig(nodes=2)), object_store_bytes=80 << 20)
deadline = 60
if fault == "late":
    deadline = 0.05
if fault == "dead":
    sound = cluster._adapt
    cluster._adapt = lambda command: [
        "--static_resource_list=CPU" if part.startswith("--static_resource_list") else part for part in sound(command)]
if fault == "refused":
    made.object_store_bytes = 1
made.start(deadline)
"""


@pytest.mark.parametrize(("fault", "words"), [
    ("late", ["WaitTimeout: node-0 did not come up: deadlines.cluster_start passed; 0 of 2 nodes up\n--- node-0"]),
    ("dead", [r"JobFailed: node-0 did not come up: its process \d+ ended with exit status 1\n--- node-0 raylet.err\n", "Check failed"]),
    ("refused", ["JobFailed: node-0 did not come up", "minimum allowed is 78643200 bytes"]),
])
def test_a_node_that_does_not_come_up_is_named_with_its_log_and_nothing_is_left(fault, words):
    run, temp = f"cl-{secrets.token_hex(3)}", Path(tempfile.mkdtemp(prefix="rrl-", dir="/tmp"))
    try:
        start = time.monotonic()
        failed = subprocess.run([sys.executable, "-c", _FAILING, fault, run, str(temp)], env=os.environ | {MARK: run}, capture_output=True,
                                text=True, timeout=100)
        assert failed.returncode == 1 and time.monotonic() - start < 60
        assert all(re.search(word, failed.stderr) for word in words), failed.stderr
        assert find_marked(run) == []
    finally:
        kill_marked(run, 10)
        shutil.rmtree(temp, ignore_errors=True)


def test_a_folder_too_deep_for_sockets_is_refused():
    with pytest.raises(ConfigError, match="must be at least 2[0-9] bytes shorter"):
        LocalCluster(Path("/tmp") / ("x" * 95), "r", plan_nodes(JobConfig(nodes=1)), object_store_bytes=80 << 20)


def _at_work_in(folder: Path) -> set[int]:
    """Processes that have it in their command line; the mark would make them a job's own."""
    found = set()
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in place.read_bytes():
                found.add(int(place.parent.name))
        except OSError:  # it has ended
            continue
    return found


def _end_all_in(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while (there := _at_work_in(folder)) and time.monotonic() < deadline:
        for pid in there:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def test_on_somebody_elses_cluster_only_our_roles_come_and_go():
    """Started by `ray start`, as people do, with labels; it is as alive after our stop as before."""
    temp = Path(tempfile.mkdtemp(prefix="rrl-", dir="/tmp"))
    env = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(temp), "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    ray = Path(sys.executable).with_name("ray")
    command = [
        str(ray), "start", "--head", "--port=0", "--num-cpus=1", "--include-dashboard=false", "--dashboard-agent-listen-port=0",
        "--node-ip-address=127.0.0.1", "--object-store-memory=80000000", "--disable-usage-stats", "--labels=robustrl=management-trainer",
        '--resources={"robustrl:rollout": 1}']
    for _ in range(3):  # a plain raylet aborts if its agents take more than 15 s to start, as they do on a busy machine
        head = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=120)
        if head.returncode == 0:
            break
        _end_all_in(temp)
    try:
        assert head.returncode == 0, head.stderr
        address = (temp / "ray/ray_current_cluster").read_text()
        before = _at_work_in(temp)
        assert before
        ours = _Driver("joined", address, env=env)
        try:
            assert ours.told["environ"] == [True]
            assert [(name, pools) for name, _, _, pools in ours.told["nodes"]] == [("node-0", ["management", "rollout", "trainer"])]
            role = next(process for process in find_marked(ours.run) if process.pid == ours.told["roles"]["agent_worker-0"]["pid"])
            ours.ask("stop")
            assert wait_exit(role, 10)
            ours.process.wait(10)
            assert ours.marked() == set()
        finally:
            ours.close()
        assert before <= _at_work_in(temp)
    finally:
        _end_all_in(temp)
        shutil.rmtree(temp, ignore_errors=True)
