"""A run made ready for other settings: what the world did, without what the supervisor of that day said and asked.

A replay with other settings meets three questions that the log does not answer by itself, and answers them from the log:

- *When is a limit seen to be passed?* A node agent logs a sample when an age passes one of its marks. A sample between two logged ones is
  known wherever the later one shows that nothing had happened since the earlier one: see `Recording.between`.
- *Would a heartbeat have been answered?* The loop's next turn answers it, and samples show when the loop turned: see `Recording.answer`.
- *What would have come had nobody stepped in?* The live job restarted what it had called failed. The places are `interventions`.

Pure. Leaves out: whether an answer is lost on its way (a partition); a loop that turned is taken to have answered.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from ..core import events as ev
from ..core.fault_book import ENDS
from ..core.roles import QUIET, Phase
from ..core.signals import GENERATING, SUPERVISOR
from ..core.thresholds import KEEP_ALIVE, LEAST
from .run import Mark, Run

AGES = ("phase_age", "active_age", "progress_age", "loop_age")
_SAID = (ev.Verdict, ev.Tick, ev.HeartbeatSent, ev.HeartbeatAnswered, ev.ThresholdsChanged)
_UNHEARD = (ev.TrajectoriesStarted, ev.TrajectoriesMoved, ev.TrajectoriesFinished, ev.TrajectoriesConsumed, ev.TrajectoriesDropped,
            ev.TokensJournalled, ev.EvaluationDone, ev.PullProgress, ev.WarningRaised, ev.FaultPlanned, ev.FaultInjected, ev.FaultEnded,
            ev.FaultRevealed, ev.RecoverySettings, ev.VersionAnnounced, ev.PullSourceSwitched, ev.PullDiscarded)  # fmt: skip
"""What no detector reads; a detector of one's own may not know what was injected."""
_STEPPED_IN = ("failed", "restarting")
_STEPS = (ev.ProcessExited, ev.ErrorRaised, ev.RestartDecided, ev.RoleStateChanged)
ENDED = ("stopped", "retired", *_STEPPED_IN)
_SAME_SPELL = 0.05
"""Seconds by which an age may have grown more than the time."""
STALE = 1.5 * KEEP_ALIVE
"""Seconds between two samples from which on the node agent itself did not look."""
_TURNS = 0.5
"""Seconds: the supervisor's loop turns more often than that, or it does not run."""
Life = tuple[str, int]


class Intervention(NamedTuple):
    t: float
    mark: Mark
    life: Life
    sample: ev.Entry | None
    """The last one of that life before; None: it had ended by itself, and what the live job did was to replace it."""


class Turns(NamedTuple):
    """Of one life's loop, by sample: when it was logged, when the loop had last turned, the longest it took since the sample before."""

    seen: list[float]
    turned: list[float]
    lag: list[float]


