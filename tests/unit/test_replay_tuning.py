"""The TuningLab without a browser: its pictures, its thread, what a page may and may not ask, and how fast it follows a slider."""

from __future__ import annotations

import json
import random
import threading
import time
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from detection_world import Fault, Shape, World
from robustrl_widgets import tuning
from robustrl_widgets.channel import Channel, merged
from robustrl_widgets.commands import Right
from robustrl_widgets.static_tuning import tuning_html
from robustrl_widgets.tuner import Tuner, told

from robustrl import Run, replay
from robustrl.core import events as ev
from robustrl.core.detection import Detector
from robustrl.core.thresholds import Thresholds
from robustrl.errors import ConfigError, JobFailed
from robustrl.replay import reducing, scoring
from robustrl.replay.stress import splice

LAB = Thresholds.lab()


def recorded(seed: int, *faults: Fault) -> Run:
    world = World(Shape.draw(random.Random(seed)), seed, Thresholds.paper())
    world.plan(*faults)
    world.run(26.0)
    run = Run.of(world.entries, f"run-{seed}")
    for at, fault in world.injected:
        run = run.annotate(fault.role, at - run.begin, at - run.begin + fault.seconds)
    return run


@cache
def runs() -> list[Run]:
    return [recorded(3, Fault("freeze", "rollout-0", seconds=9.0, phase="decode")),
            recorded(4, Fault("freeze", "trainer-0", seconds=9.0, phase="train"))]  # fmt: skip


SHARP = {"rollout.no_tokens": 1.0, "rollout.heartbeat": 1.0, "rollout.wedged": 1.5}


@pytest.fixture(scope="module")
def material() -> tuning.Material:
    return tuning.Material(runs(), LAB)


def test_a_trial_says_what_a_replay_says(material: tuning.Material) -> None:
    for changes in ({}, SHARP):
        trial = material.trial(changes)
        again = [replay(run, LAB.updated(changes)) for run in runs()]
        assert [len(outcomes) for outcomes in trial.outcomes] == [len(each.outcomes) for each in again]
        assert list(trial.score.delays) == pytest.approx([delay for each in again for delay in each.delays], abs=0.01)
    assert material.trial(SHARP).score.cost < material.trial({}).score.cost
    with pytest.raises(ConfigError, match="heartbeat"):
        material.trial({"rollout.no_tokens": 1.0})


def test_the_run_shown_first_is_one_in_which_there_is_something_to_see() -> None:
    healthy = recorded(5)
    assert tuning.first_shown([healthy, *runs()]) == 1 and tuning.first_shown(runs()) == 0 and tuning.first_shown([healthy]) == 0
    tuner = Tuner({"some": lambda: ([healthy, *runs()], LAB)}, lambda what, channel: None, load="some")
    assert tuner.judged.wait(30.0)
    assert tuner.shown == tuner.picture()["shown"] == 1
    tuner.close()


def test_the_still_picture_has_lanes_truth_and_the_peaks_of_each_signal(material: tuning.Material) -> None:
    still = tuning.still(material, 0)
    assert still["order"][0].startswith("trainer") and still["runs"] == ["run-3", "run-4"]
    ((start, end, role, _, expect),) = still["truth"]
    assert role == "rollout-0" and expect == "failed" and end - start == pytest.approx(9.0, abs=0.02)
    peak = max(value for t, value in still["signals"]["rollout-0"]["rollout.no_tokens"] if start <= t <= end + 1)
    assert 8.0 <= peak <= 9.5, "the silence is seen in full"
    assert all(len(points) <= 400 for of in still["signals"].values() for points in of.values())
    low = {slider["path"]: slider["low"] for slider in still["sliders"]}
    assert low["rollout.no_tokens"] == pytest.approx(3.0 / 8) and low["node.silent"] == 2.0
    assert json.loads(json.dumps(still)) == still


def test_a_side_has_marks_scores_and_code(material: tuning.Material) -> None:
    side = tuning.side(material.trial(SHARP), runs()[0], 0)
    assert [(mark[1], mark[2]) for mark in side["marks"]] == [("rollout-0", "detected")]
    assert side["values"]["rollout.no_tokens"] == 1.0 and side["score"]["detected"] == side["score"]["faults"] == 2
    taken: dict[str, float] = {}
    exec(side["code"], {"job": SimpleNamespace(thresholds=taken)})  # what update() takes; one by one the job would refuse some
    assert taken == SHARP
    assert tuning.side(material.trial({}), runs()[0], 0)["code"] == "# what the sliders began with: nothing is changed"


