"""The node agent: watches the role processes of its node from outside, by pidfd, /proc and status page. No UCX, no policy.

It is also the job's hand on a machine that is not the host's: it makes the run's private folders there and removes them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from ..core.roles import Phase
from ..errors import RobustRLError, WaitTimeout
from ..faults.hand import Hand
from ..faults.orders import Order
from . import registry
from .processes import ProcessId, is_alive, is_dying, kill, kill_marked, process_state, read_start_ticks, send_signal, wait_exit
from .role import Role, RoleSpec
from .sensors import Sensors

_LAST_KILL = 5.0
"""Seconds that the processes of this node have to go when the host is gone."""
_ANSWERED = 0.2
"""Seconds for the answer to leave before this process signals itself."""
_LAST_LOOK = 3.0
"""Seconds for the stack of a process before it is killed."""


class NodeAgent(Role):
    def __init__(self, spec: RoleSpec) -> None:
        for path in (Path(spec.temp_dir).parent, Path(spec.temp_dir), Path(spec.shm_dir)):
            registry.private_folder(path)
        super().__init__(spec)
        # not in on_open: whoever starts beside a later life of the agent calls it as soon as its process is there
        self._processes: dict[tuple[str, int], ProcessId] = {}
        self._sensors = Sensors(on_exit=self.emit, on_samples=self.emit)
        self._hand = Hand(self.emit)

    async def on_open(self) -> None:
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

    async def unwatch(self, role: str, incarnation: int) -> None:
        """This life has left its process, which goes on as another role."""
        self._processes.pop((role, incarnation), None)
        self._sensors.unwatch(role, incarnation)

    async def configure(self, floor: float, marks: dict[str, tuple[float, ...]]) -> None:
        """The detector's limits, so that a sample is logged as soon as one is passed."""
        self._sensors.configure(floor, marks)

    async def signal(self, role: str, incarnation: int, name: str, seconds: float) -> int:
        """``kill`` or ``hang`` (SIGSTOP; with ``seconds`` above 0 it goes on after them) this very process. Returns its pid."""
        number = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "resume": signal.SIGCONT}[name]
        if role == self.spec.role:
            if name == "hang" and seconds > 0:
                raise RobustRLError(f"{role} cannot wake itself up: hang it for good, with seconds=0")
            asyncio.get_running_loop().call_later(_ANSWERED, os.kill, os.getpid(), number)
            return os.getpid()
        process = self._processes.get((role, incarnation))
        if process is None:
            raise RobustRLError(f"{role} incarnation {incarnation} is not watched by {self.spec.role} yet: ask again")
        if not (self._hand.hang(process, seconds) if name == "hang" else send_signal(process, number)):
            raise RobustRLError(f"{role} incarnation {incarnation} (pid {process.pid}) has ended already: nothing was hit")
        return process.pid

    async def strike(self, order: Order) -> None:
        """A fault from outside; what becomes of it is in the log."""
        process = self._processes.get((order.role, order.incarnation))
        if process is None or not is_alive(process):
            raise RobustRLError(f"{order.role} incarnation {order.incarnation} is not there: nothing was hit")
        self._hand.strike(order, process)

    async def call_off(self, fault: int, folder: str, pid: int, start_ticks: int) -> bool:
        """The fault and all that lasts of it; False: too late. The process is named, for a later life of this agent may be asked before it
        watches it.
        """
        return self._hand.call_off(fault, folder, ProcessId(pid, start_ticks))

    async def kill(self, role: str, incarnation: int, pid: int, start_ticks: int) -> None:
        """SIGKILL, and return when the process is dead; one that is dead already is left in peace. Raises WaitTimeout.

        The process is named, for a later life of this agent may be asked before it watches whom the one before did.
        """
        process = ProcessId(pid, start_ticks)
        try:
            await asyncio.to_thread(self._keep_evidence, role, incarnation, process)
        except OSError as error:  # a full disk, say: no reason not to go on
            self.log.warning("no evidence of %s incarnation %d: %s", role, incarnation, error)
        kill(process)
        limit = self.deadlines.call / 2
        if not await asyncio.to_thread(wait_exit, process, limit):
            raise WaitTimeout(f"{role} (pid {process.pid}): not dead {limit:g} s after SIGKILL; no next life is started beside it")

    def _keep_evidence(self, role: str, incarnation: int, process: ProcessId) -> None:
        """State and Python stack of a process that is about to be killed, in the run directory; of a dead or dying one there is none."""
        if not is_alive(process) or is_dying(process.pid):
            return
        folder = Path(self.spec.run_dir, "evidence")
        folder.mkdir(exist_ok=True)
        text = f"process {process.pid}, state {process_state(process.pid)}\n"
        if spy := shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"):
            try:
                # a stopped process cannot be paused again, nor need it be
                done = subprocess.run(
                    [spy, "dump", "--nonblocking", "--pid", str(process.pid)], capture_output=True, text=True, timeout=_LAST_LOOK
                )
                text += done.stdout or done.stderr
            except subprocess.TimeoutExpired:
                text += f"py-spy gave no stack within {_LAST_LOOK} s\n"
        else:
            text += "py-spy is not installed: no stack\n"
        (folder / f"{role}.{incarnation}.txt").write_text(text)

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
