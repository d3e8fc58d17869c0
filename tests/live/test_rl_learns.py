"""GRPO with the real learner and a plain in-process sampler raises the tiny model's held-out accuracy.

``python tests/live/test_rl_learns.py TASK STEPS STALENESS SEED...`` prints the curve at the size of the demo.
"""

from __future__ import annotations

import copy
import sys
import time

import pytest
import torch

from robustrl.config import GRPOConfig
from robustrl.rl.learner import Learner
from robustrl.rl.models import load_tokenizer
from robustrl.rl.rewards import score_trajectories
from robustrl.rl.tasks import Task, make_task
from robustrl.rl.trajectory import Trajectory


@torch.no_grad()
def sample(model, tokenizer, task: Task, trajectories: list[Trajectory], *, greedy: bool = False, version: int = 0) -> None:
    """Fills the trajectories, all of one prompt length, asking the task's tool at each stop."""
    eos = tokenizer.eos_token_id
    rows = torch.tensor([t.prompt_tokens for t in trajectories])
    cache, pending = None, dict(enumerate(trajectories))
    forced: dict[int, list[int]] = {}
    for _ in range(task.max_tokens):
        out = model(input_ids=rows if cache is None else rows[:, -1:], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logp = out.logits[:, -1].log_softmax(-1)
        chosen = logp.argmax(-1) if greedy else torch.multinomial(logp.exp(), 1).squeeze(-1)
        for i, t in list(pending.items()):
            if forced.get(i):
                chosen[i] = forced[i].pop(0)
                t.tokens.append(int(chosen[i])), t.logprobs.append(0.0), t.mask.append(0)
                continue
            token = int(chosen[i])
            t.tokens.append(token), t.logprobs.append(float(logp[i, token])), t.mask.append(1)
            t.text = tokenizer.decode(t.tokens, skip_special_tokens=True)
            answer = None
            if task.stop and t.text.endswith(task.stop):
                answer = task.tool(t.text)
                t.tool_turns += 1
                forced[i] = tokenizer.encode(answer) if answer is not None else []
            if token == eos or (task.stop and t.text.endswith(task.stop) and answer is None):
                t.finish = "stop"
                del pending[i]
        if not pending:
            break
        rows = torch.cat([rows, chosen[:, None]], 1)
    for t in pending.values():
        t.finish = "length"
    for t in trajectories:
        t.text = tokenizer.decode(t.tokens, skip_special_tokens=True)
        t.versions = [(version, len(t.tokens))]


def batch_of(task: Task, tokenizer, split: str, start: int, prompts: int, samples: int, batch: int = 0) -> list[Trajectory]:
    found = task.prompts(split, start, prompts)
    return [Trajectory(id=g * samples + k, batch=batch, group=g, prompt=p.text, prompt_tokens=task.encode(tokenizer, p), columns=p.columns,
                       tokens=[], logprobs=[], mask=[]) for g, p in enumerate(found) for k in range(samples)]


def accuracy(learner: Learner, tokenizer, task: Task, prompts: int, greedy: bool) -> float:
    trajectories = batch_of(task, tokenizer, "held_out", 0, prompts, 1)
    sample(learner.model, tokenizer, task, trajectories, greedy=greedy)
    score_trajectories(task.reward, trajectories)
    return sum(t.reward for t in trajectories) / len(trajectories)


def train(name: str, steps: int, seed: int, prompts: int = 16, samples: int = 8, staleness: int = 0,
          show: bool = False):
    torch.manual_seed(seed)
    task, tokenizer = make_task(name, {}, seed), load_tokenizer("tiny")
    learner = Learner("tiny", GRPOConfig(), seed=seed)
    scores = lambda: tuple(accuracy(learner, tokenizer, task, 256, greedy) for greedy in (False, True))  # noqa: E731
    before, spent, pads = scores(), [], []
    sampler = copy.deepcopy(learner.model)
    kept = [copy.deepcopy(learner.model.state_dict())]
    for step in range(1, steps + 1):
        trajectories = batch_of(task, tokenizer, "train", (step - 1) * prompts, prompts, samples, step)
        sampler.load_state_dict(kept[0])
        sample(sampler, tokenizer, task, trajectories, version=max(0, step - 1 - staleness))
        score_trajectories(task.reward, trajectories)
        began = time.perf_counter()
        metrics = learner.train_step(trajectories)
        spent.append(time.perf_counter() - began)
        kept = [*kept, copy.deepcopy(learner.model.state_dict())][-1 - staleness:]
        pads.append(sum(t.text.startswith("<") for t in trajectories) / len(trajectories))
        if show and step % 10 == 0:
            values = " ".join(f"{k} {metrics[k]:.3f}" for k in ("reward", "entropy", "grad_norm", "length", "kl", "importance_weight_max"))
            print(step, f"scratchpads {pads[-1]:.2f} {values}, median {sorted(spent)[len(spent) // 2]:.2f} s a train_step", flush=True)
    return before, scores(), pads


@pytest.mark.timeout(120)
def test_accuracy_rises_on_prompts_never_trained_on():
    before, after, pads = train("arithmetic", 25, seed=5, staleness=1)
    assert 0.25 <= before[0] <= 0.5
    assert after[0] >= before[0] + 0.15
    assert pads[-1] > pads[0] + 0.2


if __name__ == "__main__":
    for number in map(int, sys.argv[4:]):
        start = time.perf_counter()
        first, last, _ = train(sys.argv[1], int(sys.argv[2]), number, staleness=int(sys.argv[3]), show=True)
        print(f"seed {number}: held-out accuracy at T=1 {first[0]:.3f} -> {last[0]:.3f}, greedy {first[1]:.3f} -> {last[1]:.3f}, "
              f"{time.perf_counter() - start:.0f} s in all", flush=True)
