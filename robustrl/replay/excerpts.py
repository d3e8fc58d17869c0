"""A stretch of a run as a small run of its own. Pure.

Promises: a detector that begins here knows who lives, which settings hold, and how each role was last seen, ages included; entries of the
stretch are kept as they are. Leaves out: what came earlier, so a role's history and pace begin anew, a wait for an optimizer step counts
from the excerpt's start, and no audit of the whole can be made of a part.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..core import events as ev
from ..core.thresholds import KEEP_ALIVE
from .recording import STALE, aged

LEAD = 1.5 * KEEP_ALIVE
"""Seconds before the stretch in which all that is known of earlier times is put."""
_LAST_OF_ALL = (ev.ThresholdsChanged, ev.RecoverySettings, ev.OptimizerStepCommitted, ev.VersionAnnounced)
_ENDED = ("stopped", "retired")


def excerpt_entries(entries: Sequence[ev.Entry], low: float, high: float) -> list[ev.Entry]:
    """Of the host times ``low`` to ``high``; numbered anew, without a chain."""
    inside = [entry for entry in entries if low <= entry.t <= high]
    early = [entry for entry in entries if entry.t < low]
    injected = {entry.event.fault for entry in inside if isinstance(entry.event, ev.FaultInjected)}
    plans = [entry for entry in early if isinstance(entry.event, ev.FaultPlanned) and entry.event.fault in injected]
    known = sorted([*_known(early, low - LEAD - STALE), *plans], key=lambda entry: entry.seq)
    moved = [_at(entry, max(low - LEAD, min(low, 0.0))) for entry in known]  # host seconds are never below 0
    moved.sort(key=lambda entry: entry.t)  # stable
    return [msgspec.structs.replace(entry, seq=number, chain="") for number, entry in enumerate([*moved, *inside], 1)]


def _known(early: Sequence[ev.Entry], since: float) -> list[ev.Entry]:
    """Samples from before ``since`` are left out: their node agent did not look, and what came after them is not known."""
    whole: dict[object, ev.Entry] = {}
    of_role: dict[str, dict[object, ev.Entry]] = {}
    for entry in early:
        event = entry.event
        match event:
            case ev.RunStarted() | ev.NodeStarted():
                whole[type(event), getattr(event, "node", "")] = entry
            case ev.RoleStarted(role=role):
                of_role[role] = {type(event): entry}
            case ev.RoleReady(role=role) | ev.RoleStateChanged(role=role) | ev.RoleSample(role=role) | ev.ProcessExited(role=role):
                if role in of_role and _life(of_role[role]) == event.incarnation:
                    of_role[role][type(event)] = entry
            case ev.PullCommitted(target=role) if role in of_role and _life(of_role[role]) == event.incarnation:
                of_role[role][type(event)] = entry
            case ev.Paused() | ev.Resumed():
                whole[ev.Paused] = entry
            case _ if isinstance(event, _LAST_OF_ALL):
                whole[type(event)] = entry
    living = [entry for known in of_role.values() if not _over(known) for entry in known.values()]
    return [*whole.values(), *(entry for entry in living if not isinstance(entry.event, ev.RoleSample) or entry.t >= since)]


def _life(known: dict[object, ev.Entry]) -> int:
    return known[ev.RoleStarted].event.incarnation  # type: ignore[union-attr]


def _over(known: dict[object, ev.Entry]) -> bool:
    state = known.get(ev.RoleStateChanged)
    return state is not None and isinstance(state.event, ev.RoleStateChanged) and state.event.new in _ENDED


def _at(entry: ev.Entry, t: float) -> ev.Entry:
    """Not before ``t``; what was seen goes on until then."""
    if entry.t >= t:
        return entry
    if isinstance(entry.event, ev.RoleSample):
        return aged(entry, t - entry.t)
    return msgspec.structs.replace(entry, t=t, at=entry.at + t - entry.t)
