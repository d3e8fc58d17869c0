"""A committed snapshot on its way from one state keeper to another: the same pull as for weights, on a server of its own.

Promises: what is offered is a private copy, so that no trainer ever waits for it; what was pulled is checked chunk by chunk; a keeper
that is gone from one end of the pull is reported by the other. Leaves out when and why (state_keeper.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..core.events import Event, PeerGone
from ..core.weights import Ask, Lease, Manifest
from ..errors import WeightsError
from ..transport.manifest import CHUNK_BYTES, checksums
from .snapshots import Kept

if TYPE_CHECKING:
    from ..transport.puller import Puller
    from ..transport.server import WeightServer
    from .role import RoleSpec


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    kept: Kept
    source: str
    incarnation: int
    address: tuple[str, int]
    digest: str
    """Of the manifest of weights and recovery state together."""


class Copier:
    def __init__(self, spec: RoleSpec, emit: Callable[[Event], None]) -> None:
        """``emit`` may be called from any thread and only queues. SnapshotCopied tells of a copy, so of its pull it gets PeerGone alone."""
        self._spec = spec
        self._emit = emit
        self._server: WeightServer | None = None
        self._puller: Puller | None = None
        self._offering = threading.Lock()

    def offer(self, kept: Kept, image: np.ndarray) -> Offer:
        """On offer from now on, in place of the one before. ``image`` belongs to the copier."""
        from ..transport.server import WeightServer

        with self._offering:
            spec = self._spec
            self._server = self._server or WeightServer(
                spec.ip, spec.secret(), role=spec.role, incarnation=spec.incarnation, on_event=self._on_event
            )
            manifest = Manifest.build(
                version=kept.step, tensors=[], nbytes=kept.nbytes, chunk_bytes=CHUNK_BYTES, chunks=checksums(image, CHUNK_BYTES)
            )
            for version in self._server.versions:
                self._server.retire(version, timeout=0.0)
            self._server.stage(manifest, image)
            return Offer(
                kept=kept, source=spec.role, incarnation=spec.incarnation, address=self._server.address, digest=manifest.digest
            )

    def pull(self, offer: Offer, seconds: float) -> tuple[Kept, np.ndarray]:
        """(record, image), each chunk checked. Raises WeightsError when the source does not deliver."""
        from ..transport.puller import Puller

        spec = self._spec
        self._puller = self._puller or Puller(spec.secret(), role=spec.role, incarnation=spec.incarnation, on_event=self._on_event)
        nbytes = offer.kept.nbytes
        lease = Lease(
            id=1,
            puller=spec.role,
            puller_incarnation=spec.incarnation,
            source=offer.source,
            incarnation=offer.incarnation,
            address=offer.address,
            version=offer.kept.step,
            digest=offer.digest,
            nbytes=nbytes,
            start=0,
            stop=-(-nbytes // CHUNK_BYTES),
            expires=seconds,
        )

        def only_source(ask: Ask) -> Lease:
            if ask.failed:
                raise WeightsError(f"{offer.source} incarnation {offer.incarnation}, step {offer.kept.step}: {ask.failed}")
            return lease

        return offer.kept, self._puller.pull(only_source, deadline_s=seconds).buffer

    def _on_event(self, event: Event) -> None:
        if isinstance(event, PeerGone):
            self._emit(event)

    def recycle(self, image: np.ndarray) -> None:
        if self._puller is not None:
            self._puller.recycle(image)
