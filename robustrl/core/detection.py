"""The detector: the entries of a run's log in, verdicts out. Pure; a verdict is a function of the log up to the entry that shows it.

How to drive it: `feed` every entry in the order of the log; after all entries of one instant, `advance` to it; `judge` does both. Time is
the log's own time: a deadline that passes while nothing is logged needs a Tick of the supervisor, due at `next_deadline()`. It comes back
through the log after all that was said before it, so a supervisor or host that did not run for a while (and says so by a ClockGap) condemns
nobody for it. A live and a recorded log give the same verdicts, changes of thresholds included; entries of one instant may swap places.

Leaves out: what is done about a verdict (core/recovery.py), and sending heartbeats: `heartbeats_due` says whom to ask.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from . import events as ev
from .roles import Phase, RoleKind
from .rules import CLEARED, FAILED, REPORTED, RULES, SUSPECT, WAITING, Rule, Sign
from .signals import SUPERVISOR, Beat, History, Life, Paces, Standing
from .stall import waited_for
from .thresholds import CHECKPOINT, HISTORY, OVERDUE, SECTION, Relative, Thresholds

_COMPARED = frozenset(kind for rule in RULES if rule.name == "straggler" for kind in rule.kinds)
"""Kinds of role that are held against their peers."""
_RULES_OF = {kind: tuple(rule for rule in RULES if kind in rule.kinds) for kind in RoleKind}
_ENDING = ("stopped", "retired", "restarting")


class Detector:
    """``thresholds`` hold until a ThresholdsChanged is fed."""

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self._limits = dict(thresholds.items())
        self.now = 0.0
        self.stalled: tuple[str, Sign] | None = None
        self._lives: dict[str, Life] = {}
        self._kinds: dict[RoleKind, list[Life]] = {}
        self._paces: defaultdict[RoleKind, Paces] = defaultdict(Paces)
        self._histories: dict[str, dict[str, History]] = {}
        self._steps_history = History()
        self._touched: set[str] = set()
        self._deadlines: dict[str, float] = {}
        self._spoke: dict[tuple[str, int], float] = {}
        self._steps = self._committed = -1
        self._checkpoint_every = 0
        self._commit: float | None = None
        self._step_since: float | None = None
        """From when on a stall counts: the last commit, resumption or role that got ready."""
        self._paused = self._over = False
        self._stall_at: float | None = None
        self._stall_known = False
        self._unrecorded: list[ev.Verdict] = []
        self._of_host: list[ev.Verdict] = []
        """Verdicts on the judge itself (core/guard.py): a log holds them, so a replay gives them too."""

    # -- facts in ---

    def feed(self, entry: ev.Entry) -> None:
        """Takes the next entry in; says nothing yet."""
        if entry.t < self.now:
            raise ValueError(f"entry {entry.seq} is of time {entry.t}; the detector has decided up to {self.now}")
        event = entry.event
        if not isinstance(event, ev.RoleSample):
            self._stall_known = False
        match event:  # in order of frequency
            case ev.RoleSample():
                if (life := self._lives.get(event.role)) and life.incarnation == event.incarnation:
                    life.take_sample(entry, event)
                    self._touch(life)
                if (agent := self._lives.get(entry.source)) and agent.incarnation == entry.incarnation:
                    agent.heard, agent.told = entry.t, True
                    self._touched.add(agent.role)
            case ev.Tick():
                self._spoken(entry)
            case ev.HeartbeatSent():
                if life := self._life(event.role, event.incarnation):
                    if life.beat is not None and (life.beat.source, life.beat.source_incarnation) == (entry.source, entry.incarnation):
                        life.misses += entry.t > life.made_progress
                    life.beats = event.number
                    if event.number > life.last_answer:
                        life.beat = Beat(entry.t, event.number, entry.source, entry.incarnation)
            case ev.HeartbeatAnswered():
                if life := self._life(event.role, event.incarnation):
                    if life.beat is not None and life.beat.number <= event.number:
                        life.beat = None
                    life.misses, life.answered, life.last_answer = 0, entry.t, max(life.last_answer, event.number)
                    life.answers += entry.t > life.made_progress
            case ev.ProcessExited():
                if life := self._life(event.role, event.incarnation):
                    life.exit = min(life.exit or (entry.t, event), (entry.t, event), key=lambda found: (found[0], found[1].cause))
            case ev.NodeLost():
                for life in self._lives.values():
                    if life.node == event.node:
                        life.lost = min(life.lost or (entry.t, event), (entry.t, event), key=lambda found: (found[0], found[1].reason))
                        self._touch(life)
            case ev.ErrorRaised():
                if life := self._life(event.role, event.incarnation):
                    if event.error == "TrainingError":
                        life.bad_number = min(life.bad_number or (entry.t, event.text), (entry.t, event.text))
                    else:
                        life.error = min(life.error or (entry.t, event), (entry.t, event), key=lambda found: (found[0], found[1].text))
            case ev.PeerGone():
                if life := self._life(event.peer, event.peer_incarnation):
                    life.gone_peer = min(life.gone_peer or (entry.t, event), (entry.t, event), key=lambda found: (found[0], found[1].role))
            case ev.PullStarted():
                if life := self._life(event.target):
                    life.pull = (entry.t, event)
            case ev.PullCommitted():
                if life := self._life(event.target, event.incarnation):
                    life.pull = None
                    life.history(Phase.PULL).add(event.seconds)
            case ev.VersionRefused():
                if life := self._life(event.role, event.incarnation):
                    life.pull = None
            case ev.StepMetrics():
                bad = sorted(name for name, value in event.values.items() if not math.isfinite(value))
                if bad and (life := self._life("trainer-0")):
                    text = f"step {event.step}: not finite: {', '.join(bad)}"
                    life.bad_number = min(life.bad_number or (entry.t, text), (entry.t, text))
            case ev.OptimizerStepCommitted():
                if event.step > max(self._committed, 0) and self._commit is not None and not self._paused:
                    self._steps_history.add(entry.t - self._commit)
                self._committed = event.step
                self._commit = self._step_since = entry.t
                if (life := self._life(event.holder)) and self._checkpoint_every and event.step % self._checkpoint_every == 0:
                    life.unsaved = entry.t if life.saved >= 0 and life.unsaved is None else life.unsaved
            case ev.SnapshotCopied():
                if event.holder == "disk" and (life := self._life(event.source)):
                    life.history(CHECKPOINT).add(event.seconds)
                    newer = self._checkpoint_every and self._committed - event.step >= self._checkpoint_every
                    life.saved, life.unsaved = event.step, entry.t if newer else None
            case ev.RoleStarted():
                self._start(entry, event)
            case ev.RoleReady():
                if life := self._life(event.role, event.incarnation):
                    life.ready = entry.t
                    self._step_since = entry.t
                    self._has_to_tell(life)
            case ev.RoleStateChanged():
                if life := self._life(event.role, event.incarnation):
                    life.muted = event.new in _ENDING
            case ev.RestartDecided(mode="full"):
                if (life := self._life(event.role, event.incarnation)) and not life.failed:
                    life.muted = True  # it is ended on purpose
            case ev.Paused():
                self._paused, self._commit = True, None
            case ev.Resumed():
                self._paused, self._step_since = False, entry.t
            case ev.ClockGap():
                self._gap(entry, event.seconds)
            case ev.ThresholdsChanged():
                self.thresholds = Thresholds.from_dict(event.thresholds)
                self._limits = dict(self.thresholds.items())
                self._touched.update(self._lives)
            case ev.RunResumed():
                self._over = self._paused = False
                self._lives.clear()
                self._kinds.clear()
                self._paces.clear()
                self._deadlines.clear()
                self._touched.clear()
                self._commit = self._step_since = None
            case ev.RunStarted():
                self._steps = int(event.config.get("steps", -1))
                self._checkpoint_every = int(event.config.get("checkpoint_every", 0))
            case ev.Verdict():
                if event in self._unrecorded:
                    self._unrecorded.remove(event)
                elif entry.source == ev.HOST and (life := self._life(event.role, event.incarnation)):
                    life.failed, life.failed_at = True, entry.t
                    self._of_host.append(event)
            case ev.EndDecided() | ev.RunEnded():
                self._over = True

    def _life(self, role: str, incarnation: int | None = None) -> Life | None:
        """The present life, which this entry touches; None for another one's late word."""
        life = self._lives.get(role)
        if life is None or (incarnation is not None and life.incarnation != incarnation):
            return None
        self._touch(life)
        return life

    def _touch(self, life: Life) -> None:
        self._touched.add(life.role)
        if life.kind is RoleKind.TRAINER:
            self._touched.update(other.role for other in self._kinds[RoleKind.TRAINER] if other.standing)  # it may wait for this one

    def _start(self, entry: ev.Entry, event: ev.RoleStarted) -> None:
        life = Life(event, entry.t, self._histories.setdefault(event.role, {}))
        same = self._kinds.setdefault(life.kind, [])
        if old := self._lives.get(event.role):
            same.remove(old)
        same.append(life)
        same.sort(key=lambda other: other.role)
        self._lives[event.role] = life
        self._touch(life)

    def _has_to_tell(self, ready: Life) -> None:
        """From when on there is somebody on its node of whom a node agent that is set up has to tell, it may not be silent."""
        for agent in self.of_kind(RoleKind.NODE_AGENT):
            if agent.node != ready.node or agent.ready is None or agent.down:
                continue
            if any(life.node == agent.node and life.ready is not None and not life.down for life in self._others(agent)):
                agent.heard = ready.ready if agent.heard is None else agent.heard
                self._touched.add(agent.role)

    def _others(self, agent: Life) -> Iterable[Life]:
        return (life for life in self._lives.values() if life.kind is not agent.kind)

    def _spoken(self, entry: ev.Entry) -> None:
        self._spoke[entry.source, entry.incarnation] = entry.t
        self._touched.update(life.role for life in self.of_kind(RoleKind.ROLLOUT) if life.beat)

    def _gap(self, entry: ev.Entry, seconds: float) -> None:
        self._touched.update(self._lives)
        if entry.source == SUPERVISOR:
            for life in self.of_kind(RoleKind.ROLLOUT):
                life.beat = None  # it may not have left, or its answer was not fetched
            self._spoken(entry)
            return
        for life in self._lives.values():
            life.shift(seconds, entry.t)
        if self._step_since is not None:
            self._step_since = min(self._step_since + seconds, entry.t)
        self._commit = None

    # -- verdicts out ---

    def advance(self, now: float) -> list[ev.Verdict]:
        """What can be said at ``now``, the time of the last entry, for the first time: in the order of due, role and rule."""
        if now < self.now:
            raise ValueError(f"time {now} lies before {self.now}, up to which was decided")
        self.now = now
        if self._over:
            self._touched.clear()
            return []
        for life in map(self._lives.__getitem__, self._touched):
            if life.kind in _COMPARED:
                self._paces[life.kind].note(life)
        self._look_for_stall()
        due = {role for role, deadline in self._deadlines.items() if deadline <= now}
        verdicts: list[ev.Verdict] = []
        for role in sorted(self._touched | due):
            verdicts += self._judge(self._lives[role])
        self._touched.clear()
        verdicts.sort(key=lambda verdict: (verdict.due, verdict.role))
        self._unrecorded += verdicts
        of_host, self._of_host = self._of_host, []
        return of_host + verdicts

    def next_deadline(self) -> float | None:
        """Log time at which something will be due unless an entry says otherwise; None: only an entry can change anything."""
        if self._over:
            return None
        stall = self._stall_due()
        deadlines = [*self._deadlines.values(), *([stall] if stall is not None and self.stalled is None else [])]
        return min(deadlines, default=None)

    def heartbeats_due(self) -> list[tuple[str, int, int]]:
        """(role, incarnation, number) of each heartbeat that the supervisor has to send now."""
        supervisor = self._lives.get(SUPERVISOR)
        found = []
        for life in self.of_kind(RoleKind.ROLLOUT):
            if life.down or self._over or not any(life.suspicions()):
                continue
            beat, limits = life.beat, self.thresholds.rollout
            waits = beat is not None and (supervisor is None or supervisor.incarnation == beat.source_incarnation)
            missed = waits and beat is not None and self.spoke(beat.source, beat.source_incarnation) >= beat.sent + limits.heartbeat
            if not waits or (missed and life.misses + 1 < limits.strikes):
                found.append((life.role, life.incarnation, life.beats + 1))
        return found

    def marks(self) -> dict[str, tuple[float, ...]]:
        """Role -> the limits of its ages: what its node agent's `Sampler` is to be configured with."""
        return {role: self._marks(life) for role, life in self._lives.items() if not life.down}

    def marks_of(self, role: str) -> tuple[float, ...]:
        """As `marks`, of one role; empty: it is not known, or down."""
        life = self._lives.get(role)
        return () if life is None or life.down else self._marks(life)

    def unrecorded(self) -> list[ev.Verdict]:
        """Verdicts given that were not fed back from the log yet: after a restart, those that the former supervisor did not write."""
        return list(self._unrecorded)

    def _judge(self, life: Life) -> list[ev.Verdict]:
        self._deadlines.pop(life.role, None)
        if life.muted or life.failed:
            return []
        signs: list[tuple[Rule, Sign | None]] = [(rule, rule.sign(life, self)) for rule in _RULES_OF[life.kind]]
        fatal = [(sign.due, place, rule, sign) for place, (rule, sign) in enumerate(signs)
                 if sign is not None and sign.kind == FAILED and sign.due <= self.now and sign.proven]  # fmt: skip
        if fatal:
            _, _, rule, sign = min(fatal, key=lambda item: item[:2])
            reported = [self._verdict(life, other, found) for other, found in signs
                        if found and found.kind == REPORTED and found.due <= self.now and other.name not in life.standing]  # fmt: skip
            life.failed, life.failed_at = True, self.now
            self._paces[life.kind].note(life)  # those judged after it have a peer less
            life.standing = {}
            self._stall_known = False
            return [*reported, self._verdict(life, rule, sign)]
        verdicts: list[ev.Verdict] = []
        deadlines: list[float] = []
        present: list[tuple[Rule, Sign]] = []
        for rule, found in signs:
            if found is not None and found.due <= self.now and found.proven:
                present.append((rule, found))
                continue
            if found is not None:
                deadlines.append(found.due)
            if rule.name in life.standing:
                verdicts += self._absent(life, rule, deadlines)
        for rule, sign in present:
            if sign.kind == WAITING:
                life.waited = self.now
            verdicts += self._present(life, rule, sign)
        if life.beat is not None and any(life.suspicions()):
            deadlines.append(life.beat.sent + self.thresholds.rollout.heartbeat)
            missed = self._spoke.get((life.beat.source, life.beat.source_incarnation), -math.inf) >= deadlines[-1]
            if missed:
                deadlines.pop()  # the next heartbeat is the supervisor's to send
        if deadlines:
            self._deadlines[life.role] = min(deadlines)
        return verdicts

    def _present(self, life: Life, rule: Rule, sign: Sign) -> list[ev.Verdict]:
        standing, cleared = life.standing.get(rule.name), []
        if standing and standing.gone is not None and standing.gone + self.thresholds.job.hysteresis <= self.now:
            cleared, standing = self._absent(life, rule, []), None  # it had ended before it began anew
        if standing and (standing.kind, standing.peer) == (sign.kind, sign.peer):
            life.standing[rule.name] = standing._replace(gone=None)
            return []
        if sign.kind == SUSPECT:
            if any(other.kind == SUSPECT for other in life.standing.values()):
                return cleared  # one suspicion at a time: both lead to the same heartbeat
            life.beat, life.misses = None, 0
        life.standing[rule.name] = Standing(sign.kind, sign.peer, None)
        return [*cleared, self._verdict(life, rule, sign)]

    def _absent(self, life: Life, rule: Rule, deadlines: list[float]) -> list[ev.Verdict]:
        standing = life.standing.get(rule.name)
        if standing is None:
            return []
        gone = self.now if standing.gone is None else standing.gone
        due = gone + self.thresholds.job.hysteresis
        if due > self.now:
            life.standing[rule.name] = standing._replace(gone=gone)
            deadlines.append(due)
            return []
        del life.standing[rule.name]
        if standing.kind == SUSPECT:
            life.beat, life.misses = None, 0
        sign = Sign(CLEARED, due, gone, self.thresholds.job.hysteresis, {"was": standing.kind, "gone_since": round(gone, 6)})
        return [self._verdict(life, rule, sign)]

    def _verdict(self, life: Life, rule: Rule, sign: Sign) -> ev.Verdict:
        return ev.Verdict(
            role=life.role, incarnation=life.incarnation, kind=sign.kind, rule=rule.name, evidence=sign.evidence, threshold=sign.threshold,
            due=sign.due, seen=self.now, onset=min(sign.onset, sign.due), blind_spot=rule.blind_spot,
        )  # fmt: skip

    # -- what rules ask (rules.Context) ---

    def limit(self, life: Life, path: str) -> float:
        value = self._limits[path]
        return value.seconds(life.history(HISTORY[path]).sorted) if isinstance(value, Relative) else value

    def of_kind(self, kind: RoleKind) -> list[Life]:
        return self._kinds.get(kind, [])

    def usual_pace(self, life: Life) -> tuple[float, float] | None:
        return self._paces[life.kind].usual(life.role)

    def untold(self, agent: str) -> float | None:
        """From when on the silence of a node agent counts, as there is somebody of whom it has to tell; None: there is nobody.

        Of whom it has told, it tells on. Once those have ended it has to tell of the next on its node from when that one is ready on.
        Before its first word: of who is ready there, unless somebody else has told of one since its start.
        """
        mine = self._lives[agent]
        if mine.heard is None:
            return None
        if mine.told and any(life.agent == agent and not life.down for life in self._lives.values()):
            return mine.heard
        here = [life for life in self._others(mine) if life.node == mine.node]
        if not mine.told and any(life.sample is not None and life.sampled >= mine.started for life in here):
            return None
        ready = [life.ready for life in here if life.ready is not None and not life.down]
        return max(mine.heard, min(ready)) if ready else None

    def spoke(self, source: str, incarnation: int) -> float:
        return self._spoke.get((source, incarnation), -math.inf)

    def _marks(self, life: Life) -> tuple[float, ...]:
        section = SECTION.get(life.kind, "management")
        if life.kind is RoleKind.NODE_AGENT:
            return ()
        if life.kind is RoleKind.TRAINER:
            names = ["no_compute", "no_marks", "silent", *OVERDUE]
        elif life.kind is RoleKind.ROLLOUT:
            names = ["no_tokens", "wedged"]
        else:
            names = ["silent", "lag"]
        if section in ("trainer", "rollout") and not life.progressed:
            names.append("grace")
        return tuple(sorted({self.limit(life, f"{section}.{name}") for name in names}))

    # -- the stall, which is the whole job's ---

    def _stall_due(self) -> float | None:
        if not self._stall_known:
            self._stall_known, self._stall_at = True, self._find_stall_due()
        return self._stall_at

    def stall_level(self, now: float) -> tuple[float, float] | None:
        """(seconds without an optimizer step, the limit of them); None while no step is expected."""
        due, since = self._stall_due(), self._step_since
        return (now - since, due - since) if due is not None and since is not None else None

    def _find_stall_due(self) -> float | None:
        if self._paused or self._step_since is None or self._committed >= self._steps:
            return None
        if any(life.ready is None and not life.down for life in self._lives.values()):
            return None  # the rule start is in charge
        limit = self.thresholds.job.stall
        return self._step_since + (limit.seconds(self._steps_history.sorted) if isinstance(limit, Relative) else limit)

    def _look_for_stall(self) -> None:
        """Reported at first; failed once the one waited for has itself been stuck for as long as the limit."""
        before, self.stalled = self.stalled, None
        due, since = self._stall_due(), self._step_since
        if due is not None and since is not None and due <= self.now and (waited := waited_for(self._lives.values())):
            limit = due - since
            evidence = {"step": self._committed + 1, "why": waited.why}
            sign = Sign(REPORTED, due, since, limit, evidence)
            if waited.since is not None and self.now >= waited.since + limit:
                sign = sign._replace(kind=FAILED, due=max(due, waited.since + limit), onset=max(since, waited.since))
            self.stalled = (waited.life.role, sign)
        self._touched.update(found[0] for found in (before, self.stalled) if found)


def judge(detector: Detector, entries: Iterable[ev.Entry]) -> Iterator[ev.Verdict]:
    """Feeds a log's entries and gives the verdicts as they fall: the one way in which live and recorded logs are judged."""
    last: float | None = None
    for entry in entries:
        if last is not None and entry.t > last:
            yield from detector.advance(last)
        last = entry.t
        detector.feed(entry)
    if last is not None:
        yield from detector.advance(last)
