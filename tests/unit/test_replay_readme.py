"""README's examples of tuning, as they are written, on recorded runs of both settings: the lab's seconds and the paper's minutes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from robustrl_widgets import tuning, tuning_widget

import robustrl
from robustrl.core.thresholds import Thresholds
from robustrl.errors import ConfigError
from robustrl.replay.given import EXAMPLE
from robustrl.replay.replaying import replay
from robustrl.replay.run import Run
from robustrl.replay.sweeping import sweep

LAB, PAPER = "hang-rollout-0", "rollout-hang-1"
"""Of the bundled runs: recorded with the lab's settings, and with the paper's."""


def _lines() -> list[str]:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    block = text.split("What other thresholds would have said of a recorded run")[1].split("`robustrl.replay.leaderboard` scores")[0]
    return re.findall(r"^ {4}(\S.*)$", block, re.MULTILINE)


@pytest.fixture
def labs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    made: list[Any] = []
    opened = tuning_widget.TuningLab.__init__

    def keep(self: Any, *given: Any, **settings: Any) -> None:
        opened(self, *given, **settings)
        made.append(self)

    monkeypatch.setattr(tuning_widget.TuningLab, "__init__", keep)
    yield made
    for lab in made:
        lab.close()


@pytest.mark.parametrize("name", [LAB, PAPER])
def test_what_readme_shows_of_tuning_works_as_it_stands(name: str, labs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = robustrl.corpus()[name]
    monkeypatch.setattr(Run, "load", classmethod(lambda cls, path: run))
    job = SimpleNamespace(over=False, thresholds=SimpleNamespace(now=Thresholds.lab().updated({"rollout.heartbeat": 2.5})))
    there: dict[str, Any] = {"robustrl": robustrl, "job": job}
    lines = _lines()
    assert len(lines) >= 12 and sum("TuningLab(" in line for line in lines) == 2
    for line in lines:
        exec(line, there)
    found = there["found"]
    assert found.skipped == 0 and len(found.settings) == 201, "none of what it draws contradicts itself"
    assert found.recommended.score.delays and not found.recommended.score.missed
    for lab, beat in zip(labs, (2.5, 3.0), strict=True):
        assert lab.tuner.judged.wait(60.0) and lab.tuner.material.base.rollout.heartbeat == beat


@pytest.mark.parametrize("name", [LAB, PAPER])
def test_what_an_error_recommends_is_allowed(name: str) -> None:
    run = robustrl.corpus()[name]
    with pytest.raises(ConfigError, match=re.escape(EXAMPLE)):
        replay(run, 3)  # type: ignore[arg-type]
    assert replay(run, eval(EXAMPLE)) and Thresholds.relative().updated(eval(EXAMPLE))


def test_a_change_that_contradicts_what_the_run_began_with_is_told_how_to_begin_elsewhere() -> None:
    run = robustrl.corpus()[PAPER]
    with pytest.raises(ConfigError, match=r"does not go with .*the run began with; Thresholds.lab\(\).updated"):
        replay(run, {"rollout.no_tokens": "4s"})
    with pytest.raises(ConfigError, match="rollout.no_tokens = '4 parsecs'.*") as caught:
        replay(run, {"rollout.no_tokens": "4 parsecs"})
    assert "began with" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"contradicts itself.*base=Thresholds.lab\(\)"):
        sweep(run, {"rollout.no_tokens": [3.0, 4.0]}, progress=False)


def test_sliders_begin_where_something_can_be_found() -> None:
    runs, lab, paper = robustrl.corpus(), Thresholds.lab(), Thresholds.paper()
    job = SimpleNamespace(thresholds=SimpleNamespace(now=paper))
    assert tuning.first_setting(runs.of(seed=1), job) == paper, "what the job has in force"
    assert tuning.first_setting(runs.of(seed=1)) == lab != runs["rollout-hang-1"].thresholds[-1][1]
    own = runs["whole-0.2"].thresholds[-1][1]
    assert tuning.first_setting([runs["whole-0.2"]]) == own
    assert tuning.Material([runs[PAPER]], lab).trial({}).code().startswith("# what the sliders began with")
