"""The state keeper: holds the trainer's last committed optimizer step outside the trainer, and serves its weights.

Two slots of shared memory. The trainer writes weights and recovery state into the free slot; `commit` computes the checksums, makes the
slot the staged version and frees the other one when no pull of it is under way any more. A trainer that dies while writing leaves the last
committed slot untouched, and pulls go on.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
from pathlib import Path

import msgspec
import numpy as np

from ..core import events as ev
from ..core.roles import Phase
from ..core.weights import Manifest
from ..errors import RobustRLError, WeightsError
from ..transport.manifest import Layout, build_manifest, checksums
from .role import UCX_ROOM, Role


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


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What lies beside the slots, so that a keeper in a later life finds what the one before had committed."""

    snapshot: Snapshot
    slots: list[Slot]
    manifest: Manifest


def map_slot(path: str) -> np.ndarray:
    """The slot's bytes as a writable uint8 array; shared with every process that maps it."""
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


class StateKeeper(Role):
    async def on_open(self) -> None:
        self.choose_transport()
        from ..transport.server import WeightServer

        self._slots: list[Slot] = []
        self._arrays: list[np.ndarray] = []
        self._committed: Snapshot | None = None
        self._server = WeightServer(
            self.spec.ip, self.spec.secret(), role=self.spec.role, incarnation=self.spec.incarnation, on_event=self.emit
        )
        self._note = Path(self.spec.temp_dir, f"{self.spec.role}.kept")
        if self.spec.incarnation > 1 and self._note.exists():
            await asyncio.to_thread(self._recover)

    def _recover(self) -> None:
        """Shared memory outlives the process that made it: check what lies there, and serve it again."""
        kept = msgspec.msgpack.decode(self._note.read_bytes(), type=_Kept)
        arrays = [map_slot(slot.path) for slot in kept.slots]
        weights = arrays[kept.snapshot.slot][: kept.slots[0].weights_bytes]
        if checksums(weights, kept.manifest.chunk_bytes) != kept.manifest.chunks:
            text = (
                f"{self.spec.role}: the snapshot of step {kept.snapshot.step} in shared memory does not match its checksums: it is not used"
            )
            self.emit(ev.WarningRaised(text=text))
            return
        self._slots, self._arrays, self._committed = kept.slots, arrays, kept.snapshot
        self._server.stage(kept.manifest, weights)
        self._announce(kept.manifest)
        self.page.version = self.page.step = kept.snapshot.step

    async def allocate(self, weights_bytes: int, state_bytes: int) -> list[Slot]:
        """Two slots of at least these sizes. Existing ones that are large enough are kept, with what they hold."""
        if not self._slots or self._slots[0].weights_bytes < weights_bytes or self._slots[0].state_bytes < state_bytes:
            if self._committed is not None:
                raise WeightsError(
                    f"{self.spec.role}: the trainer's state grew to {weights_bytes} + {state_bytes} bytes after its first snapshot; "
                    f"room is for {self._slots[0].weights_bytes} + {self._slots[0].state_bytes}"
                )
            self._slots = [self._make(i, weights_bytes, state_bytes) for i in range(2)]
            self._arrays = [map_slot(slot.path) for slot in self._slots]
        return self._slots

    def _make(self, number: int, weights_bytes: int, state_bytes: int) -> Slot:
        folder = Path(self.spec.shm_dir)
        size = weights_bytes + state_bytes
        mount = os.statvfs(folder)
        if mount.f_bavail * mount.f_frsize < size + UCX_ROOM * self.config.rollouts:  # they start UCX at about this time
            folder = Path(self.spec.temp_dir)
            self.emit(
                ev.WarningRaised(
                    text=f"{self.spec.role}: {self.spec.shm_dir} has no room for {size} bytes; the snapshot lies in {folder}, on disk"
                )
            )
        path = folder / f"{self.spec.role}.slot-{number}"
        with open(path, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            os.posix_fallocate(file.fileno(), 0, size)
        return Slot(str(path), weights_bytes, state_bytes)

    async def free_slot(self) -> int:
        """Number of the slot that may be written now: pulls of what it held have ended or were cut off."""
        if self._committed is None:
            return 0
        slot = 1 - self._committed.slot
        if self._committed.step > 0:
            await asyncio.to_thread(self._server.retire, self._committed.step - 1)
        return slot

    async def commit(self, snapshot: Snapshot) -> dict[str, str | int]:
        """Make the filled slot the committed state and the staged version; announced when this returns. Asked again: no change."""
        if self._committed is not None and self._committed.step >= snapshot.step:
            return {"version": self._committed.step}
        self.page.phase = Phase.RUNNING
        result = await asyncio.to_thread(self._commit, snapshot)
        self.page.phase = Phase.IDLE
        self.page.version = self.page.step = snapshot.step
        return result

    def _commit(self, snapshot: Snapshot) -> dict[str, str | int]:
        slot = self._slots[snapshot.slot]
        array = self._arrays[snapshot.slot]
        weights, state = array[: slot.weights_bytes], array[slot.weights_bytes : slot.weights_bytes + snapshot.state_length]
        manifest = build_manifest(
            snapshot.step, snapshot.layout, weights, probe_tokens=snapshot.probe_tokens, probe_logprobs=snapshot.probe_logprobs
        )
        snapshot_digest = hashlib.sha256(manifest.digest.encode() + state.tobytes()).hexdigest()[:32]
        self._committed = snapshot
        draft = self._note.with_suffix(".new")
        draft.write_bytes(msgspec.msgpack.encode(_Kept(snapshot=snapshot, slots=self._slots, manifest=manifest)))
        draft.replace(self._note)
        self.emit(
            ev.OptimizerStepCommitted(
                step=snapshot.step,
                version=snapshot.step,
                digest=manifest.digest,
                snapshot_digest=snapshot_digest,
                consumed=snapshot.consumed,
                batch=snapshot.batch,
                bytes=slot.weights_bytes + snapshot.state_length,
                holder=self.spec.role,
                incarnation=self.spec.incarnation,
            )
        )
        self._server.stage(manifest, weights)
        self._announce(manifest)
        return {"version": snapshot.step, "digest": manifest.digest}

    def _announce(self, manifest: Manifest) -> None:
        host, port = self._server.address
        self.emit(
            ev.VersionAnnounced(
                version=manifest.version,
                digest=manifest.digest,
                bytes=manifest.nbytes,
                chunks=len(manifest.chunks),
                holder=self.spec.role,
                incarnation=self.spec.incarnation,
                address=f"{host}:{port}",
            )
        )

    def stored(self, fault: str) -> memoryview:
        """The committed weights, which are served, or the recovery state behind them."""
        if self._committed is None:
            raise RobustRLError(f"{self.spec.role} has nothing committed yet")
        split = self._slots[self._committed.slot].weights_bytes
        array = self._arrays[self._committed.slot]
        return memoryview(array[:split] if fault == "corrupt_weights" else array[split : split + self._committed.state_length])

    async def committed(self) -> tuple[Snapshot, list[Slot]] | None:
        """The last committed optimizer step and where it lies; None before the first."""
        return None if self._committed is None else (self._committed, self._slots)
