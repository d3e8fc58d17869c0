"""What every role process has in common: its spec, its log file, its status page, its line to the host, and calls to other roles.

A role is a detached Ray actor with an asyncio loop that only ever carries control traffic: work that computes or waits runs in a thread of
its own, so no call queues behind it. The host creates the actor, asks `identity()`, registers it with its node's agent and calls `open()`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from ..config import JobConfig, in_words
from ..core import events as ev
from ..core.roles import Phase, RoleId, RoleKind
from ..errors import PeerDied, RobustRLError, WaitTimeout, plain
from ..faults.disturbance import Disturbance
from ..faults.orders import Order
from .emitter import Emitter
from .processes import read_start_ticks
from .status_page import StatusPage
from .wire import HostClient

T = TypeVar("T")
OWN_CLOCK, OWN_GAP = 0.1, 1.0
"""Seconds between two looks at one's own clock, and how late one may be before that is said."""
UCX_ROOM = 16 << 20
"""Bytes of the shared-memory mount that a process with UCX is sure to get along with; 4 MB each were measured."""
_PHASE_LOOK = 0.005
"""Seconds between two looks for the phase in which a fault is to strike."""
_LAST_WORDS = 2.0
_REST = {RoleKind.TRAINER: Phase.WAITING_BATCH, RoleKind.ROLLOUT: Phase.WAITING_REQUEST, RoleKind.STANDBY: Phase.WARMING}


class RoleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a role is made from; a second incarnation is made from the same spec with the next number."""

    role: str
    incarnation: int
    run: str
    node: str
    ip: str
    run_dir: str
    temp_dir: str
    shm_dir: str
    host_address: str
    host_token: str | None
    config: JobConfig
    fresh: bool = False
    """It begins in a full restart: what was generated and is not trained on is generated again."""

    @property
    def actor_name(self) -> str:
        return actor_name(self.role, self.incarnation)

    @property
    def log_path(self) -> str:
        return f"{self.run_dir}/logs/{self.actor_name}.log"

    @property
    def page_path(self) -> str:
        return f"{self.temp_dir}/status/{self.actor_name}"

    def secret(self) -> bytes:
        """The job's secret for the weight plane: from a file of mode 0600."""
        return Path(self.temp_dir, "secret").read_bytes()


def actor_name(role: str, incarnation: int) -> str:
    return f"{role}.{incarnation}"


async def within(seconds: float, what: str, awaitable: Awaitable[T]) -> T:
    """``awaitable`` with a deadline; the error names what was waited for."""
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except TimeoutError as error:
        if isinstance(error, WaitTimeout):
            raise
        raise WaitTimeout(f"{what}: no answer within {seconds:g} s") from None


class LifeEnded(PeerDied):
    """The present life of a role has died, and its death is not known to the host yet."""

    def __init__(self, role: str, incarnation: int) -> None:
        super().__init__(f"{role} incarnation {incarnation} has died")
        self.role, self.incarnation = role, incarnation

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (self.role, self.incarnation)


class NotHere(PeerDied):
    """This life of a role has left the process that was called."""

    def __init__(self, role: str, incarnation: int, now: str) -> None:
        super().__init__(f"{role} incarnation {incarnation} is over: its process is {now} now")
        self.role, self.incarnation, self.now = role, incarnation, now

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return type(self), (self.role, self.incarnation, self.now)


class Directory(Protocol):
    """Who knows which life of a role is the present one."""

    async def present(self, role: str) -> tuple[int, Any]:
        """Incarnation and actor handle. Raises LifeEnded."""

    async def successor(self, role: str, incarnation: int, deadline: float) -> None:
        """Returns when a later life of the role can be called. Raises WaitTimeout."""


