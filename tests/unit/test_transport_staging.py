"""Where pulled bytes land: what is kept when another version takes over, and that memory of a broken-off receive is not used again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from robustrl.core.weights import Manifest, TensorSpec
from robustrl.transport.manifest import checksum, checksums
from robustrl.transport.staging import Memory, Staging

CHUNK = 8192
NBYTES = 3 * CHUNK + 100


def content(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, NBYTES, np.uint8)


def manifest_of(data: np.ndarray, version: int = 1, chunk: int = CHUNK) -> Manifest:
    tensors = [TensorSpec("w", "uint8", (data.nbytes,), 0, data.nbytes)]
    return Manifest.build(version=version, tensors=tensors, nbytes=data.nbytes, chunk_bytes=chunk, chunks=checksums(data, chunk))


def put(staging: Staging, data: np.ndarray, *chunks: int) -> None:
    assert staging.manifest is not None
    for chunk in chunks:
        first, last = staging.manifest.span(chunk)
        staging.place(chunk)[:] = data[first:last]
        staging.have.add(chunk)


@pytest.fixture
def staging() -> Staging:
    return Staging(Memory())


def test_a_late_write_of_a_broken_off_receive_reaches_nobody(staging: Staging) -> None:
    data = content(1)
    staging.adopt(manifest_of(data))
    put(staging, data, 0, 1)
    late = [staging.place(2)]
    staging.taint(2)
    late.append(staging.place(2))
    staging.taint(2)  # the second source died too
    put(staging, data, 2, 3)
    for view in late:
        view[:] = 0
    result = staging.finish()
    for view in late:
        view[:] = 0
    assert staging.complete and result.tobytes() == data.tobytes()


def test_a_version_without_trouble_is_not_copied(staging: Staging) -> None:
    data = content(1)
    staging.adopt(manifest_of(data))
    place = staging.place(0)
    put(staging, data, 0, 1, 2, 3)
    assert np.shares_memory(staging.finish(), place)


@pytest.mark.parametrize("tainted", [False, True])
def test_chunks_that_the_next_version_lists_too_are_kept(staging: Staging, tainted: bool) -> None:
    old, new = content(1), content(1)
    new[CHUNK:2 * CHUNK] = content(2)[:CHUNK]
    staging.adopt(manifest_of(old))
    if tainted:
        staging.taint(0)
    put(staging, old, 0, 1)
    assert staging.adopt(manifest_of(new, 2)) == CHUNK == staging.discarded
    assert staging.have == {0}
    put(staging, new, 1, 2, 3)
    assert staging.finish().tobytes() == new.tobytes()


def test_chunks_that_moved_are_kept(staging: Staging) -> None:
    old = content(1)
    new = np.concatenate([old[CHUNK:2 * CHUNK], old[:CHUNK], content(2)[:50]])
    staging.adopt(manifest_of(old))
    put(staging, old, 0, 1, 3)
    late = staging.place(2)
    staging.taint(2)
    assert staging.adopt(manifest_of(new, 2)) == 100
    assert staging.have == {0, 1}
    put(staging, new, 2)
    late[:] = 0
    assert staging.finish().tobytes() == new.tobytes()


def test_buffers_are_used_again_unless_tainted() -> None:
    memory, data = Memory(), content(1)
    staging = Staging(memory)
    staging.adopt(manifest_of(data))
    put(staging, data, 0, 1, 2, 3)
    memory.give_back(first := staging.finish())
    staging = Staging(memory)
    staging.adopt(manifest_of(data, 2))
    assert np.shares_memory(staging.place(0), first)
    staging.taint(0)
    put(staging, data, 0, 1, 2, 3)
    assert not np.shares_memory(staging.finish(), first)
    assert not np.shares_memory(memory.get(NBYTES), first)


# tensors, whose checksum is computed where they lie


@pytest.fixture
def tensor() -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(content(1))


@pytest.mark.parametrize("flips", [[0], [7], [7, 15], [NBYTES - 1], [8, 16, 24]], ids=str)
def test_device_checksum_finds_damage(tensor: Any, flips: list[int]) -> None:
    damaged = tensor.clone()
    for place in flips:
        damaged[place] ^= 128
    assert checksum(tensor) == checksum(tensor.clone()) != checksum(damaged)
    assert len(checksum(tensor)) == 34


def test_device_checksum_knows_order_and_length(tensor: Any) -> None:
    swapped = tensor.clone()
    swapped[:8], swapped[8:16] = tensor[8:16], tensor[:8]
    padded = tensor.new_zeros(NBYTES + 4)
    padded[:NBYTES] = tensor
    assert len({checksum(one) for one in (tensor, swapped, padded, tensor[1:], tensor[:-1])}) == 5


def test_either_kind_of_puller_checks_either_kind_of_chunk(tensor: Any) -> None:
    array = tensor.numpy()
    for source in (checksum(tensor), checksum(array)):
        assert checksum(tensor, source) == checksum(array, source) == source
