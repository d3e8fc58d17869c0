"""From a log to pictures: what a person sees is what the log says, bounded, and harmless whatever a run calls itself."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from unicodedata import category

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_log import Writer, made_log
from robustrl_widgets import bars, lanes, recovery_text, showing, static
from robustrl_widgets.channel import Channel, difference, merged
from robustrl_widgets.scene import VIEWS, Scene, _add_cause
from robustrl_widgets.sources import load_entries
from robustrl_widgets.words import LONG, PHASES, count, cut, headline, in_phases, seconds
from story import Story
from views_log import back, continued, failing_log, full_restart

from robustrl.core import events as ev
from robustrl.core.detection import Detector
from robustrl.core.levels import levels
from robustrl.core.recovery import ALL_BECAUSE
from robustrl.core.roles import Phase, RoleState
from robustrl.core.thresholds import PATHS, Thresholds
from robustrl.tables import recoveries


def _scene(entries: list[ev.Entry]) -> Scene:
    scene = Scene()
    for entry in entries:
        scene.apply(entry)
    return scene


def _bars(scene: Scene, role: str) -> list[tuple]:
    return [dataclasses.astuple(bar) for bar in scene.lanes.lanes[role].bars]


def test_a_healthy_run_has_a_picture_in_every_view_and_equal_logs_have_equal_ones():
    log = made_log()
    one, two = _scene(log), _scene(log)
    for view in VIEWS:
        assert json.dumps(one.picture(view, one.t)) == json.dumps(two.picture(view, two.t))
    head = one.picture("board", one.t)["head"]
    assert head["status"] == "done" and head["step"] == head["steps"] == 3 and head["ill"] == []
    assert head["ledger"]["balanced"] and head["accuracy"] == 0.9


def test_a_failure_runs_through_its_stages_on_card_timeline_and_report():
    log = failing_log()
    ill = _scene(log)
    board = ill.picture("board", ill.t)
    assert board["head"]["ill"] == ["rollout-1"]
    assert board["roles"]["rollout-1"]["state"] == "restarting" and board["roles"]["rollout-1"]["life"] == 2
    assert board["roles"]["rollout-1"]["stages"]["on"] == "restart" and board["roles"]["rollout-1"]["stages"]["rule"] == "exited"
    assert board["roles"]["rollout-0"]["last_live"] and "stages" not in board["roles"]["rollout-0"]
    assert [bar[2] for bar in _bars(ill, "rollout-1")][-2:] == [lanes.DETECT, lanes.RESTART]

    well = _scene(back(log))
    board = well.picture("board", well.t)
    assert board["head"]["ill"] == []
    stages = board["roles"]["rollout-1"]["stages"]
    assert stages["on"] == "" and set(stages["took"]) == {"detect", "restart", "reconnect"}
    assert stages["total"] == pytest.approx(sum(stages["took"].values()), abs=0.02)
    assert [bar[2] for bar in _bars(well, "rollout-1")][-4:-1] == [lanes.DETECT, lanes.RESTART, lanes.RECONNECT]
    (report,) = well.picture("recovery", well.t)["recoveries"].values()
    assert report["outcome"] == "recovered" and report["role"] == "rollout-1" and "rollout-1" in report["seen"]
    assert any("takes part again" in line[3] for line in well.story)


def test_detection_took_as_long_in_all_views():
    """The word of a kill comes after that of its effect: views then showed 0 ms, 0.2 s and 0.3 s for one recovery."""
    scene = _scene(load_entries(showing.SAMPLE))
    cards, reports = scene.picture("faults", scene.t)["cards"], scene.picture("recovery", scene.t)["recoveries"]
    assert len(reports) == 2
    for report in reports.values():
        card, role = cards[str(report["faults"][0])], report["role"]
        took = card["detected"] - card["injected"]
        assert f"in phase {PHASES[card['hits'][0]['phase']]}" in report["seen"], "the last sample was of another"
        assert took > 0.1 and report["took"]["detect"] == pytest.approx(took, abs=0.002)
        assert report["t"]["onset"] == pytest.approx(card["injected"], abs=0.002)
        found = [bar for bar in _bars(scene, role) if bar[2] == lanes.DETECT]
        assert found[-1][1] - found[-1][0] == pytest.approx(took, abs=0.02)
        before = [bar for bar in _bars(scene, role) if bar[1] <= found[-1][0] + 0.01]
        assert before[-1][1] == pytest.approx(found[-1][0], abs=0.01), "no gap in front of it"
        marks = [mark for mark in scene.lanes.marks if mark[1] == role]
        assert [mark[2] for mark in marks] == ["fault"] and marks[0][0] == pytest.approx(card["injected"], abs=0.002)
        said = f"Noticed after {seconds(took)}."
        assert said in report["seen"] and sum(said in line[3] for line in scene.story) == 1 and said in static.recoveries_html(scene)
        assert sum(said in line[3] for line in scene.history[role]) == 1
        back = f"{seconds(card['recovered'] - card['injected'])} after its fault"
        if report["role"] != "trainer-0":  # it is back only when it trains
            assert any(back in line[3] for line in scene.story)


def test_without_a_fault_it_is_said_since_when_detection_is_counted():
    scene = _scene(back(failing_log()))
    (report,) = scene.picture("recovery", scene.t)["recoveries"].values()
    (bar,) = [bar for bar in _bars(scene, "rollout-1") if bar[2] == lanes.DETECT]
    said = f"Noticed {seconds(report['took']['detect'])} after its last sign of life."
    assert said in report["seen"] and any(said in line[3] for line in scene.story)
    assert bar[1] - bar[0] == pytest.approx(report["took"]["detect"], abs=0.02)


def test_the_end_of_a_supervisor_is_noticed_when_the_host_says_so_not_when_its_next_life_judges_it():
    """The report had a detection of 2.3 s and a restart of 0 ms where the table of recoveries had 0.95 s and 1.24 s."""
    story = Story()
    story.sample(101.0, "supervisor", "idle")
    story.at(101.5, ev.ProcessExited(role="supervisor", incarnation=1, pid=7, cause="pidfd", last_lines=[]))
    story.restart(101.6, "supervisor")
    story.starts(101.7, "supervisor")
    story.at(102.8, ev.RoleReady(role="supervisor", incarnation=2, seconds=1.0))
    story.at(102.9, ev.Verdict(role="supervisor", incarnation=1, kind="failed", rule="exited", evidence={"cause": "pidfd"}, threshold=0.0,
                               due=102.9, seen=102.9, onset=101.0, blind_spot=""))  # fmt: skip
    story.becomes(103.0, "supervisor", RoleState.HEALTHY)
    early, scene = _scene(story.entries[:-3]), _scene(story.entries)
    assert early.episodes.all[0].noticed == "Noticed 0.5 s after its last sign of life."
    (report,) = early.picture("recovery", 3.0)["recoveries"].values()
    assert report["seen"] == "supervisor failed: its process ended. Noticed 0.5 s after its last sign of life."
    (report,), (row,) = scene.picture("recovery", 3.0)["recoveries"].values(), recoveries(story.entries)
    for stage in ("detect", "restart", "reconnect"):
        assert report["took"][stage] == pytest.approx(row[stage], abs=0.002)
    assert report["took"]["detect"] == 0.5 and report["took"]["restart"] == pytest.approx(1.3)


@pytest.mark.parametrize(("step", "said"), [(2, "Paused after optimizer step 2."), (3, "Pauses after optimizer step 3, which still runs.")])
def test_a_pause_is_told_of_with_the_step_that_still_runs(step, said):
    story = Story()
    story.commit(101.0, 1)
    story.commit(102.0, 2)
    story.at(102.5, ev.Paused(step=step))
    assert _scene(story.entries).story[-1][3] == said


def test_an_error_without_a_full_stop_is_a_sentence_all_the_same():
    (episode,) = _scene(back(failing_log())).episodes.all
    episode.record = msgspec.structs.replace(episode.record, rule="exception")
    for text in ("out of memory", "out of memory."):
        episode.evidence = {"error": "MemoryError", "text": text}
        assert recovery_text.seen(episode) == "rollout-1 raised MemoryError: out of memory."


def test_steps_that_were_rolled_back_are_no_progress_meanwhile():
    """A log said: the others made -8 optimizer steps."""
    log = Writer()
    for entry in failing_log():
        log.write(entry.source, entry.event)
    log.write("trainer-0", ev.RolledBack(old=1, to=0, reason="made up"))
    log.write("rollout-1", ev.RoleReady(role="rollout-1", incarnation=2, seconds=0.5))
    (report,) = _scene(log.entries).picture("recovery", 1.0)["recoveries"].values()
    assert "0 optimizer steps" in report["meanwhile"] and "-" not in report["meanwhile"]


@pytest.mark.parametrize(("value", "said"), [(0.0, "0 ms"), (0.0994, "99 ms"), (0.0996, "0.1 s"), (9.94, "9.9 s"), (14.4, "14 s"),
                                             (99.4, "99 s"), (99.6, "1 min 40 s"), (119.7, "2 min 00 s"), (7200.0, "2.0 h")])  # fmt: skip
def test_a_time_is_written_in_one_way(value, said):
    assert seconds(value) == said


def test_when_the_run_is_over_no_pull_is_under_way():
    log = Writer()
    for entry in made_log():
        if isinstance(entry.event, ev.RunEnded):
            pull = {"target": "rollout-0", "source": "trainer-0", "source_incarnation": 1, "version": 9, "bytes": 10, "transport": "tcp"}
            log.write("rollout-0", ev.PullStarted(**pull))
            pulling = _scene(log.entries)
        log.write(entry.source, entry.event)
    shown = pulling.picture("board", pulling.t)["pulls"]
    assert "rollout-0 9" in shown and len(shown) > 1, "those that have ended a moment ago as well"
    over = _scene(log.entries)
    assert over.picture("board", over.t)["pulls"] == {} and over.state.pulls == {}
    pulling.lost = "its host died"
    assert pulling.picture("board", pulling.t)["pulls"] == {}


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


def test_answers_that_a_fault_made_move_on_can_be_browsed_long_after():
    """A minute later none of the newest 64 was one."""
    log = made_log(steps=60, prompts=4, samples=4)
    finished = [number for entry in log if isinstance(entry.event, ev.TrajectoriesFinished) for number in entry.event.ids]
    scene, moved = Scene(), finished[::5]
    for place, entry in enumerate(log):
        if place == 1:
            told = ev.TrajectoriesMoved(ids=moved, source="rollout-1", target="rollout-0", version=0, kept=[3] * len(moved))
            scene.samples.apply(msgspec.structs.replace(entry, event=told))
        scene.apply(entry)
    shown = scene.picture("trajectories", scene.t)
    assert not set(shown["rows"]) & set(shown["moved"]) and len(shown["rows"]) == 64
    found = [row for rows in (shown["rows"], shown["moved"]) for row in rows.values() if row["moves"]]
    assert sorted(row["id"] for row in found) == moved[-64:] and len(found) == 64


def test_pictures_stay_small_however_long_the_run_is():
    def sizes(steps: int) -> dict[str, int]:
        scene = _scene(made_log(steps=steps, prompts=1, samples=1))
        return {view: len(json.dumps(scene.picture(view, scene.t))) for view in VIEWS}

    short, long = sizes(320), sizes(640)
    for view in VIEWS:
        assert long[view] < 1.7 * short[view] + 200, view
        assert long[view] < 300_000, view


HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\u202e" + "A" * 5000


def test_hostile_words_are_cut_and_carry_no_control_characters():
    log = failing_log(hostile=HOSTILE)
    scene = _scene(log)
    assert scene.doubts == scene.doubts.__class__(maxlen=5), "the log is a possible one"
    texts = [json.dumps(scene.picture(view, scene.t), ensure_ascii=False) for view in VIEWS] + [json.dumps(scene.inspect("rollout-1"))]
    for text in texts:
        assert "\x1b" not in text and "\u202e" not in text and "A" * (LONG + 1) not in text
    assert any("onerror" in text for text in texts), "it is shown, as text"


@settings(max_examples=25, deadline=None)
@given(st.text())
def test_cut_gives_printable_text_of_bounded_length(text):
    short = cut(text, 20)
    assert len(short) <= 20 and all(sign.isprintable() or sign == "\n" or category(sign) == "Zs" for sign in short)


@pytest.mark.parametrize(("line", "shown"), [
    (" " * 500, ""), ("\x1b[2K\x1b[0m" + " " * 2000 + "\r", ""), ("a" + " " * 500, "a"), ("a\tb\r\nc", "a    b\nc"),
    ("\x1b[36m(raylet)\x1b[0m \x1b]0;title\x07x\x1b[1A\x1b(B", "(raylet) x\ufffd(B"), ("a" * 30, "a" * 19 + "\u2026"),
    ("a" + " " * 500 + "b", "a\u2026"),
])  # fmt: skip
def test_what_is_cut_says_so_and_blanks_and_escape_codes_are_nothing_that_was_cut(line, shown):
    """Blank lines of a log looked as if something had been left out."""
    assert cut(line, 20) == shown


@pytest.mark.parametrize(("text", "said"), [
    ("", ""), ("\n  \n", ""), ("trainer-0 failed: out of memory", "trainer-0 failed: out of memory"),
    ("its host (process 5) ended without a closing record\n  | \x1b[33mlog\x1b[0m\n  | ValueError: no",
     "its host (process 5) ended without a closing record"),
    ("the cluster did not start: \x1b[36mray::Role.open()\x1b[39m (pid=7)\n  File x\nrobustrl.errors.RoleDied: it died\nOSError: z",
     "the cluster did not start: robustrl.errors.RoleDied: it died"),
    ("Traceback (most recent call last):\n  File x\nMemoryError: no room", "MemoryError: no room"),
    ("ray::Role.open()", "ray::Role.open()"),
    ("word " * 900, "word " * 31 + "word\u2026"),
])  # fmt: skip
def test_the_headline_of_a_long_text_is_its_first_cause_in_one_line(text, said):
    assert headline(text) == said and "\n" not in headline(text) and len(headline(text)) <= 160


def test_a_phase_has_one_name_in_all_words():
    assert set(PHASES) == {str(phase) for phase in Phase} and len(set(PHASES.values())) == len(PHASES)
    assert in_phases("in phase waiting_tool, step 3") == "in phase waiting for a tool, step 3"


def test_a_rollout_that_is_dead_makes_no_tokens():
    """Its last rate stood for ten seconds."""
    log = Writer()
    for entry in made_log(steps=2, drop=False):
        if isinstance(entry.event, ev.TrajectoriesFinished) and entry.event.batch == 2:
            break
        log.write(entry.source, entry.event)
    for progress in (100, 900):
        log.write("node_agent-0", ev.RoleSample(
            role="rollout-1", incarnation=1, phase="decode", progress=progress, pending=2, step=1, version=0, loop_age=0.0, cpu=1.0))
    assert _scene(log.entries).state.tokens_per_second()["rollout-1"] > 0
    log.write("node_agent-0", ev.ProcessExited(role="rollout-1", incarnation=1, pid=7, cause="pidfd", last_lines=[]))
    dead = _scene(log.entries)
    dead.curves._point(dead.t, dead.state)
    assert dead.curves.tokens["rollout-1"][-1] == 0.0 == dead.state.tokens_per_second()["rollout-1"]


def test_a_full_restart_is_told_once_and_what_it_ends_on_purpose_did_not_fail():
    scene = _scene(full_restart())
    assert not scene.doubts, "the log is a possible one"
    anew = "All roles are started anew because of trainer-0: "
    assert [line[1] for line in scene.story if anew in line[3]] == ["trainer-0"]
    assert [line[1] for line in scene.story if "The process of" in line[3] or "because of" in line[3]] == ["trainer-0", "trainer-0"]
    words = [line[3] for line in scene.history["rollout-0"]]
    assert "ended: all roles are started anew because of trainer-0" in words and not any("because of rollout" in each for each in words)


def test_of_a_full_restart_it_is_said_why_all_are_restarted_and_not_what_others_made():
    """The log knew it, and nobody said it; and tokens of a moment before all were ended were said to have been made meanwhile."""
    why = "the second failure in the same optimizer step"
    for reason, said in ((f"its process ended{ALL_BECAUSE}{why}", why), ("its process ended", "the recovery mode is full")):
        log = [msgspec.structs.replace(entry, event=msgspec.structs.replace(entry.event, reason=reason))
               if isinstance(entry.event, ev.RestartDecided) and entry.event.role == "trainer-0" else entry for entry in full_restart()]
        scene = _scene(log)
        (report,) = scene.picture("recovery", scene.t)["recoveries"].values()
        assert report["done"].startswith(f"All roles were restarted: {said}.") and report["meanwhile"] == ""
        assert f"All roles are started anew because of trainer-0: {said}." in [line[3] for line in scene.story]
        saved = static.recoveries_html(scene)
        assert f"All roles were restarted: {said}." in saved and "Meanwhile" not in saved


def test_who_is_ended_on_purpose_was_not_detected():
    """Each role of a full restart had a bar and a mark of a detection, which reached back to the trainer's last sign of life."""
    log = full_restart()
    decided = [place for place, entry in enumerate(log) if isinstance(entry.event, ev.RestartDecided)]
    others = sorted({entry.event.role for entry in log if isinstance(entry.event, ev.RestartDecided)} - {"trainer-0"})
    for upto in (*range(decided[-1] + 1, len(log)), len(log)):
        scene = _scene(log[:upto])
        assert not scene.doubts and [bar[2] for bar in _bars(scene, "trainer-0")].count(lanes.DETECT) == 1
        assert [mark[1] for mark in scene.lanes.marks] == ["trainer-0"]
        board = scene.picture("board", scene.t)["roles"]
        assert "detect" in board["trainer-0"]["stages"]["took"] and "ended_for" not in board["trainer-0"]["stages"]
        for role in others:
            assert lanes.DETECT not in [bar[2] for bar in _bars(scene, role)]
            assert "detect" not in board[role]["stages"]["took"] and board[role]["stages"]["ended_for"] == "trainer-0"
            assert board[role]["stages"]["rule"] == ""
    until, begun = _scene(log[: decided[0]]), log[decided[0]].t - log[0].t
    for role in others:
        before, bar = _bars(until, role), next(bar for bar in _bars(scene, role) if bar[2] == lanes.RESTART)
        assert begun <= bar[0] <= begun + 0.2, "from the decision on"
        assert _bars(scene, role)[: len(before)] == [*before[:-1], (before[-1][0], bar[0], *before[-1][2:])], "what it did until then stays"


