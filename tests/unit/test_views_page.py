"""What the pages' own code does with what it is told, in Node and a document of a few lines (page.mjs); a browser is not needed.

Left out: layout, colours, and whatever needs Bokeh; tests/browser has them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from made_log import made_log
from robustrl_widgets import assets
from robustrl_widgets.feed import Feed
from robustrl_widgets.sources import RecordedRun
from robustrl_widgets.words import PHASES
from view_page import LOOK, NODE, at_its_end, picture_of, run_page, running_log
from views_log import failing_log

from robustrl.core import events as ev

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node, to run the pages' code")


def test_a_live_picture_without_news_says_that_it_is_the_last_one_until_news_come_again(tmp_path: Path) -> None:
    well, quiet, silent, again = run_page(tmp_path, "board", LOOK + """
it.show(picture);
const well = look();
for (let i = 0; i < 8; i += 1) { page.pass(4); it.live(); }  // signs of life, and nothing else
const quiet = look();
page.pass(41);
const silent = look();
it.live();
page.pass(1);
return [well, quiet, silent, look()];
""", picture=picture_of("board", running_log()))  # fmt: skip
    for shown in (well, quiet, again):
        assert "are well." in shown["say"] and shown["pill"] == "running" and not shown["gone"] and not shown["grey"]
    assert silent["gone"] and silent["grey"] and "well." not in silent["say"].split(":")[0] and "All" not in silent["say"]
    assert silent["words"] == "No news for 41 s: the kernel or the job is gone, this is the last picture."
    assert silent["pill"] == "was running" and "41 s" in silent["told"]


_ALL = ["board", "faults", "thresholds", "metrics", "trajectories", "recovery", "timeline"]


@pytest.mark.parametrize("view", _ALL)
def test_every_view_says_that_the_job_is_gone_and_since_when(tmp_path: Path, view: str) -> None:
    """Its host died: no silence tells of it, as the clock of the run stands still, so the line of every view stayed hidden."""
    here = "const gone = it.root.find('.gone'), look = () => [gone.style.display !== 'none', gone.textContent];"
    well, lost, much_later, again = run_page(tmp_path, view, here + """
it.show(running);
const well = look();
it.show(lost, 0);
const then = look();
page.pass(60);
const much_later = look();
it.show(running);
return [well, then, much_later, look()];
""", running=picture_of(view, running_log()), lost=picture_of(view, running_log(), "its host (process 5) is gone"))  # fmt: skip
    assert not well[0] and lost[0] and much_later == lost and not again[0]
    assert re.fullmatch(r"The job is gone since \d\d:\d\d:\d\d: what you see is its last state\.", lost[1])


def test_of_a_recording_that_breaks_off_no_recovery_reads_as_running(tmp_path: Path) -> None:
    running, ended = run_page(tmp_path, "recovery", """
const look = () => it.root.find(".report").textContent;
it.show(running);
const before = look();
it.show(broken, 0);
return [before, look()];
""", running=picture_of("recovery", failing_log()), broken=at_its_end("recovery", failing_log()))  # fmt: skip
    assert running.startswith("rollout-1: under way: restart")
    assert ended.startswith("rollout-1: the log breaks off during its restart") and "under way" not in ended


_WALL_OF_TEXT = ("its host (process 5) ended without a closing record\n  | \x1b[36m(raylet)\x1b[0m  \x1b[33mWARNING\x1b[0m worker.py:1 -- "
                 + "x" * 900 + "\n  | \x1b[2K\x1b]0;title\x07OSError: disk full")  # fmt: skip


def test_the_headline_of_a_job_that_is_gone_is_one_plain_sentence_and_the_rest_is_behind_details(tmp_path: Path) -> None:
    say, shown, more = run_page(tmp_path, "board", """
it.show(picture, 0);
const details = it.root.find(".more");
return [it.root.find(".say").textContent, details.style.display !== "none", details.textContent];
""", picture=picture_of("board", running_log(), _WALL_OF_TEXT))  # fmt: skip
    assert say == "The job broke off after optimizer step 2: its host (process 5) ended without a closing record."
    assert shown and more.startswith("details") and more.endswith("OSError: disk full") and "x" * 900 in more
    assert not re.search(r"\x1b|\ufffd|\[36m|\[2K|title", more)


def test_a_phase_has_one_name_in_all_pages(tmp_path: Path) -> None:
    words = run_page(tmp_path, "board", """
