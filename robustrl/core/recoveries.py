"""Which recoveries a run's log shows, and how long each stage of each took. Pure: entries in, records out; times are the log's own.

A recovery begins with the failure of one life of a role and ends when all that was restarted for it is back:

    onset --detect--> first word of the failure --restart--> the new process is ready --reconnect--> back

*Onset* is the moment at which the fault was done, by the injector's proof, where the log has it, else the last sign of life. A fault that
was over while the role still gave signs of life is not what its failure came from; nor is one that leaves its process there what an end
came from, where another did that. *Back* is healthy: a rollout has then committed a checked version, a trainer has been restored and has
met its peers. A trainer that has something to train is back when it trains. What dies again before all are healthy belongs to the same
recovery, as another attempt; so do ranks that fail together, and all roles of a full restart. What fails after that is a failure of its
own, with a recovery of its own; a trainer's that it had then not trained is over, and never was one.
Leaves out: what an outage cost (accounting.py), and whether the recovery was the right one (audit).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from . import events as ev
from .fault_book import ENDING, ENDS
from .fault_times import FaultTimes
from .roles import Phase, RoleId, RoleKind

INJECTION, LAST_SIGN, DECISION = "injection", "last sign of life", "decision"
STAGES = "detect", "restart", "reconnect", "total"
RECOVERED, OPEN, UNFINISHED, FAILED_AGAIN = "recovered", "open", "unfinished", "failed again"
_TRAINS = (Phase.TRAIN, Phase.ADVANTAGE, Phase.OPTIMIZER)


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One recovery. Times are host seconds as ``Entry.t``, durations seconds; None: not (yet)."""

    number: int
    """From 1, in the order in which failures were noticed."""
    role: str
    """Whose failure began it."""
    incarnation: int
    """The life that failed."""
    roles: tuple[str, ...]
    """All that were restarted for it, ``role`` first."""
    node: str
    cause: str
    rule: str
    """Of the verdict; empty: there was none, e.g. for a restart that somebody asked for."""
    faults: tuple[int, ...]
    """Numbers of the injected faults that hit a life of it."""
    mode: str
    """isolated, full, or empty while nothing is decided."""
    standby: str
    step: int
    """Last committed optimizer step at the onset."""
    onset: float
    onset_by: str
    """What the onset is taken from: the injection, the last sign of life, or the decision of a restart that no failure led to."""
    detected: float
    decided: float | None
    ready: float | None
    back: float | None
    lives: tuple[tuple[str, int, int], ...]
    """Of each of ``roles``: the life that it began with, and how many new lives were started."""
    outcome: str
    """recovered, open, unfinished: the run ended before, or failed again: so did a trainer that was healthy again, before it trained."""
    until: float | None
    """When it was back, or nothing more was to come of it; None: open."""

    @property
    def attempts(self) -> int:
        """Restarts that it took."""
        return max(tries for _, _, tries in self.lives)

    @property
    def detect(self) -> float:
        return self.detected - self.onset

    @property
    def restart(self) -> float | None:
        return None if self.ready is None else self.ready - self.detected

    @property
    def reconnect(self) -> float | None:
        return None if self.back is None or self.ready is None else self.back - self.ready

    @property
    def total(self) -> float | None:
        return None if self.back is None else self.back - self.onset


@dataclass
class _Life:
    incarnation: int
    node: str
    seen: float
    """Host time of its last sign of life: a sample of it, or an event that it emitted."""
    ended_well: bool = False


@dataclass
class _Member:
    """One role that a recovery brings back."""

    kind: RoleKind
    first: int
    """The life that is replaced."""
    life: int = 0
    """The new one, 0 until it has started."""
    tries: int = 0
    ready: float | None = None
    healthy: float | None = None
    back: float | None = None

    def lost(self) -> None:
        self.life, self.ready, self.healthy, self.back = 0, None, None, None


