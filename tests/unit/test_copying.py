"""What a copier of snapshots tells of its connections."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from robustrl.core import events as ev
from robustrl.runtime.copying import Copier
from robustrl.transport import puller, server

GONE = ev.PeerGone(role="state_keeper-0", incarnation=1, peer="state_keeper-1", peer_incarnation=2, error="reset")
STARTED = ev.PullStarted(source="state_keeper-0", source_incarnation=1, target="state_keeper-1", version=3, bytes=8, transport="shm")


@pytest.mark.parametrize("end", ["server", "puller"])
def test_a_peer_that_is_gone_is_told_by_either_end_and_nothing_else_of_the_pull(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    told: list[Any] = []

    class End:
        def __init__(self, *_: object, on_event: Any, **__: object) -> None:
            self.versions, self.address = [], ("127.0.0.1", 1)
            for event in (STARTED, GONE):
                on_event(event)

        def stage(self, *_: object) -> None:
            pass

        def pull(self, *_: object, **__: object) -> Any:
            return SimpleNamespace(buffer=b"")

    monkeypatch.setattr(server, "WeightServer", End)
    monkeypatch.setattr(puller, "Puller", End)
    spec = SimpleNamespace(role="state_keeper-0", incarnation=1, ip="127.0.0.1", secret=lambda: b"")
    kept = SimpleNamespace(step=3, nbytes=8)
    copier = Copier(spec, told.append)  # type: ignore[arg-type]
    if end == "server":
        copier.offer(kept, np.zeros(8, np.uint8))  # type: ignore[arg-type]
    else:
        offer = SimpleNamespace(kept=kept, source="state_keeper-1", incarnation=2, address=("127.0.0.1", 1), digest="")
        copier.pull(offer, 1.0)  # type: ignore[arg-type]
    assert told == [GONE]
