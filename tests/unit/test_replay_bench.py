"""The bench of the replay: its targets, and the run that it makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from robustrl.core.thresholds import Thresholds
from tests.benchmarks import _replay_live, replay
from tests.benchmarks._report import Bench


def test_targets_have_no_value_until_their_rows_are_there() -> None:
    bench = Bench("replay", replay.ROWS, replay.measure)
    replay.judge(bench)
    assert all(target["value"] is None and not target["met"] for target in bench.targets)
    bench.targets.clear()
    bench.done = {"load": {}, "replay": {"first_s": 0.7}, "sweep": {"for_1000_s": 61.0}, "slider": {"p95_s": 0.09},
                  "held-out": {"missed": 0, "low": -1.0}, "live": {"settings": 20, "within": 20}}
    replay.judge(bench)
    assert [target["met"] for target in bench.targets] == [True, False, True, True, False, True]


def test_what_a_live_cross_check_concludes() -> None:
    trials = [{"lived_s": 3.1, "predicted_s": 3.0, "noise_s": 0.01}, {"lived_s": 3.0, "predicted_s": 3.2, "noise_s": 0.05}]
    row = _replay_live.summary(trials, [0.001, 0.002, 0.05], True)
    assert row["within"] == 1 and row["excess_max_s"] == pytest.approx(0.05) and row["difference_max_s"] == pytest.approx(0.2)
    assert row["noise_median_s"] == 0.002 and row["noise_max_s"] == 0.05
    for changes in _replay_live.draw(50):
        assert changes["rollout.no_tokens"] + changes["rollout.heartbeat"] < _replay_live.LONGEST and Thresholds.lab().updated(changes)


def test_its_run_has_64_roles_and_its_faults_are_truth(tmp_path: Path) -> None:
    assert replay.record(tmp_path / "hour.jsonl.gz", seconds=9.0, every=9.0) == 64
    run = replay.loaded(tmp_path / "hour.jsonl.gz")
    assert len(run.roles) == 64 and [mark.role for mark in run.truth] == ["rollout-3"]
