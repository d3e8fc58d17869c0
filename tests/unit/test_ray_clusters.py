"""Which Ray cluster an address stands for, and how a job ends that cannot join it."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from robustrl.errors import ConfigError, JobFailed, WaitTimeout
from robustrl.runtime import cluster, ray_clusters
from robustrl.runtime.processes import MARK
from robustrl.runtime.ray_clusters import choose, found_here

PRIVATE = {"127.0.0.1:7": "other-0a1b2c"}
ALLOWED = "must be HOST:PORT of a Ray cluster's GCS, or 'auto'; None starts raylets of our own"


@pytest.mark.parametrize(("address", "clusters", "variable", "chosen"), [
    ("auto", {}, "", "auto"),
    ("auto", {"h:1": ""}, "", "auto"),
    ("auto", {"h:1": "", "h:2": ""}, "", "auto"),  # Ray's to choose
    ("auto", PRIVATE | {"h:1": ""}, "", "h:1"),
    ("auto", PRIVATE, "h:2", "h:2"),
    ("h:3", PRIVATE | {"h:1": ""}, "h:2", "h:3"),
    ("127.0.0.1:8", PRIVATE, "", "127.0.0.1:8"),
    ("10.0.0.1:7", PRIVATE, "", "10.0.0.1:7"),
])  # fmt: skip
def test_an_address_stands_for_a_cluster_that_is_nobodys_own(address, clusters, variable, chosen):
    assert choose(address, clusters, {"RAY_ADDRESS": variable} if variable else {}) == chosen


@pytest.mark.parametrize(("address", "clusters", "variable", "said"), [
    ("auto", PRIVATE, "", "address = 'auto': no Ray cluster is here but the private one of another RobustRL job "
                          "(run other-0a1b2c at 127.0.0.1:7)"),
    ("auto", PRIVATE | {"h:2": "", "h:1": ""}, "", "address = 'auto': one of h:1, h:2 has to be named"),
    ("auto", PRIVATE, "127.0.0.1:7", "RAY_ADDRESS = '127.0.0.1:7': is the private cluster of another RobustRL job, run other-0a1b2c"),
    ("auto", {}, "ray://h:1", "RAY_ADDRESS = 'ray://h:1': must be"),
    ("127.0.0.1:7", PRIVATE, "", "address = '127.0.0.1:7': is the private cluster of another RobustRL job, run other-0a1b2c"),
    ("localhost:7", PRIVATE, "", "address = 'localhost:7': is the private cluster"),
    ("[::1]:7", PRIVATE, "", "address = '[::1]:7': is the private cluster"),
])  # fmt: skip
def test_a_private_cluster_is_named_and_what_is_allowed(address, clusters, variable, said):
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}.*{re.escape(ALLOWED.removeprefix('must be'))}$"):
        choose(address, clusters, {"RAY_ADDRESS": variable} if variable else {})


@pytest.fixture
def raylet() -> Iterator[Any]:
    """Something that looks like one in the process table."""
    started: list[subprocess.Popen[bytes]] = []

    def start(address: str, *arguments: str, run: str = "", name: str = "/x/raylet/raylet") -> None:
        environment = {key: value for key, value in os.environ.items() if key != MARK} | ({MARK: run} if run else {})
        command = [name, "-c", "read end", "sh", *arguments, f"--gcs-address={address}"]
        started.append(subprocess.Popen(command, executable="/bin/sh", env=environment, stdin=subprocess.PIPE))
        deadline = time.monotonic() + 10.0
        while not Path(f"/proc/{started[-1].pid}/environ").read_bytes() and time.monotonic() < deadline:
            time.sleep(0.001)  # the kernel shows a new program's arguments a moment after its exec has returned

    yield start
    for process in started:
        process.communicate(b"end\n", timeout=10)


def test_clusters_are_found_by_their_raylets_and_private_ones_by_mark_or_folder(raylet):
    raylet("h.invalid:1")
    raylet("h.invalid:2", run="marked-0a1b2c")
    raylet("h.invalid:3", "--session_dir=/tmp/robustrl-1000/named-0a1b2c/node-0/ray")
    raylet("h.invalid:4", name="/x/python")
    raylet("h.invalid:5", "--session_dir=/tmp/ray/robustrl-lesson/x")
    found = {address: run for address, run in found_here().items() if address.startswith("h.invalid:")}
    assert found == {"h.invalid:1": "", "h.invalid:2": "marked-0a1b2c", "h.invalid:3": "named-0a1b2c", "h.invalid:5": ""}


def test_a_raylet_whose_environment_is_another_users_is_known_by_its_folder(raylet, monkeypatch):
    raylet("h.invalid:1", "--temp_dir=/tmp/robustrl-7/theirs-0a1b2c/node-0")
    real = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.name == "environ":
            raise PermissionError
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    assert found_here()["h.invalid:1"] == "theirs-0a1b2c"


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a JoinedCluster at an address, where Ray does as it is told."""
    for name in (MARK, "SPT_NOENV", "RAY_gcs_rpc_server_connect_timeout_s", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(cluster.ray_worker, "skip_slow_import", lambda: None)
    monkeypatch.setattr(cluster, "_knock", lambda *_: None)
    monkeypatch.setattr(ray_clusters, "found_here", lambda: PRIVATE)

    def start(address: str, connect: Any, nodes: Any = list, deadline: float = 5.0) -> cluster.JoinedCluster:
        monkeypatch.setattr(cluster, "_connect", lambda *_: connect())
        monkeypatch.setattr(cluster, "_nodes", nodes)
        made = cluster.JoinedCluster(address, "run")
        made.start(deadline)
        return made

    return start


@pytest.mark.parametrize("late", ["connect", "nodes"])
def test_a_cluster_that_never_answers_ends_the_start_within_its_deadline(joining, late):
    enough, answered = threading.Event(), list[bool]()
    slow = {late: lambda: answered.append(enough.wait(60)) or []}
    try:
        with pytest.raises(WaitTimeout, match="^address = 'h:1': no Ray cluster could be joined there within deadlines.cluster_start"):
            joining("h:1", **{"connect": lambda: None, **slow}, deadline=0.1)
        assert not answered, "it was not waited for"
    finally:
        enough.set()


@pytest.mark.parametrize("error", [ConnectionError("no"), RuntimeError("no"), ValueError("no"), AssertionError("no"), OSError("no")])
def test_whatever_ray_says_ends_the_start_with_the_address(joining, error):
    def fail() -> None:
        raise error

    with pytest.raises(JobFailed, match="^address = 'h:1': no Ray cluster could be joined there: no$"):
        joining("h:1", fail)


def test_a_private_cluster_is_not_even_asked(joining):
    asked: list[int] = []
    with pytest.raises(ConfigError, match="^address = 'auto': .*run other-0a1b2c"):
        joining("auto", lambda: asked.append(1))
    assert not asked


def test_the_nodes_that_live_are_listed_in_order(joining):
    table = [{"NodeID": f"{i}", "Alive": i != 2, "NodeManagerAddress": f"h{i}", "Labels": {"robustrl": "trainer"}, "Resources": {}}
             for i in (3, 2, 1)]
    made = joining("h:1", lambda: None, lambda: table)
    assert [(node.name, node.ray_node_id, node.ip, node.pools) for node in made.nodes] == [
        ("node-0", "1", "h1", ("trainer",)), ("node-1", "3", "h3", ("trainer",))]
