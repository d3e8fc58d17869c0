"""The injector: the host's half of faults. It carries out what the planner decides, through node agents and the roles themselves.

Promises: each fault that was ordered has its FaultPlanned in the log before anything is done, and its proof (FaultInjected) or its end
(FaultEnded) after; a fault that cannot be carried out ends aloud and ends nothing else. Decisions are faults/planner.py's. Here: the loss
of a whole node, as only the host knows a node's raylet.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..core import events as ev
from ..core.roles import RoleKind
from ..errors import PeerDied, RobustRLError, WaitTimeout
from ..faults.catalogue import CATALOGUE, Delay, IdleRollout, NodeLoss, Partition, make_fault
from ..faults.hand import Hand
from ..faults.orders import Order
from ..faults.planner import Planner, Strike, in_loop
from ..faults.schedules import make_schedule
from .processes import ProcessId, children_of, kill, read_start_ticks, wait_exit
from .status_page import StatusPage

if TYPE_CHECKING:
    from .host import Host
    from .namespaces import Namespaces

_TICK = 0.05
"""Seconds between two looks while a fault waits for its moment."""
_CALL = 10.0
"""Seconds for a role or node agent to take an order."""
_GONE = 5.0
_REPORT = 0.5
"""Seconds, at most, that a full restart waits for the proof of the fault that it answers: it ends who would give it."""
_CUT_OFF = 0.2
"""Seconds without an answer that prove a partition."""


class Injector:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._planner = Planner(config=host.config, root=os.geteuid() == 0, state=host.state)
        self._hand = Hand(self._record_soon)
        self._turning = self._timed = False
        self._network: Namespaces | None = None
        self._links: dict[int, str] = {}
        """Fault -> the link that it has cut, or on which packets are late."""
        self._cutting: dict[int, asyncio.Future[None]] = {}
        """Fault -> the thread that does it to its link."""
        self._called_off: set[int] = set()
        self._loop: asyncio.AbstractEventLoop

    @property
    def _folder(self) -> str:
        return str(self._host.temp / "faults")

    def know_network(self, network: Namespaces) -> None:
        """The nodes have one of their own, on which faults are possible."""
        self._network, self._planner.why_no_delay = network, network.why_no_delay

    # -- verbs ---

    async def inject(self, fault: dict[str, Any], hidden: bool = False, by: str = "") -> int:
        """The number of the fault, which is planned now. Raises ConfigError; RobustRLError for one that is refused at once."""
        planned = self._planner.plan(make_fault(fault), time.monotonic(), hidden=hidden, by=by)
        self._host.record(planned)
        self._turn()
        if (view := self._host.state.faults[planned.fault]).outcome == "refused":
            raise RobustRLError(f"fault {planned.fault} ({view.kind}) is refused: {view.reason}")
        return planned.fault

    async def schedule(self, schedule: dict[str, Any], by: str = "") -> str:
        """The name of the schedule. Raises ConfigError."""
        name = self._planner.begin(make_schedule(schedule), time.monotonic(), by)
        self._turn()
        return name

    async def abort_fault(self, fault: int) -> None:
        """Undo what can be undone. Raises RobustRLError for what is done and cannot be."""
        if fault in self._cutting:  # before it is done there is nothing to mend, and it would be done after that
            await asyncio.wait([self._cutting[fault]])
        where = self._planner.call_off(fault)
        self._called_off.add(fault)
        if where is not None:
            view = self._host.state.faults[fault]
            too_late = RobustRLError(f"fault {fault} ({view.kind}) was done and cannot be undone")
            if view.hits and not CATALOGUE[view.kind].undo:
                raise too_late
            if fault in self._links:
                await asyncio.to_thread(self._mend, fault)
            elif not await self._set_free(fault, *where):
                raise too_late
        if not self._host.state.faults[fault].outcome:
            self._host.record(ev.FaultEnded(fault=fault, outcome="aborted", reason="called off"))

    async def abort_schedule(self, schedule: str) -> None:
        """No more faults of it; those that wait are aborted, those that were done are not undone."""
        for number in self._planner.stop_series(schedule):
            await self.abort_fault(number)

    async def reveal_fault(self, fault: int, guess: str = "") -> None:
        if fault not in self._host.state.faults.faults:
            raise RobustRLError(f"there is no fault {fault}")
        if not self._host.state.faults[fault].revealed:
            self._host.record(ev.FaultRevealed(fault=fault, guess=guess))

    # -- time ---

    def feed(self) -> None:
        """The log has grown."""
        if not self._planner.idle and not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turning, self._loop = False, asyncio.get_running_loop()
        if self._host.closing:
            return
        now = time.monotonic()
        for event in self._planner.extend(now):
            self._host.record(event)
        for done in self._planner.decide(now):
            if isinstance(done, Strike):
                self._host.spawn(self._strike(done))
            else:
                self._host.record(done)
        if not self._timed and not self._planner.idle:
            self._timed = True
            self._loop.call_later(_TICK, self._time_passed)

    def _time_passed(self) -> None:
        self._timed = False
        self._turn()

    async def reported(self) -> None:
        """Returns when no proof is on its way, or after `_REPORT` seconds."""
        end = time.monotonic() + _REPORT
        while self._planner.unreported() and time.monotonic() < end:
            await asyncio.sleep(_TICK / 10)

    def closing(self, status: str) -> list[ev.FaultEnded]:
        """See Planner."""
        return self._planner.closing(status)

    def _record_soon(self, event: ev.Event) -> None:
        """From a thread of the hand."""
        self._loop.call_soon_threadsafe(self._record_if_open, event)

    def _record_if_open(self, event: ev.Event) -> None:
        if not self._host.closing:
            self._host.record(event)

    # -- doing it ---

    async def _strike(self, strike: Strike) -> None:
        try:
            await self._carry_out(strike)
        except Exception as error:  # whatever stands in its way ends the fault, and nothing else
            view = self._host.state.faults[strike.fault]
            if not view.hits and not view.outcome:
                outcome = "vanished" if isinstance(error, PeerDied) else "refused"
                self._host.record(ev.FaultEnded(fault=strike.fault, outcome=outcome, reason=f"{type(error).__name__}: {error}"))
            else:
                self._record_if_open(ev.WarningRaised(text=f"fault {strike.fault} was done, and then: {type(error).__name__}: {error}"))

    async def _carry_out(self, strike: Strike) -> None:
        lives, fault = self._host.lives, strike.what
        view = self._host.state.roles[strike.role]
        if lives.incarnations[strike.role] != strike.incarnation:
            raise PeerDied(f"{strike.role} incarnation {strike.incarnation} has been replaced")
        order = self._order(strike, view.pid)
        if isinstance(fault, NodeLoss):
            await asyncio.to_thread(self._lose_node, strike, view.node)
        elif isinstance(fault, Partition):
            await self._disturb_network(strike, fault, view.node)
        elif fault.by == "role":
            role = "rollout_manager" if isinstance(fault, IdleRollout) else strike.role
            await lives.peer(role).call("disturb", order, deadline=_CALL)
        elif view.kind is RoleKind.NODE_AGENT:  # nobody else watches it
            self._hand.strike(order, ProcessId(view.pid, lives.ticks[strike.role]))
        else:
            await lives.agent_of(view.node).call("strike", order, deadline=_CALL)

    def _order(self, strike: Strike, pid: int) -> Order:
        spec = self._host.lives.spec(strike.role, strike.incarnation)
        fault = strike.what
        return Order(
            fault=strike.fault,
            kind=fault.name,
            role=strike.role,
            incarnation=strike.incarnation,
            node=spec.node,
            pid=pid,
            page=spec.page_path,
            folder=self._folder,
            phase=fault.phase,
            step=fault.step or 0 if fault.kind is RoleKind.TRAINER else 0,
            in_loop=in_loop(fault),
            options=msgspec.to_builtins(fault),
        )

    async def _set_free(self, fault: int, role: str, _incarnation: int) -> bool:
        """False: it has killed."""
        lives, view = self._host.lives, self._host.state.roles[role]
        process = ProcessId(view.pid, lives.ticks[role])
        if view.kind is RoleKind.NODE_AGENT:
            return self._hand.call_off(fault, self._folder, process)
        try:
            return bool(await lives.agent_of(view.node).call("call_off", fault, self._folder, *process, deadline=_CALL))
        except (PeerDied, WaitTimeout) as error:
            raise RobustRLError(f"fault {fault} could not be undone: {error}") from error

    def _lose_node(self, strike: Strike, node: str) -> None:
        """The raylet first, so that nothing it would report is; then every process there, and the files of the roles that were there."""
        host = self._host
        victims = [view for view in host.state.roles.values() if view.node == node and not view.exited]
        pages = {view.role: StatusPage.read(host.lives.spec(view.role, view.incarnation).page_path) for view in victims}
        raylet = host.cluster.raylet_of(node)  # type: ignore[union-attr]
        others = [child for child in children_of(raylet) if child.pid not in {view.pid for view in victims}]
        began = time.monotonic()
        everyone = [ProcessId(raylet, read_start_ticks(raylet)), *(ProcessId(v.pid, host.lives.ticks[v.role]) for v in victims), *others]
        for process in everyone:
            kill(process)
        if left := [process.pid for process in everyone if not wait_exit(process, _GONE)]:
            raise WaitTimeout(f"{node}: not dead {_GONE:g} s after SIGKILL: {left}")
        removed = self._remove_files(node, [view.role for view in victims])
        for view in victims:
            page = pages[view.role]
            proof = {"signal": "SIGKILL", "process": "gone", "raylet": raylet, "processes": len(everyone), "removed": removed,
                     "ago": round(time.monotonic() - began, 6)}  # fmt: skip
            self._record_soon(
                ev.FaultInjected(
                    fault=strike.fault,
                    role=view.role,
                    incarnation=view.incarnation,
                    node=node,
                    pid=view.pid,
                    phase=page.phase,
                    step=page.step,
                    proof=proof,
                )
            )

    async def _disturb_network(self, strike: Strike, fault: Partition, node: str) -> None:
        """For its time, or until it is called off; every role on the node is hit."""
        if strike.fault in self._called_off:
            return
        self._cutting[strike.fault] = cutting = asyncio.ensure_future(asyncio.to_thread(self._cut, strike.fault, fault, node))
        try:
            await cutting
        finally:
            del self._cutting[strike.fault]
        await asyncio.sleep(fault.seconds)
        if strike.fault in self._links:
            await asyncio.to_thread(self._mend, strike.fault)
            self._host.record(ev.FaultEnded(fault=strike.fault, outcome="over", reason=f"after {fault.seconds:g} s"))

    def _cut(self, number: int, fault: Partition, node: str) -> None:
        host, network = self._host, self._network
        assert network is not None and host.cluster is not None
        victims = [view for view in host.state.roles.values() if view.node == node and not view.exited]
        pages = {view.role: StatusPage.read(host.lives.spec(view.role, view.incarnation).page_path) for view in victims}
        link = network.link(node)
        if isinstance(fault, Delay):
            network.delay(link, fault.milliseconds)
        else:
            network.cut(link)
        self._links[number], began = link, time.monotonic()
        proof: dict[str, Any] = {"link": link}
        if isinstance(fault, Delay):
            proof["milliseconds"] = fault.milliseconds
        else:
            proof["answers"] = not host.cluster.unreachable(node, _CUT_OFF)
        for view in victims:
            page = pages[view.role]
            done = proof | {"ago": round(time.monotonic() - began, 6)}
            self._record_soon(
                ev.FaultInjected(
                    fault=number, role=view.role, incarnation=view.incarnation, node=node, pid=view.pid, phase=page.phase, step=page.step,
                    proof=done,
                )
            )  # fmt: skip

    def _mend(self, number: int) -> None:
        assert self._network is not None
        link = self._links.pop(number, "")
        if not link:
            return  # its time is over and it is called off, both at once
        try:
            if self._host.state.faults[number].kind == Delay.__struct_config__.tag:
                self._network.hurry(link)
            else:
                self._network.heal(link)
        except RobustRLError:
            self._links[number] = link
            raise

    def _remove_files(self, node: str, roles: list[str]) -> list[str]:
        """A role's files are those named after it: slots of snapshots, what lies beside them."""
        removed = [path for role in roles for folder in (self._host.shm, self._host.temp) for path in Path(folder).glob(f"{role}.*")]
        for path in removed:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return sorted(path.name for path in removed)


def _verb(name: str) -> Callable[..., Awaitable[Any]]:
    async def verb(serving: Any, **args: Any) -> Any:
        return await getattr(serving._host.injector, name)(**args)

    return verb


VERBS = {name: _verb(name) for name in ("inject", "schedule", "abort_fault", "abort_schedule", "reveal_fault")}
"""For the host's socket."""
