"""Faults in a running job: each hits the very life, phase and thread that was meant, is seen by the right rule, and followed to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import robustrl
from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.core.fault_book import FaultView
from robustrl.errors import ConfigError, RobustRLError
from robustrl.faults import (
    CleanExit,
    CorruptSnapshot,
    CorruptWeights,
    EveryNSteps,
    Fault,
    FirstCompile,
    Freeze,
    FullDisk,
    Hang,
    IdleRollout,
    Kill,
    LongAdvantage,
    LongCheckpoint,
    LongFirstToken,
    MemoryExhaustion,
    RaiseException,
    Slow,
    Surprise,
    Wedge,
)
from robustrl.job import Job
from tests.live.conftest import assert_clean, wait_for

pytestmark = pytest.mark.timeout(300)
_LATE = 3.0
"""Seconds after its limit in which a verdict must have come, on a busy machine too; `bench detect` measures how soon it does."""
_SETTINGS = {
    "profile": "class",
    "steps": 100_000,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "agent_workers": 1,
    "evaluation_prompts": 0,
    "thresholds": "lab",
    "restarts": 50,
    "task": "arithmetic_long",
    "rollouts": 2,
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """The long task: rollouts are decoding nearly all the time."""
    with robustrl.launch(name="faulted", run_dir=str(tmp_path_factory.mktemp("runs")), **_SETTINGS) as job:
        job.wait(step=2, timeout=280)
        yield job
    assert_clean(job.run)


def condemned(job: Job, since: int) -> set[str]:
    """Roles with a failed verdict after entry ``since``."""
    return {e.event.role for e in job.events[since:] if isinstance(e.event, ev.Verdict) and e.event.kind == "failed"}


def followed(job: Job, fault: Fault) -> FaultView:
    """The fault, once it is confirmed and the job has made a step since; nobody but its target was condemned."""
    before = len(job.events)
    view = job.inject(fault).wait("confirmed", timeout=150).view
    job.wait(step=job.step + 1, timeout=120)
    assert condemned(job, before) <= {hit.role for hit in view.hits}
    return view


# -- a process that ends is seen at once -

_ENDS = [
    (Kill("rollout", phase="decode"), "exited"),
    (Kill("trainer", phase="train"), "exited"),
    (Kill("state_keeper-0"), "exited"),
    (Kill("request_manager"), "exited"),
    (Kill("rollout_manager", phase="running"), "exited"),
    (Kill("task_runner"), "exited"),
    (Kill("agent_worker-0"), "exited"),
    (Kill("supervisor"), "exit seen by the host"),
    (Kill("node_agent-0"), "exited"),
    (CleanExit("rollout"), "exited"),
    (RaiseException("trainer", phase="optimizer", text="a fault in the optimizer"), "exception"),
    (RaiseException("rollout_manager"), "exception"),
    (MemoryExhaustion("rollout"), "exception"),
]


@pytest.mark.parametrize("fault, rule", _ENDS, ids=[f"{fault.name}-{fault.target}" for fault, _ in _ENDS])
def test_the_end_of_a_process(job: Job, fault: Fault, rule: str) -> None:
    ends(job, fault, rule)


def ends(job: Job, fault: Fault, rule: str) -> None:
    view = followed(job, fault)
    assert view.detected is not None and view.detected.rule == rule
    assert view.detected.delay <= _LATE
    if fault.phase:
        assert {hit.phase for hit in view.hits} == {fault.phase}


# -- one that is silent is seen by its limit, and not before -

_SILENT = [
    (Hang("trainer", phase="train"), "no_compute", 3.0),
    (Hang("rollout", phase="decode"), "heartbeat", 6.0),
    (Wedge("trainer", phase="train"), "no_marks", 10.0),
    (Wedge("rollout", phase="decode"), "heartbeat", 6.0),
    (Wedge("rollout_manager"), "silent", 5.0),
]


@pytest.mark.parametrize("fault, rule, limit", _SILENT, ids=[f"{fault.name}-{fault.target}" for fault, *_ in _SILENT])
def test_a_silent_role(job: Job, fault: Fault, rule: str, limit: float) -> None:
    falls_silent(job, fault, rule, limit)


def falls_silent(job: Job, fault: Fault, rule: str, limit: float) -> None:
    view = followed(job, fault)
    assert view.detected is not None and view.detected.rule == rule
    verdict = next(e.event for e in job.events if isinstance(e.event, ev.Verdict) and e.t == view.detected.t and e.event.kind == "failed")
    assert verdict.due - verdict.onset >= limit - 0.01, "never before the limit"
    assert view.detected.delay <= limit + _LATE


# -- and what only looks like a fault is none -

_BENIGN = [
    Freeze("rollout", phase="decode", seconds=2.0),
    Freeze("trainer", phase="train", seconds=2.0),
    Freeze("request_manager", seconds=2.0),
    LongAdvantage(seconds=5.0),
    LongCheckpoint(seconds=5.0),
    LongFirstToken(seconds=5.0),
    IdleRollout(seconds=6.0),
    Hang("supervisor", seconds=2.0),
    Slow("rollout", seconds=4.0, share=0.5),
]


@pytest.mark.parametrize("fault", _BENIGN, ids=[f"{fault.name}-{fault.kind}" for fault in _BENIGN])
def test_a_disturbance_condemns_nobody(job: Job, fault: Fault) -> None:
    disturbs(job, fault)


def disturbs(job: Job, fault: Fault) -> None:
    before, pids = len(job.events), {name: role.pid for name, role in job.roles.items()}
    handle = job.inject(fault)
    wait_for("its end", lambda: handle.outcome == "over", timeout=60)
    job.wait(step=job.step + 1, timeout=60)
    assert not condemned(job, before) and not handle.view.false_alarm
    assert {name: role.pid for name, role in job.roles.items()} == pids


def test_a_first_compile_is_given_its_grace(job: Job) -> None:
    handle = job.inject(FirstCompile("rollout-1", seconds=8.0))
    killed = job.inject(Kill("rollout-1")).wait("recovered", timeout=120)
    wait_for("its end", lambda: handle.outcome == "over", timeout=60)
    killed.wait("confirmed")
    assert handle.view.hits[0].incarnation == killed.view.hits[0].incarnation + 1 and not handle.view.false_alarm


# -- more than one fault -


def at_rest(job: Job) -> int:
    """Paused, with nothing under way: the step that is committed and that every rollout has."""
    job.pause()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        step, before = job.step, len(job.events.of(ev.OptimizerStepCommitted))
        time.sleep(2.0)
        still = before == len(job.events.of(ev.OptimizerStepCommitted))
        if still and {role.version for name, role in job.roles.items() if name.startswith("rollout-")} == {step}:
            return step
    pytest.fail("the paused job did not come to rest within 60 s")


@pytest.mark.soak
def test_damaged_weights_are_refused_by_who_pulls_them(job: Job) -> None:
    """No step is made meanwhile, so that nothing is pulled but what is damaged."""
    at_rest(job)
    damaged = [job.inject(CorruptWeights("rollout-0")).wait("injected"), job.inject(CorruptWeights("state_keeper-0")).wait("injected")]
    assert {handle.view.hits[0].proof["bytes"] for handle in damaged} == {64}
    killed = job.inject(Kill("rollout-1"))
    wait_for("the damage to be seen", lambda: any(handle.view.detected for handle in damaged))
    job.resume()
    killed.wait("confirmed")
    seen = next(handle for handle in damaged if handle.view.detected)
    assert seen.view.detected.rule == "checksum of a chunk"
    wait_for("the damage to be written over", lambda: {handle.outcome for handle in damaged} == {"over"})


@pytest.mark.soak
def test_a_damaged_snapshot_is_refused_and_the_next_copy_taken(job: Job) -> None:
    step = at_rest(job)

    def copied() -> bool:
        return any(e.event.step == step and e.event.holder == "disk" for e in job.events.of(ev.SnapshotCopied))

    wait_for("the checkpoint", copied)
    damaged = job.inject(CorruptSnapshot("state_keeper-0")).wait("injected")
    killed = job.inject(Kill("trainer-0")).wait("recovered", timeout=120)
    restored = job.events.of(ev.SnapshotRestored)[-1].event
    assert (restored.step, restored.source) == (step, "disk")
    job.resume()
    killed.wait("confirmed")
    damaged.wait("confirmed")
    assert damaged.view.detected is not None and damaged.view.detected.rule == "check of a snapshot"


@pytest.mark.soak
def test_a_full_disk_costs_copies_and_no_step(job: Job) -> None:
    try:
        full = job.inject(FullDisk(seconds=2.0))
    except ConfigError as error:
        pytest.skip(str(error))
    wait_for("its proof or its refusal", lambda: full.view.hits or full.outcome)
    if full.outcome == "refused":
        pytest.skip(full.view.reason)
    full.wait("confirmed", timeout=60)
    assert full.view.detected is not None and full.view.detected.rule == "a checkpoint that failed"
    assert str(job.run_dir) not in Path(f"/proc/{job.roles['trainer-0'].pid}/mountinfo").read_text(), "nobody else saw it"
    job.wait(step=job.step + 1, timeout=60)


def test_never_the_last_live_rollout(job: Job) -> None:
    first = job.inject(Hang("rollout-0"))
    first.wait("injected")
    with pytest.raises(RobustRLError, match="rollout-1 is the last live rollout"):
        job.inject(Kill("rollout"))
    first.abort()
    assert first.outcome == "aborted"
    with pytest.raises(RobustRLError, match="has ended already"):
        first.abort()
    job.wait(step=job.step + 1, timeout=120)


def test_calling_off_what_is_stuck_or_waits(job: Job) -> None:
    wedged = job.inject(Wedge("request_manager", busy=False))
    wedged.wait("injected")
    wedged.abort()
    waiting = job.inject(Kill("trainer", after=3600.0))
    waiting.abort()
    assert (wedged.outcome, waiting.outcome, waiting.stage) == ("aborted", "aborted", "planned")
    job.wait(step=job.step + 2, timeout=60)


def test_a_schedule_and_a_secret(job: Job) -> None:
    series = job.schedule(EveryNSteps(2, Slow("rollout", seconds=0.5)))
    wait_for("two faults of the schedule", lambda: sum(fault.outcome == "over" for fault in series.faults) >= 2, timeout=90)
    series.abort()
    secret = job.schedule(Surprise(seed=3, within=1.0))
    [fault] = wait_for("the surprise", lambda: secret.faults)
    assert fault.stage == "hidden" and job.faults[-1]["kind"] == "hidden" and "hidden" in repr(fault)
    wait_for("its confirmation", lambda: fault.view.confirmed, timeout=150)
    assert fault.reveal("something").view.guess == "something" and job.faults[-1]["kind"] == fault.view.kind != "hidden"


def test_bad_orders_name_what_is_wrong(job: Job) -> None:
    for fault, message in ((Kill("rollout-9"), "this job has"), (Kill("trainer", step=1), "must be one of the steps to come")):
        with pytest.raises(ConfigError, match=message):
            job.inject(fault)


def test_the_log_of_all_that_passes_the_audit(job: Job) -> None:
    job.pause()
    job.stop()
    assert audit(job.events) == []
    rows = job.faults
    assert len(rows) >= 30 and not [row for row in rows if row["outcome"] in ("not_fired", "vanished")]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_all_of_them_three_times_in_a_row(launch: Callable[..., Job]) -> None:
    job = launch(**_SETTINGS | {"restarts": 500})
    job.wait(step=2, timeout=280)
    for _ in range(3):
        for fault, rule in _ENDS:
            ends(job, fault, rule)
        for fault, rule, limit in _SILENT:
            falls_silent(job, fault, rule, limit)
        for fault in _BENIGN:
            disturbs(job, fault)
    job.stop()
    assert audit(job.events) == []
