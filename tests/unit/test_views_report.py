"""One recovery as one file: complete, small, self-contained, and harmless whatever the run calls itself."""

from __future__ import annotations

import dataclasses
import json
import re

import msgspec
import pytest
from made_log import Writer, made_log
from robustrl_widgets import assets, bars, recovery_text, report, showing, static
from robustrl_widgets.channel import merged
from robustrl_widgets.ghost import ghost_of
from robustrl_widgets.scene import Scene
from robustrl_widgets.sources import load_entries
from views_log import FakeJob, back, failing_log

import robustrl
from robustrl.core import events as ev
from robustrl.errors import ConfigError
from robustrl.tables import recoveries


def _data(text: str) -> dict:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


def test_the_sample_becomes_a_file_below_a_megabyte_that_fetches_nothing(tmp_path):
    path = report.save_html(showing.SAMPLE, tmp_path / "recovery.html", 1)
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < report.LIMIT
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|\bsrc=", text)
    data = _data(text)
    assert data["recovery"]["role"] == "rollout-1" and len(data["patches"]) > 20
    assert "<svg" in text and "audit of the whole run" in text


def test_a_row_and_a_loaded_run_become_the_same_file(tmp_path):
    run = robustrl.Run.load(showing.SAMPLE)
    row = recoveries(run.entries, showing.SAMPLE)[0]
    assert row.save_html(tmp_path / "row.html") == tmp_path / "row.html" and json.loads(msgspec.json.encode(row))["number"] == 1
    report.save_html(run, tmp_path / "run.html", 1)
    report.save_html(showing.SAMPLE, tmp_path / "path.html", 1)
    row_, run_, path_ = ((tmp_path / f"{name}.html").read_text() for name in ("row", "run", "path"))
    assert row_ == run_ == path_ and "measured" in path_, "what a full restart costs is in all of them"


def test_every_recovery_can_be_had_and_no_other():
    entries = load_entries(showing.SAMPLE)
    assert {_data(report.html_of(entries, number))["recovery"]["n"] for number in (1, 2)} == {1, 2}
    assert _data(report.html_of(entries))["recovery"]["n"] == 2
    with pytest.raises(ConfigError, match="there are: 1, 2"):
        report.html_of(entries, 3)


def test_what_a_full_restart_costs_is_measured_or_called_an_estimate():
    scene = Scene()
    for entry in back(failing_log()):
        scene.apply(entry)
    (episode,) = scene.episodes.all
    assert recovery_text.full_cost(episode, scene).startswith("Estimate, not measured: a full restart would have taken about ")
    assert "would have thrown away 4 unfinished answers" in recovery_text.full_cost(episode, scene)
    scene.race.ghost = msgspec.structs.replace(ghost_of(made_log()), restarts=[30.0, 50.0, 41.0], machine={"cores": 3})
    measured = "took 41 s in the ghost's run, measured (median of 3), on another machine (3 cores)."
    assert measured in recovery_text.full_cost(episode, scene) and measured.replace("'", "&#x27;") in static.recoveries_html(scene)
    other = dataclasses.replace(episode, record=msgspec.structs.replace(episode.record, mode="full"))
    scene.episodes.all.append(other)
    assert "in this run, measured." in recovery_text.full_cost(episode, scene) and recovery_text.full_cost(other, scene) == ""


def test_what_a_run_says_is_data_in_the_file_never_markup():
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    text = report.html_of(back(failing_log(hostile=bad)))
    assert text.count("<script") == text.count("</script>") == 4, "data, player and two views"
    assert "<img" not in text.replace(_raw(text), "") and "alert(1)" in text


