"""What the table of deaths counts: the time until the surviving receivers hold the version, which may be none."""

from __future__ import annotations

import multiprocessing
import time
from types import SimpleNamespace

import pytest

from tests.benchmarks import sync
from tests.benchmarks._sync_peers import Gloo


def test_a_sync_that_was_over_before_the_death_has_a_ratio_too() -> None:
    assert sync.times([0.0, 0.0, 1.0], [0.0, 0.0, 0.0]) == 1.0
    assert sync.times([2.0], [0.0]) == pytest.approx(2000) and sync.times([3.0], [1.5]) == 2.0


@pytest.mark.parametrize(("second", "regrouped"), [("done", False), ("failed", True)])
def test_gloo_broadcasts_again_only_where_a_receiver_lacks_it(monkeypatch: pytest.MonkeyPatch, second: str, regrouped: bool) -> None:
    group = Gloo.__new__(Gloo)
    group.pipes, theirs = {}, {}
    for rank in range(4):
        group.pipes[rank], theirs[rank] = multiprocessing.Pipe()
    group.processes = {3: SimpleNamespace(kill=lambda: None)}
    now = time.monotonic()
    for rank, kind in ((0, "failed"), (1, "done"), (2, second)):
        theirs[rank].send((kind, now))
        if kind == "done":
            theirs[rank].send(("done", now))  # it left
    calls: list[str] = []
    monkeypatch.setattr(group, "_group", lambda: calls.append("group"))
    monkeypatch.setattr(group, "_hear", lambda kind: {1: time.monotonic() + 5})
    seconds = group.broadcast_with_death(3, 0.0)
    assert (seconds > 4, calls) == (regrouped, ["group"] if regrouped else [])
