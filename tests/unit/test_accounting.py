"""What faults cost: every figure is computed by hand beside the log that it belongs to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_log import made_log
from story import Story

from robustrl.core import events as ev
from robustrl.core.accounting import account, costs, ratios, spread
from robustrl.core.intervals import clipped, intersection, joined, seconds, seconds_until, without


def train(story: Story, begin: float, step: int, progress: int, marks: int = 3, role: str = "trainer-0") -> int:
    """One micro-batch a second from ``begin`` on, ``marks`` of them; returns the counter."""
    story.sample(begin, role, "train", progress, step)
    for number in range(1, marks + 1):
        story.sample(begin + number, role, "train", progress + number, step)
    return progress + marks


def three_steps() -> Story:
    """Steps of 4 s: dispatch at 101, training from 103. In step 2, begun at 107, the trainer is killed at 110, a second after its last
    sign of progress, and trains again from 114.5 on. The last commit is at 123.
    """
    story = Story(steps=3)
    story.commit(100.5, 0)
    for batch in (1, 2, 3):
        story.batch(101.0, batch)
    for batch in (1, 2, 3):
        story.finish(102.0, batch)
    train(story, 103.0, 1, 0)
    story.commit(107.0, 1)
    train(story, 107.0, 2, 3, marks=2)
    story.sample(109.5, "rollout-0", "decode", 100)
    story.injects(110.0, "trainer-0")
    story.exits(110.2, "trainer-0")
    story.restart(110.2, "trainer-0")
    story.sample(111.5, "rollout-0", "decode", 300)
    story.starts(112.0, "trainer-0")
    story.ready(114.0, "trainer-0")
    story.sample(115.0, "trainer-0", "train", 0, 2, phase_age=0.5)
    train(story, 115.0, 2, 0)
    story.commit(119.0, 2)
    train(story, 119.0, 3, 3)
    story.commit(123.0, 3)
    story.ends(130.0)
    return story


def test_a_killed_trainer() -> None:
    found = account(three_steps().entries)
    assert found.span == 22.0, "123 - 101: neither start-up nor what follows the last commit"
    assert found.lost == 5.5, "114.5 - 109"
    assert found.redone == 2.0, "109 - 107"
    assert found.ettr_strict == pytest.approx((22 - 5.5 - 2) / 22)
    # three machines out for 4.5 s, of which rollout-0 generates for 1.5 s
    assert found.ettr_paper == pytest.approx(1 - (3 * 4.5 - 1.5) / 3 / 22)
    assert (found.faults, found.recoveries, found.recovered) == (1, 1, 1)
    assert [found.mttr[stage].mean for stage in ("detect", "restart", "reconnect", "total")] == pytest.approx([0.2, 3.8, 0.5, 4.5])
    assert found.tokens["trained"] == 60 and found.goodput == pytest.approx(60 / 22)


def test_how_the_ratios_of_that_run_came_about() -> None:
    entries = three_steps().entries
    found = {each.t: each for each in ratios(entries)}
    assert list(found) == [102.0 + n for n in range(22)], "each second of the span"
    assert found[108.0].strict == found[108.0].paper == 1.0
    assert found[110.0].strict == pytest.approx((9 - 1 - 2) / 9), "a second without a mark, and two of the step that were in vain"
    assert found[112.0].paper == pytest.approx(1 - (3 * 2 - 1.5) / 3 / 11), "out since 110, of which rollout-0 generates until 111.5"
    last = account(entries)
    assert (found[123.0].strict, found[123.0].paper) == pytest.approx((last.ettr_strict, last.ettr_paper))


def test_the_ratios_of_a_long_run_stay_where_they_were_and_are_not_many() -> None:
    entries = three_steps().entries
    one, half, few = ratios(entries, 30), ratios(entries, 15), ratios(entries, 3)
    assert [len(found) for found in (one, half, few)] == [22, 11, 3]
    assert set(few) < set(half) < set(one), "and each says the same"
    assert ratios([]) == ratios(Story().entries) == []


def test_what_that_recovery_cost() -> None:
    (cost,) = costs(three_steps().entries)
    assert (cost.lost, cost.redone, cost.moved, cost.journalled_tokens) == (5.5, 2.0, 0, None)
    assert cost.tokens_meanwhile == 150, "of the 200 tokens between 109.5 and 111.5, those after 110"


def without_fault() -> Story:
    story = Story(steps=2)
    story.commit(100.5, 0)
    story.batch(101.0, 1, finished=102.0)
    story.batch(101.0, 2, finished=102.0)
    train(story, 103.0, 1, 0)
    story.commit(107.0, 1)
    train(story, 108.0, 2, 3)
    story.commit(112.0, 2)
    story.ends(113.0)
    return story


def test_without_a_fault_nothing_is_lost() -> None:
    for entries in (without_fault().entries, made_log(steps=4)):
        found = account(entries)
        assert (found.lost, found.redone, found.ettr_strict, found.ettr_paper, found.recoveries, found.mttr) == (0, 0, 1, 1, 0, {})


def test_before_the_first_dispatch_there_is_nothing_to_account_for() -> None:
    assert account([]).ettr_strict is None
    assert account(Story().entries).ettr_paper is None


def rollout_out(*, again: float) -> Story:
    """A rollout is out from 104.2 to 109; the trainer, which had a commit at 107, goes on at ``again``."""
    story = Story(steps=2)
    story.commit(100.5, 0)
    story.batch(101.0, 1, finished=102.0)
    story.batch(101.0, 2)
    train(story, 102.0, 1, 0, marks=2)
    story.injects(104.2, "rollout-0")
    story.exits(104.2, "rollout-0")
    story.restart(104.2, "rollout-0")
    for second in (105.0, 106.0):
        story.sample(second, "trainer-0", "train", round(second - 102), 1)
    story.starts(106.0, "rollout-0")
    story.commit(107.0, 1)
    story.ready(109.0, "rollout-0")
    story.finish(109.5, 2)
    train(story, again, 2, 5)
    story.commit(again + 4, 2)
    story.ends(again + 4)
    return story


def test_a_rollout_costs_what_the_trainer_waits_for_it() -> None:
    """Gaps that meet no outage are 1 s long; from 107 on the trainer waits for the batch of which the dead rollout had a part."""
    found = account(rollout_out(again=110.0).entries)
    assert (found.span, found.lost, found.redone) == (13.0, 3.0, 0.0)
    # one of three machines is out for 4.8 s
    assert found.ettr_paper == pytest.approx(1 - 4.8 / 3 / 13)
    quick = account(rollout_out(again=107.5).entries)
    assert quick.lost == 0.0, "it went on as fast as ever"


def test_a_stall_after_a_role_is_called_back_is_its_recoverys() -> None:
    """The manager is back at 106, while the trainer works on a batch that it had; the next one comes 20 s late."""
    story = Story(roles=("rollout_manager", "trainer-0", "rollout-0"), steps=4)
    story.commit(100.5, 0)
    for batch in (1, 2, 3, 4):
        story.batch(101.0, batch, finished=101.5)
    train(story, 102.0, 1, 0, marks=3)
    story.exits(105.2, "rollout_manager")
    story.restart(105.2, "rollout_manager")
    story.starts(105.5, "rollout_manager")
    story.ready(106.0, "rollout_manager")
    story.commit(106.0, 1)
    train(story, 106.0, 2, 3)
    story.commit(110.0, 2)
    train(story, 130.0, 3, 6)
    story.commit(134.0, 3)
    train(story, 134.0, 4, 9)
    story.commit(138.0, 4)
    assert account(story.entries).lost == 20.0


def test_a_restart_that_somebody_asked_for_is_no_fault() -> None:
    story = rollout_out(again=110.0)
    entries = [e for e in story.entries if not isinstance(e.event, ev.ProcessExited | ev.FaultInjected)]
    entries = [e for e in entries if not (isinstance(e.event, ev.RoleStateChanged) and e.event.new == "failed")]
    found = account(entries)
    assert (found.lost, found.recoveries, found.mttr, found.ettr_strict) == (0.0, 0, {}, 1.0)


def test_a_gap_that_two_outages_share_is_lost_once_and_charged_to_the_first() -> None:
    story = three_steps()
    kill = next(i for i, e in enumerate(story.entries) if isinstance(e.event, ev.ProcessExited))
    other = Story(steps=3)
    other.entries = []
    other.sample(110.2, "rollout-1", "decode")
    other.exits(110.5, "rollout-1")
    entries = [*story.entries[: kill + 3], *other.entries, *story.entries[kill + 3 :]]
    assert account(entries).lost == 5.5
    assert [cost.lost for cost in costs(entries)] == [5.5, 0.0]


def test_a_pause_is_nobodys_loss() -> None:
    story = three_steps()
    at = next(i for i, e in enumerate(story.entries) if e.t == 112.0)
    pause = Story()
    pause.entries = []
    pause.at(112.0, ev.Paused(step=2))
    pause.at(113.0, ev.Resumed(step=2))
    entries = [*story.entries[:at], pause.entries[0], *story.entries[at : at + 1], pause.entries[1], *story.entries[at + 1 :]]
    assert account(entries).lost == 4.5


def test_steps_that_were_rolled_back_are_done_again() -> None:
    """Of step 2, which took from 107 to 111, nothing is left when the trainer is restored to step 1."""
    story = Story(steps=2)
    story.commit(100.5, 0)
    story.batch(101.0, 1, finished=102.0)
    story.batch(101.0, 2, finished=102.0)
    train(story, 103.0, 1, 0)
    story.commit(107.0, 1)
    train(story, 107.0, 2, 3)
    story.commit(111.0, 2)
    story.exits(112.0, "trainer-0")
    story.restart(112.0, "trainer-0")
    story.starts(113.0, "trainer-0")
    story.at(113.5, ev.RolledBack(old=2, to=1, reason="the keeper's copy was bad"))
    story.ready(114.0, "trainer-0")
    train(story, 114.0, 2, 0)
    story.commit(118.0, 2)
    story.ends(118.0)
    found = account(story.entries)
    assert (found.span, found.lost, found.redone) == (17.0, 3.0, 4.0)


def test_a_trainer_killed_twice_in_one_step() -> None:
    """Begun at 103, dead at 105.5; again from 108, dead at 110.5; again from 113 to 117. Lost 105-108 and 110-113, redone 2 + 2."""
    story = Story(steps=1)
    story.commit(100.5, 0)
    story.batch(101.0, 1, finished=102.0)
    for begin in (103.0, 108.0):
        train(story, begin, 1, 0, marks=2)
        story.exits(begin + 2.5, "trainer-0")
        story.restart(begin + 2.5, "trainer-0")
        story.starts(begin + 3, "trainer-0")
        story.ready(begin + 4, "trainer-0")
    train(story, 113.0, 1, 0)
    story.commit(117.0, 1)
    story.ends(117.0)
    found = account(story.entries)
    assert (found.span, found.lost, found.redone, found.recovered) == (16.0, 6.0, 4.0, 2)


def test_tokens_of_a_dead_rollout() -> None:
    story = Story()
    story.batch(101.0, 1)
    story.at(104.0, ev.TokensJournalled(role="rollout-0", incarnation=1, tokens=80))
    story.sample(104.5, "rollout-0", "decode", 100)
    story.exits(105.0, "rollout-0")
    story.at(105.0, ev.TokensJournalled(role="rollout-0", incarnation=1, tokens=90))
    story.restart(105.0, "rollout-0")
    story.at(105.1, ev.TrajectoriesMoved(ids=[1, 2], source="rollout-0", target="rollout-1", version=0, kept=[40, 45]))
    story.starts(106.0, "rollout-0")
    story.ready(107.0, "rollout-0")
    (cost,) = costs(story.entries)
    assert (cost.journalled_tokens, cost.lost_tokens, cost.regenerated_tokens, cost.moved) == (90, 10, 10, 2)
    assert account(story.entries).tokens == {"generated": 100, "trained": 0, "journalled": 90, "lost": 10, "regenerated": 10}


def test_what_a_dead_rollout_generated_after_its_last_sample_counts() -> None:
    story = Story()
    story.sample(104.5, "rollout-0", "decode", 100)
    story.at(105.0, ev.TokensJournalled(role="rollout-0", incarnation=1, tokens=130))
    story.at(105.0, ev.ProcessExited(role="rollout-0", incarnation=1, pid=7, cause="pidfd", last_lines=[], progress=150))
    (cost,) = costs(story.entries)
    assert (cost.journalled_tokens, cost.lost_tokens) == (130, 20)


def test_tokens_of_evaluations_are_nobodys_to_keep() -> None:
    """They counted as lost with the rollout that had made them, long after the evaluation was over."""
    story = Story()
    story.sample(104.5, "rollout-0", "decode", 1300)
    story.at(105.0, ev.TokensJournalled(role="rollout-0", incarnation=1, tokens=130, evaluated=1138))
    story.at(105.0, ev.ProcessExited(role="rollout-0", incarnation=1, pid=7, cause="pidfd", last_lines=[], progress=1300))
    (cost,) = costs(story.entries)
    assert (cost.journalled_tokens, cost.lost_tokens) == (130, 32)


def test_a_run_that_never_came_back() -> None:
    story = Story(steps=2)
    story.commit(100.5, 0)
    story.batch(101.0, 1, finished=102.0)
    train(story, 103.0, 1, 0, marks=2)
    story.exits(106.0, "trainer-0")
    story.ends(111.0, "failed")
    found = account(story.entries)
    assert (found.span, found.lost, found.redone, found.recovered) == (10.0, 6.0, 2.0, 0)
    assert "of which 6.0 s are gaps in the trainer's progress that hold or meet a fault's outage, each counted whole; 2.0 s" in repr(found)


def test_spread_takes_the_nearest_rank() -> None:
    assert (spread([4.0]).p95, spread([float(i) for i in range(1, 21)]).p95) == (4.0, 19.0)


_TIMES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (float(pair[0]), float(pair[1]))), max_size=6)


@given(_TIMES, _TIMES)
def test_sets_of_times(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> None:
    """Against counting unit cells."""

    def cells(intervals: list[tuple[float, float]]) -> set[int]:
        return {n for low, high in intervals for n in range(int(low), int(high))}

    a, b = joined(some), joined(others)
    assert cells(a) == cells(some) and seconds(a) == len(cells(some))
    assert cells(intersection(a, b)) == cells(some) & cells(others) and cells(without(a, b)) == cells(some) - cells(others)
    assert cells(clipped(a, (5.0, 20.0))) == cells(some) & set(range(5, 20))
    assert all(before[1] < after[0] for before, after in zip(a, a[1:], strict=False))
    moments = [0.0, 7.5, 7.5, 20.0, 40.0]
    weighted = [seconds(clipped(a, (0.0, t))) - 2 * seconds(clipped(b, (0.0, t))) for t in moments]
    assert seconds_until(moments, [(1, a), (-2, b)]) == pytest.approx(weighted)


_WORDS = ("train", "exits", "back", "commit", "decode", "rollout exits", "rollout back", "pause", "resume", "batch", "roll back")


@given(st.lists(st.tuples(st.sampled_from(_WORDS), st.floats(0.0, 5.0)), max_size=40))
def test_ratios_are_ratios_whatever_happened(words: list[tuple[str, float]]) -> None:
    story = Story(steps=5)
    t, batch, step = 101.0, 0, 0
    for progress, (word, later) in enumerate(words, 1):
        t += later
        match word:
            case "train":
                story.sample(t, "trainer-0", "train", progress, step, phase_age=later)
            case "decode":
                story.sample(t, "rollout-0", "decode", progress)
            case "exits" | "rollout exits":
                role = "trainer-0" if word == "exits" else "rollout-0"
                story.at(t, ev.ProcessExited(role=role, incarnation=story.life[role], pid=7, cause="pidfd", last_lines=[]))
                story.restart(t, role)
            case "back" | "rollout back":
                role = "trainer-0" if word == "back" else "rollout-0"
                story.starts(t, role)
                story.ready(t, role)
            case "commit":
                step += 1
                story.commit(t, step)
            case "roll back" if step:
                step -= 1
                story.at(t, ev.RolledBack(old=step + 1, to=step, reason="so"))
            case "batch":
                batch += 1
                story.batch(t, batch, finished=t)
            case "pause":
                story.at(t, ev.Paused(step=step))
            case "resume":
                story.at(t, ev.Resumed(step=step))
    found = account(story.entries)
    assert (found.ettr_strict is None) == (found.span == 0)
    if found.span:
        assert 0 <= found.ettr_strict <= 1 and 0 <= found.ettr_paper <= 1
        assert found.lost + found.redone <= found.span
        curve = ratios(story.entries, 7)
        assert len(curve) <= 7 and (curve[-1].strict, curve[-1].paper) == pytest.approx((found.ettr_strict, found.ettr_paper), abs=1e-9)
        assert all(-1e-9 <= ratio <= 1 + 1e-9 for each in curve for ratio in each[1:])
    every = costs(story.entries)
    assert all(cost.lost >= 0 and cost.redone >= 0 for cost in every)
    assert sum(cost.lost for cost in every) == pytest.approx(found.lost)
