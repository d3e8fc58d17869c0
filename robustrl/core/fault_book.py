"""What a log says of each fault: planned -> injected -> detected -> recovered -> confirmed, or ended before.

Promises: pure; equal logs give equal books; a fault counts as injected by its proof alone, as detected only by a verdict about a life that
it hit (``failed``, or for a fault that its target survives, ``reported``), as recovered once each of its targets is healthy after it was
seen not to be, as confirmed once each has made new progress since; a target that fails again before that is to recover once more.
Times are the host's. Leaves out: whether a fault took the effect that its kind implies (core/audit_faults.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from . import events as ev
from .fault_times import FaultTimes
from .roles import RoleKind, RoleState

STAGES = ("planned", "injected", "detected", "recovered", "confirmed")
NEVER_FIRED = ("refused", "vanished", "not_fired")
SURVIVED = ("slow", "delay", "corrupt_weights", "corrupt_snapshot", "full_disk")
"""Kinds of faults that leave their target at work: nobody is to call it failed, and what is reported of it is their detection."""
_SECRET = "hidden"
_ECHO = 10.0
"""Seconds after a fault's end in which it may still be detected, unless another fault hits the same life."""


@dataclass(slots=True)
class Hit:
    """One role, in the life in which the fault met it."""

    role: str
    incarnation: int
    node: str
    pid: int
    phase: str
    step: int
    t: float
    """When it was done."""
    proof: dict[str, Any]
    unhealthy: float | None = None
    """When it was first seen to be."""
    healthy: float | None = None
    life: int = 0
    """The incarnation that is healthy again."""
    progressed: float | None = None
    mark: tuple[int, ...] | None = None
    """What its first sample since then showed."""


@dataclass(slots=True)
class Seen:
    """The verdict that names the fault's target."""

    t: float
    role: str
    incarnation: int
    kind: str
    rule: str
    delay: float
    """Seconds from the injection to the verdict in the log."""


@dataclass(slots=True)
class FaultView:
    fault: int
    kind: str
    target: str
    when: str
    benign: bool
    options: dict[str, Any]
    schedule: str
    hidden: bool
    by: str
    planned: float
    hits: list[Hit] = field(default_factory=list)
    suspected: Seen | None = None
    detected: Seen | None = None
    outcome: str = ""
    """Of its FaultEnded: over, aborted, refused, vanished, not_fired; empty: none yet."""
    reason: str = ""
    ended: float | None = None
    revealed: bool = False
    guess: str = ""

    @property
    def injected(self) -> float | None:
        return self.hits[0].t if self.hits else None

    @property
    def recovered(self) -> float | None:
        times = [hit.healthy for hit in self.hits]
        return None if not times or None in times else max(times)  # type: ignore[type-var]

    @property
    def confirmed(self) -> float | None:
        times = [hit.progressed for hit in self.hits]
        return None if not times or None in times else max(times)  # type: ignore[type-var]

    @property
    def stage(self) -> str:
        """The furthest one of STAGES that it came to."""
        reached = (True, self.injected, self.detected, self.recovered, self.confirmed)
        return [stage for stage, at in zip(STAGES, reached, strict=True) if at not in (None, False)][-1]

    @property
    def settled(self) -> bool:
        """Nothing more is to come of it."""
        over = self.outcome != "" and (not self.hits or all(hit.unhealthy is None or hit.progressed is not None for hit in self.hits))
        return self.confirmed is not None or over

    def closed(self, t: float) -> bool:
        """As `settled`, and what follows the end of a fault has had its time."""
        return self.settled and (self.ended is None or t >= self.ended + _ECHO)

    @property
    def false_alarm(self) -> bool:
        """A benign disturbance that was called a failure."""
        return self.benign and self.detected is not None and self.detected.kind == "failed"

    @property
    def masked(self) -> bool:
        return self.hidden and not self.revealed

    def row(self) -> dict[str, Any]:
        """A row of ``job.faults``; of a hidden one only that it is there. Seconds from the injection on."""
        start = self.injected
        since = {name: None if at is None or start is None else round(at - start, 3)
                 for name, at in (("recovered_s", self.recovered), ("confirmed_s", self.confirmed))}  # fmt: skip
        if self.masked:
            return {"fault": self.fault, "kind": _SECRET, "target": _SECRET, "when": _SECRET, "stage": _SECRET, "benign": None}
        return {
            "fault": self.fault, "kind": self.kind, "target": self.target, "when": self.when, "stage": self.stage, "benign": self.benign,
            "hit": ", ".join(hit.role for hit in self.hits), "pid": self.hits[0].pid if self.hits else None,
            "phase": self.hits[0].phase if self.hits else "", "step": self.hits[0].step if self.hits else None,
            "rule": self.detected.rule if self.detected else "", "verdict": self.detected.kind if self.detected else "",
            "detected_s": round(self.detected.delay, 3) if self.detected else None, **since,
            "outcome": self.outcome, "reason": self.reason, "schedule": self.schedule,
        }  # fmt: skip


