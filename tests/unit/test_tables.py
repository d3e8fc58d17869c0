"""Events as a reader takes them apart: by type, and by slice."""

from __future__ import annotations

from robustrl.core import events as ev
from robustrl.tables import Events


def _entry(seq: int, event: ev.Event) -> ev.Entry:
    return ev.Entry(seq=seq, t=0.0, source=ev.HOST, incarnation=1, n=seq, at=0.0, event=event)


def test_a_slice_of_events_can_be_asked_like_the_whole() -> None:
    entries = Events([_entry(1, ev.Paused(step=1)), _entry(2, ev.Resumed(step=1)), _entry(3, ev.Paused(step=2))])
    assert [entry.seq for entry in entries[1:].of(ev.Paused)] == [3]
    assert entries[-1].seq == 3 and entries[0].event == ev.Paused(step=1)
