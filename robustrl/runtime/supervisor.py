"""The supervisor: decides from the log, and hands out leases on weights. Nothing it knows is anywhere but in the log.

It follows the host's event stream from the first entry, so a second incarnation knows what the first one knew: what the detector and the
lifecycle say of the past is in the log already, and only what is missing there is said. Detector and policy are those of core/; this file
gives them entries and time, and carries questions to the roles.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import msgspec

from ..core import events as ev
from ..core.detection import Detector
from ..core.lifecycle import Lifecycle
from ..core.roles import Phase, RoleKind
from ..core.thresholds import Thresholds
from ..core.weights import Ask, WeightDirectory
from ..errors import PeerDied, WaitTimeout
from .role import OWN_CLOCK, OWN_GAP, Role

_HELD_BACK = 0.5
"""Seconds that a puller's question waits for the version to be announced."""
_TICK_ECHO = 0.5
"""Seconds after which a tick that changed nothing is given again."""
_NEXT_LOOK = 0.02
"""Seconds between two looks at a deadline that has passed, while its tick is on its way."""
_RESOLUTION = 0.001
"""Seconds by which a look may miss its deadline."""
_AT_ONCE = 1000
"""Entries after which the loop comes round, however long the log is that a later life begins with."""
_MARKS_EVERY = 1.0
_LEASES_PER_LIFE = 10**9


class Ticks:
    """When a tick is due: once for each deadline as it passes, and again for one that still stands after `_TICK_ECHO` seconds. Pure."""

    def __init__(self) -> None:
        self._given_for: float | None = None
        self._given = -math.inf

    def look(self, now: float, deadline: float | None) -> tuple[bool, float]:
        """(whether to give one now, seconds until the next look); both times by the log's clock."""
        if deadline is None or now < deadline:
            return False, OWN_CLOCK if deadline is None else min(OWN_CLOCK, max(_RESOLUTION, deadline - now))
        due = deadline != self._given_for or now - self._given >= _TICK_ECHO
        if due:
            self._given_for, self._given = deadline, now
        return due, _NEXT_LOOK