def test_the_stages_on_the_card_of_who_was_ended_on_purpose_are_those_of_its_lane():
    """They were those of the whole recovery: a restart that took until the last role was ready."""
    log = full_restart()
    decided = [place for place, entry in enumerate(log) if isinstance(entry.event, ev.RestartDecided)]
    others = sorted({log[place].event.role for place in decided} - {"trainer-0"})
    for upto in range(decided[-1] + 1, len(log) + 1):
        scene = _scene(log[:upto])
        for role in others:
            stages, last = scene.picture("board", scene.t)["roles"][role]["stages"], _bars(scene, role)[-1]
            if stages["on"]:
                assert {lanes.RESTART: "restart", lanes.RECONNECT: "reconnect"}[last[2]] == stages["on"]
                assert stages["since"] == pytest.approx(last[0], abs=0.011)
    drawn = {role: {bar[2]: bar[1] - bar[0] for bar in _bars(scene, role)} for role in others}
    for role in others:
        took = scene.picture("board", scene.t)["roles"][role]["stages"]["took"]
        assert took["restart"] == pytest.approx(drawn[role][lanes.RESTART], abs=0.011)
        assert took["reconnect"] == pytest.approx(drawn[role].get(lanes.RECONNECT, 0.0), abs=0.011)
    assert len({bars[lanes.RESTART] for bars in drawn.values()}) > 1, "one after another"


