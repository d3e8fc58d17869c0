"""What is known of one life of a role, taken from the log. Facts only: what follows from them is core/rules.py's to say.

Times are the host's (``Entry.t``). An age in a sample is a difference on its node's own clock; the host time at which it began is at most
``t - age``, and the smallest such value over the samples of one spell is kept. No two clocks are ever compared.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from typing import NamedTuple

from . import events as ev
from .roles import QUIET, Phase, RoleId, RoleKind

GENERATING = frozenset({Phase.PREFILL, Phase.DECODE})
_SAME_SPELL = 0.05
"""Seconds by which two samples may differ about when a spell began."""
IDLE = 0.5
"""Seconds without activity after which a role counts as idle."""
STOPPED = ("T", "t")
"""Letters of a process's state while it is stopped."""
_KEPT = 25
_MEMORY = 20.0
"""Seconds: time constant of a role's pace."""
_LEAST_WORK = 5.0
"""Seconds of observed work before a pace counts."""
_LONGEST_STEP = 3.0
"""Seconds: samples further apart say nothing about pace."""


class History:
    """The last durations of one thing."""

    def __init__(self) -> None:
        self._recent: list[float] = []
        self.sorted: list[float] = []

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)
        bisect.insort(self.sorted, seconds)
        if len(self._recent) > _KEPT:
            self.sorted.remove(self._recent.pop(0))


class Beat(NamedTuple):
    """A heartbeat on its way."""

    sent: float
    number: int
    source: str
    source_incarnation: int


class Pace:
    """Work done in the time that there was work, with a memory of `_MEMORY` seconds."""

    def __init__(self) -> None:
        self._made = self._seconds = self._load = 0.0

    def add(self, made: int, seconds: float, pending: int) -> None:
        fade = math.exp(-seconds / _MEMORY)
        self._made = self._made * fade + made
        self._seconds = self._seconds * fade + seconds
        self._load = self._load * fade + seconds * pending

    def rates(self) -> tuple[float, float] | None:
        """(per second, per second and unit of work pending); None: too little seen."""
        return (self._made / self._seconds, self._made / self._load) if self._seconds >= _LEAST_WORK else None


class Standing(NamedTuple):
    """A verdict that has not been cleared."""

    kind: str
    peer: str
    gone: float | None
    """Since when its sign is gone."""


