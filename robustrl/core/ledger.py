"""The ledger of trajectories: started = consumed + dropped(reason) + in flight, at every moment.

A trajectory is started once and ends once: consumed by an optimizer step, or dropped for a stated reason. Between the two it is in
flight, complete and rewarded or not. Pure; every other move raises and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from robustrl.errors import RobustRLError


class TrajectoryState(StrEnum):
    IN_FLIGHT = "in flight"
    CONSUMED = "consumed"
    DROPPED = "dropped"


class LedgerError(RobustRLError, ValueError):
    """An illegal move; the text names the trajectory, where it stands and where it should have gone."""


class Balance(msgspec.Struct, frozen=True):
    started: int
    consumed: int
    dropped: dict[str, int]
    """Count per reason."""
    in_flight: int


@dataclass
class Ledger:
    _states: dict[int, TrajectoryState] = field(default_factory=dict)
    _counts: Counter[TrajectoryState] = field(default_factory=Counter)
    _reasons: Counter[str] = field(default_factory=Counter)

    @property
    def started(self) -> int:
        return len(self._states)

    @property
    def consumed(self) -> int:
        return self._counts[TrajectoryState.CONSUMED]

    @property
    def in_flight(self) -> int:
        return self._counts[TrajectoryState.IN_FLIGHT]

    @property
    def dropped_by_reason(self) -> dict[str, int]:
        return dict(self._reasons)

    def balance(self) -> Balance:
        return Balance(self.started, self.consumed, self.dropped_by_reason, self.in_flight)

    def state(self, trajectory: int) -> TrajectoryState:
        """Raises LedgerError for an id that was never started."""
        if trajectory not in self._states:
            raise LedgerError(f"trajectory {trajectory} was never started")
        return self._states[trajectory]

    def knows(self, trajectory: int) -> bool:
        return trajectory in self._states

    def ids(self) -> list[int]:
        """All that were ever started, in that order."""
        return list(self._states)

    def open_ids(self) -> list[int]:
        """The trajectories in flight, in order of their start."""
        return [i for i, state in self._states.items() if state is TrajectoryState.IN_FLIGHT]

    def start(self, ids: Iterable[int]) -> None:
        """Raises LedgerError, here and below, that names the first trajectory whose move is illegal; none of ``ids`` moves then."""
        ids = list(ids)
        self._check(ids, TrajectoryState.IN_FLIGHT, None)
        self._states.update(dict.fromkeys(ids, TrajectoryState.IN_FLIGHT))
        self._counts[TrajectoryState.IN_FLIGHT] += len(ids)

    def consume(self, ids: Iterable[int]) -> None:
        self._end(list(ids), TrajectoryState.CONSUMED)

    def drop(self, ids: Iterable[int], reason: str) -> None:
        ids = list(ids)
        self._end(ids, TrajectoryState.DROPPED)
        self._reasons[reason] += len(ids)

    def _end(self, ids: list[int], end: TrajectoryState) -> None:
        self._check(ids, end, TrajectoryState.IN_FLIGHT)
        self._states.update(dict.fromkeys(ids, end))
        self._counts[TrajectoryState.IN_FLIGHT] -= len(ids)
        self._counts[end] += len(ids)

    def _check(self, ids: list[int], new: TrajectoryState, expected: TrajectoryState | None) -> None:
        if len(set(ids)) != len(ids):
            raise LedgerError(f"trajectories {sorted(i for i, n in Counter(ids).items() if n > 1)} would be {new} twice at once")
        for i in ids:
            if (old := self._states.get(i)) is not expected:
                raise LedgerError(f"trajectory {i} cannot be {new}: it " + (f"is {old} already" if old else "was never started"))
