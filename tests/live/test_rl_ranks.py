"""Two trainer ranks over gloo, plain and FSDP2-sharded: the same gradient as one rank, one recovery state, errors on both."""

from __future__ import annotations

import datetime
import math
import random

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from robustrl.config import GRPOConfig
from robustrl.errors import TrainingError
from robustrl.rl.learner import Learner
from robustrl.rl.trajectory import Trajectory

CONFIG = GRPOConfig(micro_batch=4, max_grad_norm=1e9)


def make_batch(seed: int) -> list[Trajectory]:
    """17 trajectories: with micro-batches of 4 on 2 ranks the last piece leaves one rank without a share."""
    rng = random.Random(seed)
    counts = [rng.randrange(2, 20) for _ in range(17)]
    return [Trajectory(id=i, batch=seed, group=i % 4, prompt="", prompt_tokens=[4 + i % 4] * (3 + i % 4), columns={},
                       tokens=[rng.randrange(2, 20) for _ in range(n)], logprobs=[-2.0] * n, mask=[1] * n, reward=rng.random())
            for i, n in enumerate(counts)]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def step_with_gradient(learner: Learner, batch: list[Trajectory]) -> tuple[torch.Tensor, dict[str, float]]:
    caught: list[torch.Tensor] = []
    parameters = list(learner.model.parameters())
    hook = learner.optimizer.register_step_pre_hook(lambda *_: caught.append(torch.cat([full(p.grad).flatten() for p in parameters])))
    metrics = learner.train_step(batch)
    hook.remove()
    return caught[0], metrics


def one_rank(rank: int, folder: str) -> None:
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=patience)
    for sharded in (False, True):
        run(rank, sharded, f"{folder}/{sharded}")
    dist.destroy_process_group()


def run(rank: int, sharded: bool, folder: str) -> None:
    learner = Learner("tiny", CONFIG, seed=0, rank=rank, world_size=2, sharded=sharded)
    gradient, metrics = step_with_gradient(learner, make_batch(1))
    weights = {name: tensor.clone() for name, tensor in learner.weights().items()}
    state = learner.recovery_state()
    probe = learner.probe([7, 14, 9, 17])
    following = learner.train_step(make_batch(2))
    restored = Learner("tiny", CONFIG, seed=1, rank=rank, world_size=2, sharded=sharded)
    restored.load_weights(weights)
    restored.load_recovery_state(state)
    assert restored.probe([7, 14, 9, 17]) == probe
    assert restored.train_step(make_batch(2)) == following
    assert all(torch.equal(tensor, learner.weights()[name]) for name, tensor in restored.weights().items())
    bad = make_batch(3)
    bad[0].logprobs[0] = math.nan
    with pytest.raises(TrainingError, match="optimizer step 3: loss = nan"):
        learner.train_step(bad)
    learner.save_pretrained(f"{folder}/saved")
    torch.save((gradient, metrics, weights, probe), f"{folder}/rank-{rank}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for sharded in (False, True):
        (folder / str(sharded)).mkdir()
    mp.start_processes(one_rank, args=(str(folder),), nprocs=2, start_method="spawn")
    return folder


@pytest.mark.timeout(180)
@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_make_the_step_of_one(sharded, folder):
    folder = folder / str(sharded)
    ranks = [torch.load(folder / f"rank-{rank}") for rank in range(2)]
    alone = Learner("tiny", CONFIG, seed=0)
    gradient, metrics = step_with_gradient(alone, make_batch(1))
    for found_gradient, found_metrics, weights, probe in ranks:
        assert (found_gradient - gradient).norm() <= 1e-5 * gradient.norm()
        assert found_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        assert weights.keys() == alone.weights().keys()
        assert all(torch.allclose(tensor, alone.weights()[name], atol=1e-4) for name, tensor in weights.items())
        assert probe == pytest.approx(alone.probe([7, 14, 9, 17]), abs=1e-3)
    assert ranks[0][1] == ranks[1][1]
    assert all(torch.equal(tensor, ranks[1][2][name]) for name, tensor in ranks[0][2].items())
    assert Learner(str(folder / "saved"), CONFIG, seed=0).probe([7, 14]) != alone.probe([7, 14])
