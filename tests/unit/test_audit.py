"""The audit: a good log passes, and whatever a forger removes, doubles or alters is named by its rule, the chain computed anew."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_log import forge, made_log

from robustrl.core import events as ev
from robustrl.core.audit import RULES, audit

replace = msgspec.structs.replace


def first(entries: list[ev.Entry], kind: type, which: Callable[[msgspec.Struct], bool] = lambda event: True) -> int:
    return next(i for i, entry in enumerate(entries) if isinstance(entry.event, kind) and which(entry.event))


def rules(entries: list[ev.Entry]) -> list[str]:
    return list(dict.fromkeys(finding.rule for finding in audit(entries)))


def altered(entries: list[ev.Entry], kind: type, changes: dict, which: Callable = lambda event: True) -> list[ev.Entry]:
    i = first(entries, kind, which)
    changes = {name: value(getattr(entries[i].event, name)) if callable(value) else value for name, value in changes.items()}
    return [*entries[:i], replace(entries[i], event=replace(entries[i].event, **changes)), *entries[i + 1 :]]


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 5),
    prompts=st.integers(1, 3),
    samples=st.integers(2, 3),
    rollouts=st.integers(1, 3),
    staleness=st.integers(0, 2),
    status=st.sampled_from(["done", "stopped", "failed"]),
    drop=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_good_log_passes(**shape) -> None:
    entries = made_log(**shape)
    assert audit(entries) == []
    assert forge(entries) == entries, "the forger of these tests leaves no trace of its own"


def of_step_2(event) -> bool:
    return event.step == 2


def of_version_2(event) -> bool:
    return event.version == 2


REMOVED = [
    (ev.RunStarted, None, "config"),
    (ev.RunEnded, None, "closing"),
    (ev.EndDecided, None, "closing"),
    (ev.OptimizerStepCommitted, of_step_2, "steps"),
    (ev.OptimizerStepCommitted, lambda event: event.step == 3, "steps"),
    (ev.TrajectoriesStarted, None, "ledger"),
    (ev.TrajectoriesConsumed, of_step_2, "ledger"),
    (ev.TrajectoriesDropped, None, "ledger"),
    (ev.TrajectoriesFinished, None, "finished"),
    (ev.VersionAnnounced, of_version_2, "versions"),
    (ev.PullCommitted, lambda event: event.version == 0, "pulls"),
    (ev.PullCommitted, lambda event: event.version == 3, "pulls"),
    (ev.PullStarted, of_version_2, "pulls"),
    (ev.EvaluationDone, None, "evaluations"),
    (ev.NodeStarted, None, "roles"),
    (ev.StepMetrics, of_step_2, "metrics"),
    (ev.RoleStarted, None, "roles"),
    (ev.RoleReady, None, "roles"),
    (ev.RoleStateChanged, lambda event: event.new == "stale", "roles"),
    (ev.RoleStateChanged, lambda event: event.new == "stopped", "roles"),
]


@pytest.mark.parametrize(("kind", "which", "rule"), REMOVED)
def test_a_missing_event_is_named_by_its_rule(kind, which, rule) -> None:
    entries = made_log(rollouts=1)
    del entries[first(entries, kind, which or (lambda event: True))]
    assert rules(forge(entries))[0] == rule


DOUBLED = [
    (ev.RunStarted, None, "config"),
    (ev.EndDecided, None, "closing"),
    (ev.RunEnded, None, "closing"),
    (ev.OptimizerStepCommitted, of_step_2, "steps"),
    (ev.TrajectoriesStarted, None, "ledger"),
    (ev.TrajectoriesConsumed, of_step_2, "ledger"),
    (ev.TrajectoriesDropped, None, "ledger"),
    (ev.TrajectoriesFinished, None, "finished"),
    (ev.VersionAnnounced, of_version_2, "versions"),
    (ev.PullCommitted, of_version_2, "pulls"),
    (ev.StepMetrics, of_step_2, "metrics"),
    (ev.RoleStarted, None, "roles"),
    (ev.RoleReady, None, "roles"),
    (ev.RoleStateChanged, None, "roles"),
    (ev.EvaluationDone, None, "evaluations"),
    (ev.NodeStarted, None, "roles"),
    (ev.PullStarted, of_version_2, "transfers"),
    (ev.SnapshotCopied, of_step_2, "copies"),
    (ev.TokensJournalled, None, "journalled"),
    (ev.ThresholdsChanged, None, "settings"),
    (ev.ThresholdsChanged, lambda event: event.changes, "settings"),
    (ev.RecoverySettings, None, "settings"),
]


@pytest.mark.parametrize(("kind", "which", "rule"), DOUBLED)
def test_a_doubled_event_is_named_by_its_rule(kind, which, rule) -> None:
    entries = made_log()
    i = first(entries, kind, which or (lambda event: True))
    assert rules(forge([*entries[: i + 1], *entries[i:]]))[0] == rule


ALTERED = [
    (ev.RunStarted, {"schema": 99}, None, "schema"),
    (ev.RunStarted, {"config": {"steps": "many"}}, None, "config"),
    (ev.RunEnded, {"status": "splendid"}, None, "closing"),
    (ev.EndDecided, {"status": "failed"}, None, "closing"),
    (ev.RunStarted, {"config": lambda config: config | {"steps": 4}}, None, "steps"),
    (ev.OptimizerStepCommitted, {"step": 3}, of_step_2, "steps"),
    *((ev.VersionAnnounced, {"address": address}, of_version_2, "transfers") for address in ("", "junk", "127.0.0.1:99999", "8.8.8.8:9")),
    (ev.PullCommitted, {"address": "127.0.0.1:9x"}, of_version_2, "transfers"),
    (ev.StepMetrics, {"values": lambda values: values | {"importance_weight": 1.2}}, of_step_2, "metrics"),
    (ev.OptimizerStepCommitted, {"batch": 1}, of_step_2, "steps"),
    (ev.OptimizerStepCommitted, {"version": 9}, of_step_2, "steps"),
    (ev.OptimizerStepCommitted, {"consumed": lambda ids: [*ids, 1]}, of_step_2, "steps"),
    (ev.OptimizerStepCommitted, {"consumed": lambda ids: ids[1:]}, of_step_2, "consumption"),
    (ev.OptimizerStepCommitted, {"digest": "f" * 32}, of_step_2, "digest"),
    (ev.TrajectoriesStarted, {"ids": lambda ids: [*ids[:-1], 9999]}, None, "ledger"),
    (ev.TrajectoriesStarted, {"version": 7}, None, "staleness"),
    (ev.TrajectoriesStarted, {"rollout": "rollout-9"}, None, "staleness"),
    (ev.TrajectoriesConsumed, {"ids": lambda ids: ids[1:]}, of_step_2, "ledger"),
    (ev.TrajectoriesConsumed, {"step": 9}, of_step_2, "consumption"),
    (ev.TrajectoriesDropped, {"ids": [1]}, None, "ledger"),
    (ev.TrajectoriesFinished, {"group": 5}, None, "finished"),
    (ev.TrajectoriesFinished, {"rewards": lambda rewards: rewards[1:]}, None, "finished"),
    (ev.TrajectoriesFinished, {"tokens": lambda tokens: [n + 1 for n in tokens]}, None, "tokens"),
    (ev.TrajectoriesFinished, {"versions": lambda runs: [[(8, n) for _, n in run] for run in runs]}, None, "staleness"),
    (ev.VersionAnnounced, {"version": 1}, of_version_2, "versions"),
    (ev.VersionAnnounced, {"version": 9}, of_version_2, "versions"),
    (ev.VersionAnnounced, {"digest": "f" * 32}, of_version_2, "digest"),
    (ev.PullStarted, {"version": 9}, of_version_2, "pulls"),
    (ev.PullCommitted, {"version": 1}, of_version_2, "digest"),
    (ev.PullCommitted, {"version": 1, "digest": f"{1:032x}"}, of_version_2, "pulls"),
    (ev.PullCommitted, {"digest": "f" * 32}, of_version_2, "digest"),
    (ev.PullCommitted, {"probe_gap": 0.5}, of_version_2, "pulls"),
    (ev.PullCommitted, {"incarnation": 2}, of_version_2, "pulls"),
    (ev.StepMetrics, {"step": 1}, of_step_2, "metrics"),
    (ev.EvaluationDone, {"version": 9}, None, "evaluations"),
    (ev.EvaluationDone, {"accuracy": 7.5}, None, "evaluations"),
    (ev.EvaluationDone, {"accuracy": -0.1}, None, "evaluations"),
    (ev.EvaluationDone, {"accuracy": 0.33}, None, "evaluations"),
    (ev.EvaluationDone, {"prompts": 0}, None, "evaluations"),
    (ev.EvaluationDone, {"prompts": 20}, None, "evaluations"),
    (ev.EvaluationDone, {"prompts": 257}, None, "evaluations"),
    (ev.EvaluationDone, {"samples": [{"reward": 1.0}] * 4}, None, "evaluations"),
    (ev.EvaluationDone, {"samples": [{"reward": 0.0}] * 8}, None, "evaluations"),
    (ev.RunStarted, {"config": lambda config: config | {"evaluation_prompts": 9}}, None, "evaluations"),
    (ev.StepMetrics, {"values": lambda values: values | {"reward": 0.5}}, of_step_2, "metrics"),
    (ev.StepMetrics, {"values": lambda values: values | {"accuracy": 0.5}}, of_step_2, "metrics"),
    (ev.StepMetrics, {"values": lambda values: values | {"length": 9.0}}, of_step_2, "metrics"),
    (ev.TrajectoriesFinished, {"rewards": lambda rewards: [0.0 for _ in rewards]}, None, "metrics"),
    (ev.RunStarted, {"config": lambda config: config | {"prompts_per_step": 3}}, None, "batches"),
    (ev.RunStarted, {"config": lambda config: config | {"prompts_per_step": 1}}, None, "batches"),
    (ev.RunStarted, {"config": lambda config: config | {"samples_per_prompt": 3}}, None, "batches"),
    (ev.OptimizerStepCommitted, {"holder": "state_keeper-7"}, of_step_2, "emitters"),
    (ev.OptimizerStepCommitted, {"incarnation": 9}, of_step_2, "emitters"),
    (ev.RoleStarted, {"role": "cook-0"}, None, "roles"),
    (ev.RoleReady, {"incarnation": 2}, None, "roles"),
    (ev.PullStarted, {"version": -1}, None, "pulls"),
    (ev.PullStarted, {"transport": "rc_mlx5"}, of_version_2, "transfers"),
    (ev.PullProgress, {"transport": "rc_mlx5"}, of_version_2, "transfers"),
    (ev.PullCommitted, {"transport": "rc_mlx5"}, of_version_2, "transfers"),
    (ev.PullCommitted, {"bytes": 0}, of_version_2, "transfers"),
    (ev.PullCommitted, {"lag": 2}, of_version_2, "transfers"),
    (ev.PullCommitted, {"bytes": 10**12}, of_version_2, "transfers"),
    (ev.PullStarted, {"source": "rollout-7"}, of_version_2, "pulls"),
    (ev.PullCommitted, {"source": "rollout-7"}, of_version_2, "pulls"),
    (ev.PullStarted, {"source_incarnation": 2}, of_version_2, "serving"),
    (ev.RoleSample, {"version": -1}, None, "serving"),
    (ev.TrajectoriesFinished, {"versions": lambda runs: [[(v, 1) for v, n in run for _ in range(n)] for run in runs]}, None, "tokens"),
    (ev.RoleStarted, {"node": "node-9"}, None, "roles"),
    (ev.RoleStarted, {"incarnation": 3}, None, "roles"),
    (ev.RoleStateChanged, {"new": "healthy"}, lambda event: event.new == "stale", "roles"),
    (ev.RoleStateChanged, {"old": "failed"}, None, "roles"),
    (ev.RoleStateChanged, {"new": "splendid"}, None, "roles"),
    (ev.PullStarted, {"lease": lambda lease: lease - 1}, of_version_2, "transfers"),
    (ev.PullStarted, {"bytes": 999}, of_version_2, "transfers"),
    (ev.PullStarted, {"target": "rollout-9"}, of_version_2, "pulls"),
    (ev.PullProgress, {"version": 1}, of_version_2, "transfers"),
    (ev.PullProgress, {"source": "rollout-0"}, of_version_2, "transfers"),
    (ev.PullProgress, {"done": 1001}, of_version_2, "transfers"),
    (ev.PullProgress, {"bytes": 5000}, of_version_2, "transfers"),
    (ev.PullProgress, {"target": "rollout-9"}, of_version_2, "transfers"),
    (ev.SnapshotCopied, {"step": 9}, of_step_2, "copies"),
    (ev.SnapshotCopied, {"step": 1}, of_step_2, "copies"),
    (ev.SnapshotCopied, {"digest": "other"}, of_step_2, "copies"),
    (ev.SnapshotCopied, {"bytes": 1}, of_step_2, "copies"),
    (ev.SnapshotCopied, {"holder": "state_keeper-9"}, of_step_2, "copies"),
    (ev.SnapshotCopied, {"source": "trainer-9"}, of_step_2, "copies"),
    (ev.TokensJournalled, {"tokens": 10**6}, None, "journalled"),
    (ev.TokensJournalled, {"incarnation": 2}, None, "journalled"),
    (ev.TokensJournalled, {"role": "trainer-0"}, None, "journalled"),
    (ev.RoleSample, {"cpu": 1e6}, None, "samples"),
    (ev.RoleSample, {"progress": 10**6}, None, "samples"),
    (ev.RoleSample, {"version": 2}, None, "samples"),
    (ev.RoleSample, {"incarnation": 2}, None, "samples"),
    (ev.RoleSample, {"phase": "train"}, None, "samples"),
    (ev.ThresholdsChanged, {"thresholds": lambda all: all | {"node": {"silent": 0.0}}}, None, "settings"),
    (ev.ThresholdsChanged, {"thresholds": lambda all: all | {"node": {"silent": 31.0}}}, None, "settings"),
    (ev.ThresholdsChanged, {"changes": {}}, lambda event: event.changes, "settings"),
    (ev.ThresholdsChanged, {"changes": {"node.silent": [30.0, 31.0]}}, None, "settings"),
    (ev.RecoverySettings, {"mode": "splendid"}, None, "settings"),
    (ev.RecoverySettings, {"mode": "observe"}, None, "settings"),
    (ev.RecoverySettings, {"mode": "isolated"}, lambda event: event.mode == "full", "settings"),
]


@pytest.mark.parametrize(("kind", "changes", "which", "rule"), ALTERED)
def test_an_altered_event_is_named_by_its_rule(kind, changes, which, rule) -> None:
    forged = forge(altered(made_log(), kind, changes, which or (lambda event: True)))
    assert rules(forged)[0] == rule


def test_every_rule_has_a_test_that_breaks_it() -> None:
    elsewhere = {"chain", "sequence", "recoveries", "faults", "verdicts"}  # the last two: test_fault_book
    elsewhere |= {"ranges", "durations"}  # test_audit_values
    elsewhere |= {"asked", "expected", "processes", "succession"}  # test_audit_asked
    assert {rule for *_, rule in [*REMOVED, *DOUBLED, *ALTERED]} | elsewhere == set(RULES)


def test_an_event_moved_before_its_cause() -> None:
    entries = made_log()
    commit = first(entries, ev.OptimizerStepCommitted, of_step_2)
    assert isinstance(entries[commit + 1].event, ev.VersionAnnounced)
    entries[commit], entries[commit + 1] = entries[commit + 1], entries[commit]
    assert rules(forge(entries)) == ["versions"]


def test_a_changed_line_without_a_new_chain() -> None:
    findings = audit(altered(entries := made_log(), ev.StepMetrics, {"values": lambda values: values | {"loss": 0.5}}))
    assert [(finding.rule, finding.seq) for finding in findings] == [("chain", entries[first(entries, ev.StepMetrics)].seq)]


def test_a_log_from_before_a_field_was_added_keeps_its_chain() -> None:
    told = ev.ProcessExited(role="rollout-0", incarnation=1, pid=7, cause="pidfd", last_lines=[])
    line = ev.encoder.encode(told)
    assert b"progress" not in line
    assert b'"progress":5' in ev.encoder.encode(replace(told, progress=5))


def test_the_recorded_run_that_is_shipped_passes() -> None:
    packed = Path(__file__).parents[2] / "widgets" / "robustrl_widgets" / "sample" / "demo.jsonl.gz"
    entries = [ev.entry_decoder.decode(line) for line in gzip.decompress(packed.read_bytes()).splitlines()]
    assert len(entries) > 100 and audit(entries) == []


def test_a_line_is_read_to_the_byte() -> None:
    """What decoding passes over is in no chain: a key too many, another order, a space."""
    entries = made_log(steps=1, rollouts=1)
    lines = [ev.encoder.encode(entry) for entry in entries]
    assert audit(entries, lines) == []
    for change in ((b'{"seq"', b'{"x":1,"seq"'), (b'"seq":5,', b'"seq":9,"seq":5,'), (b',"source"', b', "source"'), (b'"}', b'"}\r')):
        forged = [*lines[:4], lines[4].replace(*change, 1), *lines[5:]]
        assert forged != lines and ev.entry_decoder.decode(forged[4]) == entries[4]
        assert [(finding.rule, finding.seq) for finding in audit(entries, forged)] == [("chain", 5)]


def test_who_speaks_was_started() -> None:
    entries = made_log()
    assert rules(forge(replace(e, source="task_runner-7") if isinstance(e.event, ev.StepMetrics) else e for e in entries)) == ["roles"]


def test_a_pull_from_several_sources_may_receive_a_byte_twice_and_no_more() -> None:
    entries = made_log(rollouts=1)
    start = first(entries, ev.PullStarted, of_version_2)
    commit = first(entries, ev.PullCommitted, of_version_2)
    again = replace(entries[start], event=replace(entries[start].event, lease=99))

    def received(count: int) -> list[str]:
        committed = replace(entries[commit], event=replace(entries[commit].event, bytes=count))
        return rules(forge([*entries[:start], again, *entries[start:commit], committed, *entries[commit + 1 :]]))

    assert [received(count) for count in (1000, 1500, 600, 2001, -1)] == [[], [], [], ["transfers"], ["transfers", "ranges"]]


def test_what_a_tool_put_in_is_not_trained_on() -> None:
    entries = made_log(drop=False)

    def with_length(length: float, turns: int) -> list[str]:
        told = forge(entries)
        for i, entry in enumerate(told):
            if isinstance(event := entry.event, ev.TrajectoriesFinished):
                told[i] = replace(entry, event=replace(event, tool_turns=[turns] * len(event.ids)))
            elif isinstance(event, ev.StepMetrics) and event.step == 1:
                told[i] = replace(entry, event=replace(event, values=event.values | {"length": length}))
            elif isinstance(event, ev.RunStarted):
                told[i] = replace(entry, event=replace(event, config=event.config | {"task": "arithmetic_tool"}))
        return rules(forge(told))

    assert [with_length(*said) for said in ((2.0, 0), (1.5, 1), (1.5, 0), (2.5, 1))] == [[], [], ["metrics"], ["metrics"]]


def chained(entries: list[ev.Entry]) -> list[ev.Entry]:
    """Chained anew, every number left as it is."""
    result, chain = [], ev.GENESIS
    for entry in entries:
        result.append(ev.seal(entry, chain)[0])
        chain = result[-1].chain
    return result


def test_sequence_and_time() -> None:
    entries = made_log()
    assert rules(chained(entries[:20] + entries[21:]))[0] == "sequence"
    assert rules(chained([*entries[:20], replace(entries[20], t=1.0), *entries[21:]])) == ["sequence"]


@pytest.mark.parametrize("kind", sorted({type(entry.event) for entry in made_log()}, key=lambda kind: kind.__name__))
def test_any_event_doubled_with_its_own_time_is_seen(kind: type) -> None:
    entries = made_log()
    i = first(entries, kind)
    forged = forge([*entries[: i + 1], *entries[i:]])
    forged[i + 1] = replace(forged[i + 1], at=forged[i].at)
    assert "emitters" in rules(chained(forged))


def test_an_emitters_clock_goes_on() -> None:
    entries = made_log()
    i = first(entries, ev.StepMetrics)
    assert rules(chained([*entries[:i], replace(entries[i], at=1.0), *entries[i + 1 :]])) == ["emitters"]


def test_what_a_restored_state_claims_is_compared_with_what_was_committed() -> None:
    entries = made_log()
    i = first(entries, ev.OptimizerStepCommitted, of_step_2) + 1

    def restored(step: int, digest: str) -> list[str]:
        event = ev.SnapshotRestored(role="trainer-0", incarnation=1, step=step, source="local", digest=digest, seconds=0.1)
        entry = replace(entries[i], source="trainer-0", event=event)
        return rules(forge([*entries[:i], entry, *entries[i:]]))

    assert [restored(2, "s2"), restored(2, "s1"), restored(9, "s9")] == [[], ["copies"], ["copies"]]


def test_more_tokens_journalled_than_a_life_has_generated() -> None:
    entries = made_log(rollouts=1)
    i = max(i for i, entry in enumerate(entries) if isinstance(entry.event, ev.TokensJournalled))
    entries[i] = replace(entries[i], event=replace(entries[i].event, tokens=1000))
    for progress, found in ((1000, []), (-1, []), (990, []), (900, ["journalled"])):
        gone = ev.ProcessExited(role="rollout-0", incarnation=1, pid=107, cause="pidfd", last_lines=[], progress=progress)
        assert rules(forge([*entries[:i], replace(entries[i], source="node_agent-0", event=gone), *entries[i:]])) == found


def test_numbers_of_an_emitter() -> None:
    entries = made_log()
    i = first(entries, ev.PullProgress)
    assert rules(chained([replace(e, seq=n) for n, e in enumerate(entries[:i] + entries[i + 1 :], 1)]))[0] == "emitters"
    assert rules(chained([replace(e, seq=n) for n, e in enumerate(entries[: i + 1] + entries[i:], 1)])) == ["emitters"]


def test_a_log_cut_short_and_an_empty_one() -> None:
    assert rules(made_log()[:-1]) == ["closing"]
    assert rules([]) == ["config", "closing"]
    assert [str(finding) for finding in audit([])][0] == "config: it holds no entry, and a log begins with run_started"


def test_a_version_may_be_announced_again_by_the_next_life_of_its_holder_only() -> None:
    entries = made_log()
    place, again = next((i, e) for i, e in reversed(list(enumerate(entries))) if isinstance(e.event, ev.VersionAnnounced))

    def with_copy(incarnation: int) -> list[ev.Entry]:
        copy = msgspec.structs.replace(again, event=msgspec.structs.replace(again.event, incarnation=incarnation))
        return forge([*entries[: place + 1], copy, *entries[place + 1 :]])

    assert "versions" in {finding.rule for finding in audit(with_copy(again.event.incarnation))}
    assert "versions" not in {finding.rule for finding in audit(with_copy(again.event.incarnation + 1))}
