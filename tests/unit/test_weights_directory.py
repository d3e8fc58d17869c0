"""The weight directory's promises, by example and as properties over arbitrary sequences of events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from robustrl.core.weights import SOURCE_COPIES, Ask, Manifest, TensorSpec, WeightDirectory

KEEPER = "state_keeper-0"


def directory_with(version: int = 1, chunks: int = 10) -> WeightDirectory:
    directory = WeightDirectory()
    directory.announce(version, f"d{version}", chunks * 100, chunks, KEEPER, 1, ("h", 1), 0.0)
    return directory


def test_lease_names_everything() -> None:
    lease = directory_with().lease("rollout-0", 3, None, (), 5.0)
    assert lease is not None
    assert (lease.source, lease.incarnation, lease.address, lease.version, lease.digest) == (KEEPER, 1, ("h", 1), 1, "d1")
    assert (lease.start, lease.stop, lease.nbytes, lease.puller, lease.puller_incarnation) == (0, 10, 1000, "rollout-0", 3)
    assert lease.expires > 15.0


def test_lease_begins_at_the_first_lacking_chunk_and_counts_what_lacks() -> None:
    directory = directory_with()
    for _ in range(5):  # 5 x 4 lacking chunks are two copies of ten: the source's share, although every lease spans eight
        lease = directory.lease("rollout-0", 1, 1, {0, 1, 5, 6, 7, 8}, 0.0)
        assert lease is not None and (lease.start, lease.stop) == (2, 10)
        directory.release(lease.id)
    directory.commit("rollout-1", 1, 1, "d1", ("r", 1))
    busy = directory.lease("rollout-2", 1, 1, (), 0.0)
    assert busy is not None and busy.source == "rollout-1"
    assert directory.lease("rollout-0", 1, 1, set(range(9)), 0.0) is None


def test_what_a_failed_source_did_not_send_is_not_counted() -> None:
    directory = directory_with()
    for _ in range(20):
        lease = directory.lease("rollout-0", 1, 1, (), 0.0)
        assert lease is not None
        directory.fail(lease.id, 1, 0.0)
    directory.commit("rollout-1", 1, 1, "d1", ("r", 1))
    assert directory.lease("rollout-2", 1, 1, (), 0.0) is not None
    assert directory.lease("rollout-3", 1, 1, (), 0.0) is None, "20 chunks are two copies: the share of the source is spent"


def test_a_copy_serves_one_puller_until_it_is_released_or_expires() -> None:
    directory = directory_with()
    first = directory.lease("rollout-0", 1, None, (), 0.0)
    assert first is not None and directory.lease("rollout-1", 1, None, (), 1.0) is None
    assert directory.next_deadline() == first.expires
    assert directory.lease("rollout-1", 1, None, (), first.expires - 0.01) is None
    second = directory.lease("rollout-1", 1, None, (), first.expires)
    assert second is not None and directory.renew(first.id, first.expires) is None
    directory.release(second.id)
    assert directory.leases() == []


def test_renew_moves_the_end() -> None:
    directory = directory_with()
    lease = directory.lease("rollout-0", 1, None, (), 0.0)
    assert lease is not None
    renewed = directory.renew(lease.id, 5.0)
    assert renewed is not None and renewed.expires == lease.expires + 5.0
    assert directory.lease("rollout-1", 1, None, (), lease.expires + 1) is None


def test_numbers_only_rise_and_have_one_digest() -> None:
    directory = directory_with(version=4)
    with pytest.raises(ValueError, match="version 3 .* only rise, the newest is 4"):
        directory.announce(3, "d3", 1, 1, KEEPER, 1, ("h", 1), 0.0)
    with pytest.raises(ValueError, match="digest other, .* digest d4"):
        directory.announce(4, "other", 1000, 10, KEEPER, 1, ("h", 1), 0.0)
    directory.retire(4)
    with pytest.raises(ValueError, match="only rise, the newest is 4"):
        directory.announce(4, "d4", 1000, 10, KEEPER, 1, ("h", 1), 0.0)
    directory.announce(5, "d5", 1000, 10, KEEPER, 1, ("h", 1), 0.0)
    with pytest.raises(ValueError, match="rollout-0 committed version 5 with digest wrong"):
        directory.commit("rollout-0", 1, 5, "wrong", None)


def test_dead_incarnations_never_return() -> None:
    directory = directory_with()
    assert directory.lease("rollout-0", 2, None, (), 0.0) is not None
    directory.remove_holder(KEEPER, 1)
    assert directory.leases() == [] and directory.holders(1) == {}
    with pytest.raises(ValueError, match=f"{KEEPER} incarnation 1 is dead; the next one is 2"):
        directory.announce(1, "d1", 1000, 10, KEEPER, 1, ("h", 1), 0.0)
    directory.announce(1, "d1", 1000, 10, KEEPER, 2, ("h", 2), 0.0)
    lease = directory.lease("rollout-0", 2, None, (), 0.0)
    assert lease is not None and lease.incarnation == 2
    with pytest.raises(ValueError, match="rollout-0 incarnation 1 is dead"):
        directory.lease("rollout-0", 1, None, (), 0.0)  # its second life asked already
    directory.remove_holder("rollout-0", 2)
    assert directory.leases() == []
    with pytest.raises(ValueError, match="rollout-0 incarnation 2 is dead"):
        directory.commit("rollout-0", 2, 1, "d1", None)


def test_newer_incarnation_buries_the_older_ones_copies() -> None:
    directory = directory_with()
    directory.announce(2, "d2", 1000, 10, KEEPER, 1, ("h", 1), 0.0)
    directory.announce(2, "d2", 1000, 10, KEEPER, 2, ("h", 2), 0.0)
    assert directory.holders(1) == {} and directory.holders(2) == {KEEPER: 2}


def test_failed_source_is_shunned_while_there_is_another() -> None:
    directory = directory_with()
    directory.commit("rollout-1", 1, 1, "d1", ("r", 1))
    first = directory.answer(Ask(puller="rollout-0", incarnation=1), 0.0)
    assert first is not None and first.source == "rollout-1"  # relays come first
    failed = Ask(puller="rollout-0", incarnation=1, lease=first.id, failed="reset", received=3, version=1, have=[0, 1, 2])
    second = directory.answer(failed, 1.0)
    assert second is not None and second.source == KEEPER and second.start == 3
    directory.remove_holder(KEEPER, 1)
    third = directory.answer(Ask(puller="rollout-0", incarnation=1, version=1, have=[0, 1, 2]), 2.0)
    assert third is not None and third.source == "rollout-1"  # better than none


def test_sources_that_are_free_together_share_out_what_lacks() -> None:
    directory = directory_with()
    for index in (1, 2):
        directory.announce(1, "d1", 1000, 10, f"state_keeper-{index}", 1, ("h", index), 0.0)
    ask = Ask(puller="rollout-0", incarnation=1, version=1, have=[0, 1])
    leases: list[Any] = []
    while not leases or leases[-1].more:
        leases.append(directory.answer(msgspec.structs.replace(ask, using=[one.id for one in leases]), 0.0))
    assert [(lease.source, lease.start, lease.stop, lease.more) for lease in leases] == [
        (KEEPER, 2, 5, True), ("state_keeper-1", 5, 8, True), ("state_keeper-2", 8, 10, False)]
    # one fails after a chunk: its rest goes to the one that has finished, the third goes on
    have = [0, 1, 2, 5, 6, 7]
    assert directory.answer(Ask(puller="rollout-0", incarnation=1, lease=leases[1].id, using=[leases[0].id, leases[2].id], version=1,
                                have=have), 1.0) is None
    again = directory.answer(Ask(puller="rollout-0", incarnation=1, lease=leases[0].id, failed="reset", received=1, version=1, have=have,
                                 using=[leases[2].id]), 1.0)
    assert again is not None and (again.source, again.start, again.stop, again.more) == ("state_keeper-1", 3, 8, False)
    assert {lease.id for lease in directory.leases()} == {leases[2].id, again.id}


def test_a_relay_that_is_free_serves_alone() -> None:
    directory = directory_with()
    directory.announce(1, "d1", 1000, 10, "state_keeper-1", 1, ("h", 1), 0.0)
    directory.commit("rollout-1", 1, 1, "d1", ("r", 1))
    lease = directory.answer(Ask(puller="rollout-0", incarnation=1), 0.0)
    assert lease is not None and (lease.source, lease.start, lease.stop, lease.more) == ("rollout-1", 0, 10, False)


def test_leases_in_use_keep_the_puller_at_their_version() -> None:
    directory = directory_with()
    directory.announce(1, "d1", 1000, 10, "state_keeper-1", 1, ("h", 1), 0.0)
    first = directory.answer(Ask(puller="rollout-0", incarnation=1), 0.0)
    assert first is not None and first.more
    directory.announce(2, "d2", 1000, 10, KEEPER, 1, ("h", 1), 0.0)
    second = directory.answer(Ask(puller="rollout-0", incarnation=1, using=[first.id]), 0.0)
    assert second is not None and (second.version, second.source, second.start) == (1, "state_keeper-1", 5)
    newest = directory.answer(Ask(puller="rollout-0", incarnation=1), 0.0)
    assert newest is not None and newest.version == 2
    assert directory.leases() == [newest], "what a puller uses no more has ended"


def test_have_of_another_version_does_not_count() -> None:
    directory = directory_with()
    lease = directory.answer(Ask(puller="rollout-0", incarnation=1, version=0, have=[0, 1, 2]), 0.0)
    assert lease is not None and lease.start == 0


def test_old_versions_retire_and_their_leases_end() -> None:
    directory = directory_with(1)
    lease = directory.lease("rollout-0", 1, 1, (), 0.0)
    assert lease is not None
    directory.announce(2, "d2", 1000, 10, KEEPER, 1, ("h", 1), 0.0)
    assert directory.renew(lease.id, 0.1) is not None
    directory.announce(3, "d3", 1000, 10, KEEPER, 1, ("h", 1), 0.0)
    assert directory.renew(lease.id, 0.2) is None and directory.lease("rollout-0", 1, 1, (), 0.2) is None
    newest = directory.lease("rollout-0", 1, None, (), 0.2)
    assert newest is not None and newest.version == 3


def test_commit_makes_a_relay_of_that_version_only() -> None:
    directory = directory_with(1)
    directory.commit("rollout-0", 1, 1, "d1", ("r", 1))
    assert directory.holders(1) == {KEEPER: 1, "rollout-0": 1}
    directory.announce(2, "d2", 1000, 10, KEEPER, 1, ("h", 1), 0.0)
    directory.commit("rollout-0", 1, 2, "d2", ("r", 1))
    assert directory.holders(1) == {KEEPER: 1} and directory.holders(2) == {KEEPER: 1, "rollout-0": 1}
    directory.retire(1)
    directory.commit("rollout-1", 1, 1, "d1", ("r", 2))  # late, but right
    assert directory.holders(1) == {}


@pytest.mark.parametrize("pullers", [2, 4, 8])
def test_fan_out_grows_through_relays(pullers: int) -> None:
    """All ask at once and a copy takes one time unit: the source sends at most two, and the rounds grow with the logarithm."""
    directory, waiting, sent, now, rounds = directory_with(), {f"rollout-{i}" for i in range(pullers)}, 0, 0.0, 0
    while waiting:
        granted = [lease for puller in sorted(waiting) if (lease := directory.lease(puller, 1, None, (), now))]
        assert granted, "nobody is served although a holder lives"
        sent += sum(lease.source == KEEPER for lease in granted)
        now, rounds = now + 1.0, rounds + 1
        for lease in granted:
            directory.commit(lease.puller, 1, 1, "d1", (lease.puller, 1))
            waiting.discard(lease.puller)
    assert sent <= SOURCE_COPIES
    assert rounds == {2: 2, 4: 3, 8: 4}[pullers]


def test_source_serves_beyond_its_share_when_the_relays_are_gone() -> None:
    directory = directory_with()
    for puller in ("rollout-0", "rollout-1"):
        lease = directory.lease(puller, 1, None, (), 0.0)
        assert lease is not None and lease.source == KEEPER
        directory.commit(puller, 1, 1, "d1", None)
    directory.add_holder(1, "rollout-0", 1, ("r", 1))
    relay = directory.lease("rollout-2", 1, None, (), 0.0)
    assert relay is not None and relay.source == "rollout-0"
    assert directory.lease("rollout-3", 1, None, (), 0.0) is None
    directory.remove_holder("rollout-0", 1)
    lease = directory.lease("rollout-3", 1, None, (), 0.0)
    assert lease is not None and lease.source == KEEPER


FIELDS: dict[str, Any] = {"version": 1, "tensors": [TensorSpec("a", "float32", (2,), 0, 8)], "nbytes": 8, "chunk_bytes": 8, "chunks": ["c"]}


def test_manifest_digest_covers_every_field() -> None:
    fields = FIELDS | {"probe_tokens": [1, 2], "probe_logprobs": [-0.5]}
    Manifest.build(**fields).check()
    other = {"version": 2, "tensors": [TensorSpec("b", "float32", (2,), 0, 8)], "nbytes": 16, "chunk_bytes": 4, "chunks": ["e"],
             "probe_tokens": [1, 3], "probe_logprobs": [-0.6]}
    digests = {Manifest.build(**fields).digest, *(Manifest.build(**fields | {name: value}).digest for name, value in other.items())}
    assert len(digests) == 8


@pytest.mark.parametrize(("change", "text"), [
    ({"chunks": []}, "0 chunks of 8 bytes do not make 8 bytes"),
    ({"version": -1}, "version -1"),
    ({"tensors": [TensorSpec("a", "float32", (4,), 0, 16)]}, "tensor 'a' .* lies outside 8 bytes"),
    ({"tensors": [TensorSpec("a", "float32", (2,), 0, 8)] * 2}, "tensor 'a' is listed twice"),
])
def test_manifest_check_names_what_is_wrong(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Manifest.build(**FIELDS | change).check()


def test_manifest_check_refuses_a_false_digest() -> None:
    manifest = Manifest(version=1, tensors=[], nbytes=8, chunk_bytes=8, chunks=["c"], digest="0" * 32)
    with pytest.raises(ValueError, match="is not that of its content"):
        manifest.check()


ROLES = [KEEPER, "state_keeper-1", "rollout-0", "rollout-1", "rollout-2"]
roles, incarnations = st.sampled_from(ROLES), st.integers(1, 4)


class Directory(RuleBasedStateMachine):
    """Arbitrary events against the promises; the model is: which incarnation of each role is dead, the digests, the highest number."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = WeightDirectory(lease_seconds=5.0, shun_seconds=3.0)
        self.now, self.highest = 0.0, -1
        self.dead: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.digests: dict[int, str] = {}
        self.ids: set[int] = set()

    def _met(self, role: str, incarnation: int) -> None:
        self.dead[role] = max(self.dead.get(role, 0), incarnation - 1)

    @rule(version=st.integers(0, 6), digest=st.sampled_from("ab"), role=roles, incarnation=incarnations, chunks=st.integers(1, 6))
    def announce(self, version: int, digest: str, role: str, incarnation: int, chunks: int) -> None:
        known = version in self.directory._versions
        legal = incarnation > self.dead.get(role, 0) and (version > self.highest or (known and self.digests[version] == digest))
        try:
            self.directory.announce(version, digest, chunks * 10, chunks, role, incarnation, (role, 1), self.now)
        except ValueError:
            assert not legal
            return
        assert legal
        self._met(role, incarnation)
        self.digests[version], self.highest = digest, max(self.highest, version)

    @rule(role=roles, incarnation=incarnations, have=st.sets(st.integers(0, 5)), version=st.none() | st.integers(0, 6))
    def lease(self, role: str, incarnation: int, have: set[int], version: int | None) -> None:
        try:
            lease = self.directory.lease(role, incarnation, version, have, self.now)
        except ValueError:
            assert incarnation <= self.dead.get(role, 0)
            return
        assert incarnation > self.dead.get(role, 0)
        self._met(role, incarnation)
        if lease is not None:
            assert lease.id not in self.ids and lease.source != role and lease.expires > self.now
            assert lease.start not in have and lease.start < lease.stop
            assert version in (None, lease.version) and lease.digest == self.digests[lease.version]
            self.ids.add(lease.id)

    @rule(role=roles, incarnation=incarnations, have=st.sets(st.integers(0, 5)), data=st.data(), failed=st.sampled_from(["", "reset"]))
    def ask(self, role: str, incarnation: int, have: set[int], data: st.DataObject, failed: str) -> None:
        own = [lease for lease in self.directory.leases() if lease.puller == role]
        using = data.draw(st.lists(st.sampled_from(own), unique=True)) if own else []
        ended = data.draw(st.none() | st.sampled_from([lease for lease in own if lease not in using])) if len(own) > len(using) else None
        ask = Ask(puller=role, incarnation=incarnation, lease=ended.id if ended else None, failed=failed, received=1,
                  using=[lease.id for lease in using], version=max((one.version for one in using), default=0), have=sorted(have))
        try:
            lease = self.directory.answer(ask, self.now)
        except ValueError:
            assert incarnation <= self.dead.get(role, 0)
            return
        self._met(role, incarnation)
        left = [one for one in self.directory.leases() if one.puller == role]
        assert {one.id for one in left} <= {one.id for one in [*using, *([lease] if lease else [])]}
        if lease is not None:
            assert all(one.version == lease.version for one in left if one.id in self.ids & set(ask.using))
            self.ids.add(lease.id)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), how=st.sampled_from(["release", "fail", "renew"]))
    def end_lease(self, data: st.DataObject, how: str) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.ids)))
        if how == "release":
            self.directory.release(lease_id)
        elif how == "fail":
            self.directory.fail(lease_id, data.draw(st.integers(0, 6)), self.now)
        else:
            alive = {lease.id for lease in self.directory.leases() if lease.expires > self.now}
            assert (self.directory.renew(lease_id, self.now) is not None) == (lease_id in alive)

    @rule(role=roles, incarnation=incarnations, version=st.integers(0, 6), digest=st.sampled_from("ab"), relay=st.booleans())
    def commit(self, role: str, incarnation: int, version: int, digest: str, relay: bool) -> None:
        on_offer = version in self.directory._versions
        legal = incarnation > self.dead.get(role, 0) and (not on_offer or self.digests[version] == digest)
        try:
            self.directory.commit(role, incarnation, version, digest, (role, 2) if relay else None)
        except ValueError:
            assert not legal
            return
        assert legal
        if relay and on_offer:
            self._met(role, incarnation)

    @rule(role=roles, incarnation=incarnations)
    def die(self, role: str, incarnation: int) -> None:
        self.directory.remove_holder(role, incarnation)
        self.dead[role] = max(self.dead.get(role, 0), incarnation)

    @rule(version=st.integers(0, 6))
    def retire(self, version: int) -> None:
        self.directory.retire(version)
        self.highest = max(self.highest, version)

    @rule(seconds=st.floats(0.1, 4.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.directory.advance(self.now)

    @invariant()
    def leases_are_sound(self) -> None:
        taken: dict[tuple[str, int], int] = {}
        parts: dict[tuple[str, int], set[int]] = {}
        for lease in self.directory.leases():
            part, others = set(range(lease.start, lease.stop)), parts.setdefault((lease.puller, lease.version), set())
            assert not part & others, "a puller has a chunk from two sources"
            others |= part
            assert self.directory.holders(lease.version)[lease.source] == lease.incarnation, "a lease on a copy that is not there"
            assert lease.incarnation > self.dead.get(lease.source, 0) and lease.puller_incarnation > self.dead.get(lease.puller, 0)
            assert taken.setdefault((lease.source, lease.version), lease.id) == lease.id, "a copy with two pullers"

    @invariant()
    def holders_are_alive_and_numbers_rise(self) -> None:
        for version in self.directory._versions:
            assert self.directory.digest(version) == self.digests[version] and version <= self.highest
            for role, incarnation in self.directory.holders(version).items():
                assert incarnation > self.dead.get(role, 0)
        assert self.directory.newest <= self.highest

    @invariant()
    def deadline_is_in_the_future(self) -> None:
        deadline = self.directory.next_deadline()
        assert deadline is None or deadline > self.now or self.directory.advance(self.now) is not None

    def teardown(self) -> None:
        """Every version that somebody holds is served in the end to a newcomer that keeps asking, with time and no further help."""
        for version in list(self.directory._versions):
            if self.directory.holders(version):
                for _ in range(3):
                    lease = self.directory.lease("rollout-9", 1, version, (), self.now)
                    if lease:
                        break
                    self.now = self.directory.next_deadline() or self.now
                assert lease is not None and lease.version == version, f"version {version} is never served"
                self.directory.release(lease.id)


TestDirectory = Directory.TestCase
TestDirectory.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.soak
class TestMuchOfADirectory(Directory.TestCase):
    settings = hypothesis_settings(max_examples=600, stateful_step_count=40, deadline=None)
