"""Settings that change, marks, replay, and the table of rules."""

from __future__ import annotations

import pytest
from detection_log import LAB, Log, exited

from robustrl.core import events as ev
from robustrl.core.detection import Detector, judge
from robustrl.core.roles import RoleKind
from robustrl.core.rules import RULES
from robustrl.core.thresholds import PATHS, Relative, Thresholds


def changed(new: Thresholds) -> ev.ThresholdsChanged:
    return ev.ThresholdsChanged(thresholds=new.to_dict(), changes=LAB.changes(new))


def test_a_changed_setting_holds_from_its_entry_on():
    log = Log("rollout-0")
    log.sample(12.0, "rollout-0", "decode", progress_age=2.5)
    assert log.said() == []
    new = LAB.replace("rollout.heartbeat", "1s").replace("rollout.no_tokens", "2s")
    (verdict,) = log.add(12.1, changed(new))
    assert (verdict.rule, verdict.threshold) == ("no_tokens", 2.0)
    assert 2.0 in log.detector.marks()["rollout-0"]


def test_marks_are_the_limits_of_the_kind_with_grace_at_the_start():
    log = Log("trainer-0", "rollout-0", "task_runner")
    assert log.detector.marks()["rollout-0"] == (3.0, 5.0, 30.0)
    log.sample(10.0, "rollout-0", "decode")
    assert log.detector.marks()["rollout-0"] == (3.0, 5.0)
    assert log.detector.marks()["task_runner"] == (1.0, 5.0)
    assert log.detector.marks()["trainer-0"] == (3.0, 5.0, 10.0, 30.0)


def test_what_a_former_supervisor_did_not_write_is_known_to_the_next():
    log = Log("rollout-0", "trainer-0")
    log.add(10.0, exited("rollout-0"))
    log.add(10.1, log.verdicts[0], "supervisor")
    log.add(10.2, exited("trainer-0"))
    fresh = Detector(LAB)
    assert list(judge(fresh, log.entries)) == log.verdicts
    assert fresh.unrecorded() == log.verdicts[1:]


def test_time_does_not_run_backwards():
    log = Log("rollout-0")
    log.tick(10.0)
    with pytest.raises(ValueError, match="decided up to 10"):
        log.tick(9.0)


def test_the_table_of_rules_is_whole():
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule.blind_spot and rule.source and rule.sign.__doc__, rule.name
        if rule.setting and "*" not in rule.setting and "{" not in rule.setting:
            assert rule.setting in PATHS, rule.name
    covered: set[RoleKind] = set().union(*(rule.kinds for rule in RULES if rule.name in ("silent", "wedged", "agent_silent")))
    assert covered == set(RoleKind) - {RoleKind.SUPERVISOR}, "each role that lives and does nothing has a rule"


def test_relative_settings_start_from_their_floor():
    assert Thresholds.relative().job.stall == Relative(4.0, LAB.job.stall)
