"""Processes of a run, as the kernel sees them: who they are, what they used, and how they are ended. Linux only, no Ray.

A run's processes are found by ``ROBUSTRL_RUN=<run>`` in their environment block. That block is fixed at exec, so a process that was forked
and not yet executed carries its parent's mark. Processes of other users cannot be read and are not ours.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ..errors import WaitTimeout

log = logging.getLogger(__name__)
MARK = "ROBUSTRL_RUN"
NICE = 5
"""Of a job's processes, as in setpriority(2): a quarter of a core where something else wants all of it."""
_PROCESS_CLOCK = 2
"""Kind of clock in a Linux clock id made from a pid: run time of the whole process."""


class ProcessId(NamedTuple):
    """Names a process for good: a pid is used again, a pid with its start time is not."""

    pid: int
    start_ticks: int


def _stat(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat") as file:
        text = file.read()
    return text[text.rindex(")") + 2:].split()


def read_start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat: clock ticks from boot to the start of the process. Raises ProcessLookupError if there is none."""
    try:
        return int(_stat(pid)[19])
    except FileNotFoundError as error:
        raise ProcessLookupError(f"pid {pid}: no such process") from error


def process_state(pid: int) -> str:
    """R running, S sleeping, D waiting for the disk, T stopped, t traced, Z dead and not collected, X none (gone)."""
    try:
        return _stat(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def yield_to_others() -> None:
    """This process and what it starts come after others on a busy core. Once more changes nothing.

    Nice values alone count within a session only where the kernel groups by sessions (sched(7), "The autogroup feature"): there the
    session's own is set as well.
    """
    nice = max(NICE, os.getpriority(os.PRIO_PROCESS, 0))
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    try:
        Path("/proc/self/autogroup").write_text(str(nice))
    except FileNotFoundError:  # a kernel that does not group
        pass
    except BlockingIOError:
        log.warning("another session was set in the same tenth of a second: this one does not yield to programs outside it")


def is_alive(process: ProcessId) -> bool:
    """Whether this very process still exists and is not a zombie."""
    try:
        fields = _stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(fields[19]) == process.start_ticks and fields[0] not in "ZX"


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise
        raise ProcessLookupError(f"pid {pid}: is now a thread's number") from error


def open_pidfd(process: ProcessId) -> int:
    """A descriptor that becomes readable when the process ends. Raises ProcessLookupError if it has ended (or the pid is another's)."""
    fd = _pidfd(process.pid)
    if not is_alive(process):
        os.close(fd)
        raise ProcessLookupError(f"pid {process.pid} started at tick {process.start_ticks}: has ended")
    return fd


def wait_exit(process: ProcessId, timeout: float) -> bool:
    """True as soon as the process has ended with all its threads and given its memory back, False after ``timeout`` seconds."""
    try:
        fd = _pidfd(process.pid)
    except ProcessLookupError:
        return True
    try:
        if read_start_ticks(process.pid) != process.start_ticks:
            return True
        return bool(select.select([fd], [], [], timeout)[0])
    except ProcessLookupError:
        return True
    finally:
        os.close(fd)


def open_memory(pid: int) -> int:
    """A descriptor for `has_let_go`. Raises ProcessLookupError if there is no such process."""
    try:
        return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ProcessLookupError(f"pid {pid}: no such process") from error


def has_let_go(memory: int) -> bool:
    """Whether the main thread of the process behind this descriptor of `open_memory` has left its address space: it is past its last
    instruction and on its way out, and nothing can call it back.

    That is seen 0.2-4 ms after a SIGKILL, while the pidfd waits until all memory is freed: 18 ms at 230 MB, 31 ms at 430 MB and 110 ms at
    1.7 GB (measured, idle machine). One system call, 1.2 us.
    """
    try:
        return os.pread(memory, 2, 0) == b"0 "
    except ProcessLookupError:
        return True


def is_dying(pid: int) -> bool:
    """`has_let_go` of a process that nobody watches; True if there is none."""
    try:
        memory = open_memory(pid)
    except ProcessLookupError:
        return True
    try:
        return has_let_go(memory)
    finally:
        os.close(memory)


def send_signal(process: ProcessId, number: int) -> bool:
    """The signal to this very process, never to another that got its pid; False if it has ended already."""
    try:
        fd = open_pidfd(process)
    except ProcessLookupError:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def kill(process: ProcessId) -> bool:
    """SIGKILL; see `send_signal`."""
    return send_signal(process, signal.SIGKILL)


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of the process so far, ended ones included, in seconds, exact to the nanosecond.

    Read from the process's CPU clock in one system call (0.5 us). /proc/PID/schedstat has the main thread only, the sum over the threads of
    a role costs 60 reads and falls when one ends, and /proc/PID/stat counts in ticks of 10 ms. Raises ProcessLookupError if there is none.
    """
    try:
        return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)
    except OSError as error:
        raise ProcessLookupError(f"pid {pid}: no such process") from error


def children_of(pid: int) -> list[ProcessId]:
    """The living processes whose parent this is."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = _stat(int(name))
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.append(ProcessId(int(name), int(fields[19])))
    return found


def find_marked(run: str) -> list[ProcessId]:
    """The living processes of a run, without the calling one."""
    mark = f"{MARK}={run}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark not in file.read().split(b"\0"):
                    continue
            process = ProcessId(int(name), read_start_ticks(int(name)))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if is_alive(process):
            found.append(process)
    return found


def kill_marked(run: str, timeout: float, spare: Collection[int] = ()) -> int:
    """SIGKILLs the processes of a run, except the calling one and pids in ``spare``, until two scans in a row find none.

    Two, because a process may fork while it is being killed. Returns how many were killed; raises WaitTimeout naming the survivors.
    """
    deadline = time.monotonic() + timeout
    killed: set[ProcessId] = set()
    empty = 0
    while empty < 2:
        left = [process for process in find_marked(run) if process.pid not in spare]
        if left and time.monotonic() > deadline:
            names = ", ".join(f"{process.pid} ({process_state(process.pid)})" for process in left)
            raise WaitTimeout(f"processes of run {run} survived SIGKILL for {timeout} s: {names}")
        killed.update(process for process in left if kill(process))
        empty = 0 if left else empty + 1
        time.sleep(0.02)
    return len(killed)


def pss_bytes(run: str) -> int:
    """Proportional memory of all processes of a run but the calling one, in bytes: shared pages are counted once."""
    total = 0
    for process in find_marked(run):
        try:
            with open(f"/proc/{process.pid}/smaps_rollup") as file:
                total += next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total
