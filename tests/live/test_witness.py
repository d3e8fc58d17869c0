"""A witnessed job whose roles are killed: its log and that of the witness tell the same story, and one altered word is found out."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from robustrl import cli
from robustrl.core import events as ev
from robustrl.core.testimony import Died, Ended, Weights, cross_check
from robustrl.job import Job
from robustrl.runtime.witness import read_testimony
from tests.live.conftest import wait_for


def test_two_logs_of_one_job(launch: Callable[..., Job]) -> None:
    job = launch(steps=100_000, evaluation_prompts=0, agent_workers=1, witness=True)
    job.wait(step=2, timeout=240)
    for role in ("trainer-0", "rollout-0"):
        job.roles[role].kill()
        wait_for(f"the next life of {role}", lambda role=role: job.roles[role].incarnation == 2 and job.roles[role].state == "healthy", 120)
    job.wait(step=job.step + 2, timeout=120)
    assert [(row["role"], row["outcome"]) for row in job.recoveries] == [("trainer-0", "recovered"), ("rollout-0", "recovered")]
    assert 0 < job.ettr().ettr_strict < 1
    job.stop()
    lines = wait_for("the end of the witness's log", lambda: _complete(job), 40)
    assert cross_check(job.events, lines) == [] and cli.main(["audit", str(job.run_dir), "--witness"]) == 0
    versions = {line.sight.version for line in lines if isinstance(line.sight, Weights)}
    assert len(versions) >= 3 and {line.sight.role for line in lines if isinstance(line.sight, Died)} >= set(job.roles)
    hidden = [entry for entry in job.events if not (isinstance(entry.event, ev.ProcessExited) and entry.event.role == "trainer-0")]
    assert any("the log does not say so" in finding.text for finding in cross_check(hidden, lines))
    forged = [
        msgspec.structs.replace(entry, event=msgspec.structs.replace(entry.event, digest="f" * 32))
        if isinstance(entry.event, ev.OptimizerStepCommitted) else entry
        for entry in job.events
    ]  # fmt: skip
    assert any("has digest" in finding.text for finding in cross_check(forged, lines))


def _complete(job: Job) -> list | None:
    lines = read_testimony(job.run_dir)
    return lines if isinstance(lines[-1].sight, Ended) else None
