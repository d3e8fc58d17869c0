"""Recorded runs made harder: slower as a whole, unsteady, or put together from pieces with long tails. Pure; equal seeds give equal runs.

    stretch(run, 100)                   the same story, told a hundred times slower: do settings found at 4 s steps hold at 400 s?
    jitter(run, seed=1)                 each few seconds take up to twice, or half, as long as they did
    splice(pieces, 20, seed=1)          twenty pieces one after the other, each drawn, and slowed down by a long tail

Promises: the result is a log that a detector can take. All durations follow one warp of the time axis: phases, waits, faults, restarts.
A sample's ages become what they would be then, and samples are put in between as a node agent logs them (`KEEP_ALIVE`), with counters that
rise evenly; what would need more than `SAMPLES` is refused. An event loop turns as often in a slow job as in a fast one: its age follows
only while a fault or disturbance is on it.
Leaves out: a pause in activity that came and went between two samples, of which the log knows nothing; what the live job said and asked,
which is kept, was said of another run: replay a stressed run with thresholds.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from ..core import events as ev
from ..core.thresholds import KEEP_ALIVE
from ..errors import ConfigError
from .given import check_count, check_run, runs_of
from .outcomes import Truths
from .recording import ENDED, STALE, aged
from .run import Run

Warp = Callable[[float], float]
"""From host time to host time, rising."""
_WORK = ("phase_age", "active_age", "progress_age")
_SECONDS = ("seconds", "commit_seconds")
_TIMES = ("due", "seen", "onset")
_PIECE = 4.0
"""Seconds whose length `jitter` draws at once."""
_MOST = 2.0
_TAIL = 1.5
"""Shape of the Pareto distribution of a piece's length: below 2 its variance is infinite."""
_LONGEST = 10.0
_DRAWS = 10_000
SAMPLES = 2_500_000
"""What a run may be slowed down to: a minute of eleven roles by 3,700, an hour of 64 by ten; minutes of work, a gigabyte and a half."""


def stretch(run: Run, factor: float) -> Run:
    """Everything takes ``factor`` times as long. Raises ConfigError."""
    check_run(run)
    _check_number("factor", factor, "must be a finite number above 0", 0.0)
    most = max(1.0, SAMPLES / max(1.0, _samples([(run, 1.0)])))
    if factor > most:
        raise ConfigError("factor", factor, f"must be at most {most:.6g} for this run: more than {SAMPLES:,} samples are not made")
    begin = run.begin
    return warped(run, lambda t: begin + (t - begin) * factor, f"{run.name} x{factor:g}")


def jitter(run: Run, seed: int, most: float = _MOST) -> Run:
    """Every few seconds take between 1/``most`` and ``most`` times as long, evenly in the logarithm. Raises ConfigError."""
    check_run(run)
    check_count("seed", seed, 0)
    _check_number("most", most, "must be a finite number of at least 1", 1.0, low_too=True)
    dice = random.Random(seed)
    begin = run.begin
    if (count := _samples([(run, most)])) > max(SAMPLES, _samples([(run, 1.0)])):
        raise ConfigError("most", most, f"could make {count:.3g} samples of this run, and more than {SAMPLES:,} are not made")
    knots = [begin + _PIECE * i for i in range(2 + int((run.entries[-1].t - begin) / _PIECE))]
    slopes = [math.exp(dice.uniform(-math.log(most), math.log(most))) for _ in knots]
    places = [begin]
    for slope in slopes:
        places.append(places[-1] + _PIECE * slope)

    def warp(t: float) -> float:
        i = max(0, bisect.bisect_right(knots, t) - 1)
        return places[i] + (t - knots[i]) * slopes[i]

    return warped(run, warp, f"{run.name} jittered {seed}")


def splice(pieces: Sequence[Run], count: int, seed: int) -> Run:
    """``count`` draws from ``pieces`` (whole runs or excerpts), each slowed down by a Pareto-distributed factor, at most `_LONGEST`.

    A few are several times as long as they were: tools that take long, nodes that are slow; faults may follow each other at once.
    """
    pieces = runs_of(pieces, "pieces")
    check_count("seed", seed, 0)
    check_count("count", count, 1, _DRAWS)
    dice = random.Random(seed)
    drawn = [(dice.choice(pieces), min(_LONGEST, dice.paretovariate(_TAIL))) for _ in range(count)]
    if (size := _samples(drawn)) > SAMPLES:
        raise ConfigError("count", count, f"would make {size:.3g} samples of these pieces, and more than {SAMPLES:,} are not made")
    return Run.concatenate(*(stretch(*each) for each in drawn), name=f"{count} pieces, seed {seed}")


def _samples(drawn: Sequence[tuple[Run, float]]) -> float:
    """About how many there are in runs that are slowed down: one per role and `KEEP_ALIVE`."""
    return sum((run.entries[-1].t - run.begin) * factor * max(1, len(run.roles)) / KEEP_ALIVE for run, factor in drawn)


