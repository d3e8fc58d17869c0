"""What a node agent does: it watches role processes of its node from outside, by pidfd, /proc and status page. No Ray, no calls to a role.

Promises: the end of a process is reported within some 50 ms, once, with the last lines of its log, and while the kernel is still freeing
its memory: whoever must know that nothing of it is left waits for that himself (processes.wait_exit). Phase, step and version are sampled
every ``period`` seconds; what of that is reported is core/sampling.py's to say: changes, limits passed, and a sign of life once a second.
A process that is stopped (SIGSTOP) is no end; its samples show it, as progress, CPU time and stamp stand still.

One thread. Callbacks run in it and must be short.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ..core.events import ProcessExited, RoleSample
from ..core.sampling import Sampler
from ..errors import plain
from .processes import ProcessId, cpu_seconds, has_let_go, open_memory, open_pidfd, process_state, read_start_ticks
from .status_page import Status, StatusReader

_FLOOR = 0.05
"""Of a core: what counts as activity until the supervisor says otherwise."""
_END_LOOK = 0.05
"""Seconds between two looks for ends that their pidfd does not show yet: each second one is that for the samples."""
_LAST_LINES = 20
_LAST_BYTES = 16384
log = logging.getLogger("sensors")


class Sensors:
    """``on_exit`` gets a ProcessExited, ``on_samples`` the RoleSamples of one look, both in the thread of the sensors, which ends with
    ``close``.
    """

    def __init__(self, on_exit: Callable[[ProcessExited], None], on_samples: Callable[..., None], period: float = 0.1) -> None:
        self._on_exit, self._on_samples, self.period = on_exit, on_samples, period
        self._watched: dict[int, _Watched] = {}
        """By pidfd."""
        self._floor, self._marks = _FLOOR, dict[str, tuple[float, ...]]()
        self._lock = threading.RLock()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)
        self._thread.start()

    def watch(self, role: str, incarnation: int, pid: int, page_path: str, log_path: str = "") -> None:
        """From now on. A process that has ended by now is reported like any other; a second watch of the same incarnation does nothing."""
        with self._lock:
            if any((w.role, w.incarnation) == (role, incarnation) for w in self._watched.values()):
                return
            try:
                memory = open_memory(pid)
                try:
                    fd = open_pidfd(ProcessId(pid, read_start_ticks(pid)))
                except ProcessLookupError:
                    os.close(memory)
                    raise
            except ProcessLookupError:
                self._on_exit(ProcessExited(role=role, incarnation=incarnation, pid=pid, cause="had ended before it was watched",
                                            last_lines=_last_lines(log_path)))
                return
            sampler = Sampler(role, incarnation, self._floor, self._marks.get(role, ()))
            self._watched[fd] = _Watched(role, incarnation, pid, memory, page_path, log_path, sampler)
            self._epoll.register(fd, select.EPOLLIN)

    def configure(self, floor: float, marks: Mapping[str, Iterable[float]]) -> None:
        """Role -> the limits of its ages: from the next look on, the first one past a limit is reported."""
        with self._lock:
            self._floor, self._marks = floor, {role: tuple(ages) for role, ages in marks.items()}
            for watched in self._watched.values():
                watched.sampler.configure(floor, self._marks.get(watched.role, ()))

    def unwatch(self, role: str, incarnation: int) -> None:
        """Neither samples nor the end of this incarnation are reported any more. Unknown ones are ignored."""
        with self._lock:
            for fd in [fd for fd, w in self._watched.items() if (w.role, w.incarnation) == (role, incarnation)]:
                self._drop(fd)

    def close(self) -> None:
        """Ends the thread; a call from a callback is allowed."""
        self._closed = True
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _drop(self, fd: int) -> None:
        watched = self._watched.pop(fd)
        self._epoll.unregister(fd)
        os.close(fd)
        watched.close()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._closed:
            ended = self._epoll.poll(min(_END_LOOK, max(0.0, due - time.monotonic())))
            with self._lock:
                for fd in [fd for fd, _ in ended if fd in self._watched]:
                    self._report_exit(fd, "pidfd")
                for fd in [fd for fd, watched in self._watched.items() if has_let_go(watched.memory)]:
                    self._report_exit(fd, "its address space is gone")
                now = time.monotonic()
                if now >= due:
                    due = max(due + self.period, now)
                    self._sample_all(now)
        with self._lock:
            for fd in list(self._watched):
                self._drop(fd)
            self._epoll.close()
            os.close(self._wake)

    def _report_exit(self, fd: int, cause: str) -> None:
        """``cause``: what showed it; that its memory is given up comes before its pidfd."""
        watched = self._watched[fd]
        progress = watched.last_progress()
        self._drop(fd)
        self._on_exit(ProcessExited(
            role=watched.role, incarnation=watched.incarnation, pid=watched.pid, cause=cause, last_lines=_last_lines(watched.log_path),
            progress=progress))

    def _sample_all(self, now: float) -> None:
        samples: list[RoleSample] = []
        for watched in self._watched.values():
            try:
                sample = watched.sample(now)
            except ProcessLookupError:
                continue  # its pidfd reports the end
            except (OSError, ValueError) as error:
                if not watched.complained:
                    log.error("%s.%d: its status page cannot be read: %s", watched.role, watched.incarnation, error)
                    watched.complained = True
                continue
            if sample is not None:
                samples.append(sample)
        if samples:
            self._on_samples(*samples)


class _Watched:
    def __init__(self, role: str, incarnation: int, pid: int, memory: int, page_path: str, log_path: str, sampler: Sampler) -> None:
        self.role, self.incarnation, self.pid, self.page_path, self.log_path = role, incarnation, pid, page_path, log_path
        self.memory = memory
        self.sampler = sampler
        self.complained = False
        self._reader: StatusReader | None = None
        self._good: Status | None = None

    def sample(self, now: float) -> RoleSample | None:
        """What is worth a line of the log (core/sampling.py), or None."""
        if self._reader is None:
            self._reader = StatusReader(self.page_path)
        status = self._reader.read()
        if status.torn:  # stopped in the middle of a write, perhaps for good: what it said before still stands
            status = self._good or status
        self._good = status
        return self.sampler.look(
            now, phase=status.phase, progress=status.progress, pending=status.pending, step=status.step, version=status.version,
            loop_age=status.loop_age(), cpu=cpu_seconds(self.pid), process=lambda: process_state(self.pid))

    def last_progress(self) -> int:
        """The page outlives its writer. -1: nobody has read it yet, or the last write was torn."""
        status = self._reader.read() if self._reader is not None else None
        return -1 if status is None or status.torn else status.progress

    def close(self) -> None:
        os.close(self.memory)
        if self._reader is not None:
            self._reader.close()


def _last_lines(path: str) -> list[str]:
    if not path or not Path(path).exists():
        return []
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
        return plain(file.read().decode(errors="replace")).splitlines()[-_LAST_LINES:]
