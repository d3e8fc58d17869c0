"""Sweeps: what each setting is worth, which to take, and that neither processes nor an interruption change a row."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
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


@pytest.mark.parametrize("part", ["row", "cut", "excerpt"])
def test_a_run_too_short_for_anything_to_be_due_can_be_swept(runs: list[Run], part: str) -> None:
    short = {"row": Run.of(runs[1].entries[:1]), "cut": runs[1].cut(0.0, 0.01), "excerpt": runs[1].excerpt(5.0, 5.2)}
    found = sweep(short[part], {"rollout.no_tokens": [4.0, 5.0]}, base=LAB, processes=1, progress=False)
    assert len(found.settings) == 3 and found.recommended and found.table()


LONG = [float(i) for i in range(3, 900)]


@pytest.mark.parametrize("grid", [{"rollout.no_tokens": range(10**12)},
                                  dict.fromkeys(("rollout.no_tokens", "rollout.wedged", "trainer.no_compute"), LONG)])  # fmt: skip
def test_more_settings_than_can_be_tried_are_refused_before_they_are_made(runs: list[Run], grid: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=r"settings of the grid = \d+: must be at most 100,000"):
        sweep(runs[0], grid, progress=False)
    with pytest.raises(ConfigError, match="settings of the grid = 1000000: "):
        sweep(runs[0], {"rollout.no_tokens": (1.0, 2.0)}, samples=10**6, progress=False)


def test_a_grid_of_contradictions_alone_is_refused_with_the_reason(runs: list[Run]) -> None:
    with pytest.raises(ConfigError, match="each of its 2 settings contradicts itself; the first: rollout.no_tokens = 1.0: does not go"):
        sweep(runs[1], {"rollout.no_tokens": [1.0, 2.0]}, base=LAB, progress=False)
    with pytest.raises(ConfigError, match="its one setting contradicts itself: rollout.no_tokens"):
        sweep(runs[1], {"rollout.no_tokens": [1.0]}, base=LAB, progress=False)


def test_axes_of_numpy_and_ranges(runs: list[Run]) -> None:
    np = pytest.importorskip("numpy")
    plain = sweep(runs[1], {"rollout.no_tokens": [4.0, 5.0]}, base=LAB, processes=1, progress=False)
    for axis in (np.linspace(4, 5, 2), np.array([4, 5]), range(4, 6), [np.int64(4), np.float32(5)]):
        found = sweep(runs[1], {"rollout.no_tokens": axis}, base=LAB, processes=1, progress=False)
        assert [setting.changes for setting in found.settings] == [setting.changes for setting in plain.settings]
        assert all(type(value) is float for setting in found.settings for value in setting.changes.values())
    drawn = sweep(runs[1], {"rollout.no_tokens": (np.int64(4), np.float64(5))}, base=LAB, samples=2, processes=1, progress=False)
    assert drawn.complete
    for axis in (np.array([]), np.array([[4.0]]), np.array(4.0), {4.0, 5.0}):
        with pytest.raises(ConfigError, match="must be a list of values, or a pair"):
            sweep(runs[1], {"rollout.no_tokens": axis}, base=LAB, progress=False)
    with pytest.raises(ConfigError, match="base = 5: must be Thresholds"):
        sweep(runs[1], {"rollout.no_tokens": [4.0]}, base=5, progress=False)  # type: ignore[arg-type]


def test_an_interruption_keeps_what_the_processes_were_at(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before the first batch is done, to the whole process group as a terminal sends it."""
    real = scoring.Case.score

    def slow(case: scoring.Case, thresholds: object) -> Score:
        time.sleep(0.15)
        return real(case, thresholds)  # type: ignore[arg-type]

    monkeypatch.setattr(scoring.Case, "score", slow)
    threading.Timer(0.35, lambda: [os.kill(pid, signal.SIGINT) for pid in (*children(), os.getpid())]).start()

    def children() -> list[int]:
        return [child.pid for child in multiprocessing.active_children() if child.pid]

    found = sweep(runs[1], {"rollout.no_tokens": (3.2, 4.5)}, base=LAB, samples=40, processes=2, progress=False)
    assert not found.complete and 8 <= len(found.settings) < 41 and not children()
