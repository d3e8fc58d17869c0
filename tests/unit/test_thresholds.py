"""The detector's settings: what is taken, what is refused and why, and that an event carries them whole."""

from __future__ import annotations

from contextlib import nullcontext
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from robustrl.core import events as ev
from robustrl.core.contradictions import contradiction
from robustrl.core.roles import RoleKind
from robustrl.core.thresholds import _COUNTS, _TOGETHER, HISTORY, LEAST, PATHS, SECTION, Relative, Thresholds
from robustrl.errors import ConfigError
from robustrl.live_settings import LiveThresholds
from robustrl.runtime.wire import Failure

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
    assert (caught.value.field, caught.value.value) == (path, LAB.parse(path, value))


@pytest.mark.parametrize("rule", _TOGETHER, ids=lambda rule: "-".join(rule.paths))
@pytest.mark.parametrize("base", [LAB, Thresholds.paper(), Thresholds.relative()], ids=["lab", "paper", "relative"])
def test_whichever_setting_is_changed_the_contradiction_names_it_and_the_others(rule, base):
    """Also a count that is allowed by itself, and one of several that are changed together."""
    for path in rule.paths:
        refused = 0
        for value in (1, 1_000_000) if path in _COUNTS else (0.3 + 1e-9, 9e6):
            try:
                base.replace(path, value)
            except ConfigError as error:
                refused += 1
                again = Failure.of(error).error()
                assert type(again) is type(error) and str(again) == str(error), "it crosses the socket as what it is"
                assert (error.field, error.value) == (path, value)
                assert path in error.allowed or path == "node.silent", "it takes part in what is allowed together"
                with pytest.raises(ConfigError) as caught:
                    base.updated({"trainer.straggler": 4, path: value})
                assert str(caught.value) == str(error)
                alone = contradiction([rule], dict(base.items()) | {path: error.value}, [path])
                assert alone is None or all(f"{other} (" in alone.allowed for other in rule.paths if other != path)
        assert refused


def test_nobody_changed_anything_and_the_record_contradicts_itself():
    record = LAB.to_dict()
    record["rollout"]["strikes"] = 100
    with pytest.raises(ConfigError, match=r"job.stall = 90.0: does not go with .*rollout.strikes \(100\): .*x rollout.strikes \(303 s\)"):
        Thresholds.from_dict(record)


NO_TIMES = [
    "3\ns", "3\ts", "3 s\n", "\n3s", "\t3s", "3s\r", "3\u00a0s", "\u20093s", "3s\x0b", "3\x1fs", "3\u2028s", "\uff13s", "\u0663s",
    "3\u017f", "3m\u017f", "3\u200bs", "\ufeff3s",
    "3_0s", "3,5s", "+3s", "0x3s", "3s s", "3 0s", "3\x00s", "3m\nin", "4\nx", "\u0664x", "3 \ufb06",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_TIMES, ids=ascii)
def test_a_time_holds_ascii_digits_a_unit_and_blanks_and_nothing_else(text):
    for path in PATHS:
        with pytest.raises(ConfigError) as caught:
            LAB.replace(path, text)
        assert caught.value.field == path and caught.value.value == text and "must be" in caught.value.allowed


def _damaged(section: str, name: str | None, value: object) -> dict:
    record = LAB.to_dict()
    if name is None:
        record[section] = value
    else:
        record.setdefault(section, {})[name] = value
    return record


@pytest.mark.parametrize(("record", "words"), [
    (_damaged("rollout", "no_token", 3.0), "thresholds.rollout = 'no_token': there is no such setting; did you mean rollout.no_tokens?"),
    (_damaged("rolout", None, {}), "thresholds = 'rolout': there is no such setting; did you mean rollout? There are: job, trainer"),
    (_damaged("rollout", "no_tokens", "soon"), "rollout.no_tokens = 'soon': must be a finite time of at least 0.3 s"),
    (_damaged("rollout", "strikes", 1.5), "rollout.strikes = 1.5: must be a whole number from 1 on"),
    (_damaged("node", None, 3), "thresholds.node = 3: must be settings by name: silent"),
    (_damaged("job", "stall", {"time": 3.0, "floor": 3.0}), "job.stall = .*the fields of one by name: times, floor"),
    (_damaged("trainer", "silent", None), "trainer.silent = None: must be a finite time"),
    ({}, "job.stall = None: must be a finite time"),
    (None, "thresholds = None: must be settings by section and name; the sections are job, trainer"),
    ({**LAB.to_dict(), 3: {}}, "thresholds = 3: there is no such setting"),
])  # fmt: skip
def test_a_damaged_record_says_what_is_wrong_and_what_is_allowed(record, words):
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        Thresholds.from_dict(record)


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


@pytest.mark.parametrize(
    "odd", [np.timedelta64(3, "s"), np.datetime64("2026-01-01"), Fraction(10**400, 3), -Fraction(10**400, 3), Decimal("3.5")]
)
def test_a_number_of_another_kind_that_is_no_plain_one_is_refused_by_name(odd):
    for path in ("rollout.no_tokens", "rollout.strikes", "trainer.straggler", "trainer.activity_floor"):
        with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
            LAB.updated({path: odd})
    with pytest.raises(ConfigError, match=r"multiple\.floor"):
        Relative(4.0, odd)


@pytest.mark.parametrize("least", [0.3, "0.3s", "300ms", "0.3", ".3s"])
def test_the_least_time_that_a_refusal_names_is_allowed(least):
    assert LAB.replace("management.lag", least).management.lag == pytest.approx(0.3)


@pytest.mark.parametrize("text", ["3ms", "1e-30s", "1.00000001e7s", "0.1x", "1e9x", " 3000h "])
def test_a_text_that_is_refused_is_named_as_it_was_given(text):
    with pytest.raises(ConfigError) as refused:
        LAB.replace("trainer.snapshot", text)
    assert repr(text) in str(refused.value) and refused.value.field == "trainer.snapshot"
