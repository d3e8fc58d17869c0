"""Pulls a weight version over UCX from whatever sources the directory names, and returns it complete and checked, or raises.

Promises: a source that fails is left and the directory is asked for another one; several sources at once where it grants several ranges;
checked chunks are kept across sources, incarnations and versions where the new manifest lists the same checksum. One connection is
source.py's affair, the memory is staging.py's. Leaves out the commit: the caller does that.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from robustrl.core.events import Event, PullSourceSwitched
from robustrl.core.weights import Ask, Lease, Manifest
from robustrl.errors import WeightsError
from robustrl.transport import lane as lanes
from robustrl.transport.device import DeviceMemory
from robustrl.transport.source import Limits, Source, SourceFailed
from robustrl.transport.staging import Memory, Staging

log = logging.getLogger(__name__)

MAX_SOURCES = 4
"""Pulled from at once."""
_FIRST_PAUSE_SECONDS, _PAUSE_SECONDS = 0.005, 0.1
"""Between two asks while nothing comes: it grows from the first to the second."""
_LAST_SECONDS = 2.0
NextSource = Callable[[Ask], Lease | None]


class Pulled(msgspec.Struct, frozen=True):
    """A complete version: every chunk has been checked against the manifest, and the manifest against the directory's digest."""

    manifest: Manifest
    buffer: Any
    """uint8 array of ``manifest.nbytes``, on a device a tensor; the caller's until it gives it back with ``Puller.recycle``."""
    bytes_received: int
    """Over UCX, discarded chunks included."""
    bytes_discarded: int
    seconds: float
    transport: str
    source: str
    """The last one."""
    lease: int
    """Still held: release or commit it."""


