"""Ten thousand hostile connections against a serving process: it lives, its memory stays, and who knows the secret is served meanwhile."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from transport_processes import CHUNK, SECRET, Pulling, Source, content

from robustrl.core.weights import WeightDirectory
from robustrl.transport import wire
from tests.live.conftest import wait_for

pytestmark = pytest.mark.timeout(200)
INPUTS = 10_000
OPEN_AT_ONCE = 24
"""Half-open and slow ones that each attacker keeps."""


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def hostile(generator: random.Random) -> Iterator[bytes]:
    """What a stranger might send, from garbage to a hello that is right but for the proof."""
    hello = wire.Hello(wire.PROTOCOL, "rollout-0", 1, generator.randbytes(16))
    request = wire.GetChunk(1, 1, generator.randrange(2**40), 1)
    kinds = [
        lambda: generator.randbytes(generator.randint(1, 400)),
        lambda: (2**32 - 1).to_bytes(4, "big") + b"x" * 100,
        lambda: (16 << 30).to_bytes(8, "big"),
        lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        lambda: frame(msgspec.msgpack.encode(request)),
        lambda: frame(msgspec.msgpack.encode(wire.GetManifest(1, 1))),
        lambda: frame(msgspec.msgpack.encode(hello)) + frame(msgspec.msgpack.encode(wire.Answer(b"p" * 32, b"u", "m"))),
        lambda: frame(msgspec.msgpack.encode(hello)) * 20,
        lambda: frame(mutated(msgspec.msgpack.encode(hello), generator)),
        lambda: frame(b"\x91" * 4000),
    ]
    while True:
        yield generator.choice(kinds)()


def mutated(body: bytes, generator: random.Random) -> bytes:
    changed = bytearray(body)
    for _ in range(generator.randint(1, 6)):
        changed[generator.randrange(len(changed))] = generator.randrange(256)
    return bytes(changed)


def attack(address: tuple[str, int], count: int, seed: int, sent: list[int]) -> None:
    generator = random.Random(seed)
    inputs = hostile(generator)
    held: list[socket.socket] = []
    for number in range(count):
        data = b"" if number % 10 == 0 else next(inputs)  # half-open
        data = data[:generator.randint(1, 8)] if number % 10 == 1 else data  # stops in the middle
        try:
            sock = socket.create_connection(address, 5)
            sock.sendall(data)
        except OSError:  # the server closed it already
            continue
        finally:
            sent[0] += 1
        if number % 10 < 2:
            held.append(sock)
            if len(held) > OPEN_AT_ONCE:
                held.pop(0).close()
        else:
            sock.close()
    for sock in held:
        sock.close()


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source("tcp", nbytes=8 * CHUNK)
    yield source
    source.end()


def pull(source: Source, directory: WeightDirectory, pulling: Pulling) -> float:
    """Seconds of one pull, the directory's answers included."""
    began = time.monotonic()
    result = pulling.result()
    assert result.manifest.digest == source.digest
    directory.commit("rollout-0", 1, 1, source.digest, None)
    return time.monotonic() - began


def test_ten_thousand_hostile_inputs(source: Source) -> None:
    directory = WeightDirectory()
    source.announce(directory)
    pulling = Pulling("tcp", directory, pulls=400, contents=False)
    try:
        pull(source, directory, pulling)
        before = source.tell("usage")
        quiet = sorted(pull(source, directory, pulling) for _ in range(9))[4]
        sent = [0]
        attackers = [threading.Thread(target=attack, args=(source.address, INPUTS // 2, seed, sent)) for seed in (1, 2)]
        for attacker in attackers:
            attacker.start()
        loud = []
        while any(attacker.is_alive() for attacker in attackers) and len(loud) < 380:
            loud.append(pull(source, directory, pulling))
            time.sleep(0.05)
        for attacker in attackers:
            attacker.join(120)
        assert sent[0] == INPUTS
        after = source.tell("usage")
        sessions, strangers, refusals = source.tell("sessions")
        assert refusals > INPUTS / 2
        assert after["resident"] < before["resident"] + 16 * 2**20
        assert len(loud) >= 5
        # twice the quiet time is the goal of the bench; a test on a shared machine has a margin of 3
        assert sorted(loud)[len(loud) // 2] < 2 * 3 * quiet + 0.2, (quiet, loud)
        time.sleep(wire.HELLO_SECONDS + 0.5)
        assert source.tell("sessions")[1] == 0, "strangers outlive their deadline"
        assert source.tell("usage")["descriptors"] <= before["descriptors"] + 4
    finally:
        pulling.end()
    check = Pulling("tcp", directory, role="rollout-1")
    try:
        assert check.result().content == content(source.plan).tobytes()
    finally:
        check.end()


def test_strangers_are_few_and_short_lived(source: Source) -> None:
    from robustrl.transport.server import MAX_STRANGERS

    socks = [socket.create_connection(source.address, 5) for _ in range(3 * MAX_STRANGERS)]
    deadline = time.monotonic() + 5
    while source.tell("sessions")[2] < 2 * MAX_STRANGERS and time.monotonic() < deadline:
        time.sleep(0.05)
    assert 0 < source.tell("sessions")[1] <= MAX_STRANGERS
    deadline = time.monotonic() + wire.HELLO_SECONDS + 2
    while source.tell("sessions")[1] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert source.tell("sessions") == (0, 0, 3 * MAX_STRANGERS)
    for sock in socks:
        sock.close()


def test_member_that_asks_for_nonsense_is_put_out(source: Source) -> None:
    """Who knows the secret is trusted with the weights, not with our memory or time."""
    import asyncio

    async def ask(message: wire._Message, times: int) -> str:
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, source.address)
        channel = wire.Channel(sock)
        try:
            await wire.greet(channel, SECRET, "rollout-0", 1, "state_keeper-0", 1, worker, "elsewhere")
            for _ in range(times):
                await channel.send(message)
            answer = await asyncio.wait_for(channel.receive(wire.Refused), 5)
            return answer.reason
        except wire.Gone:
            return "gone"
        finally:
            channel.close()

    from robustrl.transport import lane

    worker = lane.get().worker_address()
    assert asyncio.run(ask(wire.GetChunk(1, 1, 2**50, 1), 1)) == f"chunk {2**50} asked for, with 0 under way"
    assert asyncio.run(ask(wire.GetManifest(7, 1), 1)) == "version 7 of incarnation 1 is not staged here"
    assert asyncio.run(ask(wire.GetChunk(1, 9, 0, 1), 1)) == "version 1 of incarnation 9 is not staged here"
    # what it had still to read when it closed may cost us its last word
    assert asyncio.run(ask(wire.GetChunk(1, 1, 0, 1), 100)) in ("chunk 0 asked for, with 32 under way", "gone")
    wait_for("the last session to end", lambda: source.tell("sessions")[0] == 0, 15)
    assert source.process.is_alive()


def test_listener_binds_one_address(source: Source) -> None:
    host, port = source.address
    assert host == "127.0.0.1"
    other = next((address for address in ("127.0.0.2", "127.1.2.3")), None)
    with pytest.raises(OSError):
        socket.create_connection((other, port), 2).close()
