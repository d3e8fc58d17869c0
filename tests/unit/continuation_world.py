"""Rollouts, agents and time made up around a rollout manager and a request manager as they are: what the tests of continuation share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from robustrl.config import JobConfig
from robustrl.core import events as ev
from robustrl.errors import PeerDied
from robustrl.rl.trajectory import Part, Trajectory
from robustrl.runtime.request_manager import RequestManager
from robustrl.runtime.rollout_manager import RolloutManager
from robustrl.runtime.routes import Lane

CONFIG = JobConfig(profile="class", agent_workers=1, prompts_per_step=1, samples_per_prompt=4)


def part(number: int, at: int, count: int, version: int = 0, state: str = "") -> Part:
    """Tokens that are their own positions."""
    return Part(number, at, list(range(at, at + count)), [-0.5] * count, [1] * count, [(version, count)] if count else [], 0, state)


def body(*parts: Part) -> bytes:
    return msgspec.msgpack.encode(list(parts))


def trajectories(count: int = 4, batch: int = 1) -> list[Trajectory]:
    return [Trajectory(id=i, batch=batch, group=0, prompt="p", prompt_tokens=[7], columns={}) for i in range(1, count + 1)]


def journal(folder: Path, incarnation: int = 1, known: dict[str, Any] | None = None) -> RequestManager:
    """Without a process or a host; ``said`` are the events that it emitted."""
    made = RequestManager.__new__(RequestManager)
    here: Any = made
    here.spec = SimpleNamespace(run_dir=str(folder), incarnation=incarnation, role="request_manager", fresh=False)
    here.config, here.deadlines = CONFIG, CONFIG.deadlines
    here.page = SimpleNamespace(phase=None, update=lambda **_: None)
    here.said = []
    here.emit = here.said.append
    here.spawn = lambda coroutine: coroutine.close()

    async def ask_host(verb: str, **_: Any) -> Any:
        return known

    here.ask_host = ask_host
    return made


async def opened(folder: Path, **options: Any) -> RequestManager:
    made = journal(folder, **options)
    await made.on_open()
    return made


async def with_group(folder: Path, rollout: str = "rollout-0") -> RequestManager:
    made = await opened(folder)
    await made.queued([msgspec.msgpack.encode(t) for t in trajectories()])
    await made.started(1, 0, [1, 2, 3, 4], rollout, 1, 0)
    return made


def decoded(answer: bytes) -> list[Part]:
    return msgspec.msgpack.decode(answer, type=list[Part])


class MadeUpPeer:
    """Calls go to a function."""

    def __init__(self, role: str, answer: Callable[..., Awaitable[Any]]) -> None:
        self.role, self._answer = role, answer

    async def call(self, method: str, *args: Any, deadline: float, again: bool = False) -> Any:
        return await self._answer(method, *args)


class MadeUpRollout(MadeUpPeer):
    def __init__(self, role: str, version: int) -> None:
        super().__init__(role, self._do)
        self.got: dict[int, Trajectory] = {}
        self.resumed: list[int] = []
        self.dead = False
        self.version = version
        self.holds: list[int] = []

    async def _do(self, method: str, *args: Any) -> Any:
        if self.dead:
            raise PeerDied(self.role)
        if method == "submit":
            self.got.update({t.id: t for t in (msgspec.msgpack.decode(b, type=Trajectory) for b in args[0])})
        elif method == "resume":
            self.resumed.append(args[0])
        elif method == "reclaim":
            return self.version, [], [], self.holds
        elif method == "collect":
            await asyncio.sleep(3600)


class World:
    def __init__(self, folder: Path, versions: dict[str, int], **settings: Any) -> None:
        self.folder, self.settings = folder, settings
        self.rollouts = {role: MadeUpRollout(role, version) for role, version in versions.items()}
        self.tool: asyncio.Future[list[int] | None] = asyncio.get_running_loop().create_future()
        self.rated: list[list[Trajectory]] = []

    async def _agent(self, method: str, *args: Any) -> Any:
        if method == "tool":
            return await self.tool
        self.rated.append([msgspec.msgpack.decode(b, type=Trajectory) for b in args[0]])
        return [msgspec.msgpack.encode(msgspec.structs.replace(t, reward=1.0)) for t in self.rated[-1]], {}

    async def _journal_call(self, method: str, *args: Any) -> Any:
        return await getattr(self.journal, method)(*args)

    async def open(self, incarnation: int = 1) -> RolloutManager:
        if incarnation == 1:
            self.journal = await opened(self.folder)
        made = RolloutManager.__new__(RolloutManager)
        here: Any = made
        here.spec = SimpleNamespace(incarnation=incarnation, role="rollout_manager")
        here.config = msgspec.structs.replace(CONFIG, rollouts=len(self.rollouts), **self.settings)
        here.deadlines, here.log = CONFIG.deadlines, logging.getLogger("test")
        here.page = SimpleNamespace(update=lambda **_: None)
        here._tasks, here._set_up = set(), asyncio.Event()
        here.die = lambda error: pytest.fail(str(error))
        here.disturbance = SimpleNamespace(holds=lambda role: False)

        async def peer(role: str) -> Any:
            return self.rollouts.get(role) or MadeUpPeer(role, self._journal_call if role == "request_manager" else self._agent)

        async def lane(role: str) -> Lane:
            made = Lane(self.rollouts[role], 1)  # type: ignore[arg-type]
            made.version = self.rollouts[role].version if incarnation == 1 else -1
            return made

        async def ask_host(verb: str, **_: Any) -> Any:
            return [role for role, rollout in self.rollouts.items() if not rollout.dead] if verb == "ready" else {"step": 0}

        here.peer, here._lane, here.ask_host = peer, lane, ask_host
        await made.on_open()
        self.manager = made
        return made

    async def generate(self, count: int = 4) -> str:
        """The rollout that got the group."""
        await self.manager.generate([[msgspec.msgpack.encode(t) for t in trajectories(count)]])
        return await until(lambda: next((role for role, rollout in self.rollouts.items() if rollout.got), None))

    def lose(self, role: str) -> None:
        self.rollouts[role].dead = True
        self.manager._lose(next(lane for lane in self.manager._lanes if lane.role == role), "test")

    @property
    def events(self) -> list[ev.Event]:
        here: Any = self.journal
        return here.said


async def until(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(5.0):
        while not (value := condition()):
            await asyncio.sleep(0.001)
    return value


def run(folder: Path, scenario: Callable[[World], Awaitable[None]], versions: dict[str, int] | None = None, **settings: Any) -> None:
    async def main() -> None:
        world = World(folder, versions or {"rollout-0": 0, "rollout-1": 0, "rollout-2": 0}, **settings)
        await world.open()
        await scenario(world)

    asyncio.run(main())


def others(world: World, lost: str) -> dict[str, MadeUpRollout]:
    return {role: rollout for role, rollout in world.rollouts.items() if role != lost}
