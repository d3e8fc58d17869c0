"""From a log to pictures: what a person sees is what the log says, bounded, and harmless whatever a run calls itself."""

from __future__ import annotations

import json
from unicodedata import category

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_log import Writer, made_log
from robustrl_widgets import lanes, recovery_text, showing, static
from robustrl_widgets.channel import Channel, difference, merged
from robustrl_widgets.scene import VIEWS, Scene
from robustrl_widgets.sources import load_entries
from robustrl_widgets.words import LONG, PHASES, count, cut, headline, in_phases, seconds
from story import Story
from view_scenes import bars_of, scene_of
from views_log import back, failing_log

from robustrl.core import events as ev
from robustrl.core.detection import Detector
from robustrl.core.levels import levels
from robustrl.core.roles import Phase, RoleState
from robustrl.core.thresholds import PATHS, Thresholds
from robustrl.tables import recoveries


def test_a_healthy_run_has_a_picture_in_every_view_and_equal_logs_have_equal_ones():
    log = made_log()
    one, two = scene_of(log), scene_of(log)
    for view in VIEWS:
        assert json.dumps(one.picture(view, one.t)) == json.dumps(two.picture(view, two.t))
    head = one.picture("board", one.t)["head"]
    assert head["status"] == "done" and head["step"] == head["steps"] == 3 and head["ill"] == []
    assert head["ledger"]["balanced"] and head["accuracy"] == 0.9


def test_a_failure_runs_through_its_stages_on_card_timeline_and_report():
    log = failing_log()
    ill = scene_of(log)
    board = ill.picture("board", ill.t)
    assert board["head"]["ill"] == ["rollout-1"]
    assert board["roles"]["rollout-1"]["state"] == "restarting" and board["roles"]["rollout-1"]["life"] == 2
    assert board["roles"]["rollout-1"]["stages"]["on"] == "restart" and board["roles"]["rollout-1"]["stages"]["rule"] == "exited"
    assert board["roles"]["rollout-0"]["last_live"] and "stages" not in board["roles"]["rollout-0"]
    assert [bar[2] for bar in bars_of(ill, "rollout-1")][-2:] == [lanes.DETECT, lanes.RESTART]

    well = scene_of(back(log))
    board = well.picture("board", well.t)
    assert board["head"]["ill"] == []
    stages = board["roles"]["rollout-1"]["stages"]
    assert stages["on"] == "" and set(stages["took"]) == {"detect", "restart", "reconnect"}
    assert stages["total"] == pytest.approx(sum(stages["took"].values()), abs=0.02)
    assert [bar[2] for bar in bars_of(well, "rollout-1")][-4:-1] == [lanes.DETECT, lanes.RESTART, lanes.RECONNECT]
    (report,) = well.picture("recovery", well.t)["recoveries"].values()
    assert report["outcome"] == "recovered" and report["role"] == "rollout-1" and "rollout-1" in report["seen"]
    assert any("takes part again" in line[3] for line in well.story)


def test_detection_took_as_long_in_all_views():
    """The word of a kill comes after that of its effect: views then showed 0 ms, 0.2 s and 0.3 s for one recovery."""
    scene = scene_of(load_entries(showing.SAMPLE))
    cards, reports = scene.picture("faults", scene.t)["cards"], scene.picture("recovery", scene.t)["recoveries"]
    assert len(reports) == 2
    for report in reports.values():
        card, role = cards[str(report["faults"][0])], report["role"]
        took = card["detected"] - card["injected"]
        assert f"in phase {PHASES[card['hits'][0]['phase']]}" in report["seen"], "the last sample was of another"
        assert took > 0.1 and report["took"]["detect"] == pytest.approx(took, abs=0.002)
        assert report["t"]["onset"] == pytest.approx(card["injected"], abs=0.002)
        found = [bar for bar in bars_of(scene, role) if bar[2] == lanes.DETECT]
        assert found[-1][1] - found[-1][0] == pytest.approx(took, abs=0.02)
        before = [bar for bar in bars_of(scene, role) if bar[1] <= found[-1][0] + 0.01]
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
    scene = scene_of(back(failing_log()))
    (report,) = scene.picture("recovery", scene.t)["recoveries"].values()
    (bar,) = [bar for bar in bars_of(scene, "rollout-1") if bar[2] == lanes.DETECT]
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
    early, scene = scene_of(story.entries[:-3]), scene_of(story.entries)
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
    assert scene_of(story.entries).story[-1][3] == said


