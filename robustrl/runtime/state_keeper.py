"""A state keeper: holds the trainer's last committed optimizer step outside the trainer, and serves its weights.

state_keeper-0, on the trainer's node, is written to: the trainer puts weights and recovery state into the free one of two slots of shared
memory; `commit` computes the checksums, makes the slot the staged version and frees the other one when no pull of it is under way any more.
A trainer that dies while writing leaves the last committed slot untouched, and pulls go on. state_keeper-1, where there is one, lives on
another node and pulls each committed step after its commit, beside the trainer: copying.py. In a later life a keeper takes up what lies in
shared memory, else what its peer has, each checked, else the trainer's next step.
"""

from __future__ import annotations

import asyncio
import time

from ..core import events as ev
from ..core.roles import Phase
from ..core.weights import Manifest
from ..errors import PeerDied, RobustRLError, WaitTimeout, WeightsError
from .copying import Copier, Offer
from .role import UCX_ROOM, Role
from .snapshots import Kept, Slot, SlotStore, Snapshot

LOCAL, PEER, DISK = "local", "peer", "disk"
_PEER_SECONDS = 10.0
"""In which the peer must give its copy to a keeper that has none."""
_PAUSE = 1.0
_PRIMARY, _COPY = "state_keeper-0", "state_keeper-1"


