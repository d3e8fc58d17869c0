"""Makes the picture in the README: the dashboard, playing the bundled run (a real one) up to the moment at which its trainer is restarted.

Run it from a checkout with Chromium: ``python scripts/screenshot.py``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from robustrl_widgets.showing import SAMPLE
from robustrl_widgets.sources import load_entries

from robustrl.core.recoveries import recoveries_of

TARGET = Path(__file__).resolve().parents[1] / "widgets" / "dashboard.png"
LIMIT = 300_000
"""Bytes."""
_SIZE = {"width": 1500, "height": 1190}
_COLOURS = 200
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def moment() -> float:
    """Seconds of the bundled run at which its last recovery is half way through its restart."""
    entries = load_entries(SAMPLE)
    last = recoveries_of(entries)[-1]
    if last.ready is None:
        raise SystemExit("the bundled run has no recovery that was completed")
    return (last.detected + last.ready) / 2 - entries[0].t


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("needs Chromium (Debian: apt-get install chromium)")
    command = [sys.executable, "-m", "robustrl", "dashboard", "--demo", "--json", "--until-eof"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server, sync_playwright() as playwright:
        assert server.stdout and server.stdin
        link = json.loads(server.stdout.readline())["look"]
        browser = playwright.chromium.launch(executable_path=chromium, args=_FLAGS)
        page = browser.new_page(viewport=_SIZE, color_scheme="light")
        page.goto(link, timeout=60_000)
        page.locator(".rrl-board .kpi").first.wait_for(timeout=60_000)
        page.get_by_role("button", name="stop").click()
        slider = page.get_by_label("moment of the run")
        slider.fill(f"{moment():.1f}")
        slider.dispatch_event("change")
        page.locator('.rrl-board button.role[aria-label^="trainer-0,"] .stages .restart.on').wait_for(timeout=20_000)
        page.locator(".rrl-timeline .bk-Figure").wait_for(timeout=20_000)
        page.wait_for_timeout(2000)  # curves are drawn once a second
        page.screenshot(path=str(TARGET))
        browser.close()
        server.stdin.close()
    Image.open(TARGET).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(TARGET, optimize=True)
    size = TARGET.stat().st_size
    print(f"{TARGET.name}: {size} bytes")
    if size > LIMIT:
        raise SystemExit(f"that is more than {LIMIT}: make it smaller")


if __name__ == "__main__":
    main()
