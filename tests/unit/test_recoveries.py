"""Which recoveries a log shows and how long their stages took: every figure here can be checked by hand."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from story import ROLES, Story

from robustrl.core import events as ev
from robustrl.core.accounting import account
from robustrl.core.recoveries import DECISION, FAILED_AGAIN, INJECTION, LAST_SIGN, OPEN, RECOVERED, UNFINISHED, Recovery, recoveries_of
from robustrl.core.roles import RoleState


def only(story: Story) -> Recovery:
    (found,) = recoveries_of(story.entries)
    return found


def killed_rollout() -> Story:
    story = Story()
    story.sample(109.0, "rollout-0", "decode", 50)
    story.exits(110.0, "rollout-0")
    story.verdict(110.1, "rollout-0", "exited", onset=109.0)
    story.restart(110.2, "rollout-0")
    story.starts(112.0, "rollout-0")
    story.ready(115.0, "rollout-0", healthy=116.5)
    return story


def test_the_stages_of_a_killed_rollout() -> None:
    found = only(killed_rollout())
    assert (found.role, found.incarnation, found.roles, found.rule, found.mode) == ("rollout-0", 1, ("rollout-0",), "exited", "isolated")
    assert (found.onset, found.onset_by) == (109.0, LAST_SIGN)
    assert (found.detect, found.restart, found.reconnect, found.total) == (1.0, 5.0, 1.5, 7.5)
    assert (found.attempts, found.outcome) == (1, RECOVERED)


def test_a_known_injection_is_the_onset_even_if_its_word_comes_late() -> None:
    story = killed_rollout()
    exited = next(i for i, e in enumerate(story.entries) if isinstance(e.event, ev.ProcessExited))
    story.life["rollout-0"] = 1
    story.injects(109.8, "rollout-0", fault=4)
    told = story.entries[-2:]
    before = [*story.entries[:exited], *told, *story.entries[exited:-2]]
    after = story.entries
    for entries in (before, after):
        (found,) = recoveries_of(entries)
        if entries is before:
            assert (found.onset, found.onset_by, found.faults, found.detect) == (109.8, INJECTION, (4,), pytest.approx(0.2))
        else:  # the role is back already: nothing is changed behind it
            assert (found.onset_by, found.faults) == (LAST_SIGN, ())


def test_the_word_of_an_injection_between_its_effect_and_the_recovery_is_no_later_than_the_effect() -> None:
    story = Story()
    story.exits(110.0, "rollout-0")
    story.injects(110.3, "rollout-0")
    assert (only(story).onset, only(story).detect, only(story).faults) == (110.0, 0.0, (1,))


def test_the_onset_is_when_the_fault_was_done_not_when_its_word_was_in_the_log() -> None:
    """The proof says how long ago it was done, and the word itself may have been on its way for a while."""
    story = Story()
    story.injects(110.3, "rollout-0")
    word = story.entries[-1]
    assert isinstance(word.event, ev.FaultInjected)
    done = msgspec.structs.replace(word.event, proof={"ago": 0.25})
    word = msgspec.structs.replace(word, source="node_agent-0", n=2, at=10.2, event=done)
    earlier = msgspec.structs.replace(word, n=1, t=101.0, at=1.0, event=ev.WarningRaised(text="so"))
    story.entries[-1:] = [earlier, word]
    story.exits(110.5, "rollout-0")
    assert only(story).onset == pytest.approx(110.3 - 0.1 - 0.25) and only(story).detect == pytest.approx(0.55)


@pytest.mark.parametrize("late", [False, True])
def test_a_fault_that_was_over_long_before_is_not_what_a_failure_came_from(late: bool) -> None:
    """A hang that was called off, or a short freeze, and then something else, with a known injection, told late, or without."""
    story = Story()
    story.injects(40.0, "rollout-0", fault=1)
    story.at(43.0, ev.FaultEnded(fault=1, outcome="aborted", reason="called off"))
    story.sample(109.0, "rollout-0", "decode", 50)
    alone = killed_rollout()
    if not late:
        story.injects(109.8, "rollout-0", fault=2)
    story.exits(110.0, "rollout-0")
    if late:
        story.injects(109.8, "rollout-0", fault=2)
    (found,) = recoveries_of(story.entries)
    assert (found.onset, found.onset_by, found.faults) == (109.8, INJECTION, (2,))
    before = [entry for entry in story.entries if isinstance(entry.event, ev.FaultInjected | ev.FaultEnded)][:2]
    first = [isinstance(entry.event, ev.RoleStarted) and entry.event.incarnation == 1 for entry in alone.entries]
    started = len(first) - first[::-1].index(True)
    (found,) = recoveries_of([*alone.entries[:started], *before, *alone.entries[started:]])
    assert (found.onset, found.onset_by, found.faults) == (109.0, LAST_SIGN, ())


def test_a_fault_that_was_over_when_its_verdict_was_said_is_blamed_all_the_same() -> None:
    """A timed hang ends between the detector's judgement and its word in the log."""
    story = Story()
    story.injects(100.0, "rollout-0", fault=1)
    story.at(105.2, ev.FaultEnded(fault=1, outcome="over", reason="its 5.2 s are over"))
    story.verdict(105.3, "rollout-0", "no_tokens", onset=100.0)
    assert (only(story).onset, only(story).onset_by, only(story).faults) == (100.0, INJECTION, (1,))


