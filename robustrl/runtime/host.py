"""The host: one plain process per job. It starts the nodes, creates every role, is the only writer of the event log, and reaps.

It is thin: what becomes of a role is decided by the supervisor; the host carries out and writes down. It is the only Ray driver. It ends
with its job, or with its owner unless ``keep_alive``; should it be killed itself, its reaper cleans up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from ..config import JobConfig
from ..core import events as ev
from ..core.lifecycle import DONE, FAILED, STOPPED
from ..core.placement import place, place_another, plan_nodes
from ..core.recovery import Failure, why_not_restart
from ..core.roles import RoleId, RoleKind, RoleState
from ..core.run_state import RunState
from ..core.thresholds import Thresholds
from ..errors import ConfigError, JobFailed, PeerDied, RobustRLError, WaitTimeout
from . import machine, reaper, registry, wire
from .cluster import Cluster, JoinedCluster, LocalCluster
from .event_log import EventLog, LogError
from .processes import ProcessId, is_alive, kill, kill_marked, wait_exit
from .role import OWN_CLOCK, OWN_GAP, Peer, RoleSpec, actor_name, within

log = logging.getLogger("host")
_DEATH_WORD = 2.0
"""Seconds that a node agent has for reporting a death before the host reports it itself."""
_RUN_DEADLINE = 30 * 24 * 3600.0
_RESERVE = 1 << 20
"""Bytes of the run directory's disk that are kept for the closing records, for when it is full."""
_SLOW_FIRST = (RoleKind.SUPERVISOR, RoleKind.TRAINER, RoleKind.ROLLOUT, RoleKind.STATE_KEEPER)
"""Order in which processes are started: the supervisor, for which others wait, then by the length of their set-up."""
_CALLS_AT_ONCE = {
    RoleKind.ROLLOUT: (RoleKind.SUPERVISOR,),
    RoleKind.ROLLOUT_MANAGER: (RoleKind.ROLLOUT, RoleKind.REQUEST_MANAGER, RoleKind.AGENT_WORKER),
}


