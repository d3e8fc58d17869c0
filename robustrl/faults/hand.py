"""What a node agent does to a process of its node, from outside: signals, at the very phase that was asked for. No Ray, no policy.

A fault that is aimed at a phase finds its target there for certain: the process is stopped, its status page is read while it cannot change,
and only if that shows the phase is the fault done; else the process goes on at once and is looked at again. What was done is reported with
its proof. Each fault waits in a thread of its own, and ends with its target. A process that several stop goes on when the last of them
lets go.
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
from .orders import Order, held_file, off_file

_LOOK = 0.002
"""Seconds between two looks at a status page."""
_TAKES_EFFECT = 1.0
"""Seconds in which a signal must show in the process's state."""
_GONE = 10.0
"""And in which a killed process must be gone: with every core taken, its threads end and its memory is given back late."""
log = logging.getLogger("faults")


class Hand:
    """``emit`` gets FaultInjected and FaultEnded, from any thread."""

    def __init__(self, emit: Callable[[ev.Event], None]) -> None:
        self._emit = emit
        self._called_off: dict[int, threading.Event] = {}
        self._killed: set[int] = set()
        self._holders: dict[ProcessId, set[int]] = {}
        """Process -> the faults that keep it stopped; below 0: an order that was no fault."""
        self._orders = 0
        self._folder = ""
        """Where faults are called off, and noted while they last: for a later life of who has this hand."""
        self._lock = threading.Lock()

    def strike(self, order: Order, process: ProcessId) -> None:
        """Begin; returns at once."""
        with self._lock:
            self._folder = order.folder
            called_off = self._called_off.setdefault(order.fault, threading.Event())
        threading.Thread(target=self._run, args=(order, process, called_off), name=f"fault-{order.fault}", daemon=True).start()

    def call_off(self, fault: int, folder: str, process: ProcessId | None) -> bool:
        """The fault is done no more, and nothing of it lasts: a waiting one does not strike, a stopped process goes on, a role that is
        busy with it finds a file. False: it has killed already, which its proof may be yet to say.
        """
        with self._lock:
            self._folder = folder
            ours = fault in self._called_off
            self._called_off.setdefault(fault, threading.Event()).set()
        off = off_file(folder, fault)
        off.parent.mkdir(parents=True, exist_ok=True)
        off.touch()
        if process is not None and not self._let_go(process, fault) and not ours:
            self._wake(process)  # done by an earlier life of who has this hand
        return fault not in self._killed

    def hang(self, process: ProcessId, seconds: float) -> bool:
        """SIGSTOP by an order that is no fault, for good with ``seconds`` of 0; False: the process has ended."""
        with self._lock:
            self._orders += 1
            holder = -self._orders
        if not self._hold(process, holder):
            return False
        if seconds:
            timer = threading.Timer(seconds, self._let_go, (process, holder))
            timer.daemon = True
            timer.start()
        return True

    def _hold(self, process: ProcessId, fault: int) -> bool:
        """SIGSTOP for this fault; False: it is called off, or the process has ended."""
        with self._lock:
            if fault in self._called_off and self._called_off[fault].is_set():
                return False
            if not send_signal(process, signal.SIGSTOP):
                return False
            self._holders.setdefault(process, set()).add(fault)
            if fault > 0:
                self._note(fault, process)
            return True

    def _let_go(self, process: ProcessId, fault: int) -> bool:
        """The process goes on, unless another fault holds it; False: this one does not hold it, or it has ended."""
        with self._lock:
            holders = self._holders.get(process, set())
            if fault not in holders:
                return False
            holders.remove(fault)
            if fault > 0:
                held_file(self._folder, fault).unlink(missing_ok=True)
            if holders:
                return True
            del self._holders[process]
            return bool(self._inherited(process)) or send_signal(process, signal.SIGCONT)

    def _wake(self, process: ProcessId) -> None:
        with self._lock:
            if process not in self._holders and not self._inherited(process):
                send_signal(process, signal.SIGCONT)

    def _note(self, fault: int, process: ProcessId) -> None:
        """What this life stops, a later one can tell from what it stops itself."""
        note = held_file(self._folder, fault)
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(_written(process))
        except OSError as error:  # a full disk, say: what was done stays done
            log.warning("fault %d: not noted: %s", fault, error)

    def _inherited(self, process: ProcessId) -> list[int]:
        """Faults of a former life that were neither over nor called off: they keep the process stopped."""
        notes = {int(note.stem.partition("-")[2]): note for note in Path(self._folder).glob("fault-*.held")} if self._folder else {}
        return sorted(
            fault for fault, note in notes.items()
            if fault not in self._called_off and not off_file(self._folder, fault).exists() and _noted(note) == _written(process)
        )  # fmt: skip

    def _held(self, process: ProcessId) -> str:
        """Who else still holds it, in words; empty: it runs."""
        with self._lock:
            others = sorted([*self._holders.get(process, ()), *self._inherited(process)])
        names = [f"fault {other}" if other > 0 else "an order to hang" for other in others]
        return f"; it is still held by {' and '.join(names)}" if names else ""

    def _run(self, order: Order, process: ProcessId, called_off: threading.Event) -> None:
        status = self._aim(order, process, called_off)
        if status is None:
            return  # called off, or its target is gone: the host knows of either
        match order.kind:
            case "kill":
                self._kill(order, process, status, called_off)
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
                    self._stop(process, order.fault)
                    status = reader.read() if reader else status
                    if _fits(order, status, on_step):
                        return status
                    self._let_go(process, order.fault)
                called_off.wait(_LOOK)
            return None
        finally:
            if reader is not None:
                reader.close()

    def _kill(self, order: Order, process: ProcessId, status: Status, called_off: threading.Event) -> None:
        began = time.monotonic()
        with self._lock:
            if called_off.is_set() or not (is_alive(process) and send_signal(process, signal.SIGKILL)):
                return  # if its target has ended, the host knows
            self._killed.add(order.fault)
            self._holders.pop(process, None)
        gone = wait_exit(process, _GONE)
        self._report(order, status, began, {"signal": "SIGKILL", "process": "gone" if gone else process_state(process.pid)})

    def _hang(self, order: Order, process: ProcessId, status: Status, called_off: threading.Event) -> None:
        seconds = float(order.options.get("seconds", 0.0))
        began = time.monotonic()
        if not (state := self._stop(process, order.fault)):
            return
        self._report(order, status, began, {"signal": "SIGSTOP", "process": state})
        if seconds and not called_off.wait(seconds) and self._let_go(process, order.fault):
            self._over(order, process, f"it goes on after {seconds:g} s", f"its {seconds:g} s are over")

    def _slow(self, order: Order, process: ProcessId, status: Status, called_off: threading.Event) -> None:
        seconds, share, period = (float(order.options[name]) for name in ("seconds", "share", "period"))
        began = time.monotonic()
        if not (state := self._stop(process, order.fault)):
            return
        self._report(order, status, began, {"signal": "SIGSTOP", "process": state, "share": share, "period": period})
        while time.monotonic() < began + seconds and is_alive(process):
            if called_off.wait((1 - share) * period):
                return
            self._let_go(process, order.fault)
            if called_off.wait(share * period) or not self._hold(process, order.fault):
                return
        if self._let_go(process, order.fault):
            self._over(order, process, f"it runs at full speed again after {seconds:g} s", f"its {seconds:g} s are over")

    def _stop(self, process: ProcessId, fault: int) -> str:
        """SIGSTOP; the state of the process once that has taken effect: T, or what it is after a second. Empty: it is called off, or the
        process has ended."""
        if not self._hold(process, fault):
            return ""
        deadline = time.monotonic() + _TAKES_EFFECT
        while (state := process_state(process.pid)) not in "TZX" and time.monotonic() < deadline:
            time.sleep(0.0005)
        if state in ("Z", "X"):  # somebody else's doing
            self._let_go(process, fault)
            return ""
        return state

    def _over(self, order: Order, process: ProcessId, alone: str, held: str) -> None:
        others = self._held(process)
        self._emit(order.over(held + others if others else alone))

    def _report(self, order: Order, status: Status, began: float, proof: dict[str, Any]) -> None:
        proof["ago"] = round(time.monotonic() - began, 6)
        self._emit(order.injected(status, proof))


def _noted(note: Path) -> str:
    try:
        return note.read_text()
    except OSError:  # the run directory is removed just then
        return ""


def _written(process: ProcessId) -> str:
    return f"{process.pid} {process.start_ticks}"


def _fits(order: Order, status: Status, on_step: bool) -> bool:
    return order.phase in ("", status.phase) and (not on_step or status.step >= order.step)
