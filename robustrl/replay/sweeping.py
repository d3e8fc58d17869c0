"""Many settings on some runs: `sweep`, a table of what each is worth, and the one to take.

    found = robustrl.sweep(runs, {"rollout.no_tokens": [2, 3, 5], "trainer.no_compute": (0.5, 10.0)}, samples=500)
    found.to_pandas()       found.pareto       found.recommended        found.recommended.thresholds

A list is tried value by value, all combinations; a pair (low, high) is a range from which ``samples`` settings are drawn, evenly in the
logarithm, seeded. Combinations that contradict themselves are left out and counted. The settings that the runs began with are always row 0.
Ctrl-C keeps what is done. Results do not depend on the number of processes. Leaves out: settings that only lead to reports.
"""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..core.thresholds import PATHS, Thresholds
from ..errors import ConfigError
from ..tables import Table
from .given import check_changes, check_count, runs_of
from .reducing import floors, reduced
from .run import Run
from .scoring import Case, Score, pareto, total

if TYPE_CHECKING:
    import pandas

_REPORTS_ONLY = frozenset({
    "trainer.advantage", "trainer.optimizer", "trainer.snapshot", "trainer.publish", "trainer.straggler", "rollout.pull",
    "rollout.straggler", "management.lag", "keeper.lag", "keeper.checkpoint",
})  # fmt: skip
_MEASURED_LIVE = frozenset({"trainer.activity_floor", "job.process_group"})
_BATCH = 4
"""Settings that a process takes at a time."""


@dataclass(frozen=True)
class Setting:
    """One row: what was changed, all thresholds, and the score."""

    changes: dict[str, Any]
    thresholds: Thresholds
    score: Score

    def code(self) -> str:
        """The change as code for a live job: all at once, as some settings contradict each other while only one of them is set."""
        lines = "".join(f'    "{path}": {value!r},\n' for path, value in self.changes.items())
        return f"job.thresholds.update({{\n{lines}}})" if lines else "# as recorded"

    def __repr__(self) -> str:
        score = self.score
        changed = ", ".join(f"{path} = {_short(value)}" for path, value in self.changes.items())
        near = f"; what was harmless reached {100 * score.reach:.0f}% of a limit ({score.reach_of})" if score.reach_of else ""
        return (f"<{changed or 'as recorded'}: {len(score.delays)} of {score.faults} faults detected, {len(score.needless)} false alarms, "
                f"{score.cost:.1f} s lost{near}>")  # fmt: skip


@dataclass(frozen=True, eq=False)
class Sweep:
    settings: tuple[Setting, ...]
    """Those that were scored. The first: as the runs were recorded."""
    complete: bool
    """False: it was interrupted."""
    skipped: int
    """Combinations that contradict themselves."""
    why_skipped: str
    """What is wrong with the first of them; empty: there is none."""
    measured: int
    """Recoveries from which the cost of a restart was taken; 0: it is assumed."""

    @cached_property
    def pareto(self) -> list[Setting]:
        """Those that no other beats in both false alarms per hour and mean delay, by rate."""
        on = pareto((setting.score.alarms_per_hour, setting.score.mean_late) for setting in self.settings)
        front = [setting for setting, best in zip(self.settings, on, strict=True) if best]
        return sorted(front, key=lambda setting: (setting.score.alarms_per_hour, setting.score.mean_late))

    @cached_property
    def recommended(self) -> Setting:
        """Of those that miss the fewest faults, the one that costs least; of equals, the one whose limits were least nearly reached."""
        return min(self.settings, key=lambda s: (len(s.score.missed), round(s.score.cost, 3), s.score.reach))

    def table(self) -> Table:
        paths = sorted({path for setting in self.settings for path in setting.changes})
        front = {id(setting) for setting in self.pareto}
        return Table({**{path: setting.thresholds.get(path) for path in paths}, **setting.score.row(), "pareto": id(setting) in front,
                      "recommended": setting is self.recommended} for setting in self.settings)  # fmt: skip

    def to_pandas(self) -> pandas.DataFrame:
        """A row per setting. Raises MissingExtra without pandas."""
        return self.table().to_pandas()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __repr__(self) -> str:
        part = "" if self.complete else ", interrupted"
        part += f", {self.skipped} left out that contradict themselves ({self.why_skipped})" if self.skipped else ""
        return f"<Sweep of {len(self.settings)} settings{part}; recommended {self.recommended!r}>"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def sweep(runs: Run | Sequence[Run], grid: Mapping[str, Any], *, base: Thresholds | None = None, samples: int = 200, seed: int = 0,
          processes: int = 2, progress: bool = True) -> Sweep:  # fmt: skip
    """Scores the settings of ``grid`` (path -> list of values, or (low, high)) on all ``runs``.

    ``base``: what is changed; by default the settings that the first run began with. Raises ConfigError.
    """
    runs = runs_of(runs)
    check_changes("grid", grid)
    for name, value, least in (("samples", samples, 1), ("processes", processes, 1), ("seed", seed, 0)):
        check_count(name, value, least)
    base = base or runs[0].thresholds[0][1]
    tried, skipped, why = drawn_settings(base, grid, samples, seed)
    low = floors(thresholds for _, thresholds in tried)
    cases = [Case(run, reduced(run.recording, low)) for run in runs]
    scores: dict[int, Score] = {}
    interrupted = False
    try:
        for place, score in _shown(_scored(cases, [thresholds for _, thresholds in tried], processes), len(tried), progress):
            scores[place] = score
    except KeyboardInterrupt:
        interrupted = True
        if not scores:
            raise
    done = tuple(Setting(tried[i][0], tried[i][1], scores[i]) for i in sorted(scores))
    return Sweep(done, not interrupted, skipped, why, sum(case.costs.measured for case in cases))


