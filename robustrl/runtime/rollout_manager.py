"""The rollout manager: routes trajectories to rollouts and carries each to its end; it holds no weights and no text of its own.

One lane per living rollout: a long poll fetches finished trajectories and tool turns. A group (the samples of one prompt) goes whole to the
least loaded rollout whose committed version is new enough; its version is stamped there and then. Finished groups are rated by an agent
worker and handed to the request manager; only then does their rollout forget them. When a rollout dies, what it had not finished goes to
others and starts again from its prompt. A manager in a later life takes up what the journal and the rollouts hold.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import cycle
from typing import Any

import msgspec

from ..core import events as ev
from ..core.roles import Phase
from ..errors import PeerDied, WaitTimeout
from ..rl.trajectory import Trajectory
from .role import Peer, Role, within

_POLL = 1.0
"""Seconds that a rollout may hold back an empty answer."""


class _Lane:
    """One life of one rollout."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.role = peer, peer.role
        self.version = -1
        self.open: set[int] = set()
        self.acknowledged: list[int] = []
        self.alive = True


class _Group(msgspec.Struct):
    key: tuple[int, int]
    """(batch, group); batch 0 are evaluations."""
    least_version: int
    trajectories: dict[int, Trajectory]
    unfinished: set[int]
    holder: dict[int, _Lane] = {}
    """Lane of each trajectory that finished, for its acknowledgement."""
    done: asyncio.Future[list[Trajectory]] | None = None


class _Work(msgspec.Struct):
    """Trajectories of one group that wait for a rollout."""

    group: _Group
    ids: list[int]
    lost_by: str = ""
    """The rollout that had them and died; empty: they were nowhere yet."""