def test_a_role_that_was_suspect_is_ended_all_the_same():
    log, more = full_restart(), Writer()
    place = next(i for i, entry in enumerate(log) if isinstance(entry.event, ev.ProcessExited))
    for number, entry in enumerate(log):
        event, now = entry.event, more.entries[-1].t if more.entries else 0.0
        if number == place:
            more.write("supervisor", ev.Verdict(
                role="rollout-0", incarnation=1, kind="suspect", rule="no_tokens", evidence={}, threshold=1.0, due=now, seen=now,
                onset=now - 0.02, blind_spot=""))
            more.write("supervisor", ev.RoleStateChanged(role="rollout-0", incarnation=1, old="healthy", new="suspect", reason="no_tokens"))
        if isinstance(event, ev.RoleStateChanged) and (event.role, event.new) == ("rollout-0", "failed"):
            event = msgspec.structs.replace(event, old="suspect")
        more.write(entry.source, event)
        if isinstance(event, ev.RestartDecided) and event.role == "rollout-0":
            break
    scene = _scene(more.entries)
    assert not scene.doubts and [bar[2:3] + (bar[1] == -1.0,) for bar in _bars(scene, "rollout-0")][-2:] == [("d", False), ("r", True)]
    assert scene.picture("board", scene.t)["roles"]["rollout-0"]["stages"]["on"] == "restart"


