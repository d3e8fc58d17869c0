"""The audit's rules on what was asked for: the configuration against what there is, and what a run of it must have said by its end.

Pure, like all of core/audit.py, which has them in its table. Each is asked only of a log that came so far, and of what the code that says
it cannot fail to say. Leaves out settings that leave no trace (a seed, a temperature, a deadline).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from robustrl.core import events as ev
from robustrl.core.audit_faults import OF_NODE
from robustrl.core.audit_log import Found, Log, kind_of
from robustrl.core.roles import RoleId, RoleKind

_CLOCK_SET_BACK = 60.0
"""Seconds by which somebody may correct a machine's clock during a run."""


def asked(log: Log) -> Found:
    """The run has the name, the roles and the nodes that its configuration asks for, and answers and copies are within its limits."""
    starts = log.all(ev.RunStarted)
    if not starts or log.broken_config:
        return
    seq, config = starts[0][0], log.config
    if starts[0][1].name != config.name:
        yield seq, f"the run is called {starts[0][1].name!r}, and its configuration {config.name!r}"
    yield from _times(log)
    if begun := log.all(ev.RoleStarted):
        nodes = {event.node for _, event in log.all(ev.NodeStarted)}
        wanted = {f"node-{i}" for i in range(config.nodes)}
        if config.address is None and nodes != wanted:
            yield begun[0][0], f"asked for were {config.nodes} nodes; there were {', '.join(sorted(nodes))}"
    if log.all(ev.TrajectoriesStarted):
        yield from _roles(log)
    yield from _answers(log)
    yield from _task(log)
    every = config.checkpoint_every
    for seq, copy in log.all(ev.SnapshotCopied):
        if copy.holder == "disk" and (not every or copy.step % every):
            yield seq, f"a copy of step {copy.step} on disk; asked for was {f'one each {every} steps' if every else 'none'}"


def _times(log: Log) -> Found:
    before = log.all(ev.RunStarted)[0][1].wall
    for entry in log.entries:
        if isinstance(event := entry.event, ev.RunResumed | ev.RunEnded):
            if event.wall < before - _CLOCK_SET_BACK:
                yield entry.seq, f"its wall time {event.wall:.0f} lies before {before:.0f}, of the entry before that has one"
            before = event.wall


def _roles(log: Log) -> Found:
    """By the first dispatch all of them had started; rollouts may be added later."""
    config = log.config
    counts = {RoleKind.TRAINER: config.trainer_ranks, RoleKind.AGENT_WORKER: config.agent_workers, RoleKind.ROLLOUT: config.rollouts}
    first = log.all(ev.TrajectoriesStarted)[0][0]
    there: dict[RoleKind, set[int]] = defaultdict(set)
    for seq, event in log.all(ev.RoleStarted):
        if (kind := kind_of(event.role)) in counts:
            index = RoleId.parse(event.role).index
            if kind is not RoleKind.ROLLOUT and index >= counts[kind]:
                yield seq, f"{event.role} started; asked for were {counts[kind]}"
            if seq < first:
                there[kind].add(index)
    for kind, count in counts.items():
        if missing := sorted(set(range(count)) - there[kind]):
            yield first, f"work was given out before {kind}-{missing[0]} had started; asked for were {count}"


def _answers(log: Log) -> Found:
    room, most = log.config.max_model_len, log.config.sampling.max_tokens
    for seq, event in log.all(ev.TrajectoriesFinished):
        for i, tokens, turns in zip(event.ids, event.tokens, event.tool_turns, strict=False):
            if tokens >= room:  # the prompt has a token at least
                yield seq, f"trajectory {i} has {tokens} tokens; prompt and answer together have room for {room}"
            elif most is not None and turns == 0 and tokens > most:
                yield seq, f"trajectory {i} has {tokens} tokens; asked for were {most} at most"


_NO_TOOL = ("arithmetic", "arithmetic_long")
_NO_TOOL_FROM = ("reasoning_gym:", "jsonl:", "hf:")
"""Tasks, and sources of tasks, in which no tool answers (rl/tasks.py)."""
_RIGHT_OR_WRONG = ("arithmetic", "arithmetic_tool", "arithmetic_long")
"""Tasks whose own reward is 1 for a right answer and 0 for any other."""


def _task(log: Log) -> Iterator[tuple[int, str]]:
    """Answers are what the configured task makes of them; of a task or a reward function that is not ours nothing is known."""
    task = log.config.task
    toolless = task in _NO_TOOL or task.startswith(_NO_TOOL_FROM)
    ours = task in _RIGHT_OR_WRONG and log.config.reward is None
    for seq, event in log.all(ev.TrajectoriesFinished):
        if toolless and any(event.tool_turns):
            yield seq, f"a tool answered in a trajectory of batch {event.batch}, and the task {task!r} has none"
        if ours and (odd := [reward for reward in event.rewards if reward not in (0, 1)]):
            yield seq, f"a reward of {odd[0]:g}; the task {task!r} gives 0 or 1"
    for seq, done in log.all(ev.EvaluationDone):
        rewards = [reward for sample in done.samples if isinstance(reward := sample.get("reward"), int | float)]
        if ours and (odd := [reward for reward in rewards if reward not in (0, 1)]):
            yield seq, f"an evaluation shows a reward of {odd[0]:g}; the task {task!r} gives 0 or 1"


