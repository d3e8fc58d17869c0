"""From a state dict to one buffer and back: tied tensors, alignment, checksums, and the errors that name a tensor."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import xxhash

from robustrl.core.weights import Lease, Manifest
from robustrl.transport.manifest import build_manifest, checksums, decode_manifest, fill, layout_of, tensors

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.usefixtures("with_torch")


def state() -> dict:
    embedding = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    return {"embed.weight": embedding, "norm.weight": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "scale": torch.tensor(7.0),
            "head.weight": embedding, "empty": torch.zeros(0, 4)}


def test_round_trip_is_bitwise_equal() -> None:
    named = state()
    layout = layout_of(named)
    buffer = np.full(layout.nbytes, 255, np.uint8)
    fill(layout, named, buffer)
    manifest = build_manifest(3, layout, buffer, chunk_bytes=64, probe_tokens=[1, 2], probe_logprobs=[-0.25])
    manifest.check()
    found = dict(tensors(manifest, buffer))
    assert list(found) == list(named)
    for name, tensor in named.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert (manifest.version, manifest.probe_tokens, manifest.probe_logprobs) == (3, [1, 2], [-0.25])


def test_tied_tensors_share_one_place_and_keep_both_names() -> None:
    specs = {spec.name: spec for spec in layout_of(state()).tensors}
    assert specs["embed.weight"].offset == specs["head.weight"].offset
    assert len({spec.offset for spec in specs.values() if spec.nbytes}) == 3


def test_a_view_of_other_shape_is_not_tied() -> None:
    weight = torch.ones(4, 4)
    offsets = [spec.offset for spec in layout_of({"a": weight, "b": weight.t(), "c": weight[:2]}).tensors]
    assert len(set(offsets)) == 3


def test_transposed_tensors_arrive_as_they_look() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    layout = layout_of({"w": weight.t()})
    buffer = np.zeros(layout.nbytes, np.uint8)
    fill(layout, {"w": weight.t()}, buffer)
    assert torch.equal(dict(tensors(build_manifest(0, layout, buffer), buffer))["w"], weight.t())


def test_equal_weights_have_equal_chunks_whatever_was_in_the_buffer() -> None:
    """A new incarnation of the source must list the same chunks: gaps between tensors are part of them."""
    named, layout = state(), layout_of(state())
    digests = []
    for rubbish in (0, 255):
        buffer = np.full(layout.nbytes, rubbish, np.uint8)
        fill(layout, named, buffer)
        digests.append(build_manifest(1, layout, buffer, chunk_bytes=32).digest)
    assert digests[0] == digests[1]


def test_checksums_are_those_of_the_chunks() -> None:
    data = np.arange(100, dtype=np.uint8)
    assert checksums(data, 40) == [xxhash.xxh3_128_hexdigest(data[a:b].tobytes()) for a, b in ((0, 40), (40, 80), (80, 100))]


@pytest.mark.parametrize(("scale", "text"), [
    (lambda: None, "tensor 'scale': missing"),
    (lambda: torch.ones(2), r"tensor 'scale': \(2,\) torch.float32, the layout has \(\) float32"),
    (lambda: torch.tensor(7), r"tensor 'scale': \(\) torch.int64"),
])
def test_fill_names_the_tensor_that_does_not_fit(scale: Callable[[], Any], text: str) -> None:
    layout = layout_of(state())
    named = {name: tensor for name, tensor in (state() | {"scale": scale()}).items() if tensor is not None}
    with pytest.raises(ValueError, match=text):
        fill(layout, named, np.zeros(layout.nbytes, np.uint8))


def test_sizes_must_fit() -> None:
    layout = layout_of(state())
    with pytest.raises(ValueError, match=f"buffer of 8 bytes, the layout has {layout.nbytes}"):
        fill(layout, state(), np.zeros(8, np.uint8))
    with pytest.raises(ValueError, match=f"buffer of 8 bytes, the layout has {layout.nbytes}"):
        build_manifest(0, layout, np.zeros(8, np.uint8))
    with pytest.raises(ValueError, match="no tensor with content"):
        layout_of({"empty": torch.zeros(0)})


def test_dtype_that_torch_does_not_have() -> None:
    layout = layout_of({"w": torch.ones(2)})
    spec = layout.tensors[0]
    odd = Manifest.build(version=0, tensors=[type(spec)(spec.name, "load", spec.shape, 0, spec.nbytes)], nbytes=layout.nbytes,
                         chunk_bytes=64, chunks=["c"])
    with pytest.raises(ValueError, match="tensor 'w': dtype 'load' is not one of torch's"):
        list(tensors(odd, np.zeros(layout.nbytes, np.uint8)))


def test_no_damaged_or_invented_manifest_is_taken_or_raises_anything_else() -> None:
    """Whatever a source sends: it is the manifest of the lease, byte for byte in meaning, or a ValueError."""
    generator = random.Random(1)
    layout = layout_of({"a": torch.arange(40.0), "b": torch.ones(3, 5)})
    buffer = np.empty(layout.nbytes, np.uint8)
    fill(layout, {"a": torch.arange(40.0), "b": torch.ones(3, 5)}, buffer)
    manifest = build_manifest(1, layout, buffer, chunk_bytes=64, probe_tokens=[1, 2], probe_logprobs=[-0.5])
    good = msgspec.msgpack.encode(manifest)
    lease = Lease(id=1, puller="rollout-0", puller_incarnation=1, source="state_keeper-0", incarnation=1, address=("h", 1), version=1,
                  digest=manifest.digest, nbytes=manifest.nbytes, start=0, stop=len(manifest.chunks), expires=1.0)
    assert decode_manifest(good, lease) == manifest
    refused = 0
    for _ in range(4000):
        sent = bytearray(good)
        for _ in range(generator.randint(1, 4)):
            sent[generator.randrange(len(sent))] = generator.randrange(256)
        try:
            assert decode_manifest(sent[:generator.choice([len(sent), generator.randrange(len(sent))])], lease) == manifest
        except ValueError:
            refused += 1
    assert refused > 3900
    for false in ({"nbytes": 2**60, "chunk_bytes": 2**60, "chunks": ["c"]}, {"version": 2}, {"nbytes": 8, "chunks": ["c"], "tensors": []}):
        fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__ if name != "digest"}
        with pytest.raises(ValueError, match="manifest: .* the lease says"):
            decode_manifest(msgspec.msgpack.encode(Manifest.build(**fields | false)), lease)
