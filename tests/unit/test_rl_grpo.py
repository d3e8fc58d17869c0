"""GRPO's formulas against plain Python loops, and the learner's step against a gradient found by finite differences and by hand."""

from __future__ import annotations

import math
import random
import statistics
from typing import TYPE_CHECKING

import pytest

from robustrl.config import GRPOConfig
from robustrl.core.roles import Phase
from robustrl.errors import ConfigError, TrainingError
from robustrl.rl.trajectory import Trajectory, decode, encode

if TYPE_CHECKING:
    import torch

    from robustrl.rl import grpo
    from robustrl.rl.learner import Learner


@pytest.fixture(scope="module", autouse=True)
def imported(request: pytest.FixtureRequest, with_torch: None) -> None:
    """What brings torch, under its name in this module."""
    from robustrl.rl import grpo
    from robustrl.rl.learner import Learner

    request.module.grpo, request.module.Learner = grpo, Learner


def make_batch(seed: int = 0, groups: int = 3, samples: int = 3, step: int = 1) -> list[Trajectory]:
    rng, batch = random.Random(seed), []
    for group in range(groups):
        prompt = [rng.randrange(4, 17) for _ in range(rng.randrange(3, 9))]
        for k in range(samples):
            count = rng.randrange(2, 12)
            mask = [1] + [int(rng.random() < 0.8) for _ in range(count - 1)]
            batch.append(Trajectory(
                id=group * samples + k, batch=step, group=group, prompt="", prompt_tokens=prompt, columns={},
                tokens=[rng.randrange(2, 20) for _ in range(count)], logprobs=[-5 * rng.random() * m for m in mask], mask=mask,
                reward=float(rng.randrange(3))))
    return batch


def plain_logprobs(learner: Learner, t: Trajectory, temperature: float = 1.0) -> list[float]:
    """Log-probabilities of the trajectory's tokens: one unpadded sequence, its softmax in Python floats."""
    with torch.no_grad():
        logits = learner.model(input_ids=torch.tensor([t.prompt_tokens + t.tokens])).logits[0].double().tolist()
    found = []
    for i, token in enumerate(t.tokens):
        row = [x / temperature for x in logits[len(t.prompt_tokens) + i - 1]]
        top = max(row)
        found.append(row[token] - top - math.log(sum(math.exp(x - top) for x in row)))
    return found


def plain_advantages(batch: list[Trajectory]) -> list[float]:
    found = []
    for t in batch:
        rewards = [o.reward for o in batch if o.group == t.group]
        found.append((t.reward - statistics.fmean(rewards)) / (statistics.pstdev(rewards) + 1e-4))
    return found


def gradient_of(learner: Learner, batch: list[Trajectory]) -> torch.Tensor:
    """The step's gradient, caught between backward and the optimizer."""
    caught = []
    learner.optimizer.register_step_pre_hook(lambda *_: caught.append(torch.cat([p.grad.flatten() for p in learner.model.parameters()])))
    learner.train_step(batch)
    return caught[0]


def test_advantages_have_mean_zero_and_unit_spread_in_each_group():
    found = grpo.group_advantages([1.0, 0.0, 0.0, 0.0, 5.0, 5.0, 2.0], ["a", "a", "a", "b", "a", "c", "c"])
    mean, spread = 1.5, statistics.pstdev([1, 0, 0, 5])
    assert found[:3] + found[4:5] == pytest.approx([(r - mean) / (spread + 1e-4) for r in (1, 0, 0, 5)])
    assert found[3] == 0.0  # alone in its group
    assert found[5:] == pytest.approx([1.5 / 1.5001, -1.5 / 1.5001])
    assert grpo.group_advantages([0.3] * 4, [1] * 4) == [0.0] * 4


@pytest.mark.parametrize(("ratio", "advantage", "expected"), [
    (1.5, 2.0, 1.2 * 2.0), (1.5, -2.0, 1.5 * -2.0), (0.5, 2.0, 0.5 * 2.0), (0.5, -2.0, 0.8 * -2.0), (1.1, 3.0, 3.3)])
