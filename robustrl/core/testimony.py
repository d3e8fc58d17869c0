"""What a witness saw of a run, and whether the run's own log says the same. Pure.

The witness (runtime/witness.py) takes nothing from the job's log or its roles' words: it reads /proc, pidfds and shared memory. Both clocks
are the monotonic clock of one machine; of roles on other machines it saw nothing, and nothing is asked. Leaves out: whether the witness
tells the truth; its lines are chained like the log's.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Union

import msgspec

from . import events as ev
from .audit import Finding

_SOON = 2.0
"""Seconds in which what one of the two saw must show at the other."""
_LATE = 10.0
"""Seconds before the end of the run in which what happened may not have reached the log any more."""
_CPU = 0.3
"""Seconds of CPU time by which two readings may differ: they are not taken at the same instant."""


class _Sight(msgspec.Struct, frozen=True, tag_field="saw", forbid_unknown_fields=True, kw_only=True):
    t: float


class Began(_Sight, tag="began"):
    run: str
    host_pid: int


class Born(_Sight, tag="born"):
    """A process put up the status page of a life of a role."""

    role: str
    incarnation: int
    pid: int
    start_ticks: int


class Died(_Sight, tag="died"):
    """By its pidfd."""

    role: str
    incarnation: int
    pid: int


class Read(_Sight, tag="read"):
    """``ROLE.INCARNATION`` -> (CPU seconds so far, state letter of its process)."""

    lives: dict[str, tuple[float, str]]


class Weights(_Sight, tag="weights"):
    """The committed weights in a keeper's memory, hashed there."""

    holder: str
    version: int
    digest: str


class Ended(_Sight, tag="ended"):
    """The host is gone; ``left``: processes of roles that were still there when the witness stopped waiting for their end."""

    left: list[str]


Sight = Union[Began, Born, Died, Read, Weights, Ended]


class Line(msgspec.Struct, frozen=True):
    """One line of ``witness.jsonl``."""

    seq: int
    sight: Sight
    chain: str = ""


def seal(line: Line, previous: str) -> Line:
    """With its chain value, which follows from the one before and the content."""
    bare = msgspec.structs.replace(line, chain="")
    chain = hashlib.sha256(previous.encode() + msgspec.json.encode(bare)).hexdigest()[:32]
    return msgspec.structs.replace(line, chain=chain)


def cross_check(entries: Sequence[ev.Entry], lines: Sequence[Line]) -> list[Finding]:
    """Where log and witness contradict each other, or one of them is silent about what the other saw. ``seq`` 0: nothing in the log."""
    return [Finding("witness", seq, text) for check in (_own_log, _births, _deaths, _weights, _readings, _faults)
            for seq, text in check(_Both(entries, lines))]  # fmt: skip


class _Both:
    def __init__(self, entries: Sequence[ev.Entry], lines: Sequence[Line]) -> None:
        self.entries, self.lines = entries, lines
        sights = [line.sight for line in lines]
        self.born = {(s.role, s.incarnation): s for s in sights if isinstance(s, Born)}
        self.died = {(s.role, s.incarnation): s for s in sights if isinstance(s, Died)}
        self.reads = [s for s in sights if isinstance(s, Read)]
        self.weights = [s for s in sights if isinstance(s, Weights)]
        self.ended = [s for s in sights if isinstance(s, Ended)]
        begun = [s.t for s in sights if isinstance(s, Began)]
        self.watched = [(t, next((s.t for s in self.ended if s.t >= t), math.inf)) for t in begun]
        """When there was a witness: a run that is resumed may have another one, or none."""
        self.end = entries[-1].t if entries else 0.0
        self.started = {(e.event.role, e.event.incarnation): e for e in entries if isinstance(e.event, ev.RoleStarted)}
        self.exited = {(e.event.role, e.event.incarnation): e for e in entries if isinstance(e.event, ev.ProcessExited)}
        self.ended_well = {(e.event.role, e.event.incarnation) for e in entries
                           if isinstance(e.event, ev.RoleStateChanged) and e.event.new in ("stopped", "retired")}  # fmt: skip
        """Its process may be gone, or go on as another role."""
        self.lost = {e.event.node: e.t for e in entries if isinstance(e.event, ev.NodeLost)}


_Found = Iterator[tuple[int, str]]


def _own_log(both: _Both) -> _Found:
    previous, due = ev.GENESIS, 1
    for number, line in enumerate(both.lines, 1):
        if isinstance(line.sight, Began):
            previous, due = ev.GENESIS, 1
        if line.seq != due or seal(line, previous).chain != line.chain:
            yield 0, f"line {number} of the witness's own log was changed, or one before it"
            return
        previous, due = line.chain, due + 1
    if not both.watched or not both.ended or both.watched[-1][1] == math.inf:
        yield 0, "the witness's log has no end: it was cut short"
    for ended in both.ended:
        if ended.left:
            yield 0, f"still there after the run: {', '.join(ended.left)}"


