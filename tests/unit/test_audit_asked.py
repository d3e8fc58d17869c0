"""The audit's rules on what was asked for, on processes and on who follows whom: a forged log is named, an honest one passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from made_log import forge, made_log
from story import ROLES, Story
from test_audit import altered, of_version_2
from test_audit_values import WHO, texts, told

from robustrl.core import events as ev
from robustrl.core.thresholds import Thresholds

replace = msgspec.structs.replace


def configured(**settings: Any) -> list[ev.Entry]:
    return forge(altered(made_log(), ev.RunStarted, {"config": lambda config: config | settings}))


def without(kind: type, which: Callable[[Any], bool] = lambda event: True, **shape: Any) -> list[ev.Entry]:
    return forge(e for e in made_log(**shape) if not (isinstance(e.event, kind) and which(e.event)))


# -- what was asked for -


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"name": "other"}, "the run is called 'job', and its configuration 'other'"),
        ({"rollouts": 3}, "before rollout-2 had started; asked for were 3"),
        ({"agent_workers": 5}, "before agent_worker-1 had started; asked for were 5"),
        ({"trainer_ranks": 4}, "before trainer-1 had started; asked for were 4"),
        ({"nodes": 3}, "asked for were 3 nodes; there were node-0"),
        ({"checkpoint_every": 0}, "on disk; asked for was none"),
        ({"checkpoint_every": 2}, "a copy of step 1 on disk; asked for was one each 2 steps"),
        ({"max_model_len": 2}, "tokens; prompt and answer together have room for 2"),
        ({"sampling": {"max_tokens": 1}}, "tokens; asked for were 1 at most"),
    ],
)
def test_a_configuration_that_the_run_contradicts(settings: dict[str, Any], text: str) -> None:
    assert any(text in found for found in texts("asked", configured(**settings)))


def test_a_cluster_of_others_has_the_nodes_that_it_has() -> None:
    assert texts("asked", configured(nodes=3, address="auto")) == []


def test_fewer_roles_than_there_are() -> None:
    assert texts("asked", configured(rollouts=1)) == [], "others may have been added"
    other = altered(made_log(), ev.RoleStarted, {"role": "agent_worker-1"}, lambda event: event.role == "agent_worker-0")
    assert "agent_worker-1 started; asked for were 1" in texts("asked", forge(other))


def test_the_answer_of_a_tool_is_no_token_that_was_asked_for() -> None:
    entries = [replace(e, event=replace(e.event, tool_turns=[1] * len(e.event.ids))) if isinstance(e.event, ev.TrajectoriesFinished) else e
               for e in configured(task="arithmetic_tool", sampling={"max_tokens": 1})]  # fmt: skip
    assert texts("asked", forge(entries)) == []


def test_a_run_ends_after_it_began_but_for_a_clock_that_was_set() -> None:
    assert [len(texts("asked", forge(altered(made_log(), ev.RunStarted, {"wall": 1e9 + late})))) for late in (100.0, 1000.0)] == [0, 1]


def test_the_reason_of_the_end_is_the_one_that_was_decided() -> None:
    assert "decided was that it does because" in texts("closing", forge(altered(made_log(), ev.RunEnded, {"reason": "so"})))[0]


# -- what the settings began with -


@pytest.mark.parametrize(("kind", "what"), [(ev.ThresholdsChanged, "thresholds"), (ev.RecoverySettings, "recovery")])
def test_settings_that_nobody_told(kind: type, what: str) -> None:
    assert f"settings of {what} the run began" in texts("settings", without(kind))[0]


def test_other_thresholds_than_the_configured_ones() -> None:
    paper = Thresholds.named("paper").to_dict()
    assert any("'lab' has" in text for text in texts("settings", forge(altered(made_log(), ev.ThresholdsChanged, {"thresholds": paper}))))
    assert any("'paper' has" in text for text in texts("settings", configured(thresholds="paper")))


def test_thresholds_of_another_version_have_other_names() -> None:
    entries = altered(made_log(), ev.ThresholdsChanged, {"thresholds": lambda all: all | {"node": {**all["node"], "of_old": 1.0}}})
    assert not any("'lab' has" in text for text in texts("settings", forge(entries)))


# -- what goes on all the time -


def slowly(entries: list[ev.Entry]) -> list[ev.Entry]:
    """A hundred times as slow."""
    return [replace(e, t=e.t * 100, at=e.at * 100) for e in forge(entries)]


@pytest.mark.parametrize(
    ("kind", "which", "text"),
    [
        (ev.SnapshotCopied, lambda event: True, "no copy of this step or of a later one reached the disk"),
        (ev.TokensJournalled, lambda event: True, "no token of any was journalled"),
        (ev.PullProgress, lambda event: True, "received 1000 bytes of version 0, and never told of any before"),
        (ev.RoleSample, lambda event: event.role == "rollout-0", "rollout-0 incarnation 1 was never seen"),
    ],
)
def test_what_is_said_all_the_time_and_is_missing(kind: type, which: Callable[[Any], bool], text: str) -> None:
    assert any(text in found for found in texts("expected", slowly(without(kind, which, steps=5))))


def test_what_is_switched_off_is_not_missed() -> None:
    quiet = altered(made_log(steps=5), ev.RunStarted, {"config": lambda config: config | {"checkpoint_every": 0, "journal_tokens": False}})
    entries = [e for e in quiet if not isinstance(e.event, ev.SnapshotCopied | ev.TokensJournalled)]
    assert not any("disk" in text or "journalled" in text for text in texts("expected", slowly(entries)))


def test_as_many_bytes_are_in_as_many_chunks() -> None:
    forged = forge(altered(made_log(), ev.VersionAnnounced, {"chunks": 7}, of_version_2))
    assert "in 7 chunks; before they were in 1" in texts("versions", forged)[0]


# -- whose tokens -


def test_work_that_another_rollout_was_given() -> None:
    entries = made_log(seed=3)
    last = {e.event.role: e.event.tokens for e in entries if isinstance(e.event, ev.TokensJournalled)}
    assert len(last) == 2
    for one, other in (("rollout-0", "rollout-1"), ("rollout-1", "rollout-0")):
        forged = forge(altered(entries, ev.TrajectoriesStarted, {"rollout": other}, lambda event, one=one: event.rollout == one))
        assert f"tokens of {one} were journalled, and what was sent to it has" in texts("journalled", forged)[0]


# -- processes -


@pytest.mark.parametrize(
    ("kind", "changes", "which", "text"),
    [
        (ev.RoleStarted, {"pid": 100}, lambda event: event.role == "trainer-0", "has the process 100 of supervisor, which did not"),
        (ev.RoleStarted, {"pid": 10}, None, "has the pid 10 of the host"),
        (ev.NodeStarted, {"kinds": ["node_agent", "rollout"]}, None, "trainer-0 incarnation 1 started on node-0, which is for"),
    ],
)
def test_a_process_that_cannot_be(kind: type, changes: dict[str, Any], which: Any, text: str) -> None:
    found = texts("processes", forge(altered(made_log(), kind, changes, which or (lambda event: True))))
    assert any(text in one for one in found)


def test_an_end_under_another_pid() -> None:
    pid = next(e.event.pid for e in made_log() if isinstance(e.event, ev.RoleStarted) and e.event.role == "rollout-0")
    for said, found in ((pid, 0), (pid + 1, 1)):
        assert len(texts("processes", told(ev.ProcessExited(**WHO, pid=said, cause="pidfd", last_lines=[])))) == found


@pytest.mark.parametrize("decided", [True, False])
def test_a_process_may_become_another_role_if_that_was_decided(decided: bool) -> None:
    story = Story(roles=())
    story.at(100.0, ev.RoleStarted(role="standby-0", incarnation=1, node="node-0", pid=8, start_ticks=8))
    story.at(100.0, ev.RoleStarted(role="trainer-0", incarnation=1, node="node-0", pid=9, start_ticks=8))
    story.at(110.0, ev.RestartDecided(role="trainer-0", incarnation=1, reason="so", standby="standby-0" if decided else ""))
    story.at(111.0, ev.RoleStarted(role="trainer-0", incarnation=2, node="node-0", pid=8, start_ticks=8))
    assert len([text for text in texts("processes", story.entries) if "which did not become it" in text]) == (0 if decided else 1)


def test_nodes_are_apart_and_seen_by_their_own_agents() -> None:
    story = Story(roles=())
    story.at(100.0, ev.NodeStarted(node="node-1", ray_node_id="x", ip="127.0.0.1", kinds=["trainer"]))
    for role, node in (("node_agent-1", "node-1"), ("node_agent-0", "node-0"), ("trainer-0", "node-1")):
        story.at(100.0, ev.RoleStarted(role=role, incarnation=1, node=node, pid=7 + len(story.entries), start_ticks=7))
        story.life[role] = 1
    story.sample(101.0, "trainer-0", "train")
    sample = story.entries.pop().event
    story.at(101.0, sample, "node_agent-1")
    assert [text for text in texts("processes", story.entries) if "same node" in text] == ["node-1 and node-0 are the same node of Ray, x"]
    assert not any("saw" in text for text in texts("processes", story.entries))
    story.at(102.0, sample, "node_agent-0")
    assert "node_agent-0 on node-0 saw trainer-0, which is on node-1" in texts("processes", story.entries)


# -- who follows whom -


def followed(*, decided: bool = True, verdict: bool = True, resumed: bool = False, mode: str = "isolated", of: str = "rollout-0") -> Story:
    story = Story()
    if verdict:
        story.at(110.0, ev.Verdict(role="rollout-0", incarnation=1, kind="failed", rule="exited", evidence={"a": 1}, threshold=0.0, due=1.0,
                 seen=1.0, onset=1.0, blind_spot=""), "supervisor")  # fmt: skip
    if decided:
        story.at(110.0, ev.RestartDecided(role=of, incarnation=1, reason="it failed", mode=mode), "supervisor")
    if resumed:
        story.at(110.5, ev.RunResumed(wall=1e9, host_pid=2))
    story.starts(111.0, "rollout-0")
    return story


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ({}, ""),
        ({"decided": False}, "nobody decided to restart incarnation 1"),
        ({"decided": False, "resumed": True}, ""),
        ({"verdict": False}, "no verdict calls it failed"),
        ({"mode": "full", "verdict": False}, ""),
        ({"mode": "full", "of": "trainer-0"}, ""),
    ],
)
def test_a_second_life_has_a_cause(case: dict[str, Any], text: str) -> None:
    found = texts("succession", followed(**case).entries)
    assert text in found[0] if text else found == []


def test_everything_may_be_started_again_by_one_decision() -> None:
    story = followed(mode="full")
    story.starts(112.0, "rollout-0")
    story.starts(113.0, "rollout-0")
    assert texts("succession", story.entries) == []
    story.starts(114.0, "rollout-0")
    assert len(texts("succession", story.entries)) == 1


def test_what_is_said_twice_by_one() -> None:
    story = followed()
    for entry in [e for e in story.entries if isinstance(e.event, ev.Verdict | ev.RestartDecided)]:
        story.at(120.0, entry.event, "supervisor", incarnation=2)
    assert texts("succession", story.entries) == [], "its next life may not have heard of it"
    for entry in [e for e in story.entries if isinstance(e.event, ev.Verdict | ev.RestartDecided) and e.incarnation == 1]:
        story.at(121.0, entry.event, "supervisor")
    assert len(texts("succession", story.entries)) == 2


def test_an_end_is_told_once_by_each_who_saw_it() -> None:
    story = Story(roles=ROLES)
    exit = ev.ProcessExited(role="rollout-0", incarnation=1, pid=7, cause="pidfd", last_lines=[])
    for source, found in (("host", 0), ("node_agent-0", 0), ("node_agent-0", 1)):
        story.at(110.0, exit, source)
        assert len(texts("succession", story.entries)) == found


def test_a_user_may_order_twice() -> None:
    story = Story()
    for _ in range(2):
        story.at(110.0, ev.RoleOrdered(role="rollout-0", incarnation=1, action="restart"))
        story.at(110.0, ev.RestartDecided(role="rollout-0", incarnation=1, reason="ordered by the user"), "supervisor")
    assert texts("succession", story.entries) == []
