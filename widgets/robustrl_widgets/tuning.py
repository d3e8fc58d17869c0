"""The pictures of the TuningLab: signals against limits, truth, what two settings say, and many settings as points. Pure; JSON values.

A *signal* is an age that a failure rule holds against a setting; the page draws it as a share of the limit, so it needs no answer from
here to follow a slider. What is said under a setting, and its score, are this side's. Times are seconds from the run's first entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from robustrl.core.roles import RoleId, RoleKind
from robustrl.core.thresholds import LEAST, SECTION, Relative, Thresholds
from robustrl.errors import RobustRLError
from robustrl.replay.outcomes import Outcome
from robustrl.replay.recording import Recording
from robustrl.replay.reducing import floors, reduced, rounded
from robustrl.replay.run import FAILED, Run
from robustrl.replay.scoring import Case, Score, pareto, total

from .thresholds import WORDS
from .words import cut

SLIDERS = ("rollout.no_tokens", "rollout.heartbeat", "rollout.wedged", "trainer.no_compute", "trainer.no_marks", "trainer.silent",
           "management.silent", "keeper.silent", "node.silent", "job.stall")  # fmt: skip
_SPAN = 8.0
"""A slider goes from the eighth of its base to eight times as much."""
_LEAST, _LEAST_OF = LEAST + 0.01, {"node.silent": 2.0}
_BINS = 400
_SHOWN = 600
"""Verdicts of one setting on one run."""
_NAMES = {"trainer": ("trainer.no_compute", "trainer.no_marks", "trainer.silent"), "rollout": ("", "rollout.no_tokens", "rollout.wedged")}

Picture = dict[str, Any]


@dataclass(frozen=True)
class Slider:
    path: str
    low: float
    high: float
    base: float

    @classmethod
    def of(cls, path: str, base: Thresholds) -> Slider:
        value = base.get(path)
        seconds = value.floor if isinstance(value, Relative) else float(value)
        return cls(path, max(_LEAST_OF.get(path, _LEAST), seconds / _SPAN), seconds * _SPAN, seconds)


class Material:
    """Runs made ready to be judged many times."""

    def __init__(self, runs: Sequence[Run], base: Thresholds) -> None:
        self.runs, self.base = list(runs), base
        self.sliders = [Slider.of(path, base) for path in SLIDERS]
        self.cases = [Case(run, run.recording) for run in self.runs]

    def trial(self, changes: dict[str, float]) -> Trial:
        """Raises ConfigError for a setting that contradicts itself."""
        thresholds = self.base.updated(changes)
        judged = [case.judge(thresholds, recording)[1] for case, recording in zip(self.cases, self._for(thresholds), strict=True)]
        scores = [case.worth(thresholds, outcomes) for case, outcomes in zip(self.cases, judged, strict=True)]
        return Trial(changes, thresholds, judged, total(scores))

    def score(self, thresholds: Thresholds, recordings: Sequence[Recording], pause: Callable[[], None]) -> Score:
        """``recordings``: of `for_all`; ``pause``: see `drive`."""
        return total([case.score(thresholds, recording, pause) for case, recording in zip(self.cases, recordings, strict=True)])

    def for_all(self, settings: Iterable[Thresholds]) -> list[Recording]:
        """The recordings without what cannot matter to any of these settings."""
        low = floors(settings)
        return [reduced(run.recording, low) for run in self.runs]

    def _for(self, thresholds: Thresholds) -> list[Recording]:
        """The recordings without what cannot matter to this setting: a third of the time, and a slider's next step shares them."""
        low = rounded(floors([thresholds]))
        return [reduced(run.recording, low) for run in self.runs]


@dataclass(frozen=True)
class Trial:
    """One setting on all runs."""

    changes: dict[str, float]
    thresholds: Thresholds
    outcomes: list[list[Outcome]]
    """Of each run."""
    score: Score

    def code(self) -> str:
        """For a live job: all at once, as some settings contradict each other while only one of them is set."""
        lines = "".join(f'    "{path}": {value:.4g},\n' for path, value in sorted(self.changes.items()))
        return f"job.thresholds.update({{\n{lines}}})" if lines else "# what the sliders began with: nothing is changed"


def first_setting(runs: Sequence[Run], job: Any = None) -> Thresholds:
    """What sliders begin with where nobody says: what ``job`` has in force; else what the first run ended with, if a silence that it calls
    a failure fits into one of the runs; else the lab's, as nothing could be found with limits of minutes in runs of seconds.
    """
    if job is not None:
        try:
            now: Thresholds = job.thresholds.now
            return now
        except RobustRLError:
            pass  # it failed before it had any
    own = runs[0].thresholds[-1][1]
    value = own.trainer.no_compute
    found_after = max(value.floor if isinstance(value, Relative) else value,
                      own.rollout.no_tokens + own.rollout.heartbeat * own.rollout.strikes)  # fmt: skip
    return own if any(run.seconds > found_after for run in runs) else Thresholds.lab()


