"""The ghost: a full-restart run of the same job, recorded once, against which a live one races. Pure.

The race is run on the training clock: seconds since the first trajectories of a run were started, without the time in which it was paused,
so that neither start-up nor a reader who stopped to look decides it. Nothing of a ghost lies in the future of the run that it is shown
beside. Ghosts belong to jobs that learn the same thing in the same way (`key_of`); the number of steps may differ.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from robustrl.core import events as ev
from robustrl.core.intervals import without
from robustrl.core.recoveries import recoveries_of
from robustrl.core.run_state import RunState

from .bars import DETECT, RECONNECT, RESTART, WORK
from .metrics import thin
from .words import cut, seconds

Bar = tuple[float, float, str, str]
"""(from, to, code of `lanes`, words); seconds."""
Fault = tuple[float, str, str, int]
"""(when, kind, role that was hit, optimizer step that ran)."""
_DECIDES = ("task", "task_options", "reward", "model", "engine", "profile", "seed", "prompts_per_step", "samples_per_prompt", "staleness",
            "rollouts", "trainer_ranks", "agent_workers", "nodes", "max_model_len", "rollout_concurrency", "grpo", "sampling")
"""Settings that two runs must share to be comparable."""
_KEPT = 2000
"""Steps that are remembered, and points of a curve."""
_SHOWN = 4
"""Faults that are named in words."""


class Ghost(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds on the training clock."""

    key: str
    mode: str
    """Of its recoveries."""
    seed: int
    steps: int
    wall: float
    """Unix time at which it was recorded."""
    machine: dict[str, Any]
    commits: list[tuple[float, int]]
    """(when, last optimizer step that was committed and stayed so)."""
    rewards: list[tuple[float, float]]
    bars: list[Bar]
    faults: list[Fault]
    restarts: list[float] = []
    """Seconds of each full restart, from onset to back."""

    @property
    def length(self) -> float:
        return self.commits[-1][0] if self.commits else 0.0

    def step_at(self, t: float) -> int:
        place = bisect_right(self.commits, t, key=lambda commit: commit[0])
        return self.commits[place - 1][1] if place else 0

    def reached(self, step: int) -> float | None:
        """When it had that step for good."""
        return _reached(self.commits, step)

    @property
    def met(self) -> list[Fault]:
        """Those of its faults that hit it in the race: neither before its start, nor when all steps were done."""
        end = self.reached(self.steps)
        return [fault for fault in self.faults if fault[0] > 0 and (end is None or fault[0] <= end)]


def key_of(config: Mapping[str, Any]) -> str:
    decides = {name: config.get(name) for name in _DECIDES}
    return hashlib.sha256(msgspec.json.encode(decides, order="deterministic")).hexdigest()[:16]


def ghost_of(entries: Sequence[ev.Entry]) -> Ghost:
    """Raises ValueError for a run that never trained."""
    state, clock, marks = RunState(), Clock(), _Marks()
    for entry in entries:
        state.apply(entry)
        clock.apply(entry)
        marks.apply(entry, state, clock)
    if clock.began is None or not marks.commits:
        raise ValueError("a run without an optimizer step is no ghost")
    stages: list[Bar] = []
    recoveries = recoveries_of(entries)
    for one in recoveries:
        words = f"recovery of {one.role}" if one.mode != "full" else f"full restart because of {one.role}"
        until = one.until or state.t
        ends = [one.onset, one.detected, one.ready or until, until]
        for low, high, code in zip(ends, ends[1:], (DETECT, RESTART, RECONNECT), strict=False):
            if (high := clock.at(high)) > (low := clock.at(low)):
                stages.append((round(low, 2), round(high, 2), code, words))
    out = [(low, high) for low, high, _, _ in stages]
    work = [(round(low, 2), round(high, 2), WORK, f"step {step}") for begun, done, step in marks.worked()
            for low, high in without([(begun, done)], out) if low < high]
    return Ghost(key=key_of(state.config), mode=state.recovery_mode, seed=int(state.config.get("seed", 0)), steps=state.steps,
                 wall=state.wall, machine=state.machine, commits=marks.commits, rewards=marks.rewards, bars=sorted(work + stages),
                 faults=marks.faults, restarts=[round(one.total, 3) for one in recoveries if one.mode == "full" and one.total is not None])


