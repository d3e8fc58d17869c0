"""The journal of unfinished trajectories: parts that join, what outlives its process, what is dropped and said."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from continuation_world import body, decoded, opened, part, trajectories, with_group

from robustrl.core import events as ev
from robustrl.core.ledger import TrajectoryState
from robustrl.rl.trajectory import Part, part_of, resumed, runs_between

# -- parts ---


def test_parts_join_whatever_is_sent_twice_and_say_where_one_is_missing() -> None:
    known = Part(1, 0)
    assert known.join(part(1, 0, 5)) and known.join(part(1, 3, 4, version=1))
    assert (known.tokens, known.versions, len(known.mask), len(known.logprobs)) == ([0, 1, 2, 3, 4, 5, 6], [(0, 5), (1, 2)], 7, 7)
    assert known.join(part(1, 0, 5)), "an old flush that comes again"
    assert known.tokens[-1] == 6
    assert not known.join(part(1, 9, 1))


def test_a_part_ends_where_its_maker_says_although_the_trajectory_has_grown() -> None:
    trajectory = trajectories()[0]
    trajectory.generated([5, 6, 7], [-1.0] * 3, 0)
    trajectory.answered([9], 0)
    trajectory.generated([8], [-2.0], 2)
    first, second = part_of(trajectory, 0, 2, 0, ""), part_of(trajectory, 2, 5, 1, "stop")
    assert (first.tokens, first.versions) == ([5, 6], [(0, 2)])
    assert first.join(second)
    again = resumed(trajectories()[0], first)
    assert again == msgspec.structs.replace(trajectory, finish="stop")
    assert runs_between([(0, 3), (4, 2)], 3, 3) == []


# -- the journal ---


def test_the_newest_partial_outlives_the_journals_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = await with_group(tmp_path)
        assert await first.grown("rollout-0", 1, body(part(1, 0, 24), part(2, 0, 24))) == []
        assert await first.grown("rollout-0", 1, body(part(1, 24, 10, version=1))) == []
        second = await opened(tmp_path, incarnation=2, known={"started": dict.fromkeys(range(1, 5), "in flight"), "finished": []})
        assert await second.grown("rollout-0", 1, body(part(1, 24, 10, version=1))) == [], "made twice: its answer was lost"
        found = {p.id: p for p in decoded(await second.taken_back("rollout-0", 1, [1, 2, 3], True))}
        assert {i: p.end for i, p in found.items()} == {1: 34, 2: 24}
        assert found[1].versions == [(0, 24), (1, 10)]
        here: Any = second
        assert here.said == [ev.TokensJournalled(role="rollout-0", incarnation=1, tokens=58)]

    asyncio.run(scenario())


def test_a_late_word_of_a_dead_incarnation_is_dropped_and_said_to_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        made = await with_group(tmp_path)
        await made.grown("rollout-0", 1, body(part(1, 0, 8)))
        await made.taken_back("rollout-0", 1, [1], True)
        assert await made.grown("rollout-0", 1, body(part(1, 8, 8))) is None
        await made.moved([1], "rollout-0", "rollout-1", 3, 0, [8])
        assert await made.grown("rollout-1", 3, body(part(1, 8, 2), part(2, 0, 2))) == [], "what it does not hold is not taken either"
        assert [(p.id, p.end) for p in decoded(await made.taken_back("rollout-1", 3, [1, 2], False))] == [(1, 10)]

    asyncio.run(scenario())


def test_a_gap_is_asked_for_again_and_an_ended_trajectory_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        made = await with_group(tmp_path)
        assert await made.grown("rollout-0", 1, body(part(1, 30, 2), part(2, 0, 2))) == [1]
        assert await made.grown("rollout-0", 1, body(part(1, 0, 32))) == []
        rated = [msgspec.structs.replace(resumed(t, part(t.id, 0, 32)), reward=1.0) for t in trajectories()]
        await made.finished([msgspec.msgpack.encode(t) for t in rated], {})
        assert await made.grown("rollout-0", 1, body(part(3, 0, 32))) == [], "the last flush may come after the end"
        with sqlite3.connect(tmp_path / "journal.sqlite") as db:
            assert db.execute("select count(*) from flushes").fetchall() == [(0,)]
            assert db.execute("select tokens from received").fetchall() == [(66,)]

    asyncio.run(scenario())


def test_a_moved_trajectory_is_moved_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        made = await with_group(tmp_path)
        for _ in range(2):
            await made.moved([1, 2], "rollout-0", "rollout-1", 2, 5, [3, 0])
        here: Any = made
        moves = [e for e in here.said if isinstance(e, ev.TrajectoriesMoved)]
        assert moves == [ev.TrajectoriesMoved(ids=[1, 2], source="rollout-0", target="rollout-1", version=5, kept=[3, 0])]
        rows = [(rollout, incarnation, version) for _, rollout, incarnation, version in await made.unfinished()]
        assert rows == [("rollout-1", 2, 0)] * 2 + [("rollout-0", 1, 0)] * 2

    asyncio.run(scenario())


def test_a_journal_that_the_disk_does_not_take_goes_on_in_memory_aloud(tmp_path: Path) -> None:
    async def scenario() -> None:
        made = await with_group(tmp_path)
        here: Any = made
        await made._do(here._db.execute, "pragma query_only = on")  # writes fail from here on
        await made.grown("rollout-0", 1, body(part(1, 0, 8)))
        await made.grown("rollout-0", 1, body(part(1, 8, 8)))
        assert [e.text for e in here.said if isinstance(e, ev.WarningRaised) and "goes on in memory" in e.text].__len__() == 1
        assert [p.end for p in decoded(await made.taken_back("rollout-0", 1, [1], True))] == [16]
        await made.dropped([1], "test")
        assert made._ledger.state(1) is TrajectoryState.DROPPED
        assert len(await made.unfinished()) == 3

    asyncio.run(scenario())


def test_consumed_trajectories_are_kept_for_a_while(tmp_path: Path) -> None:
    async def scenario() -> None:
        made = await with_group(tmp_path)
        rated = [msgspec.structs.replace(resumed(t, part(t.id, 0, 2)), reward=1.0) for t in trajectories()]
        await made.finished([msgspec.msgpack.encode(t) for t in rated], {})
        await made.consumed(1, [1, 2, 3, 4])
        assert len(await made.batch(1)) == 4
        await made.consumed(17, [])
        with pytest.raises(Exception, match="are gone"):
            await made.batch(1)

    asyncio.run(scenario())
