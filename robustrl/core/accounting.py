"""What faults cost a run: effective training time, time to recover, tokens lost. Pure, from the log alone.

The *span* that counts runs from the dispatch of the first trajectories to the commit of the last optimizer step (of a run that is not done:
to its last entry), so that neither start-up nor the closing evaluation flatters a ratio. In it,

    ettr_strict = (span - lost - redone) / span

*lost*: time without trainer progress owing to a fault, from the last progress before it to the first after it. A gap between two signs of
progress counts, whole, if it holds the death of a trainer, or if it meets an outage and is longer than 95% of the gaps that meet none. An
outage is felt until the steps are committed whose batches were under way when it ended (1 + staleness of them). *redone*: seconds of
training that came to nothing and were done again. A trainer's progress is a micro-batch, a change of phase in a step, or a commit.
No credit for rollouts that go on meanwhile; and a restart without a failure before it, which somebody asked for, is no outage.

``ettr_paper`` (RobustRL, arXiv 2512.22492): while the trainer is out and rollouts go on, time counts with weight rollouts / (rollouts +
trainers). Here each machine is counted by itself: a rollout counts in such a time as long as it generates; one that is out while the
trainer works costs its own share. Work that is done again counts as effective.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from . import events as ev
from .intervals import Interval, clipped, intersection, joined, seconds, seconds_until, without
from .recoveries import DECISION, RECOVERED, STAGES, Recovery, recoveries_of
from .roles import Phase, RoleId, RoleKind

_QUANTILE = 0.95
_WAITS = Phase.WAITING_BATCH


class Spread(msgspec.Struct, frozen=True):
    """Seconds over all recoveries that ended well."""

    mean: float
    median: float
    p95: float
    """The smallest value that 95% do not exceed."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What one recovery cost. Tokens are of the lives of rollouts that failed in it; None where the log has no word of the journal."""

    number: int
    lost: float
    """Seconds without trainer progress; what two recoveries share counts for the earlier."""
    redone: float
    journalled_tokens: int | None
    """Of its trajectories, finished or not, what the journal had received."""
    lost_tokens: int | None
    """Generated, and not in the journal."""
    regenerated_tokens: int | None
    """Those of them that were generated again, their trajectories having been moved."""
    moved: int
    """Unfinished trajectories that went on elsewhere."""
    tokens_meanwhile: int
    """Tokens that rollouts generated between onset and the end of the recovery."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, except where said otherwise. None: there was nothing to compute it from."""

    span: float
    lost: float
    redone: float
    ettr_strict: float | None
    ettr_paper: float | None
    faults: int
    """Injected."""
    recoveries: int
    """Of failures; restarts that somebody asked for are not among them."""
    recovered: int
    mttr: dict[str, Spread]
    """By stage: detect, restart, reconnect, total."""
    tokens: dict[str, int]
    """generated; trained (of the trajectories that committed steps consumed); journalled, lost, regenerated."""
    goodput: float | None
    """Trained tokens per second of the span."""

    def __repr__(self) -> str:
        if self.ettr_strict is None or self.ettr_paper is None:
            return "<no training yet, so no ettr>"
        parts = [
            f"ettr_strict {self.ettr_strict:.3f}, ettr_paper {self.ettr_paper:.3f} over {self.span:.1f} s, of which {self.lost:.1f} s are "
            f"gaps in the trainer's progress that hold or meet a fault's outage, each counted whole; {self.redone:.1f} s of work were done "
            "again",
            f"{self.faults} faults injected, {self.recovered} of {self.recoveries} recoveries complete",
        ]
        if self.mttr:
            parts.append("mean seconds: " + ", ".join(f"{stage} {spread.mean:.2f}" for stage, spread in self.mttr.items()))
        tokens = ", ".join(f"{count} {name}" for name, count in self.tokens.items())
        return "\n".join([*parts, f"tokens: {tokens}; {self.goodput or 0:.0f} trained per second"])


def account(entries: Sequence[ev.Entry]) -> Account:
    """Of a whole run, or of one under way."""
    return _Books(entries).account()


def costs(entries: Sequence[ev.Entry]) -> list[Cost]:
    """One for each of `recoveries_of(entries)`, in that order."""
    return _Books(entries).costs()


class Ratio(NamedTuple):
    """Both effective training time ratios of a run until ``t``."""

    t: float
    """Host time."""
    strict: float
    paper: float


