"""What the rollout manager knows: the living rollouts, the groups that are under way, and the trajectories that have to move.

Plain records; what is done with them is in rollout_manager.py.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from ..rl.trajectory import Trajectory

if TYPE_CHECKING:
    from .role import Peer


class Lane:
    """One life of one rollout."""

    def __init__(self, peer: Peer, incarnation: int) -> None:
        self.peer, self.role, self.incarnation = peer, peer.role, incarnation
        self.version = -1
        self.open: set[int] = set()
        self.inherited: set[int] | None = None
        """What an earlier life of the manager gave it, until the rollout has said what it has of that."""
        self.acknowledged: list[int] = []
        self.alive = True


class Group(msgspec.Struct):
    key: tuple[int, int]
    """(batch, group); batch 0 are evaluations."""
    least_version: int
    trajectories: dict[int, Trajectory]
    unfinished: set[int]
    holder: dict[int, Lane] = {}
    """Lane of each trajectory that finished, for its acknowledgement."""
    done: asyncio.Future[list[Trajectory]] | None = None
    started: int = -1
    """Version at the first dispatch."""


class Moving(msgspec.Struct):
    """A trajectory that its rollout cannot end any more, as far as it had come."""

    group: Group
    number: int
    source: str
    """The rollout that had it."""

    @property
    def trajectory(self) -> Trajectory:
        return self.group.trajectories[self.number]

    @property
    def oldest_version(self) -> int:
        """The versions of a trajectory's tokens only rise."""
        return max(self.group.least_version, self.group.started, self.trajectory.last_version)
