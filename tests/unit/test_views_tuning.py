"""What many pages of one server can make it compute with their tuning labs: one thing at a time, once for all, and little for guests."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from robustrl_widgets import tuner as tuner_module
from robustrl_widgets import tuning
from robustrl_widgets.commands import Right
from robustrl_widgets.feed import Feed
from robustrl_widgets.sources import LiveRun, RecordedRun
from robustrl_widgets.tuner import Tuner
from robustrl_widgets.tuning_stock import Stock
from test_replay_tuning import LAB, SHARP, Page, runs
from views_log import FakeJob, failing_log

from robustrl.replay.scoring import Case


class Loads:
    """Sources that count how often each is made ready."""

    def __init__(self) -> None:
        self.of: list[str] = []
        self.sources = {name: lambda name=name: (self.of.append(name), (runs(), LAB))[1] for name in ("bundled", "now")}


@pytest.fixture
def tuners():
    made: list[Tuner] = []
    yield made
    for tuner in made:
        tuner.close()


def _open(tuners: list[Tuner], loads: Loads, stock: Stock, right: Right) -> tuple[Tuner, Page]:
    page = Page()
    tuners.append(Tuner(loads.sources, page.show, right=right, stock=stock, may_load=right is Right.INSTRUCTOR))
    return tuners[-1], page


def test_who_may_only_look_tunes_on_what_is_loaded_and_loads_nothing(tuners) -> None:
    loads, stock = Loads(), Stock({"bundled"})
    viewer, seen = _open(tuners, loads, stock, Right.READ)
    for name in ("bundled", "now"):
        assert "nothing so far" in seen.ask(viewer, "load", source=name)["error"]
    assert "no source" in seen.ask(viewer, "load", source="../x")["error"] and loads.of == []
    teacher, told = _open(tuners, loads, stock, Right.INSTRUCTOR)
    assert "value" in told.ask(teacher, "load", source="bundled")
    assert "value" in seen.ask(viewer, "load", source="bundled") and "value" in seen.ask(viewer, "set", **SHARP)
    assert "(bundled)" in seen.ask(viewer, "load", source="now")["error"] and seen.picture["a"]["values"]["rollout.no_tokens"] == 1.0
    assert told.picture["a"]["values"]["rollout.no_tokens"] == 3.0, "each page has sliders of its own"
    assert loads.of == ["bundled"] and viewer.material is teacher.material
    for page in (seen, told):
        page.until(lambda page=page: page.picture.get("todo") == 0 and len(page.picture["points"]) == len(teacher.points), 60.0)
    assert len(teacher.points) <= 161, "the points were made once, for all"


def test_what_does_not_change_is_made_ready_once_and_what_grows_by_an_instructor_anew(tuners) -> None:
    loads, stock = Loads(), Stock({"bundled"})
    pages = [_open(tuners, loads, stock, Right.INSTRUCTOR) for _ in range(3)]
    for tuner, page in pages:
        for name in ("bundled", "now"):
            assert "value" in page.ask(tuner, "load", source=name)
    assert loads.of == ["bundled", "now", "now", "now"]


def test_a_server_computes_one_thing_at_a_time_whoever_asks(tuners, monkeypatch) -> None:
    at_work, most, judge = 0, 0, Case.judge

    def counted(case: Case, thresholds: Any, *further: Any) -> Any:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        time.sleep(0.002)  # others get on
        try:
            return judge(case, thresholds, *further)
        finally:
            at_work -= 1

    monkeypatch.setattr(Case, "judge", counted)
    loads, stock = Loads(), Stock({"bundled"})
    pages = [_open(tuners, loads, stock, right) for right in (Right.INSTRUCTOR, Right.INSTRUCTOR, Right.STUDENT, Right.READ, Right.READ)]
    for tuner, page in pages:
        page.ask(tuner, "load", source="bundled")
    for i in range(3):
        for n, (tuner, page) in enumerate(pages):
            tuner.take(json.dumps({"id": f"m{i}", "verb": "set", "args": {"trainer.no_compute": 1.0 + i / 5 + n / 50}}), page.answered)
    for _, page in pages:
        page.until(lambda page=page: "m2" in page.answers, 60.0)
    assert most == 1


def test_points_wait_for_a_hand_that_moves_a_slider(tuners, monkeypatch) -> None:
    monkeypatch.setattr("robustrl_widgets.tuner._QUIET", 1e6)
    tuner, page = _open(tuners, Loads(), Stock(), Right.INSTRUCTOR)
    assert "value" in page.ask(tuner, "load", source="now")
    for seconds in (1.0, 1.2, 1.4):
        assert "value" in page.ask(tuner, "set", **SHARP | {"rollout.no_tokens": seconds})
    assert len(tuner.points) == 1 and page.picture["todo"] > 0, "only that of the base, although there was time between the moves"
    monkeypatch.setattr("robustrl_widgets.tuner._QUIET", 0.0)
    assert "value" in page.ask(tuner, "set", **SHARP)
    page.until(lambda: page.picture.get("todo") == 0, 60.0)


@pytest.mark.parametrize("who", ["the same page", "an instructor", "a guest"])
def test_a_point_that_is_being_made_is_given_up_for_a_move_of_any_page_and_made_later(tuners, monkeypatch, who) -> None:
    """With points that take for ever: a move that waited for one would wait for ever too."""
    monkeypatch.setattr("robustrl_widgets.tuner._QUIET", 0.02)
    at_work, slow, score = threading.Event(), threading.Event(), tuning.Material.score

    def endless(material: Any, thresholds: Any, recordings: Any, pause: Any) -> Any:
        at_work.set()
        while slow.is_set():
            pause()
        return score(material, thresholds, recordings, pause)

    monkeypatch.setattr(tuning.Material, "score", endless)
    stock, loads = Stock({"bundled"}), Loads()
    teacher, page = _open(tuners, loads, stock, Right.INSTRUCTOR)
    slow.set()
    assert "value" in page.ask(teacher, "load", source="bundled")
    right = Right.READ if who == "a guest" else Right.INSTRUCTOR
    mover, asking = (teacher, page) if who == "the same page" else _open(tuners, loads, stock, right)
    for i in range(5):
        assert at_work.wait(10.0)
        at_work.clear()  # before it is given up: the next may have begun as soon as the move is answered
        assert "value" in (asking.ask(mover, "set", **SHARP) if i else asking.ask(mover, "load", source="bundled"))
    to_come = [changes for changes, _ in teacher._loaded.todo]
    assert len(teacher.points) == 1 and len(to_come) == page.picture["todo"] > 100
    slow.clear()
    page.until(lambda: page.picture.get("todo") == 0, 60.0)
    assert [changes for changes, _ in teacher.points[1:]] == to_come, "none was lost, none was made twice"


class Clock:
    """Stands for the module time: who sleeps brings it forward. While a guest rests, an instructor's turn is to be had at once."""

    now = 0.0

    def __init__(self, stock: Stock) -> None:
        self.stock, self.rests = stock, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.rests.append(seconds)
        with self.stock.turn(False, point=True):  # of a turn that is taken it would raise GivenUp
            pass


