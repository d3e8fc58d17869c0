"""Jobs that differ from the default in what a user brings or chooses: own data, model and reward, two ranks, tools, and what goes wrong."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import robustrl
from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.core.run_state import RunState
from robustrl.errors import JobFailed
from robustrl.job import Job
from robustrl.rl.arithmetic import solve
from robustrl.rl.models import TINY
from robustrl.runtime.event_log import read_log
from robustrl.runtime.processes import ProcessId, is_alive, read_start_ticks
from tests.live.conftest import assert_clean, wait_for

pytestmark = pytest.mark.timeout(400)
Launch = Callable[..., Job]
_SMALL = {"rollouts": 1, "agent_workers": 1}


def last_digit_reward(prompts: list[Any], completions: list[Any], *, right: list[str], **_: Any) -> list[float]:
    return [0.5 * completion.endswith(digit) for completion, digit in zip(completions, right, strict=True)]


def fussy_reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    if any(completion[-1:] in tuple("13579") for completion in completions):
        raise ValueError("an odd answer")
    return [1.0 - index % 2 for index in range(len(completions))]


def test_own_data_model_and_reward_on_two_ranks_and_on_policy(launch: Launch, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = tmp_path / "own-model"
    shutil.copytree(TINY, model)
    weights = load_file(model / "model.safetensors")
    norm = weights["model.norm.weight"].mean().item()
    weights["model.norm.weight"] *= 1.25
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    prompts = [f"{a}+{b}*{c}-{a}+{b}=" for a in range(4) for b in range(1, 5) for c in range(2, 5)]
    data = tmp_path / "own.jsonl"
    data.write_text("".join(json.dumps({"question": prompt, "right": solve(prompt)[0]}) + "\n" for prompt in prompts))

    job = launch(
        task=f"jsonl:{data}",
        task_options={"prompt_column": "question", "max_tokens": 28},
        model=str(model),
        reward=last_digit_reward,
        trainer_ranks=2,
        staleness=0,
        **_SMALL,
    )
    job.wait(step=1, timeout=180)
    job.pause()
    ranks = [job.roles["trainer-0"].pid, job.roles["trainer-1"].pid]
    assert len(set(ranks)) == 2 and all(is_alive(ProcessId(pid, read_start_ticks(pid))) for pid in ranks)
    job.resume()
    job.wait(timeout=200)
    assert job.status == "done"
    entries = read_log(job.run_dir / "events.jsonl")
    assert audit(entries) == []
    digests = {e.event.version: e.event.digest for e in entries if isinstance(e.event, ev.VersionAnnounced)}
    assert sorted(digests) == [0, 1, 2, 3] and len(set(digests.values())) == 4

    rows = list(job.trajectories)
    assert len(rows) == 3 * 4 * 8
    for row in rows:
        assert {version for version, _ in row["versions"]} == {row["batch"] - 1}, row["id"]
        assert row["reward"] == 0.5 * row["text"].endswith(solve(row["prompt"])[0]) and row["prompt"] in prompts
    assert {row["reward"] for row in rows} == {0.0, 0.5}

    saved = load_file(job.run_dir / "model" / "model.safetensors")
    assert math.isclose(saved["model.norm.weight"].mean().item(), 1.25 * norm, rel_tol=0.01)


def test_a_tool_is_waited_for_and_what_a_reward_cannot_rate_is_dropped_and_counted(launch: Launch) -> None:
    job = launch(
        task="arithmetic_tool",
        task_options={"tool_seconds": 1.0},
        reward=fussy_reward,
        reward_errors="drop",
        steps=2,
        prompts_per_step=2,
        evaluation_prompts=0,
        rollouts=1,
    )
    job.wait(timeout=240)
    assert job.status == "done"
    entries = read_log(job.run_dir / "events.jsonl")
    assert audit(entries) == []
    assert max(row["tool_turns"] for row in job.trajectories if row["end"] == "consumed") >= 2
    samples = [e.event for e in entries if isinstance(e.event, ev.RoleSample)]
    waiting = [sample for sample in samples if sample.phase == "waiting_tool"]
    assert {sample.role for sample in waiting} == {"rollout-0"} and all(sample.pending > 0 for sample in waiting)
    assert {sample.role for sample in samples if sample.phase == "running"} >= {"agent_worker-0", "agent_worker-1"}

    dropped = [e.event for e in entries if isinstance(e.event, ev.TrajectoriesDropped)]
    assert {event.reason for event in dropped} == {"raised ValueError: an odd answer"}
    count = sum(len(event.ids) for event in dropped)
    balance = RunState.of(entries).ledger.balance()
    assert balance.dropped == {"raised ValueError: an odd answer": count} and count > 0
    assert balance.started == 2 * 2 * 8 == balance.consumed + count
    finished = [text for e in entries if isinstance(e.event, ev.TrajectoriesFinished) for text in e.event.texts]
    assert len(finished) == balance.consumed and not any(text[-1:] in tuple("13579") for text in finished)


def test_a_reward_that_raises_ends_the_job_with_its_name_and_the_sample(launch: Launch) -> None:
    job = launch(reward=fussy_reward, evaluation_prompts=0, prompts_per_step=2, **_SMALL)
    with pytest.raises(JobFailed, match=r"failed: reward function \S*fussy_reward: raised ValueError: an odd answer; sample \d of 8"):
        job.wait(timeout=200)
    assert_clean(job.run)
    assert audit(read_log(job.run_dir / "events.jsonl")) == []


_WRONG_ENGINE = '''
"""An engine that forgets a tensor at its third load, as real ones did: silently."""
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "robustrl.engines.torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            load = module.TorchEngine.load
            loads = []
            def forgetful(engine, tensors):
                given = dict(tensors)
                loads.append(1)
                if len(loads) == 3:
                    given["model.norm.weight"] = given["model.norm.weight"] * 0.9
                load(engine, given)
            module.TorchEngine.load = forgetful
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
'''


def test_a_version_that_fails_the_probe_is_refused_and_gives_no_token(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_WRONG_ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = launch(evaluation_prompts=0, steps=50, **_SMALL)
    with pytest.raises(JobFailed, match=r"rollout-0 refused weight version \d+: the probe prompt's log-probabilities differ by"):
        job.wait(timeout=200)
    assert_clean(job.run)
    entries = read_log(job.run_dir / "events.jsonl")
    assert audit(entries) == []
    refused = next(e.event for e in entries if isinstance(e.event, ev.VersionRefused))
    assert refused.probe_gap > refused.limit == 1e-3
    committed = [e.event.version for e in entries if isinstance(e.event, ev.PullCommitted)]
    assert len(committed) == 2 and committed[0] == 0 and refused.version not in committed
    assert not any(version == refused.version for row in job.trajectories for version, _ in row["versions"] or ())


def test_an_unknown_data_set_is_named_at_the_first_wait(tmp_path: Path) -> None:
    job = robustrl.launch(name="unknown", profile="class", task="reasoning_gym:no_such_set", run_dir=str(tmp_path))
    wait_for("the end", lambda: job.over, timeout=100)
    for ask in (lambda: job.wait(timeout=5), lambda: job.metrics, lambda: job.trajectories):
        with pytest.raises(JobFailed, match="reasoning_gym has no data set 'no_such_set'; it has: .*leg_counting"):
            ask()
    assert "no_such_set" in repr(job)
    assert_clean(job.run)
