"""The one thread of a process that speaks UCX: its own asyncio loop, never the notebook kernel's, and one UCX worker.

Servers and pullers of a process share it. It starts at the first use, after which the process must not fork. It sleeps on UCX's event
descriptor and polls only while bytes flow: ucxx's own asyncio layer spins on every outstanding request, which takes a core from the
engine or the trainer beside it. Here is the only use of ucxx's lower layer.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from robustrl.transport import settings

T = TypeVar("T")
_START_SECONDS = 30.0
_SPIN_SECONDS = 100e-6
"""How long nothing may move before the thread sleeps."""
_SLICE_SECONDS = 500e-6
"""How long bytes move before finished requests are looked at: what came is checked, and more is asked for, while the rest comes."""
_ROUND_SECONDS = 25e-6
"""A round that took longer copied a large piece by itself (cma); shorter ones are left to UCX until nothing moves."""
_TICK_SECONDS = 0.5
"""Progress is made this often while a request is open, should an event ever be lost."""
_lane: Lane | None = None
_guard = threading.Lock()


class Endpoint:
    """A way to one peer's worker. Its requests end with ``UCXError`` when the peer is known to be gone.

    Closing it with a send under way to a peer that breaks the connection just then crashed UCX (a segmentation fault in the survivor,
    over tcp), so ``leave`` waits until UCX has ended what is under way.
    """

    def __init__(self, lane: Lane, raw: Any) -> None:
        self._lane, self._raw = lane, raw
        self._open = 0
        self._left = False

    async def send(self, view: Any, tag: int) -> None:
        """Returns when the bytes may be overwritten. If it is cancelled UCX may still read them."""
        await self._request("tag_send", view, tag)

    async def receive(self, view: Any, tag: int) -> None:
        """Fills ``view``. If it is cancelled the memory must not be used again: UCX may still write to it."""
        await self._request("tag_recv", view, tag, self._lane.api.UCXXTagMaskFull)

    def leave(self, patience: float | None) -> None:
        """No more requests. The endpoint closes when UCX has ended what is under way, and after ``patience`` s (None: never) anyway."""
        self._left = True
        self._close_if_idle()
        if self._raw is not None and patience is not None:
            self._lane.loop.call_later(patience, self._close)

    def _request(self, kind: str, view: Any, tag: int, *mask: Any) -> asyncio.Future[None]:
        if self._left:
            raise self._lane.api.UCXCloseError("endpoint left")
        self._raw.raise_on_error()
        request = getattr(self._raw, kind)(self._lane.array(view), self._lane.api.UCXXTag(tag), *mask)
        self._open += 1
        return self._lane.watch(request, view, self._ended)

    def _ended(self) -> None:
        self._open -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._left and not self._open:
            self._close()

    def _close(self) -> None:
        if self._raw is not None:
            raw, self._raw = self._raw, None
            raw.close_blocking(period=10**8, max_attempts=1)
            raw.remove_close_callback()
            self._lane.bury()


class _Request(NamedTuple):
    raw: Any
    memory: Any
    """Keeps it alive while UCX may touch it."""
    ended: Callable[[], None]


class Lane:
    """A running loop in a daemon thread. Use ``get()``."""

    def __init__(self) -> None:
        settings.import_ucxx()
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array

        self.api, self.array = libucxx, Array
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._tags = itertools.count(int.from_bytes(os.urandom(3), "big") << 36)
        self._open: dict[asyncio.Future[None], _Request] = {}
        """By its future, each request that UCX has not finished."""
        self._pumping: asyncio.Handle | None = None
        self._moved = 0.0
        self._worker: Any = None
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="robustrl-ucx", daemon=True)
        self._thread.start()
        try:
            self._ready.result(_START_SECONDS)
        except Exception:  # whatever UCX did not start for: there is no lane, and each try would leave a thread
            self.stop()
            raise

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Runs the coroutine in the lane, from any other thread. Raises TimeoutError after ``timeout`` seconds and cancels it."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("called from the UCX thread itself, which would wait for ever: call from another thread")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout)
        finally:
            future.cancel()

    def worker_address(self) -> bytes:
        """Where UCX of this process can be reached; unique to the process."""
        return bytes(memoryview(self._worker.address))

    def endpoint(self, worker_address: bytes) -> Endpoint:
        """A way to the process with that address, with error handling. Raises UCXError if the address is none."""
        address = self.api.UCXAddress.create_from_buffer(worker_address)
        raw = self.api.UCXEndpoint.create_from_worker_address(self._worker, address, True)
        self.wake()
        return Endpoint(self, raw)

    def next_tag(self) -> int:
        """A number for one receive of this process, never used again: what arrives late for an older receive matches nothing."""
        return next(self._tags)

    def watch(self, raw: Any, memory: Any, ended: Callable[[], None]) -> asyncio.Future[None]:
        """The outcome of a request as a future; ``ended`` is called when UCX is done with it, even if nobody awaits it any more."""
        future: asyncio.Future[None] = self.loop.create_future()
        self._open[future] = _Request(raw, memory, ended)
        self.wake()
        return future

    # progress

    def wake(self) -> None:
        """Something was started: poll for a while."""
        self._moved = time.monotonic()
        self._event()

    def _event(self) -> None:
        """UCX's descriptor is readable, until the worker is armed: that alone is no movement, no reason to go on polling."""
        if self._pumping is None:
            self._pumping = self.loop.call_soon(self._pump)

    def bury(self) -> None:
        """Ends the requests of endpoints that are known to be broken or were closed."""
        self._worker.cancel_inflight_requests()
        self.wake()

    def _pump(self) -> None:
        """A slice of progress; goes on while bytes move, then sleeps until the next event."""
        self._pumping = None
        began = now = time.monotonic()
        while now - began < _SLICE_SECONDS and self._worker.progress_once():
            if time.monotonic() - now < _ROUND_SECONDS:
                self._worker.progress()
            self._moved = now = time.monotonic()
        self._settle()
        if now - self._moved < _SPIN_SECONDS or not self._worker.arm():
            self._pumping = self.loop.call_soon(self._pump)

    def _settle(self) -> None:
        done = [future for future, request in self._open.items() if request.raw.completed]
        for future in done:
            request = self._open.pop(future)
            request.ended()
            if future.done():
                continue  # its waiter was cancelled
            try:
                request.raw.check_error()
            except self.api.UCXError as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def _tick(self) -> None:
        if self._open:
            self.bury()
        self.loop.call_later(_TICK_SECONDS, self._tick)

    # life

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._init)
        self.loop.run_forever()
        if self._worker is not None:
            self.loop.remove_reader(self._worker.epoll_file_descriptor)
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    def _init(self) -> None:
        try:
            self._context = self._open_context()
            worker = self.api.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
            worker.init_blocking_progress_mode()
            self._worker = worker
            self.loop.add_reader(self._worker.epoll_file_descriptor, self._event)
            self._tick()
            self.wake()
        except Exception as error:  # handed to the thread that waits in __init__
            self._ready.set_exception(error)
        else:
            self._ready.set_result(None)

    def _open_context(self) -> Any:
        try:
            return self.api.UCXContext()
        except self.api.UCXError as error:
            raise RuntimeError(f"UCX does not start ({error}); it needs its cache of registrations (UCX_RCACHE_ENABLE=y), and that needs "
                               "memory hooks: UCX_MEM_MMAP_HOOK_MODE must not be none, nor a sandbox forbid them") from error

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