class Puller:
    """Pulls in the UCX thread of this process; ``pull`` may be called from any other thread, one at a time."""

    def __init__(self, secret: bytes, *, role: str, incarnation: int, on_event: Callable[[Event], None] | None = None,
                 floor_seconds: float = 3.0, floor_rate: float = 16 * 2**20, device: str = "cpu") -> None:
        """``on_event`` is called in the UCX thread and must return at once. A source that completes no chunk for ``floor_seconds`` plus
        the time of what is under way at ``floor_rate`` bytes/s is left. ``device``: where the weights go, as torch names it."""
        self.role, self.incarnation = role, incarnation
        self._secret = secret
        self._on_event = on_event or (lambda event: None)
        self._floor_seconds, self._floor_rate = floor_seconds, floor_rate
        self._lane = lanes.get()
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="robustrl-pull")
        self._pulling = threading.Lock()
        self._memory = Memory() if device == "cpu" else DeviceMemory(device)
        self._staging = Staging(self._memory)

    # what the owner calls

    def pull(self, next_source: NextSource, *, deadline_s: float) -> Pulled:
        """The newest version that ``next_source`` offers, complete and checked.

        ``next_source`` is called in a thread of its own, may block, and returns a lease or None (nothing now: it is asked again soon).
        Raises WeightsError naming peer, version, chunk and transport after ``deadline_s``; what was checked by then is kept for the next
        call. What ``next_source`` raises ends the pull too.
        """
        if not self._pulling.acquire(blocking=False):
            raise RuntimeError(f"{self.role}: a pull is under way already")
        try:
            return self._lane.call(self._pull(next_source, deadline_s), deadline_s + 30)
        finally:
            self._pulling.release()

    def recycle(self, buffer: Any) -> None:
        """The caller needs this buffer (of a Pulled) no more: nobody reads it, it is retired at every server. A later pull uses it."""
        self._memory.give_back(buffer)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._memory.clear()

    # in the lane

    async def _pull(self, next_source: NextSource, deadline_s: float) -> Pulled:
        takes: dict[asyncio.Task[str], Source] = {}
        try:
            return await self._gather(next_source, deadline_s, takes)
        finally:
            for task in takes:
                task.cancel()
            await asyncio.gather(*takes, return_exceptions=True)

    async def _gather(self, next_source: NextSource, deadline_s: float, takes: dict[asyncio.Task[str], Source]) -> Pulled:
        """``takes``: the sources that are pulled from; each task's result says why its source failed, empty if it did not."""
        began, state = time.monotonic(), self._staging
        received, discarded = state.received, state.discarded
        limits = Limits(self._floor_seconds, self._floor_rate, began + deadline_s)
        ask, pause, trouble, left = self._ask(takes), _FIRST_PAUSE_SECONDS, "no source was offered", ""
        while True:
            try:
                lease = await self._call(next_source, ask, limits.left())
            except TimeoutError:
                raise self._late(deadline_s, trouble) from None
            if lease is not None:
                if any(source.lease.digest != lease.digest for source in takes.values()):
                    await asyncio.wait(takes)  # theirs is retired; one version at a time
                if left not in ("", lease.source):
                    self._on_event(PullSourceSwitched(target=self.role, version=lease.version, old_source=left, new_source=lease.source,
                                                      kept=len(state.have), reason=trouble))
                left = ""
                source = Source(lease, state, limits, self._pool, self.role, self.incarnation, self._on_event)
                takes[asyncio.create_task(self._take(source))] = source
                if lease.more and len(takes) < MAX_SOURCES:
                    ask = self._ask(takes)
                    continue
            if not takes:
                if time.monotonic() + pause >= limits.deadline:
                    raise self._late(deadline_s, trouble)
                await asyncio.sleep(pause)
                pause, ask = min(_PAUSE_SECONDS, pause * 1.5), self._ask(takes)
                continue
            await asyncio.wait(takes, return_when=asyncio.FIRST_COMPLETED)
            task = next(one for one in takes if one.done())
            source, failed = takes.pop(task), task.result()
            left = source.lease.source
            late = time.monotonic() >= limits.deadline
            if failed and failed != trouble:
                log.info("%s: pull: %s", self.role, failed)
            if failed and (not late or trouble == "no source was offered"):  # else it only ran into the end
                trouble = failed
            if state.complete and not takes:
                assert state.manifest is not None
                buffer = await asyncio.get_running_loop().run_in_executor(self._pool, state.finish)
                self._staging = Staging(self._memory)
                return Pulled(state.manifest, buffer, state.received - received, state.discarded - discarded, time.monotonic() - began,
                              source.transport, source.lease.source, source.lease.id)
            ask = self._ask(takes, source, failed)
            if late:
                await self._call(next_source, msgspec.structs.replace(ask, failed=failed or "deadline", using=[]), _LAST_SECONDS)
                raise self._late(deadline_s, trouble)
            if failed and not source.received:
                await asyncio.sleep(pause)
                pause = min(_PAUSE_SECONDS, pause * 1.5)
            else:
                pause = _FIRST_PAUSE_SECONDS

    async def _take(self, source: Source) -> str:
        try:
            await source.take(self._secret)
        except SourceFailed as error:
            return f"{source}: {error}"
        return ""

    async def _call(self, next_source: NextSource, ask: Ask, seconds: float) -> Lease | None:
        return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(self._pool, next_source, ask), seconds)

    def _ask(self, takes: dict[asyncio.Task[str], Source], ended: Source | None = None, failed: str = "") -> Ask:
        state = self._staging
        return Ask(puller=self.role, incarnation=self.incarnation, lease=ended.lease.id if ended else None, failed=failed,
                   received=ended.received if ended else 0, using=[source.lease.id for source in takes.values()],
                   version=state.manifest.version if state.manifest else -1, have=sorted(state.have))

    def _late(self, deadline_s: float, trouble: str) -> WeightsError:
        manifest = self._staging.manifest
        what = f"version {manifest.version}: {len(self._staging.have)} of {len(manifest.chunks)} chunks" if manifest else "no manifest yet"
        return WeightsError(f"{self.role}: pull not complete after {deadline_s:g} s ({what}); last: {trouble}")
