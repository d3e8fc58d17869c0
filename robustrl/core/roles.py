"""Roles, their phases and their states: the one place that says which exist and which transitions are legal.

A *role* is a separate distributed sub-task of an RL job and runs in a process of its own. Its *phase* says what it is doing, its
*state* how it is doing; its *incarnation* counts its lives, from 1.
"""

from __future__ import annotations

import functools
import re
from enum import StrEnum
from typing import Self

import msgspec


class RoleKind(StrEnum):
    SUPERVISOR = "supervisor"
    TASK_RUNNER = "task_runner"
    ROLLOUT_MANAGER = "rollout_manager"
    REQUEST_MANAGER = "request_manager"
    AGENT_WORKER = "agent_worker"
    TRAINER = "trainer"
    ROLLOUT = "rollout"
    STATE_KEEPER = "state_keeper"
    NODE_AGENT = "node_agent"
    STANDBY = "standby"


MANAGEMENT = frozenset(
    {RoleKind.SUPERVISOR, RoleKind.TASK_RUNNER, RoleKind.ROLLOUT_MANAGER, RoleKind.REQUEST_MANAGER, RoleKind.AGENT_WORKER}
)
SINGLE = MANAGEMENT - {RoleKind.AGENT_WORKER}
"""Kinds of which a job has exactly one; their role name carries no index."""


class Phase(StrEnum):
    """What a role does right now. The order is that of the code on a status page: append only."""

    RUNNING = "running"
    IDLE = "idle"
    WAITING_BATCH = "waiting_batch"
    TRAIN = "train"
    ADVANTAGE = "advantage"
    OPTIMIZER = "optimizer"
    SNAPSHOT = "snapshot"
    PUBLISH = "publish"
    WAITING_REQUEST = "waiting_request"
    WAITING_TOOL = "waiting_tool"
    PREFILL = "prefill"
    DECODE = "decode"
    PULL = "pull"
    WARMING = "warming"
    READY = "ready"
    TAKING_OVER = "taking_over"


_TRAINER = frozenset({Phase.WAITING_BATCH, Phase.TRAIN, Phase.ADVANTAGE, Phase.OPTIMIZER, Phase.SNAPSHOT, Phase.PUBLISH})
_ROLLOUT = frozenset({Phase.WAITING_REQUEST, Phase.WAITING_TOOL, Phase.PREFILL, Phase.DECODE, Phase.PULL})
_OTHERS = frozenset({Phase.RUNNING, Phase.IDLE})
_STANDBY = frozenset({Phase.WARMING, Phase.READY, Phase.TAKING_OVER})
PHASES: dict[RoleKind, frozenset[Phase]] = dict.fromkeys(RoleKind, _OTHERS) | {
    RoleKind.TRAINER: _TRAINER,
    RoleKind.ROLLOUT: _ROLLOUT,
    RoleKind.STANDBY: _STANDBY,
}
QUIET = frozenset({Phase.IDLE, Phase.WAITING_BATCH, Phase.WAITING_REQUEST, Phase.WAITING_TOOL, *_STANDBY})
"""Phases in which nothing is expected of a role."""


class RoleState(StrEnum):
    STARTING = "starting"
    RESTARTING = "restarting"
    STALE = "stale"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    FAILED = "failed"
    STOPPED = "stopped"


TRANSITIONS: dict[RoleState, frozenset[RoleState]] = {
    RoleState.STARTING: frozenset({RoleState.STALE, RoleState.HEALTHY, RoleState.FAILED, RoleState.STOPPED}),
    # a later life of a role begins here: the one before has failed
    RoleState.RESTARTING: frozenset({RoleState.STALE, RoleState.HEALTHY, RoleState.FAILED, RoleState.STOPPED}),
    # stale: alive, but without a complete, checked weight version (rollouts only)
    RoleState.STALE: frozenset({RoleState.HEALTHY, RoleState.FAILED, RoleState.STOPPED}),
    # healthy -> stale is missing on purpose: a role that lost its weights has lost its process
    RoleState.HEALTHY: frozenset({RoleState.SUSPECT, RoleState.FAILED, RoleState.STOPPED}),
    # suspect: something expected of it is missing, and it has been asked
    RoleState.SUSPECT: frozenset({RoleState.HEALTHY, RoleState.FAILED, RoleState.STOPPED}),
    # failed -> healthy is missing on purpose: nothing heals without a new incarnation
    RoleState.FAILED: frozenset({RoleState.STOPPED}),
    RoleState.STOPPED: frozenset(),
}

_NAME = re.compile(r"([a-z_]+?)(?:-(0|[1-9][0-9]{0,6}))?")
"""An index is written in one way alone: else two names would be one role's, or none's."""


class RoleId(msgspec.Struct, frozen=True, order=True):
    """A role of the job: its kind and, where there can be several, its index from 0. ``str()`` gives the name, e.g. ``rollout-1``."""

    kind: RoleKind
    index: int = 0

    def __str__(self) -> str:
        return self.kind.value if self.kind in SINGLE else f"{self.kind.value}-{self.index}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """Inverse of ``str()``. Raises ValueError that names the text and the kinds there are."""
        if (parts := _parts(name)) is None:
            raise ValueError(
                f"role {name!r}: must be one of {', '.join(sorted(SINGLE))} or KIND-INDEX with KIND one of "
                f"{', '.join(sorted(set(RoleKind) - SINGLE))} and INDEX 0, 1, 2 ... e.g. rollout-1"
            )
        return cls(*parts)


@functools.lru_cache(maxsize=4096)
def _parts(name: str) -> tuple[RoleKind, int] | None:
    """Kind and index of a role's name, None if it is none. Remembered: the same few names come with each entry of a log."""
    match = _NAME.fullmatch(name)
    if not match or match[1] not in set(RoleKind) or (RoleKind(match[1]) in SINGLE) != (match[2] is None):
        return None
    return RoleKind(match[1]), int(match[2] or 0)


def first_state(incarnation: int) -> RoleState:
    """The state in which a life of a role begins."""
    return RoleState.STARTING if incarnation == 1 else RoleState.RESTARTING


def check_transition(role: str, old: RoleState, new: RoleState) -> None:
    """Raises ValueError naming role, both states and what is allowed, unless ``old -> new`` is legal."""
    if new not in TRANSITIONS[old]:
        allowed = ", ".join(sorted(TRANSITIONS[old])) or "nothing, it is final"
        raise ValueError(f"{role}: {old} -> {new} is not a legal transition; from {old} only: {allowed}")