def test_clip_is_pessimistic(ratio, advantage, expected):
    found = grpo.clipped_objective(torch.tensor(math.log(ratio)), torch.tensor(0.0), torch.tensor(advantage), 0.2)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_importance_weights_are_truncated_from_above_only():
    old, behaviour = torch.tensor([0.5, 0.5, 0.1]), torch.tensor([0.4, 0.1, 0.5])
    assert grpo.importance_weights(old.log(), behaviour.log(), 2.0).tolist() == pytest.approx([1.25, 2.0, 0.2], rel=1e-5)


def test_kl_estimate_is_unbiased():
    p, q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    estimates = grpo.kl_estimate(torch.tensor(p).log(), torch.tensor(q).log()).tolist()
    assert min(estimates) >= 0
    exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert sum(a * e for a, e in zip(p, estimates, strict=True)) == pytest.approx(exact, rel=1e-5)


def test_token_loss_equals_a_plain_loop():
    rng = random.Random(1)
    shape = (4, 6)
    draw = lambda low, high: [[rng.uniform(low, high) for _ in range(shape[1])] for _ in range(shape[0])]  # noqa: E731
    current, old, behaviour, reference, advantage = draw(-2, 0), draw(-2, 0), draw(-3, 0), draw(-2, 0), draw(-1, 1)
    mask = [[float(rng.random() < 0.7) for _ in range(shape[1])] for _ in range(shape[0])]
    loss = weights = clipped = penalty = kl = 0.0
    for i in range(shape[0]):
        for j in range(shape[1]):
            if mask[i][j]:
                w = min(math.exp(old[i][j]) / math.exp(behaviour[i][j]), 1.5)
                r, a = math.exp(current[i][j]) / math.exp(old[i][j]), advantage[i][j]
                limit = max(min(r, 1.2), 0.8)
                k = math.exp(reference[i][j]) / math.exp(current[i][j])
                loss += -w * min(r * a, limit * a) + 0.3 * (k - 1 - math.log(k))
                weights += w
                clipped += (limit * a < r * a)
                penalty += k - 1 - math.log(k)
                b = math.exp(current[i][j]) / math.exp(behaviour[i][j])
                kl += b - 1 - math.log(b)
    stats = grpo.token_loss(*map(torch.tensor, (current, behaviour, advantage, mask)), clip=0.2, cap=1.5, kl_coefficient=0.3,
                            reference=torch.tensor(reference), old=torch.tensor(old))
    found = [stats.loss, stats.weight, stats.clipped, stats.kl, stats.kl_reference]
    assert [x.item() for x in found] == pytest.approx([loss, weights, clipped, kl, penalty], rel=1e-4)
    assert clipped > 0 and stats.weight_max.item() == 1.5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_step_metrics_equal_a_plain_loop(temperature):
    batch = make_batch()
    learner = Learner("tiny", GRPOConfig(micro_batch=4), seed=0, temperature=temperature)
    logp = [plain_logprobs(learner, t, temperature) for t in batch]
    picked = [(p, b, a) for t, row, a in zip(batch, logp, plain_advantages(batch), strict=True)
              for p, b, m in zip(row, t.logprobs, t.mask, strict=True) if m]
    weights = [min(math.exp(p - b), 2.0) for p, b, _ in picked]
    metrics = learner.train_step(batch)
    assert metrics["loss"] == pytest.approx(-statistics.fmean(w * a for w, (_, _, a) in zip(weights, picked, strict=True)), abs=1e-5)
    assert metrics["importance_weight"] == pytest.approx(statistics.fmean(weights), rel=1e-4)
    assert metrics["importance_weight_max"] == pytest.approx(max(weights), rel=1e-4)
    assert metrics["kl"] == pytest.approx(statistics.fmean(math.exp(p - b) - 1 - p + b for p, b, _ in picked), rel=1e-3)
    assert metrics["length"] == sum(sum(t.mask) for t in batch) / len(batch)
    assert metrics["reward"] == statistics.fmean(t.reward for t in batch)
    assert metrics["accuracy"] == statistics.fmean(t.reward >= 1 for t in batch)
    assert metrics["clip_fraction"] == 0 and "kl_reference" not in metrics


