"""What the rollout manager does about calls that are made twice."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from robustrl.config import Deadlines
from robustrl.rl.trajectory import Trajectory
from robustrl.runtime.rollout_manager import RolloutManager


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
        assert [work.ids for work in asked._waiting] == [[-1], [-2], [-3]]
        lost.cancel()  # its caller has died
        for group in asked._groups.values():
            assert group.done is not None
            group.done.set_result([msgspec.structs.replace(t, text="t", reward=1.0) for t in group.trajectories.values()])
        assert await again == [("p", "t", 1.0)] * 3

    asyncio.run(scenario())
