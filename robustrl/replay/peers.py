"""Detectors that others publish, on the signals of our logs and behind the face of our own (`feed`, `next_deadline`, `advance`).

Each says ``failed`` of a role when its sign appears and ``cleared`` when the sign is gone, so that mistakes can be timed. None knows
phases, work or peers: that is what they are here to be compared by. Two favours are done to all: they are armed when a role is ready, not
when its process starts; and the silence of a node agent, through which we see what they would see themselves, is held against nobody.
With ``exits=True`` one also takes our word for a process's end, which as published they learn by their own time-outs.

Heartbeats and probes with limits below two seconds need a log with every look of the node agents, not only changes and keep-alives.
Leaves out: what they do about a verdict.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable, Iterable
from statistics import NormalDist

from ..core import events as ev
from ..core.roles import RoleId, RoleKind

JOB = "job"
"""The role of a verdict that names nobody."""
_MODELS = frozenset({RoleKind.TRAINER, RoleKind.ROLLOUT})
_WATCHED = frozenset(RoleKind) - {RoleKind.NODE_AGENT}
_ENDING = ("stopped", "retired", "restarting")


class Watch:
    """What a peer knows of one life of a role."""

    def __init__(self, event: ev.RoleStarted) -> None:
        self.role, self.incarnation, self.node, self.kind = event.role, event.incarnation, event.node, RoleId.parse(event.role).kind
        self.agent = ""
        self.armed = False
        self.gone = False
        """Its process has ended."""
        self.since = 0.0
        """Host time of the last sign of life, whatever the peer takes for one."""
        self.stamp = 0.0
        """Host time at which its loop last came round, as far as is known."""
        self.progress = -1
        self.gaps: deque[float] = deque(maxlen=200)
        self.sorted: list[float] = []
        self.asked: float | None = None
        """Probes: when the open question left; None: the next one leaves at `next_ask`."""
        self.next_ask = math.inf
        self.misses = self.answers = 0
        self.failed = False

    def add_gap(self, gap: float) -> None:
        if len(self.gaps) == self.gaps.maxlen:
            self.sorted.pop(bisect.bisect_left(self.sorted, self.gaps[0]))
        self.gaps.append(gap)
        bisect.insort(self.sorted, gap)


class Peer:
    """Time-outs on a sign of life, one role at a time; a subclass says what the sign is (`_take`) and how long it may be missing."""

    name = "peer"
    kinds = _WATCHED

    def __init__(self, limit: float = 1.0, *, exits: bool = False) -> None:
        if not (math.isfinite(limit) and limit > 0):
            raise ValueError(f"limit {limit}: must be a finite time above 0 s")
        self.limit, self.exits, self.now = limit, exits, 0.0
        self._watches: dict[str, Watch] = {}
        self._heard: dict[str, float] = {}
        """Node agent -> its last word."""
        self._touched: set[str] = set()
        self._dues: dict[str, float] = {}

    def feed(self, entry: ev.Entry) -> None:
        event = entry.event
        if isinstance(event, ev.RoleSample):
            self._heard[entry.source] = entry.t
            watch = self._watches.get(event.role)
            if watch is not None and watch.incarnation == event.incarnation and not watch.gone:
                watch.agent = entry.source
                watch.stamp = max(watch.stamp, entry.t - event.loop_age)
                self._take(watch, entry.t, event)
                self._touched.add(watch.role)
        elif isinstance(event, ev.RoleStarted):
            if RoleId.parse(event.role).kind in self.kinds:
                self._watches[event.role] = Watch(event)
                self._dues.pop(event.role, None)
        elif isinstance(event, ev.RoleReady):
            if watch := self._watch(event.role, event.incarnation):
                watch.armed = True
                watch.since = watch.stamp = entry.t
                self._arm(watch, entry.t)
        elif isinstance(event, ev.RoleStateChanged):
            if event.new in _ENDING and self._watch(event.role, event.incarnation):
                del self._watches[event.role]
                self._dues.pop(event.role, None)
        elif isinstance(event, ev.ProcessExited | ev.ErrorRaised):
            if watch := self._watch(event.role, event.incarnation):
                self._end(watch)
        elif isinstance(event, ev.NodeLost):
            for watch in self._watches.values():
                if watch.node == event.node:
                    self._end(watch)

    def next_deadline(self) -> float | None:
        return min(self._dues.values(), default=None)

    def advance(self, now: float) -> list[ev.Verdict]:
        self.now = now
        roles = self._touched | {role for role, due in self._dues.items() if due <= now}
        self._touched = set()
        said = [verdict for role in sorted(roles) if role in self._watches for verdict in self._judge(self._watches[role])]
        return sorted(said, key=lambda verdict: (verdict.due, verdict.role))

    # -- what a subclass says ---

    def _take(self, watch: Watch, t: float, sample: ev.RoleSample) -> None:
        raise NotImplementedError

    def _arm(self, watch: Watch, t: float) -> None:
        """The role is ready."""

    def _allowed(self, watch: Watch) -> float:
        """Seconds for which the sign may be missing."""
        return self.limit

    # -- verdicts ---

    def _watch(self, role: str, incarnation: int) -> Watch | None:
        watch = self._watches.get(role)
        if watch is None or watch.incarnation != incarnation:
            return None
        self._touched.add(role)
        return watch

    def _end(self, watch: Watch) -> None:
        watch.gone = True
        self._touched.add(watch.role)

    def _judge(self, watch: Watch) -> list[ev.Verdict]:
        self._dues.pop(watch.role, None)
        if watch.gone and self.exits:
            return self._say(watch, True, self.now, watch.stamp, 0.0)
        if not watch.armed:
            return []
        allowed = self._allowed(watch)
        due = watch.since + allowed
        shown = self.now if watch.gone else self._heard.get(watch.agent, 0.0)
        if due > self.now or shown < due:
            if math.isfinite(due) and not watch.failed and due > self.now:
                self._dues[watch.role] = due
            return self._say(watch, False, self.now, watch.since, allowed)
        return self._say(watch, True, due, watch.since, allowed)

    def _say(self, watch: Watch, failed: bool, due: float, onset: float, threshold: float) -> list[ev.Verdict]:
        if watch.failed == failed:
            return []
        watch.failed = failed
        kind = "failed" if failed else "cleared"
        return [ev.Verdict(role=watch.role, incarnation=watch.incarnation, kind=kind, rule=self.name, evidence={}, threshold=threshold,
                           due=due, seen=self.now, onset=min(onset, due), blind_spot="")]  # fmt: skip


class ProcessIdle(Peer):
    """A trainer's or rollout's chip (here: its process) is idle for ``limit`` seconds. verl recipe: 30 s."""

    name, kinds = "process idle", _MODELS

    def _take(self, watch: Watch, t: float, sample: ev.RoleSample) -> None:
        watch.since = max(watch.since, t - sample.active_age)


class ClusterIdle(ProcessIdle):
    """All trainers and rollouts together are idle for ``limit`` seconds; nobody is named. NeMo-RL's watchdog over the whole job: 600 s."""

    name = "cluster idle"

    def __init__(self, limit: float = 1.0, *, exits: bool = False) -> None:
        super().__init__(limit, exits=exits)
        self._job = Watch(ev.RoleStarted(role="supervisor", incarnation=1, node="", pid=0, start_ticks=0))
        self._job.role = JOB

    def advance(self, now: float) -> list[ev.Verdict]:
        self.now = now
        self._touched = set()
        self._dues.clear()
        watches = [watch for watch in self._watches.values() if watch.armed]
        if self.exits and any(watch.gone for watch in watches):
            return self._say(self._job, True, now, now, 0.0)
        if not watches:
            return []
        since = max(watch.since for watch in watches)
        due = since + self.limit
        shown = min(now if watch.gone else self._heard.get(watch.agent, 0.0) for watch in watches)
        if due > now:
            self._dues[JOB] = due
        return self._say(self._job, due <= now and due <= shown, min(due, now), since, self.limit)


