"""The witness: a process outside Ray and outside the job that keeps a log of its own, ``witness.jsonl``, of what it sees of the job.

It asks nobody. Who is there it reads from the status pages, which each role's process puts up itself; deaths from pidfds; CPU time and
state from /proc; and it hashes the committed weights where they lie in the state keepers' memory. It carries no mark of the run, so nothing
that cleans up after the job ends it; it ends by itself once the host and all that it watches are gone. `robustrl audit RUN --witness` holds
both logs against each other. Leaves out: other machines.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..core.events import GENESIS
from ..core.testimony import Began, Born, Died, Ended, Line, Read, Sight, Weights, seal
from ..core.weights import Manifest
from ..errors import RobustRLError
from . import registry
from .processes import ProcessId, cpu_seconds, open_pidfd, process_state, read_start_ticks
from .status_page import StatusPage

FILE = "witness.jsonl"
_LOOK = 0.05
"""Seconds between two looks at what is new."""
_READ = 1.0
_LAST = 30.0
"""Seconds after the end of the host in which all that it watches must be gone."""


class Witness:
    def __init__(self, run: str, run_dir: Path, host: ProcessId) -> None:
        self.run, self.temp = run, registry.temp_dir(run)
        self._host = open_pidfd(host)
        self._poll = select.epoll()
        self._poll.register(self._host, select.EPOLLIN)
        self._file = os.open(run_dir / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._seq, self._chain = 0, GENESIS
        self._lives: dict[int, tuple[str, int, int]] = {}
        """pidfd -> role, incarnation, pid."""
        self._known: set[str] = set()
        self._hashed: dict[Path, int] = {}
        self._say(Began(t=time.monotonic(), run=run, host_pid=host.pid))

    def watch(self) -> None:
        """Returns when host and roles are gone, at the latest ``_LAST`` seconds after the host."""
        next_read, deadline = 0.0, float("inf")
        while time.monotonic() < deadline and (self._host >= 0 or self._lives):
            for fd, _ in self._poll.poll(_LOOK):
                if fd == self._host:
                    self._forget(fd)
                    self._host, deadline = -1, time.monotonic() + _LAST
                else:
                    role, incarnation, pid = self._lives.pop(fd)
                    self._forget(fd)
                    self._say(Died(t=time.monotonic(), role=role, incarnation=incarnation, pid=pid))
            self._look_for_births()
            self._look_at_weights()
            if time.monotonic() >= next_read:
                next_read = time.monotonic() + _READ
                self._read()
        self._say(Ended(t=time.monotonic(), left=[f"{role}.{n} (pid {pid})" for role, n, pid in self._lives.values()]))

    def _say(self, sight: Sight) -> None:
        self._seq += 1
        line = seal(Line(self._seq, sight), self._chain)
        self._chain = line.chain
        os.write(self._file, msgspec.json.encode(line) + b"\n")

    def _forget(self, fd: int) -> None:
        self._poll.unregister(fd)
        os.close(fd)

    def _look_for_births(self) -> None:
        try:
            names = os.listdir(self.temp / "status")
        except FileNotFoundError:  # not there yet, or no longer
            return
        for name in names:
            role, _, incarnation = name.rpartition(".")
            if name in self._known or not incarnation.isdigit():
                continue
            self._known.add(name)
            try:
                pid = StatusPage.read(self.temp / "status" / name).pid
                ticks = read_start_ticks(pid)
                fd = open_pidfd(ProcessId(pid, ticks))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has come and gone between two looks
            now = time.monotonic()
            self._say(Born(t=now, role=role, incarnation=int(incarnation), pid=pid, start_ticks=ticks))
            self._lives[fd] = role, int(incarnation), pid
            self._poll.register(fd, select.EPOLLIN)

    def _read(self) -> None:
        lives = {}
        for role, incarnation, pid in self._lives.values():
            try:
                lives[f"{role}.{incarnation}"] = round(cpu_seconds(pid), 3), process_state(pid)
            except ProcessLookupError:
                continue  # its pidfd says so at the next look
        self._say(Read(t=time.monotonic(), lives=lives))

    def _look_at_weights(self) -> None:
        for note in self.temp.glob("*.kept"):
            try:
                stamp = note.stat().st_mtime_ns
                if self._hashed.get(note) == stamp:
                    continue
                manifest = hashed_weights(note)
                if note.stat().st_mtime_ns != stamp:
                    continue  # the next step was committed meanwhile, and the slot may be written to again
            except FileNotFoundError:
                continue
            self._hashed[note] = stamp
            sight = Weights(t=time.monotonic(), holder=note.stem, version=manifest.version, digest=manifest.digest)
            self._say(sight)


def hashed_weights(note: Path) -> Manifest:
    """The manifest of the weights that lie in the slot which a keeper's note calls committed, its checksums computed from those bytes."""
    import xxhash

    held = msgspec.msgpack.decode(note.read_bytes())
    kept = held.get("kept", held)
    said = msgspec.convert(kept["manifest"], Manifest)
    with open(held["slots"][kept["snapshot"]["slot"]]["path"], "rb") as file:
        chunks = [xxhash.xxh3_128_hexdigest(file.read(last - first)) for first, last in map(said.span, range(len(said.chunks)))]
    own = msgspec.structs.replace(said, chunks=chunks)
    return msgspec.structs.replace(own, digest=own.computed_digest())


def read_testimony(run_dir: Path | str) -> list[Line]:
    """The witness's lines. Raises RobustRLError where there are none, or one cannot be read."""
    path = Path(run_dir) / FILE
    try:
        return list(_decode(path, path.read_bytes().splitlines()))
    except FileNotFoundError:
        raise RobustRLError(f"{path}: there is none: the run had no witness (launch(..., witness=True))") from None


def _decode(path: Path, lines: list[bytes]) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    for number, line in enumerate(lines, 1):
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise RobustRLError(f"{path}: line {number}: cannot be read: {error}") from None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m robustrl.runtime.witness", description=__doc__)
    parser.add_argument("run")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("host_pid", type=int)
    parser.add_argument("host_ticks", type=int)
    given = parser.parse_args(argv)
    try:
        witness = Witness(given.run, given.run_dir, ProcessId(given.host_pid, given.host_ticks))
    except ProcessLookupError:
        sys.exit("the host has ended already")
    witness.watch()


if __name__ == "__main__":
    main()