def test_what_is_saved_shows_signals_truth_verdicts_and_the_setting_and_trusts_no_text(material: tuning.Material) -> None:
    picture = {**tuning.still(material, 0), "a": tuning.side(material.trial(SHARP), runs()[0], 0)}
    form = tuning_html({**picture, "b": tuning.side(material.trial({}), runs()[0], 0)})
    assert "run-3" in form and "found, rule" in form and "&quot;rollout.no_tokens&quot;: 1," in form and ">kept<" in form
    assert form.count('<rect ') == 1 and 'stroke="#d55e00"/>' in form, "the fault, and signals beyond their limits"
    assert "<script" not in form and "No run was loaded" in tuning_html({})
    evil = "<img src=x onerror=alert(1)>"
    a = picture["a"] | {"marks": [[1.0, evil, "detected", evil, None]], "code": evil}
    hostile = {**picture, "runs": [evil], "order": [evil], "signals": {}, "truth": [[0.0, 1.0, evil, evil, evil]], "a": a}
    assert "<img" not in tuning_html(hostile) and tuning_html(hostile).count("&lt;img") == 5


def test_points_know_the_front() -> None:
    from robustrl.replay.scoring import Score

    found = [({}, Score((2.0,), watched=3600.0)), ({}, Score((1.0,), needless=(5.0,), watched=3600.0)), ({}, Score((3.0,), watched=3600.0))]
    assert [point[2] for point in tuning.points(found)] == [True, True, False]


