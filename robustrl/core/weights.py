"""Weight versions: what one consists of (Manifest), and who may pull which part of it from whom (WeightDirectory).

The directory promises: a number has one digest and numbers only rise; an incarnation that was removed never holds, serves or pulls
again; a copy serves one puller at a time; while one holder of a version lives, a puller that keeps asking gets a source; sources give
way to relays once they have sent two copies; sources that are free together share out what a puller lacks. It leaves out the bytes
(transport/), the clock (``now`` is passed in, seconds) and the decision whether a holder is dead (detection). Its whole state is rebuilt
by replaying announce, commit and remove_holder.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from typing import Self

import msgspec

SOURCE_COPIES = 2
"""Copies of one version that an announcing holder sends while a relay lives."""
KEPT_VERSIONS = 2
"""How many versions stay on offer: the newest and those just before it."""


class TensorSpec(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    """Name as in torch without the prefix, e.g. ``float32``."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the buffer; two names with one offset share their memory (tied weights)."""
    nbytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that identifies the content of one version. ``digest`` covers all other fields."""

    version: int
    tensors: list[TensorSpec]
    nbytes: int
    chunk_bytes: int
    chunks: list[str]
    """xxh3-128 of each chunk, hexadecimal, or ``d:`` and the checksum of transport/device.py; all but the last are ``chunk_bytes`` long."""
    probe_tokens: list[int] = []
    probe_logprobs: list[float] = []
    """Log-probability of each probe token after the first, under these weights."""
    digest: str = ""

    @classmethod
    def build(cls, *, version: int, tensors: list[TensorSpec], nbytes: int, chunk_bytes: int, chunks: list[str],
              probe_tokens: list[int] | None = None, probe_logprobs: list[float] | None = None) -> Self:
        """A manifest with its digest."""
        bare = cls(version=version, tensors=tensors, nbytes=nbytes, chunk_bytes=chunk_bytes, chunks=chunks,
                   probe_tokens=probe_tokens or [], probe_logprobs=probe_logprobs or [])
        return msgspec.structs.replace(bare, digest=bare.computed_digest())

    def computed_digest(self) -> str:
        """32 hex digits of SHA-256 over all fields but ``digest``."""
        return hashlib.sha256(msgspec.msgpack.encode(msgspec.structs.replace(self, digest=""))).hexdigest()[:32]

    def span(self, chunk: int) -> tuple[int, int]:
        """First byte of a chunk and the byte after its last."""
        return chunk * self.chunk_bytes, min(self.nbytes, (chunk + 1) * self.chunk_bytes)

    def check(self) -> None:
        """Raises ValueError naming the field unless the manifest is consistent in itself and its digest is right."""
        if self.version < 0 or self.nbytes < 1 or self.chunk_bytes < 1:
            found = f"version {self.version}, nbytes {self.nbytes}, chunk_bytes {self.chunk_bytes}"
            raise ValueError(f"manifest: {found}: must be >= 0, >= 1, >= 1")
        if len(self.chunks) != math.ceil(self.nbytes / self.chunk_bytes):
            raise ValueError(f"manifest: {len(self.chunks)} chunks of {self.chunk_bytes} bytes do not make {self.nbytes} bytes")
        names = set()
        for tensor in self.tensors:
            if tensor.name in names:
                raise ValueError(f"manifest: tensor {tensor.name!r} is listed twice")
            names.add(tensor.name)
            first, last = tensor.offset, tensor.offset + tensor.nbytes
            if first < 0 or tensor.nbytes < 0 or last > self.nbytes or min(tensor.shape, default=0) < 0:
                raise ValueError(f"manifest: tensor {tensor.name!r} (bytes {first} to {last}) lies outside {self.nbytes} bytes")
        if self.digest != self.computed_digest():
            raise ValueError(f"manifest: digest {self.digest} is not that of its content")


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right of one puller to chunks ``start`` up to (not including) ``stop`` of one holder's copy, until ``expires``.

    Of these it pulls those that it has not got yet.
    """

    id: int
    puller: str
    puller_incarnation: int
    source: str
    incarnation: int
    address: tuple[str, int]
    version: int
    digest: str
    nbytes: int
    start: int
    stop: int
    expires: float
    more: bool = False
    """Another source is free for the rest: ask for it while this one sends."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a puller says when it wants a source: how the lease before went, and what it holds."""

    puller: str
    incarnation: int
    lease: int | None = None
    """The lease that this ask ends, None on the first ask and while waiting."""
    using: list[int] = []
    """Leases that the puller goes on with meanwhile; all others of its end."""
    failed: str = ""
    """Why the source of that lease did not deliver; empty: it did."""
    received: int = 0
    """Chunks that came under that lease."""
    version: int = -1
    """Version that ``have`` speaks of; -1: none yet."""
    have: list[int] = []
    """Indices of the checked chunks of ``version``."""


