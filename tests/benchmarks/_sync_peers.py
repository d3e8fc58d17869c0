"""What ``bench sync`` compares with: ucx_perftest, a gloo broadcast, a Ray object store; measured in the same run as our own rows."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

GLOO_SECONDS = 10
"""The group's time-out (torch's default: 30 minutes). A survivor without a connection to the dead rank sits it out: gloo has no abort."""
_context = multiprocessing.get_context("spawn")
_SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "1m", "UCX_TCP_RX_SEG_SIZE": "1m", "UCX_TCP_SNDBUF": "8m", "UCX_TCP_RCVBUF": "8m"}
_POSIX = {"UCX_POSIX_ERROR_HANDLING": "y"}
SETTINGS: dict[str, dict[str, dict[str, str]]] = {
    "tcp": {
        "default": {"UCX_TLS": "tcp"},
        "put_zcopy": {"UCX_TLS": "tcp", "UCX_RNDV_SCHEME": "put_zcopy"},
        "segments": {"UCX_TLS": "tcp"} | _SEGMENTS,
    },
    "shm": {
        "posix": {"UCX_TLS": "posix,tcp"} | _POSIX,
        # without the last one, UCX leaves cma out where error handling is on
        "posix,cma": {"UCX_TLS": "posix,cma,tcp", "UCX_CMA_MEMORY_INVALIDATE": "y"} | _POSIX,
    },
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def perftest(settings: dict[str, str], message: int, count: int) -> float:
    """GiB/s of ucx_perftest's tag bandwidth with error handling."""
    import libucx

    folder = Path(libucx.__file__).parent
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
    environment = clean | settings | {"LD_LIBRARY_PATH": str(folder / "lib"), "UCX_WARN_UNUSED_ENV_VARS": "n"}
    options = ["-p", str(free_port()), "-t", "tag_bw", "-e", "-s", str(message), "-n", str(count), "-w", "2"]
    command = [str(folder / "bin" / "ucx_perftest"), *options]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(40):  # it does not say when it listens
            done = subprocess.run([*command, "127.0.0.1"], env=environment, capture_output=True, text=True, timeout=100, check=False)
            if not done.returncode:
                break
            time.sleep(0.25)
    finally:
        server.kill()
        server.wait(10)
    if done.returncode:
        raise RuntimeError(f"ucx_perftest with {settings}: {done.stderr[-300:] or done.stdout[-300:]}")
    final = next(line for line in done.stdout.splitlines() if line.startswith("Final:"))
    return float(re.split(r"\s+", final.strip())[5]) / 1024


