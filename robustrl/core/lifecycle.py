"""What the log implies about each role's state, and whether the job is over: the supervisor's decisions, pure.

`Lifecycle` is level-triggered: `feed` takes log entries in order, `decide` compares what the facts imply with what the log already says and
returns the missing events. A restarted supervisor feeds the whole log and goes on; nothing is decided twice. A role that fails ends the
job: this version restarts nothing.
"""

from __future__ import annotations

from . import events as ev
from .roles import TRANSITIONS, RoleId, RoleKind, RoleState

DONE, STOPPED, FAILED = "done", "stopped", "failed"


class _Facts:
    """What is known of one incarnation of one role."""

    __slots__ = ("cause", "exited", "incarnation", "kind", "last_lines", "node", "phase", "pid", "ready", "state", "version")

    def __init__(self, entry: ev.RoleStarted) -> None:
        self.kind = RoleId.parse(entry.role).kind
        self.incarnation, self.node, self.pid = entry.incarnation, entry.node, entry.pid
        self.state = RoleState.STARTING
        self.ready = self.exited = False
        self.version = -1
        self.phase = ""
        self.cause = ""
        self.last_lines: list[str] = []

    def implied(self) -> RoleState:
        if self.exited:
            return RoleState.FAILED
        if not self.ready:
            return RoleState.STARTING
        if self.kind is RoleKind.ROLLOUT and self.version < 0:
            return RoleState.STALE
        return RoleState.HEALTHY


class Lifecycle:
    """Feed it each entry of a run's log; ask it what is due."""

    def __init__(self) -> None:
        self._roles: dict[str, _Facts] = {}
        self._steps = -1
        self._committed = -1
        self._evaluated = -1
        self._final_evaluation = True
        self._failure: ev.EndDecided | None = None
        self._ended = False

    def feed(self, entry: ev.Entry) -> None:
        match entry.event:
            case ev.RunStarted(config=config):
                self._steps = config["steps"]
                self._final_evaluation = config["evaluation_prompts"] > 0
            case ev.RoleStarted() as event:
                self._roles[event.role] = _Facts(event)
            case ev.RoleReady(role=role, incarnation=incarnation):
                if facts := self._current(role, incarnation):
                    facts.ready = True
            case ev.RoleSample(role=role, incarnation=incarnation, phase=phase):
                if facts := self._current(role, incarnation):
                    facts.phase = phase
            case ev.PullCommitted(target=role, incarnation=incarnation, version=version):
                if facts := self._current(role, incarnation):
                    facts.version = version
            case ev.RoleStateChanged(role=role, incarnation=incarnation, new=new):
                if facts := self._current(role, incarnation):
                    facts.state = RoleState(new)
            case ev.ProcessExited(role=role, incarnation=incarnation, cause=cause, last_lines=lines):
                if facts := self._current(role, incarnation):
                    facts.exited, facts.cause, facts.last_lines = True, cause, lines
            case ev.ErrorRaised(role=role, incarnation=incarnation, error=error, text=text):
                if self._current(role, incarnation):
                    self._failure = self._failure or ev.EndDecided(status=FAILED, reason=f"{role}: {error}: {text}")
            case ev.NodeLost(node=node, reason=reason):
                for facts in self._roles.values():
                    if facts.node == node and not facts.exited:
                        facts.exited, facts.cause = True, f"its node {node} was lost: {reason}"
            case ev.VersionRefused(role=role, version=version, probe_gap=gap, limit=limit):
                text = (
                    f"{role} refused weight version {version}: the probe prompt's log-probabilities differ by {gap:.2g} from the trainer's "
                    f"(allowed: {limit:.2g})"
                )
                self._failure = self._failure or ev.EndDecided(status=FAILED, reason=text)
            case ev.OptimizerStepCommitted(step=step):
                self._committed = step
            case ev.EvaluationDone(version=version):
                self._evaluated = version
            case ev.EndDecided() | ev.RunEnded():
                self._ended = True

    def decide(self) -> list[ev.Event]:
        """The events that the facts call for and the log lacks, in order."""
        if self._ended:
            return []
        due: list[ev.Event] = []
        end = self._failure
        for role, facts in self._roles.items():
            implied = facts.implied()
            if implied is not facts.state and implied in TRANSITIONS[facts.state]:
                reason = _REASONS.get(implied, "") if implied is not RoleState.FAILED else f"process {facts.pid} exited ({facts.cause})"
                due.append(ev.RoleStateChanged(role=role, incarnation=facts.incarnation, old=facts.state, new=implied, reason=reason))
            if implied is RoleState.FAILED and end is None:
                end = ev.EndDecided(status=FAILED, reason=_death(role, facts))
        if end is None and 0 <= self._steps <= self._committed and (not self._final_evaluation or self._evaluated >= self._steps):
            end = ev.EndDecided(status=DONE, reason=f"all {self._steps} optimizer steps are committed")
        return [*due, end] if end else due

    def _current(self, role: str, incarnation: int) -> _Facts | None:
        """None for a late word of an earlier life."""
        facts = self._roles.get(role)
        return facts if facts and facts.incarnation == incarnation else None


_REASONS = {RoleState.HEALTHY: "ready", RoleState.STALE: "ready, without weights yet"}


def _death(role: str, facts: _Facts) -> str:
    phase = f" in phase {facts.phase}" if facts.phase else " while starting"
    lines = "".join(f"\n  | {line}" for line in facts.last_lines)
    return f"{role} (pid {facts.pid}, {facts.node}) died{phase}: {facts.cause}{lines}"
