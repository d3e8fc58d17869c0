"""How the host carries decisions out: in what order, what waits, and what is never killed."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from robustrl.config import JobConfig
from robustrl.core import events as ev
from robustrl.core.roles import RoleId, RoleKind, RoleState
from robustrl.errors import PeerDied, RobustRLError, WaitTimeout
from robustrl.runtime.processes import read_start_ticks
from robustrl.runtime.restarting import Restarting
from robustrl.runtime.serving import Serving

_NOBODY = 2**22 + 1
"""Beyond the largest pid."""
_NODES = {
    "node_agent-0": "node-0", "node_agent-1": "node-1", "supervisor": "node-0", "task_runner": "node-0", "rollout-0": "node-1",
    "trainer-0": "node-1", "state_keeper-0": "node-1",
}  # fmt: skip


class _Host:
    """Records what is done; every role is in its first life."""

    def __init__(self, address: str | None = None) -> None:
        self.config = JobConfig(profile="class", address=address)
        self.done: list[str] = []
        self.events: list[ev.Event] = []
        self.closing = False
        self.ended: list[str] = []
        roles = {
            role: SimpleNamespace(
                kind=RoleId.parse(role).kind, incarnation=1, node=node, pid=_NOBODY, exited="", state=RoleState.HEALTHY
            )
            for role, node in _NODES.items()
        }
        self.state: Any = SimpleNamespace(roles=roles, recovery_mode="isolated", recovery_standbys="cold")
        self.lives: Any = _Lives(self)
        self.cluster: Any = SimpleNamespace(nodes=[SimpleNamespace(name="node-0"), SimpleNamespace(name="node-1")], replace=self.replace)
        self.tasks: set[asyncio.Task[Any]] = set()
        self.restarting = Restarting(self)  # type: ignore[arg-type]
        self.injector: Any = SimpleNamespace(reported=self.reported)
        self.ended_before: list[int] = []
        """Lives that were over when the proofs of faults were there, at each try of a full restart."""

    def record(self, event: ev.Event) -> None:
        self.events.append(event)
        if isinstance(event, ev.RestartDecided):
            self.restarting.carry_out(event)

    def decide_end(self, status: str, reason: str) -> None:
        self.ended.append(reason)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)
        return task

    def replace(self, node: str, deadline: float) -> Any:
        self.done.append(f"replace {node}")
        new = SimpleNamespace(name=node, ray_node_id="new", ip="127.0.0.1")
        self.cluster.nodes = [new if known.name == node else known for known in self.cluster.nodes]
        return new

    async def run_training(self) -> None:
        self.done.append("run")

    async def reported(self) -> None:
        self.ended_before.append(sum(isinstance(event, ev.ProcessExited) for event in self.events))


class _Lives:
    def __init__(self, host: _Host) -> None:
        self.host = host
        self.places = {RoleId.parse(role): node for role, node in _NODES.items()}
        self.incarnations = dict.fromkeys(_NODES, 1)
        self.ticks = dict.fromkeys(_NODES, 1)
        self.given: set[tuple[str, int]] = set()
        self.lost: dict[str, str] = {}
        self.fresh = False
        self.trouble: list[BaseException] = []
        self.watched: list[str] = []
        self.late = ""

    def peer(self, role: str) -> Any:
        async def call(method: str, *args: Any, **_: Any) -> None:
            self.host.done.append(f"{role}.{method}" + (f" {args[0]}" if method == "kill" else ""))
            if f"{role}.{method}" == self.late:
                raise WaitTimeout(self.late)

        return SimpleNamespace(role=role, call=call)

    def agent_of(self, node: str) -> Any:
        return self.peer(f"node_agent-{node[-1]}")

    async def create(self, role: str, standby: str = "") -> None:
        self.incarnations[role] += 1
        self.host.done.append(f"create {role}" + (f" in {standby}" if standby else ""))

    async def start(self, roles: list[RoleId], standbys: dict[str, str]) -> None:
        assert self.fresh
        if self.trouble:
            raise self.trouble.pop()
        for role in map(str, roles):
            self.incarnations[role] += 1
        self.host.done.append(f"start {len(roles)}")

    async def prepare_trainers(self, ranks: list[str]) -> None:
        self.host.done.append(f"prepare {' '.join(ranks)}")

    async def give_secret(self, agent: str) -> None:
        self.host.done.append(f"secret {agent}")

    def spec(self, role: str, incarnation: int) -> str:
        return role

    async def watch_from_outside(self, spec: str, pid: int) -> None:
        self.watched.append(spec)


def decided(role: str, mode: str = "isolated", standby: str = "", incarnation: int = 1) -> ev.RestartDecided:
    return ev.RestartDecided(role=role, incarnation=incarnation, reason="r", mode=mode, standby=standby)


def scenario(play: Callable[[_Host], Any], address: str | None = None) -> _Host:
    async def run() -> _Host:
        host = _Host(address)
        play(host)
        while pending := [task for task in host.tasks if not task.done()]:
            await asyncio.wait_for(asyncio.gather(*pending), 10)
        for task in host.tasks:
            task.result()
        return host

    return asyncio.run(run())


@pytest.mark.parametrize("reachable", [True, False])
def test_a_condemned_supervisor_is_ended_by_its_agent_or_without_it(reachable: bool) -> None:
    def play(host: _Host) -> None:
        host.state.roles["supervisor"].pid, host.lives.ticks["supervisor"] = child.pid, ticks
        if not reachable:
            host.lives.agent_of = lambda node: _Dead()
        host.spawn(host.restarting.end_supervisor(1))

    class _Dead:
        async def call(self, *_: Any, **__: Any) -> None:
            raise PeerDied("cut off")

    child = subprocess.Popen(["sleep", "60"])
    ticks = read_start_ticks(child.pid)
    host = scenario(play)
    assert host.done == (["node_agent-0.kill supervisor"] if reachable else []), "its death is told by those who tell of any"
    assert child.poll() is None if reachable else child.wait(5) == -9
    child.kill()
    child.wait(5)


def test_the_old_process_is_dead_before_the_next_one_is_made() -> None:
    host = scenario(lambda host: host.record(decided("rollout-0", standby="standby-0")))
    assert host.done == ["node_agent-1.kill rollout-0", "create rollout-0 in standby-0", "rollout-0.open", "rollout_manager.add_rollout"]


def test_a_decision_that_was_written_twice_is_carried_out_once() -> None:
    host = scenario(lambda host: [host.record(decided("rollout-0")) for _ in range(2)])
    assert host.done.count("create rollout-0") == 1


def test_a_role_that_does_not_come_back_in_time_is_killed_and_its_death_is_the_supervisors_matter() -> None:
    def play(host: _Host) -> None:
        host.lives.late = "rollout-0.open"
        host.record(decided("rollout-0"))

    host = scenario(play)
    assert host.done == ["node_agent-1.kill rollout-0", "create rollout-0", "rollout-0.open", "node_agent-1.kill rollout-0"]
    assert [type(event) for event in host.events] == [ev.RestartDecided, ev.WarningRaised]


def test_a_process_that_became_another_role_is_not_killed_in_its_old_name() -> None:
    def play(host: _Host) -> None:
        host.lives.given.add(("rollout-0", 1))
        host.record(decided("rollout-0"))

    assert not any("kill" in line for line in scenario(play).done)


def test_a_full_restart_ends_all_then_starts_all_and_later_decisions_wait() -> None:
    def play(host: _Host) -> None:
        for role in _NODES:
            host.record(decided(role, "full"))
        host.spawn(later(host))

    async def later(host: _Host) -> None:
        await asyncio.sleep(0)
        host.record(decided("rollout-0"))
        host.record(decided("trainer-0", incarnation=2))

    host = scenario(play)
    assert host.done[:2] == [f"start {len(_NODES)}", "node_agent-1.kill trainer-0"] or host.done[0] == f"start {len(_NODES)}"
    assert "create rollout-0" not in host.done, "its life began in the full restart"
    assert "create trainer-0" in host.done and host.done.count("run") == 1
    assert {e.role for e in host.events if isinstance(e, ev.ProcessExited)} == set(_NODES)
    assert host.ended_before == [0], "the agents give the proofs of faults, and are ended too"


@pytest.mark.parametrize("trouble", [PeerDied("again"), WaitTimeout("it hangs")])
def test_a_death_or_a_hang_during_a_full_restart_has_it_done_again(trouble: RobustRLError) -> None:
    def play(host: _Host) -> None:
        host.lives.trouble = [trouble]
        host.record(decided("trainer-0", "full"))

    assert scenario(play).done == [f"start {len(_NODES)}", "run"]


def test_a_node_that_is_cut_off_is_lost_before_anything_is_started_there_again(tmp_path: Any) -> None:
    def play(host: _Host) -> None:
        host.shm = host.temp = tmp_path
        host.config = JobConfig(profile="class", hosts="namespaces", nodes=2)
        host.cluster.unreachable = lambda node, timeout: "" if "replace node-1" in host.done or node == "node-0" else "no answer"
        for role in ("node_agent-1", "task_runner"):
            host.record(decided(role))

    host = scenario(play)
    assert [(e.node, e.reason) for e in host.events if isinstance(e, ev.NodeLost)] == [("node-1", "cut off: no answer")]
    assert host.done.count("replace node-1") == 1
    assert host.done.index("replace node-1") < host.done.index("create node_agent-1")


def test_an_answer_about_a_node_that_was_replaced_meanwhile_is_not_of_the_new_one(tmp_path: Any) -> None:
    """Two roles of it come back at once; what the second one's question met was the node before."""
    asked, replaced = itertools.count(1), threading.Event()

    def unreachable(node: str, timeout: float) -> str:
        if next(asked) == 2:
            assert replaced.wait(5)
        return "no answer"

    def play(host: _Host) -> None:
        host.shm = host.temp = tmp_path
        host.config = JobConfig(profile="class", hosts="namespaces", nodes=2)
        host.cluster.unreachable = unreachable
        host.spawn(later(host))

    async def later(host: _Host) -> None:
        both = [host.spawn(host.restarting._have_node(role)) for role in ("rollout-0", "trainer-0")]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        replaced.set()

    host = scenario(play)
    assert len([event for event in host.events if isinstance(event, ev.NodeLost)]) == 1 == host.done.count("replace node-1")
    assert next(asked) == 3 and not host.lives.lost


