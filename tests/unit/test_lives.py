"""How a life begins, and what a process costs that ends before anybody knows who it is."""

from __future__ import annotations

import asyncio
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from robustrl.config import Deadlines, JobConfig
from robustrl.core import events as ev
from robustrl.core.roles import RoleId, RoleKind
from robustrl.errors import PeerDied, WaitTimeout
from robustrl.runtime import lives as lives_module
from robustrl.runtime.lives import Lives
from robustrl.runtime.processes import read_start_ticks


class _Death(Exception):
    """What Ray says of one."""


class _Cluster:
    """``fates`` of the processes in turn: None lives, an error is its end, "hangs" never answers."""

    def __init__(self, fates: list[Any]) -> None:
        self.nodes = [SimpleNamespace(name="node-0", ip="127.0.0.1")]
        self.fates, self.names = fates, list[str]()

    def create_actor(self, spec: Any, node: Any, name: str) -> Any:
        self.names.append(name)
        fate = self.fates.pop(0)

        async def identity() -> dict[str, int]:
            if fate == "hangs":
                await asyncio.sleep(3600)
            if fate:
                raise fate
            return {"pid": 7, "start_ticks": 8}

        return SimpleNamespace(identity=SimpleNamespace(remote=identity))


def create(monkeypatch: pytest.MonkeyPatch, fates: list[Any], **settings: Any) -> tuple[_Cluster, list[ev.Event], list[Any]]:
    """The cluster, what was recorded, and the processes that were ended unborn."""
    cluster, recorded, ended = _Cluster(fates), list[ev.Event](), list[Any]()
    monkeypatch.setattr(lives_module, "_actor_error", lambda: _Death)
    monkeypatch.setattr(lives_module, "_end_unborn", ended.append)
    config = JobConfig(profile="class", deadlines=Deadlines(role_start=0.02), **settings)
    host: Any = SimpleNamespace(
        config=config, cluster=cluster, record=recorded.append, state=SimpleNamespace(roles={}), spawn=lambda coroutine: coroutine.close(),
        run_id="r", run_dir="d", temp="t", shm="s", roles_address="a", token=None,
    )  # fmt: skip
    lives = Lives(host)
    lives.places = {RoleId.parse("supervisor"): "node-0"}
    lives._watch_role = lives._watch_if_there = lambda *_: SimpleNamespace(close=lambda: None)  # type: ignore[method-assign,assignment]
    try:
        asyncio.run(lives.create("supervisor"))
    finally:
        cluster.fates.append(lives.incarnations["supervisor"])
    return cluster, recorded, ended


def test_a_process_that_dies_or_hangs_before_it_says_who_it_is_is_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, recorded, ended = create(monkeypatch, [_Death(), "hangs", None])
    assert cluster.names == ["supervisor.1", "supervisor.1.2", "supervisor.1.3"], "one number for who is known, a name for each process"
    assert [type(event) for event in recorded] == [ev.WarningRaised, ev.WarningRaised, ev.RoleStarted]
    assert len(ended) == 1, "the one that hung"
    assert cluster.fates == [1]


@pytest.mark.parametrize(("restarts", "tries"), [(9, 3), (2, 2), (0, 1)])
def test_it_is_not_started_for_ever(monkeypatch: pytest.MonkeyPatch, restarts: int, tries: int) -> None:
    fates: list[Any] = [_Death() for _ in range(tries)]
    with pytest.raises(PeerDied, match="died at its start"):
        create(monkeypatch, fates, restarts=restarts)
    assert fates == [1], "all were used"


def test_a_start_that_fails_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an agent of the first attempt comes up beside that of the second, in a life of the same number."""
    ended = list[str]()

    async def create(self: Lives, role: str, standby: str = "") -> None:
        if role == "node_agent-0":
            raise PeerDied(role)
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(role)

    monkeypatch.setattr(Lives, "create", create)
    host: Any = SimpleNamespace(config=JobConfig(profile="class"))
    with pytest.raises(PeerDied, match="node_agent-0"):
        asyncio.run(asyncio.wait_for(_start(Lives(host), ended), 5))


async def _start(lives: Lives, ended: list[str]) -> None:
    try:
        await lives.start([RoleId.parse(role) for role in ("node_agent-1", "node_agent-0")])
    finally:
        assert ended == ["node_agent-1"]


def test_a_take_over_that_is_called_off_leaves_no_process_that_is_half_the_role() -> None:
    async def never() -> None:
        await asyncio.sleep(3600)

    async def scenario() -> None:
        child = subprocess.Popen(["sleep", "60"])
        view = SimpleNamespace(incarnation=1, pid=child.pid, kind=RoleKind.STANDBY, node="node-1")
        nodes = [SimpleNamespace(name=name, ip="127.0.0.1") for name in ("node-0", "node-1")]
        host: Any = SimpleNamespace(
            config=JobConfig(profile="class"), state=SimpleNamespace(roles={"standby-0": view}), cluster=SimpleNamespace(nodes=nodes),
            run_id="r", run_dir="d", temp="t", shm="s", roles_address="a", token=None,
        )  # fmt: skip
        lives = Lives(host)
        lives.places = {RoleId.parse("standby-0"): "node-1", RoleId.parse("trainer-0"): "node-0"}
        lives.actors["standby-0"] = SimpleNamespace(take_over=SimpleNamespace(remote=lambda spec: never()))
        lives.ticks["standby-0"] = read_start_ticks(child.pid)
        taking = asyncio.create_task(lives.create("trainer-0", "standby-0"))
        await asyncio.sleep(0.01)
        taking.cancel()
        await asyncio.wait([taking])
        assert child.wait(5) == -9 and lives.places[RoleId.parse("trainer-0")] == "node-0"

    asyncio.run(scenario())


def test_a_role_lives_without_an_agent_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery is only observed, the agent is dead, and the user has the role restarted."""
    recorded, tasks = list[ev.Event](), list[Any]()

    async def nobody(self: Lives, spec: Any, pid: int) -> None:
        raise WaitTimeout("node_agent-0 to come back after incarnation 1")

    monkeypatch.setattr(Lives, "watch_from_outside", nobody)
    host: Any = SimpleNamespace(record=recorded.append, spawn=lambda coroutine: tasks.append(coroutine.close()))
    lives = Lives(host)
    lives.actors["rollout-0"] = None
    spec: Any = SimpleNamespace(role="rollout-0", incarnation=2, node="node-0")
    asyncio.run(lives._started(spec, {"pid": 7, "start_ticks": 8}))
    assert [type(event) for event in recorded] == [ev.RoleStarted] and lives.ticks == {"rollout-0": 8}
