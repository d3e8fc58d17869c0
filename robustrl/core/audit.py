"""The rules that a run's log must satisfy, so that every claim made from it can be recomputed from the log alone.

Promises: pure; the rules lean on what events say about each other, so a log is found out even when its numbers and its chain were computed
anew after an event was removed, doubled or altered. Where two emitters may reach the host in either order, no rule asks for an order.
Leaves out: whether an event that no other contradicts is true (a loss, a duration, a text, or several events altered in accord). Here:
the table of rules, and those on the log as such and on optimizer steps; the others are in audit_*.py by theme.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from robustrl.config import JobConfig
from robustrl.core import (
    audit_asked,
    audit_counts,
    audit_faults,
    audit_lives,
    audit_ranges,
    audit_results,
    audit_roles,
    audit_trajectories,
    audit_weights,
)
from robustrl.core import events as ev
from robustrl.core.audit_log import Found, Log, Rule, some


class Finding(NamedTuple):
    rule: str
    seq: int
    """The entry that shows it (its line in the log, where numbers are in order); 0: there is none."""
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: entry {self.seq}: {self.text}" if self.seq else f"{self.rule}: {self.text}"


def _schema(log: Log) -> Found:
    """The log says which schema it follows, and it is one that this program knows."""
    for seq, event in log.all(ev.RunStarted):
        if event.schema != ev.SCHEMA:
            yield seq, f"schema {event.schema}; this program knows {ev.SCHEMA}"


def _chain(log: Log) -> Found:
    """Each entry's chain value follows from the one before and its own content, and its line is that entry as written, to the byte."""
    previous = ev.GENESIS
    for position, entry in enumerate(log.entries):
        sealed, line = ev.seal(entry, previous)
        if sealed.chain != entry.chain:
            yield entry.seq, "its content or an entry before it was changed"
        elif log.lines and log.lines[position] != line:
            yield entry.seq, "its line holds something that is no part of the entry, or is not written as a log is"
        previous = entry.chain


def _sequence(log: Log) -> Found:
    """Entries are numbered from 1 without gaps, and host time never runs backwards."""
    before = 0.0
    for number, entry in enumerate(log.entries, 1):
        if entry.seq != number:
            yield entry.seq, f"number {number} is due here"
        if number > 1 and entry.t < before:
            yield entry.seq, f"its time {entry.t:.6f} lies before that of the entry ahead of it ({before:.6f})"
        before = entry.t


def _config(log: Log) -> Found:
    """The first entry, and no other, starts the run and holds a valid configuration."""
    if not log.entries:
        yield 0, "it holds no entry, and a log begins with run_started"
    elif not isinstance(log.entries[0].event, ev.RunStarted):
        yield 1, "a log begins with run_started"
    for position, (seq, event) in enumerate(log.all(ev.RunStarted)):
        if position or log.entries[0].event is not event:
            yield seq, "the run started already"
        try:
            msgspec.convert(event.config, JobConfig)
        except msgspec.ValidationError as error:
            yield seq, f"the configuration is not valid: {error}"


def _closing(log: Log) -> Found:
    """One closing record, at the very end; a run that is called done was decided to be."""
    if not log.entries or not isinstance(log.entries[-1].event, ev.RunEnded):
        yield log.end, "the log does not end with run_ended: the run goes on, or was cut off"
    parts = [0, *(seq for seq, _ in log.all(ev.RunResumed)), log.end]
    for seq, _ in log.all(ev.RunEnded)[:-1]:
        if seq + 1 not in parts[1:-1]:
            yield seq, "a closing record before the end"
    for first, last in pairwise(parts):
        decided = [(seq, event) for seq, event in log.all(ev.EndDecided) if first < seq <= last]
        if len(decided) > 1:
            yield decided[1][0], "the end was decided twice"
        ends = [(seq, event) for seq, event in log.all(ev.RunEnded) if first < seq <= last]
        if decided and ends and ends[0][1].reason != (why := decided[0][1].reason):
            yield ends[0][0], f"the run ended because {ends[0][1].reason!r:.80}; decided was that it does because {why!r:.80}"
        elif decided and ends and ends[0][1].status != (status := decided[0][1].status):
            yield ends[0][0], f"the run ended as {ends[0][1].status!r:.20}; decided was that it does as {status!r:.20}"
    if log.status not in ("", "done", "stopped", "failed"):
        yield log.end, f"status {log.status!r}: must be done, stopped or failed"
    if log.status == "done" and [event.status for _, event in decided] != ["done"]:
        yield log.end, "the run is called done, but no verdict says so"


