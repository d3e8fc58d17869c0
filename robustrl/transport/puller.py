"""Pulls a weight version chunk by chunk over UCX from whatever source the directory names, and returns it complete and checked, or raises.

Promises: every receive has a deadline from its bytes and a floor; a source that dies, stops, refuses or sends a damaged chunk is left and
the next one is asked; checked chunks are kept across sources, incarnations and versions where the new manifest lists the same checksum;
a buffer with a receive that was broken off is never used again (UCX may still write to it). Leaves out the commit: the caller does that.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import xxhash

from robustrl.core.events import Event, PullDiscarded, PullProgress, PullSourceSwitched, PullStarted
from robustrl.core.weights import Ask, Lease, Manifest
from robustrl.errors import WeightsError
from robustrl.transport import lane as lanes
from robustrl.transport import settings, wire

log = logging.getLogger(__name__)

WINDOW = 4
"""Chunks asked for at once."""
_FIRST_PAUSE_SECONDS, _PAUSE_SECONDS = 0.005, 0.1
"""Between two asks while nothing comes: it grows from the first to the second."""
_PROGRESS_SECONDS = 0.25
_PATIENCE_SECONDS = 1.0
"""For receives under way from a source that was left."""
_LAST_SECONDS = 2.0
_manifests = msgspec.msgpack.Decoder(Manifest)


class Pulled(msgspec.Struct, frozen=True):
    """A complete version: every chunk has been checked against the manifest, and the manifest against the directory's digest."""

    manifest: Manifest
    buffer: np.ndarray
    """uint8 of ``manifest.nbytes``; the caller's until it gives it back with ``Puller.recycle``."""
    bytes_received: int
    """Over UCX, discarded chunks included."""
    bytes_discarded: int
    seconds: float
    transport: str
    source: str
    """The last one."""
    lease: int
    """Still held: release or commit it."""


class _SourceFailed(Exception):
    """This source does not deliver; another may."""


