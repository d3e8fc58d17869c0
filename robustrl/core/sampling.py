"""What a node agent logs of one role: the change of what matters, and a sign of life once a second. Pure: time and readings are passed in.

What matters is the phase, a trainer's step and a mark that an age has passed: what detection decides by. Versions and the steps of others
are told by other events; samples repeat them with the next sign of life. A trainer's phase is logged by the first look that finds it, any
other's by the second: the phases of rollouts, several to an optimizer step, were a third of all samples of a job of profile class.

All ages are differences on the agent's own clock, so a clock that is wrong by seconds changes nothing, nor does one that is set
meanwhile. *Marks* are the limits that the detector holds against the ages of this role: the first look that finds an age past a mark is
logged, so a limit is acted on at most one look after it was passed; without marks, at the next keep-alive. Correctness never depends on
them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable

from . import events as ev
from .roles import QUIET, Phase, RoleId, RoleKind
from .thresholds import KEEP_ALIVE, SAMPLING

_WINDOW = 1.0
"""Seconds: a burst is activity only if it amounts to the floor over this time; the odd housekeeping of an idle process does not."""
_SLACK = 1.1
_WENT_QUIET = 0.5
"""Seconds: a mark of inactivity that is always there; it tells how far a rank had come when it stopped working."""
_GENERATING = (Phase.PREFILL, Phase.DECODE)
_ONE_SPELL = dict.fromkeys(_GENERATING, "generate") | dict.fromkeys((Phase.RUNNING, Phase.IDLE), "serve")
"""Phases that alternate by the millisecond: a change between them is not logged and begins no new age."""


_JUMP = 3.0
"""Seconds between two looks from which on the agent itself did not run, or its clock was set: no role's age grows by that."""


class ActivityMeter:
    """Says when a process was last active, from readings of its CPU time (or of an accelerator's busy time), in seconds."""

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self._readings: deque[tuple[float, float]] = deque()
        self._was_active = True
        self._pace = 1.0
        """Share of a core that it used while it was active."""
        self.last = 0.0

    def shift(self, seconds: float) -> None:
        """The clock has made a jump."""
        self.last += seconds
        self._readings = deque((t + seconds, used) for t, used in self._readings)

    def read(self, now: float, used: float) -> None:
        if not self._readings:
            self._readings.append((now, used))
            self.last = now
            return
        before, used_before = self._readings[-1]
        step, spent = now - before, max(0.0, used - used_before)
        if step <= 0:
            return
        self._readings.append((now, used))
        while len(self._readings) > 2 and self._readings[1][0] <= now - _WINDOW:
            self._readings.popleft()
        start, used_start = self._readings[0]
        active = spent >= self.floor * step and used - used_start >= self.floor * min(_WINDOW, max(now - start, step))
        if active:
            self.last, self._pace = now, min(1.0, spent / step)
        elif self._was_active:
            # it may have worked on at its pace at the beginning of this stretch, or at a little less: never is an age too long
            self.last = before + min(_SLACK * spent / self._pace, step)
        self._was_active = active


class Sampler:
    """One life of a role. `look` at it every 0.1 s."""

    def __init__(self, role: str, incarnation: int, floor: float = 0.05, marks: Iterable[float] = ()) -> None:
        self.role, self.incarnation = role, incarnation
        self._trains = RoleId.parse(role).kind is RoleKind.TRAINER
        self._meter = ActivityMeter(floor)
        self._marks: list[float] = []
        self._key: tuple[tuple[object, int | None], tuple[int, int, int, int, bool]] | None = None
        """What was logged last: phase (or spell) and step, and how many marks each age had passed."""
        self._phase: object = None
        self._looked: float | None = None
        self._woke, self._slept = -math.inf, 0.0
        """When the agent itself last went on after a gap, and how long that was."""
        self._phase_since = self._progress_since = self._logged = 0.0
        self._progress = -1
        self._lag = 0.0
        self.configure(floor, marks)

    def configure(self, floor: float, marks: Iterable[float]) -> None:
        """From the next look on."""
        self._meter.floor = floor
        self._marks = sorted(marks)

    def _shift(self, seconds: float) -> None:
        self._phase_since += seconds
        self._progress_since += seconds
        self._meter.shift(seconds)

    def look(self, now: float, *, phase: Phase, progress: int, pending: int, step: int, version: int, loop_age: float, cpu: float,
             process: Callable[[], str], busy: float | None = None) -> ev.RoleSample | None:  # fmt: skip
        """A sample to log, or None. ``now``: the agent's monotonic seconds; ``process`` reads the state letter, when it is needed.

        ``busy``: the accelerator's busy seconds so far, where activity is to be told from those and not from the CPU's.
        """
        if self._looked is not None and not 0 <= now - self._looked <= _JUMP:
            self._woke, self._slept = now, now - self._looked - SAMPLING
            self._shift(self._slept)
        if loop_age > now - self._woke:  # the stamp is from before: whoever was suspended with the agent had no chance to renew it
            loop_age = max(now - self._woke, min(loop_age, loop_age - self._slept))
        self._looked = now
        self._meter.read(now, cpu if busy is None else busy)
        generating = phase in _GENERATING
        spell = _ONE_SPELL.get(phase, phase)
        if spell != self._phase:
            self._phase, self._phase_since, self._progress_since = spell, now, now
        if progress != self._progress or phase in QUIET or (generating and not pending):
            self._progress, self._progress_since = progress, now
        self._lag = max(self._lag, loop_age)
        marks, loop_age = self._marks, round(loop_age, 4)
        phase_age, active_age = round(now - self._phase_since, 4), round(now - self._meter.last, 4)
        progress_age = round(now - self._progress_since, 4)
        passed = bisect_right(marks, loop_age), 0, 0, 0, False
        if phase not in QUIET and spell != "serve":
            ages = bisect_right(marks, phase_age), bisect_right(marks, active_age), bisect_right(marks, progress_age)
            passed = passed[0], *ages, active_age >= _WENT_QUIET
        told: tuple[object, int | None] = spell, step if self._trains else None
        if self._key and not (self._trains or phase_age):
            told = self._key[0]  # seen for the first time: what is over at the next look is no news
        alive = now // KEEP_ALIVE == self._logged // KEEP_ALIVE  # of all roles of a node at the same look: one message
        if (told, passed) == self._key and alive:
            return None
        self._key, self._logged = ((spell, told[1]), passed), now
        lag, self._lag = self._lag, 0.0
        return ev.RoleSample(
            role=self.role, incarnation=self.incarnation, phase=phase.value, progress=progress, pending=pending, step=step, version=version,
            loop_age=loop_age, cpu=cpu, phase_age=phase_age, active_age=active_age, progress_age=progress_age, lag=round(lag, 4),
            process=process(),
        )  # fmt: skip
