"""The rules that a run's log must satisfy, so that every claim made from it can be recomputed from the log alone.

Promises: pure; the rules lean on what events say about each other, so a log is found out even when its numbers and its chain were computed
anew after an event was removed, doubled or altered. Where two emitters may reach the host in either order, no rule asks for an order.
Leaves out: whether an event that no other contradicts is true (a metric's value, a text).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import msgspec

from robustrl.config import JobConfig
from robustrl.core import events as ev
from robustrl.core.ledger import Ledger, LedgerError
from robustrl.core.roles import RoleId, RoleKind, RoleState, check_transition, first_state

_E = TypeVar("_E", bound=msgspec.Struct)


class Finding(NamedTuple):
    rule: str
    seq: int
    """The entry that shows it (its line in the log, where numbers are in order)."""
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: entry {self.seq}: {self.text}"


class _Log:
    """The entries, and what several rules ask of them."""

    def __init__(self, entries: Sequence[ev.Entry]) -> None:
        self.entries = entries
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
    def ran(self) -> dict[str, set[int]]:
        """Rollout -> the versions that its engine ran on."""
        ran: dict[str, set[int]] = {}
        for _, event in self.all(ev.PullCommitted):
            ran.setdefault(event.target, set()).add(event.version)
        return ran

    def may_lack(self, step: int) -> bool:
        """A run that was cut short may lack the events that follow its last step's commit."""
        return self.status != "done" and step == max(self.steps, default=0)


_Found = Iterator[tuple[int, str]]
_Rule = Callable[[_Log], _Found]


def _schema(log: _Log) -> _Found:
    """The log says which schema it follows, and it is one that this program knows."""
    for seq, event in log.all(ev.RunStarted):
        if event.schema != ev.SCHEMA:
            yield seq, f"schema {event.schema}; this program knows {ev.SCHEMA}"


def _chain(log: _Log) -> _Found:
    """Each entry's chain value follows from the one before and its own content."""
    previous = ev.GENESIS
    for entry in log.entries:
        if ev.seal(entry, previous)[0].chain != entry.chain:
            yield entry.seq, "its content or an entry before it was changed"
        previous = entry.chain


def _sequence(log: _Log) -> _Found:
    """Entries are numbered from 1 without gaps, and host time never runs backwards."""
    before = 0.0
    for number, entry in enumerate(log.entries, 1):
        if entry.seq != number:
            yield entry.seq, f"number {number} is due here"
        if number > 1 and entry.t < before:
            yield entry.seq, f"its time {entry.t:.6f} lies before that of the entry ahead of it ({before:.6f})"
        before = entry.t


def _config(log: _Log) -> _Found:
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


def _closing(log: _Log) -> _Found:
    """One closing record, at the very end; a run that is called done was decided to be."""
    if not log.entries or not isinstance(log.entries[-1].event, ev.RunEnded):
        yield log.end, "the log does not end with run_ended: the run goes on, or was cut off"
    for seq, _ in log.all(ev.RunEnded)[:-1]:
        yield seq, "a closing record before the end"
    if len(decided := log.all(ev.EndDecided)) > 1:
        yield decided[1][0], "the end was decided twice"
    if log.status not in ("", "done", "stopped", "failed"):
        yield log.end, f"status {log.status!r}: must be done, stopped or failed"
    if log.status == "done" and [event.status for _, event in decided] != ["done"]:
        yield log.end, "the run is called done, but no verdict says so"


def _ledger(log: _Log) -> _Found:
    """Each trajectory is started once and ends once, consumed or dropped, before the closing record."""
    ledger = Ledger()
    for entry in log.entries:
        try:
            match entry.event:
                case ev.TrajectoriesStarted() as event:
                    ledger.start(event.ids)
                case ev.TrajectoriesConsumed() as event:
                    ledger.consume(event.ids)
                case ev.TrajectoriesDropped() as event:
                    ledger.drop(event.ids, event.reason)
        except LedgerError as error:
            yield entry.seq, str(error)
    if left := ledger.open_ids():
        yield log.end, f"{len(left)} trajectories have no end: {_some(left)}"


