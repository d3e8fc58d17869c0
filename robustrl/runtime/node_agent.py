"""The node agent: watches the role processes of its node from outside, by pidfd, /proc and status page. No UCX, no policy.

It is also the job's hand on a machine that is not the host's: it makes the run's private folders there and removes them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from ..core.roles import Phase
from ..errors import WaitTimeout
from . import registry
from .processes import ProcessId, kill, kill_marked, read_start_ticks, wait_exit
from .role import Role, RoleSpec
from .sensors import Sensors

_LAST_KILL = 5.0
"""Seconds that the processes of this node have to go when the host is gone."""


class NodeAgent(Role):
    def __init__(self, spec: RoleSpec) -> None:
        for path in (Path(spec.temp_dir).parent, Path(spec.temp_dir), Path(spec.shm_dir)):
            registry.private_folder(path)
        super().__init__(spec)

    async def on_open(self) -> None:
        self._processes: dict[tuple[str, int], ProcessId] = {}
        self._sensors = Sensors(on_exit=self.emit, on_sample=self.emit)
        self.page.phase = Phase.RUNNING

    async def keep_secret(self, secret: bytes) -> None:
        """Put the job's secret where the roles of this node read it; a file of mode 0600."""
        path = Path(self.spec.temp_dir, "secret")
        if not path.exists():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secret)

    async def watch(self, role: str, incarnation: int, pid: int, page_path: str, log_path: str) -> None:
        try:
            self._processes[role, incarnation] = ProcessId(pid, read_start_ticks(pid))
        except ProcessLookupError:
            pass  # dead already; the sensors report it
        self._sensors.watch(role, incarnation, pid, page_path, log_path)
        self.page.update(progress=len(self._processes))

    async def kill(self, role: str, incarnation: int) -> None:
        """SIGKILL, and return when the process is dead; one that is dead already is left in peace."""
        if process := self._processes.get((role, incarnation)):
            kill(process)
            await asyncio.to_thread(wait_exit, process, _LAST_KILL)

    async def clean(self, spare: list[int], deadline: float) -> None:
        """Kill every process of the run on this machine but this one and ``spare``, and remove the run's folders."""
        self._sensors.close()
        await asyncio.to_thread(self._clean, {os.getpid(), *spare}, deadline)

    def _clean(self, spare: set[int], deadline: float) -> None:
        kill_marked(self.spec.run, deadline, spare=spare)
        for path in (self.spec.temp_dir, self.spec.shm_dir):
            shutil.rmtree(path, ignore_errors=True)

    def _host_gone(self) -> None:
        """On the host's own machine its reaper does the same."""
        try:
            self._clean({os.getpid()}, _LAST_KILL)
        except WaitTimeout as error:
            self.log.error("%s", error)
        super()._host_gone()
