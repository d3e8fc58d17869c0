"""Bars of the timeline's lanes: none overlap, none are forgotten, and they are never too many."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from robustrl_widgets import bars, lanes
from view_scenes import bars_of, scene_of
from views_log import full_restart


def test_detection_reaches_back_to_the_last_sign_of_life():
    lane = lanes.Lane()
    for start, code in enumerate("wiw"):
        lane.begin(float(start), code, "p")
    lane.replace_from(1.5, 4.0, lanes.DETECT, "")
    lane.begin(4.0, lanes.RESTART, "")
    assert [(bar.start, bar.end, bar.code) for bar in lane.bars] == [(0.0, 1.0, "w"), (1.0, 1.5, "i"), (1.5, 4.0, "d"), (4.0, -1.0, "r")]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 2), st.sampled_from("wircd")), max_size=60), st.integers(1, 9))
def test_bars_of_a_lane_never_overlap_and_are_never_too_many(moves, most):
    lane, t = lanes.Lane(), 0.0
    for gap, code in moves:
        t += gap
        if code == "d":
            lane.replace_from(max(0.0, t - 1.5), t, lanes.DETECT, "")
        else:
            lane.begin(t, code, "")
        lane.keep(most)
    ends = [t if bar.end == -1.0 else bar.end for bar in lane.bars]
    assert len(lane.bars) <= most
    assert all(end <= bar.start for end, bar in zip(ends, list(lane.bars)[1:], strict=False))
    assert all(bar.start <= end for bar, end in zip(lane.bars, ends, strict=True))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 2), st.sampled_from("wircdx")), max_size=150), st.integers(1, 90), st.floats(0, 60))
@example([(0.0, "w"), (1.0, "i"), (0.0, "d")], 1, 0.0)  # nothing is left of it, and it had been longer
def test_what_is_drawn_of_a_lane_is_all_of_its_bars_whatever_was_drawn_before(moves, most, reach):
    lane, t = lanes.Lane(), 0.0
    for gap, code in moves:
        t += gap
        if code == "d":
            lane.replace_from(max(0.0, t - reach), t, lanes.DETECT, "")
        else:
            lane.begin(t, code, "")
        lane.keep(most)
        expected: dict = {}
        for place, bar in enumerate(lane.bars):
            expected.setdefault(str(place // 16), []).append([round(bar.start, 2), round(bar.end, 2), bar.code, bar.phase])
        assert lane.drawn() == expected


def test_of_a_long_lane_nothing_is_forgotten_and_its_failures_stay_whole():
    """After ten minutes the first eight were white: the oldest bars had been dropped."""
    lane, t = lanes.Lane(), 0.0
    while t < 600.0:
        if abs(t - 40.0) < 0.01:
            lane.replace_from(t - 1.0, t, bars.DETECT, "")
            lane.begin(t, bars.RESTART, "")
            t += 19.0
        for code, phase in ((bars.WORK, "decode"), (bars.IDLE, "waiting_request")):
            lane.begin(t, code, phase)
            lane.keep(200, [(36.0, 63.0)])
            t += 0.3 if code == bars.WORK else 0.1
    assert len(lane.bars) <= 200 and lane.bars[0].start == 0.0
    assert all(abs(before.end - after.start) < 1e-6 for before, after in zip(lane.bars, lane.bars[1:], strict=False)), "no gap"
    assert [(bar.code, round(bar.end - bar.start, 3)) for bar in lane.bars if bar.code in "dr"] == [("d", 1.0), ("r", 19.0)]
    assert sum(36.0 < bar.start < 63.0 for bar in lane.bars) > 20, "around a recovery nothing is joined"
    joined = [bar for bar in lane.bars if bar.phase.startswith("mostly")]
    assert joined and {(bar.code, bar.phase) for bar in joined} == {(bars.WORK, "mostly decode")}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 9), st.sampled_from("widrc")), min_size=1, max_size=120), st.integers(1, 80),
       st.lists(st.tuples(st.floats(0, 400), st.floats(0, 30)), max_size=4))
def test_bars_that_become_fewer_cover_the_same_time(moves, most, stretches):
    made, t = [], 0.0
    for length, code in moves:
        made.append(bars.Bar(t, t + length, code, code))
        t += length
    made[-1].end = -1.0
    few = bars.thinned(made, most, [(low, low + length) for low, length in stretches])
    assert 1 <= len(few) <= most and few[-1] == made[-1]
    if most > 1:
        assert few[0].start == 0.0 and all(one.end == other.start for one, other in zip(few, few[1:], strict=False))
    assert not {"d", "r"} & {bar.code for bar in made} or {"d", "r"} & {bar.code for bar in few} or most == 1


def test_the_bar_of_a_role_without_samples_ends_with_the_recovery_that_brought_it_back():
    log = full_restart()
    scene = scene_of(log)
    bars = bars_of(scene, "node_agent-0")
    assert [bar[2] for bar in bars[-2:]] == ["c", "i"] and bars[-2][1] == bars[-1][0] == pytest.approx(scene.t)
    assert scene.episodes.all[-1].healed and {bars_of(scene, role)[-1][2] for role in scene.lanes.lanes} == {"i"}