def test_a_life_that_dies_on_its_way_back_leaves_the_first_failure_as_it_was():
    """It was drawn as one detection that reached back to before the first failure."""
    log = continued(failing_log(), ev.ProcessExited(role="rollout-1", incarnation=2, pid=999, cause="pidfd", last_lines=[]),
                   ev.RoleStateChanged(role="rollout-1", incarnation=2, old="restarting", new="failed", reason="exited"))
    before, after = _bars(_scene(failing_log()), "rollout-1"), _bars(_scene(log), "rollout-1")
    assert before == after and [bar[2] for bar in after][-2:] == [lanes.DETECT, lanes.RESTART]


def test_few_steps_say_little_of_effective_training_time_and_the_figure_stays():
    from robustrl.core.accounting import account, ratios

    log = [msgspec.structs.replace(entry, t=100 * entry.t) for entry in made_log(steps=25)]
    commits = [place for place, entry in enumerate(log) if isinstance(entry.event, ev.OptimizerStepCommitted) and entry.event.step]
    assert len(commits) == 25
    for step, hinted in ((1, True), (3, True), (19, True), (20, False), (25, False)):
        part = log[: commits[step - 1] + 1]
        scene = _scene(part)
        assert not scene.curves.early, "no figure yet"
        scene.curves.take_ratios(ratios(part, 300), scene.state.t0)
        head = scene.picture("metrics", scene.t)["head"]
        assert head["ettr"]["strict"] == 1.0 and bool(head["ettr_early"]) is hinted
        html = static.form("metrics", scene, scene.t)
        assert ("ETTR says little before 20 optimizer steps" in html) is hinted and "1.000, 1.000" in html
        if hinted:
            said = head["ettr_early"].partition("this is of ")[2]
            assert said.startswith(f"{seconds(account(part).span)} and {step} step{'s' * (step > 1)}, ")


