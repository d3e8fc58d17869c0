"""What is told of a log that breaks off, lacks rows or cannot be, and of a job that is gone."""

from __future__ import annotations

import json

import msgspec
import pytest
from made_log import made_log
from robustrl_widgets import static
from robustrl_widgets.scene import VIEWS, Scene
from robustrl_widgets.words import seconds
from view_scenes import scene_of
from views_log import back, continued, failing_log

from robustrl.core import events as ev


def test_of_a_job_that_is_gone_every_view_says_so_also_where_it_is_saved():
    scene = scene_of(failing_log())
    assert all("gone" not in scene.picture(view, scene.t) and "is gone since" not in static.form(view, scene, scene.t) for view in VIEWS)
    scene.lost = "its host (process 5) ended without a closing record"
    for view in VIEWS:
        assert scene.picture(view, scene.t)["gone"] == pytest.approx(scene.state.wall + scene.t, abs=0.1)
        assert static.form(view, scene, scene.t).startswith("<div><b>The job is gone since ")


def _played(entries: list[ev.Entry]) -> Scene:
    """A recording at its end."""
    scene = scene_of(entries)
    scene.length = entries[-1].t - entries[0].t
    return scene


def test_a_recording_whose_log_breaks_off_says_so_at_its_end_and_not_that_the_job_is_running():
    log = failing_log()
    before = scene_of(log[:-1])
    before.length = log[-1].t - log[0].t
    assert before.status == "running" and not before.over and not before.closed
    assert not any(scene.broken for scene in (before, scene_of(log))), "it goes on, or is live"
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
    running, lost, broken, over = scene_of(log), scene_of(log), _played(log), _played(back(log))
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


def test_a_log_that_cannot_be_is_shown_with_a_doubt():
    log = made_log()
    place = next(i for i, entry in enumerate(log) if isinstance(entry.event, ev.RoleStateChanged))
    log[place] = msgspec.structs.replace(log[place], event=msgspec.structs.replace(log[place].event, old="stopped"))
    scene = scene_of(log)
    assert f"entry {place + 1} of the log is not possible" in scene.doubts[0]
    for view in VIEWS:
        json.dumps(scene.picture(view, scene.t))
