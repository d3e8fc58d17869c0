"""Our side of ``bench sync``: a source and pullers as processes, driven through pipes by a WeightDirectory in this one."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from robustrl.core.weights import Ask, Lease, WeightDirectory

SECRET = b"the benchmark's secret, 32 bytes"
KEEPER = "state_keeper-0"
_context = multiprocessing.get_context("spawn")


def _source(pipe: Any, transport: str, nbytes: int, tensors: int) -> None:
    import numpy as np

    from robustrl.core.weights import Manifest, TensorSpec
    from robustrl.transport import settings

    settings.apply(transport, host="127.0.0.1")
    from robustrl.transport.manifest import CHUNK_BYTES, checksums
    from robustrl.transport.server import WeightServer
    from robustrl.transport.staging import Memory

    buffer = Memory().allocate(nbytes)  # what a relay serves from
    buffer[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    chunks = checksums(buffer, CHUNK_BYTES)
    server = WeightServer("127.0.0.1", SECRET, role=KEEPER, incarnation=1)
    specs, offset = [], 0
    for index in range(tensors):  # of mixed sizes that add up
        size = nbytes - offset if index == tensors - 1 else 2 * (nbytes - offset) // (tensors - index) * (1 + index % 3) // 6 // 4 * 4
        specs.append(TensorSpec(f"tensor.{index}", "float32", (size // 4,), offset, size))
        offset += size
    while True:
        word, version = pipe.recv()
        if word == "stage":
            server.retire(version - 1)
            manifest = Manifest.build(version=version, tensors=specs, nbytes=nbytes, chunk_bytes=CHUNK_BYTES, chunks=chunks)
            server.stage(manifest, buffer)
            pipe.send((version, manifest.digest, nbytes, len(chunks), KEEPER, 1, server.address))
        else:
            pipe.send((server.bytes_sent, time.process_time()))


def _puller(pipe: Any, transport: str, role: str, checked: bool, relay: bool) -> None:
    from robustrl.transport import settings

    settings.apply(transport, host="127.0.0.1")
    from robustrl.transport import source
    from robustrl.transport.manifest import tensors
    from robustrl.transport.puller import Puller
    from robustrl.transport.server import WeightServer

    if not checked:
        source.checksum = lambda view, expected: expected  # moves the bytes only

    def next_source(ask: Ask) -> Lease | None:
        pipe.send(("ask", ask))
        return pipe.recv()

    puller = Puller(SECRET, role=role, incarnation=1)
    server = WeightServer("127.0.0.1", SECRET, role=role, incarnation=1) if relay else None
    model: dict[str, Any] = {}
    before: Any = None
    pipe.send(("ready", None))
    while True:
        pipe.recv()
        cpu, began = time.process_time(), time.monotonic()
        pulled = puller.pull(next_source, deadline_s=120)
        if checked:
            for name, tensor in tensors(pulled.manifest, pulled.buffer):
                if name in model:
                    model[name].copy_(tensor)
                else:
                    model[name] = tensor.clone()
        ended = time.monotonic()
        if server:
            server.stage(pulled.manifest, pulled.buffer)
        pipe.send(("done", (began, ended, time.process_time() - cpu, pulled.source, server.address if server else None)))
        if before is not None:
            if server:
                server.retire(before.manifest.version)
            puller.recycle(before.buffer)
        before = pulled


class Fleet:
    """One source and ``receivers`` pullers; a context manager."""

    def __init__(self, transport: str, nbytes: int, receivers: int, *, tensors: int = 1, checked: bool = True, relay: bool = False) -> None:
        self.relay, self.nbytes, self.version = relay, nbytes, 0
        self.directory = WeightDirectory()
        self._processes: list[Any] = []
        self._source = self._start(_source, transport, nbytes, tensors)
        roles = [f"rollout-{index}" for index in range(receivers)]
        self.pullers = {role: self._start(_puller, transport, role, checked, relay) for role in roles}
        self.processes = dict(zip(self.pullers, self._processes[1:], strict=True))
        for pipe in self.pullers.values():
            assert pipe.poll(120) and pipe.recv()[0] == "ready", "a puller did not start"

    def _start(self, target: Callable[..., None], *arguments: Any) -> Any:
        mine, theirs = _context.Pipe()
        process = _context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        return mine

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)

    def sent(self) -> tuple[int, float]:
        """Bytes that the source has sent, and its CPU seconds."""
        self._source.send(("sent", 0))
        assert self._source.poll(30), "the source is silent"
        return self._source.recv()

    def sync(self, *, star: bool = False, kill: tuple[str, float] | None = None) -> dict[str, Any]:
        """One new version to all. ``star``: everyone pulls from the source at once. ``kill``: this puller dies so many seconds later.

        Seconds are from the announcement, with ``kill`` from the death, until the last survivor holds (and has copied) the version;
        ``killed`` is false if the sync was over before that.
        """
        self.version += 1
        self._source.send(("stage", self.version))
        assert self._source.poll(60), "the source is silent"
        staged = self._source.recv()
        self.directory.announce(*staged, now=time.monotonic())
        sent, source_cpu = self.sent()
        began = start = time.monotonic()
        for pipe in self.pullers.values():
            pipe.send("pull")
        done: dict[str, Any] = {}
        alive = dict(self.pullers)
        while len(done) < len(alive):
            if kill and time.monotonic() - began > kill[1]:
                self.processes[kill[0]].kill()
                start = time.monotonic()
                del alive[kill[0]]
                done.pop(kill[0], None)
                self.directory.remove_holder(kill[0], 1)
                kill = None
            assert time.monotonic() - began < 150, f"only {sorted(done)} are done"
            ready: list[Any] = wait(list(alive.values()), 0.01)
            for pipe in ready:
                role = next(role for role, one in alive.items() if one is pipe)
                kind, value = pipe.recv()
                if kind == "ask":
                    pipe.send(self._star(value, staged) if star else self.directory.answer(value, time.monotonic()))
                else:
                    done[role] = value
                    self.directory.commit(role, 1, self.version, staged[1], value[4] if self.relay and not star else None)
        after, source_cpu_after = self.sent()
        seconds = max(0.0, max(ended for _, ended, *_ in done.values()) - start)  # 0: all survivors had it before the death
        return {"killed": kill is None, "seconds": seconds, "copies": (after - sent) / self.nbytes,
                "source_cpu": source_cpu_after - source_cpu, "puller_cpu": statistics.mean(cpu for _, _, cpu, *_ in done.values())}

    def sync_with_death(self, victim: int, after: float) -> float | None:
        """Seconds from the death of that puller until the survivors hold the version; None, and no death, if the sync was over before."""
        found = self.sync(kill=(f"rollout-{victim}", after))
        return found["seconds"] if found["killed"] else None

    def _star(self, ask: Ask, staged: Any) -> Lease:
        version, digest, nbytes, chunks, source, incarnation, address = staged
        return Lease(id=0, puller=ask.puller, puller_incarnation=1, source=source, incarnation=incarnation, address=address,
                     version=version, digest=digest, nbytes=nbytes, start=0, stop=chunks, expires=float("inf"))
