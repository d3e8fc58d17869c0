"""What was written without a look at the detector holds, with a few draws of each scenario; more draws: `robustrl bench detect`."""

from __future__ import annotations

import pytest
from detection_world import run_scenario
from incidents_missed import MISSED_BY
from scenarios_adversary import ADVERSARY, PENDING
from scenarios_benign import BENIGN
from scenarios_incidents import INCIDENTS, drawn
from scenarios_overlapping import OVERLAPPING

ALL = {**INCIDENTS, **BENIGN, **ADVERSARY, **OVERLAPPING}


@pytest.mark.parametrize("name", ALL)
def test_scenario(name: str) -> None:
    _holds(name, 0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ALL)
def test_scenario_drawn_again(name: str, seed: int) -> None:
    _holds(name, seed)


def _holds(name: str, seed: int) -> None:
    wrong = run_scenario(drawn(ALL, name, seed), seed)[1]
    assert not wrong, wrong


def test_every_incident_says_who_misses_it() -> None:
    assert {name.removeprefix("incident/").split("+")[0] for name in INCIDENTS} == set(MISSED_BY)


def test_names_are_used_once() -> None:
    assert len(ALL) == sum(map(len, (INCIDENTS, BENIGN, ADVERSARY, OVERLAPPING)))
    assert not set(PENDING) & set(ALL)


def test_a_draw_is_made_again_by_its_seed() -> None:
    assert drawn(ALL, "incident/silent-server", 4) == drawn(ALL, "incident/silent-server", 4) != drawn(ALL, "incident/silent-server", 5)
