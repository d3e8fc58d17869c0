"""What a job is made of: one validated, immutable configuration, the same from a notebook, a file and the command line."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class GRPOConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300), with truncated importance weights."""

    learning_rate: float = 2e-4
    warmup_steps: int = 5
    clip: float = 0.2
    importance_cap: float = 2.0
    kl_coefficient: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch: int = 32
    """Trajectories per forward-backward, per rank."""


class SamplingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    """Generated tokens per trajectory over all turns; None: the task's own."""


class Deadlines(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds after which a wait ends with an error that names what it waited for."""

    cluster_start: float = 120.0
    role_start: float = 240.0
    call: float = 60.0
    generation: float = 600.0
    train_step: float = 600.0
    pull: float = 60.0
    stop: float = 10.0


class JobConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str = "job"
    task: str = "arithmetic"
    task_options: dict[str, Any] = {}
    reward: str | None = None
    """``module:function``, or a function given to ``launch`` (then the path of its pickle); None: the task's own."""
    reward_errors: Literal["stop", "drop"] = "stop"
    model: str = "tiny"
    engine: Literal["vllm", "torch"] = "vllm"
    profile: Literal["lab", "class"] = "lab"
    steps: int = 60
    seed: int = 0
    prompts_per_step: int = 16
    samples_per_prompt: int = 8
    staleness: int = 1
    """How many optimizer steps a token's version may lag behind the newest when its batch is trained; 0: on-policy."""
    rollouts: int = 2
    trainer_ranks: int = 1
    agent_workers: int = 2
    nodes: int = 4
    address: str | None = None
    """GCS address of an existing Ray cluster, or ``auto``; None: own raylets on this machine."""
    run_dir: str = "runs"
    keep_alive: bool | None = None
    """Go on when the owner dies; None: only on an existing cluster."""
    evaluation_prompts: int = 256
    evaluation_every: int = 0
    """Optimizer steps between evaluations; 0: before the first and after the last only."""
    rollout_concurrency: int = 64
    probe_limit: float = 1e-3
    """Largest allowed difference of the probe prompt's log-probabilities after a commit (fp32)."""
    grpo: GRPOConfig = GRPOConfig()
    sampling: SamplingConfig = SamplingConfig()
    deadlines: Deadlines = Deadlines()