class Clock:
    """The training clock of a run, from its log."""

    def __init__(self) -> None:
        self.began: float | None = None
        """Host time; None: it does not train yet."""
        self.pauses: list[list[float]] = []
        """[from, to]; to is infinite while it lasts."""

    def apply(self, entry: ev.Entry) -> None:
        match entry.event:
            case ev.TrajectoriesStarted() if self.began is None:
                self.began = entry.t
            case ev.Paused() if not self.pauses or self.pauses[-1][1] < float("inf"):
                self.pauses.append([entry.t, float("inf")])
            case ev.Resumed() | ev.RunEnded() if self.pauses and self.pauses[-1][1] == float("inf"):
                self.pauses[-1][1] = entry.t

    def at(self, t: float) -> float:
        """Of a host time, to the millisecond; 0 before the start."""
        if self.began is None:
            return 0.0
        paused = sum(max(0.0, min(t, high) - low) for low, high in self.pauses if high > self.began)
        return max(0.0, round(t - self.began - paused, 3))

    def back(self, at: float) -> float:
        """The host time at which the clock showed ``at``."""
        t = (self.began or 0.0) + at
        for low, high in self.pauses:
            if low < t < float("inf") and low > (self.began or 0.0):
                t += high - low
        return t


class _Marks:
    """What a ghost remembers of the steps of a run."""

    def __init__(self) -> None:
        self.commits: list[tuple[float, int]] = []
        self.rewards: list[tuple[float, float]] = []
        self.faults: list[Fault] = []
        """Since the start of the race."""

    def apply(self, entry: ev.Entry, state: RunState, clock: Clock) -> None:
        t = clock.at(entry.t)
        match entry.event:
            case ev.OptimizerStepCommitted(step=step) if step <= _KEPT:
                self.commits = [commit for commit in self.commits if commit[1] < step] + [(t, step)]
            case ev.StepMetrics(values=values) if "reward" in values and len(self.rewards) < _KEPT:
                self.rewards.append((t, round(values["reward"], 4)))
            case ev.FaultInjected(fault=fault, role=role) if (view := state.faults.faults.get(fault)) and not view.benign:
                done = view.hits[-1].t if view.hits else entry.t  # the word of it may come after the start of the race
                if not view.hidden and len(self.faults) < _KEPT and clock.began is not None and done >= clock.began:
                    self.faults.append((clock.at(done), view.kind, role, state.step + 1))

    def worked(self) -> list[tuple[float, float, int]]:
        begun = [0.0, *(t for t, _ in self.commits)]
        return [(low, high, step) for low, (high, step) in zip(begun, self.commits, strict=False)]


