"""What the one who carries a fault out is told: an order, which names one life of one role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..core import events as ev
from ..runtime.status_page import Status


class Order(msgspec.Struct, frozen=True, kw_only=True):
    fault: int
    kind: str
    role: str
    incarnation: int
    node: str
    pid: int
    page: str
    """Path of its status page."""
    folder: str
    """Where a file named after the fault calls it off; see `off`."""
    phase: str = ""
    """Strike in this phase only."""
    step: int = 0
    """Strike once the status page shows this optimizer step, or a later one. Of trainers only: no other role's page shows it."""
    in_loop: bool = False
    """Strike in the role's event loop, not where its work loop passes by."""
    options: dict[str, Any] = {}
    """The fault's own settings."""

    @property
    def off(self) -> Path:
        return off_file(self.folder, self.fault)

    def injected(self, status: Status, proof: dict[str, Any]) -> ev.FaultInjected:
        """``status``: what the target's page showed at that moment."""
        return ev.FaultInjected(
            fault=self.fault,
            role=self.role,
            incarnation=self.incarnation,
            node=self.node,
            pid=self.pid,
            phase=status.phase,
            step=status.step,
            proof=proof,
        )

    def over(self, reason: str) -> ev.FaultEnded:
        return ev.FaultEnded(fault=self.fault, outcome="over", reason=reason)


def off_file(folder: str, fault: int) -> Path:
    """While this file is there, the fault is called off: for a process that can hear nothing."""
    return Path(folder, f"fault-{fault}.off")


def held_file(folder: str, fault: int) -> Path:
    """While this file is there, the fault keeps the process stopped that the file names."""
    return Path(folder, f"fault-{fault}.held")
