"""The dashboard of a live job, directly and behind jupyter-server-proxy: a rollout is killed by its button and comes back before one's
eyes, and who reloads, opens a second tab or comes late in the middle of it sees the same.

One job of the class profile and one dashboard serve all tests here. Screenshots go to test-artifacts/browser.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import robustrl
from robustrl.job import Job
from tests.browser.conftest import ARTIFACTS, COMEBACK, Seen, running_lab
from tests.browser.test_notebook import _until
from tests.browser.test_views import _CATCH_UP, _MARGIN, _card, _same_within, _stage
from tests.live.conftest import assert_clean


@pytest.fixture(scope="module")
def job(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("runs")
    with robustrl.launch(name="watched", profile="class", steps=100_000, thresholds="lab", restarts=100, evaluation_prompts=0,
                         run_dir=str(folder)) as job:  # fmt: skip
        job.wait(step=2, timeout=200)
        yield job
    assert_clean(job.run)


class _Dashboard:
    def __init__(self, job: str, *options: str) -> None:
        command = [sys.executable, "-m", "robustrl", "dashboard", "--job", job, "--json", "--until-eof", *options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> dict[str, Any]:
        assert self._process.stdout
        links: dict[str, Any] = json.loads(self._process.stdout.readline())
        return links

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


def _open(view: Any, link: str) -> Any:
    view.goto(link, timeout=60_000)
    board = view.locator(".rrl-board")
    board.locator(".kpi").first.wait_for(timeout=60_000)
    return board


def _kill_and_watch(view: Any, board: Any, name: str) -> None:
    """By the button, until the board shows the restart."""
    _until(view, "all roles to be well", lambda: "are well" in board.locator(".say").inner_text(), 60.0)
    card = _card(board, "rollout-1")
    card.click()
    board.get_by_role("button", name="Kill", exact=True).click(timeout=10_000)
    _until(view, "restart on the card", lambda: _stage(card, "restart"), 30.0)
    view.screenshot(path=str(ARTIFACTS / f"{name}-restart.png"), full_page=True)


def _watch_it_heal(view: Any, board: Any, name: str, life: int, version: int) -> None:
    card, faults = _card(board, "rollout-1"), view.locator(".rrl-faults .fault").first
    _until(view, "reconnect on the card", lambda: _stage(card, "reconnect"), COMEBACK)
    _until(view, "rollout-1 to be healthy", lambda: "healthy" in card.inner_text() and f"life {life}" in card.inner_text(), 60.0)
    _until(view, "the fault to be confirmed", lambda: faults.locator(".steps .on").count() == 5, 30.0)
    _until(view, "newer versions", lambda: int(card.locator(".version").inner_text().lstrip("v").split(",")[0]) > version, 30.0)
    assert view.locator(".rrl-timeline .bk-Figure").count() == 1
    view.screenshot(path=str(ARTIFACTS / f"{name}-healed.png"), full_page=True)


@pytest.mark.timeout(600)
def test_who_reloads_opens_a_second_tab_or_comes_late_sees_the_same_recovery(job: Job, page: tuple[Any, Seen]) -> None:
    view, seen = page
    with _Dashboard(job.name) as links:
        _three_pages(view, job, links)
        view.goto("about:blank")
    assert seen.outside == [] and seen.console == []


def _three_pages(view: Any, job: Job, links: dict[str, Any]) -> None:
    life, version = job.roles["rollout-1"].incarnation, job.roles["rollout-1"].version
    first = _open(view, links["instructor"])
    second = view.context.new_page()
    _open(second, links["look"])
    _kill_and_watch(view, first, "dashboard-live")
    tab = _same_within(view, second, _MARGIN * _CATCH_UP)
    second.reload()
    second.locator(".rrl-board .kpi").first.wait_for(timeout=60_000)
    reloaded = _same_within(view, second, _MARGIN * _CATCH_UP)
    late = view.context.new_page()
    _open(late, links["look"])
    came = _same_within(view, late, _MARGIN * _CATCH_UP)
    print(f"second tab {tab:.2f} s, reload {reloaded:.2f} s, late viewer {came:.2f} s")
    assert late.locator(".rrl-faults .form").first.is_hidden(), "who looks on is offered no fault"
    _watch_it_heal(view, first, "dashboard-live", life + 1, version)
    for other in (second, late):
        _same_within(view, other, _MARGIN * _CATCH_UP)
        other.close()


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_the_same_behind_jupyter_server_proxy(job: Job, page: tuple[Any, Seen], tmp_path: Path) -> None:
    pytest.importorskip("jupyter_server_proxy")
    view, seen = page
    life, version = job.roles["rollout-1"].incarnation, job.roles["rollout-1"].version
    with running_lab(tmp_path) as lab, _Dashboard(job.name, "--origin", lab.url.removeprefix("http://")) as links:
        view.goto(f"{lab.url}/lab?token={lab.token}", timeout=60_000)  # for Jupyter's cookie
        behind = f"{lab.url}/proxy/{links['port']}/?{links['instructor'].partition('?')[2]}"
        shown = _open(view, behind)
        _kill_and_watch(view, shown, "proxy")
        _watch_it_heal(view, shown, "proxy", life + 1, version)
        view.goto("about:blank")
    assert seen.outside == [] and seen.console == []
