"""How fast is each role back? SIGKILL and SIGSTOP of each, isolated and full, cold and warm; all figures from the job's own log.

Stages as in core/recoveries.py. ``after_detection`` is restart plus reconnect. Rows of rollouts use the long task, with at least eight
unfinished trajectories at the victim. In full rows ``slowest_alone_s`` is what a full restart would take if each role had a machine of its
own: the slowest of the isolated cold rows measured so far. On a quiet reference machine a row takes 3 to 10 minutes, all of them about an
hour and a half.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

from tests.benchmarks._faulty import figure
from tests.benchmarks._report import Bench, Row

_KILLS, _STOPS, _FULL = 10, 3, 3
_MANAGEMENT = ("supervisor", "task_runner", "rollout_manager", "request_manager", "agent_worker-0")
_VICTIM = {"trainer": "trainer-0", "trainer2": "trainer-1", "rollout": "rollout-0", "node": "trainer-0"}
_UNFINISHED = 8
_TURNS = (True, False, False, True)
"""Jobs with and without the journal, in this order."""
_ROWS = [
    *(f"isolated-{standbys}-{victim}" for victim in ("trainer", "rollout", "trainer2") for standbys in ("cold", "warm")),
    *(f"full-{standbys}-{victim}" for victim in ("trainer", "rollout") for standbys in ("cold", "warm")),
    "isolated-cold-node",
    "full-cold-node",
    *(f"management-{standbys}" for standbys in ("cold", "warm")),
    "cost",
]


class _Recovery(Bench):
    def __init__(self) -> None:
        super().__init__("recovery", _ROWS, self._measure)

    def _measure(self, row: str) -> Row:
        if row == "cost":
            return cost()
        if row.startswith("management-"):
            return management(row.removeprefix("management-"))
        mode, standbys, victim = row.split("-")
        full = mode == "full"
        kills, stops = (_FULL, 0) if full else (_KILLS, _STOPS)
        found = strikes(mode, standbys, _VICTIM[victim], kills=kills, stops=stops, node=victim == "node", **settings(victim))
        if full:
            cold = [self.done[name] for name in ("isolated-cold-trainer", "isolated-cold-rollout") if name in self.done]
            alone = [row["kill"]["after_detection"]["median"] for row in cold]
            found["slowest_alone_s"] = max(alone, default=None)
        return found


def settings(victim: str) -> dict[str, Any]:
    long = {"task": "arithmetic_long", "prompts_per_step": 8, "samples_per_prompt": 4}
    return {"rollout": long, "trainer2": {"trainer_ranks": 2}}.get(victim, {})


def strikes(mode: str, standbys: str, role: str, *, kills: int, stops: int, node: bool = False, **settings: Any) -> Row:
    from robustrl.core import events as ev
    from robustrl.faults import Hang, Kill, NodeLoss
    from tests.benchmarks._faulty import figures, first_start, job_with, strike

    dice = random.Random(f"{mode}{standbys}{role}")
    with job_with(mode, standbys, name="bench-rec", **settings) as job:

        def enough_to_lose() -> bool:
            return not role.startswith("rollout") or job.roles[role].pending >= _UNFINISHED

        ended = NodeLoss(role) if node else Kill(role)
        killed = [strike(job, ended, role, enough_to_lose, dice) for _ in range(kills)]
        stopped = [strike(job, Hang(role), role, enough_to_lose, dice) for _ in range(0 if node else stops)]
        found: Row = {"mode": mode, "standbys": standbys, "role": role, "kill": figures(job, killed)}
        if stopped:
            found["stop"] = figures(job, stopped)
        if mode == "full":
            found["own_start_s"] = round(first_start(job), 3)
            found["start_over_own"] = found["kill"]["after_detection"]["median"] / found["own_start_s"]
        if node:
            sources = [e.event.source for e in job.events.of(ev.SnapshotRestored)]
            found["restored_from_peer"] = min(sources.count("peer") / len(killed), 1.0)
    return found


def management(standbys: str, kills: int = 5, stops: int = 1, **settings: Any) -> Row:
    """All of them in one job, isolated; figures by role."""
    from robustrl.faults import Hang, Kill
    from tests.benchmarks._faulty import figures, job_with, strike

    dice, found = random.Random(f"management{standbys}"), Row(mode="isolated", standbys=standbys)
    with job_with("isolated", standbys, name="bench-rec", **settings) as job:
        for role in _MANAGEMENT:
            for name, fault, count in (("kill", Kill(role), kills), ("stop", Hang(role), stops)):
                struck = [strike(job, fault, role, dice=dice) for _ in range(count)]
                found.setdefault(role, {})[name] = figures(job, struck)
    return found


def cost() -> Row:
    """What safety costs while nothing fails: for how long a snapshot keeps the learner on the demo, and what the journal takes of the
    tokens that the rollouts make while they have work, by jobs with and without it in turn.
    """
    import robustrl
    from robustrl.core import events as ev

    with robustrl.launch(name="bench-cost", steps=30, evaluation_prompts=0) as job:
        job.wait(timeout=900)
        steps = [e.event for e in job.events.of(ev.StepMetrics)][5:]
        tokens = job.summary()["tokens_per_second"]
    seconds = [sum(step.phase_seconds.values()) for step in steps]
    blocked = [step.values["snapshot_blocked"] for step in steps]
    rates: dict[bool, list[float]] = {True: [], False: []}
    for journal in _TURNS:
        rates[journal].append(decode_rate(journal))
    return {
        "snapshot_share": statistics.median(b / s for b, s in zip(blocked, seconds, strict=True)),
        "snapshot_blocked_s": figure(blocked),
        "step_s": statistics.median(seconds),
        "tokens_per_second": tokens,
        "journal_on": rates[True],
        "journal_off": rates[False],
        "journal_ratio": statistics.median(rates[True]) / statistics.median(rates[False]),
    }


def decode_rate(journal: bool, steps: int = 12, **settings: Any) -> float:
    """Tokens per second of a rollout that decodes: between two looks of its node's agent at it in which it does, after the first steps."""
    import robustrl
    from robustrl.core import events as ev

    long = {"task": "arithmetic_long", "task_options": {"pace": 0.0}, "prompts_per_step": 4, "evaluation_prompts": 0}
    with robustrl.launch(name="bench-journal", steps=steps, journal_tokens=journal, **long | settings) as job:
        job.wait(timeout=900)
        begun = job.events.of(ev.OptimizerStepCommitted)[3].t
        looks = [e for e in job.events.of(ev.RoleSample) if e.event.role.startswith("rollout-") and e.t > begun]
    tokens, seconds = 0, 0.0
    for role in {e.event.role for e in looks}:
        mine = [e for e in looks if e.event.role == role]
        for one, next_ in zip(mine, mine[1:], strict=False):
            if one.event.phase == next_.event.phase == "decode":
                tokens, seconds = tokens + next_.event.progress - one.event.progress, seconds + next_.t - one.t
    return tokens / seconds


