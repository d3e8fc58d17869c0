"""The trainer's ranks after the death of one: the others leave the broken process group, stay, and meet its next life in a new one.

A rank that does not leave in time is killed: its own restart brings all together. So does that of a rank that has died meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ..core.roles import RoleKind
from ..errors import PeerDied, RobustRLError, WaitTimeout

if TYPE_CHECKING:
    from .lives import Lives

log = logging.getLogger("host")
LEAVE_SECONDS = 10.0
"""In which a rank has to come to rest after another one died. It may have to end a micro-batch first; a collective breaks off by itself."""

_TRIES = 3
"""Meetings that may fail although every rank lives."""


class RankGroup:
    def __init__(self, lives: Lives, end_life: Callable[[str], Awaitable[None]]) -> None:
        """``end_life`` kills a role for certain."""
        self._lives, self._end_life = lives, end_life
        self._meeting = asyncio.Lock()
        self._set_up: dict[str, int] = {}
        """Later lives of ranks that can be called."""

    async def meet(self, role: str) -> None:
        """``role`` is a rank in a later life and is set up: bring all ranks together, unless another one has to come back first."""
        self._set_up[role] = self._lives.incarnations[role]
        async with self._meeting:
            ranks = [str(rank) for rank in self._lives.places if rank.kind is RoleKind.TRAINER]
            if any(self._lives.incarnations[rank] not in (1, self._set_up.get(rank)) for rank in ranks):
                return
            for left in reversed(range(_TRIES)):
                if not all(await asyncio.gather(*(self._leave(rank) for rank in ranks if rank != role))):
                    return
                try:
                    await self._lives.prepare_trainers(ranks)
                    return
                except RobustRLError:
                    raise
                except Exception as error:  # whatever a process group may raise, of a rank that dies meanwhile say
                    if not left:
                        raise
                    log.warning("the ranks did not meet: %s", error)

    def all_set_up(self) -> None:
        """After a start of all of them at once."""
        self._set_up = {str(rank): self._lives.incarnations[str(rank)] for rank in self._lives.places if rank.kind is RoleKind.TRAINER}

    async def _leave(self, rank: str) -> bool:
        """Whether this rank waits for no other any more; False: it is dead."""
        try:
            await self._lives.peer(rank).call("leave_group", deadline=LEAVE_SECONDS)
            return True
        except PeerDied:
            return False
        except WaitTimeout as error:
            log.warning("%s did not leave its process group and is killed: %s", rank, error)
            await self._end_life(rank)
            return False