@dataclass
class _Open:
    number: int
    role: str
    incarnation: int
    node: str
    step: int
    onset: float
    onset_by: str
    detected: float
    cause: str = ""
    fell: bool = False
    """Its first word was that of an end."""
    rule: str = ""
    mode: str = ""
    standby: str = ""
    decided: float | None = None
    faults: list[int] = field(default_factory=list)
    causes: list[tuple[float, int]] = field(default_factory=list)
    """(when, which) of those that hit a life which was to be replaced."""
    members: dict[str, _Member] = field(default_factory=dict)
    back: float | None = None
    ended: float | None = None
    """Without being back."""
    again: bool = False
    """So because a trainer that was healthy again failed before it trained."""

    @property
    def over(self) -> bool:
        return self.back is not None or self.ended is not None

    def record(self) -> Recovery:
        ready = [member.ready for member in self.members.values()]
        done = None if None in ready else max([self.detected, *(t for t in ready if t is not None)])
        back = None if self.back is None or done is None else max(self.back, done)
        return Recovery(
            number=self.number,
            role=self.role,
            incarnation=self.incarnation,
            roles=tuple(self.members),
            lives=tuple((role, member.first, member.tries) for role, member in self.members.items()),
            node=self.node,
            cause=self.cause,
            rule=self.rule,
            faults=tuple(self.faults),
            mode=self.mode,
            standby=self.standby,
            step=self.step,
            onset=self.onset,
            onset_by=self.onset_by,
            detected=self.detected,
            decided=self.decided,
            ready=done,
            back=back,
            outcome=RECOVERED if back is not None else FAILED_AGAIN if self.again else OPEN if self.ended is None else UNFINISHED,
            until=self.ended if back is None else back,
        )


