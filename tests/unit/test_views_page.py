"""What the pages' own code does with what it is told, in Node and a document of a few lines (page.mjs); a browser is not needed.

Left out: layout, colours, and whatever needs Bokeh; tests/browser has them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from made_log import Writer, made_log
from robustrl_widgets import assets, lanes
from robustrl_widgets.commands import Commander, Right
from robustrl_widgets.feed import Feed
from robustrl_widgets.scene import Scene
from robustrl_widgets.sources import LiveRun, RecordedRun
from robustrl_widgets.words import PHASES
from views_log import FakeJob, back, continued, failing_log, full_restart

from robustrl.core import events as ev


def _node() -> str | None:
    """Node of this machine, or the one that Playwright brings."""
    if (found := shutil.which("node")) or (spec := find_spec("playwright")) is None or spec.origin is None:
        return found
    return shutil.which("node", path=str(Path(spec.origin).parent / "driver"))


_NODE = _node()
pytestmark = pytest.mark.skipif(_NODE is None, reason="needs node, to run the pages' code")


def _scene(entries: list[ev.Entry]) -> Scene:
    scene = Scene()
    for entry in entries:
        scene.apply(entry)
    return scene


def _picture(view: str, entries: list[ev.Entry], lost: str = "") -> dict[str, Any]:
    scene = _scene(entries)
    scene.lost = lost
    return scene.picture(view, scene.t)


def _at_its_end(view: str, entries: list[ev.Entry]) -> dict[str, Any]:
    """A recording at its end."""
    scene = Scene()
    scene.length = entries[-1].t - entries[0].t
    for entry in entries:
        scene.apply(entry)
    return scene.picture(view, scene.t)


def _running() -> list[ev.Entry]:
    """A job in which all is well."""
    log = made_log(steps=3)
    place = next(i for i, entry in enumerate(log) if isinstance(entry.event, ev.OptimizerStepCommitted) and entry.event.step == 2)
    running = Writer()
    for entry in log[: place + 1]:
        running.write(entry.source, entry.event)
    running.write("node_agent-0", ev.RoleReady(role="node_agent-0", incarnation=1, seconds=0.5))
    running.write("supervisor", ev.RoleStateChanged(role="node_agent-0", incarnation=1, old="starting", new="healthy", reason="ready"))
    return running.entries


def _page(folder: Path, view: str, script: str, right: str = "INSTRUCTOR", me: str = "", **values: Any) -> Any:
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
    done = subprocess.run([str(_NODE), str(folder / "test.mjs")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout)


_LOOK = """
const look = () => ({ say: it.root.find(".say").textContent, gone: it.root.find(".gone").style.display !== "none",
  words: it.root.find(".gone").textContent, grey: it.root.classList.contains("silent"), pill: it.root.find(".pill").textContent,
  last: it.root.find(".nodes").classList.contains("last"), told: view_now() });
const view_now = () => it.root.find(".fresh").textContent;
"""


def test_a_live_picture_without_news_says_that_it_is_the_last_one_until_news_come_again(tmp_path: Path) -> None:
    well, quiet, silent, again = _page(tmp_path, "board", _LOOK + """
it.show(picture);
const well = look();
for (let i = 0; i < 8; i += 1) { page.pass(4); it.live(); }  // signs of life, and nothing else
const quiet = look();
page.pass(41);
const silent = look();
it.live();
page.pass(1);
return [well, quiet, silent, look()];
""", picture=_picture("board", _running()))  # fmt: skip
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
    well, lost, much_later, again = _page(tmp_path, view, here + """
it.show(running);
const well = look();
it.show(lost, 0);
const then = look();
page.pass(60);
const much_later = look();
it.show(running);
return [well, then, much_later, look()];
""", running=_picture(view, _running()), lost=_picture(view, _running(), "its host (process 5) is gone"))  # fmt: skip
    assert not well[0] and lost[0] and much_later == lost and not again[0]
    assert re.fullmatch(r"The job is gone since \d\d:\d\d:\d\d: what you see is its last state\.", lost[1])


def test_of_a_recording_that_breaks_off_no_recovery_reads_as_running(tmp_path: Path) -> None:
    running, ended = _page(tmp_path, "recovery", """
const look = () => it.root.find(".report").textContent;
it.show(running);
const before = look();
it.show(broken, 0);
return [before, look()];
""", running=_picture("recovery", failing_log()), broken=_at_its_end("recovery", failing_log()))  # fmt: skip
    assert running.startswith("rollout-1: under way: restart")
    assert ended.startswith("rollout-1: the log breaks off during its restart") and "under way" not in ended


_WALL_OF_TEXT = ("its host (process 5) ended without a closing record\n  | \x1b[36m(raylet)\x1b[0m  \x1b[33mWARNING\x1b[0m worker.py:1 -- "
                 + "x" * 900 + "\n  | \x1b[2K\x1b]0;title\x07OSError: disk full")  # fmt: skip


def test_the_headline_of_a_job_that_is_gone_is_one_plain_sentence_and_the_rest_is_behind_details(tmp_path: Path) -> None:
    say, shown, more = _page(tmp_path, "board", """