def test_the_bar_of_a_role_without_samples_ends_with_the_recovery_that_brought_it_back():
    log = full_restart()
    scene = _scene(log)
    bars = _bars(scene, "node_agent-0")
    assert [bar[2] for bar in bars[-2:]] == ["c", "i"] and bars[-2][1] == bars[-1][0] == pytest.approx(scene.t)
    assert scene.episodes.all[-1].healed and {_bars(scene, role)[-1][2] for role in scene.lanes.lanes} == {"i"}


def _killed(story: Story, t: float, fault: int, late: float = 0.0) -> None:
    if not late:
        story.injects(t - 0.25, "trainer-0", fault=fault)
    life = story.life["trainer-0"]
    story.at(t, ev.ProcessExited(role="trainer-0", incarnation=life, pid=7, cause="pidfd", last_lines=[]))
    story.verdict(t, "trainer-0", "exited", onset=t)
    story.becomes(t, "trainer-0", RoleState.FAILED)
    if late:
        story.injects(t + late, "trainer-0", fault=fault)
    story.restart(t, "trainer-0")
    story.starts(t + 1.0, "trainer-0")


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_a_trainer_that_is_killed_again_before_it_trained_is_told_of_each_time_in_its_own_words(late: float):
    story = Story()
    story.batch(101.0, 1, finished=102.0)
    story.sample(109.0, "trainer-0", "train", 1)
    _killed(story, 110.0, 1)
    story.ready(112.0, "trainer-0")
    _killed(story, 120.0, 2, late)
    story.ready(122.0, "trainer-0")
    for t, progress in ((123.0, 2), (124.0, 3)):
        story.sample(t, "trainer-0", "train", progress)
    scene = _scene(story.entries)
    first, second = (episode.record for episode in scene.episodes.all)
    assert (first.faults, second.faults, first.outcome, second.outcome) == ((1,), (2,), "failed again", "recovered")
    words = [line[3] for line in scene.story if "The process of" in line[3]]
    assert [each.partition("Noticed")[2] for each in words] == [" after 0.2 s.", " after 0 ms." if late else " after 0.2 s."]
    drawn = scene.picture("recovery", 30.0)["recoveries"]
    assert [each["standing"] for each in drawn.values()] == ["failed again before it had trained", ""]
    assert drawn["2"]["t"]["onset"] == pytest.approx(20.0 if late else 19.75)
    bars = [bar for bar in _bars(scene, "trainer-0") if bar[2] == "d"]
    assert all(stop - start < 1.0 for start, stop, *_ in bars), "neither detection reaches back to the other"


