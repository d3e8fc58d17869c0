"""Who is called when a rank comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from robustrl.core.roles import RoleId
from robustrl.errors import PeerDied, WaitTimeout
from robustrl.runtime.rank_group import RankGroup


class _Lives:
    def __init__(self, trouble: dict[str, Exception], **incarnations: int) -> None:
        self.incarnations = {f"trainer-{name[-1]}": number for name, number in incarnations.items()}
        self.places = {RoleId.parse(role): "node-1" for role in [*self.incarnations, "rollout-0"]}
        self.failures: list[Exception] = []
        self.trouble, self.left, self.met, self.killed = trouble, list[str](), list[list[str]](), list[str]()

    def peer(self, role: str) -> Any:
        lives = self

        class Peer:
            async def call(self, method: str, *, deadline: float) -> None:
                assert method == "leave_group"
                if error := lives.trouble.get(role):
                    raise error
                lives.left.append(role)

        return Peer()

    async def prepare_trainers(self, ranks: list[str]) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.met.append(ranks)

    async def end_life(self, role: str) -> None:
        self.killed.append(role)


def group(lives: _Lives) -> RankGroup:
    return RankGroup(lives, lives.end_life)  # type: ignore[arg-type]


def test_the_others_leave_stay_and_meet_the_one_that_came_back() -> None:
    lives = _Lives({}, rank0=1, rank1=2, rank2=1)
    asyncio.run(group(lives).meet("trainer-1"))
    assert lives.left == ["trainer-0", "trainer-2"] and lives.met == [["trainer-0", "trainer-1", "trainer-2"]] and not lives.killed


@pytest.mark.parametrize(("error", "killed"), [(PeerDied("gone"), []), (WaitTimeout("late"), ["trainer-0"])])
def test_one_that_does_not_leave_is_killed_and_nobody_meets_before_it_is_back(error: Exception, killed: list[str]) -> None:
    lives = _Lives({"trainer-0": error}, rank0=1, rank1=2)
    asyncio.run(group(lives).meet("trainer-1"))
    assert lives.killed == killed and not lives.met


def test_ranks_that_died_together_meet_once_when_the_last_is_there() -> None:
    lives = _Lives({}, rank0=2, rank1=2)
    ranks = group(lives)
    asyncio.run(ranks.meet("trainer-0"))
    assert not lives.met and not lives.left
    asyncio.run(ranks.meet("trainer-1"))
    assert lives.met == [["trainer-0", "trainer-1"]]


def test_a_meeting_that_fails_although_all_live_is_held_again_and_not_for_ever() -> None:
    lives = _Lives({}, rank0=1, rank1=2)
    lives.failures = [RuntimeError("address in use")] * 2
    asyncio.run(group(lives).meet("trainer-1"))
    assert lives.left == ["trainer-0"] * 3 and len(lives.met) == 1
    lives.failures = [RuntimeError("address in use")] * 3
    with pytest.raises(RuntimeError):
        asyncio.run(group(lives).meet("trainer-1"))


def test_a_rank_that_dies_while_they_meet_brings_them_together_by_its_own_restart() -> None:
    lives = _Lives({"trainer-0": PeerDied("gone")}, rank0=1, rank1=2)
    asyncio.run(group(lives).meet("trainer-1"))
    assert not lives.met
    lives.trouble, lives.failures = {}, [PeerDied("gone"), RuntimeError("not reached")]
    with pytest.raises(PeerDied):
        asyncio.run(group(lives).meet("trainer-1"))
    assert len(lives.failures) == 1