def test_a_fault_on_the_way_back_is_not_the_onset() -> None:
    story = Story()
    story.exits(110.0, "rollout-0")
    story.restart(110.2, "rollout-0")
    story.starts(112.0, "rollout-0")
    story.injects(113.0, "rollout-0", fault=3)
    assert (only(story).onset_by, only(story).faults) == (LAST_SIGN, (3,))


def test_an_event_of_the_role_itself_is_a_sign_of_life() -> None:
    story = Story(roles=("node_agent-0",))
    story.at(108.0, ev.WarningRaised(text="so"), source="node_agent-0")
    story.exits(110.0, "node_agent-0")
    story.verdict(110.0, "node_agent-0", "exited", onset=100.0)
    assert (only(story).onset, only(story).detect) == (108.0, 2.0)


def test_a_hang_begins_where_its_rule_says() -> None:
    story = Story()
    for second in range(101, 115):
        story.sample(second, "trainer-0", "train", 1)
    story.verdict(115.0, "trainer-0", "no_compute", onset=105.0)
    story.restart(115.0, "trainer-0")
    story.exits(116.0, "trainer-0")
    assert (only(story).rule, only(story).onset, only(story).detect, only(story).outcome) == ("no_compute", 105.0, 10.0, OPEN)


def trainer_dies(story: Story) -> None:
    story.exits(110.0, "trainer-0")
    story.restart(110.0, "trainer-0")
    story.starts(112.0, "trainer-0")


def test_a_trainer_with_a_batch_to_train_is_back_when_it_trains() -> None:
    story = Story()
    story.batch(101.0, 1, finished=105.0)
    trainer_dies(story)
    story.ready(114.0, "trainer-0")
    assert only(story).outcome == OPEN
    story.sample(115.0, "trainer-0", "waiting_batch")
    assert only(story).outcome == OPEN
    story.sample(116.0, "trainer-0", "train", phase_age=0.5)
    assert (only(story).ready, only(story).back, only(story).reconnect) == (114.0, 115.5, 1.5)


@pytest.mark.parametrize("why", ["no batch", "unfinished", "dropped half", "paused"])
def test_a_trainer_without_one_is_back_when_it_is_healthy(why: str) -> None:
    story = Story()
    if why != "no batch":
        story.batch(101.0, 1, finished=105.0 if why == "paused" else None)
    if why == "dropped half":
        story.at(106.0, ev.TrajectoriesDropped(ids=[1], reason="reward error"))
    if why == "paused":
        story.at(106.0, ev.Paused(step=1))
    trainer_dies(story)
    story.ready(114.0, "trainer-0", healthy=114.25)
    assert (only(story).outcome, only(story).reconnect) == (RECOVERED, 0.25)


