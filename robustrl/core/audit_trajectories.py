"""The audit's rules on trajectories: each starts once and ends once, each token has one version, and steps consume what they name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

from robustrl.core import events as ev
from robustrl.core.audit_log import Found, Log, some
from robustrl.core.audit_told import in_order, rated
from robustrl.core.ledger import Ledger, LedgerError
from robustrl.core.recovery import FULL


def ledger(log: Log) -> Found:
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
        yield log.end, f"{len(left)} trajectories have no end: {some(left)}"


def finished(log: Log) -> Found:
    """A trajectory is finished at most once, after its start; only a finished one is consumed; its lists fit together."""
    started: dict[int, tuple[int, int]] = {}
    finished: set[int] = set()
    for entry in log.entries:
        match entry.event:
            case ev.TrajectoriesStarted() as event:
                started.update(dict.fromkeys(event.ids, (event.batch, event.group)))
            case ev.TrajectoriesFinished() as event:
                if wrong := [i for i in event.ids if started.get(i) != (event.batch, event.group)]:
                    yield entry.seq, f"finished in batch {event.batch}, group {event.group}, but not started there: {some(wrong)}"
                if twice := [i for i in event.ids if i in finished]:
                    yield entry.seq, f"finished twice: {some(twice)}"
                if not _rising(event.ids):
                    yield entry.seq, f"finished out of the order of numbers: {some(event.ids)}"
                finished.update(event.ids)
                sizes = {len(x) for x in (event.ids, event.texts, event.rewards, event.tokens, event.versions, event.tool_turns)}
                if len(sizes) != 1:
                    yield entry.seq, f"its lists have different lengths: {sorted(sizes)}"
            case ev.TrajectoriesConsumed() as event:
                if early := [i for i in event.ids if i not in finished]:
                    yield entry.seq, f"consumed but never finished: {some(early)}"
    yield from rated(log)


def _rising(ids: list[int]) -> bool:
    return all(one < other for one, other in pairwise(ids))


def consumption(log: Log) -> Found:
    """The trajectories marked consumed by a step are those that its committed state names, in order; each step marks once."""
    marked: dict[int, int] = {}
    for seq, event in log.all(ev.TrajectoriesConsumed):
        if event.step in marked:
            yield seq, f"step {event.step} marked its trajectories before"
        marked[event.step] = seq
        if event.step not in log.steps:
            yield seq, f"consumed by step {event.step}, which was never committed"
        elif Counter(event.ids) != Counter(log.steps[event.step].consumed):
            odd = set(event.ids) ^ set(log.steps[event.step].consumed)
            yield seq, f"marked as consumed and named in step {event.step}'s committed state differ in {some(sorted(odd))}"
        elif not _rising(event.ids):
            yield seq, f"step {event.step} marked its trajectories in another order than that of their numbers"
    yield from in_order(log, ev.TrajectoriesConsumed)
    for seq, committed in log.all(ev.OptimizerStepCommitted):
        if not _rising(committed.consumed):
            yield seq, f"step {committed.step} consumed its trajectories in another order than that of their numbers"
        if committed.consumed and committed.step not in marked:
            yield seq, f"step {committed.step} consumed {len(committed.consumed)} trajectories and none was marked"


def batches(log: Log) -> Found:
    """A batch is of as many prompts as the configuration says, each in one group of as many samples, once; a step trains no more."""
    prompts, samples = log.config.prompts_per_step, log.config.samples_per_prompt
    groups: dict[int, set[int]] = defaultdict(set)
    # else batches may be generated again
    once = not log.all(ev.RunResumed) and all(event.mode != FULL for _, event in log.all(ev.RestartDecided))
    for seq, event in log.all(ev.TrajectoriesStarted):
        if not 0 <= event.group < prompts or len(event.ids) != samples:
            what = f"group {event.group} of batch {event.batch} was started with {len(event.ids)} samples"
            yield seq, f"{what}; asked for were {prompts} prompts a step and {samples} samples of each"
        if not _rising(event.ids):
            yield seq, f"group {event.group} of batch {event.batch} was started out of the order of numbers: {some(event.ids)}"
        if once and event.group in groups[event.batch]:
            yield seq, f"group {event.group} of batch {event.batch} was started before"
        groups[event.batch].add(event.group)
    for seq, step in log.all(ev.OptimizerStepCommitted):
        if step.step >= 1 and (len(groups[step.batch]) != prompts or len(step.consumed) > prompts * samples):
            what = f"step {step.step} consumed {len(step.consumed)} trajectories of {len(groups[step.batch])} prompts"
            yield seq, f"{what}; asked for were {prompts} prompts with {samples} samples of each"


def tokens(log: Log) -> Found:
    """Each token of a trajectory has one version, and versions rise along it. What was kept when it moved stays; what is generated after
    that is of the new rollout's version or a newer one, and marked so.
    """
    moves: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for entry in log.entries:
        match entry.event:
            case ev.TrajectoriesMoved() as event:
                if len(event.kept) != len(event.ids):
                    yield entry.seq, f"{len(event.ids)} trajectories moved, and the tokens of {len(event.kept)} were kept"
                for i, kept in zip(event.ids, event.kept, strict=False):
                    if moves[i] and kept < moves[i][-1][1]:
                        yield entry.seq, f"trajectory {i} had {moves[i][-1][1]} tokens when it moved before, and now {kept}"
                    moves[i].append((event.version, kept))
            case ev.TrajectoriesFinished() as event:
                for i, count, runs, turns in zip(event.ids, event.tokens, event.versions, event.tool_turns, strict=False):
                    yield from ((entry.seq, f"trajectory {i} {text}") for text in _marks(count, runs, moves[i], turns > 0))


def _marks(count: int, runs: list[tuple[int, int]], moves: list[tuple[int, int]], tools: bool) -> Iterator[str]:
    versions = [version for version, _ in runs]
    if (marked := sum(n for _, n in runs)) != count:
        yield f"has {count} tokens, its versions account for {marked}"
    if versions != sorted(set(versions)) or any(n < 1 for _, n in runs):
        yield f"has tokens of versions {versions}: must rise, each with a token at least"
    for version, kept in moves:
        if kept > count:
            yield f"ended with {count} tokens; {kept} were kept when it moved"
        # the answers of tools are in the runs, but not in what is kept
        if not tools and (older := sum(n for v, n in runs if v < version)) > kept:
            yield f"has {older} tokens of versions below {version}, but only {kept} were kept when it moved to a rollout with that version"


def staleness(log: Log) -> Found:
    """Batch b is dispatched by version b - 1 - staleness or newer; its tokens are of versions up to b - 1 that its rollouts ran on."""
    origin: dict[int, tuple[list[str], int]] = {}
    for entry in log.entries:
        match entry.event:
            case ev.TrajectoriesStarted() as event:
                oldest = max(0, event.batch - 1 - log.config.staleness)
                if not oldest <= log.step_of.get(event.version, event.version) < event.batch:
                    yield entry.seq, f"batch {event.batch} was dispatched by version {event.version}, not {oldest} to {event.batch - 1}"
                elif event.version not in log.ran.get(event.rollout, ()) and not log.may_have_run(event.rollout, event.version, entry.t):
                    yield entry.seq, f"dispatched to {event.rollout} by version {event.version}, which it never committed"
                origin.update({i: ([event.rollout], event.version) for i in event.ids})
            case ev.TrajectoriesMoved() as event:
                if event.version not in log.ran.get(event.target, ()) and not log.may_have_run(event.target, event.version, entry.t):
                    yield entry.seq, f"moved to {event.target} at version {event.version}, which it never committed"
                for i in event.ids:
                    if i not in origin or origin[i][0][-1] != event.source:
                        yield entry.seq, f"trajectory {i} moved from {event.source}, where it was not"
                    else:
                        origin[i][0].append(event.target)
            case ev.TrajectoriesFinished() as event:
                for i, runs in zip(event.ids, event.versions, strict=False):
                    versions = [version for version, _ in runs]
                    rollouts, stamped = origin.get(i, ([], 0))
                    if not all(stamped <= version and log.step_of.get(version, version) < event.batch for version in versions):
                        yield entry.seq, f"trajectory {i} of batch {event.batch}, dispatched by version {stamped}, has tokens of {versions}"
                    elif rollouts and (foreign := sorted(_foreign(log, versions, rollouts, entry.t))):
                        yield entry.seq, f"trajectory {i} has tokens of versions {foreign}, on which {' and '.join(rollouts)} never ran"


def _foreign(log: Log, versions: list[int], rollouts: list[str], seen: float) -> Iterator[int]:
    """Versions on which none of these rollouts can have run."""
    for version in {*versions}.difference(*(log.ran.get(rollout, ()) for rollout in rollouts)):
        if not any(log.may_have_run(rollout, version, seen) for rollout in rollouts):
            yield version
