"""The first lesson in JupyterLab, as a reader meets it: Run All, and Run All again.

Left out: the later lessons, which draw with the same means; tests/live/test_notebooks.py runs the cells of each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import nbformat
import pytest

from tests.browser.conftest import ARTIFACTS, Lab, Seen
from tests.live.conftest import assert_clean

_NOTEBOOK = "01_first_job.ipynb"
_RUN_DEADLINE = 240.0
_PLOTS = 3


@pytest.mark.timeout(900)
def test_run_all_twice(lab: Lab, page: tuple[Any, Seen]) -> None:
    view, seen = page
    _open(view, lab)
    for number in (1, 2):
        _run_all(view, lab)
        figures = view.locator(".bk-Figure").count() - view.locator(".rrl .bk-Figure").count()
        assert figures == _PLOTS, "plots that the lesson drew itself; the timelines are the views' own"
        _photograph(view, f"run-{number}")
        _check_saved(view, lab, number)
    assert seen.outside == [], "something tried to leave the machine"
    assert seen.console == [], "errors in the browser's console"
    runs = {json.loads(path.read_text())["run"] for path in (lab.folder / "runs").glob("*/job.json")}
    assert len(runs) == 2
    for run in runs:
        assert_clean(run)


def test_what_would_leave_the_machine_and_what_fails_in_a_page_is_seen(lab: Lab, page: tuple[Any, Seen]) -> None:
    view, seen = page
    view.goto(f"{lab.url}/lab?token={lab.token}", timeout=60_000)
    view.evaluate("fetch('https://cdn.example.org/x.js').catch(() => console.error('no way out'))")
    assert seen.outside == ["https://cdn.example.org/x.js"]
    _until(view, "the page's complaint", lambda: "no way out" in seen.console, 10.0)


def _open(view: Any, lab: Lab) -> None:
    view.goto(f"{lab.url}/lab/tree/{_NOTEBOOK}?token={lab.token}", timeout=60_000)
    view.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    _until(view, "the kernel to be ready", lambda: _kernel(lab) == "idle", 60.0)


def _run_all(view: Any, lab: Lab) -> None:
    waiting = view.locator(".jp-InputPrompt", has_text="[*]")
    view.get_by_role("menuitem", name="Run", exact=True).click()
    view.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    _until(view, "the first cell to run", lambda: waiting.count() > 0, 30.0)
    _until(view, "the last cell", lambda: waiting.count() == 0 and _kernel(lab) == "idle", _RUN_DEADLINE)


def _check_saved(view: Any, lab: Lab, number: int) -> None:
    """What the reader's file holds: every cell ran, in order, without an error."""
    path = lab.folder / _NOTEBOOK
    before = path.stat().st_mtime_ns
    view.keyboard.press("Control+s")
    _until(view, "the notebook to be saved", lambda: path.stat().st_mtime_ns != before and _is_whole(path), 30.0)
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [output for cell in cells for output in cell.outputs if output.output_type == "error" or output.get("name") == "stderr"] == []
    first = (number - 1) * len(cells) + 1
    assert [cell.execution_count for cell in cells] == list(range(first, first + len(cells)))


def _is_whole(path: Path) -> bool:
    """Jupyter writes in place."""
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


def _photograph(view: Any, name: str) -> None:
    cells = view.locator(".jp-Notebook .jp-Cell")
    for index in range(cells.count()):
        cell = cells.nth(index)
        cell.scroll_into_view_if_needed(timeout=10_000)
        cell.screenshot(path=str(ARTIFACTS / f"{name}-{index:02}.png"), timeout=20_000)


def _kernel(lab: Lab) -> str:
    try:
        kernels = lab.get("/api/kernels")
    except HTTPError:  # what Jupyter answers while a kernel is half started
        return "starting"
    return str(kernels[0]["execution_state"]) if kernels else "none"


def _until(view: Any, what: str, condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            view.screenshot(path=str(ARTIFACTS / "late.png"))
            pytest.fail(f"waited {seconds} s for {what}; see {ARTIFACTS / 'late.png'}")
        view.wait_for_timeout(200)  # milliseconds; the page's requests are answered meanwhile
