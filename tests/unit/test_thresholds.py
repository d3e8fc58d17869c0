"""The detector's settings: what is taken, what is refused and why, and that an event carries them whole."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from robustrl.core import events as ev
from robustrl.core.roles import RoleKind
from robustrl.core.thresholds import HISTORY, LEAST, PATHS, SECTION, Relative, Thresholds
from robustrl.errors import ConfigError
from robustrl.live_settings import LiveThresholds

LAB = Thresholds.lab()


def test_the_papers_figures():
    paper = Thresholds.paper()
    assert paper.trainer.no_compute == 300.0
    assert paper.rollout.no_tokens == 60.0
    assert paper.trainer.activity_floor == 0.05
    assert paper.job.process_group > paper.trainer.no_compute


@pytest.mark.parametrize(
    ("text", "seconds"), [("3s", 3.0), ("3750ms", 3.75), ("0.05min", 3.0), ("0.001h", 3.6), ("4", 4.0), (4, 4.0), (" 3.5 S ", 3.5)]
)
def test_times_are_read(text, seconds):
    assert LAB.replace("rollout.no_tokens", text).rollout.no_tokens == pytest.approx(seconds)


def test_a_multiple_keeps_the_present_value_as_its_floor():
    changed = LAB.replace("trainer.snapshot", "4x")
    assert changed.trainer.snapshot == Relative(4.0, LAB.trainer.snapshot)
    assert changed.replace("trainer.snapshot", "6x").trainer.snapshot == Relative(6.0, LAB.trainer.snapshot)
    assert LAB.trainer.snapshot == 10.0, "the original does not change"


@pytest.mark.parametrize(
    ("history", "seconds"),
    [([], 2.0), ([9.0] * 4, 2.0), ([0.1] * 5, 2.0), ([1.0, 1.0, 3.0, 3.0, 3.0], 12.0), ([1.0, 1.0, 1.0, 9.0, 9.0], 4.0)],
)
def test_a_multiple_of_the_median_from_the_fifth_observation_on(history, seconds):
    assert Relative(4.0, 2.0).seconds(history) == seconds


def test_counts_and_factors_are_read():
    changed = LAB.replace("rollout.strikes", "3").replace("rollout.straggler", "2.5x").replace("trainer.activity_floor", "0.1")
    assert (changed.rollout.strikes, changed.rollout.straggler, changed.trainer.activity_floor) == (3, 2.5, 0.1)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("rollout.no_tokens", -1, "at least 0.3 s"),
        ("rollout.no_tokens", "-1s", "at least 0.3 s"),
        ("rollout.no_tokens", float("nan"), "finite"),
        ("rollout.no_tokens", float("inf"), "finite"),
        ("rollout.no_tokens", "soon", '"250ms"'),
        ("rollout.no_tokens", "3 weeks", '"250ms"'),
        ("rollout.no_tokens", None, "finite time"),
        ("rollout.no_tokens", True, "finite time"),
        ("rollout.no_tokens", "4x", "finite time"),
        ("rollout.no_tokens", LEAST - 0.01, "at least 0.3 s"),
        ("rollout.strikes", 0, "whole number from 1"),
        ("rollout.strikes", "2s", "whole number from 1"),
        ("rollout.strikes", 1.5, "whole number from 1"),
        ("trainer.straggler", 1, "factor above 1"),
        ("trainer.activity_floor", 0, "fraction of a core"),
        ("trainer.activity_floor", "5s", "fraction of a core"),
        ("trainer.no_compute", "0.5x", "at least 1x"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(path, value, words):
    with pytest.raises(ConfigError) as caught:
        LAB.replace(path, value)
    assert path in str(caught.value) and words in str(caught.value)
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("rollout.no_token", "; did you mean rollout.no_tokens? There are: no_tokens, wedged, "),
        ("rollout.nope", "; there are: no_tokens, wedged, "),
        ("rollout", "; there are: no_tokens, wedged, "),
        ("no_tokens", "; did you mean rollout.no_tokens? There are: job.stall, job.start"),
        ("colour", "; there are: job.stall, job.start"),
    ],
)
def test_an_unknown_setting_is_named_with_what_there_is(path, words):
    for use in (LAB.get, lambda path: LAB.replace(path, 3), lambda path: LAB.parse(path, "3s")):
        with pytest.raises(ConfigError) as caught:
            use(path)
        assert repr(path) in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("rollout.heartbeat", "4s", "must not be longer than rollout.no_tokens (3 s)"),
        ("rollout.no_tokens", "2s", "must not be longer than rollout.no_tokens (2 s)"),
        ("job.process_group", "3s", "must be longer than trainer.no_compute"),
        ("trainer.no_marks", "2s", "must not be shorter than trainer.no_compute"),
        ("trainer.grace", "9s", "must not be shorter than trainer.no_marks"),
        ("rollout.grace", "4s", "must not be shorter than rollout.wedged"),
        ("rollout.wedged", "2s", "must not be shorter than rollout.no_tokens"),
        ("job.stall", "4s", "must not be shorter than"),
        ("rollout.strikes", 50, "must not be shorter than rollout.no_tokens and the heartbeats after it"),
        ("job.hysteresis", "3s", "must be shorter than"),
        ("management.lag", "5s", "must be shorter than management.silent"),
        ("node.silent", "1s", "a healthy agent may say nothing"),
    ],
)
def test_contradictions_are_refused_with_the_reason(path, value, words):
    with pytest.raises(ConfigError) as caught:
        LAB.replace(path, value)
    assert words in str(caught.value)


@pytest.mark.parametrize("made", [Thresholds.lab(), Thresholds.paper(), Thresholds.relative(), LAB.replace("job.stall", "3x")])
def test_an_event_carries_them_whole(made):
    event = ev.ThresholdsChanged(thresholds=made.to_dict(), changes=LAB.changes(made))
    entry = ev.Entry(1, 0.0, ev.HOST, 1, 1, 0.0, event)
    read = ev.entry_decoder.decode(ev.encoder.encode(entry)).event
    assert isinstance(read, ev.ThresholdsChanged)
    assert Thresholds.from_dict(read.thresholds) == made
    assert read == event


def test_changes_name_what_differs():
    assert LAB.changes(LAB.replace("rollout.no_tokens", "4s")) == {"rollout.no_tokens": [3.0, 4.0]}


@pytest.mark.parametrize(
    "values",
    [{}, {**LAB.to_dict(), "extra": {}}, {**LAB.to_dict(), "node": {"silent": "x"}}, {**LAB.to_dict(), "node": {"silent": 0.5}}],
)
def test_a_damaged_record_is_refused(values):
    with pytest.raises(ConfigError):
        Thresholds.from_dict(values)


@given(st.sampled_from(PATHS), st.one_of(st.floats(), st.integers(-5, 10**9), st.text(max_size=6), st.none(), st.booleans()))
def test_any_value_is_taken_whole_or_refused(path, value):
    try:
        changed = LAB.replace(path, value)
    except ConfigError:
        return
    assert Thresholds.from_dict(msgspec.json.decode(msgspec.json.encode(changed.to_dict()))) == changed
    assert set(LAB.changes(changed)) <= {path}


def test_every_role_kind_and_every_relative_setting_is_known():
    assert {SECTION.get(kind, "management") for kind in RoleKind} <= {path.partition(".")[0] for path in PATHS}
    assert set(HISTORY) <= set(PATHS)


def test_a_live_job_is_sent_what_its_host_takes():
    """A number of numpy or a multiple cannot cross the socket as it is."""
    sent = []
    state = SimpleNamespace(thresholds=LAB.to_dict())
    job = SimpleNamespace(_changed=nullcontext(), _state=state, _call=lambda *_, **args: sent.append(args))
    live = LiveThresholds(job)
    live.update({"job.stall": Relative(4.0, 90.0), "rollout.no_tokens": np.float64(3.5), "trainer.snapshot": "4x", "rollout.strikes": 2})
    changes = msgspec.msgpack.decode(msgspec.msgpack.encode(sent[0]["changes"]))
    there = LAB.updated(changes)
    assert (there.job.stall, there.rollout.no_tokens, there.trainer.snapshot) == (Relative(4.0, 90.0), 3.5, Relative(4.0, 10.0))
    with pytest.raises(ConfigError, match="must be settings by path"):
        live.update(None)
    assert len(sent) == 1
