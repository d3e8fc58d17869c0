"""Whether a setting that was chosen on some runs is better on others: cost by run, side by side, with an interval. Pure.

    proof = prove(found.recommended.thresholds, Thresholds.lab(), held_out)         proof.saved, proof.low, proof.high, proof.missed

Both settings are scored on the same runs. The interval is a bootstrap over runs (percentile, 95%), because mistakes and delays of one run
belong together. Leaves out: whether those runs are like the ones to come.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from ..core.thresholds import Thresholds
from ..errors import ConfigError
from .reducing import floors, reduced
from .run import Run
from .scoring import Case, Score, total

_DRAWS = 4000


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """``saved``: seconds by which the chosen setting costs less on all runs together; ``low`` and ``high``: its 95% interval."""

    runs: int
    faults: int
    missed: int
    missed_before: int
    false_alarms: int
    false_alarms_before: int
    cost: float
    cost_before: float
    saved: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """No fault is missed, and the interval lies above nothing saved."""
        return self.missed == 0 and self.low > 0


def prove(chosen: Thresholds, before: Thresholds, runs: Sequence[Run], seed: int = 0) -> Proof:
    """Raises ConfigError without runs."""
    if not runs:
        raise ConfigError("runs", [], "must be at least one run")
    low = floors([chosen, before])
    cases = [Case(run, reduced(run.recording, low)) for run in runs]
    return compared([case.score(chosen) for case in cases], [case.score(before) for case in cases], seed)


def compared(chosen: Sequence[Score], before: Sequence[Score], seed: int = 0) -> Proof:
    """Of two settings' scores, run by run."""
    ours, theirs = total(chosen), total(before)
    low, high = interval([other.cost - one.cost for one, other in zip(chosen, before, strict=True)], seed)
    return Proof(
        runs=len(chosen), faults=ours.faults, missed=len(ours.missed), missed_before=len(theirs.missed), false_alarms=len(ours.needless),
        false_alarms_before=len(theirs.needless), cost=ours.cost, cost_before=theirs.cost, saved=theirs.cost - ours.cost,
        low=low, high=high,
    )  # fmt: skip


def interval(values: Sequence[float], seed: int = 0, draws: int = _DRAWS) -> tuple[float, float]:
    """Of the sum of ``values``, drawn again with replacement: 2.5% and 97.5%."""
    dice = random.Random(seed)
    sums = sorted(sum(dice.choices(values, k=len(values))) for _ in range(draws))
    return sums[int(0.025 * draws)], sums[min(draws - 1, int(0.975 * draws))]