it.show(picture);
return it.root.querySelectorAll(".word").map((node) => node.textContent).join(" | ");
""", picture=picture_of("board", made_log()[:60]) | {"pulls": {}})  # fmt: skip
    assert words
    for view in assets.NAMES:
        text = assets.esm(view).partition("const PHASES = ")[2]
        assert json.loads(text.partition(";\n")[0]) == PHASES
        assert not re.search(r"phase\??\.replaceAll", text.replace("String(phase).replaceAll", "")), f"{view} has words of its own"


@pytest.mark.parametrize("view", _ALL[:-1])
def test_every_view_says_that_no_news_come(tmp_path: Path, view: str) -> None:
    before, after = run_page(tmp_path, view, """
it.show(picture);
page.pass(4);
const shown = () => it.root.find(".gone").style.display !== "none";
const before = shown();
page.pass(2);
return [before, shown()];
""", picture=picture_of(view, running_log()))  # fmt: skip
    assert (before, after) == (False, True)


@pytest.mark.parametrize("store", ["empty", "kept", "broken", "other", "none"])
def test_bokeh_is_asked_for_once_in_a_browser_that_can_keep_it(tmp_path: Path, store: str) -> None:
    """The kernel's megabyte came again with each reload, half a second and more, and to every other page of the kernel too."""
    asked, shelf, ran = run_page(tmp_path, "timeline", """
const place = "http://127.0.0.1:8888/robustrl/bokeh-3.9.2.js", ran = [];
const shelf = new Map({ kept: [[place, "of 3.9.2"]], broken: [[place, "torn"]], other: [["x", "of 3.0.0"]] }[store] ?? []);
const put = async (key, found) => { shelf.set(key, await found.text()); };
const match = async (key) => shelf.has(key) ? new Response(shelf.get(key)) : undefined;
if (store !== "none") globalThis.caches = { delete: async () => shelf.clear(), open: async () => ({ match, put }) };
document.head.append = (script) => {
  ran.push(script.textContent);
  if (script.textContent !== "torn") window.Bokeh = { version: "3.9.2", embed: { embed_item: () => new Promise(() => {}) } };
};
globalThis.requestIdleCallback = setImmediate;
const wait = setTimeout; globalThis.setTimeout = (soon, ms) => wait(soon, ms < 20000 ? 0 : ms);
const again = page.open(view, "READ", "", { figure: JSON.stringify({ version: "3.9.2" }) });
let asked = 0;
for (let turn = 0; turn < 100; turn += 1) {
  await new Promise((soon) => wait(soon, 1));
  if (again.sent.length > asked) { asked += 1; again.answer({ value: "of 3.9.2, brought" }); }
}
return [again.sent.map((one) => one.verb), [...shelf], ran];
""", store=store)  # fmt: skip
    place, brought = "http://127.0.0.1:8888/robustrl/bokeh-3.9.2.js", "of 3.9.2, brought"
    assert asked == ([] if store == "kept" else ["bokeh"])
    assert shelf == ([] if store == "none" else [[place, "of 3.9.2" if store == "kept" else brought]])
    assert ran == {"kept": ["of 3.9.2"], "broken": ["torn", brought]}.get(store, [brought])


def test_bokeh_which_holds_the_page_runs_after_the_first_news_were_shown(tmp_path: Path) -> None:
    ran = run_page(tmp_path, "timeline", """
let ran = 0;
const found = [];
document.head.append = () => { ran += 1; window.Bokeh = { version: "3.9.2", embed: { embed_item: () => new Promise(() => {}) } }; };
globalThis.requestIdleCallback = setImmediate;
globalThis.caches = { open: async () => ({ match: async () => new Response("of 3.9.2") }) };
globalThis.setTimeout = () => {};
const again = page.open(view, "READ", "", { figure: JSON.stringify({ version: "3.9.2" }) });
for (const show of [() => page.frame(), () => again.show({})]) {
  show();
  for (let turn = 0; turn < 50; turn += 1) await page.settle();
  found.push(ran);
}
return found;
""")  # fmt: skip
    assert ran == [0, 1]


