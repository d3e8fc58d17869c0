"""What the tuning labs of one server share: runs that are made ready once for all pages, and one turn to compute.

Promised: never two computations at once, whoever asks and from however many pages; nobody waits for a point: one that is being made is
given up, and made anew later; those who are no instructors (*guests*) compute at most half of the time, all together, and an instructor
waits for at most one of their judgements; a source that does not change is made ready once. A lab in a notebook has a stock of its own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from robustrl.core.thresholds import Thresholds
from robustrl.replay.recording import Recording
from robustrl.replay.scoring import Score

from . import tuning

_REST = 2.0
"""Seconds for which guests rest after one of their computations, at most."""
_LOOK, _BREATH = 0.002, 0.0002
"""Seconds between two looks at whether a point is to be given up, and for which the interpreter is left to other threads at each: else
those that bring a move would get it only after 5 ms, and need it several times."""


class GivenUp(Exception):
    """Somebody needs the turn in which a point is made."""


@dataclass
class Loaded:
    """Runs that are ready, with the settings that are drawn as points: whose turn it is adds one."""

    material: tuning.Material
    first: tuning.Trial
    """Of the setting that the sliders begin with."""
    todo: deque[tuple[dict[str, Any], Thresholds]]
    points: list[tuple[dict[str, float], Score]]
    recordings: list[Recording] = field(init=False)
    """For all settings that are to come: none of them takes from the sliders what was made ready for these."""

    def __post_init__(self) -> None:
        self.recordings = self.material.for_all([self.first.thresholds, *(thresholds for _, thresholds in self.todo)])

    def further_point(self, wanted: Callable[[], bool]) -> None:
        """Judges one setting more, if there is one left. Raises GivenUp once ``wanted``: then that one is still to come."""
        looked = time.perf_counter()

        def pause() -> None:
            nonlocal looked
            if time.perf_counter() - looked >= _LOOK:
                time.sleep(_BREATH)
                if wanted():
                    raise GivenUp
                looked = time.perf_counter()

        if self.todo:
            changes, thresholds = self.todo[0]
            self.points.append((changes, self.material.score(thresholds, self.recordings, pause)))
            self.todo.popleft()


class Stock:
    """``constant``: sources that give the same runs each time."""

    def __init__(self, constant: Iterable[str] = ()) -> None:
        self._constant = frozenset(constant)
        self._loaded: dict[str, Loaded] = {}
        self._turn, self._guests = threading.Lock(), threading.Lock()
        self._rested = 0.0
        self._waiting: list[bool] = []
        """An item for each who waits for a turn, and for no point."""

    @property
    def wanted(self) -> bool:
        """Somebody waits for a turn to be over."""
        return bool(self._waiting)

    @contextmanager
    def _held(self, lock: threading.Lock, point: bool) -> Iterator[None]:
        if point and not lock.acquire(blocking=False):
            raise GivenUp  # a page that waited here would not take its next move
        if not point:
            self._waiting.append(True)
            lock.acquire()
            self._waiting.pop()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def turn(self, guest: bool, point: bool = False) -> Iterator[None]:
        """Held while something is computed; from threads of tuners only, as it waits. For a point it does not: it raises GivenUp."""
        if not guest:
            with self._held(self._turn, point):
                yield
            return
        with self._held(self._guests, point):
            time.sleep(max(0.0, self._rested - time.monotonic()))
            with self._held(self._turn, point):
                began = time.monotonic()
                try:
                    yield
                finally:
                    ended = time.monotonic()
                    self._rested = ended + min(_REST, ended - began)

    @property
    def names(self) -> list[str]:
        """Of what is ready."""
        return sorted(self._loaded)

    def get(self, name: str, make: Callable[[], Loaded] | None) -> Loaded | None:
        """What is ready under this name; made, or made anew if it may have changed, where ``make`` is given. Call it in a turn."""
        found = self._loaded.get(name)
        if make is None or (found is not None and name in self._constant):
            return found
        made = self._loaded[name] = make()
        return made
