"""What was written without a look at the detector, drawn three times each; once with a fixed seed: test_detection_scenarios.py."""

from __future__ import annotations

import pytest
from detection_world import run_scenario
from incidents_missed import MISSED_BY
from scenario_suite import BLIND, SUITE
from scenarios_incidents import INCIDENTS, drawn


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", BLIND)
def test_scenario(name: str, seed: int) -> None:
    _, wrong = run_scenario(drawn(BLIND, name, seed), seed)
    assert not wrong, wrong


def test_a_third_of_the_suite_comes_from_someone_who_has_not_read_the_detector() -> None:
    assert 3 * len(BLIND) >= len(SUITE)


def test_every_incident_says_who_misses_it() -> None:
    assert {name.removeprefix("incident/").split("+")[0] for name in INCIDENTS} == set(MISSED_BY)


def test_a_draw_is_made_again_by_its_seed() -> None:
    assert drawn(BLIND, "incident/silent-server", 4) == drawn(BLIND, "incident/silent-server", 4)
    assert drawn(BLIND, "incident/silent-server", 4) != drawn(BLIND, "incident/silent-server", 5)


def test_the_virtual_clock_does_not_run_backwards_when_a_host_thaws() -> None:
    world, wrong = run_scenario(drawn(BLIND, "death-at-the-end-of-the-hosts-gap", 110), 110)
    times = [entry.t for entry in world.entries]
    assert times == sorted(times) and not wrong