def test_taking_up_the_state_belongs_to_the_reconnection() -> None:
    story = Story()
    trainer_dies(story)
    restored = ev.SnapshotRestored(role="trainer-0", incarnation=2, step=0, source="peer", digest="d", seconds=0.75)
    story.at(113.75, restored)
    story.ready(114.0, "trainer-0")
    assert (only(story).restart, only(story).reconnect) == (3.0, 1.0)


def test_a_second_death_on_the_way_is_another_attempt() -> None:
    story = Story()
    story.exits(110.0, "rollout-0")
    story.restart(110.0, "rollout-0")
    story.starts(111.0, "rollout-0")
    story.exits(112.0, "rollout-0")
    story.restart(112.0, "rollout-0")
    story.starts(113.0, "rollout-0")
    story.ready(115.0, "rollout-0", healthy=116.0)
    found = only(story)
    assert (found.attempts, found.incarnation, found.lives) == (2, 1, (("rollout-0", 1, 2),))
    assert (found.restart, found.reconnect) == (5.0, 1.0)


def test_a_second_death_after_it_was_back_is_another_recovery() -> None:
    story = killed_rollout()
    story.exits(120.0, "rollout-0")
    first, second = recoveries_of(story.entries)
    assert (first.outcome, second.outcome, second.incarnation) == (RECOVERED, OPEN, 2)


def killed_again(story: Story, late: float = 0.0) -> list[Recovery]:
    """A trainer with a batch to train is killed, is healthy again at 114, and is killed again before it trains."""
    story.batch(101.0, 1, finished=105.0)
    story.injects(109.8, "trainer-0", fault=1)
    trainer_dies(story)
    story.ready(114.0, "trainer-0")
    if not late:
        story.injects(120.0, "trainer-0", fault=2)
    story.exits(120.1, "trainer-0")
    if late:
        story.injects(120.1 + late, "trainer-0", fault=2)
    story.verdict(120.4, "trainer-0", "exited", onset=120.1)
    story.restart(120.5, "trainer-0", mode="full")
    for role in ("supervisor", "rollout-0", "rollout-1"):
        story.restart(120.5, role, mode="full")
        story.exits(120.6, role)
    for role in ROLES:
        story.starts(122.0, role)
        story.ready(124.0, role)
    story.sample(126.0, "trainer-0", "train")
    return recoveries_of(story.entries)


@pytest.mark.parametrize("late", [0.0, 0.05])
def test_a_trainer_that_fails_again_before_it_trained_has_a_recovery_for_each_of_its_faults(late: float) -> None:
    story = Story()
    first, second = killed_again(story, late)
    assert (first.outcome, first.faults, first.mode, first.roles, first.attempts) == (FAILED_AGAIN, (1,), "isolated", ("trainer-0",), 1)
    assert (first.onset, first.ready, first.back, first.until, first.total) == (109.8, 114.0, None, 120.1, None)
    assert (second.outcome, second.faults, second.mode, set(second.roles)) == (RECOVERED, (2,), "full", set(ROLES))
    assert (second.incarnation, second.onset_by, second.rule, second.back) == (2, INJECTION, "exited", 126.0)
    assert second.onset == pytest.approx(120.1 if late else 120.0) and second.detected == 120.1
    cost = account(story.entries)
    assert (cost.recoveries, cost.recovered) == (2, 1)


