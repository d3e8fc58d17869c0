"""What the proof of each kind of fault must show, and logs in which the rest says that it was not done."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from robustrl.core import events as ev
from robustrl.core.audit_faults import faults, verdicts
from robustrl.core.audit_log import Log
from robustrl.core.audit_proofs import BENIGN, PROOFS, lacks
from robustrl.faults.catalogue import CATALOGUE

KILLED = {"signal": "SIGKILL", "process": "gone", "ago": 0.1}
STOPPED = {"signal": "SIGSTOP", "process": "T", "ago": 0.001}
INSIDE = {"thread": "engine", "place": "decode"}
GOOD: dict[str, dict[str, Any]] = {
    "kill": KILLED, "node_loss": KILLED | {"raylet": 9, "processes": 3, "removed": []}, "hang": STOPPED, "freeze": STOPPED,
    "partition": {"link": "node1", "answers": False, "ago": 0.2}, "delay": {"link": "node1", "milliseconds": 5.0, "ago": 0.2},
    "slow": STOPPED | {"share": 0.5, "period": 0.2}, "wedge": INSIDE | {"busy": True}, "exception": INSIDE | {"raised": "InjectedError"},
    "memory_exhaustion": {"thread": "engine", "limit": 9, "allocated": 0, "raised": "MemoryError"}, "clean_exit": INSIDE | {"exit": 0},
    "corrupt_weights": {"bytes": 64, "at": 100, "of": 200}, "corrupt_snapshot": {"bytes": 64, "at": 0, "of": 64},
    "full_disk": {"full": 65536, "folder": "checkpoints", "thread": "writer"}, "long_first_token": {"held": "tokens"},
    "idle_rollout": {"held": "requests"}, "slow_tool": {"thread": "a", "place": "tool", "seconds": 3.0},
    "long_advantage": {"thread": "a", "place": "advantage", "seconds": 3.0},
    "long_checkpoint": {"thread": "a", "place": "snapshot", "seconds": 3.0}, "first_compile": INSIDE | {"seconds": 3.0},
}  # fmt: skip
OPTIONS = {"share": 0.5, "period": 0.2, "busy": True, "milliseconds": 5.0, "seconds": 3.0}


def plan(kind: str, **options: Any) -> ev.FaultPlanned:
    return ev.FaultPlanned(fault=1, kind=kind, target="rollout-0", when="now", benign=kind in BENIGN, options={"fault": kind} | options)


def test_each_kind_has_its_proof() -> None:
    assert set(PROOFS) == set(GOOD) == set(CATALOGUE)
    assert set(BENIGN) == {kind for kind, fault in CATALOGUE.items() if fault.benign}


@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_fault_is_of_a_kind_that_there_is_and_benign_as_that_is(kind: str) -> None:
    order = plan(kind)
    assert found((1.0, order), (2.0, over("refused"))) == []
    [text] = found((1.0, msgspec.structs.replace(order, benign=not order.benign)), (2.0, over("refused")))
    assert f"fault 1 ({kind}) was planned as" in text
    [text] = found((1.0, msgspec.structs.replace(order, kind="zap")), (2.0, over("refused")))
    assert "fault 1 is of the kind 'zap': must be one of kill, " in text


@pytest.mark.parametrize("kind", GOOD)
def test_a_proof_without_a_field_or_with_one_that_shows_nothing_is_none(kind: str) -> None:
    order = plan(kind, **OPTIONS)
    assert lacks(order, GOOD[kind]) == ""
    for field in PROOFS[kind]:
        for odd in (None, "", [], {}, -1, float("nan"), float("inf"), 10**400, "R", "sleeping"):
            found = lacks(order, GOOD[kind] | {field: odd})
            if field in ("thread", "place", "raised", "folder", "link") and odd in ("R", "sleeping") and not found:
                continue  # any name will do
            assert found.startswith(f"{field} = "), (field, odd)
        assert lacks(order, {name: value for name, value in GOOD[kind].items() if name != field})
    for other, proof in GOOD.items():
        if not PROOFS[kind].keys() <= proof.keys():
            assert lacks(order, proof), f"the proof of {other} is none of {kind}"


def test_a_proof_that_is_of_another_order_or_lies_outside_is_none() -> None:
    assert lacks(plan("slow", share=0.2), GOOD["slow"]) == "share = 0.5, and 0.2 was asked for"
    assert lacks(plan("wedge", busy=False), GOOD["wedge"]) == "busy = True, and False was asked for"
    assert lacks(plan("slow_tool", seconds=9.0), GOOD["slow_tool"]) == "seconds = 3.0, and 9.0 was asked for"
    assert lacks(plan("corrupt_weights"), {"bytes": 64, "at": 190, "of": 200}) == "64 bytes at 190 of 200"


def told(kind: str, *later: tuple[float, ev.Event], **options: Any) -> list[str]:
    """A fault on rollout-0 at 10 s, and what is said after."""
    words: list[tuple[float, ev.Event]] = [
        (0.0, ev.RoleStarted(role="rollout-0", incarnation=1, node="node-0", pid=7, start_ticks=1)),
        (9.0, plan(kind, **options)),
        (10.0, ev.FaultInjected(fault=1, role="rollout-0", incarnation=1, node="node-0", pid=7, phase="decode", step=0, proof=GOOD[kind])),
        *later,
    ]
    entries = [ev.Entry(i, t, ev.HOST, 1, i, t, event) for i, (t, event) in enumerate(words, 1)]
    return [text for _, text in faults(Log(entries))]


def sample(progress: int, process: str = "T") -> ev.RoleSample:
    return ev.RoleSample(role="rollout-0", incarnation=1, phase="decode", phase_age=1.0, progress=progress, pending=2, step=0, version=0,
                         loop_age=1.0, lag=1.0, cpu=0.0, process=process)  # fmt: skip


def ended(pid: int = 7) -> ev.ProcessExited:
    return ev.ProcessExited(role="rollout-0", incarnation=1, pid=pid, cause="pidfd", last_lines=[])


def over(outcome: str = "over") -> ev.FaultEnded:
    return ev.FaultEnded(fault=1, outcome=outcome, reason="so")


@pytest.mark.parametrize("kind", ["hang", "freeze", "wedge"])
def test_what_was_to_stand_still_and_went_on_was_not_hit(kind: str) -> None:
    process = "R" if kind == "wedge" else "T"
    assert told(kind, (13.0, sample(5, process)), (15.0, sample(5, process)), seconds=0.0) == []
    [text] = told(kind, (13.0, sample(5, process)), (15.0, sample(6, process)), seconds=0.0)
    assert "made progress all the same, from 5 to 6" in text
    assert told(kind, (11.0, sample(4, process)), (13.0, sample(5, process)), seconds=0.0) == [], "the first may be from before"
    assert told(kind, (13.0, sample(5, process)), (14.0, over("aborted")), (15.0, sample(6, "S")), seconds=0.0) == []
    assert told(kind, (13.0, sample(5, process)), (20.0, sample(6, "S")), (21.0, over()), seconds=9.0) == []
    if kind != "wedge":
        [text] = told(kind, (13.0, sample(5, "S")), seconds=0.0)
        assert "was seen later in the state 'S'" in text


def test_a_death_is_that_processs_and_comes_after() -> None:
    assert told("kill", (10.1, ended())) == []
    assert "the process that ended had pid 8" in told("kill", (10.1, ended(8)))[0]
    words = [(0.0, ev.RoleStarted(role="rollout-0", incarnation=1, node="node-0", pid=7, start_ticks=1)), (1.0, ended())]
    late = ev.FaultInjected(fault=1, role="rollout-0", incarnation=1, node="node-0", pid=7, phase="decode", step=0, proof=GOOD["kill"])
    entries = [ev.Entry(i, t, ev.HOST, 1, i, t, e) for i, (t, e) in enumerate([*words, (9.0, plan("kill")), (10.0, late)], 1)]
    assert any("had ended 8.9 s before" in text for _, text in faults(Log(entries)))


def test_what_is_over_before_its_time_did_not_last() -> None:
    assert told("freeze", (12.9, over()), seconds=3.0) == []
    assert "was over after 1.00 s; it was to last 3 s" in told("freeze", (11.0, over()), seconds=3.0)[0]
    assert told("freeze", (11.0, over("aborted")), seconds=3.0) == []


HIT = ev.FaultInjected(fault=1, role="rollout-0", incarnation=1, node="node-0", pid=7, phase="decode", step=0, proof=GOOD["freeze"])
BORN = ev.RoleStarted(role="rollout-0", incarnation=1, node="node-0", pid=7, start_ticks=1)


def found(*words: tuple[float, ev.Event]) -> list[str]:
    return [text for _, text in faults(Log([ev.Entry(i, t, ev.HOST, 1, i, t, event) for i, (t, event) in enumerate(words, 1)]))]


@pytest.mark.parametrize("word", [HIT, over("refused")])
def test_nothing_becomes_of_a_fault_before_it_was_planned(word: ev.Event) -> None:
    order = plan("freeze", seconds=3.0)
    assert found((0.0, BORN), (9.0, order), (10.0, word)) == []
    assert "fault 1 was not planned by then" in found((0.0, BORN), (9.0, word), (10.0, order))
    assert found((0.0, BORN), (9.0, word))[0] == "fault 1 was never planned"


@pytest.mark.parametrize("phase", ["", "zz", "train", "running"])
def test_a_fault_strikes_in_a_phase_of_its_target(phase: str) -> None:
    [text] = found((0.0, BORN), (9.0, plan("freeze", seconds=3.0)), (10.0, msgspec.structs.replace(HIT, phase=phase)))
    assert f"struck in {phase!r}; its phases are decode, prefill, pull" in text


def test_what_lasts_for_a_time_has_its_end_in_the_log_unless_its_target_ended_before() -> None:
    done = ev.RunEnded(status="done", reason="", wall=0.0)
    words = [(0.0, BORN), (9.0, plan("freeze", seconds=3.0)), (10.0, HIT)]
    assert found(*words, (11.0, ended()), (60.0, done)) == []
    assert found(*words, (13.1, over()), (40.0, ended()), (60.0, done)) == []
    assert "the log knows of no end of it" in found(*words, (40.0, ended()), (60.0, done))[0]
    assert "the log knows of no end of it" in found(*words, (40.0, ev.NodeLost(node="node-0", reason="r")), (60.0, done))[0]


def verdict(kind: str, rule: str, **evidence: Any) -> ev.Verdict:
    return ev.Verdict(role="rollout-0", incarnation=1, kind=kind, rule=rule, evidence=evidence, threshold=1.0, due=5.0, seen=5.0, onset=4.0,
                      blind_spot="b")  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "name", "good"), [("exited", "cause", "pidfd"), ("silent", "loop_age", 3.0), ("slow_checkpoint", "last_on_disk", 0)]
)
def test_evidence_is_of_its_kind(rule: str, name: str, good: Any) -> None:
    def said(value: Any) -> list[str]:
        words = [BORN, verdict("reported", rule, **{name: value})]
        return [text for _, text in verdicts(Log([ev.Entry(i, 6.0, "supervisor", 1, i, 6.0, word) for i, word in enumerate(words, 1)]))]

    assert said(good) == []
    for odd in (None, "", [], {}, True, float("nan"), float("inf"), 10**400, 5 if isinstance(good, str) else "5"):
        assert said(odd) and f"without evidence ({name})" in said(odd)[0], odd


def test_only_what_was_said_is_cleared() -> None:
    def said(*events: ev.Verdict) -> list[str]:
        words: list[ev.Event] = [BORN, *events]
        return [text for _, text in verdicts(Log([ev.Entry(i, 6.0, "supervisor", 1, i, 6.0, word) for i, word in enumerate(words, 1)]))]

    suspect, cleared = verdict("suspect", "no_tokens", progress_age=3.0), verdict("cleared", "no_tokens", was="suspect")
    assert said(suspect, cleared) == []
    for words in ([cleared], [cleared, suspect], [verdict("suspect", "wedged", loop_age=3.0), cleared],
                  [verdict("reported", "no_tokens", progress_age=3.0), cleared]):  # fmt: skip
        assert "that it was suspect by that rule was not said before" in said(*words)[0]
    assert said(verdict("cleared", "no_tokens", was=["suspect"])) != []


def test_times_that_are_none_are_out_of_order() -> None:
    nan = msgspec.structs.replace(verdict("reported", "exited", cause="c"), due=float("nan"))
    entries = [ev.Entry(1, 1.0, ev.HOST, 1, 1, 1.0, BORN), ev.Entry(2, 6.0, "supervisor", 1, 1, 6.0, nan)]
    assert any("out of order" in text for _, text in verdicts(Log(entries)))
