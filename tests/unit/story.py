"""A log told by hand: who does what at which second, so that every figure computed from it can be checked by mental arithmetic."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from robustrl.config import JobConfig
from robustrl.core import events as ev
from robustrl.core.roles import RoleId, RoleKind, RoleState, first_state

ROLES = ("supervisor", "trainer-0", "rollout-0", "rollout-1")


class Story:
    """Entries in the order of their times, each written by the host unless ``source`` is given."""

    def __init__(self, roles: tuple[str, ...] = ROLES, steps: int = 3, start: float = 100.0) -> None:
        self.entries: list[ev.Entry] = []
        self._n: Counter[tuple[str, int]] = Counter()
        self._state: dict[tuple[str, int], RoleState] = {}
        self.life: dict[str, int] = {}
        config = msgspec.to_builtins(JobConfig(steps=steps))
        self.at(start, ev.RunStarted(schema=1, run="r", name="n", wall=1e9, host_pid=1, config=config, machine={}))
        self.at(start, ev.NodeStarted(node="node-0", ray_node_id="x", ip="127.0.0.1", kinds=[]))
        for role in roles:
            self.starts(start, role)
            self.ready(start, role)

    def at(self, t: float, event: ev.Event, source: str = "host", incarnation: int = 1) -> None:
        self._n[source, incarnation] += 1
        n = self._n[source, incarnation]
        self.entries.append(ev.Entry(len(self.entries) + 1, t, source, incarnation, n, t, event))

    def starts(self, t: float, role: str) -> None:
        self.life[role] = self.life.get(role, 0) + 1
        self._state[role, self.life[role]] = first_state(self.life[role])
        self.at(t, ev.RoleStarted(role=role, incarnation=self.life[role], node="node-0", pid=7, start_ticks=7))

    def ready(self, t: float, role: str, healthy: float | None = None) -> None:
        """``healthy``: when that is said, if later."""
        self.at(t, ev.RoleReady(role=role, incarnation=self.life[role], seconds=1.0))
        if RoleId.parse(role).kind is RoleKind.ROLLOUT:
            self.becomes(t, role, RoleState.STALE)
        self.becomes(t if healthy is None else healthy, role, RoleState.HEALTHY)

    def becomes(self, t: float, role: str, new: RoleState) -> None:
        life = self.life[role]
        self.at(t, ev.RoleStateChanged(role=role, incarnation=life, old=self._state[role, life], new=new, reason="so"))
        self._state[role, life] = new

    def exits(self, t: float, role: str) -> None:
        self.at(t, ev.ProcessExited(role=role, incarnation=self.life[role], pid=7, cause="pidfd", last_lines=[]))
        self.becomes(t, role, RoleState.FAILED)

    def restart(self, t: float, role: str, **fields: Any) -> None:
        self.at(t, ev.RestartDecided(role=role, incarnation=self.life[role], reason="it failed", **fields))

    def sample(self, t: float, role: str, phase: str, progress: int = 0, step: int = 1, phase_age: float = 0.0) -> None:
        self.at(
            t,
            ev.RoleSample(
                role=role,
                incarnation=self.life[role],
                phase=phase,
                progress=progress,
                pending=1,
                step=step,
                version=0,
                loop_age=0.0,
                cpu=0.0,
                phase_age=phase_age,
            ),
        )

    def batch(self, t: float, batch: int, *, finished: float | None = None, tokens: int = 10) -> None:
        """Two trajectories, dispatched to rollout-0 and, if so, finished at ``finished``."""
        ids = [2 * batch - 1, 2 * batch]
        self.at(t, ev.TrajectoriesStarted(batch=batch, group=0, ids=ids, rollout="rollout-0", version=0))
        if finished is not None:
            self.finish(finished, batch, tokens)

    def finish(self, t: float, batch: int, tokens: int = 10) -> None:
        ids = [2 * batch - 1, 2 * batch]
        runs = [[(0, tokens)]] * 2
        event = ev.TrajectoriesFinished(
            batch=batch, group=0, ids=ids, prompt="1+1=", texts=["2"] * 2, rewards=[1.0] * 2, tokens=[tokens] * 2, versions=runs,
            tool_turns=[0] * 2,
        )  # fmt: skip
        self.at(t, event)

    def commit(self, t: float, step: int) -> None:
        consumed = [2 * step - 1, 2 * step] if step else []
        event = ev.OptimizerStepCommitted(
            step=step, version=step, digest=f"{step:032x}", snapshot_digest="s", consumed=consumed, batch=step, bytes=1,
            holder="state_keeper-0", incarnation=1,
        )  # fmt: skip
        self.at(t, event)

    def verdict(self, t: float, role: str, rule: str, onset: float) -> None:
        self.at(
            t,
            ev.Verdict(
                role=role,
                incarnation=self.life[role],
                kind="failed",
                rule=rule,
                evidence={},
                threshold=1.0,
                due=t,
                seen=t,
                onset=onset,
                blind_spot="",
            ),
        )

    def injects(self, t: float, role: str, fault: int = 1) -> None:
        self.at(t, ev.FaultPlanned(fault=fault, kind="kill", target=role, when="now", benign=False, options={}))
        proof = {"signal": "SIGKILL"}
        life = self.life[role]
        self.at(t, ev.FaultInjected(fault=fault, role=role, incarnation=life, node="node-0", pid=7, phase="train", step=1, proof=proof))

    def ends(self, t: float, status: str = "done") -> None:
        self.at(t, ev.EndDecided(status=status, reason="so"))
        self.at(t, ev.RunEnded(status=status, reason="so", wall=1e9))