def test_who_fails_on_its_way_back_is_not_told_of_in_the_words_of_its_first_failure():
    story = Story()
    _killed(story, 110.0, 1)
    _killed(story, 112.0, 2)
    scene = _scene(story.entries)
    assert [line[3] for line in scene.story if line[2] == "bad" and "Fault" not in line[3]] == [
        "The process of trainer-0 ended in phase train (no cause known). Noticed after 0.2 s.", "trainer-0 failed on its way back: so"]


def _told_late() -> list[ev.Entry]:
    """A kill of which the log tells only when it has told what it led to."""
    log = Writer()
    entries = failing_log()
    place = next(i for i, entry in enumerate(entries) if isinstance(entry.event, ev.ProcessExited))
    for number, entry in enumerate(entries):
        if number == place:
            log.write("host", ev.FaultPlanned(fault=1, kind="kill", target="rollout-1", when="now", benign=False, options={}))
            begun = log.entries[-1].t
        log.write(entry.source, entry.event)
    ago = {"ago": log.entries[-1].t - begun}
    hit = ev.FaultInjected(fault=1, role="rollout-1", incarnation=1, node="node-0", pid=5, phase="decode", step=1, proof=ago)
    log.write("node_agent-0", hit)
    return log.entries


def test_a_cause_stands_before_what_it_led_to():
    scene = _scene(_told_late())
    for lines in (scene.story, scene.history["rollout-1"]):
        words, times = [line[3] for line in lines], [line[0] for line in lines]
        cause = next(place for place, line in enumerate(words) if line.startswith("Fault 1 hits rollout-1"))
        effect = next(place for place, line in enumerate(words) if line.startswith("The process of rollout-1 ended"))
        assert cause < effect and times == sorted(times)


