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
    seconds = group.broadcast_with_death(2, 0.0)
    assert seconds is not None and (seconds > 4, calls) == (regrouped, ["group"] if regrouped else [])


def test_nobody_dies_of_a_gloo_broadcast_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Gloo.__new__(Gloo)
    group.pipes, theirs = {}, {}
    for rank in range(3):
        group.pipes[rank], theirs[rank] = multiprocessing.Pipe()
        theirs[rank].send(("done", 1.0))
    group.processes = {}  # whoever is to be killed is missing
    assert group.broadcast_with_death(1, 0.0) is None


def test_the_death_comes_earlier_until_the_sync_is_not_over_before_it() -> None:
    tried: list[tuple[int, float]] = []

    def sync_with_death(victim: int, after: float) -> float | None:
        tried.append((victim, after))
        return 0.25 if after < 1 else None

    assert sync.struck(iter([9.0, 7.0, 4.0]).__next__, sync_with_death, 1) == 0.25
    assert tried == [(1, 2.0), (1, 1.0), (1, 0.5)]