@dataclass
class Recording:
    entries: list[ev.Entry]
    before: list[float]
    """For each entry that is a sample: time of the life's sample before it; else, and for the first one, -infinity."""
    end: float
    turns: dict[Life, Turns]
    silent: list[tuple[float, float]]
    """When the supervisor could not have spoken."""
    supervisors: list[tuple[float, int]]
    """(ready, incarnation)."""
    interventions: list[Intervention]
    started: dict[Life, ev.RoleStarted]
    over: dict[Life, float]
    """When a life ended or was ended; infinite: it did not."""
    ends: dict[Life, float]
    """When a life ended by itself, or was said to have ended."""
    called: frozenset[Life]
    """Those that the live job called failed: without that nobody would have replaced them."""
    between: list[tuple[float, ev.Entry, float]] = field(default_factory=list)
    """(time of the sample before, sample, seconds by which ages grew more than the time between the two: its way was shorter) where a limit
    may have been passed between them, in the order of the first."""
    others: list[int] = field(default_factory=list)
    """Places of the entries that are no samples."""
    whole: Recording | None = None
    """What this one was reduced from."""
    reductions: dict[Any, Recording] = field(default_factory=dict)
    """By floors; see reducing.py."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Node agent -> the source that its samples have here, where that is another."""

    @cached_property
    def _places(self) -> tuple[dict[Life, list[int]], dict[Life, list[int]]]:
        """Of all samples, by whom they are about and by who took them; in one go, for there are many."""
        about, by = defaultdict[Life, list[int]](list), defaultdict[Life, list[int]](list)
        for i, entry in enumerate(self.entries):
            event = entry.event
            if isinstance(event, ev.RoleSample):
                about[event.role, event.incarnation].append(i)
                by[entry.source, entry.incarnation].append(i)
        return dict(about), dict(by)

    @cached_property
    def samples(self) -> dict[Life, list[int]]:
        """Places of each life's samples."""
        return {life: places for life, places in self._places[0].items() if life in self.started}

    @property
    def heard(self) -> dict[Life, list[int]]:
        """Places of each node agent's words about roles."""
        return self._places[1]

    @cached_property
    def peaks(self) -> dict[Life, tuple[list[float], list[float], list[float]]]:
        """Of each sample the ages that a failure can depend on: idle at work, at work without progress, loop not turning. 0: none."""
        found, train, entries = {}, str(Phase.TRAIN), self.entries
        generating = frozenset(map(str, GENERATING))
        for life, places in self.samples.items():
            samples: list[Any] = [entries[i].event for i in places]
            loop = [sample.loop_age for sample in samples]
            idle, stuck = [0.0] * len(samples), [0.0] * len(samples)
            for i, sample in enumerate(samples):
                if (phase := sample.phase) == train:
                    idle[i], stuck[i] = min(sample.active_age, sample.phase_age), sample.progress_age
                elif phase in generating and sample.pending > 0:
                    stuck[i] = sample.progress_age
            found[life] = idle, stuck, loop
        return found

    def answer(self, life: Life, asked: float) -> float | None:
        """When a question that reached the loop at ``asked`` is answered; None: never, as far as the log goes.

        Between two samples the loop turned at least every ``lag`` seconds: half of that is what a question waits on average.
        """
        turns = self.turns.get(life)
        if turns is None:
            return None
        place = bisect.bisect_right(turns.seen, asked)
        for i in range(place, len(turns.seen)):
            if turns.turned[i] >= asked:
                first = min(turns.turned[i], asked + turns.lag[i] / 2) if i == place else turns.turned[i]
                return first if first < self.over.get(life, math.inf) else None
        return None

    def first_sample(self, life: Life, t: float) -> ev.Entry | None:
        """The life's first one after ``t``."""
        whole = self.whole or self
        place = bisect.bisect_right(self.turns[life].seen, t) if life in self.turns else 0
        if life not in whole.samples or place >= len(whole.samples[life]):
            return None
        entry = whole.entries[whole.samples[life][place]]
        return msgspec.structs.replace(entry, source=self.renamed.get(entry.source, entry.source))

    def speaks(self, t: float) -> float:
        """The first time from ``t`` on at which the supervisor can speak."""
        if not self.supervisors or t < self.supervisors[0][0]:
            return self.supervisors[0][0] if self.supervisors else math.inf
        place = bisect.bisect_right(self.silent, (t, math.inf)) - 1
        return self.silent[place][1] if place >= 0 and self.silent[place][1] > t else t

    def supervisor(self, t: float) -> int:
        """Its incarnation; 1: the log knows of none."""
        return 1 if not self.supervisors else self.supervisors[max(0, bisect.bisect_right(self.supervisors, (t, math.inf)) - 1)][1]