class Heartbeat(Peer):
    """Each process beats from a thread of its own; none for ``limit`` seconds: dead. torchft: 5 s (of its trainer replicas only)."""

    name = "heartbeat"

    def _take(self, watch: Watch, t: float, sample: ev.RoleSample) -> None:
        if sample.process not in ("T", "t"):
            watch.since = t


class PhiAccrual(Peer):
    """Hayashibara et al. 2004: a role's loop beats each second; phi is how improbable the present silence is, in powers of ten.

    Defaults are Akka's: phi 8, deviation at least 0.1 s, 3 s of acceptable pause, up to 200 intervals.
    """

    name = "phi accrual"

    def __init__(self, phi: float = 8.0, *, pause: float = 3.0, period: float = 1.0, deviation: float = 0.1, exits: bool = False) -> None:
        super().__init__(exits=exits)
        self.phi, self.pause, self.period, self.deviation = phi, pause, period, deviation
        self._away = -NormalDist().inv_cdf(10.0**-phi)
        """Standard deviations."""

    def _take(self, watch: Watch, t: float, sample: ev.RoleSample) -> None:
        gap = watch.stamp - watch.since
        if gap >= self.period:
            watch.add_gap(gap)
            watch.since = watch.stamp

    def _allowed(self, watch: Watch) -> float:
        gaps = watch.gaps or (self.period,)
        mean = sum(gaps) / len(gaps)
        spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
        return mean + self.pause + self._away * max(spread, self.deviation)


