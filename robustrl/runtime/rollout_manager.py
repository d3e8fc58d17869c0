"""The rollout manager: routes trajectories to rollouts and carries each to its end; it holds no weights and no text of its own.

One lane per living rollout: a long poll fetches finished trajectories and tool turns. A group (the samples of one prompt) goes whole to the
least loaded rollout whose committed version is new enough; its version is stamped there and then. Finished groups are rated by an agent
worker and handed to the request manager; only then does their rollout forget them.

When a rollout dies, each trajectory that it had not finished goes on at another one from the last token that the journal has: at one with
the version of that token while there is one, else as `JobConfig.version_switch` says. A trajectory that waits for a tool waits on here and
goes to its new rollout with the answer. A manager in a later life takes up what the journal and the rollouts hold, each rollout when it
answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import cycle
from typing import Any

import msgspec

from ..core.roles import Phase
from ..errors import PeerDied, WaitTimeout
from ..faults.orders import Order
from ..rl.trajectory import IN_TOOL, Trajectory, parts_decoder, resumed
from .role import Role, RoleSpec, within
from .routes import Group, Lane, Moving

_POLL = 1.0
"""Seconds that a rollout may hold back an empty answer."""
_HELD_LOOK = 0.1
"""Seconds between two looks at whether a rollout is still to get no work."""


class RolloutManager(Role):
    def __init__(self, spec: RoleSpec) -> None:
        super().__init__(spec)
        self._set_up = asyncio.Event()

    async def on_open(self) -> None:
        self._workers = [await self.peer(f"agent_worker-{i}") for i in range(self.config.agent_workers)]
        self._raters = cycle(self._workers)
        self._journal = await self.peer("request_manager")
        self._waiting: deque[Group] = deque()
        """Groups that no rollout has had yet."""
        self._moving: list[Moving] = []
        self._in_tool: set[int] = set()
        self._groups: dict[tuple[int, int], Group] = {}
        self._lanes: list[Lane] = []
        self._done = 0
        self._newest = 0
        self._changed = asyncio.Condition()
        if self.spec.incarnation == 1:
            for i in range(self.config.rollouts):
                self._take_in(await self._lane(f"rollout-{i}"))
        else:
            await self._recover()
        self.spawn(self._dispatch())
        self._set_up.set()

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
        """Take a rollout that is set up into the membership: from here on it hears of versions and gets work once it has one.

        Asked again for the same life, or for one that this manager found when it began: no change.
        """
        await self._when_set_up()
        lane = await self._lane(role)
        if all((known.role, known.incarnation) != (role, lane.incarnation) for known in self._lanes):
            self._take_in(lane)
        await lane.peer.call("sync", self._newest, deadline=self.deadlines.call)

    async def _when_set_up(self) -> None:
        """The host may call a life that is not open yet: a rollout came back beside it."""
        await within(self.deadlines.call, f"{self.spec.role} to be set up", self._set_up.wait())

    async def drain(self, role: str) -> None:
        """This rollout gets no more work, and what it has not finished goes on elsewhere. Asked again: no change."""
        await self._when_set_up()
        for lane in [lane for lane in self._lanes if lane.role == role]:
            self._lose(lane, "it is drained")

    async def sync(self, version: int) -> None:
        """Tell every rollout of this membership view that ``version`` is there to be pulled."""
        self._newest = max(self._newest, version)
        for lane in self._lanes:
            self.spawn(self._hand_over(lane, "sync", version))

    async def _hand_over(self, lane: Lane, method: str, *args: Any) -> None:
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

    async def disturb(self, order: Order) -> None:
        """See Role. A rollout that is to get no work gets none from now on, and some again when that is over, whatever is dispatched."""
        await super().disturb(order)
        if order.role != self.spec.role:
            self.spawn(self._hold(order.role))

    async def _hold(self, role: str) -> None:
        while self.disturbance.holds(role):
            await asyncio.sleep(_HELD_LOOK)
        async with self._changed:
            self._changed.notify_all()

    # -- lanes ---

    def _least_version(self, batch: int) -> int:
        return batch - 1 - self.config.staleness

    async def _lane(self, role: str) -> Lane:
        """Of the role's present life."""
        peer = await self.life(role)
        incarnation, _ = await self.present(role)
        return Lane(peer, incarnation)

    def _take_in(self, lane: Lane) -> None:
        self._enter(lane)
        self.spawn(self._poll(lane))

    def _enter(self, lane: Lane) -> None:
        for old in [old for old in self._lanes if old.role == lane.role]:
            self._lose(old, "its next life is there")
        self._lanes.append(lane)

    async def _queue(self, trajectories: list[Trajectory], least_version: int, done: asyncio.Future | None = None) -> None:
        key = trajectories[0].batch, trajectories[0].group
        async with self._changed:
            self._groups[key] = group = Group(key, least_version, {t.id: t for t in trajectories}, {t.id for t in trajectories}, done=done)
            self._waiting.append(group)
            self._changed.notify_all()

    def _free_lane(self, group: Group) -> Lane | None:
        count = len(group.trajectories)
        limit = max(self.config.rollout_concurrency, count)
        able = [lane for lane in self._lanes if lane.version >= group.least_version and len(lane.open) + count <= limit]
        able = [lane for lane in able if not self.disturbance.holds(lane.role)]
        return min(able, key=lambda lane: len(lane.open), default=None)

    def _next_lane(self, moving: Moving) -> Lane | None:
        """The least loaded of those with the version of its last token; where none has that any more, of all with a newer one.

        No limit: an engine keeps those that it has no place for.
        """
        able = [lane for lane in self._lanes if lane.version >= moving.oldest_version]
        same = [lane for lane in able if lane.version == moving.trajectory.last_version]
        return min(same or able, key=lambda lane: len(lane.open), default=None)

    def _placeable(self) -> bool:
        return any(map(self._next_lane, self._moving)) or bool(self._waiting and self._free_lane(self._waiting[0]))

    async def _dispatch(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(self._placeable)
                moves = self._place_moving()
                group, lane = (self._waiting[0], self._free_lane(self._waiting[0])) if self._waiting else (None, None)
                if group and lane:
                    self._waiting.popleft()
                    lane.open |= group.unfinished
                    group.started = lane.version
            for (target, source, version), moved in moves.items():
                await self._send_moved(target, source, version, moved)
            if group and lane:
                if group.done is None:
                    arguments = (*group.key, sorted(group.unfinished), lane.role, lane.incarnation, group.started)
                    await self._journal.call("started", *arguments, deadline=self.deadlines.call, again=True)
                self._submit(lane, [group.trajectories[i] for i in sorted(group.unfinished)])
            self._show()

    def _place_moving(self) -> dict[tuple[Lane, str, int], list[Moving]]:
        """Those that some rollout can take, by that rollout, the one that had them, and the version there."""
        moves: dict[tuple[Lane, str, int], list[Moving]] = {}
        for moving in list(self._moving):
            if lane := self._next_lane(moving):
                self._moving.remove(moving)
                lane.open.add(moving.number)
                moves.setdefault((lane, moving.source, lane.version), []).append(moving)
        return moves

    async def _send_moved(self, lane: Lane, source: str, version: int, moved: list[Moving]) -> None:
        trained = [m for m in moved if m.group.done is None]
        switched = [m for m in trained if m.trajectory.tokens and m.trajectory.last_version != version]
        if self.config.version_switch == "drop" and switched:
            await self._drop(lane, switched, f"{source} died and no other rollout had its version")
            trained = [m for m in trained if m not in switched]
            moved = [m for m in moved if m not in switched]
        if trained:
            kept = [sum(m.trajectory.mask) for m in trained]
            arguments = ([m.number for m in trained], source, lane.role, lane.incarnation, version, kept)
            await self._journal.call("moved", *arguments, deadline=self.deadlines.call, again=True)
        if moved:
            self._submit(lane, [m.trajectory for m in moved])

    async def _drop(self, lane: Lane, dropped: list[Moving], reason: str) -> None:
        await self._journal.call("dropped", [m.number for m in dropped], reason, deadline=self.deadlines.call, again=True)
        for moving in dropped:
            lane.open.discard(moving.number)
            del moving.group.trajectories[moving.number]
            self._ended(moving.group, moving.number)

    def _submit(self, lane: Lane, trajectories: list[Trajectory]) -> None:
        self.spawn(self._hand_over(lane, "submit", [msgspec.msgpack.encode(t) for t in trajectories]))

    async def _poll(self, lane: Lane) -> None:
        """What the rollout has finished, and what waits for a tool, as it comes. What a call that had no answer in time has taken with it
        is asked for again: whether the rollout hangs is the detector's question."""
        late = lane.inherited is not None
        while lane.alive:
            try:
                if late:
                    await self._reclaim(lane)
                    late = False
                acknowledged, lane.acknowledged = lane.acknowledged, []
                answer = await lane.peer.call("collect", _POLL, acknowledged, deadline=_POLL + self.deadlines.call)
            except PeerDied:
                self._lose(lane, "it died")
            except WaitTimeout as error:
                self.log.warning("%s", error)
                late = True
            else:
                if lane.alive:
                    await self._take(lane, *answer)

    async def _take(self, lane: Lane, version: int, finished: list[tuple[int, bytes]], tools: list[bytes]) -> None:
        async with self._changed:
            if not lane.alive:  # lost while this waited: what it had open goes on elsewhere, and ends there alone
                return
            lane.version = version
            lane.open.difference_update(number for number, _ in finished)
            self._changed.notify_all()
        for trajectory in [msgspec.msgpack.decode(body, type=Trajectory) for body in tools]:
            if trajectory.id not in self._in_tool:
                self.spawn(self._tool_turn(lane, trajectory))
        for _, body in finished:
            self._collect(lane, msgspec.msgpack.decode(body, type=Trajectory))
        self._show()

    def _lose(self, lane: Lane, reason: str) -> None:
        """What this rollout had not finished goes on elsewhere."""
        if not lane.alive:
            return
        lane.alive = False
        self._lanes.remove(lane)
        lost = sorted(i for group in self._groups.values() for i in lane.open & group.unfinished)
        self.log.warning("%s is lost (%s): %d trajectories go on elsewhere", lane.role, reason, len(lost))
        self.spawn(self._move(lane, lost))

    async def _move(self, lane: Lane, ids: list[int]) -> None:
        """Those of its trajectories that wait for a tool go on when it answers, the others now, as far as the journal knows them."""
        ids = [i for i in ids if i not in self._in_tool]
        arguments = lane.role, lane.incarnation, [i for i in ids if i > 0], not lane.alive
        body = await self._journal.call("taken_back", *arguments, deadline=self.deadlines.call, again=True)
        parts = {part.id: part for part in parts_decoder.decode(body)}
        groups = {i: group for group in self._groups.values() for i in group.unfinished}
        for number in ids:
            group = groups[number]
            group.trajectories[number] = trajectory = resumed(group.trajectories[number], parts.get(number))
            if trajectory.finish:
                self._ended(group, number)
            elif number in parts and parts[number].state == IN_TOOL:
                self.spawn(self._tool_turn(lane, trajectory))
            else:
                self._moving.append(Moving(group, number, lane.role))
        async with self._changed:
            self._changed.notify_all()

    async def _tool_turn(self, lane: Lane, trajectory: Trajectory) -> None:
        """The tool's answer goes to the rollout that has the trajectory, or with the trajectory to its next one."""
        self._in_tool.add(trajectory.id)
        worker = self._workers[trajectory.id % len(self._workers)]  # each turn has one worker, which answers it once
        tokens = await worker.call("tool", msgspec.msgpack.encode(trajectory), deadline=self.deadlines.generation, again=True)
        self._in_tool.discard(trajectory.id)
        if lane.alive:
            await self._hand_over(lane, "resume", trajectory.id, tokens)
            return
        group = self._groups.get((trajectory.batch, trajectory.group))
        if group is None or trajectory.id not in group.unfinished:
            return
        group.trajectories[trajectory.id] = trajectory
        if tokens is None:
            trajectory.finish = "stop"
            self._ended(group, trajectory.id)
            return
        trajectory.answered(tokens, trajectory.last_version)
        async with self._changed:
            self._moving.append(Moving(group, trajectory.id, lane.role))
            self._changed.notify_all()

    def _collect(self, lane: Lane, trajectory: Trajectory) -> None:
        group = self._groups.get((trajectory.batch, trajectory.group))
        if group is None or trajectory.id not in group.unfinished:
            lane.acknowledged.append(trajectory.id)  # it is in the journal, or an evaluation that nobody waits for any more
            return
        group.trajectories[trajectory.id] = trajectory
        group.holder[trajectory.id] = lane
        self._ended(group, trajectory.id)

    def _ended(self, group: Group, number: int) -> None:
        group.unfinished.discard(number)
        if not group.unfinished:
            self.spawn(self._rate(group))

    async def _rate(self, group: Group) -> None:
        bodies = [msgspec.msgpack.encode(t) for t in group.trajectories.values()]
        if bodies:
            bodies, dropped = await next(self._raters).call("score", bodies, deadline=self.deadlines.generation, again=True)
        if group.done is not None:
            if not group.done.done():
                group.done.set_result([msgspec.msgpack.decode(body, type=Trajectory) for body in bodies])
        elif bodies:
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
        """Each trajectory that the journal calls unfinished is waiting, or held by a rollout, or by one that has died."""
        rows = await self._journal.call("unfinished", deadline=self.deadlines.call, again=True)
        self._newest = (await self.ask_host("known"))["step"]
        held: dict[tuple[str, int], set[int]] = {}
        for body, rollout, incarnation, version in rows:
            trajectory = msgspec.msgpack.decode(body, type=Trajectory)
            key = trajectory.batch, trajectory.group
            group = self._groups.setdefault(key, Group(key, self._least_version(key[0]), {}, set(), started=version))
            group.trajectories[trajectory.id] = trajectory
            group.unfinished.add(trajectory.id)
            if rollout:
                held.setdefault((rollout, incarnation), set()).add(trajectory.id)
        self._waiting.extend(group for group in self._groups.values() if group.started < 0)
        for role in await self.ask_host("ready", kind="rollout"):
            try:
                lane = await self._lane(role)
            except PeerDied:
                continue
            lane.open = held.pop((role, lane.incarnation), set())
            lane.inherited = set(lane.open)
            self._take_in(lane)
        for (role, incarnation), ids in held.items():
            dead = Lane(await self.peer(role), incarnation)
            dead.alive = False
            self.spawn(self._move(dead, sorted(ids)))

    async def _reclaim(self, lane: Lane) -> None:
        """All that the rollout has and nobody has acknowledged. Of what an earlier life of this manager gave it, evaluations are asked for
        anew by whoever wants them, and what it never got goes on elsewhere."""
        version, finished, tools, running = await lane.peer.call("reclaim", deadline=self.deadlines.call)
        if lane.inherited is not None:
            waiting = {msgspec.msgpack.decode(body, type=Trajectory).id: body for body in tools}
            evaluations = [number for number in (*running, *waiting) if number < 0]
            await lane.peer.call("abort", evaluations, deadline=self.deadlines.call)
            tools = [body for number, body in waiting.items() if number > 0]
            missing = lane.inherited - {*running, *waiting, *(number for number, _ in finished)}
            if not lane.alive:
                return
            lane.inherited = None
            lane.open -= missing
            if missing:
                self.spawn(self._move(lane, sorted(missing)))
        if lane.alive:
            await self._take(lane, version, finished, tools)
