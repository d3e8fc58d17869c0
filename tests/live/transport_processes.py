"""Source, relay and puller processes for the tests of the weight plane, with traps that strike at a chosen chunk."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from robustrl.core.weights import Ask, Lease, Manifest, TensorSpec, WeightDirectory
from robustrl.errors import WeightsError

SECRET = b"a secret of the test, 32 bytes.."
CHUNK = 4 * 2**20
CHUNKS = 16
NBYTES = (CHUNKS - 1) * CHUNK + 4097
"""The last chunk is short and odd."""
_context = multiprocessing.get_context("spawn")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a source serves and what befalls it."""

    role: str = "state_keeper-0"
    incarnation: int = 1
    version: int = 1
    seed: int = 1
    """Of the content."""
    other_seed: int | None = None
    """Content of the chunks from ``CHUNKS // 2`` on, where it differs."""
    nbytes: int = NBYTES
    damage: int | None = None
    """Offset of a byte that is changed after the checksums were taken."""
    trap_chunk: int | None = None
    """How many chunks are asked for before the trap strikes in the middle of one."""
    trap_signal: int = signal.SIGKILL
    overwrite: bool = False
    """The trap is not a signal: other bytes are written over all that is served."""
    secret: bytes = SECRET


def content(plan: Plan) -> np.ndarray:
    data = np.random.default_rng(plan.seed).integers(0, 256, plan.nbytes, np.uint8)
    if plan.other_seed is not None:
        half = CHUNKS // 2 * CHUNK
        data[half:] = np.random.default_rng(plan.other_seed).integers(0, 256, plan.nbytes - half, np.uint8)
    return data


def manifest_of(version: int, buffer: np.ndarray, chunk_bytes: int = CHUNK) -> Manifest:
    from robustrl.transport.manifest import checksums

    tensors = [TensorSpec("w", "uint8", (buffer.nbytes,), 0, buffer.nbytes)]
    chunks = checksums(buffer, chunk_bytes)
    return Manifest.build(version=version, tensors=tensors, nbytes=buffer.nbytes, chunk_bytes=chunk_bytes, chunks=chunks)


def _serve(pipe: Any, transport: str, plan: Plan) -> None:
    from robustrl.transport import settings

    settings.apply(transport)
    from robustrl.transport.server import WeightServer

    class Trapped(WeightServer):
        asked = 0

        async def _send_chunk(self, session: Any, staged: Any, request: Any) -> None:
            self.asked += 1
            if self.asked == plan.trap_chunk:
                strike = (buffer.fill, 7) if plan.overwrite else (os.kill, os.getpid(), plan.trap_signal)
                asyncio.get_running_loop().call_soon(*strike)  # once the send has begun
            await super()._send_chunk(session, staged, request)

    buffer = content(plan)
    manifest = manifest_of(plan.version, buffer)
    if plan.damage is not None:
        buffer[plan.damage] ^= 1
    events: list[Any] = []
    server = Trapped("127.0.0.1", plan.secret, role=plan.role, incarnation=plan.incarnation, on_event=events.append)
    server.stage(manifest, buffer)
    pipe.send((server.address, manifest.digest, len(manifest.chunks)))
    while (word := pipe.recv()) != "close":
        if word == "sent":
            pipe.send(server.bytes_sent)
        elif word == "retire":
            pipe.send(server.retire(plan.version, 1.0))
        elif word == "sessions":
            pipe.send((len(server._sessions), len(server._strangers), server.refusals))
        elif word == "open":
            pipe.send(len(server._lane._open))
        elif word == "usage":
            pipe.send(usage())
        elif word == "events":
            pipe.send(events)
    server.close(1.0)
    pipe.send("closed")


