"""Control frames: bounds, the mutual proof, and that nothing in this package lets a peer choose how much we allocate."""

from __future__ import annotations

import ast
import asyncio
import os
import random
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

import robustrl.transport
from robustrl.transport import wire

SECRET = b"x" * 32


Work = Callable[[wire.Channel], Coroutine[Any, Any, Any]]


def both(server: Work, puller: Work) -> tuple[Any, Any]:
    """Runs the two sides over a socket pair; a side's exception is its result, and its end closes its socket."""

    async def side(work: Work, sock: socket.socket) -> Any:
        channel = wire.Channel(sock)
        try:
            return await asyncio.wait_for(work(channel), 5)
        except Exception as error:
            return error
        finally:
            channel.close()

    async def main() -> tuple[Any, Any]:
        here, there = pair()
        return tuple(await asyncio.gather(side(server, here), side(puller, there)))  # type: ignore[return-value]

    return asyncio.run(main())


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        return listener.accept()[0], here


def admit(secret: bytes = SECRET) -> Work:
    return lambda channel: wire.admit(channel, secret, "state_keeper-0", 2, b"ucx-s", "m")


def greet(secret: bytes = SECRET, role: str = "state_keeper-0", incarnation: int = 2) -> Work:
    return lambda channel: wire.greet(channel, secret, "rollout-0", 1, role, incarnation, b"ucx-p", "m")


def test_both_sides_prove_themselves() -> None:
    admitted, welcome = both(admit(), greet())
    hello, answer = admitted
    assert (hello.role, hello.incarnation, answer.ucx) == ("rollout-0", 1, b"ucx-p")
    assert welcome == wire.Welcome(b"ucx-s", "m")


def test_wrong_secret_is_found_by_the_puller_first() -> None:
    server, puller = both(admit(b"y" * 32), greet())
    assert isinstance(puller, wire.ProtocolError) and "does not know the job's secret" in str(puller)
    assert isinstance(server, wire.Gone)


def test_puller_that_cannot_prove_itself_is_refused() -> None:
    async def liar(channel: wire.Channel) -> Any:
        await channel.send(wire.Hello(wire.PROTOCOL, "rollout-0", 1, os.urandom(16)))
        challenge = await channel.receive(wire.Challenge)
        await channel.send(wire.Answer(challenge.proof, b"ucx", "m"))  # the server's own proof, reflected
        return await channel.receive(wire.Welcome)

    server, puller = both(admit(), liar)
    assert isinstance(server, wire.ProtocolError) and "rollout-0 does not know the job's secret" in str(server)
    assert isinstance(puller, wire.Gone)


def test_recorded_hello_does_not_open_a_second_connection() -> None:
    recorded: list[Any] = []

    class Recording(wire.Channel):
        async def send(self, message: Any) -> None:
            recorded.append(message)
            await super().send(message)

    async def honest(channel: wire.Channel) -> Any:
        channel.__class__ = Recording
        return await greet()(channel)

    async def replay(channel: wire.Channel) -> Any:
        await channel.send(recorded[0])
        await channel.receive(wire.Challenge)
        await channel.send(recorded[1])
        return await channel.receive(wire.Welcome)

    assert not isinstance(both(admit(), honest)[0], Exception)
    server, puller = both(admit(), replay)
    assert isinstance(server, wire.ProtocolError) and isinstance(puller, wire.Gone)


