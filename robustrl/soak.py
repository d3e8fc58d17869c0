"""`robustrl soak`: a job is hit by one random fault after the other, and in the end everything must be as if nothing had happened.

Kind, role, moment and doubles come from the seed, so a failing soak is repeated with one command. After each fault the job must be whole
again and commit two more steps. At the end: the audit, the witness, every fault done, and nothing left or grown (processes, memory,
descriptors, shared memory). What went wrong is a `SoakFailed` that names the fault and the command.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .errors import RobustRLError
from .faults import CleanExit, Fault, Hang, Kill, RaiseException, Wedge
from .job import Job

_BACK = 240.0
"""Seconds in which the job must be whole again."""
_DOUBLE = 0.2
"""Share of faults that come while the job still recovers from the one before."""
_KINDS: tuple[type[Fault], ...] = (Kill, Kill, Hang, Wedge, RaiseException, CleanExit)
_TARGETS = ("trainer", "rollout", "rollout", "state_keeper", "request_manager", "rollout_manager", "task_runner", "agent_worker",
            "supervisor", "node_agent")  # fmt: skip
_WATCHERS = ("supervisor", "node_agent")
"""Who watches the others: what can be seen of them is that they die or hang."""
_GONE_WITHIN = 15.0
_WARM_UP = 2
"""Faults before the first measure of what must not grow."""
_GROWTH = 1.25
_SETTINGS: dict[str, Any] = {"profile": "class", "steps": 1_000_000, "evaluation_prompts": 0, "thresholds": "lab", "restarts": 1_000_000,
                             "prompts_per_step": 8, "witness": True}  # fmt: skip


class SoakFailed(RobustRLError):
    pass


class Strike(NamedTuple):
    fault: Fault
    pause: float
    """Seconds between the moment that it may come and its coming."""
    double: bool
    """It does not wait until the one before is over."""


def plan(seed: int, count: int) -> list[Strike]:
    """The same for the same seed, and the first n of a longer plan."""
    dice = random.Random(seed)
    strikes = []
    for number in range(count):
        kind, target = dice.choice(_KINDS), dice.choice(_TARGETS)
        if target in _WATCHERS and kind is not Hang:
            kind = Kill
        strikes.append(Strike(kind(target), dice.uniform(0.0, 2.0), number > 0 and dice.random() < _DOUBLE))
    return strikes


def soak(faults: int, seed: int, run_dir: str = "runs", say: Callable[[str], None] = lambda text: print(text, file=sys.stderr)) -> str:
    """One line that sums up. Raises SoakFailed."""
    from .launching import launch

    command = f"robustrl soak --faults {faults} --seed {seed}"
    job = launch(name=f"soak-{seed}", run_dir=run_dir, seed=seed, **_SETTINGS)
    try:
        _strike_all(job, plan(seed, faults), say)
    except RobustRLError as error:
        raise SoakFailed(f"{error}\n  run {job.run_dir}, again with: {command}") from error
    finally:
        job.stop()
    if wrong := [*_left(job.run), *_judged(job.run_dir)]:
        raise SoakFailed("\n  ".join([*wrong, f"run {job.run_dir}, again with: {command}"]))
    account = job.ettr()
    return (
        f"{job.run_dir}: 0 of {faults} faults left a trace: {job.step} steps, each committed once, {account.recovered} recoveries, "
        f"audit and witness agree; with 95% confidence fewer than {300 / faults:.1f}% of such faults would"
    )


def _strike_all(job: Job, strikes: list[Strike], say: Callable[[str], None]) -> None:
    job.wait(step=2, timeout=300)
    before: dict[str, int] = {}
    for number, strike in enumerate(strikes, 1):
        if not strike.double:
            _wait(job, f"the job to be whole before fault {number}", lambda: _whole(job))
        if number == min(_WARM_UP, len(strikes)):
            before = _held(job)
        time.sleep(strike.pause)
        handle = job.inject(strike.fault)
        handle.wait("injected", timeout=_BACK)
        hit = handle.view.hits[-1]
        double = " (double)" if strike.double else ""
        say(f"fault {number}/{len(strikes)}: {hit.role} {handle.view.kind} in phase {hit.phase or '-'}{double}")
        if number == len(strikes) or not strikes[number].double:
            _wait(job, f"{hit.role} to be back after fault {number}", lambda hit=hit: _replaced(job, hit.role, hit.incarnation))  # type: ignore[misc]
            _wait(job, f"the job to be whole after fault {number}", lambda: _whole(job))
            step = job.step
            _wait(job, f"two more steps after fault {number}", lambda step=step: job.step >= step + 2)  # type: ignore[misc]
    grown = [f"{name} grew from {before[name]} to {now}" for name, now in _held(job).items() if now > _GROWTH * before[name] + 16]
    if grown:
        raise SoakFailed("; ".join(grown))


def _replaced(job: Job, role: str, incarnation: int) -> bool:
    return job.roles[role].incarnation > incarnation


def _whole(job: Job) -> bool:
    return all(role.state == "healthy" for role in job.roles.values())


def _wait(job: Job, what: str, condition: Callable[[], bool]) -> None:
    done = job.wait_until(lambda: condition() or job.over, _BACK)
    if job.over:
        raise SoakFailed(f"{what}: {job.status} ({job.reason})")
    if not done:
        states = ", ".join(f"{role.name}.{role.incarnation} {role.state}" for role in job.roles.values() if role.state != "healthy")
        raise SoakFailed(f"{what}: not within {_BACK:g} s ({states or 'all healthy'})")


def _held(job: Job) -> dict[str, int]:
    """What the job holds on this machine now: must not grow with the number of faults."""
    from .runtime import processes, registry

    marked = processes.find_marked(job.run)
    shm = sum(path.stat().st_size for path in registry.shm_dir(job.run).rglob("*") if path.is_file())
    descriptors = len(os.listdir(f"/proc/{job._entry.host_pid}/fd"))
    return {"processes": len(marked), "memory (MiB)": processes.pss_bytes(job.run) >> 20, "shared memory (MiB)": shm >> 20,
            "descriptors of the host": descriptors}  # fmt: skip


def _left(run: str) -> list[str]:
    """What is there of the run although it has ended."""
    from .runtime import processes, registry

    deadline = time.monotonic() + _GONE_WITHIN
    while True:
        left = [f"left: process {process.pid}" for process in processes.find_marked(run)]
        left += [f"left: {path}" for path in (registry.temp_dir(run), registry.shm_dir(run)) if path.exists()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _judged(run_dir: Path) -> list[str]:
    from .core.audit import audit
    from .core.testimony import Ended, cross_check
    from .runtime.event_log import read_log
    from .runtime.witness import read_testimony

    entries = read_log(run_dir / "events.jsonl")
    deadline = time.monotonic() + 2 * _GONE_WITHIN
    while not isinstance((lines := read_testimony(run_dir))[-1].sight, Ended) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [str(finding) for finding in [*audit(entries), *cross_check(entries, lines)]]