it.show(picture, 0);
const details = it.root.find(".more");
return [it.root.find(".say").textContent, details.style.display !== "none", details.textContent];
""", picture=_picture("board", _running(), _WALL_OF_TEXT))  # fmt: skip
    assert say == "The job broke off after optimizer step 2: its host (process 5) ended without a closing record."
    assert shown and more.startswith("details") and more.endswith("OSError: disk full") and "x" * 900 in more
    assert not re.search(r"\x1b|\ufffd|\[36m|\[2K|title", more)


def test_nothing_can_be_ordered_of_a_job_that_is_gone_and_that_is_said(tmp_path: Path) -> None:
    faults = _page(tmp_path, "faults", """
const fields = () => it.root.all((node) => ["button", "select", "input"].includes(node.tag));
const said = "no fault can be injected and no setting changed";
const look = () => [fields().map((node) => Boolean(node.disabled)), it.root.textContent.includes(`The job is gone: ${said} any more.`)];
it.show(running);
const before = look();
it.show(lost, 0);
return [before, look()];
""", running=_picture("faults", _running()), lost=_picture("faults", _running(), "so"))  # fmt: skip
    assert [(any(off), said) for off, said in faults[:1]] == [(False, False)] and all(faults[1][0]) and faults[1][1]
    limits = _page(tmp_path, "thresholds", """
const fields = () => it.root.all((node) => node.tag === "input"), said = "The job is gone: no limit can be changed any more.";
const look = () => [fields().map((node) => node.disabled), it.root.textContent.includes(said)];
it.show(running);
const before = look();
it.show(lost, 0);
return [before, look()];
""", running=_picture("thresholds", _running()), lost=_picture("thresholds", _running(), "so"))  # fmt: skip
    assert not any(limits[0][0]) and not limits[0][1] and all(limits[1][0]) and limits[1][1]


def test_the_drawer_of_a_role_says_that_its_process_has_ended_and_offers_nothing_then(tmp_path: Path) -> None:
    detail = {"live": True, "right": 2, "faults": ["kill", "hang", "slow"], "history": []}
    well, lost = _page(tmp_path, "board", """
it.show(running);
it.root.all((node) => (node.attributes["aria-label"] ?? "").startsWith("rollout-0,"))[0].fire("click");
await page.settle();
it.answer({ value: detail });
await page.settle();
const fields = () => it.root.find(".detail").find(".acts").children.filter((node) => node.tag !== "span");
const look = () => [it.root.find(".detail").textContent, fields().map((node) => node.disabled)];
const well = look();
it.show(lost, 0);
return [well, look()];
""", detail=detail, running=_picture("board", _running()), lost=_picture("board", _running(), "so"))  # fmt: skip
    pid = _picture("board", _running())["roles"]["rollout-0"]["pid"]
    assert f"(process {pid})" in well[0] and not any(well[1]) and "no fault can" not in well[0]
    assert f"(process {pid}, which has ended)" in lost[0] and all(lost[1])
    assert "The job is gone: no fault can be injected any more." in lost[0]


def test_a_planned_fault_does_not_look_injected_and_one_that_cannot_fire_any_more_not_planned(tmp_path: Path) -> None:
    log = Writer()
    for entry in _running():
        log.write(entry.source, entry.event)
    log.write("host", ev.FaultPlanned(fault=1, kind="kill", target="rollout-0", when="in phase waiting_request", benign=False, options={}))
    hidden = {"kind": "hang", "target": "trainer-0", "when": "now", "benign": False, "options": {}, "hidden": True}
    log.write("host", ev.FaultPlanned(fault=2, **hidden))
    planned, gone = _page(tmp_path, "faults", """