def test_the_picture_of_an_early_recovery_shows_its_own_stretch_however_long_the_run_went_on():
    """Ten minutes later the lanes held their newest bars alone: of the recovery there were only marks."""
    log = Writer()
    for entry in back(failing_log()):
        log.write(entry.source, entry.event)
    early = report.html_of(log.entries)
    for step in range(3000):
        for role, phase in (("rollout-1", "decode"), ("rollout-0", "decode"), ("trainer-0", "train")):
            for phase_now, pending in ((phase, 1), ("", 0)):
                log.write("node_agent-0", ev.RoleSample(role=role, incarnation=1 + (role == "rollout-1"), phase=phase_now, progress=step,
                                                        pending=pending, step=2, version=0, loop_age=0.0, cpu=1.0))  # fmt: skip
    late = report.html_of(log.entries)
    drawn = [re.findall(r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)"[^>]*fill="(#\w+)"', text) for text in (early, late)]
    assert {static.FILL[code] for code in "dr"} <= {fill for *_, fill in drawn[1]}
    assert {y for _, y, _, _ in drawn[0]} == {y for _, y, _, _ in drawn[1]}, "all lanes have bars in it"
    assert all(float(x) + float(width) <= 951 for x, _, width, _ in drawn[1])
    assert len(late.encode()) < report.LIMIT and "<h2>Timeline from" in late


def _raw(text: str) -> str:
    return re.search(r'<script id="data".*?</script>', text, re.S)[0]


def test_a_stage_has_one_colour_in_all_views_and_in_the_table():
    """In the table of `job.recoveries` restart was blue, which is reconnect everywhere else."""
    css = assets.text("views.css").partition(".rrl[data-theme")[0]
    names = {"detect": "det", "restart": "res", "reconnect": "rec"}
    codes = {"detect": bars.DETECT, "restart": bars.RESTART, "reconnect": bars.RECONNECT}
    pages = {stage: re.search(rf"--{name}: (#[0-9a-f]+)", css)[1] for stage, name in names.items()}
    saved = {stage: static.FILL[code] for stage, code in codes.items()}
    table = recoveries(back(failing_log()))._repr_html_()
    drawn = {title: fill for fill, title in re.findall(r'fill="(#\w+)"><title>(\w+) ', table)}
    assert pages == saved == {stage: colour.lower() for stage, colour in drawn.items()}


def test_the_static_form_escapes_and_shows_all_lanes():
    bad = "</svg><script>alert(1)</script>"
    scene = Scene()
    for entry in failing_log(hostile=bad):
        scene.apply(entry)
    text = static.timeline_svg(scene, scene.t) + static.recoveries_html(scene)
    assert "<script" not in text and text.count("<svg") == text.count("</svg>") == 1
    for role in scene.lanes.lanes:
        assert f">{role}</text>" in text
    assert "\u26a1" not in text and "&#9889;" not in text and text.count('fill="#d55e00" stroke') == len(scene.lanes.marks) > 0
    for word in ("detect", "restart", "waiting (normal)", "&#9660;</b> fault or failure"):
        assert word in text


@pytest.mark.parametrize(("live", "said"), [(False, "not recovered when the log ended (restart)"),
                                            (True, "recovery under way when this was written (restart)")])  # fmt: skip
def test_a_recovery_that_did_not_end_is_told_in_words(live, said):
    """It said: rollout-1: open."""
    text = report.html_of(failing_log(), live=live)
    assert f"<h1>rollout-1: {said}</h1>" in text and _data(text)["recovery"]["standing"] == said
    assert _data(text)["recovery"]["done"].startswith("Only rollout-1 was restarted")
    data = _data(text)
    last = data["first"]
    for patch in data["patches"]:
        last = merged(last, patch)
    assert last["roles"]["rollout-1"]["stages"].get("cut_off", False) is not live


def test_what_was_not_decided_when_all_ended_is_told_so():
    log = failing_log()
    log = log[: next(place for place, entry in enumerate(log) if isinstance(entry.event, ev.RestartDecided))]
    for live, said in ((True, "Nothing was decided yet."), (False, "Nothing was decided before the log ended.")):
        assert _data(report.html_of(log, live=live))["recovery"]["done"] == said
    ended = Writer()
    for entry in log:
        ended.write(entry.source, entry.event)
    ended.write("host", ev.RunEnded(status="failed", reason="so", wall=1.0))
    text = report.html_of(ended.entries)
    assert "<h1>rollout-1: not recovered when the job ended</h1>" in text
    assert _data(text)["recovery"]["done"] == "Nothing was decided before the job ended."


def test_a_job_that_goes_on_is_kept_as_one(tmp_path):
    log = failing_log()
    job = FakeJob(log, len(log))
    for over, said in ((False, "recovery under way"), (True, "not recovered")):
        job.over = over
        assert f"<h1>rollout-1: {said}" in report.save_html(job, tmp_path / "x.html").read_text()
