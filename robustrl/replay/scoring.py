"""What one setting is worth on some runs: counts, delays, mistakes, and the time that it costs. Pure.

*Cost* is seconds of work lost: by each fault until it is called failed (a missed one: as long as it was there), and by each needless
restart what a restart of that role took in that run. *Reach*: how near anything harmless came to a limit, as a share of it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ..core.detection import Detector
from ..core.roles import RoleId, RoleKind
from ..core.thresholds import SECTION, Relative, Thresholds
from .driving import Said, drive
from .outcomes import DETECTED, FALSE_ALARM, MISSED, Outcome, Truths, match
from .quality import exact_bounds, percentile, poisson_lower, poisson_upper
from .recording import Recording
from .run import Run


class Score(msgspec.Struct, frozen=True):
    """Of one setting on one or several runs. Durations are seconds."""

    delays: tuple[float, ...] = ()
    """Of the detected faults."""
    missed: tuple[float, ...] = ()
    """How long each missed fault was there."""
    needless: tuple[float, ...] = ()
    """What each false alarm would have cost."""
    watched: float = 0.0
    reach: float = 0.0
    reach_of: str = ""
    """Setting, role and run of the harmless thing that came nearest to its limit."""

    @property
    def faults(self) -> int:
        return len(self.delays) + len(self.missed)

    @property
    def late(self) -> float:
        return sum(self.delays) + sum(self.missed)

    @property
    def cost(self) -> float:
        return self.late + sum(self.needless)

    @property
    def alarms_per_hour(self) -> float:
        return len(self.needless) / self.watched * 3600 if self.watched else 0.0

    @property
    def mean_late(self) -> float:
        """Restricted mean of the delay: a missed fault counts as long as it was there."""
        return self.late / self.faults if self.faults else 0.0

    def row(self) -> dict[str, float | int | str | None]:
        found, alarms, hours = len(self.delays), len(self.needless), self.watched / 3600
        recall, precision = exact_bounds(found, self.faults), exact_bounds(found, found + alarms)
        return {
            "faults": self.faults, "detected": found, "missed": len(self.missed), "false_alarms": alarms,
            "recall": found / self.faults if self.faults else None, "recall_low": recall[0], "recall_high": recall[1],
            "precision": found / (found + alarms) if found + alarms else None,
            "precision_low": precision[0], "precision_high": precision[1],
            "delay_p50": percentile(self.delays, 0.5), "delay_p95": percentile(self.delays, 0.95),
            "delay_max": max(self.delays, default=None),
            "alarms_per_hour": alarms / hours if hours else None, "alarms_per_hour_low": poisson_lower(alarms) / hours if hours else None,
            "alarms_per_hour_high": poisson_upper(alarms) / hours if hours else None, "late_s": self.late, "needless_s": sum(self.needless),
            "cost_s": self.cost, "cost_s_per_hour": self.cost / hours if hours else None, "reach": self.reach, "reach_of": self.reach_of,
        }  # fmt: skip


def total(scores: Sequence[Score]) -> Score:
    if not scores:
        return Score()
    nearest = max(scores, key=lambda score: score.reach)
    return Score(
        sum((score.delays for score in scores), ()), sum((score.missed for score in scores), ()),
        sum((score.needless for score in scores), ()), sum(score.watched for score in scores), nearest.reach, nearest.reach_of,
    )  # fmt: skip


class Case:
    """A run made ready to be scored many times."""

    def __init__(self, run: Run, recording: Recording) -> None:
        self.name, self.watched, self.recording = run.name, run.seconds, recording
        self.truths, self.costs = Truths(run), run.costs
        self._harmless = _harmless(self.truths, run.recording)

    def judge(self, thresholds: Thresholds, recording: Recording | None = None,
              pause: Callable[[], None] = lambda: None) -> tuple[Said, list[Outcome]]:  # fmt: skip
        """What is said of the run, and what it was worth. ``recording``: the run's, reduced for these thresholds or lower ones.
        ``pause``: see `drive`.
        """
        recording = recording or self.recording
        said = drive(recording, Detector(thresholds), self.costs.restart, self.truths.excused, pause)
        return said, match(self.truths, recording, said, self.costs.restart)

    def score(self, thresholds: Thresholds, recording: Recording | None = None, pause: Callable[[], None] = lambda: None) -> Score:
        return self.worth(thresholds, self.judge(thresholds, recording, pause)[1])

    def worth(self, thresholds: Thresholds, outcomes: Sequence[Outcome]) -> Score:
        reach, reach_of = self._reach(thresholds)
        return Score(
            tuple(found.delay for found in outcomes if found.outcome == DETECTED and found.delay is not None),
            tuple(found.lasted for found in outcomes if found.outcome == MISSED),
            tuple(self.costs.restart(found.role) for found in outcomes if found.outcome == FALSE_ALARM), self.watched, reach, reach_of,
        )  # fmt: skip

    def _reach(self, thresholds: Thresholds) -> tuple[float, str]:
        best, of = 0.0, ""
        for path, seen in self._harmless.items():
            value = thresholds.get(path)
            limit = value.floor if isinstance(value, Relative) else value
            place = bisect.bisect_left(seen, (limit, "")) - 1
            if place >= 0 and seen[place][0] / limit > best:
                best, of = seen[place][0] / limit, f"{path}, {seen[place][1]}, {self.name}"
        return best, of


def _harmless(truths: Truths, recording: Recording) -> dict[str, list[tuple[float, str]]]:
    """Setting -> (age, role) of the samples of roles that were well, sorted: what came near its limit and was no fault."""
    found: dict[str, set[tuple[float, str]]] = {}
    for life, places in recording.samples.items():
        kind = RoleId.parse(life[0]).kind
        if kind in (RoleKind.NODE_AGENT, RoleKind.SUPERVISOR):
            continue
        section = SECTION.get(kind, "management")
        names = {"trainer": ("no_compute", "no_marks", "silent"), "rollout": ("", "no_tokens", "wedged")}.get(section, ("", "", "silent"))
        end = recording.over.get(life, math.inf)
        for values, name in zip(recording.peaks[life], names, strict=True):
            for value, i in zip(values, places, strict=True) if name else ():
                entry = recording.entries[i]
                if value >= _NEAR and entry.t < end and entry.event.progress and not truths.excused(*life, entry.t):  # type: ignore[union-attr]
                    found.setdefault(f"{section}.{name}", set()).add((round(value, 3), life[0]))
    return {path: sorted(values) for path, values in found.items()}


_NEAR = 0.1
"""Seconds: below it nothing comes near any limit."""


def pareto(points: Iterable[tuple[float, float]]) -> list[bool]:
    """Of each point (less is better in both): whether no other is as good in both and better in one."""
    listed = list(points)
    best = math.inf
    front: set[tuple[float, float]] = set()
    for point in sorted(set(listed)):
        if point[1] < best:
            front.add(point)
            best = point[1]
    return [point in front for point in listed]

