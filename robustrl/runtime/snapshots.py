"""Recovery snapshots where they lie: two slots of shared memory on one node, and a note beside them that says what the committed one holds.

Promises: what is committed has checksums over weights and recovery state alike, and nobody writes to its slot until the next one is
committed; a process that comes after finds it by the note, on the same node only. Leaves out who writes and who may read.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from ..core.weights import Manifest
from ..errors import WeightsError
from ..transport.manifest import Layout, build_manifest, checksums, fill


class Slot(msgspec.Struct, frozen=True):
    """Shared memory of one slot: weights first, recovery state behind them."""

    path: str
    weights_bytes: int
    state_bytes: int
    """Room for the recovery state."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer says of the slot that it has filled."""

    step: int
    batch: int
    consumed: list[int]
    slot: int
    layout: Layout
    state_length: int
    probe_tokens: list[int]
    probe_logprobs: list[float]
    metrics: dict[str, float] = {}
    phase_seconds: dict[str, float] = {}


@dataclass
class Gathered:
    """All that a snapshot holds of a learner: the live state, until it is in a slot."""

    weights: dict[str, Any]
    recovery: list[np.ndarray]
    """uint8, one behind the other."""
    probe: list[float]
    began: float
    slot: int | None = None
    """Where it is already."""

    @property
    def length(self) -> int:
        """Bytes of the recovery state."""
        return sum(part.nbytes for part in self.recovery)


def fill_slot(slot: Slot, array: np.ndarray, layout: Layout, state: Gathered) -> None:
    """Each byte is copied once, from where the learner has it to where it is kept. Raises WeightsError where there is no room."""
    if state.length > slot.state_bytes:
        raise WeightsError(f"recovery state of {state.length} bytes: the slot has room for {slot.state_bytes}")
    at = slot.weights_bytes
    fill(layout, state.weights, array[:at])
    for part in state.recovery:
        array[at : at + part.nbytes] = part
        at += part.nbytes


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A committed optimizer step: all that one needs to know of its bytes."""

    snapshot: Snapshot
    manifest: Manifest
    """Of the weights."""
    state_checksum: str

    @property
    def step(self) -> int:
        return self.snapshot.step

    @property
    def nbytes(self) -> int:
        """Weights and recovery state."""
        return self.manifest.nbytes + self.snapshot.state_length

    @property
    def digest(self) -> str:
        """Covers weights and recovery state."""
        return hashlib.sha256(f"{self.manifest.digest}{self.state_checksum}".encode()).hexdigest()[:32]

    def fault(self, image: np.ndarray) -> str:
        """Why ``image`` (weights, then recovery state) is not what was committed; empty: it is."""
        if image.nbytes != self.nbytes:
            return f"{image.nbytes} bytes where {self.nbytes} were committed"
        if checksums(image[: self.manifest.nbytes], self.manifest.chunk_bytes) != self.manifest.chunks:
            return "the weights do not match their checksums"
        if _checksum(image[self.manifest.nbytes :]) != self.state_checksum:
            return "the recovery state does not match its checksum"
        return ""


def keep(snapshot: Snapshot, image: np.ndarray) -> Kept:
    """The record of a filled slot's bytes (weights, then recovery state)."""
    weights = image[: snapshot.layout.nbytes]
    manifest = build_manifest(
        snapshot.step, snapshot.layout, weights, probe_tokens=snapshot.probe_tokens, probe_logprobs=snapshot.probe_logprobs
    )
    return Kept(snapshot=snapshot, manifest=manifest, state_checksum=_checksum(image[snapshot.layout.nbytes :]))


def room_for(step: int, weights_bytes: int, state_length: int) -> int:
    """Bytes that a recovery state of this step may grow to: AdamW's two moments come with the first step."""
    return state_length + (1 << 20) + (0 if step else 3 * weights_bytes)