def test_an_error_without_a_full_stop_is_a_sentence_all_the_same():
    (episode,) = scene_of(back(failing_log())).episodes.all
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
    (report,) = scene_of(log.entries).picture("recovery", 1.0)["recoveries"].values()
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
            pulling = scene_of(log.entries)
        log.write(entry.source, entry.event)
    shown = pulling.picture("board", pulling.t)["pulls"]
    assert "rollout-0 9" in shown and len(shown) > 1, "those that have ended a moment ago as well"
    over = scene_of(log.entries)
    assert over.picture("board", over.t)["pulls"] == {} and over.state.pulls == {}
    pulling.lost = "its host died"
    assert pulling.picture("board", pulling.t)["pulls"] == {}


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
        scene = scene_of(made_log(steps=steps, prompts=1, samples=1))
        return {view: len(json.dumps(scene.picture(view, scene.t))) for view in VIEWS}

    short, long = sizes(320), sizes(640)
    for view in VIEWS:
        assert long[view] < 1.7 * short[view] + 200, view
        assert long[view] < 300_000, view


HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\u202e" + "A" * 5000


def test_hostile_words_are_cut_and_carry_no_control_characters():
    log = failing_log(hostile=HOSTILE)
    scene = scene_of(log)
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
    assert scene_of(log.entries).state.tokens_per_second()["rollout-1"] > 0
    log.write("node_agent-0", ev.ProcessExited(role="rollout-1", incarnation=1, pid=7, cause="pidfd", last_lines=[]))
    dead = scene_of(log.entries)
    dead.curves._point(dead.t, dead.state)
    assert dead.curves.tokens["rollout-1"][-1] == 0.0 == dead.state.tokens_per_second()["rollout-1"]


def test_few_steps_say_little_of_effective_training_time_and_the_figure_stays():
    from robustrl.core.accounting import account, ratios

    log = [msgspec.structs.replace(entry, t=100 * entry.t) for entry in made_log(steps=25)]
    commits = [place for place, entry in enumerate(log) if isinstance(entry.event, ev.OptimizerStepCommitted) and entry.event.step]
    assert len(commits) == 25
    for step, hinted in ((1, True), (3, True), (19, True), (20, False), (25, False)):
        part = log[: commits[step - 1] + 1]
        scene = scene_of(part)
        assert not scene.curves.early, "no figure yet"
        scene.curves.take_ratios(ratios(part, 300), scene.state.t0)
        head = scene.picture("metrics", scene.t)["head"]
        assert head["ettr"]["strict"] == 1.0 and bool(head["ettr_early"]) is hinted
        html = static.form("metrics", scene, scene.t)
        assert ("ETTR says little before 20 optimizer steps" in html) is hinted and "1.000, 1.000" in html
        if hinted:
            said = head["ettr_early"].partition("this is of ")[2]
            assert said.startswith(f"{seconds(account(part).span)} and {step} step{'s' * (step > 1)}, ")


def test_cut_leaves_our_own_numbers_alone():
    """Their thousands are set apart by a thin space, which does not count as printable."""
    assert cut(f"made {count(13301)} tokens") == "made 13\u2009301 tokens"


def test_a_hidden_fault_keeps_its_secret():
    log = Writer()
    for entry in failing_log():
        log.write(entry.source, entry.event)
    log.write("host", ev.FaultPlanned(fault=1, kind="sigstop", target="trainer-0", when="now", benign=False, options={}, hidden=True))
    log.write("host", ev.FaultInjected(fault=1, role="trainer-0", incarnation=1, node="node-0", pid=5, phase="train", step=2, proof={}))
    scene = scene_of(log.entries)
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