def _gloo(pipe: Any, rank: int, nbytes: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    tensor = torch.ones(nbytes // 4) if rank == 0 else torch.zeros(nbytes // 4)
    pipe.send(("ready", None))
    while True:
        word, *arguments = pipe.recv()
        try:
            if word == "group":
                port, place, size = arguments
                where = f"tcp://127.0.0.1:{port}"
                dist.init_process_group("gloo", init_method=where, rank=place, world_size=size, timeout=timedelta(seconds=GLOO_SECONDS))
                dist.barrier()
            elif word == "broadcast":
                dist.broadcast(tensor, 0)
            else:
                dist.destroy_process_group()
        except RuntimeError as error:
            dist.destroy_process_group()
            pipe.send(("failed", str(error)))
        else:
            pipe.send(("done", time.monotonic()))


class Gloo:
    """A sender and ``receivers``, broadcasting over gloo; after a death the survivors form a new group and broadcast again."""

    def __init__(self, nbytes: int, receivers: int) -> None:
        self.pipes: dict[int, Any] = {}
        self.processes: dict[int, Any] = {}
        for rank in range(receivers + 1):
            self.pipes[rank], theirs = _context.Pipe()
            self.processes[rank] = _context.Process(target=_gloo, args=(theirs, rank, nbytes), daemon=True)
            self.processes[rank].start()
            theirs.close()
        self._hear("ready")
        self._group()

    def __enter__(self) -> Gloo:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(10)

    def broadcast(self) -> float:
        """Seconds until the last receiver has it."""
        began = time.monotonic()
        self._tell("broadcast")
        return max(self._hear("done").values()) - began

    def broadcast_with_death(self, victim: int, after: float) -> float | None:
        """Seconds from the death of that receiver until the last survivor has it: abort, new group, broadcast again. None, and no death, if
        all had it before.

        If all survivors got it from the first broadcast, there is no second.
        """
        self._tell("broadcast")
        time.sleep(after)
        if all(pipe.poll() for rank, pipe in self.pipes.items() if rank):
            self._hear("done")
            return None
        self.processes[victim + 1].kill()
        killed = time.monotonic()
        self.pipes.pop(victim + 1)
        waiting, through = dict(self.pipes), {}
        while waiting:
            assert time.monotonic() - killed < 120, f"gloo ranks {sorted(waiting)} are silent"
            for pipe in wait(list(waiting.values()), 1):
                rank = next(rank for rank, one in waiting.items() if one is pipe)
                kind, value = waiting.pop(rank).recv()
                if kind == "done":  # it was through before the others failed; it must join the new group all the same
                    through[rank] = value
                    self.pipes[rank].send(("leave",))
                    assert self.pipes[rank].poll(120), f"gloo rank {rank} is silent"
                    self.pipes[rank].recv()
        if set(through) >= set(self.pipes) - {0}:  # all receivers
            return max(0.0, max(value for rank, value in through.items() if rank) - killed)
        self._group()
        self._tell("broadcast")
        return max(self._hear("done").values()) - killed

    def _group(self) -> None:
        port = free_port()
        for place, pipe in enumerate(self.pipes.values()):
            pipe.send(("group", port, place, len(self.pipes)))
        self._hear("done")

    def _tell(self, word: str) -> None:
        for pipe in self.pipes.values():
            pipe.send((word,))

    def _hear(self, kind: str) -> dict[int, Any]:
        heard = {}
        for rank, pipe in self.pipes.items():
            assert pipe.poll(120), f"gloo rank {rank} is silent"
            found, heard[rank] = pipe.recv()
            assert found == kind, f"gloo rank {rank}: {heard[rank]}"
        return heard


class RayStore:
    """A source and ``receivers`` as Ray actors: put, get, copy into the same buffer each time."""

    def __init__(self, nbytes: int, receivers: int) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        for last in (False, False, True):
            try:
                ray.init(num_cpus=receivers + 1, include_dashboard=False, object_store_memory=max(3 * nbytes, 256 << 20),
                         log_to_driver=False, logging_level="error", runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}})
                break
            except Exception as error:  # Ray's own type for a raylet that was not up within its fixed 30 s: a busy machine
                if last or "timed out during startup" not in str(error):
                    raise
                ray.shutdown()

        class Source:
            def __init__(self) -> None:
                import numpy as np

                self.buffer = np.ones(nbytes, np.uint8)

            def put(self) -> Any:
                return [ray.put(self.buffer)]

        class Receiver:
            def __init__(self) -> None:
                import numpy as np

                self.buffer = np.ones(nbytes, np.uint8)

            def get(self, boxed: Any) -> float:
                self.buffer[:] = ray.get(boxed[0])
                return time.monotonic()

        self._ray = ray
        self.source = ray.remote(num_cpus=1)(Source).remote()
        self.receivers = [ray.remote(num_cpus=1)(Receiver).remote() for _ in range(receivers)]
        self.sync()

    def __enter__(self) -> RayStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def sync(self) -> float:
        """Seconds until the last receiver has it."""
        began = time.monotonic()
        return max(self._ray.get(self._get(), timeout=120)) - began

    def sync_with_death(self, victim: int, after: float) -> float | None:
        """Seconds from the death of that receiver until the others have it; None, and no death, if all had it before."""
        ray, got = self._ray, self._get()
        time.sleep(after)
        if len(ray.wait(got, num_returns=len(got), timeout=0)[0]) == len(got):
            return None
        ray.kill(self.receivers.pop(victim))
        got.pop(victim)
        killed = time.monotonic()
        return max(0.0, max(ray.get(got, timeout=120)) - killed)  # 0: the survivors had it before the death

    def _get(self) -> list[Any]:
        """Puts once, and has each receiver get it. An argument is resolved by Ray: the list with the reference in it arrives as such."""
        boxed = self.source.put.remote()
        return [receiver.get.remote(boxed) for receiver in self.receivers]
