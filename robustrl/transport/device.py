"""Weights that stay on an accelerator: buffers there, and a checksum that is computed there, so that no tensor is copied to the host.

A version staged from a device has chunks whose checksum begins with ``d:``; both kinds of puller can check both kinds of chunk. UCX must
have CUDA and the transport must be ``auto``, which lets UCX use it (settings.py). Leaves out several devices for one version.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from robustrl.transport.staging import Memory

PREFIX = "d:"
_MASKS = {29: 2**35 - 1, 32: 2**32 - 1}
_MULTIPLIERS = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Those of splitmix64's finalizer (Steele, Lea, Flood 2014), as signed numbers."""


class DeviceMemory(Memory):
    """Buffers are uint8 tensors on ``device`` (as torch names it). What UCX may still write to stays allocated for good."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def allocate(self, nbytes: int) -> Any:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def abandon(self, buffer: Any) -> None:
        self._abandoned.append(buffer)


def checksum(flat: Any) -> str:
    """128 bits over a uint8 tensor, computed where it lies: each 8-byte word, mixed with its position, in two sums modulo 2**64.

    Finds damage, as xxh3 does, and like it is no proof against forgery.
    """
    import torch

    words = flat if flat.numel() % 8 == 0 else torch.nn.functional.pad(flat, (0, 8 - flat.numel() % 8))
    if words.data_ptr() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    position = torch.arange(1, 2 * words.numel(), 2, dtype=torch.int64, device=words.device)
    mixed = words ^ (position * _MULTIPLIERS[0])
    mixed = (mixed ^ ((mixed >> 32) & _MASKS[32])) * _MULTIPLIERS[0]
    mixed = (mixed ^ ((mixed >> 29) & _MASKS[29])) * _MULTIPLIERS[1]
    mixed = mixed ^ ((mixed >> 32) & _MASKS[32])
    sums = torch.stack([mixed.sum() + flat.numel(), (mixed * position).sum()]).tolist()
    return PREFIX + "".join(f"{one % 2**64:016x}" for one in sums)


def as_tensor(view: Any) -> Any:
    """Any buffer as a flat uint8 tensor that shares its memory."""
    import torch

    return view if isinstance(view, torch.Tensor) else torch.from_numpy(np.frombuffer(view, np.uint8))


def is_tensor(buffer: Any) -> bool:
    """Whether it is a tensor of torch rather than an array or another buffer of the host."""
    return hasattr(buffer, "device") and hasattr(buffer, "data_ptr")
