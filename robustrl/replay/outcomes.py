"""Verdicts held against the truth: what was detected and how late, what was missed, what was a mistake. Pure.

A fault is *detected* by a verdict ``failed`` on its role while it lasts (or at most `AFTER` seconds later), *missed* otherwise. Such a
verdict on a role that was well is a *false alarm*. On one that had truly ended, though nobody injected it, it is a *consequence*. A
disturbance that was not called failed is *left alone*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from ..core import events as ev
from ..core.fault_book import ENDING, ENDS
from ..core.recoveries import RECOVERED, recoveries_of
from ..core.roles import RoleId
from ..faults.catalogue import CATALOGUE
from .driving import Restarts, Said
from .recording import Recording
from .run import AFTER, FAILED, WELL, Mark, Run

DETECTED, MISSED, FALSE_ALARM, CONSEQUENCE, LEFT_ALONE = "detected", "missed", "false alarm", "consequence", "left alone"
ASSUMED_RESTART = 10.0
"""Seconds that a restart is taken to cost in a run that has none."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, disturbance or mistake. Times are host seconds, durations seconds."""

    outcome: str
    role: str
    kind: str
    """Of the fault or disturbance; empty: there was none."""
    fault: int
    start: float | None
    """Of the fault."""
    at: float | None
    """When it was called failed."""
    delay: float | None
    lasted: float
    """Of a fault: how long it was, or would have been, there to be detected."""
    rule: str
    threshold: float
    evidence: dict[str, Any]
    beyond: bool
    """The live job had stepped in before; see driving.py."""