class Peer:
    """Another role, whatever life it is in. ``await peer.call(method, ...)`` never waits without a deadline."""

    def __init__(self, directory: Directory, role: str) -> None:
        self._directory, self.role = directory, role

    async def call(self, method: str, *args: Any, deadline: float, again: bool = False, **kwargs: Any) -> Any:
        """Result of ``method``. Raises WaitTimeout naming role and method, PeerDied when the role has died, or what the method raised, with
        its own text.

        ``again``: the call means the same when it is made twice; should the role die, its next life is asked, within the same deadline.
        """
        import ray

        end = time.monotonic() + deadline
        while True:
            try:
                incarnation, handle = await self._directory.present(self.role)
            except LifeEnded as error:
                if not again:
                    raise
                await self._directory.successor(self.role, error.incarnation, end - time.monotonic())
                continue
            ref = handle.invoke.remote(self.role, incarnation, method, *args, **kwargs)
            try:
                return await within(max(0.0, end - time.monotonic()), f"{self.role}.{method}()", ref)
            except ray.exceptions.RayActorError as error:
                if not again:
                    raise PeerDied(f"{self.role} died during {method}(): {type(error).__name__}") from None
            except ray.exceptions.RayTaskError as error:
                if not (again and isinstance(error.cause, NotHere)):
                    raise _as_raised(error, f"{self.role}.{method}()") from None
            await self._directory.successor(self.role, incarnation, end - time.monotonic())


class _OneLife:
    """A Directory that knows one life of one role and nothing of what comes after it."""

    def __init__(self, incarnation: int, handle: Any) -> None:
        self._life = incarnation, handle

    async def present(self, role: str) -> tuple[int, Any]:
        return self._life

    async def successor(self, role: str, incarnation: int, deadline: float) -> None:
        raise PeerDied(f"{role} incarnation {incarnation} died, and no other life of it is meant")