def _finished(log: _Log) -> _Found:
    """A trajectory is finished at most once, after its start; only a finished one is consumed; its lists fit together."""
    started: dict[int, tuple[int, int]] = {}
    finished: set[int] = set()
    for entry in log.entries:
        match entry.event:
            case ev.TrajectoriesStarted() as event:
                started.update(dict.fromkeys(event.ids, (event.batch, event.group)))
            case ev.TrajectoriesFinished() as event:
                if wrong := [i for i in event.ids if started.get(i) != (event.batch, event.group)]:
                    yield entry.seq, f"finished in batch {event.batch}, group {event.group}, but not started there: {_some(wrong)}"
                if twice := [i for i in event.ids if i in finished]:
                    yield entry.seq, f"finished twice: {_some(twice)}"
                finished.update(event.ids)
                sizes = {len(x) for x in (event.ids, event.texts, event.rewards, event.tokens, event.versions, event.tool_turns)}
                if len(sizes) != 1:
                    yield entry.seq, f"its lists have different lengths: {sorted(sizes)}"
            case ev.TrajectoriesConsumed() as event:
                if early := [i for i in event.ids if i not in finished]:
                    yield entry.seq, f"consumed but never finished: {_some(early)}"


def _steps(log: _Log) -> _Found:
    """Optimizer steps follow each other without gaps, up to the last in a run called done; step b trains batch b and makes version b."""
    expected = 0
    for seq, event in log.all(ev.OptimizerStepCommitted):
        if event.step != expected:
            yield seq, f"step {event.step} was committed, step {expected} is due"
        expected = event.step + 1
        if event.batch != event.step or event.version != event.step:
            yield seq, f"step {event.step} claims batch {event.batch} and version {event.version}"
        if event.step > log.config.steps:
            yield seq, f"step {event.step} of {log.config.steps}"
        if foreign := [i for i in event.consumed if log.batch_of.get(i) != event.batch]:
            yield seq, f"step {event.step} consumed trajectories that are not of batch {event.batch}: {_some(foreign)}"
    if log.status == "done" and (last := max(log.steps, default=0)) < log.config.steps:
        yield log.end, f"the run is called done after step {last} of {log.config.steps}"


def _consumption(log: _Log) -> _Found:
    """The trajectories marked consumed by a step are those that its committed state names; each step marks once."""
    marked: dict[int, int] = {}
    for seq, event in log.all(ev.TrajectoriesConsumed):
        if event.step in marked:
            yield seq, f"step {event.step} marked its trajectories before"
        marked[event.step] = seq
        if event.step not in log.steps:
            yield seq, f"consumed by step {event.step}, which was never committed"
        elif Counter(event.ids) != Counter(log.steps[event.step].consumed):
            odd = set(event.ids) ^ set(log.steps[event.step].consumed)
            yield seq, f"marked as consumed and named in step {event.step}'s committed state differ in {_some(sorted(odd))}"
    for seq, committed in log.all(ev.OptimizerStepCommitted):
        if committed.consumed and committed.step not in marked:
            yield seq, f"step {committed.step} consumed {len(committed.consumed)} trajectories and none was marked"


def _announced(log: _Log) -> _Found:
    """Version numbers only rise; a number comes again only from a later life of its holder; each is announced after its step's commit."""
    committed: set[int] = set()
    newest = -1
    lives: dict[str, int] = {}
    for entry in log.entries:
        match entry.event:
            case ev.OptimizerStepCommitted() as event:
                committed.add(event.version)
            case ev.VersionAnnounced() as event:
                again = event.version == newest and event.incarnation > lives.get(event.holder, event.incarnation)
                lives[event.holder] = event.incarnation
                if event.version <= newest and not again:
                    yield entry.seq, f"version {event.version} was announced after version {newest}"
                newest = max(newest, event.version)
                if event.version not in committed:
                    yield entry.seq, f"version {event.version} was announced before its optimizer step was committed"
    announced = {event.version for _, event in log.all(ev.VersionAnnounced)}
    for seq, step in log.all(ev.OptimizerStepCommitted):
        if step.version not in announced and not log.may_lack(step.step):
            yield seq, f"version {step.version} was committed and never announced"


def _digest(log: _Log) -> _Found:
    """A version number has one digest, in every event that names both."""
    digests: dict[int, str] = {}
    for entry in log.entries:
        if isinstance(event := entry.event, ev.OptimizerStepCommitted | ev.VersionAnnounced | ev.PullCommitted):
            known = digests.setdefault(event.version, event.digest)
            if known != event.digest:
                yield entry.seq, f"version {event.version} has digest {event.digest} here and {known} before"


