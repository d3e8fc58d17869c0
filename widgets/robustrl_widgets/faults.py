"""Faults as objects with five stages (planned, injected, detected, recovered, confirmed), from the log. Hidden ones keep their secret."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from robustrl.core import events as ev
from robustrl.core.run_state import RunState

from .words import LONG, cut

if TYPE_CHECKING:
    from .scene import Scene

STAGES = ("planned", "injected", "detected", "recovered", "confirmed")
_KEPT, _SHOWN = 200, 24
_SECRETS = ("kind", "target", "hits", "schedule", "end_reason", "benign")
"""What a hidden fault does not say until somebody asks for it."""


class Faults:
    def __init__(self) -> None:
        self._cards: dict[int, dict[str, Any]] = {}

    def is_hidden(self, fault: int) -> bool:
        return bool(self._cards.get(fault, {}).get("hidden"))

    def words(self, fault: int) -> str:
        return str(self._cards.get(fault, {}).get("kind", "unknown"))

    def apply(self, entry: ev.Entry, state: RunState) -> None:
        t = round(entry.t - state.t0, 3)
        match entry.event:
            case ev.FaultPlanned() as planned:
                self._cards[planned.fault] = {
                    "n": planned.fault, "kind": cut(planned.kind), "target": cut(planned.target), "when": cut(planned.when),
                    "benign": planned.benign, "hidden": planned.hidden, "by": cut(planned.by, 40), "schedule": cut(planned.schedule),
                    "planned": t, "hits": [], "ended": ""}
                while len(self._cards) > _KEPT:
                    del self._cards[next(iter(self._cards))]
            case ev.FaultInjected() as hit:
                if card := self._cards.get(hit.fault):
                    card.setdefault("injected", t)
                    card["hits"] = [*card["hits"], {"role": hit.role, "life": hit.incarnation, "pid": hit.pid, "phase": hit.phase,
                                                    "step": hit.step, "node": hit.node}][-16:]
            case ev.FaultEnded(fault=fault, outcome=outcome, reason=reason):
                if card := self._cards.get(fault):
                    card["ended"], card["end_reason"], card["over"] = outcome, cut(reason, LONG), t

    def reveal(self, fault: int) -> dict[str, Any]:
        """All about a fault. Raises KeyError for an unknown one."""
        return dict(self._cards[fault])

    def cards(self, scene: Scene) -> dict[str, dict[str, Any]]:
        """The newest ones, completed by what detection and recovery have made of them."""
        by_fault = {fault: episode for episode in scene.episodes.all for fault in episode.record.faults}
        t0 = scene.state.t0
        drawn = {}
        for number, card in list(self._cards.items())[-_SHOWN:]:
            shown = {name: value for name, value in card.items() if name not in _SECRETS} if card["hidden"] else dict(card)
            if episode := by_fault.get(number):
                record = episode.record
                shown["recovery"] = record.number
                shown["detected"] = round(record.detected - t0, 3)
                if record.back is not None:
                    shown["recovered"] = round(record.back - t0, 3)
                    after = [(step, t) for step, t in scene.state.step_times.items() if t > record.back]
                    if after:
                        shown["confirmed"], shown["step"] = round(min(after)[1] - t0, 3), min(after)[0]
            drawn[str(number)] = shown
        return drawn


def picture(scene: Scene, now: float) -> dict[str, Any]:
    roles = {role: view.kind.value for role, view in scene.state.roles.items()}
    return {"cards": scene.faults.cards(scene), "roles": roles, "over": scene.state.over, "head": {"name": cut(scene.state.name)}}
