"""One job as users run it (vLLM, four nodes), looked at while it runs and afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import robustrl
from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.errors import ConfigError, WaitTimeout
from robustrl.job import Job
from robustrl.runtime.event_log import read_log
from robustrl.runtime.processes import NICE
from tests.live.conftest import assert_clean

_STEPS = 8


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with robustrl.launch(
        name="lab", steps=_STEPS, evaluation_prompts=64, evaluation_every=4, standbys=0, run_dir=str(tmp_path_factory.mktemp("runs"))
    ) as job:
        job.wait(step=1, timeout=240)
        job.pause()  # so that there is a running job to look at for as long as it takes
        yield job
    assert_clean(job.run)


@pytest.fixture(scope="module")
def ended(job: Job) -> Job:
    job.resume()
    job.wait(timeout=240)
    return job


def test_every_role_is_a_live_process_of_its_own_on_four_nodes(job: Job) -> None:
    pids = {role: handle.pid for role, handle in job.roles.items()}
    assert {
        "supervisor",
        "task_runner",
        "rollout_manager",
        "request_manager",
        "agent_worker-0",
        "agent_worker-1",
        "trainer-0",
        "state_keeper-0",
        "state_keeper-1",
        "rollout-0",
        "rollout-1",
        "node_agent-0",
        "node_agent-1",
        "node_agent-2",
        "node_agent-3",
    } == set(pids)
    assert len(set(pids.values())) == len(pids)
    for role, pid in pids.items():
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert f"ROBUSTRL_RUN={job.run}".encode() in environment, role
        assert os.getpriority(os.PRIO_PROCESS, pid) >= NICE, f"{role} yields to who watches"
    assert len({handle.node for handle in job.roles.values()}) == 4
    assert os.getpid() not in pids.values()


def test_a_paused_job_commits_at_most_the_step_that_was_running(job: Job) -> None:
    paused = next(e for e in job.events if isinstance(e.event, ev.Paused))
    job.pause()
    with pytest.raises(WaitTimeout, match="step"):
        job.wait(step=_STEPS, timeout=3.0)
    begun = [e.event.step for e in job.events if isinstance(e.event, ev.OptimizerStepCommitted) and e.seq > paused.seq]
    assert job.status == "paused" and begun in ([], [paused.event.step])
    assert sum(isinstance(e.event, ev.Paused) for e in job.events) == 1, "a second pause changes nothing"


def test_a_saved_model_loads_in_transformers(job: Job, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = job.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.config.model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(path).encode("3*7=")
    with pytest.raises(ConfigError) as caught:  # what the trainer finds, as on a cluster whose disks are not this machine's
        job._call("save_pretrained", 60.0, path="/proc/x")
    text = "path = '/proc/x': must be a folder that can be written, or a name where one can be made: "
    assert caught.value.field == "path" and str(caught.value).startswith(text) and "\x1b" not in str(caught.value)


def test_logs_of_a_role(job: Job) -> None:
    assert job.roles["rollout-0"].logs(lines=5)


def test_rollouts_start_without_weights_and_become_healthy_by_a_pull(ended: Job) -> None:
    for rollout in ("rollout-0", "rollout-1"):
        states = [(e.event.old, e.event.new) for e in ended.events if isinstance(e.event, ev.RoleStateChanged) and e.event.role == rollout]
        assert states[:2] == [("starting", "stale"), ("stale", "healthy")]
        pulls = [e.event for e in ended.events if isinstance(e.event, ev.PullCommitted) and e.event.target == rollout]
        assert pulls[0].version == 0 and pulls[-1].version == _STEPS
        assert all(pull.probe_gap <= 1e-3 and pull.bytes > 0 for pull in pulls)


def test_staleness_is_bounded(ended: Job) -> None:
    for row in ended.trajectories:
        assert all(row["batch"] - 2 <= version <= row["batch"] - 1 for version, _ in row["versions"]), row["id"]


def test_the_ledger_balances_and_every_step_consumes_its_batch(ended: Job) -> None:
    balance = ended.summary()["trajectories"]
    assert balance["started"] == balance["consumed"] == _STEPS * 16 * 8
    assert balance["in_flight"] == 0


def test_metrics_and_evaluations_are_tables(ended: Job) -> None:
    frame = ended.metrics.to_pandas()
    assert list(frame["step"]) == list(range(1, _STEPS + 1))
    assert {"reward", "accuracy", "entropy", "kl", "clip_fraction", "grad_norm", "length", "importance_weight"} <= set(frame)
    assert frame["importance_weight"].between(0.9, 1.1).all(), "behaviour log-probabilities of vLLM agree with the trainer's"
    assert [row["version"] for row in ended.evaluations] == [0, 4, _STEPS]
    assert any(path.name.startswith("events.out") for path in (ended.run_dir / "tensorboard").iterdir())


def test_the_run_directory_passes_the_audit_and_holds_the_summary(ended: Job) -> None:
    assert ended.status == "done"
    assert any(isinstance(e.event, ev.Resumed) for e in ended.events)
    assert audit(read_log(ended.run_dir / "events.jsonl")) == []
    summary = json.loads((ended.run_dir / "summary.json").read_text())
    assert summary["status"] == "done" and summary["nodes"] == 4 and summary["steps"] == _STEPS
    assert summary["distinct_pids"] == len(summary["roles"]) == 15
    assert summary["ucx"]["bytes"] > 2 * _STEPS * 1_600_000
    assert summary["tokens_per_second"] > 0
    assert {"train", "snapshot", "publish", "waiting_batch"} <= set(summary["step_seconds"])
