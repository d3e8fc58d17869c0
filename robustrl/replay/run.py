"""A recorded run: its entries, what is known to be true of them, and the part that counts.

    run = Run.load("runs/demo-...")           run.truth           injected faults and disturbances, and whatever somebody marked
    part = run.cut(60, 120)                   both = Run.concatenate(run, other)
    run = run.annotate("rollout-1", 31.5, 44.0, expect="well", note="a slow tool")

Promises: a Run never changes, each operation gives a new one; seconds count from the run's first entry. A cut keeps what was before it:
the detector has to know what it knew: only what falls into the *window* counts. Leaves out: what a detector makes of a run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ..core import events as ev
from ..core.accounting import Account, account
from ..core.fault_book import ENDING, FaultBook
from ..core.thresholds import Thresholds
from ..errors import ConfigError, counted
from ..faults.catalogue import CATALOGUE
from ..tables import Table
from .reading import BadRun, Problem, examine, read_file, write_gzip

if TYPE_CHECKING:
    from .outcomes import Costs
    from .recording import Recording

FAILED, WELL, ANYTHING = "failed", "well", "anything"
EXPECTED = (FAILED, WELL, ANYTHING)
AFTER = 1.0
"""Seconds after a fault's end in which its role may still be called failed."""
_PAUSE = 1.0
"""Seconds between two concatenated runs."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What is true of one role for some time. Times are host seconds, as ``Entry.t``."""

    role: str
    start: float
    end: float
    """When it was over: called off, by itself, or because the role was replaced; else the end of the log."""
    incarnation: int
    """The life that it hit; 0: whichever was there."""
    kind: str
    """Of the fault or disturbance."""
    expect: str
    """What a right detector says meanwhile: ``failed``; ``well``: not that; or ``anything``."""
    fault: int = 0
    """Its number in the log; 0: somebody marked it."""
    replaced: bool = False
    """It ended with the life that it hit, not before."""
    lasts: float = math.inf
    """Seconds that it would have lasted had nobody done anything, as far as is known."""
    note: str = ""

    def covers(self, role: str, incarnation: int, t: float) -> bool:
        """Whether it is the truth about this life at host time ``t``; the word of it may be `AFTER` seconds late."""
        if role != self.role or t < self.start:
            return False
        return t <= self.end + AFTER or (incarnation == self.incarnation and self.replaced)