def _check_number(name: str, value: Any, allowed: str, low: float, low_too: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not (value > low or (low_too and value == low)):
        raise ConfigError(name, value, allowed)


def warped(run: Run, warp: Warp, name: str) -> Run:
    """With every host time ``t`` at ``warp(t)``."""
    truths = Truths(run)
    found: list[ev.Entry] = []
    last: dict[tuple[str, int], ev.Entry] = {}

    def disturbed(life: tuple[str, int], t: float) -> bool:
        return any(mark.covers(*life, t) for mark in truths.of(life[0]))

    def until(life: tuple[str, int], t: float) -> None:
        """The keep-alives from a life's last sample to its end."""
        if (before := last.pop(life, None)) is not None and t > before.t:
            found.extend(_between(before, aged(before, t - before.t), warp, disturbed(life, before.t)))

    for entry in run.entries:
        event = entry.event
        if isinstance(event, ev.RoleSample):
            life = event.role, event.incarnation
            hit = disturbed(life, entry.t)
            if (before := last.get(life)) is not None:
                found += _between(before, entry, warp, hit)
            last[life] = entry
            found.append(_sample(entry, warp, hit))
            continue
        found.append(_moved(entry, warp))
        if isinstance(event, ev.ProcessExited) or (isinstance(event, ev.RoleStateChanged) and event.new in ENDED):
            until((event.role, event.incarnation), entry.t)
    for life in list(last):
        until(life, run.entries[-1].t)
    found.sort(key=lambda entry: entry.t)  # stable
    entries = [msgspec.structs.replace(entry, seq=number, chain="") for number, entry in enumerate(found, 1)]
    marks = tuple(msgspec.structs.replace(mark, start=warp(mark.start), end=warp(mark.end), lasts=_lasts(mark.start, mark.lasts, warp))
                  for mark in run.annotations)  # fmt: skip
    return dataclasses.replace(run, name=name, entries=entries, window=(warp(run.window[0]), warp(run.window[1])), annotations=marks)


def _lasts(start: float, lasts: float, warp: Warp) -> float:
    return warp(start + lasts) - warp(start) if math.isfinite(lasts) else lasts


def _moved(entry: ev.Entry, warp: Warp) -> ev.Entry:
    event = entry.event
    changes: dict[str, Any] = {name: warp(entry.t) - warp(entry.t - getattr(event, name)) for name in _SECONDS
                               if isinstance(getattr(event, name, None), float)}  # fmt: skip
    if isinstance(event, ev.Verdict):
        changes |= {name: warp(getattr(event, name)) for name in _TIMES}
    elif isinstance(event, ev.FaultPlanned) and isinstance(seconds := event.options.get("seconds"), int | float):
        changes["options"] = event.options | {"seconds": warp(entry.t + seconds) - warp(entry.t)}
    elif isinstance(event, ev.StepMetrics):
        changes["phase_seconds"] = {name: warp(entry.t) - warp(entry.t - took) for name, took in event.phase_seconds.items()}
    moved = warp(entry.t)
    event = msgspec.structs.replace(event, **changes) if changes else event
    return msgspec.structs.replace(entry, t=moved, at=entry.at + moved - entry.t, event=event)


def _sample(entry: ev.Entry, warp: Warp, disturbed: bool) -> ev.Entry:
    sample, t = entry.event, entry.t
    assert isinstance(sample, ev.RoleSample)
    ages = {name: warp(t) - warp(t - getattr(sample, name)) for name in (*_WORK, *(("loop_age", "lag") if disturbed else ()))}
    moved = warp(t)
    return msgspec.structs.replace(entry, t=moved, at=entry.at + moved - t, event=msgspec.structs.replace(sample, **ages))


def _between(before: ev.Entry, after: ev.Entry, warp: Warp, disturbed: bool) -> Iterator[ev.Entry]:
    """The keep-alives that a node agent would have logged between two samples of a life that were further apart then."""
    first, last = _sample(before, warp, disturbed), _sample(after, warp, disturbed)
    gap, was = last.t - first.t, after.t - before.t
    old, new = first.event, last.event
    assert isinstance(old, ev.RoleSample) and isinstance(new, ev.RoleSample)
    if was > STALE:
        return  # the agent itself did not look
    names = ("active_age", "progress_age", *(("loop_age",) if disturbed else ()))
    ticks = _Ticks(before, after)
    for i in range(1, math.ceil(gap / KEEP_ALIVE - 1e-9)):
        later = i * KEEP_ALIVE
        ages = {name: max(0.0, getattr(new, name) - (gap - later)) for name in names}
        made, latest = ticks.at(before.t + was * later / gap)
        if latest is not None and old.pending:
            ages["progress_age"] = max(0.0, first.t + later - warp(latest))
        event = msgspec.structs.replace(old, progress=old.progress + made, cpu=old.cpu + (new.cpu - old.cpu) * later / gap,
                                        phase_age=old.phase_age + later, **ages)  # fmt: skip
        yield msgspec.structs.replace(first, t=first.t + later, at=first.at + later, event=event)


class _Ticks:
    """The counter between two samples: what was made was made at even distances, the last of it when the later sample says."""

    def __init__(self, before: ev.Entry, after: ev.Entry) -> None:
        old, new = before.event, after.event
        assert isinstance(old, ev.RoleSample) and isinstance(new, ev.RoleSample)
        self.made = new.progress - old.progress
        self.start, self.end = before.t - old.progress_age, after.t - new.progress_age

    def at(self, t: float) -> tuple[int, float | None]:
        """(made until then, when the last of it was)."""
        if self.made <= 0 or self.end <= self.start:
            return 0, None
        count = min(self.made, max(0, int(self.made * (t - self.start) / (self.end - self.start))))
        return count, self.start + (self.end - self.start) * count / self.made
