"""The audit's rules on single values and on what each step and role must have: a forged one is named, an honest one passes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from made_log import forge, made_log
from test_audit import altered, chained, first, of_step_2, of_version_2

from robustrl.core import events as ev
from robustrl.core.audit import audit

replace = msgspec.structs.replace


def texts(rule: str, entries: list[ev.Entry]) -> list[str]:
    return [finding.text for finding in audit(entries) if finding.rule == rule]


def told(event: ev.Event, source: str = "host") -> list[ev.Entry]:
    """A log in which that was said too, in the middle."""
    entries = made_log()
    i = first(entries, ev.StepMetrics, of_step_2)
    return forge([*entries[:i], replace(entries[i], source=source, event=event), *entries[i:]])


# -- ranges -


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        (ev.PullCommitted, {"probe_gap": -1.0}, "pull_committed.probe_gap = -1: must be at least 0"),
        (ev.PullCommitted, {"seconds": -5.0}, "pull_committed.seconds = -5"),
        (ev.PullCommitted, {"commit_seconds": -5.0}, "pull_committed.commit_seconds = -5"),
        (ev.VersionAnnounced, {"chunks": 0}, "version_announced.chunks = 0: must be at least 1"),
        (ev.RoleSample, {"pending": -1}, "role_sample.pending = -1"),
        (ev.RoleSample, {"process": "Q"}, "role_sample.process = 'Q': must be one of"),
        (ev.RoleSample, {"step": 1000}, "was seen at step 1000 of 3"),
        (ev.RoleSample, {"loop_age": -0.1}, "role_sample.loop_age = -0.1"),
        (ev.TrajectoriesFinished, {"tool_turns": lambda turns: [-9 for _ in turns]}, "trajectories_finished.tool_turns = -9"),
        (ev.RoleStarted, {"pid": 0}, "role_started.pid = 0"),
        (ev.NodeStarted, {"kinds": ["cook"]}, "node_started.kinds = 'cook'"),
        (ev.StepMetrics, {"values": lambda values: values | {"clip_fraction": 5.0}}, "clip_fraction 5: must be from 0 to 1"),
        (ev.StepMetrics, {"values": lambda values: values | {"entropy": -3.0}}, "entropy -3"),
        (ev.StepMetrics, {"values": lambda values: values | {"importance_weight": -1.0}}, "importance_weight -1: must be from 0 to 2"),
        (ev.StepMetrics, {"values": lambda values: values | {"importance_weight": 2.5}}, "importance_weight 2.5: must be from 0 to 2"),
        (ev.StepMetrics, {"values": lambda values: values | {"grad_norm": -1.0}}, "grad_norm -1"),
        (ev.StepMetrics, {"phase_seconds": lambda seconds: dict.fromkeys(seconds, -1.0)}, "-1 s of the phase train"),
        (ev.StepMetrics, {"phase_seconds": lambda seconds: seconds | {"lunch": 1.0}}, "a phase 'lunch'"),
    ],
)
def test_a_value_that_cannot_be_is_named(kind: type, changes: dict[str, Any], text: str) -> None:
    assert any(text in found for found in texts("ranges", forge(altered(made_log(), kind, changes))))


WHO: dict[str, Any] = {"role": "rollout-0", "incarnation": 1}
VERDICT: dict[str, Any] = {**WHO, "kind": "reported", "evidence": {}, "threshold": 0.0, "due": 1.0, "seen": 1.0, "onset": 1.0}


@pytest.mark.parametrize(
    ("event", "found"),
    [
        (ev.RestartDecided(**WHO, reason="so", mode="isolatedx"), 1),
        (ev.RestartDecided(**WHO, reason="so", mode="full"), 0),
        (ev.Verdict(**VERDICT, rule="exitedx", blind_spot=""), 1),
        (ev.Verdict(**VERDICT, rule="exited", blind_spot=""), 0),
        (ev.Verdict(**VERDICT, rule="unseen", blind_spot=""), 0),
        (ev.RoleOrdered(**WHO, action="dance"), 1),
        (ev.ProcessExited(**WHO, pid=108, cause="pidfd", last_lines=[], progress=-1), 0),
    ],
)
def test_a_word_that_does_not_exist_is_named(event: ev.Event, found: int) -> None:
    assert len(texts("ranges", told(event))) == found


def test_a_number_that_is_none_is_no_lie() -> None:
    assert texts("ranges", forge(altered(made_log(), ev.StepMetrics, {"values": lambda values: values | {"kl": float("nan")}}))) == []


# -- durations -


@pytest.mark.parametrize(
    ("kind", "changes", "which", "text"),
    [
        (ev.PullCommitted, {"seconds": 1e6}, of_version_2, "the commit before was"),
        (ev.PullCommitted, {"commit_seconds": 4.0}, of_version_2, "the commit before was"),
        (ev.PullCommitted, {"seconds": 1e6}, lambda event: event.version == 0, "seconds: 1e+06 s, and the log began"),
        (ev.StepMetrics, {"phase_seconds": lambda seconds: seconds | {"train": 1e6}}, of_step_2, "train: 1e+06 s"),
        (ev.RoleReady, {"seconds": 1e6}, None, "seconds: 1e+06 s"),
        (ev.RoleSample, {"phase_age": 1e6}, None, "phase_age: 1e+06 s"),
        (ev.SnapshotCopied, {"seconds": 1e6}, None, "seconds: 1e+06 s"),
    ],
)
def test_a_duration_that_the_clocks_contradict_is_named(kind: type, changes: dict[str, Any], which: Any, text: str) -> None:
    assert any(text in found for found in texts("durations", forge(altered(made_log(), kind, changes, which or (lambda event: True)))))


def test_a_pull_that_was_shorter_than_its_own_progress() -> None:
    entries = made_log(rollouts=1)
    i = first(entries, ev.PullProgress, of_version_2)
    for late, found in ((0.0, 0), (3.0, 1)):
        later = [replace(entry, at=entry.at + (late if n >= i else 0)) for n, entry in enumerate(entries)]
        assert len(texts("durations", chained(later))) == found


def test_the_phases_of_all_steps_fit_into_the_run() -> None:
    forged = [replace(e, event=replace(e.event, phase_seconds=dict.fromkeys(e.event.phase_seconds, 0.9)))
              if isinstance(e.event, ev.StepMetrics) else e for e in made_log()]  # fmt: skip
    assert any("all phases of all steps so far" in text for text in texts("durations", forge(forged)))


# -- what each step has -


@pytest.mark.parametrize("name", ["reward", "loss", "grad_norm", "learning_rate", "entropy"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_metric_that_is_left_out_is_named(name: str, everywhere: bool) -> None:
    def without(event: ev.StepMetrics) -> ev.StepMetrics:
        return replace(event, values={key: value for key, value in event.values.items() if key != name})

    forged = [replace(e, event=without(e.event)) if isinstance(e.event, ev.StepMetrics) and (everywhere or e.event.step == 2) else e
              for e in made_log()]  # fmt: skip
    assert f"step 2 has no {name}" in texts("metrics", forge(forged))


def test_a_metric_that_one_step_alone_lacks() -> None:
    forged = [replace(e, event=replace(e.event, values=e.event.values | {"own": 1.0})) if isinstance(e.event, ev.StepMetrics)
              and e.event.step != 2 else e for e in made_log()]  # fmt: skip
    assert texts("metrics", forge(forged)) == ["step 2 has no own"]


def test_phases_that_are_left_out() -> None:
    forged = forge(altered(made_log(), ev.StepMetrics, {"phase_seconds": {}}, of_step_2))
    assert texts("metrics", forged) == ["step 2 has no seconds of advantage, optimizer, train"]


def test_a_step_that_was_taken_from_a_checkpoint_may_lack_its_phases() -> None:
    event = ev.SnapshotRestored(role="trainer-0", incarnation=1, step=2, source="disk", digest="s2", seconds=0.1)
    entries = told(event, "trainer-0")
    assert texts("metrics", forge(altered(entries, ev.StepMetrics, {"phase_seconds": {"snapshot": 0.001}}, of_step_2))) == []


def test_a_learning_rate_that_was_not_configured() -> None:
    forged = forge(altered(made_log(), ev.StepMetrics, {"values": lambda values: values | {"learning_rate": 1e-3}}, of_step_2))
    assert texts("metrics", forged) == ["step 2 has learning_rate 0.001; configured was 8e-05 for it"]


def test_an_evaluation_shows_some_of_its_answers() -> None:
    forged = forge(altered(made_log(), ev.EvaluationDone, {"samples": []}))
    assert any("it shows no sample" in text for text in texts("evaluations", forged))
