"""The live views in JupyterLab and in the dashboard, as a person meets them.

A job runs, a rollout is killed by its button while a cell is in a busy loop, and the picture passes through detect, restart, reconnect.
Screenshots go to test-artifacts/browser.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest

from tests.browser.conftest import ARTIFACTS, COMEBACK, Lab, Seen
from tests.browser.test_notebook import _kernel, _until

_NAME = "views.ipynb"
_START = """
import robustrl
job = robustrl.launch(name="views", profile="class", steps=400, thresholds="lab")
job
"""
_BUSY = """
import time
end = time.monotonic() + {seconds}
while time.monotonic() < end and not Path("enough").exists():
    sum(range(1000))
Path("over").touch()
"""
_CATCH_UP = 2.0
"""Seconds after which a page that has been loaded must show what the others show."""
_MARGIN = 3.0


@pytest.fixture
def notebook(lab: Lab) -> Lab:
    cells = ["from pathlib import Path", _START, "job.wait(step=2, timeout=150)", _BUSY.format(seconds=2 * COMEBACK), "job.stop()"]
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(made, lab.folder / _NAME)
    return lab


@pytest.mark.timeout(900)
def test_a_rollout_killed_by_its_button_while_a_cell_is_busy_comes_back_before_ones_eyes(notebook: Lab, page: tuple[Any, Seen]) -> None:
    view, seen = page
    view.goto(f"{notebook.url}/lab/tree/{_NAME}?token={notebook.token}", timeout=60_000)
    view.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    _until(view, "the kernel to be ready", lambda: _kernel(notebook) == "idle", 60.0)
    view.locator(".jp-Notebook .jp-Cell").first.click()
    for _ in range(3):
        view.keyboard.press("Shift+Enter")
    board, timeline = view.locator(".rrl-board").first, view.locator(".rrl-timeline").first
    board.wait_for(timeout=60_000)
    _until(view, "all roles to be well", lambda: "are well" in board.locator(".say").inner_text(), 120.0)
    _until(view, "two optimizer steps", lambda: view.locator(".jp-InputPrompt", has_text="[*]").count() == 0, 150.0)
    _photograph(view, board, "lab-well")
    view.keyboard.press("Shift+Enter")  # the busy loop
    _until(view, "the kernel to be busy", lambda: view.locator(".jp-InputPrompt", has_text="[*]").count() == 1, 20.0)
    card = _card(board, "rollout-1")
    card.click()
    board.get_by_role("button", name="Kill", exact=True).click(timeout=10_000)
    for stage in ("restart", "reconnect"):
        _until(view, f"{stage} on the card", lambda stage=stage: _stage(card, stage), COMEBACK)
        _photograph(view, board, f"lab-{stage}")
    _until(view, "rollout-1 to be healthy", lambda: "healthy" in card.inner_text() and "life 2" in card.inner_text(), 60.0)
    assert not (notebook.folder / "over").exists(), "all this happened while the cell ran"  # JupyterLab keeps no cell that is scrolled away
    (notebook.folder / "enough").touch()
    _until(view, "the next version", lambda: int(card.locator(".version").inner_text().lstrip("v").split(",")[0]) >= 2, 30.0)
    assert timeline.locator(".bk-Figure").count() == 1
    view.wait_for_timeout(600)
    _photograph(view, board, "lab-healed")
    _photograph(view, timeline, "lab-timeline")
    _reload_and_open_a_second_tab(view, notebook)
    assert seen.outside == [] and seen.console == []


def _reload_and_open_a_second_tab(view: Any, notebook: Lab) -> None:
    """In the middle of the next recovery, the kernel being idle: what both show is the same, and how long each took after the notebook."""
    _until(view, "the kernel to be idle", lambda: _kernel(notebook) == "idle", 30.0)
    path = notebook.folder / _NAME
    before = path.stat().st_mtime_ns
    view.keyboard.press("Control+s")
    _until(view, "the notebook to be saved", lambda: path.stat().st_mtime_ns != before, 30.0)
    second = view.context.new_page()
    board = view.locator(".rrl-board").first
    board.get_by_role("button", name="Kill", exact=True).click(timeout=10_000)
    _until(view, "restart on the card", lambda: _stage(_card(board, "rollout-1"), "restart"), 60.0)
    took = []
    for page, load in ((second, lambda: second.goto(f"{notebook.url}/lab/tree/{_NAME}", timeout=60_000)), (view, view.reload)):
        load()
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        began = time.monotonic()
        _until(page, "the board", page.locator(".rrl-board .kpi").first.is_visible, 30.0)
        took.append(time.monotonic() - began)
    took.append(_same_within(second, view, _MARGIN * _CATCH_UP))
    print("JupyterLab, seconds after the notebook shows: second tab {:.2f}, reload {:.2f}; both the same {:.2f} later".format(*took))
    _photograph(second, second.locator(".rrl-board").first, "lab-second-tab")
    second.close()


def _state(view: Any) -> list[Any]:
    """What a page says of a failure: headline (without what its reader may do), stage on the role's card, newest line of the story, and how
    far each fault has come.
    """
    board = view.locator(".rrl-board").first
    stage = board.locator('button.role[aria-label^="rollout-1,"] .stages .on')
    headline = board.locator(".say").inner_text(timeout=5000).split("Click")[0]
    return [headline, stage.evaluate_all("all => all.map((one) => one.className)"),
            board.locator(".below > div:first-child .story li span").first.inner_text(timeout=5000),
            view.locator(".rrl-faults .fault").evaluate_all("all => all.map((one) => one.querySelectorAll('.steps .on').length)")]


def _same_within(one: Any, other: Any, seconds: float) -> float:
    """Seconds until both pages say the same."""
    began = time.monotonic()
    while (states := (_state(one), _state(other)))[0] != states[1]:
        assert time.monotonic() < began + seconds, f"after {seconds} s the pages differ: {states}"
        one.wait_for_timeout(50)
    return time.monotonic() - began


def _card(board: Any, role: str) -> Any:
    """By its label: the text of another role's card may name this one as the source of a pull."""
    return board.locator(f'button.role[aria-label^="{role},"]')


