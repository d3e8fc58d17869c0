"""Group Relative Policy Optimization, in reading order: advantages, importance weights, clipped objective, KL penalty, loss.

Three policies meet in it. The *behaviour* policy generated the tokens: the engine, at a version that may be an optimizer step old (or two
versions within one trajectory). The *old* policy is the trainer's at the start of the optimizer step, on the same tokens. The *current*
policy is what the gradient moves. This package makes one gradient step per batch, so current equals old in value, the clipped ratio is
exactly 1 and the clip is inactive (clip_fraction is 0): the ratio is there for its gradient. What corrects for stale weights and for an
engine that rounds differently is the importance weight old / behaviour, truncated at a cap and held constant in the gradient. The two are
kept apart, as in "decoupled PPO" (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298), because clipping against the behaviour
policy would silence tokens for being stale rather than for being pushed too far.

All functions work on plain float tensors of any one shape, one entry per token; ``mask`` is 1 where the model chose the token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_EPSILON = 1e-4


def group_advantages(rewards: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """A = (r - mean) / (std + 1e-4) over the samples of the same prompt (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The standard deviation is that of the population, so a group whose rewards are equal, or of one sample, has advantage 0.
    """
    members = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        members[group].append(reward)
    moments = {}
    for group, values in members.items():
        mean = sum(values) / len(values)
        moments[group] = mean, math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    return [(reward - moments[group][0]) / (moments[group][1] + _EPSILON) for reward, group in zip(rewards, groups, strict=True)]


def importance_weights(old: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """w = min(pi_old / pi_behaviour, cap) per token: truncated importance sampling (Espeholt et al., arXiv 1802.01561, rho-bar)."""
    return (old - behaviour).exp().clamp(max=cap)


def clipped_objective(current: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """min(r A, clip(r, 1 - c, 1 + c) A) with r = pi_current / pi_old (PPO, arXiv 1707.06347, equation 7). To be maximised."""
    ratio = (current - old).exp()
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def kl_estimate(policy: Tensor, other: Tensor) -> Tensor:
    """k3 = other/policy - 1 - log(other/policy) per token drawn from ``policy``: unbiased for KL(policy || other), never negative.

    Schulman, "Approximating KL divergence", 2020; DeepSeekMath, arXiv 2402.03300, equation 4.
    """
    gap = other - policy
    return gap.expm1() - gap


class TokenStats(NamedTuple):
    """Sums over the masked tokens of one micro-batch, except ``weight_max``; no gradient but in ``loss``."""

    loss: Tensor
    weight: Tensor
    weight_max: Tensor
    clipped: Tensor
    kl: Tensor
    """KL(behaviour || current): how far off-policy the data is."""
    kl_reference: Tensor


def token_loss(current: Tensor, behaviour: Tensor, advantage: Tensor, mask: Tensor, *, clip: float, cap: float, kl_coefficient: float = 0.0,
               reference: Tensor | None = None, old: Tensor | None = None) -> TokenStats:
    """The loss, as a sum over tokens: -w min(r A, clip(r) A) + beta k3(current, reference).

    Divide it by the number of masked tokens of the *whole* batch: each token then counts the same, however the batch is cut (token-level
    loss of DAPO, arXiv 2503.14476, equation 8). Without ``old`` the current values are taken: the one-gradient-step case.
    """
    fixed = current.detach()
    old = fixed if old is None else old
    weight = importance_weights(old, behaviour, cap)
    loss = -weight * clipped_objective(current, old, advantage, clip)
    if reference is None:
        penalty = torch.zeros_like(fixed)
    else:
        penalty = kl_estimate(current, reference)
        loss = loss + kl_coefficient * penalty
    ratio = (fixed - old).exp()
    clipped = ((ratio < 1 - clip) & (advantage < 0)) | ((ratio > 1 + clip) & (advantage > 0))
    return TokenStats((loss * mask).sum(), (weight * mask).sum(), (weight * mask).max(), (clipped * mask).sum(),
                      (kl_estimate(behaviour, fixed) * mask).sum(), (penalty.detach() * mask).sum())
