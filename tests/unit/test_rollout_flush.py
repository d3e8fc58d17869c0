"""What a rollout tells the journal while it generates: each token once, in the order of its trajectory, and nothing of evaluations."""

from __future__ import annotations

import asyncio
import queue
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from robustrl.core.roles import Phase
from robustrl.engines.base import Delta
from robustrl.rl.trajectory import IN_TOOL, Part, Trajectory, parts_decoder
from robustrl.runtime.rollout import _FLUSH_TOKENS, Rollout


class _Journal:
    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.answer: list[int] | None = []

    async def call(
        self, method: str, role: str, incarnation: int, body: bytes, evaluated: int, *, deadline: float, again: bool
    ) -> list[int] | None:
        assert (method, role, incarnation, again) == ("grown", "rollout-0", 2, True)
        self.evaluated = evaluated
        self.parts += parts_decoder.decode(body)
        return self.answer


def rollout(journal_tokens: bool = True) -> tuple[Rollout, Any, _Journal]:
    made = Rollout.__new__(Rollout)
    here: Any = made
    here.spec = SimpleNamespace(role="rollout-0", incarnation=2)
    here.deadlines, here.config = SimpleNamespace(call=1.0), SimpleNamespace(journal_tokens=journal_tokens)
    here._journal = journal = _Journal()
    here._loop = asyncio.get_running_loop()
    here._out, here._unacknowledged = asyncio.Queue(), {}
    here._grown, here._growing, here._flushed = {}, {}, {}
    here._flush_due, here._commands = asyncio.Event(), queue.SimpleQueue()
    here._live, here._in_tool, here._version, here._generated, here._since_flush, here._budget = {}, {}, 3, 0, 0, 100
    here._evaluated = 0
    here._engine = SimpleNamespace(add=lambda request: None, abort=lambda ids: None)
    here._request = lambda trajectory: None
    return made, here, journal


def trajectory(number: int, tokens: int = 0) -> Trajectory:
    made = Trajectory(id=number, batch=1, group=0, prompt="p", prompt_tokens=[7], columns={})
    made.generated(list(range(tokens)), [-1.0] * tokens, 2)
    return made


def grow(here: Any, number: int, count: int, finished: Any = None) -> None:
    at = len(here._live[number].tokens)
    here._take([Delta(str(number), list(range(at, at + count)), [-1.0] * count, finished)])


def test_each_token_is_told_once_and_an_ended_trajectory_is_forgotten() -> None:
    async def scenario() -> None:
        made, here, journal = rollout()
        here._begin([trajectory(1), trajectory(2), trajectory(-5)])
        grow(here, 1, 5)
        grow(here, -5, 5)
        await made._flush()
        await made._flush()
        assert [(p.id, p.at, p.end, p.state) for p in journal.parts] == [(1, 0, 5, "")]
        grow(here, 1, 4, "eos")
        grow(here, 2, 2)
        await made._flush()
        assert [(p.id, p.at, p.end, p.state) for p in journal.parts[1:]] == [(1, 5, 9, "stop"), (2, 0, 2, "")]
        assert journal.parts[1].versions == [(3, 4)] and set(here._grown) == set(here._growing) == set(here._flushed) == {2}

    asyncio.run(scenario())


def test_without_a_journal_of_tokens_nothing_is_told_or_kept() -> None:
    async def scenario() -> None:
        made, here, journal = rollout(journal_tokens=False)
        await made.submit([msgspec.msgpack.encode(trajectory(1, 5))])
        here._commands.get_nowait()()
        grow(here, 1, 4, "eos")
        await made._flush()
        assert not journal.parts and not here._grown and not here._flushed

    asyncio.run(scenario())


def test_the_tokens_of_evaluations_are_told_as_a_number() -> None:
    async def scenario() -> None:
        made, here, journal = rollout()
        here._begin([trajectory(-1), trajectory(1)])
        grow(here, -1, 7)
        grow(here, 1, 2)
        await made._flush()
        assert [part.id for part in journal.parts] == [1] and journal.evaluated == 7 and here._generated == 9

    asyncio.run(scenario())


