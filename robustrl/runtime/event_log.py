"""The writer and the reader of ``events.jsonl``, the single source of truth of a run.

Promises: entries are numbered from 1 without gaps and chained; ``append`` returns an entry only after its line was handed to the kernel,
so what a decision saw survives the death of this process; what an emitter sends again is recognised and written once; a gap in an emitter's
numbers is refused, and the error names the number to send again from. One writer per file (flock). A torn last line, left by a crash in the
middle of a write, is cut off when the log is opened again, and that is recorded.

Leaves out: threads (one caller at a time) and power loss: the file is synced to disk at most once in ``SYNC_SECONDS``, with the closing
record, and on close, so a machine that loses power can lose about that much. Whether a log is *right* is core/audit.py's question.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import msgspec

from robustrl.core.audit import Finding, audit
from robustrl.core.events import GENESIS, HOST, Emitted, Entry, Event, LogRepaired, RunEnded, WarningRaised, entry_decoder, seal
from robustrl.errors import RobustRLError

SYNC_SECONDS = 1.0


class LogError(RobustRLError, ValueError):
    """A log that cannot be read, written or continued; the text names the file and, where there is one, the line."""


class UnreadableLine(LogError):
    """A line that is no entry of this schema, or the torn last one of a log that nobody writes any more."""

    def __init__(self, path: str, line: int, why: str) -> None:
        super().__init__(f"{path}: line {line}: {why}")
        self.path, self.line, self.why = path, line, why

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return type(self), (self.path, self.line, self.why)


class EventGap(LogError):
    """An emitter's event arrived before an earlier one of the same life: send again from ``expected``."""

    def __init__(self, emitted: Emitted, expected: int) -> None:
        life = f"{emitted.source} incarnation {emitted.incarnation}"
        super().__init__(f"{life}: event {emitted.n} came, {expected} is next; send again from {expected}")
        self.emitted, self.expected = emitted, expected

    def __reduce__(self) -> tuple[type, tuple[Emitted, int]]:
        return type(self), (self.emitted, self.expected)


