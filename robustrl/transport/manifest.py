"""From named tensors to one buffer with a manifest, and back to named views: the layout is computed once, the copy is per version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from robustrl.core.weights import Lease, Manifest, TensorSpec
from robustrl.transport import device

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 16 * 2**20
_ALIGN = 64
_decoder = msgspec.msgpack.Decoder(Manifest)


class Layout(msgspec.Struct, frozen=True):
    """Where each tensor lies in the buffer. Tied tensors (same memory, shape and dtype) share one place and keep both names."""

    tensors: list[TensorSpec]
    nbytes: int


def layout_of(named: Mapping[str, torch.Tensor]) -> Layout:
    """Layout of a state dict (not of named_parameters, which leaves a tied head out). Raises ValueError if it is empty."""
    specs: list[TensorSpec] = []
    places: dict[tuple[Any, ...], int] = {}
    end = 0
    for name, tensor in named.items():
        nbytes = tensor.numel() * tensor.element_size()
        same = (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype))
        offset = places.get(same) if tensor.data_ptr() else None
        if offset is None:
            offset = places[same] = end
            end += -(-nbytes // _ALIGN) * _ALIGN
        specs.append(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, nbytes))
    if not end:
        raise ValueError("layout: no tensor with content was given")
    return Layout(specs, end)


def fill(layout: Layout, named: Mapping[str, torch.Tensor], buffer: Any) -> None:
    """Copies the tensors into the buffer: ``layout.nbytes`` writable bytes, or a uint8 tensor on their device.

    Raises ValueError naming a tensor that is missing or differs.
    """
    flat = _flat(buffer)
    if flat.numel() != layout.nbytes:
        raise ValueError(f"buffer of {flat.numel()} bytes, the layout has {layout.nbytes}")
    written: set[int] = set()
    for spec in layout.tensors:
        tensor = named.get(spec.name)
        if tensor is None or tuple(tensor.shape) != spec.shape or str(tensor.dtype) != f"torch.{spec.dtype}":
            found = "missing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"tensor {spec.name!r}: {found}, the layout has {spec.shape} {spec.dtype}")
        if spec.nbytes and spec.offset not in written:
            written.add(spec.offset)
            _view(flat, spec).copy_(tensor.detach())
            flat[spec.offset + spec.nbytes:spec.offset + -(-spec.nbytes // _ALIGN) * _ALIGN] = 0  # the gap is part of a chunk


def build_manifest(version: int, layout: Layout, buffer: Any, *, chunk_bytes: int = CHUNK_BYTES, probe_tokens: list[int] | None = None,
                   probe_logprobs: list[float] | None = None) -> Manifest:
    """Manifest of a filled buffer of ``layout.nbytes`` bytes; of a tensor the checksums are computed where it lies."""
    flat = buffer if device.is_tensor(buffer) else np.frombuffer(buffer, dtype=np.uint8)
    if flat.nbytes != layout.nbytes:
        raise ValueError(f"buffer of {flat.nbytes} bytes, the layout has {layout.nbytes}")
    return Manifest.build(version=version, tensors=layout.tensors, nbytes=layout.nbytes, chunk_bytes=chunk_bytes,
                          chunks=checksums(flat, chunk_bytes), probe_tokens=probe_tokens, probe_logprobs=probe_logprobs)


def decode_manifest(data: Any, lease: Lease) -> Manifest:
    """What a source sent as the manifest of the leased version. Raises ValueError unless it is sound and the one that the lease names."""
    try:
        manifest = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"manifest: {error}") from None
    manifest.check()
    if (manifest.version, manifest.digest, manifest.nbytes) != (lease.version, lease.digest, lease.nbytes):
        raise ValueError(f"manifest: version {manifest.version}, digest {manifest.digest}, {manifest.nbytes} bytes; "
                         f"the lease says {lease.version}, {lease.digest}, {lease.nbytes}")
    return manifest


def checksum(view: Any, like: str = "") -> str:
    """xxh3-128 of contiguous bytes, hexadecimal; of a tensor, and where ``like`` is such a one, device.py's."""
    if like.startswith(device.PREFIX):
        return device.checksum(device.as_tensor(view))
    if not device.is_tensor(view):
        return xxhash.xxh3_128_hexdigest(view)
    return xxhash.xxh3_128_hexdigest(view.cpu().numpy()) if like else device.checksum(view)


def checksums(flat: Any, chunk_bytes: int) -> list[str]:
    """Of each chunk of a uint8 array or tensor."""
    views: list[Any] = [flat[start:start + chunk_bytes] for start in range(0, flat.nbytes, chunk_bytes)]
    if len(views) == 1:
        return [checksum(views[0])]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(checksum, views))


def tensors(manifest: Manifest, buffer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Named views into a pulled buffer (no copy), in the order of the state dict that it was built from."""
    return views(manifest.tensors, buffer)


def views(specs: Sequence[TensorSpec], buffer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """As `tensors`, from the list of where each tensor lies."""
    flat = _flat(buffer)
    for spec in specs:
        yield spec.name, _view(flat, spec)


def _flat(buffer: Any) -> torch.Tensor:
    import torch

    return buffer if isinstance(buffer, torch.Tensor) else torch.frombuffer(buffer, dtype=torch.uint8)


def _view(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    import torch

    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"tensor {spec.name!r}: dtype {spec.dtype!r} is not one of torch's")
    return flat[spec.offset:spec.offset + spec.nbytes].view(dtype).view(spec.shape)
