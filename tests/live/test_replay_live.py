"""What the replay predicts of a setting is what a live job under that setting says. The bench `replay`, row live, has twenty settings."""

from __future__ import annotations

import pytest

from tests.benchmarks._replay_live import cross_check, draw

_SLACK = 3.0
"""Margin on a ceiling of time: one sample plus the noise of the machine."""


@pytest.mark.soak  # a job of its own for more than a minute; lesson 5 has two faults live
@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.timeout(600)
def test_predicted_verdicts_are_the_lived_ones(count: int) -> None:
    row = cross_check(draw(count, seed=count), "cross")
    assert row["replayed_as_live"], "with the settings as they were changed, the log gives exactly its own verdicts"
    for trial in row["trials"]:
        assert trial["rule"] == ("no_compute" if trial["role"] == "trainer-0" else "heartbeat")
        assert abs(trial["lived_s"] - trial["predicted_s"]) <= _SLACK * (row["sample_s"] + trial["noise_s"]), trial
