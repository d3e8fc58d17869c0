"""Trajectories of a rollout that died go on elsewhere from what the journal has: manager and journal as they are, rollouts made up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from continuation_world import CONFIG, World, body, journal, opened, others, part, run, trajectories, until, with_group

from robustrl.core import events as ev
from robustrl.errors import WaitTimeout
from robustrl.rl.trajectory import IN_TOOL, resumed
from robustrl.runtime.rollout_manager import RolloutManager


def test_the_survivors_go_on_from_the_last_journalled_token_and_share_the_load(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        lost = await world.generate()
        await world.journal.grown(lost, 1, body(part(1, 0, 10), part(2, 0, 7)))
        world.lose(lost)
        left = others(world, lost)
        await until(lambda: sum(len(r.got) for r in left.values()) == 4)
        assert sorted(len(r.got) for r in left.values()) == [2, 2]
        got = {i: len(t.tokens) for r in left.values() for i, t in r.got.items()}
        assert got == {1: 10, 2: 7, 3: 0, 4: 0}
        moves = [e for e in world.events if isinstance(e, ev.TrajectoriesMoved)]
        assert {i: tokens for e in moves for i, tokens in zip(e.ids, e.kept, strict=True)} == got
        assert {e.source for e in moves} == {lost} and {e.target for e in moves} == set(left)

    run(tmp_path, scenario)


def test_a_trajectory_keeps_its_version_while_a_rollout_has_it(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        lost = await world.generate()
        await world.journal.grown(lost, 1, body(*(part(i, 0, 5, version=1) for i in range(1, 5))))
        for role, version in zip(others(world, lost), (2, 1), strict=True):
            next(lane for lane in world.manager._lanes if lane.role == role).version = version
        world.lose(lost)
        newer, same = others(world, lost).values()
        await until(lambda: len(same.got) == 4)
        assert not newer.got
        world.lose(same.role)  # nobody has version 1 any more
        await until(lambda: len(newer.got) == 4)
        assert [e.version for e in world.events if isinstance(e, ev.TrajectoriesMoved)] == [1, 2]

    run(tmp_path, scenario)


def test_a_switch_of_the_version_drops_and_counts_where_that_is_the_policy(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        lost = await world.generate()
        await world.journal.grown(lost, 1, body(part(1, 0, 5), part(2, 0, 5)))
        for lane in world.manager._lanes:
            lane.version = 1
        world.lose(lost)
        [left] = others(world, lost).values()
        await until(lambda: len(left.got) == 2 and any(isinstance(e, ev.TrajectoriesDropped) for e in world.events))
        assert set(left.got) == {3, 4}, "those without a token lose nothing"
        [dropped] = [e for e in world.events if isinstance(e, ev.TrajectoriesDropped)]
        assert dropped.ids == [1, 2] and "version" in dropped.reason
        for number in (3, 4):
            world.manager._collect(world.manager._lanes[0], resumed(left.got[number], part(number, 0, 9, 1, "stop")))
        await until(lambda: world.rated)
        assert [t.id for t in world.rated[0]] == [3, 4]
        await until(lambda: any(isinstance(e, ev.TrajectoriesFinished) for e in world.events))

    run(tmp_path, scenario, {"rollout-0": 0, "rollout-1": 0}, version_switch="drop")


def test_no_rollout_with_an_older_version_takes_it_over(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        lost = await world.generate()
        await world.journal.grown(lost, 1, body(*(part(i, 0, 5, version=1) for i in range(1, 5))))
        world.lose(lost)
        [left] = others(world, lost).values()
        await asyncio.sleep(0.05)
        assert not left.got, "it waits for the rollout to have version 1"
        await world.manager._take(world.manager._lanes[0], 1, [], [])
        await until(lambda: len(left.got) == 4)

    run(tmp_path, scenario, {"rollout-0": 0, "rollout-1": 0})


@pytest.mark.parametrize("answer", [[40, 41], None])
def test_a_tools_answer_reaches_the_new_holder(tmp_path: Path, answer: list[int] | None) -> None:
    async def scenario(world: World) -> None:
        lost = await world.generate()
        lane = next(lane for lane in world.manager._lanes if lane.role == lost)
        waits = resumed(world.rollouts[lost].got[1], part(1, 0, 6))
        await world.manager._take(lane, 0, [], [msgspec.msgpack.encode(waits)])
        await asyncio.sleep(0.01)
        world.lose(lost)
        left = others(world, lost)
        await until(lambda: sum(len(r.got) for r in left.values()) == 3)
        world.tool.set_result(answer)
        if answer is None:
            await until(lambda: all(1 not in group.unfinished for group in world.manager._groups.values()))
            assert world.manager._groups[1, 0].trajectories[1].finish == "stop"
            return
        holder = await until(lambda: next((r for r in left.values() if 1 in r.got), None))
        assert holder.got[1].tokens == [0, 1, 2, 3, 4, 5, 40, 41] and holder.got[1].mask == [1] * 6 + [0, 0]
        assert holder.got[1].tool_turns == 1 and holder.got[1].versions == [(0, 8)]

    run(tmp_path, scenario)


def test_a_tool_that_only_the_journal_knows_of_is_asked_again(tmp_path: Path) -> None:
    """The rollout died before the manager heard that the trajectory waits."""

    async def scenario(world: World) -> None:
        lost = await world.generate()
        await world.journal.grown(lost, 1, body(part(1, 0, 6, state=IN_TOOL), part(2, 0, 9, state="stop")))
        world.tool.set_result([40])
        world.lose(lost)
        left = others(world, lost)
        await until(lambda: sum(len(r.got) for r in left.values()) == 3)
        assert {i: t.tokens[-1:] for r in left.values() for i, t in r.got.items()} == {1: [40], 3: [], 4: []}
        assert 2 not in world.manager._groups[1, 0].unfinished, "it had ended"

    run(tmp_path, scenario)


def test_a_manager_beside_a_hung_rollout_opens_and_goes_on_with_the_others(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        hung = await world.generate()
        await world.journal.grown(hung, 1, body(part(1, 0, 3)))
        answers = world.rollouts[hung]._answer

        async def never(method: str, *args: Any) -> Any:
            await asyncio.sleep(3600)

        world.rollouts[hung]._answer = never
        async with asyncio.timeout(1.0):
            await world.open(incarnation=2)
        second = [t for t in trajectories(8, batch=2) if t.id > 4]
        left = others(world, hung)
        await until(lambda: all(lane.version == 0 for lane in world.manager._lanes if lane.role != hung))
        await world.manager.generate([[msgspec.msgpack.encode(t) for t in second]])
        await until(lambda: sum(len(r.got) for r in left.values()) == 4)
        assert all(i > 4 for r in left.values() for i in r.got), "what the hung one has stays with it"
        world.rollouts[hung]._answer = answers
        world.lose(hung)
        await until(lambda: {i for r in left.values() for i in r.got} == set(range(1, 9)))

    run(tmp_path, scenario)


def test_what_a_living_rollout_never_got_is_sent_again(tmp_path: Path) -> None:
    """The manager died between the journal's word and the rollout's."""

    async def scenario(world: World) -> None:
        holder = await world.generate()
        rollout = world.rollouts[holder]
        rollout.holds, rollout.got = [1, 2], {}
        await world.open(incarnation=2)
        await until(lambda: {i for r in world.rollouts.values() for i in r.got} == {3, 4})
        assert await world.journal.grown(holder, 1, body(part(1, 0, 2))) == [], "the living rollout is not fenced off"

    run(tmp_path, scenario)


def test_a_rollout_that_says_nothing_in_time_is_asked_again_for_all_that_it_has(tmp_path: Path) -> None:
    """First its manager's successor gets no answer, later an answer is lost that held what had finished."""

    async def scenario(world: World) -> None:
        holder = await world.generate()
        rollout = world.rollouts[holder]
        done = [msgspec.msgpack.encode(resumed(t, part(t.id, 0, 9, state="stop"))) for t in trajectories()]
        answers, late, asked = rollout._answer, {"reclaim", "collect"}, []

        async def answer(method: str, *args: Any) -> Any:
            asked.append(method)
            if method in late:
                late.discard(method)
                raise WaitTimeout(method)
            if method == "reclaim":
                return 0, list(enumerate(done, 1)) if not late else [], [], [1, 2, 3, 4] if late else []
            return await answers(method, *args)

        rollout._answer = answer
        await world.open(incarnation=2)
        await until(lambda: any(isinstance(e, ev.TrajectoriesFinished) for e in world.events))
        assert [a for a in asked if a != "abort"] == ["reclaim", "reclaim", "collect", "reclaim", "collect"]
        assert asked.count("abort") == 1, "what this life asked for goes on"
        assert not any(isinstance(e, ev.TrajectoriesMoved) for e in world.events)

    run(tmp_path, scenario)


