"""When a planned fault is to strike, and whom: decided from the log and the time that is passed in. Pure and seeded.

`plan` says what was ordered, or raises ConfigError for what this job or machine does not allow. `decide` compares what waits with what the
log shows and says what is to be done now: strike, or give up and why. Nothing waits for a target that is gone: a fault whose target
vanished before it struck ends. Never the last live rollout, unless asked. Left out: doing it (runtime/injecting.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from ..config import JobConfig
from ..core import events as ev
from ..core.fault_book import FaultBook
from ..core.roles import Phase, RoleKind, RoleState
from ..core.run_state import RoleView, RunState
from ..core.thresholds import Thresholds
from ..errors import ConfigError, RobustRLError
from .catalogue import CATALOGUE, NODE, Delay, Fault, Freeze, FullDisk, IdleRollout, OfNode, Partition, SlowTool
from .freezing import check_freeze
from .schedules import Occurrence, Schedule

_GRACE = 2.0
"""Seconds after its target's end in which a fault may still prove that it was the cause."""
_OVERWRITTEN = 2
"""Optimizer steps after which a copy of weights or snapshot has been replaced."""
_LIVE = (RoleState.HEALTHY, RoleState.SUSPECT)


class Refused(RobustRLError):
    """The fault cannot be done now; the text says why."""


class Strike(msgspec.Struct, frozen=True):
    """Do it, to this life of this role."""

    fault: int
    what: Fault
    role: str
    incarnation: int


@dataclass(slots=True)
class _Waiting:
    number: int
    fault: Fault
    given: float
    share: float = 0.0
    due: float | None = None
    """Host time from which on it may strike; None: its step has not come."""


@dataclass(slots=True)
class _Armed:
    fault: Fault
    role: str
    lives: dict[str, int]
    """Target, and who has the order for it -> the life that is meant."""
    gone: float | None = None
    """When one of them was seen to have ended."""


@dataclass(slots=True)
class _Series:
    name: str
    schedule: Schedule
    given: float
    by: str
    rest: Iterator[Occurrence]
    last: int = 0
    """Number of the fault planned last."""
    stopped: bool = False


