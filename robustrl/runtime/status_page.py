"""The status page: a small file in which a role says what it does, readable from outside at any moment, without any call.

One writer process, any number of readers. The fields form one record under a sequence lock: the sequence is odd while the record is being
written, and a reader takes a record only if the sequence was even, and the same before and after. A writer that is killed or stopped in
the middle leaves it odd; readers report that as ``torn`` instead of waiting. Relies on 8-byte stores becoming visible in order, as on x86.

A write is a handful of stores under a lock without a system call: one field 0.55 us, ``stamp()`` 0.45 us, ``update()`` of two fields
0.7 us; a read of an open page 1.1 us, ``StatusPage.read`` with open and map 17 us (measured, best of 5 x 200,000).
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple, Self

from ..core.roles import Phase

_MAGIC = int.from_bytes(b"RRLPAGE1", "little")
_FIELDS = ("sequence", "phase", "progress", "pending", "step", "version", "stamp", "incarnation", "pid")
_AT = {field: position for position, field in enumerate(_FIELDS, 1)}
"""Position in the page, in units of 8 bytes; position 0 is the magic number."""
_SIZE = 8 * (len(_FIELDS) + 1)
_SEQUENCE, _PHASE, _STAMP = _AT["sequence"], _AT["phase"], _AT["stamp"]
_PHASES = tuple(Phase)
_CODES = {phase: code for code, phase in enumerate(_PHASES)}
_TRIES = 40
_PAUSE = 50e-6


class Status(NamedTuple):
    """One record of a page."""

    phase: Phase
    progress: int
    pending: int
    step: int
    version: int
    """-1: none yet."""
    stamp: int
    """Nanoseconds of the machine's monotonic clock at which the main loop last came round."""
    incarnation: int
    pid: int
    torn: bool
    """The writer stopped or died in the middle of a write: the fields may be of two records."""

    def loop_age(self) -> float:
        """Seconds since the stamp."""
        return (time.monotonic_ns() - self.stamp) / 1e9


class StatusPage:
    """The writer's side; every setter may be called from any thread."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._lock = view, threading.Lock()

    @classmethod
    def create(cls, path: str | os.PathLike[str], incarnation: int, pid: int) -> Self:
        """A new page at ``path``: phase running, counters 0, version -1, stamped now. Readers never see it half made."""
        draft = Path(f"{os.fspath(path)}.new")
        with open(draft, "w+b") as file:
            os.fchmod(file.fileno(), 0o600)
            file.truncate(_SIZE)
            view = memoryview(mmap.mmap(file.fileno(), _SIZE)).cast("q")
        view[0] = _MAGIC
        page = cls(view)
        page.update(incarnation=incarnation, pid=pid, version=-1, stamp=time.monotonic_ns())
        os.replace(draft, path)
        return page

    def update(self, **fields: int) -> None:
        """Sets several of progress, pending, step, version in one record. KeyError for another name."""
        view = self._view
        with self._lock:
            view[_SEQUENCE] += 1
            try:
                for field, value in fields.items():
                    view[_AT[field]] = value
            finally:
                view[_SEQUENCE] += 1

    def _set(self, position: int, value: int) -> None:
        view = self._view
        with self._lock:
            view[_SEQUENCE] += 1
            try:
                view[position] = value
            finally:
                view[_SEQUENCE] += 1

    def stamp(self) -> None:
        """The main loop came round."""
        self._set(_STAMP, time.monotonic_ns())

    @property
    def phase(self) -> Phase:
        return _PHASES[self._view[_PHASE]]

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._set(_PHASE, _CODES[phase])

    @property
    def step(self) -> int:
        return self._view[_AT["step"]]

    @step.setter
    def step(self, step: int) -> None:
        self._set(_AT["step"], step)

    @property
    def version(self) -> int:
        return self._view[_AT["version"]]

    @version.setter
    def version(self, version: int) -> None:
        self._set(_AT["version"], version)

    @property
    def progress(self) -> int:
        return self._view[_AT["progress"]]

    @property
    def pending(self) -> int:
        return self._view[_AT["pending"]]

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Status:
        """One record of the page at ``path``. Raises FileNotFoundError without one, ValueError if the file is no page."""
        with StatusReader(path) as reader:
            return reader.read()


class StatusReader:
    """A page held open for reading again and again."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != _SIZE:
                raise ValueError(f"{path}: {size} bytes; a status page has {_SIZE}")
            self._map = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)
        self._view = memoryview(self._map).cast("q")
        if self._view[0] != _MAGIC:
            self.close()
            raise ValueError(f"{path}: is no status page of this version")

    def read(self) -> Status:
        """Waits at most about 4 ms for a writer in the middle of a write, then reports the record as torn."""
        view = self._view
        for _ in range(_TRIES):
            before = view[_SEQUENCE]
            record = view[_PHASE:].tolist()
            if not before & 1 and view[_SEQUENCE] == before:
                return _status(record, torn=False)
            time.sleep(_PAUSE)
        return _status(record, torn=True)

    def close(self) -> None:
        self._view.release()
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _status(record: list[int], torn: bool) -> Status:
    phase, progress, pending, step, version, stamp, incarnation, pid = record
    return Status(_PHASES[phase], progress, pending, step, version, stamp, incarnation, pid, torn)
