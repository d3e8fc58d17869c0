"""What the supervisor makes of a log in which two emitters' words crossed."""

from __future__ import annotations

import asyncio

import msgspec

from robustrl.core import events as ev
from robustrl.core.weights import Ask, WeightDirectory
from robustrl.runtime.supervisor import Supervisor, Ticks


def supervisor() -> Supervisor:
    """Without a process, a host or other roles."""
    made = Supervisor.__new__(Supervisor)
    made._directory = WeightDirectory()
    return made


def announced(version: int, incarnation: int = 1) -> ev.VersionAnnounced:
    return ev.VersionAnnounced(version=version, digest=f"d{version}", bytes=64, chunks=4, holder="state_keeper-0", incarnation=incarnation,
                               address="127.0.0.1:1")


def committed(rollout: str, version: int, incarnation: int = 1) -> ev.PullCommitted:
    return ev.PullCommitted(source="state_keeper-0", target=rollout, incarnation=incarnation, version=version, digest=f"d{version}",
                            bytes=64, seconds=0.1, commit_seconds=0.1, transport="shm", lag=1, probe_gap=0.0, address="127.0.0.1:2")


def exited(role: str) -> ev.ProcessExited:
    return ev.ProcessExited(role=role, incarnation=1, pid=1, cause="pidfd", last_lines=[])


def test_the_last_word_of_a_dead_role_may_come_after_the_word_of_its_death() -> None:
    """Each life of the supervisor reads the same log: an error here would end one after the other, and the job."""
    here = supervisor()
    for event in (announced(0), announced(1), exited("rollout-0"), committed("rollout-0", 1), exited("state_keeper-0"), announced(2)):
        here._learn_weights(event)
    assert here._directory.newest == 1 and not here._directory.holders(1)
    here._learn_weights(announced(2, incarnation=2))
    lease = here._directory.answer(Ask(puller="rollout-0", incarnation=2), 0.0)
    assert lease is not None and (lease.version, lease.source, lease.incarnation) == (2, "state_keeper-0", 2)


def test_a_life_that_has_ended_gets_no_weights_and_no_error() -> None:
    """It asked in the middle of a pull; its process may be about to become another role, and would die of an error."""
    here = supervisor()
    for event in (announced(0), exited("rollout-1")):
        here._learn_weights(event)

    async def answers() -> list[bool]:
        here._changed = asyncio.Condition()
        asks = (Ask(puller="rollout-1", incarnation=life) for life in (1, 2))
        return [await here.ask(msgspec.msgpack.encode(ask), 0) is not None for ask in asks]

    assert asyncio.run(answers()) == [False, True]


def test_each_deadline_has_its_tick_as_it_passes_however_close_they_are() -> None:
    deadlines, ticks, now, given = [10.0, 10.04, 10.3, 12.0], Ticks(), 9.0, []
    while now < 12.5:
        tick, pause = ticks.look(now, deadlines[0] if deadlines else None)
        assert 0.001 <= pause <= 0.1
        if tick:
            given.append(now)
            deadlines.pop(0)
        now += pause
    assert [round(t - due, 6) <= 0.001 for t, due in zip(given, (10.0, 10.04, 10.3, 12.0), strict=True)] == [True] * 4


def test_a_deadline_that_stands_is_not_ticked_at_every_look() -> None:
    ticks = Ticks()
    given = [t for t in range(200) if ticks.look(5.0 + t / 100, 5.0)[0]]
    assert given == [0, 50, 100, 150]
