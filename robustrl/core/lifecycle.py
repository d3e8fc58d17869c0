"""What the log implies about each role's state, and whether the job is over: the supervisor's decisions, pure.

`Lifecycle` is level-triggered: `feed` takes log entries in order, `decide` compares what the facts imply with what the log already says and
returns the missing events. A restarted supervisor feeds the whole log and goes on; nothing is decided twice. What
becomes of a role that failed is the policy's to say (recovery.py).
"""

from __future__ import annotations

from collections import defaultdict

from . import events as ev
from .recovery import Failure, why_not_restart
from .roles import TRANSITIONS, RoleId, RoleKind, RoleState, first_state

DONE, STOPPED, FAILED = "done", "stopped", "failed"


class _Facts:
    """What is known of one incarnation of one role."""

    __slots__ = (
        "cause",
        "condemned",
        "error",
        "exited",
        "incarnation",
        "kind",
        "last_lines",
        "node",
        "node_lost",
        "phase",
        "pid",
        "ready",
        "replaced",
        "state",
        "suspect",
        "version",
    )

    def __init__(self, entry: ev.RoleStarted) -> None:
        self.kind = RoleId.parse(entry.role).kind
        self.incarnation, self.node, self.pid = entry.incarnation, entry.node, entry.pid
        self.state = first_state(entry.incarnation)
        self.ready = self.exited = self.node_lost = False
        self.replaced = False
        """Its restart is decided: its end is no further news."""
        self.error = ""
        self.suspect = False
        self.condemned = ""
        """Why the detector calls it failed although its process may live."""
        self.version = -1
        self.phase = ""
        self.cause = ""
        self.last_lines: list[str] = []

    def implied(self) -> RoleState:
        if self.exited or self.condemned:
            return RoleState.FAILED
        if not self.ready:
            return first_state(self.incarnation)
        if self.kind is RoleKind.ROLLOUT and self.version < 0:
            return RoleState.STALE
        return RoleState.SUSPECT if self.suspect and self.state in (RoleState.HEALTHY, RoleState.SUSPECT) else RoleState.HEALTHY


class Lifecycle:
    """Feed it each entry of a run's log; ask it what is due."""

    def __init__(self) -> None:
        self._roles: dict[str, _Facts] = {}
        self._restarts: defaultdict[str, set[int]] = defaultdict(set)
        """Role -> its incarnations that were, or are being, replaced."""
        self._were_healthy: set[str] = set()
        self._budget = 0
        self._steps = -1
        self._measured = -1
        """The last step whose metrics are known: the task runner has then finished it."""
        self._evaluated = -1
        self._final_evaluation = True
        self._failure: ev.EndDecided | None = None
        self._ended = False

    def feed(self, entry: ev.Entry) -> None:
        match entry.event:
            case ev.RunStarted(config=config):
                self._steps, self._budget = config["steps"], config["restarts"]
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
                    if facts.state is RoleState.HEALTHY:
                        self._were_healthy.add(role)
            case ev.ProcessExited(role=role, incarnation=incarnation, cause=cause, last_lines=lines):
                if facts := self._current(role, incarnation):
                    facts.exited, facts.cause, facts.last_lines = True, facts.cause or cause, lines
            case ev.RestartDecided(role=role, incarnation=incarnation):
                if facts := self._current(role, incarnation):
                    self._restarts[role].add(incarnation)
                    facts.replaced = True
            case ev.ErrorRaised(role=role, incarnation=incarnation, error=error, text=text):
                if facts := self._current(role, incarnation):
                    facts.error, facts.cause = error, f"{error}: {text}"
            case ev.Verdict(role=role, incarnation=incarnation, kind=kind, rule=rule, evidence=evidence):
                if facts := self._current(role, incarnation):
                    if kind == "suspect" or (kind == "cleared" and evidence.get("was") == "suspect"):
                        facts.suspect = kind == "suspect"
                    elif kind == "failed" and rule not in _OWN_WORDS:
                        facts.condemned = facts.cause = f"rule {rule}: {evidence}"
            case ev.NodeLost(node=node, reason=reason):
                for facts in self._roles.values():
                    if facts.node == node and not facts.exited:
                        facts.exited = facts.node_lost = True
                        facts.cause = f"its node {node} was lost: {reason}"
            case ev.VersionRefused(role=role, version=version, probe_gap=gap, limit=limit):
                text = (
                    f"{role} refused weight version {version}: the probe prompt's log-probabilities differ by {gap:.2g} from the trainer's "
                    f"(allowed: {limit:.2g})"
                )
                self._failure = self._failure or ev.EndDecided(status=FAILED, reason=text)
            case ev.StepMetrics(step=step):
                self._measured = step
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
                reason = _REASONS[implied] if implied is not RoleState.FAILED else facts.cause or f"process {facts.pid} exited"
                due.append(ev.RoleStateChanged(role=role, incarnation=facts.incarnation, old=facts.state, new=implied, reason=reason))
            if (facts.exited or facts.condemned) and not facts.replaced:
                failure = Failure(
                    kind=facts.kind,
                    restarts=len(self._restarts[role]),
                    was_healthy=role in self._were_healthy,
                    error=facts.error,
                    node_lost=facts.node_lost,
                )
                if not (why := why_not_restart(failure, self._budget)):
                    due.append(ev.RestartDecided(role=role, incarnation=facts.incarnation, reason=facts.cause))
                elif end is None:
                    end = ev.EndDecided(status=FAILED, reason=f"{_death(role, facts)}\n{why}")
        if end is None and 0 <= self._steps <= self._measured and (not self._final_evaluation or self._evaluated >= self._steps):
            end = ev.EndDecided(status=DONE, reason=f"all {self._steps} optimizer steps are committed")
        return [*due, end] if end else due

    def _current(self, role: str, incarnation: int) -> _Facts | None:
        """None for a late word of an earlier life."""
        facts = self._roles.get(role)
        return facts if facts and facts.incarnation == incarnation else None


_OWN_WORDS = ("exited", "node_lost", "exception")
"""Rules whose facts are taken from their events, in full."""
_REASONS = {RoleState.HEALTHY: "ready", RoleState.STALE: "ready, without weights yet", RoleState.SUSPECT: "something expected is missing"}


def _death(role: str, facts: _Facts) -> str:
    phase = f" in phase {facts.phase}" if facts.phase else " while starting"
    lines = "".join(f"\n  | {line}" for line in facts.last_lines)
    return f"{role} (pid {facts.pid}, {facts.node}) died{phase}: {facts.cause}{lines}"
