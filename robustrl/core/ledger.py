"""The ledger of trajectories: started = consumed + dropped(reason) + in flight, at every moment.

A trajectory is started once, may be finished (complete and rewarded), and ends once: consumed by an optimizer step, or dropped for a
stated reason. Pure; every other move raises and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from robustrl.errors import RobustRLError


class TrajectoryState(StrEnum):
    STARTED = "started"
    FINISHED = "finished"
    CONSUMED = "consumed"
    DROPPED = "dropped"


_LEGAL: dict[TrajectoryState, frozenset[TrajectoryState | None]] = {
    TrajectoryState.STARTED: frozenset({None}),
    TrajectoryState.FINISHED: frozenset({TrajectoryState.STARTED}),
    # started -> consumed is missing on purpose: only a complete, rewarded trajectory is trained on
    TrajectoryState.CONSUMED: frozenset({TrajectoryState.FINISHED}),
    TrajectoryState.DROPPED: frozenset({TrajectoryState.STARTED, TrajectoryState.FINISHED}),
}


class LedgerError(RobustRLError, ValueError):
    """An illegal move; the text names the trajectory, where it stands and where it should have gone."""


class Balance(msgspec.Struct, frozen=True):
    started: int
    consumed: int
    dropped: dict[str, int]
    """Count per reason."""
    in_flight: int


class Ledger:
    def __init__(self) -> None:
        self._states: dict[int, TrajectoryState] = {}
        self._counts: Counter[TrajectoryState] = Counter()
        self._dropped: Counter[str] = Counter()

    def start(self, ids: Iterable[int]) -> None:
        self._move(list(ids), TrajectoryState.STARTED)

    def finish(self, ids: Iterable[int]) -> None:
        self._move(list(ids), TrajectoryState.FINISHED)

    def consume(self, ids: Iterable[int]) -> None:
        self._move(list(ids), TrajectoryState.CONSUMED)

    def drop(self, ids: Iterable[int], reason: str) -> None:
        ids = list(ids)
        self._move(ids, TrajectoryState.DROPPED)
        self._dropped[reason] += len(ids)

    def state(self, trajectory: int) -> TrajectoryState:
        """Raises LedgerError for an id that was never started."""
        if trajectory not in self._states:
            raise LedgerError(f"trajectory {trajectory} was never started")
        return self._states[trajectory]

    def open(self) -> list[int]:
        """Ids of the trajectories in flight, finished ones that no step consumed yet included, in order of their start."""
        return [i for i, state in self._states.items() if state in (TrajectoryState.STARTED, TrajectoryState.FINISHED)]

    def balance(self) -> Balance:
        counts = self._counts
        in_flight = counts[TrajectoryState.STARTED] + counts[TrajectoryState.FINISHED]
        return Balance(len(self._states), counts[TrajectoryState.CONSUMED], dict(self._dropped), in_flight)

    def _move(self, ids: list[int], new: TrajectoryState) -> None:
        if len(set(ids)) != len(ids):
            raise LedgerError(f"trajectories {sorted(i for i, n in Counter(ids).items() if n > 1)} would be {new} twice at once")
        for i in ids:
            old = self._states.get(i)
            if old not in _LEGAL[new]:
                raise LedgerError(f"trajectory {i} cannot be {new}: it " + (f"is {old} already" if old else "was never started"))
        for i in ids:
            old = self._states.get(i)
            if old is not None:
                self._counts[old] -= 1
            self._states[i] = new
        self._counts[new] += len(ids)
