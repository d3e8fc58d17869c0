"""What can be done to a virtual job, one method `_do_KIND` for each kind of `Fault`. See detection_world.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from world_roles import Agent, Role, Supervisor
from world_shape import TICK, Fault

from robustrl.core import events as ev
from robustrl.core.roles import RoleKind


class Faults:
    """A part of World."""

    def _draw(self, value: float | tuple[float, float]) -> float:
        return self.dice.uniform(*value) if isinstance(value, tuple) else value

    def _try(self, fault: Fault) -> None:
        role = self.roles.get(fault.role)
        if self.step < fault.step:
            self.after(TICK, lambda: self._try(fault))
            return
        if role is not None and fault.phase and fault.kind != "long_phase":
            role.turn(self.now)
            done = fault.phase in ("prefill", "decode") and not role.pending
            if role.phase.value != fault.phase or not role.up or done:
                self.after(0.01, lambda: self._try(fault))
                return
        self.injected.append((self.now, fault))
        for next in self.planned:
            if next.after is not None and self.planned[next.after] is fault:
                self.after(next.at, lambda next=next: self._try(next))
        if role is not None:
            role.turn(self.now)
        getattr(self, f"_do_{fault.kind}")(fault, role)

    def agent_of(self, role: Role) -> Agent:
        agent = self.on(role.node)[0]  # made first
        assert isinstance(agent, Agent)
        return agent

    def _looked_at(self, role: Role) -> bool:
        """Often enough for `turn` to be left to its node agent."""
        agent = self.agent_of(role)
        return agent.up and agent.period <= 0.1

    def _later(self, fault: Fault, undo: Callable[[], Any]) -> None:
        if fault.seconds is not None:
            self.after(fault.seconds, undo)  # type: ignore[arg-type]

    def _flag(self, fault: Fault, role: Role, name: str, value: Any, before: Any) -> None:
        incarnation = role.incarnation
        setattr(role, name, value)
        self._later(fault, lambda: (role.turn(self.now), setattr(role, name, before)) if role.incarnation == incarnation else None)

    def _die(self, role: Role) -> None:
        role.alive = False
        if role.node in self._lost:
            return
        agent = self.agent_of(role)
        if role is agent or role.kind is RoleKind.SUPERVISOR:
            event = ev.ProcessExited(role=role.name, incarnation=role.incarnation, pid=1, cause="Ray: ActorDiedError", last_lines=[])
            self.after(0.01 + self.lag(), lambda: self._arrive(ev.HOST, 1, self.now, event))
            if role.kind is RoleKind.SUPERVISOR:
                self.after(1.0, lambda: self._start(role.name, 1.0))
        elif isinstance(agent, Agent) and agent.alive and not agent.frozen:
            incarnation = role.incarnation
            self.after(0.002, lambda: self.emit(agent.name, ev.ProcessExited(
                role=role.name, incarnation=incarnation, pid=1, cause="pidfd", last_lines=[])))  # fmt: skip
        elif isinstance(agent, Agent):
            agent.unreported.append(role)

    def _do_kill(self, fault: Fault, role: Role) -> None:
        self._die(role)

    _do_exit = _do_kill

    def _do_exception(self, fault: Fault, role: Role, error: str = "RuntimeError") -> None:
        self.emit(role.name, ev.ErrorRaised(role=role.name, incarnation=role.incarnation, error=error, text="injected"))
        role.hung = True
        self.after(0.2, lambda: self._die(role))

    def _do_non_finite(self, fault: Fault, role: Role) -> None:
        self._do_exception(fault, role, "TrainingError")

    def _do_freeze(self, fault: Fault, role: Role | None) -> None:
        if role is None:
            if self._host_frozen_since is None:
                self._host_frozen_since = self.now
            self._later(fault, self._thaw_host)
            return
        role.frozen = True
        incarnation = role.incarnation
        self._later(fault, lambda: self._thaw(role, incarnation, fault.seconds))  # type: ignore[arg-type]

    def _thaw(self, role: Role, incarnation: int, seconds: float) -> None:
        if role.incarnation != incarnation or not role.alive:
            return
        role.turn(self.now)
        role.frozen = False
        if isinstance(role, Supervisor):
            role.suspended = seconds
            role.wake()

    def _thaw_host(self) -> None:
        if self._host_frozen_since is None:
            return
        seconds, self._host_frozen_since = self.now - self._host_frozen_since, None
        self._log(ev.HOST, 1, self.now, ev.ClockGap(seconds=seconds))
        inbox, self._host_inbox = self._host_inbox, []
        for word in inbox:
            self.now += 1e-6
            self._log(*word)

    def _do_wedge(self, fault: Fault, role: Role) -> None:
        self._flag(fault, role, "wedged", True, False)

    def _do_hang(self, fault: Fault, role: Role) -> None:
        self._flag(fault, role, "hung", True, False)

    def _do_dry(self, fault: Fault, role: Role) -> None:
        self._flag(fault, role, "dry", True, False)

    def _do_slow(self, fault: Fault, role: Role) -> None:
        self._flag(fault, role, "speed", 1 / fault.size, 1.0)  # type: ignore[operator]

    def _do_lag(self, fault: Fault, role: Role) -> None:
        role.blocked_until = self.now + (fault.seconds or 1e9)  # type: ignore[operator]

    def _do_node_loss(self, fault: Fault, role: None) -> None:
        self._lost.add(fault.role)
        for victim in self.on(fault.role):
            victim.alive = False
        event = ev.NodeLost(node=fault.role, reason="injected")
        self.after(self.dice.uniform(1.0, 3.0), lambda: self._arrive(ev.HOST, 1, self.now, event))

    def _do_late_start(self, fault: Fault, role: Role) -> None:
        self._never_ready.add(role.name)

    def _do_peer_gone(self, fault: Fault, role: Role, incarnation: int = 0) -> None:
        other = next((r for r in self.of(RoleKind.ROLLOUT) if r is not role and r.alive), None)
        if other is None:
            self.injected.pop()
            return
        self.emit(other.name, ev.PeerGone(role=other.name, incarnation=other.incarnation, peer=role.name,
                                          peer_incarnation=incarnation or role.incarnation, error="UCXXConnectionResetError"))  # fmt: skip

    def _do_late_word(self, fault: Fault, role: Role) -> None:
        before = role.incarnation - 1
        if before < 1:
            self.injected.pop()
            self.after(TICK, lambda: self._try(fault))
            return
        agent = self.agent_of(role)
        self._do_peer_gone(fault, role, before)
        self.emit(agent.name, ev.ProcessExited(role=role.name, incarnation=before, pid=1, cause="pidfd", last_lines=[]))
        words: list[ev.Event] = [ev.ErrorRaised(role=role.name, incarnation=before, error="RuntimeError", text="late"),
                                 ev.HeartbeatAnswered(role=role.name, incarnation=before, number=1)]  # fmt: skip
        for word in words:
            self.after(self.lag(), lambda word=word: self._arrive(role.name, before, self.now, word))

    def _do_lost_group(self, fault: Fault, role: Role) -> None:
        if self.dispatched > self.training:
            self.left[self.dispatched] += 1
        else:
            self.after(TICK, lambda: self._do_lost_group(fault, role))

    def _do_long_phase(self, fault: Fault, role: Role) -> None:
        role.extra[fault.phase] = fault.seconds  # type: ignore[assignment]

    def _do_long_token(self, fault: Fault, role: Role) -> None:
        role.extra["token"] = fault.seconds  # type: ignore[assignment]

    def _do_compile(self, fault: Fault, role: Role) -> None:
        self._compiles[role.name] = fault.seconds  # type: ignore[assignment]

    def _do_slow_tool(self, fault: Fault, role: None) -> None:
        self.tool_seconds = fault.seconds  # type: ignore[assignment]

    def _do_slow_pull(self, fault: Fault, role: Role) -> None:
        role.extra["pull"] = fault.seconds  # type: ignore[assignment]

    def _do_slow_disk(self, fault: Fault, role: Role) -> None:
        role.extra["disk"] = fault.seconds  # type: ignore[assignment]

    def _do_idle(self, fault: Fault, role: Role) -> None:
        self._idle.add(role.name)
        self._later(fault, lambda: self._idle.discard(role.name))

    def _do_pause(self, fault: Fault, role: None) -> None:
        self.paused = True
        self.emit("task_runner", ev.Paused(step=self.step))

        def resume() -> None:
            self.paused = False
            self.emit("task_runner", ev.Resumed(step=self.step))

        self._later(fault, resume)

    def _do_offset(self, fault: Fault, role: None) -> None:
        self._offsets[fault.role] = fault.size  # type: ignore[assignment]

    def _do_starved(self, fault: Fault, role: Role) -> None:
        self._flag(fault, role, "period", fault.size, 0.1)
