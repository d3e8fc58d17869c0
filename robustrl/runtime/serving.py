"""The host's socket: events come in, the log goes out, and verbs are answered. Any number of readers; each sees every line, in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from ..core import events as ev
from ..core.lifecycle import STOPPED
from ..core.placement import place_another
from ..core.recovery import MODES, STANDBYS
from ..core.roles import RoleId, RoleKind, RoleState
from ..core.thresholds import LEAST
from ..errors import ConfigError, JobFailed, PeerDied, RobustRLError, WaitTimeout
from . import injecting, wire
from .role import Peer, actor_name

if TYPE_CHECKING:
    from .host import Host

log = logging.getLogger("host")
_DIGESTS = 64
"""Versions whose digest is told to a state keeper in a later life."""
_NOT_URGENT = (ev.TrajectoriesStarted, ev.TrajectoriesFinished, ev.TokensJournalled, ev.PullStarted, ev.PullProgress, ev.StepMetrics)
"""Most entries of a log. They wait for one that somebody may have to act on: a reader is woken for many at once. So does a sample of a role
whose phase has just begun: no limit is that short.
"""
_WAITS = 0.05
"""Seconds, at most."""
_LINES = 1000
"""Of one message."""


class Outbox:
    """What a reader of the log has yet to be sent, in order: lines, and answers among them; None after the last line."""

    def __init__(self) -> None:
        self._items: list[bytes | wire.Result | None] = []
        self._some, self._urgent = asyncio.Event(), asyncio.Event()

    def put(self, item: bytes | wire.Result | None, event: ev.Event | None = None) -> None:
        self._items.append(item)
        self._some.set()
        new_phase = isinstance(event, ev.RoleSample) and max(event.phase_age, event.loop_age) < LEAST
        if not (new_phase or isinstance(event, _NOT_URGENT)):
            self._urgent.set()

    async def get(self) -> list[bytes | wire.Result | None]:
        """All that is there, as soon as one item is urgent or the first one has waited for `_WAITS`."""
        await self._some.wait()
        if not self._urgent.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), _WAITS)
        return self.take()

    def take(self) -> list[bytes | wire.Result | None]:
        """All that is there now."""
        items, self._items = self._items, []
        self._some.clear()
        self._urgent.clear()
        return items


def _messages(items: list[bytes | wire.Result | None]) -> Iterator[wire.Entries | wire.Result]:
    """Those of an outbox, one for all lines that follow each other; answers that came after the last line are among them."""
    lines: list[bytes] = []
    for item in items:
        if isinstance(item, bytes):
            lines.append(item)
        if lines and (not isinstance(item, bytes) or len(lines) == _LINES):
            yield wire.Entries(lines)
            lines = []
        if isinstance(item, wire.Result):
            yield item
    if lines:
        yield wire.Entries(lines)


class Serving:
    def __init__(self, host: Host) -> None:
        self._host, self._lives = host, host.lives

    async def serve(self, hello: wire.Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the peer leaves. One that also reads the log gets an answer after all lines written before it."""
        streams: list[asyncio.Task[None]] = []
        outbox: Outbox | None = None
        try:
            while message := await wire.read_message(reader):
                match message:
                    case wire.Emit(events=events):
                        if ack := self.take_events(events):
                            wire.write_message(writer, ack)
                    case wire.Subscribe(after=after):
                        outbox = Outbox()
                        streams.append(asyncio.create_task(self._stream(after, outbox, writer)))
                    case wire.Call():
                        self._host.spawn(self._answer(message, outbox, writer))
        except (ConnectionError, RobustRLError) as error:
            log.info("a %s left: %s", hello.kind, error)
        finally:
            for stream in streams:
                stream.cancel()

    def take_events(self, events: bytes) -> wire.Ack | None:
        batch = ev.emitted_decoder.decode(events)
        if self._host.closing:
            return None
        self._host.say_gap()
        for emitted in batch:
            self._host.write(lambda emitted=emitted: self._host.event_log.append(emitted))  # type: ignore[misc]
        last = batch[-1]
        return wire.Ack(last.source, last.incarnation, self._host.event_log.acknowledged(last.source, last.incarnation))

    async def _stream(self, after: int, outbox: Outbox, writer: asyncio.StreamWriter) -> None:
        """History from the file, then each line as it is written; one message for all that is ready."""
        history = self._host.event_log.lines(after)
        self._host.outboxes.append(outbox)
        try:
            for start in range(0, len(history), _LINES):
                wire.write_message(writer, wire.Entries(history[start : start + _LINES]))
                await writer.drain()
            ended = False
            while not ended:
                items = await outbox.get()
                ended = None in items
                for message in _messages(items):
                    wire.write_message(writer, message)
                await writer.drain()
        except ConnectionError:
            pass  # the reader's side of this connection sees the same and says so
        finally:
            self._host.outboxes.remove(outbox)
            for item in outbox.take():
                if isinstance(item, wire.Result):
                    wire.write_message(writer, item)

    async def _answer(self, call: wire.Call, outbox: Outbox | None, writer: asyncio.StreamWriter) -> None:
        try:
            verb = self._VERBS.get(call.verb)
            if verb is None:
                raise RobustRLError(f"verb {call.verb!r}: the host knows {', '.join(sorted(self._VERBS))}")
            result = wire.Result(call.id, await verb(self, **call.args))
        except Exception as error:  # whatever a verb raises is the caller's to see
            result = wire.Result(call.id, error=wire.Failure.of(error))
        if any(outbox is one for one in self._host.outboxes):
            assert outbox is not None
            outbox.put(result)
        else:
            wire.write_message(writer, result)

    # -- verbs ---

    async def _stop(self, reason: str = "stopped by the user") -> str:
        self._host.decide_end(STOPPED, reason)
        return self._host.end.result().status

    async def _pause(self) -> int:
        return await self._running("task_runner").call("pause", deadline=self._host.config.deadlines.call)

    async def _resume(self) -> int:
        return await self._running("task_runner").call("resume", deadline=self._host.config.deadlines.call)

    async def save_pretrained(self, path: str) -> str:
        await self._running("trainer-0").call("save_pretrained", path, deadline=self._host.config.deadlines.call)
        return path

    async def finish_checkpoint(self) -> bool:
        """Whether the newest checkpoint is on disk, or has failed, within the deadline of a call."""
        limit = self._host.config.deadlines.call
        return bool(await self._running("trainer-0").call("finish_checkpoint", 0.4 * limit, deadline=limit))

    async def _add_rollout(self) -> str:
        """The name of the new role, whose process is there; it sets itself up and joins behind our back."""
        manager = self._running("rollout_manager")
        assert self._host.cluster is not None
        role, node = place_another(RoleKind.ROLLOUT, self._host.cluster.nodes, self._lives.places)
        self._lives.places[role] = node
        try:
            await self._lives.create(str(role))
        except BaseException:
            if str(role) not in self._host.state.roles:
                del self._lives.places[role]
            raise
        self._host.spawn(self._join(str(role), manager))
        return str(role)

    async def _join(self, rollout: str, manager: Peer) -> None:
        deadline = self._host.config.deadlines.role_start
        try:
            await self._lives.peer(rollout).call("open", deadline=deadline)
            await manager.call("add_rollout", rollout, deadline=deadline, again=True)
        except PeerDied as error:  # the supervisor hears of that death as of any other
            log.warning("%s did not join: %s", rollout, error)
        except WaitTimeout as error:
            self._host.record(ev.WarningRaised(text=f"{rollout} did not join: {error}"))

    async def _set_thresholds(self, changes: dict[str, Any]) -> dict[str, Any]:
        """All or none of ``changes`` (path -> value), checked and in force from the next entry on. Returns all thresholds."""
        new = self._host.thresholds.updated(changes)
        if made := self._host.thresholds.changes(new):
            self._host.thresholds = new
            self._host.record(ev.ThresholdsChanged(thresholds=new.to_dict(), changes=made))
        return new.to_dict()

    async def _set_recovery(self, mode: str | None = None, standbys: str | None = None) -> list[str]:
        """What is given, checked and in force from the next entry on. Returns [mode, standbys]."""
        for field, value, allowed in (("recovery.mode", mode, MODES), ("recovery.standbys", standbys, STANDBYS)):
            if value is not None and value not in allowed:
                raise ConfigError(field, value, f"must be one of {', '.join(allowed)}")
        state = self._host.state
        new = [mode or state.recovery_mode, standbys or state.recovery_standbys]
        if new != [state.recovery_mode, state.recovery_standbys]:
            self._host.record(ev.RecoverySettings(mode=new[0], standbys=new[1]))
        return new

    async def _order(self, role: str, action: str) -> int:
        """The incarnation that is to be restarted, or drained."""
        if role not in self._host.state.roles:
            raise RobustRLError(f"role {role!r}: this job has {', '.join(self._host.state.roles) or 'none yet'}")
        view = self._host.state.roles[role]
        if action == "drain":
            await self._drain(role)
        elif view.state not in (RoleState.HEALTHY, RoleState.SUSPECT, RoleState.STOPPED):
            raise JobFailed(f"{role} is {view.state}: its recovery is under way")
        self._host.record(ev.RoleOrdered(role=role, incarnation=view.incarnation, action=action))
        if action == "drain":
            await self._host.restarting.end_drained(role)
        return view.incarnation

    async def _drain(self, role: str) -> None:
        if RoleId.parse(role).kind is not RoleKind.ROLLOUT:
            raise ConfigError("role", role, "cannot be drained: only a rollout's work can go to others; restart() is for any role")
        others = [r for r, view in self._host.state.roles.items() if view.kind is RoleKind.ROLLOUT and view.state is RoleState.HEALTHY]
        if others in ([], [role]):
            raise JobFailed(f"{role} is the last rollout that serves: nobody could take its work")
        manager, deadline = self._running("rollout_manager"), self._host.config.deadlines.call
        await self._running(role).call("stop_work", deadline=deadline)
        await manager.call("drain", role, deadline=deadline, again=True)

    async def _present(self, role: str) -> tuple[int, str]:
        """Number and actor name of the present life; a later life counts once it can be called."""
        number = await self._incarnation(role)
        return number, self._lives.names[role]

    async def _signal(self, role: str, signal: str, seconds: float = 0.0) -> int:
        """The pid that was hit, by its node's agent."""
        if role not in self._host.state.roles:
            raise RobustRLError(f"role {role!r}: this job has {', '.join(self._host.state.roles) or 'none yet'}")
        view = self._host.state.roles[role]
        agent = self._lives.agent_of(view.node)
        deadline = self._host.config.deadlines.call
        return await agent.call("signal", role, view.incarnation, signal, seconds, deadline=deadline)

    async def _logs(self, role: str, lines: int = 50) -> list[str]:
        if role not in self._host.state.roles:
            raise RobustRLError(f"role {role!r}: this job has {', '.join(self._host.state.roles) or 'none yet'}")
        path = self._host.run_dir / "logs" / f"{actor_name(role, self._host.state.roles[role].incarnation)}.log"
        return path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []

    async def _incarnation(self, role: str) -> int:
        """Number of the present life; a later life counts once it can be called."""
        if role not in self._lives.incarnations:
            raise RobustRLError(f"role {role!r}: this job has {', '.join(self._lives.incarnations)}")
        if (number := self._lives.incarnations[role]) > 1:
            await self._lives.successor(role, number - 1, self._host.config.deadlines.role_start)
        return self._lives.incarnations[role]

    async def _successor(self, role: str, incarnation: int, wait: float) -> None:
        await self._lives.successor(role, incarnation, wait)

    async def _ready(self, kind: str) -> list[str]:
        """The roles of a kind that can be called, and whose next life is not on its way."""
        return [
            role
            for role, view in self._host.state.roles.items()
            if view.kind == kind and view.ready and not view.exited and view.incarnation == self._lives.incarnations[role]
        ]

    async def _known(self) -> dict[str, Any]:
        """What the log holds of the trajectories and of the steps, for a request manager or task runner in a later life."""
        ledger = self._host.state.ledger
        return {
            "step": self._host.state.step,
            "stands": self._host.state.stands,
            "committed": max(self._host.state.step_times, default=-1),
            "version": self._host.state.newest,
            "digests": {str(version): view.digest for version, view in list(self._host.state.announced.items())[-_DIGESTS:]},
            "evaluated": [done.version for done in self._host.state.evaluations],
            "paused": self._host.state.paused,
            "full_restarts": self._host.state.full_restarts,
            "metrics": int(self._host.state.metrics[-1]["step"]) if self._host.state.metrics else 0,
            "started": {i: ledger.state(i).value for i in ledger.ids()},
            "finished": sorted(self._host.state.finished_ids),
        }

    async def _state(self) -> dict[str, Any]:
        return {
            "run": self._host.run_id,
            "status": self._host.state.status,
            "step": self._host.state.step,
            "steps": self._host.state.steps,
            "reason": self._host.state.reason,
        }

    _VERBS: ClassVar[dict[str, Callable[..., Awaitable[Any]]]] = {
        "stop": _stop,
        "pause": _pause,
        "resume": _resume,
        "save_pretrained": save_pretrained,
        "add_rollout": _add_rollout,
        "set_thresholds": _set_thresholds,
        "signal": _signal,
        "logs": _logs,
        "state": _state,
        "incarnation": _incarnation,
        "set_recovery": _set_recovery,
        "order": _order,
        "present": _present,
        "successor": _successor,
        "ready": _ready,
        "known": _known,
        **injecting.VERBS,
    }

    def _running(self, role: str) -> Peer:
        view = self._host.state.roles.get(role)
        if view is None or view.state is not RoleState.HEALTHY:
            raise JobFailed(f"{role} is {view.state if view else 'not started yet'}: wait for the job to run, e.g. job.wait(step=1)")
        return self._lives.peer(role)
