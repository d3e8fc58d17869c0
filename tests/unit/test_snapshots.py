"""Snapshots in shared memory and on disk: whatever is damaged is found, and the next best is taken."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robustrl.core import events as ev
from robustrl.core.weights import TensorSpec
from robustrl.errors import WeightsError
from robustrl.runtime import checkpoint
from robustrl.runtime.snapshots import Kept, SlotStore, Snapshot, keep, room_for
from robustrl.transport.manifest import Layout

_WEIGHTS, _STATE = 4096, 1000
_LAYOUT = Layout([TensorSpec("a", "float32", (512,), 0, 2048), TensorSpec("tied", "float32", (512,), 0, 2048),
                  TensorSpec("b", "float32", (16, 32), 2048, 2048)], _WEIGHTS)


def snapshot(step: int, slot: int = 0) -> Snapshot:
    return Snapshot(
        step=step, batch=step, consumed=[step], slot=slot, layout=_LAYOUT, state_length=_STATE, probe_tokens=[1, 2], probe_logprobs=[-1.0]
    )


def image(step: int) -> np.ndarray:
    floats = np.random.default_rng(step).standard_normal(_WEIGHTS // 4).astype(np.float32)
    return np.concatenate([floats.view(np.uint8), np.full(_STATE, step, np.uint8)])


def store(folder: Path, incarnation: int = 1, node: str = "node-1", **options: Any) -> SlotStore:
    (folder / "shm").mkdir(exist_ok=True)
    defaults: dict[str, Any] = {"shm_dir": str(folder / "shm"), "temp_dir": str(folder), "reserve": 0, "warn": pytest.fail}
    return SlotStore("state_keeper-0", incarnation, node, **defaults | options)


def commit(kept_in: SlotStore, step: int) -> Kept:
    kept_in.allocate(_WEIGHTS, room_for(step, _WEIGHTS, _STATE))
    number = kept_in.free
    kept_in._arrays[number][: _WEIGHTS + _STATE] = image(step)
    return kept_in.commit(snapshot(step, number))


def flip(path: str | Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_later_life_on_the_node_takes_up_what_was_committed_and_the_next_slot_is_the_other_one(tmp_path: Path) -> None:
    first = store(tmp_path)
    commit(first, 0)
    kept = commit(first, 1)
    later = store(tmp_path, incarnation=2)
    assert later.take_up() == (1, "")
    assert later.kept == kept and later.free == 0
    assert np.array_equal(later.image(kept), image(1))
    assert store(tmp_path, incarnation=2, node="node-5").take_up()[1] == "it lies on node-1"


@pytest.mark.parametrize(("at", "word"), [(10, "weights"), (_WEIGHTS + 5, "recovery state")])
def test_a_flipped_bit_in_weights_or_state_is_found(tmp_path: Path, at: int, word: str) -> None:
    first = store(tmp_path)
    kept = commit(first, 3)
    flip(first.slots[kept.snapshot.slot].path, at)
    assert word in first.fault()
    step, fault = store(tmp_path, 2).take_up()
    assert step == 3 and word in fault


def test_a_writers_slots_are_adopted_by_a_keeper_that_lost_its_note(tmp_path: Path) -> None:
    first = store(tmp_path)
    commit(first, 1)
    (tmp_path / "state_keeper-0.kept").unlink()
    later = store(tmp_path, 2)
    assert later.take_up() == (-1, "it holds none")
    later.adopt(first.slots)
    first._arrays[1][: _WEIGHTS + _STATE] = image(2)
    assert later.commit(snapshot(2, 1)).step == 2
    assert later.fault() == ""


def test_a_copy_is_put_beside_what_is_held_and_refused_if_it_is_not_what_its_record_says(tmp_path: Path) -> None:
    copy = store(tmp_path)
    for step in (1, 2, 3):
        kept = copy.put(keep(snapshot(step), image(step)), image(step))
        assert kept.snapshot.slot == (step + 1) % 2 and copy.fault() == ""
    with pytest.raises(WeightsError, match="step 4: the recovery state"):
        copy.put(keep(snapshot(4), image(4)), np.concatenate([image(4)[:-1], np.zeros(1, np.uint8)]))
    assert copy.kept is not None and copy.kept.step == 3 and copy.fault() == ""


def test_without_room_in_shared_memory_the_slots_lie_on_disk_aloud(tmp_path: Path) -> None:
    said: list[str] = []
    commit(store(tmp_path, reserve=1 << 60, warn=said.append), 0)
    assert len(said) == 2 and "on disk" in said[0]
    assert not list((tmp_path / "shm").iterdir())


# -- on disk ---


def test_the_last_two_checkpoints_are_kept_and_come_back_whole(tmp_path: Path) -> None:
    (tmp_path / "step-00000000.partial").mkdir()  # its writer died
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, keep(snapshot(step), image(step)), image(step))
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000003", "step-00000002"]
    kept, found = checkpoint.load(checkpoint.checkpoints(tmp_path)[0])
    assert kept.step == 3 and np.array_equal(found, image(3))
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize("what", ["data", "metadata", "record", "missing"])
def test_a_damaged_checkpoint_is_refused_with_its_name(tmp_path: Path, what: str) -> None:
    path = checkpoint.save(tmp_path, keep(snapshot(7), image(7)), image(7))
    match what:
        case "data":
            data = next(path.glob("*.distcp"))
            flip(data, data.read_bytes().index(image(7)[_WEIGHTS:].tobytes()) + 3)
        case "metadata":
            (path / ".metadata").write_bytes(b"nonsense")
        case "record":
            (path / "snapshot.msgpack").write_bytes(b"\xc1")
        case "missing":
            next(path.glob("*.distcp")).unlink()
    with pytest.raises(WeightsError, match="step-00000007"):
        checkpoint.load(path)


def test_a_disk_that_fails_is_said_once_and_tried_again(tmp_path: Path) -> None:
    said: list[ev.Event] = []
    folder = tmp_path / "run" / "checkpoints"
    writer = checkpoint.CheckpointWriter(folder, "trainer-0", said.append)
    for step in (1, 2):
        writer.offer(keep(snapshot(step), image(step)), image(step))
        assert writer.flush(20.0)
    [warning] = said
    assert isinstance(warning, ev.WarningRaised) and "in memory only" in warning.text and "FileNotFoundError" in warning.text
    (tmp_path / "run").mkdir()
    writer.offer(keep(snapshot(3), image(3)), image(3))
    assert writer.flush(20.0)
    copied = said[-1]
    assert isinstance(copied, ev.SnapshotCopied) and (copied.step, copied.holder, copied.bytes) == (3, "disk", _WEIGHTS + _STATE)
    assert copied.digest == keep(snapshot(3), image(3)).digest


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_costs_a_warning_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)], check=False).returncode:
        pytest.skip("no mount in this container")
    try:
        said: list[ev.Event] = []
        folder = tmp_path / "checkpoints"
        checkpoint.save(folder, keep(snapshot(1), image(1)), image(1))
        with open(tmp_path / "ballast", "wb", buffering=0) as ballast, pytest.raises(OSError, match="No space"):
            while True:
                ballast.write(bytes(4096))
        writer = checkpoint.CheckpointWriter(folder, "trainer-0", said.append)
        writer.offer(keep(snapshot(2), image(2)), image(2))
        assert writer.flush(20.0)
        [warning] = said
        assert isinstance(warning, ev.WarningRaised) and "in memory only" in warning.text
        assert checkpoint.load(checkpoint.checkpoints(folder)[0])[0].step == 1
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
