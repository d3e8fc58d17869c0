"""Many settings on some runs: `sweep`, a table of what each is worth, and the one to take.

    found = robustrl.sweep(runs, {"rollout.no_tokens": [3, 4, 5], "trainer.no_compute": (0.6, 5.0)}, samples=500,
                           base=Thresholds.lab())
    found.to_pandas()       found.pareto       found.recommended        found.recommended.thresholds

A list is tried value by value, all combinations; a pair (low, high) is a range from which ``samples`` settings are drawn, evenly in the
logarithm, seeded. Combinations that contradict themselves are left out and counted; where all do, that is an error. The base, by default
the settings that the first run began with, is always row 0. Ctrl-C keeps what is done, and what the processes are at. Results do not
depend on the number of processes. Leaves out: settings that only lead to reports.
"""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..core.thresholds import PATHS, Thresholds
from ..errors import ConfigError, counted
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
SETTINGS = 100_000
"""Of one sweep, at most: an hour of work on ten minutes of a job."""
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
        return f"job.thresholds.update({{\n{lines}}})" if lines else "# the base: nothing is changed"

    def __repr__(self) -> str:
        score = self.score
        changed = ", ".join(f"{path} = {_short(value)}" for path, value in self.changes.items())
        near = f"; what was harmless reached {100 * score.reach:.0f}% of a limit ({score.reach_of})" if score.reach_of else ""
        return (f"<{changed or 'the base'}: {len(score.delays)} of {score.faults} faults detected, "
                f"{counted(len(score.needless), 'false alarm')}, "
                f"{score.cost:.1f} s lost{near}>")  # fmt: skip


@dataclass(frozen=True, eq=False)
class Sweep:
    settings: tuple[Setting, ...]
    """Those that were scored. The first: the base, of which the others are changes."""
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
        return f"<Sweep of {counted(len(self.settings), 'setting')}{part}; recommended {self.recommended!r}>"


def _each(count: int) -> str:
    return "its one setting" if count == 1 else f"each of its {counted(count, 'setting')}"


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
    if base is not None and not isinstance(base, Thresholds):
        raise ConfigError("base", base, "must be Thresholds, e.g. Thresholds.lab()")
    other = "" if base else "; the others are those that the first run began with: base=Thresholds.lab(), say, takes others"
    base = base or runs[0].thresholds[0][1]
    tried, skipped, why = drawn_settings(base, grid, samples, seed)
    if skipped and len(tried) == 1:
        raise ConfigError("grid", grid, f"{_each(skipped)} contradicts itself{'; the first' if skipped > 1 else ''}: {why}{other}")
    low = floors(thresholds for _, thresholds in tried)
    cases = [Case(run, reduced(run.recording, low)) for run in runs]
    scores: dict[int, Score] = {}
    interrupted = False
    try:
        with _bar(len(tried), progress) as advance:
            _score(cases, [thresholds for _, thresholds in tried], processes, scores, advance)
    except KeyboardInterrupt:
        interrupted = True
        if not scores:
            raise
    done = tuple(Setting(tried[i][0], tried[i][1], scores[i]) for i in sorted(scores))
    return Sweep(done, not interrupted, skipped, why, sum(case.costs.measured for case in cases))


def drawn_settings(base: Thresholds, grid: Mapping[str, Any], samples: int,
                   seed: int) -> tuple[list[tuple[dict[str, Any], Thresholds]], int, str]:  # fmt: skip
    """((changes, all thresholds) of each, ``base`` first; how many contradicted themselves; why the first did). Raises ConfigError."""
    lists: dict[str, Sequence[Any]] = {}
    ranges: dict[str, tuple[float, float]] = {}
    for path, values in grid.items():
        if path in _REPORTS_ONLY | _MEASURED_LIVE:
            why = "leads to reports only" if path in _REPORTS_ONLY else "is measured by the live job, not by the detector"
            raise ConfigError("grid", path, f"{why}: a sweep scores failures")
        if isinstance(values, tuple):
            if len(values) != 2 or not all(isinstance(base.parse(path, _plain(value)), float) for value in values):
                raise ConfigError(path, values, "a range must be (low, high), both plain values")
            low, high = (base.parse(path, _plain(value)) for value in values)
            if not low < high:
                raise ConfigError(path, values, "a range must be (low, high) with low < high")
            ranges[path] = low, high
        elif (axis := _axis(values)) is not None and len(axis):
            lists[path] = axis
        else:
            base.get(path) if path in PATHS else base.parse(path, values)
            raise ConfigError(path, values, "must be a list of values, or a pair (low, high)")
    count = samples if ranges else math.prod(map(len, lists.values()))
    if (longest := max([count, *map(len, lists.values())])) > SETTINGS:
        raise ConfigError("settings of the grid", longest, f"must be at most {SETTINGS:,}; a range (low, high) draws samples = {samples}")
    lists = {path: [base.parse(path, _plain(value)) for value in axis] for path, axis in lists.items()}
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


def _axis(values: Any) -> Sequence[Any] | None:
    """A list, a range, or what NumPy and pandas make of one; None: none of these."""
    if isinstance(values, list | range):
        return values
    if hasattr(values, "tolist") and getattr(values, "ndim", 0) == 1:
        found: list[Any] = values.tolist()
        return found
    return None


def _plain(value: Any) -> Any:
    """Of a NumPy scalar the number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


_cases: list[Case] = []
"""Of the sweep under way: what worker processes inherit."""


def _score(cases: list[Case], settings: list[Thresholds], processes: int, scores: dict[int, Score],
           advance: Callable[[int], None]) -> None:  # fmt: skip
    """Adds to ``scores`` by place, as they come; when it is interrupted, those too that the processes were at."""
    if processes == 1 or len(settings) <= _BATCH:
        for place, thresholds in enumerate(settings):
            scores[place] = total([case.score(thresholds) for case in cases])
            advance(1)
        return
    _cases[:] = cases
    gc.freeze()  # else each worker copies what it never changes
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _ignore_interrupts)
    todo: list[Future[list[tuple[int, Score]]]] = []
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a Ctrl-C may reach workers too, before they ignore it
        try:
            todo += (pool.submit(_batch, start, settings[start:start + _BATCH]) for start in range(0, len(settings), _BATCH))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for future in as_completed(todo):
            found = future.result()
            scores.update(found)
            advance(len(found))
    finally:
        try:
            pool.shutdown(cancel_futures=True)
            for future in todo:
                if future.done() and not future.cancelled() and future.exception() is None:
                    scores.update(future.result())
        finally:
            gc.unfreeze()
            _cases.clear()


def _batch(start: int, settings: list[Thresholds]) -> list[tuple[int, Score]]:
    return [(start + i, total([case.score(thresholds) for case in _cases])) for i, thresholds in enumerate(settings)]


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _bar(count: int, progress: bool) -> Iterator[Callable[[int], None]]:
    from rich.progress import Progress

    with Progress(disable=not progress, transient=True) as bar:
        task = bar.add_task(counted(count, "setting"), total=count)
        yield lambda more: bar.advance(task, more)