def ratios(entries: Sequence[ev.Entry], most: int = 300) -> list[Ratio]:
    """How both came about: at most ``most`` moments, evenly spread, the last of which says what `account` says.

    Of each moment with all that the log knows: a gap that turned out to be a fault's counts from where it began. So whoever reads a log
    has the same curve, whenever he came. While a run goes on its moments stay where they are, until every second one is dropped.
    """
    return _Books(entries).ratios(most)


class _Books:
    """One pass over the log, and what follows from it."""

    def __init__(self, entries: Sequence[ev.Entry]) -> None:
        self.recoveries = recoveries_of(entries)
        self.end = entries[-1].t if entries else 0.0
        self.first: float | None = None
        self.commits: dict[int, float] = {}
        self.commit_times: list[float] = []
        """Also of steps that were rolled back since."""
        self.marks: list[float] = []
        """Moments of trainer progress."""
        self.begun: list[float] = []
        """Those that begin the work on a step."""
        self.wasted: list[tuple[float, float]] = []
        """(when state was rolled back, seconds of work that went with it)"""
        self.made: dict[str, list[tuple[float, float, int]]] = {}
        """Rollout -> (from, to, tokens generated in between)."""
        self.generated: dict[tuple[str, int], int] = {}
        self.journalled: dict[tuple[str, int], int] = {}
        self.evaluated: dict[tuple[str, int], int] = {}
        self.moved: list[tuple[float, str, int]] = []
        self.pauses: list[Interval] = []
        self.machines: dict[RoleKind, set[str]] = {RoleKind.TRAINER: set(), RoleKind.ROLLOUT: set()}
        self.steps = self.staleness = 0
        self.trained = 0
        self.faults: set[int] = set()
        self._read(entries)
        self.span = self._span()
        self.gaps = self._lost_gaps()

    def _read(self, entries: Sequence[ev.Entry]) -> None:
        before: dict[str, tuple[float, ev.RoleSample]] = {}
        tokens: dict[int, int] = {}
        benign: set[int] = set()
        paused: float | None = None
        for entry in entries:
            t = entry.t
            match entry.event:
                case ev.RoleSample(role=role) as event if (kind := RoleId.parse(role).kind) in self.machines:
                    last = before.get(role)
                    if last and last[1].incarnation != event.incarnation:
                        last = None
                    before[role] = t, event
                    if kind is RoleKind.ROLLOUT:
                        self._rollout(t, event, last)
                    elif RoleId.parse(role).index == 0:
                        self._trainer(t, event, last)
                case ev.TrajectoriesStarted():
                    self.first = t if self.first is None else self.first
                case ev.TrajectoriesFinished(ids=ids, tokens=counts):
                    tokens.update(zip(ids, counts, strict=False))
                case ev.TrajectoriesMoved(source=source, ids=ids):
                    self.moved.append((t, source, len(ids)))
                case ev.OptimizerStepCommitted(step=step, consumed=consumed):
                    self.commits[step] = t
                    self.commit_times.append(t)
                    self.marks.append(t)
                    self.trained += sum(tokens.get(i, 0) for i in consumed)
                case ev.RolledBack(old=old, to=to):
                    self.wasted.append((t, self._worked(to, old)))
                case ev.ProcessExited(role=role, incarnation=incarnation, progress=progress) if (role, incarnation) in self.generated:
                    self.generated[role, incarnation] = max(progress, self.generated[role, incarnation])
                case ev.TokensJournalled() as event:
                    self.journalled[event.role, event.incarnation] = event.tokens
                    self.evaluated[event.role, event.incarnation] = event.evaluated
                case ev.RoleStarted(role=role) if (kind := RoleId.parse(role).kind) in self.machines:
                    self.machines[kind].add(role)
                case ev.FaultPlanned(fault=fault, benign=True):
                    benign.add(fault)
                case ev.FaultInjected(fault=fault) if fault not in benign:
                    self.faults.add(fault)
                case ev.Paused() if paused is None:
                    paused = t
                case ev.Resumed() if paused is not None:
                    self.pauses.append((paused, t))
                    paused = None
                case ev.RunStarted(config=config):
                    self.steps, self.staleness = int(config.get("steps", 0)), int(config.get("staleness", 0))
        if paused is not None:
            self.pauses.append((paused, self.end))
        self.marks.sort()

    def _rollout(self, t: float, event: ev.RoleSample, last: tuple[float, ev.RoleSample] | None) -> None:
        if last and event.progress > last[1].progress:
            self.made.setdefault(event.role, []).append((last[0], t, event.progress - last[1].progress))
        self.generated[event.role, event.incarnation] = event.progress

    def _trainer(self, t: float, event: ev.RoleSample, last: tuple[float, ev.RoleSample] | None) -> None:
        if event.phase == _WAITS:
            return
        begins = last is None or last[1].phase == _WAITS or last[1].step != event.step
        if begins:
            self.begun.append(t - event.phase_age)
        if begins or (last and last[1].phase != event.phase):
            self.marks.append(t - event.phase_age)
        if last and event.progress > last[1].progress:
            self.marks.append(t)

    def _span(self) -> Interval:
        if self.first is None:
            return self.end, self.end
        done = self.steps and max(self.commits, default=0) >= self.steps
        return self.first, max(self.first, self.commits[max(self.commits)] if done else self.end)

    # -- time -

    def outage(self, recovery: Recovery) -> Interval:
        return recovery.onset, self.end if recovery.until is None else recovery.until

    def _stops_trainer(self, recovery: Recovery) -> bool:
        return any(RoleId.parse(role).kind is RoleKind.TRAINER for role in recovery.roles)

    def _felt(self, recovery: Recovery) -> Interval:
        """When it could cost the trainer progress: a trainer that makes some is not dead yet, whatever was seen of it last."""
        onset, back = self.outage(recovery)
        later = [t for t in self.commit_times if t > back][: 1 + self.staleness]
        return (recovery.detected if self._stops_trainer(recovery) else onset), later[-1] if later else self.end

    def _lost_gaps(self) -> list[tuple[Interval, list[Recovery]]]:
        """The gaps in the trainer's progress that faults are to blame for, and the recoveries that each meets, the first one first."""
        start, end = self.span
        if end <= start:
            return []
        points = [start, *(t for t in self.marks if start < t < end), end]
        gaps = list(zip(points, points[1:], strict=False))
        felt = [(recovery, *self._felt(recovery)) for recovery in self.recoveries if recovery.onset_by != DECISION]
        met = [[r for r, begin, until in felt if begin < high and until > low] for low, high in gaps]
        clean = sorted(high - low for (low, high), by in zip(gaps, met, strict=True) if not by)
        ordinary = clean[min(len(clean) - 1, int(_QUANTILE * len(clean)))] if clean else 0.0
        found = []
        for (low, high), by in zip(gaps, met, strict=True):
            deaths = [r for r in by if self._stops_trainer(r) and low <= r.detected < high]
            if deaths or (by and high - low > ordinary):
                found.append(((low, high), deaths or by))
        return found

    def redone(self, recovery: Recovery) -> float:
        return sum(spent for _, spent in self._redone(recovery))

    def _redone(self, recovery: Recovery) -> list[tuple[float, float]]:
        """(when it was lost, seconds) of work that came to nothing: on steps that were rolled back, and on the one it was in."""
        found = [(t, spent) for t, spent in self.wasted if recovery.onset <= t <= self.outage(recovery)[1]]
        gap = next((gap for gap, by in self.gaps if by[0] is recovery), None) if self._stops_trainer(recovery) else None
        if gap is not None:
            committed = max((t for t in self.commit_times if t <= gap[0]), default=self.span[0])
            if begun := [t for t in self.begun if committed <= t <= gap[0]]:
                found.append((gap[0], gap[0] - begun[-1]))
        return found

    def _worked(self, to: int, old: int) -> float:
        """Seconds of work in the committed steps above ``to``, up to ``old``."""
        total = 0.0
        for step in range(to + 1, old + 1):
            if (end := self.commits.pop(step, None)) is not None:
                begun = [t for t in self.begun if t <= end]
                total += end - begun[-1] if begun else 0.0
        return total

    # -- what is told -

    def account(self) -> Account:
        length = self.span[1] - self.span[0]
        lost = min(seconds(self._lost()), length)
        redone = min(sum(self.redone(recovery) for recovery in self.recoveries), length - lost)
        every = self.costs()
        tokens = {"generated": sum(self.generated.values()), "trained": self.trained}
        for name in ("journalled", "lost", "regenerated"):
            tokens[name] = sum(getattr(cost, f"{name}_tokens") or 0 for cost in every)
        failures = [recovery for recovery in self.recoveries if recovery.onset_by != DECISION]
        done = [recovery for recovery in failures if recovery.outcome == RECOVERED]
        mttr = {stage: spread([getattr(recovery, stage) for recovery in done]) for stage in STAGES} if done else {}
        return Account(
            span=length,
            lost=lost,
            redone=redone,
            ettr_strict=(length - lost - redone) / length if length else None,
            ettr_paper=self._paper(),
            faults=len(self.faults),
            recoveries=len(failures),
            recovered=len(done),
            mttr=mttr,
            tokens=tokens,
            goodput=self.trained / length if length else None,
        )

    def _lost(self) -> list[Interval]:
        return without(joined(gap for gap, _ in self.gaps), joined(self.pauses))

    def _paper(self) -> float | None:
        machines, length = self._counted(), self.span[1] - self.span[0]
        away = sum(weight * seconds(times) for weight, times in self._away())
        return 1.0 - away / machines / length if machines and length else None

    def _counted(self) -> int:
        return sum(len(roles) for roles in self.machines.values())

    def _away(self) -> list[tuple[int, list[Interval]]]:
        """When machines did nothing for the paper's ratio, and how many; negative: they did, in a time that was counted already."""
        paused = joined(self.pauses)
        out = without(clipped(joined(self.outage(r) for r in self.recoveries if self._stops_trainer(r)), self.span), paused)
        found = [(self._counted(), out)]
        for role in self.machines[RoleKind.ROLLOUT]:
            generating = joined((low, high) for low, high, _ in self.made.get(role, ()))
            down = clipped(joined(self.outage(r) for r in self.recoveries if role in r.roles), self.span)
            found += [(1, without(down, joined([*out, *paused]))), (-1, intersection(generating, out))]
        return found

    def ratios(self, most: int) -> list[Ratio]:
        start, end = self.span
        if end <= start or not self._counted():
            return []
        every = 1.0
        while (end - start) / every >= most:
            every *= 2
        moments = [*(start + every * n for n in range(1, math.ceil((end - start) / every))), end]
        lost = seconds_until(moments, [(1, self._lost())])
        away = seconds_until(moments, self._away())
        redone = sorted(piece for recovery in self.recoveries for piece in self._redone(recovery))
        found, spoilt = [], 0.0
        for t, gone, idle in zip(moments, lost, away, strict=True):
            while redone and redone[0][0] <= t:
                spoilt += redone.pop(0)[1]
            length = t - start
            gone = min(gone, length)
            strict = (length - gone - min(spoilt, length - gone)) / length
            found.append(Ratio(t, strict, 1.0 - idle / self._counted() / length))
        return found

    def costs(self) -> list[Cost]:
        paused = joined(self.pauses)
        found = []
        for recovery in self.recoveries:
            low, high = self.outage(recovery)
            lives = self._failed_lives(recovery)
            known = [life for life in lives if life in self.journalled]
            lost = sum(max(0, self.generated.get(life, 0) - self.evaluated[life] - self.journalled[life]) for life in known)
            moved = sum(count for t, source, count in self.moved if low <= t <= high and source in {role for role, _ in lives})
            found.append(
                Cost(
                    number=recovery.number,
                    lost=seconds(without([gap for gap, by in self.gaps if by[0] is recovery], paused)),
                    redone=self.redone(recovery),
                    journalled_tokens=sum(self.journalled[life] for life in known) if known else None,
                    lost_tokens=lost if known else None,
                    regenerated_tokens=(lost if moved else 0) if known else None,
                    moved=moved,
                    tokens_meanwhile=round(self._made_within(low, high)),
                )
            )
        return found

    def _failed_lives(self, recovery: Recovery) -> list[tuple[str, int]]:
        """Of rollouts, all lives that ended in this recovery."""
        return [(role, n) for role, first, tries in recovery.lives if role in self.machines[RoleKind.ROLLOUT]
                for n in range(first, first + max(1, tries))]  # fmt: skip

    def _made_within(self, low: float, high: float) -> float:
        """Tokens of all rollouts; those between two samples are spread evenly."""
        spans = [span for spans in self.made.values() for span in spans]
        return sum(n * max(0.0, min(b, high) - max(a, low)) / (b - a) for a, b, n in spans if b > a)


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    ordered = sorted(values)
    p95 = ordered[max(0, math.ceil(_QUANTILE * len(ordered)) - 1)]
    return Spread(statistics.fmean(ordered), statistics.median(ordered), p95)
