"""The picture of the FaultPanel: what can be ordered, and each fault as a card with five stages. From the book of faults in the log alone.

A hidden fault tells nothing until it is revealed.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from robustrl.core.fault_book import NEVER_FIRED, FaultView
from robustrl.core.roles import PHASES, RoleKind
from robustrl.core.run_state import RunState
from robustrl.core.thresholds import Thresholds

from .presets import offered
from .words import BROKEN, LONG, cut, in_phases, whose

if TYPE_CHECKING:
    from .scene import Scene

_SHOWN, _HITS = 24, 8
_LENGTH = 10.0
"""Seconds that are offered for a fault that needs a length."""
_UNUSUAL = ("full_disk", "partition", "delay", "node_loss")
"""Need root, namespaces or several nodes: offered last."""


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Fault -> what it is, whom it can hit, and whether it can have a length, and must (``needs``)."""
    from robustrl.faults.catalogue import CATALOGUE

    names = sorted(CATALOGUE, key=lambda name: (CATALOGUE[name].benign, name in _UNUSUAL))
    return {name: {"words": cut((CATALOGUE[name].__doc__ or "").strip().splitlines()[0]), "benign": CATALOGUE[name].benign,
                   "kinds": sorted(map(str, CATALOGUE[name].kinds)), "timed": "seconds" in CATALOGUE[name].__struct_fields__,
                   "needs": any(field.name == "seconds" and field.required for field in msgspec.structs.fields(CATALOGUE[name])),
                   "for_students": CATALOGUE[name].by != "host"}
            for name in names}


def fitting(kind: str, limits: Thresholds) -> dict[str, float | None]:
    """Faults that can be injected into a role of this kind -> the seconds that are offered for it; None: it needs none."""
    most = longest(limits)
    return {name: min(_LENGTH, most.get(name, {}).get(kind, _LENGTH)) if about["needs"] else None
            for name, about in catalogue().items() if kind in most.get(name, about["kinds"])}


def longest(limits: Thresholds) -> dict[str, dict[str, float]]:
    """Fault whose length has a limit -> kind of roles -> the most seconds that are accepted; without kinds that it cannot hit at all."""
    from robustrl.faults.freezing import LEAST_FREEZE, longest_freeze

    most = {kind: longest_freeze(RoleKind(kind), limits) for kind in catalogue()["freeze"]["kinds"]}
    return {"freeze": {kind: seconds for kind, seconds in most.items() if seconds >= LEAST_FREEZE}}


def can_be_called_off(view: FaultView, state: RunState) -> bool:
    """Whether the host would do it (faults/planner.py, runtime/injecting.py): the fault waits, or it lasts and can be undone."""
    from robustrl.faults.catalogue import CATALOGUE

    if view.settled or view.outcome:
        return False
    if not view.hits:
        return True
    role, known = state.roles.get(view.hits[0].role), CATALOGUE.get(view.kind)
    return known is not None and known.undo and role is not None and role.incarnation == view.hits[0].incarnation and not role.exited


def picture(scene: Scene, now: float) -> dict[str, Any]:
    state = scene.state
    views = list(state.faults.faults.values())[-_SHOWN:]
    return {
        "cards": {str(view.fault): card(view, state, scene.closed) for view in views}, "over": scene.over, "closed": scene.closed,
        "catalogue": catalogue(), "longest": longest(scene.detector.thresholds),
        "roles": {role: view.kind.value for role, view in state.roles.items()}, "presets": offered(state.roles),
        "recovery": {"mode": state.recovery_mode, "standbys": state.recovery_standbys} if state.recovery_mode else {},
        "phases": {str(kind): sorted(map(str, phases)) for kind, phases in PHASES.items()},
    }


def card(view: FaultView, state: RunState, closed: str) -> dict[str, Any]:
    """``closed``: why the job goes on no more, in words; then nothing more comes of the fault. ``whose``: the key of who ordered it."""
    t0 = state.t0
    if view.masked:
        return {"n": view.fault, "masked": True, "planned": round(view.planned - t0, 2), "by": cut(view.by, 40)}
    outcome, reason, dead = view.outcome, cut(view.reason, LONG), view.outcome in NEVER_FIRED and not view.hits
    if closed and not view.settled and not outcome:
        outcome, dead = ("unknown", False) if closed == BROKEN else ("unfinished", False) if view.hits else ("not_fired", True)
        reason = closed

    def at(t: float | None) -> float | None:
        return None if t is None else round(t - t0, 3)

    return {
        "n": view.fault, "kind": cut(view.kind), "target": cut(view.target), "when": cut(in_phases(view.when)), "benign": view.benign,
        "by": cut(view.by, 40), "schedule": cut(view.schedule), "planned": at(view.planned), "injected": at(view.injected),
        "detected": at(view.detected.t if view.detected else None), "recovered": at(view.recovered), "confirmed": at(view.confirmed),
        "rule": cut(view.detected.rule) if view.detected else "", "outcome": cut(outcome), "reason": reason,
        "never": dead, "settled": view.settled, "guess": cut(view.guess),
        "whose": whose(view.by), "abort": not closed and can_be_called_off(view, state),
        "hits": [{"role": hit.role, "life": hit.incarnation, "pid": hit.pid, "phase": hit.phase, "step": hit.step}
                 for hit in view.hits[-_HITS:]],
    }
