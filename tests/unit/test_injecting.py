"""The injector against a host told by hand: what is in the log before anything is done, and that a fault that fails ends nothing else."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from robustrl.config import JobConfig
from robustrl.core import events as ev
from robustrl.core.run_state import RunState
from robustrl.core.thresholds import Thresholds
from robustrl.errors import ConfigError, PeerDied, RobustRLError, WaitTimeout
from robustrl.faults import EveryNSteps, Fault, Hang, IdleRollout, Kill, NodeLoss, Partition, RaiseException
from robustrl.runtime.injecting import Injector
from robustrl.runtime.processes import read_start_ticks
from robustrl.runtime.status_page import StatusPage


class Host:
    """As much of a host as the injector asks for; calls to roles are kept, and answered by ``answer``."""

    def __init__(self, folder: Path, pids: dict[str, int] | None = None) -> None:
        self.config, self.state, self.closing = JobConfig(steps=20), RunState(), False
        self.temp, self.shm = folder, folder / "shm"
        self.shm.mkdir(exist_ok=True)
        self.calls: list[tuple[str, str, Any]] = []
        self.answer: Callable[[], Any] = lambda: True
        self.tasks: list[asyncio.Task[None]] = []
        self.lives = SimpleNamespace(
            incarnations={}, ticks={}, peer=self._peer, spec=self._spec, agent_of=lambda node: self._peer(f"node_agent-{node[-1]}")
        )
        self.injector = Injector(self)  # type: ignore[arg-type]
        self._n = 0
        config = msgspec.to_builtins(self.config)
        self.record(ev.RunStarted(schema=1, run="r", name="n", wall=0.0, host_pid=1, config=config, machine={}))
        self.record(ev.ThresholdsChanged(thresholds=Thresholds.lab().to_dict(), changes={}))
        for node in ("node-0", "node-1"):
            self.record(ev.NodeStarted(node=node, ray_node_id="x", ip="127.0.0.1", kinds=[]))
        places = {"supervisor": "node-0", "trainer-0": "node-0", "rollout-0": "node-0", "rollout-1": "node-1"}
        for role, node in places.items():
            self.start(role, node, (pids or {}).get(role, 7))

    def start(self, role: str, node: str, pid: int) -> None:
        self.lives.incarnations[role] = 1
        self.lives.ticks[role] = read_start_ticks(pid) if pid != 7 else 7
        self.record(ev.RoleStarted(role=role, incarnation=1, node=node, pid=pid, start_ticks=self.lives.ticks[role]))
        self.record(ev.RoleReady(role=role, incarnation=1, seconds=0.1))
        steps = ["starting", "stale", "healthy"] if role.startswith("rollout") else ["starting", "healthy"]
        for old, new in zip(steps, steps[1:], strict=False):
            self.record(ev.RoleStateChanged(role=role, incarnation=1, old=old, new=new, reason="so"))
        StatusPage.create(self.temp / f"{role}.page", incarnation=1, pid=pid)

    def _spec(self, role: str, incarnation: int) -> Any:
        return SimpleNamespace(page_path=str(self.temp / f"{role}.page"), node=self.state.roles[role].node)

    def _peer(self, role: str) -> Any:
        async def call(method: str, *args: Any, **_: Any) -> Any:
            self.calls.append((role, method, args[0]))
            return self.answer()

        return SimpleNamespace(call=call)

    def record(self, event: ev.Event) -> None:
        self._n += 1
        self.state.apply(ev.Entry(self._n, time.monotonic(), "host", 1, self._n, 0.0, event))
        if self._n > 2:
            self.injector.feed() if asyncio._get_running_loop() else None

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(coroutine))

    def hit(self, fault: int, role: str) -> None:
        self.record(
            ev.FaultInjected(fault=fault, role=role, incarnation=1, node="node-1", pid=7, phase="decode", step=0, proof={"process": "T"})
        )


def run(host: Host, fault: Fault, then: Callable[[int], Coroutine[Any, Any, None]] | None = None) -> int:
    async def scenario() -> int:
        number = await host.injector.inject(msgspec.to_builtins(fault))
        await asyncio.sleep(0.01)
        await asyncio.gather(*host.tasks)
        if then:
            await then(number)
        return number

    return asyncio.run(scenario())


def test_orders_go_to_whoever_can_carry_them_out(tmp_path: Path) -> None:
    for fault, to, method in (
        (Kill("rollout-1", phase="decode"), "node_agent-1", "strike"),
        (RaiseException("trainer", phase="optimizer", step=3), "trainer-0", "disturb"),
        (IdleRollout("rollout-0", seconds=2), "rollout_manager", "disturb"),
    ):
        host = Host(tmp_path)
        if to == "rollout_manager":
            host.start("rollout_manager", "node-0", 7)
        host.answer = lambda host=host, fault=fault: _planned(host, fault)  # type: ignore[misc]
        if fault.step:
            host.record(ev.OptimizerStepCommitted(step=1, version=1, digest="d", snapshot_digest="s", consumed=[], batch=1, bytes=1,
                                                  holder="state_keeper-0", incarnation=1))  # fmt: skip
        run(host, fault)
        [(role, called, order)] = host.calls
        assert (role, called, order.kind, order.phase, order.pid) == (to, method, fault.name, fault.phase, 7)
        assert order.step == (fault.step or 0) and order.options == msgspec.to_builtins(fault)


@pytest.mark.parametrize("comes", [True, False])
def test_a_proof_that_is_on_its_way_is_waited_for_but_not_for_ever(tmp_path: Path, comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robustrl.runtime.injecting._REPORT", 20.0 if comes else 0.05)
    host = Host(tmp_path)

    async def then(number: int) -> None:
        await host.injector.reported()  # it may wait for its phase for long: nothing to wait for
        host.record(ev.ProcessExited(role="rollout-1", incarnation=1, pid=7, cause="pidfd", last_lines=[]))
        waiting = asyncio.create_task(host.injector.reported())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        if comes:
            host.hit(number, "rollout-1")
        await asyncio.wait_for(waiting, 10)

    run(host, Kill("rollout-1"), then)


def _planned(host: Host, fault: Fault) -> None:
    view = host.state.faults[1]
    assert view.kind == fault.name and view.stage == "planned", "it is in the log before anything is done"


@pytest.mark.parametrize(
    "error, outcome", [(WaitTimeout("no answer"), "refused"), (PeerDied("it died"), "vanished"), (KeyError("?"), "refused")]
)
def test_a_fault_that_cannot_be_carried_out_ends_aloud_and_ends_nothing_else(tmp_path: Path, error: Exception, outcome: str) -> None:
    host = Host(tmp_path)

    def fail() -> None:
        raise error

    host.answer = fail
    number = run(host, Hang("rollout-1"))
    view = host.state.faults[number]
    assert (view.outcome, type(error).__name__ in view.reason) == (outcome, True)


def test_what_is_refused_at_once_is_raised_and_recorded(tmp_path: Path) -> None:
    host = Host(tmp_path)
    with pytest.raises(ConfigError, match="this job has"):
        run(host, Kill("rollout-5"))
    assert not host.state.faults.faults

    async def second(number: int) -> None:
        host.hit(number, "rollout-1")
        with pytest.raises(RobustRLError, match=r"fault 2 \(kill\) is refused: rollout-0 is the last live rollout"):
            await host.injector.inject(msgspec.to_builtins(Kill("rollout-0")))

    run(host, Hang("rollout-1"), second)
    assert host.state.faults[2].outcome == "refused"


def test_calling_off_goes_through_the_node_and_is_recorded_once(tmp_path: Path) -> None:
    host = Host(tmp_path)

    async def call_off(number: int) -> None:
        host.hit(number, "rollout-1")
        await host.injector.abort_fault(number)
        assert host.calls[-1][:2] == ("node_agent-1", "call_off") and host.state.faults[number].outcome == "aborted"
        with pytest.raises(RobustRLError, match="has ended already: aborted"):
            await host.injector.abort_fault(number)

    run(host, Hang("rollout-1"), call_off)

    async def too_late(number: int) -> None:
        host.hit(number, "rollout-1")
        with pytest.raises(RobustRLError, match="was done and cannot be undone"):
            await host.injector.abort_fault(number)

    host = Host(tmp_path)
    run(host, Kill("rollout-1"), too_late)

    async def just_too_late(number: int) -> None:
        """It is on its way, or done: only who does it knows."""
        host.answer = lambda: False
        with pytest.raises(RobustRLError, match="was done and cannot be undone"):
            await host.injector.abort_fault(number)
        assert not host.state.faults[number].outcome

    host = Host(tmp_path)
    run(host, Kill("rollout-1"), just_too_late)


class _Network:
    """The nodes' links, and what was done to them."""

    why_no_delay = ""

    def __init__(self) -> None:
        self.done: list[str] = []

    def link(self, node: str) -> str:
        return f"link of {node}"

    def cut(self, link: str) -> None:
        self.done.append(f"cut {link}")

    def heal(self, link: str) -> None:
        self.done.append(f"heal {link}")


