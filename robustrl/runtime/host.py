"""The host: one plain process per job. It starts the nodes, creates every role, is the only writer of the event log, and reaps.

It is thin: what becomes of a role is decided by the supervisor; the host carries out and writes down. It is the only Ray driver. It ends
with its job, or with its owner unless ``keep_alive``; should it be killed itself, its reaper cleans up. This file has the job's log, start
and end; the roles' lives are in lives.py, restarts in restarting.py, the socket in serving.py.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ..config import JobConfig, in_words, is_on_hub
from ..core import events as ev
from ..core.guard import Guard
from ..core.lifecycle import DONE, FAILED, STOPPED
from ..core.placement import place, plan_nodes
from ..core.roles import RoleKind
from ..core.run_state import RunState
from ..core.thresholds import Thresholds
from ..errors import ConfigError, JobFailed, PeerDied, RobustRLError, WaitTimeout, plain
from . import machine, namespaces, reaper, registry, wire
from .cluster import Cluster, JoinedCluster, LocalCluster
from .event_log import EventLog, LogError
from .injecting import Injector
from .lives import Lives
from .processes import ProcessId, is_alive, kill_marked, wait_exit, yield_to_others
from .restarting import Restarting
from .role import OWN_CLOCK, OWN_GAP, within
from .serving import Outbox, Serving

log = logging.getLogger("host")
_SLOW_CHECKS = 5.0
"""Seconds after which the log says what the checks before the start may be waiting for."""
_RUN_DEADLINE = 30 * 24 * 3600.0
_RESERVE = 1 << 20
"""Bytes of the run directory's disk that are kept for the closing records, for when it is full."""


