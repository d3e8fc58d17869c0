"""What a run's log says so far: fed entry by entry, asked by the client, the terminal table, the views and the supervisor.

Promises: pure, a few microseconds an entry, and equal logs give equal states. Raises on what must never be in a log (an illegal state
transition, a trajectory that ends twice). Leaves out: whether the whole log is right (core/audit.py).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from robustrl.core import events as ev
from robustrl.core.fault_book import FaultBook
from robustrl.core.ledger import Ledger
from robustrl.core.roles import RoleId, RoleKind, RoleState, check_transition, first_state

RATE_WINDOW = 10.0
"""Seconds over which a rollout's tokens per second are measured."""


@dataclass(slots=True)
class NodeView:
    node: str
    ip: str
    kinds: list[str]
    since: float
    lost: str | None = None
    """Why it is gone; None: it is there."""


@dataclass(slots=True)
class RoleView:
    """One role in its present life. Times are the host's monotonic seconds (``Entry.t``)."""

    role: str
    kind: RoleKind
    state: RoleState
    incarnation: int
    pid: int
    node: str
    started: float
    state_since: float
    phase: str = ""
    """Empty until the first sample."""
    phase_since: float = 0.0
    reason: str = ""
    """Of the last change of state."""
    version: int = -1
    progress: int = 0
    progress_since: float = 0.0
    """When the progress counter was last seen to change."""
    pending: int = 0
    step: int = 0
    loop_age: float = 0.0
    cpu: float = 0.0
    sampled: float = 0.0
    ready: bool = False
    """Its set-up is finished, it can be called."""
    exited: str = ""
    """Cause of the process's end, once it is known."""


@dataclass(slots=True)
class PullView:
    target: str
    source: str
    version: int
    bytes: int
    done: int
    transport: str
    since: float


@dataclass(slots=True)
class VersionView:
    version: int
    digest: str
    bytes: int
    chunks: int
    holder: str
    incarnation: int
    address: str
    t: float
    """When it was announced."""


