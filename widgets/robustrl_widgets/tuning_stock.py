"""What the tuning labs of one server share: runs that are made ready once for all pages, and one turn to compute.

Promised: never two computations at once, whoever asks and from however many pages; those who are no instructors (*guests*) compute at most
half of the time, all together, and an instructor waits for at most one of their judgements; a source that does not change is made ready
once. A lab in a notebook has a stock of its own.
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
from robustrl.replay.scoring import Score

from . import tuning

_REST = 2.0
"""Seconds for which guests rest after one of their computations, at most."""


@dataclass
class Loaded:
    """Runs that are ready, with the settings that are drawn as points: whose turn it is adds one."""

    material: tuning.Material
    first: tuning.Trial
    """Of the setting that the sliders begin with."""
    todo: deque[tuple[dict[str, Any], Thresholds]]
    points: list[tuple[dict[str, float], Score]] = field(default_factory=list)

    def further_point(self) -> None:
        """Judges one setting more, if there is one left."""
        if self.todo:
            changes, thresholds = self.todo.popleft()
            self.points.append((changes, self.material.score(thresholds)))


class Stock:
    """``constant``: sources that give the same runs each time."""

    def __init__(self, constant: Iterable[str] = ()) -> None:
        self._constant = frozenset(constant)
        self._loaded: dict[str, Loaded] = {}
        self._turn, self._guests = threading.Lock(), threading.Lock()
        self._rested = 0.0

    @contextmanager
    def turn(self, guest: bool) -> Iterator[None]:
        """Held while something is computed; from threads of tuners only, as it waits."""
        if not guest:
            with self._turn:
                yield
            return
        with self._guests:
            time.sleep(max(0.0, self._rested - time.monotonic()))
            with self._turn:
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