def _checksum(data: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    slots: list[Slot]
    kept: Kept


def map_slot(path: str) -> np.ndarray:
    """The slot's bytes as a writable uint8 array; shared with every process that maps it."""
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


class SlotStore:
    """The slots of one keeper. ``owner`` (role and incarnation) and ``node`` name its files; the folders are private to the run."""

    def __init__(self, role: str, incarnation: int, node: str, *, shm_dir: str, temp_dir: str, reserve: int, warn: Callable[[str], None]):
        """``reserve``: bytes of shared memory to leave to others; without room for them slots lie in ``temp_dir``, on disk, aloud."""
        self._role, self._incarnation, self._node = role, incarnation, node
        self._folders, self._reserve, self._warn = (Path(shm_dir), Path(temp_dir)), reserve, warn
        self._note = Path(temp_dir, f"{role}.kept")
        self._made = 0
        self._arrays: list[np.ndarray] = []
        self.slots: list[Slot] = []
        self.kept: Kept | None = None

    def image(self, kept: Kept) -> np.ndarray:
        """The bytes of a record of this store."""
        slot, array = self.slots[kept.snapshot.slot], self._arrays[kept.snapshot.slot]
        if slot.weights_bytes != kept.manifest.nbytes:
            raise WeightsError(f"{slot.path}: weights of {slot.weights_bytes} bytes where {kept.manifest.nbytes} are kept")
        return array[: kept.nbytes]

    @property
    def free(self) -> int:
        """Number of the slot that may be written."""
        return 0 if self.kept is None else 1 - self.kept.snapshot.slot

    def allocate(self, weights_bytes: int, state_bytes: int) -> None:
        """Two slots of at least these sizes; existing ones that are large enough stay, with what they hold."""
        if self.slots and self.slots[0].weights_bytes == weights_bytes and self.slots[0].state_bytes >= state_bytes:
            return
        if self.kept is not None:
            raise WeightsError(
                f"{self._role}: the trainer's state grew to {weights_bytes} + {state_bytes} bytes after its first snapshot; room is for "
                f"{self.slots[0].weights_bytes} + {self.slots[0].state_bytes}"
            )
        self._made += 1
        self.slots = [self._make(i, weights_bytes, state_bytes) for i in range(2)]
        self._arrays = [map_slot(slot.path) for slot in self.slots]

    def _make(self, number: int, weights_bytes: int, state_bytes: int) -> Slot:
        folder, on_disk = self._folders
        size = weights_bytes + state_bytes
        mount = os.statvfs(folder)
        if mount.f_bavail * mount.f_frsize < size + self._reserve:
            self._warn(f"{self._role}: {folder} has no room for {size} bytes; the snapshot lies in {on_disk}, on disk")
            folder = on_disk
        path = folder / f"{self._role}.{self._incarnation}-{self._made}.slot-{number}"
        with open(path, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            os.posix_fallocate(file.fileno(), 0, size)
        return Slot(str(path), weights_bytes, state_bytes)

    def adopt(self, slots: list[Slot]) -> None:
        """The slots that a writer has, where a life of this keeper that knew nothing of them finds them there."""
        if slots != self.slots:
            self._arrays = [map_slot(slot.path) for slot in slots]
            self.slots, self.kept = slots, None

    def commit(self, snapshot: Snapshot) -> Kept:
        """The filled slot is what this store holds from here on, in this life and the next."""
        slot, array = self.slots[snapshot.slot], self._arrays[snapshot.slot]
        kept = self._hold(keep(snapshot, array[: slot.weights_bytes + snapshot.state_length]))
        for folder in self._folders:
            for path in folder.glob(f"{self._role}.*.slot-*"):
                if all(str(path) != slot.path for slot in self.slots):
                    path.unlink()  # of an earlier life
        return kept

    def put(self, kept: Kept, image: np.ndarray) -> Kept:
        """A copy from elsewhere, into the free slot. Raises WeightsError if the copy is not what its record says."""
        self.allocate(kept.manifest.nbytes, room_for(kept.step, kept.manifest.nbytes, kept.snapshot.state_length))
        number = self.free
        self._arrays[number][: kept.nbytes] = image
        if fault := kept.fault(self._arrays[number][: kept.nbytes]):
            raise WeightsError(f"step {kept.step}: {fault}")
        return self._hold(msgspec.structs.replace(kept, snapshot=msgspec.structs.replace(kept.snapshot, slot=number)))

    def _hold(self, kept: Kept) -> Kept:
        draft = self._note.with_suffix(".new")
        draft.write_bytes(msgspec.msgpack.encode(_Note(node=self._node, slots=self.slots, kept=kept)))
        draft.replace(self._note)
        self.kept = kept
        return kept

    def fault(self) -> str:
        """Why what is held cannot be used any more; empty: it is as it was committed."""
        return self.kept.fault(self.image(self.kept)) if self.kept else "it holds none"

    def discard(self) -> None:
        self.kept = None
        self._note.unlink(missing_ok=True)

    def take_up(self) -> tuple[int, str]:
        """What an earlier life on this node left: (its step, why it cannot be used); (-1, ...) where there is none."""
        if not self._note.exists():
            return -1, "it holds none"
        try:
            note = msgspec.msgpack.decode(self._note.read_bytes(), type=_Note)
        except msgspec.DecodeError as error:
            return -1, f"its note cannot be read: {error}"
        if note.node != self._node:
            return -1, f"it lies on {note.node}"
        try:
            self._arrays = [map_slot(slot.path) for slot in note.slots]
        except OSError as error:
            return note.kept.step, f"shared memory: {error}"
        self.slots, self.kept = note.slots, note.kept
        if fault := self.fault():
            self.kept = None
        return note.kept.step, fault
