"""A role's events on their way to the host: numbered, kept until acknowledged, sent again after a reconnect."""

from __future__ import annotations

import threading
import time
from collections import deque

from ..core import events as ev
from ..errors import RobustRLError, WaitTimeout
from .wire import HostClient


class Emitter:
    """``emit`` may be called from any thread and only queues; a thread of its own sends in batches and waits for the host's word.

    An event leaves the queue when the host has acknowledged its number, so a host that dies between receipt and writing loses nothing that
    the log claims to hold; the host drops what it sees twice.
    """

    def __init__(self, host: HostClient, source: str, incarnation: int, *, batch: int = 256, deadline: float = 30.0) -> None:
        self._host, self._source, self._incarnation, self._batch, self._deadline = host, source, incarnation, batch, deadline
        self._queue: deque[ev.Emitted] = deque()
        self._changed = threading.Condition()
        self._n = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="emitter", daemon=True)
        self._thread.start()

    def emit(self, *events: ev.Event) -> None:
        """Those of one call leave in one batch, as far as one holds them."""
        with self._changed:
            for event in events:
                self._n += 1
                self._queue.append(ev.Emitted(self._source, self._incarnation, self._n, time.monotonic(), event))
            self._changed.notify_all()

    def flush(self, timeout: float) -> None:
        """Wait until all is acknowledged. Raises WaitTimeout naming how many events are not."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._queue or self._failure, timeout) or self._failure:
                raise WaitTimeout(
                    f"{self._source}: {len(self._queue)} events not acknowledged by the host within {timeout:g} s ({self._failure})"
                )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                batch = [self._queue[i] for i in range(min(self._batch, len(self._queue)))]
            try:
                self._host.emit(batch, timeout=self._deadline)
            except WaitTimeout:  # the host was stopped for a while, or is busy; what it has by then it recognises
                continue
            except RobustRLError as error:  # the host is gone: the client's on_disconnect decides
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                for _ in batch:
                    self._queue.popleft()
                self._changed.notify_all()
