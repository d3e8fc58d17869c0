"""What the audit's rules are asked about: a run's entries, and what several rules want to know of them. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import TypeVar

import msgspec

from robustrl.config import JobConfig
from robustrl.core import events as ev
from robustrl.core.roles import RoleId, RoleKind

_E = TypeVar("_E", bound=msgspec.Struct)
Found = Iterator[tuple[int, str]]
"""(number of the entry that shows it, what is wrong)"""
_LATE_WORD = 5.0
"""Seconds that a role's word may be on its way to a busy host: no life that goes on stays behind for longer."""
_PROMPT_WORD, _TIMES = 1.0, 4.0
"""Where nothing holds words up, one is on its way for this long at most (0.3 s was seen), or so many times as long as the slowest there."""
_DISTURBED = ev.FaultPlanned | ev.NodeLost | ev.RunResumed | ev.WarningRaised


class Log:
    """The entries, and what several rules ask of them."""

    def __init__(self, entries: Sequence[ev.Entry], lines: Sequence[bytes] = ()) -> None:
        self.entries = entries
        self.lines = lines
        """What each was read from; empty: not known."""
        self.end = entries[-1].seq if entries else 0
        self._by_type: dict[type, list[tuple[int, msgspec.Struct]]] = defaultdict(list)
        for entry in entries:
            self._by_type[type(entry.event)].append((entry.seq, entry.event))

    def all(self, kind: type[_E]) -> list[tuple[int, _E]]:
        return self._by_type[kind]  # type: ignore[return-value]

    @cached_property
    def config(self) -> JobConfig:
        """What the run was asked for; the defaults where the rule ``config`` is violated."""
        for _, event in self.all(ev.RunStarted):
            try:
                return msgspec.convert(event.config, JobConfig)
            except msgspec.ValidationError:
                break
        return JobConfig()

    @cached_property
    def broken_config(self) -> bool:
        """Of one that is not valid the defaults stand for it, and nothing follows from them."""
        for _, event in self.all(ev.RunStarted):
            try:
                msgspec.convert(event.config, JobConfig)
            except msgspec.ValidationError:
                return True
            break
        return False

    @cached_property
    def status(self) -> str:
        ended = self.all(ev.RunEnded)
        return ended[-1][1].status if ended else ""

    @cached_property
    def batch_of(self) -> dict[int, int]:
        return {i: event.batch for _, event in self.all(ev.TrajectoriesStarted) for i in event.ids}

    @cached_property
    def steps(self) -> dict[int, ev.OptimizerStepCommitted]:
        return {event.step: event for _, event in self.all(ev.OptimizerStepCommitted)}

    @cached_property
    def step_of(self) -> dict[int, int]:
        """Version -> the optimizer step that made it; the same number, until state is rolled back."""
        return {event.version: event.step for _, event in self.all(ev.OptimizerStepCommitted)}

    @cached_property
    def commits(self) -> Counter[int]:
        """Optimizer step -> how often it was committed: more than once only after a rollback."""
        return Counter(event.step for _, event in self.all(ev.OptimizerStepCommitted))

    @cached_property
    def ran(self) -> dict[str, set[int]]:
        """Rollout -> the versions that its engine ran on."""
        ran: dict[str, set[int]] = {}
        for _, event in self.all(ev.PullCommitted):
            ran.setdefault(event.target, set()).add(event.version)
        return ran

    @cached_property
    def _told(self) -> dict[tuple[str, int], int]:
        """Life of a rollout -> the newest version that it surely told of, had it run on it: it said so, or began to pull a newer one."""
        told: dict[tuple[str, int], int] = {}
        for entry in self.entries:
            match entry.event:
                case ev.PullCommitted(target=role, incarnation=incarnation, version=version):
                    told[role, incarnation] = max(told.get((role, incarnation), -1), version)
                case ev.PullStarted(target=role, version=version):
                    told[role, entry.incarnation] = max(told.get((role, entry.incarnation), -1), version - 1)
        return told

    @cached_property
    def _cut_short(self) -> dict[str, dict[int, tuple[float, float]]]:
        """Role -> its lives that ended before the run was done: the time by which each was over, on the log's clock, and for how long
        before that a word of it may have been under way; it is not known when exactly a process died.
        """
        begun = {(e.event.role, e.event.incarnation): e.t for e in reversed(self.entries) if isinstance(e.event, ev.RoleStarted)}
        exited = {(event.role, event.incarnation) for _, event in self.all(ev.ProcessExited)}
        end = self.entries[-1].t if self.entries else 0.0
        cut: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
        for role, life in begun:
            if (role, life + 1) in begun or (role, life) in exited:
                cut[role][life] = begun.get((role, life + 1), end), _LATE_WORD
            elif self.status != "done":
                cut[role][life] = end, self.late
        return cut

    @cached_property
    def announced(self) -> dict[int, float]:
        """Version -> the time of its first announcement, on the log's clock."""
        return {e.event.version: e.t for e in reversed(self.entries) if isinstance(e.event, ev.VersionAnnounced)}

    @cached_property
    def late(self) -> float:
        """Seconds before the end within which a word may have been on its way and is missing, as the words that came were late here."""
        if any(isinstance(entry.event, _DISTURBED) for entry in self.entries):
            return _LATE_WORD
        offset: dict[tuple[str, int], float] = {}
        for entry in self.entries:
            life = entry.source, entry.incarnation
            offset[life] = min(offset.get(life, math.inf), entry.t - entry.at)
        slowest = max((entry.t - entry.at - offset[entry.source, entry.incarnation] for entry in self.entries), default=0.0)
        gap = max((event.seconds for _, event in self.all(ev.ClockGap)), default=0.0)
        return min(_LATE_WORD, max(_PROMPT_WORD, _TIMES * slowest, _TIMES * gap))

    @cached_property
    def times(self) -> dict[int, float]:
        """Number of an entry -> its time."""
        return {entry.seq: entry.t for entry in self.entries}

    @cached_property
    def long_ago(self) -> float:
        """A word from before this time is in the log."""
        return self.entries[-1].t - self.late if self.entries else 0.0

    def one_life(self, *roles: str) -> bool:
        """Whether each of these lived once, and to the end of the run: none of its words died with it."""
        ends = ev.ProcessExited | ev.RestartDecided | ev.RoleOrdered
        gone = {entry.event.role for entry in self.entries if isinstance(entry.event, ends)}
        more = {event.role for _, event in self.all(ev.RoleStarted) if event.incarnation > 1}
        if any(isinstance(entry.event, ev.RunResumed | ev.NodeLost) for entry in self.entries):
            return False
        return not (gone | more) & {*roles}

    def may_have_run(self, role: str, version: int, seen: float, *, lives: Collection[int] | None = None) -> bool:
        """Whether one of these lives of a rollout (None: any) may have run on this version though the log has no word of it. ``seen``: when
        the log has something that came of it.

        A rollout tells its manager and the host at once that it runs on a version. Where its process, or the run, ends before the host's
        copy is written, the log has the work that the manager then gave it and not that word: the last one of a life that was cut short.
        """
        announced = self.announced.get(version, math.inf)
        return any(
            announced <= end <= seen + patience and version > self._told.get((role, life), -1)
            for life, (end, patience) in self._cut_short.get(role, {}).items()
            if lives is None or life in lives
        )

    def may_lack(self, step: int) -> bool:
        """A run that was cut short may lack the events that follow its last step's commit."""
        return self.status != "done" and step == max(self.steps, default=0)


Rule = Callable[[Log], Found]


def kind_of(role: str) -> RoleKind | None:
    """None for what names no role."""
    try:
        return RoleId.parse(role).kind
    except ValueError:
        return None


def some(ids: Sequence[int], most: int = 5) -> str:
    return ", ".join(map(str, ids[:most])) + (f" and {len(ids) - most} more" if len(ids) > most else "")