def test_gradient_is_the_slope_of_the_plain_objective():
    """d/dx of -mean(w A logp), w held constant, along a random direction, by central differences of the plain loop."""
    batch = make_batch(1)
    learner = Learner("tiny", GRPOConfig(max_grad_norm=1e9), seed=0)
    weights = [[min(math.exp(p - b), 2.0) * m for p, b, m in zip(plain_logprobs(learner, t), t.logprobs, t.mask, strict=True)]
               for t in batch]
    advantages = plain_advantages(batch)
    count = sum(sum(t.mask) for t in batch)

    def objective() -> float:
        return -sum(w * a * p for t, row, a in zip(batch, weights, advantages, strict=True)
                    for w, p in zip(row, plain_logprobs(learner, t), strict=True)) / count

    torch.manual_seed(0)
    learner.model.double()
    direction = [torch.randn_like(p) for p in learner.model.parameters()]

    def move(by: float) -> None:
        with torch.no_grad():
            for p, d in zip(learner.model.parameters(), direction, strict=True):
                p.add_(d, alpha=by)

    move(1e-5)
    high = objective()
    move(-2e-5)
    slope = (high - objective()) / 2e-5
    move(1e-5)
    learner.model.float()
    gradient = gradient_of(learner, batch)
    along = gradient.double() @ torch.cat([d.flatten() for d in direction])
    assert abs(slope) > 1e-2
    assert along.item() == pytest.approx(slope, rel=2e-3)


def test_kl_pulls_back_to_the_reference():
    batch = make_batch(2)
    learner = Learner("tiny", GRPOConfig(kl_coefficient=0.5, warmup_steps=0), seed=0)
    assert learner.train_step(batch)["kl_reference"] == pytest.approx(0, abs=1e-6)
    moved = [plain_logprobs(learner, t) for t in batch]
    start = Learner("tiny", GRPOConfig(), seed=0)
    gaps = [r - p for t, row in zip(batch, moved, strict=True) for r, p, m in zip(plain_logprobs(start, t), row, t.mask, strict=True) if m]
    metrics = learner.train_step(batch)
    assert metrics["kl_reference"] == pytest.approx(statistics.fmean(math.exp(g) - 1 - g for g in gaps), rel=1e-2)
    assert metrics["kl_reference"] > 1e-6


def test_gradient_does_not_depend_on_the_micro_batch():
    batch = make_batch(3, groups=5)
    whole, small = (gradient_of(Learner("tiny", GRPOConfig(micro_batch=size, max_grad_norm=1e9), seed=0), batch) for size in (64, 2))
    assert torch.allclose(whole, small, rtol=1e-4, atol=1e-6 * whole.abs().max().item() + 1e-8)
    assert whole.norm() > 1e-2


def test_tool_tokens_are_not_trained_on():
    batch = make_batch(4)
    for t in batch:
        t.mask[-1] = 0
        t.mask[0] = 1
    first = gradient_of(Learner("tiny", GRPOConfig(), seed=0), batch)
    for t in batch:
        t.tokens[-1] = (t.tokens[-1] + 1) % 20
    assert torch.equal(first, gradient_of(Learner("tiny", GRPOConfig(), seed=0), batch))


def test_phases_and_marks():
    seen: list = []
    Learner("tiny", GRPOConfig(micro_batch=4), seed=0).train_step(make_batch(), seen.append, lambda *mark: seen.append(mark))
    assert seen == [Phase.ADVANTAGE, Phase.TRAIN, (0, 3), (1, 3), (2, 3), (3, 3), Phase.OPTIMIZER]


