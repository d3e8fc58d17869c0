"""One source of a pull, under one lease: hello, manifest, and the chunks of the leased range into staging memory.

Promises: every receive has a deadline from its bytes and a floor; a source that dies, stops, refuses or sends a damaged chunk ends with
SourceFailed, and what it had sent and was checked by then stays. Leaves out which source to ask next (puller.py).
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import msgspec

from robustrl.core.events import Event, PeerGone, PullDiscarded, PullProgress, PullStarted
from robustrl.core.weights import Lease, Manifest
from robustrl.transport import lane as lanes
from robustrl.transport import settings, wire
from robustrl.transport.manifest import checksum, decode_manifest
from robustrl.transport.staging import Staging

WINDOW = 4
"""Chunks asked for at once."""
_PROGRESS_SECONDS = 0.25
_PATIENCE_SECONDS = 1.0
"""For receives under way from a source that was left."""
_GRACE_SECONDS = 0.1
"""For the last word of a source that closed the connection."""


class SourceFailed(Exception):
    """This source does not deliver; another may."""


class _Broken(SourceFailed):
    """The connection broke: the source's process, or the way to it, is gone."""


class Limits(msgspec.Struct, frozen=True):
    """A source that completes no chunk for ``floor_seconds`` plus the time of what is under way at ``floor_rate`` bytes/s is left."""

    floor_seconds: float
    floor_rate: float
    deadline: float
    """End of the pull, in the loop's monotonic seconds."""

    def left(self) -> float:
        return max(0.001, self.deadline - time.monotonic())

    def answer(self) -> float:
        return min(self.floor_seconds, self.left())

    def chunks(self, nbytes: int) -> float:
        return min(self.floor_seconds + nbytes / self.floor_rate, self.left())


