"""Several logs as one: times, numbers, incarnations and faults go on counting from part to part. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..core import events as ev
from .run import Mark

_LIVES = ("incarnation", "source_incarnation", "peer_incarnation")
_OF_THE_WHOLE = (ev.RunEnded, ev.EndDecided)


def joined_entries(parts: Sequence[tuple[Sequence[ev.Entry], Sequence[Mark]]], pause: float) -> tuple[list[ev.Entry], list[Mark]]:
    """``parts``: (entries, marks) of each. Between two parts lie ``pause`` seconds, in which the roles of the first are stopped."""
    found: list[ev.Entry] = []
    marks: list[Mark] = []
    lives = faults = 0
    """How far incarnations and fault numbers of the parts before have come."""
    for place, (entries, own) in enumerate(parts):
        shift = found[-1].t + pause - entries[0].t if found else 0.0
        shifted = [_moved(entry, shift, lives, faults) for entry in entries
                   if place == len(parts) - 1 or not isinstance(entry.event, _OF_THE_WHOLE)]  # fmt: skip
        found += shifted
        if place < len(parts) - 1:
            found += _stopped(shifted)
        marks += [msgspec.structs.replace(mark, start=mark.start + shift, end=mark.end + shift) for mark in own]
        lives = max([lives, *(max(entry.incarnation, getattr(entry.event, "incarnation", 0)) for entry in shifted)])
        faults = max([faults, *(entry.event.fault for entry in shifted if isinstance(entry.event, ev.FaultPlanned))])
    return [msgspec.structs.replace(entry, seq=number, chain="") for number, entry in enumerate(found, 1)], marks


def _moved(entry: ev.Entry, shift: float, lives: int, faults: int) -> ev.Entry:
    if not shift and not lives and not faults:
        return entry
    event = entry.event
    changes: dict[str, Any] = {name: getattr(event, name) + lives for name in _LIVES if hasattr(event, name)}
    if hasattr(event, "fault"):
        changes["fault"] = event.fault + faults
    if isinstance(event, ev.Verdict):
        changes |= {name: getattr(event, name) + shift for name in ("due", "seen", "onset")}
    incarnation = entry.incarnation + (0 if entry.source == ev.HOST else lives)
    event = msgspec.structs.replace(event, **changes) if changes else event
    return msgspec.structs.replace(entry, t=entry.t + shift, at=entry.at + shift, incarnation=incarnation, event=event)


def _stopped(entries: Sequence[ev.Entry]) -> list[ev.Entry]:
    """What ends the roles that a part leaves behind."""
    lives: dict[str, int] = {}
    for entry in entries:
        if isinstance(entry.event, ev.RoleStarted):
            lives[entry.event.role] = entry.event.incarnation
    last = entries[-1]
    return [msgspec.structs.replace(last, source=ev.HOST, incarnation=1, event=ev.RoleStateChanged(
        role=role, incarnation=life, old="healthy", new="stopped", reason="the next recorded run begins")) for role, life in lives.items()]
