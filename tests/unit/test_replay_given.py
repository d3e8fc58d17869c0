"""What is handed to load, replay, sweep, cut and annotate by mistake: the error names field and value, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from robustrl.core.thresholds import Thresholds
from robustrl.errors import ConfigError, Contradiction
from robustrl.replay.corpus import corpus
from robustrl.replay.given import changed
from robustrl.replay.reading import BadRun
from robustrl.replay.replaying import replay
from robustrl.replay.run import Run
from robustrl.replay.sweeping import sweep

OWN = "the others are those that the run began with"
GRID = {"rollout.no_tokens": (3.0, 4.0)}


@pytest.fixture(scope="module")
def run() -> Run:
    return corpus().of(seed=1)[0]


@pytest.mark.parametrize("path", [None, 3, 1.5, [], b"x", "", " ", "x\0y"])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(ConfigError, match="path = .*must be the path of a run directory"):
        Run.load(path)


def test_a_row_too_deep_to_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "deep.jsonl"
    for row in (b"[" * 100_000, b'{"event":' * 100_000):
        file.write_bytes(row + b"\n")
        with pytest.raises(BadRun, match="row 1: cannot be read"):
            Run.load(file)


@pytest.mark.parametrize("other", [None, 3, "runs/latest", [], [3]])
def test_what_is_no_run(run: Run, other: Any) -> None:
    with pytest.raises(ConfigError, match=r"run = .*must be a Run: robustrl.Run.load\(path\)"):
        replay(other, Thresholds.lab())
    with pytest.raises(ConfigError, match="runs = .*must be a Run or at least one of them"):
        sweep(other, GRID, progress=False)


@pytest.mark.parametrize("other", [3, "6s", [("rollout.no_tokens", 6)], {3: 4}])
def test_what_are_no_thresholds(run: Run, other: Any) -> None:
    with pytest.raises(ConfigError, match="thresholds = .*must be a mapping from settings to values"):
        replay(run, other)
    with pytest.raises(ConfigError, match="grid = .*must be a mapping from settings to values"):
        sweep(run, other, progress=False)


@pytest.mark.parametrize("other", [3, lambda: None, lambda: 3, Run])
def test_what_makes_no_detector(run: Run, other: Any) -> None:
    if other is Run:
        other = type("Half", (), {"feed": lambda self, entry: None})
    with pytest.raises(ConfigError, match="detector = .*feed, advance, next_deadline"):
        replay(run, detector=other)


@pytest.mark.parametrize(("name", "value"), [("samples", 0), ("samples", -1), ("samples", "5"), ("samples", True), ("processes", 0),
                                             ("processes", 1.5), ("seed", "a"), ("seed", -1), ("seed", None)])  # fmt: skip
def test_what_is_no_count(run: Run, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} = .*must be a whole number of at least"):
        sweep(run, GRID, progress=False, **{name: value})


@pytest.mark.parametrize("value", ["a", None, True, float("nan"), [1]])
def test_what_is_no_time(run: Run, value: Any) -> None:
    calls: list[Callable[[], Any]] = [lambda: run.cut(value, 2.0), lambda: run.annotate("rollout-0", value)]
    if value is not None:
        calls += [lambda: run.cut(0.0, value), lambda: run.annotate("rollout-0", 1.0, value)]
    for call in calls:
        with pytest.raises(ConfigError, match="must be a number of seconds"):
            call()


def test_a_sweep_says_how_many_settings_contradict_themselves_and_why(run: Run) -> None:
    found = sweep(run, {"rollout.no_tokens": [3.0, 4.0, 90.0]}, processes=1, progress=False)
    assert len(found.settings) == 2 and found.skipped == 2
    assert "2 left out that contradict themselves (rollout.no_tokens = 3.0: does not go with rollout.heartbeat" in repr(found)


def test_a_contradiction_is_known_by_its_class_and_not_by_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Thresholds.lab()
    with pytest.raises(Contradiction, match=OWN) as caught:
        changed(own, {"rollout.wedged": 1.0})
    assert caught.value.field == "rollout.wedged" and isinstance(caught.value, ConfigError)
    with pytest.raises(Contradiction, match="does not go with"):
        own.replace("rollout.wedged", 1.0)
    for error, told in ((Contradiction("a", 1, "in other words"), True), (ConfigError("a", 1, "does not go with b"), False)):
        with monkeypatch.context() as patch:
            patch.setattr(Thresholds, "updated", lambda self, changes, error=error: (_ for _ in ()).throw(error))
            with pytest.raises(ConfigError) as caught:
                changed(own, {})
        assert (OWN in str(caught.value)) is told