class Costs:
    """What restarts of a run cost, as it measured them."""

    def __init__(self, run: Run) -> None:
        took: dict[str, list[float]] = {}
        for found in recoveries_of(run.entries):
            if found.outcome == RECOVERED and found.back is not None:
                took.setdefault(RoleId.parse(found.role).kind.value, []).append(found.back - found.detected)
        every = sorted(seconds for times in took.values() for seconds in times)
        self.usual = every[len(every) // 2] if every else ASSUMED_RESTART
        self.measured = len(every)
        """Recoveries; 0: the cost is assumed."""
        self._of = {kind: sorted(times)[len(times) // 2] for kind, times in took.items()}

    def restart(self, role: str) -> float:
        """Seconds, from the verdict until the role is back: the median of its kind, else of all, else `ASSUMED_RESTART`."""
        try:
            return self._of.get(RoleId.parse(role).kind.value, self.usual)
        except ValueError:
            return self.usual  # a detector that names nobody


class Truths:
    """The marks of a run by role."""

    def __init__(self, run: Run) -> None:
        self.marks = run.truth
        self.window = run.window
        self._of: dict[str, list[Mark]] = {}
        for mark in self.marks:
            self._of.setdefault(mark.role, []).append(mark)

    @cached_property
    def faults(self) -> list[Mark]:
        return [mark for mark in self.marks if mark.expect == FAILED]

    def of(self, role: str) -> Sequence[Mark]:
        return self._of.get(role, ())

    def excused(self, role: str, incarnation: int, t: float) -> bool:
        """Calling this life failed then is no mistake."""
        return any(mark.expect != WELL and mark.covers(role, incarnation, t) for mark in self._of.get(role, ()))

    def disturbance(self, role: str, t: float) -> Mark | None:
        return next((mark for mark in self._of.get(role, ()) if mark.expect == WELL and mark.start <= t <= mark.end + AFTER), None)


def match(truths: Truths, recording: Recording, said: Said, restarts: Restarts, anybody: str = "") -> list[Outcome]:
    """In the order of time. ``anybody``: the name under which a detector condemns without naming."""
    low, high = truths.window
    failed = [verdict for verdict in said.verdicts if verdict.kind == "failed" and low <= verdict.seen <= high]
    beyond = {mark: verdict for (_, mark, _, _), verdict in said.beyond}
    found: list[Outcome] = []
    mistaken = _mistakes(truths, recording, failed, anybody)
    for mark in truths.marks:
        if mark.expect == FAILED:
            found.append(_fault(mark, failed, beyond.get(mark), mistaken, restarts, anybody, recording))
        elif mark.expect == WELL:
            verdict = beyond.get(mark)
            if verdict is not None:
                found.append(_outcome(FALSE_ALARM, mark, verdict, beyond=True))
            elif not any(truths.disturbance(v.role, v.seen) is mark for v in mistaken):
                found.append(_outcome(LEFT_ALONE, mark, None))
    for verdict in failed:
        if verdict in mistaken:
            found.append(_outcome(FALSE_ALARM, truths.disturbance(verdict.role, verdict.seen), verdict))
        elif not truths.excused(verdict.role, verdict.incarnation, verdict.seen) and verdict.role != anybody:
            found.append(_outcome(CONSEQUENCE, None, verdict))
    return sorted(found, key=lambda outcome: (outcome.start if outcome.start is not None else outcome.at or 0.0, outcome.role))


def _mistakes(truths: Truths, recording: Recording, failed: Sequence[ev.Verdict], anybody: str) -> list[ev.Verdict]:
    def right(verdict: ev.Verdict) -> bool:
        if verdict.role == anybody:
            return any(mark.start <= verdict.seen <= mark.end + AFTER for mark in truths.faults)
        life = verdict.role, verdict.incarnation
        ended = (recording.over if verdict.rule in ENDS else recording.ends).get(life, math.inf)  # who was ended on purpose has exited
        return truths.excused(verdict.role, verdict.incarnation, verdict.seen) or ended <= verdict.seen

    return [verdict for verdict in failed if not right(verdict)]


def _fault(mark: Mark, failed: Sequence[ev.Verdict], beyond: ev.Verdict | None, mistaken: Sequence[ev.Verdict],
           restarts: Restarts, anybody: str, recording: Recording) -> Outcome:  # fmt: skip
    names = {mark.role, anybody} if anybody else {mark.role}
    if math.isfinite(mark.lasts):
        lasted = mark.lasts
    else:  # where the live job noticed it and replaced the role, it would have gone on
        lasted = (recording.end if (mark.role, mark.incarnation) in recording.called else mark.end) - mark.start
    for verdict in failed:
        role = mark.role if verdict.role in names else ""
        if verdict.rule in ENDS and mark.fault and mark.kind in CATALOGUE and mark.kind not in ENDING:
            continue  # somebody else ended what it had hit
        if mark.covers(role, verdict.incarnation, verdict.seen):
            return _outcome(DETECTED, mark, verdict, lasted=lasted)
    if beyond is not None:
        return _outcome(DETECTED, mark, beyond, lasted=lasted, beyond=True)
    for verdict in mistaken:
        if verdict.role in names and verdict.seen <= mark.start < verdict.seen + restarts(mark.role):
            return _outcome(DETECTED, mark, verdict, lasted=lasted)  # it stood condemned, wrongly until then
    return _outcome(MISSED, mark, None, lasted=lasted)


def _outcome(outcome: str, mark: Mark | None, verdict: ev.Verdict | None, lasted: float = 0.0, beyond: bool = False) -> Outcome:
    start, at = mark.start if mark else None, verdict.seen if verdict else None
    delay = max(0.0, at - start) if outcome == DETECTED and at is not None and start is not None else None
    return Outcome(
        outcome=outcome, role=mark.role if mark else verdict.role if verdict else "", kind=mark.kind if mark else "",
        fault=mark.fault if mark else 0, start=start, at=at, delay=delay, lasted=lasted, rule=verdict.rule if verdict else "",
        threshold=verdict.threshold if verdict else 0.0, evidence=verdict.evidence if verdict else {}, beyond=beyond,
    )  # fmt: skip