def test_what_stands_still_has_no_news_and_misses_none(tmp_path: Path) -> None:
    over, stopped, fast = run_page(tmp_path, "board", LOOK + """
it.show(done, 0);
page.pass(60);
const over = look();
it.show(running, 0);
page.pass(60);
const stopped = look();
it.show(running, 10);
page.pass(2);
return [over, stopped, look()];
""", done=picture_of("board", made_log()), running=picture_of("board", running_log()))  # fmt: skip
    assert "The job is done" in over["say"] and stopped["told"] == "standing still" and "are well." in stopped["say"]
    assert not any(shown["gone"] or shown["grey"] for shown in (over, stopped, fast))


@pytest.mark.parametrize("view", [*_ALL, "player"])
def test_every_view_of_a_recording_says_where_its_log_breaks_off(tmp_path: Path, view: str) -> None:
    log = running_log()
    before, end, again = run_page(tmp_path, view, """
const gone = it.root.find('.gone'), look = () => [gone.style.display !== 'none', gone.textContent];
it.show(running);
const before = look();
it.show(broken, 0);
page.pass(60);
const end = look();
it.show(running);
return [before, end, look()];
""", running=picture_of(view, log), broken=(broken := at_its_end(view, log)))  # fmt: skip
    assert not before[0] and end == [True, broken["broken"]] and end[1].startswith("The log breaks off here") and not again[0]


def test_the_headline_of_a_log_that_breaks_off_calls_no_job_running(tmp_path: Path) -> None:
    picture = at_its_end("board", running_log())
    end = run_page(tmp_path, "board", LOOK + "it.show(picture, 0); page.pass(9); return look();", picture=picture)
    assert end["say"].startswith("How it was when the log breaks off: optimizer step 2 of 3, ") and end["say"].endswith("is not known.")
    assert end["pill"] == "unknown" and end["last"] and end["told"] == "recording, at its end" and not end["grey"]


def test_a_job_whose_host_died_is_not_said_to_be_well(tmp_path: Path) -> None:
    lost = run_page(tmp_path, "board", LOOK + "it.show(picture, 0); page.pass(9); return look();",
                 picture=picture_of("board", running_log(), "its host (process 5) ended without a closing record"))  # fmt: skip
    assert lost["say"] == "The job broke off after optimizer step 2: its host (process 5) ended without a closing record."
    assert lost["pill"] == "failed" and lost["last"] and lost["told"] == "ended"


def test_a_recording_is_never_called_live(tmp_path: Path) -> None:
    told = run_page(tmp_path, "board", LOOK + """
const told = [];
for (const speed of [1, 4, 0]) { it.show(running, speed); page.pass(1); told.push(look().told); }
it.show(done, 0); page.pass(1);
return [...told, look().told];
""", "READ", running=_recorded(running_log()), done=_recorded(made_log()))  # fmt: skip
    assert told == ["recording", "recording \u00d74", "recording, stopped", "recording, at its end"]


def test_the_bar_of_a_stopped_recording_stays_where_it_was_put(tmp_path: Path) -> None:
    """It jumped back to where it had been, while the board showed the right second."""
    places = run_page(tmp_path, "player", """
const bar = it.root.labelled("moment of the run"), places = [], at = () => { places.push(Number(bar.value)); };
it.show(picture, 0, 20);
at();
bar.value = 48; bar.fire("input"); bar.fire("change");
await page.settle(); page.pass(1); at();
it.answer({ value: {} }); await page.settle(); page.pass(0.25); at();
it.show(picture, 0, 48); page.pass(5); at();
bar.value = 48; bar.fire("input"); bar.fire("change");
await page.settle(); it.answer({ value: {} }); await page.settle(); page.pass(2);
it.show(picture, 0, 30); at();
return places;
""", picture={"length": 60.0, "name": "x", "pace": 1.0})  # fmt: skip
    assert places == [20, 48, 48, 48, 30]


