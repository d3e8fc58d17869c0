"""A newcomer's path: from JupyterLab as `make lab` opens it, in the small profile, to the first healed fault, in five clicks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import ARTIFACTS, Seen, running_lab
from tests.browser.test_notebook import _kernel, _until
from tests.browser.test_views import _card

_CLICKS, _SECONDS = 5, 90.0
_MARGIN = 3.0


@pytest.mark.soak
@pytest.mark.timeout(500)
def test_five_clicks_from_an_empty_lab_to_the_first_healed_fault(chromium: str, page: tuple[Any, Seen], tmp_path: Path) -> None:
    view, seen = page
    with running_lab(tmp_path, steps=400) as lab:
        view.goto(f"{lab.url}/lab?token={lab.token}", timeout=60_000)
        lesson = view.locator(".jp-DirListing-item", has_text="01_first_job.ipynb")
        lesson.wait_for(timeout=60_000)
        began, clicks = time.monotonic(), 0

        def click(what: Any, double: bool = False) -> None:
            nonlocal clicks
            what.dblclick(timeout=60_000) if double else what.click(timeout=60_000)
            clicks += 1

        click(lesson, double=True)
        view.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        _until(view, "the kernel to be there", lambda: _kernel(lab) == "idle", 60.0)  # sooner it would ask which
        click(view.get_by_role("menuitem", name="Run", exact=True))
        click(view.get_by_role("menuitem", name="Run All Cells", exact=True))
        board = view.locator(".rrl-board").first

        def scrolled_to_the_board() -> bool:
            """Run All goes to the end of the lesson, and JupyterLab draws what is in sight only."""
            view.mouse.move(700, 700)
            view.mouse.wheel(0, -600 if board.count() == 0 else 0)
            return bool(board.count())

        _until(view, "the board", scrolled_to_the_board, 90.0)
        board.scroll_into_view_if_needed()
        _until(view, "all roles to be well", lambda: "are well" in board.locator(".say").inner_text(), 150.0)
        click(_card(board, "rollout-1"))
        click(board.get_by_role("button", name="Kill", exact=True))
        _until(view, "the healed fault", lambda: "rollout-1 takes part again" in board.locator(".story").first.inner_text(), 120.0)
        took = time.monotonic() - began
        view.screenshot(path=str(ARTIFACTS / "newcomer.png"))
        print(f"{clicks} clicks, {took:.1f} s")
        assert clicks <= _CLICKS and took <= _MARGIN * _SECONDS
        view.get_by_role("menuitem", name="Kernel", exact=True).click()
        view.get_by_role("menuitem", name="Shut Down Kernel", exact=True).click()
        view.wait_for_timeout(1000)
    assert seen.outside == []
