"""Serves staged weight versions to pullers that know the job's secret, chunk by chunk over UCX.

Promises: only complete staged versions are offered; a puller that dies, stops or misbehaves costs the others nothing; no more than
``MAX_STRANGERS`` connections that have not proved themselves live at once, each for at most 2 s. Leaves out who may pull what when
(core/weights.py) and the truth of the bytes (the puller checks them against the manifest).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from robustrl.core.events import Event, PeerGone
from robustrl.core.weights import Manifest
from robustrl.transport import lane as lanes
from robustrl.transport import settings, wire
from robustrl.transport.device import is_tensor

log = logging.getLogger(__name__)

MAX_STRANGERS = 32
MAX_PULLERS = 64
MAX_CHUNKS_ASKED = 32
"""Chunks that one puller may have asked for and not got."""
_CALL_SECONDS = 30.0
_GRACE_SECONDS = 0.1
"""For UCX to tell that the last chunks have arrived, which the puller's leave may overtake."""
_PATIENCE_SECONDS = 5.0
"""For sends under way to a puller that is gone. Shared memory may never end them; tcp does, when the peer dies."""


class _Staged:
    def __init__(self, manifest: Manifest, buffer: Any) -> None:
        self.manifest, self.buffer = manifest, buffer
        self.encoded = msgspec.msgpack.encode(manifest)
        self.sessions: dict[_Session, int] = {}
        """Sends in flight, by session."""
        self.idle = asyncio.Event()
        self.idle.set()


class _Session:
    """One puller that proved itself."""

    def __init__(self, channel: wire.Channel, hello: wire.Hello, endpoint: lanes.Endpoint, transport: str) -> None:
        self.channel, self.peer, self.endpoint, self.transport = channel, hello, endpoint, transport
        self.sends: set[asyncio.Task[None]] = set()
        self.told_to_go = False
        """What it says then may be lost: it need not have died."""

    def __str__(self) -> str:
        return f"{self.peer.role} incarnation {self.peer.incarnation}"

    def cut_off(self, reason: str) -> None:
        """Ends the connection, which ends the session."""
        self.told_to_go = True
        self.channel.last_word(wire.Refused(reason))
        self.channel.hang_up()

    def leave(self) -> None:
        """Forgets the puller. Bytes that it already asked for may still go out: it will not take them for anything else."""
        self.channel.close()
        for send in list(self.sends):
            send.cancel()
        self.endpoint.leave(_PATIENCE_SECONDS if self.transport == "shm" else None)