def _recorded(until: list[ev.Entry]) -> dict[str, Any]:
    scene, _ = Feed(RecordedRun(made_log(steps=3), at=until[-1].t - until[0].t)).still()
    return scene.picture("board", scene.t)


def test_answers_that_moved_on_are_shown_under_their_filter_and_no_other(tmp_path: Path) -> None:
    row = {"id": 1, "prompt": "p", "text": "t", "reward": 1, "versions": [[1, 5]], "at": "rollout-0", "moves": []}
    moved = [["rollout-1", "rollout-0", 3]]
    found = run_page(tmp_path, "trajectories", """
const found = [], only = it.root.labelled("which answers");
it.show({ rows, moved });
for (const value of ["all", "moved", "right"]) {
  only.value = value; only.fire("change"); page.frame();
  const lines = it.root.all((node) => node.tag === "tbody")[0].children;
  found.push([it.root.find(".legend").find(".mut").textContent, lines.map((line) => line.children[0].textContent)]);
}
return found;
""", rows={"9": row | {"id": 9}, "8": row | {"id": 8, "moves": moved}}, moved={"2": row | {"id": 2, "moves": moved}})  # fmt: skip
    assert found == [["2 of the newest 2", ["9", "8"]], ["the newest 2 of the whole run", ["8", "2"]], ["2 of the newest 2", ["9", "8"]]]


def test_bands_of_the_curves_are_explained_where_there_are_some(tmp_path: Path) -> None:
    shown = run_page(tmp_path, "metrics", """
const told = () => it.root.find(".bands").style.display !== "none" && it.root.find(".bands").textContent.startsWith("a role was ill");
it.show(picture);
const without = told();
it.show({ ...picture, outages: [[0.1, 0.2, "rollout-1"]] });
return [without, told()];
""", picture=picture_of("metrics", running_log()))  # fmt: skip
    assert shown == [False, True]


def test_no_axis_has_an_exponent(tmp_path: Path) -> None:
    labels = run_page(tmp_path, "metrics", """
const labels = () => it.root.all((node) => node.tag === "text").map((node) => node.textContent);
const found = [];
for (const top of [0, 1e-12, 3e-7, 0.5, 1234, 123456, 8.5e6, 3e12]) {
  it.show({ ...picture, lag: picture.times.map(() => top), steps: [1], reward: [top] });
  found.push(...labels());
}
return found;
""", picture=picture_of("metrics", running_log()))  # fmt: skip
    assert len(labels) > 50 and not [label for label in labels if "e" in label or "NaN" in label]
    assert {"0", "1", "0.5", "1.23k", "123k", "8.5M"} <= set(labels)


@pytest.mark.parametrize("pace", [60.0, 1.0, 0.25, 1 / 3, 1e-6, 100.0])
def test_the_player_shows_and_keeps_whatever_speed_was_asked_for(tmp_path: Path, pace: float) -> None:
    """--speed 60 was shown as x1, and became that with the next click."""
    chosen, shown, stopped, again, other = run_page(tmp_path, "player", """
const speed = it.root.labelled("speed"), button = it.root.all((node) => node.tag === "button")[0];
it.show(picture, picture.pace, 1);
const chosen = [Number(speed.value), speed.options.find((one) => one.value === speed.value).textContent];
button.fire("click"); await page.settle();
const stopped = it.sent.at(-1).args;
it.answer({ value: {} }); await page.settle();
it.show(picture, 0, 2);
button.fire("click"); await page.settle();
const again = it.sent.at(-1).args;
const shown = Number(speed.value);
it.show({ ...picture, pace: 4 }, 4, 3);  // another page of the same recording
return [chosen, shown, stopped, again, Number(speed.value)];
""", picture={"length": 60.0, "name": "x", "pace": pace})  # fmt: skip
    assert chosen[0] == shown == pace and float(chosen[1].removeprefix("\u00d7")) == pace
    assert (stopped, again, other) == ({"speed": 0}, {"speed": pace}, 4)