def test_the_restart_of_a_standby_goes_on_beside_a_full_restart() -> None:
    """It lives through one, so nobody would make its next life."""

    async def warm_up(standby: str) -> None:
        await asyncio.sleep(0.05)
        host.done.append(f"warm up {standby}")

    async def play() -> None:
        _add_standby(host)
        host.lives.warm_up = warm_up
        host.record(decided("standby-0"))
        for role in _NODES:
            host.record(decided(role, "full"))
        await asyncio.wait(host.tasks)

    host = _Host()
    asyncio.run(asyncio.wait_for(play(), 10))
    assert "warm up standby-0" in host.done and f"start {len(_NODES)}" in host.done


def _add_standby(host: _Host, number: int = 0, pid: int = _NOBODY) -> None:
    role = f"standby-{number}"
    host.state.roles[role] = SimpleNamespace(
        kind=RoleKind.STANDBY, incarnation=1, node="node-1", pid=pid, exited="", state=RoleState.HEALTHY
    )
    host.lives.places[RoleId.parse(role)] = "node-1"
    host.lives.incarnations[role] = host.lives.ticks[role] = 1


def test_an_agent_that_is_being_made_comes_up_though_the_restart_that_needs_it_is_called_off() -> None:
    async def play() -> None:
        host.cluster.nodes.append(SimpleNamespace(name="node-2", ray_node_id="r", ip="i"))
        host.lives.create = create
        needing = asyncio.create_task(host.restarting._have_agent("node-2"))
        await asyncio.sleep(0.01)
        needing.cancel()
        await asyncio.wait([needing, *host.tasks])

    async def create(role: str) -> None:
        await asyncio.sleep(0.05)

    host = _Host("there:6379")
    asyncio.run(asyncio.wait_for(play(), 10))
    assert host.done == ["node_agent-2.open", "secret node_agent-2"]


