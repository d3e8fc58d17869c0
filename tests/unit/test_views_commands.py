"""Whatever a page sends is answered: all verbs with odd values, against a job whose host's messages are really encoded."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from robustrl_widgets import commands
from robustrl_widgets.commands import Commander, Refused, Right, whole
from robustrl_widgets.faults import can_be_called_off, catalogue, fitting, longest
from robustrl_widgets.feed import Feed
from robustrl_widgets.sources import LiveRun, RecordedRun
from robustrl_widgets.tuner import Tuner
from test_injecting import Host
from views_log import FakeJob, back, failing_log

from robustrl.core import events as ev
from robustrl.core.roles import SINGLE, RoleKind
from robustrl.core.thresholds import Thresholds
from robustrl.errors import RobustRLError
from robustrl.faults import Fault, Freeze, Hang, Kill, RaiseException, make_fault
from robustrl.faults.freezing import LEAST_FREEZE, check_freeze, longest_freeze
from robustrl.replay.run import Run
from robustrl.runtime.wire import Call, encode_frame

_ODD = ["1e300", "-1e300", "1e400", "NaN", "Infinity", "-Infinity", str(10**400), str(-(10**400)), str(2**64), str(2**63), "-1",
        "0", "0.5", "1e-300", "true", "false", "null",
        '""', '"x"', '"1e300"', '"nan"', '"\\u0000"', '"\\ud800"', "[]", "[[[[1]]]]", '{"a": {"b": 1}}']  # fmt: skip
_PLAIN = {"role": '"trainer-0"', "kind": '"kill"', "target": '"trainer-0"', "phase": '"train"', "seconds": "10", "ahead": "1", "fault": "1",
          "hidden": "false", "sure": "true", "name": '"surprise"', "path": '"rollout.no_tokens"', "value": "3", "mode": '"full"',
          "standbys": '"warm"', "speed": "1", "at": "0", "guess": '"kill"'}  # fmt: skip
_TAKES = {"inspect": ["role"], "logs": ["role"], "stack": ["role"], "play": ["speed", "at"], "pause": [], "resume": [],
          "inject": ["kind", "target", "phase", "seconds", "ahead", "hidden", "sure"], "abort": ["fault"], "reveal": ["fault", "guess"],
          "schedule": ["name"], "set_threshold": ["path", "value"], "set_recovery": ["mode", "standbys"]}  # fmt: skip


class _Job(FakeJob):
    """What it is asked to send is encoded as for a host, and its thresholds are real ones."""

    def __init__(self) -> None:
        log = back(failing_log())
        super().__init__(log, len(log))
        self.thresholds = SimpleNamespace(update=lambda changes: (Thresholds.lab().updated(changes), self._call("set", None, **changes)))

    def _call(self, verb: str, timeout: float | None, **args: Any) -> Any:
        encode_frame(Call(1, verb, args))
        return super()._call(verb, timeout, **args)

    def pause(self) -> None:
        self._call("pause", None)

    def resume(self) -> None:
        self._call("resume", None)


def _answer(feed: Feed, right: Right, verb: str, args: str) -> dict[str, Any]:
    answers: list[dict[str, Any]] = []
    Commander(feed, right, "Ada", may_play=True).take(f'{{"id": "1", "verb": {json.dumps(verb)}, "args": {args}}}', answers.append)
    (answer,) = answers
    json.dumps(answer)
    return answer


@pytest.fixture
def feeds() -> list[Feed]:
    made = [Feed(LiveRun(_Job())), Feed(RecordedRun(failing_log()))]
    for feed in made:
        feed.later = lambda task: task()  # type: ignore[method-assign]
        feed.still()
    return made


@pytest.mark.parametrize("verb", [*commands._VERBS, "no_such_verb"])
def test_every_command_is_answered_whatever_it_holds(feeds: list[Feed], verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page waits for its answer. An odd value is refused for what it is, not by a defect further down."""
    defects: list[str] = []
    monkeypatch.setattr(commands.log, "exception", lambda text: defects.append(text))
    assert set(_TAKES) == set(commands._VERBS), "each verb is tried with each of its arguments"
    for feed in feeds:
        for right in Right:
            for odd in _TAKES.get(verb, ["role"]):
                for value in _ODD:
                    args = {name: _PLAIN[name] for name in _TAKES.get(verb, [])} | {odd: value}
                    answer = _answer(feed, right, verb, "{" + ", ".join(f'"{name}": {text}' for name, text in args.items()) + "}")
                    assert {"value", "error", "confirm"} & set(answer), (verb, odd, value)
                    assert answer.get("error", "said") and not defects, (verb, odd, value, answer)


@pytest.mark.parametrize("ahead", ["1e300", "1000001", "-1", "0.5", "true", '"x"', str(2**62)])
def test_how_far_ahead_a_fault_may_be_ordered_is_said(feeds: list[Feed], ahead: str) -> None:
    """A student's page got no answer: such a number fits into no message to the host."""
    answer = _answer(feeds[0], Right.STUDENT, "inject", f'{{"kind": "kill", "target": "trainer-0", "ahead": {ahead}}}')
    assert answer["error"].startswith("ahead = ") and "must be a whole number from 0 to 1000000" in answer["error"]
    for_ever = _answer(feeds[0], Right.STUDENT, "inject", '{"kind": "hang", "target": "trainer-0", "seconds": 1e300}')
    assert "must be at most 86400" in for_ever["error"]
    assert feeds[0].source.job.calls == []


