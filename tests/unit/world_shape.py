"""What a virtual job is, and what is done to it: plain data. See detection_world.py."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

TICK = 0.05


@dataclass(frozen=True)
class Shape:
    """A healthy job: seconds, tokens per second and trajectory, trajectories per batch."""

    ranks: int = 1
    rollouts: int = 2
    workers: int = 1
    lockstep: bool = False
    """Ranks meet at each micro-batch (sharded weights), not only in the optimizer."""
    staleness: int = 1
    batch: int = 32
    tokens: int = 60
    rate: float = 60.0
    concurrency: int = 64
    micro_batches: int = 6
    micro_seconds: float = 0.2
    seconds: dict[str, float] = field(
        default_factory=lambda: {"advantage": 0.05, "optimizer": 0.1, "snapshot": 0.2, "publish": 0.1, "pull": 0.2}
    )
    tools: float = 0.2
    """Share of the trajectories with a tool turn."""
    tool_seconds: float = 0.3
    delay: float = 0.005
    """Mean of the time that a word takes."""
    jitter: float = 0.01
    """Mean lateness of a node agent's look."""

    @classmethod
    def draw(cls, dice: random.Random) -> Shape:
        uniform = dice.uniform
        return cls(
            ranks=dice.choice([1, 1, 2, 3]), rollouts=dice.choice([1, 2, 2, 3]), workers=dice.choice([1, 2]), staleness=dice.choice([0, 1]),
            lockstep=dice.random() < 0.5, batch=dice.randint(8, 48), tokens=dice.randint(20, 120), rate=uniform(30, 120),
            micro_batches=dice.randint(2, 10), micro_seconds=uniform(0.05, 0.6), tools=dice.choice([0.0, 0.2, 0.5]),
            tool_seconds=uniform(0.1, 1.5), delay=uniform(0.001, 0.01), jitter=uniform(0.0, 0.02),
            seconds={"advantage": uniform(0.01, 0.5), "optimizer": uniform(0.02, 0.4), "snapshot": uniform(0.05, 0.8),
                     "publish": uniform(0.02, 0.3), "pull": uniform(0.05, 0.8)},
        )  # fmt: skip


@dataclass(frozen=True)
class Fault:
    kind: str
    role: str = ""
    at: float | tuple[float, float] = 10.0
    """Virtual seconds, or a range that it is drawn from; so are the next ones."""
    seconds: float | tuple[float, float] | None = None
    phase: str = ""
    size: float | tuple[float, float] = 3.0
    step: int = 0
    """Wait until this optimizer step is committed: from step 1 on, start-up grace is over."""
    after: int | None = None
    """``at`` counts from the injection of this one of the faults planned with it."""
