"""The host's judgement on the supervisor, in virtual time: stopped for good, slow, unseen, and the host's own gaps."""

from __future__ import annotations

from typing import Any

import pytest

from robustrl.core import events as ev
from robustrl.core.detection import Detector, judge
from robustrl.core.guard import Guard
from robustrl.core.thresholds import Thresholds

LAB = Thresholds.lab()
SILENT, UNSEEN = LAB.management.silent, LAB.management.silent + LAB.node.silent


class _Story:
    """A supervisor in its first life, started at 0 and ready at 1."""

    def __init__(self, ready: bool = True) -> None:
        self.guard, self.entries, self.said = Guard(LAB), list[ev.Entry](), list[ev.Verdict]()
        self.at(0.0, ev.RoleStarted(role="supervisor", incarnation=1, node="node-0", pid=7, start_ticks=1))
        if ready:
            self.at(1.0, ev.RoleReady(role="supervisor", incarnation=1, seconds=1.0), "supervisor")

    def at(self, t: float, event: ev.Event, source: str = "host", incarnation: int = 1) -> None:
        entry = ev.Entry(len(self.entries) + 1, t, source, incarnation, len(self.entries) + 1, t, event)
        self.entries.append(entry)
        self.note(self.guard.feed(entry))

    def note(self, verdict: ev.Verdict | None) -> None:
        if verdict:
            self.said.append(verdict)
            self.at(verdict.seen + 0.001, verdict)

    def sample(self, t: float, loop_age: float, incarnation: int = 1) -> None:
        self.at(t, sample(loop_age, incarnation), "node_agent-0")

    def samples(self, begin: float, end: float, stopped: float | None = None) -> None:
        """Once a second, and as the limit passes; ``stopped``: since when its loop stands still."""
        t = begin
        while t < end:
            self.sample(t, 0.05 if stopped is None or t < stopped else t - stopped)
            t += 1.0


def sample(loop_age: float, incarnation: int = 1) -> ev.RoleSample:
    values: dict[str, Any] = dict.fromkeys(("phase_age", "active_age", "progress_age", "lag", "cpu"), 0.0)
    return ev.RoleSample(role="supervisor", incarnation=incarnation, phase="idle", progress=9, pending=0, step=0, version=-1,
                         loop_age=loop_age, process="T" if loop_age > 1 else "S", **values)


def test_one_that_is_stopped_for_good_is_condemned_once_and_not_before_the_limit() -> None:
    story = _Story()
    story.samples(1.5, 60.0, stopped=20.0)
    [verdict] = story.said
    assert (verdict.rule, verdict.incarnation, verdict.threshold) == ("silent", 1, SILENT)
    assert verdict.onset == pytest.approx(20.0) and verdict.due == pytest.approx(20.0 + SILENT)
    assert verdict.due <= verdict.seen <= verdict.due + 1.0
    assert verdict.evidence["process"] == "T" and verdict.evidence["seen_by"] == "node_agent-0"


def test_a_slow_loop_and_a_short_stop_are_none() -> None:
    story = _Story()
    for t in range(2, 60):
        story.sample(t, SILENT - 0.01)
    assert not story.said and story.guard.look(61.0) is None


def test_it_has_grace_until_it_is_ready_and_the_whole_limit_from_then_on() -> None:
    story = _Story(ready=False)
    story.samples(0.5, 30.0, stopped=0.1)
    assert not story.said and story.guard.look(200.0) is None
    story.at(200.0, ev.RoleReady(role="supervisor", incarnation=1, seconds=200.0), "supervisor")
    story.sample(200.5, 100.0)
    assert not story.said
    story.sample(200.0 + SILENT, 100.0)
    assert [v.onset for v in story.said] == [200.0]


def test_a_host_that_did_not_run_condemns_nobody_for_the_gap() -> None:
    story = _Story()
    story.samples(1.5, 10.0)
    story.at(40.0, ev.ClockGap(seconds=30.0))
    story.sample(40.01, 29.0)  # what the agent saw meanwhile: both were suspended
    assert not story.said and story.guard.look(40.02) is None and story.guard.look(40.0 + UNSEEN - 0.1) is None
    story.samples(41.0, 60.0)
    assert not story.said, "it goes on"
    story.at(90.0, ev.ClockGap(seconds=30.0))
    story.samples(90.5, 99.0, stopped=59.0)
    assert [v.onset for v in story.said] == [90.0], "and one that really stands still is found all the same"


def test_the_gap_of_another_is_no_excuse() -> None:
    story = _Story()
    story.at(24.9, ev.ClockGap(seconds=3.0), "supervisor", incarnation=0)
    story.samples(2.0, 30.0, stopped=20.0)
    assert len(story.said) == 1


