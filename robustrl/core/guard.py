"""Who judges the judge: whether the supervisor, which condemns all other roles, has itself come to a stop. For the host; pure.

The host feeds every entry of the log and looks at times of its own. Two signs, both measured against live settings: the node agent's
samples show that the supervisor's event loop has not come round for ``management.silent``; or nobody has seen it (its node's agent says
nothing either) and it has said nothing itself for ``node.silent`` and that together, the time in which it would have condemned the agent.

No false alarm: what counts begins when this life is ready, and anew when the host itself did not run (ClockGap); and once it is said that
the agent has failed, or is restarted, being unseen counts from the start of the agent's next life. A death is not this rule's business: it
is seen as any other. Blind spots: a loop that turns and decides nothing; one that stops after its word on an agent that never comes back.
"""

from __future__ import annotations

import math
from typing import Any

from . import events as ev
from .roles import RoleKind
from .rules import FAILED
from .thresholds import Thresholds

SUPERVISOR = RoleKind.SUPERVISOR.value
RULE_UNSEEN = "unseen"
_BLIND_SPOT = "a loop that turns and decides nothing; a call that blocks it longer than the limit looks the same"


class Guard:
    """``thresholds`` hold until a ThresholdsChanged is fed."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._incarnation = 0
        self._watching = False
        self._begun = self._seen = -math.inf
        """Host times: from when on silence counts; when it last gave a sign of any sort."""
        self._node = ""
        self._agents: dict[str, str] = {}
        """Node -> its agent."""
        self._leaving: set[str] = set()
        """Agents of which it was said that they have failed, or are restarted."""

    def feed(self, entry: ev.Entry) -> ev.Verdict | None:
        """Takes the next entry in; a verdict if it shows that the supervisor stands still. At most one for each life."""
        event = entry.event
        if entry.source == SUPERVISOR and entry.incarnation == self._incarnation:
            self._seen = entry.t
        match event:
            case ev.RoleSample(role="supervisor", incarnation=self._incarnation):
                self._seen = entry.t
                return self._judge_sample(entry, event)
            case ev.RoleStarted(role="supervisor", incarnation=incarnation):
                self._incarnation, self._watching, self._node = incarnation, False, event.node
            case ev.RoleStarted(role=role) if role.startswith(RoleKind.NODE_AGENT):
                self._agents[event.node] = role
                if role in self._leaving:
                    self._leaving.remove(role)
                    self._begun = max(self._begun, entry.t)
            case ev.RoleReady(role="supervisor", incarnation=self._incarnation):
                self._watching, self._begun = True, entry.t
            case (
                ev.ProcessExited(role="supervisor", incarnation=self._incarnation)
                | ev.RestartDecided(role="supervisor", incarnation=self._incarnation)
                | ev.EndDecided()
                | ev.RunResumed()
            ):
                self._watching = False
            case ev.Verdict(role=role, kind="failed") | ev.RestartDecided(role=role) if role.startswith(RoleKind.NODE_AGENT):
                self._leaving.add(role)
            case ev.ThresholdsChanged():
                self._thresholds = Thresholds.from_dict(event.thresholds)
            case ev.ClockGap() if entry.source == ev.HOST:
                self._begun = entry.t
        return None

    def look(self, now: float) -> ev.Verdict | None:
        """``now``: the log's time. As `feed`, when nothing has come."""
        limit = self._thresholds.node.silent + self._thresholds.management.silent
        since = max(self._begun, self._seen)
        if not self._watching or self._agents.get(self._node) in self._leaving or now < since + limit:
            return None
        return self._condemn(RULE_UNSEEN, since, limit, now, {"unseen": True, "unheard": True})

    def _judge_sample(self, entry: ev.Entry, sample: ev.RoleSample) -> ev.Verdict | None:
        limit = self._thresholds.management.silent
        since = max(self._begun, entry.t - sample.loop_age)
        if not self._watching or entry.t < since + limit:
            return None
        evidence = {"seen_by": entry.source, "process": sample.process, "loop_age": sample.loop_age, "progress": sample.progress}
        return self._condemn("silent", since, limit, entry.t, evidence)

    def _condemn(self, rule: str, onset: float, limit: float, seen: float, evidence: dict[str, Any]) -> ev.Verdict:
        self._watching = False
        return ev.Verdict(
            role=SUPERVISOR, incarnation=self._incarnation, kind=FAILED, rule=rule, evidence=evidence, threshold=limit, due=onset + limit,
            seen=seen, onset=onset, blind_spot=_BLIND_SPOT,
        )  # fmt: skip