@dataclass
class RunState:
    run: str = ""
    name: str = ""
    schema: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    wall: float = 0.0
    """Unix time of the start."""
    host_pid: int = 0
    steps: int = 0
    """Optimizer steps that the configuration asks for."""
    status: str = "starting"
    """starting (until the first trajectory is started), running, paused, done, stopped, failed."""
    reason: str = ""
    """Of the end, from the supervisor's verdict on."""
    ending: str = ""
    """Status that the supervisor decided on, while the host still tidies up."""
    nodes: dict[str, NodeView] = field(default_factory=dict)
    roles: dict[str, RoleView] = field(default_factory=dict)
    announced: dict[int, VersionView] = field(default_factory=dict)
    committed: dict[str, int] = field(default_factory=dict)
    """Rollout -> version its engine runs on."""
    pulled: Counter[str] = field(default_factory=Counter)
    """Rollout -> versions committed so far."""
    pulls: dict[str, PullView] = field(default_factory=dict)
    """Target -> its pull under way."""
    refused: list[ev.VersionRefused] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    finished: int = 0
    """Trajectories that are, or were, complete and rewarded."""
    finished_ids: set[int] = field(default_factory=set)
    step: int = 0
    """Last committed optimizer step."""
    stands: int = 0
    """The last one that was not rolled back since."""
    step_times: dict[int, float] = field(default_factory=dict)
    """Optimizer step -> when it was committed; 0 is the state before the first."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """A row per step: ``step``, ``t``, the metrics, and ``seconds_PHASE`` for each trainer phase."""
    evaluations: list[ev.EvaluationDone] = field(default_factory=list)
    warnings: list[tuple[float, str]] = field(default_factory=list)
    ucx_bytes: Counter[str] = field(default_factory=Counter)
    """Transport -> bytes received over UCX for the versions that were committed, discarded chunks included."""
    discarded_bytes: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    """Rollout -> tokens generated, over all its lives."""
    thresholds: dict[str, Any] = field(default_factory=dict)
    """In force, plain; see core/thresholds.py."""
    recovery_mode: str = ""
    recovery_standbys: str = ""
    """In force; see core/recovery.py."""
    full_restarts: int = 0
    verdicts: list[ev.Verdict] = field(default_factory=list)
    faults: FaultBook = field(default_factory=FaultBook)
    seq: int = 0
    t0: float = 0.0
    t: float = 0.0
    """Host times of the first and the last entry."""
    ended: float | None = None
    _unmarked: dict[int, list[int]] = field(default_factory=dict)
    """Step -> trajectories of its committed state that are not marked consumed; the two events may come in either order."""
    _rates: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)
    _generating: tuple[float, float] | None = None

    @classmethod
    def of(cls, entries: Iterable[ev.Entry]) -> RunState:
        state = cls()
        for entry in entries:
            state.apply(entry)
        return state

    @property
    def paused(self) -> bool:
        return self.status == "paused"

    @property
    def newest(self) -> int:
        """Newest announced version, -1 for none."""
        return max(self.announced, default=-1)

    @property
    def over(self) -> bool:
        return self.status in ("done", "stopped", "failed")

    @property
    def seconds_to_first_step(self) -> float | None:
        return self.step_times[1] - self.t0 if 1 in self.step_times else None

    def unreconciled(self) -> list[tuple[int, list[int]]]:
        """(step, ids) of committed optimizer steps whose trajectories the log does not call consumed yet."""
        return [(step, ids) for step, ids in sorted(self._unmarked.items()) if ids]

    def tokens_per_second(self) -> dict[str, float]:
        """Rollout -> its rate over the last RATE_WINDOW seconds of samples; 0.0 for one that is dead, or not sampled any more."""
        rates = {}
        for role, window in self._rates.items():
            (first, before), (last, after) = window[0], window[-1]
            view = self.roles[role]
            dead = view.exited or view.state in (RoleState.FAILED, RoleState.STOPPED)
            alive = not dead and self.t - view.sampled <= RATE_WINDOW
            rates[role] = (after - before) / (last - first) if alive and last > first else 0.0
        return rates

    def mean_tokens_per_second(self) -> float:
        """All rollouts together, from the first generated token that a sample saw to the last."""
        first, last = self._generating or (0.0, 0.0)
        return sum(self.tokens.values()) / (last - first) if last > first else 0.0

    def closing(self, reason: str) -> list[ev.Event]:
        """What the host must record between the end of the last role and the closing record, so that no account stays open.

        Trajectories of a committed step that nobody marked any more are consumed, all others in flight are dropped; roles that did not
        fail are stopped.
        """
        events: list[ev.Event] = [ev.TrajectoriesConsumed(step=step, ids=ids) for step, ids in self.unreconciled()]
        consumed = {i for _, ids in self.unreconciled() for i in ids}
        if left := [i for i in self.ledger.open_ids() if i not in consumed]:
            events.append(ev.TrajectoriesDropped(ids=left, reason=reason))
        for role, view in self.roles.items():
            if (old := view.state) not in (RoleState.FAILED, RoleState.STOPPED):
                events.append(ev.RoleStateChanged(role=role, incarnation=view.incarnation, old=old, new=RoleState.STOPPED, reason=reason))
        return events

    def apply(self, entry: ev.Entry) -> None:
        """Takes the next entry in. Raises ValueError for one out of sequence, an unknown role, an illegal transition or ledger move."""
        if self.seq and entry.seq != self.seq + 1:
            raise ValueError(f"entry {entry.seq} came after entry {self.seq}")
        if not self.seq:
            self.t0 = entry.t
        self.seq, self.t = entry.seq, entry.t
        self.faults.apply(entry)
        event = entry.event
        match event:  # in order of frequency
            case ev.RoleSample():
                self._sample(entry, event)
            case ev.PullProgress():
                if (pull := self.pulls.get(event.target)) and pull.version == event.version:
                    pull.done = event.done
            case ev.TrajectoriesStarted():
                self.ledger.start(event.ids)
                if self.status == "starting":
                    self.status = "running"
            case ev.TrajectoriesFinished():
                self.finished += len(event.ids)
                self.finished_ids.update(event.ids)
            case ev.TrajectoriesConsumed():
                self.ledger.consume(event.ids)
                self._unmarked[event.step] = []
            case ev.TrajectoriesDropped():
                self.ledger.drop(event.ids, event.reason)
            case ev.PullStarted():
                self.pulls[event.target] = PullView(event.target, event.source, event.version, event.bytes, 0, event.transport, entry.t)
            case ev.PullCommitted():
                self.pulls.pop(event.target, None)
                self.committed[event.target] = event.version
                self.pulled[event.target] += 1
                self.ucx_bytes[event.transport] += event.bytes
            case ev.PullSourceSwitched():
                if pull := self.pulls.get(event.target):
                    pull.source = event.new_source
            case ev.PullDiscarded():
                self.discarded_bytes += event.bytes
            case ev.VersionRefused():
                self.pulls.pop(event.role, None)
                self.refused.append(event)
            case ev.VersionAnnounced():
                self.announced[event.version] = VersionView(
                    event.version, event.digest, event.bytes, event.chunks, event.holder, event.incarnation, event.address, entry.t
                )
            case ev.OptimizerStepCommitted():
                self.step = self.stands = event.step
                self.step_times[event.step] = entry.t
                self._unmarked.setdefault(event.step, event.consumed)
            case ev.RolledBack():
                self.stands = event.to
            case ev.StepMetrics():
                phases = {f"seconds_{phase}": seconds for phase, seconds in event.phase_seconds.items()}
                self.metrics.append({"step": event.step, "t": entry.t - self.t0, **event.values, **phases})
            case ev.RoleStateChanged():
                self._change(entry, event)
            case ev.RoleStarted():
                self._start(entry, event)
            case ev.RoleReady():
                started = self._role(event.role)
                started.ready |= started.incarnation == event.incarnation
            case ev.ProcessExited():
                if (view := self.roles.get(event.role)) and view.incarnation == event.incarnation:
                    view.exited = event.cause
            case ev.EvaluationDone():
                self.evaluations.append(event)
            case ev.NodeStarted():
                self.nodes[event.node] = NodeView(event.node, event.ip, event.kinds, entry.t)
            case ev.NodeLost():
                if event.node in self.nodes:
                    self.nodes[event.node].lost = event.reason
                self._gone((view for view in self.roles.values() if view.node == event.node), "its node was lost")
            case ev.WarningRaised():
                self.warnings.append((entry.t, event.text))
            case ev.LogRepaired():
                self.warnings.append((entry.t, f"the log's torn last line ({event.dropped_bytes} bytes) was cut off"))
            case ev.Paused():
                self.status = "paused"
            case ev.Resumed():
                self.status = "running"
            case ev.RunStarted():
                self.run, self.name, self.schema, self.wall, self.host_pid = event.run, event.name, event.schema, event.wall, event.host_pid
                self.config, self.machine, self.steps = event.config, event.machine, int(event.config.get("steps", 0))
            case ev.RunResumed():
                self.host_pid = event.host_pid
                self.full_restarts += self.over  # what was in flight then has been dropped
                self.status, self.reason, self.ending, self.ended = "starting" if not self.step_times else "running", "", "", None
                self.pulls.clear()
                self._gone(self.roles.values(), "the host before ended")
            case ev.RecoverySettings():
                self.recovery_mode, self.recovery_standbys = event.mode, event.standbys
            case ev.RestartDecided(mode="full", role="task_runner"):
                self.full_restarts += 1
            case ev.ThresholdsChanged():
                self.thresholds = event.thresholds
            case ev.Verdict():
                self.verdicts.append(event)
            case ev.EndDecided():
                self.ending, self.reason = event.status, event.reason
            case ev.RunEnded():
                self.status, self.reason, self.ended = event.status, event.reason, entry.t
                self.pulls.clear()

    def _gone(self, views: Iterable[RoleView], cause: str) -> None:
        for view in views:
            view.exited = view.exited or cause

    def _start(self, entry: ev.Entry, event: ev.RoleStarted) -> None:
        old = self.roles.get(event.role)
        if old and old.incarnation >= event.incarnation:
            raise ValueError(f"{event.role}: incarnation {event.incarnation} started after incarnation {old.incarnation}")
        self.roles[event.role] = RoleView(
            event.role,
            RoleId.parse(event.role).kind,
            first_state(event.incarnation),
            event.incarnation,
            event.pid,
            event.node,
            entry.t,
            entry.t,
            phase_since=entry.t,
            progress_since=entry.t,
        )
        self.committed.pop(event.role, None)
        self.pulls.pop(event.role, None)
        self._rates.pop(event.role, None)

    def _change(self, entry: ev.Entry, event: ev.RoleStateChanged) -> None:
        view = self._role(event.role)
        if event.incarnation < view.incarnation:
            return  # the end of a former life
        if event.incarnation != view.incarnation or event.old != view.state:
            raise ValueError(
                f"{event.role} incarnation {event.incarnation}: {event.old} -> {event.new}, "
                f"but it is incarnation {view.incarnation} in state {view.state}"
            )
        new = RoleState(event.new)
        check_transition(event.role, view.state, new)
        view.state, view.state_since, view.reason = new, entry.t, event.reason
        if new in (RoleState.FAILED, RoleState.STOPPED):
            self.pulls.pop(event.role, None)

    def _sample(self, entry: ev.Entry, event: ev.RoleSample) -> None:
        view = self._role(event.role)
        if event.incarnation != view.incarnation:
            return  # read before or after the life that this view shows
        if event.phase != view.phase:
            view.phase, view.phase_since = event.phase, entry.t
        if event.progress != view.progress:
            if view.kind is RoleKind.ROLLOUT:
                self.tokens[event.role] += event.progress - view.progress
                self._generating = (self._generating[0] if self._generating else view.sampled or view.started, entry.t)
            view.progress, view.progress_since = event.progress, entry.t
        view.version, view.pending, view.step = event.version, event.pending, event.step
        view.loop_age, view.cpu, view.sampled = event.loop_age, event.cpu, entry.t
        if view.kind is RoleKind.ROLLOUT:
            window = self._rates.setdefault(event.role, deque())
            window.append((entry.at, event.progress))
            while len(window) > 2 and entry.at - window[1][0] >= RATE_WINDOW:
                window.popleft()

    def _role(self, name: str) -> RoleView:
        if name not in self.roles:
            raise ValueError(f"{name}: no such role was started; there are {', '.join(self.roles) or 'none'}")
        return self.roles[name]
