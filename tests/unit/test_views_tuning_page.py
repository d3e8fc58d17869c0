"""What the tuning lab's page does, in Node and a document of a few lines (page.mjs): points while others come; a job that ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from view_page import NODE, run_page

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node, to run the page's code")

PICTURE: dict[str, Any] = {
    "sources": ["this run"], "live": True, "job": True, "runs": ["a"], "shown": 0, "seconds": 10.0, "order": ["rollout-0"], "signals": {},
    "truth": [], "sliders": [{"path": "rollout.no_tokens", "low": 0.4, "high": 24.0, "base": 3.0, "words": ""}], "todo": 90,
    "a": {"values": {"rollout.no_tokens": 3.0}, "marks": [], "code": "# nothing",
          "score": {"faults": 1, "detected": 1, "missed": 0, "false_alarms": 0, "mean": 1.0, "max": 1.0, "cost": 1.0, "late": 1.0,
                    "reach": 0.1, "reach_of": ""}},
    "points": [[float(i), 1.0 + i, i == 0, 0] for i in range(10)],
}  # fmt: skip
_START = """
Object.getPrototypeOf(it.root).remove = function () {
  this.parentNode.children = this.parentNode.children.filter((each) => each !== this); };
const dots = () => it.root.all((node) => node.tag === "circle");
it.show(picture);
"""


def test_a_point_that_is_pressed_while_others_are_drawn_is_chosen(tmp_path: Path) -> None:
    """The whole plot was made anew every half second: a click that began on one point ended on another element, and was none."""
    more = [*PICTURE["points"], *([100.0 + i, 50.0, False, 1] for i in range(10))]
    found = run_page(tmp_path, "tuning", _START + """
const before = dots(), plot = before[5].parentNode, where = before[5].attributes.cx;
const fire = (name, target, [clientX, clientY] = [7, 7]) => {
  for (const tell of plot.heard[name]) tell({ target, clientX, clientY, key: "Enter", preventDefault() {} }); };
const asked = async () => {
  await page.settle(); const last = it.sent.at(-1); if (last) it.answer({ value: {} }); await page.settle(); return last && last.args; };
fire("pointerdown", before[5]);
it.show({ ...picture, points: more, todo: 80 });
const same = before.every((dot, index) => dot === dots()[index]), moved = before[5].attributes.cx !== where, count = dots().length;
fire("click", plot);
const pressed = await asked();
fire("click", before[3]);
const plain = await asked();
fire("keydown", before[2]);
const key = await asked();
fire("pointerdown", before[4], [7, 7]); fire("click", plot, [60, 7]);
const dragged = it.sent.length;
it.show({ ...picture, points: more.slice(0, 4) });
return { same, moved, count, pressed, plain, key, dragged, left: dots().length };
""", picture=PICTURE, more=more)  # fmt: skip
    assert found == {"same": True, "moved": True, "count": 20, "pressed": {"point": 5}, "plain": {"point": 3}, "key": {"point": 2},
                     "dragged": 3, "left": 4}  # fmt: skip


def test_a_job_that_is_gone_is_said_and_cannot_be_applied_to(tmp_path: Path) -> None:
    there, gone, done = run_page(tmp_path, "tuning", _START + """
const look = () => {
  const apply = it.root.all((node) => node.tag === "button" && node.textContent === "apply to live job")[0];
  const alarm = it.root.find(".gone");
  return { off: apply.disabled, title: apply.title ?? "", gone: alarm.style.display !== "none" ? alarm.textContent : "" }; };
const seen = [look()];
it.show({ ...picture, closed: "the job is gone", gone: 1000 });
seen.push(look());
it.show({ ...picture, closed: "the job is done" });
seen.push(look());
return seen;
""", picture=PICTURE)  # fmt: skip
    assert there == {"off": False, "title": "", "gone": ""}
    assert gone["off"] and gone["title"] == "The job is gone: nothing can be applied to it any more." and "gone since" in gone["gone"]
    assert done == {"off": True, "title": "The job is done: nothing can be applied to it any more.", "gone": ""}
