"""An agent worker: runs tools and reward functions, each call in a thread, so that a slow tool delays nobody else.

A tool runs once for a turn, whoever asks: a rollout manager in a later life gets the answer that the one before was waiting for.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict

import msgspec

from ..core.roles import Phase
from ..errors import ConfigError
from ..rl.models import load_tokenizer
from ..rl.rewards import load_reward, score_trajectories
from ..rl.tasks import make_task
from ..rl.trajectory import Trajectory
from .role import Role

_ANSWERS = 4096
"""Turns whose answers are remembered."""


class AgentWorker(Role):
    async def on_open(self) -> None:
        self._running = self._done = 0
        self._answers: OrderedDict[bytes, asyncio.Task[list[int] | None]] = OrderedDict()
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        self._task = make_task(self.config.task, self.config.task_options, seed=self.config.seed)
        self._tokenizer = load_tokenizer(self.config.model)
        reward = load_reward(self.config.reward) if self.config.reward else self._task.reward
        if reward is None:
            raise ConfigError("reward", None, f"the task {self.config.task!r} has none of its own")
        self._reward = reward

    async def tool(self, body: bytes) -> list[int] | None:
        """Tokens that the environment answers with, or None when the trajectory is over."""
        turn = hashlib.blake2b(body, digest_size=16).digest()
        if (answer := self._answers.get(turn)) is None or (answer.done() and answer.exception()):
            answer = self._answers[turn] = asyncio.create_task(self._busy(self._run_tool, body))
            while len(self._answers) > _ANSWERS and next(iter(self._answers.values())).done():
                self._answers.popitem(last=False)
        return await asyncio.shield(answer)

    async def score(self, bodies: list[bytes]) -> tuple[list[bytes], dict[int, str]]:
        """The trajectories with text and reward, and the reason for each that has none. Raises RewardError where the policy is to stop."""
        return await self._busy(self._score, bodies)

    async def _busy(self, function, *args):
        self._running += 1
        self.page.phase = Phase.RUNNING
        try:
            return await asyncio.to_thread(function, *args)
        finally:
            self._running -= 1
            self._done += 1
            self.page.update(progress=self._done, pending=self._running)
            if not self._running:
                self.page.phase = Phase.IDLE

    def _run_tool(self, body: bytes) -> list[int] | None:
        trajectory = msgspec.msgpack.decode(body, type=Trajectory)
        self.disturbance.pass_by("tool")
        answer = self._task.tool(self._text(trajectory))
        return None if answer is None else self._tokenizer.encode(answer, add_special_tokens=False)

    def _score(self, bodies: list[bytes]) -> tuple[list[bytes], dict[int, str]]:
        group = [msgspec.msgpack.decode(body, type=Trajectory) for body in bodies]
        for trajectory in group:
            trajectory.text = self._text(trajectory)
        dropped = score_trajectories(self._reward, group, errors=self.config.reward_errors)
        return [msgspec.msgpack.encode(t) for t in group], dropped

    def _text(self, trajectory: Trajectory) -> str:
        return self._tokenizer.decode(trajectory.tokens, skip_special_tokens=True)