def judge(bench: Bench) -> None:
    def after(row: Row) -> float:
        return row["kill"]["after_detection"]["median"]

    for victim, seconds, cold, warm in (("rollout", 1.5, 15, 4), ("trainer", 2.0, 10, 3)):
        mine = f"isolated-warm-{victim}"
        bench.target(f"{victim}, warm: back after detection, median (s)", "<=", seconds, [mine], lambda rows: after(rows[0]))
        for standbys, factor in (("cold", cold), ("warm", warm)):
            name = f"{victim}, warm: faster than a full {standbys} restart"
            bench.target(name, ">=", factor, [mine, f"full-{standbys}-{victim}"], lambda rows: after(rows[1]) / after(rows[0]))
    for standbys, role in product(("cold", "warm"), _MANAGEMENT):
        row, name = [f"management-{standbys}"], f"{role}, {standbys}"
        bench.target(f"{name}: back after detection, median (s)", "<=", 2.0, row, lambda rows, role=role: after(rows[0][role]))
        bench.target(f"{name}: steps lost", "<=", 0, row, lambda rows, role=role: rows[0][role]["kill"]["steps_rolled_back"])
    for standbys in ("cold", "warm"):
        row = [f"isolated-{standbys}-rollout"]
        name = f"rollout, {standbys}: tokens generated again, per trajectory, largest"
        bench.target(name, "<=", 32, row, lambda rows: rows[0]["kill"]["regenerated_per_trajectory"] or 0.0)
        name = f"rollout, {standbys}: unfinished trajectories at the victim, least"
        bench.target(name, ">=", _UNFINISHED, row, lambda rows: rows[0]["kill"]["moved"])
    for victim in ("trainer", "rollout"):
        row = [f"full-cold-{victim}"]
        bench.target(f"full restart ({victim}) over the job's own first start", "<=", 1.1, row, lambda rows: rows[0]["start_over_own"])
    node = ["isolated-cold-node"]
    bench.target("node losses restored from the peer, share", ">=", 1.0, node, lambda rows: rows[0]["restored_from_peer"])
    name = "share of a step for which its snapshot keeps the trainer"
    bench.target(name, "<=", 0.02, ["cost"], lambda rows: rows[0]["snapshot_share"])
    bench.target("tokens/s with the journal over those without", ">=", 0.97, ["cost"], lambda rows: rows[0]["journal_ratio"])


def main(argv: Sequence[str]) -> int:
    return _Recovery().run(argv, judge)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