@pytest.mark.parametrize("speaks", [False, True])
def test_with_its_agent_gone_too_it_is_judged_by_its_own_words(speaks: bool) -> None:
    story = _Story()
    story.samples(1.5, 10.0)  # the last at 9.5
    for t in range(11, 60):
        if speaks and t % 5 == 0:
            story.at(float(t), ev.Tick(), "supervisor")
        story.at(t + 0.5, ev.WarningRaised(text="others go on"), "task_runner")
        story.note(story.guard.look(t + 0.6))
    assert [v.rule for v in story.said] == ([] if speaks else ["unseen"])
    if not speaks:
        assert story.said[0].onset == 9.5 and story.said[0].threshold == UNSEEN
        assert 0 <= story.said[0].seen - story.said[0].due <= 1.0


def test_it_may_be_silent_once_it_has_spoken_on_its_agent_until_the_next_one_is_there() -> None:
    """The agent's restart may take longer than the limit, and where recovery is only observed there is none."""
    story = _Story()
    story.at(2.0, ev.RoleStarted(role="node_agent-0", incarnation=1, node="node-0", pid=8, start_ticks=1))
    story.samples(2.5, 10.0)
    story.at(15.0, _failed("node_agent-1"), "supervisor")
    story.at(15.1, _failed("node_agent-0"), "supervisor")
    assert story.guard.look(500.0) is None
    story.at(500.0, ev.RoleStarted(role="node_agent-0", incarnation=2, node="node-0", pid=9, start_ticks=1))
    assert story.guard.look(500.0 + UNSEEN - 0.1) is None
    verdict = story.guard.look(500.0 + UNSEEN)
    assert verdict and (verdict.rule, verdict.onset) == ("unseen", 500.0), "whoever brought it back did not see the supervisor"


def test_a_word_on_another_nodes_agent_is_no_excuse() -> None:
    story = _Story()
    story.at(2.0, ev.RoleStarted(role="node_agent-0", incarnation=1, node="node-0", pid=8, start_ticks=1))
    story.at(3.0, _failed("node_agent-1"), "supervisor")
    assert story.guard.look(3.0 + UNSEEN)


def _failed(role: str) -> ev.Verdict:
    return ev.Verdict(role=role, incarnation=1, kind="failed", rule="silent", evidence={}, threshold=5.0, due=15.0, seen=15.0, onset=10.0,
                      blind_spot="none")


def test_the_limit_is_the_one_in_force() -> None:
    story = _Story()
    story.at(10.0, ev.ThresholdsChanged(thresholds=LAB.replace("management.silent", "12s").to_dict(), changes={}))
    story.samples(10.5, 40.0, stopped=20.0)
    assert [(v.threshold, v.onset) for v in story.said] == [(12.0, 20.0)]


@pytest.mark.parametrize("event", [
    ev.ProcessExited(role="supervisor", incarnation=1, pid=7, cause="memory", last_lines=[]),
    ev.RestartDecided(role="supervisor", incarnation=1, reason="ordered by the user"),
    ev.EndDecided(status="done", reason="all steps"),
])  # fmt: skip
def test_an_end_that_is_known_is_not_judged_again(event: ev.Event) -> None:
    story = _Story()
    story.at(5.0, event)
    story.samples(5.5, 40.0, stopped=5.0)
    assert not story.said and story.guard.look(99.0) is None


def test_the_next_life_is_judged_by_its_own_samples_alone() -> None:
    story = _Story()
    story.samples(1.5, 30.0, stopped=20.0)
    story.at(40.0, ev.RoleStarted(role="supervisor", incarnation=2, node="node-0", pid=8, start_ticks=1))
    story.at(41.0, ev.RoleReady(role="supervisor", incarnation=2, seconds=1.0), "supervisor", incarnation=2)
    story.sample(47.0, 27.0)  # of the first life
    assert len(story.said) == 1
    story.sample(48.0, 6.5, incarnation=2)
    assert [v.incarnation for v in story.said] == [1, 2]


def test_a_replay_gives_the_hosts_verdict_and_no_second_one_on_the_death_that_follows() -> None:
    story = _Story()
    story.samples(1.5, 30.0, stopped=20.0)
    story.at(31.0, ev.ProcessExited(role="supervisor", incarnation=1, pid=7, cause="memory", last_lines=[]), "node_agent-0")
    assert list(judge(Detector(LAB), story.entries)) == story.said
    detector = Detector(LAB)
    list(judge(detector, story.entries))
    assert detector.unrecorded() == [], "the next supervisor has nothing to add"