const dots = (card) => card.find(".steps").children.map((step) => step.className);
const look = () => it.root.querySelectorAll(".fault").map((card) => [card.className, dots(card), card.textContent]);
it.show(running);
const before = look();
it.show(lost, 0);
return [before, look()];
""", running=_picture("faults", log.entries), lost=_picture("faults", log.entries, "so"))  # fmt: skip
    hidden_card, card = planned
    assert card[1] == ["now", "", "", "", ""] and "waits for its moment" in card[2] and "in phase waiting for requests" in card[2]
    assert hidden_card[1] == ["on", "", "", "", ""] and "hang" not in hidden_card[2]
    hidden_card, card = gone
    assert card[0] == "fault never" and card[1] == [""] * 5 and "never fired: the job is gone" in card[2] and "Abort" not in card[2]
    assert "stays hidden: the job is gone" in hidden_card[2] and "hang" not in hidden_card[2] and "Reveal" not in hidden_card[2]


def test_a_stage_that_a_fault_did_not_come_to_is_not_filled_and_no_word_stands_twice(tmp_path: Path) -> None:
    """A slow tool that nobody took for a failure recovers without having been detected."""
    picture = _picture("faults", _running())
    common = {"target": "rollout-0", "when": "now", "benign": True, "planned": 1.0, "injected": 1.5, "hits": [], "never": False,
              "recovered": None, "confirmed": None, "detected": None}  # fmt: skip
    benign = common | {"n": 1, "kind": "slow_tool", "recovered": 4.0, "outcome": "over", "reason": "over after 2 s"}
    called_off = common | {"n": 2, "kind": "hang", "outcome": "aborted", "reason": "called off"}
    second, first = _page(tmp_path, "faults", """
it.show(picture);
return it.root.querySelectorAll(".fault").map((card) => [card.find(".steps").children.map((step) => step.className), card.textContent]);
""", picture=picture | {"cards": {"1": benign, "2": called_off}})  # fmt: skip
    assert first[0] == ["on", "on", "", "on", ""] and "over: over after 2 s" in first[1]
    assert second[0] == ["on", "on", "", "", ""] and second[1].count("called off") == 1


def test_a_phase_has_one_name_in_all_pages(tmp_path: Path) -> None:
    words = _page(tmp_path, "board", """
it.show(picture);
return it.root.querySelectorAll(".word").map((node) => node.textContent).join(" | ");
""", picture=_picture("board", made_log()[:60]) | {"pulls": {}})  # fmt: skip
    assert words
    for view in assets.NAMES:
        text = assets.esm(view).partition("const PHASES = ")[2]
        assert json.loads(text.partition(";\n")[0]) == PHASES
        assert not re.search(r"phase\??\.replaceAll", text.replace("String(phase).replaceAll", "")), f"{view} has words of its own"


@pytest.mark.parametrize("view", _ALL[:-1])
def test_every_view_says_that_no_news_come(tmp_path: Path, view: str) -> None:
    before, after = _page(tmp_path, view, """