_SAID_BY_THEN = 30.0
"""Seconds after which must be in the log what is said every second, or beside each step."""


def expected(log: Log) -> Found:
    """What goes on all the time is in the log: copies on the disk, tokens of the journal, progress of pulls, samples of each role."""
    if not log.entries:
        return
    times = {entry.seq: entry.t for entry in log.entries}
    over = log.entries[-1].t - _SAID_BY_THEN
    named = log.all(ev.RunStarted)[0][1].config if log.all(ev.RunStarted) else {}  # earlier versions had neither
    every = log.config.checkpoint_every if "checkpoint_every" in named else 0
    odd = ev.FaultPlanned | ev.WarningRaised | ev.ProcessExited | ev.NodeLost | ev.RunResumed
    trouble = any(isinstance(entry.event, odd) for entry in log.entries)
    due = [seq for seq, event in log.all(ev.OptimizerStepCommitted) if every and event.step and event.step % every == 0]
    if due and times[due[0]] < over and not trouble and not any(event.holder == "disk" for _, event in log.all(ev.SnapshotCopied)):
        yield due[0], "no copy of this step or of a later one reached the disk, and nothing was in its way"
    done = [seq for seq, _ in log.all(ev.TrajectoriesFinished)]
    journals = log.config.journal_tokens and "recovery" in named
    if journals and done and times[done[0]] < over and not trouble and not log.all(ev.TokensJournalled):
        yield done[0], "answers were finished, and no token of any was journalled"
    yield from _progress(log)
    yield from _watched(log, times)


def _progress(log: Log) -> Iterator[tuple[int, str]]:
    """A pull tells of its first bytes at once."""
    told: dict[tuple[str, int], set[int]] = defaultdict(set)
    begun: dict[tuple[str, int], set[int]] = defaultdict(set)
    for entry in log.entries:
        life = (entry.source, entry.incarnation)
        match entry.event:
            case ev.PullStarted(version=version):
                begun[life].add(version)
            case ev.PullProgress(version=version):
                told[life].add(version)
            case ev.PullCommitted() as event if event.bytes > 0 and event.version in begun[life] and event.version not in told[life]:
                yield entry.seq, f"{event.target} received {event.bytes} bytes of version {event.version}, and never told of any before"


def _watched(log: Log, times: dict[int, float]) -> Iterator[tuple[int, str]]:
    """Each life on a node whose agent told of others meanwhile, for so long that it must have told of this one too."""
    ended: dict[tuple[str, int], float] = {}
    for entry in log.entries:
        match entry.event:
            case ev.NodeLost() | ev.RunResumed():
                return
            case ev.FaultPlanned(kind=kind) if kind in OF_NODE:
                return
            case ev.ProcessExited(role=role) | ev.Verdict(role=role) | ev.FaultInjected(role=role) if kind_of(role) is RoleKind.NODE_AGENT:
                return  # it may have been asked to watch while it was not there
            case ev.ProcessExited() | ev.RestartDecided() | ev.RoleOrdered() as end:
                ended.setdefault((end.role, end.incarnation), entry.t)
    node_of: dict[tuple[str, int], str] = {}
    begun: dict[tuple[str, int], int] = {}
    seen: set[tuple[str, int]] = set()
    spans: dict[str, tuple[float, float]] = {}
    for entry in log.entries:
        match entry.event:
            case ev.RoleStarted() as start:
                node_of[start.role, start.incarnation] = start.node
                begun[start.role, start.incarnation] = entry.seq
            case ev.RoleSample() as sample:
                seen.add((sample.role, sample.incarnation))
                if node := node_of.get((entry.source, entry.incarnation)):
                    spans[node] = spans.get(node, (entry.t, entry.t))[0], entry.t
    ready = {(event.role, event.incarnation) for _, event in log.all(ev.RoleReady)}
    for life, seq in begun.items():
        first, last = spans.get(node_of[life], (0.0, 0.0))
        told_for = min(last, ended.get(life, last)) - max(first, times[seq])
        if life in ready and life not in seen and kind_of(life[0]) is not RoleKind.NODE_AGENT and told_for > _SAID_BY_THEN:
            what = f"{life[0]} incarnation {life[1]}"
            yield seq, f"{what} was never seen, though the agent of its node told of others for {told_for:.0f} s after its start"
