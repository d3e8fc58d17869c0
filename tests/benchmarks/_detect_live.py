"""Real deaths and real stops in a live job (profile class): from the signal to the verdict, by the one clock of this machine.

The signal is sent from here, to the pid of the log, so that no way of ours is part of the delay. A trainer is stopped in its train phase
and a rollout while it decodes, which the role's own status page shows before and after the signal; else it goes on, and the next try is
made.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import robustrl
from robustrl.core import events as ev
from robustrl.core.roles import Phase
from robustrl.core.thresholds import Thresholds
from robustrl.job import Job
from robustrl.replay.quality import percentile
from robustrl.runtime import registry
from robustrl.runtime.role import actor_name
from robustrl.runtime.status_page import StatusReader
from tests.benchmarks._report import Row

_ROUND = ("agent_worker-0", "rollout-0", "task_runner", "agent_worker-1", "trainer-0", "request_manager", "agent_worker-2", "rollout-1",
          "rollout_manager", "agent_worker-3", "supervisor")  # fmt: skip
KILLS, STOPS = 26, 5
_PATIENCE = 120.0
LAB = Thresholds.lab()


@contextmanager
def watched_job() -> Iterator[Job]:
    """Rollouts decode nearly all the time, trainer steps have many micro-batches, and a role may be restarted as often as it takes."""
    with tempfile.TemporaryDirectory() as folder, robustrl.launch(
        name=f"bench-detect-{os.getpid()}", profile="class", run_dir=folder, steps=100_000, task="arithmetic_long", thresholds="lab",
        restarts=1000, rollouts=2, agent_workers=4, evaluation_prompts=0, checkpoint_every=0,
    ) as job:  # fmt: skip
        job.wait(step=2, timeout=300)
        yield job


def kills() -> Row:
    delays: dict[str, list[float]] = {}
    trained = 0
    with watched_job() as job:
        for i in range(KILLS):
            role = _ROUND[i % len(_ROUND)]
            _until("all are well", lambda: all(handle.state == "healthy" for handle in job.roles.values()))
            if role == "trainer-0":
                trained = _trained_on(job, trained)
            handle = job.roles[role]
            incarnation, began = handle.incarnation, time.monotonic()
            os.kill(handle.pid, signal.SIGKILL)
            delays.setdefault(role.partition("-")[0], []).append(_said(job, role, incarnation, began) - began)
            _until(f"{role} has its next life", lambda handle=handle, old=incarnation: handle.incarnation > old)
    every = [delay for kind in delays.values() for delay in kind]
    spread = {"median_s": percentile(every, 0.5), "p95_s": percentile(every, 0.95), "max_s": max(every)}
    by_kind = {kind: {"median_s": percentile(values, 0.5), "max_s": max(values)} for kind, values in delays.items()}
    return {"kills": len(every), **spread, "by_kind": by_kind, "delays_s": delays}


def _trained_on(job: Job, since: int) -> int:
    """The present step, at least two after ``since``: a second death in one optimizer step would restart everything."""
    _until("another step", lambda: job.step > since + 1)
    return int(job.step)


def stops() -> Row:
    """``late``: seconds from the signal to the verdict, less the threshold. ``early``: by how much the verdict came before the threshold,
    counted from the last sign of life: a rollout's last token may lie before the signal.
    """
    late: dict[str, list[float]] = {"trainer": [], "rollout": []}
    early, trained = 0.0, 0
    with watched_job() as job:
        for i in range(2 * STOPS):
            role, phases, limit = [
                ("trainer-0", (Phase.TRAIN,), LAB.trainer.no_compute),
                ("rollout-0", (Phase.DECODE,), LAB.rollout.no_tokens + LAB.rollout.heartbeat),
            ][i % 2]
            _until(f"{role} works", lambda role=role: job.roles[role].state == "healthy" and job.roles[role].progress > 0)
            if role == "trainer-0":
                trained = _trained_on(job, trained)
            handle = job.roles[role]
            began, alive = _stop_in(job, role, handle.incarnation, handle.pid, phases)
            said = _said(job, role, handle.incarnation, began)
            late[role.partition("-")[0]].append(said - began - limit)
            early = max(early, limit - (said - alive))
            _until(f"{role} has its next life", lambda handle=handle, old=handle.incarnation: handle.incarnation > old)
        failed = {e.event.role for e in job.events if isinstance(e.event, ev.Verdict) and e.event.kind == "failed"}
    every = [seconds for kind in late.values() for seconds in kind]
    others = sorted(failed - {"trainer-0", "rollout-0"})
    return {"stops": len(every), "late_s": late, "late_max_s": max(every), "early_max_s": early, "also_failed": others}


def _stop_in(job: Job, role: str, incarnation: int, pid: int, phases: tuple[Phase, ...]) -> tuple[float, float]:
    """When the role was stopped, in one of ``phases``, with work and after the first of its progress; and from when on it was silent: of a
    rollout, which is stopped as soon as a token is seen, the last look before that one.
    """
    page = StatusReader(registry.temp_dir(job.run) / "status" / actor_name(role, incarnation))
    deadline = time.monotonic() + _PATIENCE
    decodes, looked, progress = Phase.DECODE in phases, time.monotonic(), page.read().progress
    try:
        while time.monotonic() < deadline:
            now, before = time.monotonic(), page.read()
            news, progress, alive, looked = before.progress != progress, before.progress, looked, now
            if before.phase not in phases or not before.pending or not before.progress or (decodes and not news):
                time.sleep(0.002)
                continue
            began = time.monotonic()
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.02)
            after = page.read()
            if after.phase in phases and after.pending:
                return began, alive if decodes else began
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)
            looked, progress = time.monotonic(), page.read().progress
    finally:
        page.close()
    raise TimeoutError(f"{role} was in none of {', '.join(phases)} with work within {_PATIENCE:g} s")


def _said(job: Job, role: str, incarnation: int, after: float) -> float:
    """Host time at which the log holds the verdict; for the supervisor, which judges itself in its next life only, its recorded exit."""

    def found() -> float | None:
        for entry in reversed(job.events):
            if entry.t < after - 0.5:
                return None
            event: Any = entry.event
            said = isinstance(event, ev.ProcessExited) if role == "supervisor" else isinstance(event, ev.Verdict) and event.kind == "failed"
            if said and (event.role, event.incarnation) == (role, incarnation):
                return float(entry.t)
        return None

    return float(_until(f"the verdict on {role}", found))


def _until(what: str, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if (value := condition()) not in (None, False):
            return value
        time.sleep(0.01)
    raise TimeoutError(f"{what}: not within {_PATIENCE:g} s")
