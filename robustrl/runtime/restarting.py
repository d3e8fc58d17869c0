"""The restart half of the host: ends a role's life for certain, makes the next one, and has it taken in by those who work with it.

It carries out what the log says was decided and decides nothing itself; the one exception is the supervisor's own death, on which the same
policy is asked here.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ..core import events as ev
from ..core.lifecycle import FAILED
from ..core.recovery import Failure, why_not_restart
from ..core.roles import RoleId, RoleKind
from ..errors import PeerDied, WaitTimeout
from .processes import ProcessId, kill, wait_exit
from .rank_group import RankGroup

if TYPE_CHECKING:
    from .host import Host

log = logging.getLogger("host")


class Restarting:
    def __init__(self, host: Host) -> None:
        self._host, self._lives = host, host.lives
        self._ranks = RankGroup(self._lives, self._end_life)

    def replace_supervisor(self, incarnation: int, pid: int, cause: str) -> None:
        """It cannot judge its own death; the same policy is asked here."""
        if not self._host.state.roles["supervisor"].exited:
            self._host.record(ev.ProcessExited(role="supervisor", incarnation=incarnation, pid=pid, cause=f"Ray: {cause}", last_lines=[]))
        failure = Failure(kind=RoleKind.SUPERVISOR, restarts=incarnation - 1, was_healthy=True)
        if why := why_not_restart(failure, self._host.config.restarts):
            self._host.decide_end(FAILED, f"the supervisor (pid {pid}) died: {cause}\n{why}")
        else:
            self._host.record(ev.RestartDecided(role="supervisor", incarnation=incarnation, reason=cause))

    async def restart(self, role: str, incarnation: int, reason: str) -> None:
        """A new life of this role, made from the same spec."""
        if incarnation != self._lives.incarnations[role]:
            return  # a decision that was written twice
        log.info("restarting %s after incarnation %d: %s", role, incarnation, reason)
        await self._end_life(role)
        await self._lives.create(role)
        try:
            await self._set_up_again(role)
        except PeerDied as error:  # it or somebody it needs: the supervisor hears of that death as of any other
            log.warning("%s did not come back: %s", role, error)

    async def _set_up_again(self, role: str) -> None:
        deadline = self._host.config.deadlines.role_start
        await self._lives.peer(role).call("open", deadline=deadline)
        match RoleId.parse(role).kind:
            case RoleKind.TRAINER:
                await self._ranks.meet(role)
            case RoleKind.ROLLOUT:
                await self._lives.peer("rollout_manager").call("add_rollout", role, deadline=deadline, again=True)
            case RoleKind.TASK_RUNNER:
                await self._host.run_training()
            case RoleKind.NODE_AGENT:
                await self._watch_again(role)

    async def _end_life(self, role: str) -> None:
        """A new incarnation starts only after the old process is known to be dead (fencing)."""
        view, limit = self._host.state.roles[role], self._host.config.deadlines.call
        agent = self._lives.agent_of(view.node)
        if agent.role == role or (role == "supervisor" and self._host.config.address is None):  # their agent may be dead as well
            process = ProcessId(view.pid, self._lives.ticks[role])
            kill(process)
            if not await asyncio.to_thread(wait_exit, process, limit):
                raise WaitTimeout(f"{role} (pid {process.pid}): not dead {limit:g} s after SIGKILL")
        else:
            await agent.call("kill", role, view.incarnation, deadline=limit, again=True)

    async def _watch_again(self, agent: str) -> None:
        node = self._host.state.roles[agent].node
        secret = (self._host.temp / "secret").read_bytes()
        await self._lives.peer(agent).call("keep_secret", secret, deadline=self._host.config.deadlines.call)
        for role, view in list(self._host.state.roles.items()):
            if view.node == node and role != agent and not view.exited:
                await self._lives.watch_from_outside(self._lives.spec(role, view.incarnation), view.pid)
