"""What a page offers to order, and how it orders it: faults, thresholds, the answer to failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_log import Writer
from robustrl_widgets.commands import Commander, Right
from robustrl_widgets.feed import Feed
from robustrl_widgets.sources import LiveRun
from view_page import LOOK, NODE, picture_of, run_page, running_log, scene_of
from views_log import FakeJob

from robustrl.core import events as ev

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node, to run the pages' code")

_DRAWER = """
it.root.all((node) => (node.attributes["aria-label"] ?? "").startsWith("rollout-0,"))[0].fire("click");
await page.settle();
it.answer({ value: detail });
await page.settle();
"""
"""Opens the drawer of rollout-0 on a board, which shows ``detail``."""


def test_nothing_can_be_ordered_of_a_job_that_is_gone_and_that_is_said(tmp_path: Path) -> None:
    faults = run_page(tmp_path, "faults", """
const fields = () => it.root.all((node) => ["button", "select", "input"].includes(node.tag));
const said = "no fault can be injected and no setting changed";
const look = () => [fields().map((node) => Boolean(node.disabled)), it.root.textContent.includes(`The job is gone: ${said} any more.`)];
it.show(running);
const before = look();
it.show(lost, 0);
return [before, look()];
""", running=picture_of("faults", running_log()), lost=picture_of("faults", running_log(), "so"))  # fmt: skip
    assert [(any(off), said) for off, said in faults[:1]] == [(False, False)] and all(faults[1][0]) and faults[1][1]
    limits = run_page(tmp_path, "thresholds", """
const fields = () => it.root.all((node) => node.tag === "input"), said = "The job is gone: no limit can be changed any more.";
const look = () => [fields().map((node) => node.disabled), it.root.textContent.includes(said)];
it.show(running);
const before = look();
it.show(lost, 0);
return [before, look()];
""", running=picture_of("thresholds", running_log()), lost=picture_of("thresholds", running_log(), "so"))  # fmt: skip
    assert not any(limits[0][0]) and not limits[0][1] and all(limits[1][0]) and limits[1][1]


def test_the_drawer_of_a_role_says_that_its_process_has_ended_and_offers_nothing_then(tmp_path: Path) -> None:
    detail = {"live": True, "right": 2, "faults": ["kill", "hang", "slow"], "history": []}
    well, lost = run_page(tmp_path, "board", "it.show(running);" + _DRAWER + """
const fields = () => it.root.find(".detail").find(".acts").children.filter((node) => node.tag !== "span");
const look = () => [it.root.find(".detail").textContent, fields().map((node) => node.disabled)];
const well = look();
it.show(lost, 0);
return [well, look()];
""", detail=detail, running=picture_of("board", running_log()), lost=picture_of("board", running_log(), "so"))  # fmt: skip
    pid = picture_of("board", running_log())["roles"]["rollout-0"]["pid"]
    assert f"(process {pid})" in well[0] and not any(well[1]) and "no fault can" not in well[0]
    assert f"(process {pid}, which has ended)" in lost[0] and all(lost[1])
    assert "The job is gone: no fault can be injected any more." in lost[0]


def test_a_planned_fault_does_not_look_injected_and_one_that_cannot_fire_any_more_not_planned(tmp_path: Path) -> None:
    log = Writer()
    for entry in running_log():
        log.write(entry.source, entry.event)
    log.write("host", ev.FaultPlanned(fault=1, kind="kill", target="rollout-0", when="in phase waiting_request", benign=False, options={}))
    hidden = {"kind": "hang", "target": "trainer-0", "when": "now", "benign": False, "options": {}, "hidden": True}
    log.write("host", ev.FaultPlanned(fault=2, **hidden))
    planned, gone = run_page(tmp_path, "faults", """
const dots = (card) => card.find(".steps").children.map((step) => step.className);
const look = () => it.root.querySelectorAll(".fault").map((card) => [card.className, dots(card), card.textContent]);
it.show(running);
const before = look();
it.show(lost, 0);
return [before, look()];
""", running=picture_of("faults", log.entries), lost=picture_of("faults", log.entries, "so"))  # fmt: skip
    hidden_card, card = planned
    assert card[1] == ["now", "", "", "", ""] and "waits for its moment" in card[2] and "in phase waiting for requests" in card[2]
    assert hidden_card[1] == ["on", "", "", "", ""] and "hang" not in hidden_card[2]
    hidden_card, card = gone
    assert card[0] == "fault never" and card[1] == [""] * 5 and "never fired: the job is gone" in card[2] and "Abort" not in card[2]
    assert "stays hidden: the job is gone" in hidden_card[2] and "hang" not in hidden_card[2] and "Reveal" not in hidden_card[2]


def test_a_stage_that_a_fault_did_not_come_to_is_not_filled_and_no_word_stands_twice(tmp_path: Path) -> None:
    """A slow tool that nobody took for a failure recovers without having been detected."""
    picture = picture_of("faults", running_log())
    common = {"target": "rollout-0", "when": "now", "benign": True, "planned": 1.0, "injected": 1.5, "hits": [], "never": False,
              "recovered": None, "confirmed": None, "detected": None}  # fmt: skip
    benign = common | {"n": 1, "kind": "slow_tool", "recovered": 4.0, "outcome": "over", "reason": "over after 2 s"}
    called_off = common | {"n": 2, "kind": "hang", "outcome": "aborted", "reason": "called off"}
    second, first = run_page(tmp_path, "faults", """
