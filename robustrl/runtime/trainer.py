"""A trainer rank: applies optimizer steps, and puts its whole state into its state keeper before a version is announced.

The ranks of one trainer form a torch.distributed group (gloo on CPU). The learner runs in a thread of its own. Rank 0 publishes: it fills
the keeper's free slot and goes on; the keeper commits and announces meanwhile, and the next slot is filled only after that. A later life
takes up the newest state that passes its check: the keeper's, else its peer's, else a checkpoint on disk. What the log calls committed
beyond that is done again from the journal. When a rank dies, the others leave the process group, stay, and meet its next life.
"""

from __future__ import annotations

import asyncio
import importlib
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..core import events as ev
from ..core.roles import Phase
from ..errors import RobustRLError, SnapshotError, WeightsError
from ..rl.models import load_tokenizer, resolve_model
from ..rl.tasks import make_task
from ..rl.trajectory import Trajectory
from ..transport.manifest import Layout, layout_of, views
from . import ranks
from .checkpoint import CheckpointWriter, checkpoints, load, step_of
from .role import Role
from .snapshots import Gathered, Kept, Slot, Snapshot, fill_slot, map_slot, room_for

_PROBE_TOKENS = 64
_DISK = "disk"


class Trainer(Role):
    ready_when_open = False

    async def on_open(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._loop = asyncio.get_running_loop()
        self._marks = 0
        self._one_step = asyncio.Lock()
        self._results: dict[int, dict[str, Any]] = {}
        """What `train` returned for the last steps."""
        self._phase_seconds: dict[str, float] = {}
        self._phase_since = time.monotonic()
        self._blocked = 0.0
        """Seconds for which the last snapshot kept the learner from its next step."""
        self._maps: dict[str, np.ndarray] = {}
        self._slots: list[Slot] = []
        self._commit: asyncio.Task[None] | None = None
        """Of the step before: the keeper's commit of what was filled."""
        self._next_slot: asyncio.Task[int] | None = None
        self._layout: Layout | None = None
        self._learner: Any = None
        self._said_ready = False
        self._redone = -1
        """The last step that was committed before the state was rolled back."""
        self._cuda = False
        self._store: Any = None
        """Where the other ranks find rank 0."""
        self._writer = CheckpointWriter(Path(self.spec.run_dir, "checkpoints"), self.spec.role, self.emit, self.disturbance.disk)
        await self._in_thread(importlib.import_module, "robustrl.rl.learner")  # torch and transformers: seconds

    async def rendezvous(self) -> str:
        """``host:port`` at which rank 0 waits for the other ranks."""
        self._store = ranks.open_store(self.spec.ip, self.config.trainer_ranks)
        return f"{self.spec.ip}:{self._store.port if self._store else 0}"

    async def prepare(self, rendezvous: str, process_group: float) -> None:
        """Meet the other ranks and publish version 0; in a later life, or where another rank is in one, take up the newest state.

        ``process_group``: seconds that a collective waits for the other ranks; longer than the detector's (core/thresholds.py).
        """
        async with self._one_step:
            first = self._learner is None
            await self._committed()
            self._keeper = await self.peer("state_keeper-0")
            await self._in_thread(self._meet, rendezvous, process_group)
            if first or self._cuda:  # shards belong to their process group
                await self._in_thread(self._build)
            if (first and self.spec.incarnation == 1) or not await self._restore():
                if not first:
                    await self._in_thread(self._build)
                await self._snapshot(step=0, batch=0, consumed=[])
                await self._committed()
            if self.config.trainer_ranks > 1:
                await self._in_thread(ranks.agree_on, self._learner.step)
            self._enter(Phase.WAITING_BATCH)
        if not self._said_ready:  # a meeting before this one may have failed once the learner was there
            self._said_ready = True
            self.say_ready()

    async def leave_group(self) -> None:
        """Another rank has died: returns once nothing here waits for it any more, so that `prepare` can be called again."""
        if self._cuda:
            await asyncio.to_thread(ranks.abort)
        async with self._one_step:  # gloo raises by itself when a peer is gone
            await self._in_thread(ranks.leave)

    def _meet(self, rendezvous: str, process_group: float) -> None:
        import torch

        self._cuda = torch.cuda.is_available()
        ranks.join(rendezvous, self.role.index, self.config.trainer_ranks, process_group, cuda=self._cuda, store=self._store)

    def _build(self) -> None:
        from ..rl.learner import Learner

        warm = self.inherited.pop("learner", None)
        if warm is not None:
            warm.take_rank(self.role.index, self.config.trainer_ranks)
        self._learner = warm or Learner(
            resolve_model(self.config.model),
            self.config.grpo,
            seed=self.config.seed,
            rank=self.role.index,
            world_size=self.config.trainer_ranks,
            device="cuda" if self._cuda else "cpu",
            temperature=self.config.sampling.temperature,
        )
        task = make_task(self.config.task, self.config.task_options, seed=self.config.seed)
        prompt = task.encode(load_tokenizer(self.config.model), task.prompts("train", 0, 1)[0])
        self._probe = (prompt if len(prompt) > 1 else prompt * 2)[:_PROBE_TOKENS]  # one token alone has no log-probability

    # -- taking up what another life did ---

    async def _restore(self) -> bool:
        """The newest state that passes its check, and from there to the last step that the log calls committed. False: there is none yet.

        Raises SnapshotError where the log knows of a state and none can be restored.
        """
        began = time.monotonic()
        if self._next_slot is not None:  # its answer would come after the one asked for here, and stand for what the keeper has now
            asked, self._next_slot = self._next_slot, None
            await asyncio.gather(asked, return_exceptions=True)
        known = await self.ask_host("known")
        arguments = self.spec.role, self.spec.incarnation
        kept, slots, source, refusals = await self._keeper.call("restore", *arguments, deadline=self.deadlines.call, again=True)
        if kept is not None:
            self._slots = slots
            image = self._map(slots[kept.snapshot.slot])[: kept.nbytes]
        else:
            kept, image = await self._in_thread(self._from_disk, refusals, known["committed"])
            source = _DISK
        if kept is None:
            if known["committed"] <= 0:  # the state before the first step is made anew
                return False
            raise SnapshotError(f"the state of step {known['committed']} cannot be restored from anywhere. " + "; ".join(refusals))
        await self._in_thread(self._take_over, kept, image)
        seconds = time.monotonic() - began
        self.emit(
            ev.SnapshotRestored(
                role=self.spec.role, incarnation=self.spec.incarnation, step=kept.step, source=source, digest=kept.digest, seconds=seconds
            )
        )
        if known["committed"] > kept.step:
            await self._do_again(kept.step, known["committed"], known["stands"])
        elif source == _DISK:  # the keeper has nothing yet
            what = kept.snapshot
            self._redone = -1
            await self._snapshot(step=what.step, batch=what.batch, consumed=what.consumed, metrics=what.metrics)
            await self._committed()
        return True

    def _from_disk(self, refusals: list[str], committed: int) -> tuple[Kept | None, np.ndarray]:
        """The newest checkpoint that passes its check; adds to ``refusals`` what is wrong with the others.

        Where everything begins anew, one of a step that was made after the log was closed goes.
        """
        folder = Path(self.spec.run_dir, "checkpoints")
        for path in checkpoints(folder):
            if self.spec.fresh and step_of(path) > committed:
                shutil.rmtree(path)
                continue
            try:
                return load(path)
            except WeightsError as error:
                refusals.append(f"{_DISK}: {error}")
                self.emit(
                    ev.SnapshotRefused(
                        role=self.spec.role, incarnation=self.spec.incarnation, step=step_of(path), source=_DISK, reason=str(error)
                    )
                )
        refusals.append(f"{_DISK}: no other checkpoint in {folder}")
        return None, np.zeros(0, np.uint8)

    def _take_over(self, kept: Kept, image: np.ndarray) -> None:
        self._layout = kept.snapshot.layout
        self._learner.load_weights(dict(views(kept.manifest.tensors, image[: kept.manifest.nbytes])))
        self._learner.load_recovery_state(image[kept.manifest.nbytes :].tobytes())
        self._results = {kept.step: self._result(kept.snapshot)}
        self.page.step = self.page.version = kept.step

    async def _do_again(self, step: int, committed: int, stands: int) -> None:
        """Steps that the log calls committed and no copy holds: the same trajectories in the same order, from the journal.

        ``stands``: the last one that was not rolled back, by a life that died while it did the same.
        """
        if self.role.index == 0 and stands > step:
            text = "no copy of a later step was left: its trajectories are trained on again"
            self.emit(ev.RolledBack(old=stands, to=step, reason=text))
        self._redone = committed
        for number in range(step + 1, committed + 1):
            await self._train(number, number)
        await self._committed()

    # -- optimizer steps ---

    def _result(self, snapshot: Snapshot) -> dict[str, Any]:
        return {"metrics": snapshot.metrics, "phase_seconds": snapshot.phase_seconds, "version": snapshot.step}

    async def train(self, step: int, batch: int) -> dict[str, Any]:
        """One optimizer step on the finished trajectories of ``batch``: metrics, seconds by phase, and the version that it makes.

        Its state is outside this process once the keeper has committed it, which goes on when this returns: ask the keeper. A step is
        applied once: asked again for it, in this life or a later one, the answer is that of the first time. A step before it that was
        trained and never committed is trained first.
        """
        async with self._one_step:
            if step not in self._results and step < self._learner.step:
                raise RobustRLError(f"optimizer step {step}: {self.spec.role} is at step {self._learner.step} already")
            try:
                for number in range(self._learner.step + 1, step):
                    await self._train(number, number)
                if step not in self._results:
                    await self._train(step, batch)
            except RobustRLError:
                raise
            except Exception as error:
                if self._lost_a_peer(error):
                    self._enter(Phase.WAITING_BATCH)  # until the other is back
                    raise  # not this rank's own: whoever died is named by its node's agent
                self.die(error)
            return self._results[step]

    def _lost_a_peer(self, error: Exception) -> bool:
        return self.config.trainer_ranks > 1 and isinstance(error, RuntimeError) and ("gloo" in str(error) or "nccl" in str(error).lower())

    async def _train(self, step: int, batch: int) -> None:
        journal = await self.peer("request_manager")
        self.page.step = step
        bodies = await journal.call("batch", batch, deadline=self.deadlines.call, again=True)
        trajectories = [msgspec.msgpack.decode(body, type=Trajectory) for body in bodies]
        state = None
        if self._learner.step < step:  # else only its snapshot is missing
            self._metrics, state = await self._in_thread(self._work, trajectories)
        await self._snapshot(step=step, batch=batch, consumed=[t.id for t in trajectories], metrics=self._metrics, state=state)

    def _work(self, trajectories: list[Trajectory]) -> tuple[dict[str, float], Gathered]:
        metrics = self._learner.train_step(trajectories, self._on_phase, self._mark)
        return metrics | {"snapshot_blocked": self._blocked}, self._gather()

    async def save_pretrained(self, path: str) -> None:
        await self._in_thread(self._learner.save_pretrained, path)

    async def finish_checkpoint(self, seconds: float) -> bool:
        """Whether the checkpoint of the last commit is on disk, or has failed, within ``seconds``."""
        if self._commit is not None:
            await asyncio.wait([self._commit], timeout=seconds)
        return await asyncio.to_thread(self._writer.flush, seconds)

    # -- the snapshot ---

    async def _snapshot(
        self, *, step: int, batch: int, consumed: list[int], metrics: dict[str, float] | None = None, state: Gathered | None = None
    ) -> None:
        """All ranks gather the state; that of rank 0 goes into the keeper's free slot, and its commit goes on beside the next step."""
        state = state or await self._in_thread(self._gather)
        metrics = metrics or {}
        if self.role.index == 0:
            await self._committed()
            if self._layout is None:
                self._layout = layout_of(state.weights)
            number = state.slot
            if number is None:
                number = await self._free_slot(state.length, room_for(step, self._layout.nbytes, state.length))
                await self._in_thread(self._fill, number, state)
            self._next_slot = None
            seconds, self._phase_seconds = self._phase_seconds, {}
            snapshot = Snapshot(
                step=step,
                batch=batch,
                consumed=consumed,
                slot=number,
                layout=self._layout,
                state_length=state.length,
                probe_tokens=self._probe,
                probe_logprobs=state.probe,
                metrics=metrics,
                phase_seconds=seconds,
            )
            self._commit = asyncio.create_task(self._publish(snapshot, list(self._slots)))
            self._commit.add_done_callback(self._finished)
        else:
            self._enter(Phase.WAITING_BATCH)
            seconds, self._phase_seconds = self._phase_seconds, {}
        result = {"metrics": metrics, "phase_seconds": seconds, "version": step}
        self._results = {number: known for number, known in self._results.items() if number == step - 1} | {step: result}
        self._blocked = time.monotonic() - state.began

    async def _committed(self) -> None:
        """The snapshot before is committed. Raises what its commit met."""
        if self._commit is not None:
            commit, self._commit = self._commit, None
            await commit

    async def _publish(self, snapshot: Snapshot, slots: list[Slot]) -> None:
        arguments = snapshot, slots, snapshot.step <= self._redone
        kept = await self._keeper.call("commit", *arguments, deadline=self.deadlines.call, again=True)
        self.page.version = snapshot.step
        every = self.config.checkpoint_every
        if every and snapshot.step and snapshot.step % every == 0 and kept.step == snapshot.step:
            image = self._map(slots[snapshot.slot])[: kept.nbytes]
            await asyncio.to_thread(self._writer.offer, kept, image)
        if self.page.phase is Phase.PUBLISH:
            self._enter(Phase.WAITING_BATCH)

    def _on_phase(self, phase: Phase) -> None:
        """Called in the learner's thread."""
        self._enter(phase)
        self.disturbance.pass_by(phase)

    def _ask_ahead(self) -> None:
        if self._next_slot is None:
            self._next_slot = asyncio.create_task(self._ask_slot(0))

    async def _free_slot(self, needed: int, room: int) -> int:
        asked, self._next_slot = self._next_slot, None
        number = await asked if asked else await self._ask_slot(room)
        return number if self._slots[number].state_bytes >= needed else await self._ask_slot(room)

    async def _ask_slot(self, room: int) -> int:
        if self._commit is not None:
            await asyncio.wait([self._commit])
        assert self._layout is not None
        arguments = self._slots, self._layout.nbytes, room
        number, self._slots = await self._keeper.call("free_slot", *arguments, deadline=self.deadlines.call, again=True)
        return number

    def _gather(self) -> Gathered:
        """In the learner's thread, which puts it into the slot at once if one is known to be free: no wait in between."""
        began = time.monotonic()
        self._enter(Phase.SNAPSHOT)
        self.disturbance.pass_by(Phase.SNAPSHOT)
        state = Gathered(self._learner.weights(), self._learner.recovery_parts(), self._learner.probe(self._probe), began)
        state.slot = self._known_slot(state.length)
        if state.slot is not None:
            self._fill(state.slot, state)
        return state

    def _known_slot(self, needed: int) -> int | None:
        asked = self._next_slot
        if asked is None or not asked.done() or asked.exception() is not None:
            return None
        return asked.result() if self._slots[asked.result()].state_bytes >= needed else None

    def _fill(self, number: int, state: Gathered) -> None:
        assert self._layout is not None
        fill_slot(self._slots[number], self._map(self._slots[number]), self._layout, state)
        self._enter(Phase.PUBLISH)
        self.disturbance.pass_by(Phase.PUBLISH)

    def _map(self, slot: Slot) -> np.ndarray:
        if slot.path not in self._maps:
            self._maps = {path: array for path, array in self._maps.items() if any(path == known.path for known in self._slots)}
            self._maps[slot.path] = map_slot(slot.path)
        return self._maps[slot.path]

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _enter(self, phase: Phase) -> None:
        now = time.monotonic()
        old = self.page.phase.value
        self._phase_seconds[old] = self._phase_seconds.get(old, 0.0) + now - self._phase_since
        self._phase_since = now
        self.page.phase = phase

    def _mark(self, done: int, total: int) -> None:
        """In the learner's thread. Beside the last micro-batch the keeper frees the slot: pulls of what it held may have to end."""
        self._marks += 1
        self.page.update(progress=self._marks, pending=total - done)
        if done >= total - 1 and self.role.index == 0:
            self._loop.call_soon_threadsafe(self._ask_ahead)
        if done < total:
            self.disturbance.pass_by(Phase.TRAIN)