class Quantile(Peer):
    """No progress for ``times`` the quantile ``q`` of the role's own gaps between two signs of progress; at least ``floor`` seconds.

    No system publishes settings for it; the defaults are a usual choice. Until it has seen ``least`` gaps it says nothing.
    """

    name, kinds = "adaptive quantile", _MODELS

    def __init__(self, times: float = 3.0, *, q: float = 0.99, floor: float = 1.0, least: int = 10, exits: bool = False) -> None:
        super().__init__(exits=exits)
        self.times, self.q, self.floor, self.least = times, q, floor, least

    def _take(self, watch: Watch, t: float, sample: ev.RoleSample) -> None:
        if sample.progress != watch.progress:
            if watch.progress >= 0:
                watch.add_gap(t - watch.since)
            watch.progress, watch.since = sample.progress, t

    def _allowed(self, watch: Watch) -> float:
        gaps = watch.sorted
        if len(gaps) < self.least:
            return math.inf
        return max(self.floor, self.times * gaps[min(len(gaps) - 1, int(self.q * len(gaps)))])


class Probe(Peer):
    """A question to a role's own loop every ``period`` seconds, first after ``first``, with ``timeout`` to answer.

    ``strikes`` misses in a row condemn, ``good`` answers in a row acquit.

    slime: first 300 s, every 10 s, 5 s, one strike (rollouts). miles: rollouts 0/30/30 s, trainers 300/10/10 s, three strikes.
    NeMo-RL: 5 s, 2 s, three bad, two good (rollouts).
    """

    name = "probe"

    def __init__(self, *, first: float, period: float, timeout: float, strikes: int, good: int = 1, exits: bool = False,
                 kinds: Iterable[RoleKind] = _WATCHED) -> None:  # fmt: skip
        super().__init__(timeout, exits=exits)
        self.first, self.period, self.strikes, self.good = first, period, strikes, good
        self.kinds = frozenset(kinds)

    def _take(self, watch: Watch, t: float, sample: ev.RoleSample) -> None:
        pass

    def _arm(self, watch: Watch, t: float) -> None:
        watch.next_ask = t + self.first

    def _judge(self, watch: Watch) -> list[ev.Verdict]:
        if watch.gone and self.exits:
            self._dues.pop(watch.role, None)
            return self._say(watch, True, self.now, watch.stamp, 0.0)
        said: list[ev.Verdict] = []
        while True:
            if watch.asked is None:
                if watch.next_ask > self.now:
                    break
                watch.asked, watch.next_ask = watch.next_ask, math.inf
            asked = watch.asked
            if watch.stamp >= asked:
                watch.misses, watch.answers = 0, watch.answers + 1
                if watch.answers >= self.good:
                    said += self._say(watch, False, self.now, asked, self.limit)
            elif self.now >= asked + self.limit:
                if not watch.gone and self._heard.get(watch.agent, 0.0) < asked + self.limit:
                    break  # nobody could have told us of the answer
                watch.misses, watch.answers = watch.misses + 1, 0
                if watch.misses >= self.strikes:
                    said += self._say(watch, True, asked + self.limit, asked, self.limit)
            else:
                break
            late = asked + self.limit if watch.misses else asked
            watch.asked, watch.next_ask = None, max(asked + self.period, late)
        due = watch.next_ask if watch.asked is None else watch.asked + self.limit
        if self.now < due < math.inf:
            self._dues[watch.role] = due
        else:
            self._dues.pop(watch.role, None)
        return said