it.show(picture);
return it.root.querySelectorAll(".fault").map((card) => [card.find(".steps").children.map((step) => step.className), card.textContent]);
""", picture=picture | {"cards": {"1": benign, "2": called_off}})  # fmt: skip
    assert first[0] == ["on", "on", "", "on", ""] and "over: over after 2 s" in first[1]
    assert second[0] == ["on", "on", "", "", ""] and second[1].count("called off") == 1


@pytest.mark.parametrize(("right", "offered"), [("READ", False), ("STUDENT", True), ("INSTRUCTOR", True)])
def test_only_who_may_make_a_role_fail_is_told_to(tmp_path: Path, right: str, offered: bool) -> None:
    text = run_page(tmp_path, "board", LOOK + "it.show(picture); return look().say;", right, picture=picture_of("board", running_log()))
    assert text.startswith("All ") and ("make it fail" in text) is offered


def test_a_threshold_that_is_refused_says_why_beside_it(tmp_path: Path) -> None:
    """Also once the field has lost the keyboard, which a field that waits for its answer does."""
    sent, before, why, later, gone = run_page(tmp_path, "thresholds", """
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
""", picture=picture_of("thresholds", running_log()))  # fmt: skip
    assert sent == [["set_threshold", {"path": "rollout.no_tokens", "value": "0"}]] and before == "" and gone == ""
    assert why == ["rollout.no_tokens = 0: must be a finite time", "alert"] and later == why[0]


def test_how_failures_are_answered_changes_by_a_button_not_with_each_key(tmp_path: Path) -> None:
    keys, sent, kept, refused = run_page(tmp_path, "faults", """
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
""", picture=picture_of("faults", running_log()) | {"recovery": {"mode": "observe", "standbys": "warm"}})  # fmt: skip
    assert keys == [0, "full"], "arrow keys send nothing"
    assert sent == [["set_recovery", {"mode": "full", "standbys": "cold"}]]
    assert kept == ["full", "observe", 1] and refused == "observe"


def test_only_what_the_server_would_do_is_offered_for_a_fault(tmp_path: Path) -> None:
    """A student had a button that aborts the faults of others, and kills that were done."""
    log = Writer()
    for entry in running_log():
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
        shown, kinds, hidden, may_order, why = run_page(tmp_path, "faults", """
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
            off, told = run_page(tmp_path, "board", "it.show(picture);" + _DRAWER + """
const acts = it.root.find(".detail").find(".acts").children.filter((node) => node.tag === "button");
return [acts.map((node) => node.disabled), it.root.find(".detail").textContent.includes("One at a time: your fault #")];
""", right.name, viewer.me, picture=scene.picture("board", now), detail=detail | {"right": int(right)})  # fmt: skip
            assert off == 3 * [why] and told is why, "Kill, Hang and Inject in the drawer of a role"


def test_a_fault_is_ordered_with_a_length_that_the_server_offers(tmp_path: Path) -> None:
    """The board had a list of its own of faults that have a length, in which one was missing."""
    picture, detail = picture_of("board", running_log()), scene_of(running_log()).inspect("rollout-0")
    sent = run_page(tmp_path, "board", "it.show(picture);" + _DRAWER + """
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
    lengths = run_page(tmp_path, "faults", """
it.show(picture);
const choose = (label, value) => { const select = it.root.labelled(label); select.value = value; select.fire("change"); };
const length = () => it.root.labelled("seconds").value;
const lengths = [length()];
choose("fault", "freeze");
for (const role of ["rollout-0", "task_runner"]) { choose("role", role); lengths.push(length()); }
choose("fault", "slow");
return [...lengths, length()];
""", picture=picture_of("faults", running_log()))  # fmt: skip
    assert lengths == ["10", "2.7", "4.7", "10"]
