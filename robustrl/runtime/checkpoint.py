"""Checkpoints on disk: snapshots of committed optimizer steps in the format of torch.distributed.checkpoint, the last two of them.

A checkpoint is a folder ``step-00000012`` with the shards, their metadata and ``snapshot.msgpack`` (see snapshots.Kept). It is written
under another name and renamed when it is complete, in a thread of its own; a disk that fails costs a warning, never the job.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..core import events as ev
from ..errors import WeightsError
from ..transport.manifest import views
from .snapshots import Kept

KEPT_CHECKPOINTS = 2
_RECORD = "snapshot.msgpack"
_PARTIAL = ".partial"


def _tensors(kept: Kept, image: np.ndarray) -> dict[str, Any]:
    """The image as named tensors that share its memory, tied ones once."""
    import torch

    specs = list({spec.offset: spec for spec in kept.manifest.tensors}.values())
    weights = dict(views(specs, image[: kept.manifest.nbytes]))
    return {"weights": weights, "recovery_state": torch.frombuffer(image[kept.manifest.nbytes :], dtype=torch.uint8)}


def save(folder: Path, kept: Kept, image: np.ndarray) -> Path:
    """Writes the checkpoint of a committed step and removes those before the last two. Raises OSError, or what the writer raises."""
    import torch.distributed.checkpoint as dcp

    final = folder / f"step-{kept.step:08d}"
    draft = folder / f"{final.name}{_PARTIAL}"
    shutil.rmtree(draft, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is no process group: none is meant
        dcp.save(_tensors(kept, image), checkpoint_id=str(draft), no_dist=True)
    (draft / _RECORD).write_bytes(msgspec.msgpack.encode(kept))
    shutil.rmtree(final, ignore_errors=True)  # of the same step, before a rollback
    os.replace(draft, final)
    for old in [*checkpoints(folder)[KEPT_CHECKPOINTS:], *folder.glob(f"*{_PARTIAL}")]:  # of a writer that died, too
        shutil.rmtree(old, ignore_errors=True)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Complete ones, the newest first."""
    return sorted((path for path in folder.glob("step-*") if path.suffix != _PARTIAL), reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def load(path: Path) -> tuple[Kept, np.ndarray]:
    """(record, image). Raises WeightsError naming what is wrong with it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException  # not an Exception

    try:
        kept = msgspec.msgpack.decode((path / _RECORD).read_bytes(), type=Kept)
        image = np.zeros(kept.nbytes, np.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(_tensors(kept, image), checkpoint_id=str(path), no_dist=True)
    except (Exception, CheckpointException) as error:  # damaged metadata make the reader raise anything
        raise WeightsError(f"{path}: {_short(error)}") from error
    if fault := kept.fault(image):
        raise WeightsError(f"{path}: {fault}")
    return kept, image


def _short(error: BaseException) -> str:
    """The writer and the reader put whole tracebacks into their errors: the last line says it."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]:.300}"


class CheckpointWriter:
    """Writes the newest checkpoint that it was offered, one at a time, in a thread of its own."""

    def __init__(
        self, folder: Path, source: str, emit: Callable[[ev.Event], None], before: Callable[[Path], None] = lambda folder: None
    ) -> None:
        """``before`` is called with the folder, in the thread that writes, ahead of each checkpoint."""
        self._folder, self._source, self._emit, self._before = folder, source, emit, before
        self._next: tuple[Kept, np.ndarray] | None = None
        self._busy = self._failing = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="checkpoint", daemon=True).start()

    def offer(self, kept: Kept, image: np.ndarray) -> None:
        """``image`` is copied, so it may be overwritten when this returns; an older offer that still waits is given up."""
        with self._changed:
            self._next = kept, image.copy()
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Whether all that was offered is written, or has failed, within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next is None and not self._busy, timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None)
                assert self._next is not None
                (kept, image), self._next, self._busy = self._next, None, True
            self._write(kept, image)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _write(self, kept: Kept, image: np.ndarray) -> None:
        from torch.distributed.checkpoint.api import CheckpointException

        began = time.monotonic()
        try:
            self._folder.mkdir(exist_ok=True)
            self._before(self._folder)
            save(self._folder, kept, image)
        except (Exception, CheckpointException) as error:  # a full or removed disk, in whatever error it comes
            if not self._failing:
                text = f"no checkpoint of step {kept.step} in {self._folder}: the job goes on with copies in memory only. {_short(error)}"
                self._emit(ev.WarningRaised(text=text))
            self._failing = True
            return
        self._failing = False
        seconds = time.monotonic() - began
        self._emit(
            ev.SnapshotCopied(step=kept.step, source=self._source, holder="disk", digest=kept.digest, bytes=kept.nbytes, seconds=seconds)
        )