@pytest.mark.parametrize("called_off", [True, False])
def test_a_partition_hits_every_role_of_the_node_and_is_over_in_time_or_called_off(tmp_path: Path, called_off: bool) -> None:
    host, network = Host(tmp_path), _Network()
    host.config = msgspec.structs.replace(host.config, hosts="namespaces", nodes=2)
    host.injector = Injector(host)  # type: ignore[arg-type]
    host.injector.know_network(network)  # type: ignore[arg-type]
    host.cluster = SimpleNamespace(unreachable=lambda node, timeout: "no answer" if network.done == ["cut link of node-1"] else "")  # type: ignore[attr-defined]
    host.start("node_agent-1", "node-1", 7)

    async def scenario() -> None:
        number = await host.injector.inject(msgspec.to_builtins(Partition("rollout-1", seconds=30 if called_off else 0.2)))
        while len(host.state.faults[number].hits) < 2:
            await asyncio.sleep(0.01)
        hits = host.state.faults[number].hits
        assert {hit.role: hit.proof["answers"] for hit in hits} == {"rollout-1": False, "node_agent-1": False}
        if called_off:
            await host.injector.abort_fault(number)
            host.tasks[0].cancel()
        await asyncio.gather(*host.tasks, return_exceptions=True)
        assert host.state.faults[number].outcome == ("aborted" if called_off else "over")
        assert network.done == ["cut link of node-1", "heal link of node-1"]

    asyncio.run(asyncio.wait_for(scenario(), 10))


