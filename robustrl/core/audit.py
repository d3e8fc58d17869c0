"""The rules that a run's log must satisfy, so that every claim made from it can be recomputed from the log alone.

Promises: pure; the rules lean on what events say about each other, so a log is found out even when its numbers and its chain were computed
anew after an event was removed, doubled or altered. Where two emitters may reach the host in either order, no rule asks for an order.
Leaves out: whether an event that no other contradicts is true (a metric's value, a text). Here: the table of rules, and those on the log as
such and on optimizer steps; the others are in audit_*.py by theme.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import msgspec

from robustrl.config import JobConfig
from robustrl.core import audit_counts, audit_faults, audit_roles, audit_trajectories, audit_weights
from robustrl.core import events as ev
from robustrl.core.audit_log import Found, Log, Rule, some
from robustrl.core.roles import RoleState


class Finding(NamedTuple):
    rule: str
    seq: int
    """The entry that shows it (its line in the log, where numbers are in order)."""
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: entry {self.seq}: {self.text}"


def _schema(log: Log) -> Found:
    """The log says which schema it follows, and it is one that this program knows."""
    for seq, event in log.all(ev.RunStarted):
        if event.schema != ev.SCHEMA:
            yield seq, f"schema {event.schema}; this program knows {ev.SCHEMA}"


def _chain(log: Log) -> Found:
    """Each entry's chain value follows from the one before and its own content."""
    previous = ev.GENESIS
    for entry in log.entries:
        if ev.seal(entry, previous)[0].chain != entry.chain:
            yield entry.seq, "its content or an entry before it was changed"
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
    if not log.entries or not isinstance(log.entries[0].event, ev.RunStarted):
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


def _metrics(log: Log) -> Found:
    """Each optimizer step from 1 on has its metrics, once each time that it was made."""
    rows: Counter[int] = Counter()
    for seq, event in log.all(ev.StepMetrics):
        rows[event.step] += 1
        if event.step < 1 or event.step not in log.steps:
            yield seq, f"metrics of step {event.step}, which was never committed"
        elif rows[event.step] > log.commits[event.step]:
            yield seq, f"step {event.step} has its metrics twice"
    for seq, step in log.all(ev.OptimizerStepCommitted):
        if step.step >= 1 and step.step not in rows and not log.may_lack(step.step):
            yield seq, f"step {step.step} has no metrics"


def _evaluations(log: Log) -> Found:
    """Evaluations are those that the configuration asks for, each once, and of a version that every rollout had or passed."""
    config = log.config
    every = config.evaluation_every
    planned = {0, config.steps, *(range(every, config.steps, every) if every else ())} if config.evaluation_prompts else set()
    done: set[int] = set()
    failed = {event.role for _, event in log.all(ev.RoleStateChanged) if event.new == RoleState.FAILED}
    served = {event.role for _, event in log.all(ev.RoleStateChanged) if event.new == RoleState.HEALTHY} - failed
    for seq, event in log.all(ev.EvaluationDone):
        if event.version in done or event.version not in planned:
            yield seq, f"an evaluation of version {event.version}, which was done before or never asked for"
        done.add(event.version)
        for role in sorted(served & log.ran.keys()):
            if max(log.ran[role]) < event.version:
                yield seq, f"an evaluation of version {event.version}, but {role} only came to version {max(log.ran[role])}"
    if log.status == "done" and (missing := planned - done):
        yield log.end, f"no evaluation of version {min(missing)}"


def _emitters(log: Log) -> Found:
    """Each life of each source numbers its events from 1, without gaps or doubles, and its clock goes on between two of them."""
    last: dict[tuple[str, int], ev.Entry] = {}
    for entry in log.entries:
        key, life = (entry.source, entry.incarnation), f"{entry.source} incarnation {entry.incarnation}"
        before = last.get(key)
        if entry.n != (due := before.n + 1 if before else 1):
            yield entry.seq, f"{life}: event {entry.n} follows event {due - 1}"
        if before and entry.at < before.at:
            yield entry.seq, f"{life}: its clock said {before.at:.6f}, and then {entry.at:.6f}"
        if before and (entry.at, entry.event) == (before.at, before.event):
            yield entry.seq, f"{life}: the same event as the one before, at the same moment"
        last[key] = entry


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
    "tokens": audit_trajectories.tokens,
    "versions": audit_weights.announced,
    "digest": audit_weights.digest,
    "pulls": audit_weights.pulls,
    "staleness": audit_trajectories.staleness,
    "serving": audit_weights.serving,
    "transfers": audit_weights.transfers,
    "copies": audit_counts.copies,
    "metrics": _metrics,
    "evaluations": _evaluations,
    "roles": audit_roles.roles,
    "recoveries": audit_roles.recoveries,
    "samples": audit_counts.samples,
    "journalled": audit_counts.journalled,
    "settings": audit_counts.settings,
    "emitters": _emitters,
    "faults": audit_faults.faults,
    "verdicts": audit_faults.verdicts,
}
"""In the order in which violations are told: what the file is, what it claims, who said it."""


def audit(entries: Iterable[ev.Entry]) -> list[Finding]:
    """Every violation of every rule, the first rule's first; empty for a log that holds what it claims."""
    log = Log(list(entries))
    return [Finding(name, seq, text) for name, rule in RULES.items() for seq, text in rule(log)]
