"""The one thread of a process that speaks UCX: its own asyncio loop, never the notebook kernel's, and ucxx's single context.

Servers and pullers of a process share it. It starts at the first use, after which the process must not fork.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from robustrl.transport import settings

T = TypeVar("T")
_START_SECONDS = 30.0
_lane: Lane | None = None
_guard = threading.Lock()


class Lane:
    """A running loop in a daemon thread. Use ``get()``."""

    def __init__(self) -> None:
        self.ucxx = settings.import_ucxx()
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._tags = itertools.count(int.from_bytes(os.urandom(3), "big") << 36)
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="robustrl-ucx", daemon=True)
        self._thread.start()
        self._ready.result(_START_SECONDS)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs the coroutine in the lane; callable from any other thread."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("called from the UCX thread itself, which would wait for ever: call from another thread")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """As ``submit``, and waits for the result. Raises TimeoutError after ``timeout`` seconds (the coroutine is cancelled)."""
        future = self.submit(coroutine)
        try:
            return future.result(timeout)
        finally:
            future.cancel()

    def worker_address(self) -> bytes:
        """Where UCX of this process can be reached; unique to the process."""
        return bytes(memoryview(self.ucxx.get_worker_address()))

    async def endpoint(self, worker_address: bytes) -> Any:
        """A UCX endpoint, with error handling, to the process with that address."""
        return await self.ucxx.create_endpoint_from_worker_address(self.ucxx.get_ucx_address_from_buffer(worker_address))

    def next_tag(self) -> int:
        """A number for one receive of this process, never used again: what arrives late for an older receive matches nothing."""
        return next(self._tags)

    def tag(self, number: int) -> Any:
        return self.ucxx.types.Tag(number)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._init)
        self.loop.run_forever()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    def _init(self) -> None:
        try:
            self.ucxx.init(progress_mode="blocking")
            self.ucxx.continuous_ucx_progress(self.loop)
        except Exception as error:  # handed to the thread that waits in __init__
            self._ready.set_exception(error)
        else:
            self._ready.set_result(None)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)


def get() -> Lane:
    """The lane of this process. Raises RuntimeError in a process forked after its start, MissingExtra without ucxx."""
    global _lane
    with _guard:
        if _lane is None:
            _lane = Lane()
            atexit.register(_lane.stop)
        if _lane.pid != os.getpid():
            raise RuntimeError("this process was forked after UCX had started in its parent: start it with spawn or forkserver")
        return _lane
