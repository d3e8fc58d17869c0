"""Detectors of others, on logs made entry by entry: each does what its source says, no less."""

from __future__ import annotations

from typing import Any

import pytest

from robustrl.core import events as ev
from robustrl.core.roles import RoleKind
from robustrl.replay.peers import JOB, PUBLISHED, TUNABLE, ClusterIdle, Heartbeat, Peer, PhiAccrual, Probe, ProcessIdle, Quantile

ROLES = ("trainer-0", "rollout-0")


class Log:
    """Two roles that are looked at every 0.1 s; what they show is set between looks."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.t, self.n = peer, 0.0, 0
        self.said: list[tuple[float, str, str]] = []
        self.shown: dict[str, dict[str, Any]] = {role: {"busy": True, "turns": True, "process": "S", "progress": 0} for role in ROLES}
        self.since = dict.fromkeys(ROLES, 0.0)
        self.stamp = dict.fromkeys(ROLES, 0.0)
        for role in ROLES:
            self.add(ev.RoleStarted(role=role, incarnation=1, node="node-1", pid=7, start_ticks=1))
            self.add(ev.RoleReady(role=role, incarnation=1, seconds=1.0))

    def add(self, event: ev.Event, source: str = ev.HOST) -> None:
        self.n += 1
        self.peer.feed(ev.Entry(self.n, self.t, source, 1, self.n, self.t, event))
        self.said += [(round(v.seen, 1), v.role, v.kind) for v in self.peer.advance(self.t)]

    def run(self, seconds: float, role: str = "", progress: int = 1, **shown: Any) -> Log:
        if role:
            self.shown[role].update(shown)
        for _ in range(round(10 * seconds)):
            self.t = round(self.t + 0.1, 1)
            for name in ROLES:
                state = self.shown[name]
                if state["busy"]:
                    self.since[name] = self.t
                    state["progress"] += progress
                if state["turns"]:
                    self.stamp[name] = self.t
                if state["process"] != "gone":
                    sample = ev.RoleSample(
                        role=name, incarnation=1, phase="train", progress=state["progress"], pending=1, step=1, version=0, cpu=0.0,
                        loop_age=self.t - self.stamp[name], active_age=self.t - self.since[name], process=state["process"],
                    )  # fmt: skip
                    self.add(sample, "node_agent-1")
        return self

    def kill(self, role: str) -> Log:
        self.shown[role].update(process="gone", busy=False, turns=False)
        self.add(ev.ProcessExited(role=role, incarnation=1, pid=7, cause="pidfd", last_lines=[]), "node_agent-1")
        return self


def test_an_idle_process_is_condemned_whatever_it_waits_for_and_acquitted_when_it_works():
    log = Log(ProcessIdle(2.0)).run(5.0).run(3.0, "rollout-0", busy=False).run(1.0, "rollout-0", busy=True)
    assert log.said == [(7.0, "rollout-0", "failed"), (8.1, "rollout-0", "cleared")]


def test_a_cluster_is_idle_when_all_are():
    log = Log(ClusterIdle(2.0)).run(5.0).run(5.0, "rollout-0", busy=False)
    assert log.said == []
    log.run(3.0, "trainer-0", busy=False)
    assert log.said == [(12.0, JOB, "failed")]


def test_heartbeats_stop_with_the_process_and_not_with_its_work():
    log = Log(Heartbeat(5.0)).run(5.0).run(10.0, "trainer-0", busy=False, turns=False)
    assert log.said == []
    log.run(6.0, "trainer-0", process="T")
    assert log.said == [(20.0, "trainer-0", "failed")]


def test_a_killed_process_is_missed_until_the_time_out_or_known_at_once():
    assert Log(Heartbeat(5.0)).run(5.0).kill("rollout-0").run(6.0).said == [(10.0, "rollout-0", "failed")]
    assert Log(Heartbeat(5.0, exits=True)).run(5.0).kill("rollout-0").run(6.0).said == [(5.0, "rollout-0", "failed")]


def test_a_probe_is_answered_by_the_loop_and_condemns_after_its_strikes():
    log = Log(Probe(first=1.0, period=2.0, timeout=1.0, strikes=2, kinds=[RoleKind.ROLLOUT])).run(6.5)
    log.run(8.0, "rollout-0", turns=False).run(0.0, "trainer-0", turns=False)
    assert log.said == [(10.0, "rollout-0", "failed")], "asked at 7 and 9"
    log.run(3.0, "rollout-0", turns=True)
    assert log.said[1:] == [(15.0, "rollout-0", "cleared")], "asked at 13 and again at 15"


def test_the_first_wait_of_a_probe_and_its_good_answers():
    log = Log(Probe(first=10.0, period=2.0, timeout=1.0, strikes=1, good=2)).run(2.0, "rollout-0", turns=False).run(8.5)
    assert log.said == []
    log.run(1.0)
    assert log.said == [(11.0, "rollout-0", "failed")]
    log.run(2.0, "rollout-0", turns=True)
    assert log.said[1:] == []
    log.run(3.0)
    assert [kind for _, _, kind in log.said[1:]] == ["cleared"]


def test_phi_grows_with_the_silence_and_is_patient_with_an_uneven_beat():
    def first(even: bool) -> float:
        log = Log(PhiAccrual(8.0, pause=0.0, period=0.3))
        for i in range(20):
            log.run(1.0 if even else 0.3 + 0.1 * (i % 12), "rollout-0", turns=False).run(0.1, "rollout-0", turns=True)
        start = log.t
        log.run(30.0, "rollout-0", turns=False)
        return log.said[-1][0] - start

    assert 1.0 < first(True) < first(False) < 10.0


def test_a_quantile_learns_how_long_progress_may_take():
    log = Log(Quantile(3.0, floor=0.5))
    for _ in range(20):
        log.run(0.9, "trainer-0", busy=False).run(0.1, "trainer-0", busy=True)
    assert log.said == []
    log.run(10.0, "trainer-0", busy=False)
    assert [(role, kind) for _, role, kind in log.said] == [("trainer-0", "failed")]
    assert log.said[0][0] == pytest.approx(20.0 + 3.0, abs=0.3)


@pytest.mark.parametrize("name", [*PUBLISHED, *TUNABLE])
def test_nobody_is_condemned_while_all_work_nor_for_a_life_that_was_ended_or_a_watcher_that_is_silent(name):
    peer = PUBLISHED[name]() if name in PUBLISHED else TUNABLE[name][0](TUNABLE[name][1][3])
    log = Log(peer).run(20.0)
    log.add(ev.RoleStateChanged(role="rollout-0", incarnation=1, old="healthy", new="stopped", reason="drained"))
    log.kill("rollout-0")
    log.run(3.0)
    log.t += 100.0  # nobody says anything
    log.add(ev.Tick(), "supervisor")
    assert log.said == []


def test_a_deadline_is_when_it_says_so():
    log = Log(Heartbeat(5.0)).run(5.0).kill("rollout-0").run(1.0)
    assert log.peer.next_deadline() == pytest.approx(10.0)
    with pytest.raises(ValueError, match="limit -1"):
        Heartbeat(-1.0)