def test_guests_rest_as_long_as_they_computed_and_nobody_waits_for_their_rest(monkeypatch) -> None:
    stock = Stock()
    clock = Clock(stock)
    monkeypatch.setattr("robustrl_widgets.tuning_stock.time", clock)
    clock.now = 100.0
    for seconds in (0.1, 0.3, 60.0, 0.1):
        with stock.turn(True):
            clock.now += seconds
    assert clock.rests == pytest.approx([0.0, 0.1, 0.3, 2.0]), "as long as the turn before, and never longer than two seconds"
    began = clock.now
    with stock.turn(False):
        pass
    assert len(clock.rests) == 4 and clock.now == began, "an instructor rests for nobody"
    with pytest.raises(ValueError), stock.turn(True):
        raise ValueError
    with stock.turn(False):
        pass


@pytest.mark.parametrize(("live", "right", "may"), [(True, Right.READ, False), (True, Right.STUDENT, False), (True, Right.INSTRUCTOR, True),
                                                    (False, Right.READ, True)])  # fmt: skip
def test_the_pages_of_a_dashboard_have_one_stock_and_beside_a_job_an_instructor_fills_it(live, right, may, monkeypatch) -> None:
    pytest.importorskip("panel")
    from bokeh.document import Document
    from panel.io.state import set_curdoc
    from robustrl_widgets import dashboard

    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dashboard, "Tuner", lambda sources, show, **how: made.append({"sources": list(sources), **how}))
    monkeypatch.setattr(dashboard.pn.state, "on_session_destroyed", lambda call: None)
    monkeypatch.setattr(type(dashboard.pn.state), "session_args", property(lambda self: {"name": [b"Ada"]}))
    log = failing_log()
    feed = Feed(LiveRun(FakeJob(log, len(log))) if live else RecordedRun(log))
    feed._thread = threading.current_thread()
    page = dashboard.application(lambda: feed, SimpleNamespace(right=lambda token: right), shared=live)
    for _ in range(2):
        document = Document()
        document.add_next_tick_callback = lambda callback: None
        with set_curdoc(document):
            page()
    assert [how["may_load"] for how in made] == [may, may] and made[0]["stock"] is made[1]["stock"] is not None
    assert set(made[0]["sources"]) - made[0]["stock"]._constant == ({"this run, until now"} if live else set())