def test_a_defect_is_an_answer_too(feeds: list[Feed], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(commander: Commander, args: dict[str, Any]) -> Any:
        raise OverflowError("int too large")

    monkeypatch.setitem(commands._VERBS, "pause", (Right.READ, broken))
    assert "pause failed: the log" in _answer(feeds[0], Right.READ, "pause", "{}")["error"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 11, 0.5, True, "3", None, [3]])
def test_a_whole_number_is_one(value: Any) -> None:
    with pytest.raises(Refused, match=r"run = .*: must be a whole number from 0 to 10"):
        whole("run", value, 10)
    assert whole("run", 3.0, 10) == 3


def test_the_tuning_lab_answers_odd_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    defects: list[str] = []
    monkeypatch.setattr("robustrl_widgets.tuner.log.exception", lambda text: defects.append(text))
    answers: list[dict[str, Any]] = []
    tuner = Tuner({"now": lambda: ([Run.of(failing_log())], None)}, lambda what, channel: None, load="now")
    takes = {"load": "source", "set": "rollout.no_tokens", "look": "run", "point": "point", "compare": "on"}
    sent = [f'{{"id": "1", "verb": "{verb}", "args": {{"{name}": {value}}}}}' for value in _ODD for verb, name in takes.items()]
    try:
        for place in range(0, len(sent), 40):
            for raw in sent[place : place + 40]:
                tuner.take(raw, answers.append)
            deadline = time.monotonic() + 20.0
            while len(answers) < len(sent[: place + 40]) and time.monotonic() < deadline:
                time.sleep(0.01)
    finally:
        tuner.close()
    assert len(answers) == len(sent) and not defects
    assert all({"value", "error"} & set(answer) for answer in answers)


_HIT = ev.FaultInjected(fault=1, role="rollout-1", incarnation=1, node="node-1", pid=7, phase="", step=0, proof={"process": "T"})
_GONE = ev.ProcessExited(role="rollout-1", incarnation=1, pid=7, cause="pidfd", last_lines=[])
_REPLACED = ev.RoleStarted(role="rollout-1", incarnation=2, node="node-1", pid=8, start_ticks=8)
_OVER = ev.FaultEnded(fault=1, outcome="over", reason="so")


@pytest.mark.parametrize(("fault", "later", "possible"), [
    (Kill("rollout-1", step=9), [], True), (Kill("rollout-1"), [], True), (Kill("rollout-1"), [_HIT], False),
    (Kill("rollout-1"), [_HIT, _GONE], False), (RaiseException("rollout-1"), [_HIT], False),
    (Hang("rollout-1"), [_HIT], True), (Hang("rollout-1"), [_HIT, _GONE], False), (Hang("rollout-1"), [_HIT, _OVER], False),
    (Hang("rollout-1"), [_HIT, _GONE, ev.RoleStateChanged(role="rollout-1", incarnation=1, old="healthy", new="failed", reason="x"),
                         _REPLACED], False),
])  # fmt: skip
def test_what_can_be_called_off_is_what_the_host_calls_off(tmp_path: Path, fault: Fault, later: list[ev.Event], possible: bool) -> None:
    host = Host(tmp_path)

    async def scenario() -> tuple[bool, bool]:
        number = await host.injector.inject(msgspec.to_builtins(fault))
        for event in later:
            await asyncio.sleep(0.01)
            await asyncio.gather(*host.tasks)
            host.record(event)
        offered = can_be_called_off(host.state.faults[number], host.state)
        try:
            await host.injector.abort_fault(number)
        except RobustRLError:
            return offered, False
        return offered, True

    assert asyncio.run(scenario()) == (possible, possible)


def test_a_student_is_offered_the_kinds_of_faults_that_are_accepted(feeds: list[Feed]) -> None:
    feed, refused = feeds[0], set()
    offered = _answer(feed, Right.STUDENT, "inspect", '{"role": "trainer-0"}')["value"]["faults"]
    every = _answer(feed, Right.INSTRUCTOR, "inspect", '{"role": "trainer-0"}')["value"]["faults"]
    for kind in every:
        timed = {"seconds": 5} if catalogue()[kind]["timed"] else {}
        answer = _answer(feed, Right.STUDENT, "inject", json.dumps({"kind": kind, "target": "trainer-0"} | timed))
        if "one role's process" in answer.get("error", ""):
            refused.add(kind)
    assert refused and set(offered) == set(every) - refused
    assert refused == {kind for kind in every if not catalogue()[kind]["for_students"]}


_SHORT = Thresholds.lab().updated({"job.hysteresis": 0.1, "rollout.no_tokens": 0.3, "rollout.heartbeat": 0.3})


@pytest.mark.parametrize("limits", [Thresholds.lab(), Thresholds.paper(), _SHORT])
def test_the_length_that_is_offered_for_a_fault_is_one_that_is_accepted(limits: Thresholds) -> None:
    """A freeze was offered without a length on the board, and with 10 s on the panel: both were refused."""
    for kind in RoleKind:
        offered, role = fitting(kind.value, limits), kind.value if kind in SINGLE else f"{kind.value}-0"
        for name, seconds in offered.items():
            fault = make_fault({"fault": name, "target": role} | ({} if seconds is None else {"seconds": seconds}))
            if isinstance(fault, Freeze):
                check_freeze(fault, limits)
        assert ("freeze" in offered) == (longest_freeze(kind, limits) >= LEAST_FREEZE and kind is not RoleKind.SUPERVISOR)
        assert offered.get("freeze", 10.0) == min(10.0, longest(limits)["freeze"].get(kind.value, 10.0))
