"""The bench of the replay: its targets, and the run that it makes."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks import replay
from tests.benchmarks._report import Bench


def test_targets_have_no_value_until_their_rows_are_there() -> None:
    bench = Bench("replay", ["load", "replay", "sweep"], replay.measure)
    replay.judge(bench)
    assert all(target["value"] is None and not target["met"] for target in bench.targets)
    bench.targets.clear()
    bench.done = {"load": {}, "replay": {"first_s": 0.7}, "sweep": {"for_1000_s": 61.0}}
    replay.judge(bench)
    assert [target["met"] for target in bench.targets] == [True, False]


def test_its_run_has_64_roles_and_its_faults_are_truth(tmp_path: Path) -> None:
    assert replay.record(tmp_path / "hour.jsonl.gz", seconds=9.0, every=9.0) == 64
    run = replay.loaded(tmp_path / "hour.jsonl.gz")
    assert len(run.roles) == 64 and [mark.role for mark in run.truth] == ["rollout-3"]
