"""What a task runner in a later life makes up for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from robustrl.config import Deadlines, JobConfig
from robustrl.runtime.task_runner import TaskRunner


@pytest.mark.parametrize(("done", "expected"), [(0, [0, 2, 4, 6]), (1, [2, 4, 6]), (2, [2, 4, 6]), (4, [4, 6]), (6, [6])])
def test_an_evaluation_that_its_earlier_life_died_of_is_made_again(done: int, expected: list[int]) -> None:
    evaluated: list[int] = []
    runner = TaskRunner.__new__(TaskRunner)
    stub: Any = runner
    stub.config, stub.deadlines = JobConfig(profile="class", steps=6, evaluation_every=2), Deadlines()
    stub.spec = SimpleNamespace(incarnation=2)
    stub._finishing = None
    stub.page, stub._tensorboard = SimpleNamespace(update=lambda **_: None), SimpleNamespace(close=lambda: None)

    async def nothing(*_: Any, **__: Any) -> None:
        pass

    async def take_up() -> tuple[int, int]:
        return done, done

    async def evaluate(version: int) -> None:
        evaluated.append(version)

    stub.peer = stub._gate = stub._dispatch = stub._train = stub._finish_step = stub._ask_rollouts = nothing
    stub._take_up, stub._evaluate = take_up, evaluate
    asyncio.run(runner.run())
    assert evaluated == expected