def record(run: Run) -> Recording:
    ends, stepped = _ends(run.entries)
    entries: list[ev.Entry] = []
    before: list[float] = []
    last: dict[Life, float] = {}
    turns: dict[Life, Turns] = {}
    started: dict[Life, ev.RoleStarted] = {}
    over = {**ends, **stepped}
    lives: dict[str, int] = {}
    muted: set[Life] = set()
    for entry in run.entries:
        event = entry.event
        if isinstance(event, ev.RoleSample):
            life = event.role, event.incarnation
            entries.append(entry)
            before.append(last.get(life, -math.inf))
            last[life] = entry.t
            seen = turns.setdefault(life, Turns([], [], []))
            seen.seen.append(entry.t)
            seen.turned.append(entry.t - event.loop_age)
            seen.lag.append(max(event.lag, event.loop_age))
            continue
        if isinstance(event, ev.RoleStarted):
            if event.role in lives:
                over.setdefault((event.role, lives[event.role]), entry.t)
            lives[event.role] = event.incarnation
            started[event.role, event.incarnation] = event
        elif isinstance(event, ev.RoleStateChanged) and event.new in ENDED:
            over.setdefault((event.role, event.incarnation), entry.t)
        of = getattr(event, "role", ""), getattr(event, "incarnation", 0)
        if of in stepped and entry.t >= stepped[of] and isinstance(event, _STEPS):
            if of not in muted:  # what the live job ended did not end by itself
                muted.add(of)
                entries.append(_muted(entry, of))
                before.append(-math.inf)
            continue
        if not isinstance(event, _SAID + _UNHEARD):
            entries.append(entry)
            before.append(-math.inf)
    others = [i for i, entry in enumerate(entries) if not isinstance(entry.event, ev.RoleSample)]
    silent, supervisors = _silences(run.entries, ends)
    called = frozenset((verdict.role, verdict.incarnation) for verdict in run.verdicts if verdict.kind == "failed")
    interventions = _interventions(run, stepped, {life: over[life] for life in ends if life in called})
    return Recording(entries, before, run.entries[-1].t, turns, silent, supervisors, interventions, started, over, ends,
                     called, _between(entries, before), others)  # fmt: skip


def _ends(entries: Sequence[ev.Entry]) -> tuple[dict[Life, float], dict[Life, float]]:
    """When lives ended by themselves (or said so), and when the live job ended those that had not.

    What exits after it was called failed was ended by the live job, even where the log does not say that it was to be.
    """
    condemned: set[Life] = set()
    ends: dict[Life, float] = {}
    stepped: dict[Life, float] = {}
    places: dict[str, tuple[int, str]] = {}
    for entry in entries:
        event = entry.event
        if isinstance(event, ev.RoleSample):
            continue
        if isinstance(event, ev.RoleStarted):
            places[event.role] = event.incarnation, event.node
        elif isinstance(event, ev.Verdict):
            if event.kind == "failed" and event.rule not in ENDS:
                condemned.add((event.role, event.incarnation))
        elif isinstance(event, ev.ProcessExited | ev.ErrorRaised):
            life = event.role, event.incarnation
            if life not in stepped and life not in ends:
                (stepped if life in condemned else ends)[life] = entry.t
        elif isinstance(event, ev.RestartDecided) or (isinstance(event, ev.RoleStateChanged) and event.new in _STEPPED_IN):
            if (event.role, event.incarnation) not in ends:
                stepped.setdefault((event.role, event.incarnation), entry.t)
        elif isinstance(event, ev.NodeLost):
            for role, (number, node) in places.items():
                if node == event.node and (role, number) not in stepped:
                    ends.setdefault((role, number), entry.t)
    return ends, stepped


def _muted(entry: ev.Entry, life: Life) -> ev.Entry:
    event = ev.RoleStateChanged(role=life[0], incarnation=life[1], old="healthy", new="restarting", reason="the live job stepped in")
    return msgspec.structs.replace(entry, source=ev.HOST, incarnation=1, event=event)


def at_work(sample: ev.RoleSample) -> bool:
    """Whether ages other than the loop's are held against limits; see core/sampling.py."""
    phase = Phase(sample.phase)
    return phase not in QUIET and phase is not Phase.RUNNING


