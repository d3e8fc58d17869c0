"""The whole suite of scenarios, once with fixed seeds; with fresh ones in the soak, and by the thousand in `robustrl bench detect`."""

from __future__ import annotations

import random
import zlib

import pytest
from detection_world import run_scenario
from scenario_suite import SUITE


@pytest.mark.parametrize("name", SUITE)
def test_what_must_be_said_is_said_and_nothing_else(name):
    seed = zlib.crc32(name.encode())
    world, wrong = run_scenario(SUITE[name](seed), seed)
    assert wrong == [], (world.shape, world.injected)


@pytest.mark.soak
@pytest.mark.parametrize("name", SUITE)
def test_also_with_fresh_parameters(name):
    for _ in range(5):
        seed = random.SystemRandom().getrandbits(32)
        world, wrong = run_scenario(SUITE[name](seed), seed)
        assert wrong == [], (seed, world.shape, world.injected)
