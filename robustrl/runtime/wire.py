"""The host's socket: what goes over it, and both ends of it.

A frame is a 4-byte big-endian length, at most `MAX_FRAME`, and that many bytes of msgpack: one of the messages below. The first frame
of a connection is a `Hello`; nothing else is read from a peer that has not shown the token. Promised: a frame is delivered whole or the
connection ends; every wait has a deadline; an error that a host verb raises arrives as the same class where it is one of ours. Left out:
encryption (a unix socket of mode 0600, or TCP inside a trusted network with a token), reconnecting, and what the verbs mean.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import os
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Literal, Union

import msgspec

from .. import errors
from ..core.events import Emitted
from ..errors import ConfigError, HostGone, RobustRLError, WaitTimeout

MAX_FRAME = 64 << 20
"""Bytes."""
_MAX_HELLO = 4096
_HELLO_DEADLINE = 10.0
_SEND_DEADLINE = 10.0
_LENGTH = struct.Struct(">I")


class _Message(msgspec.Struct, tag_field="m"):
    pass


class Hello(_Message, tag="hello"):
    kind: Literal["client", "role"] = "client"
    token: str | None = None


class Call(_Message, tag="call"):
    id: int
    verb: str
    args: dict[str, Any] = {}


class Failure(msgspec.Struct, frozen=True):
    """An error as data; ``args`` rebuild those of our classes that take more than a text."""

    type: str
    message: str
    args: list[Any] = []

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        args = error.__reduce__()[1] if isinstance(error, ConfigError) else ()
        return cls(type(error).__name__, str(error), [arg if isinstance(arg, str | int | float | None) else repr(arg) for arg in args])

    def error(self) -> RobustRLError:
        kind = getattr(errors, self.type, None)
        if isinstance(kind, type) and issubclass(kind, RobustRLError):
            return kind(*(self.args or [self.message]))
        return RobustRLError(f"{self.type}: {self.message}")


class Result(_Message, tag="result"):
    id: int
    value: Any = None
    error: Failure | None = None


class Subscribe(_Message, tag="subscribe"):
    """Asks for the log's entries with a seq above ``after``: the history first, in batches, then each as it is written."""

    after: int = 0


class Entries(_Message, tag="entries"):
    lines: list[bytes]
    """Lines of ``events.jsonl``, without newline, in order."""


class Emit(_Message, tag="emit"):
    events: bytes
    """msgpack of list[Emitted], all of one source and incarnation."""


class Ack(_Message, tag="ack"):
    """All events of this source and incarnation up to number ``n`` are in the log."""

    source: str
    incarnation: int
    n: int


class Closing(_Message, tag="closing"):
    """Last frame of a host that ends the connection on purpose."""

    reason: str


