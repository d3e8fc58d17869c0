"""Where a pull's bytes land: one buffer for a version, which chunks of it are checked, and what is kept when another version takes over.

Promises: memory with a receive that was broken off is never read or used again (UCX may still write to it, much later); a checked chunk
is kept where the next manifest lists the same checksum, whoever sent it. Leaves out the network and the checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from typing import Any

import numpy as np

from robustrl.core.weights import Manifest

_KEPT_BUFFERS = 2
_LARGE_BYTES = 4 * 2**20
"""From this size on a buffer is worth large pages: fewer faults, and less work for the kernel where it copies between processes."""


class Memory:
    """Buffers for pulls in this process, used again. This one gives host memory; see device.py for another kind."""

    def __init__(self) -> None:
        self._spare: list[Any] = []
        self._abandoned: list[Any] = []

    def get(self, nbytes: int) -> Any:
        """A buffer that nobody writes to, its pages touched."""
        for index, spare in enumerate(self._spare):
            if spare.nbytes == nbytes:
                return self._spare.pop(index)
        self._spare.clear()
        return self.allocate(nbytes)

    def give_back(self, buffer: Any) -> None:
        if len(self._spare) < _KEPT_BUFFERS:
            self._spare.append(buffer)

    def abandon(self, buffer: Any) -> None:
        """Keeps the addresses mapped for good, so that a late write of UCX hits nothing else, but gives the memory back."""
        self._abandoned.append(buffer)
        for one in self._abandoned:
            _pages(one).madvise(mmap.MADV_DONTNEED)

    def clear(self) -> None:
        self._spare.clear()

    def allocate(self, nbytes: int) -> Any:
        """Private memory of its own pages, large ones where the kernel has them, touched."""
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _LARGE_BYTES:
            with contextlib.suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        buffer = np.frombuffer(pages, np.uint8)
        buffer[::mmap.PAGESIZE] = 0
        return buffer


class Staging:
    """What has been pulled so far; outlives a pull that failed."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.manifest: Manifest | None = None
        self.have: set[int] = set()
        """Indices of the checked chunks."""
        self.received = 0
        """Bytes over UCX, those discarded later included."""
        self.discarded = 0
        self.learning = asyncio.Lock()
        """Held by the one source that the manifest is got from."""
        self._buffer: Any = None
        self._tainted: set[int] = set()
        """Chunks whose place in the buffer may still be written to."""
        self._aside: dict[int, Any] = {}
        """Where the tainted ones land instead."""

    @property
    def complete(self) -> bool:
        return self.manifest is not None and len(self.have) == len(self.manifest.chunks)

    @property
    def held_bytes(self) -> int:
        assert self.manifest is not None
        return sum(last - first for first, last in map(self.manifest.span, self.have))

    def place(self, chunk: int) -> Any:
        """Memory for this chunk of the manifest."""
        assert self.manifest is not None
        first, last = self.manifest.span(chunk)
        if chunk in self._tainted:
            if chunk not in self._aside:
                self._aside[chunk] = self._memory.allocate(last - first)
            return self._aside[chunk]
        return self._buffer[first:last]

    def taint(self, chunk: int) -> None:
        """The receive of this chunk was broken off: its memory is UCX's."""
        self._tainted.add(chunk)
        if chunk in self._aside:
            self._memory.abandon(self._aside.pop(chunk))

    def adopt(self, manifest: Manifest) -> int:
        """Makes this manifest the one being pulled. Checked chunks that it lists stay; returns the bytes of the others."""
        old, old_have = self.manifest, self.have
        if old is None:
            self.manifest, self._buffer = manifest, self._memory.get(manifest.nbytes)
            return 0
        held = {old.chunks[index]: index for index in sorted(old_have)}
        moved = {index: held[digest] for index, digest in enumerate(manifest.chunks)
                 if digest in held and _length(old, held[digest]) == _length(manifest, index)}
        same_places = old.nbytes == manifest.nbytes and old.chunk_bytes == manifest.chunk_bytes
        if not same_places or any(index != before for index, before in moved.items()):
            fresh = self._memory.get(manifest.nbytes)
            for index, before in moved.items():
                first, last = manifest.span(index)
                fresh[first:last] = self.place(before)
            self._drop_buffer()
            self._buffer = fresh
        kept = {manifest.chunks[index] for index in moved}
        lost = sum(_length(old, index) for digest, index in held.items() if digest not in kept)
        self.manifest, self.have = manifest, set(moved)
        self.discarded += lost
        return lost

    def finish(self) -> Any:
        """The complete version's buffer, in which nobody writes any more; the caller's from here on."""
        assert self.complete and self.manifest is not None
        if self._tainted:
            fresh = self._memory.get(self.manifest.nbytes)
            for index in range(len(self.manifest.chunks)):
                first, last = self.manifest.span(index)
                fresh[first:last] = self.place(index)
            self._drop_buffer()
            return fresh
        return self._buffer

    def _drop_buffer(self) -> None:
        if self._tainted:
            self._memory.abandon(self._buffer)
        else:
            self._memory.give_back(self._buffer)
        self._tainted.clear()
        self._aside.clear()


def _length(manifest: Manifest, chunk: int) -> int:
    first, last = manifest.span(chunk)
    return last - first


def _pages(buffer: np.ndarray) -> mmap.mmap:
    base: Any = buffer.base
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    assert isinstance(base, mmap.mmap)
    return base
