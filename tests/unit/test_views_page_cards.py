"""What the cards of the roles and the words beside them tell of failures, restarts, pulls and of what was done on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_log import Writer, made_log
from robustrl_widgets import lanes
from view_page import NODE, at_its_end, picture_of, run_page, running_log, scene_of
from views_log import back, continued, failing_log, full_restart

from robustrl.core import events as ev

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node, to run the pages' code")


def test_a_finished_board_keeps_no_word_of_a_pull(tmp_path: Path) -> None:
    running = picture_of("board", running_log())
    assert any(pull["to"] == "rollout-0" for pull in running["pulls"].values())
    before, after, arrows = run_page(tmp_path, "board", """
const words = () => it.root.querySelectorAll(".wire").map((wire) => wire.textContent).join("");
it.show(running);
const before = words();
it.show(done, 0);
return [before, words(), it.root.find(".pulls").children.length];
""", running=running, done=picture_of("board", made_log()))  # fmt: skip
    assert "from" in before and after.strip("\u00a0") == "" and arrows == 0


def test_after_a_jump_in_a_recording_no_card_tells_of_a_pull_that_is_not_where_the_role_is(tmp_path: Path) -> None:
    running = picture_of("board", running_log())
    role = running["roles"]["rollout-0"]
    pull = max((pull for pull in running["pulls"].values() if pull["to"] == "rollout-0"), key=lambda pull: pull["t"])
    kept, behind, earlier, live, arrows = run_page(tmp_path, "board", """
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


@pytest.mark.parametrize("suspected", [False, True])
def test_where_a_log_breaks_off_no_stage_on_a_card_reads_as_running(tmp_path: Path, suspected: bool) -> None:
    log, role = (failing_log(), "rollout-1") if not suspected else (_suspecting(), "rollout-0")
    running, ended, lost = run_page(tmp_path, "board", """
const card = () => it.root.all((node) => (node.attributes["aria-label"] ?? "").startsWith(`${role},`))[0];
const look = () => [card().find(".stages").textContent, card().querySelectorAll(".on").length];
it.show(running);
const found = [look()];
for (const picture of [broken, lost]) { it.show(picture, 0); page.pass(2); found.push(look()); }
return found;
""", role=role, running=picture_of("board", log), broken=at_its_end("board", log), lost=picture_of("board", log, "so"))  # fmt: skip
    assert "\u2026" in running[0] and running[1] == 1
    for words, on in (ended, lost):
        assert "\u2026" not in words and "not over" in words and on == 0


def _suspecting() -> list[ev.Entry]:
    log = Writer()
    for entry in running_log():
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
    say, mine, others = run_page(tmp_path, "board", """
const card = (role) => it.root.all((node) => (node.attributes["aria-label"] ?? "").startsWith(`${role},`))[0];
const stages = (role) => card(role).find(".stages").children.map((box) => box.className.split(" ")[0]);
const look = (role) => [stages(role), card(role).textContent, card(role).className];
it.show(picture);
return [it.root.find(".say").textContent, look("trainer-0"), look("rollout-0")];
""", picture=picture_of("board", log[:begun]))  # fmt: skip
    assert mine[0] == ["detect", "restart", "reconnect"] and "rule exited" in mine[1] and " bad" in mine[2]
    assert others[0] == ["restart", "reconnect"] and "because of trainer-0" in others[1]
    assert "rule" not in others[1] and " bad" not in others[2]
    count = len(picture_of("board", log[:begun])["head"]["ill"]) - 1
    assert say.startswith(f"trainer-0 failed and is restarted; {count} roles are started anew because of it")


def test_the_word_on_a_card_in_a_full_restart_is_what_is_the_case(tmp_path: Path) -> None:
    """Who was ended on purpose read "failed", and who was about to be ended, or already back, "healthy"."""
    log = full_restart()

    def after(place: int) -> dict[str, Any]:
        return picture_of("board", log[: place + 1])

    decided = max(place for place, entry in enumerate(log) if isinstance(entry.event, ev.RestartDecided))
    ended, begun, back_again = (
        next(place for place, entry in enumerate(log) if isinstance(entry.event, kind) and entry.event.role == "rollout-0"
             and getattr(entry.event, "incarnation", 0) == life and getattr(entry.event, "new", new) == new)
        for kind, life, new in ((ev.RoleStateChanged, 1, "failed"), (ev.RoleStarted, 2, ""), (ev.RoleStateChanged, 2, "healthy")))
    words = run_page(tmp_path, "board", """
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
    trainer = picture_of("board", first.entries)["roles"]["trainer-0"]
    assert trainer["word"] == "waits for the others" and trainer["stages"]["on"] == "restart"


def test_a_role_that_is_added_is_told_of_and_is_well_when_it_takes_part(tmp_path: Path) -> None:
    log = Writer()
    for entry in running_log():
        log.write(entry.source, entry.event)
    count, pictures = len(picture_of("board", log.entries)["roles"]), []
    log.write("host", ev.RoleStarted(role="rollout-2", incarnation=1, node="node-0", pid=77, start_ticks=7))
    pictures.append(picture_of("board", log.entries))
    log.write("rollout-2", ev.RoleReady(role="rollout-2", incarnation=1, seconds=0.5))
    log.write("supervisor", ev.RoleStateChanged(role="rollout-2", incarnation=1, old="starting", new="stale", reason="ready"))
    pictures.append(picture_of("board", log.entries))
    log.write("supervisor", ev.RoleStateChanged(role="rollout-2", incarnation=1, old="stale", new="healthy", reason="version committed"))
    pictures.append(picture_of("board", log.entries))
    started, stale, well = run_page(tmp_path, "board", """
return pictures.map((picture) => { it.show(picture); return [it.root.find(".say").textContent, it.root.find(".story").textContent]; });
""", pictures=pictures)  # fmt: skip
    for say, story in (started, stale):
        assert say.startswith(f"rollout-2 is starting. The other {count} roles go on.")
        assert "rollout-2 joins: its process is started." in story
    assert well[0].startswith(f"All {count + 1} roles are well.") and "rollout-2 takes part now." in well[1]


@pytest.mark.parametrize("drained", [True, False])
def test_what_is_ended_on_purpose_is_no_failure(tmp_path: Path, drained: bool) -> None:
    log, pictures = Writer(), []
    for entry in running_log():
        log.write(entry.source, entry.event)
    count, now = len(picture_of("board", log.entries)["roles"]), {"role": "rollout-1", "incarnation": 1}

    def then(source: str, *events: ev.Event) -> None:
        for event in events:
            log.write(source, event)
        pictures.append(picture_of("board", log.entries))

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
    shown = run_page(tmp_path, "board", """
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
    assert not scene_of(log.entries).doubts, "the log is a possible one"
    assert lanes.DETECT not in [bar.code for bar in scene_of(log.entries).lanes.lanes["rollout-1"].bars]


def test_while_there_are_few_steps_it_is_said_that_effective_training_time_says_little(tmp_path: Path) -> None:
    picture = picture_of("metrics", running_log())
    before, after = run_page(tmp_path, "metrics", """
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
    told, well = run_page(tmp_path, "recovery", """
const look = () => it.root.find(".report").find("h3") ?? it.root.find(".report").children[0];
it.show(ended);
const told = look().textContent;
it.show(back);
return [told, look().textContent];
""", ended=picture_of("recovery", log), back=picture_of("recovery", back(failing_log())))  # fmt: skip
    assert told.startswith("rollout-1: not recovered when the job ended") and well.startswith("rollout-1: back after ")