def test_a_page_that_cannot_be_made_shows_no_text_of_the_log_and_leaves_nothing(monkeypatch) -> None:
    """A role's name in a recording made Panel print the error, and a script in it ran."""
    pytest.importorskip("panel")
    from bokeh.document import Document
    from panel.io.state import set_curdoc
    from robustrl_widgets import dashboard

    hostile, left = "</style></script><img src=x onerror=alert(1)>", []
    feed = Feed(RecordedRun(failing_log()))

    def subscribe(view: str, sink: Any) -> Any:
        if view == "faults":
            raise ValueError(f"role {hostile!r}: must be one of ...")
        left.append(view)
        return SimpleNamespace(close=lambda: left.remove(view))

    monkeypatch.setattr(feed, "subscribe", subscribe)
    page = dashboard.application(lambda: feed, SimpleNamespace(right=lambda token: Right.READ), shared=False)
    with set_curdoc(Document()):
        shown = page()
    assert isinstance(shown, dashboard.pn.pane.Str) and "cannot be shown" in shown.object and "img" not in shown.object
    assert left == []


def _ended(tuner: Tuner, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while tuner._thread is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return tuner._thread is None


def test_a_lab_with_nothing_left_to_do_has_no_thread_and_takes_the_next_move_as_ever(tuners, monkeypatch) -> None:
    monkeypatch.setattr(tuner_module, "_IDLE", 0.05)
    monkeypatch.setattr(tuner_module, "POINTS", 2)
    teacher, told = _open(tuners, Loads(), Stock(), Right.INSTRUCTOR)
    assert "value" in told.ask(teacher, "load", source="bundled")
    assert _ended(teacher) and told.picture["todo"] == 0 and len(told.picture["points"]) == len(teacher.points)
    assert "value" in told.ask(teacher, "set", **SHARP) and told.picture["a"]["values"]["rollout.no_tokens"] == 1.0
    assert _ended(teacher)


def test_a_lab_that_nobody_looks_at_rests_beside_a_live_job_too_and_goes_on_when_somebody_does(monkeypatch) -> None:
    """Its cell was run again: its thread watched the job until the lab was closed, which nobody did."""
    pytest.importorskip("anywidget")
    from robustrl_widgets.tuning_widget import TuningLab

    monkeypatch.setattr(tuner_module, "_IDLE", 0.05)
    monkeypatch.setattr(tuner_module, "_JOB_EVERY", 0.02)
    monkeypatch.setattr(tuner_module, "_QUIET", 0.0)
    monkeypatch.setattr(tuner_module, "POINTS", 2)
    job = FakeJob(failing_log(), len(failing_log()))
    job.status = "running"
    lab = TuningLab(job)
    try:
        assert lab.get_state(["_view_count"]) == {"_view_count": 0}, "a page counts only where it finds a number"
        assert lab.tuner.judged.wait(20.0)
        assert not _ended(lab.tuner, 0.4), "nobody has counted yet: not each page does"
        for count in (1, 2, 1):
            lab.set_state({"_view_count": count})
        assert not _ended(lab.tuner, 0.4), "it is still seen in one place"
        lab.set_state({"_view_count": 0})
        assert _ended(lab.tuner)
        job.over, job.status = True, "done"
        lab.set_state({"_view_count": 1})
        deadline = time.monotonic() + 20.0
        while not lab.tuner.last["closed"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lab.tuner.last["closed"] == "the job is done" and _ended(lab.tuner)
    finally:
        lab.close()
