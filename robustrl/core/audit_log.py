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
    def _cut_short(self) -> dict[str, dict[int, float]]:
        """Role -> its lives that ended before the run was done, and the time by which each was over, on the log's clock."""
        begun = {(e.event.role, e.event.incarnation): e.t for e in reversed(self.entries) if isinstance(e.event, ev.RoleStarted)}
        exited = {(event.role, event.incarnation) for _, event in self.all(ev.ProcessExited)}
        end = self.entries[-1].t if self.entries else 0.0
        cut: dict[str, dict[int, float]] = defaultdict(dict)
        for role, life in begun:
            if (role, life + 1) in begun or self.status != "done" or (role, life) in exited:
                cut[role][life] = begun.get((role, life + 1), end)
        return cut

    @cached_property
    def _announced(self) -> dict[int, float]:
        """Version -> the time of its first announcement, on the log's clock."""
        return {e.event.version: e.t for e in reversed(self.entries) if isinstance(e.event, ev.VersionAnnounced)}

    def may_have_run(self, role: str, version: int, seen: float, *, lives: Collection[int] | None = None) -> bool:
        """Whether one of these lives of a rollout (None: any) may have run on this version though the log has no word of it. ``seen``: when
        the log has something that came of it.

        A rollout tells its manager and the host at once that it runs on a version. Where its process, or the run, ends before the host's
        copy is written, the log has the work that the manager then gave it and not that word: the last one of a life that was cut short.
        """
        announced = self._announced.get(version, math.inf)
        return any(
            announced <= end <= seen + _LATE_WORD and version > self._told.get((role, life), -1)
            for life, end in self._cut_short.get(role, {}).items()
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