class Page:
    """What a browser holds."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self.key, self.whole, self.patch = 0, {}, {}
        self.news = threading.Condition()

    def show(self, what: str, channel: Channel) -> None:
        with self.news:
            full, delta = json.loads(channel.full), json.loads(channel.delta)
            self.key, self.whole, self.patch = full["key"], full["picture"], delta["patch"]
            self.news.notify_all()

    @property
    def picture(self) -> dict[str, Any]:
        return merged(self.whole, self.patch)

    def ask(self, tuner: Tuner, verb: str, **args: Any) -> dict[str, Any]:
        ident = f"{len(self.answers)}"
        tuner.take(json.dumps({"id": ident, "verb": verb, "args": args}), self.answered)
        return self.until(lambda: self.answers.get(ident))

    def answered(self, answer: dict[str, Any]) -> None:
        with self.news:
            self.answers[answer["id"]] = answer
            self.news.notify_all()

    def until(self, condition: Any, seconds: float = 20.0) -> Any:
        deadline = time.monotonic() + seconds
        with self.news:
            while not (value := condition()):
                assert self.news.wait(deadline - time.monotonic()), "nothing came in time"
        return value


def tuner_of(page: Page, **settings: Any) -> Tuner:
    return Tuner({"both": lambda: (runs(), LAB)}, page.show, **settings)


def test_a_page_loads_moves_compares_chooses_a_point_and_is_told_what_is_wrong() -> None:
    page = Page()
    tuner = tuner_of(page)
    assert "no run is loaded" in page.ask(tuner, "set")["error"] and "no source" in page.ask(tuner, "load", source="x")["error"]
    assert "value" in page.ask(tuner, "load", source="both") and page.picture["a"]["score"]["faults"] == 2
    before = page.picture["a"]["score"]["cost"]
    page.ask(tuner, "compare", on=True)
    page.ask(tuner, "set", **SHARP)
    assert page.picture["a"]["score"]["cost"] < before == page.picture["b"]["score"]["cost"]
    assert "heartbeat" in page.ask(tuner, "set", **{"rollout.no_tokens": 0.5})["error"], "and the picture stays"
    assert page.picture["a"]["values"]["rollout.no_tokens"] == 1.0
    page.until(lambda: page.picture.get("todo") == 0, 60.0)
    points = page.picture["points"]
    assert len(points) > 100 and any(point[2] for point in points)
    page.ask(tuner, "point", point=7)
    assert tuner.now is not None and tuner.now.changes == tuner.points[7][0] != {}
    page.ask(tuner, "look", run=1)
    assert page.picture["shown"] == 1 and "a whole number from 0 to 1" in page.ask(tuner, "look", run=5)["error"]
    assert "no job" in page.ask(tuner, "apply")["error"]
    tuner.take("{", page.answered)
    page.until(lambda: "no command" in page.answers.get("", {}).get("error", ""))
    assert "must be a number" in page.ask(tuner, "set", **{"job.stall": "1"})["error"]
    threads = [thread for thread in threading.enumerate() if thread.name == "robustrl-tuner"]
    tuner.close()
    assert not any(thread.is_alive() for thread in threads)


def test_only_an_instructor_changes_the_job() -> None:
    asked: list[dict[str, float]] = []
    job = SimpleNamespace(over=False, thresholds=SimpleNamespace(update=asked.append))
    for right, word in ((Right.STUDENT, "instructor"), (Right.INSTRUCTOR, "")):
        page = Page()
        tuner = tuner_of(page, job=job, right=right, load="both")
        page.until(lambda page=page: "a" in page.picture)
        page.ask(tuner, "set", **SHARP)
        answer = page.ask(tuner, "apply")
        assert word in answer.get("error", "") and page.picture["live"] is (not word) and len(asked) == (0 if word else 1)
        tuner.close()
    assert set(asked[0]) == set(tuning.SLIDERS) and asked[0] == {path: LAB.updated(SHARP).get(path) for path in tuning.SLIDERS}


@pytest.mark.parametrize(("lost", "closed"), [(JobFailed("it failed\n  | a log"), "the job is gone"), (None, "the job is done")])
def test_a_job_that_is_over_is_said_and_nothing_is_applied_to_it(lost: JobFailed | None, closed: str) -> None:
    asked: list[dict[str, float]] = []
    job = SimpleNamespace(over=False, _lost=None, status="running", _state=SimpleNamespace(wall=1000.0, t=25.0, t0=5.0),
                          thresholds=SimpleNamespace(update=asked.append))  # fmt: skip
    page = Page()
    tuner = tuner_of(page, job=job, right=Right.INSTRUCTOR, load="both")
    page.until(lambda: page.picture.get("todo") == 0, 60.0)
    assert page.picture["closed"] == "" and "value" in page.ask(tuner, "apply") and len(asked) == 1
    job._lost, job.status, job.over = lost, "failed" if lost else "done", True
    page.until(lambda: page.picture["closed"] == closed, 10.0)  # although nobody asks for anything
    assert page.picture.get("gone") == (1020.0 if lost else None)
    assert page.ask(tuner, "apply")["error"] == f"{closed}: nothing can be applied to it any more" and len(asked) == 1
    assert "value" in page.ask(tuner, "set", **SHARP), "what was loaded can still be tuned on"
    tuner.close()


def test_what_fails_is_told_in_one_sentence() -> None:
    def update(changes: Any) -> None:
        raise JobFailed("job 'x' failed: its host (process 5) ended without a closing record\n  | line\n  | line")

    page = Page()
    tuner = tuner_of(page, job=SimpleNamespace(over=False, thresholds=SimpleNamespace(update=update)), right=Right.INSTRUCTOR, load="both")
    page.until(lambda: "a" in page.picture)
    assert page.ask(tuner, "apply")["error"] == "job 'x' failed: its host (process 5) ended without a closing record"
    tuner.close()


def test_a_hidden_fault_is_not_told_to_whoever_loads_the_run() -> None:
    run = runs()[0]
    t = run.begin + 3.0

    def entry(event: Any) -> ev.Entry:
        return ev.Entry(seq=0, t=t, source="host", incarnation=0, n=0, at=0.0, event=event)

    secret = [entry(ev.FaultPlanned(fault=7, kind="sigstop", target="trainer-0", when="now", benign=False, options={}, hidden=True)),
              entry(ev.FaultInjected(fault=7, role="trainer-0", incarnation=1, node="", pid=1, phase="", step=1, proof={}))]
    entries = sorted([*run.entries, *secret], key=lambda each: each.t)
    assert [mark.role for mark in Run.of(entries).truth] == ["trainer-0"]
    assert told(entries, "x").truth == () and told(entries, "x").name == "x, without 1 hidden"
    revealed = [*entries, entry(ev.FaultRevealed(fault=7, guess=""))]
    assert [mark.role for mark in told(revealed, "x").truth] == ["trainer-0"] and told(revealed, "x").name == "x"


def test_nobody_is_answered_under_a_lock_and_a_closed_one_takes_none() -> None:
    free: list[bool] = []
    taken, go_on = threading.Event(), threading.Event()

    def slow() -> tuple[list[Run], None]:
        taken.set()
        go_on.wait(5.0)
        return [], None

    tuner = Tuner({"slow": slow}, lambda what, channel: None)
    assert tuner._thread is None, "a page that asks nothing costs no thread"

    def answer(found: dict[str, Any]) -> None:
        other = threading.Thread(target=lambda: free.append(tuner._wake.acquire(timeout=5.0) and tuner._wake.release() is None))
        other.start()
        other.join()

    tuner.take(json.dumps({"id": "0", "verb": "load", "args": {"source": "slow"}}), lambda found: None)
    assert taken.wait(5.0)
    for _ in range(65):
        tuner.take(json.dumps({"id": "1", "verb": "set"}), answer)
    assert free == [True]
    tuner.close(wait=0.0)
    again = threading.Thread(target=tuner.close, daemon=True)
    with tuner._wake:
        again.start()
        again.join(5.0)
        assert not again.is_alive()
    go_on.set()


def test_a_source_that_fails_leaves_what_was_there_and_a_page_that_is_gone_does_not_end_the_thread() -> None:
    page = Page()
    tuner = Tuner({"both": lambda: (runs(), LAB), "bad": lambda: ([SimpleNamespace(thresholds=[(0.0, LAB)])], None)}, page.show)  # type: ignore[dict-item, list-item, return-value]
    page.ask(tuner, "load", source="both")
    before = page.picture["a"]
    assert "failed" in page.ask(tuner, "load", source="bad")["error"]

    def gone(answer: dict[str, Any]) -> None:
        raise RuntimeError("the page is gone")

    tuner.take(json.dumps({"id": "x", "verb": "compare", "args": {}}), gone)
    assert "value" in page.ask(tuner, "set") and page.picture["a"] == before
    tuner.close()


def test_of_many_moves_the_last_is_judged_and_all_are_answered() -> None:
    page = Page()
    tuner = tuner_of(page, load="both")
    page.until(lambda: "a" in page.picture)
    for i in range(40):
        tuner.take(json.dumps({"id": f"m{i}", "verb": "set", "args": {"trainer.no_compute": 1.0 + i / 20}}), page.answered)
    page.until(lambda: len([name for name in page.answers if name.startswith("m")]) == 40)
    assert page.picture["a"]["values"]["trainer.no_compute"] == pytest.approx(2.95)
    tuner.close()


def test_a_move_of_a_slider_looks_at_a_part_of_the_log_and_sends_what_changed(monkeypatch) -> None:
    """What makes the kernel's half short, counted; by the clock, and for ten minutes, it is the row ``slider`` of `bench replay`."""
    long = splice([run.excerpt(2.0, 25.0) for run in runs()], 4, seed=5)
    fed, reductions = [0], list[Any]()

    class Counting(Detector):
        def feed(self, entry: ev.Entry) -> None:
            fed[-1] += 1
            super().feed(entry)

    def reduce(recording: Any, low: Any) -> Any:
        reductions.append(low)
        return make(recording, low)

    make = reducing._reduce
    monkeypatch.setattr(scoring, "Detector", Counting)
    monkeypatch.setattr(reducing, "_reduce", reduce)
    material, channel = tuning.Material([long], LAB), Channel()
    still = tuning.still(material, 0)
    channel.push(still, 0.0, 0.0)
    dice = random.Random(1)
    for _ in range(6):
        moved = {"trainer.no_compute": dice.uniform(2.1, 3.9), "rollout.no_tokens": dice.uniform(4.1, 7.9), "rollout.wedged": 9.0}
        fed.append(0)
        assert channel.push({**still, "a": tuning.side(material.trial(moved), long, 0)}, 0.0, 0.0) == "delta"
        assert len(channel.delta) < len(channel.full) / 5
    assert 0 < max(fed) < len(long.entries) / 5 and len(reductions) == 1, "neighbours share what was made ready for one of them"
