"""Whatever a page sends is answered: all verbs with odd values, against a job whose host's messages are really encoded."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from robustrl_widgets import commands
from robustrl_widgets.commands import Commander, Refused, Right, whole
from robustrl_widgets.feed import Feed
from robustrl_widgets.sources import LiveRun, RecordedRun
from robustrl_widgets.tuner import Tuner
from views_log import FakeJob, back, failing_log

from robustrl.core.thresholds import Thresholds
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
