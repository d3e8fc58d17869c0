"""The reaper: a small process that outlives the host of a job only to clean up after it.

It waits until the host ends, however it ends, then kills every process with the run's mark, removes the run's folders and takes the run
off the list of jobs. A host that has cleaned up itself dismisses it before. It runs in a session of its own, ignores the signals of a
terminal, and is as mortal as anyone by SIGKILL: who kills host and reaper at once leaves the cleaning to ``robustrl stop``.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from ..errors import WaitTimeout
from . import registry
from .processes import MARK, ProcessId, kill_marked, open_pidfd, read_start_ticks

_DISMISSED = b"d"
_KILL_TIMEOUT = 60.0
log = logging.getLogger("reaper")


class Reaper:
    """The host's hold on its reaper. The pipe's end is closed on exec, so no other child of the host keeps it open."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: int) -> None:
        self._process, self._pipe = process, pipe
        self.pid = process.pid

    def dismiss(self, timeout: float = 5.0) -> None:
        """Ends the reaper; nothing is left for it to do. Safe to call twice. Kills it if it has not ended after ``timeout`` seconds."""
        if self._pipe < 0:
            return
        try:
            os.write(self._pipe, _DISMISSED)
        except BrokenPipeError:
            log.warning("the reaper (pid %d) had ended before it was dismissed", self.pid)
        os.close(self._pipe)
        self._pipe = -1
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout)


def start_reaper(run: str, dirs: list[Path]) -> Reaper:
    """Starts the reaper of this process. ``dirs``: what it removes with all that is in them."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", __name__, run, "--fd", str(reading), *_host(), "--dirs", *map(str, dirs)]
    process = subprocess.Popen(command, pass_fds=[reading], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
                               env=os.environ | {MARK: run})
    os.close(reading)
    return Reaper(process, writing)


def _host() -> list[str]:
    return ["--host", str(os.getpid()), "--ticks", str(read_start_ticks(os.getpid()))]


def _wait(fd: int, host: ProcessId) -> bool:
    """Blocks until the host has gone (True) or has dismissed us (False).

    The pipe alone would do, were it not for a child forked without exec, which would hold it open; hence the pidfd as well.
    """
    try:
        pidfd = open_pidfd(host)
    except ProcessLookupError:
        pass  # gone while this process was starting
    else:
        select.select([fd, pidfd], [], [])
    readable, _, _ = select.select([fd], [], [], 0)
    return not (readable and os.read(fd, 1) == _DISMISSED)


def clean_up(run: str, dirs: list[Path]) -> None:
    """Kills, removes, unregisters; whatever fails is logged and the rest is done."""
    try:
        log.warning("the host of %s is gone: killed %d processes", run, kill_marked(run, _KILL_TIMEOUT))
    except WaitTimeout as error:
        log.error("%s", error)
    for path in dirs:
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            log.error("%s could not be removed", path)
    registry.release(run)


def main(argv: list[str] | None = None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m robustrl.runtime.reaper", description="Cleans up after a job's host.")
    parser.add_argument("run")
    parser.add_argument("--fd", type=int, required=True, help="reading end of the host's pipe")
    parser.add_argument("--host", type=int, required=True, help="pid of the host")
    parser.add_argument("--ticks", type=int, required=True, help="start time of the host")
    parser.add_argument("--dirs", nargs="*", type=Path, default=[], help="folders to remove")
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if _wait(given.fd, ProcessId(given.host, given.ticks)):
        clean_up(given.run, given.dirs)


if __name__ == "__main__":
    main()
