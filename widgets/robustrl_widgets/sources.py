"""Where entries come from: a live job, or a recorded run that is played back. Both say what time it is in the run."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from robustrl.core import events as ev

from .ghost_files import run_dir_of

if TYPE_CHECKING:
    from robustrl.job import Job

FASTEST = 100
"""Seconds of a recording per second, at most."""


class Source(Protocol):
    """What a `Feed` follows."""

    job: Job | None
    """For commands; None: there is nobody to give one to."""
    generation: int
    """Rises when it starts again from the beginning."""

    @property
    def speed(self) -> float: ...  # seconds of the run per second; 0: it stands still
    @property
    def length(self) -> float: ...  # seconds of the whole run; 0: not known yet
    @property
    def lost(self) -> str: ...  # why nothing more comes although the log has no end; empty else

    def take(self) -> Sequence[ev.Entry]: ...  # those that came since the last call
    def now(self) -> float: ...  # seconds since the first entry
    def entries(self) -> Sequence[ev.Entry]: ...  # all that were taken
    def all(self) -> Sequence[ev.Entry]: ...  # and those of a recording that are not played yet


class LiveRun:
    """A job that runs, or has ended meanwhile."""

    def __init__(self, job: Job, clock: Callable[[], float] = time.monotonic) -> None:
        self.job: Job | None = job
        self.generation, self.length = 0, 0.0
        self._job, self._clock, self._count = job, clock, 0
        self._first = self._last = self._heard = 0.0

    @property
    def speed(self) -> float:
        return 0.0 if self._job.over else 1.0

    @property
    def lost(self) -> str:
        return self._job.reason if self._job._lost is not None else ""

    def take(self) -> Sequence[ev.Entry]:
        entries = self._job.entries_after(self._count)
        if entries:
            self._first = self._first if self._count else entries[0].t
            self._count += len(entries)
            self._last, self._heard = entries[-1].t, self._clock()
        return entries

    def entries(self) -> Sequence[ev.Entry]:
        return self._job.events[: self._count]

    def all(self) -> Sequence[ev.Entry]:
        return self.entries()

    def now(self) -> float:
        if not self._count:
            return 0.0
        return self._last - self._first + (self._clock() - self._heard if self.speed else 0.0)


class RecordedRun:
    """A finished run, played back: at any speed, from any moment, again and again."""

    def __init__(self, entries: Sequence[ev.Entry], speed: float = 1.0, clock: Callable[[], float] = time.monotonic,
                 at: float = 0.0, run_dir: Path | None = None) -> None:
        """Plays from ``at`` seconds on; what came before is there from the first moment. ``run_dir``: where it lies, if anybody knows."""
        if not entries:
            raise ValueError("a recording without entries cannot be played")
        _check(speed)
        self.job: Job | None = None
        self.generation, self.lost, self.run_dir = 0, "", run_dir
        self._entries, self._clock = entries, clock
        self._times = [entry.t - entries[0].t for entry in entries]
        self._taken, self._speed = 0, speed
        self.pace = speed or 1.0
        """How fast it plays when it plays: it is known while it stands still, too."""
        self._at, self._since = min(max(0.0, at), self._times[-1]), clock()

    @classmethod
    def load(cls, path: str | Path, speed: float = 1.0) -> RecordedRun:
        """See `load_entries`."""
        return cls(load_entries(path), speed, run_dir=run_dir_of(path))

    @property
    def length(self) -> float:
        """Seconds from the first entry to the last."""
        return self._times[-1]

    @property
    def speed(self) -> float:
        return self._speed if self.now() < self.length else 0.0

    def now(self) -> float:
        return min(self.length, self._at + (self._clock() - self._since) * self._speed)

    def take(self) -> Sequence[ev.Entry]:
        before, self._taken = self._taken, bisect.bisect_right(self._times, self.now())
        return self._entries[before : self._taken]

    def entries(self) -> Sequence[ev.Entry]:
        return self._entries[: self._taken]

    def all(self) -> Sequence[ev.Entry]:
        return self._entries

    def play(self, speed: float | None = None, at: float | None = None) -> None:
        """From now on at this speed (0 to `FASTEST`), from ``at`` seconds on. Raises ValueError."""
        if speed is not None:
            _check(speed)
        if at is not None and not at >= 0:
            raise ValueError(f"at = {at!r}: must be seconds, 0 or more")
        here = self.now()
        self._at, self._since = min(self.length, here if at is None else at), self._clock()
        self._speed = self._speed if speed is None else speed
        self.pace = speed or self.pace
        if self._at < here and at is not None:
            self._taken = 0
            self.generation += 1


def _check(speed: float) -> None:
    if not 0 <= speed <= FASTEST:
        raise ValueError(f"speed = {speed!r}: must be from 0 to {FASTEST}")


def load_entries(path: str | Path) -> Sequence[ev.Entry]:
    """Of whatever `robustrl.Run.load` reads, with its checks; the log may still be written. Raises LogError, BadRun, MissingExtra."""
    from robustrl.replay.run import Run

    return Run.load(Path(path).expanduser(), live=True).entries
