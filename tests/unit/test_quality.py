"""Figures of a detector's quality: checked against published tables and against logs short enough to count by hand."""

from __future__ import annotations

import pytest

from robustrl.core import events as ev
from robustrl.replay.quality import Quality, Truth, dominates, exact_bounds, judge_quality, percentile, poisson_upper, total


@pytest.mark.parametrize(("k", "n", "bounds"), [
    (0, 2000, (0.0, 0.001843)), (2000, 2000, (0.998157, 1.0)), (0, 10, (0.0, 0.308497)), (5, 10, (0.187086, 0.812914)),
    (1, 20, (0.001265, 0.248733)), (0, 0, (0.0, 1.0)),
])  # fmt: skip
def test_exact_binomial_bounds(k, n, bounds):
    assert exact_bounds(k, n) == pytest.approx(bounds, abs=2e-6)


def test_no_share_beyond_all():
    with pytest.raises(ValueError, match="3 of 2"):
        exact_bounds(3, 2)


def test_a_count_of_zero_is_not_a_mean_of_zero():
    assert poisson_upper(0) == pytest.approx(3.6889, abs=1e-3)
    assert poisson_upper(5) == pytest.approx(11.668, abs=1e-2)


def verdict(seen: float, role: str, kind: str = "failed") -> ev.Verdict:
    return ev.Verdict(role=role, incarnation=1, kind=kind, rule="r", evidence={}, threshold=1.0, due=seen, seen=seen, onset=seen,
                      blind_spot="")  # fmt: skip


def truth(**faults: float) -> Truth:
    return Truth({role.replace("_", "-"): at for role, at in faults.items()}, frozenset({"rollout-9"}), 4, 0.0, 100.0)


def test_a_fault_that_is_found_ends_the_reading():
    got = judge_quality([verdict(12.0, "trainer-0"), verdict(13.0, "rollout-0")], truth(trainer_0=10.0))
    assert (got.faults, got.delays, got.restricted, got.mistakes, got.healthy) == (1, (2.0,), (2.0,), 0, 48.0)


def test_a_fault_that_is_missed_counts_as_the_time_that_it_was_watched():
    got = judge_quality([], truth(trainer_0=10.0))
    assert (got.faults, got.delays, got.restricted) == (1, (), (90.0,))


def test_mistakes_last_until_they_are_taken_back():
    said = [verdict(5.0, "rollout-0"), verdict(8.0, "rollout-0", "cleared"), verdict(90.0, "rollout-1"), verdict(7.0, "rollout-9")]
    got = judge_quality(sorted(said, key=lambda v: v.seen), truth())
    assert (got.mistakes, got.wrong_trials, got.mistaken, got.healthy) == (2, 1, 13.0, 400.0)
    table = got.table()
    assert table["query_accuracy"] == pytest.approx(1 - 13 / 400) and table["mistake_duration_mean"] == 6.5
    assert table["mistake_rate_per_hour"] == pytest.approx(72.0)


def test_too_early_is_a_mistake_and_standing_condemned_when_the_fault_comes_is_finding_it():
    got = judge_quality([verdict(9.0, "trainer-0")], truth(trainer_0=10.0))
    assert (got.mistakes, got.delays, got.mistaken) == (1, (0.0,), 1.0)
    got = judge_quality([verdict(9.0, "trainer-0"), verdict(9.5, "trainer-0", "cleared")], truth(trainer_0=10.0))
    assert (got.mistakes, got.delays, got.restricted) == (1, (), (90.0,))


def test_one_who_names_nobody_finds_any_fault():
    got = judge_quality([verdict(15.0, "job")], truth(trainer_0=10.0), "job")
    assert (got.delays, got.mistakes, got.faults) == ((5.0,), 0, 1)
    assert judge_quality([verdict(9.0, "job"), verdict(9.5, "job", "cleared")], truth(trainer_0=10.0), "job").mistakes == 1


def test_sums_and_percentiles():
    one = judge_quality([verdict(12.0, "trainer-0")], truth(trainer_0=10.0))
    two = total([one, judge_quality([], truth(trainer_0=20.0))])
    assert (two.trials, two.faults, two.delays, two.restricted) == (2, 2, (2.0,), (2.0, 80.0))
    assert two.table()["recall"] == 0.5 and total([]) == Quality()
    assert percentile(range(1, 101), 0.95) == 95 and percentile([], 0.95) is None


def test_a_curve_dominates_another_point_by_point():
    assert dominates([(0.0, 5.0), (2.0, 1.0)], [(0.0, 5.0), (1.0, 6.0), (3.0, 1.0)]) == []
    assert dominates([(0.0, 5.0)], [(0.0, 4.0), (1.0, 5.5)]) == [(0.0, 4.0)]
