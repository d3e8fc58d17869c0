"""A warm standby: a process that has done beforehand what takes long, and that becomes another role when that one is lost (see shell.py).

The first ``config.standbys`` of them have a learner and an engine built, with weights that mean nothing, and become a trainer or a rollout;
the one after them has its imports done, and becomes any other role. What it has built, it leaves to the role that it becomes.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from ..core.roles import Phase
from .role import Role

_LIGHT = ("task_runner", "rollout_manager", "request_manager", "agent_worker", "supervisor", "state_keeper", "node_agent")
_HEAVY = ("trainer", "rollout", "state_keeper")
_WARM_UP_TOKENS = 4


class Standby(Role):
    async def on_open(self) -> None:
        self.page.phase = Phase.WARMING
        self._built: dict[str, Any] = {}
        heavy = self.role.index < (self.config.standbys or 0)
        await asyncio.to_thread(self._build if heavy else self._import, _HEAVY if heavy else _LIGHT)
        self.page.phase = Phase.READY

    async def retire(self) -> dict[str, Any]:
        self.page.phase = Phase.TAKING_OVER
        await super().retire()
        return self._built

    def _import(self, names: tuple[str, ...]) -> None:
        from ..rl.models import load_tokenizer
        from ..rl.tasks import make_task

        for name in names:
            importlib.import_module(f"{__package__}.{name}")
        make_task(self.config.task, self.config.task_options, seed=self.config.seed)
        load_tokenizer(self.config.model)

    def _build(self, names: tuple[str, ...]) -> None:
        self._import(names)
        self.choose_transport()
        import torch

        from ..engines.base import Request, make_engine
        from ..rl.learner import Learner
        from ..rl.models import resolve_model
        from ..transport import puller, server  # noqa: F401

        model = resolve_model(self.config.model)
        engine = make_engine(
            self.config.engine,
            model,
            seed=(self.config.seed * 1000 + 500 + self.role.index) % 2**32,
            load="dummy",
            max_model_len=self.config.max_model_len,
            max_num_seqs=self.config.rollout_concurrency,
        )
        engine.add(Request(id="warm-up", tokens=[1, 2], max_tokens=_WARM_UP_TOKENS, temperature=1.0, top_p=1.0, stop=[], seed=1))
        while engine.unfinished:
            engine.step()
        engine.score([1, 2, 3])
        engine.drop_held()
        self._built["engine"] = engine
        if not torch.cuda.is_available():  # there the ranks shard the model, which takes their process group
            learner = Learner(model, self.config.grpo, seed=self.config.seed, temperature=self.config.sampling.temperature)
            learner.probe([1, 2, 3])
            self._built["learner"] = learner
