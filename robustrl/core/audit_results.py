"""The audit's rules on results: what a step and an evaluation say of themselves, against the trajectories and the configuration.

Pure, like all of core/audit.py, which has them in its table. A step's mean reward, accuracy and length are computed anew from what it
consumed, and its learning rate from the configuration. Leaves out what no other event holds: loss, gradient norm and the like within what
they can be (audit_ranges.py), and the evaluation's trajectories, of which the
log has a few samples only.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from robustrl.core import events as ev
from robustrl.core.audit_log import Found, Log
from robustrl.core.audit_told import announced_before, evaluated, in_order, measured, planned
from robustrl.core.roles import Phase, RoleState

_METRICS = {"loss", "importance_weight", "importance_weight_max", "clip_fraction", "kl", "entropy", "grad_norm", "learning_rate",
            "reward", "accuracy", "length"}  # fmt: skip
"""What the learner says of every step (rl/learner.py)."""
_PHASES = {Phase.ADVANTAGE.value, Phase.TRAIN.value, Phase.OPTIMIZER.value}
"""In which every step is trained; the first step of a life may lack the others."""
_ROUNDED = 1e-6
_RIGHT = 1.0
"""Reward from which an answer counts as right."""


class _Rated(NamedTuple):
    reward: float
    tokens: int
    tools: bool


def metrics(log: Log) -> Found:
    """Each optimizer step from 1 on has its metrics, once each time that it was made; they follow from what it consumed."""
    rows: Counter[int] = Counter()
    commits: dict[int, list[ev.OptimizerStepCommitted]] = defaultdict(list)
    for _, commit in log.all(ev.OptimizerStepCommitted):
        commits[commit.step].append(commit)
    rated = {
        i: _Rated(reward, tokens, turns > 0)
        for _, event in log.all(ev.TrajectoriesFinished)
        for i, reward, tokens, turns in zip(event.ids, event.rewards, event.tokens, event.tool_turns, strict=False)
    }
    everywhere = {name for _, row in log.all(ev.StepMetrics) for name in row.values}
    from_disk = {event.step for _, event in log.all(ev.SnapshotRestored) if event.source == "disk"}
    for seq, row in log.all(ev.StepMetrics):
        rows[row.step] += 1
        if row.step < 1 or row.step not in commits:
            yield seq, f"metrics of step {row.step}, which was never committed"
            continue
        if rows[row.step] > len(commits[row.step]):
            yield seq, f"step {row.step} has its metrics twice"
        yield from ((seq, f"step {row.step} has {text}") for text in _lacks(log, row, everywhere, from_disk))
        found = [_differ(row.values, [rated.get(i) for i in commit.consumed]) for commit in commits[row.step]]
        if all(found):  # made again after a rollback, a step may have consumed others
            yield seq, f"step {row.step} has {found[-1]}"
    for seq, step in log.all(ev.OptimizerStepCommitted):
        if step.step >= 1 and step.step not in rows and not log.may_lack(step.step):
            yield seq, f"step {step.step} has no metrics"
    yield from in_order(log, ev.StepMetrics)
    yield from measured(log)


def _lacks(log: Log, row: ev.StepMetrics, everywhere: set[str], from_disk: set[int]) -> Iterator[str]:
    """What a step must hold, as the learner makes it and the other steps have it; its learning rate follows from its number."""
    config = log.config.grpo
    wanted = _METRICS | everywhere | ({"kl_reference"} if config.kl_coefficient > 0 else set())
    if lacking := sorted(wanted - row.values.keys()):
        yield f"no {', '.join(lacking)}"
    # one that was taken from a checkpoint has the seconds of the life that took it
    if row.step not in from_disk and (lacking := sorted(_PHASES - row.phase_seconds.keys())):
        yield f"no seconds of {', '.join(lacking)}"
    mean, largest = (row.values.get(name, 0.0) for name in ("importance_weight", "importance_weight_max"))
    if mean > largest * (1 + _ROUNDED):
        yield f"importance_weight {mean:g}, and none of them is above {largest:g}"
    rate = config.learning_rate * min(1.0, row.step / max(1, config.warmup_steps))
    if not math.isclose(said := row.values.get("learning_rate", rate), rate, rel_tol=1e-6):
        yield f"learning_rate {said:g}; configured was {rate:g} for it"


def _differ(values: dict[str, float], trajectories: list[_Rated | None]) -> str:
    """What the trajectories contradict; empty for nothing. None: never finished, which is another rule's to tell."""
    consumed = [one for one in trajectories if one]
    if not consumed or len(consumed) < len(trajectories):
        return ""
    count = len(consumed)
    means = {
        "reward": sum(one.reward for one in consumed) / count,
        "accuracy": sum(one.reward >= _RIGHT for one in consumed) / count,
        "length": sum(one.tokens for one in consumed) / count,
    }
    tools = any(one.tools for one in consumed)
    for name, mean in means.items():
        said = values.get(name, mean)
        # tokens that a tool put in are not trained on, and the log does not tell them from the others
        if not (math.isclose(said, mean, rel_tol=1e-6, abs_tol=1e-9) or (name == "length" and tools and 0 <= said < mean)):
            return f"{name} {said:g}; the {count} trajectories that it consumed have {mean:g}"
    return ""


