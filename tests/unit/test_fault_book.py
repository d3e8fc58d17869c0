"""The book of faults: each stage by what the log shows, whatever the order in which emitters reach it, and nothing by what it does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from story import Story

from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.core.fault_book import SURVIVED, FaultView, Seen
from robustrl.core.roles import RoleState
from robustrl.core.run_state import RunState
from robustrl.faults.catalogue import CATALOGUE
from robustrl.faults.handle import html_fault

KILLED = {"signal": "SIGKILL", "process": "gone", "ago": 0.01}


def plan(story: Story, t: float, kind: str = "kill", number: int = 1, **fields: Any) -> None:
    values = {"target": "rollout-0", "when": "now", "benign": False, "options": {}} | fields
    story.at(t, ev.FaultPlanned(fault=number, kind=kind, **values))


def hit(story: Story, t: float, role: str = "rollout-0", proof: dict[str, Any] = KILLED, number: int = 1, phase: str = "decode") -> None:
    life = story.life[role]
    story.at(t, ev.FaultInjected(fault=number, role=role, incarnation=life, node="node-0", pid=7, phase=phase, step=1, proof=proof))


def verdict(story: Story, t: float, role: str = "rollout-0", kind: str = "failed", rule: str = "exited") -> None:
    event = ev.Verdict(
        role=role,
        incarnation=story.life[role],
        kind=kind,
        rule=rule,
        evidence={"pid": 7, "cause": "pidfd"},
        threshold=0.0,
        due=t,
        seen=t,
        onset=t,
        blind_spot="",
    )
    story.at(t, event)


def book(story: Story, number: int = 1) -> FaultView:
    return RunState.of(story.entries).faults[number]


@pytest.mark.parametrize("offset", [0.0, 5.0, -5.0])
def test_a_verdict_that_came_while_the_proof_was_on_its_way_counts(offset: float) -> None:
    """Struck at 102.0, seen dead 10 ms later, said by an agent whose clock is ``offset`` off, and written 30 ms after that."""
    story = Story()
    plan(story, 101.0)
    for t, stamp in ((101.5, 101.5), (102.04, 102.01)):
        if t == 102.04:
            verdict(story, 102.02)
            hit(story, t)
        else:
            story.at(t, ev.WarningRaised(text="any word"))
        story.entries[-1] = msgspec.structs.replace(story.entries[-1], source="node_agent-0", at=stamp + offset)
    view = book(story)
    assert view.injected == pytest.approx(102.0)
    assert view.detected is not None and view.detected.delay == pytest.approx(0.02)


def test_a_kill_from_its_plan_to_its_confirmation() -> None:
    story = Story()
    plan(story, 101.0)
    assert book(story).stage == "planned"
    hit(story, 102.01)
    assert book(story).stage == "injected" and book(story).injected == pytest.approx(102.0)
    story.at(102.02, ev.ProcessExited(role="rollout-0", incarnation=1, pid=7, cause="pidfd", last_lines=[]))
    assert book(story).stage == "injected", "that it is gone is not yet a verdict"
    verdict(story, 102.05)
    view = book(story)
    assert view.stage == "detected" and view.detected is not None and view.detected.delay == pytest.approx(0.05)
    story.becomes(102.05, "rollout-0", RoleState.FAILED)
    story.starts(104.0, "rollout-0")
    story.ready(106.0, "rollout-0")
    assert book(story).stage == "recovered" and book(story).recovered == 106.0
    story.sample(106.5, "rollout-0", "decode", progress=0)
    assert book(story).stage == "recovered", "healthy and idle is no progress"
    story.sample(107.0, "rollout-0", "decode", progress=5)
    view = book(story)
    assert view.stage == "confirmed" and view.confirmed == 107.0 and view.settled
    row = view.row()
    assert (row["hit"], row["rule"], row["detected_s"], row["recovered_s"], row["confirmed_s"]) == ("rollout-0", "exited", 0.05, 4.0, 5.0)
    assert "confirmed +5.00 s" in html_fault(view) and "SIGKILL" in html_fault(view)


def test_what_is_logged_ahead_of_its_cause_counts_all_the_same() -> None:
    """The node agent reports the exit, and the supervisor its verdict, before the one who killed has written his proof."""
    story = Story()
    plan(story, 101.0)
    story.at(102.0, ev.ProcessExited(role="rollout-0", incarnation=1, pid=7, cause="pidfd", last_lines=[]))
    verdict(story, 102.005)
    hit(story, 102.01, proof=KILLED | {"ago": 0.011})
    view = book(story)
    assert view.stage == "detected" and view.detected is not None and view.detected.delay == pytest.approx(0.006)


def test_a_verdict_about_another_life_or_from_before_is_none_about_this_fault() -> None:
    story = Story()
    verdict(story, 100.5, kind="suspect", rule="no_tokens")
    plan(story, 101.0, kind="hang")
    hit(story, 102.0, proof={"process": "T"})
    verdict(story, 102.5, role="rollout-1")
    assert book(story).stage == "injected" and book(story).suspected is None
    verdict(story, 105.0, kind="suspect", rule="no_tokens")
    assert book(story).suspected is not None and book(story).stage == "injected"
    verdict(story, 108.0, rule="heartbeat")
    assert book(story).detected is not None and book(story).detected.rule == "heartbeat"  # type: ignore[union-attr]


def test_a_freeze_that_nobody_minds_is_over_and_settled() -> None:
    story = Story()
    plan(story, 101.0, kind="freeze", benign=True)
    hit(story, 102.0, proof={"process": "T"})
    story.at(103.0, ev.FaultEnded(fault=1, outcome="over", reason="it goes on"))
    view = book(story)
    assert view.settled and not view.false_alarm and view.stage == "injected" and view.outcome == "over"
    assert "nobody took it for a failure" in html_fault(view)
    verdict(story, 103.5, rule="no_tokens")
    assert book(story).false_alarm


@pytest.mark.parametrize("proof_first", [True, False])
def test_what_a_later_fault_does_to_the_same_life_is_not_put_down_to_one_that_is_over(proof_first: bool) -> None:
    """A healthy rollout had a benign disturbance behind it and was killed a moment later: no false alarm."""
    story = Story()
    plan(story, 101.0, kind="long_first_token", benign=True)
    hit(story, 102.0, proof={"held": "tokens"})
    verdict(story, 105.0, kind="suspect", rule="no_tokens")
    story.at(107.0, ev.FaultEnded(fault=1, outcome="over", reason="over after 5 s"))
    plan(story, 108.0, number=2)
    if proof_first:
        hit(story, 109.0, number=2, proof=KILLED | {"ago": 0.0})
    story.at(109.01, ev.ProcessExited(role="rollout-0", incarnation=1, pid=7, cause="pidfd", last_lines=[]))
    verdict(story, 109.02)
    if not proof_first:
        hit(story, 109.03, number=2, proof=KILLED | {"ago": 0.03})
    story.becomes(109.05, "rollout-0", RoleState.FAILED)
    story.starts(110.0, "rollout-0")
    story.ready(111.0, "rollout-0")
    benign, kill = book(story, 1), book(story, 2)
    assert not benign.false_alarm and benign.suspected is not None and benign.detected is None
    assert kill.detected is not None and kill.detected.delay == pytest.approx(0.02) and kill.recovered == 111.0


def test_a_hang_that_ends_in_time_is_confirmed_in_the_same_life() -> None:
    story = Story()
    plan(story, 101.0, kind="hang")
    hit(story, 102.0, proof={"process": "T"})
    verdict(story, 105.0, kind="suspect", rule="no_tokens")
    story.becomes(105.0, "rollout-0", RoleState.SUSPECT)
    story.at(106.0, ev.FaultEnded(fault=1, outcome="over", reason="it goes on"))
    assert not book(story).settled, "it was seen unhealthy: it has to come back"
    story.becomes(106.5, "rollout-0", RoleState.HEALTHY)
    for t, tokens in ((106.6, 3), (106.7, 9)):
        story.sample(t, "rollout-0", "decode", progress=tokens)
    assert book(story).confirmed == 106.7 and book(story).hits[0].life == 1


def hung_and_killed(kind: str = "hang", proof_first: bool = True, told_last: bool = False) -> Story:
    """At 102.0 it is stopped, at 102.5 it is killed; by 102.55 somebody has said so."""
    story = Story()
    plan(story, 101.0, kind=kind, benign=kind == "freeze")
    if not told_last:
        hit(story, 102.0, proof={"process": "T"})
    plan(story, 102.3, number=2)
    if proof_first:
        hit(story, 102.5, number=2, proof=KILLED | {"ago": 0.0})
    story.at(102.52, ev.ProcessExited(role="rollout-0", incarnation=1, pid=7, cause="pidfd", last_lines=[]))
    verdict(story, 102.55)
    if not proof_first:
        hit(story, 102.56, number=2, proof=KILLED | {"ago": 0.06})
    if told_last:
        hit(story, 102.57, proof={"process": "T", "ago": 0.57})
    story.becomes(102.6, "rollout-0", RoleState.FAILED)
    return story


@pytest.mark.parametrize("told_last", [False, True])
@pytest.mark.parametrize("proof_first", [False, True])
@pytest.mark.parametrize("kind", ["hang", "wedge", "slow", "corrupt_weights", "freeze"])
def test_that_a_process_ended_is_the_detection_of_the_fault_that_ended_it_alone(kind: str, proof_first: bool, told_last: bool) -> None:
    story = hung_and_killed(kind, proof_first, told_last)
    first, kill = book(story, 1), book(story, 2)
    assert kill.detected is not None and kill.detected.delay == pytest.approx(0.05)
    assert first.detected is None and first.settled and first.outcome == "vanished" and not first.false_alarm
    assert first.reason == f"rollout-0 incarnation 1 ended before it was {'over' if kind == 'freeze' else 'detected'}"
    story.starts(104.0, "rollout-0")
    story.ready(106.0, "rollout-0")
    for t, progress in ((106.5, 1), (107.0, 2)):
        story.sample(t, "rollout-0", "decode", progress)
    assert (book(story, 1).stage, book(story, 2).stage) == ("injected", "confirmed")
    assert f"vanished: {first.reason}" in html_fault(book(story, 1))


def test_a_hang_that_was_noticed_before_its_target_was_killed_is_detected() -> None:
    story = Story()
    plan(story, 101.0, kind="hang")
    hit(story, 102.0, proof={"process": "T"})
    verdict(story, 105.0, rule="no_tokens")
    plan(story, 105.0, number=2)
    hit(story, 105.1, number=2)
    story.exits(105.15, "rollout-0")
    hang, kill = book(story, 1), book(story, 2)
    assert hang.detected is not None and hang.detected.rule == "no_tokens" and not hang.outcome
    assert kill.settled and kill.reason == "rollout-0 incarnation 1 was called failed before it struck"


@pytest.mark.parametrize("kind", ["kill", "hang", "corrupt_weights"])
def test_a_fault_that_strikes_who_is_to_be_replaced_anyway_does_not_wait_for_a_verdict(kind: str) -> None:
    """All roles are restarted owing to another one, and the process has not been ended yet."""
    story = Story()
    plan(story, 101.0, kind=kind)
    story.restart(102.0, "rollout-0", mode="full")
    hit(story, 102.1, proof=KILLED)
    story.exits(102.2, "rollout-0")
    story.starts(104.0, "rollout-0")
    story.ready(106.0, "rollout-0")
    view = book(story)
    assert view.settled and (view.stage, view.reason) == ("injected", "rollout-0 incarnation 1 was to be replaced before it struck")


def test_the_host_sees_a_dead_supervisor_and_no_hang_of_it() -> None:
    story = Story()
    for number, kind, proof in ((1, "hang", {"process": "T"}), (2, "kill", KILLED)):
        plan(story, 101.0, kind=kind, number=number, target="supervisor")
        hit(story, 102.0, "supervisor", proof, number, phase="idle")
    story.at(102.02, ev.ProcessExited(role="supervisor", incarnation=1, pid=7, cause="Ray: ActorDiedError", last_lines=[]))
    assert book(story, 1).detected is None and book(story, 1).settled
    assert book(story, 2).detected is not None and book(story, 2).detected.rule == "exit seen by the host"  # type: ignore[union-attr]


def test_what_outlives_its_target_or_was_only_told_late_is_detected_after_all() -> None:
    damaged, hung = hung_and_killed("corrupt_weights"), hung_and_killed()
    damaged.at(103.0, ev.PullDiscarded(target="rollout-1", version=3, bytes=10, reason="chunk 0: checksum 1, the manifest says 2"))
    verdict(hung, 102.7, rule="no_tokens")
    for story, rule in ((damaged, "checksum of a chunk"), (hung, "no_tokens")):
        view = book(story)
        assert view.detected is not None and view.detected.rule == rule and not view.outcome and not view.settled


def test_what_a_run_ends_with_was_not_ended_by_something_else() -> None:
    story = Story()
    plan(story, 101.0, kind="hang")
    hit(story, 102.0, proof={"process": "T"})
    story.ends(110.0)
    story.at(110.5, ev.ProcessExited(role="rollout-0", incarnation=1, pid=7, cause="pidfd", last_lines=[]))
    assert not book(story).outcome and not book(story).settled


@pytest.mark.parametrize("benign_first", [True, False])
def test_what_a_disturbance_and_a_fault_lead_to_together_is_no_false_alarm(benign_first: bool) -> None:
    story = Story()
    for number, (kind, t) in enumerate((("freeze", 102.0), ("hang", 102.1)) if benign_first else (("hang", 102.0), ("freeze", 102.1)), 1):
        plan(story, 101.0, kind=kind, number=number, benign=kind == "freeze")
        hit(story, t, proof={"process": "T"}, number=number)
    verdict(story, 105.0, kind="suspect", rule="no_tokens")
    verdict(story, 106.0, rule="no_tokens")
    views = {view.kind: view for view in (book(story, 1), book(story, 2))}
    assert views["hang"].detected is not None and views["freeze"].detected is views["freeze"].suspected is None


@pytest.mark.parametrize("kind", SURVIVED)
def test_what_its_target_survives_is_not_recovered_from_with_the_fault_that_ended_it(kind: str) -> None:
    story = Story()
    for number, fault in ((1, kind), (2, "hang")):
        plan(story, 101.0, kind=fault, number=number)
        hit(story, 101.0 + number, proof={"process": "T"}, number=number)
    verdict(story, 105.0, kind="suspect", rule="no_tokens")
    story.becomes(105.0, "rollout-0", RoleState.SUSPECT)
    verdict(story, 106.0, rule="heartbeat")
    story.exits(106.1, "rollout-0")
    story.at(106.2, ev.FaultEnded(fault=1, outcome="over", reason="its 4 s are over"))
    story.starts(108.0, "rollout-0")
    story.ready(109.0, "rollout-0")
    for t, progress in ((109.5, 1), (110.0, 2)):
        story.sample(t, "rollout-0", "decode", progress)
    assert (book(story, 1).stage, book(story, 1).outcome) == ("injected", "over")
    assert book(story, 2).stage == "confirmed" and book(story, 1).settled and book(story, 2).settled


@pytest.mark.parametrize(("kind", "seen"), [("hang", False), ("wedge", False), ("kill", False), ("slow", True), ("corrupt_weights", True)])
def test_what_is_only_reported_is_the_detection_of_a_fault_that_its_target_survives(kind: str, seen: bool) -> None:
    story = Story()
    plan(story, 101.0, kind)
    hit(story, 101.1)
    verdict(story, 101.2, kind="reported", rule="straggler")
    assert (book(story).detected is not None) is seen
    verdict(story, 106.1, rule="no_tokens")
    assert book(story).detected == Seen(106.1, "rollout-0", 1, "failed", "no_tokens", pytest.approx(5.0, abs=0.02))


def test_the_kinds_that_are_survived_are_the_catalogues() -> None:
    assert set(SURVIVED) == {kind for kind, fault in CATALOGUE.items() if not fault.disabling and not fault.benign}


def test_a_target_that_fails_again_before_it_has_made_progress_is_to_recover_once_more() -> None:
    story = Story()
    plan(story, 101.0)
    hit(story, 101.1)
    story.exits(101.1, "rollout-0")
    story.starts(103.0, "rollout-0")
    story.ready(104.0, "rollout-0", healthy=105.0)
    assert book(story).stage == "recovered"
    story.exits(105.1, "rollout-0")
    assert book(story).recovered is None and not book(story).settled
    story.starts(107.0, "rollout-0")
    story.ready(108.0, "rollout-0", healthy=109.0)
    for t, progress in ((109.5, 1), (110.0, 2)):
        story.sample(t, "rollout-0", "decode", progress)
    assert (book(story).recovered, book(story).confirmed, book(story).settled) == (109.0, 110.0, True)


@pytest.mark.parametrize("outcome", ["refused", "aborted", "vanished", "not_fired"])
def test_one_that_never_fired_is_settled(outcome: str) -> None:
    story = Story()
    plan(story, 101.0)
    story.at(102.0, ev.FaultEnded(fault=1, outcome=outcome, reason="because"))
    view = book(story)
    assert view.settled and view.stage == "planned" and view.row()["outcome"] == outcome and "because" in html_fault(view)


def test_a_hidden_one_shows_nothing_until_it_is_revealed() -> None:
    story = Story()
    plan(story, 101.0, hidden=True)
    hit(story, 102.0)
    row = book(story).row()
    assert row["fault"] == 1 and {row["kind"], row["target"], row["stage"]} == {"hidden"} and "hit" not in row
    assert "kill" not in html_fault(book(story)) and "rollout" not in html_fault(book(story))
    story.at(110.0, ev.FaultRevealed(fault=1, guess="a hang of rollout-0"))
    assert book(story).row()["kind"] == "kill" and book(story).guess == "a hang of rollout-0"


def test_a_supervisor_cannot_judge_its_own_death_and_a_node_agent_shows_progress_by_its_samples() -> None:
    story = Story((*("supervisor", "trainer-0", "rollout-0", "rollout-1"), "node_agent-0"))
    plan(story, 101.0, target="supervisor")
    hit(story, 102.0, role="supervisor")
    story.at(102.02, ev.ProcessExited(role="supervisor", incarnation=1, pid=7, cause="Ray: ActorDiedError", last_lines=[]))
    detected = book(story).detected
    assert detected is not None and detected.rule == "exit seen by the host"
    plan(story, 103.0, number=2, target="node_agent-0")
    hit(story, 104.0, role="node_agent-0", number=2)
    story.exits(104.1, "node_agent-0")
    story.starts(105.0, "node_agent-0")
    story.ready(106.0, "node_agent-0")
    sample = ev.RoleSample(role="rollout-0", incarnation=1, phase="decode", progress=1, pending=1, step=0, version=0, loop_age=0.0, cpu=0.0)
    story.at(106.1, sample, source="node_agent-0", incarnation=1)
    assert book(story, 2).confirmed is None, "a former life's late word"
    story.at(106.2, sample, source="node_agent-0", incarnation=2)
    assert book(story, 2).confirmed == 106.2


def test_damaged_weights_are_seen_by_who_pulls_them() -> None:
    story = Story()
    plan(story, 101.0, kind="corrupt_weights")
    hit(story, 102.0, proof={"bytes": 64})
    story.at(103.0, ev.PullDiscarded(target="rollout-1", version=3, bytes=10, reason="chunk 0: checksum 1, the manifest says 2"))
    view = book(story)
    assert view.detected is not None and view.detected.kind == "reported" and view.stage == "detected"
    pull = ev.PullCommitted(source="state_keeper-0", target="rollout-1", incarnation=1, version=3, digest="d", bytes=1, seconds=0.1,
                            commit_seconds=0.1, transport="shm", lag=1, probe_gap=0.0, address="")  # fmt: skip
    story.at(104.0, pull)
    assert book(story).confirmed == 104.0


# -- the audit -


def findings(story: Story, *rules: str) -> list[str]:
    return [finding.text for finding in audit(story.entries) if finding.rule in (rules or ("faults", "verdicts"))]


def killed(t: float = 102.0) -> Story:
    story = Story()
    plan(story, 101.0)
    hit(story, t)
    story.at(t + 0.02, ev.ProcessExited(role="rollout-0", incarnation=1, pid=7, cause="pidfd", last_lines=[]))
    verdict(story, t + 0.05)
    return story


def test_a_run_whose_faults_fired_passes() -> None:
    story = killed()
    story.ends(150.0)
    assert findings(story) == []


def test_what_a_fault_claims_and_the_log_does_not_show() -> None:
    story = Story()
    for number, (kind, proof, phase) in enumerate(
        [("kill", {"process": "S"}, "decode"), ("hang", {"process": "S"}, "decode"), ("wedge", {}, "decode")], 1
    ):
        plan(story, 101.0, kind=kind, number=number)
        hit(story, 102.0, number=number, proof=proof, phase=phase)
    plan(story, 103.0, kind="hang", number=4, options={"phase": "pull"})
    hit(story, 104.0, number=4, proof={"process": "T"})
    plan(story, 105.0, number=5)
    plan(story, 106.0, number=7)
    story.at(107.0, ev.FaultEnded(fault=7, outcome="not_fired", reason="it did not"))
    story.at(108.0, ev.FaultEnded(fault=9, outcome="over", reason=""))
    story.ends(150.0)
    text = "\n".join(findings(story))
    for part in (
        "fault 1 (kill) on rollout-0 incarnation 1 has no proof",
        "fault 1 (kill) on rollout-0 incarnation 1: the log knows of no end of that process",
        "fault 2 (hang) on rollout-0 incarnation 1 has no proof",
        "fault 3 (wedge) on rollout-0 incarnation 1 has no proof",
        "fault 4 (hang) on rollout-0 incarnation 1 was meant for the phase pull and struck in decode",
        "fault 5 (kill) was ordered, and the log does not say what became of it",
        "fault 7 was planned after fault 5",
        "fault 7 did not fire: it did not",
        "fault 9 was never planned",
    ):
        assert part in text


@pytest.mark.parametrize("status, named", [("done", True), ("stopped", False), ("failed", False)])
def test_in_a_run_that_is_done_a_fault_whose_target_vanished_did_not_fire(status: str, named: bool) -> None:
    story = Story()
    plan(story, 101.0)
    story.at(107.0, ev.FaultEnded(fault=1, outcome="vanished", reason="rollout-0 incarnation 1 ended before it struck"))
    story.ends(150.0, status)
    assert findings(story) == ["fault 1 did not fire: rollout-0 incarnation 1 ended before it struck"] * named


def lasting(kind: str = "hang", seconds: float = 5.0, ends: float = 150.0, role: str = "rollout-0") -> Story:
    story = Story()
    plan(story, 101.0, kind=kind, options={"seconds": seconds}, target=role, benign=kind == "idle_rollout")
    hit(story, 102.0, role, {"signal": "SIGSTOP", "process": "T", "ago": 0.0, "held": "requests"})
    story.ends(ends)
    return story


def test_a_fault_for_a_time_has_an_end() -> None:
    assert findings(lasting()) == ["fault 1 (hang) on rollout-0 incarnation 1 was to last 5 s, and the log knows of no end of it"]
    assert findings(lasting(seconds=0.0)) == findings(lasting(ends=110.0)) == [], "for good, and the run was over before"
    assert "fault 1 (idle_rollout) on rollout-0 incarnation 1 was to last 5 s" in findings(lasting("idle_rollout"))[0]
    gone, over = lasting(ends=149.0), lasting(ends=149.0)
    gone.exits(103.0, "rollout-0")
    over.at(107.0, ev.FaultEnded(fault=1, outcome="over", reason=""))
    assert findings(gone) == findings(over) == []


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"node": "node-7"}, "struck on node-7, and that life is on node-0"),
        ({"step": 999}, "struck in step 999, which had not come"),
        ({"step": -1}, "struck in step -1, which had not come"),
        ({"incarnation": 4}, "hit pid 7, which is not that life's"),
    ],
)
def test_where_and_in_which_step_a_fault_struck(changes: dict[str, Any], text: str) -> None:
    story = killed()
    i = next(i for i, entry in enumerate(story.entries) if isinstance(entry.event, ev.FaultInjected))
    story.entries[i] = msgspec.structs.replace(story.entries[i], event=msgspec.structs.replace(story.entries[i].event, **changes))
    assert any(text in found for found in findings(story))


@pytest.mark.parametrize(
    "kind, rule, evidence",
    [
        ("failed", "silent", {}),
        ("suspect", "no_tokens", {}),
        ("reported", "loop_lag", {}),
        ("cleared", "no_tokens", {}),
        ("waiting_on_peer", "no_compute", {}),
        ("failed", "exited", {"pid": 7}),
        ("failed", "exited", {"pid": 7, "cause": ""}),
        ("suspect", "no_tokens", {"x": 1}),
        ("cleared", "no_tokens", {"was": None}),
        ("waiting_on_peer", "no_compute", {"peer": "", "active_age": 3.0}),
    ],
)
def test_each_verdict_has_evidence_that_says_something(kind: str, rule: str, evidence: dict[str, Any]) -> None:
    story = killed(110.0)
    verdict(story, 102.0, kind=kind, rule=rule)
    last = story.entries[-1]
    story.entries[-1] = msgspec.structs.replace(last, event=msgspec.structs.replace(last.event, evidence=evidence))
    assert any(f"{kind} by rule {rule}, about rollout-0 incarnation 1: without evidence" in found for found in findings(story))


def test_a_fault_just_before_the_end_may_lack_its_effect_but_not_its_proof() -> None:
    story = Story()
    plan(story, 101.0)
    hit(story, 102.0)
    story.ends(103.0, "stopped")
    assert findings(story) == []


def test_a_verdict_without_a_cause_or_evidence_or_out_of_order() -> None:
    story = Story()
    verdict(story, 102.0)
    event = ev.Verdict(
        role="rollout-1",
        incarnation=1,
        kind="failed",
        rule="silent",
        evidence={},
        threshold=0.0,
        due=103.0,
        seen=102.5,
        onset=101.0,
        blind_spot="",
    )
    story.at(103.0, event)
    verdict(story, 104.0, role="trainer-0", kind="doomed", rule="silent")
    text = "\n".join(findings(story, "verdicts"))
    assert "by rule exited, about rollout-0 incarnation 1: the log does not hold what it rests on" in text
    assert "by rule silent, about rollout-1 incarnation 1: without evidence" in text and "out of order" in text
    assert "doomed by rule silent" in text