def _births(both: _Both) -> _Found:
    for (role, incarnation), entry in both.started.items():
        event, born = entry.event, both.born.get((role, incarnation))
        assert isinstance(event, ev.RoleStarted)
        gone = both.exited.get((role, incarnation))
        if born is None:
            if not any(begin <= entry.t <= end for begin, end in both.watched):
                continue
            if not (gone and gone.t - entry.t < _SOON) and both.end - entry.t > _LATE:
                yield entry.seq, f"{role} incarnation {incarnation} started, the witness saw no such process"
        elif (born.pid, born.start_ticks) != (event.pid, event.start_ticks):
            yield entry.seq, f"{role} incarnation {incarnation} is pid {event.pid} in the log; the witness saw pid {born.pid}"
    for (role, incarnation), born in both.born.items():
        if (role, incarnation) not in both.started and both.end - born.t > _LATE:
            yield 0, f"the witness saw {role} incarnation {incarnation} (pid {born.pid}) begin; the log does not know it"
        before = both.died.get((role, incarnation - 1))
        earlier = both.born.get((role, incarnation - 1))
        if earlier and (before is None or before.t > born.t) and (role, incarnation - 1) not in both.ended_well:
            yield 0, f"{role} incarnation {incarnation} began while incarnation {incarnation - 1} (pid {earlier.pid}) was alive"


def _deaths(both: _Both) -> _Found:
    for life, entry in both.exited.items():
        died = both.died.get(life)
        if life in both.born and (died is None or died.t > entry.t + _SOON):
            yield entry.seq, f"{life[0]} incarnation {life[1]} has ended in the log; the witness saw it alive"
    for life, died in both.died.items():
        start = both.started.get(life)
        node = start.event.node if start and isinstance(start.event, ev.RoleStarted) else ""
        told = life in both.exited or node in both.lost or life in both.ended_well
        if start and not told and both.end - died.t > _LATE:
            yield start.seq, f"the witness saw {life[0]} incarnation {life[1]} end at {died.t:.2f}; the log does not say so"


def _weights(both: _Both) -> _Found:
    digests = {e.event.version: e.event.digest for e in both.entries if isinstance(e.event, ev.OptimizerStepCommitted)}
    damaged = any(isinstance(e.event, ev.FaultPlanned) and e.event.kind.startswith("corrupt") for e in both.entries)
    for sight in both.weights:
        if sight.version not in digests:
            if both.end - sight.t > _LATE:
                yield 0, f"{sight.holder} held weights of version {sight.version}, which the log does not call committed"
        elif digests[sight.version] != sight.digest and not damaged:
            said = digests[sight.version]
            yield 0, f"version {sight.version} in the memory of {sight.holder} has digest {sight.digest}, in the log {said}"


def _readings(both: _Both) -> _Found:
    """CPU times only rise, so a reading in the log lies between those of the witness before and after it."""
    series: dict[tuple[str, int], tuple[list[float], list[float]]] = {}
    for read in both.reads:
        for name, (cpu, _) in read.lives.items():
            role, _, incarnation = name.rpartition(".")
            times, values = series.setdefault((role, int(incarnation)), ([], []))
            times.append(read.t)
            values.append(cpu)
    told: set[tuple[str, int]] = set()
    for entry in both.entries:
        if isinstance(event := entry.event, ev.RoleSample) and (life := (event.role, event.incarnation)) in series and life not in told:
            times, values = series[life]
            before, after = bisect.bisect_left(times, entry.t - _SOON) - 1, bisect.bisect_right(times, entry.t)
            if (before >= 0 and event.cpu < values[before] - _CPU) or (after < len(values) and event.cpu > values[after] + _CPU):
                told.add(life)
                yield entry.seq, f"{event.role} incarnation {event.incarnation} is said to have used {event.cpu:.2f} s of CPU time; not so"


def _faults(both: _Both) -> _Found:
    """A fault that is said to have stopped or ended a process did."""
    for entry in both.entries:
        if not isinstance(event := entry.event, ev.FaultInjected) or (life := (event.role, event.incarnation)) not in both.born:
            continue
        died = both.died.get(life)
        soon = died is not None and died.t <= entry.t + _SOON
        if event.proof.get("process") == "gone" and not soon:
            yield entry.seq, f"fault {event.fault} is said to have ended {event.role} (pid {event.pid}); the witness saw it alive"
        if event.proof.get("process") == "T" and not soon and both.end - entry.t > _SOON:
            name = f"{event.role}.{event.incarnation}"
            near = [read for read in both.reads if abs(read.t - entry.t) <= _SOON and name in read.lives]
            if near and all(read.lives[name][1] != "T" for read in near):
                yield entry.seq, f"fault {event.fault} is said to have stopped {event.role} (pid {event.pid}); the witness saw it run"
