"""Control frames between a puller and a weight server: a TCP connection of our own, beside UCX, which carries the weights only.

A frame is a 4-byte big-endian length and a msgpack message. It is received into a buffer that was allocated before the peer spoke; a
longer frame, or one that is not a known message, ends the connection. Keeping control out of UCX has three reasons: the listener binds
one address, what a stranger can make us allocate is bounded, and a dead peer closes it at once, which UCX's shared memory never tells.

Hello: nonce -> nonce + server's proof -> puller's proof. A proof is HMAC-SHA256 under the job's secret over the side, both nonces and
both identities, so it cannot be replayed or reflected. What follows is not encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
from pathlib import Path
from typing import Annotated, Any, Union

import msgspec

PROTOCOL = 1
HELLO_SECONDS = 2.0
HELLO_BYTES = 4096
FRAME_BYTES = 64 * 1024
PART_BYTES = 48 * 1024
"""Bytes of an encoded manifest per frame."""
MANIFEST_BYTES = 64 * 1024 * 1024
"""Largest encoded manifest that a puller accepts (a million tensors or chunks)."""

Name = Annotated[str, msgspec.Meta(max_length=64)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Proof = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Message(msgspec.Struct, frozen=True, tag_field="m", forbid_unknown_fields=True):
    pass


class Hello(_Message, frozen=True, tag="hello"):
    protocol: int
    role: Name
    incarnation: Count
    nonce: Nonce


class Challenge(_Message, frozen=True, tag="challenge"):
    role: Name
    incarnation: Count
    nonce: Nonce
    proof: Proof


class Answer(_Message, frozen=True, tag="answer"):
    proof: Proof
    ucx: Annotated[bytes, msgspec.Meta(min_length=1, max_length=3500)]
    machine: Annotated[str, msgspec.Meta(max_length=128)]


class Welcome(_Message, frozen=True, tag="welcome"):
    ucx: Annotated[bytes, msgspec.Meta(min_length=1, max_length=3500)]
    machine: Annotated[str, msgspec.Meta(max_length=128)]


class GetManifest(_Message, frozen=True, tag="get_manifest"):
    version: Count
    incarnation: Count
    """Of the server, as the puller's lease says."""


