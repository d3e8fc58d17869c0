"""A log written entry by entry, judged instant by instant: for tests of single rules."""

from __future__ import annotations

from typing import Any

from robustrl.core import events as ev
from robustrl.core.detection import Detector
from robustrl.core.roles import RoleId
from robustrl.core.thresholds import Thresholds

LAB = Thresholds.lab().replace("rollout.heartbeat", "2s")
AGENT = {"trainer": "node_agent-1", "rollout": "node_agent-2"}


class Log:
    """Writes entries at given times and judges each instant as it ends."""

    def __init__(self, *roles: str, thresholds: Thresholds = LAB, steps: int = 100) -> None:
        self.detector = Detector(thresholds)
        self.entries: list[ev.Entry] = []
        self.verdicts: list[ev.Verdict] = []
        self.t = 0.0
        self.add(0.0, ev.RunStarted(schema=1, run="r", name="n", wall=0.0, host_pid=1, config={"steps": steps}, machine={}))
        for role in ("supervisor", "node_agent-1", "node_agent-2", *roles):
            self.start(role, 0.0)

    def add(self, t: float, event: ev.Event, source: str = ev.HOST, incarnation: int = 1) -> list[ev.Verdict]:
        """The verdicts of this instant."""
        entry = ev.Entry(len(self.entries) + 1, t, source, incarnation, len(self.entries) + 1, 1000.0 + t, event)
        self.entries.append(entry)
        self.detector.feed(entry)
        said = self.detector.advance(t)
        self.verdicts += said
        self.t = t
        return said

    def start(self, role: str, t: float, incarnation: int = 1, ready: bool = True, node: str = "") -> None:
        """An agent is beside its roles only where ``node`` says so: else it would have to tell of them, which few tests are about."""
        node = node or ("elsewhere" if role.startswith("node_agent") else f"node-{role[-1]}")
        self.add(t, ev.RoleStarted(role=role, incarnation=incarnation, node=node, pid=7, start_ticks=1))
        if ready:
            self.add(t, ev.RoleReady(role=role, incarnation=incarnation, seconds=1.0))

    def sample(self, t: float, role: str, phase: str, incarnation: int = 1, **fields: Any) -> list[ev.Verdict]:
        values: dict[str, Any] = {"progress": 5, "pending": 2, "step": 3, "version": 1, "loop_age": 0.0, "cpu": 1.0, "process": "S"}
        values |= {"phase_age": 50.0} | fields
        values["lag"] = max(values.get("lag", 0.0), values["loop_age"])
        kind = RoleId.parse(role).kind.value
        return self.add(t, ev.RoleSample(role=role, incarnation=incarnation, phase=phase, **values), AGENT.get(kind, "node_agent-1"))

    def tick(self, t: float, incarnation: int = 1) -> list[ev.Verdict]:
        return self.add(t, ev.Tick(), "supervisor", incarnation)

    def beat(self, t: float, role: str = "rollout-0", number: int = 1, incarnation: int = 1) -> list[ev.Verdict]:
        return self.add(t, ev.HeartbeatSent(role=role, incarnation=1, number=number), "supervisor", incarnation)

    def answer(self, t: float, role: str = "rollout-0", number: int = 1) -> list[ev.Verdict]:
        return self.add(t, ev.HeartbeatAnswered(role=role, incarnation=1, number=number), role)

    def said(self) -> list[tuple[str, str, str]]:
        return [(v.role, v.kind, v.rule) for v in self.verdicts]


def exited(role: str, incarnation: int = 1, **fields: Any) -> ev.ProcessExited:
    return ev.ProcessExited(role=role, incarnation=incarnation, pid=7, cause="pidfd", last_lines=["a", "b"], **fields)
