"""What the views cost and how fast they are: a made-up run of 64 (or 256) roles at 4 Hz, in JupyterLab and in the dashboard.

Processor shares are of one core, over 60 s. Latency is from the moment at which a step is due to the moment at which the page shows its
number. Memory: 10 minutes of events of 64 roles, folded and drawn as fast as possible, after a first minute of them.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks._made_up_run import PERIOD, MadeUpRun
from tests.benchmarks._report import Bench, Row

_SECONDS, _WARM = 60.0, 10.0
_VIEWERS = 40
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"]
_WATCH = """() => {
  const seen = window.seen = { frames: 0, steps: {}, began: performance.now() };
  const frame = () => { seen.frames += 1; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  const find = (root) => root.querySelector(".rrl-board") ?? [...root.querySelectorAll("*")].map((one) => one.shadowRoot && find(one.shadowRoot)).find(Boolean);
  let board = null;  // the search through all shadow roots is dear: once
  setInterval(() => {
    if (!board?.isConnected) board = find(document);
    const step = board?.querySelector(".kpi b")?.textContent.split(" ")[0];
    if (step && !seen.steps[step]) seen.steps[step] = Date.now() / 1000;
  }, 10);
}"""  # noqa: E501
_CELLS = """
import os, sys
sys.path[:0] = {path!r}
from pathlib import Path
from tests.benchmarks._made_up_run import MadeUpRun
from robustrl_widgets import RoleBoard, Timeline
from robustrl_widgets.feed import Feed
run = MadeUpRun({roles})
feed = Feed(run)
feed.still()
Path("kernel.json").write_text(f'{{{{"pid": {{os.getpid()}}, "wall": {{run.wall}}}}}}')
display(RoleBoard(feed), Timeline(feed))
"""


@contextmanager
def _page(counted: list[float]) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", headless=True, args=_FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 1400})
        page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: counted.append(time.monotonic())
                                                      if '"delta' in str(frame) or 'delta"' in str(frame) else None))
        yield page
        browser.close()


def _observe(page: Any, process: psutil.Process, wall: float, counted: list[float], views: int) -> Row:
    page.wait_for_timeout(1000 * _WARM)
    page.evaluate(_WATCH)
    counted.clear()
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    page.wait_for_timeout(1000 * _SECONDS)
    share = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
    seen = page.evaluate("() => ({...window.seen, passed: (performance.now() - window.seen.began) / 1000})")
    assert len(seen["steps"]) > 1, f"the page showed no new step within {_SECONDS} s: {seen['steps']}"
    late = sorted(at - wall - int(step) for step, at in list(seen["steps"].items())[1:] if step.isdecimal())
    return {"cpu_share": round(share, 4), "fps": round(seen["frames"] / seen["passed"], 1),
            "messages_per_second_and_view": round(len(counted) / _SECONDS / views, 2), "steps_seen": len(late),
            "latency_median_s": round(statistics.median(late), 3), "latency_p95_s": round(late[int(0.95 * (len(late) - 1))], 3)}


def _lab(roles: int) -> Row:
    import nbformat

    from tests.browser.conftest import running_lab

    checkout = str(Path(__file__).parents[2])
    counted: list[float] = []
    with tempfile.TemporaryDirectory() as base, running_lab(Path(base)) as lab, _page(counted) as page:
        cell = _CELLS.format(path=[checkout, f"{checkout}/widgets"], roles=roles)
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
        made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(made, lab.folder / "bench.ipynb")
        page.goto(f"{lab.url}/lab/tree/bench.ipynb?token={lab.token}", timeout=60_000)
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        page.wait_for_timeout(5000)
        page.locator(".jp-Notebook .jp-Cell").first.click()
        page.keyboard.press("Shift+Enter")
        page.wait_for_selector(".rrl-board .kpi", timeout=60_000)
        known = json.loads((lab.folder / "kernel.json").read_text())
        return _observe(page, psutil.Process(known["pid"]), known["wall"], counted, views=2)


def _dashboard(roles: int) -> Row:
    counted: list[float] = []
    module = [sys.executable, "-m", "tests.benchmarks._made_up_run"]
    with subprocess.Popen([*module, str(roles)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout and server.stdin
        port, wall = server.stdout.readline().split()
        with subprocess.Popen([*module, "--clients", port.decode(), str(_VIEWERS - 1)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE) as clients, _page(counted) as page:
            assert clients.stdout and clients.stdin
            page.goto(f"http://127.0.0.1:{port.decode()}/", timeout=60_000)
            page.wait_for_selector(".rrl-board .kpi", timeout=60_000)
            clients.stdout.readline()
            row = _observe(page, psutil.Process(server.pid), float(wall), counted, views=7)
            assert clients.poll() is None, "all clients stayed to the end"
            clients.stdin.close()
        server.stdin.close()
    return {**row, "viewers": _VIEWERS}


def _memory(_: int) -> Row:
    from robustrl_widgets.channel import Channel
    from robustrl_widgets.feed import Feed
    from robustrl_widgets.scene import VIEWS

    clock = [0.0]
    feed = Feed(MadeUpRun(64, clock=lambda: clock[0]))
    channels = {view: Channel() for view in VIEWS}
    process, sizes = psutil.Process(), {}
    for round_ in range(int(660 / PERIOD)):
        clock[0] = round_ * PERIOD
        scene, now = feed.still()
        for view, channel in channels.items():
            channel.push(scene.picture(view, now), now, 1.0)
        if clock[0] in (60.0, 659.75):
            gc.collect()
            sizes[clock[0]] = process.memory_info().rss
    return {"growth_mb": round((sizes[659.75] - sizes[60.0]) / 1e6, 2), "rss_mb": round(sizes[659.75] / 1e6, 1), "roles": 64}


_ROWS = {"lab-64": (_lab, 64), "dashboard-64": (_dashboard, 64), "memory-64": (_memory, 64), "lab-256": (_lab, 256)}


def measure(row: str) -> Row:
    run, roles = _ROWS[row]
    return run(roles)


def judge(bench: Bench) -> None:
    both = ["lab-64", "dashboard-64"]
    bench.target("kernel, share of a core, 64 roles at 4 Hz", "<=", 0.05, ["lab-64"], lambda rows: rows[0]["cpu_share"])
    bench.target("dashboard server, share of a core, 40 viewers", "<=", 0.05 + 0.01 * _VIEWERS, ["dashboard-64"],
                 lambda rows: rows[0]["cpu_share"])
    bench.target("foreground page, frames per second", ">=", 30, both, lambda rows: min(row["fps"] for row in rows))
    bench.target("messages per second and view", "<=", 5, both, lambda rows: max(row["messages_per_second_and_view"] for row in rows))
    bench.target("event to picture, p95 seconds", "<=", 0.5, both, lambda rows: max(row["latency_p95_s"] for row in rows))
    bench.target("memory growth over 10 minutes of events, MB", "<=", 5, ["memory-64"], lambda rows: rows[0]["growth_mb"])


def main(argv: Sequence[str]) -> int:
    return Bench("views", list(_ROWS), measure).run(argv, judge)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
