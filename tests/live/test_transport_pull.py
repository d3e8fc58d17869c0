"""A pull between two processes over UCX, its transports, and the death of either side. Each process here is a real one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from robustrl.core.weights import Ask, Lease, Manifest, WeightDirectory
from robustrl.errors import WeightsError

SECRET = b"a secret of the test, 32 bytes.."
CHUNK = 2**20
TRANSPORTS = ["shm", "tcp"]


def content(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def manifest_of(version: int, buffer: np.ndarray, chunk_bytes: int = CHUNK) -> Manifest:
    from robustrl.core.weights import TensorSpec
    from robustrl.transport.manifest import checksums

    return Manifest.build(version=version, tensors=[TensorSpec("w", "uint8", (buffer.nbytes,), 0, buffer.nbytes)], nbytes=buffer.nbytes,
                          chunk_bytes=chunk_bytes, chunks=checksums(buffer, chunk_bytes))


def serve(pipe: Any, transport: str, role: str, incarnation: int, version: int, seed: int, nbytes: int, damage: int | None) -> None:
    """A source process: stages one version, tells its address, waits to be told to end."""
    from robustrl.transport import settings

    settings.apply(transport)
    from robustrl.transport.server import WeightServer

    buffer = content(seed, nbytes)
    manifest = manifest_of(version, buffer)
    if damage is not None:
        buffer[damage] ^= 1
    server = WeightServer("127.0.0.1", SECRET, role=role, incarnation=incarnation)
    server.stage(manifest, buffer)
    pipe.send((server.address, manifest.digest, len(manifest.chunks)))
    while pipe.recv() != "end":
        pipe.send(server.bytes_sent)
    server.close(1.0)
    pipe.send("closed")


class Source:
    def __init__(self, transport: str, role: str = "state_keeper-0", incarnation: int = 1, version: int = 1, seed: int = 1, nbytes: int = 8 * CHUNK + 17,
                 damage: int | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.role, self.incarnation, self.version, self.nbytes = role, incarnation, version, nbytes
        self.process = context.Process(target=serve, args=(theirs, transport, role, incarnation, version, seed, nbytes, damage), daemon=True)
        self.process.start()
        assert self.pipe.poll(60), "the source did not start"
        self.address, self.digest, self.chunks = self.pipe.recv()

    def announce(self, directory: WeightDirectory) -> None:
        directory.announce(self.version, self.digest, self.nbytes, self.chunks, self.role, self.incarnation, tuple(self.address), time.monotonic())

    def bytes_sent(self) -> int:
        self.pipe.send("bytes")
        assert self.pipe.poll(10)
        return self.pipe.recv()

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid or 0, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)


@pytest.fixture
def sources():
    made: list[Source] = []

    def make(*args: Any, **kwargs: Any) -> Source:
        made.append(Source(*args, **kwargs))
        return made[-1]

    yield make
    for source in made:
        source.end()


def pull_here(pipe: Any, transport: str, deadline_s: float, pulls: int, options: dict[str, Any]) -> None:
    """A puller process: asks for leases through the pipe, answers with what it got."""
    from robustrl.transport import settings

    settings.apply(transport)
    from robustrl.transport.puller import Puller

    def next_source(ask: Ask) -> Lease | None:
        pipe.send(("ask", ask))
        return pipe.recv()

    puller = Puller(SECRET, role="rollout-0", incarnation=1, on_event=lambda event: pipe.send(("event", event)), **options)
    for _ in range(pulls):
        try:
            pulled = puller.pull(next_source, deadline_s=deadline_s)
        except WeightsError as error:
            pipe.send(("error", str(error)))
            continue
        pipe.send(("pulled", {"manifest": pulled.manifest, "seed_sum": int(pulled.buffer.astype(np.uint64).sum()), "buffer": pulled.buffer.tobytes(),
                              "received": pulled.bytes_received, "discarded": pulled.bytes_discarded, "transport": pulled.transport,
                              "source": pulled.source, "lease": pulled.lease}))
        puller.recycle(pulled.buffer)


class Pulling:
    def __init__(self, transport: str, directory: WeightDirectory, deadline_s: float = 30, pulls: int = 1, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.directory, self.deadline_s = directory, deadline_s
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=pull_here, args=(theirs, transport, deadline_s, pulls, options), daemon=True)
        self.process.start()
        self.events: list[Any] = []
        self.leases: list[Lease] = []

    def run(self, on_event: Any = None) -> tuple[str, Any]:
        """Answers the puller until it has an outcome."""
        end = time.monotonic() + self.deadline_s + 40
        while self.pipe.poll(max(0, end - time.monotonic())):
            kind, value = self.pipe.recv()
            if kind == "ask":
                lease = self.directory.answer(value, time.monotonic())
                if lease:
                    self.leases.append(lease)
                self.pipe.send(lease)
            elif kind == "event":
                self.events.append(value)
                if on_event:
                    on_event(value)
            else:
                return kind, value
        raise AssertionError("the puller gave no outcome")

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pull_is_complete_and_equal(sources: Any, transport: str) -> None:
    source, directory = sources(transport), WeightDirectory()
    source.announce(directory)
    pulling = Pulling(transport, directory, pulls=2)
    for _ in range(2):
        kind, got = pulling.run()
        assert kind == "pulled", got
        assert got["manifest"].digest == source.digest
        assert got["buffer"] == content(1, source.nbytes).tobytes()
        assert (got["received"], got["discarded"], got["transport"], got["source"]) == (source.nbytes, 0, transport, "state_keeper-0")
        directory.commit("rollout-0", 1, 1, source.digest, None)
    assert source.bytes_sent() == 2 * source.nbytes
    source.pipe.send("end")
    assert source.pipe.poll(10) and source.pipe.recv() == "closed"
    pulling.end()
