"""What a state keeper stops serving before its slots are written to."""

from __future__ import annotations

from types import SimpleNamespace

from robustrl.runtime.state_keeper import StateKeeper


def test_both_slots_are_retired_when_what_is_held_is_no_good() -> None:
    retired: list[int] = []
    keeper = StateKeeper.__new__(StateKeeper)
    keeper._server = SimpleNamespace(versions=[3, 4], retire=retired.append)  # type: ignore[assignment]
    keeper._staged = SimpleNamespace(version=4)  # type: ignore[assignment]
    keeper._unstage()
    assert retired == [3, 4] and keeper._staged is None