def evaluations(log: Log) -> Found:
    """Evaluations are those that the configuration asks for, each once, all of as many prompts, with an accuracy that these can have, and
    of a version that every rollout had or passed.
    """
    done: set[int] = set()
    failed = {event.role for _, event in log.all(ev.RoleStateChanged) if event.new == RoleState.FAILED}
    served = {event.role for _, event in log.all(ev.RoleStateChanged) if event.new == RoleState.HEALTHY} - failed
    prompts: int | None = None
    times = {entry.seq: entry.t for entry in log.entries}
    for seq, event in log.all(ev.EvaluationDone):
        if event.version in done or not _asked(log, event.version):
            yield seq, f"an evaluation of version {event.version}, which was done before or never asked for"
        done.add(event.version)
        for role in sorted(served & log.ran.keys()):
            if max(log.ran[role]) < event.version and not log.may_have_run(role, event.version, times[seq]):
                yield seq, f"an evaluation of version {event.version}, but {role} only came to version {max(log.ran[role])}"
        if not 1 <= event.prompts <= log.config.evaluation_prompts:
            yield seq, f"an evaluation on {event.prompts} prompts; asked for were {log.config.evaluation_prompts}"
        elif event.prompts != (prompts := event.prompts if prompts is None else prompts):
            yield seq, f"an evaluation on {event.prompts} prompts, after one on {prompts}"
        elif text := _impossible(event):
            yield seq, f"an evaluation of version {event.version} with accuracy {event.accuracy:g} on {event.prompts} prompts: {text}"
    yield from announced_before(log)
    if log.status == "done" and (missing := next((version for version in planned(log) if version not in done), None)) is not None:
        yield log.end, f"no evaluation of version {missing}"
    else:
        yield from evaluated(log)


def _asked(log: Log, version: int) -> bool:
    config, every = log.config, log.config.evaluation_every
    between = every > 0 and 0 < version < config.steps and version % every == 0
    return config.evaluation_prompts > 0 and (version in (0, config.steps) or between)


def _impossible(event: ev.EvaluationDone) -> str:
    if not 0 <= event.accuracy <= 1:
        return "must be from 0 to 1"
    right = event.accuracy * event.prompts
    if abs(right - round(right)) > 1e-6:
        return f"that is {right:g} right answers"
    rewards = [reward for sample in event.samples if isinstance(reward := sample.get("reward"), int | float)]
    shown = sum(reward >= _RIGHT for reward in rewards)
    if not shown <= round(right) <= event.prompts - (len(rewards) - shown):
        return f"of {len(rewards)} samples {shown} are right"
    if not event.samples:
        return "it shows no sample"
    return ""