class ManifestPart(_Message, frozen=True, tag="manifest_part"):
    index: Count
    parts: Annotated[int, msgspec.Meta(ge=1, le=MANIFEST_BYTES // PART_BYTES + 1)]
    data: Annotated[bytes, msgspec.Meta(max_length=PART_BYTES)]


class GetChunk(_Message, frozen=True, tag="get_chunk"):
    version: Count
    incarnation: Count
    chunk: Count
    tag: Count
    """UCX tag that the puller waits on; used once in the life of its process."""


class Refused(_Message, frozen=True, tag="refused"):
    reason: Annotated[str, msgspec.Meta(max_length=500)]


class Bye(_Message, frozen=True, tag="bye"):
    """The puller leaves of its own will. Without it, it died."""


Message = Union[Hello, Challenge, Answer, Welcome, GetManifest, ManifestPart, GetChunk, Refused, Bye]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class ProtocolError(Exception):
    """The peer sent something that is not allowed here, or does not know the secret."""


class Gone(Exception):
    """The peer closed the connection or its process ended."""


class Channel:
    """A connected, non-blocking socket that carries frames. Used by one reader and one writer at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(HELLO_BYTES)
        self._writing = asyncio.Lock()

    def trust(self) -> None:
        """The peer has proved itself: larger frames from here on."""
        self._buffer = bytearray(FRAME_BYTES)

    async def send(self, message: _Message) -> None:
        """Raises Gone. The caller sets the deadline."""
        body = _encoder.encode(message)
        try:
            async with self._writing:
                await self._loop.sock_sendall(self._sock, len(body).to_bytes(4, "big") + body)
        except OSError as error:
            raise Gone(f"connection lost ({error.strerror or error})") from error

    async def receive(self, *kinds: type[_Message]) -> Any:
        """The next message, which must be of one of ``kinds``. Raises Gone, ProtocolError. The caller sets the deadline."""
        view = memoryview(self._buffer)
        await self._fill(view[:4])
        size = int.from_bytes(view[:4], "big")
        if not 0 < size <= len(view):
            raise ProtocolError(f"frame of {size} bytes: 1 to {len(view)} allowed")
        await self._fill(view[:size])
        try:
            message = _decoder.decode(view[:size])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"frame that is no message ({error})") from None
        if not isinstance(message, kinds):
            raise ProtocolError(f"{type(message).__name__} where {' or '.join(kind.__name__ for kind in kinds)} was due")
        return message

    async def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                got = await self._loop.sock_recv_into(self._sock, view[done:])
            except OSError as error:
                raise Gone(f"connection lost ({error.strerror or error})") from error
            if not got:
                raise Gone("connection closed by the peer")
            done += got

    def last_word(self, message: _Message) -> None:
        """Sends it if that needs no waiting: why the connection is going to be closed. Without one, the other side takes us for dead."""
        if not self._writing.locked():
            body = _encoder.encode(message)
            with contextlib.suppress(OSError):
                self._sock.send(len(body).to_bytes(4, "big") + body)

    def hang_up(self) -> None:
        """Whoever reads or writes here gets Gone."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer was first
            pass

    def close(self) -> None:
        """Only when nobody reads or writes here any more: the loop would never wake them."""
        self._sock.close()


def proof(secret: bytes, side: str, hello: Hello, role: str, incarnation: int, nonce: bytes) -> bytes:
    """What ``side`` (``server`` or ``puller``) shows; the last three name the server's part of the hello."""
    text = msgspec.msgpack.encode((PROTOCOL, side, hello.role, hello.incarnation, hello.nonce, role, incarnation, nonce))
    return hmac.digest(secret, text, "sha256")


async def greet(
    channel: Channel, secret: bytes, role: str, incarnation: int, server_role: str, server_incarnation: int, ucx: bytes, machine: str
) -> Welcome:
    """Puller's side of the hello. Raises ProtocolError if the server is not who the lease says, Gone; the caller sets the deadline."""
    hello = Hello(PROTOCOL, role, incarnation, os.urandom(16))
    await channel.send(hello)
    challenge = await channel.receive(Challenge)
    expected = proof(secret, "server", hello, challenge.role, challenge.incarnation, challenge.nonce)
    if not hmac.compare_digest(challenge.proof, expected):
        raise ProtocolError("it does not know the job's secret")
    if (challenge.role, challenge.incarnation) != (server_role, server_incarnation):
        raise ProtocolError(f"{challenge.role} incarnation {challenge.incarnation} answered instead")
    await channel.send(Answer(proof(secret, "puller", hello, challenge.role, challenge.incarnation, challenge.nonce), ucx, machine))
    welcome: Welcome = await channel.receive(Welcome)
    channel.trust()
    return welcome


async def admit(channel: Channel, secret: bytes, role: str, incarnation: int, ucx: bytes, machine: str) -> tuple[Hello, Answer]:
    """Server's side of the hello. Raises ProtocolError, Gone; the caller sets the deadline."""
    hello = await channel.receive(Hello)
    if hello.protocol != PROTOCOL:
        raise ProtocolError(f"protocol {hello.protocol}, here {PROTOCOL}")
    nonce = os.urandom(16)
    await channel.send(Challenge(role, incarnation, nonce, proof(secret, "server", hello, role, incarnation, nonce)))
    answer = await channel.receive(Answer)
    if not hmac.compare_digest(answer.proof, proof(secret, "puller", hello, role, incarnation, nonce)):
        raise ProtocolError(f"{hello.role} does not know the job's secret")
    await channel.send(Welcome(ucx, machine))
    channel.trust()
    return hello, answer


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """The secret in a file of at least 16 bytes that only its owner can read. Raises ValueError naming the file."""
    file = Path(path)
    mode = file.stat().st_mode & 0o777
    if mode & 0o077:
        raise ValueError(f"secret file {file} has mode {mode:04o}: must be 0600")
    secret = file.read_bytes()
    if len(secret) < 16:
        raise ValueError(f"secret file {file} has {len(secret)} bytes: must be at least 16")
    return secret
