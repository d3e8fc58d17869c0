"""What a role does to itself when a fault of the catalogue asks for it: stuck, an exception, an exit, a delay where it really would be.

A role's work loop passes by at its phases; without an order that costs one look at an empty list. A fault strikes in the very thread and
place where such a thing would happen, says so first, with its proof, and is over after its time, or once it is called off.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core import events as ev
from ..core.roles import PHASES, Phase, RoleKind
from ..runtime.status_page import StatusPage
from . import disk
from .orders import Order

_LOOK = 0.02
"""Seconds between two looks for a sign that the fault is called off."""
_FLUSH = 2.0
_PIECE = 4 << 20
_FLIPPED = 64
"""Bytes."""
_PLACE = {"slow_tool": "tool", "long_advantage": Phase.ADVANTAGE, "long_checkpoint": Phase.SNAPSHOT}
"""Where the benign ones strike."""
_HELD = ("long_first_token", "idle_rollout")
_DISK = "full_disk"


class InjectedError(Exception):
    """Raised by a fault, on purpose."""


class Disturbance:
    def __init__(self, page: StatusPage, emit: Callable[[ev.Event], None], flush: Callable[[float], None]) -> None:
        self._page, self._emit, self._flush = page, emit, flush
        self._orders: list[Order] = []
        self._holding: dict[str, list[tuple[Order, float]]] = {}
        """Role -> what holds its work back, and until when: the work goes on after the last of them."""
        self._full = 0
        """Bytes that fill the disk."""

    def arm(self, order: Order) -> None:
        self._orders.append(order)

    def pass_by(self, place: str, *, working: bool = True) -> None:
        """Called by the work loop at ``place``: a phase, or ``tool``. Strikes there, at most one fault at a time."""
        for order in list(self._orders):
            if not order.in_loop and order.kind not in (*_HELD, _DISK) and self._fits(order, place, working):
                self._orders.remove(order)
                self._strike(order, place)
                return

    def strike_in_loop(self, order: Order, stored: Callable[[str], memoryview]) -> bool:
        """The fault, in the event loop that calls this; False: its phase is not there yet. ``stored(kind)``: what that kind damages."""
        if self._off(order):
            return True
        if order.phase not in ("", self._page.phase):
            return False
        self._orders.remove(order)
        if order.kind.startswith("corrupt"):
            self._corrupt(order, stored(order.kind))
        else:
            self._strike(order, self._page.phase)
        return True

    def holds(self, role: str) -> bool:
        """Whether work of ``role`` is held back now: the tokens of a rollout, or, at the rollout manager, what would be sent to it."""
        if not self._orders and not self._holding:
            return False
        for order in list(self._orders):
            if order.kind in _HELD and order.role == role and not self._off(order):
                self._begin(role, order)
                self._say(order, {"held": "tokens" if order.kind == "long_first_token" else "requests"})
        self.release(role)
        return role in self._holding

    def release(self, role: str) -> None:
        """What holds ``role``'s work back no longer is told of, also while there is no work that would be."""
        for order in self._ended(role) if self._holding else ():
            self._over(order)

    def disk(self, folder: Path) -> None:
        """Called by who is about to write to ``folder``, in the thread that writes: a full disk begins here, and ends."""
        for order in list(self._orders):
            if order.kind != _DISK or self._off(order):
                continue
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if _DISK not in self._holding:
                    self._full = disk.fill(folder)
            except OSError as error:
                self._orders.remove(order)
                self._emit(ev.FaultEnded(fault=order.fault, outcome="refused", reason=str(error)))
            else:
                self._begin(_DISK, order)
                self._say(order, {"full": self._full, "folder": folder.name, "thread": threading.current_thread().name})
        if ended := self._ended(_DISK):
            if _DISK not in self._holding:
                disk.free(folder)
            for order in ended:
                self._over(order)

    def _begin(self, what: str, order: Order) -> None:
        self._orders.remove(order)
        self._holding.setdefault(what, []).append((order, time.monotonic() + order.options["seconds"]))

    def _ended(self, what: str) -> list[Order]:
        """Those that held it until now."""
        now, holding = time.monotonic(), self._holding.get(what, [])
        ended = [(order, until) for order, until in holding if order.off.exists() or now >= until]
        for each in ended:
            holding.remove(each)
        if not holding:
            self._holding.pop(what, None)
        return [order for order, _ in ended]

    def _fits(self, order: Order, place: str, working: bool) -> bool:
        wanted = _PLACE.get(order.kind, order.phase)
        if order.kind == "first_compile":
            if not working:
                return False
            wanted = Phase.TRAIN if place in PHASES[RoleKind.TRAINER] else ""
        return wanted in ("", place) and self._page.step >= order.step and not self._off(order)

    def _off(self, order: Order) -> bool:
        if called_off := order.off.exists():
            self._orders.remove(order)
        return called_off

    def _strike(self, order: Order, place: str) -> None:
        thread = threading.current_thread().name
        match order.kind:
            case "exception":
                self._say(order, {"thread": thread, "place": str(place), "raised": InjectedError.__name__})
                raise InjectedError(f"fault {order.fault}: {order.options['text']}")
            case "clean_exit":
                self._say(order, {"thread": thread, "place": str(place), "exit": 0})
                self._flush(_FLUSH)
                os._exit(0)
            case "memory_exhaustion":
                self._exhaust(order, thread)
            case "wedge":
                self._say(order, {"thread": thread, "place": str(place), "busy": order.options["busy"]})
                self._stick(order, busy=order.options["busy"])
            case _:
                self._say(order, {"thread": thread, "place": str(place), "seconds": order.options["seconds"]})
                self._stick(order, busy=False)

    def _stick(self, order: Order, *, busy: bool) -> None:
        """Stuck here for the fault's seconds, 0: for good; called off by its file alone, as nothing else gets through."""
        seconds = float(order.options["seconds"])
        until = time.monotonic() + seconds if seconds else float("inf")
        off, looked = order.off, 0.0
        while (now := time.monotonic()) < until:
            if now >= looked + _LOOK:
                looked = now
                if off.exists():
                    return
            if not busy:
                time.sleep(min(_LOOK, until - now))
        self._over(order)

    def _exhaust(self, order: Order, thread: str) -> None:
        """Raises the MemoryError that it met; what it took is given back, so that the role can say what happened. The limit stays."""
        import resource

        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        limit = size + (int(order.options["room_mb"]) << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        taken: list[bytearray] = []
        try:
            while True:
                taken.append(bytearray(_PIECE))
        except MemoryError:
            count = len(taken)
            taken.clear()
            self._say(order, {"thread": thread, "limit": limit, "allocated": count * _PIECE, "raised": "MemoryError"})
            raise MemoryError(f"fault {order.fault}: RLIMIT_AS of {limit >> 20} MiB is used up") from None

    def _corrupt(self, order: Order, stored: memoryview) -> None:
        start = len(stored) // 2
        before = bytes(stored[start : start + _FLIPPED])
        stored[start : start + _FLIPPED] = bytes(byte ^ 0xFF for byte in before)
        changed = sum(a != b for a, b in zip(before, bytes(stored[start : start + _FLIPPED]), strict=True))
        self._say(order, {"bytes": changed, "at": start, "of": len(stored)})

    def _say(self, order: Order, proof: dict[str, Any]) -> None:
        self._emit(order.injected(StatusPage.read(order.page), proof))

    def _over(self, order: Order) -> None:
        if not order.off.exists():
            self._emit(order.over(f"over after {order.options['seconds']:g} s"))