class Both(Peer):
    """Two detectors side by side, for one system that treats two kinds of role differently."""

    def __init__(self, *peers: Peer) -> None:
        super().__init__()
        self.peers = peers

    def feed(self, entry: ev.Entry) -> None:
        for peer in self.peers:
            peer.feed(entry)

    def next_deadline(self) -> float | None:
        return min((due for peer in self.peers if (due := peer.next_deadline()) is not None), default=None)

    def advance(self, now: float) -> list[ev.Verdict]:
        self.now = now
        return [verdict for peer in self.peers for verdict in peer.advance(now)]


_ROLLOUTS, _TRAINERS = (RoleKind.ROLLOUT,), (RoleKind.TRAINER,)
PUBLISHED: dict[str, Callable[[], Peer]] = {
    "cluster idle (NeMo-RL watchdog, 600 s)": lambda: ClusterIdle(600.0),
    "process idle (verl recipe, 30 s)": lambda: ProcessIdle(30.0),
    "heartbeat (torchft, 5 s)": lambda: Heartbeat(5.0),
    "heartbeat (TRL, 300 s)": lambda: Heartbeat(300.0),
    "probe (slime)": lambda: Probe(first=300.0, period=10.0, timeout=5.0, strikes=1, kinds=_ROLLOUTS),
    "probe (miles)": lambda: Both(Probe(first=0.0, period=30.0, timeout=30.0, strikes=3, kinds=_ROLLOUTS),
                                  Probe(first=300.0, period=10.0, timeout=10.0, strikes=3, kinds=_TRAINERS)),
    "probe (NeMo-RL)": lambda: Probe(first=0.0, period=5.0, timeout=2.0, strikes=3, good=2, kinds=_ROLLOUTS),
    "phi accrual (Akka)": lambda: PhiAccrual(),
    "adaptive quantile": lambda: Quantile(),
}  # fmt: skip
"""Settings as published, by system."""

_SECONDS = (0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 24.0)
TUNABLE: dict[str, tuple[Callable[[float], Peer], tuple[float, ...]]] = {
    "cluster idle": (lambda limit: ClusterIdle(limit, exits=True), _SECONDS),
    "process idle": (lambda limit: ProcessIdle(limit, exits=True), _SECONDS),
    "heartbeat": (lambda limit: Heartbeat(limit, exits=True), _SECONDS),
    "probe": (lambda limit: Probe(first=0.0, period=max(0.5, limit), timeout=limit, strikes=1, exits=True), _SECONDS),
    "phi accrual": (lambda pause: PhiAccrual(pause=pause, period=0.3, exits=True), (0.1, 0.4, 1.0, 2.0, 4.0, 8.0, 16.0)),
    "adaptive quantile": (lambda times: Quantile(times, floor=0.4, exits=True), (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 16.0)),
}
"""Peer -> how to make it with its one setting, and the settings that its curve is drawn over. All take our word for an exit."""