class RolloutManager(Role):
    async def on_open(self) -> None:
        self._workers = cycle([await self.peer(f"agent_worker-{i}") for i in range(self.config.agent_workers)])
        self._journal = await self.peer("request_manager")
        self._waiting: deque[_Work] = deque()
        self._groups: dict[tuple[int, int], _Group] = {}
        self._lanes: list[_Lane] = []
        self._done = 0
        self._newest = 0
        self._changed = asyncio.Condition()
        if self.spec.incarnation == 1:
            for i in range(self.config.rollouts):
                self._take_in(_Lane(await self.life(f"rollout-{i}")))
        else:
            await self._recover()
        self.spawn(self._dispatch())

    # -- what others ask for ---

    async def generate(self, batch: list[list[bytes]]) -> None:
        """Queue the groups of a batch; returns when the journal has them. They end in the request manager. Asked again: no change."""
        await self._journal.call("queued", [body for bodies in batch for body in bodies], deadline=self.deadlines.call, again=True)
        for bodies in batch:
            trajectories = [msgspec.msgpack.decode(body, type=Trajectory) for body in bodies]
            if (trajectories[0].batch, trajectories[0].group) not in self._groups:
                await self._queue(trajectories, self._least_version(trajectories[0].batch))

    async def evaluate(self, bodies: list[bytes], least_version: int) -> list[tuple[str, str, float]]:
        """(prompt, text, reward) of each trajectory; evaluations are no part of the ledger. Asked again, by a task runner in a later life:
        what is under way is waited for.
        """
        futures = []
        for body in bodies:
            trajectory = msgspec.msgpack.decode(body, type=Trajectory)
            under_way = self._groups.get((trajectory.batch, trajectory.group))
            done = under_way.done if under_way else None
            if done is None:
                done = asyncio.get_running_loop().create_future()
                await self._queue([trajectory], least_version, done)
            futures.append(asyncio.shield(done))
        groups = await within(self.deadlines.generation, f"evaluation of {len(bodies)} prompts", asyncio.gather(*futures))
        return [(t.prompt, t.text, t.reward or 0.0) for group in groups for t in group]

    async def add_rollout(self, role: str) -> None:
        """Take a rollout that is set up into the membership: from here on it hears of versions and gets work once it has one."""
        lane = _Lane(await self.life(role))
        self._take_in(lane)
        await lane.peer.call("sync", self._newest, deadline=self.deadlines.call)

    async def sync(self, version: int) -> None:
        """Tell every rollout of this membership view that ``version`` is there to be pulled."""
        self._newest = max(self._newest, version)
        for lane in self._lanes:
            self.spawn(self._hand_over(lane, "sync", version))

    async def _hand_over(self, lane: _Lane, method: str, *args: Any) -> None:
        """A call that no one waits for, so that a rollout that hangs delays no other; it gets the call when it goes on, if it ever does."""
        try:
            await lane.peer.call(method, *args, deadline=self.deadlines.call)
        except PeerDied:
            self._lose(lane, "it died")
        except WaitTimeout as error:
            self.log.warning("%s", error)

    async def wait_version(self, version: int, deadline: float) -> None:
        """Return when there are rollouts and each of them has committed ``version`` or a newer one."""

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: self._lanes and all(lane.version >= version for lane in self._lanes))

        await within(deadline, f"rollouts to commit weight version {version}", wait())

    # -- lanes ---

    def _least_version(self, batch: int) -> int:
        return batch - 1 - self.config.staleness

    def _take_in(self, lane: _Lane) -> None:
        for old in [old for old in self._lanes if old.role == lane.role]:
            self._lose(old, "its next life is there")
        self._lanes.append(lane)
        self.spawn(self._poll(lane))

    async def _queue(self, trajectories: list[Trajectory], least_version: int, done: asyncio.Future | None = None) -> None:
        ids = [t.id for t in trajectories]
        key = trajectories[0].batch, trajectories[0].group
        group = _Group(key, least_version, {t.id: t for t in trajectories}, set(ids), done=done)
        async with self._changed:
            self._groups[key] = group
            self._waiting.append(_Work(group, ids))
            self._changed.notify_all()

    def _free_lane(self, work: _Work) -> _Lane | None:
        limit = max(self.config.rollout_concurrency, len(work.ids))
        able = [lane for lane in self._lanes if lane.version >= work.group.least_version and len(lane.open) + len(work.ids) <= limit]
        return min(able, key=lambda lane: len(lane.open), default=None)

    async def _dispatch(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting and self._free_lane(self._waiting[0]))
                work = self._waiting.popleft()
                lane = self._free_lane(work)
                assert lane is not None
                lane.open.update(work.ids)
            group = work.group
            if group.done is None and work.lost_by:
                kept = [len(group.trajectories[i].tokens) for i in work.ids]
                self.emit(ev.TrajectoriesMoved(ids=work.ids, source=work.lost_by, target=lane.role, version=lane.version, kept=kept))
            elif group.done is None:
                arguments = (*group.key, work.ids, lane.role, lane.version)
                await self._journal.call("started", *arguments, deadline=self.deadlines.call, again=True)
            bodies = [msgspec.msgpack.encode(group.trajectories[i]) for i in work.ids]
            self.spawn(self._hand_over(lane, "submit", bodies))
            self._show()

    async def _poll(self, lane: _Lane) -> None:
        while lane.alive:
            acknowledged, lane.acknowledged = lane.acknowledged, []
            try:
                # what a late answer holds would be lost with it: whether the rollout hangs is the detector's question
                limit = _POLL + max(self.deadlines.call, self.deadlines.generation)
                version, finished, tools = await lane.peer.call("collect", _POLL, acknowledged, deadline=limit)
            except PeerDied:
                self._lose(lane, "it died")
                return
            if lane.alive:
                await self._take(lane, version, finished, tools)

    async def _take(self, lane: _Lane, version: int, finished: list[tuple[int, bytes]], tools: list[bytes]) -> None:
        async with self._changed:
            lane.version = version
            lane.open.difference_update(number for number, _ in finished)
            self._changed.notify_all()
        for body in tools:
            self.spawn(self._tool_turn(lane, body))
        for _, body in finished:
            self._collect(lane, msgspec.msgpack.decode(body, type=Trajectory))
        self._show()

    def _lose(self, lane: _Lane, reason: str) -> None:
        """What this rollout had not finished starts again elsewhere, from its prompt."""
        if not lane.alive:
            return
        lane.alive = False
        self._lanes.remove(lane)
        by_group: dict[tuple[int, int], list[int]] = {}
        for group in self._groups.values():
            if lost := sorted(lane.open & group.unfinished):
                by_group[group.key] = lost
        for key, ids in by_group.items():
            group = self._groups[key]
            for number in ids:
                group.trajectories[number] = _from_its_prompt(group.trajectories[number])
            self._waiting.appendleft(_Work(group, ids, lost_by=lane.role))
        self.log.warning("%s is lost (%s): %d trajectories start again elsewhere", lane.role, reason, sum(map(len, by_group.values())))
        self.spawn(self._tell_changed())

    async def _tell_changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _tool_turn(self, lane: _Lane, body: bytes) -> None:
        trajectory = msgspec.msgpack.decode(body, type=Trajectory)
        tokens = await next(self._workers).call("tool", body, deadline=self.deadlines.generation, again=True)
        if lane.alive:
            await self._hand_over(lane, "resume", trajectory.id, tokens)

    def _collect(self, lane: _Lane, trajectory: Trajectory) -> None:
        group = self._groups.get((trajectory.batch, trajectory.group))
        if group is None or trajectory.id not in group.unfinished:
            lane.acknowledged.append(trajectory.id)  # it is in the journal, or an evaluation that nobody waits for any more
            return
        group.trajectories[trajectory.id] = trajectory
        group.holder[trajectory.id] = lane
        group.unfinished.discard(trajectory.id)
        if not group.unfinished:
            self.spawn(self._rate(group))

    async def _rate(self, group: _Group) -> None:
        bodies = [msgspec.msgpack.encode(t) for t in group.trajectories.values()]
        bodies, dropped = await next(self._workers).call("score", bodies, deadline=self.deadlines.generation, again=True)
        if group.done is not None:
            if not group.done.done():
                group.done.set_result([msgspec.msgpack.decode(body, type=Trajectory) for body in bodies])
        else:
            await self._journal.call("finished", bodies, dropped, deadline=self.deadlines.call, again=True)
        del self._groups[group.key]
        for number, lane in group.holder.items():
            lane.acknowledged.append(number)
        self._done += len(bodies)
        self._show()

    def _show(self) -> None:
        self.page.update(progress=self._done, pending=sum(len(g.unfinished) for g in self._groups.values()))
        self.page.phase = Phase.RUNNING if self._groups else Phase.IDLE

    # -- a later life ---

    async def _recover(self) -> None:
        """Each trajectory that the journal calls unfinished: finished, running or in a tool at a rollout, or else to be sent out again."""
        unfinished = await self._journal.call("unfinished", deadline=self.deadlines.call, again=True)
        sent_to: dict[int, str] = {}
        self._newest = (await self.ask_host("known"))["step"]
        groups: dict[tuple[int, int], list[Trajectory]] = {}
        for body, rollout in unfinished:
            trajectory = msgspec.msgpack.decode(body, type=Trajectory)
            sent_to[trajectory.id] = rollout
            groups.setdefault((trajectory.batch, trajectory.group), []).append(trajectory)
        for key, members in groups.items():
            self._groups[key] = _Group(key, self._least_version(key[0]), {t.id: t for t in members}, {t.id for t in members})
        held: set[int] = set()
        for role in await self.ask_host("ready", kind="rollout"):
            lane = _Lane(await self.life(role))
            try:
                version, finished, tools, running = await lane.peer.call("reclaim", deadline=self.deadlines.call)
                await lane.peer.call("abort", [number for number in running if number < 0], deadline=self.deadlines.call)
            except PeerDied:
                continue
            in_tools = {msgspec.msgpack.decode(body, type=Trajectory).id for body in tools}
            lane.open = {number for number in {*running, *in_tools} if number > 0}
            held |= lane.open | {number for number, _ in finished}
            self._take_in(lane)
            await self._take(lane, version, finished, tools)
        for group in self._groups.values():
            for rollout in sorted(set(sent_to.values())):
                if missing := sorted(number for number in group.unfinished - held if sent_to[number] == rollout):
                    self._waiting.append(_Work(group, missing, lost_by=rollout))


def _from_its_prompt(trajectory: Trajectory) -> Trajectory:
    return msgspec.structs.replace(trajectory, tokens=[], logprobs=[], mask=[], versions=[], tool_turns=0, finish="")
