"""The views as widgets, without a browser: what they leave behind, how clicks come in, and what is shown where nothing can be live."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from robustrl_widgets import hosts
from robustrl_widgets.hosts import feed_of
from views_log import FakeJob, failing_log

from robustrl.errors import ConfigError
from robustrl.replay.run import Run

pytest.importorskip("anywidget")
_instances = pytest.importorskip("ipywidgets.widgets.widget")._instances
notebook = pytest.importorskip("robustrl_widgets.notebook")


def _job() -> FakeJob:
    log = failing_log()
    return FakeJob(log, len(log))


def _gone(count: int) -> bool:
    deadline = time.monotonic() + 10.0
    while threading.active_count() > count and time.monotonic() < deadline:
        time.sleep(0.05)
    return threading.active_count() <= count


def test_a_hundred_boards_opened_and_closed_leave_nothing_behind():
    threads, widgets = threading.active_count(), len(_instances)
    job = _job()
    kept = []
    for _ in range(100):
        board = notebook.RoleBoard(job)
        kept.append(weakref.ref(board))
        board.close()
        del board
    assert feed_of(job)._subscriptions == [] and len(_instances) == widgets
    assert _gone(threads)
    gc.collect()
    assert sum(ref() is not None for ref in kept) == 0


def test_a_closed_view_is_collected_without_waiting_for_anybody():
    """The collector runs wherever it likes: also in a thread that whoever holds the lock is waiting for."""
    board = notebook.RoleBoard(_job())
    board.close()
    again = threading.Thread(target=board.__del__, daemon=True)
    with board.feed.lock:
        again.start()
        again.join(5.0)
    assert not again.is_alive()


@pytest.mark.parametrize("name", ["RoleBoard", "Timeline", "FaultPanel", "ThresholdPanel", "Metrics", "Trajectories", "RecoveryReport"])
def test_a_view_has_its_whole_picture_from_its_first_moment(name):
    view = getattr(notebook, name)(_job())
    full = json.loads(view.full)
    assert full["key"] == 1 and full["picture"] and view.right == "INSTRUCTOR"
    data, _ = view._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data and "<script" not in data["text/html"] and len(data["text/html"]) > 20
    assert data["text/plain"] == f"<{name} of job>"
    view.close()


def test_the_state_that_a_reloaded_page_waits_for_is_small_and_bokeh_comes_when_asked():
    """Bokeh's bundle was four fifths of the state of all views together, which JupyterLab fetches in one message."""
    view = notebook.Timeline(_job())
    heard = []
    view.observe(lambda change: heard.append(json.loads(change["new"])), "answer")
    assert sum(len(value) for value in view.get_state().values() if isinstance(value, str)) < 100_000
    view.command = json.dumps({"id": "7", "verb": "bokeh", "args": {}})
    assert heard[0]["id"] == "7" and "Bokeh" in heard[0]["value"] and view.answer == "{}"
    view.command = "no command"
    assert "no command" in view.answer
    view.close()


def test_a_tuning_lab_that_is_saved_shows_what_was_judged_and_is_collected_without_waiting():
    from robustrl_widgets.tuning_widget import TuningLab

    from robustrl import Run

    lab = TuningLab(Run.of(failing_log(), "recorded"))
    data, _ = lab._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data and "<svg" in data["text/html"] and "recorded" in data["text/html"]
    lab.close()
    again = threading.Thread(target=lab.__del__, daemon=True)
    with lab.tuner._wake:
        again.start()
        again.join(5.0)
    assert not again.is_alive()


def test_a_click_is_answered_and_whoever_may_only_look_is_refused():
    job = _job()
    board, looker = notebook.RoleBoard(job), notebook.RoleBoard(job, right=notebook.Right.READ)
    for view, verb, args, word in ((board, "inspect", {"role": "rollout-1"}, "life 2"),
                                   (looker, "inject", {"kind": "kill", "target": "rollout-0"}, "may only look")):
        view.command = json.dumps({"id": "1", "verb": verb, "args": args})
        deadline = time.monotonic() + 5.0
        while view.answer == "{}" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert word in view.answer
    assert job.calls == []
    for view in (board, looker):
        view.close()


def test_clicks_take_the_subshell_that_they_came_on():
    """Guarded: with a comm that knows no subshells nothing is touched."""
    comm, plain = SimpleNamespace(_reply_subshell_for=lambda data, default: "of the reply"), SimpleNamespace()
    notebook._take_clicks_while_a_cell_runs(comm)
    notebook._take_clicks_while_a_cell_runs(plain)
    notebook._take_clicks_while_a_cell_runs(None)
    assert comm._reply_subshell_for({}, "its own") == "its own" and not vars(plain)


def test_ipykernel_still_has_the_hook_that_is_bent():
    """If this fails, clicks wait for the running cell: see what ipykernel does now."""
    from ipykernel.comm import Comm

    assert callable(getattr(Comm, "_reply_subshell_for", None))


def test_a_view_takes_a_loaded_run_too_and_says_what_it_takes():
    entries = list(_job().events)
    assert feed_of(Run.of(entries)).source.length == entries[-1].t - entries[0].t
    for wrong in (entries, None, 7):
        with pytest.raises(ConfigError, match=r"run = .*must be a job, a run directory"):
            feed_of(wrong)


def test_a_saved_notebook_shows_a_recording_as_it_ended():
    """It plays from its start, where no role has started yet: that is what was saved."""
    board = notebook.RoleBoard(Run.of(list(_job().events)))
    form = board._repr_mimebundle_()[0]["text/html"]
    assert "rollout-1" in form and "no role has started yet" not in form
    assert board.feed.scene.state.roles == {}, "what is played is where it was"
    board.close()


def test_without_a_kernel_there_is_the_static_form_alone():
    job = _job()
    assert hosts.live_views(job) == {}
    text = hosts.static_html(job)
    assert "<svg" in text and "rollout-1" in text and "<script" not in text


def test_a_kernel_shows_the_same_live_views_each_time(monkeypatch):
    monkeypatch.setattr(hosts, "_in_kernel", lambda: True)
    job = _job()
    first, again = hosts.live_views(job), hosts.live_views(job)
    assert first == again and list(first) == ["application/vnd.jupyter.widget-view+json"]
    for view in job._views:
        view.close()
    assert hosts.live_views(job) != first, "closed ones are replaced"
    for view in job._views:
        view.close()


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_lesson_shows_its_board_as_soon_as_its_job_is_launched(path):
    """A cell that waited first showed it when there was little left to see."""
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    source = next("".join(cell["source"]) for cell in cells if "robustrl.launch(" in "".join(cell["source"]))
    assert source.splitlines()[-1] == "job" and "job.wait" not in source