def drawn_settings(base: Thresholds, grid: Mapping[str, Any], samples: int,
                   seed: int) -> tuple[list[tuple[dict[str, Any], Thresholds]], int, str]:  # fmt: skip
    """((changes, all thresholds) of each, ``base`` first; how many contradicted themselves; why the first did). Raises ConfigError."""
    lists: dict[str, list[Any]] = {}
    ranges: dict[str, tuple[float, float]] = {}
    for path, values in grid.items():
        if path in _REPORTS_ONLY | _MEASURED_LIVE:
            why = "leads to reports only" if path in _REPORTS_ONLY else "is measured by the live job, not by the detector"
            raise ConfigError("grid", path, f"{why}: a sweep scores failures")
        if isinstance(values, tuple):
            if len(values) != 2 or not all(isinstance(base.parse(path, value), float) for value in values):
                raise ConfigError(path, values, "a range must be (low, high), both plain values")
            low, high = (base.parse(path, value) for value in values)
            if not low < high:
                raise ConfigError(path, values, "a range must be (low, high) with low < high")
            ranges[path] = low, high
        elif isinstance(values, list) and values:
            lists[path] = [base.parse(path, value) for value in values]
        else:
            base.get(path) if path in PATHS else base.parse(path, values)
            raise ConfigError(path, values, "must be a list of values, or a pair (low, high)")
    dice = random.Random(seed)
    if ranges:
        drawn = [{path: dice.choice(values) for path, values in lists.items()}
                 | {path: math.exp(dice.uniform(math.log(a), math.log(b))) for path, (a, b) in ranges.items()}
                 for _ in range(samples)]  # fmt: skip
    else:
        drawn = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    tried: list[tuple[dict[str, Any], Thresholds]] = [({}, base)]
    skipped, why = 0, ""
    for changes in drawn:
        try:
            thresholds = base.updated(changes)
        except ConfigError as error:
            skipped, why = skipped + 1, why or str(error)
            continue
        if thresholds != base:
            tried.append((changes, thresholds))
    return tried, skipped, why


_cases: list[Case] = []
"""Of the sweep under way: what worker processes inherit."""


def _scored(cases: list[Case], settings: list[Thresholds], processes: int) -> Iterator[tuple[int, Score]]:
    """(place, score) as they come."""
    if processes == 1 or len(settings) <= _BATCH:
        for place, thresholds in enumerate(settings):
            yield place, total([case.score(thresholds) for case in cases])
        return
    _cases[:] = cases
    gc.freeze()  # else each worker copies what it never changes
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _ignore_interrupts)
    try:
        todo = [pool.submit(_batch, start, settings[start:start + _BATCH]) for start in range(0, len(settings), _BATCH)]
        for future in as_completed(todo):
            yield from future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        gc.unfreeze()
        _cases.clear()


def _batch(start: int, settings: list[Thresholds]) -> list[tuple[int, Score]]:
    return [(start + i, total([case.score(thresholds) for case in _cases])) for i, thresholds in enumerate(settings)]


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _shown(scores: Iterator[tuple[int, Score]], count: int, progress: bool) -> Iterator[tuple[int, Score]]:
    from rich.progress import Progress

    with Progress(disable=not progress, transient=True) as bar:
        task = bar.add_task(f"{count} settings", total=count)
        for found in scores:
            yield found
            bar.advance(task)