it.show(picture);
page.pass(4);
const shown = () => it.root.find(".gone").style.display !== "none";
const before = shown();
page.pass(2);
return [before, shown()];
""", picture=_picture(view, _running()))  # fmt: skip
    assert (before, after) == (False, True)


@pytest.mark.parametrize("store", ["empty", "kept", "broken", "other", "none"])
def test_bokeh_is_asked_for_once_in_a_browser_that_can_keep_it(tmp_path: Path, store: str) -> None:
    """The kernel's megabyte came again with each reload, half a second and more, and to every other page of the kernel too."""
    asked, shelf, ran = _page(tmp_path, "timeline", """
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
    ran = _page(tmp_path, "timeline", """
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
    over, stopped, fast = _page(tmp_path, "board", _LOOK + """
it.show(done, 0);
page.pass(60);
const over = look();
it.show(running, 0);
page.pass(60);
const stopped = look();
it.show(running, 10);
page.pass(2);
return [over, stopped, look()];
""", done=_picture("board", made_log()), running=_picture("board", _running()))  # fmt: skip
    assert "The job is done" in over["say"] and stopped["told"] == "standing still" and "are well." in stopped["say"]
    assert not any(shown["gone"] or shown["grey"] for shown in (over, stopped, fast))


@pytest.mark.parametrize("view", [*_ALL, "player"])
def test_every_view_of_a_recording_says_where_its_log_breaks_off(tmp_path: Path, view: str) -> None:
    log = _running()
    before, end, again = _page(tmp_path, view, """
const gone = it.root.find('.gone'), look = () => [gone.style.display !== 'none', gone.textContent];
it.show(running);
const before = look();
it.show(broken, 0);
page.pass(60);
const end = look();
it.show(running);
return [before, end, look()];
""", running=_picture(view, log), broken=(broken := _at_its_end(view, log)))  # fmt: skip
    assert not before[0] and end == [True, broken["broken"]] and end[1].startswith("The log breaks off here") and not again[0]


def test_the_headline_of_a_log_that_breaks_off_calls_no_job_running(tmp_path: Path) -> None:
    end = _page(tmp_path, "board", _LOOK + "it.show(picture, 0); page.pass(9); return look();", picture=_at_its_end("board", _running()))
    assert end["say"].startswith("How it was when the log breaks off: optimizer step 2 of 3, ") and end["say"].endswith("is not known.")
    assert end["pill"] == "unknown" and end["last"] and end["told"] == "recording, at its end" and not end["grey"]


def test_a_job_whose_host_died_is_not_said_to_be_well(tmp_path: Path) -> None:
    lost = _page(tmp_path, "board", _LOOK + "it.show(picture, 0); page.pass(9); return look();",
                 picture=_picture("board", _running(), "its host (process 5) ended without a closing record"))  # fmt: skip
    assert lost["say"] == "The job broke off after optimizer step 2: its host (process 5) ended without a closing record."
    assert lost["pill"] == "failed" and lost["last"] and lost["told"] == "ended"


def test_a_finished_board_keeps_no_word_of_a_pull(tmp_path: Path) -> None:
    running = _picture("board", _running())
    assert any(pull["to"] == "rollout-0" for pull in running["pulls"].values())
    before, after, arrows = _page(tmp_path, "board", """
const words = () => it.root.querySelectorAll(".wire").map((wire) => wire.textContent).join("");
it.show(running);
const before = words();
it.show(done, 0);
return [before, words(), it.root.find(".pulls").children.length];
""", running=running, done=_picture("board", made_log()))  # fmt: skip
    assert "from" in before and after.strip("\u00a0") == "" and arrows == 0


def test_after_a_jump_in_a_recording_no_card_tells_of_a_pull_that_is_not_where_the_role_is(tmp_path: Path) -> None:
    running = _picture("board", _running())
    role = running["roles"]["rollout-0"]
    pull = max((pull for pull in running["pulls"].values() if pull["to"] == "rollout-0"), key=lambda pull: pull["t"])
    kept, behind, earlier, live, arrows = _page(tmp_path, "board", """
const card = () => it.root.all((node) => (node.attributes["aria-label"] ?? "").startsWith("rollout-0,"))[0];
const words = () => card().find(".wire").textContent.replaceAll("\\u00a0", "");
const at = (more) => ({ ...running, pulls: {}, roles: { ...running.roles, "rollout-0": { ...role, ...more } } });
it.show(running, 1, 9); it.show(at(), 1, 20);
const kept = words();
it.show(at({ version: role.version + 9 }), 1, 90);
const behind = words();
it.show(running, 1, 9); it.show(at(), 1, 0);
const earlier = words();
it.show({ ...running, pulls: { x: { ...pull, over: -1 } } }, 1, 9); it.show(at(), 1, 30);
return [kept, behind, earlier, words(), it.root.find(".pulls").children.length];
""", running=running, role=role | {"version": pull["v"]}, pull=pull)  # fmt: skip
    assert "from" in kept and (behind, earlier, live, arrows) == ("", "", "", 0)


@pytest.mark.parametrize(("right", "offered"), [("READ", False), ("STUDENT", True), ("INSTRUCTOR", True)])
def test_only_who_may_make_a_role_fail_is_told_to(tmp_path: Path, right: str, offered: bool) -> None:
    text = _page(tmp_path, "board", _LOOK + "it.show(picture); return look().say;", right, picture=_picture("board", _running()))
    assert text.startswith("All ") and ("make it fail" in text) is offered


def test_a_recording_is_never_called_live(tmp_path: Path) -> None:
    told = _page(tmp_path, "board", _LOOK + """
const told = [];
for (const speed of [1, 4, 0]) { it.show(running, speed); page.pass(1); told.push(look().told); }
it.show(done, 0); page.pass(1);
return [...told, look().told];
""", "READ", running=_recorded(_running()), done=_recorded(made_log()))  # fmt: skip
    assert told == ["recording", "recording \u00d74", "recording, stopped", "recording, at its end"]


def test_the_bar_of_a_stopped_recording_stays_where_it_was_put(tmp_path: Path) -> None:
    """It jumped back to where it had been, while the board showed the right second."""
    places = _page(tmp_path, "player", """
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
    found = _page(tmp_path, "trajectories", """
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
    shown = _page(tmp_path, "metrics", """
const told = () => it.root.find(".bands").style.display !== "none" && it.root.find(".bands").textContent.startsWith("a role was ill");
it.show(picture);
const without = told();
it.show({ ...picture, outages: [[0.1, 0.2, "rollout-1"]] });
return [without, told()];
""", picture=_picture("metrics", _running()))  # fmt: skip
    assert shown == [False, True]


def test_no_axis_has_an_exponent(tmp_path: Path) -> None:
    labels = _page(tmp_path, "metrics", """
const labels = () => it.root.all((node) => node.tag === "text").map((node) => node.textContent);
const found = [];
for (const top of [0, 1e-12, 3e-7, 0.5, 1234, 123456, 8.5e6, 3e12]) {
  it.show({ ...picture, lag: picture.times.map(() => top), steps: [1], reward: [top] });
  found.push(...labels());
}
return found;
""", picture=_picture("metrics", _running()))  # fmt: skip
    assert len(labels) > 50 and not [label for label in labels if "e" in label or "NaN" in label]
    assert {"0", "1", "0.5", "1.23k", "123k", "8.5M"} <= set(labels)


def test_a_threshold_that_is_refused_says_why_beside_it(tmp_path: Path) -> None:
    """Also once the field has lost the keyboard, which a field that waits for its answer does."""
    sent, before, why, later, gone = _page(tmp_path, "thresholds", """
it.show(picture);
const input = it.root.labelled("limit of rollout.no_tokens"), why = input.parentNode.parentNode.find(".why");
input.value = "0"; input.fire("input"); input.fire("change"); input.fire("blur");
await page.settle();
const sent = it.sent.map((command) => [command.verb, command.args]), before = why.textContent;
it.answer({ error: "rollout.no_tokens = 0: must be a finite time" });
await page.settle();
const told = [why.textContent, why.attributes.role];
it.show(picture); page.pass(3);
const later = why.textContent;
input.value = "4"; input.fire("input");
return [sent, before, told, later, why.textContent];
""", picture=_picture("thresholds", _running()))  # fmt: skip
    assert sent == [["set_threshold", {"path": "rollout.no_tokens", "value": "0"}]] and before == "" and gone == ""
    assert why == ["rollout.no_tokens = 0: must be a finite time", "alert"] and later == why[0]


def test_how_failures_are_answered_changes_by_a_button_not_with_each_key(tmp_path: Path) -> None:
    keys, sent, kept, refused = _page(tmp_path, "faults", """
const choose = (label, value) => { const select = it.root.labelled(label); select.value = value; select.fire("change"); return select; };
const apply = it.root.labelled("apply how failures are answered");
it.show(picture);
const mode = choose("a failed role is", "isolated");
choose("a failed role is", "full");
choose("standbys", "cold");
it.show(picture);  // a picture that comes meanwhile leaves the choice
await page.settle();
const keys = [it.sent.length, mode.value];
apply.fire("click");
await page.settle();
const sent = it.sent.map((command) => [command.verb, command.args]);
it.answer({ value: { said: "from now on" } });
await page.settle();
const kept = [mode.value];
it.show({ ...picture, recovery: { mode: "full", standbys: "cold" } });
it.show({ ...picture, recovery: { mode: "observe", standbys: "cold" } });  // somebody else's
kept.push(mode.value);
apply.fire("click");  // nothing was chosen since
await page.settle();
kept.push(it.sent.length);
choose("a failed role is", "full");
apply.fire("click");
await page.settle();
it.answer({ error: "no" });
await page.settle();
return [keys, sent, kept, mode.value];
""", picture=_picture("faults", _running()) | {"recovery": {"mode": "observe", "standbys": "warm"}})  # fmt: skip
    assert keys == [0, "full"], "arrow keys send nothing"
    assert sent == [["set_recovery", {"mode": "full", "standbys": "cold"}]]
    assert kept == ["full", "observe", 1] and refused == "observe"


@pytest.mark.parametrize("pace", [60.0, 1.0, 0.25, 1 / 3, 1e-6, 100.0])
def test_the_player_shows_and_keeps_whatever_speed_was_asked_for(tmp_path: Path, pace: float) -> None:
    """--speed 60 was shown as x1, and became that with the next click."""
    chosen, shown, stopped, again, other = _page(tmp_path, "player", """
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


@pytest.mark.parametrize("suspected", [False, True])
def test_where_a_log_breaks_off_no_stage_on_a_card_reads_as_running(tmp_path: Path, suspected: bool) -> None:
    log, role = (failing_log(), "rollout-1") if not suspected else (_suspecting(), "rollout-0")
    running, ended, lost = _page(tmp_path, "board", """
const card = () => it.root.all((node) => (node.attributes["aria-label"] ?? "").startsWith(`${role},`))[0];
const look = () => [card().find(".stages").textContent, card().querySelectorAll(".on").length];
it.show(running);
const found = [look()];
for (const picture of [broken, lost]) { it.show(picture, 0); page.pass(2); found.push(look()); }
return found;
""", role=role, running=_picture("board", log), broken=_at_its_end("board", log), lost=_picture("board", log, "so"))  # fmt: skip
    assert "\u2026" in running[0] and running[1] == 1
    for words, on in (ended, lost):
        assert "\u2026" not in words and "not over" in words and on == 0


def _suspecting() -> list[ev.Entry]:
    log = Writer()
    for entry in _running():
        log.write(entry.source, entry.event)
    now = log.entries[-1].t
    log.write("supervisor", ev.Verdict(
        role="rollout-0", incarnation=1, kind="suspect", rule="no_tokens", evidence={}, threshold=1.0, due=now, seen=now, onset=now - 0.1,
        blind_spot=""))
    log.write("supervisor", ev.RoleStateChanged(role="rollout-0", incarnation=1, old="healthy", new="suspect", reason="no_tokens"))
    return log.entries


def test_who_is_ended_by_a_full_restart_has_no_detection_on_the_card_and_did_not_fail(tmp_path: Path) -> None:
    log = full_restart()
    begun = next(place for place, entry in enumerate(log) if isinstance(entry.event, ev.RoleStarted) and entry.event.incarnation == 2)
    say, mine, others = _page(tmp_path, "board", """
const card = (role) => it.root.all((node) => (node.attributes["aria-label"] ?? "").startsWith(`${role},`))[0];
const stages = (role) => card(role).find(".stages").children.map((box) => box.className.split(" ")[0]);
const look = (role) => [stages(role), card(role).textContent, card(role).className];
it.show(picture);
return [it.root.find(".say").textContent, look("trainer-0"), look("rollout-0")];
""", picture=_picture("board", log[:begun]))  # fmt: skip
    assert mine[0] == ["detect", "restart", "reconnect"] and "rule exited" in mine[1] and " bad" in mine[2]
    assert others[0] == ["restart", "reconnect"] and "because of trainer-0" in others[1]
    assert "rule" not in others[1] and " bad" not in others[2]
    count = len(_picture("board", log[:begun])["head"]["ill"]) - 1
    assert say.startswith(f"trainer-0 failed and is restarted; {count} roles are started anew because of it")


def test_the_word_on_a_card_in_a_full_restart_is_what_is_the_case(tmp_path: Path) -> None:
    """Who was ended on purpose read "failed", and who was about to be ended, or already back, "healthy"."""
    log = full_restart()

    def after(place: int) -> dict[str, Any]:
        return _picture("board", log[: place + 1])

    decided = max(place for place, entry in enumerate(log) if isinstance(entry.event, ev.RestartDecided))
    ended, begun, back_again = (
        next(place for place, entry in enumerate(log) if isinstance(entry.event, kind) and entry.event.role == "rollout-0"
             and getattr(entry.event, "incarnation", 0) == life and getattr(entry.event, "new", new) == new)
        for kind, life, new in ((ev.RoleStateChanged, 1, "failed"), (ev.RoleStarted, 2, ""), (ev.RoleStateChanged, 2, "healthy")))
    words = _page(tmp_path, "board", """
const card = (role) => it.root.all((node) => (node.attributes["aria-label"] ?? "").startsWith(`${role},`))[0];
const word = (role) => card(role).find(".word").textContent;
return pictures.map((picture) => { it.show(picture); return ["rollout-0", "supervisor", "trainer-0"].map(word); });
""", pictures=[after(place) for place in (decided, ended, begun, back_again, len(log) - 1)])  # fmt: skip
    assert [rollout for rollout, _, _ in words[:4]] == ["is being ended", "ended for the restart", "restarting", "waits for the others"]
    assert words[0][1] == "is being ended" and words[1][1] == "ended for the restart" and words[1][2] == "failed", "that one did fail"
    assert words[4][0].startswith("healthy") and words[4][1].startswith("healthy")
    first = Writer()  # the one that failed may be up before the others, above a restart that runs
    for entry in log[: begun + 1]:
        first.write(entry.source, entry.event)
    first.write("host", ev.RoleStarted(role="trainer-0", incarnation=2, node="node-0", pid=999, start_ticks=9))
    first.write("supervisor", ev.RoleStateChanged(role="trainer-0", incarnation=2, old="restarting", new="healthy", reason="ready"))
    trainer = _picture("board", first.entries)["roles"]["trainer-0"]
    assert trainer["word"] == "waits for the others" and trainer["stages"]["on"] == "restart"


def test_a_role_that_is_added_is_told_of_and_is_well_when_it_takes_part(tmp_path: Path) -> None:
    log = Writer()
    for entry in _running():
        log.write(entry.source, entry.event)
    count, pictures = len(_picture("board", log.entries)["roles"]), []
    log.write("host", ev.RoleStarted(role="rollout-2", incarnation=1, node="node-0", pid=77, start_ticks=7))
    pictures.append(_picture("board", log.entries))
    log.write("rollout-2", ev.RoleReady(role="rollout-2", incarnation=1, seconds=0.5))
    log.write("supervisor", ev.RoleStateChanged(role="rollout-2", incarnation=1, old="starting", new="stale", reason="ready"))
    pictures.append(_picture("board", log.entries))
    log.write("supervisor", ev.RoleStateChanged(role="rollout-2", incarnation=1, old="stale", new="healthy", reason="version committed"))
    pictures.append(_picture("board", log.entries))
    started, stale, well = _page(tmp_path, "board", """
return pictures.map((picture) => { it.show(picture); return [it.root.find(".say").textContent, it.root.find(".story").textContent]; });
""", pictures=pictures)  # fmt: skip
    for say, story in (started, stale):
        assert say.startswith(f"rollout-2 is starting. The other {count} roles go on.")
        assert "rollout-2 joins: its process is started." in story
    assert well[0].startswith(f"All {count + 1} roles are well.") and "rollout-2 takes part now." in well[1]


@pytest.mark.parametrize("drained", [True, False])
def test_what_is_ended_on_purpose_is_no_failure(tmp_path: Path, drained: bool) -> None:
    log, pictures = Writer(), []
    for entry in _running():
        log.write(entry.source, entry.event)
    count, now = len(_picture("board", log.entries)["roles"]), {"role": "rollout-1", "incarnation": 1}

    def then(source: str, *events: ev.Event) -> None:
        for event in events:
            log.write(source, event)
        pictures.append(_picture("board", log.entries))

    if drained:
        then("host", ev.RoleOrdered(**now, action="drain"), ev.RoleStateChanged(**now, old="healthy", new="stopped", reason="drained"))
    end = ev.ProcessExited(**now, pid=1, cause="ended by the host", last_lines=[])
    failed = [] if drained else [ev.RoleStateChanged(**now, old="healthy", new="failed", reason="ended by the host")]
    then("host", ev.RoleOrdered(**now, action="restart"), ev.RestartDecided(**now, reason="ordered by the user"))
    then("host", end, *failed)
    now["incarnation"] = 2
    then("host", ev.RoleStarted(**now, node="node-0", pid=999, start_ticks=9))
    then("host", ev.RoleReady(**now, seconds=0.5), ev.RoleStateChanged(**now, old="restarting", new="stale", reason="ready"),
         ev.RoleStateChanged(**now, old="stale", new="healthy", reason="version committed"))
    then("host", ev.EndDecided(status="stopped", reason="job.stop()"), ev.RunEnded(status="stopped", reason="job.stop()", wall=1e9))
    shown = _page(tmp_path, "board", """
const card = () => it.root.all((node) => (node.attributes["aria-label"] ?? "").startsWith("rollout-1,"))[0];
const look = () => [it.root.find(".say"), card(), it.root.find(".story")].map((node) => node.textContent);
return pictures.map((picture) => { it.show(picture); return look(); });
""", pictures=pictures)  # fmt: skip
    if drained:
        say, card, story = shown.pop(0)
        assert say.startswith(f"rollout-1 is drained. The other {count - 1} roles go on.") and "drained" in card
        assert "rollout-1 is drained: its work goes to others, and it ends." in story
    assert not drained or "drained" in shown[0][1], "until its next life begins"
    for say, card, story in shown[:3]:
        assert say.startswith(f"rollout-1 is started again. The other {count - 1} roles go on.") and "failed" not in card + story
        assert "rollout-1 is started again: ordered by the user." in story and "detect" not in card
    assert shown[3][0].startswith(f"All {count} roles are well.") and "failed" not in shown[3][2]
    assert "failure" not in shown[4][0]
    assert not _scene(log.entries).doubts, "the log is a possible one"
    assert lanes.DETECT not in [bar.code for bar in _scene(log.entries).lanes.lanes["rollout-1"].bars]


def test_only_what_the_server_would_do_is_offered_for_a_fault(tmp_path: Path) -> None:
    """A student had a button that aborts the faults of others, and kills that were done."""
    log = Writer()
    for entry in _running():
        log.write(entry.source, entry.event)
    ordered = (("student Ada", "hang"), ("student Bob", "hang"), ("instructor", "hang"), ("student ada ", "kill"))
    for number, (by, kind) in enumerate(ordered, 1):
        log.write("host", ev.FaultPlanned(fault=number, kind=kind, target="rollout-1", when="now", benign=False, options={}, by=by))
    log.write("node_agent-0", ev.FaultInjected(fault=4, role="rollout-1", incarnation=1, node="node-0", pid=5, phase="", step=1, proof={}))
    feed = Feed(LiveRun(FakeJob(log.entries, len(log.entries))))  # type: ignore[arg-type]
    feed.later = lambda task: task()  # type: ignore[method-assign]
    scene, now = feed.still()
    detail = scene.inspect("rollout-0") | {"live": True}
    viewers: list[tuple[Right, str, set[int]]] = [
        (Right.READ, "", set()), (Right.STUDENT, "Ada", {1}), (Right.STUDENT, "ADA\u200b", {1}), (Right.STUDENT, "Bob", {2}),
        (Right.STUDENT, "Eve", set()), (Right.INSTRUCTOR, "", {1, 2, 3}),
    ]  # fmt: skip
    for right, name, abortable in viewers:
        viewer = Commander(feed, right, name)
        answers: list[dict[str, Any]] = []
        for number in range(1, 5):
            viewer.take(json.dumps({"id": "1", "verb": "abort", "args": {"fault": number}}), answers.append)
        shown, kinds, hidden, may_order, why = _page(tmp_path, "faults", """
it.show(picture);
const button = (node, label) => node.all((each) => each.tag === "button" && each.textContent === label)[0];
const number = (card) => Number(card.textContent.match(/#(\\d+)/)[1]);
const shown = it.root.querySelectorAll(".fault").filter((card) => button(card, "Abort")).map(number);
const kinds = it.root.labelled("fault").options.map((one) => one.value);
const hides = it.root.all((node) => node.tag === "label" && node.textContent === "hidden")[0];
return [shown, kinds, hides.style.display === "none", !button(it.root, "Inject").disabled, it.root.textContent.includes("One at a time")];
""", right.name, viewer.me, picture=scene.picture("faults", now))  # fmt: skip
        accepted = {number for number, answer in enumerate(answers, 1) if "value" in answer} - {4}  # a kill: test_views_commands.py
        assert set(shown) == accepted == abortable
        student = right is Right.STUDENT
        assert ("node_loss" in kinds, "kill" in kinds, hidden) == (not student, True, student)
        assert may_order is not why and why is (name in ("Ada", "ADA\u200b", "Bob"))
        if right is not Right.READ:
            off, told = _page(tmp_path, "board", """
it.show(picture);
it.root.all((node) => (node.attributes["aria-label"] ?? "").startsWith("rollout-0,"))[0].fire("click");
await page.settle();
it.answer({ value: detail });
await page.settle();
const acts = it.root.find(".detail").find(".acts").children.filter((node) => node.tag === "button");
return [acts.map((node) => node.disabled), it.root.find(".detail").textContent.includes("One at a time: your fault #")];
""", right.name, viewer.me, picture=scene.picture("board", now), detail=detail | {"right": int(right)})  # fmt: skip
            assert off == 3 * [why] and told is why, "Kill, Hang and Inject in the drawer of a role"


def test_a_fault_is_ordered_with_a_length_that_the_server_offers(tmp_path: Path) -> None:
    """The board had a list of its own of faults that have a length, in which one was missing."""
    picture, detail = _picture("board", _running()), _scene(_running()).inspect("rollout-0")
    sent = _page(tmp_path, "board", """
it.show(picture);
it.root.all((node) => (node.attributes["aria-label"] ?? "").startsWith("rollout-0,"))[0].fire("click");
await page.settle();
it.answer({ value: detail });
await page.settle();
const sent = [];
for (const kind of ["freeze", "slow", "exception"]) {
  it.root.labelled("another fault").value = kind;
  it.root.all((node) => node.tag === "button" && node.textContent === "Inject")[0].fire("click");
  await page.settle();
  sent.push(it.sent.at(-1).args.seconds);
  it.answer({ value: {} });
  await page.settle();
}
return sent;
""", picture=picture, detail=detail | {"right": 2, "live": True})  # fmt: skip
    assert sent == [2.7, 10, None], "by the thresholds of a lab a rollout may be stopped for 2.7 s"
    lengths = _page(tmp_path, "faults", """
it.show(picture);
const choose = (label, value) => { const select = it.root.labelled(label); select.value = value; select.fire("change"); };
const length = () => it.root.labelled("seconds").value;
const lengths = [length()];
choose("fault", "freeze");
for (const role of ["rollout-0", "task_runner"]) { choose("role", role); lengths.push(length()); }
choose("fault", "slow");
return [...lengths, length()];
""", picture=_picture("faults", _running()))  # fmt: skip
    assert lengths == ["10", "2.7", "4.7", "10"]


def test_while_there_are_few_steps_it_is_said_that_effective_training_time_says_little(tmp_path: Path) -> None:
    picture = _picture("metrics", _running())
    before, after = _page(tmp_path, "metrics", """
const told = () => it.root.querySelectorAll(".early").map((node) => node.textContent);
it.show({ ...picture, ettrs: [[9, 0.07, 0.5]], head: { ...picture.head, ettr_early: "ETTR says little" } });
const before = told();
it.show(picture);
return [before, told()];
""", picture=picture)  # fmt: skip
    assert (before, after) == (["ETTR says little"], [])


def test_a_recovery_that_did_not_end_well_is_told_in_words(tmp_path: Path) -> None:
    log = failing_log()
    log = continued(log, ev.EndDecided(status="failed", reason="so"), ev.RunEnded(status="failed", reason="so", wall=1.0))
    told, well = _page(tmp_path, "recovery", """
const look = () => it.root.find(".report").find("h3") ?? it.root.find(".report").children[0];
it.show(ended);
const told = look().textContent;
it.show(back);
return [told, look().textContent];
""", ended=_picture("recovery", log), back=_picture("recovery", back(failing_log())))  # fmt: skip
    assert told.startswith("rollout-1: not recovered when the job ended") and well.startswith("rollout-1: back after ")