def test_the_same_moment_is_told_cause_first_and_a_full_story_keeps_its_length():
    lines = deque([[float(n), "a", "bad", "x"] for n in range(40)], maxlen=40)
    _add_cause(lines, [39.0, "a", "bad", "cause"])
    assert [line[3] for line in lines][-2:] == ["cause", "x"] and len(lines) == 40
    _add_cause(lines, [0.5, "a", "bad", "older than all"])
    assert len(lines) == 40 and lines[0][0] == 1.0


def test_of_a_job_that_is_gone_every_view_says_so_also_where_it_is_saved():
    scene = _scene(failing_log())
    assert all("gone" not in scene.picture(view, scene.t) and "is gone since" not in static.form(view, scene, scene.t) for view in VIEWS)
    scene.lost = "its host (process 5) ended without a closing record"
    for view in VIEWS:
        assert scene.picture(view, scene.t)["gone"] == pytest.approx(scene.state.wall + scene.t, abs=0.1)
        assert static.form(view, scene, scene.t).startswith("<div><b>The job is gone since ")


def _played(entries: list[ev.Entry]) -> Scene:
    """A recording at its end."""
    scene = _scene(entries)
    scene.length = entries[-1].t - entries[0].t
    return scene


def test_a_recording_whose_log_breaks_off_says_so_at_its_end_and_not_that_the_job_is_running():
    log = failing_log()
    before = _scene(log[:-1])
    before.length = log[-1].t - log[0].t
    assert before.status == "running" and not before.over and not before.closed
    assert not any(scene.broken for scene in (before, _scene(log))), "it goes on, or is live"
    scene = _played(log)
    assert (scene.status, scene.over, scene.closed, scene.gone) == ("unknown", True, "the log breaks off", None)
    head = scene.picture("board", scene.t)["head"]
    assert head["status"] == "unknown" and head["recorded"] and not head["lost"]
    words = f"The log breaks off here, {seconds(scene.t)} after its first entry"
    for view in VIEWS:
        said = scene.picture(view, scene.t)["broken"]
        assert said.startswith(words) and said.endswith("its last entry is role_started of rollout-1. What became of the job is not known.")
        assert "broken" not in before.picture(view, before.t) and static.form(view, scene, scene.t).startswith(f"<div><b>{words}")
    assert "</span> unknown, optimizer step 1 of 2" in static.form("board", scene, scene.t)


def test_where_a_log_breaks_off_no_recovery_is_under_way_any_more():
    log = failing_log()
    running, lost, broken, over = _scene(log), _scene(log), _played(log), _played(back(log))
    lost.lost = "its host is gone"
    said = {"under way: restart": running, "the job was lost during its restart": lost, "the log breaks off during its restart": broken}
    for words, scene in said.items():
        assert scene.picture("recovery", scene.t)["recoveries"]["1"]["standing"] == words
        shown = static.form("recovery", scene, scene.t)
        assert f"<b>rollout-1: {words}</b>" in shown and ("under way" in shown) is (scene is running)
    assert not over.picture("recovery", over.t)["recoveries"]["1"]["standing"]
    assert "<b>rollout-1: recovered in " in static.form("recovery", over, over.t)


@pytest.mark.parametrize(("wall", "clock"), [(1.8e9, "(2027-01-15 08:00:0"), (0.0, ""), (1e300, ""), (float("nan"), "")])
def test_where_a_log_breaks_off_the_clock_is_told_if_the_log_knows_it(wall, clock):
    log = failing_log()
    log[0] = msgspec.structs.replace(log[0], event=msgspec.structs.replace(log[0].event, wall=wall))
    said = _played(log).broken
    assert clock in said and ("UTC" in said) is bool(clock)


def test_only_a_log_with_the_end_of_the_job_in_it_does_not_break_off():
    assert not _played(made_log()).broken and _played(made_log()).status == "done"
    resumed = continued(made_log(), ev.RunResumed(host_pid=6, wall=2.0))
    assert "its last entry is run_resumed." in _played(resumed).broken
    decided = continued(failing_log(), ev.EndDecided(status="done", reason=""))
    assert "That it should end as done had been decided." in _played(decided).broken