class Host:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir.resolve()
        self.file = msgspec.json.decode((self.run_dir / "job.json").read_bytes(), type=registry.HostFile)
        self.config = msgspec.json.decode((self.run_dir / "config.json").read_bytes(), type=JobConfig)
        self.run_id = self.file.run
        self.temp, self.shm = registry.temp_dir(self.run_id), registry.shm_dir(self.run_id)
        self.state = RunState()
        self._reserve = self.run_dir / "reserve"
        self.end: asyncio.Future[ev.EndDecided]
        self.token: str | None = None
        self._cluster_up = False
        self._turned = time.monotonic()
        """When this process last showed that it runs."""
        self._ahead = 0.0
        """The log's clock less this machine's."""
        self.outboxes: list[Outbox] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self.cluster: Cluster | None = None
        self.closing = False
        self.guard = Guard(Thresholds.named(self.config.thresholds))
        self.lives = Lives(self)
        self.restarting = Restarting(self)
        self.serving = Serving(self)
        self.injector = Injector(self)

    # -- the log ---

    def record(self, event: ev.Event) -> None:
        """An event of the host itself. Raises LogError, and ends the job, where it cannot be written."""
        self.write(lambda: self.event_log.record(event))

    def write(self, write: Callable[[], ev.Entry | None]) -> None:
        was_there = not self.event_log.removed
        try:
            entry = write()
        except LogError as error:
            if isinstance(error.__cause__, OSError):
                self._end_without_room(error)
            raise
        self._written(entry)
        if was_there and self.event_log.removed and not self.event_log.ended:
            text = "was removed while the job runs: it goes on from memory, and this log is lost once it ends"
            self.record(ev.WarningRaised(text=f"{self.event_log.path} {text}"))

    def _end_without_room(self, error: LogError) -> None:
        """The log cannot be written any more: the job ends, and what was kept back has room for saying so."""
        self._reserve.unlink(missing_ok=True)
        if not self.end.done():
            verdict = ev.EndDecided(status=FAILED, reason=str(error))
            try:
                self._written(self.event_log.record(verdict))
            except LogError as again:
                log.error("%s", again)
                self.end.set_result(verdict)

    def _written(self, entry: ev.Entry | None) -> None:
        if entry is None:
            return
        self.state.apply(entry)
        self._ahead = entry.t - time.monotonic()
        line = ev.encoder.encode(entry)
        for outbox in self.outboxes:
            outbox.put(line, entry.event)
        self.injector.feed()
        match entry.event:
            case ev.EndDecided() as verdict if not self.end.done():
                self.end.set_result(verdict)
            case ev.RestartDecided() as decided if not self.end.done():
                self.restarting.carry_out(decided)
            case ev.RoleReady():
                self.spawn(self.lives.tell_changed())
        self._condemn_supervisor(self.guard.feed(entry))

    def _condemn_supervisor(self, verdict: ev.Verdict | None) -> None:
        if verdict is not None and not self.closing:
            self.record(verdict)
            self.spawn(self.restarting.end_supervisor(verdict.incarnation))

    # -- life ---

    async def main(self) -> int:
        self.end = asyncio.get_running_loop().create_future()
        registry.make_folders(self.run_id)
        (self.temp / "secret").write_bytes(secrets.token_bytes(32))
        (self.temp / "secret").chmod(0o600)
        self._reaper = reaper.start_reaper(self.run_id, [self.temp, self.shm])
        address = f"unix:{registry.socket_path(self.run_id)}"
        self.event_log = EventLog(self.run_dir / "events.jsonl", time.monotonic, resume=True)
        self._keep_room()
        self._begin_log()
        self._servers = [await wire.listen(address, self.serving.serve)]
        self.roles_address = address
        for sig in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(sig, self.decide_end, STOPPED, f"the host received {sig.name}")
        if not self.file.keep_alive:
            self.spawn(self._watch_owner())
        self._turned = time.monotonic()
        self.spawn(self._watch_own_clock())
        self.spawn(self._start_and_run())
        verdict = await self.end
        await self._shut_down(verdict)
        return 0 if verdict.status in (DONE, STOPPED) else 1

    def _begin_log(self) -> None:
        """A new one, or the next part of one whose host has ended: then all goes on from what it says."""
        found = self.event_log.found
        self.resumed = any(isinstance(entry.event, ev.RunStarted) for entry in found)
        if self.resumed:
            for entry in found:
                self.state.apply(entry)
            self.lives.fresh = self.state.over
            self.thresholds = Thresholds.from_dict(self.state.thresholds)
            self.guard = Guard(self.thresholds)
            self.record(ev.RunResumed(wall=time.time(), host_pid=os.getpid()))
            return
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
        self.thresholds = Thresholds.named(self.config.thresholds)
        self.record(ev.ThresholdsChanged(thresholds=self.thresholds.to_dict(), changes={}))
        self.record(self.config.first_recovery())

    def _keep_room(self) -> None:
        try:
            with open(self._reserve, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, _RESERVE)
        except OSError as error:
            raise ConfigError("run_dir", self.config.run_dir, f"has no room for a run: {error}") from error

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("the job cannot go on", exc_info=error)
            self.decide_end(FAILED, in_words(error, self.config) if isinstance(error, RobustRLError) else _foreign(error))

    def decide_end(self, status: str, reason: str) -> None:
        if not self.end.done():
            self.record(ev.EndDecided(status=status, reason=reason))

    async def _watch_owner(self) -> None:
        while is_alive(ProcessId(self.file.owner_pid, self.file.owner_ticks)):
            await asyncio.sleep(0.5)
        self.decide_end(STOPPED, f"its owner, process {self.file.owner_pid}, has ended (keep_alive=True would let the job go on)")

    async def _watch_own_clock(self) -> None:
        while True:
            await asyncio.sleep(OWN_CLOCK)
            self.say_gap()
            self._condemn_supervisor(self.guard.look(time.monotonic() + self._ahead))

    def say_gap(self) -> None:
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
        assert self.cluster is not None
        if self.config.address or self.config.hosts == "namespaces":
            await self._listen_for_other_machines()
        self.lives.places = place(self.cluster.nodes, self.config)
        for node in self.cluster.nodes:
            kinds = sorted({role.kind.value for role, where in self.lives.places.items() if where == node.name})
            self.record(ev.NodeStarted(node=node.name, ray_node_id=node.ray_node_id, ip=node.ip, kinds=kinds))
        self.spawn(self.restarting.watch_nodes())
        await self.lives.start([role for role in self.lives.places if role.kind is not RoleKind.STANDBY])
        for role in [role for role in self.lives.places if role.kind is RoleKind.STANDBY]:
            self.spawn(self.lives.warm_up(str(role)))
        self.lives.fresh = False
        if self.resumed:
            self.restarting.all_started()
        await self.run_training()

    async def run_training(self) -> None:
        """The training loop, in the task runner's present life, whose death is the supervisor's matter.

        One that lives and stopped over a trainer that did not come back goes on once it has: that may take long, and while recovery is
        only observed nobody brings it back.
        """
        runner, life = self.lives.peer("task_runner"), self.lives.incarnations["task_runner"]
        while self.lives.incarnations["task_runner"] == life:
            try:
                await runner.call("run", deadline=_RUN_DEADLINE)
                return
            except PeerDied as error:
                log.warning("%s", error)
                if not await self.lives.is_there("task_runner", life):
                    return
                self.record(ev.WarningRaised(text=f"the training waits: {error}"))
                await self.lives.trainers_there()

    async def _listen_for_other_machines(self) -> None:
        import ray

        ip = ray.util.get_node_ip_address()
        self.token = secrets.token_hex(32)
        server = await wire.listen(f"tcp:{ip}:0", self.serving.serve, self.token)
        self._servers.append(server)
        self.roles_address = f"tcp:{ip}:{server.sockets[0].getsockname()[1]}"

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
        hint = asyncio.get_running_loop().call_later(_SLOW_CHECKS, self._say_slow_checks)
        try:
            output, _ = await within(self.config.deadlines.call, "the checks before the start (deadlines.call)", process.communicate())
        finally:
            hint.cancel()
        if process.returncode:
            raise JobFailed(
                output.decode().strip() or f"the checks before the start ended with exit status {process.returncode}: see logs/host.log"
            )

    def _say_slow_checks(self) -> None:
        if is_on_hub(self.config.model) and not self.end.done():
            text = f"the start waits for the model {self.config.model!r}: what is not on this machine yet comes from the Hugging Face hub"
            self.record(ev.WarningRaised(text=text))

    def _start_cluster(self) -> None:
        config = self.config
        if config.address:
            self.cluster = JoinedCluster(config.address, self.run_id)
        elif config.hosts == "namespaces":
            hosts = namespaces.Namespaces()
            self.injector.know_network(hosts)
            self.cluster = LocalCluster(self.temp, self.run_id, plan_nodes(config), config.object_store_mb << 20, namespaces.HEAD_IP, hosts)
        else:
            self.cluster = LocalCluster(self.temp, self.run_id, plan_nodes(config), object_store_bytes=config.object_store_mb << 20)
        self.cluster.start(deadline=config.deadlines.cluster_start)
        self._cluster_up = True

    # -- end ---

    async def _shut_down(self, verdict: ev.EndDecided) -> None:
        """Close the log with its balance, then remove all that the job started."""
        log.info("ending: %s (%s)", verdict.status, verdict.reason)
        if verdict.status == DONE:
            await self._keep_model()
        self.closing = True
        for task in list(self._tasks):
            task.cancel()
        self._close_log(verdict)
        for outbox in self.outboxes:
            outbox.put(None)
        if self.config.address:
            await self._clean_other_machines()
        await asyncio.to_thread(self._remove_all)
        for server in self._servers:
            server.close()

    def _close_log(self, verdict: ev.EndDecided) -> None:
        """A log that cannot be closed keeps nothing from being removed; its reader learns of it from what is missing."""
        self._reserve.unlink(missing_ok=True)
        try:
            for event in [*self.injector.closing(verdict.status), *self.state.closing(f"job {verdict.status}")]:
                self.record(event)
            self.record(ev.RunEnded(status=verdict.status, reason=verdict.reason, wall=time.time()))
            self.event_log.close()
            self._write_summary()
        except (LogError, OSError) as error:
            log.error("the run's files could not be closed: %s", error)

    def _write_summary(self) -> None:
        from ..summary import summarize

        (self.run_dir / "summary.json").write_bytes(msgspec.json.encode(summarize(self.run_dir)) + b"\n")

    async def _keep_model(self) -> None:
        """The trained model outlives the job, in its run directory, and so does the checkpoint of its last step."""
        try:
            await self.serving.save_pretrained(str(self.run_dir / "model"))
        except RobustRLError as error:
            self.record(ev.WarningRaised(text=f"the trained model was not saved: {error}"))
        try:
            if not await self.serving.finish_checkpoint():
                self.record(ev.WarningRaised(text="the last checkpoint was still being written when the job ended"))
        except RobustRLError as error:
            self.record(ev.WarningRaised(text=f"whether the last checkpoint was written is not known: {error}"))

    async def _clean_other_machines(self) -> None:
        deadline = self.config.deadlines.stop
        agents = [self.lives.peer(role) for role in self.lives.actors if role.startswith(RoleKind.NODE_AGENT)]
        spare = [os.getpid(), self._reaper.pid]
        results = await asyncio.gather(
            *(agent.call("clean", spare, deadline, deadline=2 * deadline) for agent in agents), return_exceptions=True
        )
        for agent, result in zip(agents, results, strict=True):
            if isinstance(result, BaseException):
                log.error("%s could not clean up its node: %s", agent.role, result)

    def _remove_all(self) -> None:
        deadline = self.config.deadlines.stop
        if self.cluster is not None:
            self.cluster.stop(self.lives.actors, deadline=deadline)
        kill_marked(self.run_id, deadline, spare={os.getpid(), self._reaper.pid})
        registry.remove_folders(self.run_id)
        registry.release(self.run_id)
        if self.cluster is None or self._cluster_up:
            self._reaper.dismiss()  # else a thread still starts nodes: the reaper removes what it makes, once this process is gone


def _foreign(error: BaseException) -> str:
    """Of an error that is none of ours: also where it was raised, which its own text seldom says."""
    return "\n".join((f"{type(error).__name__}: {plain(str(error))}", *getattr(error, "__notes__", ())))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m robustrl.runtime.host", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(namespaces.INSIDE, dest="inside", action="store_true", help="in the namespace that it began for itself")
    given = parser.parse_args(argv)
    run_dir = given.run_dir
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    host = Host(run_dir)
    if host.config.hosts == "namespaces" and not given.inside:
        namespaces.enter(["-m", "robustrl.runtime.host", str(run_dir)])
    if host.config.address is None:  # the roles are its children: pages and kernels on this machine come first
        yield_to_others()
    asyncio.run(_run(host))


async def _run(host: Host) -> None:
    """Does not return: threads of Ray's driver may still wait for a cluster that is gone, or that never answered, and nobody for them."""
    try:
        code = await host.main()
    except (RobustRLError, LogError) as error:
        log.exception("the host could not start")
        (host.run_dir / "host-error.json").write_bytes(msgspec.json.encode(wire.Failure.of(error)))
        code = 1
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