@dataclass
class Planner:
    config: JobConfig
    root: bool
    """This process may mount."""
    state: RunState
    """Kept up to date by its owner; its book tells which faults there are."""
    why_no_delay: str = ""
    """Why packets cannot be delayed here."""
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    _armed: dict[int, _Armed] = field(default_factory=dict)
    _damaged: dict[int, int] = field(default_factory=dict)
    """Fault that damaged bytes -> last committed step when it did."""
    _series: dict[str, _Series] = field(default_factory=dict)
    _numbers: int = 0

    @property
    def idle(self) -> bool:
        """Nothing waits for its moment, its proof, or, where somebody else carries it, its end."""
        return not self._waiting and not self._armed and not self._damaged and all(series.stopped for series in self._series.values())

    @property
    def book(self) -> FaultBook:
        return self.state.faults

    # -- orders in ---

    def plan(
        self, fault: Fault, now: float, *, hidden: bool = False, by: str = "", schedule: str = "", share: float = 0.0
    ) -> ev.FaultPlanned:
        """Raises ConfigError for what cannot be done in this job or on this machine."""
        self.check(fault)
        if not isinstance(hidden, bool):  # it would not be read back from the log, and a fault without its plan would strike
            raise ConfigError("hidden", hidden, "must be True or False")
        self._numbers = number = self._numbers + 1
        self._waiting[number] = _Waiting(number, fault, now, share)
        return ev.FaultPlanned(
            fault=number,
            kind=fault.name,
            target=fault.aim(),
            when=fault.when(),
            benign=fault.benign,
            options=msgspec.to_builtins(fault),
            schedule=schedule,
            hidden=hidden,
            by=by,
        )

    def begin(self, schedule: Schedule, now: float, by: str = "") -> str:
        """The name of the schedule; its first fault is planned by the next `extend`. Raises ConfigError."""
        name = f"schedule-{len(self._series) + 1}"
        occurrences = schedule.occurrences(self.config.steps, self.config.seed, self.state.step)
        first = next(occurrences, None)
        if first is None:
            raise ConfigError("schedule", schedule.name, f"has no fault for the {self.config.steps - self.state.step} steps that are left")
        self.check(first.fault)

        def all_of_them() -> Iterator[Occurrence]:
            yield first
            yield from occurrences

        self._series[name] = _Series(name, schedule, now, by, all_of_them())
        return name

    def extend(self, now: float) -> list[ev.Event]:
        """The next fault of each schedule whose last one has come; one that is not possible is planned and refused in one."""
        events: list[ev.Event] = []
        for series in self._series.values():
            while not series.stopped and not (series.schedule.endless and self._ahead(series.last, now)):
                occurrence = next(series.rest, None)
                if occurrence is None:
                    series.stopped = True
                    break
                if occurrence.fault.step is not None and occurrence.fault.step <= self.state.step:
                    continue  # gone by while a fault before it waited for its moment
                names = {"hidden": series.schedule.hidden, "by": series.by, "schedule": series.name}
                try:
                    planned = self.plan(occurrence.fault, series.given, share=occurrence.share, **names)  # type: ignore[arg-type]
                except ConfigError as error:
                    series.stopped = True
                    events.append(ev.WarningRaised(text=f"{series.name} ends: {error}"))
                    break
                series.last = planned.fault
                events.append(planned)
        return events

    def _ahead(self, number: int, now: float) -> bool:
        waiting = self._waiting.get(number)
        return waiting is not None and (waiting.due is None or waiting.due > now)

    def check(self, fault: Fault) -> None:
        """Raises ConfigError naming what stands against it in this job or on this machine."""
        config, name = self.config, fault.name
        if config.address and not fault.foreign:
            raise ConfigError(name, fault.target, "is refused on a cluster that this job did not start (address=): it would hit others")
        if config.address and fault.kind is RoleKind.NODE_AGENT:
            raise ConfigError(f"{name}.target", fault.target, "is refused with address=: nobody else on that node could prove it")
        if isinstance(fault, Partition) and config.hosts != "namespaces":
            raise ConfigError(name, fault.target, 'needs hosts="namespaces": nodes that share a network cannot be cut off from each other')
        if isinstance(fault, Delay) and self.why_no_delay:
            raise ConfigError(name, fault.target, f"is not possible here: {self.why_no_delay}")
        if isinstance(fault, FullDisk) and not self.root:
            raise ConfigError(name, fault.target, "needs root, for a little tmpfs of its own")
        if (role := fault.role) and role not in self.state.roles:
            raise ConfigError(f"{name}.target", role, f"this job has {', '.join(self.state.roles) or 'no role yet'}")
        self._check_node(fault)
        if fault.step is not None and not self.state.step < fault.step <= config.steps:
            raise ConfigError(f"{name}.step", fault.step, f"must be one of the steps to come, {self.state.step + 1} to {config.steps}")
        if isinstance(fault, SlowTool) and not _has_tool(config.task):
            raise ConfigError(f"{name}.target", fault.target, f"the task {config.task!r} has no tool; arithmetic_tool has one")
        if isinstance(fault, IdleRollout) and sum(view.kind is RoleKind.ROLLOUT for view in self.state.roles.values()) < 2:
            raise ConfigError(f"{name}.target", fault.target, "with one rollout alone, nobody is there to do its work")
        if isinstance(fault, Freeze):
            check_freeze(fault, Thresholds.from_dict(self.state.thresholds))

    def _check_node(self, fault: Fault) -> None:
        nodes = self.state.nodes
        for field_name, node in (("node", fault.node), ("target", fault.target if NODE.fullmatch(fault.target) else "")):
            if node and node not in nodes:
                raise ConfigError(f"{fault.name}.{field_name}", node, f"this job has {', '.join(nodes) or 'no node yet'}")
        if isinstance(fault, OfNode):
            head = next(iter(nodes), "")
            if len(nodes) < 2:
                raise ConfigError(fault.name, fault.target, "needs a job of several nodes (profile 'lab', or nodes=2 and more)")
            where = fault.node or fault.target
            view = self.state.roles.get(fault.role)
            if head in (where, view.node if view else ""):
                raise ConfigError(f"{fault.name}.target", fault.target, f"{head} has the head of Ray, a declared single point")

    # -- decisions out ---

    def decide(self, now: float) -> list[Strike | ev.FaultEnded]:
        """What is to be done at ``now``, in the order of planning."""
        done: list[Strike | ev.FaultEnded] = []
        for number in list(self._armed):
            if (ended := self._look_after(number, now)) is not None:
                done.append(ended)
        for number, step in list(self._damaged.items()):
            if self.state.step >= step + _OVERWRITTEN:
                del self._damaged[number]
                done.append(ev.FaultEnded(fault=number, outcome="over", reason=f"step {self.state.step} was written over the damage"))
        for waiting in list(self._waiting.values()):
            if waiting.due is None:
                waiting.due = self._due(waiting)
            if waiting.due is None or waiting.due > now:
                continue
            try:
                role = self.choose(waiting.fault, waiting.number)
            except Refused as error:
                del self._waiting[waiting.number]
                done.append(ev.FaultEnded(fault=waiting.number, outcome="refused", reason=str(error)))
                continue
            if role is not None:
                del self._waiting[waiting.number]
                lives = {name: self.state.roles[name].incarnation for name in (role, self._carrier(waiting.fault, role))}
                self._armed[waiting.number] = _Armed(waiting.fault, role, lives)
                done.append(Strike(waiting.number, waiting.fault, role, lives[role]))
        return done

    def _due(self, waiting: _Waiting) -> float | None:
        fault = waiting.fault
        due = waiting.given + fault.after
        if fault.step is None:
            return due
        # a trainer's page shows the step that runs: the order may be there before it begins
        early = fault.kind is RoleKind.TRAINER and fault.phase != "" and not waiting.share
        reached = fault.step - (2 if early else 1)
        if reached < 0:
            return due
        if reached not in self.state.step_times:
            return None
        began = self.state.step_times[reached]
        lasted = began - self.state.step_times.get(reached - 1, began)
        return max(due, began + waiting.share * lasted)

    def _look_after(self, number: int, now: float) -> ev.FaultEnded | None:
        """An armed fault leaves with its proof or its end; it ends when its target is gone without either."""
        armed, view = self._armed[number], self.book.faults.get(number)
        if view is None:
            return None
        held = bool(view.hits) and isinstance(armed.fault, IdleRollout)  # over with its carrier, which tells of any other end
        if view.outcome or (view.hits and not held):
            del self._armed[number]
            if view.kind in ("corrupt_weights", "corrupt_snapshot") and not view.outcome:
                self._damaged[number] = self.state.step
            return None
        ended = [name for name in self._ended(armed) if not held or name != armed.role]
        if not ended:
            return None
        armed.gone = now if armed.gone is None else armed.gone
        if now < armed.gone + _GRACE:
            return None
        del self._armed[number]
        if held:
            reason = f"{ended[0]} incarnation {armed.lives[ended[0]]} ended, which held the requests back"
            return ev.FaultEnded(fault=number, outcome="over", reason=reason)
        reason = f"{ended[0]} incarnation {armed.lives[ended[0]]} ended before it struck"
        return ev.FaultEnded(fault=number, outcome="vanished", reason=reason)

    def _ended(self, armed: _Armed) -> list[str]:
        """Those of its target and of who carries the order whose life is over."""
        roles = self.state.roles
        return [name for name, life in armed.lives.items() if roles[name].incarnation != life or roles[name].exited]

    def unreported(self) -> list[int]:
        """Faults whose target has ended while who was to strike it lives on: its proof is on its way, should that have been the fault."""
        views = self.book.faults
        return [
            number for number, armed in self._armed.items()
            if number in views and not views[number].hits and not views[number].outcome and self._ended(armed) == [armed.role]
        ]  # fmt: skip

    def _carrier(self, fault: Fault, role: str) -> str:
        """The role that waits with the order until it can be done."""
        if isinstance(fault, IdleRollout):
            return str(RoleKind.ROLLOUT_MANAGER)
        views = self.state.roles.values()
        agents = [view.role for view in views if view.kind is RoleKind.NODE_AGENT and view.node == self.state.roles[role].node]
        return agents[0] if fault.by == "agent" and agents else role

    def choose(self, fault: Fault, number: int) -> str | None:
        """Whom it is to hit now; None: nobody is there yet. Raises Refused."""
        state = self.state
        if isinstance(fault, OfNode) and NODE.fullmatch(fault.target):
            role = next((view.role for view in state.roles.values() if view.node == fault.target and _there(view)), None)
            if state.nodes[fault.target].lost:
                raise Refused(f"{fault.target} is lost already")
            return role
        candidates = [view for view in state.roles.values() if view.kind is fault.kind and _there(view)]
        candidates = [view for view in candidates if fault.node in ("", view.node) and fault.role in ("", view.role)]
        if isinstance(fault, OfNode):
            candidates = [view for view in candidates if view.node != next(iter(state.nodes))]
        if fault.name == "first_compile":
            candidates = [view for view in candidates if view.ready and view.progress == 0]
        elif not fault.role:
            candidates = [view for view in candidates if view.state in _LIVE]
        if not candidates:
            return None
        busy = self._under_fault()
        if not fault.role:
            candidates = [view for view in candidates if view.role not in busy] or candidates
            candidates = [view for view in candidates if view.phase == fault.phase] or candidates
        chosen = random.Random(f"{self.config.seed}/{number}").choice(sorted(candidates, key=lambda view: view.role))
        self._spare_the_last(fault, chosen, busy)
        return chosen.role

    def _spare_the_last(self, fault: Fault, chosen: RoleView, busy: set[str]) -> None:
        if not fault.disabling or fault.force:
            return
        hit = {chosen.role}
        if isinstance(fault, OfNode):
            hit = {view.role for view in self.state.roles.values() if view.node == chosen.node}
        live = {view.role for view in self.state.roles.values()
                if view.kind is RoleKind.ROLLOUT and view.state in _LIVE and _there(view)} - busy  # fmt: skip
        if live and live <= hit:
            raise Refused(f"{', '.join(sorted(live))} is the last live rollout; force=True would hit it all the same")

    def _under_fault(self) -> set[str]:
        """Roles that a disabling fault has hit or is about to, and that are not back."""
        out = {armed.role for armed in self._armed.values() if armed.fault.disabling}
        for view in self.book.faults.values():
            if not view.settled and CATALOGUE[view.kind].disabling:
                out |= {hit.role for hit in view.hits if hit.healthy is None and not view.outcome}
        return out

    # -- calling off ---

    def call_off(self, number: int) -> tuple[str, int] | None:
        """None: it had not struck, and will not. Otherwise the life that has to be set free. Raises RobustRLError if it is too late."""
        view = self.book.faults.get(number) if type(number) is int else None
        if view is None:
            raise ConfigError("fault", number, f"there are {', '.join(map(str, self.book.faults)) or 'none yet'}")
        if self._waiting.pop(number, None) is not None:
            return None
        if view.outcome and not view.inferred:
            raise RobustRLError(f"fault {number} ({view.kind}) has ended already: {view.outcome}")
        if not view.hits:
            if (armed := self._armed.get(number)) is None:
                raise RobustRLError(f"fault {number} ({view.kind}) is called off already")
            return armed.role, armed.lives[armed.role]
        hit = view.hits[0]
        role = self.state.roles[hit.role]
        if role.incarnation != hit.incarnation or role.exited:
            raise RobustRLError(f"fault {number} ({view.kind}) has done its work: {hit.role} incarnation {hit.incarnation} has ended")
        return hit.role, hit.incarnation

    def stop_series(self, name: str) -> list[int]:
        """No more faults of this schedule; the numbers of those that wait. Raises ConfigError for an unknown name."""
        if not isinstance(name, str) or name not in self._series:
            raise ConfigError("schedule", name, f"there are {', '.join(self._series) or 'none'}")
        self._series[name].stopped = True
        return [number for number in self._waiting if self.book[number].schedule == name]

    def closing(self, status: str) -> list[ev.FaultEnded]:
        """Ends of all that have none, for a run that ends. In one that is done, a fault whose moment came did not fire."""
        events = []
        for number, waiting in self._waiting.items():
            fired = status == "done" and waiting.due is not None and waiting.due <= self.state.t
            events.append(ev.FaultEnded(fault=number, outcome="not_fired" if fired else "aborted", reason="the run ended first"))
        for number, armed in self._armed.items():
            view = self.book.faults.get(number)
            if view is not None and not view.hits and not view.outcome:
                outcome = "not_fired" if status == "done" else "aborted"
                events.append(ev.FaultEnded(fault=number, outcome=outcome, reason=f"the run ended before {armed.role} was hit"))
        return events


def _there(view: RoleView) -> bool:
    return not view.exited and view.state not in (RoleState.FAILED, RoleState.STOPPED)


def _has_tool(task: str) -> bool:
    from ..rl.tasks import Task, task_class

    return task_class(task).tool is not Task.tool


WORK_PHASES = {RoleKind.TRAINER: {Phase.TRAIN, Phase.ADVANTAGE, Phase.OPTIMIZER, Phase.SNAPSHOT, Phase.PUBLISH}}
"""Phases in which a kind's work loop passes by its hooks; a rollout's does in all."""


def in_loop(fault: Fault) -> bool:
    """Whether the fault is one of the role's event loop: that of a role without a work loop, or of a trainer at rest."""
    if fault.name in ("corrupt_weights", "corrupt_snapshot"):
        return True
    if fault.benign or fault.kind is RoleKind.ROLLOUT:
        return False
    return fault.kind is not RoleKind.TRAINER or fault.phase == Phase.WAITING_BATCH
