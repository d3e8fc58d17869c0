"""What ended a connection to a source: its own last word, where it left one, and else that it is gone."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from robustrl.core.weights import Lease, Manifest
from robustrl.transport import lane, source, wire
from robustrl.transport.staging import Memory, Staging

MANIFEST = Manifest.build(version=1, tensors=[], nbytes=100, chunk_bytes=100, chunks=["00"])
LEASE = Lease(id=1, puller="rollout-0", puller_incarnation=1, source="state_keeper-0", incarnation=1, address=("127.0.0.1", 1), version=1,
              digest=MANIFEST.digest, nbytes=100, start=0, stop=1, expires=9.0)


class Channel:
    """The source's last word (None: it died) comes a little later than UCX's error."""

    def __init__(self, last: wire.Refused | None) -> None:
        self.last = last

    async def receive(self, *kinds: Any) -> wire.Refused:
        for _ in range(5):
            await asyncio.sleep(0)
        if self.last is None:
            raise wire.Gone("connection closed by the peer")
        return self.last


@pytest.mark.parametrize(("last", "found"), [(wire.Refused("it is retired"), "refused: it is retired"), (None, "chunk 0: reset")])
def test_a_source_that_gave_a_reason_is_not_gone(monkeypatch: pytest.MonkeyPatch, last: wire.Refused | None, found: str) -> None:
    async def fetch() -> None:
        staging = Staging(Memory())
        staging.adopt(MANIFEST)
        limits = source.Limits(1.0, 1e6, asyncio.get_running_loop().time() + 5)
        with ThreadPoolExecutor(1) as pool:
            one = source.Source(LEASE, staging, limits, pool, "rollout-0", 1, lambda event: None)
            one._channel = Channel(last)  # type: ignore[assignment]
            await one._fetch(None)  # type: ignore[arg-type]

    async def broken(*_: Any) -> None:
        raise source._Broken("chunk 0: reset")

    monkeypatch.setattr(lane, "get", lambda: None)
    monkeypatch.setattr(source.Source, "_receive", broken)
    with pytest.raises(source.SourceFailed, match=found) as caught:
        asyncio.run(fetch())
    assert isinstance(caught.value, source._Broken) is (last is None)
