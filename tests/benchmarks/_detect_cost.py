"""What detection costs a live job (profile class): its processes' CPU time, and the step time with and without it, in turns.

Without: the node agent is stopped, so that nothing is sampled and the detector has nothing to judge, and an actor that does nothing goes on
in its place (in the other turns that one is stopped): what any actor of Ray costs is no cost of detection. The thresholds are those of the
paper, except that an agent may be silent for hours. ``cpu_share``: what the agent uses beyond the idle actor, and the supervisor beyond
itself without samples, for it leases weights and follows the rest of the log all the same. ``whole_share``: both beyond idle actors, those
duties included. ``step_ratio``: the median over pairs of neighbouring blocks, one with and one without.
"""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict

import robustrl
from robustrl.config import GRPOConfig
from robustrl.core import events as ev
from robustrl.job import Job
from robustrl.runtime.processes import cpu_seconds
from tests.benchmarks._idle_actor import idle_actor
from tests.benchmarks._report import Row

_BLOCKS, _MOST, _STEPS = 120, 240, 6
"""Blocks of steps: so many, and more of them as long as the interval is wider than `_WIDTH`; and steps in each, of which the first does
not count. With, without, without, with, and so on: what drifts on the machine meets both alike."""
_WIDTH = 0.04
_DRAWS = 2000
_LEARNS_NOTHING = 1e-12
"""The policy stays as it is, and with it the usual length of an answer: one that learned went from 1,100 tokens a step to 2,200 on average
within a minute, and the time of its steps followed them.
"""


def cost() -> Row:
    with tempfile.TemporaryDirectory() as folder, robustrl.launch(
        name=f"bench-cost-{os.getpid()}", profile="class", run_dir=folder, steps=100_000, evaluation_prompts=0, checkpoint_every=0,
        grpo=GRPOConfig(learning_rate=_LEARNS_NOTHING),
    ) as job:  # fmt: skip
        job.wait(step=5, timeout=300)
        job.thresholds.node.silent = "10h"
        agent, supervisor = job.roles["node_agent-0"].pid, job.roles["supervisor"].pid
        steps: dict[bool, list[list[float]]] = {True: [], False: []}
        used: dict[tuple[str, bool], float] = defaultdict(float)
        seconds: dict[bool, float] = defaultdict(float)
        low, high = 0.0, math.inf
        with idle_actor(job) as idler:
            pids = {"agent": agent, "supervisor": supervisor, "idler": idler}
            try:
                for block in range(_MOST):
                    on = block % 4 in (0, 3)
                    for pid, runs in ((agent, on), (idler, not on)):
                        os.kill(pid, signal.SIGCONT if runs else signal.SIGSTOP)
                    before, began = {name: cpu_seconds(pid) for name, pid in pids.items()}, time.monotonic()
                    steps[on].append(_step_times(job))
                    for name, pid in pids.items():
                        used[name, on] += cpu_seconds(pid) - before[name]
                    seconds[on] += time.monotonic() - began
                    if block % 2 and block + 1 >= _BLOCKS:
                        low, high = bootstrap(pair_ratios(steps[True], steps[False]))
                        if high - low <= _WIDTH:
                            break
            finally:
                for pid in (agent, idler):
                    os.kill(pid, signal.SIGCONT)
    with_it, without = sum(steps[True], []), sum(steps[False], [])
    agent_share, with_samples = used["agent", True] / seconds[True], used["supervisor", True] / seconds[True]
    without_samples, idle = used["supervisor", False] / seconds[False], used["idler", False] / seconds[False]
    return {
        "steps": [len(with_it), len(without)], "step_s": [statistics.median(with_it), statistics.median(without)],
        "step_ratio": statistics.median(pair_ratios(steps[True], steps[False])), "step_ratio_interval": [low, high],
        "step_ratio_width": high - low, "ratio_of_medians": statistics.median(with_it) / statistics.median(without),
        "agent_share": agent_share, "supervisor_share": with_samples,
        "without_samples_share": without_samples, "idle_share": idle, "whole_share": agent_share + with_samples - 2 * idle,
        "cpu_share": agent_share - idle + with_samples - without_samples,
    }  # fmt: skip


def _step_times(job: Job) -> list[float]:
    """Seconds between commits over the next steps, the first one left out."""
    job.wait(step=job.step + 1 + _STEPS, timeout=300)
    commits = [entry.t for entry in job.events if isinstance(entry.event, ev.OptimizerStepCommitted)][-_STEPS:]
    return [after - before for before, after in zip(commits, commits[1:], strict=False)]


def pair_ratios(a: list[list[float]], b: list[list[float]]) -> list[float]:
    """Of each block of ``a`` and the one of ``b`` that was measured beside it: what a step took over what one took there."""
    return [statistics.mean(mine) / statistics.mean(other) for mine, other in zip(a, b, strict=True)]


def bootstrap(ratios: list[float], seed: int = 0) -> tuple[float, float]:
    """95% interval of their median."""
    dice = random.Random(seed)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(_DRAWS))
    return medians[int(0.025 * _DRAWS)], medians[int(0.975 * _DRAWS)]
