"""The trainer's arithmetic: one optimizer step of GRPO on one batch, data parallel over ranks.

Promises: the gradient of a step does not depend on the number of ranks or on the micro-batch size (up to rounding); a step that meets a
non-finite number raises on every rank before anything is changed; weights and recovery state together continue bit for bit. Leaves out:
where weights and state are kept, and the process group, which the caller makes (gloo on CPU, nccl on GPUs) and whose time-out bounds
every wait here. On CPU the ranks hold full copies and add up their gradients; on CUDA devices (or with ``sharded``) FSDP2 shards them.

A token generated at temperature T is trained on at temperature T: ``logprobs`` of a trajectory must be those of the sampled distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from robustrl.config import GRPOConfig
from robustrl.core.roles import Phase
from robustrl.errors import ConfigError, TrainingError
from robustrl.rl.grpo import group_advantages, token_loss
from robustrl.rl.models import load_model, load_tokenizer
from robustrl.rl.trajectory import Trajectory
from robustrl.saving import folder_to_write

_SUMS = ("loss", "importance_weight", "clip_fraction", "kl", "kl_reference", "entropy")


class Learner:
    """Holds model and optimizer of one rank. Methods marked *collective* must be called by all ranks together."""

    def __init__(self, model: str, config: GRPOConfig, *, seed: int, rank: int = 0, world_size: int = 1, device: str = "cpu",
                 temperature: float = 1.0, sharded: bool | None = None) -> None:
        if world_size > 1 and not (dist.is_initialized() and dist.get_world_size() == world_size):
            raise ConfigError("trainer_ranks", world_size, "needs a process group of that size before the learner is made")
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._config, self._rank, self._world = config, rank, world_size
        self._device, self._temperature = torch.device(device), temperature
        self._model_name = model
        self._sharded = world_size > 1 and (self._device.type == "cuda" if sharded is None else sharded)
        self.model = self._load(model)
        self._reference = None
        if config.kl_coefficient > 0:
            self._reference = self._load(model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
        self.step = 0
        """Optimizer steps done; also the version of the weights."""

    def take_rank(self, rank: int, world_size: int) -> None:
        """Made alone, it becomes one of several data-parallel ranks, whose process group is there. Not for sharded weights."""
        if self._sharded:
            raise ConfigError("sharded", True, "cannot be given another rank: its shards belong to a process group")
        self._rank, self._world = rank, world_size

    def _load(self, name: str) -> Any:
        model = load_model(name).to(self._device).eval()  # no dropout: log-probabilities must be those of the engine
        if self._sharded:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self._device.type, (self._world,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def train_step(self, trajectories: Sequence[Trajectory], on_phase: Callable[[Phase], None] = lambda phase: None,
                   on_mark: Callable[[int, int], None] = lambda done, total: None) -> dict[str, float]:
        """One optimizer step on the whole batch, which every rank passes in full and in the same order. Collective.

        ``on_phase`` is called as each phase begins, ``on_mark(done, total)`` after each micro-batch of this rank. Returns the metrics of
        the batch, equal on all ranks. Raises ValueError for a trajectory that cannot be trained on, TrainingError for a loss or gradient
        that is not finite; the weights are then as before.
        """
        on_phase(Phase.ADVANTAGE)
        _check(trajectories)
        advantages = group_advantages([t.reward for t in trajectories if t.reward is not None], [(t.batch, t.group) for t in trajectories])
        tokens = sum(sum(t.mask) for t in trajectories)

        on_phase(Phase.TRAIN)
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(len(_SUMS), dtype=torch.float64)
        weight_max = torch.zeros((), dtype=torch.float64)
        pieces = list(self._pieces(trajectories, advantages))
        on_mark(0, len(pieces))
        for done, piece in enumerate(pieces, 1):
            part, largest = self._forward_backward(piece, tokens)
            sums += part
            weight_max = torch.maximum(weight_max, largest)
            on_mark(done, len(pieces))

        on_phase(Phase.OPTIMIZER)
        if self._world > 1:
            self._reduce(sums, weight_max)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        norm = float(_full(grad_norm))
        metrics = dict(zip(_SUMS, (sums / tokens).tolist(), strict=True))
        if not all(map(torch.isfinite, (sums[0], torch.tensor(norm)))):
            what = f"loss = {metrics['loss']}" if not torch.isfinite(sums[0]) else f"gradient norm = {norm}"
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(f"optimizer step {self.step + 1}: {what} is not finite; the weights are still those of step {self.step}. "
                                f"Likely causes: a learning rate too high ({self._config.learning_rate}) or damaged log-probabilities")
        rate = self._config.learning_rate * min(1.0, (self.step + 1) / max(1, self._config.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self._reference is None:
            del metrics["kl_reference"]
        rewards = [t.reward for t in trajectories if t.reward is not None]
        return metrics | {
            "reward": sum(rewards) / len(rewards),
            "accuracy": sum(r >= 1 for r in rewards) / len(rewards),
            "length": tokens / len(trajectories),
            "importance_weight_max": weight_max.item(), "grad_norm": norm, "learning_rate": rate,
        }

    def _pieces(self, trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> Iterator[list[tuple[Trajectory, float, bool]]]:
        """This rank's micro-batches of (trajectory, advantage, counts), alike in length; every rank gets equally many."""
        order = sorted(range(len(trajectories)), key=lambda i: len(trajectories[i].prompt_tokens) + len(trajectories[i].tokens))
        size = self._config.micro_batch * self._world
        for start in range(0, len(order), size):
            mine = order[start:start + size][self._rank::self._world]
            # a rank without a share runs one trajectory that does not count: with sharded weights a forward pass is collective
            yield [(trajectories[i], advantages[i], True) for i in mine] or [(trajectories[order[start]], 0.0, False)]

    def _forward_backward(self, piece: list[tuple[Trajectory, float, bool]], tokens: int) -> tuple[Tensor, Tensor]:
        width = max(len(t.prompt_tokens) + len(t.tokens) for t, _, _ in piece)
        first = min(len(t.prompt_tokens) for t, _, _ in piece)  # logits before the first generated token are not needed
        inputs = torch.zeros(len(piece), width, dtype=torch.long)
        behaviour, mask = torch.zeros(len(piece), width), torch.zeros(len(piece), width)
        for row, (t, _, counts) in enumerate(piece):
            start, end = len(t.prompt_tokens), len(t.prompt_tokens) + len(t.tokens)
            inputs[row, :end] = torch.tensor(t.prompt_tokens + t.tokens)
            behaviour[row, start:end] = torch.tensor(t.logprobs)
            if counts:
                mask[row, start:end] = torch.tensor(t.mask, dtype=torch.float32)
        inputs, behaviour, mask = inputs.to(self._device), behaviour[:, first:].to(self._device), mask[:, first:].to(self._device)
        advantage = torch.tensor([a for _, a, _ in piece], device=self._device)[:, None].expand_as(mask)

        logp, entropy = self._logprobs(self.model, inputs, first)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._logprobs(self._reference, inputs, first)
        config = self._config
        stats = token_loss(logp, behaviour, advantage, mask, clip=config.clip, cap=config.importance_cap,
                           kl_coefficient=config.kl_coefficient, reference=reference)
        # FSDP averages the ranks' gradients where plain data parallelism here adds them up
        (stats.loss * ((self._world if self._sharded else 1) / tokens)).backward()
        parts = (stats.loss, stats.weight, stats.clipped, stats.kl, stats.kl_reference, (entropy * mask).sum())
        return torch.stack([part.detach().double().cpu() for part in parts]), stats.weight_max.detach().double().cpu()

    def _logprobs(self, model: Any, inputs: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Log-probability of each token from position ``first`` on, given those before it, and the entropy it was drawn with.

        Rows are padded on the right and attention is causal, so padding changes nothing before it and needs no attention mask.
        """
        logits = model(input_ids=inputs, use_cache=False, logits_to_keep=inputs.shape[1] - first + 1).logits[:, :-1]
        logp = (logits.float() / self._temperature).log_softmax(-1)
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, inputs[:, first:, None]).squeeze(-1), entropy

    def _reduce(self, sums: Tensor, weight_max: Tensor) -> None:
        """Adds up metrics and, unless FSDP did, gradients over the ranks."""
        if not self._sharded:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat)
            for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))
        for tensor, operation in ((sums, dist.ReduceOp.SUM), (weight_max, dist.ReduceOp.MAX)):
            moved = tensor.to(self._device)
            dist.all_reduce(moved, operation)
            tensor.copy_(moved)

    def probe(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of ``tokens[1:]``, each given all before it, at temperature 1. Collective where sharded."""
        with torch.no_grad():
            inputs = torch.tensor([list(tokens)], device=self._device)
            logp = self.model(input_ids=inputs, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            return logp.gather(-1, inputs[0, 1:, None]).squeeze(-1).tolist()

    def weights(self) -> dict[str, Tensor]:
        """The full state dict, a tied ``lm_head.weight`` included. Collective where sharded.

        Unsharded, these are the live tensors: copy them before the next step.
        """
        return {name: _full(tensor.detach()) for name, tensor in self.model.state_dict().items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Takes over a full state dict as ``weights`` gives it. Collective where sharded.

        Raises RuntimeError that names missing and unexpected names and wrong shapes.
        """
        own = self.model.state_dict()
        self.model.load_state_dict({name: _like(tensor, own.get(name)) for name, tensor in weights.items()})

    def recovery_state(self) -> bytes:
        """Optimizer, step (and with it the learning-rate schedule) and random state; not the weights. Collective where sharded."""
        return b"".join(part.tobytes() for part in self.recovery_parts())

    def recovery_parts(self) -> list[np.ndarray]:
        """The same as uint8 arrays, one behind the other, for whoever copies them to where they are kept. Collective where sharded.

        Unsharded and on CPU, they are the live state: copy them before the next step.
        """
        optimizer = self.optimizer.state_dict()
        tensors: list[tuple[int, str, str, list[int]]] = []
        data: list[np.ndarray] = []
        for i, entry in optimizer["state"].items():
            for key, value in entry.items():
                whole = _full(value).detach().cpu().contiguous()
                tensors.append((i, key, str(whole.dtype).removeprefix("torch."), list(whole.shape)))
                data.append(whole.reshape(-1).view(torch.uint8).numpy())
        rng = torch.get_rng_state().numpy().tobytes()
        head = msgspec.msgpack.encode((self.step, rng, optimizer["param_groups"], tensors))
        return [np.frombuffer(len(head).to_bytes(8, "little") + head, np.uint8), *data]

    def load_recovery_state(self, state: bytes) -> None:
        """Continues from ``recovery_state``; the weights of the same step come by ``load_weights``. Collective where sharded."""
        start = 8 + int.from_bytes(state[:8], "little")
        step, rng, groups, tensors = msgspec.msgpack.decode(state[8:start])
        flat = torch.frombuffer(bytearray(state[start:]) or bytearray(1), dtype=torch.uint8)
        parameters = list(self.model.parameters())
        entries: dict[int, dict[str, Any]] = {}
        at = 0
        for i, key, name, shape in tensors:
            dtype = getattr(torch, name)
            end = at + math.prod(shape) * dtype.itemsize
            entries.setdefault(i, {})[key] = _like(flat[at:end].clone().view(dtype).view(shape), parameters[i])
            at = end
        groups = [group | {"betas": tuple(group["betas"])} for group in groups]
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})
        torch.set_rng_state(torch.frombuffer(bytearray(rng), dtype=torch.uint8))
        self.step = step

    def save_pretrained(self, path: str) -> None:
        """Model and tokenizer in Hugging Face's format; rank 0 writes. Collective where sharded. Raises ConfigError naming ``path``."""
        if self._rank == 0:
            folder_to_write(path)  # transformers would only log that it is a file
        weights = self.weights()
        if self._rank == 0:
            self.model.save_pretrained(path, state_dict=weights)
            load_tokenizer(self._model_name).save_pretrained(path)


def _full(tensor: Any) -> Any:
    """The whole of a sharded tensor (collective); anything else as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _like(tensor: Tensor, sharded: Any) -> Tensor:
    """A whole tensor, sharded as the other one where that is sharded and of its shape (collective)."""
    if not hasattr(sharded, "full_tensor") or sharded.shape != tensor.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(sharded.device), sharded.device_mesh, sharded.placements)


def _check(trajectories: Sequence[Trajectory]) -> None:
    if not trajectories:
        raise ValueError("a batch without trajectories cannot be trained on")
    for t in trajectories:
        if t.reward is None:
            raise ValueError(f"trajectory {t.id} has no reward: dropped trajectories do not belong in a batch")
        if not len(t.tokens) == len(t.logprobs) == len(t.mask):
            raise ValueError(f"trajectory {t.id}: {len(t.tokens)} tokens, {len(t.logprobs)} log-probabilities, {len(t.mask)} mask entries")
        if not (t.prompt_tokens and any(t.mask)):
            raise ValueError(f"trajectory {t.id} has no prompt token or no generated token")