class Life:
    def __init__(self, event: ev.RoleStarted, t: float, histories: dict[str, History]) -> None:
        self.role, self.kind, self.incarnation = event.role, RoleId.parse(event.role).kind, event.incarnation
        self.node, self.pid, self.started = event.node, event.pid, t
        self.histories = histories
        """Of the role, over all its lives, by phase."""
        self.ready: float | None = None
        self.muted = False
        """It was ended or is being replaced on purpose."""
        self.agent = ""
        """Source of its samples."""
        self.sample: ev.RoleSample | None = None
        self.sampled = t
        self.sampled_at = 0.0
        self.began: dict[str, tuple[float, float]] = {}
        """Name of an age -> (agent's clock, host's clock) at which its spell began."""
        self.pace = Pace()
        self.heard: float | None = None
        """Node agents: when their last sample of any role came, or, before the first, from when on there was one to send."""
        self.told = False
        """Node agents: it has sent one."""
        self.error: tuple[float, ev.ErrorRaised] | None = None
        self.bad_number: tuple[float, str] | None = None
        self.exit: tuple[float, ev.ProcessExited] | None = None
        self.lost: tuple[float, ev.NodeLost] | None = None
        self.gone_peer: tuple[float, ev.PeerGone] | None = None
        """Someone lost its connection to this role."""
        self.pull: tuple[float, ev.PullStarted] | None = None
        self.saved = -1
        """Keepers: the last optimizer step that has a checkpoint on disk; -1: none that this life is known to have written."""
        self.unsaved: float | None = None
        """Keepers: from when on the checkpoint that is not written yet has had its turn."""
        self.beat: Beat | None = None
        self.beats = self.misses = self.answers = self.last_answer = 0
        self.made_progress = -math.inf
        """When new progress was last told of: what comes at the same time counts as before it."""
        self.answered = -math.inf
        self.advanced = -math.inf
        """When progress was last told of that an earlier sample of this life had not shown."""
        self.waited = -math.inf
        """Until when it had a peer to wait for."""
        self.standing: dict[str, Standing] = {}
        self.failed = False
        self.failed_at = math.inf
        self.idled = -math.inf
        """When it was last seen to do nothing."""

    @property
    def armed(self) -> bool:
        """It is set up, alive as far as is known, and there is something to judge it by."""
        return self.ready is not None and self.sample is not None and not self.down

    @property
    def down(self) -> bool:
        return self.failed or self.muted or self.exit is not None or self.lost is not None

    @property
    def ended(self) -> float:
        """From when on it was no more, or said to be; infinite: it goes on."""
        told = [found[0] for found in (self.exit, self.lost, self.error) if found]
        return min([self.failed_at, *told])

    @property
    def progressed(self) -> bool:
        """It has done something in this life: its first compile, load and warm-up are behind it."""
        return self.sample is not None and self.sample.progress > 0

    @property
    def warming(self) -> bool:
        """It has done nothing yet, and is about to: what it does may be its first compile. One that waits for work compiles nothing."""
        return not self.progressed and (self.sample is None or Phase(self.sample.phase) not in QUIET)

    @property
    def stopped(self) -> bool:
        """Its process was stopped (SIGSTOP) when it was last looked at. Evidence, never a reason."""
        return self.sample is not None and self.sample.process in STOPPED

    def since(self, age: str) -> float:
        """Host time at which the spell of this age began, as early as is known."""
        return self.began[age][1] if age in self.began else self.started

    def suspicions(self) -> Iterator[str]:
        """Rules that suspect it now."""
        return (rule for rule, standing in self.standing.items() if standing.kind == "suspect" and standing.gone is None)

    def take_sample(self, entry: ev.Entry, new: ev.RoleSample) -> None:
        old, same_agent = self.sample, self.agent == entry.source
        if old is not None and same_agent:
            self._learn(old, new, entry.at - self.sampled_at, entry.at)
        if old is None or new.progress != old.progress:
            self.answers = self.misses = 0
            self.made_progress = entry.t
            self.advanced = self.advanced if old is None else entry.t
        if new.active_age >= IDLE:
            self.idled = entry.t
        self.agent, self.sample, self.sampled, self.sampled_at = entry.source, new, entry.t, entry.at
        for name in _AGES:
            age = getattr(new, name)
            at, host = entry.at - age, entry.t - age
            before = self.began.get(name)
            if same_agent and before and abs(before[0] - at) < _SAME_SPELL:
                host = min(host, before[1])
            self.began[name] = (at, host)

    def _learn(self, old: ev.RoleSample, new: ev.RoleSample, seconds: float, at: float) -> None:
        phase = Phase(old.phase)
        if self.kind is RoleKind.TRAINER and new.phase != old.phase:
            duration = at - new.phase_age - self.began["phase_age"][0]
            self.history(phase).add(max(0.0, duration))
        at_work = phase in GENERATING or (phase is Phase.TRAIN and (new.active_age < IDLE or self.stopped or new.process in STOPPED))
        if 0 < seconds <= _LONGEST_STEP and old.pending > 0 and at_work:  # a rank that idles may wait for a peer, which is no slowness
            self.pace.add(max(0, new.progress - old.progress), seconds, old.pending)

    def history(self, of: str) -> History:
        return self.histories.setdefault(of, History())

    def shift(self, seconds: float, now: float) -> None:
        """The host did not run for this long, up to ``now``: what waits by the host's clock waits as much longer."""

        def later(t: float) -> float:
            return min(t + seconds, now)

        self.started = later(self.started)
        if self.ready is not None:
            self.ready = later(self.ready)
        if self.heard is not None:
            self.heard = later(self.heard)
        if self.pull is not None:
            self.pull = (later(self.pull[0]), self.pull[1])
        if self.unsaved is not None:
            self.unsaved = later(self.unsaved)
        if self.beat is not None:
            self.beat = self.beat._replace(sent=later(self.beat.sent))


class Paces:
    """The rates of all armed lives of a kind, kept sorted: what is usual among one's peers is told without asking each of them."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, float]] = {}
        self._sorted: tuple[list[float], list[float]] = [], []

    def note(self, life: Life) -> None:
        """Takes in what a life is now: to be called before anybody asks, whenever it may have changed."""
        old, new = self._of.pop(life.role, None), life.pace.rates() if life.armed else None
        if new is not None:
            self._of[life.role] = new
        if new == old:
            return
        for i, values in enumerate(self._sorted):
            if old is not None:
                del values[bisect.bisect_left(values, old[i])]
            if new is not None:
                bisect.insort(values, new[i])

    def usual(self, role: str) -> tuple[float, float] | None:
        """The lower median of each rate among the others; None: there are none."""
        mine = self._of.get(role)
        others = len(self._of) - (mine is not None)
        if not others:
            return None
        place, (rates, per_work) = (others - 1) // 2, self._sorted
        if mine is None:
            return rates[place], per_work[place]
        # one's own value is skipped; which of several equal ones makes no difference
        return (rates[place + (place >= bisect.bisect_left(rates, mine[0]))],
                per_work[place + (place >= bisect.bisect_left(per_work, mine[1]))])  # fmt: skip


_AGES = ("phase_age", "active_age", "progress_age", "loop_age")
SUPERVISOR = RoleKind.SUPERVISOR.value