@pytest.mark.parametrize(("role", "incarnation"), [("state_keeper-1", 2), ("state_keeper-0", 3)])
def test_puller_wants_exactly_the_peer_of_its_lease(role: str, incarnation: int) -> None:
    puller = both(admit(), greet(role=role, incarnation=incarnation))[1]
    assert isinstance(puller, wire.ProtocolError) and "state_keeper-0 incarnation 2 answered instead" in str(puller)


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(("sent", "text"), [
    (b"\xff\xff\xff\xff", "frame of 4294967295 bytes: 1 to 4096 allowed"),
    ((4097).to_bytes(4, "big"), "frame of 4097 bytes"),
    (b"\0\0\0\0", "frame of 0 bytes"),
    (b"GET / HTTP/1.1\r\n\r\n", "frame of 1195725856 bytes"),
    (frame(b"\xc1garbage"), "no message"),
    (frame(b"\x91" * 4000), "no message"),
    (frame(msgspec.msgpack.encode({"m": "hello", "protocol": 1, "role": "r" * 65, "incarnation": 1, "nonce": b"n" * 16})), "no message"),
    (frame(msgspec.msgpack.encode({"m": "hello", "protocol": 1, "role": "r", "incarnation": -1, "nonce": b"n" * 16})), "no message"),
    (frame(msgspec.msgpack.encode({"m": "hello", "protocol": 1, "role": "r", "incarnation": 1, "nonce": b"n"})), "no message"),
    (frame(msgspec.msgpack.encode({"m": "hello", "protocol": 9, "role": "r", "incarnation": 1, "nonce": b"n" * 16})), "protocol 9, here 1"),
    (frame(msgspec.msgpack.encode(wire.GetChunk(1, 1, 0, 0))), "GetChunk where Hello was due"),
])
def test_hostile_hello(sent: bytes, text: str) -> None:
    async def puller(channel: wire.Channel) -> None:
        await channel._loop.sock_sendall(channel._sock, sent)
        await asyncio.sleep(0.05)

    server = both(admit(), puller)[0]
    assert isinstance(server, wire.ProtocolError) and text in str(server)


def test_fuzzed_messages_never_raise_anything_else() -> None:
    generator = random.Random(1)
    messages = (wire.Hello(1, "rollout-0", 1, b"n" * 16), wire.Challenge("r", 1, b"n" * 16, b"p" * 32), wire.Answer(b"p" * 32, b"u", "m"),
                wire.Welcome(b"u", "m"), wire.GetManifest(1, 1), wire.ManifestPart(0, 1, b"d"), wire.GetChunk(1, 1, 2, 3),
                wire.Refused("r"), wire.Bye())
    valid = [msgspec.msgpack.encode(message) for message in messages]

    async def main() -> int:
        refused = 0
        here, there = pair()
        channel = wire.Channel(here)
        there.setblocking(False)
        for _ in range(10_000):
            body = bytearray(generator.choice(valid))
            for _ in range(generator.randint(1, 4)):
                body[generator.randrange(len(body))] = generator.randrange(256)
            await channel._loop.sock_sendall(there, frame(bytes(body)))
            try:
                await channel.receive(wire._Message)
            except wire.ProtocolError:
                refused += 1
        channel.close()
        there.close()
        return refused

    assert 1000 < asyncio.run(main()) < 10_000


def test_buffer_is_allocated_before_the_peer_speaks() -> None:
    async def main() -> tuple[int, int]:
        here, there = pair()
        channel = wire.Channel(here)
        before = len(channel._buffer)
        channel.trust()
        sizes = before, len(channel._buffer)
        channel.close()
        there.close()
        return sizes

    assert asyncio.run(main()) == (wire.HELLO_BYTES, wire.FRAME_BYTES)
    for message in (wire.ManifestPart(2**62, 1, b"d" * wire.PART_BYTES), wire.Refused("r" * 500)):
        assert len(msgspec.msgpack.encode(message)) <= wire.FRAME_BYTES
    for message in (wire.Answer(b"p" * 32, b"u" * 3500, "m" * 128), wire.Challenge("r" * 64, 2**62, b"n" * 16, b"p" * 32)):
        assert len(msgspec.msgpack.encode(message)) <= wire.HELLO_BYTES


def test_no_receive_is_sized_by_the_peer() -> None:
    """Lint: these calls allocate what the peer asks for; control frames are only received by Channel._fill into its own buffer."""
    forbidden = {
        *("recv_obj", "am_recv", "recv_multi", "tag_recv_multi", "recv_with_handle", "tag_recv_with_handle", "tag_probe", "stream_recv"),
        *("recv", "sock_recv", "recvfrom", "sock_recvfrom", "readexactly", "readuntil", "readline", "open_connection", "start_server"),
    }
    for file in sorted(Path(robustrl.transport.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            where = f"{file.name}:{getattr(node, 'lineno', 0)}"
            assert name not in forbidden and text not in forbidden, f"{where}: {name or text} lets the peer choose the size"


@pytest.mark.parametrize(("mode", "size", "text"), [(0o644, 32, "mode 0644: must be 0600"), (0o600, 15, "15 bytes: must be at least 16")])
def test_secret_file_that_others_can_read_or_is_short(tmp_path: Path, mode: int, size: int, text: str) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"s" * size)
    file.chmod(mode)
    with pytest.raises(ValueError, match=text):
        wire.read_secret(file)


def test_secret_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    assert wire.read_secret(file) == SECRET