Message = Union[Hello, Call, Result, Subscribe, Entries, Emit, Ack, Closing]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise RobustRLError(f"a {type(message).__name__} of {len(body)} bytes is too large: a frame holds at most {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def _body_length(header: bytes, limit: int) -> int:
    length: int = _LENGTH.unpack(header)[0]
    if length > limit:
        raise RobustRLError(f"a frame of {length} bytes was announced: at most {limit} are allowed here")
    return length


def _decode(body: bytes) -> Message:
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:  # a ValidationError is one too
        raise RobustRLError(f"a frame of {len(body)} bytes is no message of this protocol: {error}") from None


def parse_address(address: str) -> tuple[str, Any]:
    """``unix:/path`` -> ("unix", path); ``tcp:host:port`` -> ("tcp", (host, port)). Raises ConfigError."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest.startswith("/"):
        return scheme, rest
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isdecimal() and int(port) < 65536:
        return scheme, (host, int(port))
    raise ConfigError("address", address, "must be unix:/PATH or tcp:HOST:PORT")


# -- the host's side: asyncio --------------------------------------------------------------------------------------------------------------


async def read_message(reader: asyncio.StreamReader, limit: int = MAX_FRAME) -> Message | None:
    """The next message, or None when the peer closed between two frames. Raises RobustRLError for what is no frame, HostGone inside one."""
    try:
        header = await reader.readexactly(_LENGTH.size)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise HostGone("the connection ended inside a frame") from None
        return None
    try:
        return _decode(await reader.readexactly(_body_length(header, limit)))
    except asyncio.IncompleteReadError:
        raise HostGone("the connection ended inside a frame") from None


def write_message(writer: asyncio.StreamWriter, message: Message) -> None:
    """Queues the message; the caller awaits ``writer.drain()`` with a deadline where much may queue up."""
    writer.write(encode_frame(message))


Handler = Callable[[Hello, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def listen(address: str, handler: Handler, token: str | None = None) -> asyncio.Server:
    """A listening server that calls ``handler`` for each peer that said a valid Hello, and closes the connection when it returns.

    A unix socket has mode 0600 before anyone can connect. TCP needs a token; port 0 takes a free one (see ``server.sockets``).
    """
    scheme, place = parse_address(address)
    if scheme == "tcp" and not token:
        raise ConfigError("token", token, "a host that listens on TCP needs a token")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                hello = await asyncio.wait_for(read_message(reader, _MAX_HELLO), _HELLO_DEADLINE)
            except (RobustRLError, OSError, TimeoutError):
                return
            if not isinstance(hello, Hello) or (token and not hmac.compare_digest((hello.token or "").encode(), token.encode())):
                write_message(writer, Closing("a valid hello with the job's token is needed first"))
                return
            await handler(hello, reader, writer)
        except asyncio.CancelledError:
            pass  # the loop ends, and this is the outermost frame; asyncio of 3.11 would log a cancelled connection as an error
        finally:
            writer.close()

    if scheme == "tcp":
        return await asyncio.start_server(connected, *place)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(place)
        os.chmod(place, 0o600)  # before listen(): until then a connect is refused
        return await asyncio.start_unix_server(connected, sock=sock)
    except BaseException:
        sock.close()
        raise


# -- the kernel's and the roles' side: blocking calls, one private thread ------------------------------------------------------------------


class HostClient:
    """A line to a job's host, usable from any thread; a private daemon thread reads, and runs the callbacks.

    ``on_disconnect()`` is called once when the connection ends for any reason but `close`; ``reason`` then says why. Raises HostGone when
    nobody listens at ``address`` or the host refuses the token.
    """

    def __init__(
        self,
        address: str,
        token: str | None = None,
        *,
        kind: Literal["client", "role"] = "client",
        on_disconnect: Callable[[], None] | None = None,
        connect_timeout: float = 10.0,
    ) -> None:
        self.address, self.reason = address, ""
        self._on_disconnect: Callable[[], None] | None = None
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._acks: dict[tuple[str, int], list[tuple[int, Future[None]]]] = {}
        self._on_lines: Callable[[list[bytes]], object] | None = None
        self._closed = False
        scheme, place = parse_address(address)
        self._socket = socket.socket(socket.AF_UNIX if scheme == "unix" else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(connect_timeout)
            self._socket.connect(place)
        except OSError as error:
            self._socket.close()
            raise HostGone(f"no host answers at {address}: {error}") from None
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_SEND_DEADLINE), 0))
        self._stream = self._socket.makefile("rb", buffering=1 << 16)
        self._send(Hello(kind, token))
        self._on_disconnect = on_disconnect
        self._thread = threading.Thread(target=self._read, name=f"robustrl-client {address}", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        return not self._closed

    def call_future(self, verb: str, /, **args: Any) -> Future[Any]:
        """Like `call`, without waiting; cancelling it only forgets the answer."""
        number, future = next(self._ids), Future[Any]()
        with self._lock:
            self._calls[number] = future
        self._send(Call(number, verb, args))
        return future

    def call(self, verb: str, timeout: float, /, **args: Any) -> Any:
        """What the host's verb returns. Raises WaitTimeout, HostGone, or the verb's own error."""
        return self._wait(self.call_future(verb, **args), timeout, f"the host's answer to {verb!r}")

    def emit(self, events: list[Emitted], timeout: float) -> None:
        """Returns when the host has written all of them; they are of one source and incarnation. Raises WaitTimeout, HostGone."""
        last, future = events[-1], Future[None]()
        with self._lock:
            self._acks.setdefault((last.source, last.incarnation), []).append((last.n, future))
        self._send(Emit(_encoder.encode(events)))
        self._wait(future, timeout, f"the host's word that event {last.n} of {last.source} is written")

    def subscribe(self, on_lines: Callable[[list[bytes]], object], after: int = 0) -> None:
        """From now on ``on_lines`` gets the log's lines with a seq above ``after``, in order, on the private thread. Once per client."""
        self._on_lines = on_lines
        self._send(Subscribe(after))

    def close(self) -> None:
        """End the connection, without `on_disconnect`. Waiting calls raise HostGone."""
        self._on_disconnect = None
        self._end("closed on this side")

    def _wait(self, future: Future[Any], timeout: float, what: str) -> Any:
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():  # the verb itself raised a time-out, or the answer came just now
                return future.result()
            raise WaitTimeout(f"{what} ({self.address}): not within {timeout:g} s") from None

    def _send(self, message: Message) -> None:
        frame = encode_frame(message)
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError as error:  # part of the frame may be out: the stream is of no further use
            self._end(f"sending failed: {error}")
            raise HostGone(f"the connection to the host at {self.address} has ended: {self.reason}") from None
        if self._closed:  # it may have ended before this call was in the books
            self._end("")

    def _read(self) -> None:
        reason = "the host closed it"
        try:
            while header := self._stream.read(_LENGTH.size):
                body = self._stream.read(_body_length(header, MAX_FRAME)) if len(header) == _LENGTH.size else b""
                message = _decode(body)
                if isinstance(message, Closing):
                    reason = message.reason
                    break
                self._take(message)
        except (OSError, ValueError, RobustRLError) as error:  # ValueError: the stream was closed on this side
            reason = str(error)
        except Exception as error:
            reason = f"a callback failed: {error!r}"
            raise
        finally:
            self._end(reason)
            self._stream.close()

    def _take(self, message: Message) -> None:
        match message:
            case Result(id=number, value=value, error=failure):
                with self._lock:
                    future = self._calls.pop(number, None)
                if future and future.set_running_or_notify_cancel():
                    future.set_exception(failure.error()) if failure else future.set_result(value)
            case Entries(lines=lines) if self._on_lines:
                self._on_lines(lines)
            case Ack(source=source, incarnation=incarnation, n=n):
                with self._lock:
                    waiting = self._acks.get((source, incarnation), [])
                    done = [future for number, future in waiting if number <= n]
                    waiting[:] = [item for item in waiting if item[0] > n]
                for ack in done:
                    ack.set_result(None)
            case _:
                raise RobustRLError(f"the host sent a {type(message).__name__}, which a client does not expect")

    def _end(self, reason: str) -> None:
        with self._lock:
            first, self._closed = not self._closed, True
            if first:
                self.reason = reason
            lost: list[Future[Any]] = [*self._calls.values(), *(future for waiting in self._acks.values() for _, future in waiting)]
            self._calls.clear()
            self._acks.clear()
        gone = HostGone(f"the connection to the host at {self.address} has ended: {self.reason}")
        for future in lost:
            if future.set_running_or_notify_cancel():
                future.set_exception(gone)
        if first:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other side was faster
            self._socket.close()
            if self._on_disconnect:
                self._on_disconnect()
