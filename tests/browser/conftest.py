"""A real JupyterLab and a real Chromium, both started and ended by the tests, with user folders of their own.

Promised: nobody's settings are read or written, nothing of the server is left, and no page can reach beyond this machine: what tries is
recorded. Screenshots go to test-artifacts/.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from robustrl.config import Deadlines
from robustrl.runtime.processes import MARK, find_marked

_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
          "--disable-component-update", "--disable-sync"]
_CHECKOUT = Path(__file__).parents[2]
ARTIFACTS = _CHECKOUT / "test-artifacts" / "browser"
_WIDTH, _HEIGHT = 1280, 1400
_SERVER_DEADLINE = 90.0
COMEBACK = Deadlines().role_start
"""Seconds that a job gives a role to start: cold and beside a busy cell, a rollout needs up to a minute."""
_USER_FOLDERS = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR",
                 "IPYTHONDIR", "HOME")
_SETTINGS = {"@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}
"""No question about news in front of the lesson."""
_LOCAL = ("127.0.0.1", "localhost")


@dataclass
class Lab:
    """A running JupyterLab."""

    url: str
    token: str
    folder: Path
    """What it shows: a copy of notebooks/."""

    def get(self, path: str) -> Any:
        """The answer of its REST API."""
        request = urllib.request.Request(f"{self.url}{path}", headers={"Authorization": f"token {self.token}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)


@dataclass
class Seen:
    """What a page did that it should not."""

    console: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    """Requests that would have left the machine."""


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the system's Chromium: Playwright's own may not be downloaded."""
    if path := shutil.which("chromium"):
        return path
    pytest.skip("no chromium on this machine. Debian: apt-get update && apt-get install chromium")


@pytest.fixture(scope="module")
def lab(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@contextmanager
def running_lab(base: Path, steps: int = 12) -> Iterator[Lab]:
    """In ``base``, with a copy of the notebooks, whose jobs make ``steps`` steps; nothing of it is left afterwards."""
    folder = base / "notebooks"
    shutil.copytree(_CHECKOUT / "notebooks", folder, ignore=shutil.ignore_patterns("runs", ".ipynb_checkpoints"))
    mark, token, port = f"lab-{secrets.token_hex(4)}", secrets.token_hex(16), _free_port()
    environment = os.environ | {name: str(base / name.lower()) for name in _USER_FOLDERS}
    environment |= {MARK: mark, "JUPYTER_TOKEN": token, "ROBUSTRL_PROFILE": "class", "ROBUSTRL_STEPS": str(steps)}
    (base / "home").mkdir()
    for plugin, settings in _SETTINGS.items():
        path = base / "jupyterlab_settings_dir" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(settings))
    command = ["setpriv", "--pdeathsig", "TERM",  # it does not outlive tests that are killed
               sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}",
               "--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}"]
    with (base / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        lab = Lab(f"http://127.0.0.1:{port}", token, folder)
        _wait_until_it_answers(lab, server, base / "server.log")
        yield lab
    finally:
        _end(server)
    _assert_nothing_left(mark)


@pytest.fixture
def page(chromium: str) -> Iterator[tuple[Any, Seen]]:
    """A page in the light theme at 1280 pixels, and what it did that it should not."""
    from playwright.sync_api import sync_playwright

    seen = Seen()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=_FLAGS)
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        context = browser.new_context(viewport={"width": _WIDTH, "height": _HEIGHT}, color_scheme="light")
        context.route("**/*", lambda route: _only_here(route, seen))
        page = context.new_page()
        page.on("websocket", lambda socket: None if _is_here(socket.url) else seen.outside.append(socket.url))
        page.on("console", lambda message: seen.console.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: seen.console.append(str(error)))
        yield page, seen
        browser.close()


def _is_here(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("data", "blob", "about") or parts.hostname in _LOCAL


def _only_here(route: Any, seen: Seen) -> None:
    if _is_here(route.request.url):
        route.continue_()
    else:
        seen.outside.append(route.request.url)
        route.abort()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_until_it_answers(lab: Lab, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _SERVER_DEADLINE
    while time.monotonic() < deadline and server.poll() is None:
        try:
            lab.get("/api/status")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not answer within {_SERVER_DEADLINE} s (exit status {server.poll()}):\n{log.read_text()[-3000:]}")


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(10)


def _assert_nothing_left(mark: str, within: float = 15.0) -> None:
    """Neither the server nor a kernel of it: they all carry the mark."""
    deadline = time.monotonic() + within
    while (left := find_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        os.kill(process.pid, signal.SIGKILL)
    assert not left, f"left {within} s after the end of the server: {left}"
