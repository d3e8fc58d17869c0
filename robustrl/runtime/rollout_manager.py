"""The rollout manager: routes trajectories to rollouts and carries each to its end; it holds no weights and no text of its own.

One lane per rollout: a long poll fetches finished trajectories and tool turns. A group (the samples of one prompt) goes whole to the
least loaded rollout whose committed version is new enough; its version is stamped there and then. Finished groups are rated by an agent
worker and handed to the request manager.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import cycle

import msgspec

from ..core.roles import Phase
from ..rl.trajectory import Trajectory
from .role import Peer, Role, within

_POLL = 1.0
"""Seconds that a rollout may hold back an empty answer."""


class _Lane:
    def __init__(self, peer: Peer) -> None:
        self.peer, self.role = peer, peer.role
        self.version = -1
        self.open: set[int] = set()


class _Group(msgspec.Struct):
    key: tuple[int, int]
    """(batch, group); batch 0 are evaluations."""
    least_version: int
    trajectories: list[Trajectory]
    unfinished: int
    done: asyncio.Future[list[Trajectory]] | None = None


class RolloutManager(Role):
    async def on_open(self) -> None:
        self._lanes = [_Lane(await self.peer(f"rollout-{i}")) for i in range(self.config.rollouts)]
        self._workers = cycle([await self.peer(f"agent_worker-{i}") for i in range(self.config.agent_workers)])
        self._journal = await self.peer("request_manager")
        self._waiting: deque[_Group] = deque()
        self._groups: dict[tuple[int, int], _Group] = {}
        self._done = 0
        self._newest = 0
        self._changed = asyncio.Condition()
        for lane in self._lanes:
            self.spawn(self._poll(lane))
        self.spawn(self._dispatch())

    # -- what the task runner asks for ---

    async def generate(self, groups: list[list[bytes]], least_version: int) -> None:
        """Queue groups of trajectories; returns at once. They end in the request manager."""
        for bodies in groups:
            await self._queue([msgspec.msgpack.decode(body, type=Trajectory) for body in bodies], least_version)

    async def evaluate(self, bodies: list[bytes], least_version: int) -> list[tuple[str, str, float]]:
        """(prompt, text, reward) of each trajectory; evaluations are no part of the ledger."""
        futures = []
        for body in bodies:
            futures.append(asyncio.get_running_loop().create_future())
            await self._queue([msgspec.msgpack.decode(body, type=Trajectory)], least_version, futures[-1])
        groups = await within(self.deadlines.generation, f"evaluation of {len(bodies)} prompts", asyncio.gather(*futures))
        return [(t.prompt, t.text, t.reward or 0.0) for group in groups for t in group]

    async def add_rollout(self, role: str) -> None:
        """Take a rollout that is set up into the membership: from here on it hears of versions and gets work once it has one."""
        lane = _Lane(await self.peer(role))
        self._lanes.append(lane)
        self.spawn(self._poll(lane))
        await lane.peer.call("sync", self._newest, deadline=self.deadlines.call)

    async def sync(self, version: int) -> None:
        """Tell every rollout of this membership view that ``version`` is there to be pulled."""
        self._newest = max(self._newest, version)
        lanes = list(self._lanes)
        await asyncio.gather(*(lane.peer.call("sync", version, deadline=self.deadlines.call) for lane in lanes))

    async def wait_version(self, version: int, deadline: float) -> None:
        """Return when every rollout has committed ``version`` or a newer one."""

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: all(lane.version >= version for lane in self._lanes))

        await within(deadline, f"rollouts to commit weight version {version}", wait())

    # -- lanes ---

    async def _queue(self, trajectories: list[Trajectory], least_version: int, done: asyncio.Future | None = None) -> None:
        group = _Group((trajectories[0].batch, trajectories[0].group), least_version, trajectories, len(trajectories), done)
        async with self._changed:
            self._groups[group.key] = group
            self._waiting.append(group)
            self._changed.notify_all()

    def _free_lane(self, group: _Group) -> _Lane | None:
        limit = max(self.config.rollout_concurrency, len(group.trajectories))
        able = [lane for lane in self._lanes if lane.version >= group.least_version and len(lane.open) + len(group.trajectories) <= limit]
        return min(able, key=lambda lane: len(lane.open), default=None)

    async def _dispatch(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting and self._free_lane(self._waiting[0]))
                group = self._waiting.popleft()
                lane = self._free_lane(group)
                assert lane is not None
                lane.open.update(t.id for t in group.trajectories)
            batch, number = group.key
            if group.done is None:
                ids = [t.id for t in group.trajectories]
                await self._journal.call("started", batch, number, ids, lane.role, lane.version, deadline=self.deadlines.call)
            await lane.peer.call("submit", [msgspec.msgpack.encode(t) for t in group.trajectories], deadline=self.deadlines.call)
            self._show()

    async def _poll(self, lane: _Lane) -> None:
        while True:
            version, finished, tools = await lane.peer.call("collect", _POLL, deadline=_POLL + self.deadlines.call)
            async with self._changed:
                lane.version = version
                lane.open.difference_update(t for t, _ in finished)
                self._changed.notify_all()
            for body in tools:
                self.spawn(self._tool_turn(lane, body))
            for _, body in finished:
                self._collect(msgspec.msgpack.decode(body, type=Trajectory))
            self._show()

    async def _tool_turn(self, lane: _Lane, body: bytes) -> None:
        trajectory = msgspec.msgpack.decode(body, type=Trajectory)
        tokens = await next(self._workers).call("tool", body, deadline=self.deadlines.generation)
        await lane.peer.call("resume", trajectory.id, tokens, deadline=self.deadlines.call)

    def _collect(self, trajectory: Trajectory) -> None:
        group = self._groups[trajectory.batch, trajectory.group]
        place = next(i for i, t in enumerate(group.trajectories) if t.id == trajectory.id)
        group.trajectories[place] = trajectory
        group.unfinished -= 1
        if not group.unfinished:
            del self._groups[group.key]
            self.spawn(self._rate(group))

    async def _rate(self, group: _Group) -> None:
        bodies = [msgspec.msgpack.encode(t) for t in group.trajectories]
        bodies, dropped = await next(self._workers).call("score", bodies, deadline=self.deadlines.generation)
        if group.done is not None:
            group.done.set_result([msgspec.msgpack.decode(body, type=Trajectory) for body in bodies])
        else:
            await self._journal.call("finished", bodies, dropped, deadline=self.deadlines.call)
        self._done += len(bodies)
        self._show()

    def _show(self) -> None:
        self.page.update(progress=self._done, pending=sum(g.unfinished for g in self._groups.values()))
        self.page.phase = Phase.RUNNING if self._groups else Phase.IDLE