def _pulls(log: _Log) -> _Found:
    """A version is pulled, after its announcement, from one who holds it, by a role that lives; what a rollout runs on only rises."""
    holders: dict[int, set[str]] = defaultdict(set)
    life: dict[str, int] = {}
    begun: dict[str, set[int]] = defaultdict(set)
    runs: dict[tuple[str, int], int] = {}
    for entry in log.entries:
        match entry.event:
            case ev.VersionAnnounced() as event:
                holders[event.version].add(event.holder)
            case ev.RoleStarted() as event:
                life[event.role] = event.incarnation
            case ev.PullStarted() as event:
                if event.source not in holders[event.version]:
                    yield entry.seq, f"{event.target} pulls version {event.version} from {event.source}, which does not hold it yet"
                begun[event.target].add(event.version)
            case ev.PullCommitted() as event:
                target, version = event.target, event.version
                if event.source not in holders[version]:
                    yield entry.seq, f"{target} committed version {version} from {event.source}, which does not hold it yet"
                if version not in begun.pop(target, set()):
                    yield entry.seq, f"{target} committed version {version} without a pull of it"
                if life.get(target) != event.incarnation:
                    yield entry.seq, f"{target} incarnation {event.incarnation} committed; incarnation {life.get(target)} lives"
                if version <= (before := runs.get((target, event.incarnation), -1)):
                    yield entry.seq, f"{target} committed version {version} after version {before}"
                if event.probe_gap > (limit := log.config.probe_limit):
                    yield entry.seq, f"{target} committed version {version} with probe gap {event.probe_gap:g} > {limit:g}"
                runs[target, event.incarnation] = version
                holders[version].add(target)
            case ev.RoleSample(role=role, version=version) if version >= 0:
                # a rollout that dies, or a run that ends, between commit and event is no liar
                if version not in (ran := log.ran.get(role, {version})) and (version < max(ran) or log.status == "done"):
                    yield entry.seq, f"{role} was seen to run on version {version}, which it never committed"


def _staleness(log: _Log) -> _Found:
    """Batch b is dispatched by version b - 1 - staleness or newer; its tokens are of versions up to b - 1 that its rollouts ran on."""
    origin: dict[int, tuple[list[str], int]] = {}
    for entry in log.entries:
        match entry.event:
            case ev.TrajectoriesStarted() as event:
                oldest = max(0, event.batch - 1 - log.config.staleness)
                if not oldest <= event.version < event.batch:
                    yield entry.seq, f"batch {event.batch} was dispatched by version {event.version}, not {oldest} to {event.batch - 1}"
                elif event.version not in log.ran.get(event.rollout, ()):
                    yield entry.seq, f"dispatched to {event.rollout} by version {event.version}, which it never committed"
                origin.update({i: ([event.rollout], event.version) for i in event.ids})
            case ev.TrajectoriesMoved() as event:
                if event.version not in log.ran.get(event.target, ()):
                    yield entry.seq, f"moved to {event.target} at version {event.version}, which it never committed"
                for i in event.ids:
                    if i not in origin or origin[i][0][-1] != event.source:
                        yield entry.seq, f"trajectory {i} moved from {event.source}, where it was not"
                    else:
                        origin[i][0].append(event.target)
            case ev.TrajectoriesFinished() as event:
                for i, tokens, runs in zip(event.ids, event.tokens, event.versions, strict=False):
                    versions = [version for version, _ in runs]
                    rollouts, stamped = origin.get(i, ([], 0))
                    if sum(count for _, count in runs) != tokens:
                        yield entry.seq, f"trajectory {i} has {tokens} tokens, its versions account for {sum(count for _, count in runs)}"
                    if versions != sorted(versions) or not all(stamped <= version < event.batch for version in versions):
                        yield entry.seq, f"trajectory {i} of batch {event.batch}, dispatched by version {stamped}, has tokens of {versions}"
                    elif rollouts and (foreign := sorted({*versions}.difference(*(log.ran.get(rollout, ()) for rollout in rollouts)))):
                        yield entry.seq, f"trajectory {i} has tokens of versions {foreign}, on which {' and '.join(rollouts)} never ran"


