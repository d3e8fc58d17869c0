"""What keeps the learner while its state goes to the keeper: one copy, into a slot that was asked for beforehand where that is known."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from robustrl.config import JobConfig
from robustrl.core.roles import Phase, RoleId
from robustrl.errors import WeightsError
from robustrl.runtime import ranks
from robustrl.runtime.snapshots import Gathered, Slot, SlotStore, fill_slot
from robustrl.runtime.trainer import Trainer
from robustrl.transport.manifest import layout_of

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.usefixtures("with_torch")


class _Learner:
    """Its weights and state are its step."""

    step = 0

    def train_step(self, trajectories: list[Any], on_phase: Any, on_mark: Any) -> dict[str, float]:
        on_phase(Phase.TRAIN)
        on_mark(0, 1)
        self.hold()
        on_phase(Phase.OPTIMIZER)
        self.step += 1
        return {"loss": 0.5}

    def hold(self) -> None:
        """The last micro-batch."""

    def weights(self) -> dict[str, torch.Tensor]:
        return {"a": torch.full((64,), float(self.step))}

    def recovery_parts(self) -> list[np.ndarray]:
        return [np.full(3, self.step, np.uint8), np.full(5, 10 + self.step, np.uint8)]

    def probe(self, tokens: list[int]) -> list[float]:
        return [-float(self.step)]


class _Keeper:
    def __init__(self, store: SlotStore) -> None:
        self.store, self.calls = store, list[str]()
        self.freed = asyncio.Event()
        self.phases: list[Phase] = []

    async def call(self, method: str, *args: Any, deadline: float, again: bool) -> Any:
        self.calls.append(method)
        if method == "free_slot":
            self.store.allocate(*args[1:])
            self.freed.set()
            return self.store.free, self.store.slots
        return self.store.commit(args[0])


def trainer(folder: Path) -> tuple[Trainer, _Keeper, _Learner]:
    """After step 0, whose snapshot is committed."""
    store = SlotStore(
        "state_keeper-0", 1, "node-0", shm_dir=str(folder), temp_dir=str(folder), reserve=0, warn=lambda text: pytest.fail(text)
    )
    made, keeper, learner = Trainer.__new__(Trainer), _Keeper(store), _Learner()
    here: Any = made
    here.role, here.config, here.deadlines = RoleId.parse("trainer-0"), JobConfig(checkpoint_every=0), JobConfig().deadlines
    here.page = SimpleNamespace(phase=Phase.WAITING_BATCH, update=lambda **_: None, version=-1)
    here.disturbance, here.log = SimpleNamespace(pass_by=lambda phase: None), logging.getLogger("test")
    here._thread, here._loop, here._tasks = ThreadPoolExecutor(1), asyncio.get_running_loop(), set()
    here._phase_seconds, here._phase_since, here._blocked, here._marks, here._redone = {}, 0.0, 0.0, 0, -1
    here._maps, here._slots, here._commit, here._next_slot, here._layout, here._results = {}, [], None, None, None, {}
    here._keeper, here._learner, here._probe = keeper, learner, [1, 2]
    return made, keeper, learner


@pytest.mark.parametrize("ahead", [True, False])
def test_a_step_is_in_the_slot_before_its_commit_is_asked_for_and_no_step_waits_for_the_one_before(tmp_path: Path, ahead: bool) -> None:
    async def scenario() -> None:
        made, keeper, learner = trainer(tmp_path)
        loop = asyncio.get_running_loop()
        await made._snapshot(step=0, batch=0, consumed=[])
        await made._committed()
        keeper.freed.clear()
        if ahead:  # the keeper answers within the micro-batch

            def hold() -> None:
                asyncio.run_coroutine_threadsafe(keeper.freed.wait(), loop).result(5)
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result(5)

            learner.hold = hold  # type: ignore[method-assign]
        else:
            made._ask_ahead = lambda: None  # type: ignore[method-assign]
        metrics, state = await made._in_thread(made._work, [])
        assert (state.slot is not None) == ahead
        await made._snapshot(step=1, batch=1, consumed=[7], metrics=metrics, state=state)
        assert keeper.store.kept is not None and keeper.store.kept.step == 0, "its commit goes on beside what follows"
        await made._committed()
        kept = keeper.store.kept
        assert kept is not None and (kept.step, kept.snapshot.consumed, kept.snapshot.probe_logprobs) == (1, [7], [-1.0])
        image = keeper.store.image(kept)
        assert image[: 64 * 4].view(np.float32).tolist() == [1.0] * 64 and image[kept.manifest.nbytes :].tolist() == [1] * 3 + [11] * 5
        assert keeper.calls == ["free_slot", "commit", "free_slot", "commit"]
        assert "snapshot_blocked" in metrics and made._results[1]["phase_seconds"].keys() >= {"train", "optimizer", "snapshot"}

    asyncio.run(scenario())


def test_a_slot_that_was_asked_for_before_a_restore_does_not_stand_for_what_the_restore_found(tmp_path: Path) -> None:
    """A rank dies in the last micro-batch of another, whose keeper is slow to answer, and then has other slots."""

    async def scenario() -> None:
        made, keeper, learner = trainer(tmp_path)
        here: Any = made
        await made._snapshot(step=0, batch=0, consumed=[])
        await made._committed()
        here.spec, here.emit = SimpleNamespace(role="trainer-0", incarnation=1), lambda event: None
        kept, slow = keeper.store.kept, asyncio.Event()
        others = [msgspec.structs.replace(slot) for slot in keeper.store.slots]
        answered = list[str]()

        async def call(method: str, *args: Any, deadline: float, again: bool) -> Any:
            if method == "free_slot":
                await slow.wait()
                answered.append(method)
                return 1, ["slots of before"]
            answered.append(method)
            return kept, others, "peer", []

        async def known(verb: str) -> dict[str, int]:
            return {"committed": 0}

        keeper.call, here.ask_host, here._take_over = call, known, lambda *_: None  # type: ignore[method-assign]
        made._ask_ahead()
        await asyncio.sleep(0)
        restoring = asyncio.create_task(made._restore())
        await asyncio.sleep(0.01)
        slow.set()
        assert await restoring
        await asyncio.sleep(0.01)
        assert made._slots is others and made._next_slot is None and answered == ["free_slot", "restore"]

    asyncio.run(scenario())


@pytest.mark.parametrize(("stands", "said"), [(5, [(5, 2)]), (4, [(4, 2)]), (2, [])])
def test_who_dies_while_steps_are_done_again_leaves_less_to_roll_back(tmp_path: Path, stands: int, said: list[tuple[int, int]]) -> None:
    """Step 5 had been committed. The life before had rolled back to step 1, say, and come to ``stands``; step 2 is what a copy holds."""

    async def scenario() -> None:
        made, _, _ = trainer(tmp_path)
        here: Any = made
        events, done = list[Any](), list[int]()

        async def train(step: int, batch: int) -> None:
            done.append(step)

        async def committed() -> None:
            done.append(0)

        here.spec, here.emit, here._train, here._committed = SimpleNamespace(role="trainer-0"), events.append, train, committed
        await made._do_again(2, 5, stands)
        assert [(event.old, event.to) for event in events] == said and done == [3, 4, 5, 0]

    asyncio.run(scenario())


def test_a_state_that_has_outgrown_its_slot_is_refused() -> None:
    layout = layout_of({"a": torch.zeros(64)})
    state = Gathered({"a": torch.zeros(64)}, [np.zeros(9, np.uint8)], [], 0.0)
    with pytest.raises(WeightsError, match="9 bytes: the slot has room for 8"):
        fill_slot(Slot("p", layout.nbytes, 8), np.zeros(layout.nbytes + 8, np.uint8), layout, state)


def test_a_rank_whose_first_meeting_fails_late_is_ready_after_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank dies as all agree on their step: this one's learner is there, and nobody may call it before it has said so."""
    said = list[str]()
    agree = iter([RuntimeError("gloo: connection closed by peer"), None, None])

    def agree_on(step: int) -> None:
        if error := next(agree):
            raise error

    async def scenario() -> None:
        made, keeper, learner = trainer(tmp_path)
        here: Any = made
        here.config = JobConfig(trainer_ranks=2, profile="class")
        here.spec, here._one_step, here._cuda, here._store = SimpleNamespace(incarnation=2), asyncio.Lock(), False, None
        here._said_ready, here._learner = False, None

        async def restored() -> bool:
            return True

        async def peer(role: str) -> _Keeper:
            return keeper

        here.peer, here._restore, here._meet = peer, restored, lambda *_: None
        here._build, here.say_ready = lambda: setattr(here, "_learner", learner), lambda: said.append("ready")
        monkeypatch.setattr("robustrl.runtime.trainer.ranks.agree_on", agree_on)
        with pytest.raises(RuntimeError, match="gloo"):
            await made.prepare("here:1", 1.0)
        assert not said
        for _ in range(2):
            await made.prepare("here:1", 1.0)
        assert said == ["ready"]

    asyncio.run(scenario())