class Source:
    """``take`` pulls what the lease allows and the staging lacks. Lives in the UCX thread."""

    def __init__(self, lease: Lease, staging: Staging, limits: Limits, pool: Executor, role: str, incarnation: int,
                 on_event: Callable[[Event], None]) -> None:
        self.lease = lease
        self.received = 0
        """Chunks that came and were checked."""
        self.transport = settings.in_use()
        self._staging, self._limits, self._pool = staging, limits, pool
        self._role, self._incarnation, self._on_event = role, incarnation, on_event
        self._lane = lanes.get()
        self._arrived: set[int] = set()
        """Chunks that are here and being checked: their receive must not be broken off any more."""

    def __str__(self) -> str:
        return f"{self.lease.source} incarnation {self.lease.incarnation}, version {self.lease.version}, {self.transport}"

    async def take(self, secret: bytes) -> None:
        """Raises SourceFailed. The connection is closed in any case."""
        endpoint = await self._connect(secret)
        try:
            await self._learn()
            await self._fetch(endpoint)
        except (wire.Gone, _Broken) as error:
            self._on_event(PeerGone(role=self._role, incarnation=self._incarnation, peer=self.lease.source,
                                    peer_incarnation=self.lease.incarnation, error=str(error)))
            raise SourceFailed(str(error)) from error
        except wire.ProtocolError as error:
            raise SourceFailed(str(error)) from error
        except TimeoutError:
            raise SourceFailed(f"no answer within {self._limits.floor_seconds:.1f} s") from None
        finally:
            self._channel.last_word(wire.Bye())
            self._channel.close()
            endpoint.leave(_PATIENCE_SECONDS)

    async def _connect(self, secret: bytes) -> lanes.Endpoint:
        """Hello with the source."""
        lease, loop = self.lease, asyncio.get_running_loop()
        sock = socket.socket(socket.AF_INET6 if ":" in lease.address[0] else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        self._channel = wire.Channel(sock)
        limit = min(wire.HELLO_SECONDS, self._limits.left())
        try:
            async with asyncio.timeout(limit):
                await loop.sock_connect(sock, (lease.address[0], lease.address[1]))
                welcome = await wire.greet(self._channel, secret, self._role, self._incarnation, lease.source, lease.incarnation,
                                           self._lane.worker_address(), settings.machine_id())
            self.transport = settings.between(welcome.machine == settings.machine_id())
            return self._lane.endpoint(welcome.ucx)
        except TimeoutError:
            self._channel.close()
            raise SourceFailed(f"no hello within {limit:.1f} s") from None
        except (OSError, wire.Gone, wire.ProtocolError, self._lane.api.UCXError) as error:
            self._channel.close()
            raise SourceFailed(f"hello: {error}") from error
        except BaseException:
            self._channel.close()
            raise

    async def _learn(self) -> None:
        """The manifest that the lease speaks of, unless it is known; keeps the chunks that it lists."""
        lease = self.lease
        async with self._staging.learning:
            known = self._staging.manifest
            if known is None or known.digest != lease.digest:
                manifest = await self._get_manifest()
                lost = await asyncio.get_running_loop().run_in_executor(self._pool, self._staging.adopt, manifest)
                if lost and known is not None:
                    reason = f"not part of version {manifest.version}"
                    self._on_event(PullDiscarded(target=self._role, version=known.version, bytes=lost, reason=reason))
        self._on_event(PullStarted(source=lease.source, source_incarnation=lease.incarnation, target=self._role, version=lease.version,
                                   bytes=self._manifest.nbytes, transport=self.transport, lease=lease.id))

    @property
    def _manifest(self) -> Manifest:
        manifest = self._staging.manifest
        assert manifest is not None and manifest.digest == self.lease.digest
        return manifest

    async def _get_manifest(self) -> Manifest:
        lease = self.lease
        await asyncio.wait_for(self._channel.send(wire.GetManifest(lease.version, lease.incarnation)), self._limits.answer())
        data, parts = bytearray(), 1
        index = 0
        while index < parts:
            part = await asyncio.wait_for(self._channel.receive(wire.ManifestPart, wire.Refused), self._limits.answer())
            if isinstance(part, wire.Refused):
                raise SourceFailed(f"refused: {part.reason}")
            if part.index != index or (index and part.parts != parts):
                raise SourceFailed(f"manifest part {part.index} of {part.parts} where {index} was due")
            parts, index = part.parts, index + 1
            data += part.data
        try:
            return decode_manifest(data, lease)
        except ValueError as error:
            raise SourceFailed(str(error)) from None

    async def _fetch(self, endpoint: lanes.Endpoint) -> None:
        """The chunks of the lease that are lacking, ``WINDOW`` at a time."""
        lease, manifest = self.lease, self._manifest
        wanted = [index for index in range(lease.start, min(lease.stop, len(manifest.chunks))) if index not in self._staging.have]
        wanted.reverse()
        listening: asyncio.Task[Any] = asyncio.create_task(self._channel.receive(wire.Refused))
        receives: dict[asyncio.Task[None], int] = {}
        told = 0.0
        try:
            while wanted or receives:
                while wanted and len(receives) < WINDOW:
                    index = wanted.pop()
                    receives[asyncio.create_task(self._receive(endpoint, index))] = index
                limit = self._limits.chunks(len(receives) * manifest.chunk_bytes)
                done, _ = await asyncio.wait({listening, *receives}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise SourceFailed(f"chunk {min(receives.values())}: nothing came for {limit:.1f} s")
                errors = [error for task in done - {listening} if (error := task.exception())]
                if errors:
                    broken = isinstance(errors[0], wire.Gone | _Broken)
                    await asyncio.wait({listening}, timeout=_GRACE_SECONDS if broken else 0)
                if listening.done() and not listening.exception():
                    raise SourceFailed(f"refused: {listening.result().reason}")
                if errors or listening.done():
                    error = errors[0] if errors else listening.exception()
                    raise _Broken(f"chunk {min(receives.values())}: {error}") if isinstance(error, wire.Gone) else error  # type: ignore[misc]
                for task in done:
                    del receives[task]
                if time.monotonic() - told > _PROGRESS_SECONDS:
                    told = time.monotonic()
                    self._on_event(PullProgress(source=lease.source, target=self._role, version=lease.version, bytes=manifest.nbytes,
                                                done=self._staging.held_bytes, transport=self.transport))
        finally:
            for task, index in receives.items():
                if index not in self._arrived:
                    task.cancel()
            listening.cancel()
            await asyncio.gather(listening, *receives, return_exceptions=True)

    async def _receive(self, endpoint: lanes.Endpoint, index: int) -> None:
        """One chunk into its place, checked. Raises SourceFailed, Gone, UCXError."""
        lease, manifest, view, tag = self.lease, self._manifest, self._staging.place(index), self._lane.next_tag()
        arriving = asyncio.ensure_future(endpoint.receive(view, tag))
        try:
            await self._channel.send(wire.GetChunk(lease.version, lease.incarnation, index, tag))
            await arriving
        except BaseException as error:
            arriving.cancel()
            self._staging.taint(index)
            if isinstance(error, self._lane.api.UCXError):
                raise _Broken(f"chunk {index}: {type(error).__name__} {error}") from error
            raise
        self._arrived.add(index)
        self._staging.received += view.nbytes
        found = await asyncio.get_running_loop().run_in_executor(self._pool, checksum, view, manifest.chunks[index])
        if found != manifest.chunks[index]:
            self._staging.discarded += view.nbytes
            reason = f"chunk {index} from {lease.source} is damaged"
            self._on_event(PullDiscarded(target=self._role, version=lease.version, bytes=view.nbytes, reason=reason))
            raise SourceFailed(f"chunk {index}: checksum {found}, the manifest says {manifest.chunks[index]}")
        self._staging.have.add(index)
        self.received += 1