@dataclass(frozen=True, eq=False)
class Run:
    name: str
    entries: Sequence[ev.Entry]
    """In the order of time."""
    window: tuple[float, float]
    """The part that counts, in host seconds."""
    annotations: tuple[Mark, ...] = ()
    problems: tuple[Problem, ...] = ()
    """Of a file that was read in part."""

    @classmethod
    def load(cls, path: str | Path, *, partial: bool = False, live: bool = False) -> Self:
        """A run directory, its ``events.jsonl`` (also gzipped), or a Parquet file of `to_parquet`.

        Raises BadRun, which names the first row that is wrong, or LogError where nothing is found. With ``partial`` only if no row can be
        used: else rows that cannot be used are left out, the others put in the order of time, and ``problems`` says what was wrong.
        ``live``: somebody may still write the log; a last row without its end is then no problem, and not read.
        """
        from .given import path_of

        path = path_of(path)
        rows, problems, facts = read_file(path, live)
        entries, wrong = examine(rows)
        problems = sorted([*problems, *wrong])
        if not rows and not problems:
            problems = [Problem(1, "empty", "the log is empty")]
        if not entries or (problems and not partial):
            raise BadRun(str(path), problems, bool(entries))
        run = cls.of(entries, name=path.name if path.is_dir() else path.parent.name if path.name == "events.jsonl" else path.stem)
        return dataclasses.replace(run, problems=tuple(problems), **facts)

    @classmethod
    def of(cls, entries: Sequence[ev.Entry], name: str = "run") -> Self:
        """Of entries in the order of time, e.g. ``job.events``."""
        if not entries:
            raise ConfigError("entries", [], "must hold at least one entry of a log")
        return cls(name, entries, (entries[0].t, entries[-1].t))

    @property
    def begin(self) -> float:
        """Host seconds of the first entry: the zero of all seconds that are asked for here."""
        return self.entries[0].t

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.window[1] - self.window[0]

    @property
    def complete(self) -> bool:
        """Its closing record is there."""
        return isinstance(self.entries[-1].event, ev.RunEnded)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        return tuple(sorted({entry.event.role for entry in self.entries if isinstance(entry.event, ev.RoleStarted)}))

    @cached_property
    def thresholds(self) -> tuple[tuple[float, Thresholds], ...]:
        """(host seconds, settings in force from then on). A log that names none: the lab's."""
        found = [(entry.t, Thresholds.from_dict(entry.event.thresholds)) for entry in self.entries
                 if isinstance(entry.event, ev.ThresholdsChanged)]  # fmt: skip
        return tuple(found) or ((self.begin, Thresholds.lab()),)

    @cached_property
    def verdicts(self) -> tuple[ev.Verdict, ...]:
        """What was said live."""
        return tuple(entry.event for entry in self.entries if isinstance(entry.event, ev.Verdict))

    @cached_property
    def truth(self) -> tuple[Mark, ...]:
        """Injected faults and disturbances, and annotations, in the order of time: those that begin in the window."""
        low, high = self.window
        return tuple(sorted((mark for mark in (*_injected(self.entries), *self.annotations) if low <= mark.start <= high),
                            key=lambda mark: (mark.start, mark.role)))  # fmt: skip

    @cached_property
    def account(self) -> Account:
        """Recovery times and losses, as measured; see core/accounting.py."""
        return account(self.entries)

    @cached_property
    def costs(self) -> Costs:
        """What a needless restart costs, as this run measured its recoveries."""
        from .outcomes import Costs

        return Costs(self)

    @cached_property
    def recording(self) -> Recording:
        """Made ready for other settings than its own; takes a second for an hour of 64 roles, once."""
        from .recording import record

        return record(self)

    def annotate(self, role: str, start: float, end: float | None = None, *, expect: str = FAILED, kind: str = "marked",
                 note: str = "") -> Self:  # fmt: skip
        """With the truth about ``role`` from ``start`` to ``end`` (seconds from the run's first entry; None: to its replacement)."""
        if role not in self.roles:
            raise ConfigError("role", role, f"must be a role of this run: {', '.join(self.roles)}")
        if expect not in EXPECTED:
            raise ConfigError("expect", expect, f"must be one of {', '.join(EXPECTED)}")
        from .given import check_seconds

        for name, value in (("start", start), ("end", start if end is None else end)):
            check_seconds(name, value)
        length = self.entries[-1].t - self.begin
        if not 0 <= start <= length:
            raise ConfigError("start", start, f"must lie in the run, from 0 to {length:.3f} s")
        if end is not None and not start < end <= length:
            raise ConfigError("end", end, f"must lie after start = {start:g} and in the run, up to {length:.3f} s")
        at = self.begin + start
        until = _replaced(self.entries, role, at) if end is None else self.begin + end
        lasts = math.inf if end is None else end - start
        mark = Mark(role=role, start=at, end=until, incarnation=0, kind=kind, expect=expect, lasts=lasts, note=note)
        return dataclasses.replace(self, annotations=(*self.annotations, mark))

    def cut(self, start: float = 0.0, end: float | None = None) -> Self:
        """Of which only ``start`` to ``end`` counts (seconds from the run's first entry). Nothing after ``end`` is kept."""
        from .given import check_seconds

        length = self.entries[-1].t - self.begin
        end = length if end is None else end
        for name, value in (("start", start), ("end", end)):
            check_seconds(name, value)
        if not 0 <= start < end <= length:
            raise ConfigError("start, end", (start, end), f"must be two times in the run, 0 <= start < end <= {length:.3f} s")
        low, high = self.begin + start, self.begin + end
        return dataclasses.replace(self, entries=[entry for entry in self.entries if entry.t <= high], window=(low, high))

    def excerpt(self, start: float = 0.0, end: float | None = None, name: str = "") -> Self:
        """The same stretch as a small run of its own: see excerpts.py for what it knows of earlier times. Annotations in it are kept."""
        from .excerpts import excerpt_entries

        part = self.cut(start, end)
        entries = excerpt_entries(part.entries, *part.window)
        marks = tuple(mark for mark in self.annotations if part.window[0] <= mark.start <= part.window[1])
        return dataclasses.replace(self, name=name or self.name, entries=entries, annotations=marks, window=(entries[0].t, part.window[1]))

    @classmethod
    def concatenate(cls, *runs: Run, name: str = "") -> Self:
        """One run after the other, in one log. Incarnations and faults go on counting; a run's roles end with it.

        Windows and thresholds are those of the parts; a stall in a later part is looked for from its first optimizer step on.
        """
        if not runs:
            raise ConfigError("runs", (), "must be at least one run")
        if odd := [run for run in runs if not isinstance(run, Run)]:
            raise ConfigError("runs", odd[0], "must be runs: robustrl.Run.load(path), or those of robustrl.corpus()")
        if late := [run.name for run in runs[1:] if run.window[0] > run.begin]:
            raise ConfigError("runs", late, "only the first part may be cut at its beginning")
        from .joining import joined_entries

        entries, marks = joined_entries([(run.entries, run.annotations) for run in runs], _PAUSE)
        low = entries[0].t + runs[0].window[0] - runs[0].begin
        return cls(name or " + ".join(run.name for run in runs), entries, (low, entries[-1].t), tuple(marks))

    def save(self, path: str | Path) -> None:
        """As a gzipped log, a small file. Raises ConfigError if it holds annotations or a cut: those need `to_parquet`."""
        if self.annotations or self.window != (self.begin, self.entries[-1].t):
            raise ConfigError("path", str(path), "annotations and cuts are kept by to_parquet only")
        write_gzip(Path(path).expanduser(), self.entries)

    def to_parquet(self, path: str | Path) -> None:
        """See parquet.py for the schema. Raises MissingExtra without pyarrow."""
        from .parquet import write_parquet

        facts = {"name": self.name, "window": self.window, "annotations": [msgspec.to_builtins(mark) for mark in self.annotations]}
        write_parquet(Path(path).expanduser(), self.entries, facts)

    def table(self) -> Table:
        """The truth, a row per mark, in seconds from the first entry."""
        return Table({"role": mark.role, "kind": mark.kind, "expect": mark.expect, "fault": mark.fault or None,
                      "start": round(mark.start - self.begin, 3), "end": round(mark.end - self.begin, 3), "note": mark.note}
                     for mark in self.truth)  # fmt: skip

    def __repr__(self) -> str:
        faults = sum(mark.expect == FAILED for mark in self.truth)
        odd = f", {counted(len(self.problems), 'problem')}" if self.problems else ""
        entries = "1 entry" if len(self.entries) == 1 else f"{len(self.entries)} entries"
        return (f"<Run {self.name}: {self.seconds:.1f} s, {counted(len(self.roles), 'role')}, {entries}, "
                f"{counted(faults, 'fault')}{odd}>")