def usage() -> dict[str, int]:
    """Descriptors, resident bytes and shared-memory mappings of this process."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * 4096
    with open("/proc/self/maps") as file:
        shared = sum("/dev/shm" in line or "ucx_shm" in line for line in file)
    return {"descriptors": len(os.listdir("/proc/self/fd")), "resident": resident, "shared": shared}


class _Process:
    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, seconds: float = 30.0) -> Any:
        assert self.pipe.poll(seconds), f"nothing from {self.process.name} for {seconds} s"
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid or 0, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)


class Source(_Process):
    def __init__(self, transport: str, **plan: Any) -> None:
        self.plan = Plan(**plan)
        super().__init__(_serve, transport, self.plan)
        self.address, self.digest, self.chunks = self.hear(60)

    def announce(self, directory: WeightDirectory) -> None:
        plan = self.plan
        directory.announce(plan.version, self.digest, plan.nbytes, self.chunks, plan.role, plan.incarnation, self.address, time.monotonic())

    def join(self, directory: WeightDirectory) -> None:
        """As a relay."""
        directory.commit(self.plan.role, self.plan.incarnation, self.plan.version, self.digest, self.address)

    def tell(self, word: str) -> Any:
        self.pipe.send(word)
        return self.hear()


def _pull(pipe: Any, transport: str, role: str, pulls: int, deadline_s: float, relay: bool, contents: bool,
          options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO)
    from robustrl.transport import settings

    settings.apply(transport)
    from robustrl.transport.puller import Puller
    from robustrl.transport.server import WeightServer

    def next_source(ask: Ask) -> Lease | None:
        pipe.send(("ask", ask))
        return pipe.recv()

    puller = Puller(SECRET, role=role, incarnation=1, on_event=lambda event: pipe.send(("event", event)), **options)
    server = WeightServer("127.0.0.1", SECRET, role=role, incarnation=1) if relay else None
    for _ in range(pulls):
        try:
            pulled = puller.pull(next_source, deadline_s=deadline_s)
        except WeightsError as error:
            pipe.send(("error", str(error)))
            continue
        if server:
            server.stage(pulled.manifest, pulled.buffer)
        result = Result(manifest=pulled.manifest, content=pulled.buffer.tobytes() if contents else b"", received=pulled.bytes_received,
                        discarded=pulled.bytes_discarded, transport=pulled.transport, source=pulled.source, usage=usage(),
                        address=server.address if server else None)
        pipe.send(("pulled", result))
        if not server:
            puller.recycle(pulled.buffer)
    pipe.recv()


class Result(msgspec.Struct, kw_only=True):
    manifest: Manifest
    content: bytes
    received: int
    discarded: int
    transport: str
    source: str
    usage: dict[str, int]
    address: tuple[str, int] | None


class Pulling(_Process):
    """A puller process whose questions this process answers from a directory."""

    def __init__(self, transport: str, directory: WeightDirectory, *, role: str = "rollout-0", deadline_s: float = 30.0, pulls: int = 1,
                 relay: bool = False, contents: bool = True, **options: Any) -> None:
        self.directory, self.role, self.deadline_s = directory, role, deadline_s
        self.events: list[Any] = []
        self.leases: list[Lease] = []
        self.waited = 0
        super().__init__(_pull, transport, role, pulls, deadline_s, relay, contents, options)

    def step(self, seconds: float) -> tuple[str, Any] | None:
        """Answers one message; returns the outcome (``pulled`` or ``error``) when it comes."""
        if not self.pipe.poll(seconds):
            return None
        kind, value = self.pipe.recv()
        if kind == "ask":
            lease = self.directory.answer(value, time.monotonic())
            self.leases += [lease] if lease else []
            self.waited += lease is None
            self.pipe.send(lease)
        elif kind == "event":
            self.events.append(value)
        else:
            return kind, value
        return None

    def outcome(self, meanwhile: Callable[[], None] = lambda: None) -> tuple[str, Any]:
        end = time.monotonic() + self.deadline_s + 30
        while time.monotonic() < end:
            if found := self.step(0.05):
                return found
            meanwhile()
        raise AssertionError("the puller gave no outcome")

    def result(self, meanwhile: Callable[[], None] = lambda: None) -> Result:
        kind, value = self.outcome(meanwhile)
        assert kind == "pulled", value
        return value

    def events_of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]
