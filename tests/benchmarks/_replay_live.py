"""Predicted against lived: one job (profile class), first recorded under patient thresholds, then lived through settings drawn at random.

The recording holds stops (SIGSTOP) of the trainer in its train phase and of a rollout while it decodes. Of it each setting's verdict is
predicted; then the setting is put in force, the same role stopped in the same phase, and the live verdict awaited. Compared is the time
from the last sign of life that the rules count from to the verdict. The noise of a trial is what this machine adds: the latest waking of
a thread of this process that does nothing but sleep for 10 ms at a time, and the longest way of a sample, and of a heartbeat, from its
process into the log.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import robustrl
from robustrl.core import events as ev
from robustrl.core.thresholds import SAMPLING, Thresholds
from robustrl.faults import Hang
from robustrl.job import Job
from robustrl.replay.replaying import replay
from robustrl.replay.run import Run
from tests.benchmarks._report import Row

_PATIENCE = 120.0
_VICTIMS = ("trainer-0", "rollout-0")
_PHASES = {"trainer-0": "train", "rollout-0": "decode"}
LONGEST = 8.0
"""Seconds of the recorded stops: no setting that is drawn takes longer."""


def draw(count: int, seed: int = 0) -> list[dict[str, float]]:
    """Settings that lead to a verdict within `LONGEST` seconds."""
    dice = random.Random(seed)
    found = []
    for _ in range(count):
        tokens = dice.uniform(0.8, 4.0)
        found.append({
            "trainer.no_compute": dice.uniform(0.8, 6.0), "trainer.silent": 9.0, "rollout.no_tokens": tokens,
            "rollout.heartbeat": dice.uniform(0.4, min(tokens, 3.0)), "rollout.wedged": 9.0, "job.hysteresis": 0.3,
        })  # fmt: skip
    return found


class Noise:
    """The latest waking since `begin`, in seconds."""

    def __init__(self) -> None:
        self._latest, self._over = 0.0, threading.Event()
        self.all: list[float] = []
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self) -> None:
        self._latest = 0.0

    @property
    def latest(self) -> float:
        return self._latest

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            due = time.monotonic() + 0.01
            time.sleep(0.01)
            late = time.monotonic() - due
            self.all.append(late)
            self._latest = max(self._latest, late)


def cross_check(settings: Sequence[dict[str, float]], name: str) -> Row:
    """Setting i stops the trainer if i is even, else the rollout."""
    noise, lived = Noise(), []
    with tempfile.TemporaryDirectory() as folder, robustrl.launch(
        name=f"{name}-{os.getpid()}", profile="class", run_dir=folder, steps=100_000, task="arithmetic_long", thresholds="paper",
        restarts=1000, rollouts=2, agent_workers=2, evaluation_prompts=0, checkpoint_every=0, prompts_per_step=4, samples_per_prompt=4,
    ) as job:  # fmt: skip
        try:
            job.wait(step=2, timeout=300)
            low = job.events[-1].t
            for role in _VICTIMS:
                job.inject(Hang(role, phase=_PHASES[role], seconds=LONGEST)).wait("over", timeout=_PATIENCE)
                job.wait(step=job.step + 1, timeout=_PATIENCE)
            recorded = Run.of(list(job.events), "recorded")
            recorded = recorded.excerpt(low - recorded.begin)
            for place, changes in enumerate(settings):
                lived.append(_live(job, _VICTIMS[place % 2], changes, noise))
            replayed = robustrl.replay(Run.of(list(job.events)))
        finally:
            noise.stop()
    trials = [{**trial, "predicted_s": predicted(recorded, trial["role"], changes)} for trial, changes in zip(lived, settings, strict=True)]
    return summary(trials, sorted(noise.all), replayed.as_live)


def predicted(recorded: Run, role: str, changes: dict[str, float]) -> float:
    """Seconds from the last sign of life to the verdict."""
    said = replay(recorded, Thresholds.lab().updated(changes)).verdicts
    verdict = next(verdict for verdict in said if verdict.kind == "failed" and verdict.role == role)
    return verdict.seen - _last_sign(said, verdict)


def _last_sign(said: Sequence[ev.Verdict], failed: ev.Verdict) -> float:
    """From when on the rules counted: where a suspicion came first, its onset. That of the verdict is later if the loop turned on for a
    while without a token.
    """
    life = failed.role, failed.incarnation
    suspicions = [v.onset for v in said if (v.role, v.incarnation) == life and v.kind == "suspect" and v.seen <= failed.seen]
    return suspicions[-1] if suspicions else failed.onset


def summary(trials: list[dict[str, Any]], wakings: list[float], as_live: bool) -> Row:
    """``excess_s``: by how much each difference exceeds one sample plus the noise of its own trial."""
    differences = [trial["lived_s"] - trial["predicted_s"] for trial in trials]
    excess = [abs(difference) - SAMPLING - trial["noise_s"] for difference, trial in zip(differences, trials, strict=True)]
    return {
        "settings": len(trials), "sample_s": SAMPLING, "noise_median_s": wakings[len(wakings) // 2] if wakings else 0.0,
        "noise_p99_s": wakings[int(0.99 * (len(wakings) - 1))] if wakings else 0.0, "noise_max_s": wakings[-1] if wakings else 0.0,
        "difference_max_s": max(map(abs, differences)), "within": sum(value <= 0 for value in excess), "excess_max_s": max(excess),
        "replayed_as_live": as_live, "trials": trials,
    }  # fmt: skip


def _live(job: Job, role: str, changes: dict[str, float], noise: Noise) -> dict[str, Any]:
    job.thresholds.update(dict(Thresholds.lab().updated(changes).items()))
    handle = job.roles[role]
    incarnation = handle.incarnation
    noise.begin()
    fault = job.inject(Hang(role, phase=_PHASES[role]))
    fault.wait("detected", timeout=_PATIENCE)  # which a report may do, that it is slow
    until, verdict = time.monotonic() + _PATIENCE, None
    while verdict is None:
        assert time.monotonic() < until, f"{role}: no failure was said within {_PATIENCE:g} s of {changes}"
        time.sleep(0.001)
        late = noise.latest
        said = [entry.event for entry in job.events if isinstance(entry.event, ev.Verdict)]
        verdict = next((v for v in reversed(said) if v.kind == "failed" and (v.role, v.incarnation) == (role, incarnation)), None)
    fault.wait("confirmed", timeout=_PATIENCE)
    job.wait(step=job.step + 2, timeout=_PATIENCE)  # two failures in one step would restart everything
    began = _last_sign(said, verdict)
    lived, due = verdict.seen - began, verdict.due - began
    ways = {kind: max((entry.t - entry.at for entry in job.events if began <= entry.t <= verdict.seen and isinstance(entry.event, kind)
                       and entry.event.role == role), default=0.0) for kind in (ev.RoleSample, ev.HeartbeatSent)}  # fmt: skip
    return {"role": role, "rule": verdict.rule, "lived_s": lived, "due_s": due, "noise_s": late + sum(ways.values())}