def test_a_lost_node_is_replaced_once_before_its_roles_come_back(tmp_path: Any) -> None:
    def play(host: _Host) -> None:
        host.shm = host.temp = tmp_path
        (tmp_path / "state_keeper-0.1-1.slot-0").touch()
        host.restarting._lose("node-1", "its raylet ended")
        for role in ("node_agent-1", "state_keeper-0", "rollout-0"):
            host.record(decided(role))

    host = scenario(play)
    assert host.done.count("replace node-1") == 1 and host.done[0] == "replace node-1" and not host.lives.lost
    assert {"create node_agent-1", "create state_keeper-0", "create rollout-0", "secret node_agent-1"} <= set(host.done)
    assert [type(e) for e in host.events if isinstance(e, ev.NodeLost | ev.NodeStarted)] == [ev.NodeLost, ev.NodeStarted]
    assert not list(tmp_path.iterdir()), "its memory went with it"


def test_the_loss_of_the_head_ends_the_job(tmp_path: Any) -> None:
    def play(host: _Host) -> None:
        host.shm = host.temp = tmp_path
        host.restarting._lose("node-0", "its GCS ended")

    assert "node-0, the head" in scenario(play).ended[0]


@pytest.mark.parametrize("mode", ["isolated", "observe", "full"])
def test_the_supervisors_own_death_is_answered_here(mode: str) -> None:
    def play(host: _Host) -> None:
        host.state.recovery_mode = mode
        host.restarting.replace_supervisor(1, 7, "ActorDiedError")

    host = scenario(play)
    if mode == "full":
        assert host.done == [f"start {len(_NODES)}", "run"]
    else:
        assert host.done == ["create supervisor", "supervisor.open"]


