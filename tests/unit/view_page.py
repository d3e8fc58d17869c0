"""A page of a view in Node, with the pictures that tests show it. The document is page.mjs."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from made_log import Writer, made_log
from robustrl_widgets import assets
from robustrl_widgets.scene import Scene
from view_scenes import scene_of

from robustrl.core import events as ev


def _node() -> str | None:
    """Node of this machine, or the one that Playwright brings."""
    if (found := shutil.which("node")) or (spec := find_spec("playwright")) is None or spec.origin is None:
        return found
    return shutil.which("node", path=str(Path(spec.origin).parent / "driver"))


NODE = _node()


def picture_of(view: str, entries: list[ev.Entry], lost: str = "") -> dict[str, Any]:
    scene = scene_of(entries)
    scene.lost = lost
    return scene.picture(view, scene.t)


def at_its_end(view: str, entries: list[ev.Entry]) -> dict[str, Any]:
    """A recording at its end."""
    scene = Scene()
    scene.length = entries[-1].t - entries[0].t
    for entry in entries:
        scene.apply(entry)
    return scene.picture(view, scene.t)


def running_log() -> list[ev.Entry]:
    """A job in which all is well."""
    log = made_log(steps=3)
    place = next(i for i, entry in enumerate(log) if isinstance(entry.event, ev.OptimizerStepCommitted) and entry.event.step == 2)
    running = Writer()
    for entry in log[: place + 1]:
        running.write(entry.source, entry.event)
    running.write("node_agent-0", ev.RoleReady(role="node_agent-0", incarnation=1, seconds=0.5))
    running.write("supervisor", ev.RoleStateChanged(role="node_agent-0", incarnation=1, old="starting", new="healthy", reason="ready"))
    return running.entries


def run_page(folder: Path, view: str, script: str, right: str = "INSTRUCTOR", me: str = "", **values: Any) -> Any:
    """What ``script`` returns, which is given the module `page`, the page `it`, and ``values``."""
    (folder / "view.mjs").write_text(assets.esm(view))
    (folder / "page.mjs").write_text(Path(__file__).with_name("page.mjs").read_text())
    (folder / "test.mjs").write_text(f"""
import * as page from "./page.mjs";
import view from "./view.mjs";
const {{ {", ".join(values)} }} = {json.dumps(values)};
const it = page.open(view, {json.dumps(right)}, {json.dumps(me)});
const run = async () => {{ {script} }};
console.log(JSON.stringify(await run()));
process.exit(0);
""")
    done = subprocess.run([str(NODE), str(folder / "test.mjs")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout)


LOOK = """
const look = () => ({ say: it.root.find(".say").textContent, gone: it.root.find(".gone").style.display !== "none",
  words: it.root.find(".gone").textContent, grey: it.root.classList.contains("silent"), pill: it.root.find(".pill").textContent,
  last: it.root.find(".nodes").classList.contains("last"), told: view_now() });
const view_now = () => it.root.find(".fresh").textContent;
"""
