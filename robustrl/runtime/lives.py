"""The lives of a job's roles: where each runs, which life of it is the present one, and how a life is made and watched.

Promises: every life of a role is made from the same spec; an agent watches it from its first moment; whoever asks for a role gets its
present life. Left out: what becomes of a role that died (core/recovery.py decides, restarting.py carries out).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from ..core import events as ev
from ..core.roles import RoleId, RoleKind
from ..errors import PeerDied, WaitTimeout
from .processes import ProcessId, kill
from .role import LifeEnded, Peer, RoleSpec, actor_name, within

if TYPE_CHECKING:
    from .host import Host

log = logging.getLogger("host")
_DEATH_WORD = 2.0
"""Seconds that a node agent has for reporting a death before the host reports it itself."""
_TAKE_OVER = 20.0
"""Seconds in which a warm process has to become another role, its own work handed on."""
_BREATH = 1.0
"""Seconds before the training that met a death is asked for again, should whoever died be back already."""
_TRIES = 3
"""Times that a process is made which dies, or says nothing, before it is in the log; no more than the role's restart budget."""
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
        self.names: dict[str, str] = {}
        """Role -> name of its present life's actor. One that was taken over has that of the process's first role."""
        self.incarnations: dict[str, int] = {}
        self.ticks: dict[str, int] = {}
        """Start times of the present processes, which name them for good together with their pids."""
        self.given: set[tuple[str, int]] = set()
        """Lives whose process has become another role's: nobody may kill it in their name."""
        self.lost: dict[str, str] = {}
        """Nodes that are gone and not replaced yet -> why."""
        self.fresh = False
        """Lives that begin now are part of a full restart."""
        self._tries: Counter[tuple[str, int]] = Counter()
        self._changed = asyncio.Condition()

    async def start(self, roles: list[RoleId], standbys: dict[str, str] | None = None) -> None:
        """All side by side, the slow ones first; each role's agent watches it from its first moment. ``standbys``: who takes over which.

        Raises PeerDied if one of them dies meanwhile.
        """
        deadline = self._host.config.deadlines
        agents = [str(role) for role in roles if role.kind is RoleKind.NODE_AGENT]
        await _all(self.create(role) for role in agents)
        await _all(self.peer(role).call("open", deadline=deadline.role_start) for role in agents)
        await _all(self.give_secret(role) for role in agents)
        others = [role for role in roles if role.kind not in (RoleKind.NODE_AGENT, RoleKind.STANDBY)]
        others.sort(key=lambda role: _SLOW_FIRST.index(role.kind) if role.kind in _SLOW_FIRST else len(_SLOW_FIRST))
        up: dict[RoleKind, list[asyncio.Task[None]]] = {}
        for role in others:
            standby = (standbys or {}).get(str(role), "")
            up.setdefault(role.kind, []).append(asyncio.create_task(self._bring_up(str(role), role.kind, up, standby)))
        await _all([*(task for tasks in up.values() for task in tasks), self._first_version(up)])

    async def give_secret(self, agent: str) -> None:
        secret = (self._host.temp / "secret").read_bytes()
        await self.peer(agent).call("keep_secret", secret, deadline=self._host.config.deadlines.call)

    async def warm_up(self, standby: str) -> None:
        """A standby, whose set-up nobody waits for: the job goes on without one that cannot be made, or set up."""
        try:
            await self.create(standby)
            await self.peer(standby).call("open", deadline=self._host.config.deadlines.role_start)
        except Exception as error:  # whatever its engine or model may raise
            self._host.record(ev.WarningRaised(text=f"{standby} is not there to take over: {type(error).__name__}: {error}"))

    async def _bring_up(self, role: str, kind: RoleKind, up: dict[RoleKind, list[asyncio.Task[None]]], standby: str) -> None:
        """Its process, then its set-up once those are set up whom it calls from its first moment."""
        await self.create(role, standby)
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

    async def create(self, role: str, standby: str = "") -> None:
        """The next life of a role, in the process of ``standby`` where there is one that lives, else in a new one.

        A process that ends, or says nothing, before it has said who it is is a failed start: another one is made in its place, within the
        role's budget. Raises PeerDied when none came up.
        """
        if standby and await self._take_over(role, standby):
            return
        tries = max(1, min(_TRIES, self._host.config.restarts))
        for left in reversed(range(tries)):
            try:
                spec, identity = await self._give_birth(role)
                break
            except PeerDied as error:
                if not left:
                    raise
                self._host.record(ev.WarningRaised(text=f"{error}; it is started again"))
        await self._started(spec, identity)

    async def _give_birth(self, role: str) -> tuple[RoleSpec, dict[str, Any]]:
        spec, name = self._next_life(role)
        handle = self._host.cluster.create_actor(spec, self._node_of(role), name)  # type: ignore[union-attr]
        self._enter(spec, handle, name)
        try:
            deadline = self._host.config.deadlines.role_start
            return spec, await within(deadline, f"the process of {role} (deadlines.role_start)", handle.identity.remote())
        except asyncio.CancelledError:
            _end_unborn(handle)
            raise
        except WaitTimeout as error:
            _end_unborn(handle)
            raise PeerDied(f"{error}: see {spec.log_path}") from error
        except _actor_error() as error:
            raise PeerDied(f"{role} died at its start ({type(error).__name__}): see {spec.log_path}") from error

    def _next_life(self, role: str) -> tuple[RoleSpec, str]:
        """Its spec, and a name for its actor: one that died before it was in the log leaves its number, not its name, to the next."""
        view = self._host.state.roles.get(role)
        number = view.incarnation + 1 if view else 1
        self._tries[role, number] += 1
        tries = self._tries[role, number]
        return self.spec(role, number), actor_name(role, number) + (f".{tries}" if tries > 1 else "")

    def _enter(self, spec: RoleSpec, handle: Any, name: str) -> None:
        self.incarnations[spec.role], self.actors[spec.role], self.names[spec.role] = spec.incarnation, handle, name

    async def _take_over(self, role: str, standby: str) -> bool:
        """Whether it did. A standby that dies once it has the role dies as that role; before that, a cold start follows."""
        handle, view = self.actors[standby], self._host.state.roles[standby]
        process, deadline = ProcessId(view.pid, self.ticks[standby]), min(_TAKE_OVER, self._host.config.deadlines.call)
        place, before = RoleId.parse(role), self.places[RoleId.parse(role)]
        self.given.add((standby, view.incarnation))
        self.places[place] = self.places[RoleId.parse(standby)]
        spec, _ = self._next_life(role)
        try:
            if view.kind is RoleKind.ROLLOUT:
                await self.peer(standby).call("stop_work", deadline=deadline)
                await self.peer("rollout_manager").call("drain", standby, deadline=deadline, again=True)
            identity = await within(deadline, f"{standby} to become {role}", handle.take_over.remote(spec))
        except asyncio.CancelledError:  # everything is restarted, and the role gets a process of its own
            kill(process)
            self.places[place] = before
            raise
        except (_actor_error(), PeerDied, WaitTimeout) as error:
            kill(process)  # it must not become the role later
            self._host.record(ev.WarningRaised(text=f"{standby} did not become {role} ({type(error).__name__}): a new process is started"))
            self.places[place] = before
            return False
        self._enter(spec, handle, self.names[standby])
        await self._started(spec, identity)
        if not role.startswith(RoleKind.NODE_AGENT):
            self._host.spawn(self._unwatch(standby, view.incarnation, view.node))
        return True

    async def _unwatch(self, role: str, incarnation: int, node: str) -> None:
        try:
            await self.agent_of(node).call("unwatch", role, incarnation, deadline=self._host.config.deadlines.call, again=True)
        except (PeerDied, WaitTimeout) as error:
            log.warning("%s is still watched in its old name: %s", role, error)

    async def _started(self, spec: RoleSpec, identity: dict[str, Any]) -> None:
        role, pid = spec.role, identity["pid"]
        self._host.record(
            ev.RoleStarted(role=role, incarnation=spec.incarnation, node=spec.node, pid=pid, start_ticks=identity["start_ticks"])
        )
        self.ticks[role] = identity["start_ticks"]
        self._host.spawn(self._watch_role(role, spec, pid, self.actors[role]))
        if role == "supervisor":  # it is needed to bring back an agent that died with it, which will then watch it
            self._host.spawn(self._watch_if_there(spec, pid))
        elif not role.startswith(RoleKind.NODE_AGENT):
            await self._watch_if_there(spec, pid)

    async def _watch_if_there(self, spec: RoleSpec, pid: int) -> None:
        """An agent that is not there, and may never be where recovery is only observed, keeps no role from living: Ray tells of its end."""
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
            fresh=self.fresh,
        )

    def peer(self, role: str) -> Peer:
        return Peer(self, role)

    async def present(self, role: str) -> tuple[int, Any]:
        """See role.Directory."""
        if role not in self.actors:
            raise LifeEnded(role, 0)
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

    async def is_there(self, role: str, incarnation: int) -> bool:
        """Whether this life is the present one and its process has not ended; of one that hangs it is told when it goes on, or is dead."""
        handle, limit = self.actors[role], self._host.config.deadlines.call
        while self.incarnations[role] == incarnation:
            try:
                await within(limit, f"{role}.identity()", handle.identity.remote())
                return True
            except WaitTimeout as error:
                log.warning("%s", error)
            except _actor_error():
                break
        return False

    async def trainers_there(self) -> None:
        """Returns when every rank can be called, however long that takes."""

        def there() -> bool:
            ranks = [str(role) for role in self.places if role.kind is RoleKind.TRAINER]
            views = [self._host.state.roles[rank] for rank in ranks]
            return all(view.ready and not view.exited and view.incarnation == self.incarnations[view.role] for view in views)

        await asyncio.sleep(_BREATH)
        async with self._changed:
            await self._changed.wait_for(there)

    async def tell_changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _watch_role(self, role: str, spec: RoleSpec, pid: int, handle: Any) -> None:
        """Ray's word on a death: for those whom nobody else reports, and as a second witness for all."""
        import ray

        try:
            await handle.lifetime.remote()
        except ray.exceptions.RayActorError as error:
            if self._host.closing or (role, spec.incarnation) in self.given:
                return
            if role == "supervisor":
                self._host.restarting.replace_supervisor(spec.incarnation, pid, type(error).__name__)
                return
            if role.startswith(RoleKind.NODE_AGENT) and self._host.config.address is None:
                if spec.node in await asyncio.to_thread(self._host.cluster.lost):  # type: ignore[union-attr]
                    return  # it went with its node, which is said elsewhere
            else:
                await asyncio.sleep(_DEATH_WORD)
            view = self._host.state.roles[role]
            if not self._host.closing and view.incarnation == spec.incarnation and not view.exited:
                self._host.record(
                    ev.ProcessExited(role=role, incarnation=spec.incarnation, pid=pid, cause=f"Ray: {type(error).__name__}", last_lines=[])
                )


def _actor_error() -> type[BaseException]:
    """What a call raises whose process dies."""
    import ray

    error: type[BaseException] = ray.exceptions.RayActorError
    return error


def _end_unborn(handle: Any) -> None:
    """A process that is in no log yet, and that nobody waits for any more."""
    import ray

    ray.kill(handle)


async def _all(work: Iterable[Coroutine[Any, Any, None] | asyncio.Task[None]]) -> None:
    """As gather; but when one fails nothing of it goes on: a process that comes up late would have the number of another one's life."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _all_up(up: dict[RoleKind, list[asyncio.Task[None]]], kinds: tuple[RoleKind, ...]) -> None:
    """The tasks of these kinds have ended well; raises what one of them raised."""
    for kind in kinds:
        await asyncio.gather(*map(asyncio.shield, up[kind]))
