"""The audit's rules on what a run must have said by then: words that are missing, though what others saw later came of them.

Pure, like all of core/audit.py, in whose rules they are. An emitter's words come in the order in which they were said, and each is in the
log soon (`Log.long_ago`), unless its process died; so each rule asks nothing of lives that ended. Leaves out what came of nothing that the
log shows, and the last words before the end of a run.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from robustrl.core import events as ev
from robustrl.core.audit_log import Found, Log, kind_of
from robustrl.core.roles import RoleKind, RoleState


def planned(log: Log) -> Iterator[int]:
    """Versions of which the configuration asks for an evaluation."""
    config = log.config
    if config.evaluation_prompts:
        yield 0
        if config.evaluation_every:
            yield from range(config.evaluation_every, config.steps, config.evaluation_every)
        yield config.steps


def in_order(log: Log, kind: type[ev.StepMetrics] | type[ev.TrajectoriesConsumed]) -> Found:
    """One life of an emitter tells of the steps in their order; from an earlier one on only after a rollback."""
    newest: dict[tuple[str, int], int] = {}
    for entry in log.entries:
        if isinstance(entry.event, ev.RolledBack | ev.RunResumed):
            newest.clear()
        elif isinstance(entry.event, kind):
            life, step = (entry.source, entry.incarnation), entry.event.step
            if life in newest and step <= newest[life]:
                yield entry.seq, f"{entry.source} tells of step {step} after step {newest[life]}"
            newest[life] = step


def announced_before(log: Log) -> Found:
    """No version is evaluated before there is one."""
    for seq, event in log.all(ev.EvaluationDone):
        if (early := log.announced.get(event.version, 0.0) - log.times[seq]) > log.late:
            yield seq, f"an evaluation of version {event.version} {early:.1f} s before that version was announced"


def rated(log: Log) -> Found:
    """The rollout manager counts a trajectory once the journal has said that it ended, or an evaluation has its answer, and no other."""
    if not log.one_life("rollout_manager", "request_manager", "task_runner"):
        return
    newest = max(log.steps, default=0)
    evaluated = sum(log.config.evaluation_prompts for version in planned(log) if version == 0 or version <= newest)
    at, ended = [-math.inf], [0]
    for entry in log.entries:
        if entry.source == "request_manager" and isinstance(entry.event, ev.TrajectoriesFinished | ev.TrajectoriesDropped):
            at.append(entry.at)
            ended.append(ended[-1] + len(entry.event.ids))
    node_of = {event.role: event.node for _, event in log.all(ev.RoleStarted)}
    for entry in log.entries:
        if not isinstance(sample := entry.event, ev.RoleSample) or sample.role != "rollout_manager" or entry.t >= log.long_ago:
            continue
        one_clock = node_of.get(entry.source) == node_of.get("request_manager")
        count = ended[bisect.bisect_right(at, entry.at) - 1 if one_clock else -1]
        if sample.progress > count + evaluated:
            what = f"{sample.progress} answers were rated, for evaluations up to {evaluated} of them"
            yield entry.seq, f"{what}; of {count} the log tells that they had ended"
            return


def evaluated(log: Log) -> Found:
    """An evaluation comes before what follows it in the order of the training loop: the metrics of a later step, the batch of one."""
    due = list(planned(log))
    done: set[int] = set()
    first: dict[int, int] = {}
    whole = log.one_life("task_runner", "rollout_manager", "request_manager")
    accused: set[int] = set()
    for entry in log.entries:
        passed, begun = -1, 0
        match entry.event:
            case ev.EvaluationDone(version=version):
                done.add(version)
            case ev.StepMetrics(step=step) if kind_of(entry.source) is RoleKind.TASK_RUNNER:
                begun = first.setdefault(entry.incarnation, 0 if entry.incarnation == 1 else step)
                passed = step - 1
        for version in due:
            if begun <= version <= passed and version not in done | accused:
                accused.add(version)
                yield entry.seq, f"metrics of step {passed + 1}, and no evaluation of version {version} before it was trained"
    if not whole:
        return
    for seq, started in log.all(ev.TrajectoriesStarted):
        passed = max(0, started.batch - 1 - log.config.staleness)
        for version in due:
            if version <= passed and version not in done | accused and log.times[seq] < log.long_ago:
                accused.add(version)
                yield seq, f"work on batch {started.batch} was given out, and no evaluation of version {version} was done"


_JOURNALLED_BY_THEN = 3.0
"""Seconds in which the journal tells of the tokens of what has ended: it hears of them in 0.2 s and tells each second (1.7 s was seen)."""


def journalled(log: Log) -> Found:
    """The journal has told of the tokens of what ended a while ago. Asked only where nobody but a trainer died, was late or in doubt."""
    named = log.all(ev.RunStarted)[0][1].config if log.all(ev.RunStarted) else {}  # earlier versions told of none
    if not log.config.journal_tokens or "recovery" not in named or _disturbed(log):
        return
    moved = {i for _, event in log.all(ev.TrajectoriesMoved) for i in event.ids}
    rollout = {i: event.rollout for _, event in log.all(ev.TrajectoriesStarted) for i in event.ids if i not in moved}
    stood: dict[str, float] = defaultdict(float)
    for _, sample in log.all(ev.RoleSample):
        stood[sample.role] = max(stood[sample.role], sample.loop_age, sample.lag)
    told: Counter[str] = Counter()
    newest = {(event.role, event.incarnation): event.tokens for _, event in log.all(ev.TokensJournalled)}
    for (name, _), tokens in newest.items():
        told[name] += tokens
    ended: Counter[str] = Counter()
    accused: set[str] = set()
    for seq, event in log.all(ev.TrajectoriesFinished):
        for i, tokens, turns in zip(event.ids, event.tokens, event.tool_turns, strict=False):
            if turns == 0 and i in rollout:  # the answers of tools are not generated
                ended[rollout[i]] += tokens
        for role in {rollout[i] for i in event.ids if i in rollout} - accused:
            patience = _JOURNALLED_BY_THEN + stood[role] + stood["request_manager"]
            if ended[role] > told[role] and log.times[seq] + patience < log.long_ago:
                accused.add(role)
                yield seq, f"answers with {ended[role]} tokens of {role} had ended; {told[role]} of its tokens were journalled to the end"


def _disturbed(log: Log) -> bool:
    odd = ev.FaultPlanned | ev.WarningRaised | ev.NodeLost | ev.RunResumed | ev.ClockGap
    if any(isinstance(entry.event, odd) for entry in log.entries):
        return True
    ends = ev.ProcessExited | ev.RestartDecided | ev.RoleOrdered | ev.Verdict
    return any(isinstance(entry.event, ends) and kind_of(entry.event.role) is not RoleKind.TRAINER for entry in log.entries)


def followed(log: Log) -> Found:
    """What follows the commit of the last step of a run that was cut short, where its keeper and the task runner lived on."""
    if log.status in ("", "done") or not log.steps:
        return
    last = max(log.steps)
    version, keeper = log.steps[last].version, log.steps[last].holder
    committed = [seq for seq, event in log.all(ev.OptimizerStepCommitted) if event.step == last][-1]
    quiet = log.one_life(keeper) and log.times[committed] < log.long_ago
    if quiet and all(event.version != version for _, event in log.all(ev.VersionAnnounced)):
        before = log.entries[-1].t - log.times[committed]
        yield committed, f"version {version} was committed {before:.1f} s before the end, and never announced"


def measured(log: Log) -> Found:
    """A step's metrics are told as soon as rollouts hear of its version, the last one's too."""
    if log.status in ("", "done") or not log.steps or not log.one_life("task_runner", "rollout_manager", "request_manager"):
        return
    last = max(log.steps)
    pulled = [seq for seq, event in log.all(ev.PullStarted) if event.version == log.steps[last].version and event.version > 0]
    if pulled and log.times[pulled[0]] < log.long_ago and all(event.step != last for _, event in log.all(ev.StepMetrics)):
        yield pulled[0], f"version {log.steps[last].version} is pulled, and step {last} has no metrics"


def reached(log: Log) -> Found:
    """A run is done once each rollout has the last step's version."""
    ordered = {event.role for _, event in log.all(ev.RoleOrdered)}
    if log.status != "done" or any(isinstance(entry.event, ev.RunResumed | ev.RolledBack) for entry in log.entries) or not log.steps:
        return
    changes = [event for _, event in log.all(ev.RoleStateChanged)]
    failed = {event.role for event in changes if event.new == RoleState.FAILED} | ordered
    served = {event.role for event in changes if event.new == RoleState.HEALTHY} & log.ran.keys()
    last = log.steps[max(log.steps)].version
    for role in sorted(served - failed):
        if max(log.ran[role]) < last:
            yield log.end, f"the run is called done, and {role} only came to version {max(log.ran[role])} of {last}"