class Role:
    """Base of all role actors; see the module's text. Subclasses override `on_open` and add their methods."""

    ready_when_open = True
    """False: the role says itself when it can be called."""

    def __init__(self, spec: RoleSpec) -> None:
        self._born = time.monotonic()
        self.spec, self.config, self.deadlines = spec, spec.config, spec.config.deadlines
        self.role = RoleId.parse(spec.role)
        _redirect_output(spec.log_path)
        _keep_temporary_files_in(spec.temp_dir)
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
        self.log = logging.getLogger(spec.role)
        Path(spec.page_path).parent.mkdir(parents=True, exist_ok=True)
        self.page = StatusPage.create(spec.page_path, incarnation=spec.incarnation, pid=os.getpid())
        self.page.phase = _REST.get(self.role.kind, Phase.IDLE)
        self.host = HostClient(spec.host_address, token=spec.host_token, kind="role", on_disconnect=self._host_gone)
        self.emitter = Emitter(self.host, spec.role, spec.incarnation)
        self.disturbance = Disturbance(self.page, self.emit, self.emitter.flush)
        self.inherited: dict[str, Any] = {}
        """What the role that was in this process before has built; empty in a process of its own."""
        self._present: dict[str, tuple[int, Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stamper: asyncio.Task[None] | None = None

    async def identity(self) -> dict[str, Any]:
        """Who this process is; asked first, so that from here on its loop shows that it comes round."""
        if self._stamper is None:
            self._stamper = asyncio.create_task(self._stamp())
        return {"pid": os.getpid(), "start_ticks": read_start_ticks(os.getpid())}

    async def open(self) -> None:
        """Set the role up; it can be called when this returns."""
        await self.on_open()
        if self.ready_when_open:
            self.say_ready()

    def say_ready(self) -> None:
        self.emit(ev.RoleReady(role=self.spec.role, incarnation=self.spec.incarnation, seconds=time.monotonic() - self._born))

    async def on_open(self) -> None:
        """Subclasses' set-up."""

    async def retire(self) -> dict[str, Any]:
        """This life ends and its process goes on as another role; what it leaves to that one."""
        for task in list(self._tasks):
            task.cancel()
        self.stop_stamping()
        await asyncio.to_thread(self.emitter.flush, _LAST_WORDS)
        self.host.close()
        return {}

    def emit(self, *events: ev.Event) -> None:
        self.emitter.emit(*events)

    async def disturb(self, order: Order) -> None:
        """A fault that only this process can make: in this event loop, or where its work loop passes by."""
        self.disturbance.arm(order)
        if order.in_loop:
            self.spawn(self._disturb_loop(order))

    async def _disturb_loop(self, order: Order) -> None:
        while not self.disturbance.strike_in_loop(order, self.stored):
            await asyncio.sleep(_PHASE_LOOK)

    def stored(self, fault: str) -> memoryview:
        """What this role keeps for others and a fault of this kind is to damage. Raises RobustRLError without any."""
        raise RobustRLError(f"{self.spec.role} keeps nothing for others")

    def choose_transport(self) -> None:
        """UCX's settings, before ucxx is imported. Where the shared-memory mount is too small, UCX would go over TCP without a word."""
        from ..transport import settings

        mount = os.statvfs(self.spec.shm_dir)
        free = mount.f_bavail * mount.f_frsize
        own_hosts = self.config.hosts == "namespaces"  # between which there is no shared memory
        settings.apply("shm" if free >= UCX_ROOM and not own_hosts else "tcp", shm_dir=self.spec.shm_dir, host=self.spec.ip)
        if free < UCX_ROOM and not own_hosts:
            text = f"{self.spec.role}: the shared-memory mount has {free >> 20} MiB left, UCX needs {UCX_ROOM >> 20}: weights go over tcp"
            self.emit(ev.WarningRaised(text=text))

    async def peer(self, role: str) -> Peer:
        """Another role of this job."""
        return Peer(self, role)

    async def life(self, role: str) -> Peer:
        """The present life of another role and no later one: calls raise PeerDied once it has ended."""
        self._present.pop(role, None)
        return Peer(_OneLife(*await self.present(role)), role)

    async def present(self, role: str) -> tuple[int, Any]:
        """See Directory. What the host said last is kept until a call fails."""
        import ray

        if role not in self._present:
            incarnation, name = await self.ask_host("present", deadline=self.deadlines.role_start, role=role)
            try:
                handle = await asyncio.to_thread(ray.get_actor, name, self.spec.run)
            except ValueError:  # Ray knows no living actor of that name
                raise LifeEnded(role, incarnation) from None
            self._present[role] = incarnation, handle
        return self._present[role]

    async def successor(self, role: str, incarnation: int, deadline: float) -> None:
        """See Directory."""
        self._present.pop(role, None)
        await self.ask_host("successor", deadline=deadline, role=role, incarnation=incarnation, wait=deadline)

    async def ask_host(self, verb: str, deadline: float | None = None, **args: Any) -> Any:
        """The host's answer. Raises WaitTimeout, HostGone, or the verb's own error."""
        deadline = self.deadlines.call if deadline is None else deadline
        return await asyncio.to_thread(self.host.call, verb, max(0.0, deadline), **args)

    def spawn(self, coroutine: Any) -> None:
        """Run a coroutine for its own sake. An error in it ends this process, a peer's death does not: that is the supervisor's matter."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or not (error := task.exception()):
            return
        if isinstance(error, PeerDied):
            self.log.warning("%s", error)
        else:
            self.die(error)

    def die(self, error: BaseException) -> None:
        """Say why, in the event log and as the last lines of the role's own log, and exit."""
        self.log.error("%s cannot go on", self.spec.role, exc_info=error)
        text = in_words(error, self.config)
        self.emit(ev.ErrorRaised(role=self.spec.role, incarnation=self.spec.incarnation, error=type(error).__name__, text=text))
        try:
            self.emitter.flush(timeout=_LAST_WORDS)
        except WaitTimeout as late:
            self.log.error("%s", late)
        os._exit(1)

    def stop_stamping(self) -> None:
        """For a role whose work loop is not this one and stamps the page itself: a stuck work loop must show."""
        if self._stamper is not None:
            self._stamper.cancel()

    async def _stamp(self) -> None:
        while True:
            self.page.stamp()
            await asyncio.sleep(0.1)

    def _host_gone(self) -> None:
        self.log.error("the host is gone: exiting")
        os._exit(3)


def _as_raised(error: Any, where: str) -> BaseException:
    """The error that a remote method raised, for Ray's own text of it is a traceback in colours; that of a foreign one is logged here."""
    cause: BaseException = error.cause
    if not isinstance(cause, RobustRLError):
        logging.getLogger("peer").warning("%s raised:\n%s", where, plain(str(error)))
        cause.add_note(f"raised by {where}")
    return cause


def _keep_temporary_files_in(folder: str) -> None:
    """What libraries leave there goes with the run: vLLM never removes its own. Inductor's cache stays where the next run finds it."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"))
    tempfile.tempdir = os.environ["TMPDIR"] = folder


def _redirect_output(path: str) -> None:
    """This process's output, also what native code prints, goes to the role's own log file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    # Ray replaces both by writers of its own
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