class WeightServer:
    """Listens on one address, in the UCX thread of this process. Methods may be called from any other thread."""

    def __init__(self, host: str, secret: bytes, *, role: str, incarnation: int, port: int = 0, floor_seconds: float = 3.0,
                 floor_rate: float = 16 * 2**20, on_event: Callable[[Event], None] | None = None) -> None:
        """``host``: the one IP to bind. A send may take ``floor_seconds`` plus the time of what is in flight at ``floor_rate`` bytes/s.
        ``on_event`` is called in the UCX thread and must return at once."""
        self.role, self.incarnation = role, incarnation
        self.bytes_sent = 0
        self.refusals = 0
        """Connections that did not prove themselves."""
        self._secret = secret
        self._on_event = on_event or (lambda event: None)
        self._floor_seconds, self._floor_rate = floor_seconds, floor_rate
        self._staged: dict[int, _Staged] = {}
        self._strangers: dict[asyncio.Task[bool], socket.socket] = {}
        """Connections whose hello is not done, oldest first."""
        self._sessions: dict[asyncio.Task[None], _Session] = {}
        self._lane = lanes.get()
        self._listener = socket.create_server((host, port), backlog=128, reuse_port=False)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._accepting: asyncio.Task[None] = self._lane.call(self._start(), _CALL_SECONDS)

    # what the owner calls

    def stage(self, manifest: Manifest, buffer: Any) -> None:
        """Offers a complete version. ``buffer``: contiguous bytes (numpy uint8, memoryview, or a uint8 tensor on a device),
        unchanged until ``retire`` has returned.

        Raises ValueError if the buffer's size is not the manifest's or another content is staged under this number.
        """
        flat = buffer if is_tensor(buffer) else np.frombuffer(buffer, dtype=np.uint8)
        if flat.nbytes != manifest.nbytes:
            raise ValueError(f"version {manifest.version}: buffer of {flat.nbytes} bytes, manifest says {manifest.nbytes}")
        self._lane.call(self._stage(manifest, flat), _CALL_SECONDS)

    def retire(self, version: int, timeout: float = 5.0) -> bool:
        """Stops offering a version; returns once nothing of it is being sent, or after ``timeout`` s: then pullers that hang are cut off.

        True: all sends had ended by themselves. In either case the memory may be overwritten or freed: who wakes up late and reads it
        finds the checksum wrong, or gets an error. A version that is not staged is retired already.
        """
        return self._lane.call(self._retire(version, timeout), timeout + _CALL_SECONDS)

    @property
    def versions(self) -> list[int]:
        return sorted(self._staged)

    def close(self, timeout: float = 5.0) -> None:
        """Ends all connections, after waiting up to ``timeout`` s for pullers to leave by themselves."""
        self._lane.call(self._close(timeout), timeout + _CALL_SECONDS)

    # in the lane

    async def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._accept())

    async def _stage(self, manifest: Manifest, buffer: Any) -> None:
        there = self._staged.get(manifest.version)
        if there is not None and there.manifest.digest != manifest.digest:
            raise ValueError(f"version {manifest.version} is staged with digest {there.manifest.digest}, not {manifest.digest}")
        if there is None:
            self._staged[manifest.version] = _Staged(manifest, buffer)

    async def _retire(self, version: int, timeout: float) -> bool:
        staged = self._staged.pop(version, None)
        if staged is None:
            return True
        try:
            await asyncio.wait_for(staged.idle.wait(), timeout)
        except TimeoutError:
            for session in list(staged.sessions):
                log.warning("%s: version %d is retired while %s pulls it: cut off", self.role, version, session)
                session.cut_off(f"version {version} is retired")
                for send in session.sends:
                    send.cancel()
            return False
        return True

    async def _close(self, timeout: float) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listener.close()
        if self._sessions:
            await asyncio.wait(self._sessions, timeout=timeout)
        others: list[asyncio.Task[Any]] = [*self._sessions, *self._strangers]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._staged.clear()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # out of descriptors, or a connection that was gone before it was accepted
                log.warning("%s: accept failed (%s)", self.role, error)
                await asyncio.sleep(0.05)
                continue
            if sum(not task.cancelling() for task in self._strangers) >= MAX_STRANGERS:  # the oldest makes room
                next(task for task in self._strangers if not task.cancelling()).cancel()
            task = asyncio.create_task(self._meet(sock))
            self._strangers[task] = sock
            task.add_done_callback(self._met)

    def _met(self, task: asyncio.Task[bool], /) -> None:
        """Also for those that were cancelled before they began."""
        sock = self._strangers.pop(task)
        if task.cancelled() or not task.result():
            self.refusals += 1
            sock.close()

    async def _meet(self, sock: socket.socket) -> bool:
        """The hello; a stranger that passes becomes a session with a task of its own. False: refused."""
        channel = wire.Channel(sock)
        try:
            admission = wire.admit(channel, self._secret, self.role, self.incarnation, self._lane.worker_address(), settings.machine_id())
            hello, answer = await asyncio.wait_for(admission, wire.HELLO_SECONDS)
            if len(self._sessions) >= MAX_PULLERS:
                raise wire.ProtocolError(f"{MAX_PULLERS} pullers are connected already")
            endpoint = self._lane.endpoint(answer.ucx)
        except (wire.ProtocolError, wire.Gone, TimeoutError, self._lane.api.UCXError) as error:
            log.info("%s: connection refused: %s", self.role, error or "no hello in time")
            return False
        session = _Session(channel, hello, endpoint, settings.between(answer.machine == settings.machine_id()))
        task = asyncio.create_task(self._serve(session))
        self._sessions[task] = session
        task.add_done_callback(lambda done: self._sessions.pop(done, None))
        return True

    async def _serve(self, session: _Session) -> None:
        try:
            while True:
                request = await session.channel.receive(wire.GetManifest, wire.GetChunk, wire.Bye)
                if isinstance(request, wire.Bye):
                    if session.sends:
                        await asyncio.wait(session.sends, timeout=_GRACE_SECONDS)
                    break
                staged = self._staged.get(request.version)
                if request.incarnation != self.incarnation or staged is None:
                    reason = f"version {request.version} of incarnation {request.incarnation} is not staged here"
                    session.told_to_go = True
                    await self._tell(session, wire.Refused(reason))
                elif isinstance(request, wire.GetManifest):
                    await self._send_manifest(session, staged)
                elif request.chunk >= len(staged.manifest.chunks) or len(session.sends) >= MAX_CHUNKS_ASKED:
                    raise wire.ProtocolError(f"chunk {request.chunk} asked for, with {len(session.sends)} under way")
                else:
                    send = asyncio.create_task(self._send_chunk(session, staged, request))
                    session.sends.add(send)
                    send.add_done_callback(session.sends.discard)
        except wire.Gone as error:
            if not session.told_to_go:
                log.info("%s: %s is gone: %s", self.role, session, error)
                self._on_event(PeerGone(role=self.role, incarnation=self.incarnation, peer=session.peer.role,
                                        peer_incarnation=session.peer.incarnation, error=str(error)))
        except (wire.ProtocolError, TimeoutError) as error:
            log.info("%s: %s is put out: %s", self.role, session, error)
            session.cut_off(str(error) or "an answer was not taken in time")
        except asyncio.CancelledError:
            session.cut_off("the server closes")
            raise
        finally:
            # the puller said Bye, or it is gone: nothing that it still waits for is cut off
            session.leave()

    async def _tell(self, session: _Session, message: Any) -> None:
        await asyncio.wait_for(session.channel.send(message), self._floor_seconds)

    async def _send_manifest(self, session: _Session, staged: _Staged) -> None:
        data, size = staged.encoded, wire.PART_BYTES
        parts = -(-len(data) // size)
        for index in range(parts):
            await self._tell(session, wire.ManifestPart(index, parts, data[index * size:(index + 1) * size]))

    async def _send_chunk(self, session: _Session, staged: _Staged, request: wire.GetChunk) -> None:
        first, last = staged.manifest.span(request.chunk)
        staged.sessions[session] = staged.sessions.get(session, 0) + 1
        staged.idle.clear()
        ahead = (len(session.sends) + 1) * staged.manifest.chunk_bytes
        try:
            await asyncio.wait_for(session.endpoint.send(staged.buffer[first:last], request.tag),
                                   self._floor_seconds + ahead / self._floor_rate)
            self.bytes_sent += last - first
        except TimeoutError:
            session.cut_off(f"chunk {request.chunk} of version {request.version} was not taken in time")
        except self._lane.api.UCXError as error:
            log.info("%s: chunk %d of version %d to %s: %s", self.role, request.chunk, request.version, session, error)
            session.channel.hang_up()
        finally:
            staged.sessions[session] -= 1
            if not staged.sessions[session]:
                del staged.sessions[session]
            if not staged.sessions:
                staged.idle.set()