def test_learning_rate_warms_up():
    learner = Learner("tiny", GRPOConfig(learning_rate=1e-3, warmup_steps=4), seed=0)
    assert [learner.train_step(make_batch(i))["learning_rate"] for i in range(5)] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


def test_recovery_continues_bit_for_bit():
    steady = Learner("tiny", GRPOConfig(micro_batch=4, weight_decay=0.01), seed=0)
    for i in range(2):
        steady.train_step(make_batch(i))
    weights = {name: tensor.clone() for name, tensor in steady.weights().items()}
    state = steady.recovery_state()
    expected = [steady.train_step(make_batch(i)) for i in range(2, 4)]
    restored = Learner("tiny", GRPOConfig(micro_batch=4, weight_decay=0.01), seed=7)
    restored.load_weights(weights)
    restored.load_recovery_state(state)
    assert restored.step == 2
    assert [restored.train_step(make_batch(i)) for i in range(2, 4)] == expected
    assert all(torch.equal(tensor, steady.weights()[name]) for name, tensor in restored.weights().items())
    moments = [learner.optimizer.state_dict()["state"] for learner in (restored, steady)]
    assert all(torch.equal(value, moments[1][i][key]) for i, entry in moments[0].items() for key, value in entry.items())


def test_weights_hold_the_tied_head():
    learner = Learner("tiny", GRPOConfig(), seed=0)
    weights = learner.weights()
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    del weights["lm_head.weight"]
    with pytest.raises(RuntimeError, match="lm_head.weight"):
        learner.load_weights(weights)


def test_what_is_not_finite_is_named_and_changes_nothing():
    learner = Learner("tiny", GRPOConfig(), seed=0)
    learner.train_step(make_batch())
    before = {name: tensor.clone() for name, tensor in learner.weights().items()}
    bad = make_batch()
    bad[4].logprobs[0] = math.nan
    with pytest.raises(TrainingError, match=r"optimizer step 2: loss = nan"):
        learner.train_step(bad)
    assert learner.step == 1 and all(torch.equal(tensor, before[name]) for name, tensor in learner.weights().items())
    learner.model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(TrainingError, match=r"optimizer step 2: gradient norm = (nan|inf)"):
        learner.train_step(make_batch())


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: setattr(t, "reward", None), "trajectory 4 has no reward"),
    (lambda t: t.tokens.append(3), "trajectory 4: "),
    (lambda t: setattr(t, "prompt_tokens", []), "trajectory 4 has no prompt token"),
    (lambda t: setattr(t, "mask", [0] * len(t.mask)), "trajectory 4 has no prompt token or no generated token")])
def test_trajectories_that_cannot_be_trained_on(change, message):
    batch = make_batch()
    change(batch[4])
    with pytest.raises(ValueError, match=message):
        Learner("tiny", GRPOConfig(), seed=0).train_step(batch)


def test_probe_is_the_log_probability_of_each_next_token():
    learner = Learner("tiny", GRPOConfig(), seed=0, temperature=0.5)
    tokens = [7, 14, 9, 13, 4, 17]
    plain = plain_logprobs(learner, Trajectory(id=0, batch=0, group=0, prompt="", prompt_tokens=tokens[:1], tokens=tokens[1:], columns={}))
    assert learner.probe(tokens) == pytest.approx(plain, abs=1e-5)


def test_saved_model_loads_in_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    learner = Learner("tiny", GRPOConfig(), seed=0)
    learner.train_step(make_batch())
    learner.save_pretrained(str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, learner.weights()[name]) for name, tensor in loaded.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path).decode([7, 14]) == "3+"


def test_ranks_need_a_process_group():
    with pytest.raises(ConfigError, match="trainer_ranks = 2"):
        Learner("tiny", GRPOConfig(), seed=0, world_size=2)


def test_trajectory_travels_as_msgpack():
    t = make_batch()[0]
    t.versions = [(3, 1), (4, len(t.tokens) - 1)]
    assert decode(encode(t)) == t