def test_one_that_came_with_tokens_is_told_from_there_on() -> None:
    async def scenario() -> None:
        made, here, journal = rollout()
        here._commands = SimpleNamespace(put=lambda command: command())
        await made.submit([msgspec.msgpack.encode(trajectory(1, tokens=10))])
        await made._flush()
        assert not journal.parts, "the journal has those"
        grow(here, 1, 2)
        await made._flush()
        assert [(p.at, p.end, p.versions) for p in journal.parts] == [(10, 12, [(3, 2)])]

    asyncio.run(scenario())


def test_what_the_journal_misses_is_sent_again_from_its_start() -> None:
    async def scenario() -> None:
        made, here, journal = rollout()
        here._begin([trajectory(1)])
        grow(here, 1, 5)
        journal.answer = [1]
        await made._flush()
        grow(here, 1, 1)
        journal.answer = []
        await made._flush()
        assert [(p.at, p.end) for p in journal.parts] == [(0, 5), (0, 6)]

    asyncio.run(scenario())


def test_a_tool_turn_is_told_at_once_and_so_is_its_answer() -> None:
    async def scenario() -> None:
        made, here, journal = rollout()
        here._begin([trajectory(1)])
        grow(here, 1, 3, "stop")
        await asyncio.sleep(0)
        assert here._flush_due.is_set()
        await made._flush()
        here._flush_due.clear()
        made._resume(1, [40, 41])
        await asyncio.sleep(0)
        assert here._flush_due.is_set()
        await made._flush()
        assert [(p.at, p.end, p.state, p.tool_turns, p.mask) for p in journal.parts] == [
            (0, 3, IN_TOOL, 0, [1, 1, 1]),
            (3, 5, "", 1, [0, 0]),
        ]

    asyncio.run(scenario())


def test_a_life_that_was_replaced_exits() -> None:
    async def scenario() -> None:
        made, here, journal = rollout()
        deaths: list[BaseException] = []
        here.die = deaths.append
        here._begin([trajectory(1)])
        grow(here, 1, 1)
        journal.answer = None
        await made._flush()
        assert "was replaced" in str(deaths[0])

    asyncio.run(scenario())


@pytest.mark.parametrize("slow", [False, True])
def test_a_flush_is_due_after_so_many_tokens_whatever_the_time(slow: bool) -> None:
    async def scenario() -> None:
        made, here, _ = rollout()
        here.page = SimpleNamespace(stamp=lambda: None, update=lambda **_: None, phase=None)
        here._pace = 0.0
        here.disturbance = SimpleNamespace(pass_by=lambda place, working: None, holds=lambda role: False)
        here._commands = SimpleNamespace(get=_empty, get_nowait=_empty)
        here._begin([trajectory(1)])
        step = [Delta("1", [4], [-1.0], None)]
        here._engine = SimpleNamespace(decoded=True, step=lambda: step)
        for _ in range(_FLUSH_TOKENS - slow):
            made._turn()
        await asyncio.sleep(0)
        assert here._flush_due.is_set() is not slow

    asyncio.run(scenario())


def test_the_page_says_that_there_is_work_before_the_first_engine_step() -> None:
    """Which may compile for long: a loop that stands still while it waits for work is taken for wedged, without start-up grace."""

    async def scenario() -> None:
        made, here, _ = rollout()
        told: dict[str, int] = {}
        here.page = SimpleNamespace(stamp=lambda: None, update=lambda **fields: told.update(fields), phase=None)
        here._pace = 0.0
        here.disturbance = SimpleNamespace(pass_by=lambda place, working: None, holds=lambda role: False)
        here._commands.put(lambda: here._begin([trajectory(1)]))
        seen = []

        def step() -> list[Delta]:
            seen.append((here.page.phase, told["pending"]))
            return []

        here._engine = SimpleNamespace(decoded=False, step=step, add=lambda request: None)
        made._turn()
        assert seen == [(Phase.PREFILL, 1)]

    asyncio.run(scenario())


def _empty(**_: Any) -> None:
    import queue

    raise queue.Empty
