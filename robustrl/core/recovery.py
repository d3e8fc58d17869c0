"""The recovery policy: what is done about a failed role. Pure: facts in, one action out.

A failed role is restarted, and only that role, unless restarting cannot help: then the job ends, and the reason says why. Left out: how a
role comes back (runtime/host.py), and warm standbys.
"""

from __future__ import annotations

import msgspec

from .roles import RoleKind

FATAL_ERRORS = frozenset({"ConfigError", "MissingExtra", "RewardError", "TrainingError"})
"""Errors that lie in what the job was given: the next life would meet them again."""
STAYS = frozenset({RoleKind.ROLLOUT})
"""Kinds that another node can take over when theirs is lost; the others' state or place is gone with it."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failed incarnation, as the log shows it."""

    kind: RoleKind
    restarts: int
    """Restarts of this role so far."""
    was_healthy: bool
    """In this life or an earlier one."""
    error: str = ""
    """Class of the error that the role raised before it exited; empty: it said nothing."""
    node_lost: bool = False


def why_not_restart(failure: Failure, budget: int) -> str:
    """Empty: restart it. Otherwise why the job ends instead."""
    if failure.error in FATAL_ERRORS:
        return f"a restart would meet the same {failure.error}"
    if failure.node_lost and failure.kind not in STAYS:
        return "what it held is gone with its node"
    if not failure.was_healthy:
        return "it never became healthy"
    if failure.restarts >= budget:
        return f"its restart budget of {budget} is used up" if budget else "restarts are switched off (restarts=0)"
    return ""