@pytest.mark.parametrize("when", ["as it is cut", "before that"])
def test_a_partition_that_is_called_off_while_it_is_made_does_not_last(tmp_path: Path, when: str) -> None:
    class Slow(_Network):
        def cut(self, link: str) -> None:
            called_off.wait(5)
            super().cut(link)

    host, network, called_off = Host(tmp_path), Slow(), threading.Event()
    host.config = msgspec.structs.replace(host.config, hosts="namespaces", nodes=2)
    host.injector = Injector(host)  # type: ignore[arg-type]
    host.injector.know_network(network)  # type: ignore[arg-type]
    host.cluster = SimpleNamespace(unreachable=lambda node, timeout: "no answer")  # type: ignore[attr-defined]
    host.start("node_agent-1", "node-1", 7)

    async def scenario() -> None:
        number = await host.injector.inject(msgspec.to_builtins(Partition("rollout-1", seconds=0.5)))
        while when == "as it is cut" and number not in host.injector._cutting:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.05, called_off.set)
        await host.injector.abort_fault(number)
        await asyncio.gather(*host.tasks)
        assert host.state.faults[number].outcome == "aborted"
        assert network.done == (["cut link of node-1", "heal link of node-1"] if when == "as it is cut" else [])

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_a_partition_that_cannot_be_ended_says_so_and_can_still_be_called_off(tmp_path: Path) -> None:
    class Stuck(_Network):
        def heal(self, link: str) -> None:
            super().heal(link)
            if len(self.done) == 2:
                raise RobustRLError("ip link set: timed out")

    host, network, said = Host(tmp_path), Stuck(), list[str]()
    host.config = msgspec.structs.replace(host.config, hosts="namespaces", nodes=2)
    host.injector = Injector(host)  # type: ignore[arg-type]
    host.injector.know_network(network)  # type: ignore[arg-type]
    host.cluster = SimpleNamespace(unreachable=lambda node, timeout: "no answer")  # type: ignore[attr-defined]
    host.start("node_agent-1", "node-1", 7)
    record = host.record
    host.record = lambda event: (said.append(event.text) if isinstance(event, ev.WarningRaised) else None, record(event))[1]  # type: ignore[method-assign]

    async def then(number: int) -> None:
        assert said == [f"fault {number} was done, and then: RobustRLError: ip link set: timed out"]
        await host.injector.abort_fault(number)
        assert network.done == ["cut link of node-1", "heal link of node-1", "heal link of node-1"]

    run(host, Partition("rollout-1", seconds=0.05), then)


def test_a_schedule_is_followed_and_ends(tmp_path: Path) -> None:
    host = Host(tmp_path)

    async def scenario() -> None:
        name = await host.injector.schedule(msgspec.to_builtins(EveryNSteps(5, Hang("rollout", seconds=1))))
        assert [(view.when, view.schedule) for view in host.state.faults.faults.values()] == [("at step 5", name)]
        await host.injector.abort_schedule(name)
        assert host.state.faults[1].outcome == "aborted"
        await host.injector.reveal_fault(1, "guessed")
        assert host.state.faults[1].guess == "guessed"

    asyncio.run(scenario())
    assert host.injector.closing("done") == []


_RAYLET = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)
time.sleep(60)
"""


def test_the_loss_of_a_node_takes_its_raylet_its_processes_and_the_files_of_its_roles(tmp_path: Path) -> None:
    raylet = subprocess.Popen([sys.executable, "-c", _RAYLET], stdout=subprocess.PIPE, text=True)
    assert raylet.stdout is not None
    child = int(raylet.stdout.readline())
    role = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        host = Host(tmp_path, {"rollout-1": role.pid})
        host.cluster = SimpleNamespace(raylet_of=lambda node: raylet.pid)  # type: ignore[attr-defined]
        for name in ("rollout-1.slot-0", "rollout-10.slot-0", "rollout-0.slot-0"):
            (host.shm / name).touch()
        number = run(host, NodeLoss("node-1"))
        [hit] = host.state.faults[number].hits
        assert (hit.role, hit.pid, hit.proof["process"]) == ("rollout-1", role.pid, "gone")
        assert hit.proof["removed"] == ["rollout-1.page", "rollout-1.slot-0"] and hit.proof["processes"] == 3
        assert sorted(path.name for path in host.shm.iterdir()) == ["rollout-0.slot-0", "rollout-10.slot-0"]
        assert role.wait(2) and raylet.wait(2) and not Path(f"/proc/{child}/exe").exists()
    finally:
        for process in (raylet, role):
            process.kill()
            process.wait()
        raylet.stdout.close()