class Supervisor(Role):
    async def on_open(self) -> None:
        self._lifecycle = Lifecycle()
        self._detector = Detector(Thresholds.named(self.config.thresholds))
        self._directory = WeightDirectory(first_lease=(self.spec.incarnation - 1) * _LEASES_PER_LIFE + 1)
        self._changed = asyncio.Condition()
        self._entries: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self._handled = 0
        self._live = False
        """False: the entries are those that an earlier life, if there was one, has judged."""
        self._last = -math.inf
        self._behind = math.inf
        """This process's clock less the host's: the smallest difference seen."""
        self._asked: set[tuple[str, int, int]] = set()
        self._node_of: dict[str, str] = {}
        self._lives: dict[str, int] = {}
        self._marks_sent: dict[str, Any] = {}
        loop = asyncio.get_running_loop()
        self.host.subscribe(lambda lines: loop.call_soon_threadsafe(self._entries.put_nowait, lines), after=0)
        self.spawn(self._follow())
        self.spawn(self._keep_time())
        self.spawn(self._send_marks())

    async def _follow(self) -> None:
        while True:
            lines = await self._entries.get()
            while not self._entries.empty() and len(lines) < _AT_ONCE:
                lines = lines + self._entries.get_nowait()
            self.page.phase = Phase.RUNNING
            self._take([ev.entry_decoder.decode(line) for line in lines])
            self._handled += len(lines)
            self.page.update(progress=self._handled, pending=self._entries.qsize())
            self.page.phase = Phase.IDLE
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(0)

    def _take(self, entries: list[ev.Entry]) -> None:
        verdicts: list[ev.Verdict] = []
        for entry in entries:
            if entry.t > self._last > -math.inf:
                verdicts += self._detector.advance(self._last)
            self._last = entry.t
            self._behind = min(self._behind, time.monotonic() - entry.t)
            self._detector.feed(entry)
            self._lifecycle.feed(entry)
            self._learn_weights(entry.event)
            if isinstance(entry.event, ev.RoleStarted):
                self._node_of[entry.event.role] = entry.event.node
                self._lives[entry.event.role] = entry.event.incarnation
                if (entry.event.role, entry.event.incarnation) == (self.spec.role, self.spec.incarnation):
                    self._live, verdicts = True, self._detector.unrecorded()
        verdicts += self._detector.advance(self._last)
        if self._live:
            self._say([verdict for verdict in verdicts if verdict.role != self.spec.role or verdict.incarnation != self.spec.incarnation])
            self._say(self._lifecycle.decide())
            self._ask_suspects()

    def _say(self, events: list[Any]) -> None:
        for event in events:
            self.emit(event)
            self._lifecycle.feed(ev.Entry(0, 0.0, self.spec.role, self.spec.incarnation, 0, time.monotonic(), event))

    # -- what the detector needs done ---

    async def _keep_time(self) -> None:
        """A tick for each deadline that passes while nothing is logged; and a word when this process itself did not run."""
        last, pause, ticks = time.monotonic(), OWN_CLOCK, Ticks()
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            if (gap := now - last - pause) > OWN_GAP:
                self.emit(ev.ClockGap(seconds=round(gap, 3)))
            last = now
            tick, pause = ticks.look(now - self._behind, self._detector.next_deadline() if self._live else None)
            if tick:
                self.emit(ev.Tick())

    def _ask_suspects(self) -> None:
        for beat in self._detector.heartbeats_due():
            if beat not in self._asked:
                self._asked.add(beat)
                self.spawn(self._ask_for_life(*beat))

    async def _ask_for_life(self, role: str, incarnation: int, number: int) -> None:
        peer = await self.life(role)
        call = asyncio.create_task(peer.call("heartbeat", incarnation, number, deadline=self.deadlines.call))
        await asyncio.sleep(0)  # the call is handed over
        self.emit(ev.HeartbeatSent(role=role, incarnation=incarnation, number=number))
        try:
            await call
        except (PeerDied, WaitTimeout) as error:
            self.log.info("heartbeat %d of %s: %s", number, role, error)

    async def _send_marks(self) -> None:
        """Each node agent is told the limits of the roles that it watches, when they change."""
        while True:
            await asyncio.sleep(_MARKS_EVERY)
            floor = self._detector.thresholds.trainer.activity_floor
            marks = self._detector.marks()
            for agent, node in list(self._node_of.items()):
                if not agent.startswith(RoleKind.NODE_AGENT):
                    continue
                here = {role: ages for role, ages in marks.items() if self._node_of.get(role) == node}
                # rounded up: a sample that is logged just before its limit would show nothing
                wanted = floor, {role: tuple(math.ceil(1000 * age) / 1000 for age in ages) for role, ages in here.items()}
                try:
                    peer = await self.peer(agent)
                    incarnation, _ = await self.present(agent)
                    if self._marks_sent.get(agent) != (incarnation, wanted):
                        await peer.call("configure", *wanted, deadline=self.deadlines.call)
                        self._marks_sent[agent] = (incarnation, wanted)
                except (PeerDied, WaitTimeout) as error:
                    self._present.pop(agent, None)
                    self.log.info("limits for %s: %s", agent, error)

    def _learn_weights(self, event: ev.Event) -> None:
        now = time.monotonic()
        match event:
            case ev.VersionAnnounced(holder=role, incarnation=incarnation) | ev.PullCommitted(target=role, incarnation=incarnation) if (
                self._directory.is_dead(role, incarnation)
            ):
                pass  # its last word reached the log after that of its node's agent; what it held is gone
            case ev.VersionAnnounced():
                self._directory.announce(
                    event.version, event.digest, event.bytes, event.chunks, event.holder, event.incarnation, _place(event.address), now
                )
            case ev.PullCommitted():
                address = _place(event.address) if event.address else None
                self._directory.commit(event.target, event.incarnation, event.version, event.digest, address)
            case ev.ProcessExited(role=role, incarnation=incarnation):
                self._directory.remove_holder(role, incarnation)
            case ev.RestartDecided(standby=standby) if standby in self._lives:
                self._directory.remove_holder(standby, self._lives[standby])
            case ev.NodeLost(node=node):
                self._forget([role for role, where in self._node_of.items() if where == node])
            case ev.RunResumed():
                self._forget(list(self._node_of))

    def _forget(self, roles: list[str]) -> None:
        for role in roles:
            self._directory.remove_holder(role, self._lives[role])

    async def ask(self, body: bytes, least_version: int) -> bytes | None:
        """The answer to a msgpack `Ask` as a msgpack `Lease`; None: nothing at or above ``least_version`` is free, ask again.

        A life that has ended gets nothing either, and no error: its process may be about to become another role, in the middle of a pull.
        """
        ask = msgspec.msgpack.decode(body, type=Ask)
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._directory.newest >= least_version), _HELD_BACK)
            except TimeoutError:
                return None
        if self._directory.is_dead(ask.puller, ask.incarnation):
            return None
        lease = self._directory.answer(ask, time.monotonic())
        if lease is not None and lease.version < least_version:  # the only holder of the newest has died
            self._directory.release(lease.id)
            return None
        return None if lease is None else msgspec.msgpack.encode(lease)


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