class Recoveries:
    """Feed it the entries of a log, in order; ``all()`` gives the recoveries so far."""

    def __init__(self) -> None:
        self._all: list[_Open] = []
        self._of: dict[str, _Open] = {}
        """Role -> the recovery under way that brings it back."""
        self._full: _Open | None = None
        self._lives: dict[str, _Life] = {}
        self._injected: dict[tuple[str, int], list[tuple[float, int]]] = {}
        self._kinds: dict[int, str] = {}
        self._ended: dict[int, float] = {}
        """Fault -> when it was over."""
        self._times = FaultTimes()
        self._batch_of: dict[int, int] = {}
        """Trajectory that is not complete -> its batch."""
        self._rest: Counter[int] = Counter()
        """Batch -> how many those are."""
        self._step = 0
        self._paused = self._over = False

    def all(self) -> list[Recovery]:
        return [recovery.record() for recovery in self._all]

    def feed(self, entry: ev.Entry) -> None:
        t = entry.t
        self._times.feed(entry)
        if (speaker := self._lives.get(entry.source)) and speaker.incarnation == entry.incarnation:
            speaker.seen = t
        match entry.event:  # in order of frequency
            case ev.RoleSample() as event:
                self._sample(t, event)
            case ev.TrajectoriesStarted(batch=batch, ids=ids):
                self._batch_of.update(dict.fromkeys(ids, batch))
                self._rest[batch] += len(ids)
            case ev.TrajectoriesFinished(ids=ids) | ev.TrajectoriesDropped(ids=ids):
                self._rest.subtract(self._batch_of.pop(i) for i in ids if i in self._batch_of)
            case ev.OptimizerStepCommitted(step=step):
                self._step = step
            case ev.RolledBack(to=step):
                self._step = step
            case ev.RoleStarted() as event:
                self._start(t, event)
            case ev.RoleReady(role=role, incarnation=incarnation):
                if member := self._new_life(role, incarnation):
                    member.ready = member.ready or t
            case ev.SnapshotRestored(role=role, incarnation=incarnation, seconds=seconds):
                if member := self._new_life(role, incarnation):
                    member.ready = t - seconds  # from here on it takes up its state
            case ev.RoleStateChanged(role=role, incarnation=incarnation, new=new):
                self._change(t, role, incarnation, new, entry.event.reason)
            case ev.ErrorRaised(role=role, incarnation=incarnation, error=error, text=text):
                self._fail(t, role, incarnation, f"{error}: {text}", fell=True)
            case ev.ProcessExited(role=role, incarnation=incarnation) as event:
                self._fail(t, role, incarnation, event.in_words, fell=True)
            case ev.NodeLost(node=node, reason=reason):
                for role, life in list(self._lives.items()):
                    if life.node == node:
                        self._fail(t, role, life.incarnation, f"{node} was lost: {reason}", fell=True)
            case ev.Verdict(kind="failed") as event:
                self._fail(t, event.role, event.incarnation, f"rule {event.rule}", event)
            case ev.RestartDecided() as event:
                self._decide(t, event)
            case ev.FaultPlanned(fault=fault, kind=kind):
                self._kinds[fault] = kind
            case ev.FaultInjected(role=role, incarnation=incarnation, fault=fault) as event:
                self._inject(self._times.done(entry, event), role, incarnation, fault)
            case ev.FaultEnded(fault=fault):
                self._ended.setdefault(fault, t)
            case ev.Paused():
                self._paused = True
            case ev.Resumed():
                self._paused = False
            case ev.EndDecided() | ev.RunEnded() if not self._over:
                self._end(t)
            case ev.RunResumed():
                if not self._over:
                    self._end(t)
                self._over = self._paused = False
                self._lives.clear()

    # -- what failed ---

    def _fail(self, t: float, role: str, incarnation: int, cause: str, verdict: ev.Verdict | None = None, fell: bool = False) -> None:
        life = self._lives.get(role)
        if self._over or life is None or life.incarnation != incarnation or life.ended_well:
            return
        recovery = self._under_way(t, role, incarnation) or self._together(role)
        if recovery is None:
            since = verdict.onset if verdict and verdict.rule not in ENDS else life.seen
            recovery = self._open(t, role, life, cause, since=since, fell=fell)
        elif role not in recovery.members:
            self._join(recovery, role, incarnation)
        elif (member := recovery.members[role]).life == incarnation:
            member.lost()
            return
        if (role, incarnation) == (recovery.role, recovery.incarnation):
            recovery.cause = recovery.cause or cause
            if verdict and not recovery.rule and recovery.onset_by != DECISION:
                recovery.rule = verdict.rule
                if recovery.onset_by == LAST_SIGN and verdict.rule not in ENDS:
                    recovery.onset = min(verdict.onset, recovery.detected)
                self._date(recovery)

    def _under_way(self, t: float, role: str, incarnation: int) -> _Open | None:
        """The recovery that this life's failure at ``t`` is a part of. It is none of one whose roles are all healthy again."""
        recovery = self._of.get(role)
        if recovery is None or (member := recovery.members[role]).life != incarnation:
            return recovery
        if any(each.healthy is None for each in recovery.members.values()):
            return recovery
        if member.kind is RoleKind.TRAINER:  # it alone was waited for
            recovery.ended, recovery.again = t, True
            self._release(recovery)
        else:
            del self._of[role]
        own = {fault for _, fault in self._injected.get((role, incarnation), ())}
        recovery.faults = [fault for fault in recovery.faults if fault not in own]
        return None

    def _release(self, recovery: _Open) -> None:
        self._of = {role: other for role, other in self._of.items() if other is not recovery}

    def _open(
        self, t: float, role: str, life: _Life, cause: str, onset_by: str = LAST_SIGN, since: float = 0.0, fell: bool = False
    ) -> _Open:
        """``since``: a fault that was over before then did not lead to it."""
        onset = t if onset_by == DECISION else min(life.seen, t)
        recovery = _Open(len(self._all) + 1, role, life.incarnation, life.node, self._step, onset, onset_by, t, cause, fell)
        self._all.append(recovery)
        self._join(recovery, role, life.incarnation)
        for injected, fault in self._injected.get((role, life.incarnation), ()):
            if self._ended.get(fault, t) >= since:
                self._blame(recovery, injected, fault, first=True)
        return recovery

    def _join(self, recovery: _Open, role: str, incarnation: int) -> None:
        recovery.members[role] = _Member(RoleId.parse(role).kind, incarnation)
        self._of[role] = recovery

    def _together(self, role: str) -> _Open | None:
        """The recovery of another trainer rank that this one belongs to."""
        if RoleId.parse(role).kind is not RoleKind.TRAINER:
            return None
        return next((self._of[other] for other in self._of if RoleId.parse(other).kind is RoleKind.TRAINER), None)

    def _inject(self, t: float, role: str, incarnation: int, fault: int) -> None:
        """The word of it may come after that of its effect."""
        self._injected.setdefault((role, incarnation), []).append((t, fault))
        if (recovery := self._of.get(role)) and incarnation >= (first := recovery.members[role].first):
            decided = t if recovery.decided is None else recovery.decided
            led_to_it = t <= (decided if role == recovery.role else recovery.detected)
            self._blame(recovery, t, fault, first=incarnation == first and led_to_it)

    def _blame(self, recovery: _Open, t: float, fault: int, first: bool) -> None:
        """``first``: it hit a life that was to be replaced, before that was decided, not one of those that came for it."""
        if first:
            recovery.causes.append((t, fault))
            self._date(recovery)
        if fault not in recovery.faults:
            recovery.faults.append(fault)

    def _date(self, recovery: _Open) -> None:
        """The onset is that of the first fault that can have led to a failure of its sort, if any can, else of the first one."""
        if recovery.onset_by == DECISION or not recovery.causes:
            return
        fell = recovery.rule in ENDS if recovery.rule else recovery.fell
        kinds = self._kinds
        fitting = [t for t, fault in recovery.causes if fault not in kinds or (kinds[fault] in ENDING) == fell]
        recovery.onset = min(*(fitting or [t for t, _ in recovery.causes]), recovery.detected)
        recovery.onset_by = INJECTION

    # -- what was done about it ---

    def _decide(self, t: float, event: ev.RestartDecided) -> None:
        life = self._lives.get(event.role)
        if self._over or life is None or life.incarnation != event.incarnation:
            return
        recovery = self._under_way(t, event.role, event.incarnation)
        if recovery is None and event.mode == "full":
            if self._full is None or self._full.over:
                self._full = next((found for found in self._all if not found.over and found.mode in ("", "full")), None)
            recovery = self._full
            if recovery is not None:
                self._join(recovery, event.role, event.incarnation)
        if recovery is None:
            recovery = self._open(t, event.role, life, event.reason, DECISION)
        if recovery.members[event.role].life == event.incarnation:
            recovery.members[event.role].lost()
        if event.mode == "full" and recovery.mode != "full":
            self._full = recovery
        recovery.mode, recovery.decided = event.mode, t if recovery.decided is None else recovery.decided
        recovery.standby = event.standby if event.role == recovery.role else recovery.standby

    def _start(self, t: float, event: ev.RoleStarted) -> None:
        before = self._lives.get(event.role)
        self._lives[event.role] = _Life(event.incarnation, event.node, t)
        if before is None:
            return
        if event.role not in self._of and (together := self._together(event.role)):
            self._join(together, event.role, before.incarnation)
        if recovery := self._of.get(event.role):
            member = recovery.members[event.role]
            member.life, member.tries = event.incarnation, member.tries + 1

    def _new_life(self, role: str, incarnation: int) -> _Member | None:
        recovery = self._of.get(role)
        member = recovery.members[role] if recovery else None
        return member if member and member.life == incarnation else None

    # -- who is back ---

    def _change(self, t: float, role: str, incarnation: int, new: str, reason: str) -> None:
        life = self._lives.get(role)
        if new == "failed":
            self._fail(t, role, incarnation, reason)
        elif new in ("stopped", "retired") and life is not None and life.incarnation == incarnation:
            life.ended_well = True
        elif new == "healthy" and (member := self._new_life(role, incarnation)):
            member.healthy = t
            if member.kind is not RoleKind.TRAINER or not self._something_to_train():
                member.back = max(t, member.back or t)
            elif member.back is not None:
                member.back = max(t, member.back)
            self._look(role)

    def _something_to_train(self) -> bool:
        due = self._step + 1
        return not self._paused and due in self._rest and not self._rest[due]

    def _sample(self, t: float, event: ev.RoleSample) -> None:
        life = self._lives.get(event.role)
        if life is None or life.incarnation != event.incarnation:
            return
        life.seen = t
        if event.phase in _TRAINS and (member := self._new_life(event.role, event.incarnation)) and member.back is None:
            member.back = max(t - event.phase_age, member.ready or 0.0, member.healthy or 0.0)
            self._look(event.role)

    def _look(self, role: str) -> None:
        """Whether the recovery that brings this role back is complete."""
        recovery = self._of[role]
        if all(member.healthy is not None and member.back is not None for member in recovery.members.values()):
            recovery.back = max(member.back or 0.0 for member in recovery.members.values())
            self._release(recovery)

    def _end(self, t: float) -> None:
        self._over = True
        for recovery in {id(found): found for found in self._of.values()}.values():
            recovery.ended = t
            if all(member.healthy is not None for member in recovery.members.values()):
                recovery.back = max(member.back or member.healthy or 0.0 for member in recovery.members.values())
        self._of.clear()


def recoveries_of(entries: Iterable[ev.Entry]) -> list[Recovery]:
    """In the order in which the failures were noticed."""
    found = Recoveries()
    for entry in entries:
        found.feed(entry)
    return found.all()
