"""A rollout's finished trajectories reach the rollout manager that lives, not a dead one that had asked before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from robustrl.runtime.rollout import Rollout


def test_what_a_dead_manager_was_waiting_for_goes_to_its_successor() -> None:
    async def scenario() -> None:
        rollout: Any = Rollout.__new__(Rollout)
        rollout._out, rollout._unacknowledged, rollout._version = asyncio.Queue(), {}, 3
        rollout._loop, rollout._in_tool, rollout._live = asyncio.get_running_loop(), {}, {7: None}
        rollout._commands = SimpleNamespace(put=lambda command: command())
        dead = asyncio.create_task(rollout.collect(0.3, []))
        await asyncio.sleep(0)
        assert await rollout.reclaim() == (3, [], [], [7])
        living = asyncio.create_task(rollout.collect(0.3, []))
        await asyncio.sleep(0)
        rollout._posted("finished", (7, b"body"))
        assert await living == (3, [(7, b"body")], [])
        assert await dead == (3, [], [])

    asyncio.run(scenario())


def test_a_tool_turn_that_comes_right_after_the_look_is_not_lost() -> None:
    """The engine goes on between its look at what runs and the answer."""

    async def scenario() -> None:
        rollout: Any = Rollout.__new__(Rollout)
        rollout._out, rollout._unacknowledged, rollout._version = asyncio.Queue(), {}, 3
        rollout._loop, rollout._in_tool, rollout._live = asyncio.get_running_loop(), {}, {7: None}

        def look_and_go_on(look: Any) -> None:
            rollout._post("finished", (5, b"before"))
            look()
            rollout._post("tool", b"after")

        rollout._commands = SimpleNamespace(put=look_and_go_on)
        assert await rollout.reclaim() == (3, [(5, b"before")], [], [7])
        assert await rollout.collect(1.0, []) == (3, [], [b"after"])

    asyncio.run(scenario())