def test_a_rollout_that_comes_back_beside_its_manager_waits_until_that_is_set_up_and_joins_once(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        made = RolloutManager.__new__(RolloutManager)
        here: Any = made
        here.spec, here.deadlines, here._set_up = SimpleNamespace(role="rollout_manager"), CONFIG.deadlines, asyncio.Event()
        joins = asyncio.create_task(made.add_rollout("rollout-0"))
        await asyncio.sleep(0.01)
        assert not joins.done()
        joins.cancel()
        lost = await world.generate()
        before = list(world.manager._lanes)
        await world.manager.add_rollout(lost)
        assert world.manager._lanes == before
        assert await world.journal.grown(lost, 1, body(part(1, 0, 2))) == [], "its word counts"

    run(tmp_path, scenario)


def test_a_full_restart_drops_what_the_log_knows_forgets_what_it_does_not_and_leaves_the_batch_to_be_made_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = await with_group(tmp_path)
        await first.consumed(1, [1])  # a step that was made after the log's last word
        made = journal(tmp_path, incarnation=2, known={"step": 0, "started": dict.fromkeys((1, 2, 3), "in flight"), "finished": []})
        here: Any = made
        here.spec.fresh = True
        await made.on_open()
        assert here.said == [ev.TrajectoriesDropped(ids=[1, 2, 3], reason="full restart")]
        assert await made.unfinished() == [] and await made.newest_batch() == 0
        assert made._settled[1] == 0

    asyncio.run(scenario())


def test_what_the_log_has_missed_is_said_in_the_order_in_which_it_happened(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = await opened(tmp_path)
        await first.queued([msgspec.msgpack.encode(t) for t in trajectories()])
        await first.started(1, 0, [1, 2], "rollout-0", 1, 0)
        await first.dropped([1], "a reward that is none")
        await first.started(1, 1, [3, 4], "rollout-1", 1, 0)
        second = await opened(tmp_path, incarnation=2, known={"step": 0, "started": {}, "finished": []})
        here: Any = second
        assert [type(event) for event in here.said] == [ev.TrajectoriesStarted, ev.TrajectoriesStarted, ev.TrajectoriesDropped]

    asyncio.run(scenario())
