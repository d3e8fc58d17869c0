"""A reduced recording: the detector says the same of failures, for every setting at or above the floors, from a fraction of the entries."""

from __future__ import annotations

import zlib

import pytest
from scenario_suite import SUITE
from test_replay_replaying import LAB, scaled
from world_scenario import make_world

from robustrl import Run
from robustrl.core import events as ev
from robustrl.core.detection import Detector
from robustrl.replay.driving import drive
from robustrl.replay.reducing import floors, reduced
from robustrl.replay.replaying import of_failures

NAMES = sorted(SUITE)
SETTINGS = (scaled(0.6), scaled(0.9), LAB, scaled(2.0))


def failures(verdicts: list[ev.Verdict]) -> list[ev.Verdict]:
    return [verdict for verdict in verdicts if of_failures(verdict)]


@pytest.mark.parametrize("part", range(2))
def test_nothing_that_is_said_of_failures_changes(part: int) -> None:
    """Over scenarios of the detector's suite: what a reduction leaves out never mattered."""
    said = kept = entries = 0
    for name in ["several/agent-stopped-and-its-rollout-killed", *NAMES[7 * part::len(NAMES) // 6]]:
        scenario = SUITE[name](part)
        world = make_world(scenario, zlib.crc32(name.encode()), LAB)
        world.run(min(scenario.seconds, 30.0))
        recording = Run.of(world.entries).recording
        small = reduced(recording, floors(SETTINGS))
        for thresholds in SETTINGS[::2]:
            full = drive(recording, Detector(thresholds), lambda role: 3.0, lambda *_: False)
            less = drive(small, Detector(thresholds), lambda role: 3.0, lambda *_: False)
            assert failures(less.verdicts) == failures(full.verdicts), name
            said += len(failures(full.verdicts))
        kept, entries = kept + len(small.entries), entries + len(recording.entries)
    assert said > 5 and kept < 0.7 * entries
