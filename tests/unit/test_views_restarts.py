"""What is told of full restarts, of who is ended on purpose and of who fails again, on cards, lanes and in the story."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from made_log import Writer
from robustrl_widgets import lanes, static
from robustrl_widgets.scene import _add_cause
from story import Story
from view_scenes import bars_of, scene_of
from views_log import continued, failing_log, full_restart

from robustrl.core import events as ev
from robustrl.core.recovery import ALL_BECAUSE
from robustrl.core.roles import RoleState


def test_a_full_restart_is_told_once_and_what_it_ends_on_purpose_did_not_fail():
    scene = scene_of(full_restart())
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
        scene = scene_of(log)
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
        scene = scene_of(log[:upto])
        assert not scene.doubts and [bar[2] for bar in bars_of(scene, "trainer-0")].count(lanes.DETECT) == 1
        assert [mark[1] for mark in scene.lanes.marks] == ["trainer-0"]
        board = scene.picture("board", scene.t)["roles"]
        assert "detect" in board["trainer-0"]["stages"]["took"] and "ended_for" not in board["trainer-0"]["stages"]
        for role in others:
            assert lanes.DETECT not in [bar[2] for bar in bars_of(scene, role)]
            assert "detect" not in board[role]["stages"]["took"] and board[role]["stages"]["ended_for"] == "trainer-0"
            assert board[role]["stages"]["rule"] == ""
    until, begun = scene_of(log[: decided[0]]), log[decided[0]].t - log[0].t
    for role in others:
        before, bar = bars_of(until, role), next(bar for bar in bars_of(scene, role) if bar[2] == lanes.RESTART)
        assert begun <= bar[0] <= begun + 0.2, "from the decision on"
        *earlier, last = before
        assert bars_of(scene, role)[: len(before)] == [*earlier, (last[0], bar[0], *last[2:])], "what it did until then stays"


def test_the_stages_on_the_card_of_who_was_ended_on_purpose_are_those_of_its_lane():
    """They were those of the whole recovery: a restart that took until the last role was ready."""
    log = full_restart()
    decided = [place for place, entry in enumerate(log) if isinstance(entry.event, ev.RestartDecided)]
    others = sorted({log[place].event.role for place in decided} - {"trainer-0"})
    for upto in range(decided[-1] + 1, len(log) + 1):
        scene = scene_of(log[:upto])
        for role in others:
            stages, last = scene.picture("board", scene.t)["roles"][role]["stages"], bars_of(scene, role)[-1]
            if stages["on"]:
                assert {lanes.RESTART: "restart", lanes.RECONNECT: "reconnect"}[last[2]] == stages["on"]
                assert stages["since"] == pytest.approx(last[0], abs=0.011)
    drawn = {role: {bar[2]: bar[1] - bar[0] for bar in bars_of(scene, role)} for role in others}
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
    scene = scene_of(more.entries)
    assert not scene.doubts and [bar[2:3] + (bar[1] == -1.0,) for bar in bars_of(scene, "rollout-0")][-2:] == [("d", False), ("r", True)]
    assert scene.picture("board", scene.t)["roles"]["rollout-0"]["stages"]["on"] == "restart"


def test_a_life_that_dies_on_its_way_back_leaves_the_first_failure_as_it_was():
    """It was drawn as one detection that reached back to before the first failure."""
    log = continued(failing_log(), ev.ProcessExited(role="rollout-1", incarnation=2, pid=999, cause="pidfd", last_lines=[]),
                   ev.RoleStateChanged(role="rollout-1", incarnation=2, old="restarting", new="failed", reason="exited"))
    before, after = bars_of(scene_of(failing_log()), "rollout-1"), bars_of(scene_of(log), "rollout-1")
    assert before == after and [bar[2] for bar in after][-2:] == [lanes.DETECT, lanes.RESTART]


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
    scene = scene_of(story.entries)
    first, second = (episode.record for episode in scene.episodes.all)
    assert (first.faults, second.faults, first.outcome, second.outcome) == ((1,), (2,), "failed again", "recovered")
    words = [line[3] for line in scene.story if "The process of" in line[3]]
    assert [each.partition("Noticed")[2] for each in words] == [" after 0.2 s.", " after 0 ms." if late else " after 0.2 s."]
    drawn = scene.picture("recovery", 30.0)["recoveries"]
    assert [each["standing"] for each in drawn.values()] == ["failed again before it had trained", ""]
    assert drawn["2"]["t"]["onset"] == pytest.approx(20.0 if late else 19.75)
    bars = [bar for bar in bars_of(scene, "trainer-0") if bar[2] == "d"]
    assert all(stop - start < 1.0 for start, stop, *_ in bars), "neither detection reaches back to the other"


def test_who_fails_on_its_way_back_is_not_told_of_in_the_words_of_its_first_failure():
    story = Story()
    _killed(story, 110.0, 1)
    _killed(story, 112.0, 2)
    scene = scene_of(story.entries)
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
    scene = scene_of(_told_late())
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
