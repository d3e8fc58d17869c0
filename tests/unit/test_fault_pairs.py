"""Two faults on one role, each pair at each stage of what the first one leads to: book, recoveries and audit tell one story of it.

A job in virtual time: what is done to the role, what its node's agent, the supervisor and the host then write, and in which order.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

import msgspec
import pytest
from story import ROLES, Story

from robustrl.core import events as ev
from robustrl.core.audit import RULES
from robustrl.core.audit_log import Log
from robustrl.core.fault_book import ENDING, ENDS, FaultView
from robustrl.core.recoveries import FAILED_AGAIN, INJECTION, RECOVERED, Recovery, recoveries_of
from robustrl.core.roles import RoleState
from robustrl.core.run_state import RunState

PROOFS = {
    "kill": {"signal": "SIGKILL", "process": "gone", "ago": 0.0}, "hang": {"signal": "SIGSTOP", "process": "T", "ago": 0.0},
    "wedge": {"thread": "engine", "place": "decode", "busy": False}, "exception": {"thread": "engine", "place": "decode", "raised": "E"},
    "slow": {"signal": "SIGSTOP", "process": "T", "ago": 0.0, "share": 0.5, "period": 0.2},
    "corrupt_weights": {"bytes": 64, "at": 0, "of": 64}, "freeze": {"signal": "SIGSTOP", "process": "T", "ago": 0.0},
}  # fmt: skip
STANDS_STILL = {"hang": "no_compute", "wedge": "no_marks"}
LASTS = {"slow": 6.0, "freeze": 2.0, "corrupt_weights": 8.0}
LIMIT = 3.0
OFFSETS = (0.0, 0.03, 0.055, 0.5, 1.5, 2.5, 3.02, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 20.0)
"""Seconds between the two: before the first is seen, while the next life starts, before it is healthy, before it works, and after all."""


class World:
    """``late``: seconds from a deed to its proof in the log."""

    def __init__(self, role: str, late: float) -> None:
        self.story, self.role, self.late = Story(), role, late
        self.trainer = role == "trainer-0"
        self.phase = "train" if self.trainer else "decode"
        self.story.batch(100.5, 1, finished=101.0)
        self.alive, self.condemned, self.still, self.progress = True, False, 0, 0
        self._later: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self.work(101.0)

    @property
    def life(self) -> int:
        return self.story.life[self.role]

    def at(self, t: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._later, (t, next(self._order), what))

    def of_this_life(self, what: Callable[[float], None]) -> Callable[[float], None]:
        life = self.life
        return lambda t: what(t) if self.life == life and self.alive else None

    def run(self, until: float) -> Story:
        while self._later and self._later[0][0] < until:
            t, _, what = heapq.heappop(self._later)
            what(t)
        for role in ROLES:
            self.story.becomes(until, role, RoleState.STOPPED)
        self.story.ends(until, "stopped")
        return self.story

    # -- what goes on ---

    def work(self, t: float) -> None:
        if not self.still:
            self.progress += 1
            self.story.sample(t, self.role, self.phase, self.progress, step=0)
        self.at(t + 0.5, self.of_this_life(self.work))

    def strikes(self, number: int, kind: str, t: float) -> None:
        options = {"seconds": LASTS.get(kind, 0.0)} if kind in ("slow", "freeze", "hang", "wedge") else {}
        options |= {"share": 0.5, "period": 0.2} if kind == "slow" else {"busy": False} if kind == "wedge" else {}
        plan = ev.FaultPlanned(fault=number, kind=kind, target=self.role, when="now", benign=kind == "freeze", options=options)
        self.story.at(t, plan)
        self.at(t, lambda t: self.strike(number, kind, t))

    def strike(self, number: int, kind: str, t: float) -> None:
        life = self.life
        if not self.alive:
            gone = ev.FaultEnded(fault=number, outcome="vanished", reason=f"{self.role} incarnation {life} ended before it struck")
            self.at(t + 2.0, lambda t: self.story.at(t, gone))
            return
        hit = ev.FaultInjected(fault=number, role=self.role, incarnation=life, node="node-0", pid=7, phase=self.phase, step=0,
                               proof=PROOFS[kind] | ({"ago": self.late} if "ago" in PROOFS[kind] else {}))  # fmt: skip
        self.at(t + self.late, lambda told: self.tell(told, hit, t))
        if kind in ENDING:
            self.alive = False
            if kind == "exception":
                error = ev.ErrorRaised(role=self.role, incarnation=life, error="E", text="raised by a fault")
                self.at(t + 0.01, lambda t: self.story.at(t, error))
            self.at(t + 0.02, lambda t: self.exits(t, life))
            return
        if kind in STANDS_STILL:
            self.still += 1
            self.at(t + LIMIT, self.of_this_life(lambda seen: self.condemn(seen, STANDS_STILL[kind], onset=t)))
        if kind == "corrupt_weights":  # written over, whoever is there then
            self.at(t + LASTS[kind], lambda t: self.over(number, t))
        elif kind in LASTS:
            self.at(t + LASTS[kind], self.of_this_life(lambda t: self.over(number, t)))

    def tell(self, told: float, hit: ev.FaultInjected, t: float) -> None:
        self.story.at(told, hit)
        if "ago" not in hit.proof:  # by its own stamp
            self.story.entries[-1] = msgspec.structs.replace(self.story.entries[-1], at=t)

    def over(self, number: int, t: float) -> None:
        self.story.at(t, ev.FaultEnded(fault=number, outcome="over", reason="its time is over"))

    # -- what is done about it ---

    def condemn(self, t: float, rule: str, onset: float) -> None:
        if self.condemned:
            return
        self.condemned = True
        self.verdict(t, rule, onset, {"active_age": LIMIT, "progress_age": LIMIT})
        self.fails(t)
        life = self.life
        self.at(t + 0.1, self.of_this_life(lambda t: self.exits(t, life)))

    def exits(self, t: float, life: int) -> None:
        self.alive = False
        self.story.at(t, ev.ProcessExited(role=self.role, incarnation=life, pid=7, cause="pidfd", last_lines=[]))
        if not self.condemned:
            self.condemned = True
            self.at(t + 0.03, self.seen_to_have_ended)

    def seen_to_have_ended(self, t: float) -> None:
        self.verdict(t, "exited", t, {"cause": "pidfd"})
        self.fails(t)

    def verdict(self, t: float, rule: str, onset: float, evidence: dict[str, object]) -> None:
        event = ev.Verdict(role=self.role, incarnation=self.life, kind="failed", rule=rule, evidence=evidence, threshold=1.0, due=t, seen=t,
                           onset=onset, blind_spot="")  # fmt: skip
        self.story.at(t, event)

    def fails(self, t: float) -> None:
        self.story.becomes(t, self.role, RoleState.FAILED)
        self.story.restart(t, self.role)
        self.at(t + 1.0, self.starts)

    def starts(self, t: float) -> None:
        self.story.starts(t, self.role)
        self.alive, self.condemned, self.still = True, False, 0
        self.at(t + 2.0, self.of_this_life(self.is_ready))

    def is_ready(self, t: float) -> None:
        if self.still:
            return
        self.story.at(t, ev.RoleReady(role=self.role, incarnation=self.life, seconds=2.0))
        if not self.trainer:
            self.story.becomes(t, self.role, RoleState.STALE)
        self.at(t + 1.0, self.of_this_life(self.is_healthy))

    def is_healthy(self, t: float) -> None:
        if not self.still and not self.condemned:
            self.story.becomes(t, self.role, RoleState.HEALTHY)
            self.at(t + 1.0, self.of_this_life(self.work))


def told(role: str, kinds: tuple[str, str], offset: float, late: float) -> tuple[Story, list[FaultView], list[Recovery]]:
    world = World(role, late)
    for number, (kind, t) in enumerate(zip(kinds, (110.0, 110.0 + offset), strict=True), 1):
        world.at(t, lambda t, number=number, kind=kind: world.strikes(number, kind, t))  # type: ignore[misc]
    story = world.run(170.0)
    return story, list(RunState.of(story.entries).faults.faults.values()), recoveries_of(story.entries)


@pytest.mark.parametrize("role", ["trainer-0", "rollout-0"])
@pytest.mark.parametrize("first, second", list(itertools.product(sorted(PROOFS), repeat=2)))
def test_of_any_two_faults_each_is_told_for_itself(role: str, first: str, second: str) -> None:
    for offset, late in itertools.product(OFFSETS, (0.01, 0.04, 0.06)):
        story, faults, recoveries = told(role, (first, second), offset, late)
        for view in faults:
            assert view.settled, (offset, late, view)
            stages = [view.injected, view.detected and view.detected.t, view.recovered, view.confirmed]
            times = [t for t in stages if t is not None]
            assert times == sorted(times), (offset, late, view)
            assert view.detected or (view.recovered, view.confirmed) == (None, None), (offset, late, view)
            assert view.detected or view.outcome, (offset, late, view)
            if view.detected:
                assert (view.detected.rule in ENDS) == (view.kind in ENDING) and view.detected.delay >= 0, (offset, late, view)
            assert not view.false_alarm
        for recovery in recoveries:
            assert recovery.until is not None and recovery.outcome in (RECOVERED, FAILED_AGAIN), (offset, late, recovery)
            named = [faults[number - 1] for number in recovery.faults]
            for view in named:
                over = view.ended if view.outcome else view.recovered
                assert view.injected is not None and view.injected <= recovery.until, (offset, late, recovery)
                assert recovery.onset <= (over or math.inf), (offset, late, recovery)
            assert recovery.onset_by == INJECTION, (offset, late, recovery)
            causes = [view for view in named if view.injected == pytest.approx(recovery.onset)]
            assert any(view.hits[0].incarnation == recovery.incarnation for view in causes), (offset, late, recovery)
            assert (recovery.rule in ENDS) == any(view.kind in ENDING for view in causes), (offset, late, recovery)
        for one, other in itertools.pairwise(recoveries):
            assert one.until is not None and one.until <= other.detected and one.incarnation < other.incarnation
            assert set(one.faults).isdisjoint(other.faults), (offset, late, recoveries)
        assert not recoveries or recoveries[-1].outcome == RECOVERED
        log = Log(story.entries)
        assert [found for rule in ("faults", "verdicts", "recoveries") for found in RULES[rule](log)] == [], (offset, late)
