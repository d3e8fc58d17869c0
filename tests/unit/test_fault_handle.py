"""The handle of a fault: what it waits for, what ends its wait, and that it shows nothing of a hidden one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from story import Story
from test_fault_book import hit, plan, verdict

from robustrl.core import events as ev
from robustrl.core.run_state import RunState
from robustrl.errors import ConfigError, HostGone, RobustRLError, WaitTimeout
from robustrl.faults.handle import FaultHandle, ScheduleHandle
from robustrl.role_handles import RoleHandle


def handle(story: Story, over: bool = False) -> FaultHandle:
    """Of fault 1, in a job that does nothing more."""
    return FaultHandle(job(story, over), 1)


def job(story: Story, over: bool = False) -> Any:
    state = RunState.of(story.entries)
    return SimpleNamespace(
        name="j", over=over, _state=state, read=lambda draw: draw(state), wait_until=lambda condition, seconds: condition()
    )


def planned(**fields: Any) -> Story:
    story = Story()
    plan(story, 101.0, **fields)
    return story


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "3", None, True, [], 10**400, 1e15])
def test_an_odd_time_is_named_before_anything_is_done(seconds: Any) -> None:
    calls: list[Any] = []
    with pytest.raises(ConfigError, match="seconds = .*must be finite and not negative, at most 10000000; 0: for good"):
        RoleHandle(SimpleNamespace(_call=lambda *args, **_: calls.append(args)), "rollout-0").hang(seconds)  # type: ignore[arg-type]
    assert not calls
    story = planned()
    if isinstance(seconds, float | int) and seconds >= 0 and seconds is not True:
        with pytest.raises(WaitTimeout):
            handle(story).wait("injected", timeout=seconds)
        return
    with pytest.raises(ConfigError, match="timeout = "):
        handle(story).wait("injected", timeout=seconds)


def test_a_wait_ends_with_its_stage_or_says_how_far_it_came() -> None:
    story = planned()
    with pytest.raises(WaitTimeout, match=r"fault 1 \(kill, rollout-0\): not injected within 1 s; it is planned"):
        handle(story).wait("injected", timeout=1)
    with pytest.raises(HostGone, match="job 'j' ended while fault 1 was planned"):
        handle(story, over=True).wait()
    with pytest.raises(ConfigError, match="stage = 'done': must be one of planned, injected, detected, recovered, confirmed, over"):
        handle(story).wait("done")
    hit(story, 102.0)
    assert handle(story).wait("injected").stage == "injected"


def test_a_wait_does_not_outlast_what_it_waits_for() -> None:
    story = planned()
    story.at(102.0, ev.FaultEnded(fault=1, outcome="refused", reason="it is the last"))
    with pytest.raises(RobustRLError, match=r"came to the stage planned and no further: refused \(it is the last\)"):
        handle(story).wait()
    story = planned(kind="freeze", benign=True)
    hit(story, 102.0, proof={"process": "T"})
    story.at(103.0, ev.FaultEnded(fault=1, outcome="over", reason="it goes on"))
    assert handle(story).wait("over").outcome == "over"


def test_what_a_handle_looks_like() -> None:
    story = planned()
    hit(story, 102.0)
    verdict(story, 102.5)
    text = repr(handle(story))
    assert text.startswith("<fault 1: kill, rollout-0, now: detected; hit rollout-0 (pid 7) in phase decode, step 1: signal SIGKILL")
    assert "failed by rule 'exited', 0.51 s after the injection" in text
    assert "<b>fault 1</b>" in handle(story)._repr_html_()
    hidden = planned(hidden=True, schedule="schedule-1")
    assert repr(handle(hidden)) == "<fault 1: hidden>" and handle(hidden).stage == "hidden" and handle(hidden).outcome == ""
    series = ScheduleHandle(job(hidden), "schedule-1")
    assert [fault.number for fault in series.faults] == [1] and "hidden" in series._repr_html_() and "kill" not in repr(series)


@pytest.mark.parametrize("guess", [3, None, ["a"]])
def test_a_guess_is_a_text(guess: Any) -> None:
    with pytest.raises(ConfigError, match="guess = .* must be a text"):
        handle(planned(hidden=True)).reveal(guess)
