"""Trajectories of a rollout that died go on elsewhere from what the journal has: manager and journal as they are, rollouts made up."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from robustrl.config import JobConfig
from robustrl.core import events as ev
from robustrl.core.ledger import TrajectoryState
from robustrl.errors import PeerDied, WaitTimeout
from robustrl.rl.trajectory import IN_TOOL, Part, Trajectory, part_of, resumed, runs_between
from robustrl.runtime.request_manager import RequestManager
from robustrl.runtime.rollout_manager import RolloutManager
from robustrl.runtime.routes import Lane

_CONFIG = JobConfig(profile="class", agent_workers=1, prompts_per_step=1, samples_per_prompt=4)


def part(number: int, at: int, count: int, version: int = 0, state: str = "") -> Part:
    """Tokens that are their own positions."""
    return Part(number, at, list(range(at, at + count)), [-0.5] * count, [1] * count, [(version, count)] if count else [], 0, state)


def body(*parts: Part) -> bytes:
    return msgspec.msgpack.encode(list(parts))


def trajectories(count: int = 4, batch: int = 1) -> list[Trajectory]:
    return [Trajectory(id=i, batch=batch, group=0, prompt="p", prompt_tokens=[7], columns={}) for i in range(1, count + 1)]


def journal(folder: Path, incarnation: int = 1, known: dict[str, Any] | None = None) -> RequestManager:
    """Without a process or a host; ``said`` are the events that it emitted."""
    made = RequestManager.__new__(RequestManager)
    here: Any = made
    here.spec = SimpleNamespace(run_dir=str(folder), incarnation=incarnation, role="request_manager", fresh=False)
    here.config, here.deadlines = _CONFIG, _CONFIG.deadlines
    here.page = SimpleNamespace(phase=None, update=lambda **_: None)
    here.said = []
    here.emit = here.said.append
    here.spawn = lambda coroutine: coroutine.close()

    async def ask_host(verb: str, **_: Any) -> Any:
        return known

    here.ask_host = ask_host
    return made


async def opened(folder: Path, **options: Any) -> RequestManager:
    made = journal(folder, **options)
    await made.on_open()
    return made


async def with_group(folder: Path, rollout: str = "rollout-0") -> RequestManager:
    made = await opened(folder)
    await made.queued([msgspec.msgpack.encode(t) for t in trajectories()])
    await made.started(1, 0, [1, 2, 3, 4], rollout, 1, 0)
    return made


def decoded(answer: bytes) -> list[Part]:
    return msgspec.msgpack.decode(answer, type=list[Part])


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


# -- the manager ---


class _Peer:
    """Calls go to a function."""

    def __init__(self, role: str, answer: Callable[..., Awaitable[Any]]) -> None:
        self.role, self._answer = role, answer

    async def call(self, method: str, *args: Any, deadline: float, again: bool = False) -> Any:
        return await self._answer(method, *args)


class _Rollout(_Peer):
    def __init__(self, role: str, version: int) -> None:
        super().__init__(role, self._do)
        self.got: dict[int, Trajectory] = {}
        self.resumed: list[int] = []
        self.dead = False
        self.version = version
        self.holds: list[int] = []

    async def _do(self, method: str, *args: Any) -> Any:
        if self.dead:
            raise PeerDied(self.role)
        if method == "submit":
            self.got.update({t.id: t for t in (msgspec.msgpack.decode(b, type=Trajectory) for b in args[0])})
        elif method == "resume":
            self.resumed.append(args[0])
        elif method == "reclaim":
            return self.version, [], [], self.holds
        elif method == "collect":
            await asyncio.sleep(3600)


class _World:
    def __init__(self, folder: Path, versions: dict[str, int], **settings: Any) -> None:
        self.folder, self.settings = folder, settings
        self.rollouts = {role: _Rollout(role, version) for role, version in versions.items()}
        self.tool: asyncio.Future[list[int] | None] = asyncio.get_running_loop().create_future()
        self.rated: list[list[Trajectory]] = []

    async def _agent(self, method: str, *args: Any) -> Any:
        if method == "tool":
            return await self.tool
        self.rated.append([msgspec.msgpack.decode(b, type=Trajectory) for b in args[0]])
        return [msgspec.msgpack.encode(msgspec.structs.replace(t, reward=1.0)) for t in self.rated[-1]], {}

    async def _journal_call(self, method: str, *args: Any) -> Any:
        return await getattr(self.journal, method)(*args)

    async def open(self, incarnation: int = 1) -> RolloutManager:
        if incarnation == 1:
            self.journal = await opened(self.folder)
        made = RolloutManager.__new__(RolloutManager)
        here: Any = made
        here.spec = SimpleNamespace(incarnation=incarnation, role="rollout_manager")
        here.config = msgspec.structs.replace(_CONFIG, rollouts=len(self.rollouts), **self.settings)
        here.deadlines, here.log = _CONFIG.deadlines, logging.getLogger("test")
        here.page = SimpleNamespace(update=lambda **_: None)
        here._tasks, here._set_up = set(), asyncio.Event()
        here.die = lambda error: pytest.fail(str(error))
        here.disturbance = SimpleNamespace(holds=lambda role: False)

        async def peer(role: str) -> Any:
            return self.rollouts.get(role) or _Peer(role, self._journal_call if role == "request_manager" else self._agent)

        async def lane(role: str) -> Lane:
            made = Lane(self.rollouts[role], 1)  # type: ignore[arg-type]
            made.version = self.rollouts[role].version if incarnation == 1 else -1
            return made

        async def ask_host(verb: str, **_: Any) -> Any:
            return [role for role, rollout in self.rollouts.items() if not rollout.dead] if verb == "ready" else {"step": 0}

        here.peer, here._lane, here.ask_host = peer, lane, ask_host
        await made.on_open()
        self.manager = made
        return made

    async def generate(self, count: int = 4) -> str:
        """The rollout that got the group."""
        await self.manager.generate([[msgspec.msgpack.encode(t) for t in trajectories(count)]])
        return await until(lambda: next((role for role, rollout in self.rollouts.items() if rollout.got), None))

    def lose(self, role: str) -> None:
        self.rollouts[role].dead = True
        self.manager._lose(next(lane for lane in self.manager._lanes if lane.role == role), "test")

    @property
    def events(self) -> list[ev.Event]:
        here: Any = self.journal
        return here.said


async def until(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(5.0):
        while not (value := condition()):
            await asyncio.sleep(0.001)
    return value


def run(folder: Path, scenario: Callable[[_World], Awaitable[None]], versions: dict[str, int] | None = None, **settings: Any) -> None:
    async def main() -> None:
        world = _World(folder, versions or {"rollout-0": 0, "rollout-1": 0, "rollout-2": 0}, **settings)
        await world.open()
        await scenario(world)

    asyncio.run(main())


def others(world: _World, lost: str) -> dict[str, _Rollout]:
    return {role: rollout for role, rollout in world.rollouts.items() if role != lost}


def test_the_survivors_go_on_from_the_last_journalled_token_and_share_the_load(tmp_path: Path) -> None:
    async def scenario(world: _World) -> None:
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
    async def scenario(world: _World) -> None:
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
    async def scenario(world: _World) -> None:
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
    async def scenario(world: _World) -> None:
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
    async def scenario(world: _World) -> None:
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

    async def scenario(world: _World) -> None:
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
    async def scenario(world: _World) -> None:
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

    async def scenario(world: _World) -> None:
        holder = await world.generate()
        rollout = world.rollouts[holder]
        rollout.holds, rollout.got = [1, 2], {}
        await world.open(incarnation=2)
        await until(lambda: {i for r in world.rollouts.values() for i in r.got} == {3, 4})
        assert await world.journal.grown(holder, 1, body(part(1, 0, 2))) == [], "the living rollout is not fenced off"

    run(tmp_path, scenario)


def test_a_rollout_that_says_nothing_in_time_is_asked_again_for_all_that_it_has(tmp_path: Path) -> None:
    """First its manager's successor gets no answer, later an answer is lost that held what had finished."""

    async def scenario(world: _World) -> None:
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
    async def scenario(world: _World) -> None:
        made = RolloutManager.__new__(RolloutManager)
        here: Any = made
        here.spec, here.deadlines, here._set_up = SimpleNamespace(role="rollout_manager"), _CONFIG.deadlines, asyncio.Event()
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