class _Version(msgspec.Struct):
    digest: str
    nbytes: int
    chunks: int


class _Copy(msgspec.Struct):
    """One holder's complete copy of one version."""

    incarnation: int
    address: tuple[str, int]
    relay: bool
    granted: int = 0
    """Chunks given out so far."""
    lease: Lease | None = None
    lacking: int = 0
    """Chunks of the lease that its puller did not have when it was given."""
    shunned: dict[str, float] = msgspec.field(default_factory=dict)
    """Pullers that had trouble with this copy, and until when they get another one if there is one."""


class WeightDirectory:
    """Versions, their holders and the leases on them. All methods are immediate; none calls back."""

    def __init__(
        self, *, lease_seconds: float = 10.0, floor_rate: float = 16 * 2**20, shun_seconds: float = 10.0, first_lease: int = 1
    ) -> None:
        """A lease lasts ``lease_seconds`` plus the time of its bytes at ``floor_rate`` (bytes/s). ``first_lease`` must lie above every id
        that an earlier directory of the same run gave out."""
        self._lease_seconds, self._floor_rate, self._shun_seconds = lease_seconds, floor_rate, shun_seconds
        self._next_lease = first_lease
        self._versions: dict[int, _Version] = {}
        self._copies: dict[int, dict[str, _Copy]] = {}
        self._leases: dict[int, Lease] = {}
        self._dead: dict[str, int] = {}
        self._retired_below = 0

    # versions and holders

    @property
    def newest(self) -> int:
        """Number of the newest version, -1 before the first."""
        return max(self._versions, default=self._retired_below - 1)

    def is_dead(self, role: str, incarnation: int) -> bool:
        return incarnation <= self._dead.get(role, 0)

    def digest(self, version: int) -> str:
        return self._versions[version].digest

    def holders(self, version: int) -> dict[str, int]:
        """Role and incarnation of each holder of a complete copy."""
        return {role: copy.incarnation for role, copy in self._copies.get(version, {}).items()}

    def leases(self) -> list[Lease]:
        return list(self._leases.values())

    def announce(self, version: int, digest: str, nbytes: int, chunks: int, holder: str, incarnation: int, address: tuple[str, int],
                 now: float) -> None:
        """A version is on offer at a source. A source that came back announces the same number with the same digest.

        Raises ValueError: the number lies below the newest and is not on offer, it has another digest, or the incarnation is dead.
        """
        if nbytes < 1 or chunks < 1:
            raise ValueError(f"version {version}: {nbytes} bytes in {chunks} chunks: both must be >= 1")
        self.advance(now)
        known = self._versions.get(version)
        if known is None:
            if version <= self.newest:
                raise ValueError(f"version {version} of {holder}: numbers only rise, the newest is {self.newest}")
            self._check_alive(holder, incarnation)
            self._versions[version] = _Version(digest, nbytes, chunks)
            for old in sorted(self._versions)[:-KEPT_VERSIONS]:
                self.retire(old)
        elif known.digest != digest:
            raise ValueError(f"version {version} of {holder}: digest {digest}, but this number has digest {known.digest} already")
        self.add_holder(version, holder, incarnation, address, relay=False)

    def add_holder(self, version: int, holder: str, incarnation: int, address: tuple[str, int], *, relay: bool = True) -> None:
        """A complete, checked copy exists. Raises ValueError if the incarnation is dead, KeyError if the version is not on offer."""
        self._check_alive(holder, incarnation)
        if version not in self._versions:
            raise KeyError(f"version {version} is not on offer; on offer: {sorted(self._versions)}")
        copies = self._copies.setdefault(version, {})
        if holder in copies and copies[holder].incarnation == incarnation:
            return
        self._bury_older(holder, incarnation)
        copies[holder] = _Copy(incarnation, address, relay)

    def remove_holder(self, role: str, incarnation: int) -> None:
        """This incarnation (and every earlier one) of a role is dead: its copies and its leases end, and it never returns."""
        self._dead[role] = max(incarnation, self._dead.get(role, 0))
        for copies in self._copies.values():
            if role in copies and copies[role].incarnation <= incarnation:
                self._end(copies.pop(role).lease)
        for lease in [one for one in self._leases.values() if one.puller == role and one.puller_incarnation <= incarnation]:
            self._end(lease)

    def drop_copy(self, version: int, holder: str) -> None:
        """The holder lives but holds this version no longer (its buffer is needed)."""
        copy = self._copies.get(version, {}).pop(holder, None)
        if copy is not None:
            self._end(copy.lease)

    def retire(self, version: int) -> list[str]:
        """Takes a version and all older ones off the offer for good. Returns the roles that held them."""
        roles: set[str] = set()
        for old in [number for number in self._versions if number <= version]:
            for role, copy in self._copies.pop(old, {}).items():
                roles.add(role)
                self._end(copy.lease)
            del self._versions[old]
        self._retired_below = max(self._retired_below, version + 1)
        return sorted(roles)

    # leases

    def lease(self, puller: str, puller_incarnation: int, version: int | None, have: Collection[int], now: float) -> Lease | None:
        """A source for chunks that the puller lacks, or None: nothing on offer, all copies busy, or nothing lacking. Ask again.

        ``version`` None means the newest that somebody holds. ``have``: indices of its chunks that the puller holds already.
        Raises ValueError if this incarnation of the puller is dead.
        """
        self._check_alive(puller, puller_incarnation)
        self._bury_older(puller, puller_incarnation)
        self.advance(now)
        if version is None:
            version = self._newest_for(puller)
        if version not in self._versions:
            return None
        about = self._versions[version]
        own = [one for one in self._leases.values() if one.puller == puller and one.version == version]
        taken = {index for one in own for index in range(one.start, one.stop)}
        start = next((index for index in range(about.chunks) if index not in have and index not in taken), None)
        if start is None:
            return None
        stop = next((index for index in range(start, about.chunks) if index in taken), about.chunks)
        wanted = [index for index in range(start, stop) if index not in have]
        others = [(role, copy) for role, copy in self._copies.get(version, {}).items() if role != puller]
        others = [one for one in others if puller not in one[1].shunned] or others
        if any(copy.relay for _, copy in others):
            others = [one for one in others if one[1].relay or one[1].granted + len(wanted) <= SOURCE_COPIES * about.chunks]
        free = [one for one in others if one[1].lease is None]
        if not free:
            return None
        role, copy = min(free, key=lambda one: (not one[1].relay, one[1].granted, one[0]))
        more = not copy.relay and min(len(free), len(wanted)) > 1
        if more:  # no relay is free: this source's share
            wanted = wanted[:math.ceil(len(wanted) / len(free))]
            stop = wanted[-1] + 1
        lease = Lease(id=self._next_lease, puller=puller, puller_incarnation=puller_incarnation, source=role, incarnation=copy.incarnation,
                      address=copy.address, version=version, digest=about.digest, nbytes=about.nbytes, start=start, stop=stop,
                      expires=now + self._duration(about, stop - start), more=more)
        self._next_lease += 1
        copy.lease, copy.lacking, copy.granted = lease, len(wanted), copy.granted + len(wanted)
        self._leases[lease.id] = lease
        return lease

    def answer(self, ask: Ask, now: float) -> Lease | None:
        """Ends the lease that ``ask`` speaks of and gives a source, or None: ask again later.

        It is for the version of the leases in use, without any for the newest on offer.
        """
        if ask.lease is not None and ask.failed:
            self.fail(ask.lease, ask.received, now)
        own = [lease for lease in self._leases.values() if lease.puller == ask.puller]
        for lease in own:
            if lease.id not in ask.using:
                self._end(lease)
        version = max((lease.version for lease in own if lease.id in ask.using), default=self._newest_for(ask.puller))
        return self.lease(ask.puller, ask.incarnation, version, frozenset(ask.have if ask.version == version else ()), now)

    def renew(self, lease_id: int, now: float) -> Lease | None:
        """The lease with a later end, or None: it has ended, stop using the source."""
        self.advance(now)
        lease = self._leases.get(lease_id)
        if lease is None:
            return None
        renewed = msgspec.structs.replace(lease, expires=now + self._duration(self._versions[lease.version], lease.stop - lease.start))
        self._leases[lease_id] = self._copies[lease.version][lease.source].lease = renewed
        return renewed

    def release(self, lease_id: int) -> None:
        """The puller has got what it leased. Unknown ids are those of leases that ended before: nothing to do."""
        self._end(self._leases.get(lease_id))

    def fail(self, lease_id: int, received: int, now: float) -> None:
        """The source did not deliver (``received`` chunks came); for a while this puller gets another one where there is one."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            copy = self._copies[lease.version][lease.source]
            copy.granted -= max(0, copy.lacking - received)
            copy.shunned[lease.puller] = now + self._shun_seconds
            self._end(lease)

    def commit(self, puller: str, incarnation: int, version: int, digest: str, address: tuple[str, int] | None) -> None:
        """The puller runs on this version now; with an address it serves it as a relay, and its copies of other versions are gone.

        Raises ValueError if the digest differs from that of the number, or the incarnation is dead.
        """
        self._check_alive(puller, incarnation)
        for lease in [one for one in self._leases.values() if one.puller == puller]:
            self._end(lease)
        for other in [number for number, copies in self._copies.items() if number != version and puller in copies]:
            self.drop_copy(other, puller)
        known = self._versions.get(version)
        if known is None:
            return  # retired meanwhile: right to run on, not on offer any more
        if known.digest != digest:
            raise ValueError(f"{puller} committed version {version} with digest {digest}, but this number has digest {known.digest}")
        if address is not None:
            self.add_holder(version, puller, incarnation, address)

    # time

    def next_deadline(self) -> float | None:
        """When ``advance`` has something to do next, or None."""
        times = [lease.expires for lease in self._leases.values()]
        times += [until for copies in self._copies.values() for copy in copies.values() for until in copy.shunned.values()]
        return min(times, default=None)

    def advance(self, now: float) -> list[Lease]:
        """Ends what is due at ``now``. Returns the leases that expired."""
        expired = [lease for lease in self._leases.values() if lease.expires <= now]
        for lease in expired:
            self._end(lease)
        for copies in self._copies.values():
            for copy in copies.values():
                copy.shunned = {puller: until for puller, until in copy.shunned.items() if until > now}
        return expired

    def _newest_for(self, puller: str) -> int:
        return max((number for number, copies in self._copies.items() if any(role != puller for role in copies)), default=-1)

    def _duration(self, about: _Version, chunks: int) -> float:
        return self._lease_seconds + about.nbytes * chunks / about.chunks / self._floor_rate

    def _check_alive(self, role: str, incarnation: int) -> None:
        if self.is_dead(role, incarnation):
            raise ValueError(f"{role} incarnation {incarnation} is dead; the next one is {self._dead[role] + 1}")

    def _bury_older(self, role: str, incarnation: int) -> None:
        """Who hears of a new incarnation knows that the earlier ones are gone (fencing)."""
        if incarnation > 1 and self._dead.get(role, 0) < incarnation - 1:
            self.remove_holder(role, incarnation - 1)

    def _end(self, lease: Lease | None) -> None:
        if lease is not None and self._leases.pop(lease.id, None) is not None:
            copy = self._copies.get(lease.version, {}).get(lease.source)
            if copy is not None and copy.lease is not None and copy.lease.id == lease.id:
                copy.lease = None
