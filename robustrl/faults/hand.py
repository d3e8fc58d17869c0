"""What a node agent does to a process of its node, from outside: signals, at the very phase that was asked for. No Ray, no policy.

A fault that is aimed at a phase finds its target there for certain: the process is stopped, its status page is read while it cannot change,
and only if that shows the phase is the fault done; else the process goes on at once and is looked at again. What was done is reported with
its proof. Each fault waits in a thread of its own, and ends with its target.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core import events as ev
from ..core.roles import RoleId, RoleKind
from ..runtime.processes import ProcessId, is_alive, process_state, send_signal, wait_exit
from ..runtime.status_page import Status, StatusReader
from .orders import Order, off_file

_LOOK = 0.002
"""Seconds between two looks at a status page."""
_TAKES_EFFECT = 1.0
"""Seconds in which a signal must show in the process's state."""
log = logging.getLogger("faults")


class Hand:
    """``emit`` gets FaultInjected and FaultEnded, from any thread."""

    def __init__(self, emit: Callable[[ev.Event], None]) -> None:
        self._emit = emit
        self._called_off: dict[int, threading.Event] = {}
        self._lock = threading.Lock()

    def strike(self, order: Order, process: ProcessId) -> None:
        """Begin; returns at once."""
        with self._lock:
            called_off = self._called_off.setdefault(order.fault, threading.Event())
        threading.Thread(target=self._run, args=(order, process, called_off), name=f"fault-{order.fault}", daemon=True).start()

    def call_off(self, fault: int, folder: str, process: ProcessId | None) -> None:
        """The fault is done no more, and nothing of it lasts: a waiting one does not strike, a stopped process goes on, a role that is
        busy with it finds a file.
        """
        with self._lock:
            self._called_off.setdefault(fault, threading.Event()).set()
        off = off_file(folder, fault)
        off.parent.mkdir(parents=True, exist_ok=True)
        off.touch()
        if process is not None:
            send_signal(process, signal.SIGCONT)

    def _run(self, order: Order, process: ProcessId, called_off: threading.Event) -> None:
        status = self._aim(order, process, called_off)
        if status is None:
            return  # called off, or its target is gone: the host knows of either
        match order.kind:
            case "kill":
                self._kill(order, process, status)
            case "hang" | "freeze":
                self._hang(order, process, status, called_off)
            case "slow":
                self._slow(order, process, status, called_off)

    def _aim(self, order: Order, process: ProcessId, called_off: threading.Event) -> Status | None:
        """The record of the status page with which the fault strikes; aimed at a phase, the process is then stopped."""
        on_step = RoleId.parse(order.role).kind is RoleKind.TRAINER
        reader: StatusReader | None = None
        try:
            while is_alive(process) and not called_off.is_set():
                if reader is None and Path(order.page).exists():
                    reader = StatusReader(order.page)
                status = reader.read() if reader else None
                if status is not None and _fits(order, status, on_step):
                    if not order.phase:
                        return status
                    _stop(process)
                    status = reader.read() if reader else status
                    if _fits(order, status, on_step):
                        return status
                    send_signal(process, signal.SIGCONT)
                called_off.wait(_LOOK)
            return None
        finally:
            if reader is not None:
                reader.close()

    def _kill(self, order: Order, process: ProcessId, status: Status) -> None:
        began = time.monotonic()
        sent = send_signal(process, signal.SIGKILL)
        gone = sent and wait_exit(process, _TAKES_EFFECT)
        self._report(order, status, began, {"signal": "SIGKILL", "process": "gone" if gone else process_state(process.pid)})

    def _hang(self, order: Order, process: ProcessId, status: Status, called_off: threading.Event) -> None:
        seconds = float(order.options.get("seconds", 0.0))
        began = time.monotonic()
        state = _stop(process)
        self._report(order, status, began, {"signal": "SIGSTOP", "process": state})
        if seconds and not called_off.wait(seconds) and send_signal(process, signal.SIGCONT):
            self._emit(order.over(f"it goes on after {seconds:g} s"))

    def _slow(self, order: Order, process: ProcessId, status: Status, called_off: threading.Event) -> None:
        seconds, share, period = (float(order.options[name]) for name in ("seconds", "share", "period"))
        began = time.monotonic()
        state = _stop(process)
        self._report(order, status, began, {"signal": "SIGSTOP", "process": state, "share": share, "period": period})
        while time.monotonic() < began + seconds and is_alive(process):
            if called_off.wait((1 - share) * period):
                return
            send_signal(process, signal.SIGCONT)
            if called_off.wait(share * period):
                return
            send_signal(process, signal.SIGSTOP)
        if send_signal(process, signal.SIGCONT):
            self._emit(order.over(f"it runs at full speed again after {seconds:g} s"))

    def _report(self, order: Order, status: Status, began: float, proof: dict[str, Any]) -> None:
        proof["ago"] = round(time.monotonic() - began, 6)
        self._emit(order.injected(status, proof))


def _fits(order: Order, status: Status, on_step: bool) -> bool:
    return order.phase in ("", status.phase) and (not on_step or status.step >= order.step)


def _stop(process: ProcessId) -> str:
    """SIGSTOP; the state of the process once that has taken effect: T, or what it is after a second."""
    send_signal(process, signal.SIGSTOP)
    deadline = time.monotonic() + _TAKES_EFFECT
    while (state := process_state(process.pid)) not in "TZX" and time.monotonic() < deadline:
        time.sleep(0.0005)
    return state
