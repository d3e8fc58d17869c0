"""A detector driven through a recording: entries, ticks at its own deadlines, heartbeats that it asks for. The detector is the live one.

Besides what the log holds, a replay does what the live supervisor and node agents would have done with these settings: a tick when a
deadline passes, a sample when an age passes a limit, a heartbeat to a suspect and its answer. A role that is condemned though it was well
is watched anew after the restart that this would have cost. Where the live job stepped in before this detector spoke, a copy of it goes on
alone, with the role's ages growing, until it speaks or the fault would have been over. Deterministic.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple, Protocol

from ..core import events as ev
from ..core.detection import Detector
from ..core.signals import SUPERVISOR
from .recording import AGES, Intervention, Life, Recording, aged, at_work

ECHO = 0.5
"""Seconds after which a tick that changed nothing is sent again, as live."""
_GREW = 0.3
"""Seconds: an age above it in the last sample goes on growing."""
_PAST = 1e-4
"""Seconds after a limit at which the sample that shows it is taken: ages are kept to so many digits."""
_ROUNDED = 2 * _PAST
"""Seconds by which the difference of two ages may be off for it."""
_ANSWERS = 0.05
"""Seconds in which a loop that turns answers."""
_MOST = 300
"""Steps of a detector that goes on alone."""
_ALONE = 900.0
"""Seconds that a detector without marks goes on alone, looked at once a second."""
_TICK = ev.Tick()
Restarts = Callable[[str], float]
Excused = Callable[[str, int, float], bool]


class Judge(Protocol):
    """A detector: ours, a peer's, or one's own."""

    def feed(self, entry: ev.Entry) -> None:
        """Entries come in the order of time; those of one instant before its `advance`."""

    def advance(self, now: float) -> list[ev.Verdict]:
        """What is said at ``now`` for the first time."""

    def next_deadline(self) -> float | None:
        """When to call `advance` at the latest."""


class Said(NamedTuple):
    verdicts: list[ev.Verdict]
    beyond: list[tuple[Intervention, ev.Verdict]]
    """What a detector said where the live job had stepped in before."""


def drive(recording: Recording, judge: Judge, restarts: Restarts, at_fault: Excused, pause: Callable[[], None] = lambda: None) -> Said:
    """``restarts(role)``: seconds that a needless restart takes; ``at_fault(role, incarnation, t)``: calling it failed is right then.

    ``pause``: called at each instant; what it raises ends the drive.
    """
    return _Drive(recording, judge, restarts, at_fault, pause).run()


class _Drive:
    def __init__(self, recording: Recording, judge: Judge, restarts: Restarts, at_fault: Excused, pause: Callable[[], None]) -> None:
        self.recording, self.judge, self.restarts, self.at_fault, self.pause = recording, judge, restarts, at_fault, pause
        self.ours = judge if isinstance(judge, Detector) else None
        self.said: list[ev.Verdict] = []
        self.beyond: list[tuple[Intervention, ev.Verdict]] = []
        self.failed: set[Life] = set()
        self.suspects: set[str] = set()
        self.asked: set[tuple[str, int, int, int]] = set()
        self.heap: list[tuple[float, int, ev.Entry]] = []
        self.number = count()
        self.now = -math.inf
        self.tick: float = math.inf

    def run(self) -> Said:
        entries, end = self.recording.entries, self.recording.end
        between, interventions = self.recording.between if self.ours else [], self.recording.interventions
        judge, heap, size = self.judge, self.heap, len(entries)
        i = b = s = 0
        while True:
            self.pause()
            t = min(entries[i].t if i < size else math.inf, self.tick)
            if heap and heap[0][0] < t:
                t = heap[0][0]
            while b < len(between) and between[b][0] < t:
                self._pass_marks(*between[b])
                b += 1
                if heap and heap[0][0] < t:
                    t = heap[0][0]
            if t > end:
                return Said(self.said, self.beyond)
            while s < len(interventions) and interventions[s].t <= t:
                self._alone(interventions[s])
                s += 1
            if self.tick <= t:
                judge.feed(self._tick(t))
            while i < size and entries[i].t == t:
                judge.feed(entries[i])
                i += 1
            while heap and heap[0][0] <= t:
                judge.feed(heapq.heappop(heap)[2])
            self._advance(t)

    def _advance(self, t: float) -> None:
        self.now = t
        verdicts = self.judge.advance(t)
        if verdicts:
            self._note(verdicts)
        if self.suspects and self.ours and self.recording.speaks(t) == t:
            for role, incarnation, number in self.ours.heartbeats_due():
                supervisor = self.recording.supervisor(t)
                if (role, incarnation, number, supervisor) in self.asked:
                    continue
                self.asked.add((role, incarnation, number, supervisor))
                sent = ev.HeartbeatSent(role=role, incarnation=incarnation, number=number)
                self._push(t, ev.Entry(0, t, SUPERVISOR, supervisor, 0, t, sent))
                if (answered := self.recording.answer((role, incarnation), t)) is not None:
                    answer = ev.HeartbeatAnswered(role=role, incarnation=incarnation, number=number)
                    self._push(answered, ev.Entry(0, answered, role, incarnation, 0, answered, answer))
        deadline = self.judge.next_deadline()
        if deadline is None:
            self.tick = math.inf
        else:
            self.tick = self.recording.speaks(deadline if deadline > t else t + ECHO)

    def _note(self, verdicts: list[ev.Verdict]) -> None:
        self.said += verdicts
        for verdict in verdicts:
            role, life = verdict.role, (verdict.role, verdict.incarnation)
            if verdict.kind == "suspect":
                self.suspects.add(role)
            elif verdict.kind == "failed":
                self.suspects.discard(role)
                self.failed.add(life)
                self.asked = {asked for asked in self.asked if asked[0] != role}
                again = verdict.seen + self.restarts(role)
                lives = life in self.recording.started and again < self.recording.over.get(life, math.inf)
                if lives and not self.at_fault(role, life[1], verdict.seen):
                    for event in (self.recording.started[life], ev.RoleReady(role=role, incarnation=life[1], seconds=0.0)):
                        self._push(again, ev.Entry(0, again, ev.HOST, 1, 0, again, event))
                    if first := self.recording.first_sample(life, again):
                        self._push(first.t, first)

    def _push(self, t: float, entry: ev.Entry) -> None:
        heapq.heappush(self.heap, (t, next(self.number), entry))

    def _tick(self, t: float) -> ev.Entry:
        return ev.Entry(0, t, SUPERVISOR, self.recording.supervisor(t), 0, t, _TICK)

    def _pass_marks(self, earlier: float, entry: ev.Entry, shorter: float) -> None:
        """Samples between this one and the one before it, where a limit of the detector's was passed.

        One whose way was ``shorter`` than that of the one before shows ages that seem to have passed a limit before that one came, and that
        one, which knew better, did not: then it was right after it.
        """
        sample = entry.event
        assert self.ours is not None and isinstance(sample, ev.RoleSample)
        ages = AGES if at_work(sample) else AGES[3:]
        for mark in self.ours.marks_of(sample.role):
            for name in ages:
                back, span = getattr(sample, name) - mark - _PAST, entry.t - max(earlier, self.now)
                if 0 < back < span + shorter + _ROUNDED:
                    found = aged(entry, -min(back, span - _PAST))
                    self._push(found.t, found)

    # -- where the live job stepped in ---

    def _alone(self, intervention: Intervention) -> None:
        life, sample = intervention.life, intervention.sample
        if life in self.failed or math.isinf(self.now) or (sample is None and self.ours):
            return
        judge: Any = copy.deepcopy(self.judge)
        growing = [name for name in AGES if sample is not None and getattr(sample.event, name) > _GREW]
        answers = "loop_age" not in growing
        t, end = self.now, intervention.mark.start + intervention.mark.lasts
        if self.ours is None:
            end = min(end, t + _ALONE)
        queued: list[ev.Entry] = []
        for _ in range(_MOST if self.ours else int(_ALONE)):
            self.pause()
            times = [entry.t for entry in queued]
            if self.ours and sample is not None:
                times += [sample.t + mark + _PAST - getattr(sample.event, name) for name in growing for mark in judge.marks_of(life[0])]
            else:
                times.append(t + 1.0)
            if (deadline := judge.next_deadline()) is not None:
                times.append(deadline if deadline > t else t + ECHO)
            t = min((time for time in times if time > t), default=math.inf)
            if t > end or math.isinf(t):
                return
            shown = [] if sample is None else [aged(sample, t - sample.t, growing)]
            for entry in [*(e for e in queued if e.t <= t), *shown, self._tick(t)]:
                judge.feed(_at(entry, t))
            queued = [e for e in queued if e.t > t]
            verdicts = judge.advance(t)
            if self.ours:
                for role, incarnation, number in judge.heartbeats_due():
                    sent = ev.HeartbeatSent(role=role, incarnation=incarnation, number=number)
                    judge.feed(ev.Entry(0, t, SUPERVISOR, self.recording.supervisor(t), 0, t, sent))
                    if role != life[0] or answers:
                        answer = ev.HeartbeatAnswered(role=role, incarnation=incarnation, number=number)
                        queued.append(ev.Entry(0, t + _ANSWERS, role, incarnation, 0, t + _ANSWERS, answer))
                verdicts += judge.advance(t)
            for verdict in verdicts:
                if verdict.kind == "failed" and (verdict.role, verdict.incarnation) == life:
                    self.beyond.append((intervention, verdict))
                    return


def _at(entry: ev.Entry, t: float) -> ev.Entry:
    return entry if entry.t >= t else ev.Entry(entry.seq, t, entry.source, entry.incarnation, entry.n, entry.at, entry.event)
