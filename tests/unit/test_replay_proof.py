"""What a comparison of two settings on held-out runs concludes, by hand."""

from __future__ import annotations

import pytest

from robustrl.core.thresholds import Thresholds
from robustrl.errors import ConfigError
from robustrl.replay.proof import compared, interval, prove
from robustrl.replay.scoring import Score


def test_costs_and_mistakes_are_counted_run_by_run() -> None:
    chosen = [Score((1.0,), watched=10.0), Score((1.5,), needless=(4.0,), watched=10.0), Score((2.0,), watched=10.0)]
    before = [Score((3.0,), watched=10.0), Score((), missed=(9.0,), watched=10.0), Score((6.0,), watched=10.0)]
    proof = compared(chosen, before)
    assert (proof.runs, proof.faults, proof.missed, proof.missed_before) == (3, 3, 0, 1)
    assert (proof.cost, proof.cost_before, proof.saved) == (8.5, 18.0, 9.5)
    assert (proof.false_alarms, proof.false_alarms_before) == (1, 0)
    assert 3 * 2.0 <= proof.low <= 9.5 <= proof.high <= 3 * 4.0 and proof.holds


def test_it_does_not_hold_with_a_missed_fault_or_with_an_interval_that_reaches_nothing() -> None:
    better, worse = Score((1.0,)), Score((5.0,))
    assert compared([better] * 4, [worse] * 4).holds
    assert not compared([*[better] * 3, Score((), missed=(0.5,))], [worse] * 4).holds
    assert not compared([better, worse], [worse, better]).holds


def test_the_interval_is_that_of_resampled_runs() -> None:
    assert interval([2.0] * 5) == (10.0, 10.0)
    low, high = interval([0.0, 1.0] * 50, seed=1)
    assert low == pytest.approx(40.0, abs=1.5) and high == pytest.approx(60.0, abs=1.5), "50 -+ 1.96 x sqrt(100) / 2"
    assert interval([0.0, 1.0] * 50, seed=1) == (low, high)


def test_without_runs_nothing_is_proved() -> None:
    with pytest.raises(ConfigError, match="runs"):
        prove(Thresholds.lab(), Thresholds.paper(), [])