def _stage(card: Any, stage: str) -> bool:
    classes = card.locator(f".stages .{stage}").get_attribute("class", timeout=2000) if card.locator(f".stages .{stage}").count() else ""
    return bool(classes) and ("on" in classes.split() or "past" in classes.split())


def _photograph(view: Any, element: Any, name: str) -> None:
    element.scroll_into_view_if_needed(timeout=10_000)
    element.screenshot(path=str(ARTIFACTS / f"{name}.png"), timeout=20_000)


# -- the dashboard -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def demo() -> Iterator[dict[str, Any]]:
    """A dashboard that plays the bundled run, and its addresses."""
    command = [sys.executable, "-m", "robustrl", "dashboard", "--demo", "--speed", "4", "--json", "--until-eof"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdin
        yield json.loads(process.stdout.readline())
        process.stdin.close()
        process.wait(20)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_demo_moves_and_can_be_wound(demo: dict[str, Any], page: tuple[Any, Seen], scheme: str) -> None:
    view, seen = page
    view.emulate_media(color_scheme=scheme)
    view.goto(demo["look"], timeout=60_000)
    board, card = view.locator(".rrl-board"), _card(view.locator(".rrl-board"), "rollout-1")
    _until(view, "rollout-1 to be restarted", lambda: card.count() == 1 and _stage(card, "restart"), 40.0)
    view.screenshot(path=str(ARTIFACTS / f"dashboard-{scheme}.png"), full_page=True)
    _until(view, "the end of the run", lambda: "The job is done" in board.locator(".say").inner_text(), 40.0)
    assert board.get_attribute("data-theme") == scheme
    view.screenshot(path=str(ARTIFACTS / f"dashboard-end-{scheme}.png"), full_page=True)
    slider = view.get_by_label("moment of the run")
    slider.fill("20")
    slider.dispatch_event("change")
    _until(view, "the beginning again", lambda: "The job is done" not in board.locator(".say").inner_text(), 10.0)
    card.click()
    _until(view, "the role's history", lambda: "life 1 begins" in board.locator(".detail").inner_text(), 10.0)
    assert board.get_by_role("button", name="Kill", exact=True).count() == 0, "nothing can be done to a recording"
    assert seen.outside == [] and seen.console == []


@pytest.mark.timeout(120)
def test_a_page_with_a_wrong_token_shows_nothing(demo: dict[str, Any], page: tuple[Any, Seen]) -> None:
    view, _ = page
    view.goto(demo["look"] + "?token=wrong-wrong-wrong", timeout=60_000)
    _until(view, "the refusal", lambda: view.get_by_text("needs a token").count() == 1, 20.0)
    assert view.locator(".rrl").count() == 0