class _Progress:
    """What has been pulled so far; outlives a failed pull."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.buffer: np.ndarray | None = None
        self.have: set[int] = set()
        self.received = 0
        self.discarded = 0


class _Source:
    """A connection to one source under one lease."""

    def __init__(self, lease: Lease, channel: wire.Channel, endpoint: lanes.Endpoint, transport: str) -> None:
        self.lease, self.channel, self.endpoint, self.transport = lease, channel, endpoint, transport
        self.received = 0
        self.checking: set[asyncio.Task[Any]] = set()
        """Chunks that have arrived: their receive must not be broken off any more."""

    def leave(self) -> None:
        self.channel.close()
        self.endpoint.leave(_PATIENCE_SECONDS)


class Puller:
    """Pulls in the UCX thread of this process; ``pull`` may be called from any other thread, one at a time."""

    def __init__(self, secret: bytes, *, role: str, incarnation: int, on_event: Callable[[Event], None] | None = None,
                 floor_seconds: float = 3.0, floor_rate: float = 16 * 2**20) -> None:
        """``on_event`` is called in the UCX thread and must return at once. A source that completes no chunk for ``floor_seconds`` plus
        the time of what is under way at ``floor_rate`` bytes/s is left."""
        self.role, self.incarnation = role, incarnation
        self._secret = secret
        self._on_event = on_event or (lambda event: None)
        self._floor_seconds, self._floor_rate = floor_seconds, floor_rate
        self._lane = lanes.get()
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="robustrl-pull")
        self._pulling = threading.Lock()
        self._progress = _Progress()
        self._spare: list[np.ndarray] = []
        self._abandoned: list[np.ndarray] = []

    # what the owner calls

    def pull(self, next_source: Callable[[Ask], Lease | None], *, deadline_s: float) -> Pulled:
        """The newest version that ``next_source`` offers, complete and checked.

        ``next_source`` is called in a thread of its own, may block, and returns a lease or None (nothing now: it is asked again soon).
        Raises WeightsError naming peer, version, chunk and transport after ``deadline_s``; what was checked by then is kept for the next
        call. What ``next_source`` raises ends the pull too.
        """
        if not self._pulling.acquire(blocking=False):
            raise RuntimeError(f"{self.role}: a pull is under way already")
        try:
            return self._lane.call(self._pull(next_source, time.monotonic() + deadline_s, deadline_s), deadline_s + 30)
        finally:
            self._pulling.release()

    def recycle(self, buffer: np.ndarray) -> None:
        """The caller needs this buffer (of a Pulled) no more: nobody reads it, it is retired at every server. A later pull uses it."""
        if len(self._spare) < 2:
            self._spare.append(buffer)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._spare.clear()

    # in the lane

    async def _pull(self, next_source: Callable[[Ask], Lease | None], deadline: float, deadline_s: float) -> Pulled:
        began, state, loop = time.monotonic(), self._progress, asyncio.get_running_loop()
        received, discarded = state.received, state.discarded
        ask = self._ask(None, "")
        pause, trouble, last, tried = _FIRST_PAUSE_SECONDS, "no source was offered", "", False
        while True:
            left = deadline - time.monotonic()
            try:
                lease = await asyncio.wait_for(loop.run_in_executor(self._pool, next_source, ask), max(left, 0.001))
            except TimeoutError:
                raise self._late(deadline_s, trouble) from None
            if lease is None:
                if left <= pause:
                    raise self._late(deadline_s, trouble)
                await asyncio.sleep(pause)
                pause, ask = min(_PAUSE_SECONDS, pause * 1.5), self._ask(None, "")
                continue
            if last and last != lease.source:
                self._on_event(PullSourceSwitched(target=self.role, version=lease.version, old_source=last, new_source=lease.source,
                                                  kept=len(state.have), reason=trouble))
            source, failed = None, ""
            try:
                source = await self._connect(lease, deadline)
                await self._take(source, deadline)
            except _SourceFailed as error:
                transport = source.transport if source else settings.in_use()
                failed = f"{lease.source} incarnation {lease.incarnation}, version {lease.version}, {transport}: {error}"
                if failed != trouble:
                    log.info("%s: pull: %s", self.role, failed)
                if time.monotonic() < deadline or not tried:  # else it only ran into the end
                    trouble = failed
                tried = True
            last = lease.source
            manifest, buffer = state.manifest, state.buffer
            if not failed and manifest is not None and buffer is not None and len(state.have) == len(manifest.chunks):
                self._progress = _Progress()
                assert source is not None
                return Pulled(manifest, buffer, state.received - received, state.discarded - discarded, time.monotonic() - began,
                              source.transport, lease.source, lease.id)
            if time.monotonic() >= deadline:
                last_words = self._ask(lease.id, failed or "deadline", source)
                await asyncio.wait_for(loop.run_in_executor(self._pool, next_source, last_words), _LAST_SECONDS)
                raise self._late(deadline_s, trouble)
            ask = self._ask(lease.id, failed, source)
            if failed and not (source and source.received):
                await asyncio.sleep(pause)
                pause = min(_PAUSE_SECONDS, pause * 1.5)
            else:
                pause = _FIRST_PAUSE_SECONDS

    def _ask(self, lease: int | None, failed: str, source: _Source | None = None) -> Ask:
        state = self._progress
        return Ask(puller=self.role, incarnation=self.incarnation, lease=lease, failed=failed, received=source.received if source else 0,
                   version=state.manifest.version if state.manifest else -1, have=sorted(state.have))

    def _late(self, deadline_s: float, trouble: str) -> WeightsError:
        manifest = self._progress.manifest
        what = f"version {manifest.version}: {len(self._progress.have)} of {len(manifest.chunks)} chunks" if manifest else "no manifest yet"
        return WeightsError(f"{self.role}: pull not complete after {deadline_s:g} s ({what}); last: {trouble}")

    async def _connect(self, lease: Lease, deadline: float) -> _Source:
        """Hello with the source. Raises _SourceFailed."""
        sock = socket.socket(socket.AF_INET6 if ":" in lease.address[0] else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        channel = wire.Channel(sock)
        limit = min(wire.HELLO_SECONDS, max(0.001, deadline - time.monotonic()))
        try:
            async with asyncio.timeout(limit):
                await asyncio.get_running_loop().sock_connect(sock, (lease.address[0], lease.address[1]))
                welcome = await wire.greet(channel, self._secret, self.role, self.incarnation, lease.source, lease.incarnation,
                                           self._lane.worker_address(), settings.machine_id())
            endpoint = self._lane.endpoint(welcome.ucx)
        except TimeoutError:
            channel.close()
            raise _SourceFailed(f"no hello within {limit:.1f} s") from None
        except (OSError, wire.Gone, wire.ProtocolError, self._lane.api.UCXError) as error:
            channel.close()
            raise _SourceFailed(f"hello: {error}") from error
        except BaseException:
            channel.close()
            raise
        return _Source(lease, channel, endpoint, settings.between(welcome.machine == settings.machine_id()))

    async def _take(self, source: _Source, deadline: float) -> None:
        """Manifest and chunks of one lease. Raises _SourceFailed; the source is closed in any case."""
        try:
            await self._learn(source, deadline)
            await self._fetch(source, deadline)
            await asyncio.wait_for(source.channel.send(wire.Bye()), self._floor_seconds)
        except (wire.Gone, wire.ProtocolError) as error:
            raise _SourceFailed(str(error)) from error
        except TimeoutError:
            raise _SourceFailed(f"no answer within {self._floor_seconds:.1f} s") from None
        finally:
            source.leave()

    async def _learn(self, source: _Source, deadline: float) -> None:
        """The manifest that the lease speaks of, unless it is known; keeps the chunks that it lists."""
        lease, state = source.lease, self._progress
        if state.manifest is None or state.manifest.digest != lease.digest:
            manifest = await self._get_manifest(source)
            await asyncio.get_running_loop().run_in_executor(self._pool, self._adopt, manifest)
        assert state.manifest is not None
        self._on_event(PullStarted(source=lease.source, source_incarnation=lease.incarnation, target=self.role, version=lease.version,
                                   bytes=state.manifest.nbytes, transport=source.transport))

    async def _get_manifest(self, source: _Source) -> Manifest:
        lease = source.lease
        await asyncio.wait_for(source.channel.send(wire.GetManifest(lease.version, lease.incarnation)), self._floor_seconds)
        data, parts = bytearray(), 1
        index = 0
        while index < parts:
            part = await asyncio.wait_for(source.channel.receive(wire.ManifestPart, wire.Refused), self._floor_seconds)
            if isinstance(part, wire.Refused):
                raise _SourceFailed(f"refused: {part.reason}")
            if part.index != index or (index and part.parts != parts):
                raise _SourceFailed(f"manifest part {part.index} of {part.parts} where {index} was due")
            parts, index = part.parts, index + 1
            data += part.data
        try:
            manifest = _manifests.decode(data)
            manifest.check()
        except (msgspec.DecodeError, ValueError) as error:
            raise _SourceFailed(f"manifest: {error}") from None
        if (manifest.version, manifest.digest, manifest.nbytes) != (lease.version, lease.digest, lease.nbytes):
            raise _SourceFailed(f"manifest: version {manifest.version}, digest {manifest.digest}, {manifest.nbytes} bytes; "
                                f"the lease says {lease.version}, {lease.digest}, {lease.nbytes}")
        return manifest

    def _adopt(self, manifest: Manifest) -> None:
        """Makes this manifest the one being pulled. Checked chunks that it lists stay; the others are discarded and counted."""
        state = self._progress
        old, old_buffer, old_have = state.manifest, state.buffer, state.have
        state.have = set()
        if old is None or old_buffer is None:
            state.buffer = self._new_buffer(manifest.nbytes)
        else:
            held = {old.chunks[index]: old.span(index) for index in sorted(old_have)}
            in_place = old.nbytes == manifest.nbytes and old.chunk_bytes == manifest.chunk_bytes
            moved = [(index, held[digest]) for index, digest in enumerate(manifest.chunks) if digest in held]
            if not in_place or any(manifest.span(index) != span for index, span in moved):
                state.buffer = self._new_buffer(manifest.nbytes)
            assert state.buffer is not None
            for index, (first, last) in moved:
                begin, end = manifest.span(index)
                if last - first == end - begin:
                    if state.buffer is not old_buffer:
                        state.buffer[begin:end] = old_buffer[first:last]
                    state.have.add(index)
            if state.buffer is not old_buffer:
                self.recycle(old_buffer)
            kept = {manifest.chunks[index] for index in state.have}
            lost = sum(last - first for digest, (first, last) in held.items() if digest not in kept)
            if lost:
                state.discarded += lost
                reason = f"not part of version {manifest.version}"
                self._on_event(PullDiscarded(target=self.role, version=old.version, bytes=lost, reason=reason))
        state.manifest = manifest

    def _new_buffer(self, nbytes: int) -> np.ndarray:
        """A buffer that nobody writes to, its pages touched."""
        for index, spare in enumerate(self._spare):
            if spare.nbytes == nbytes:
                return self._spare.pop(index)
        self._spare.clear()
        return _allocate(nbytes)

    async def _fetch(self, source: _Source, deadline: float) -> None:
        """The chunks of the lease that are lacking, ``WINDOW`` at a time. Raises _SourceFailed, Gone, ProtocolError, TimeoutError."""
        lease, state = source.lease, self._progress
        assert state.manifest is not None and state.buffer is not None
        wanted = [index for index in range(lease.start, min(lease.stop, len(state.manifest.chunks))) if index not in state.have]
        wanted.reverse()
        listening: asyncio.Task[Any] = asyncio.create_task(source.channel.receive(wire.Refused))
        receives: dict[asyncio.Task[None], int] = {}
        told = 0.0
        try:
            while wanted or receives:
                while wanted and len(receives) < WINDOW:
                    index = wanted.pop()
                    receives[asyncio.create_task(self._receive(source, index))] = index
                limit = self._floor_seconds + len(receives) * state.manifest.chunk_bytes / self._floor_rate
                limit = min(limit, max(0.001, deadline - time.monotonic()))
                done, _ = await asyncio.wait({listening, *receives}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise _SourceFailed(f"chunk {min(receives.values())}: nothing came for {limit:.1f} s")
                finished = [task for task in done if receives.pop(task, None) is not None]
                errors = [error for task in finished if (error := task.exception())]
                if errors:
                    raise errors[0]
                if listening in done:
                    raise _SourceFailed(f"refused: {listening.result().reason}")
                if time.monotonic() - told > _PROGRESS_SECONDS:
                    told = time.monotonic()
                    held = sum(last - first for first, last in map(state.manifest.span, state.have))
                    self._on_event(PullProgress(source=lease.source, target=self.role, version=lease.version, done=held,
                                                bytes=state.manifest.nbytes, transport=source.transport))
        except BaseException:
            await self._break_off([listening, *receives], source.checking)
            raise
        listening.cancel()
        await asyncio.wait([listening])

    async def _receive(self, source: _Source, index: int) -> None:
        """One chunk into its place, checked."""
        lease, state = source.lease, self._progress
        assert state.manifest is not None and state.buffer is not None
        first, last = state.manifest.span(index)
        view: Any = state.buffer[first:last]
        tag = self._lane.next_tag()
        arriving = asyncio.ensure_future(source.endpoint.receive(view, tag))
        try:
            await source.channel.send(wire.GetChunk(lease.version, lease.incarnation, index, tag))
            await arriving
        except self._lane.api.UCXError as error:
            raise _SourceFailed(f"chunk {index}: {type(error).__name__} {error}") from error
        finally:
            if not arriving.done():
                arriving.cancel()
        state.received += last - first
        source.checking.add(asyncio.current_task())  # type: ignore[arg-type]  # there is one in a coroutine
        await self._check(source, index, view)
        state.have.add(index)
        source.received += 1

    async def _check(self, source: _Source, index: int, view: Any) -> None:
        """Raises _SourceFailed unless the bytes are what the manifest says."""
        lease, state = source.lease, self._progress
        assert state.manifest is not None
        found = await asyncio.get_running_loop().run_in_executor(self._pool, xxhash.xxh3_128_hexdigest, view)
        if found != state.manifest.chunks[index]:
            state.discarded += view.nbytes
            reason = f"chunk {index} from {lease.source} is damaged"
            self._on_event(PullDiscarded(target=self.role, version=lease.version, bytes=view.nbytes, reason=reason))
            raise _SourceFailed(f"chunk {index}: checksum {found}, the manifest says {state.manifest.chunks[index]}")

    async def _break_off(self, tasks: list[asyncio.Task[Any]], checking: set[asyncio.Task[Any]]) -> None:
        """Ends receives under way. Their buffer is left to UCX, which may write to it later; checked chunks move to a fresh one."""
        state = self._progress
        assert state.manifest is not None and state.buffer is not None
        for task in tasks:
            if task not in checking:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        old, manifest = state.buffer, state.manifest

        def move() -> None:
            fresh = self._new_buffer(manifest.nbytes)
            for index in state.have:
                first, last = manifest.span(index)
                fresh[first:last] = old[first:last]
            state.buffer = fresh
            self._abandon(old)

        await asyncio.get_running_loop().run_in_executor(self._pool, move)

    def _abandon(self, buffer: np.ndarray) -> None:
        """Gives the memory back but keeps the addresses mapped for good, so that a late write of UCX hits nothing else."""
        self._abandoned.append(buffer)
        for one in self._abandoned:
            _pages(one).madvise(mmap.MADV_DONTNEED)


def _allocate(nbytes: int) -> np.ndarray:
    """Private memory of its own pages, touched."""
    buffer = np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    buffer[::mmap.PAGESIZE] = 0
    return buffer


def _pages(buffer: np.ndarray) -> mmap.mmap:
    base = buffer.base
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    assert isinstance(base, mmap.mmap)
    return base
