"""The node agent: watches the role processes of its node from outside, by pidfd, /proc and status page. No UCX, no policy."""

from __future__ import annotations

from ..core.roles import Phase
from .role import Role
from .sensors import Sensors


class NodeAgent(Role):
    async def on_open(self) -> None:
        self._watched = 0
        self._sensors = Sensors(on_exit=self.emit, on_sample=self.emit)
        self.page.phase = Phase.RUNNING

    async def watch(self, role: str, incarnation: int, pid: int, page_path: str, log_path: str) -> None:
        self._sensors.watch(role, incarnation, pid, page_path, log_path)
        self._watched += 1
        self.page.update(progress=self._watched)