class Host:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir.resolve()
        self.file = msgspec.json.decode((self.run_dir / "job.json").read_bytes(), type=registry.HostFile)
        self.config = msgspec.json.decode((self.run_dir / "config.json").read_bytes(), type=JobConfig)
        self.run_id = self.file.run
        self.temp, self.shm = registry.temp_dir(self.run_id), registry.shm_dir(self.run_id)
        self.state = RunState()
        self._reserve = self.run_dir / "reserve"
        self.actors: dict[str, Any] = {}
        self.end: asyncio.Future[ev.EndDecided]
        self._token: str | None = None
        self._cluster_up = False
        self._turned = time.monotonic()
        """When this process last showed that it runs."""
        self._incarnations: dict[str, int] = {}
        self._ticks: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self._lines: list[asyncio.Queue[bytes | None]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cluster: Cluster | None = None
        self._closing = False
        self._trainer_restart = asyncio.Lock()

    # -- the log ---

    def record(self, event: ev.Event) -> None:
        """An event of the host itself. Raises LogError, and ends the job, where it cannot be written."""
        self._write(lambda: self._log.record(event))

    def _write(self, write: Callable[[], ev.Entry | None]) -> None:
        try:
            entry = write()
        except LogError as error:
            if isinstance(error.__cause__, OSError):
                self._end_without_room(error)
            raise
        self._written(entry)

    def _end_without_room(self, error: LogError) -> None:
        """The log cannot be written any more: the job ends, and what was kept back has room for saying so."""
        self._reserve.unlink(missing_ok=True)
        if not self.end.done():
            verdict = ev.EndDecided(status=FAILED, reason=str(error))
            try:
                self._written(self._log.record(verdict))
            except LogError as again:
                log.error("%s", again)
                self.end.set_result(verdict)

    def _written(self, entry: ev.Entry | None) -> None:
        if entry is None:
            return
        self.state.apply(entry)
        line = ev.encoder.encode(entry)
        for subscriber in self._lines:
            subscriber.put_nowait(line)
        match entry.event:
            case ev.EndDecided() as verdict if not self.end.done():
                self.end.set_result(verdict)
            case ev.RestartDecided(role=role, incarnation=incarnation, reason=reason) if not self.end.done():
                self._spawn(self._restart(role, incarnation, reason))
            case ev.RoleReady():
                self._spawn(self._tell_changed())

    # -- life ---

    async def main(self) -> int:
        self.end = asyncio.get_running_loop().create_future()
        registry.make_folders(self.run_id)
        (self.temp / "secret").write_bytes(secrets.token_bytes(32))
        (self.temp / "secret").chmod(0o600)
        self._reaper = reaper.start_reaper(self.run_id, [self.temp, self.shm])
        address = f"unix:{registry.socket_path(self.run_id)}"
        self._log = EventLog(self.run_dir / "events.jsonl", time.monotonic)
        self._keep_room()
        self.record(
            ev.RunStarted(
                schema=ev.SCHEMA,
                run=self.run_id,
                name=self.config.name,
                wall=time.time(),
                host_pid=os.getpid(),
                config=msgspec.to_builtins(self.config),
                machine=machine.describe(),
            )
        )
        self._thresholds = Thresholds.named(self.config.thresholds)
        self.record(ev.ThresholdsChanged(thresholds=self._thresholds.to_dict(), changes={}))
        self._servers = [await wire.listen(address, self._serve)]
        self._roles_address = address
        for sig in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(sig, self._decide_end, STOPPED, f"the host received {sig.name}")
        if not self.file.keep_alive:
            self._spawn(self._watch_owner())
        self._turned = time.monotonic()
        self._spawn(self._watch_own_clock())
        self._spawn(self._start_and_run())
        verdict = await self.end
        await self._shut_down(verdict)
        return 0 if verdict.status in (DONE, STOPPED) else 1

    def _keep_room(self) -> None:
        try:
            with open(self._reserve, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, _RESERVE)
        except OSError as error:
            raise ConfigError("run_dir", self.config.run_dir, f"has no room for a run: {error}") from error

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("the job cannot go on", exc_info=error)
            self._decide_end(FAILED, str(error) if isinstance(error, RobustRLError) else f"{type(error).__name__}: {error}")

    def _decide_end(self, status: str, reason: str) -> None:
        if not self.end.done():
            self.record(ev.EndDecided(status=status, reason=reason))

    async def _watch_owner(self) -> None:
        while is_alive(ProcessId(self.file.owner_pid, self.file.owner_ticks)):
            await asyncio.sleep(0.5)
        self._decide_end(STOPPED, f"its owner, process {self.file.owner_pid}, has ended (keep_alive=True would let the job go on)")

    async def _watch_own_clock(self) -> None:
        while True:
            await asyncio.sleep(OWN_CLOCK)
            self._say_gap()

    def _say_gap(self) -> None:
        """A host that did not run for a while says so before it writes anything of what has come in meanwhile."""
        gap, self._turned = time.monotonic() - self._turned - OWN_CLOCK, time.monotonic()
        if gap > OWN_GAP:
            self.record(ev.ClockGap(seconds=round(gap, 3)))

    # -- start ---

    async def _start_and_run(self) -> None:
        if self.file.replaces:
            await asyncio.to_thread(self._wait_replaced)
        # a copy, since the thread that starts the cluster changes the environment: exec with one that moves fails with EFAULT
        checks = asyncio.create_task(self._preflight(dict(os.environ)))
        await asyncio.to_thread(self._start_cluster)
        await checks
        assert self._cluster is not None
        if self.config.address:
            await self._listen_for_other_machines()
        self._places = place(self._cluster.nodes, self.config)
        for node in self._cluster.nodes:
            kinds = sorted({role.kind.value for role, where in self._places.items() if where == node.name})
            self.record(ev.NodeStarted(node=node.name, ray_node_id=node.ray_node_id, ip=node.ip, kinds=kinds))
        await self._start_roles()
        await self._run()

    async def _run(self) -> None:
        """The training loop, in the task runner's present life; its death is the supervisor's matter."""
        try:
            await self._peer("task_runner").call("run", deadline=_RUN_DEADLINE)
        except PeerDied as error:
            log.warning("%s", error)

    async def _listen_for_other_machines(self) -> None:
        import ray

        ip = ray.util.get_node_ip_address()
        self._token = secrets.token_hex(32)
        server = await wire.listen(f"tcp:{ip}:0", self._serve, self._token)
        self._servers.append(server)
        self._roles_address = f"tcp:{ip}:{server.sockets[0].getsockname()[1]}"

    def _wait_replaced(self) -> None:
        for entry in registry.live_jobs():
            if entry.run == self.file.replaces and not wait_exit(entry.host, 30.0):
                raise WaitTimeout(f"the earlier job {entry.run} (host {entry.host_pid}) did not end within 30 s")

    async def _preflight(self, environment: dict[str, str]) -> None:
        """Checks that need heavy imports, in a process of their own, so that this one stays small."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "robustrl.runtime.preflight",
            str(self.run_dir / "config.json"),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await within(self.config.deadlines.call, "the checks before the start", process.communicate())
        if process.returncode:
            raise JobFailed(
                output.decode().strip() or f"the checks before the start ended with exit status {process.returncode}: see logs/host.log"
            )

    def _start_cluster(self) -> None:
        config = self.config
        if config.address:
            self._cluster = JoinedCluster(config.address, self.run_id)
        else:
            self._cluster = LocalCluster(self.temp, self.run_id, plan_nodes(config), object_store_bytes=config.object_store_mb << 20)
        self._cluster.start(deadline=config.deadlines.cluster_start)
        self._cluster_up = True

    async def _start_roles(self) -> None:
        """All side by side, the slow ones first; each role's agent watches it from its first moment."""
        deadline = self.config.deadlines
        agents = [str(role) for role in self._places if role.kind is RoleKind.NODE_AGENT]
        await asyncio.gather(*(self._create(role) for role in agents))
        await asyncio.gather(*(self._peer(role).call("open", deadline=deadline.role_start) for role in agents))
        secret = (self.temp / "secret").read_bytes()
        await asyncio.gather(*(self._peer(role).call("keep_secret", secret, deadline=deadline.call) for role in agents))
        others = [role for role in self._places if role.kind is not RoleKind.NODE_AGENT]
        others.sort(key=lambda role: _SLOW_FIRST.index(role.kind) if role.kind in _SLOW_FIRST else len(_SLOW_FIRST))
        up: dict[RoleKind, list[asyncio.Task[None]]] = {}
        for role in others:
            up.setdefault(role.kind, []).append(asyncio.create_task(self._bring_up(str(role), role.kind, up)))
        await asyncio.gather(*(task for tasks in up.values() for task in tasks), self._first_version(up))

    async def _bring_up(self, role: str, kind: RoleKind, up: dict[RoleKind, list[asyncio.Task[None]]]) -> None:
        """Its process, then its set-up once those are set up whom it calls from its first moment."""
        await self._create(role)
        await _all_up(up, _CALLS_AT_ONCE.get(kind, ()))
        await self._peer(role).call("open", deadline=self.config.deadlines.role_start)

    async def _first_version(self, up: dict[RoleKind, list[asyncio.Task[None]]]) -> None:
        """Version 0, as soon as trainer and state keeper are there."""
        await _all_up(up, (RoleKind.TRAINER, RoleKind.STATE_KEEPER))
        await self._prepare_trainers([str(role) for role in self._places if role.kind is RoleKind.TRAINER])

    async def _prepare_trainers(self, ranks: list[str]) -> None:
        deadline = self.config.deadlines.role_start
        rendezvous = await self._peer("trainer-0").call("rendezvous", deadline=deadline)
        group = self._thresholds.job.process_group
        await asyncio.gather(*(self._peer(role).call("prepare", rendezvous, group, deadline=deadline) for role in ranks))

    async def _create(self, role: str) -> None:
        self._incarnations[role] = self._incarnations.get(role, 0) + 1
        spec = self._spec(role)
        handle = self._cluster.create_actor(spec, self._node_of(role))  # type: ignore[union-attr]
        self.actors[role] = handle
        identity = await self._peer(role).call("identity", deadline=self.config.deadlines.role_start)
        self.record(
            ev.RoleStarted(
                role=role, incarnation=spec.incarnation, node=spec.node, pid=identity["pid"], start_ticks=identity["start_ticks"]
            )
        )
        self._ticks[role] = identity["start_ticks"]
        self._spawn(self._watch_role(role, spec, identity["pid"], handle))
        if role == "supervisor":  # it is needed to bring back an agent that died with it, which will then watch it
            self._spawn(self._watch_if_there(spec, identity["pid"]))
        elif not role.startswith(RoleKind.NODE_AGENT):
            await self._watch_from_outside(spec, identity["pid"])

    async def _watch_if_there(self, spec: RoleSpec, pid: int) -> None:
        try:
            await self._watch_from_outside(spec, pid)
        except (PeerDied, WaitTimeout) as error:
            log.warning("%s is not watched from outside: %s", spec.role, error)

    async def _watch_from_outside(self, spec: RoleSpec, pid: int) -> None:
        await self._agent_of(spec.node).call(
            "watch", spec.role, spec.incarnation, pid, spec.page_path, spec.log_path, deadline=self.config.deadlines.call, again=True
        )

    def _agent_of(self, node: str) -> Peer:
        return self._peer(str(next(r for r, where in self._places.items() if where == node and r.kind is RoleKind.NODE_AGENT)))

    def _node_of(self, role: str) -> Any:
        name = next(where for r, where in self._places.items() if str(r) == role)
        return next(node for node in self._cluster.nodes if node.name == name)  # type: ignore[union-attr]

    def _spec(self, role: str, incarnation: int | None = None) -> RoleSpec:
        """Of the present life, or of another one; every life of a role is made from the same."""
        node = self._node_of(role)
        return RoleSpec(
            role=role,
            incarnation=incarnation or self._incarnations[role],
            run=self.run_id,
            node=node.name,
            ip=node.ip,
            run_dir=str(self.run_dir),
            temp_dir=str(self.temp),
            shm_dir=str(self.shm),
            host_address=self._roles_address,
            host_token=self._token,
            config=self.config,
        )

    def _peer(self, role: str) -> Peer:
        return Peer(self, role)

    async def present(self, role: str) -> tuple[int, Any]:
        """See role.Directory."""
        return self._incarnations[role], self.actors[role]

    async def successor(self, role: str, incarnation: int, deadline: float) -> None:
        """See role.Directory."""

        def there() -> bool:
            view = self.state.roles.get(role)
            return view is not None and view.incarnation > incarnation and view.ready

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(there)

        await within(deadline, f"{role} to come back after incarnation {incarnation}", wait())

    async def _tell_changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _watch_role(self, role: str, spec: RoleSpec, pid: int, handle: Any) -> None:
        """Ray's word on a death: for those whom nobody else reports, and as a second witness for all."""
        import ray

        try:
            await handle.lifetime.remote()
        except ray.exceptions.RayActorError as error:
            if self._closing:
                return
            if role == "supervisor":
                self._replace_supervisor(spec.incarnation, pid, type(error).__name__)
                return
            await asyncio.sleep(_DEATH_WORD)
            view = self.state.roles[role]
            if not self._closing and view.incarnation == spec.incarnation and not view.exited:
                self.record(
                    ev.ProcessExited(role=role, incarnation=spec.incarnation, pid=pid, cause=f"Ray: {type(error).__name__}", last_lines=[])
                )

    def _replace_supervisor(self, incarnation: int, pid: int, cause: str) -> None:
        """It cannot judge its own death; the same policy is asked here."""
        if not self.state.roles["supervisor"].exited:
            self.record(ev.ProcessExited(role="supervisor", incarnation=incarnation, pid=pid, cause=f"Ray: {cause}", last_lines=[]))
        failure = Failure(kind=RoleKind.SUPERVISOR, restarts=incarnation - 1, was_healthy=True)
        if why := why_not_restart(failure, self.config.restarts):
            self._decide_end(FAILED, f"the supervisor (pid {pid}) died: {cause}\n{why}")
        else:
            self.record(ev.RestartDecided(role="supervisor", incarnation=incarnation, reason=cause))

    # -- restart ---

    async def _restart(self, role: str, incarnation: int, reason: str) -> None:
        """A new life of this role, made from the same spec; of a trainer, of all its ranks."""
        kind = RoleId.parse(role).kind
        roles = [role]
        if kind is RoleKind.TRAINER:
            roles = [str(r) for r in self._places if r.kind is RoleKind.TRAINER]
        # a rank may die while the others are still being made: their lives must be known before they are ended
        async with self._trainer_restart if kind is RoleKind.TRAINER else contextlib.nullcontext():
            if incarnation != self._incarnations[role]:
                return  # a decision that was written twice
            log.info("restarting %s after incarnation %d: %s", role, incarnation, reason)
            for each in roles:
                await self._end_life(each)
            await asyncio.gather(*(self._create(each) for each in roles))
        try:
            await self._set_up_again(role, kind, roles)
        except PeerDied as error:  # it or somebody it needs: the supervisor hears of that death as of any other
            log.warning("%s did not come back: %s", role, error)

    async def _set_up_again(self, role: str, kind: RoleKind, roles: list[str]) -> None:
        await asyncio.gather(*(self._peer(each).call("open", deadline=self.config.deadlines.role_start) for each in roles))
        match kind:
            case RoleKind.TRAINER:
                await self._prepare_trainers(roles)
            case RoleKind.ROLLOUT:
                await self._peer("rollout_manager").call("add_rollout", role, deadline=self.config.deadlines.role_start, again=True)
            case RoleKind.TASK_RUNNER:
                await self._run()
            case RoleKind.NODE_AGENT:
                await self._watch_again(role)

    async def _end_life(self, role: str) -> None:
        """A new incarnation starts only after the old process is known to be dead (fencing)."""
        view = self.state.roles[role]
        agent = self._agent_of(view.node)
        if agent.role == role or (role == "supervisor" and self.config.address is None):  # their agent may be dead as well
            process = ProcessId(view.pid, self._ticks[role])
            kill(process)
            if not await asyncio.to_thread(wait_exit, process, self.config.deadlines.call):
                raise WaitTimeout(f"{role} (pid {process.pid}): not dead {self.config.deadlines.call:g} s after SIGKILL")
        else:
            await agent.call("kill", role, view.incarnation, deadline=self.config.deadlines.call, again=True)

    async def _watch_again(self, agent: str) -> None:
        node = self.state.roles[agent].node
        secret = (self.temp / "secret").read_bytes()
        await self._peer(agent).call("keep_secret", secret, deadline=self.config.deadlines.call)
        for role, view in list(self.state.roles.items()):
            if view.node == node and role != agent and not view.exited:
                await self._watch_from_outside(self._spec(role, view.incarnation), view.pid)

    # -- the socket ---

    async def _serve(self, hello: wire.Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streams: list[asyncio.Task[None]] = []
        try:
            while message := await wire.read_message(reader):
                match message:
                    case wire.Emit(events=events):
                        if ack := self._emit(events):
                            wire.write_message(writer, ack)
                    case wire.Subscribe(after=after):
                        streams.append(asyncio.create_task(self._stream(after, writer)))
                    case wire.Call():
                        self._spawn(self._answer(message, writer))
        except (ConnectionError, RobustRLError) as error:
            log.info("a %s left: %s", hello.kind, error)
        finally:
            for stream in streams:
                stream.cancel()

    def _emit(self, events: bytes) -> wire.Ack | None:
        batch = ev.emitted_decoder.decode(events)
        if self._closing:
            return None
        self._say_gap()
        for emitted in batch:
            self._write(lambda emitted=emitted: self._log.append(emitted))  # type: ignore[misc]
        last = batch[-1]
        return wire.Ack(last.source, last.incarnation, self._log.acknowledged(last.source, last.incarnation))

    async def _stream(self, after: int, writer: asyncio.StreamWriter) -> None:
        """History from the file, then each line as it is written; one message for all that is ready."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        history = self._log.path.read_bytes().splitlines()[after:]
        self._lines.append(queue)
        try:
            for start in range(0, len(history), 1000):
                wire.write_message(writer, wire.Entries(history[start : start + 1000]))
                await writer.drain()
            while (line := await queue.get()) is not None:
                lines = [line]
                while not queue.empty() and len(lines) < 1000:
                    if (more := queue.get_nowait()) is None:
                        wire.write_message(writer, wire.Entries(lines))
                        return
                    lines.append(more)
                wire.write_message(writer, wire.Entries(lines))
                await writer.drain()
        except ConnectionError:
            pass  # the reader's side of this connection sees the same and says so
        finally:
            self._lines.remove(queue)

    async def _answer(self, call: wire.Call, writer: asyncio.StreamWriter) -> None:
        try:
            verb = self._VERBS.get(call.verb)
            if verb is None:
                raise RobustRLError(f"verb {call.verb!r}: the host knows {', '.join(sorted(self._VERBS))}")
            result = wire.Result(call.id, await verb(self, **call.args))
        except Exception as error:  # whatever a verb raises is the caller's to see
            result = wire.Result(call.id, error=wire.Failure.of(error))
        wire.write_message(writer, result)

    # -- verbs ---

    async def _stop(self, reason: str = "stopped by the user") -> str:
        self._decide_end(STOPPED, reason)
        return self.end.result().status

    async def _pause(self) -> int:
        return await self._running("task_runner").call("pause", deadline=self.config.deadlines.call)

    async def _resume(self) -> int:
        return await self._running("task_runner").call("resume", deadline=self.config.deadlines.call)

    async def _save_pretrained(self, path: str) -> str:
        await self._running("trainer-0").call("save_pretrained", path, deadline=self.config.deadlines.call)
        return path

    async def _add_rollout(self) -> str:
        """The name of the new role, whose process is there; it sets itself up and joins behind our back."""
        manager = self._running("rollout_manager")
        assert self._cluster is not None
        role, node = place_another(RoleKind.ROLLOUT, self._cluster.nodes, self._places)
        self._places[role] = node
        await self._create(str(role))
        self._spawn(self._join(str(role), manager))
        return str(role)

    async def _join(self, rollout: str, manager: Peer) -> None:
        await self._peer(rollout).call("open", deadline=self.config.deadlines.role_start)
        await manager.call("add_rollout", rollout, deadline=self.config.deadlines.call)

    async def _set_thresholds(self, changes: dict[str, Any]) -> dict[str, Any]:
        """All or none of ``changes`` (path -> value), checked and in force from the next entry on. Returns all thresholds."""
        new = self._thresholds.updated(changes)
        if made := self._thresholds.changes(new):
            self._thresholds = new
            self.record(ev.ThresholdsChanged(thresholds=new.to_dict(), changes=made))
        return new.to_dict()

    async def _signal(self, role: str, signal: str, seconds: float = 0.0) -> int:
        """The pid that was hit, by its node's agent."""
        if role not in self.state.roles:
            raise RobustRLError(f"role {role!r}: this job has {', '.join(self.state.roles) or 'none yet'}")
        view = self.state.roles[role]
        agent = self._agent_of(view.node)
        deadline = self.config.deadlines.call
        return await agent.call("signal", role, view.incarnation, signal, seconds, deadline=deadline)

    async def _logs(self, role: str, lines: int = 50) -> list[str]:
        if role not in self.state.roles:
            raise RobustRLError(f"role {role!r}: this job has {', '.join(self.state.roles) or 'none yet'}")
        path = self.run_dir / "logs" / f"{actor_name(role, self.state.roles[role].incarnation)}.log"
        return path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []

    async def _incarnation(self, role: str) -> int:
        """Number of the present life; a later life counts once it can be called."""
        if role not in self._incarnations:
            raise RobustRLError(f"role {role!r}: this job has {', '.join(self._incarnations)}")
        if (number := self._incarnations[role]) > 1:
            await self.successor(role, number - 1, self.config.deadlines.role_start)
        return self._incarnations[role]

    async def _successor(self, role: str, incarnation: int, wait: float) -> None:
        await self.successor(role, incarnation, wait)

    async def _ready(self, kind: str) -> list[str]:
        """The roles of a kind that can be called."""
        return [role for role, view in self.state.roles.items() if view.kind == kind and view.ready and not view.exited]

    async def _known(self) -> dict[str, Any]:
        """What the log holds of the trajectories and of the steps, for a request manager or task runner in a later life."""
        ledger = self.state.ledger
        return {
            "step": self.state.step,
            "evaluated": [done.version for done in self.state.evaluations],
            "paused": self.state.paused,
            "metrics": int(self.state.metrics[-1]["step"]) if self.state.metrics else 0,
            "started": {i: ledger.state(i).value for i in ledger.ids()},
            "finished": sorted(self.state.finished_ids),
        }

    async def _state(self) -> dict[str, Any]:
        return {
            "run": self.run_id,
            "status": self.state.status,
            "step": self.state.step,
            "steps": self.state.steps,
            "reason": self.state.reason,
        }

    _VERBS: ClassVar[dict[str, Callable[..., Awaitable[Any]]]] = {
        "stop": _stop,
        "pause": _pause,
        "resume": _resume,
        "save_pretrained": _save_pretrained,
        "add_rollout": _add_rollout,
        "set_thresholds": _set_thresholds,
        "signal": _signal,
        "logs": _logs,
        "state": _state,
        "incarnation": _incarnation,
        "successor": _successor,
        "ready": _ready,
        "known": _known,
    }

    def _running(self, role: str) -> Peer:
        view = self.state.roles.get(role)
        if view is None or view.state is not RoleState.HEALTHY:
            raise JobFailed(f"{role} is {view.state if view else 'not started yet'}: wait for the job to run, e.g. job.wait(step=1)")
        return self._peer(role)

    # -- end ---

    async def _shut_down(self, verdict: ev.EndDecided) -> None:
        """Close the log with its balance, then remove all that the job started."""
        log.info("ending: %s (%s)", verdict.status, verdict.reason)
        if verdict.status == DONE:
            await self._keep_model()
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        self._close_log(verdict)
        for queue in self._lines:
            queue.put_nowait(None)
        if self.config.address:
            await self._clean_other_machines()
        await asyncio.to_thread(self._remove_all)
        for server in self._servers:
            server.close()

    def _close_log(self, verdict: ev.EndDecided) -> None:
        """A log that cannot be closed keeps nothing from being removed; its reader learns of it from what is missing."""
        self._reserve.unlink(missing_ok=True)
        try:
            for event in self.state.closing(f"job {verdict.status}"):
                self.record(event)
            self.record(ev.RunEnded(status=verdict.status, reason=verdict.reason, wall=time.time()))
            self._log.close()
            self._write_summary()
        except (LogError, OSError) as error:
            log.error("the run's files could not be closed: %s", error)

    def _write_summary(self) -> None:
        from ..summary import summarize

        (self.run_dir / "summary.json").write_bytes(msgspec.json.encode(summarize(self.run_dir)) + b"\n")

    async def _keep_model(self) -> None:
        """The trained model outlives the job, in its run directory."""
        try:
            await self._save_pretrained(str(self.run_dir / "model"))
        except RobustRLError as error:
            self.record(ev.WarningRaised(text=f"the trained model was not saved: {error}"))

    async def _clean_other_machines(self) -> None:
        deadline = self.config.deadlines.stop
        agents = [self._peer(role) for role in self.actors if role.startswith(RoleKind.NODE_AGENT)]
        spare = [os.getpid(), self._reaper.pid]
        results = await asyncio.gather(
            *(agent.call("clean", spare, deadline, deadline=2 * deadline) for agent in agents), return_exceptions=True
        )
        for agent, result in zip(agents, results, strict=True):
            if isinstance(result, BaseException):
                log.error("%s could not clean up its node: %s", agent.role, result)

    def _remove_all(self) -> None:
        deadline = self.config.deadlines.stop
        if self._cluster is not None:
            self._cluster.stop(self.actors, deadline=deadline)
        kill_marked(self.run_id, deadline, spare={os.getpid(), self._reaper.pid})
        registry.remove_folders(self.run_id)
        registry.release(self.run_id)
        if self._cluster is None or self._cluster_up:
            self._reaper.dismiss()  # else a thread still starts nodes: the reaper removes what it makes, once this process is gone


async def _all_up(up: dict[RoleKind, list[asyncio.Task[None]]], kinds: tuple[RoleKind, ...]) -> None:
    """The tasks of these kinds have ended well; raises what one of them raised."""
    for kind in kinds:
        await asyncio.gather(*map(asyncio.shield, up[kind]))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m robustrl.runtime.host", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args(argv).run_dir
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    host = Host(run_dir)
    try:
        code = asyncio.run(host.main())
    except (RobustRLError, LogError) as error:
        log.exception("the host could not start")
        (run_dir / "host-error.json").write_bytes(msgspec.json.encode(wire.Failure.of(error)))
        code = 1
    logging.shutdown()
    os._exit(code)  # threads of Ray's driver may still wait for a cluster that is gone


if __name__ == "__main__":
    main()
