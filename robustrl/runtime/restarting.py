"""The restart half of the host: ends a role's life for certain, makes the next one, and has it taken in by those who work with it.

It carries out what the log says was decided and decides nothing itself; the one exception is the supervisor's own death, on which the same
policy is asked here. While everything is being restarted, later decisions wait; those that are still true then are carried out after it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from ..core import events as ev
from ..core.lifecycle import FAILED
from ..core.placement import NodeSpec, place_again
from ..core.recovery import FULL, WARM, Candidate, Failure, choose_standby, why_not_restart
from ..core.roles import RoleId, RoleKind, RoleState
from ..errors import PeerDied, WaitTimeout
from .processes import ProcessId, kill, wait_exit
from .rank_group import RankGroup

if TYPE_CHECKING:
    from .host import Host

log = logging.getLogger("host")
_TRIES = 3
"""Times that everything is started which meets a death, or an endless wait, while it starts."""
_STOPPED_WITHIN = 5.0
_LAST_LOOK = 5.0
"""Seconds for a node agent to keep a stack of the supervisor and kill it."""
_ANSWERS = 1.0
"""Seconds for a node to take a connection."""
_LOOK = 0.2
"""Seconds between two looks at the cluster's nodes, and between two at whether a node for a waiting role has come."""


class Restarting:
    def __init__(self, host: Host) -> None:
        self._host, self._lives = host, host.lives
        self._ranks = RankGroup(self._lives, self._end_life)
        self._under_way: set[asyncio.Task[None]] = set()
        """Restarts of one role that a full restart calls off."""
        self._full: dict[str, ev.RestartDecided] = {}
        """Roles of the full restart that is under way."""
        self._begun = False
        self._begun_for: set[tuple[str, int]] = set()
        """Failed lives whose successor is made, or being made."""
        self._waiting: list[ev.RestartDecided] = []
        self._replacing: dict[str, asyncio.Task[None]] = {}

    # -- decisions ---

    def carry_out(self, decided: ev.RestartDecided) -> None:
        if decided.mode == FULL and (not self._full or not self._begun):
            if not self._full:
                self._begun = False
                self._host.spawn(self._restart_all())
            self._full[decided.role] = decided
        elif self._full:
            self._waiting.append(decided)
        else:
            task = self._host.spawn(self._restart(decided))
            if RoleId.parse(decided.role).kind not in self._spared():  # a full restart makes no next life of those
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)

    def replace_supervisor(self, incarnation: int, pid: int, cause: str) -> None:
        """It cannot judge its own death, and without it nobody is judged, whatever the mode; the same policy is asked here."""
        state = self._host.state
        if self._full or ("supervisor", incarnation) in self._begun_for:
            return  # its end was decided
        if not state.roles["supervisor"].exited:
            self._host.record(ev.ProcessExited(role="supervisor", incarnation=incarnation, pid=pid, cause=f"Ray: {cause}", last_lines=[]))
        failure = Failure(kind=RoleKind.SUPERVISOR, restarts=incarnation - 1, was_healthy=True)
        if why := why_not_restart(failure, self._host.config.restarts):
            self._host.decide_end(FAILED, f"the supervisor (pid {pid}) died: {cause}\n{why}")
            return
        if state.recovery_mode == FULL:
            self._decide_on_all(cause)
            return
        standby = self._free_standby("supervisor")
        self._host.record(ev.RestartDecided(role="supervisor", incarnation=incarnation, reason=cause, standby=standby))

    def _decide_on_all(self, cause: str) -> None:
        """As Lifecycle would: those that have a life to replace, each in a standby where one is free; agents come first, and cold."""
        taken: set[str] = set()
        for role in sorted(map(str, self._to_restart()), key=lambda role: role != "supervisor"):
            view = self._host.state.roles[role]
            if (role, view.incarnation) in self._lives.given:
                continue
            standby = "" if view.kind is RoleKind.NODE_AGENT else self._free_standby(role, taken)
            taken.add(standby)
            reason = cause if role == "supervisor" else "everything is restarted, owing to supervisor"
            self._host.record(ev.RestartDecided(role=role, incarnation=view.incarnation, reason=reason, mode=FULL, standby=standby))

    async def end_supervisor(self, incarnation: int) -> None:
        """It was condemned by the host (core/guard.py); what follows is what follows its death."""
        view = self._host.state.roles["supervisor"]
        process = ProcessId(view.pid, self._lives.ticks["supervisor"])
        try:  # the agent keeps a stack of it
            await self._lives.agent_of(view.node).call("kill", "supervisor", incarnation, *process, deadline=_LAST_LOOK)
        except (PeerDied, WaitTimeout) as error:
            log.warning("%s", error)
            if self._host.config.address is None:  # elsewhere, Ray's word on that node is all there is
                kill(process)

    def _free_standby(self, role: str, taken: Collection[str] = ()) -> str:
        """Who takes this role over, those ``taken`` aside; empty: nobody."""
        if self._host.state.recovery_standbys != WARM:
            return ""
        heavy, view = self._host.config.standbys or 0, self._host.state.roles[role]
        free = [
            Candidate(name, standby.kind, standby.node, heavy=RoleId.parse(name).index < heavy)
            for name, standby in self._host.state.roles.items()
            if standby.kind is RoleKind.STANDBY and standby.state is RoleState.HEALTHY and not standby.exited
            and name not in taken and (name, standby.incarnation) not in self._lives.given
        ]
        return choose_standby(view.kind, view.node, free)

    def all_started(self) -> None:
        """All roles are in lives that began together."""
        self._ranks.all_set_up()

    # -- one role ---

    async def _restart(self, decided: ev.RestartDecided) -> None:
        """The next life of this role, made from the same spec."""
        role = decided.role
        if decided.incarnation != self._lives.incarnations[role] or (role, decided.incarnation) in self._begun_for:
            return  # a decision that was written twice
        self._begun_for.add((role, decided.incarnation))
        log.info("restarting %s after incarnation %d: %s", role, decided.incarnation, decided.reason)
        await self._end_life(role)
        await self._have_node(role)
        if RoleId.parse(role).kind is RoleKind.STANDBY:
            await self._lives.warm_up(role)
            return
        await self._lives.create(role, decided.standby)
        try:
            await self._set_up_again(role)
        except PeerDied as error:  # it or somebody it needs: the supervisor hears of that death as of any other
            log.warning("%s did not come back: %s", role, error)
        except WaitTimeout as error:
            self._host.record(ev.WarningRaised(text=f"{role} did not come back and is killed: {error}"))
            await self._end_life(role)
        else:
            if RoleId.parse(role).kind is RoleKind.TASK_RUNNER:  # no part of its set-up: what stops the training ends the job
                await self._host.run_training()

    async def _set_up_again(self, role: str) -> None:
        deadline = self._host.config.deadlines.role_start
        kind = RoleId.parse(role).kind
        if kind is RoleKind.NODE_AGENT:
            await self._lives.give_secret(role)
        await self._lives.peer(role).call("open", deadline=deadline)
        match kind:
            case RoleKind.TRAINER:
                await self._ranks.meet(role)
            case RoleKind.ROLLOUT:
                await self._lives.peer("rollout_manager").call("add_rollout", role, deadline=deadline, again=True)
            case RoleKind.NODE_AGENT:
                await self._watch_again(role)

    async def _end_life(self, role: str) -> None:
        """A new incarnation starts only after the old process is known to be dead (fencing)."""
        view, limit = self._host.state.roles[role], self._host.config.deadlines.call
        if (role, view.incarnation) in self._lives.given:
            return  # its process is another role's now
        agent = self._lives.agent_of(view.node)
        gone = view.node in self._lives.lost or bool(self._host.state.roles[agent.role].exited)
        if gone and self._host.config.address is not None:
            return  # nobody can reach that machine; receivers refuse what an earlier life says
        if gone or agent.role == role or (role == "supervisor" and self._host.config.address is None):
            await self._kill(role)
            return
        try:
            await agent.call("kill", role, view.incarnation, view.pid, self._lives.ticks[role], deadline=limit, again=True)
        except WaitTimeout as error:  # the agent itself hangs, and its limit may be longer than this one
            if self._host.config.address is not None:
                raise
            log.warning("%s", error)
            await self._kill(role)

    async def _kill(self, role: str) -> None:
        """By the host itself, on its own machine."""
        view, limit = self._host.state.roles[role], self._host.config.deadlines.call
        process = ProcessId(view.pid, self._lives.ticks[role])
        kill(process)
        if not await asyncio.to_thread(wait_exit, process, limit):
            raise WaitTimeout(f"{role} (pid {process.pid}): not dead {limit:g} s after SIGKILL")
        if not self._host.state.roles[role].exited:
            self._host.record(
                ev.ProcessExited(role=role, incarnation=view.incarnation, pid=view.pid, cause="ended by the host", last_lines=[])
            )

    async def end_drained(self, role: str) -> None:
        """Its work is with others, and its end is ordered: it is stopped first, so that its end is no failure."""
        end = time.monotonic() + _STOPPED_WITHIN
        while self._host.state.roles[role].state is not RoleState.STOPPED and time.monotonic() < end:
            await asyncio.sleep(_LOOK / 4)
        await self._end_life(role)

    async def _watch_again(self, agent: str) -> None:
        node = self._host.state.roles[agent].node
        for role, view in list(self._host.state.roles.items()):
            if view.node == node and role != agent and not view.exited and (role, view.incarnation) not in self._lives.given:
                await self._lives.watch_from_outside(self._lives.spec(role, view.incarnation), view.pid)

    # -- all roles ---

    async def _restart_all(self) -> None:
        """Every role process ends, the raylets stay up, and the roles start in parallel, from the last committed state."""
        self._begun = True
        for attempt in range(1, _TRIES + 1):
            for task in list(self._under_way):
                task.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)
            await self._host.injector.reported()
            roles = self._to_restart()
            log.info("restarting everything: %s", ", ".join(map(str, roles)))
            await asyncio.gather(*(self._end_for_all(str(role)) for role in roles))
            for role in roles:
                await self._have_node(str(role))
            self._lives.fresh = True
            try:
                await self._lives.start(roles, {role: event.standby for role, event in self._full.items() if attempt == 1})
                break
            except (PeerDied, WaitTimeout) as error:
                if attempt == _TRIES:
                    raise
                log.warning("a role died, or hung, while everything was being restarted, so it is done again: %s", error)
            finally:
                self._lives.fresh = False
        self.all_started()
        for role in roles:
            if role.kind is RoleKind.NODE_AGENT:
                await self._watch_again(str(role))  # of what lived on there
        self._full.clear()
        waiting, self._waiting = self._waiting, []
        for decided in waiting:
            if decided.incarnation == self._lives.incarnations[decided.role]:
                self.carry_out(decided)
        await self._host.run_training()

    def _to_restart(self) -> list[RoleId]:
        """Not one that is just being added, or that only the host before knew."""
        begun = [role for role in self._lives.places if str(role) in self._lives.ticks]
        return [role for role in begun if role.kind not in self._spared() and not self._drained(str(role))]

    def _spared(self) -> tuple[RoleKind, ...]:
        """Kinds that live through a full restart; on somebody else's cluster the agents are the hand that ends processes there."""
        return (RoleKind.STANDBY, RoleKind.NODE_AGENT) if self._host.config.address else (RoleKind.STANDBY,)

    def _drained(self, role: str) -> bool:
        view = self._host.state.roles[role]
        return view.state is RoleState.STOPPED and (role, view.incarnation) not in self._lives.given

    async def _end_for_all(self, role: str) -> None:
        view = self._host.state.roles[role]
        if (role, view.incarnation) in self._lives.given:
            return
        if self._host.config.address is None:
            await self._kill(role)
        else:
            await self._end_life(role)

    # -- nodes ---

    async def watch_nodes(self) -> None:
        """Says of each node that is lost that it is; what becomes of its roles is the supervisor's matter, like any failure."""
        cluster = self._host.cluster
        assert cluster is not None
        while True:
            await asyncio.sleep(_LOOK if self._host.config.address is None else 5 * _LOOK)
            for node, reason in (await asyncio.to_thread(cluster.lost)).items():
                if node not in self._lives.lost:
                    self._lose(node, reason)

    def _lose(self, node: str, reason: str) -> None:
        self._lives.lost[node] = reason
        self._host.record(ev.NodeLost(node=node, reason=reason))
        if self._host.config.address is not None:
            return
        for role, view in self._host.state.roles.items():  # on one machine they may have outlived their raylet
            if role in self._lives.ticks and view.node == node and (role, view.incarnation) not in self._lives.given:
                kill(ProcessId(view.pid, self._lives.ticks[role]))
                for folder in (self._host.shm, self._host.temp):  # as on a machine that is gone
                    for path in folder.glob(f"{role}.*"):
                        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        assert self._host.cluster is not None
        if node == self._host.cluster.nodes[0].name:
            self._host.decide_end(FAILED, f"{node}, the head of the job's Ray cluster, is lost: {reason}")

    async def _have_node(self, role: str) -> None:
        """Returns once the node on which this role runs is there: its own, a new one in its place, or, on a cluster of somebody else's, a
        free one of its kind; there it may take long, and the log says so."""
        place = RoleId.parse(role)
        node = self._lives.places[place]
        await self._look_for_node(node)
        if node not in self._lives.lost:
            return
        if self._host.config.address is None:
            if node not in self._replacing:
                self._replacing[node] = asyncio.create_task(self._replace(node))
            await asyncio.shield(self._replacing[node])
            return
        told = False
        while not (found := self._free_node(place)):
            if not told:
                self._host.record(ev.WarningRaised(text=f"{role} waits: {node} is lost, and no other node of its kind is there"))
                told = True
            await asyncio.sleep(5 * _LOOK)
        self._lives.places[place] = found
        await self._have_agent(found)

    async def _look_for_node(self, node: str) -> None:
        """One that is cut off counts as lost, with all that may live on there, before anything is started on it again."""
        if self._host.config.hosts == "namespaces" and node not in self._lives.lost:
            asked = self._spec_of(node)
            why = await asyncio.to_thread(self._host.cluster.unreachable, node, _ANSWERS)  # type: ignore[union-attr]
            # another role's restart may have had it replaced meanwhile: the answer is of the one before
            if why and node not in self._lives.lost and self._spec_of(node) is asked:
                self._lose(node, f"cut off: {why}")

    def _spec_of(self, node: str) -> NodeSpec:
        return next(spec for spec in self._host.cluster.nodes if spec.name == node)  # type: ignore[union-attr]

    async def _replace(self, node: str) -> None:
        cluster = self._host.cluster
        assert cluster is not None
        new = await asyncio.to_thread(cluster.replace, node, self._host.config.deadlines.cluster_start)
        assert new is not None
        del self._lives.lost[node], self._replacing[node]
        self._say_started(new.name, new.ray_node_id, new.ip)

    def _say_started(self, node: str, ray_node_id: str, ip: str) -> None:
        kinds = sorted({role.kind.value for role, where in self._lives.places.items() if where == node})
        self._host.record(ev.NodeStarted(node=node, ray_node_id=ray_node_id, ip=ip, kinds=kinds))

    def _free_node(self, role: RoleId) -> str:
        assert self._host.cluster is not None
        nodes = [node for node in self._host.cluster.nodes if node.name not in self._lives.lost]
        return place_again(role, nodes, self._lives.places)

    async def _have_agent(self, node: str) -> None:
        """A node that joined the cluster later gets its agent with its first role."""
        places = self._lives.places
        if any(role.kind is RoleKind.NODE_AGENT and where == node for role, where in places.items()):
            return
        agent = RoleId(RoleKind.NODE_AGENT, 1 + max(role.index for role in places if role.kind is RoleKind.NODE_AGENT))
        places[agent] = node
        spec = self._spec_of(node)
        self._say_started(node, spec.ray_node_id, spec.ip)
        await asyncio.shield(self._host.spawn(self._bring_agent(str(agent))))  # others come here, should this restart be called off

    async def _bring_agent(self, agent: str) -> None:
        await self._lives.create(agent)
        await self._lives.peer(agent).call("open", deadline=self._host.config.deadlines.role_start)
        await self._lives.give_secret(agent)
