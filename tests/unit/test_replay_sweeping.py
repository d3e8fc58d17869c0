"""Sweeps: what each setting is worth, which to take, and that neither processes nor an interruption change a row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from detection_world import Fault
from test_replay_replaying import LAB, PATIENT, make, recorded

from robustrl import Run, replay, sweep
from robustrl.errors import ConfigError
from robustrl.replay import scoring, sweeping
from robustrl.replay.outcomes import ASSUMED_RESTART
from robustrl.replay.quality import poisson_lower, poisson_upper
from robustrl.replay.scoring import Score, pareto


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    hang = recorded(make(31, Fault("freeze", "rollout-0", phase="decode"), restarts=2.0), "hang")
    slow = recorded(make(32, Fault("freeze", "rollout-0", seconds=4.0, phase="decode"), thresholds=PATIENT), "freeze", seconds=4.0)
    return [hang, slow]


GRID = {"rollout.no_tokens": [1.0, 2.0, 4.0], "rollout.heartbeat": [0.5, 1.0, 3.0]}


def test_each_row_is_what_replays_say(runs: list[Run]) -> None:
    found = sweep(runs, GRID, processes=1, progress=False)
    assert found.complete and len(found.settings) == 10 - found.skipped and not found.settings[0].changes
    for setting in found.settings[1::3]:
        said = [replay(run, setting.thresholds) for run in runs]
        assert list(setting.score.delays) == pytest.approx([delay for one in said for delay in one.delays])
        assert len(setting.score.needless) == sum(len(one.false_alarms) for one in said)
        assert len(setting.score.missed) == sum(len(one.missed) for one in said)
        assert setting.score.watched == pytest.approx(sum(run.seconds for run in runs))
    tight = next(s for s in found.settings if s.changes == {"rollout.no_tokens": 1.0, "rollout.heartbeat": 0.5})
    assert tight.score.needless, "four seconds of a benign freeze pass 1.5 s"
    best = found.recommended
    assert not best.score.needless and not best.score.missed
    assert best.score.cost == min(s.score.cost for s in found.settings if not s.score.missed)
    assert best in found.pareto and 0 < best.score.reach < 1 and "rollout" in best.score.reach_of
    (row,) = [row for row in found.table() if row["recommended"]]
    assert row["recall"] == 1.0 and row["recall_low"] < 1.0 and row["alarms_per_hour"] == 0.0 < row["alarms_per_hour_high"]
    assert row["cost_s"] == pytest.approx(row["late_s"] + row["needless_s"])
    assert row["rollout.no_tokens"] == best.thresholds.rollout.no_tokens
    assert len(found.to_pandas()) == len(found.settings) and "faults detected" in repr(found)
    taken: dict[str, float] = {}
    exec(best.code(), {"job": SimpleNamespace(thresholds=taken)})
    assert taken == best.changes


def test_two_processes_and_the_seed_give_the_same_rows(runs: list[Run]) -> None:
    grid = {"rollout.no_tokens": (1.0, 6.0), "rollout.heartbeat": [0.5, 1.0]}
    one, two = (sweep(runs[1], grid, samples=8, seed=5, processes=n, progress=False) for n in (1, 2))
    assert [(s.changes, s.score) for s in one.settings] == [(s.changes, s.score) for s in two.settings]
    other = sweep(runs[1], grid, samples=8, seed=6, processes=1, progress=False)
    assert [s.changes for s in other.settings] != [s.changes for s in one.settings]
    assert all(1.0 <= s.changes["rollout.no_tokens"] <= 6.0 for s in one.settings[1:])


def test_an_interruption_keeps_what_is_done(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    scored, real = 0, scoring.Case.score

    def score(case: scoring.Case, thresholds: object) -> Score:
        nonlocal scored
        scored += 1
        if scored > 3:
            raise KeyboardInterrupt
        return real(case, thresholds)  # type: ignore[arg-type]

    monkeypatch.setattr(scoring.Case, "score", score)
    found = sweep(runs[1], GRID, processes=1, progress=False)
    assert not found.complete and len(found.settings) == 3 and "interrupted" in repr(found)


def test_what_contradicts_itself_is_left_out_and_counted(runs: list[Run]) -> None:
    found = sweep(runs[1], {"rollout.no_tokens": [0.5, 4.0], "rollout.heartbeat": [1.0]}, processes=1, progress=False)
    assert found.skipped == 1 and len(found.settings) == 2


@pytest.mark.parametrize(("grid", "why"), [
    ({"rollout.no_token": [3.0]}, "did you mean rollout.no_tokens"), ({"rollout.no_tokens": 3.0}, "a list of values, or a pair"),
    ({"rollout.no_tokens": (3.0, 2.0)}, "low < high"), ({"rollout.no_tokens": []}, "a list of values"),
    ({"trainer.straggler": [2.0, 3.0]}, "reports only"), ({"trainer.activity_floor": [0.1]}, "measured by the live job"),
    ({"trainer.no_compute": ("3x", "4x")}, "plain values"), ({"rollout.no_tokens": ["3 eggs"]}, "must be a finite time"),
])  # fmt: skip
def test_bad_grids_are_refused_by_name(runs: list[Run], grid: dict, why: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=why):
        sweep(runs[0], grid, progress=False)


def test_no_runs_and_no_processes() -> None:
    with pytest.raises(ConfigError, match="runs"):
        sweep([], GRID)
    with pytest.raises(ConfigError, match="processes"):
        sweep(Run.of(make(33, seconds=5.0).entries), GRID, processes=0)


def test_costs_by_hand() -> None:
    score = scoring.total([Score((2.0, 4.0), (10.0,), (3.0,), 1800.0, 0.4, "a"), Score((1.0,), (), (3.0, 5.0), 1800.0, 0.7, "b")])
    assert (score.faults, score.late, score.cost, score.alarms_per_hour, score.reach_of) == (4, 17.0, 28.0, 3.0, "b")
    row = score.row()
    assert (row["recall"], row["precision"], row["delay_p50"], row["delay_max"]) == (0.75, 0.5, 2.0, 4.0)
    assert row["alarms_per_hour_low"] == pytest.approx(poisson_lower(3)) and row["alarms_per_hour_high"] == pytest.approx(poisson_upper(3))
    assert poisson_lower(3) == pytest.approx(0.6187, abs=1e-3) and poisson_lower(0) == 0.0
    run = Run.of(make(34, seconds=5.0).entries)
    assert run.costs.measured == 0 and run.costs.restart("rollout-0") == ASSUMED_RESTART


def test_the_front_by_hand() -> None:
    points = [(0.0, 5.0), (1.0, 3.0), (1.0, 4.0), (2.0, 3.0), (3.0, 1.0), (0.0, 5.0)]
    assert pareto(points) == [True, True, False, False, True, True]


def test_a_relative_limit_can_be_swept(runs: list[Run]) -> None:
    found = sweep(runs[0], {"trainer.no_compute": ["4x", 3.0]}, base=LAB, processes=1, progress=False)
    assert len(found.settings) == 2 and found.settings[1].score.faults == 1
    assert sweeping._short(4.0) == "4"