class EventLog:
    """Opens ``path`` for appending, creating it where it is missing. ``clock`` gives the host's monotonic seconds; where they lie before
    the log's, as after a reboot, they are counted on from there. ``resume``: the run may have ended; then a RunResumed has to follow.

    Raises LogError if another process writes the file, if a complete line is unreadable, out of sequence or breaks the chain, or if the run
    has ended. ``found`` holds the entries that were there, a LogRepaired of this opening included.
    """

    def __init__(self, path: Path | str, clock: Callable[[], float], *, resume: bool = False) -> None:
        self.path = Path(path)
        self._resume = resume
        self._clock = clock
        self._seq, self._chain, self._ended = 0, GENESIS, False
        self.removed = False
        """Somebody deleted the file: it lives on as long as this process does, and no longer."""
        self._last: dict[tuple[str, int], int] = {}
        self._synced = clock()
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LogError(f"{self.path}: another process writes this log; a log has one writer") from None
            self.found = self._recover()
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, emitted: Emitted) -> Entry | None:
        """The entry, written; None if this event is in the log already. Raises EventGap, and LogError after the closing record.

        An event that JSON cannot hold (a NaN, say) is replaced by a WarningRaised under its number, so that the emitter's numbers go on.
        """
        last = self._last.get((emitted.source, emitted.incarnation), 0)
        if emitted.n <= last:
            return None
        if self._ended:
            what = f"{type(emitted.event).__name__} of {emitted.source}"
            raise LogError(f"{self.path}: the run has ended, nothing follows its closing record ({what} came)")
        if emitted.n != last + 1:
            raise EventGap(emitted, last + 1)
        entry = Entry(self._seq + 1, self._clock(), emitted.source, emitted.incarnation, emitted.n, emitted.at, emitted.event)
        entry, line = seal(entry, self._chain)
        try:
            entry_decoder.decode(line)
        except msgspec.ValidationError as error:
            text = f"{type(emitted.event).__name__} of {emitted.source} was not logged, it cannot be read back: {error}"
            entry, line = seal(msgspec.structs.replace(entry, event=WarningRaised(text=text)), self._chain)
        self._write(line + b"\n")
        self._note(entry)
        if self._ended or entry.t - self._synced >= SYNC_SECONDS:
            self.sync()
            self._synced = entry.t
        return entry

    def record(self, event: Event) -> Entry:
        """An event of the host itself: numbered here, written like any other."""
        now = self._clock()
        entry = self.append(Emitted(HOST, 1, self.acknowledged(HOST, 1) + 1, now, event))
        assert entry is not None
        return entry

    def acknowledged(self, source: str, incarnation: int) -> int:
        """The highest event number of this life that is in the log; the emitter may forget up to it."""
        return self._last.get((source, incarnation), 0)

    @property
    def seq(self) -> int:
        """Number of the last entry, 0 for none."""
        return self._seq

    @property
    def ended(self) -> bool:
        """The closing record is written."""
        return self._ended

    def lines(self, after: int) -> list[bytes]:
        """The log's lines but the first ``after``, without newline; also of a file that was removed."""
        with open(self._fd if self._fd >= 0 else self.path, "rb", closefd=self._fd < 0) as file:
            file.seek(0)
            return file.read().splitlines()[after:]

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Syncs and gives the lock up; a second call does nothing."""
        if self._fd >= 0:
            self.sync()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        state = os.fstat(self._fd)
        start, self.removed = state.st_size, state.st_nlink == 0
        try:
            while data:
                data = data[os.write(self._fd, data):]
        except OSError as error:  # a full disk: leave no half line for the next append to glue itself to
            os.ftruncate(self._fd, start)
            raise LogError(f"{self.path}: entry {self._seq + 1} could not be written: {error}") from error

    def _note(self, entry: Entry) -> None:
        self._seq, self._chain = entry.seq, entry.chain
        self._last[entry.source, entry.incarnation] = entry.n
        self._ended = isinstance(entry.event, RunEnded)

    def _recover(self) -> list[Entry]:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        found: list[Entry] = []
        for entry in _decode(self.path, data[:whole]):
            if entry.seq != self._seq + 1:
                raise LogError(f"{self.path}: line {self._seq + 1} has number {entry.seq}; this log was altered and is not continued")
            if seal(entry, self._chain)[0].chain != entry.chain:
                raise LogError(f"{self.path}: line {entry.seq} breaks the chain; this log was altered and is not continued")
            self._note(entry)
            found.append(entry)
        if found and (ahead := found[-1].t - self._clock()) > 0:
            clock = self._clock
            self._clock = lambda: clock() + ahead
        if self._ended and self._resume:
            self._ended = False
        if self._ended:
            raise LogError(f"{self.path}: the run has ended (line {self._seq} is its closing record); a new run needs a new directory")
        if torn := len(data) - whole:
            os.ftruncate(self._fd, whole)
            found.append(self.record(LogRepaired(dropped_bytes=torn)))
        return found


def read_log(path: Path | str, *, live: bool = False) -> list[Entry]:
    """The entries of a log, in order, decoded but not audited. Raises LogError that names the line that cannot be read.

    ``live``: somebody still writes the file; a last line without its newline is then left out instead of being an error.
    """
    return _read(Path(path), live)[0]


def _read(path: Path, live: bool) -> tuple[list[Entry], bytes]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from error
    whole = data.rfind(b"\n") + 1
    entries = list(_decode(path, data[:whole]))
    if whole != len(data) and not live:
        raise UnreadableLine(str(path), len(entries) + 1, f"is torn: {len(data) - whole} bytes without an end")
    return entries, data[:whole]


def read_and_audit(path: Path | str) -> tuple[list[Entry], list[Finding]]:
    """The entries of a log and the findings of core/audit.py, on its lines as they stand too. Raises LogError like ``read_log``."""
    entries, data = _read(Path(path), live=False)
    return entries, audit(entries, data.split(b"\n")[:-1])


def audit_run(path: Path | str) -> list[Finding]:
    """The findings of core/audit.py for a run directory or a log; an unreadable line is one of the rule ``schema``.

    Raises LogError where there is no log.
    """
    path = Path(path)
    try:
        return read_and_audit(path / "events.jsonl" if path.is_dir() else path)[1]
    except UnreadableLine as error:
        return [Finding("schema", error.line, error.why)]


def _decode(path: Path, data: bytes) -> Iterator[Entry]:
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            yield entry_decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnreadableLine(str(path), number, f"cannot be read: {error}") from error
