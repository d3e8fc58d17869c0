"""What the benchmarks of recovery share: a job with a recovery mode, faults one after the other, and figures from its log alone."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import robustrl
from robustrl.core import events as ev
from robustrl.core.accounting import spread
from robustrl.errors import WaitTimeout
from robustrl.faults import Fault
from robustrl.job import Job
from tests.benchmarks._report import Row

BACK = 300.0
"""Seconds in which a job must be whole again after a fault."""
STAGES = ("detect", "restart", "reconnect", "total")


@contextmanager
def job_with(mode: str, standbys: str, first_step: int = 2, **settings: Any) -> Iterator[Job]:
    """A job that has made its first steps; its thresholds are the lab's seconds; ``mode`` isolated or full, ``standbys`` warm or cold."""
    fixed = {"thresholds": "lab", "restarts": 10_000, "steps": 1_000_000, "evaluation_prompts": 0}
    # warm: one standby for trainer or rollout and one for the other roles
    recovery = {"recovery": {"mode": mode, "standbys": standbys}, "standbys": int(standbys == "warm")}
    with robustrl.launch(**fixed | recovery | settings) as job:
        job.wait(step=first_step, timeout=600)
        yield job


def whole(job: Job) -> bool:
    """Every role that was started is there, and standbys are ready."""
    return all(role.state == "healthy" and (role.phase == "ready" or not role.name.startswith("standby")) for role in job.roles.values())


def wait_until(job: Job, what: str, condition: Callable[[], bool], seconds: float = BACK) -> None:
    """Raises WaitTimeout naming ``what``, JobFailed if the job ends."""
    deadline = time.monotonic() + seconds
    while not condition():
        if job.follow(0.05):
            job.wait(step=job.config.steps)
        if time.monotonic() > deadline:
            states = ", ".join(f"{role.name} {role.state}/{role.phase}" for role in job.roles.values())
            raise WaitTimeout(f"{what}: not within {seconds:g} s ({states})")


def strike(job: Job, fault: Fault, role: str, when: Callable[[], bool] = lambda: True, dice: random.Random | None = None) -> int:
    """Injects the fault into ``role`` once ``when`` holds, at a random moment of the next half second; returns its number when the job is
    whole again and has committed another step.
    """
    wait_until(job, "the job to be whole before the fault", lambda: whole(job) and when())
    time.sleep((dice or random).uniform(0.0, 0.5))
    incarnation, step = job.roles[role].incarnation, job.step
    handle = job.inject(fault)
    handle.wait("injected", timeout=60)
    wait_until(job, f"{role} to be back after {fault}", lambda: job.roles[role].incarnation > incarnation and whole(job))
    wait_until(job, f"a step after {fault}", lambda: job.step > step)
    return handle.number


def figures(job: Job, faults: Sequence[int]) -> Row:
    """Seconds by stage, and what it cost, over the recoveries of these faults."""
    rows = [row for row in job.recoveries if set(row["faults"]) & set(faults) and row["outcome"] == "recovered"]
    if len(rows) < len(faults):
        raise WaitTimeout(f"{len(faults)} faults, and {len(rows)} complete recoveries in the log")
    found: Row = {"trials": len(rows)}
    for stage in STAGES:
        found[stage] = figure([row[stage] for row in rows])
    found["after_detection"] = figure([row["restart"] + row["reconnect"] for row in rows])
    found["tokens_meanwhile"] = statistics.median(row["tokens_meanwhile"] for row in rows)
    for name in ("journalled_tokens", "lost_tokens", "regenerated_tokens"):
        known = [row[name] for row in rows if row[name] is not None]
        found[name] = statistics.median(known) if known else None
    moved = [row for row in rows if row["moved"] and row["regenerated_tokens"] is not None]
    found["moved"] = min((row["moved"] for row in rows), default=0)
    found["regenerated_per_trajectory"] = max((row["regenerated_tokens"] / row["moved"] for row in moved), default=None)
    found["redone_s"] = statistics.median(row["redone"] for row in rows)
    found["steps_rolled_back"] = sum(e.event.old - e.event.to for e in job.events.of(ev.RolledBack))
    found["standbys_used"] = sum(bool(row["standby"]) for row in rows)
    return found


def figure(values: list[float]) -> dict[str, float]:
    measured = spread(values)
    return {"median": round(measured.median, 3), "p95": round(measured.p95, 3)}


def first_start(job: Job) -> float:
    """Seconds from the first role's start until every role of the beginning was healthy for the first time."""
    begun = job.events.of(ev.RoleStarted)[0].t
    first = [e for e in job.events.of(ev.RoleStateChanged) if e.event.new == "healthy" and e.event.incarnation == 1]
    return max(e.t for e in first) - begun