def _steps(log: Log) -> Found:
    """Optimizer steps follow each other without gaps, up to the last in a run called done; step b trains batch b and makes version b.

    A step is committed again only after a rollback to below it, which says what it rolls back. Made again bit for bit it is the version
    that it was; else version numbers go on upward.
    """
    expected, newest, rolled_back = 0, -1, False
    digests: dict[int, str] = {}
    for entry in log.entries:
        match entry.event:
            case ev.RolledBack(old=old, to=to):
                if old != expected - 1 or not 0 <= to < old:
                    yield entry.seq, f"rolled back from step {old} to {to}, when the last committed step was {expected - 1}"
                expected, rolled_back = to + 1, True
            case ev.OptimizerStepCommitted() as event:
                same = rolled_back and event.version == event.step and digests.get(event.version) == event.digest
                yield from ((entry.seq, text) for text in _step(log, event, expected, event.version - 1 if same else newest, rolled_back))
                expected, newest = event.step + 1, max(newest, event.version)
                digests[event.version] = event.digest
    if log.status == "done" and (last := max(log.steps, default=0)) < log.config.steps:
        yield log.end, f"the run is called done after step {last} of {log.config.steps}"


def _step(log: Log, event: ev.OptimizerStepCommitted, expected: int, newest: int, rolled_back: bool) -> Iterator[str]:
    if event.step != expected:
        yield f"step {event.step} was committed, step {expected} is due"
    if event.batch != event.step:
        yield f"step {event.step} claims batch {event.batch}"
    if event.version <= newest or (event.version != event.step and not rolled_back):
        yield f"step {event.step} claims version {event.version} after version {newest}"
    if event.step > log.config.steps:
        yield f"step {event.step} of {log.config.steps}"
    if foreign := [i for i in event.consumed if log.batch_of.get(i) != event.batch]:
        yield f"step {event.step} consumed trajectories that are not of batch {event.batch}: {some(foreign)}"


def _emitters(log: Log) -> Found:
    """Each life of each source numbers its events from 1, without gaps or doubles, and its clock goes on between two of them; what a life
    does, nobody tells but that life.
    """
    last: dict[tuple[str, int], ev.Entry] = {}
    for entry in log.entries:
        key, life = (entry.source, entry.incarnation), f"{entry.source} incarnation {entry.incarnation}"
        before = last.get(key)
        if (doer := _doer(entry.event)) not in (None, key):
            yield entry.seq, f"{life} told what another did: {doer[0]} incarnation {doer[1]}"
        if entry.n != (due := before.n + 1 if before else 1):
            yield entry.seq, f"{life}: event {entry.n} follows event {due - 1}"
        if before and entry.at < before.at:
            yield entry.seq, f"{life}: its clock said {before.at:.6f}, and then {entry.at:.6f}"
        if before and (entry.at, entry.event) == (before.at, before.event):
            yield entry.seq, f"{life}: the same event as the one before, at the same moment"
        last[key] = entry


def _doer(event: ev.Event) -> tuple[str, int] | None:
    """The life that alone can tell of this; None: others can."""
    match event:
        case ev.OptimizerStepCommitted(holder=role, incarnation=incarnation) | ev.VersionAnnounced(holder=role, incarnation=incarnation):
            return role, incarnation
        case ev.PullCommitted(target=role, incarnation=incarnation):
            return role, incarnation
        case ev.RoleReady() | ev.ErrorRaised() | ev.HeartbeatAnswered() | ev.SnapshotRestored() | ev.VersionRefused() | ev.PeerGone():
            return event.role, event.incarnation
    return None


RULES: dict[str, Rule] = {
    "schema": _schema,
    "chain": _chain,
    "sequence": _sequence,
    "config": _config,
    "closing": _closing,
    "ledger": audit_trajectories.ledger,
    "finished": audit_trajectories.finished,
    "steps": _steps,
    "consumption": audit_trajectories.consumption,
    "batches": audit_trajectories.batches,
    "tokens": audit_trajectories.tokens,
    "versions": audit_weights.announced,
    "digest": audit_weights.digest,
    "pulls": audit_weights.pulls,
    "staleness": audit_trajectories.staleness,
    "serving": audit_weights.serving,
    "transfers": audit_weights.transfers,
    "copies": audit_counts.copies,
    "metrics": audit_results.metrics,
    "evaluations": audit_results.evaluations,
    "roles": audit_roles.roles,
    "recoveries": audit_roles.recoveries,
    "samples": audit_counts.samples,
    "journalled": audit_counts.journalled,
    "settings": audit_counts.settings,
    "emitters": _emitters,
    "faults": audit_faults.faults,
    "verdicts": audit_faults.verdicts,
    "processes": audit_lives.processes,
    "succession": audit_lives.succession,
    "asked": audit_asked.asked,
    "expected": audit_asked.expected,
    "ranges": audit_ranges.ranges,
    "durations": audit_ranges.durations,
}
"""In the order in which violations are told: what the file is, what it claims, who said it."""


def audit(entries: Iterable[ev.Entry], lines: Sequence[bytes] = ()) -> list[Finding]:
    """Every violation of every rule, the first rule's first; empty for a log that holds what it claims.

    ``lines``: what the entries were read from, one for each, without newline; without them nobody sees what decoding passes over.
    """
    log = Log(list(entries), lines)
    return [Finding(name, seq, text) for name, rule in RULES.items() for seq, text in rule(log)]