def test_who_fails_for_itself_while_a_trainer_has_yet_to_train_has_a_recovery_of_its_own() -> None:
    story = Story()
    story.batch(101.0, 1, finished=105.0)
    story.exits(110.0, "trainer-0")
    for role in ("trainer-0", "rollout-0"):
        story.restart(110.1, role, mode="full")
    for role in ("trainer-0", "rollout-0"):
        story.starts(111.0, role)
        story.ready(113.0, role)
    story.injects(114.0, "rollout-0", fault=1)
    story.exits(114.0, "rollout-0")
    story.restart(114.1, "rollout-0")
    story.starts(115.0, "rollout-0")
    story.sample(116.0, "trainer-0", "train")
    story.ready(117.0, "rollout-0")
    all_of_them, alone = recoveries_of(story.entries)
    assert (all_of_them.outcome, all_of_them.back, all_of_them.faults, all_of_them.attempts) == (RECOVERED, 116.0, (), 1)
    assert (alone.outcome, alone.back, alone.faults, alone.roles, alone.mode) == (RECOVERED, 117.0, (1,), ("rollout-0",), "isolated")


@pytest.mark.parametrize("kind", ["hang", "slow", "long_first_token"])
@pytest.mark.parametrize("late", [False, True])
def test_an_end_came_of_the_fault_that_ends_processes_not_of_the_one_that_lasted(kind: str, late: bool) -> None:
    story = Story()
    story.at(101.0, ev.FaultPlanned(fault=1, kind=kind, target="rollout-0", when="now", benign=False, options={}))
    hit = ev.FaultInjected(fault=1, role="rollout-0", incarnation=1, node="node-0", pid=7, phase="decode", step=1, proof={"ago": 0.0})
    story.at(102.0, hit)
    if not late:
        story.injects(104.0, "rollout-0", fault=2)
    story.exits(104.1, "rollout-0")
    if late:
        assert (only(story).onset, only(story).onset_by) == (102.0, INJECTION), "nothing else is known yet"
        story.injects(104.1, "rollout-0", fault=2)
    story.verdict(104.2, "rollout-0", "exited", onset=104.1)
    assert (only(story).onset, only(story).faults) == (104.1 if late else 104.0, (1, 2))


def test_a_stall_came_of_the_hang_though_somebody_killed_the_role_then() -> None:
    story = Story()
    story.at(101.0, ev.FaultPlanned(fault=1, kind="hang", target="rollout-0", when="now", benign=False, options={}))
    hit = ev.FaultInjected(fault=1, role="rollout-0", incarnation=1, node="node-0", pid=7, phase="decode", step=1, proof={"ago": 0.0})
    story.at(102.0, hit)
    story.verdict(105.0, "rollout-0", "no_tokens", onset=102.0)
    story.injects(105.1, "rollout-0", fault=2)
    story.exits(105.1, "rollout-0")
    assert (only(story).onset, only(story).rule) == (102.0, "no_tokens")


def test_ranks_that_are_replaced_together_are_one_recovery() -> None:
    story = Story(roles=("supervisor", "trainer-0", "trainer-1"))
    story.exits(110.0, "trainer-1")
    story.restart(110.0, "trainer-1")
    story.exits(110.5, "trainer-0")
    for rank in ("trainer-0", "trainer-1"):
        story.starts(111.0, rank)
    story.ready(113.0, "trainer-1")
    assert only(story).outcome == OPEN
    story.ready(114.0, "trainer-0")
    assert (only(story).role, only(story).roles, only(story).ready) == ("trainer-1", ("trainer-1", "trainer-0"), 114.0)


def test_ranks_of_which_one_stays() -> None:
    story = Story(roles=("supervisor", "trainer-0", "trainer-1"))
    story.exits(110.0, "trainer-1")
    story.restart(110.0, "trainer-1")
    story.starts(111.0, "trainer-1")
    story.ready(113.0, "trainer-1")
    assert (only(story).roles, only(story).outcome) == (("trainer-1",), RECOVERED)


def test_a_full_restart_is_one_recovery_of_all_roles() -> None:
    story = Story()
    story.sample(109.5, "rollout-1", "decode", 5)
    story.exits(110.0, "rollout-1")
    for role in ROLES:
        story.restart(110.5, role, mode="full")
    for role in ROLES:
        if role != "rollout-1":
            story.exits(111.0, role)
    for role in ROLES:
        story.starts(112.0, role)
    for second, role in enumerate(ROLES):
        story.ready(114.0 + second, role)
    found = only(story)
    assert (found.role, set(found.roles), found.mode, found.attempts) == ("rollout-1", set(ROLES), "full", 1)
    assert (found.detect, found.restart, found.reconnect) == (0.5, 7.0, 0.0)


