"""What the rollout manager does about calls that are made twice."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from robustrl.config import Deadlines
from robustrl.core import events as ev
from robustrl.core.roles import Phase
from robustrl.errors import PeerDied, WaitTimeout
from robustrl.faults.disturbance import Disturbance
from robustrl.faults.orders import Order
from robustrl.rl.trajectory import Trajectory
from robustrl.runtime.rollout_manager import RolloutManager
from robustrl.runtime.routes import Lane
from robustrl.runtime.status_page import StatusPage


def manager() -> RolloutManager:
    """Without a process, a host or other roles."""
    made = RolloutManager.__new__(RolloutManager)
    made.deadlines, made._groups, made._waiting, made._changed = Deadlines(generation=5.0), {}, deque(), asyncio.Condition()
    return made


def test_an_evaluation_that_is_asked_for_again_is_not_made_twice() -> None:
    """An engine refuses a request whose id it works on; and the first one's end must not take the second one's group away."""

    async def scenario() -> None:
        asked = manager()
        fields = {"batch": 0, "prompt": "p", "prompt_tokens": [1], "columns": {}}
        bodies = [msgspec.msgpack.encode(Trajectory(id=-1 - i, group=i, **fields)) for i in range(3)]
        lost, again = (asyncio.create_task(asked.evaluate(bodies, 0)) for _ in range(2))
        await asyncio.sleep(0.01)
        assert [list(group.unfinished) for group in asked._waiting] == [[-1], [-2], [-3]]
        lost.cancel()  # its caller has died
        for group in asked._groups.values():
            assert group.done is not None
            group.done.set_result([msgspec.structs.replace(t, text="t", reward=1.0) for t in group.trajectories.values()])
        assert await again == [("p", "t", 1.0)] * 3

    asyncio.run(scenario())


class _Rollout:
    def __init__(self, role: str, error: Exception | None = None) -> None:
        self.role, self.error, self.got = role, error, list[Any]()

    async def call(self, method: str, *args: Any, deadline: float) -> None:
        if isinstance(self.error, WaitTimeout):
            await asyncio.sleep(0.2)
        if self.error:
            raise self.error
        self.got.append((method, *args))


def test_a_rollout_that_hangs_or_dies_delays_no_other_and_ends_no_manager() -> None:
    async def scenario() -> None:
        made = manager()
        here: Any = made
        here._newest, here._tasks, here.log, here.page = 0, set(), logging.getLogger("test"), None
        rollouts = [_Rollout("rollout-0", WaitTimeout("late")), _Rollout("rollout-1", PeerDied("gone")), _Rollout("rollout-2")]
        here._lanes = [Lane(rollout, 1) for rollout in rollouts]  # type: ignore[arg-type]
        here.die = lambda error: (_ for _ in ()).throw(error)
        await asyncio.wait_for(made.sync(3), 0.1)
        await asyncio.sleep(0.05)
        assert rollouts[2].got == [("sync", 3)]
        await asyncio.sleep(0.3)
        assert [lane.role for lane in here._lanes] == ["rollout-0", "rollout-2"], "one that hangs is the detector's matter"

    asyncio.run(scenario())


def test_what_a_rollout_finished_as_it_was_lost_ends_once_where_it_goes_on() -> None:
    async def scenario() -> None:
        made = manager()
        here: Any = made
        here._tasks, here.log, here.page, here._in_tool, moved = set(), logging.getLogger("test"), None, set(), list[list[int]]()
        lane = Lane(_Rollout("rollout-0"), 1)  # type: ignore[arg-type]
        lane.open, here._lanes = {1}, [lane]
        trajectory = Trajectory(id=1, batch=1, group=0, prompt="p", prompt_tokens=[1], columns={})
        await made._queue([trajectory], 0)

        async def move(_: Lane, ids: list[int]) -> None:
            moved.append(ids)

        here._move, here._show = move, lambda: None
        await made._changed.acquire()
        taking = asyncio.create_task(made._take(lane, 3, [(1, msgspec.msgpack.encode(trajectory))], []))
        await asyncio.sleep(0)
        made._lose(lane, "it died")
        made._changed.release()
        await taking
        await asyncio.sleep(0)
        assert moved == [[1]] and made._groups[1, 0].unfinished == {1}

    asyncio.run(scenario())


class _Held:
    """A manager whose clock passes as it sleeps: ``said`` is what its disturbance tells of, with the times."""

    def __init__(self, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.said, self.tmp = 0.0, list[tuple[float, str]](), tmp
        self.manager: Any = manager()
        self.manager.spec, self.manager._tasks = SimpleNamespace(role="rollout_manager"), set()
        page = StatusPage.create(tmp / "page", incarnation=1, pid=7)
        page.phase = Phase.WAITING_REQUEST
        told: Callable[[ev.Event], None] = lambda event: self.said.append((round(self.now, 3), type(event).__name__))  # noqa: E731
        self.manager.disturbance = Disturbance(page, told, lambda timeout: None)
        turn = asyncio.sleep

        async def sleep(seconds: float) -> None:
            self.now += seconds
            await turn(0)

        monkeypatch.setattr("robustrl.faults.disturbance.time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(asyncio, "sleep", sleep)

    def order(self, role: str = "rollout-0", fault: int = 1, seconds: float = 5.0) -> Order:
        return Order(fault=fault, kind="idle_rollout", role=role, incarnation=1, node="node-0", pid=7, page=str(self.tmp / "page"),
                     folder=str(self.tmp), options={"seconds": seconds})  # fmt: skip

    async def over(self) -> None:
        while self.manager._tasks:
            await asyncio.gather(*self.manager._tasks)


def test_a_rollout_is_idle_for_its_time_though_nothing_is_dispatched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = _Held(tmp_path, monkeypatch)

    async def scenario() -> None:
        await held.manager.disturb(held.order())
        await held.over()

    asyncio.run(scenario())
    (begun, first), (ended, second) = held.said
    assert (first, begun, second) == ("FaultInjected", 0.0, "FaultEnded") and 5.0 <= ended <= 5.2


def test_an_idle_rollout_that_is_called_off_gets_work_at_once_and_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = _Held(tmp_path, monkeypatch)

    async def scenario() -> None:
        await held.manager.disturb(held.order())
        await asyncio.sleep(0)
        held.order().off.touch()
        await held.over()

    asyncio.run(scenario())
    assert held.now < 0.5 and held.said == [(0.0, "FaultInjected")], "its end is the caller's to write"


def test_a_rollout_that_was_idle_gets_the_group_that_waits_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = _Held(tmp_path, monkeypatch)
    here = held.manager
    here.config, here._moving = SimpleNamespace(rollout_concurrency=1), []
    here._lanes = [Lane(_Rollout("rollout-0"), 1), Lane(_Rollout("rollout-1"), 1)]  # type: ignore[arg-type]
    here._lanes[1].open = {7}
    for lane in here._lanes:
        lane.version = 0

    async def scenario() -> None:
        await here.disturb(held.order())
        await here._queue([Trajectory(id=1, batch=1, group=0, prompt="p", prompt_tokens=[1], columns={})], 0)
        async with here._changed:
            assert not here._placeable()
            await asyncio.wait_for(here._changed.wait_for(here._placeable), 5)
        assert here._free_lane(here._waiting[0]).role == "rollout-0" and 5.0 <= held.now <= 5.2

    asyncio.run(scenario())
