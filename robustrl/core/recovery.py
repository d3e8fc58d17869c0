"""The recovery policy: what is done about a failed role. Pure: facts in, one answer out.

Modes: ``observe`` (verdicts only, a dead role's work waits), ``isolated`` (the failed role is restarted, and it alone), ``full`` (the
usual baseline: every role process is ended, the last snapshot loaded, the current batch generated again). In ``isolated`` mode a trainer's
failure is answered by a full restart, as in the paper, when it falls into the first optimizer step, or the first after a resume; when the
same step failed before; or when the restart itself failed twice. A restart that cannot help ends the job, and the reason says why.

Left out: how a role comes back (runtime/restarting.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from .roles import RoleKind

OBSERVE, ISOLATED, FULL = "observe", "isolated", "full"
MODES = (OBSERVE, ISOLATED, FULL)
WARM, COLD = "warm", "cold"
STANDBYS = (WARM, COLD)
FATAL_ERRORS = frozenset({"ConfigError", "MissingExtra", "RewardError", "TrainingError"})
"""Errors that lie in what the job was given: the next life would meet them again."""
FAILED_RESTARTS = 2
"""Restarts of a trainer that may fail before everything is restarted."""
HEAVY = frozenset({RoleKind.TRAINER, RoleKind.ROLLOUT})
"""Kinds whose standby has built a model and an engine; for the others it has its imports done."""
BOUND = frozenset({RoleKind.STATE_KEEPER, RoleKind.NODE_AGENT})
"""Kinds that belong to their node: no process elsewhere can take them over."""
ALL_BECAUSE = "; everything is restarted: "
"""In the reason of a full restart in isolated mode, between the failure and what `why_all` says."""
_LEAST_ROLLOUTS = 1
"""Rollouts that go on serving when another one gives its place to the trainer."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failed incarnation, as the log shows it."""

    kind: RoleKind
    restarts: int
    """Restarts of this role owing to its own failures so far."""
    was_healthy: bool
    """In this life or an earlier one."""
    error: str = ""
    """Class of the error that the role raised before it exited; empty: it said nothing."""
    node_lost: bool = False
    failed_restarts: int = 0
    """Lives of this role in a row, this one included, that followed another one and never became healthy."""
    first_step: bool = False
    """No optimizer step was committed since the job began, or was resumed."""
    same_step: bool = False
    """An earlier failure of the trainer hit the optimizer step that is under way."""


def why_not_restart(failure: Failure, budget: int) -> str:
    """Empty: restart it. Otherwise why the job ends instead."""
    if failure.error in FATAL_ERRORS:
        return f"a restart would meet the same {failure.error}"
    if not failure.was_healthy:
        return "it never became healthy"
    if failure.restarts >= budget:
        return f"its restart budget of {budget} is used up" if budget else "restarts are switched off (restarts=0)"
    return ""


def why_all(failure: Failure) -> str:
    """Why not the failed role alone but every role is restarted, in isolated mode; empty: it alone is."""
    if failure.kind is not RoleKind.TRAINER:
        return ""
    if failure.first_step:
        return "in the first optimizer step since the job began or was resumed"
    if failure.same_step:
        return "the second failure in the same optimizer step"
    if failure.failed_restarts >= FAILED_RESTARTS:
        return f"its restart failed {failure.failed_restarts} times"
    return ""


class Candidate(msgspec.Struct, frozen=True):
    """A healthy role whose process could become another role."""

    role: str
    kind: RoleKind
    node: str
    heavy: bool = False
    """A standby that has built a model and an engine."""


def choose_standby(kind: RoleKind, node: str, candidates: Iterable[Candidate]) -> str:
    """Who takes over a role of this kind that was on ``node``; empty: nobody, a cold start.

    A standby of the right sort, first one on the same node. For a trainer without one: a rollout gives its place, as long as others serve.
    """
    there = list(candidates)
    standbys = [c for c in there if c.kind is RoleKind.STANDBY and c.heavy == (kind in HEAVY) and (kind not in BOUND or c.node == node)]
    if standbys:
        return min(standbys, key=lambda c: (c.node != node, c.role)).role
    rollouts = [c.role for c in there if c.kind is RoleKind.ROLLOUT]
    if kind is RoleKind.TRAINER and len(rollouts) > _LEAST_ROLLOUTS:
        return max(rollouts)
    return ""
