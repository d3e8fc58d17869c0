"""What a log says of each fault: planned -> injected -> detected -> recovered -> confirmed, or ended before.

Promises: pure; equal logs give equal books; a fault counts as injected by its proof alone, as detected only by a verdict about a life that
it hit (``failed``, or for a fault that its target survives, ``reported``), as recovered once each of its targets is healthy after it was
seen not to be, as confirmed once each has made new progress since; a target that fails again before that is to recover once more.
That a process has ended is the detection of a fault that ends it, and of no other: where a hang's target is killed before anybody has
noticed the hang, nothing more comes of that one, and its outcome is ``vanished``.
Times are the host's. Leaves out: whether a fault took the effect that its kind implies (core/audit_faults.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from . import events as ev
from .fault_times import FaultTimes
from .roles import RoleKind, RoleState

STAGES = ("planned", "injected", "detected", "recovered", "confirmed")
NEVER_FIRED = ("refused", "vanished", "not_fired")
ENDS = ("exited", "exception", "node_lost")
"""Rules that tell of an end, not since when something was wrong."""
FATAL = ("kill", "node_loss", "exception", "memory_exhaustion", "clean_exit")
"""Kinds of faults after which the process is no more."""
ENDING = (*FATAL, "partition")
"""Those that are noticed by that: of who is cut off for long nothing is left either."""
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
    gone: float | None = None
    """When that life ended by something else, before the fault was detected."""


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
    """Of its FaultEnded: over, aborted, refused, vanished, not_fired; empty: none yet. Without one: vanished, if all that it hit ended
    before it was detected."""
    reason: str = ""
    ended: float | None = None
    revealed: bool = False
    guess: str = ""
    inferred: bool = False
    """The outcome is no FaultEnded's."""

    @property
    def disabling(self) -> bool:
        """Its target is out of service until it is replaced or the fault is over."""
        return not self.benign and self.kind not in SURVIVED

    @property
    def injected(self) -> float | None:
        return self.hits[0].t if self.hits else None

    @property
    def recovered(self) -> float | None:
        times = [hit.healthy for hit in self.hits if hit.gone is None]
        return None if not times or None in times else max(times)  # type: ignore[type-var]

    @property
    def confirmed(self) -> float | None:
        times = [hit.progressed for hit in self.hits if hit.gone is None]
        return None if not times or None in times else max(times)  # type: ignore[type-var]

    @property
    def stage(self) -> str:
        """The furthest one of STAGES that it came to."""
        reached = (True, self.injected, self.detected, self.recovered, self.confirmed)
        return [stage for stage, at in zip(STAGES, reached, strict=True) if at not in (None, False)][-1]

    @property
    def settled(self) -> bool:
        """Nothing more is to come of it."""
        left = [hit for hit in self.hits if hit.gone is None and hit.unhealthy is not None and hit.progressed is None]
        return self.confirmed is not None or (self.outcome != "" and not left)

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
    _given_up: dict[tuple[str, int], tuple[float, str]] = field(default_factory=dict)
    """Life -> when it was called failed while it was there, or its end was decided, in words: no verdict is said of what comes then."""
    _times: FaultTimes = field(default_factory=FaultTimes)
    _over: bool = False
    """The run ends, and with it every process."""

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
            case ev.EndDecided() | ev.RunEnded() | ev.RunResumed():
                self._over = not isinstance(event, ev.RunResumed)
            case ev.Verdict():
                self._verdicts.setdefault((event.role, event.incarnation), []).append((entry.t, event))
                if event.kind == "failed" and event.rule not in ENDS:
                    self._given_up.setdefault((event.role, event.incarnation), (entry.t, "was called failed before it struck"))
                self._judged(entry.t, event)
            case ev.RestartDecided(role=role, incarnation=incarnation):
                self._given_up.setdefault((role, incarnation), (entry.t, "was to be replaced before it struck"))
            case ev.RoleStateChanged():
                self._change(entry.t, event)
            case ev.ProcessExited(role=role, incarnation=incarnation):
                self._fell(entry.t, role, incarnation)
            case ev.FaultInjected():
                self._inject(entry, event)
            case ev.FaultEnded():
                if (view := self.faults.get(event.fault)) and (not view.outcome or view.inferred):
                    view.outcome, view.reason, view.ended, view.inferred = event.outcome, event.reason, entry.t, False
            case ev.FaultRevealed():
                if view := self.faults.get(event.fault):
                    view.revealed, view.guess = True, event.guess
            case ev.NodeLost(node=node):
                for view, hit in self._hits():
                    if hit.node == node and entry.t >= hit.t:
                        self._lost(view, hit, entry.t)
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
        return [(view, hit) for view, hit in hits if not view.outcome or view.inferred] or hits

    def _inject(self, entry: ev.Entry, event: ev.FaultInjected) -> None:
        view = self.faults.get(event.fault)
        if view is None:
            return
        t = max(view.planned, self._times.done(entry, event))
        hit = Hit(event.role, event.incarnation, event.node, event.pid, event.phase, event.step, t, event.proof)
        self._take_back(view, event.role, event.incarnation, t)
        view.hits.append(hit)
        life = (event.role, event.incarnation)
        given_up, why = self._given_up.get(life, (math.inf, ""))
        if given_up < t <= self._down.get(life, math.inf):
            self._vanish(view, hit, t, why)
            return
        for at, verdict in self._verdicts.get(life, []):
            if at >= t:
                self._judge(view, hit, at, verdict)
        if self._down.get(life, -1.0) >= t:
            self._fell(self._down[life], *life)

    def _take_back(self, found: FaultView, role: str, incarnation: int, t: float) -> None:
        """A fault hit this life at ``t``, and what it led to was said before: that is no longer a matter of faults that were over, nor, if
        it disables its target, of those that do not."""
        for view, hit in self._hits():
            if (view.outcome or (found.disabling and not view.disabling)) and (hit.role, hit.incarnation) == (role, incarnation):
                view.suspected, view.detected = (seen if seen and seen.t < t else None for seen in (view.suspected, view.detected))
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
        if verdict.kind in ("suspect", "failed") and not view.disabling and self._disabled(hit, t):
            return
        if verdict.kind == "failed" and verdict.rule in ENDS and view.kind not in ENDING:
            self._lost(view, hit, t)
            return
        if verdict.kind == "suspect":
            view.suspected = view.suspected or seen
        elif verdict.kind == "failed":
            if view.detected is None or view.detected.kind != "failed":
                view.detected = seen
        elif verdict.kind == "reported" and view.kind in SURVIVED and verdict.rule != "peer_gone":  # others lose that with a dead peer
            view.detected = view.detected or seen
        if view.detected is seen:
            self._regain(view, hit)
        if verdict.kind in ("suspect", "failed"):
            hit.unhealthy = hit.unhealthy or t

    def _disabled(self, hit: Hit, t: float) -> bool:
        """Whether another fault, which disables that life, lasted at ``t``."""
        return any(
            (other.role, other.incarnation) == (hit.role, hit.incarnation) and other.t <= t and (view.ended is None or t <= view.ended)
            for view, other in self._hits() if view.disabling
        )  # fmt: skip

    def _lost(self, view: FaultView, hit: Hit, t: float) -> None:
        """The life that it hit has ended, whatever from."""
        if view.kind in ENDING or view.detected is not None:
            hit.unhealthy = hit.unhealthy or t
            return
        if not self._over:
            self._vanish(view, hit, t, f"ended before it was {'over' if view.benign else 'detected'}")

    def _vanish(self, view: FaultView, hit: Hit, t: float, why: str) -> None:
        hit.gone = hit.gone or t
        if not view.outcome and all(each.gone is not None for each in view.hits):
            view.outcome, view.ended, view.inferred = "vanished", t, True
            view.reason = f"{hit.role} incarnation {hit.incarnation} {why}"

    def _regain(self, view: FaultView, hit: Hit) -> None:
        """It is detected after all: the word of that came after the word of the end, or what it did outlived its target."""
        hit.gone = None
        if view.inferred:
            view.outcome, view.reason, view.ended, view.inferred = "", "", None, False

    def _fell(self, t: float, role: str, incarnation: int) -> None:
        self._down.setdefault((role, incarnation), t)
        self._lost_again(role, incarnation)
        for view, hit in self._hits_of(role, incarnation, t):
            self._lost(view, hit, t)
            if role == RoleKind.SUPERVISOR and view.detected is None and view.kind in ENDING:
                # the judge cannot judge its own death: the host's word
                view.detected = Seen(t, role, incarnation, "failed", "exit seen by the host", t - hit.t)

    def _change(self, t: float, event: ev.RoleStateChanged) -> None:
        if event.new in (RoleState.FAILED, RoleState.SUSPECT):
            if event.new == RoleState.FAILED:
                self._lost_again(event.role, event.incarnation)
            for view, hit in self._hits_of(event.role, event.incarnation, t):
                if hit.gone is None and (view.disabling or not self._disabled(hit, t)):
                    hit.unhealthy = hit.unhealthy or t
        elif event.new == RoleState.HEALTHY:
            for view, hit in self._hits():
                if hit.role != event.role or event.incarnation < hit.incarnation or t < hit.t or hit.healthy is not None:
                    continue
                if event.incarnation > hit.incarnation and not view.outcome:
                    self._lost(view, hit, t)
                if hit.unhealthy is not None and hit.gone is None:
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
                self._regain(view, hit)
                view.detected = Seen(t, event.target, 0, "reported", "checksum of a chunk", t - hit.t)
                hit.unhealthy = t

    def _disk(self, t: float, event: ev.WarningRaised | ev.SnapshotCopied) -> None:
        """A full disk is seen by who writes to it, and over when something is written again."""
        for view, hit in self._hits("full_disk"):
            if isinstance(event, ev.SnapshotCopied):
                if event.holder == "disk" and hit.unhealthy is not None and hit.healthy is None:
                    hit.healthy = hit.progressed = t
            elif hit.unhealthy is None and hit.gone is None and "no checkpoint" in event.text and t >= hit.t:
                view.detected = Seen(t, hit.role, hit.incarnation, "reported", "a checkpoint that failed", t - hit.t)
                hit.unhealthy = t

    def _snapshot(self, t: float, event: ev.SnapshotRefused | ev.SnapshotRestored | ev.OptimizerStepCommitted) -> None:
        for view, hit in self._hits("corrupt_snapshot"):
            if isinstance(event, ev.SnapshotRefused):
                if hit.unhealthy is None and t >= hit.t:
                    self._regain(view, hit)
                    view.detected = Seen(t, event.role, event.incarnation, "reported", "check of a snapshot", t - hit.t)
                    hit.unhealthy = t
            elif isinstance(event, ev.SnapshotRestored):
                if hit.unhealthy is not None:
                    hit.healthy = hit.healthy or t
            elif hit.healthy is not None:
                hit.progressed = hit.progressed or t
