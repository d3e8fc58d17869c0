"""Nodes with a network of their own: a partition is real, is seen by silence, and leaves nothing. Needs root; skips aloud without."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.errors import ConfigError
from robustrl.faults import Delay, Partition
from robustrl.job import Job
from robustrl.runtime import namespaces
from robustrl.runtime.processes import process_state
from tests.live.conftest import wait_for

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why := namespaces.why_not()), reason=f"no network namespaces here: {why}"),
]
_INSIDE = """
import socket, subprocess, sys
from robustrl.runtime import namespaces
if namespaces.INSIDE not in sys.argv:
    namespaces.enter(sys.argv)
SERVE = "import socket; s = socket.create_server(('0.0.0.0', 4242)); print(flush=True); [s.accept() for _ in iter(int, 1)]"
CALL = "import socket; socket.create_connection(('10.77.0.2', 4242), 0.5)"
net = namespaces.Namespaces()
for node in ("node-1", "node-2"):
    print(net.add(node))
    server = subprocess.Popen(net.command(node, [sys.executable, "-c", SERVE]), stdout=subprocess.PIPE)
    server.stdout.readline()
def between():
    from_2 = subprocess.run(net.command("node-2", [sys.executable, "-c", CALL]), stderr=subprocess.DEVNULL).returncode == 0
    print(net.answers("node-1", 4242, 0.5), net.answers("node-2", 4242, 0.5), from_2)
between()
link = net.link("node-1")
net.cut(link)
between()
net.heal(link)
between()
print(net.add("node-1"), net.link("node-1"))
net.heal(link)
print(*[host._holder.pid for host in net._hosts.values()], flush=True)
sys.stdin.read()
"""


def _interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def test_a_cut_node_is_cut_off_from_all_and_nothing_outlives_its_maker(tmp_path: Path) -> None:
    before = _interfaces(), Path("/proc/self/mounts").read_text(), subprocess.run(["ip", "netns"], capture_output=True).stdout
    script = tmp_path / "inside.py"
    script.write_text(_INSIDE)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, str(script)], stdin=pipe, stdout=pipe, text=True, start_new_session=True) as maker:
        assert maker.stdout is not None
        said = [maker.stdout.readline().strip() for _ in range(6)]
        holders = maker.stdout.readline().split()
        assert len(holders) == 2 and all(process_state(int(pid)) in "RS" for pid in holders)
        maker.kill()
        wait_for("the namespaces' holders to go", lambda: all(process_state(int(pid)) in "ZX" for pid in holders), 10)
        os.killpg(maker.pid, 9)  # its servers, as the job's reaper would
    assert said[:2] == ["10.77.0.2", "10.77.0.3"]
    assert said[2:5] == ["True True True", "False True False", "True True True"]
    assert said[5] == "10.77.0.4 node3"
    after = _interfaces(), Path("/proc/self/mounts").read_text(), subprocess.run(["ip", "netns"], capture_output=True).stdout
    assert after == before


def test_a_rollouts_node_is_cut_off_seen_fenced_and_replaced(launch: Callable[..., Job]) -> None:
    before = _interfaces()
    job = launch(
        steps=100_000, nodes=2, hosts="namespaces", rollouts=1, evaluation_prompts=0, agent_workers=1, thresholds="lab", restarts=20,
    )  # fmt: skip
    job.wait(step=1, timeout=200)
    pulled = [e.event.transport for e in job.events if isinstance(e.event, ev.PullCommitted)]
    assert set(pulled) == {"tcp"}, "no shared memory between hosts"
    assert _interfaces() == before
    with pytest.raises(ConfigError, match="node-0 has the head of Ray"):
        job.inject(Partition("trainer-0", seconds=3))
    netem = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "0ms"]
    if subprocess.run(netem, stderr=subprocess.DEVNULL).returncode == 0:
        job.inject(Delay("node-1", seconds=1)).wait("injected", timeout=30)
    else:
        with pytest.raises(ConfigError, match="delay = 'node-1': is not possible here: the kernel's netem is not there"):
            job.inject(Delay("node-1", seconds=1))

    short = job.inject(Partition("node-1", seconds=1.5, force=True))
    wait_for("the end of the short one", lambda: short.view.outcome == "over")
    assert all(hit.proof["answers"] is False for hit in short.view.hits) and {hit.role for hit in short.view.hits} >= {"rollout-0"}
    job.wait(step=job.step + 1, timeout=120)
    assert not [e for e in job.events if isinstance(e.event, ev.NodeLost)], "too short to be a loss"

    rollout, pid, began = job.roles["rollout-0"], job.roles["rollout-0"].pid, time.monotonic()
    fault = job.inject(Partition("node-1", seconds=120, force=True))
    wait_for("the loss of the node", lambda: [e for e in job.events if isinstance(e.event, ev.NodeLost)], 60)
    lost = next(e for e in job.events if isinstance(e.event, ev.NodeLost))
    silent = next(e.event for e in job.events if isinstance(e.event, ev.Verdict) and e.t > began and e.event.kind == "failed")
    assert silent.rule == "agent_silent" and "cut off" in lost.event.reason
    wait_for("the process on it to be dead", lambda: not Path(f"/proc/{pid}").exists())
    wait_for("its next life", lambda: rollout.incarnation > 1 and rollout.state == "healthy", 120)
    assert fault.view.detected is not None
    job.wait(step=job.step + 1, timeout=120)
    addresses = [e.event.ip for e in job.events if isinstance(e.event, ev.NodeStarted) and e.event.node == "node-1"]
    assert addresses == ["10.77.0.2", "10.77.0.3"], "another host in its place"
    job.stop()
    assert audit(job.events) == [] and _interfaces() == before
