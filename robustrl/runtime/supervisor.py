"""The supervisor: decides from the log, and hands out leases on weights. Nothing it knows is anywhere but in the log.

It follows the host's event stream from the first entry, so a second incarnation knows what the first one knew. In this version its one
recovery action is to end the job with a clear reason.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from ..core import events as ev
from ..core.lifecycle import Lifecycle
from ..core.roles import Phase
from ..core.weights import Ask, WeightDirectory
from .role import Role

_HELD_BACK = 0.5
"""Seconds that a puller's question waits for the version to be announced."""


class Supervisor(Role):
    async def on_open(self) -> None:
        self._lifecycle = Lifecycle()
        self._directory = WeightDirectory()
        self._changed = asyncio.Condition()
        self._entries: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self._handled = 0
        loop = asyncio.get_running_loop()
        self.host.subscribe(lambda lines: loop.call_soon_threadsafe(self._entries.put_nowait, lines), after=0)
        self.spawn(self._follow())

    async def _follow(self) -> None:
        while True:
            lines = await self._entries.get()
            while not self._entries.empty():
                lines = lines + self._entries.get_nowait()
            self.page.phase = Phase.RUNNING
            for line in lines:
                entry = ev.entry_decoder.decode(line)
                self._lifecycle.feed(entry)
                self._learn_weights(entry.event)
            for event in self._lifecycle.decide():
                self.emit(event)
                self._lifecycle.feed(ev.Entry(0, 0.0, self.spec.role, self.spec.incarnation, 0, time.monotonic(), event))
            self._handled += len(lines)
            self.page.update(progress=self._handled, pending=self._entries.qsize())
            self.page.phase = Phase.IDLE
            async with self._changed:
                self._changed.notify_all()

    def _learn_weights(self, event: ev.Event) -> None:
        now = time.monotonic()
        match event:
            case ev.VersionAnnounced():
                self._directory.announce(
                    event.version, event.digest, event.bytes, event.chunks, event.holder, event.incarnation, _place(event.address), now
                )
            case ev.PullCommitted():
                address = _place(event.address) if event.address else None
                self._directory.commit(event.target, event.incarnation, event.version, event.digest, address)
            case ev.ProcessExited(role=role, incarnation=incarnation):
                self._directory.remove_holder(role, incarnation)

    async def ask(self, body: bytes, least_version: int) -> bytes | None:
        """The answer to a msgpack `Ask` as a msgpack `Lease`; None: nothing at or above ``least_version`` is free, ask again."""
        ask = msgspec.msgpack.decode(body, type=Ask)
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._directory.newest >= least_version), _HELD_BACK)
            except TimeoutError:
                return None
        lease = self._directory.answer(ask, time.monotonic())
        if lease is not None and lease.version < least_version:  # the only holder of the newest has died
            self._directory.release(lease.id)
            return None
        return None if lease is None else msgspec.msgpack.encode(lease)


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
