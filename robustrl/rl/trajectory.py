"""One sample of one prompt: the record that rollouts fill, the journal keeps and the learner trains on. It travels as msgpack."""

from __future__ import annotations

from typing import Any

import msgspec


class Trajectory(msgspec.Struct, kw_only=True):
    """``tokens``, ``logprobs`` and ``mask`` run in step: one entry per token after the prompt."""

    id: int
    batch: int
    group: int
    """Number of the prompt within its batch; the samples of one prompt share (batch, group)."""
    prompt: str
    """The text shown to people."""
    prompt_tokens: list[int]
    columns: dict[str, Any]
    """What the task gives to the reward function."""
    messages: list[dict[str, Any]] | None = None
    """The prompt as chat messages where it is conversational."""
    tokens: list[int] = []
    """Generated tokens (the end-of-sequence token too) and tool tokens, in order."""
    logprobs: list[float] = []
    """Log-probabilities under the policy that generated (the behaviour policy), at the sampling temperature; 0.0 on tool tokens."""
    mask: list[int] = []
    """1: generated; 0: put in by a tool, never trained on."""
    versions: list[tuple[int, int]] = []
    """Runs of (weight version, number of tokens), in order; together ``len(tokens)``."""
    text: str = ""
    """``tokens`` as text, without special tokens."""
    reward: float | None = None
    finish: str = ""
    """``stop``: ended by itself; ``length``: cut at the limit; empty: still in flight."""
    tool_turns: int = 0


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Trajectory).decode
