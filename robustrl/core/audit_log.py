"""What the audit's rules are asked about: a run's entries, and what several rules want to know of them. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TypeVar

import msgspec

from robustrl.config import JobConfig
from robustrl.core import events as ev
from robustrl.core.roles import RoleId, RoleKind

_E = TypeVar("_E", bound=msgspec.Struct)
Found = Iterator[tuple[int, str]]
"""(number of the entry that shows it, what is wrong)"""


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