def aged(entry: ev.Entry, seconds: float, growing: Sequence[str] = AGES) -> ev.Entry:
    """The sample as it would have been so many seconds later, or, negative, earlier, if nothing happened but that ages grow."""
    sample = entry.event
    assert isinstance(sample, ev.RoleSample)
    ages = {name: max(0.0, getattr(sample, name) + seconds) for name in growing}
    lag = max(sample.lag, ages.get("loop_age", 0.0)) if seconds > 0 else ages.get("loop_age", sample.loop_age)
    event = msgspec.structs.replace(sample, lag=lag, **ages)
    return msgspec.structs.replace(entry, t=entry.t + seconds, at=entry.at + seconds, event=event)


def _between(entries: Sequence[ev.Entry], before: Sequence[float]) -> list[tuple[float, ev.Entry, float]]:
    found = []
    last: dict[Life, ev.Entry] = {}
    for entry, earlier in zip(entries, before, strict=True):
        sample = entry.event
        if not isinstance(sample, ev.RoleSample):
            continue
        old = last.get(life := (sample.role, sample.incarnation), entry)
        last[life] = entry
        if entry.t - earlier > STALE:
            continue
        oldest = max(sample.loop_age, max(sample.phase_age, sample.active_age, sample.progress_age) if at_work(sample) else 0.0)
        if oldest >= LEAST:
            grown = [getattr(sample, name) - getattr(old.event, name) - (entry.t - old.t) for name in AGES]
            found.append((earlier, entry, max([0.0, *(more for more in grown if more < _SAME_SPELL)])))
    found.sort(key=lambda item: item[0])
    return found


def _silences(entries: Sequence[ev.Entry], ends: dict[Life, float]) -> tuple[list[tuple[float, float]], list[tuple[float, int]]]:
    ready: list[tuple[float, int]] = []
    silent: list[tuple[float, float]] = []
    begun = math.inf
    for entry in entries:
        event = entry.event
        if isinstance(event, ev.RoleStarted) and event.role == SUPERVISOR:
            begun = entry.t
        elif isinstance(event, ev.RoleReady) and event.role == SUPERVISOR:
            if ready:
                silent.append((min(begun, ends.get((SUPERVISOR, ready[-1][1]), begun)), entry.t))
            ready.append((entry.t, event.incarnation))
        elif isinstance(event, ev.ClockGap) and entry.source in (SUPERVISOR, ev.HOST):
            silent.append((entry.t - event.seconds, entry.t))
        elif isinstance(event, ev.RoleSample) and event.role == SUPERVISOR and event.loop_age > _TURNS:
            silent.append((entry.t - event.loop_age, entry.t))
    if not ready:  # of a log in part: from its first word on
        ready = [(entry.t, entry.incarnation) for entry in entries if entry.source == SUPERVISOR][:1]
    if ready and (SUPERVISOR, ready[-1][1]) in ends:
        silent.append((ends[SUPERVISOR, ready[-1][1]], math.inf))
    silent.sort()
    merged: list[tuple[float, float]] = []
    for low, high in silent:
        if merged and low <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return merged, ready


def _interventions(run: Run, stepped: dict[Life, float], ended: dict[Life, float]) -> list[Intervention]:
    """Those in the time of a fault or disturbance."""
    hit = [(mark, life, t) for mark in run.truth for life, t in stepped.items() if mark.covers(*life, t)]
    wanted = {life for _, life, _ in hit}
    for entry in run.entries if ended else ():
        event = entry.event
        if isinstance(event, ev.RoleStarted) and (before := (event.role, event.incarnation - 1)) in ended:
            hit += [(mark, before, entry.t) for mark in run.truth if mark.covers(*before, ended[before])]
    last: dict[Life, ev.Entry] = {}
    for entry in run.entries if wanted else ():
        event = entry.event
        if isinstance(event, ev.RoleSample) and (life := (event.role, event.incarnation)) in wanted and entry.t < stepped[life]:
            last[life] = entry
    return sorted((Intervention(t, mark, life, last.get(life)) for mark, life, t in hit), key=lambda found: found.t)