class StateKeeper(Role):
    async def on_open(self) -> None:
        self.choose_transport()
        from ..transport.server import WeightServer

        self._store = SlotStore(
            self.spec.role,
            self.spec.incarnation,
            self.spec.node,
            shm_dir=self.spec.shm_dir,
            temp_dir=self.spec.temp_dir,
            reserve=UCX_ROOM * self.config.rollouts,  # they start UCX at about this time
            warn=lambda text: self.emit(ev.WarningRaised(text=text)),
        )
        self._source = LOCAL
        """Where the held state came from."""
        self._server = WeightServer(
            self.spec.ip, self.spec.secret(), role=self.spec.role, incarnation=self.spec.incarnation, on_event=self.emit
        )
        self._copier = Copier(self.spec, self.emit)
        self._staged: Manifest | None = None
        self._announced = -1
        """Newest version that this life announced."""
        self._logged = self._known_version = -1
        self._known_digest = ""
        self._peer_there: bool | None = None
        self._busy = asyncio.Lock()
        self._changed = asyncio.Condition()
        if self.spec.incarnation > 1:
            await self._take_up()
        if self.spec.role == _PRIMARY:
            self.spawn(self._copy_to_peer())

    # -- the trainer's calls ---

    async def free_slot(self, slots: list[Slot], weights_bytes: int, state_bytes: int) -> tuple[int, list[Slot]]:
        """(number, slots): the one that may be written now; pulls of what it held have ended or were cut off.

        ``slots`` are those that the trainer knows; the answer's have at least the wanted sizes.
        """
        if slots and not self._store.slots:
            self._store.adopt(slots)
        self._store.allocate(weights_bytes, state_bytes)
        if self._staged is not None:
            for version in self._server.versions:
                if version < self._staged.version:
                    await asyncio.to_thread(self._server.retire, version)
        return self._store.free, self._store.slots

    async def commit(self, snapshot: Snapshot, slots: list[Slot], redone: bool) -> Kept:
        """Make the filled slot the committed state and the staged version; announced when this returns. Asked again: no change.

        ``redone``: the log calls this step committed; no copy of it was left, and it was made again.
        """
        async with self._busy:
            if self._store.kept is None or self._store.kept.step < snapshot.step:
                self.page.phase = Phase.RUNNING
                self._store.adopt(slots)
                kept = await asyncio.to_thread(self._store.commit, snapshot)
                self._source = LOCAL
                if redone:
                    await self._compare(kept)
                await asyncio.to_thread(self._publish, kept)
                self.page.phase = Phase.IDLE
        await self._tell_changed()
        assert self._store.kept is not None
        return self._store.kept

    async def _compare(self, kept: Kept) -> None:
        """Whether a step that was made again is the version that it was."""
        digests = (await self.ask_host("known"))["digests"]
        if digests.get(str(kept.step)) == kept.manifest.digest:
            self.emit(self._committed_event(kept))
        else:
            text = f"step {kept.step}, made again, is not the version {kept.step} that was announced, whose policy is lost"
            self.emit(ev.WarningRaised(text=text))

    async def wait_committed(self, step: int, wait: float) -> bool:
        """Whether ``step`` or a later one is committed, at the latest after ``wait`` seconds."""

        def there() -> bool:
            return self._store.kept is not None and self._store.kept.step >= step

        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(there), wait)
            except TimeoutError:
                pass
        return there()

    async def restore(self, role: str, incarnation: int) -> tuple[Kept | None, list[Slot], str, list[str]]:
        """(record, slots, source, refusals) of the newest committed step that passes its check, for a life of a trainer.

        No record: neither here nor at the peer there is one, and ``refusals`` says why.
        """
        refusals: list[str] = []
        async with self._busy:
            if self._store.kept is None:
                refusals.append(f"{LOCAL}: {self.spec.role} holds none")
            elif fault := await asyncio.to_thread(self._store.fault):
                refusals.append(self._refuse(role, incarnation, self._store.kept.step, self._source, fault))
                await asyncio.to_thread(self._unstage)
                self._store.discard()
            if self._store.kept is None:
                await self._refill(role, incarnation, refusals)
            return self._store.kept, self._store.slots, self._source, refusals

    # -- a later life ---

    async def _take_up(self) -> None:
        known = await self.ask_host("known")
        self._logged, self._known_version, self._known_digest = known["committed"], known["version"], ""
        if known["version"] >= 0:
            self._known_digest = known["digests"][str(known["version"])]
        step, fault = await asyncio.to_thread(self._store.take_up)
        if not fault:
            assert self._store.kept is not None
            await asyncio.to_thread(self._publish, self._store.kept)
            return
        if step >= 0:
            self._refuse(self.spec.role, self.spec.incarnation, step, LOCAL, fault)
        await self._refill(self.spec.role, self.spec.incarnation, [])

    async def _refill(self, role: str, incarnation: int, refusals: list[str]) -> None:
        """From the peer, if it has a copy that passes its check; adds to ``refusals`` why not."""
        if not await self._has_peer():
            refusals.append(f"{PEER}: this job has none")
            return
        peer = await self.peer(self._peer_name)
        try:
            offer, step, fault = await peer.call("offer", deadline=_PEER_SECONDS, again=True)
            if offer is not None:
                kept, image = await asyncio.to_thread(self._copier.pull, offer, _PEER_SECONDS)
                kept = await asyncio.to_thread(self._store.put, kept, image)
                self._copier.recycle(image)
                self._source = PEER
                await asyncio.to_thread(self._publish, kept)
                return
        except (PeerDied, WaitTimeout, WeightsError) as error:
            step, fault = -1, str(error)
        refusals.append(self._refuse(role, incarnation, step, PEER, fault) if step >= 0 else f"{PEER}: {fault}")

    def _refuse(self, role: str, incarnation: int, step: int, source: str, reason: str) -> str:
        self.emit(ev.SnapshotRefused(role=role, incarnation=incarnation, step=step, source=source, reason=reason))
        return f"{source}: {reason}"

    # -- copies ---

    @property
    def _peer_name(self) -> str:
        return _COPY if self.spec.role == _PRIMARY else _PRIMARY

    async def _has_peer(self) -> bool:
        if self._peer_there is None:
            try:
                await self.ask_host("incarnation", deadline=_PEER_SECONDS, role=self._peer_name)
                self._peer_there = True
            except (WaitTimeout, PeerDied):
                return True
            except RobustRLError:
                self._peer_there = False
        return self._peer_there

    async def _copy_to_peer(self) -> None:
        """The newest committed step, whenever the peer does not have it; a step that is over before its turn is left out."""
        done = 0  # all roles are there once the first step is committed

        def newer() -> bool:
            return self._store.kept is not None and self._store.kept.step > done

        while True:
            async with self._changed:
                await self._changed.wait_for(newer)
            if not await self._has_peer():
                return
            try:
                offer, step, _ = await self.offer()
                if offer is not None:
                    peer = await self.peer(self._peer_name)
                    await peer.call("take", offer, deadline=2 * self.deadlines.pull)
                    done = step
                    continue
            except (PeerDied, WaitTimeout, WeightsError) as error:
                self.log.warning("no copy at %s: %s", self._peer_name, error)
            await asyncio.sleep(_PAUSE)

    async def offer(self) -> tuple[Offer | None, int, str]:
        """(offer, step, fault): what is held, checked, for the peer to pull; or why there is none."""
        kept = self._store.kept
        if kept is None:
            return None, -1, f"{self.spec.role} holds none"
        image = await asyncio.to_thread(lambda: self._store.image(kept).copy())
        if fault := await asyncio.to_thread(kept.fault, image):
            if self._store.kept is not None and self._store.kept.step > kept.step:
                return await self.offer()  # the slot was written to meanwhile
            return None, kept.step, fault
        return await asyncio.to_thread(self._copier.offer, kept, image), kept.step, ""

    async def take(self, offer: Offer) -> None:
        """Pull the offered step, check it and hold it. Raises WeightsError."""
        began = time.monotonic()
        async with self._busy:
            if self._store.kept is not None and self._store.kept.step >= offer.kept.step:
                return
            self.page.phase = Phase.RUNNING
            kept, image = await asyncio.to_thread(self._copier.pull, offer, self.deadlines.pull)
            kept = await asyncio.to_thread(self._store.put, kept, image)
            self._copier.recycle(image)
            self.page.phase = Phase.IDLE
        self.page.version = self.page.step = kept.step
        seconds = time.monotonic() - began
        self.emit(
            ev.SnapshotCopied(
                step=kept.step, source=offer.source, holder=self.spec.role, digest=kept.digest, bytes=kept.nbytes, seconds=seconds
            )
        )

    # -- what others get ---

    def _publish(self, kept: Kept) -> None:
        """Say what the log lacks, and serve the weights where they are those that were announced under this number, or are to be."""
        manifest = kept.manifest
        self.page.version = self.page.step = kept.step
        if self.spec.role != _PRIMARY:
            return
        if kept.step > self._logged:
            self._logged = kept.step
            self.emit(self._committed_event(kept))
        if kept.step > self._known_version:
            self._known_version, self._known_digest = kept.step, manifest.digest
        if (kept.step, manifest.digest) == (self._known_version, self._known_digest):
            self._stage(kept)
            self._announce(manifest)

    def _committed_event(self, kept: Kept) -> ev.OptimizerStepCommitted:
        return ev.OptimizerStepCommitted(
            step=kept.step,
            version=kept.step,
            digest=kept.manifest.digest,
            snapshot_digest=kept.digest,
            consumed=kept.snapshot.consumed,
            batch=kept.snapshot.batch,
            bytes=kept.nbytes,
            holder=self.spec.role,
            incarnation=self.spec.incarnation,
        )

    def _stage(self, kept: Kept) -> None:
        self._server.retire(kept.step, timeout=0.0)  # the same bytes from another place
        self._server.stage(kept.manifest, self._store.image(kept)[: kept.manifest.nbytes])
        self._staged = kept.manifest

    def _unstage(self) -> None:
        """Both slots are about to be written to: what is held is no good, and the version before it may be served still."""
        for version in self._server.versions:
            self._server.retire(version)
        self._staged = None

    def _announce(self, manifest: Manifest) -> None:
        if manifest.version <= self._announced:
            return
        self._announced = manifest.version
        host, port = self._server.address
        self.emit(
            ev.VersionAnnounced(
                version=manifest.version,
                digest=manifest.digest,
                bytes=manifest.nbytes,
                chunks=len(manifest.chunks),
                holder=self.spec.role,
                incarnation=self.spec.incarnation,
                address=f"{host}:{port}",
            )
        )

    def stored(self, fault: str) -> memoryview:
        """The committed weights, which are served, or the recovery state behind them."""
        if (kept := self._store.kept) is None:
            raise RobustRLError(f"{self.spec.role} has nothing committed yet")
        image, split = self._store.image(kept), kept.manifest.nbytes
        return memoryview(image[:split] if fault == "corrupt_weights" else image[split:])

    async def _tell_changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()
