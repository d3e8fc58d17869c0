"""The lives of a job's roles: where each runs, which life of it is the present one, and how a life is made and watched.

Promises: every life of a role is made from the same spec; an agent watches it from its first moment; whoever asks for a role gets its
present life. Left out: what becomes of a role that died (core/recovery.py decides, restarting.py carries out).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from ..core import events as ev
from ..core.roles import RoleId, RoleKind
from ..errors import PeerDied, WaitTimeout
from .role import Peer, RoleSpec, within

if TYPE_CHECKING:
    from .host import Host

log = logging.getLogger("host")
_DEATH_WORD = 2.0
"""Seconds that a node agent has for reporting a death before the host reports it itself."""
_SLOW_FIRST = (RoleKind.SUPERVISOR, RoleKind.TRAINER, RoleKind.ROLLOUT, RoleKind.STATE_KEEPER)
"""Order in which processes are started: the supervisor, for which others wait, then by the length of their set-up."""
_CALLS_AT_ONCE = {
    RoleKind.ROLLOUT: (RoleKind.SUPERVISOR,),
    RoleKind.ROLLOUT_MANAGER: (RoleKind.ROLLOUT, RoleKind.REQUEST_MANAGER, RoleKind.AGENT_WORKER),
}


class Lives:
    """A Directory (role.py) of the host's own."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.places: dict[RoleId, str] = {}
        """Role -> name of its node."""
        self.actors: dict[str, Any] = {}
        self.incarnations: dict[str, int] = {}
        self.ticks: dict[str, int] = {}
        """Start times of the present processes, which name them for good together with their pids."""
        self._changed = asyncio.Condition()

    async def start_all(self) -> None:
        """All side by side, the slow ones first; each role's agent watches it from its first moment."""
        deadline = self._host.config.deadlines
        agents = [str(role) for role in self.places if role.kind is RoleKind.NODE_AGENT]
        await asyncio.gather(*(self.create(role) for role in agents))
        await asyncio.gather(*(self.peer(role).call("open", deadline=deadline.role_start) for role in agents))
        secret = (self._host.temp / "secret").read_bytes()
        await asyncio.gather(*(self.peer(role).call("keep_secret", secret, deadline=deadline.call) for role in agents))
        others = [role for role in self.places if role.kind is not RoleKind.NODE_AGENT]
        others.sort(key=lambda role: _SLOW_FIRST.index(role.kind) if role.kind in _SLOW_FIRST else len(_SLOW_FIRST))
        up: dict[RoleKind, list[asyncio.Task[None]]] = {}
        for role in others:
            up.setdefault(role.kind, []).append(asyncio.create_task(self._bring_up(str(role), role.kind, up)))
        await asyncio.gather(*(task for tasks in up.values() for task in tasks), self._first_version(up))

    async def _bring_up(self, role: str, kind: RoleKind, up: dict[RoleKind, list[asyncio.Task[None]]]) -> None:
        """Its process, then its set-up once those are set up whom it calls from its first moment."""
        await self.create(role)
        await _all_up(up, _CALLS_AT_ONCE.get(kind, ()))
        await self.peer(role).call("open", deadline=self._host.config.deadlines.role_start)

    async def _first_version(self, up: dict[RoleKind, list[asyncio.Task[None]]]) -> None:
        """Version 0, as soon as trainer and state keeper are there."""
        await _all_up(up, (RoleKind.TRAINER, RoleKind.STATE_KEEPER))
        await self.prepare_trainers([str(role) for role in self.places if role.kind is RoleKind.TRAINER])

    async def prepare_trainers(self, ranks: list[str]) -> None:
        deadline = self._host.config.deadlines.role_start
        rendezvous = await self.peer("trainer-0").call("rendezvous", deadline=deadline)
        group = self._host.thresholds.job.process_group
        await asyncio.gather(*(self.peer(role).call("prepare", rendezvous, group, deadline=deadline) for role in ranks))

    async def create(self, role: str) -> None:
        self.incarnations[role] = self.incarnations.get(role, 0) + 1
        spec = self.spec(role)
        handle = self._host.cluster.create_actor(spec, self._node_of(role))  # type: ignore[union-attr]
        self.actors[role] = handle
        identity = await self.peer(role).call("identity", deadline=self._host.config.deadlines.role_start)
        self._host.record(
            ev.RoleStarted(
                role=role, incarnation=spec.incarnation, node=spec.node, pid=identity["pid"], start_ticks=identity["start_ticks"]
            )
        )
        self.ticks[role] = identity["start_ticks"]
        self._host.spawn(self._watch_role(role, spec, identity["pid"], handle))
        if role == "supervisor":  # it is needed to bring back an agent that died with it, which will then watch it
            self._host.spawn(self._watch_if_there(spec, identity["pid"]))
        elif not role.startswith(RoleKind.NODE_AGENT):
            await self.watch_from_outside(spec, identity["pid"])

    async def _watch_if_there(self, spec: RoleSpec, pid: int) -> None:
        try:
            await self.watch_from_outside(spec, pid)
        except (PeerDied, WaitTimeout) as error:
            log.warning("%s is not watched from outside: %s", spec.role, error)

    async def watch_from_outside(self, spec: RoleSpec, pid: int) -> None:
        await self.agent_of(spec.node).call(
            "watch", spec.role, spec.incarnation, pid, spec.page_path, spec.log_path, deadline=self._host.config.deadlines.call, again=True
        )

    def agent_of(self, node: str) -> Peer:
        return self.peer(str(next(r for r, where in self.places.items() if where == node and r.kind is RoleKind.NODE_AGENT)))

    def _node_of(self, role: str) -> Any:
        name = next(where for r, where in self.places.items() if str(r) == role)
        return next(node for node in self._host.cluster.nodes if node.name == name)  # type: ignore[union-attr]

    def spec(self, role: str, incarnation: int | None = None) -> RoleSpec:
        """Of the present life, or of another one; every life of a role is made from the same."""
        node = self._node_of(role)
        return RoleSpec(
            role=role,
            incarnation=incarnation or self.incarnations[role],
            run=self._host.run_id,
            node=node.name,
            ip=node.ip,
            run_dir=str(self._host.run_dir),
            temp_dir=str(self._host.temp),
            shm_dir=str(self._host.shm),
            host_address=self._host.roles_address,
            host_token=self._host.token,
            config=self._host.config,
        )

    def peer(self, role: str) -> Peer:
        return Peer(self, role)

    async def present(self, role: str) -> tuple[int, Any]:
        """See role.Directory."""
        return self.incarnations[role], self.actors[role]

    async def successor(self, role: str, incarnation: int, deadline: float) -> None:
        """See role.Directory."""

        def there() -> bool:
            view = self._host.state.roles.get(role)
            return view is not None and view.incarnation > incarnation and view.ready

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(there)

        await within(deadline, f"{role} to come back after incarnation {incarnation}", wait())

    async def tell_changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _watch_role(self, role: str, spec: RoleSpec, pid: int, handle: Any) -> None:
        """Ray's word on a death: for those whom nobody else reports, and as a second witness for all."""
        import ray

        try:
            await handle.lifetime.remote()
        except ray.exceptions.RayActorError as error:
            if self._host.closing:
                return
            if role == "supervisor":
                self._host.restarting.replace_supervisor(spec.incarnation, pid, type(error).__name__)
                return
            await asyncio.sleep(_DEATH_WORD)
            view = self._host.state.roles[role]
            if not self._host.closing and view.incarnation == spec.incarnation and not view.exited:
                self._host.record(
                    ev.ProcessExited(role=role, incarnation=spec.incarnation, pid=pid, cause=f"Ray: {type(error).__name__}", last_lines=[])
                )

async def _all_up(up: dict[RoleKind, list[asyncio.Task[None]]], kinds: tuple[RoleKind, ...]) -> None:
    """The tasks of these kinds have ended well; raises what one of them raised."""
    for kind in kinds:
        await asyncio.gather(*map(asyncio.shield, up[kind]))
