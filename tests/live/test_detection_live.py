"""Detection in a live job: real SIGSTOP, real quiet, thresholds changed while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import robustrl
from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.core.detection import Detector, judge
from robustrl.core.thresholds import Thresholds
from robustrl.errors import ConfigError
from robustrl.job import Job
from robustrl.runtime.event_log import read_log
from tests.live.conftest import assert_clean, wait_for

pytestmark = pytest.mark.timeout(300)
_LIMITS = {"job.hysteresis": "500ms", "rollout.no_tokens": "4s", "rollout.heartbeat": "3s", "rollout.wedged": "6s"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """The long task: rollouts are decoding nearly all the time."""
    settings = {
        "profile": "class",
        "steps": 100_000,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "agent_workers": 1,
        "evaluation_prompts": 0,
    }
    settings |= {"task": "arithmetic_long", "rollouts": 2}
    with robustrl.launch(name="watched", run_dir=str(tmp_path_factory.mktemp("runs")), **settings) as job:
        job.wait(step=1, timeout=280)
        yield job
    assert_clean(job.run)


def verdicts(job: Job, role: str, kind: str) -> list[ev.Verdict]:
    return [e.event for e in job.events if isinstance(e.event, ev.Verdict) and e.event.role == role and e.event.kind == kind]


def test_settings_are_checked_applied_and_recorded(job: Job) -> None:
    assert job.thresholds.rollout.no_tokens == Thresholds.paper().rollout.no_tokens
    with pytest.raises(ConfigError, match="rollout.no_tokens"):
        job.thresholds.rollout.no_tokens = "-3s"
    with pytest.raises(ConfigError, match="must not be longer than rollout.no_tokens"):
        job.thresholds.rollout.heartbeat = "2min"
    with pytest.raises(ConfigError, match="there is no such setting"):
        job.thresholds.rollout.no_token = "3s"
    job.thresholds.update(_LIMITS)
    wait_for("the change in the log", lambda: job.thresholds.rollout.no_tokens == 4.0)
    changed = [e.event for e in job.events if isinstance(e.event, ev.ThresholdsChanged)]
    assert len(changed) == 2 and changed[-1].changes["rollout.no_tokens"] == [60.0, 4.0]


def test_a_freeze_below_the_threshold_is_forgiven(job: Job) -> None:
    rollout = job.roles["rollout-1"]
    pid = rollout.pid
    wait_for("it to decode", lambda: rollout.phase == "decode")
    rollout.hang(seconds=2.0)
    time.sleep(6.0)
    assert rollout.pid == pid and rollout.state == "healthy"
    assert not verdicts(job, "rollout-1", "failed")


def test_a_stopped_rollout_is_suspected_asked_and_replaced(job: Job) -> None:
    rollout = job.roles["rollout-1"]
    wait_for("it to decode", lambda: rollout.phase == "decode")
    pid = rollout.hang()
    wait_for("the verdict", lambda: verdicts(job, "rollout-1", "failed"), timeout=30)
    [suspect], [failed] = verdicts(job, "rollout-1", "suspect")[-1:], verdicts(job, "rollout-1", "failed")
    assert suspect.rule == "no_tokens" and suspect.due <= suspect.seen <= suspect.due + 0.5
    # never before the threshold and the heartbeat's deadline after it
    assert failed.due - failed.onset >= 4.0 + 3.0
    wait_for("its next life", lambda: rollout.incarnation == 2 and rollout.state == "healthy" and rollout.pid != pid, timeout=120)
    job.wait(step=job.step + 1, timeout=120)
    evidence = (job.run_dir / "evidence" / "rollout-1.1.txt").read_text()
    assert f"process {pid}, state T" in evidence and "_turn" in evidence


def test_a_stopped_manager_is_silent_and_replaced(job: Job) -> None:
    job.thresholds.update({"management.silent": "4s", "management.lag": "3s"})
    manager = job.roles["rollout_manager"]
    manager.hang()
    wait_for("the verdict", lambda: verdicts(job, "rollout_manager", "failed"), timeout=30)
    assert verdicts(job, "rollout_manager", "failed")[0].rule == "silent"
    wait_for("its next life", lambda: manager.incarnation == 2 and manager.state == "healthy", timeout=120)
    job.wait(step=job.step + 1, timeout=120)


def test_the_log_gives_the_same_verdicts_again(job: Job) -> None:
    job.stop()
    entries = read_log(job.run_dir / "events.jsonl")
    assert audit(entries) == []
    live = [e.event for e in entries if isinstance(e.event, ev.Verdict)]
    replayed = list(judge(Detector(Thresholds.paper()), entries))
    assert [(v.role, v.kind, v.rule, v.due, v.seen) for v in replayed[: len(live)]] == [
        (v.role, v.kind, v.rule, v.due, v.seen) for v in live
    ]
    assert {v.role for v in live if v.kind == "failed"} == {"rollout-1", "rollout_manager"}, "and nobody else was condemned"