def test_the_place_where_the_ranks_meet_is_open_from_the_moment_it_is_named() -> None:
    """One that is only looked up may be another program's when they meet, and the first meeting is held once."""

    async def name() -> str:
        return await made.rendezvous()

    made: Any = Trainer.__new__(Trainer)
    made.spec, made.config = SimpleNamespace(ip="127.0.0.1"), JobConfig(trainer_ranks=2, profile="class")
    host, _, port = asyncio.run(name()).rpartition(":")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, int(port)))
    made.config = JobConfig(profile="class")
    assert asyncio.run(name()) == "127.0.0.1:0" and made._store is None, "one rank alone meets nobody"


@pytest.mark.timeout(120)
def test_two_ranks_meet_there_and_meet_again(tmp_path: Path) -> None:
    places = [ranks.open_store("127.0.0.1", 2) for _ in range(2)]
    code = f"""
from robustrl.runtime import ranks
for port in {[store.port for store in places]}:
    ranks.join(f"127.0.0.1:{{port}}", 1, 2, 60.0, cuda=False)
    ranks.agree_on(3)
ranks.leave()
"""
    other = subprocess.Popen([sys.executable, "-c", code])
    try:
        for store in places:
            ranks.join(f"127.0.0.1:{store.port}", 0, 2, 60.0, cuda=False, store=store)
            ranks.agree_on(3)
        assert other.wait(60) == 0
    finally:
        ranks.leave()
        other.kill()
        other.wait()