def still(material: Material, shown: int) -> Picture:
    """What no setting changes: of the run that is shown its lanes and truth, the sliders, and the names of all runs."""
    run = material.runs[shown]
    roles = {mark.role for mark in run.truth} | {life[0] for life in run.recording.peaks}
    kinds = [RoleKind.TRAINER, RoleKind.ROLLOUT]
    order = sorted(roles, key=lambda role: (_rank(role, kinds), role))
    return {
        "runs": [cut(each.name, 60) for each in material.runs], "shown": shown, "seconds": round(run.entries[-1].t - run.begin, 2),
        "order": order, "signals": signals(run),
        "truth": [[round(mark.start - run.begin, 2), round(mark.end - run.begin, 2), mark.role, cut(mark.kind, 40), mark.expect]
                  for mark in run.truth],
        "sliders": [{"path": slider.path, "low": round(slider.low, 3), "high": round(slider.high, 3), "base": round(slider.base, 3),
                     "words": WORDS.get(slider.path, "")} for slider in material.sliders],
    }  # fmt: skip


def first_shown(runs: Sequence[Run]) -> int:
    """The place of the first run in which a role that a fault hit shows a signal: of a healthy run all lanes may be empty; else 0."""
    for place, run in enumerate(runs):
        hit = {mark.role for mark in run.truth if mark.expect == FAILED}
        if hit and any(any(of.values()) for role, of in signals(run).items() if role in hit):
            return place
    return 0


def signals(run: Run) -> dict[str, dict[str, list[list[float]]]]:
    """Role -> setting -> [time, seconds] of the highest sample in each of `_BINS` stretches; stretches without a value are left out."""
    width = max(1e-6, (run.entries[-1].t - run.begin) / _BINS)
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    recording = run.recording
    for (role, incarnation), peaks in recording.peaks.items():
        kind = RoleId.parse(role).kind
        if kind in (RoleKind.NODE_AGENT, RoleKind.SUPERVISOR):
            continue
        section = SECTION.get(kind, "management")
        for path, values in zip(_NAMES.get(section, ("", "", f"{section}.silent")), peaks, strict=True):
            bins = found.setdefault(role, {}).setdefault(path, {}) if path else {}
            for value, place in zip(values, recording.samples[role, incarnation], strict=True):
                if not path or value < LEAST:
                    continue
                t = recording.entries[place].t - run.begin
                best = bins.get(int(t / width))
                if best is None or value > best[1]:
                    bins[int(t / width)] = [round(t, 2), round(value, 3)]
    return {role: {path: [bins[i] for i in sorted(bins)] for path, bins in of.items()} for role, of in found.items()}


def side(trial: Trial, run: Run, place: int) -> Picture:
    """What one setting says of the run that is shown, and its worth on all."""
    begin = run.begin
    marks = [[round((found.at if found.at is not None else found.start or 0.0) - begin, 3), found.role, found.outcome, cut(found.rule, 30),
              None if found.delay is None else round(found.delay, 2)] for found in trial.outcomes[place][:_SHOWN]]  # fmt: skip
    score = trial.score
    return {
        "values": {path: _seconds(trial.thresholds.get(path)) for path in SLIDERS}, "marks": marks, "code": trial.code(),
        "score": {"faults": score.faults, "detected": len(score.delays), "missed": len(score.missed), "false_alarms": len(score.needless),
                  "mean": round(score.mean_late, 2), "max": round(max(score.delays, default=0.0), 2), "cost": round(score.cost, 1),
                  "late": round(score.late, 1), "reach": round(score.reach, 2), "reach_of": cut(score.reach_of)},
    }  # fmt: skip


def points(found: Sequence[tuple[dict[str, float], Score]]) -> list[list[Any]]:
    """[false alarms per hour, mean delay, on the front, missed] of each setting, in order."""
    front = pareto((score.alarms_per_hour, score.mean_late) for _, score in found)
    return [[round(score.alarms_per_hour, 2), round(score.mean_late, 3), best, len(score.missed)]
            for (_, score), best in zip(found, front, strict=True)]  # fmt: skip


def _seconds(value: Any) -> float:
    return round(value.floor if isinstance(value, Relative) else float(value), 4)


def _rank(role: str, kinds: list[RoleKind]) -> int:
    try:
        kind = RoleId.parse(role).kind
    except ValueError:
        return len(kinds) + 1
    return kinds.index(kind) if kind in kinds else len(kinds)


def ranges(material: Material) -> dict[str, tuple[float, float]]:
    """Of the settings that are drawn as points: half of what the sliders reach, in the logarithm."""
    return {slider.path: (max(slider.low, slider.base / math.sqrt(_SPAN)), slider.base * math.sqrt(_SPAN)) for slider in material.sliders
            if slider.path != "job.stall"}  # fmt: skip