def test_of_a_fault_that_was_planned_when_the_log_breaks_off_nobody_says_that_it_never_fired():
    plan = ev.FaultPlanned(fault=1, kind="kill", target="rollout-0", when="now", benign=False, options={})
    scene = _played(continued(failing_log(), plan))
    card = scene.picture("faults", scene.t)["cards"]["1"]
    assert (card["outcome"], card["reason"], card["never"]) == ("unknown", "the log breaks off", False)


def test_behind_rows_that_are_missing_the_run_goes_on():
    """The first hole in what could be read of a log was the last that its views took in."""
    log = made_log()
    place = next(i for i, entry in enumerate(log) if isinstance(entry.event, ev.WarningRaised | ev.RoleSample))
    scene = _played(log[:place] + log[place + 2 :])
    assert scene.status == "done" and scene.state.step == 3
    assert f"entries {place + 1} to {place + 2} of the log are missing" in scene.doubts


def test_cut_leaves_our_own_numbers_alone():
    """Their thousands are set apart by a thin space, which does not count as printable."""
    assert cut(f"made {count(13301)} tokens") == "made 13\u2009301 tokens"


def test_a_log_that_cannot_be_is_shown_with_a_doubt():
    log = made_log()
    place = next(i for i, entry in enumerate(log) if isinstance(entry.event, ev.RoleStateChanged))
    log[place] = msgspec.structs.replace(log[place], event=msgspec.structs.replace(log[place].event, old="stopped"))
    scene = _scene(log)
    assert f"entry {place + 1} of the log is not possible" in scene.doubts[0]
    for view in VIEWS:
        json.dumps(scene.picture(view, scene.t))


def test_a_hidden_fault_keeps_its_secret():
    log = Writer()
    for entry in failing_log():
        log.write(entry.source, entry.event)
    log.write("host", ev.FaultPlanned(fault=1, kind="sigstop", target="trainer-0", when="now", benign=False, options={}, hidden=True))
    log.write("host", ev.FaultInjected(fault=1, role="trainer-0", incarnation=1, node="node-0", pid=5, phase="train", step=2, proof={}))
    scene = _scene(log.entries)
    for view in VIEWS:
        assert "sigstop" not in json.dumps(scene.picture(view, scene.t)), view
    assert "sigstop" not in json.dumps(scene.inspect("trainer-0"))


def test_levels_are_those_of_the_detector():
    detector = Detector(Thresholds.lab())
    log = failing_log()
    for entry in log:
        detector.feed(entry)
    found = levels(detector, log[-1].t + 2.0)
    assert set(found) <= set(PATHS)
    assert found["job.start"].limit == 240.0 and found["job.start"].value >= 2.0
    assert found["rollout.no_tokens"].role == "rollout-0" and "job.stall" not in found, "while a role starts, no step is expected"


_json = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
                     lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=4), max_leaves=12)
_object = st.dictionaries(st.text(max_size=2), _json, max_size=5)


def _without_nulls(value):
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return value


@settings(max_examples=25, deadline=None)
@given(_object, _object)
def test_a_difference_makes_the_new_picture_of_the_old_one(old, new):
    """A key that is null and one that is missing are the same to a page."""
    assert _without_nulls(merged(old, difference(old, new))) == _without_nulls(new)
    assert difference(new, new) == {}


@settings(max_examples=25, deadline=None)
@given(st.lists(_object, min_size=1, max_size=12))
def test_keyframe_and_any_later_difference_are_the_whole_picture(pictures):
    channel = Channel()
    for picture in pictures:
        channel.push(picture, 0.0, 1.0)
        full, delta = json.loads(channel.full), json.loads(channel.delta)
        assert full["key"] == delta["key"]
        assert _without_nulls(merged(full["picture"], delta["patch"])) == _without_nulls(picture)


def test_nothing_is_sent_while_nothing_changes_and_growth_brings_a_new_keyframe():
    channel = Channel()
    assert channel.push({"a": {"b": 1}}, 0.0, 1.0) == "full"
    assert channel.push({"a": {"b": 1}}, 0.3, 1.0) == ""
    assert channel.push({"a": {"b": 2}}, 0.5, 1.0) == "delta"
    sent = [channel.push({"a": {str(i): "x" * 50 for i in range(n)}}, 1.0, 1.0) for n in range(200)]
    assert 2 <= sent.count("full") < 20
    assert max(i for i, what in enumerate(sent) if what == "full") > 100
