"""A trainer rank: applies optimizer steps, and puts its whole state into its state keeper before a version is announced.

The ranks of one trainer form a torch.distributed group (gloo on CPU). The learner runs in a thread of its own. Rank 0 publishes.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np

from ..core.roles import Phase
from ..errors import RobustRLError, WeightsError
from ..rl.models import load_tokenizer, resolve_model
from ..rl.tasks import make_task
from ..rl.trajectory import Trajectory
from ..transport.manifest import fill, layout_of, views
from .role import Role
from .state_keeper import Slot, Snapshot, map_slot

_PROBE_TOKENS = 64


class Trainer(Role):
    ready_when_open = False

    async def on_open(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._marks = 0
        self._one_step = asyncio.Lock()
        self._published: dict[str, Any] = {}
        """What `train` returned for the last step."""
        self._phase_seconds: dict[str, float] = {}
        self._phase_since = time.monotonic()
        await self._in_thread(importlib.import_module, "robustrl.rl.learner")  # torch and transformers: seconds

    async def rendezvous(self) -> str:
        """``host:port`` at which rank 0 will wait for the other ranks."""
        with socket.socket() as probe:
            probe.bind((self.spec.ip, 0))
            return f"{self.spec.ip}:{probe.getsockname()[1]}"

    async def prepare(self, rendezvous: str, process_group: float) -> None:
        """Load the model, meet the other ranks, and publish version 0; in a later life, take up the step that the keeper has.

        ``process_group``: seconds that a collective waits for the other ranks; longer than the detector's (core/thresholds.py).
        """
        await self._in_thread(self._build, rendezvous, process_group)
        self._keeper = await self.peer("state_keeper-0")
        kept = await self._keeper.call("committed", deadline=self.deadlines.call, again=True) if self.spec.incarnation > 1 else None
        if kept is not None:
            await self._in_thread(self._restore, *kept)
        else:
            self._published = await self._snapshot(step=0, batch=0, consumed=[])
        self._enter(Phase.WAITING_BATCH)
        self.say_ready()

    def _build(self, rendezvous: str, process_group: float) -> None:
        import torch

        from ..rl.learner import Learner

        world = self.config.trainer_ranks
        cuda = torch.cuda.is_available()
        if world > 1:
            import torch.distributed as dist

            dist.init_process_group(
                "nccl" if cuda else "gloo",
                init_method=f"tcp://{rendezvous}",
                rank=self.role.index,
                world_size=world,
                timeout=timedelta(seconds=process_group),
            )
        self._learner = Learner(
            resolve_model(self.config.model),
            self.config.grpo,
            seed=self.config.seed,
            rank=self.role.index,
            world_size=world,
            device="cuda" if cuda else "cpu",
            temperature=self.config.sampling.temperature,
        )
        task = make_task(self.config.task, self.config.task_options, seed=self.config.seed)
        prompt = task.encode(load_tokenizer(self.config.model), task.prompts("train", 0, 1)[0])
        self._probe = (prompt if len(prompt) > 1 else prompt * 2)[:_PROBE_TOKENS]  # one token alone has no log-probability

    def _restore(self, snapshot: Snapshot, slots: list[Slot]) -> None:
        """Weights and recovery state of the keeper's last committed step, read where they lie."""
        self._slots, self._layout = [(slot, map_slot(slot.path)) for slot in slots], snapshot.layout
        slot, array = self._slots[snapshot.slot]
        self._learner.load_weights(dict(views(snapshot.layout.tensors, array[: slot.weights_bytes])))
        self._learner.load_recovery_state(array[slot.weights_bytes : slot.weights_bytes + snapshot.state_length].tobytes())
        self._published = self._result(snapshot)
        self.page.step = self.page.version = snapshot.step

    def _result(self, snapshot: Snapshot) -> dict[str, Any]:
        return {"metrics": snapshot.metrics, "phase_seconds": snapshot.phase_seconds, "version": snapshot.step}

    async def train(self, step: int, batch: int) -> dict[str, Any]:
        """One optimizer step on the finished trajectories of ``batch``: metrics, seconds by phase, and the version that was published.

        A step is applied once: asked again for it, in this life or a later one, the answer is that of the first time.
        """
        async with self._one_step:
            if self._published["version"] < step:
                try:
                    self._published = await self._train(step, batch)
                except RobustRLError:
                    raise
                except Exception as error:
                    if self._lost_a_peer(error):
                        raise  # not this rank's own: whoever died is named by its node's agent
                    self.die(error)
            return self._published

    def _lost_a_peer(self, error: Exception) -> bool:
        return self.config.trainer_ranks > 1 and isinstance(error, RuntimeError) and ("gloo" in str(error) or "nccl" in str(error).lower())

    async def _train(self, step: int, batch: int) -> dict[str, Any]:
        journal = await self.peer("request_manager")
        self.page.step = step
        bodies = await journal.call("batch", batch, deadline=self.deadlines.call, again=True)
        trajectories = [msgspec.msgpack.decode(body, type=Trajectory) for body in bodies]
        if self._learner.step < step:  # else only its snapshot is missing
            self._metrics = await self._in_thread(self._learner.train_step, trajectories, self._work, self._mark)
        result = await self._snapshot(step=step, batch=batch, consumed=[t.id for t in trajectories], metrics=self._metrics)
        self._enter(Phase.WAITING_BATCH)
        return result

    async def save_pretrained(self, path: str) -> None:
        await self._in_thread(self._learner.save_pretrained, path)

    async def _snapshot(self, *, step: int, batch: int, consumed: list[int], metrics: dict[str, float] | None = None) -> dict[str, Any]:
        """Fill the keeper's free slot, have it committed and announced. The trainer's state is outside the trainer when this returns.

        All ranks gather the state together; rank 0 hands it over and returns what was published.
        """
        self._enter(Phase.SNAPSHOT)
        weights, state, probe = await self._in_thread(self._collect_state)
        if self.role.index > 0:
            return {"version": step}
        if step == 0:
            self._layout = layout_of(weights)
            room = len(state) + 3 * self._layout.nbytes + (1 << 20)  # AdamW's two moments come with the first step
            slots = await self._keeper.call("allocate", self._layout.nbytes, room, deadline=self.deadlines.call, again=True)
            self._slots = [(slot, map_slot(slot.path)) for slot in slots]
        number = await self._keeper.call("free_slot", deadline=self.deadlines.call, again=True)
        await self._in_thread(self._fill, number, weights, state)
        self._enter(Phase.PUBLISH)
        await self._in_thread(self.disturbance.pass_by, Phase.PUBLISH)
        seconds, self._phase_seconds = self._phase_seconds, {}
        snapshot = Snapshot(
            step=step,
            batch=batch,
            consumed=consumed,
            slot=number,
            layout=self._layout,
            state_length=len(state),
            probe_tokens=self._probe,
            probe_logprobs=probe,
            metrics=metrics or {},
            phase_seconds=seconds,
        )
        await self._keeper.call("commit", snapshot, deadline=self.deadlines.call, again=True)
        self.page.version = step
        return self._result(snapshot)

    def _collect_state(self) -> tuple[dict[str, Any], bytes, list[float]]:
        self.disturbance.pass_by(Phase.SNAPSHOT)
        return self._learner.weights(), self._learner.recovery_state(), self._learner.probe(self._probe)

    def _fill(self, number: int, weights: dict[str, Any], state: bytes) -> None:
        slot, array = self._slots[number]
        if len(state) > slot.state_bytes:
            raise WeightsError(f"recovery state of {len(state)} bytes: the slot has room for {slot.state_bytes}")
        fill(self._layout, weights, array[: slot.weights_bytes])
        array[slot.weights_bytes : slot.weights_bytes + len(state)] = np.frombuffer(state, np.uint8)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _enter(self, phase: Phase) -> None:
        now = time.monotonic()
        old = self.page.phase.value
        self._phase_seconds[old] = self._phase_seconds.get(old, 0.0) + now - self._phase_since
        self._phase_since = now
        self.page.phase = phase

    def _work(self, phase: Phase) -> None:
        self._enter(phase)
        self.disturbance.pass_by(phase)

    def _mark(self, done: int, total: int) -> None:
        self._marks += 1
        self.page.update(progress=self._marks, pending=total - done)
        if done < total:
            self.disturbance.pass_by(Phase.TRAIN)
