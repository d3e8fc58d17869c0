"""The ghost of a run: what is kept of it, who leads, how it is labelled, and where it is found."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import msgspec
import pytest
from made_log import Writer, made_log
from robustrl_widgets import ghost_files, showing, static
from robustrl_widgets.channel import merged
from robustrl_widgets.feed import Feed
from robustrl_widgets.ghost import Clock, ghost_of, key_of
from robustrl_widgets.scene import Scene
from robustrl_widgets.sources import RecordedRun, load_entries

from robustrl.core import events as ev
from robustrl.errors import ConfigError
from robustrl.faults import Kill


def _slower(entries: list[ev.Entry], times: float) -> list[ev.Entry]:
    return [msgspec.structs.replace(entry, t=100 + (entry.t - 100) * times) for entry in entries]


def _scene(entries: list[ev.Entry], ghost: object = None) -> Scene:
    scene = Scene()
    scene.race.ghost = ghost
    for entry in entries:
        scene.apply(entry)
    return scene


def _until_step(entries: list[ev.Entry], step: int) -> list[ev.Entry]:
    place = next(i for i, entry in enumerate(entries) if isinstance(entry.event, ev.OptimizerStepCommitted) and entry.event.step == step)
    return entries[: place + 1]


LOG = made_log(steps=6)
GHOST = ghost_of(_slower(LOG, 2.0))


def test_a_ghost_keeps_steps_rewards_and_what_can_be_compared():
    assert [step for _, step in GHOST.commits] == [0, 1, 2, 3, 4, 5, 6] and GHOST.steps == 6
    assert [words for _, _, _, words in GHOST.bars] == [f"step {step}" for step in range(1, 7)]
    assert GHOST.step_at(-1.0) == 0 and GHOST.step_at(GHOST.length) == 6 and GHOST.reached(7) is None
    assert msgspec.json.decode(msgspec.json.encode(GHOST), type=type(GHOST)) == GHOST
    with pytest.raises(ValueError, match="no ghost"):
        ghost_of(LOG[:20])


def test_who_leads_is_said_in_steps_and_after_the_end_in_seconds():
    half = _scene(_until_step(LOG, 4), GHOST)
    assert half.picture("timeline", half.t)["ghost"]["words"] == "You lead by 2 steps."
    slow = _scene(_slower(_until_step(LOG, 2), 5.0), GHOST)
    assert slow.picture("metrics", slow.t)["race"]["words"] == "The ghost leads by 2 steps."
    level = _scene(_slower(_until_step(LOG, 2), 2.0), GHOST)
    assert level.picture("metrics", level.t)["race"]["words"] == "You are level with the ghost."
    done = _scene(LOG, GHOST)
    assert done.picture("timeline", done.t)["ghost"]["words"].startswith("6 steps took you ")
    assert "ghost" not in _scene(LOG).picture("timeline", 1.0) and _scene(LOG).picture("metrics", 1.0)["race"] == {}


def test_all_views_say_the_same_of_the_race_at_any_moment():
    """Metrics are drawn less often than the timeline: one said 14 steps where the other said 13."""
    clock = SimpleNamespace(t=0.0)
    feed = Feed(RecordedRun(LOG, clock=lambda: clock.t), clock=lambda: clock.t)
    feed._thread, feed._sought = SimpleNamespace(), True  # nobody draws but this test
    feed.race_against(GHOST)
    words: dict[str, list[str]] = {"timeline": [], "metrics": []}

    def heard(view, key):
        def sink(what, channel):
            shown = merged(json.loads(channel.full)["picture"], json.loads(channel.delta)["patch"])
            words[view].append(shown.get(key, {}).get("words", ""))

        feed.subscribe(view, sink)

    heard("timeline", "ghost")
    heard("metrics", "race")
    said = set()
    while clock.t < feed.source.length:
        clock.t += 0.1
        feed.step()
        assert words["timeline"][-1] == words["metrics"][-1]
        said.add(words["timeline"][-1])
    assert len(said) > 3 and len(words["metrics"]) < len(words["timeline"])


def _with_faults(*roles: str) -> list[ev.Entry]:
    """Four steps, and kills of these roles."""
    log = Writer()
    for entry in _until_step(LOG, 4):
        log.write(entry.source, entry.event)
    for fault, role in enumerate(roles, 1):
        log.write("host", ev.FaultPlanned(fault=fault, kind="kill", target=role, when="now", benign=False, options={}))
        log.write("host", ev.FaultInjected(fault=fault, role=role, incarnation=1, node="node-0", pid=5, phase="", step=0, proof={}))
    return log.entries


@pytest.mark.parametrize(("mine", "yours"), [
    # failures that were not injected are none of the race: that a run "had none" stood beside seven of them
    ((), "none of them hit you"), (("rollout-1",), "you had 1 of them"), (("rollout-1", "trainer-0"), ""),
    (("rollout-0",), "none of them hit you, but 1 other injected fault did"),
])  # fmt: skip
def test_who_is_ahead_of_a_ghost_that_was_struck_and_was_not_is_not_praised(mine, yours):
    struck = msgspec.structs.replace(GHOST, faults=[(0.01, "kill", "rollout-1", 1), (0.02, "kill", "trainer-0", 1), (99.0, "kill", "x", 9)])
    scene = _scene(_with_faults(*mine), struck)
    words = scene.picture("timeline", scene.t)["ghost"]["words"]
    saved = static.timeline_svg(scene, scene.t) + static.metrics_html(scene, scene.t)
    assert ("lead" not in words) == bool(yours) and words.endswith(f"a ghost that had 2 faults so far; {yours}." if yours else "steps.")
    assert words.startswith("You are " if yours else "You lead by ") and saved.count(words) == 2


def test_what_is_said_at_the_end_counts_the_faults_that_the_ghost_had_on_its_way():
    on_the_way = msgspec.structs.replace(GHOST, faults=[(0.01, "kill", "rollout-1", 1)])
    done = _scene(LOG, on_the_way)
    assert done.picture("timeline", done.t)["ghost"]["words"].endswith(" a ghost that had 1 fault; it did not hit you.")
    assert " s, the ghost " not in static.timeline_svg(done, done.t)
    later = _scene(LOG, msgspec.structs.replace(GHOST, faults=[(GHOST.length + 1, "kill", "rollout-1", 6)]))
    assert "the ghost" in later.picture("timeline", later.t)["ghost"]["words"]
    behind = _scene(_slower(_until_step(LOG, 2), 5.0), on_the_way)
    words = behind.picture("metrics", behind.t)["race"]["words"]
    assert words == "You are 2 steps behind a ghost that had 1 fault so far; it did not hit you."


def test_faults_before_the_start_of_the_race_and_after_its_end_do_not_count():
    """Neither those of the ghost nor those of this run; and the log may tell of one after the start that was before it."""
    kill = {"kind": "kill", "target": "rollout-1", "when": "now", "benign": False, "options": {}}
    log, begun = Writer(), False
    for entry in LOG:
        if isinstance(entry.event, ev.TrajectoriesStarted) and not begun:
            begun = True
            for fault in (1, 2):
                log.write("host", ev.FaultPlanned(fault=fault, **kill))
            log.write("host", _hit(1))
            before = log.entries[-1].t
            log.write(entry.source, entry.event)
            log.write("host", _hit(2, ago=log.entries[-1].t - before))
        elif isinstance(entry.event, ev.RunEnded):
            log.write("host", ev.FaultPlanned(fault=3, **kill))
            log.write("host", _hit(3))
            log.write(entry.source, entry.event)
        else:
            log.write(entry.source, entry.event)
    outside = (0.0, "kill", "rollout-1", 1), (GHOST.length + 1, "kill", "rollout-1", 7)
    struck = msgspec.structs.replace(GHOST, faults=[outside[0], (0.01, "kill", "trainer-0", 1), outside[1]])
    done = _scene(log.entries, struck)
    words, label = (done.picture("timeline", done.t)["ghost"][name] for name in ("words", "label"))
    assert words.endswith("a ghost that had 1 fault; it did not hit you.")
    assert "Its faults: kill trainer-0 in step 1. 0 of these 1 hit you" in label
    assert ghost_of(log.entries).met == [] and "It met no fault." in _scene(LOG, ghost_of(log.entries)).race.label(done.state)


def _hit(fault: int, ago: float = 0.0) -> ev.FaultInjected:
    return ev.FaultInjected(fault=fault, role="rollout-1", incarnation=1, node="node-0", pid=5, phase="", step=0, proof={"ago": ago})


def test_nothing_of_a_ghost_lies_in_the_future_of_the_run():
    scene = _scene(_until_step(LOG, 2), GHOST)
    bars = scene.race.lane(scene.state, scene.t)
    assert all(start <= scene.t for start, _, _, _ in bars) and bars[-1][1] == -1.0
    race = scene.picture("metrics", scene.t)["race"]
    at = scene.race.clock.at(scene.state.t)
    assert race["ghost_steps"] == [list(commit) for commit in GHOST.commits if commit[0] <= at] and race["ghost_steps"] != race["steps"]


def test_curves_of_a_long_race_reach_from_its_beginning_to_its_end():
    long = made_log(steps=700)
    scene = _scene(long, ghost_of(long))
    race = scene.picture("metrics", scene.t)["race"]
    for name in ("steps", "ghost_steps"):
        assert race[name][0][1] <= 1 and race[name][-1][1] == 700 and len(race[name]) <= 301
    assert len(race["reward"]) <= 301 and race["reward"][0][0] < race["reward"][-1][0] / 100


def test_a_pause_stops_the_race():
    clock = Clock()
    clock.apply(ev.Entry(1, 10.0, "x", 1, 1, 10.0, ev.TrajectoriesStarted(batch=1, group=0, ids=[1], rollout="rollout-0", version=0)))
    clock.apply(ev.Entry(2, 12.0, "x", 1, 2, 12.0, ev.Paused(step=1)))
    assert clock.at(20.0) == 2.0
    clock.apply(ev.Entry(3, 22.0, "x", 1, 3, 22.0, ev.Resumed(step=1)))
    assert [clock.at(t) for t in (9.0, 11.0, 15.0, 23.0)] == [0.0, 1.0, 2.0, 3.0]
    assert [clock.back(at) for at in (1.0, 3.0)] == [11.0, 23.0]


def test_the_label_says_where_it_was_recorded_and_whether_the_race_is_fair():
    log = Writer()
    for entry in _until_step(LOG, 3):
        log.write(entry.source, entry.event)
    plan = {"kind": "kill", "target": "rollout-1", "when": "now", "benign": False, "options": {}}
    for fault, hidden in ((1, False), (2, True)):
        log.write("host", ev.FaultPlanned(fault=fault, hidden=hidden, **plan))
        log.write("host", ev.FaultInjected(fault=fault, role="rollout-1", incarnation=1, node="node-0", pid=5, phase="", step=0, proof={}))
    ghost = ghost_of(log.entries)
    assert [fault[1:] for fault in ghost.faults] == [("kill", "rollout-1", 4)], "of a hidden one nothing is told"
    label = _scene(LOG, ghost).race.label(_scene(LOG).state)
    assert "recorded on this machine" in label and "kill rollout-1 in step 4. 0 of these 1 hit you too so far." in label
    elsewhere = msgspec.structs.replace(ghost, machine={"cores": 64}, mode="full")
    label = _scene(log.entries, elsewhere).race.label(_scene(LOG).state)
    assert "on another machine (64 cores)" in label and "full restart" in label and "They hit you too." in label
    assert "another machine" in static.timeline_svg(_scene(LOG, elsewhere), 1.0)


def test_a_ghost_is_found_by_what_the_job_learns_and_a_broken_file_is_said(tmp_path, caplog):
    config = LOG[0].event.config
    assert ghost_files.find(config, tmp_path) is None
    assert ghost_files.write(GHOST, tmp_path).name == f"{key_of(config)}.json"
    assert ghost_files.find({**config, "steps": 999, "name": "other", "recovery": {}}, tmp_path) == GHOST
    assert ghost_files.find({**config, "seed": 7}, tmp_path) is None
    for place in ("runs/one", "runs/one/events.jsonl", "runs/one/events.jsonl.gz"):
        assert ghost_files.folder_of(tmp_path / place) == tmp_path / "runs" / "ghosts"
    feed = Feed(RecordedRun(LOG, speed=1e-9), ghosts=tmp_path)
    assert feed.still()[0].race.ghost == GHOST
    (tmp_path / f"{key_of(config)}.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert ghost_files.find(config, tmp_path) is None
    assert "cannot be read" in caplog.text


def test_faults_are_struck_again_in_their_step_and_at_the_role_that_they_hit():
    log = Writer()
    for entry in _until_step(LOG, 3):
        log.write(entry.source, entry.event)
    options = msgspec.to_builtins(Kill("rollout", phase="decode", after=3.0, rank=1))
    for fault, role in ((1, "rollout-1"), (2, "rollout-7")):
        log.write("host", ev.RoleStarted(role="rollout-7", incarnation=fault, node="node-0", pid=7, start_ticks=1))
        log.write("host", ev.FaultPlanned(fault=fault, kind="kill", target="a rollout", when="now", benign=False, options=options))
        log.write("host", ev.FaultInjected(fault=fault, role=role, incarnation=1, node="node-0", pid=5, phase="", step=0, proof={}))
    assert ghost_files.faults_of(log.entries) == [Kill("rollout-1", phase="decode", step=4)], "rollout-7 came later"


def test_a_job_that_runs_is_not_recorded():
    with pytest.raises(ConfigError, match="slow each other down"):
        ghost_files.record(SimpleNamespace(over=False, name="j", status="running"), None)


def test_the_bundled_ghost_belongs_to_the_bundled_run():
    entries = load_entries(showing.SAMPLE)
    ghost = ghost_files.find(entries[0].event.config, None)
    assert ghost is not None and ghost.mode == "full" and len(ghost.faults) == 2 and ghost.steps == 24
    assert {code for _, _, code, _ in ghost.bars} == {"w", "d", "r", "c"}
    scene = _scene(entries, ghost)
    assert "steps took you" in json.dumps(scene.picture("timeline", scene.t)["ghost"])
    assert ghost_files.BUNDLED.stat().st_size < 30_000