def _metrics(log: _Log) -> _Found:
    """Each optimizer step from 1 on has its metrics, once."""
    rows: set[int] = set()
    for seq, event in log.all(ev.StepMetrics):
        if event.step in rows:
            yield seq, f"step {event.step} has its metrics twice"
        if event.step < 1 or event.step not in log.steps:
            yield seq, f"metrics of step {event.step}, which was never committed"
        rows.add(event.step)
    for seq, step in log.all(ev.OptimizerStepCommitted):
        if step.step >= 1 and step.step not in rows and not log.may_lack(step.step):
            yield seq, f"step {step.step} has no metrics"


def _evaluations(log: _Log) -> _Found:
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


def _roles(log: _Log) -> _Found:
    """Roles start on nodes that are there, lives are numbered upward, each change of state is legal and follows its cause; all end."""
    nodes: set[str] = set()
    state: dict[tuple[str, int], RoleState] = {}
    life: dict[str, int] = {}
    ready: set[tuple[str, int]] = set()
    loaded: set[tuple[str, int]] = set()
    for entry in log.entries:
        match entry.event:
            case ev.NodeStarted(node=node):
                if node in nodes:
                    yield entry.seq, f"{node} started twice"
                nodes.add(node)
            case ev.NodeLost(node=node):
                nodes.discard(node)
            case ev.RoleStarted(role=role, incarnation=incarnation):
                if entry.event.node not in nodes:
                    yield entry.seq, f"{role} started on {entry.event.node}, which is not there"
                if incarnation != life.get(role, 0) + 1:
                    yield entry.seq, f"{role} incarnation {incarnation} started after incarnation {life.get(role, 0)}"
                life[role] = incarnation
                state[role, incarnation] = first_state(incarnation)
            case ev.RoleReady(role=role, incarnation=incarnation):
                if (role, incarnation) not in state or (role, incarnation) in ready:
                    yield entry.seq, f"{role} incarnation {incarnation} became ready twice, or never started"
                ready.add((role, incarnation))
            case ev.PullCommitted(target=role, incarnation=incarnation):
                loaded.add((role, incarnation))
            case ev.RoleStateChanged(role=role, incarnation=incarnation, old=old, new=new):
                key = role, incarnation
                if state.get(key) != old:
                    yield entry.seq, f"{role} incarnation {incarnation}: {old} -> {new}, but it was {state.get(key, 'never started')}"
                try:
                    check_transition(role, RoleState(old), RoleState(new))
                    if new in (RoleState.STALE, RoleState.HEALTHY) and key not in ready:
                        yield entry.seq, f"{role} incarnation {incarnation} is {new} before it was ready"
                    if new == RoleState.HEALTHY and RoleId.parse(role).kind is RoleKind.ROLLOUT and key not in loaded:
                        yield entry.seq, f"{role} incarnation {incarnation} is healthy without a committed version"
                    state[key] = RoleState(new)
                except ValueError as error:
                    yield entry.seq, str(error)
    for (role, incarnation), last in state.items():
        if log.status and life.get(role) == incarnation and last not in (RoleState.FAILED, RoleState.STOPPED):
            yield log.end, f"the run ended and {role} incarnation {incarnation} is left {last}"


def _emitters(log: _Log) -> _Found:
    """Each life of each source numbers its events from 1, without gaps or doubles."""
    last: Counter[tuple[str, int]] = Counter()
    for entry in log.entries:
        key = entry.source, entry.incarnation
        if entry.n != last[key] + 1:
            yield entry.seq, f"{entry.source} incarnation {entry.incarnation}: event {entry.n} follows event {last[key]}"
        last[key] = entry.n


RULES: dict[str, _Rule] = {
    "schema": _schema,
    "chain": _chain,
    "sequence": _sequence,
    "config": _config,
    "closing": _closing,
    "ledger": _ledger,
    "finished": _finished,
    "steps": _steps,
    "consumption": _consumption,
    "versions": _announced,
    "digest": _digest,
    "pulls": _pulls,
    "staleness": _staleness,
    "metrics": _metrics,
    "evaluations": _evaluations,
    "roles": _roles,
    "emitters": _emitters,
}
"""In the order in which violations are told: what the file is, what it claims, who said it."""


def audit(entries: Iterable[ev.Entry]) -> list[Finding]:
    """Every violation of every rule, the first rule's first; empty for a log that holds what it claims."""
    log = _Log(list(entries))
    return [Finding(name, seq, text) for name, rule in RULES.items() for seq, text in rule(log)]


def _some(ids: Sequence[int], most: int = 5) -> str:
    return ", ".join(map(str, ids[:most])) + (f" and {len(ids) - most} more" if len(ids) > most else "")
