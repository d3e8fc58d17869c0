"""The weight plane between real processes: whole pulls, and the death, stop, return or lie of a source, a relay or a puller."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from transport_processes import CHUNK, CHUNKS, NBYTES, Plan, Pulling, Result, Source, content

from robustrl.core.events import PeerGone, PullDiscarded, PullSourceSwitched, PullStarted
from robustrl.core.weights import SOURCE_COPIES, WeightDirectory

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def start(transport: str) -> Iterator[Any]:
    """Starts sources (``start(role=...)``) and pullers (``start(directory, ...)``) and ends them after the test."""
    made: list[Any] = []

    def begin(directory: WeightDirectory | None = None, **options: Any) -> Any:
        made.append(Source(transport, **options) if directory is None else Pulling(transport, directory, **options))
        return made[-1]

    yield begin
    for process in made:
        process.end()


def check(result: Result, source: Source) -> None:
    """Complete, equal to the trainer's, and not more bytes than needed."""
    assert result.manifest.digest == source.digest
    assert result.content == content(source.plan).tobytes()
    assert result.received <= 1.05 * (NBYTES + result.discarded)


def test_pull_is_complete_and_equal(start: Any, transport: str) -> None:
    source, directory = start(), WeightDirectory()
    source.announce(directory)
    pulling = start(directory, pulls=2)
    for _ in range(2):
        result = pulling.result()
        check(result, source)
        assert (result.received, result.discarded, result.transport, result.source) == (NBYTES, 0, transport, "state_keeper-0")
        directory.commit("rollout-0", 1, 1, source.digest, None)
    assert source.tell("sent") == 2 * NBYTES
    assert source.tell("close") == "closed"