class Race:
    """The present run against its ghost; ``ghost`` is set by whoever has found one."""

    def __init__(self) -> None:
        self.ghost: Ghost | None = None
        self.clock, self._marks = Clock(), _Marks()

    def apply(self, entry: ev.Entry, state: RunState) -> None:
        """Takes the next entry in; ``state`` has it already."""
        self.clock.apply(entry)
        self._marks.apply(entry, state, self.clock)

    def lane(self, state: RunState, now: float) -> list[Bar]:
        """Its bars until ``now`` (seconds since the first entry), where they lie in this run; the last one goes on (-1)."""
        if self.ghost is None or self.clock.began is None:
            return []
        at = self.clock.at(state.t0 + now)

        def place(t: float) -> float:
            return round(self.clock.back(t) - state.t0, 2)

        return [(place(low), place(high) if high <= at else -1.0, code, words) for low, high, code, words in self.ghost.bars if low < at]

    def picture(self, state: RunState, now: float) -> dict[str, Any]:
        """Empty without a ghost. Curves are [training clock, value], those of the ghost until now."""
        ghost = self.ghost
        if ghost is None:
            return {}
        at = self.clock.at(state.t0 + now)
        steps, rewards = [commit for commit in ghost.commits if commit[0] <= at], [reward for reward in ghost.rewards if reward[0] <= at]
        return {
            "words": self.said(state, now), "label": self.label(state),
            "steps": [list(commit) for commit in thin(self._marks.commits)],
            "reward": [list(reward) for reward in thin(self._marks.rewards)],
            "ghost_steps": [list(commit) for commit in thin(steps)],
            "ghost_reward": [list(reward) for reward in thin(rewards)],
        }

    def said(self, state: RunState, now: float) -> str:
        """As `picture` says it in words, at ``now`` seconds after the first entry."""
        return self.words(state, self.clock.at(state.t0 + now))

    def words(self, state: RunState, at: float) -> str:
        """Who leads, at ``at`` on the training clock. Whoever is ahead of a ghost that was struck, and was not struck, has won nothing."""
        ghost = self.ghost
        if ghost is None:
            return ""
        if self.clock.began is None:
            return "The race begins with the first answers."
        mine, step = self._marks.commits, state.step
        goal = min(step, ghost.steps, _KEPT)
        if mine and (state.over or (ghost.length < at and step > ghost.step_at(at))) and (theirs := ghost.reached(goal)) is not None:
            took = next(t for t, done in mine if done >= goal)
            struck, yours = self._struck(ghost, theirs, took)
            if struck:
                return f"{goal} steps took you {seconds(took)}, and {seconds(theirs)} a ghost that {struck}; {yours}."
            return f"{goal} steps took you {seconds(took)}, the ghost {seconds(theirs)}."
        lead, (struck, yours) = step - ghost.step_at(at), self._struck(ghost, at, self._until(state, ghost, at))
        unit = "step" if abs(lead) == 1 else "steps"
        if struck:
            place = "level with" if not lead else f"{abs(lead)} {unit} {'ahead of' if lead > 0 else 'behind'}"
            return f"You are {place} a ghost that {struck} so far; {yours}."
        if not lead:
            return "You are level with the ghost."
        return f"You lead by {lead} {unit}." if lead > 0 else f"The ghost leads by {-lead} {unit}."

    def _until(self, state: RunState, ghost: Ghost, at: float) -> float:
        """``at``, or the end of the race for this run: when the last step of both was done."""
        goal = min(state.steps or ghost.steps, ghost.steps)
        return min(at, _reached(self._marks.commits, goal) or at)

    def _struck(self, ghost: Ghost, theirs_until: float, mine_until: float) -> tuple[str, str]:
        """What the ghost had in the race until then on its clock, and what this run has had of it until then on its own; empty where all of
        that hit this run as well. Of failures without an injected fault (`role.kill()`) nothing is said.
        """
        mine = Counter(_met([fault for fault in self._marks.faults if fault[0] <= mine_until]))
        theirs = Counter(_met([fault for fault in ghost.met if fault[0] <= theirs_until]))
        if not theirs - mine:
            return "", ""
        hit, others, count = (mine & theirs).total(), mine.total(), theirs.total()
        yours = f"you had {hit} of them" if hit else "none of them hit you" if count > 1 else "it did not hit you"
        if others and not hit:
            yours += f", but {others} other injected fault{'s' * (others > 1)} did"
        return f"had {count} fault{'s' * (count > 1)}", yours

    def label(self, state: RunState) -> str:
        """What the ghost is, and whether the race is a fair one."""
        ghost = self.ghost
        if ghost is None:
            return ""
        how = "every failure is answered by a full restart" if ghost.mode == "full" else f"recovery mode {ghost.mode}"
        return cut(f"Ghost: the same job, seed {ghost.seed}, {how}; recorded {self.where(state)}. {self._fairness(ghost)}", 400)

    def where(self, state: RunState) -> str:
        """The ghost's machine; one that describes itself in the same way counts as the same."""
        machine = self.ghost.machine if self.ghost else {}
        here = all(machine.get(name) == state.machine.get(name) for name in ("cores", "memory", "system"))
        return "on this machine" if here else f"on another machine ({machine.get('cores', '?')} cores)"

    def _fairness(self, ghost: Ghost) -> str:
        faults = ghost.met
        if not faults:
            return "It met no fault."
        named = ", ".join(f"{kind.replace('_', ' ')} {role} in step {step}" for _, kind, role, step in faults[:_SHOWN])
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        met = (Counter(_met(self._marks.faults)) & Counter(_met(faults))).total()
        yours = "They hit you too." if met == len(faults) else f"{met} of these {len(faults)} hit you too so far."
        return f"Its faults: {named}{more}. {yours}"


def _reached(commits: Sequence[tuple[float, int]], step: int) -> float | None:
    return next((t for t, done in commits if done >= step), None)


def _met(faults: Sequence[Fault]) -> list[tuple[str, str]]:
    """What makes a fault of one run and one of another the same: kind and role."""
    return [(kind, role) for _, kind, role, _ in faults]