def test_a_kill_while_everything_is_restarted_is_not_what_that_came_from() -> None:
    story = Story()
    story.sample(109.5, "rollout-1", "decode", 5)
    story.exits(110.0, "rollout-1")
    for role in ROLES:
        story.restart(110.5, role, mode="full")
    for fault, role in enumerate(("rollout-0", "rollout-1"), 1):
        story.injects(110.6, role, fault=fault)
    assert (only(story).onset, only(story).onset_by, only(story).faults) == (109.5, LAST_SIGN, (1, 2))


def test_a_restart_that_somebody_asked_for_has_no_failure_before_it() -> None:
    story = Story()
    story.restart(110.0, "rollout-0")
    story.exits(110.2, "rollout-0")
    story.verdict(110.3, "rollout-0", "exited", onset=109.0)
    story.starts(111.0, "rollout-0")
    story.ready(112.0, "rollout-0")
    found = only(story)
    assert (found.onset_by, found.onset, found.detect, found.rule, found.total) == (DECISION, 110.0, 0.0, "", 2.0)


def test_the_nodes_roles_fail_with_it() -> None:
    story = Story()
    story.at(110.0, ev.NodeLost(node="node-0", reason="no heartbeat"))
    assert [found.role for found in recoveries_of(story.entries)] == list(ROLES)


def test_what_the_run_did_not_live_to_see() -> None:
    story = killed_rollout()
    trainer_dies(story)
    story.ends(120.0, "failed")
    story.exits(121.0, "supervisor")
    assert [found.outcome for found in recoveries_of(story.entries)] == [RECOVERED, UNFINISHED]


def test_who_was_stopped_has_not_failed() -> None:
    story = Story()
    story.becomes(110.0, "rollout-0", RoleState.STOPPED)
    story.at(110.5, ev.ProcessExited(role="rollout-0", incarnation=1, pid=7, cause="pidfd", last_lines=[]))
    assert recoveries_of(story.entries) == []


_WORDS = ("exits", "restart", "starts", "ready", "verdict", "sample", "inject", "commit", "batch", "full", "node", "pause")


@given(st.lists(st.tuples(st.sampled_from(_WORDS), st.sampled_from(ROLES), st.floats(0.0, 3.0)), max_size=40))
def test_whatever_the_log_says_stages_add_up_and_none_is_negative(words: list[tuple[str, str, float]]) -> None:
    story = Story()
    t, batch, step = 101.0, 0, -1
    for word, role, later in words:
        t += later
        match word:
            case "exits":
                event = ev.ProcessExited(role=role, incarnation=story.life[role], pid=7, cause="pidfd", last_lines=[])
                story.at(t, event)
            case "restart":
                story.restart(t, role)
            case "full":
                for each in ROLES:
                    story.restart(t, each, mode="full")
            case "starts":
                story.starts(t, role)
            case "ready":
                story.ready(t, role)
            case "verdict":
                story.verdict(t, role, "no_compute", onset=t - later)
            case "sample":
                story.sample(t, role, "train" if role == "trainer-0" else "decode", phase_age=later)
            case "inject":
                story.injects(t, role)
            case "commit":
                step += 1
                story.commit(t, step)
            case "batch":
                batch += 1
                story.batch(t, batch, finished=t)
            case "node":
                story.at(t, ev.NodeLost(node="node-0", reason="gone"))
            case "pause":
                story.at(t, ev.Paused(step=1))
    for found in recoveries_of(story.entries):
        stages = [found.detect, found.restart, found.reconnect]
        assert all(stage is None or stage >= 0 for stage in stages), found
        assert (found.outcome == RECOVERED) == (found.total is not None)
        if found.total is not None:
            assert sum(stages) == pytest.approx(found.total)