@pytest.mark.parametrize("chunk", [2, CHUNKS // 2, CHUNKS - 1])
def test_relay_is_killed(start: Any, chunk: int) -> None:
    source, relay, directory = start(), start(role="rollout-1", trap_chunk=chunk), WeightDirectory()
    source.announce(directory)
    relay.join(directory)
    pulling = start(directory)
    result = pulling.result()
    check(result, source)
    assert [lease.source for lease in pulling.leases] == ["rollout-1", "state_keeper-0"]
    (gone,) = pulling.events_of(PeerGone)
    assert (gone.role, gone.peer, gone.peer_incarnation) == ("rollout-0", "rollout-1", 1) and gone.error
    (switch,) = pulling.events_of(PullSourceSwitched)
    assert (switch.old_source, switch.new_source, switch.kept) == ("rollout-1", "state_keeper-0", pulling.leases[1].start)
    # what the relay had sent and we had checked is not pulled again
    assert source.tell("sent") == NBYTES - switch.kept * CHUNK
    assert switch.kept >= chunk - 5


def test_keepers_share_out_what_a_puller_lacks(start: Any) -> None:
    keepers, directory = [start(role=f"state_keeper-{index}") for index in range(2)], WeightDirectory()
    for keeper in keepers:
        keeper.announce(directory)
    pulling = start(directory)
    result = pulling.result()
    check(result, keepers[0])
    first, second = pulling.leases
    assert {first.source, second.source} == {"state_keeper-0", "state_keeper-1"}
    assert (first.start, first.stop, second.start, second.stop) == (0, CHUNKS // 2, CHUNKS // 2, CHUNKS)
    assert sorted(keeper.tell("sent") for keeper in keepers) == [NBYTES - CHUNKS // 2 * CHUNK, CHUNKS // 2 * CHUNK]
    assert not pulling.events_of(PeerGone) and not pulling.events_of(PullSourceSwitched)


@pytest.mark.parametrize("struck", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)], ids=["killed", "stopped"])
def test_one_of_two_keepers_fails_while_both_send(start: Any, struck: int) -> None:
    steady, other, directory = start(), start(role="state_keeper-1", trap_chunk=5, trap_signal=struck), WeightDirectory()
    for keeper in (steady, other):
        keeper.announce(directory)
    pulling = start(directory, floor_seconds=0.5)
    result = pulling.result()
    check(result, steady)
    assert [lease.source for lease in pulling.leases] == ["state_keeper-0", "state_keeper-1", "state_keeper-0"]
    assert pulling.leases[2].start >= CHUNKS // 2, "what the steady one sends was disturbed"
    assert [gone.peer for gone in pulling.events_of(PeerGone)] == (["state_keeper-1"] if struck == signal.SIGKILL else [])
    if struck == signal.SIGSTOP:
        other.signal(signal.SIGCONT)
        assert other.tell("sent") <= NBYTES


def test_two_relays_in_a_row_are_killed(start: Any) -> None:
    source, directory = start(), WeightDirectory()
    source.announce(directory)
    for index, chunk in ((1, 6), (2, 6)):
        start(role=f"rollout-{index}", trap_chunk=chunk).join(directory)
    pulling = start(directory)
    check(pulling.result(), source)
    assert [lease.source for lease in pulling.leases] == ["rollout-1", "rollout-2", "state_keeper-0"]


@pytest.mark.parametrize("same", [True, False], ids=["same-chunks", "half-of-the-chunks"])
def test_only_source_dies_and_returns(start: Any, same: bool) -> None:
    first, directory = start(trap_chunk=15), WeightDirectory()
    first.announce(directory)
    pulling = start(directory)
    second: list[Source] = []

    def meanwhile() -> None:
        """The verdict comes at once, the new incarnation when the puller has waited for a while."""
        if not first.process.is_alive():
            directory.remove_holder("state_keeper-0", 1)
        if not second and pulling.waited >= 3:
            second.append(start(incarnation=2, **({} if same else {"version": 2, "other_seed": 9})))
            second[0].announce(directory)

    result = pulling.result(meanwhile)
    check(result, second[0])
    discarded = sum(event.bytes for event in pulling.events_of(PullDiscarded))
    if same:
        assert discarded == result.discarded == 0
        assert second[0].tell("sent") <= NBYTES - 10 * CHUNK, "checked chunks were pulled again"
    else:
        assert discarded == result.discarded > 0
        assert second[0].tell("sent") == NBYTES - CHUNKS // 2 * CHUNK, "the half that both list was pulled again, or not all of it kept"


def test_source_restarts_while_it_is_pulled(start: Any) -> None:
    """The next incarnation is there at once."""
    first, second, directory = start(trap_chunk=8), start(incarnation=2), WeightDirectory()
    first.announce(directory)
    pulling = start(directory)

    def meanwhile() -> None:
        if not first.process.is_alive() and "state_keeper-0" not in directory.holders(1):
            second.announce(directory)
        elif not first.process.is_alive() and directory.holders(1)["state_keeper-0"] == 1:
            directory.remove_holder("state_keeper-0", 1)

    result = pulling.result(meanwhile)
    check(result, second)
    assert result.discarded == 0 and pulling.leases[-1].incarnation == 2
    assert {gone.peer_incarnation for gone in pulling.events_of(PeerGone)} == {1}
    assert second.tell("sent") <= NBYTES - 3 * CHUNK, "checked chunks were pulled again"


def test_stopped_source_is_left_in_time(start: Any) -> None:
    stopped, source, directory = start(role="rollout-1", trap_chunk=8, trap_signal=signal.SIGSTOP), start(), WeightDirectory()
    source.announce(directory)
    stopped.join(directory)
    pulling = start(directory, floor_seconds=0.5)
    began = time.monotonic()
    check(pulling.result(), source)
    (switch,) = pulling.events_of(PullSourceSwitched)
    assert "nothing came for" in switch.reason and "chunk" in switch.reason and "rollout-1 incarnation 1" in switch.reason
    assert time.monotonic() - began < 15
    assert not pulling.events_of(PeerGone), "who is stopped is not gone"
    # woken up again it may still write to the old buffer; the next pull must not see it
    stopped.signal(signal.SIGCONT)
    assert stopped.tell("sent") <= NBYTES


def test_source_stopped_before_the_hello(start: Any) -> None:
    stopped, source, directory = start(role="rollout-1"), start(), WeightDirectory()
    source.announce(directory)
    stopped.join(directory)
    stopped.signal(signal.SIGSTOP)
    pulling = start(directory)
    check(pulling.result(), source)
    (switch,) = pulling.events_of(PullSourceSwitched)
    assert "no hello within 2.0 s" in switch.reason


def test_damaged_chunk_is_found_and_pulled_elsewhere(start: Any) -> None:
    damaged, source, directory = start(role="rollout-1", damage=5 * CHUNK + 123), start(), WeightDirectory()
    source.announce(directory)
    damaged.join(directory)
    pulling = start(directory)
    result = pulling.result()
    check(result, source)
    assert result.discarded == CHUNK
    (discard,) = pulling.events_of(PullDiscarded)
    assert discard.reason == "chunk 5 from rollout-1 is damaged"
    assert [lease.source for lease in pulling.leases] == ["rollout-1", "state_keeper-0"]


def test_memory_is_overwritten_while_it_is_read(start: Any) -> None:
    """With cma the puller reads the source's memory when it likes: what it finds there too late is never taken for the version."""
    hasty, source, directory = start(role="rollout-1", trap_chunk=3, overwrite=True), start(), WeightDirectory()
    source.announce(directory)
    hasty.join(directory)
    pulling = start(directory)
    result = pulling.result()
    check(result, source)
    assert result.source == "state_keeper-0" and result.discarded >= CHUNK
    assert not pulling.events_of(PeerGone), "its process lives"


def test_only_source_is_damaged(start: Any) -> None:
    source, directory = start(damage=0), WeightDirectory()
    source.announce(directory)
    kind, text = start(directory, deadline_s=6.0).outcome()
    assert kind == "error"
    assert "state_keeper-0 incarnation 1, version 1" in text and "chunk 0: checksum" in text


def test_killed_puller_costs_the_server_nothing(start: Any) -> None:
    source, directory = start(), WeightDirectory()
    source.announce(directory)
    for index in range(2):
        victim = start(directory, role=f"rollout-{index}")
        while not victim.events_of(PullStarted):
            victim.step(1.0)
        victim.signal(signal.SIGKILL)
        victim.process.join(10)
        directory.remove_holder(f"rollout-{index}", 1)
    assert directory.leases() == []
    check(start(directory, role="rollout-9").result(), source)
    assert [(gone.peer, gone.peer_incarnation) for gone in source.tell("events")] == [("rollout-0", 1), ("rollout-1", 1)]
    assert source.tell("retire") is True
    assert source.tell("sessions")[:2] == (0, 0)


def test_stopped_puller_is_cut_off_by_retire(start: Any) -> None:
    source, directory = start(), WeightDirectory()
    source.announce(directory)
    victim = start(directory)
    while not victim.events_of(PullStarted):
        victim.step(1.0)
    victim.signal(signal.SIGSTOP)
    began = time.monotonic()
    source.tell("retire")
    assert time.monotonic() - began < 5
    assert source.tell("sessions")[1] == 0
    victim.signal(signal.SIGCONT)
    for _ in range(20):
        victim.step(0.1)
    assert source.tell("events") == victim.events_of(PeerGone) == [], "nobody is gone"


def test_wrong_incarnation_and_wrong_secret_are_refused(start: Any) -> None:
    source, liar, directory = start(incarnation=2), start(role="rollout-1", secret=b"another secret, 32 bytes long..."), WeightDirectory()
    source.announce(directory)
    directory.add_holder(1, "rollout-2", 5, source.address)  # the address of a role that is gone: state_keeper-0 answers there now
    liar.join(directory)
    pulling = start(directory)
    check(pulling.result(), source)
    reasons = " ".join(event.reason for event in pulling.events_of(PullSourceSwitched))
    assert "state_keeper-0 incarnation 2 answered instead" in reasons
    assert "does not know the job's secret" in reasons
    assert liar.tell("sent") == 0


def test_versions_spread_through_relays(start: Any) -> None:
    source, directory = start(), WeightDirectory()
    source.announce(directory)
    pullers = [start(directory, role=f"rollout-{index}", relay=True) for index in range(4)]
    results: dict[str, Result] = {}
    end = time.monotonic() + 60
    while len(results) < 4 and time.monotonic() < end:
        for pulling in pullers:
            found = pulling.step(0.01)
            if found:
                assert found[0] == "pulled", found[1]
                results[pulling.role] = found[1]
                directory.commit(pulling.role, 1, 1, source.digest, found[1].address)
    assert len(results) == 4
    for result in results.values():
        assert result.content == content(source.plan).tobytes()
    assert source.tell("sent") <= SOURCE_COPIES * NBYTES
    assert {result.source for result in results.values()} > {"state_keeper-0"}


def test_two_hundred_pulls_leak_nothing(start: Any) -> None:
    """A broken-off pull every tenth time: its buffer is given back too."""
    source, directory = start(nbytes=3 * CHUNK), WeightDirectory()
    damaged = start(role="rollout-1", nbytes=3 * CHUNK, damage=0)
    source.announce(directory)
    pulling = start(directory, pulls=200, contents=False)
    usages, serving = [], []
    for number in range(200):
        if number % 10 == 0:
            damaged.join(directory)
        result = pulling.result()
        usages.append(result.usage)
        serving.append(source.tell("usage"))
        assert result.discarded == (CHUNK if number % 10 == 0 else 0)
        directory.drop_copy(1, "rollout-1")
        directory.commit("rollout-0", 1, 1, source.digest, None)
    for early, late in ((usages[20], usages[-1]), (serving[20], serving[-1])):
        assert late["descriptors"] <= early["descriptors"] + 2
        assert late["shared"] <= early["shared"] + 2
        assert late["resident"] <= early["resident"] + 8 * 2**20


def test_plan_defaults_are_what_the_counts_above_assume() -> None:
    assert -(-Plan().nbytes // CHUNK) == CHUNKS
