"""What the benchmarks of recovery conclude from their rows: targets by hand, and none from rows that are missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from story import Story

from robustrl.core import events as ev
from robustrl.errors import WaitTimeout
from robustrl.tables import Events, recoveries
from tests.benchmarks import _faulty, ettr, learn, recovery, sync
from tests.benchmarks._report import Bench


def targets(bench: Bench, judge: Callable[[Bench], None], rows: dict[str, Any]) -> dict[str, Any]:
    bench.done, bench.targets = rows, []
    judge(bench)
    return {target["name"]: target for target in bench.targets}


@pytest.mark.parametrize(
    ("bench", "judge"),
    [
        (recovery._Recovery(), recovery.judge),
        (ettr._Ettr(), ettr.judge),
        (Bench("learn", learn._ROWS, learn.measure), learn.judge),
        (Bench("sync", sync._ROWS, sync.measure), sync.judge),
    ],
    ids=["recovery", "ettr", "learn", "sync"],
)
def test_without_its_rows_a_target_has_no_value(bench: Bench, judge: Callable[[Bench], None]) -> None:
    found = targets(bench, judge, {})
    assert found and all(target["value"] is None and target["met"] is False for target in found.values())
    assert len(found) == len(bench.targets), "each has a name of its own"


def test_a_call_that_resumes_reports_all_rows_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    measured: list[str] = []

    def measure(name: str) -> dict[str, Any]:
        measured.append(name)
        return {"figure": len(measured)}

    def judge(bench: Bench) -> None:
        bench.target("last", ">=", 1.0, ["first", "last"], lambda rows: rows[1]["figure"])

    for argv, met in ((["--rows", "last"], False), ([], True)):
        bench = Bench("two", ["first", "last"], measure)
        assert bench.run([*argv, "--json"], judge) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert report["targets"][0]["met"] is met
    assert measured == ["last", "first"]
    assert [(row["row"], row["figure"]) for row in report["rows"]] == [("first", 2), ("last", 1)]
    assert not Path("runs/bench/two.json").exists(), "the next call begins anew"


def struck() -> SimpleNamespace:
    """A job whose rollout-0 was killed by fault 1 at 110, and whose trainer died at 120 of something else."""
    story = Story()
    story.batch(101.0, 1)
    story.sample(109.9, "rollout-0", "decode", 100)
    story.injects(110.0, "rollout-0")
    story.at(110.1, ev.ProcessExited(role="rollout-0", incarnation=1, pid=7, cause="pidfd", last_lines=[], progress=120))
    story.restart(110.1, "rollout-0")
    story.at(110.2, ev.TokensJournalled(role="rollout-0", incarnation=1, tokens=100))
    story.at(110.3, ev.TrajectoriesMoved(ids=[1, 2], source="rollout-0", target="rollout-1", version=0, kept=[40, 45]))
    story.starts(111.0, "rollout-0")
    story.ready(113.1, "rollout-0", healthy=114.1)
    story.exits(120.0, "trainer-0")
    return SimpleNamespace(events=Events(story.entries), recoveries=recoveries(story.entries))


def test_figures_are_of_the_faults_that_were_injected() -> None:
    found = _faulty.figures(struck(), [1])  # type: ignore[arg-type]
    assert found["trials"] == 1 and found["after_detection"] == {"median": 4.0, "p95": 4.0}
    assert [found[stage]["median"] for stage in _faulty.STAGES] == pytest.approx([0.1, 3.0, 1.0, 4.1])
    assert (found["lost_tokens"], found["moved"], found["regenerated_per_trajectory"]) == (20, 2, 10.0)
    assert (found["steps_rolled_back"], found["standbys_used"]) == (0, 0)
    with pytest.raises(WaitTimeout, match="2 faults, and 1 complete recoveries"):
        _faulty.figures(struck(), [1, 2])  # type: ignore[arg-type]
    assert _faulty.first_start(struck()) == 0.0  # type: ignore[arg-type]


def row(after: float, **fields: Any) -> dict[str, Any]:
    return {"kill": {"after_detection": {"median": after}, "regenerated_per_trajectory": 7.5, "moved": 9, "steps_rolled_back": 0}, **fields}


def test_recovery_compares_warm_and_isolated_with_full() -> None:
    rows = {"isolated-warm-rollout": row(1.2), "full-cold-rollout": row(24.0, start_over_own=1.05), "full-warm-rollout": row(3.0)}
    found = targets(recovery._Recovery(), recovery.judge, rows)
    assert found["rollout, warm: back after detection, median (s)"]["met"]
    assert found["rollout, warm: faster than a full cold restart"]["value"] == pytest.approx(20.0)
    missed = found["rollout, warm: faster than a full warm restart"]
    assert missed["value"] == pytest.approx(2.5) and not missed["met"]
    assert found["rollout, warm: tokens generated again, per trajectory, largest"]["value"] == 7.5
    assert found["full restart (rollout) over the job's own first start"]["met"]


def test_each_management_role_is_judged_by_its_own_figures() -> None:
    slow = {role: row(1.0) for role in recovery._MANAGEMENT} | {"task_runner": row(2.5)}
    found = targets(recovery._Recovery(), recovery.judge, {"management-warm": slow})
    for role in recovery._MANAGEMENT:
        assert found[f"{role}, warm: back after detection, median (s)"]["met"] == (role != "task_runner")
    assert found["supervisor, cold: steps lost"]["value"] is None


def test_ettr_holds_the_measured_loss_against_the_predicted_one() -> None:
    def long(span: float, loss: float, faults: int = 0) -> dict[str, Any]:
        return {"span_s": span, "lost_s": loss, "redone_s": 0.0, "ettr_strict": 1 - loss / span, "faults": faults}

    rows: dict[str, Any] = {
        "probe-isolated-warm": {"model_loss_per_fault_s": 4.0},
        "isolated-warm-10": long(260.0, 20.0, 6),
        "isolated-warm-5": long(250.0, 10.0, 3),
        "isolated-warm-2": long(245.0, 5.0, 1),
        "isolated-warm-0": long(240.0, 0.0),
        "full-cold-10": long(400.0, 160.0, 6),
        "full-cold-0": long(246.0, 0.0),
    }
    found = targets(ettr._Ettr(), ettr.judge, rows)
    assert found["ettr_strict, isolated warm at 10%"]["value"] == pytest.approx(1 - 20 / 260)
    assert found["end to end at 10%: isolated warm faster than full cold (%)"]["value"] == pytest.approx(35.0)
    assert found["isolated-warm: measured loss off the predicted one, largest (share of the span)"]["value"] == pytest.approx(4 / 260)
    assert found["at 0% the two differ by at most (share)"]["value"] == pytest.approx(6 / 243)
    del rows["probe-isolated-warm"]
    off = targets(ettr._Ettr(), ettr.judge, rows)["isolated-warm: measured loss off the predicted one, largest (share of the span)"]
    assert not off["met"], "what was not predicted is no hit"


def test_learning_is_unharmed_only_if_the_whole_interval_is_small() -> None:
    def pairs(changes: list[float]) -> dict[str, Any]:
        rows: dict[str, Any] = {}
        for seed, change in enumerate(changes):
            rows[f"clean-{seed}"] = {"after": 0.9, "faults": 0}
            rows[f"faulty-{seed}"] = {"after": 0.9 + change / 100, "faults": 12}
        return rows

    bench, name = Bench("learn", learn._ROWS, learn.measure), "end of the 90% interval of what faults change in accuracy (points)"
    close = targets(bench, learn.judge, pairs([1.0, -1.0] * 4))[name]
    # standard deviation sqrt(8/7), times 1.895 / sqrt(8)
    assert close["met"] and close["value"] == pytest.approx(1.895 / 7**0.5, abs=1e-6)
    wide = targets(bench, learn.judge, pairs([9.0, -9.0] * 4))[name]
    assert not wide["met"], "no mean change, and yet nothing is shown"
    harmed = targets(bench, learn.judge, pairs([-6.0, -6.1] * 4))[name]
    assert not harmed["met"] and harmed["value"] > 6


def test_an_honest_log_must_pass_where_the_unmarked_one_is_rejected() -> None:
    bench, name = Bench("learn", learn._ROWS, learn.measure), "an unmarked mixture of versions is rejected"
    for row, met in (
        ({"findings": ["tokens: ..."], "honest_findings": 0}, True),
        ({"findings": [], "honest_findings": 0}, False),
        ({"findings": ["tokens: ..."], "honest_findings": 1}, False),
    ):
        assert targets(bench, learn.judge, {"unmarked": row})[name]["met"] is met
