"""Detectors side by side on the same sealed runs, by the time that each of them would have cost.

    class LoopStuck:                                      # a rule of one's own
        def __init__(self, limit=4.0):
            self.limit, self.last = limit, {}
        def feed(self, entry):
            if isinstance(entry.event, RoleSample):
                self.last[entry.event.role, entry.event.incarnation] = entry.event
        def advance(self, now):
            late = [life for life, sample in self.last.items() if sample.loop_age > self.limit]
            return [call_failed(*life, now, "loop stuck", self.last.pop(life).loop_age) for life in late]
        def next_deadline(self):
            return None

    leaderboard(runs, {"mine": LoopStuck})

Promises: each gets a fresh detector per run; none sees what was injected, nor what was said live; one that raises, cannot be made or says
what is no verdict is told by its error and counts as silent from there on. Our detector is driven like all others. Leaves out:
runs whose live job stepped in are kinder to the quick: see driving.py; for a contest record with ``job.recovery.mode = "observe"``.
"""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from ..core import events as ev
from ..core.detection import Detector
from ..core.thresholds import Thresholds
from ..errors import ConfigError
from ..tables import Table
from .driving import Judge, Said, drive
from .given import made_by, runs_of
from .outcomes import DETECTED, FALSE_ALARM, MISSED, Truths, match
from .peers import JOB, PUBLISHED
from .run import Run
from .scoring import Score, total

OURS = "ours, as recorded"
_SHOWN = ("late_s", "needless_s", "faults", "detected", "missed", "false_alarms", "delay_p50", "delay_max")


def call_failed(role: str, incarnation: int, now: float, rule: str, value: float = 0.0) -> ev.Verdict:
    """The verdict ``failed`` of a detector of one's own; ``value``: what it saw, as evidence."""
    return ev.Verdict(role=role, incarnation=incarnation, kind="failed", rule=rule, evidence={"value": value}, threshold=0.0, due=now,
                      seen=now, onset=now, blind_spot="")  # fmt: skip


class _Guarded:
    """Keeps a detector's error, and is silent after it."""

    def __init__(self, judge: Judge | None, errors: list[str] | None = None) -> None:
        self.judge = judge
        self.errors: list[str] = [] if errors is None else errors

    @classmethod
    def made(cls, make: Callable[[], Judge]) -> _Guarded:
        guard = cls(None)
        try:
            guard.judge = made_by(make)
        except Exception as error:
            guard._end(error)
        return guard

    def __deepcopy__(self, memo: dict[int, Any]) -> _Guarded:
        """Which goes on alone where the live job stepped in (driving.py); its errors are this one's."""
        twin = _Guarded(None, self.errors)
        try:
            twin.judge = copy.deepcopy(self.judge, memo)
        except Exception as error:
            twin._end(error)
        return twin

    def feed(self, entry: ev.Entry) -> None:
        if self.judge is not None:
            try:
                self.judge.feed(entry)
            except Exception as error:  # somebody's own code: whatever it raises is its result
                self._end(error)

    def advance(self, now: float) -> list[ev.Verdict]:
        try:
            return [] if self.judge is None else [_verdict(said) for said in self.judge.advance(now)]
        except Exception as error:
            self._end(error)
            return []

    def next_deadline(self) -> float | None:
        try:
            return None if self.judge is None else _moment(self.judge.next_deadline())
        except Exception as error:
            self._end(error)
            return None

    def _end(self, error: Exception) -> None:
        self.judge = None
        self.errors.append(f"{type(error).__name__}: {error}")


def _verdict(said: Any) -> ev.Verdict:
    """Raises TypeError."""
    if not isinstance(said, ev.Verdict):
        raise TypeError(f"advance gave {reprlib.repr(said)}: must be a list of verdicts, e.g. of call_failed(role, incarnation, now, rule)")
    kinds = {"role": str, "incarnation": int, "kind": str, "rule": str, "evidence": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(getattr(said, name), kind)]
    wrong += [name for name in ("threshold", "due", "seen", "onset") if not isinstance(getattr(said, name), Real)]
    if wrong:
        raise TypeError(f"advance gave a verdict whose {wrong[0]} is {reprlib.repr(getattr(said, wrong[0]))}: "
                        f"must be {'a number' if wrong[0] not in kinds else kinds[wrong[0]].__name__}")  # fmt: skip
    return said


def _moment(deadline: Any) -> float | None:
    """Raises TypeError."""
    if deadline is not None and (not isinstance(deadline, Real) or math.isnan(deadline)):
        raise TypeError(f"next_deadline gave {reprlib.repr(deadline)}: must be host seconds, or None")
    return deadline  # type: ignore[return-value]


def leaderboard(runs: Run | Sequence[Run], detectors: Mapping[str, Callable[[], Judge]] | None = None, *, peers: bool = True) -> Table:
    """A row per detector, the one that costs least time first: ``detectors`` (name -> what makes a fresh one), ours, and others' published.

    Columns: place, detector, time_lost_s (cost, see scoring.py), late_s, needless_s, faults, detected, missed, false_alarms, delay_p50,
    delay_max, error. What is wrong with a detector is in its row; raises ConfigError for what are no runs, and a name that is taken.
    """
    runs = runs_of(runs)
    if detectors is not None and not isinstance(detectors, Mapping):
        raise ConfigError("detectors", detectors, 'must be a mapping from names to what makes a detector, e.g. {"mine": MyRule}')
    every: dict[str, Callable[[Run], Judge]] = {
        OURS: lambda run: Detector(run.thresholds[0][1]), "ours, lab": lambda run: Detector(Thresholds.lab()),
        "ours, paper": lambda run: Detector(Thresholds.paper()),
    }  # fmt: skip
    if peers:
        every |= {name: lambda run, make=make: make() for name, make in PUBLISHED.items()}  # type: ignore[misc]
    for name, make in (detectors or {}).items():
        if not isinstance(name, str) or not name.strip():
            raise ConfigError("detectors", name, "the name of a detector must be a text")
        if name in every:
            raise ConfigError("detectors", name, "is the name of another detector")
        every[name] = lambda run, make=make: _Guarded.made(make)  # type: ignore[misc]
    rows = []
    for name, of in every.items():
        scores, errors = [], []
        for run in runs:
            score, found = _score(run, of(run))
            scores.append(score)
            errors += found
        whole = total(scores)
        row = whole.row()
        shown = {key: row[key] for key in _SHOWN}
        rows.append({"detector": name, "time_lost_s": whole.cost, **shown, "error": "; ".join(sorted(set(errors)))})
    rows.sort(key=lambda row: (row["time_lost_s"], row["detector"]))
    return Table({"place": place, **row} for place, row in enumerate(rows, 1))


def _score(run: Run, judge: Judge) -> tuple[Score, list[str]]:
    guard = judge if isinstance(judge, Detector | _Guarded) else _Guarded(judge)
    truths, restart = Truths(run), run.costs.restart
    said: Said = drive(run.recording, guard, restart, truths.excused)
    outcomes = match(truths, run.recording, said, restart, JOB)
    score = Score(
        tuple(found.delay for found in outcomes if found.outcome == DETECTED and found.delay is not None),
        tuple(found.lasted for found in outcomes if found.outcome == MISSED),
        tuple(restart(found.role) for found in outcomes if found.outcome == FALSE_ALARM), run.seconds,
    )  # fmt: skip
    return score, guard.errors if isinstance(guard, _Guarded) else []
