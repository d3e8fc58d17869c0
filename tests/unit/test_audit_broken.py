"""The audit of what is no log any more: findings, never an exception."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_log import forge, made_log
from test_audit import first, rules

from robustrl.core import events as ev
from robustrl.core.audit import audit

replace = msgspec.structs.replace


@given(data=st.data())
def test_no_log_is_too_broken_to_be_audited(data: st.DataObject) -> None:
    """Whatever is left of a log, in whatever order: findings, never an exception."""
    entries = made_log(steps=2, rollouts=1)
    picked = data.draw(st.lists(st.sampled_from(entries), max_size=40))
    assert {"closing", "config"} & set(rules(forge(picked))) or picked[0] is entries[0]


def odd(value: Any) -> list[Any]:
    """Others of its type."""
    match value:
        case bool():
            return [not value]
        case int():
            return [-1, 0, value + 1, 10**18]
        case float():
            return [-1.0, 1e308]
        case str():
            return ["", "rollout-9", "failed", "\u2028"]
        case list() | tuple():
            inner = [[other, *value[1:]] for other in odd(value[0])] if value else []
            return [[], [*value, *value], *inner]
        case dict():
            return [{}, *(value | {name: other} for name in value for other in (None, "x", -1, 1e308, [], {"a": 1}, *odd(value[name])))]
    return []


def _eventful() -> list[ev.Entry]:
    """A short log with what a healthy one lacks: deaths, faults, verdicts, moves, a rollback."""
    entries = made_log(steps=1, prompts=1, rollouts=1)
    place = first(entries, ev.TrajectoriesFinished)
    ids = entries[place].event.ids
    who: dict[str, Any] = {"role": "rollout-0", "incarnation": 1}
    hit = {"fault": 1, **who, "node": "node-0", "pid": 108, "phase": "decode", "step": 1}
    verdict = {**who, "evidence": {"a": 1}, "threshold": 1.0, "due": 1.0, "seen": 1.0, "onset": 0.0, "blind_spot": ""}
    pulled = {"target": "rollout-0", "version": 0}
    more = [
        ev.FaultPlanned(fault=1, kind="delay", target="rollout-0", when="now", benign=False, options={"phase": "decode"}),
        ev.FaultInjected(**hit, proof={"milliseconds": 5, "bytes": 5, "process": "gone", "thread": 1}),
        ev.FaultEnded(fault=1, outcome="over", reason=""),
        ev.FaultRevealed(fault=1, guess=""),
        ev.Verdict(**verdict, kind="suspect", rule="progress"),
        ev.Verdict(**verdict, kind="failed", rule="node_lost"),
        ev.HeartbeatSent(**who, number=1),
        ev.HeartbeatAnswered(**who, number=1),
        ev.ErrorRaised(**who, error="E", text=""),
        ev.PullDiscarded(**pulled, bytes=1, reason=""),
        ev.PullSourceSwitched(**pulled, old_source="rollout-0", new_source="trainer-0", kept=0, reason=""),
        ev.VersionRefused(**who, version=1, probe_gap=1.0, limit=0.1),
        ev.PeerGone(**who, peer="trainer-0", peer_incarnation=1, error=""),
        ev.SnapshotRestored(role="trainer-0", incarnation=1, step=0, source="local", digest="s0", seconds=0.1),
        ev.SnapshotRefused(role="trainer-0", incarnation=1, step=0, source="local", reason=""),
        ev.RolledBack(old=1, to=0, reason=""),
        ev.ProcessExited(**who, pid=1, cause="pidfd", last_lines=[""], progress=1),
        ev.RestartDecided(**who, reason=""),
        ev.RoleStarted(role="rollout-0", incarnation=2, node="node-0", pid=1, start_ticks=1),
        ev.RoleReady(role="rollout-0", incarnation=2, seconds=1.0),
        ev.TrajectoriesMoved(ids=ids, source="rollout-0", target="rollout-0", version=0, kept=[0] * len(ids)),
        ev.NodeLost(node="node-0", reason=""),
        ev.RunResumed(wall=1.0, host_pid=1),
    ]
    host = replace(entries[0], source="host")
    return forge([*entries[:place], *(replace(host, event=event) for event in more), *entries[place:]])


EVENTFUL = _eventful()


@pytest.mark.parametrize("kind", sorted({type(entry.event) for entry in EVENTFUL}, key=lambda kind: kind.__name__))
def test_no_value_of_a_field_makes_a_rule_raise(kind: type) -> None:
    """Every field of every kind of event, whatever it is within its type: findings or none, never an exception."""
    i = first(EVENTFUL, kind)
    event = EVENTFUL[i].event
    told = [(name, value) for name in kind.__struct_fields__ for value in odd(getattr(event, name))]
    for name, value in told[:: max(1, len(told) // 12)]:
        changed = replace(EVENTFUL[i], event=replace(event, **{name: value}))
        try:
            changed = ev.entry_decoder.decode(ev.encoder.encode(changed))
        except msgspec.ValidationError:
            continue
        audit([*EVENTFUL[:i], changed, *EVENTFUL[i + 1 :]])


def test_nor_does_one_of_an_entry() -> None:
    for name in ("seq", "t", "source", "incarnation", "n", "at", "chain"):
        for value in odd(getattr(EVENTFUL[20], name)):
            assert audit([*EVENTFUL[:20], replace(EVENTFUL[20], **{name: value}), *EVENTFUL[21:]])
