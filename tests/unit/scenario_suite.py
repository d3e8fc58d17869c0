"""All scenarios by name, each as a function of a seed."""

from __future__ import annotations

from collections.abc import Callable

from detection_world import Scenario
from scenarios_adversary import ADVERSARY
from scenarios_benign import BENIGN
from scenarios_harmless import HARMLESS
from scenarios_incidents import INCIDENTS, drawn
from scenarios_overlapping import OVERLAPPING
from scenarios_several import SEVERAL
from scenarios_single import SINGLE

SUITE: dict[str, Callable[[int], Scenario]] = {}


def add(name: str, made: Callable[[int], Scenario]) -> None:
    if name in SUITE:
        raise ValueError(f"two scenarios are called {name}")
    SUITE[name] = made


for _scenario in (*SINGLE, *HARMLESS, *SEVERAL):
    add(_scenario.name, lambda seed, scenario=_scenario: scenario)  # its ranges are drawn by the world
BLIND = {**INCIDENTS, **BENIGN, **ADVERSARY, **OVERLAPPING}
"""Those written without a look at the detector."""
for _name in BLIND:
    add(_name, lambda seed, name=_name: drawn(BLIND, name, seed))
