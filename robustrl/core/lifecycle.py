"""What the log implies about each role's state, and whether the job is over: the supervisor's decisions, pure.

`Lifecycle` is level-triggered: `feed` takes log entries in order, `decide` compares what the facts imply with what the log already says and
returns the missing events. A restarted supervisor feeds the whole log and goes on; nothing is decided twice. What
becomes of a role that failed is the policy's to say (recovery.py).
"""

from __future__ import annotations

from collections import defaultdict

from . import events as ev
from .recovery import (
    ALL_BECAUSE,
    COLD,
    FATAL_ERRORS,
    FULL,
    ISOLATED,
    OBSERVE,
    WARM,
    Candidate,
    Failure,
    choose_standby,
    why_all,
    why_not_restart,
)
from .roles import TRANSITIONS, RoleId, RoleKind, RoleState, first_state

DONE, STOPPED, FAILED = "done", "stopped", "failed"


class _Facts:
    """What is known of one incarnation of one role."""

    __slots__ = (
        "cause",
        "condemned",
        "error",
        "exited",
        "gave",
        "incarnation",
        "kind",
        "last_lines",
        "node",
        "node_lost",
        "ordered",
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
        """A restart of it, or of its whole kind, is decided: its end is no further news."""
        self.gave: tuple[str, int] | None = None
        """The role, and its life that failed, whose next life runs in this one's process."""
        self.ordered = ""
        """What the user wants of it: restart or drain."""
        self.error = ""
        self.suspect = False
        self.condemned = ""
        """Why the detector calls it failed although its process may live."""
        self.version = -1
        self.phase = ""
        self.cause = ""
        self.last_lines: list[str] = []

    @property
    def failed(self) -> bool:
        return (self.exited or bool(self.condemned)) and not self.gave and self.ordered != "drain"

    @property
    def serves(self) -> bool:
        return self.state is RoleState.HEALTHY and not (self.exited or self.condemned or self.gave or self.ordered or self.replaced)

    def implied(self) -> RoleState:
        if self.gave or self.ordered == "drain":
            return RoleState.STOPPED
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
        self._healthy: defaultdict[str, set[int]] = defaultdict(set)
        """Role -> its incarnations that were healthy at some time."""
        self._fault_steps: dict[tuple[str, int], int] = {}
        """Failed life of a trainer rank -> the optimizer step that was under way."""
        self._begun_at: dict[object, int] = {}
        """Beginnings of the job, resumptions included -> the last committed step at that moment."""
        self._committed = -1
        self._mode, self._standbys = ISOLATED, COLD
        self._heavy = 0
        self._joined = False
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
                self._joined, self._heavy = config.get("address") is not None, config.get("standbys") or 0
                self._begun_at["start"] = 0
                self._final_evaluation = config["evaluation_prompts"] > 0
            case ev.RunResumed(wall=wall):
                self._begun_at.setdefault(wall, self._committed)
                self._roles.clear()
                self._failure, self._ended = None, False
            case ev.RecoverySettings(mode=mode, standbys=standbys):
                self._mode, self._standbys = mode, standbys
            case ev.RoleOrdered(role=role, incarnation=incarnation, action=action):
                if facts := self._current(role, incarnation):
                    facts.ordered = action
                    facts.replaced = False
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
                        self._healthy[role].add(incarnation)
            case ev.ProcessExited(role=role, incarnation=incarnation, last_lines=lines) as event:
                if facts := self._current(role, incarnation):
                    facts.exited, facts.cause, facts.last_lines = True, facts.cause or event.in_words, lines
            case ev.RestartDecided(role=role, incarnation=incarnation) as event:
                if facts := self._current(role, incarnation):
                    self._decided(facts, event)
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
                for life in self._roles.values():
                    if life.node == node and not life.exited:
                        life.exited = life.node_lost = True
                        life.cause = f"its node {node} was lost: {reason}"
            case ev.VersionRefused(role=role, version=version, probe_gap=gap, limit=limit):
                text = (
                    f"{role} refused weight version {version}: the probe prompt's log-probabilities differ by {gap:.2g} from the trainer's "
                    f"(allowed: {limit:.2g})"
                )
                self._failure = self._failure or ev.EndDecided(status=FAILED, reason=text)
            case ev.OptimizerStepCommitted(step=step):
                self._committed = step
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
        for role, facts in list(self._roles.items()):
            if self._mode == OBSERVE or facts.replaced:
                continue
            if facts.ordered == "restart":
                due.append(self._restart(role, facts, "ordered by the user"))
            elif facts.failed:
                decisions, why = self._recover(role, facts)
                due += decisions
                if why and end is None:
                    end = ev.EndDecided(status=FAILED, reason=f"{_death(role, facts)}\n{why}")
            elif facts.gave and self._taken_over(*facts.gave):
                due.append(self._restart(role, facts, f"its process became {facts.gave[0]}"))
        if end is None and 0 <= self._steps <= self._measured and (not self._final_evaluation or self._evaluated >= self._steps):
            end = ev.EndDecided(status=DONE, reason=f"all {self._steps} optimizer steps are committed")
        return [*due, end] if end else due

    def _recover(self, role: str, facts: _Facts) -> tuple[list[ev.Event], str]:
        """What is done about a failed role, and, if nothing can be, why the job ends."""
        failure = Failure(
            kind=facts.kind,
            restarts=len(self._restarts[role]),
            was_healthy=bool(self._healthy[role]),
            error=facts.error,
            node_lost=facts.node_lost,
            failed_restarts=self._failed_restarts(role, facts.incarnation),
            first_step=self._committed <= max(self._begun_at.values(), default=0),
            same_step=any(step == self._committed + 1 and self._came_back(*life) for life, step in self._fault_steps.items()),
        )
        if facts.node_lost and self._joined and facts.kind in (RoleKind.NODE_AGENT, RoleKind.STANDBY):
            facts.replaced = True  # there is no such node any more
            return [], ""
        if why := why_not_restart(failure, self._budget):
            return [], "" if facts.kind is RoleKind.STANDBY else why
        if facts.kind is RoleKind.STANDBY:
            return [self._restart(role, facts, facts.cause)], ""
        why = "" if self._mode == FULL else why_all(failure)
        if self._mode == FULL or why:
            return self._restart_all(role, facts.cause + (f"{ALL_BECAUSE}{why}" if why else "")), ""
        return [self._restart(role, facts, facts.cause, standby=self._standby_for(facts))], ""

    def _came_back(self, role: str, incarnation: int) -> bool:
        return any(life > incarnation for life in self._healthy[role])

    def _failed_restarts(self, role: str, incarnation: int) -> int:
        number = 0
        while incarnation - number > 1 and incarnation - number not in self._healthy[role]:
            number += 1
        return number

    def _restart(self, role: str, facts: _Facts, reason: str, *, mode: str = ISOLATED, standby: str = "") -> ev.RestartDecided:
        event = ev.RestartDecided(role=role, incarnation=facts.incarnation, reason=reason, mode=mode, standby=standby)
        self._decided(facts, event)  # now, too: another role may have failed in the same moment
        return event

    def _restart_all(self, failed: str, reason: str) -> list[ev.Event]:
        spared = {RoleKind.STANDBY, RoleKind.NODE_AGENT} if self._joined else {RoleKind.STANDBY}
        roles = [
            (role, facts)
            for role, facts in self._roles.items()
            if facts.kind not in spared and not (facts.replaced or facts.gave or facts.ordered == "drain")
        ]
        roles.sort(key=lambda pair: pair[0] != failed)
        return [
            self._restart(
                role,
                facts,
                reason if role == failed else f"everything is restarted, owing to {failed}",
                mode=FULL,
                standby="" if facts.kind is RoleKind.NODE_AGENT else self._standby_for(facts, of_rollouts=False),  # agents come first
            )
            for role, facts in roles
        ]

    def _standby_for(self, facts: _Facts, *, of_rollouts: bool = True) -> str:
        if self._standbys != WARM:
            return ""
        free = [
            Candidate(role, other.kind, other.node, heavy=int(role.rpartition("-")[2] or 0) < self._heavy)
            for role, other in self._roles.items()
            if other.kind in (RoleKind.STANDBY, RoleKind.ROLLOUT) and other.serves
        ]
        if not of_rollouts:
            free = [candidate for candidate in free if candidate.kind is RoleKind.STANDBY]
        return choose_standby(facts.kind, facts.node, free)

    def _decided(self, facts: _Facts, event: ev.RestartDecided) -> None:
        """What a decision, made just now or read from the log, means for later ones."""
        role, life = event.role, (event.role, event.incarnation)
        if facts.failed and not facts.ordered:
            self._restarts[role].add(event.incarnation)
            if facts.kind is RoleKind.TRAINER:
                self._fault_steps.setdefault(life, self._committed + 1)
        if event.mode == FULL:
            self._begun_at.setdefault(life, self._committed)
        facts.replaced = True
        if event.standby and (giver := self._roles.get(event.standby)) and not giver.exited:
            giver.gave = life

    def _taken_over(self, role: str, before: int) -> bool:
        """The next life of the role is at work, or has come to its own end."""
        facts = self._roles[role]
        return facts.incarnation > before and (facts.state is RoleState.HEALTHY or facts.exited)

    def _current(self, role: str, incarnation: int) -> _Facts | None:
        """None for a late word of an earlier life."""
        facts = self._roles.get(role)
        return facts if facts and facts.incarnation == incarnation else None


_OWN_WORDS = ("exited", "node_lost", "exception")
"""Rules whose facts are taken from their events, in full."""
_REASONS = {
    RoleState.HEALTHY: "ready",
    RoleState.STALE: "ready, without weights yet",
    RoleState.SUSPECT: "something expected is missing",
    RoleState.STOPPED: "drained, or its process became another role",
}


def _death(role: str, facts: _Facts) -> str:
    """Its first line is for people. An error in what the job was given is told as it is: the role that met it, or only passed it on, is
    not at fault, and its log has the rest."""
    if facts.error in FATAL_ERRORS:
        return f"{facts.cause.removeprefix(f'{facts.error}: ')}\n{facts.error}, met by {role} (pid {facts.pid}, {facts.node})"
    phase = f" in phase {facts.phase}" if facts.phase else " while starting"
    lines = "".join(f"\n  | {line}" for line in facts.last_lines)
    return f"{role} (pid {facts.pid}, {facts.node}) died{phase}: {facts.cause}{lines}"