@pytest.mark.parametrize("standbys", ["warm", "cold"])
def test_the_supervisors_death_in_full_mode_takes_the_standbys_and_only_roles_that_have_a_life(standbys: str) -> None:
    def play(host: _Host) -> None:
        host.config = JobConfig(profile="class", standbys=1)
        for number in range(2):  # one with a model, one for any other role
            _add_standby(host, number)
        host.state.recovery_mode, host.state.recovery_standbys = "full", standbys
        gone = SimpleNamespace(kind=RoleKind.ROLLOUT, incarnation=3, node="node-1", pid=_NOBODY, exited="so", state=RoleState.FAILED)
        host.state.roles["rollout-7"] = gone  # was added under the host before, and a resumed run begins with those of its configuration
        host.state.roles["rollout-0"].state = RoleState.STOPPED  # it is drained
        host.restarting.replace_supervisor(1, 7, "ActorDiedError")

    decisions = {event.role: event.standby for event in scenario(play).events if isinstance(event, ev.RestartDecided)}
    assert decisions.keys() == _NODES.keys() - {"rollout-0"}
    given = {"supervisor": "standby-1", "trainer-0": "standby-0"} if standbys == "warm" else {}
    assert {role: standby for role, standby in decisions.items() if standby} == given


def test_the_end_of_the_supervisor_in_a_full_restart_is_no_news() -> None:
    def play(host: _Host) -> None:
        host.state.recovery_mode = "full"
        for role in _NODES:
            host.record(decided(role, "full"))
        host.restarting.replace_supervisor(1, 7, "ActorDiedError")

    assert len([e for e in scenario(play).events if isinstance(e, ev.RestartDecided)]) == len(_NODES)


def test_a_role_that_is_just_being_added_is_no_part_of_a_full_restart() -> None:
    def play(host: _Host) -> None:
        host.lives.places[RoleId.parse("rollout-7")] = "node-1"  # its process has not said yet who it is
        host.record(decided("trainer-0", "full"))

    assert scenario(play).done == [f"start {len(_NODES)}", "run"]


def test_a_node_is_lost_with_roles_that_only_the_host_before_knew(tmp_path: Any) -> None:
    def play(host: _Host) -> None:
        host.shm = host.temp = tmp_path
        del host.lives.ticks["rollout-0"]  # it was added, and a resumed run begins with those of its configuration
        host.restarting._lose("node-1", "its raylet ended")

    assert [e.node for e in scenario(play).events if isinstance(e, ev.NodeLost)] == ["node-1"]


def test_what_stops_the_training_is_no_set_up_that_came_late() -> None:
    async def stopped() -> None:
        raise WaitTimeout("evaluation of 8 prompts")

    def play(host: _Host) -> None:
        host.run_training = stopped  # type: ignore[method-assign]
        host.record(decided("task_runner"))

    with pytest.raises(WaitTimeout, match="evaluation of 8 prompts"):
        scenario(play)


@pytest.mark.parametrize("error", [PeerDied("rollout-7 died during open()"), WaitTimeout("rollout-7.open()")])
def test_an_added_rollout_that_dies_or_hangs_before_it_joins_ends_no_job(error: RobustRLError) -> None:
    async def call(*_: Any, **__: Any) -> None:
        raise error

    host = _Host()
    host.lives.peer = lambda role: SimpleNamespace(call=call)
    asyncio.run(Serving(host)._join("rollout-7", host.lives.peer("rollout_manager")))  # type: ignore[arg-type]
    assert [type(event) for event in host.events] == ([ev.WarningRaised] if isinstance(error, WaitTimeout) else [])


@pytest.mark.parametrize("address", [None, "there:6379"])
def test_a_role_whose_agent_hangs_is_ended_by_the_host_where_it_can_be(address: str | None) -> None:
    def play(host: _Host) -> None:
        host.lives.late = "node_agent-1.kill"
        host.record(decided("rollout-0"))

    if address:
        with pytest.raises(WaitTimeout, match=r"node_agent-1\.kill"):
            scenario(play, address)
        return
    host = scenario(play)
    assert host.done[:2] == ["node_agent-1.kill rollout-0", "create rollout-0"]
    assert [event.cause for event in host.events if isinstance(event, ev.ProcessExited)] == ["ended by the host"]
