"""One sample of one prompt: the record that rollouts fill, the journal keeps and the learner trains on. It travels as msgpack.

A trajectory grows by generated tokens and by what tools answer. A `Part` is a stretch of that growth: what a rollout tells the journal
while it generates, and what a trajectory is put together from again after its rollout died.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

Runs = list[tuple[int, int]]
"""(weight version, number of tokens), in order."""
IN_TOOL = "tool"
"""State of a part: the trajectory waits for a tool's answer."""


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
    versions: Runs = []
    """Together ``len(tokens)``."""
    text: str = ""
    """``tokens`` as text, without special tokens."""
    reward: float | None = None
    finish: str = ""
    """``stop``: ended by itself; ``length``: cut at the limit; empty: still in flight."""
    tool_turns: int = 0

    @property
    def last_version(self) -> int:
        """Of its newest token; -1 without any."""
        return self.versions[-1][0] if self.versions else -1

    def generated(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.mask += [1] * len(tokens)
        stamp(self.versions, version, len(tokens))

    def answered(self, tokens: Sequence[int], version: int) -> None:
        """A tool's answer, stamped with the version that goes on from it."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.mask += [0] * len(tokens)
        stamp(self.versions, version, len(tokens))
        self.tool_turns += 1


class Part(msgspec.Struct, array_like=True):
    """What a trajectory gained from its token ``at`` on."""

    id: int
    at: int
    tokens: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    versions: Runs = []
    tool_turns: int = 0
    """Of the whole trajectory at the end of this part, as is the state."""
    state: str = ""
    """Empty: it is being generated; IN_TOOL; or how it finished."""

    @property
    def end(self) -> int:
        return self.at + len(self.tokens)

    def join(self, more: Part) -> bool:
        """Takes in what ``more`` has beyond this part; False if there is a gap between the two."""
        known = self.end - more.at
        if known < 0:
            return False
        if more.end >= self.end:
            self.tokens += more.tokens[known:]
            self.logprobs += more.logprobs[known:]
            self.mask += more.mask[known:]
            for version, count in runs_between(more.versions, known, len(more.tokens)):
                stamp(self.versions, version, count)
            self.tool_turns, self.state = more.tool_turns, more.state
        return True


def part_of(trajectory: Trajectory, at: int, end: int, tool_turns: int, state: str) -> Part:
    """Its tokens from ``at`` to ``end``; another thread may be adding to it behind ``end``."""
    return Part(
        trajectory.id,
        at,
        trajectory.tokens[at:end],
        trajectory.logprobs[at:end],
        trajectory.mask[at:end],
        runs_between(list(trajectory.versions), at, end),
        tool_turns,
        state,
    )


def resumed(prompt: Trajectory, part: Part | None) -> Trajectory:
    """The trajectory as far as ``part`` (from token 0) knows it; from its prompt without one."""
    part = part or Part(prompt.id, 0)
    return msgspec.structs.replace(
        prompt,
        tokens=list(part.tokens),
        logprobs=list(part.logprobs),
        mask=list(part.mask),
        versions=list(part.versions),
        tool_turns=part.tool_turns,
        finish=part.state if part.state != IN_TOOL else "",
    )


def stamp(runs: Runs, version: int, count: int) -> None:
    """``count`` more tokens, of this version."""
    if not count:
        return
    if runs and runs[-1][0] == version:
        runs[-1] = (version, runs[-1][1] + count)
    else:
        runs.append((version, count))


def runs_between(runs: Runs, start: int, end: int) -> Runs:
    """The runs of the tokens from ``start`` to ``end``."""
    found: Runs = []
    first = 0
    for version, count in runs:
        if (inside := min(first + count, end) - max(first, start)) > 0:
            found.append((version, inside))
        first += count
    return found


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Trajectory).decode
parts_decoder = msgspec.msgpack.Decoder(list[Part])
"""What a rollout sends in one flush."""
