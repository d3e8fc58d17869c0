"""A CUDA tensor goes through without a host copy: needs a GPU and a UCX with CUDA, and says so where they are missing."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest

from robustrl.core.weights import Ask, Lease
from robustrl.transport import settings

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU HERE: weights on an accelerator are not tested"),
]
SECRET = b"a secret of the test, 32 bytes.."
CHUNK, NBYTES = 2**20, 5 * 2**20 + 4096
_context = multiprocessing.get_context("spawn")


def content() -> Any:
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def serve(pipe: Any, where: str) -> None:
    settings.apply("auto")
    from robustrl.transport.manifest import build_manifest, fill, layout_of
    from robustrl.transport.server import WeightServer

    named = {"w": content().to(where)}
    layout = layout_of(named)
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=where) if where != "cpu" else bytearray(layout.nbytes)
    fill(layout, named, buffer)
    manifest = build_manifest(1, layout, buffer, chunk_bytes=CHUNK)
    server = WeightServer("127.0.0.1", SECRET, role="trainer-0", incarnation=1)
    server.stage(manifest, buffer)
    pipe.send((manifest.digest, manifest.nbytes, len(manifest.chunks), manifest.chunks[0], server.address))
    pipe.recv()


def pull(pipe: Any, where: str, lease: Lease) -> None:
    settings.apply("auto")
    from robustrl.transport.manifest import tensors
    from robustrl.transport.puller import Puller

    def next_source(ask: Ask) -> Lease:
        return lease

    pulled = Puller(SECRET, role="rollout-0", incarnation=1, device=where).pull(next_source, deadline_s=60)
    found = dict(tensors(pulled.manifest, pulled.buffer))["w"]
    pipe.send((str(found.device), torch.equal(found.cpu(), content())))


@pytest.mark.parametrize(("source", "target"), [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_tensor_on_a_device_arrives_where_it_is_wanted(source: str, target: str) -> None:
    assert settings.describe()["cuda"], "this UCX has no CUDA"
    ours, theirs = _context.Pipe()
    server = _context.Process(target=serve, args=(theirs, source), daemon=True)
    server.start()
    puller = None
    try:
        assert ours.poll(60), "the source does not come up"
        digest, nbytes, chunks, first, address = ours.recv()
        assert first.startswith("d:") == (source != "cpu"), "the checksum was not computed where the tensor lies"
        lease = Lease(id=1, puller="rollout-0", puller_incarnation=1, source="trainer-0", incarnation=1, address=address, version=1,
                      digest=digest, nbytes=nbytes, start=0, stop=chunks, expires=time.monotonic() + 60)
        mine, other = _context.Pipe()
        puller = _context.Process(target=pull, args=(other, target, lease), daemon=True)
        puller.start()
        assert mine.poll(90), "the pull does not end"
        assert mine.recv() == (target, True)
    finally:
        for process in filter(None, (server, puller)):
            process.kill()
            process.join(10)