@dataclass
class FaultBook:
    """Feed it each entry of a run's log. By number: ``book[3]``."""

    faults: dict[int, FaultView] = field(default_factory=dict)
    _open: dict[int, FaultView] = field(default_factory=dict)
    """Those of which more may come."""
    _verdicts: dict[tuple[str, int], list[tuple[float, ev.Verdict]]] = field(default_factory=dict)
    _down: dict[tuple[str, int], float] = field(default_factory=dict)
    """Life -> when it was first said to have ended. It may be logged ahead of the fault that ended it."""
    _times: FaultTimes = field(default_factory=FaultTimes)

    def __getitem__(self, number: int) -> FaultView:
        return self.faults[number]

    def apply(self, entry: ev.Entry) -> None:
        event = entry.event
        self._times.feed(entry)
        if isinstance(event, ev.FaultPlanned):
            self.faults[event.fault] = self._open[event.fault] = FaultView(**msgspec.structs.asdict(event), planned=entry.t)
        for number in [number for number, view in self._open.items() if view.closed(entry.t)]:
            del self._open[number]
        match event:  # in order of frequency
            case ev.RoleSample():
                self._sample(entry, event)
            case ev.Verdict():
                self._verdicts.setdefault((event.role, event.incarnation), []).append((entry.t, event))
                self._judged(entry.t, event)
            case ev.RoleStateChanged():
                self._change(entry.t, event)
            case ev.ProcessExited(role=role, incarnation=incarnation):
                self._fell(entry.t, role, incarnation)
            case ev.FaultInjected():
                self._inject(entry, event)
            case ev.FaultEnded():
                if (view := self.faults.get(event.fault)) and not view.outcome:
                    view.outcome, view.reason, view.ended = event.outcome, event.reason, entry.t
            case ev.FaultRevealed():
                if view := self.faults.get(event.fault):
                    view.revealed, view.guess = True, event.guess
            case ev.NodeLost(node=node):
                for _, hit in self._hits():
                    if hit.node == node and entry.t >= hit.t:
                        hit.unhealthy = hit.unhealthy or entry.t
            case ev.PullDiscarded() | ev.PullSourceSwitched() | ev.PullCommitted():
                self._weights(entry.t, event)
            case ev.WarningRaised() | ev.SnapshotCopied():
                self._disk(entry.t, event)
            case ev.SnapshotRefused() | ev.SnapshotRestored() | ev.OptimizerStepCommitted():
                self._snapshot(entry.t, event)

    def _hits(self, *kinds: str) -> list[tuple[FaultView, Hit]]:
        return [(view, hit) for view in self._open.values() if not kinds or view.kind in kinds for hit in view.hits]

    def _hits_of(self, role: str, incarnation: int, t: float) -> list[tuple[FaultView, Hit]]:
        """Whom to ascribe to what is said of this life at ``t``: the faults that last, else those that are over."""
        hits = [(view, hit) for view, hit in self._hits() if (hit.role, hit.incarnation) == (role, incarnation) and t >= hit.t]
        return [(view, hit) for view, hit in hits if not view.outcome] or hits

    def _inject(self, entry: ev.Entry, event: ev.FaultInjected) -> None:
        view = self.faults.get(event.fault)
        if view is None:
            return
        t = max(view.planned, self._times.done(entry, event))
        hit = Hit(event.role, event.incarnation, event.node, event.pid, event.phase, event.step, t, event.proof)
        self._take_back(event.role, event.incarnation, t)
        view.hits.append(hit)
        life = (event.role, event.incarnation)
        for at, verdict in self._verdicts.get(life, []):
            if at >= t:
                self._judge(view, hit, at, verdict)
        if self._down.get(life, -1.0) >= t:
            self._fell(self._down[life], *life)

    def _take_back(self, role: str, incarnation: int, t: float) -> None:
        """A fault hit this life at ``t``, and what it led to was said before: that is no longer a matter of faults that were over."""
        for view, hit in self._hits():
            if view.outcome and (hit.role, hit.incarnation) == (role, incarnation):
                view.suspected = view.detected = None
                if hit.unhealthy is not None and hit.unhealthy >= t:
                    hit.unhealthy = None
                for at, verdict in self._verdicts.get((role, incarnation), []):
                    if hit.t <= at < t:
                        self._judge(view, hit, at, verdict)

    def _judged(self, t: float, verdict: ev.Verdict) -> None:
        for view, hit in self._hits_of(verdict.role, verdict.incarnation, t):
            self._judge(view, hit, t, verdict)

    def _judge(self, view: FaultView, hit: Hit, t: float, verdict: ev.Verdict) -> None:
        seen = Seen(t, verdict.role, verdict.incarnation, verdict.kind, verdict.rule, t - hit.t)
        if verdict.kind == "suspect":
            view.suspected = view.suspected or seen
        elif verdict.kind == "failed":
            if view.detected is None or view.detected.kind != "failed":
                view.detected = seen
        elif verdict.kind == "reported" and view.kind in SURVIVED and verdict.rule != "peer_gone":  # others lose that with a dead peer
            view.detected = view.detected or seen
        if verdict.kind in ("suspect", "failed"):
            hit.unhealthy = hit.unhealthy or t

    def _fell(self, t: float, role: str, incarnation: int) -> None:
        self._down.setdefault((role, incarnation), t)
        self._lost_again(role, incarnation)
        for view, hit in self._hits_of(role, incarnation, t):
            hit.unhealthy = hit.unhealthy or t
            if role == RoleKind.SUPERVISOR and view.detected is None:  # the judge cannot judge its own death: the host's word
                view.detected = Seen(t, role, incarnation, "failed", "exit seen by the host", t - hit.t)

    def _change(self, t: float, event: ev.RoleStateChanged) -> None:
        if event.new in (RoleState.FAILED, RoleState.SUSPECT):
            if event.new == RoleState.FAILED:
                self._lost_again(event.role, event.incarnation)
            for _, hit in self._hits_of(event.role, event.incarnation, t):
                hit.unhealthy = hit.unhealthy or t
        elif event.new == RoleState.HEALTHY:
            for view, hit in self._hits():
                if hit.role != event.role or event.incarnation < hit.incarnation or t < hit.t or hit.healthy is not None:
                    continue
                if hit.unhealthy is not None or (event.incarnation > hit.incarnation and not view.outcome):
                    hit.unhealthy = hit.unhealthy or t
                    hit.healthy, hit.life, hit.mark = t, event.incarnation, None

    def _lost_again(self, role: str, incarnation: int) -> None:
        """The life that was healthy again has failed without progress: that was no recovery."""
        for _, hit in self._hits():
            if (hit.role, hit.life) == (role, incarnation) and incarnation > hit.incarnation and hit.progressed is None:
                hit.healthy, hit.life, hit.mark = None, 0, None

    def _sample(self, entry: ev.Entry, sample: ev.RoleSample) -> None:
        for _, hit in self._hits():
            if hit.healthy is None or hit.progressed is not None:
                continue
            if (hit.role, hit.life) == (entry.source, entry.incarnation):  # a node agent's progress are its samples of others
                hit.progressed = entry.t
            elif (hit.role, hit.life) == (sample.role, sample.incarnation):
                mark = (sample.progress, sample.step, sample.version)
                if hit.mark is None:
                    hit.mark = mark
                elif mark != hit.mark:
                    hit.progressed = entry.t

    def _weights(self, t: float, event: ev.PullDiscarded | ev.PullSourceSwitched | ev.PullCommitted) -> None:
        """Damage at a source is seen by whoever pulls from there."""
        for view, hit in self._hits("corrupt_weights"):
            if isinstance(event, ev.PullCommitted):
                if hit.unhealthy is not None and hit.healthy is None:
                    hit.healthy = hit.progressed = t
            elif hit.unhealthy is None and "checksum" in event.reason and t >= hit.t:
                view.detected = Seen(t, event.target, 0, "reported", "checksum of a chunk", t - hit.t)
                hit.unhealthy = t

    def _disk(self, t: float, event: ev.WarningRaised | ev.SnapshotCopied) -> None:
        """A full disk is seen by who writes to it, and over when something is written again."""
        for view, hit in self._hits("full_disk"):
            if isinstance(event, ev.SnapshotCopied):
                if event.holder == "disk" and hit.unhealthy is not None and hit.healthy is None:
                    hit.healthy = hit.progressed = t
            elif hit.unhealthy is None and "no checkpoint" in event.text and t >= hit.t:
                view.detected = Seen(t, hit.role, hit.incarnation, "reported", "a checkpoint that failed", t - hit.t)
                hit.unhealthy = t

    def _snapshot(self, t: float, event: ev.SnapshotRefused | ev.SnapshotRestored | ev.OptimizerStepCommitted) -> None:
        for view, hit in self._hits("corrupt_snapshot"):
            if isinstance(event, ev.SnapshotRefused):
                if hit.unhealthy is None and t >= hit.t:
                    view.detected = Seen(t, event.role, event.incarnation, "reported", "check of a snapshot", t - hit.t)
                    hit.unhealthy = t
            elif isinstance(event, ev.SnapshotRestored):
                if hit.unhealthy is not None:
                    hit.healthy = hit.healthy or t
            elif hit.healthy is not None:
                hit.progressed = hit.progressed or t
