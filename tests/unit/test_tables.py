"""Tables as a reader takes them apart: events by type and by slice, recoveries as rows, text and HTML."""

from __future__ import annotations

from story import Story

from robustrl.core import events as ev
from robustrl.tables import Events, RecoveryTable, recoveries


def _entry(seq: int, event: ev.Event) -> ev.Entry:
    return ev.Entry(seq=seq, t=0.0, source=ev.HOST, incarnation=1, n=seq, at=0.0, event=event)


def test_a_slice_of_events_can_be_asked_like_the_whole() -> None:
    entries = Events([_entry(1, ev.Paused(step=1)), _entry(2, ev.Resumed(step=1)), _entry(3, ev.Paused(step=2))])
    assert [entry.seq for entry in entries[1:].of(ev.Paused)] == [3]
    assert entries[-1].seq == 3 and entries[0].event == ev.Paused(step=1)


def recovered() -> RecoveryTable:
    story = Story()
    story.sample(109.0, "rollout-0", "decode", 50)
    story.exits(110.0, "rollout-0")
    story.verdict(110.1, "rollout-0", "exited", onset=109.0)
    story.restart(110.2, "rollout-0", standby="<standby>")
    story.starts(112.0, "rollout-0")
    story.ready(115.0, "rollout-0", healthy=116.5)
    story.exits(120.0, "trainer-0")
    return recoveries(story.entries)


def test_recoveries_are_rows() -> None:
    frame = recovered().to_pandas()
    assert list(frame["role"]) == ["rollout-0", "trainer-0"] and list(frame["outcome"]) == ["recovered", "open"]
    first = recovered()[0]
    assert (first["at"], first["detect"], first["restart"], first["reconnect"], first["total"]) == (9.0, 1.0, 5.0, 1.5, 7.5)


def test_their_text_shows_each_stage_to_scale() -> None:
    head, first, second = repr(recovered()).splitlines()
    assert "- detect, = restart, ~ reconnect" in head
    detect = second.rstrip().rpartition(" ")[2]
    assert set(detect) == {"-"}, "the trainer was last seen 20 s before its end was noticed"
    scale = len(detect) / 20
    bar = first.rstrip().rpartition(" ")[2]
    assert [bar.count(sign) for sign in "-=~"] == [round(scale * s) for s in (1.0, 5.0, 1.5)]


def test_their_html_is_escaped_and_fetches_nothing() -> None:
    drawn = recovered()._repr_html_()
    assert "&lt;standby&gt;" in drawn and "<standby>" not in drawn and "http" not in drawn and "<script" not in drawn
    assert drawn.count("<svg") == 2 and "restart 5.00 s" in drawn
    assert "no recoveries" in recoveries([])._repr_html_() and repr(recoveries([])) == "<no recoveries>"
