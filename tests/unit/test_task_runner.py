"""What a task runner in a later life makes up for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from robustrl.config import Deadlines, JobConfig
from robustrl.errors import PeerDied
from robustrl.runtime.role import LifeEnded
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


def test_asked_again_in_the_same_life_it_takes_up_what_it_has_done_itself() -> None:
    """A trainer stayed away for too long: nothing is dispatched, or evaluated, twice."""
    stub: Any = TaskRunner.__new__(TaskRunner)
    stub.config, stub.deadlines = JobConfig(profile="class", steps=3, staleness=1, evaluation_prompts=8), Deadlines()
    stub.spec, stub._begun, stub._evaluated, stub._step = SimpleNamespace(incarnation=1), False, set(), 0
    stub._task = SimpleNamespace(prompts=lambda *_: [])
    stub.page, stub._tensorboard = SimpleNamespace(update=lambda **_: None), SimpleNamespace(close=lambda: None, add_scalar=lambda *_: None)
    dispatched, trained, evaluated, said = list[int](), list[int](), list[int](), list[Any]()
    stub.emit = said.append

    async def nothing(*_: Any, **__: Any) -> None:
        pass

    async def dispatch(batch: int) -> None:
        dispatched.append(batch)

    async def train(step: int) -> dict[str, Any]:
        trained.append(step)
        if trained == [1, 2]:
            raise PeerDied("trainer-0 died during train()")
        return {"version": step}

    async def known(verb: str) -> dict[str, Any]:
        return {"evaluated": [], "paused": False, "step": 1, "metrics": 1}  # the word of the evaluation is on its way

    async def evaluate(method: str, *args: Any, **_: Any) -> list[tuple[str, str, float]]:
        if method == "evaluate":
            evaluated.append(args[1])
        return [("p", "t", 1.0)]

    async def newest_batch(*_: Any, **__: Any) -> int:
        return max(dispatched)

    async def peer(role: str) -> Any:
        return SimpleNamespace(call=newest_batch)

    stub.peer, stub._gate, stub._dispatch, stub._train, stub._finish_step = peer, nothing, dispatch, train, nothing
    stub._ask_rollouts, stub._call_trainers, stub.ask_host = evaluate, nothing, known
    with pytest.raises(PeerDied):
        asyncio.run(stub.run())
    asyncio.run(stub.run())
    assert trained == [1, 2, 2, 3] and dispatched == [1, 2, 3] and evaluated == [0, 3]


def test_a_trainer_that_is_dead_before_it_is_asked_is_waited_for() -> None:
    """A later life of this role knows nobody yet, and finds the trainer dead and its next life not there."""
    asked = list[str]()
    stub: Any = TaskRunner.__new__(TaskRunner)
    stub.deadlines = Deadlines()

    async def train(*_: Any, **__: Any) -> dict[str, Any]:
        asked.append("train")
        return {"version": 3}

    async def present(role: str) -> tuple[int, str]:
        if not asked:
            raise LifeEnded(role, 1)
        return 2, "handle"

    async def successor(role: str, incarnation: int, deadline: float) -> None:
        asked.append(f"{role} after {incarnation}, {deadline:g} s")

    stub._trainers, stub.present, stub.successor = [SimpleNamespace(role="trainer-0", call=train)], present, successor
    assert asyncio.run(stub._call_trainers(3)) == {"version": 3}
    assert asked == [f"trainer-0 after 1, {stub.deadlines.role_start:g} s", "train"]