def _injected(entries: Sequence[ev.Entry]) -> list[Mark]:
    planned: dict[int, ev.FaultPlanned] = {}
    hits: list[tuple[float, ev.FaultInjected]] = []
    ended: dict[int, float] = {}
    exits: dict[tuple[str, int], float] = {}
    for entry in entries:
        event = entry.event
        if isinstance(event, ev.FaultPlanned):
            planned[event.fault] = event
        elif isinstance(event, ev.FaultInjected):
            hits.append((entry.t, event))
        elif isinstance(event, ev.FaultEnded):
            ended.setdefault(event.fault, entry.t)
        elif isinstance(event, ev.ProcessExited):
            exits.setdefault((event.role, event.incarnation), entry.t)
    found = []
    unseen = _unseen(entries, planned)
    for t, hit in hits:
        start = min(t, exits.get((hit.role, hit.incarnation), t))  # the end may be logged ahead of what caused it
        over = min(ended.get(hit.fault, math.inf), unseen.get((hit.fault, hit.role), math.inf))
        mark = _mark(entries, start, hit, planned.get(hit.fault), over)
        brief = (hit.fault, hit.role) in unseen and over - start <= AFTER and mark.expect == FAILED
        found.append(msgspec.structs.replace(mark, expect=ANYTHING) if brief else mark)
    return found


def _unseen(entries: Sequence[ev.Entry], planned: dict[int, ev.FaultPlanned]) -> dict[tuple[int, str], float]:
    """(fault, role) -> when what it hit ended by something else, before it was detected. Where that was at once, nobody could detect it."""
    if all(plan.kind in ENDING for plan in planned.values()):
        return {}
    book = FaultBook()
    for entry in entries:
        book.apply(entry)
    return {(number, hit.role): hit.gone for number, view in book.faults.items() for hit in view.hits if hit.gone is not None}


def _mark(entries: Sequence[ev.Entry], t: float, hit: ev.FaultInjected, plan: ev.FaultPlanned | None, over: float) -> Mark:
    kind = plan.kind if plan else "unknown"
    fault = CATALOGUE.get(kind)
    expect = WELL if plan and plan.benign else FAILED if fault is None or fault.disabling else ANYTHING
    seconds: Any = plan.options.get("seconds") if plan else None
    lasts = float(seconds) if isinstance(seconds, int | float) and seconds > 0 else math.inf
    gone = _replaced(entries, hit.role, t, hit.incarnation)
    if over < gone:  # called off, or by itself: it would not have gone on
        lasts = min(lasts, max(0.0, over - t))
    return Mark(role=hit.role, start=t, end=max(t, min(over, gone)), incarnation=hit.incarnation, kind=kind, expect=expect,
                fault=hit.fault, lasts=lasts, replaced=gone <= over)  # fmt: skip


def _replaced(entries: Sequence[ev.Entry], role: str, after: float, incarnation: int | None = None) -> float:
    """When the life of a role that was there at ``after`` was over: the next one's start, or the end of the log."""
    for entry in entries:
        event = entry.event
        if isinstance(event, ev.RoleStarted) and event.role == role and (
            entry.t > after if incarnation is None else event.incarnation > incarnation
        ):
            return entry.t
    return entries[-1].t
