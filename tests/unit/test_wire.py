"""The host's socket: frames, tokens, errors that keep their class, deadlines, and both ends talking over a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
import threading

import msgspec
import pytest

from robustrl.core import events as ev
from robustrl.errors import ConfigError, HostGone, JobFailed, RobustRLError, WaitTimeout
from robustrl.runtime import wire


class Host:
    """A host's end on a thread: echoes calls, streams five lines to subscribers, acknowledges what roles emit."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.emitted: list[ev.Emitted] = []
        self.acknowledge = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = self.run(wire.listen(address, self._serve, token))

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(5)

    @property
    def port(self) -> int:
        return self.server.sockets[0].getsockname()[1]

    def close(self) -> None:
        async def cancel() -> None:
            self.server.close()
            connections = asyncio.all_tasks() - {asyncio.current_task()}
            for task in connections:
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

        self.run(cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    async def _serve(self, hello, reader, writer) -> None:
        while message := await wire.read_message(reader):
            match message:
                case wire.Call(id=number, verb="fail", args=args):
                    kind = {"config": ConfigError("steps", 0, "must be at least 1"), "job": JobFailed("rollout-1 died"),
                            "other": KeyError("x"), "late": WaitTimeout("the pull was late")}[args["kind"]]
                    wire.write_message(writer, wire.Result(number, error=wire.Failure.of(kind)))
                case wire.Call(verb="silence"):
                    pass
                case wire.Call(verb="hang_up"):
                    wire.write_message(writer, wire.Closing("the job is over"))
                    return
                case wire.Call(id=number, args=args):
                    wire.write_message(writer, wire.Result(number, [hello.kind, args]))
                case wire.Subscribe(after=after):
                    lines = [b"%d" % n for n in range(after + 1, 6)]
                    wire.write_message(writer, wire.Entries(lines[:2]))
                    wire.write_message(writer, wire.Entries(lines[2:]))
                case wire.Emit(events=events) if self.acknowledge:
                    self.emitted += ev.emitted_decoder.decode(events)
                    last = self.emitted[-1]
                    wire.write_message(writer, wire.Ack(last.source, last.incarnation, last.n))


@pytest.fixture
def host(tmp_path):
    host = Host(f"unix:{tmp_path}/s")
    host.address = f"unix:{tmp_path}/s"
    yield host
    host.close()


@pytest.fixture
def client(host):
    client = wire.HostClient(host.address)
    yield client
    client.close()


def test_a_call_comes_back_with_its_answer(client):
    arguments = {"text": "a", "number": [1, 2.5, None], "timeout": 3}
    assert client.call("echo", 5, **arguments) == ["client", arguments]


def test_the_socket_is_for_its_owner_only(host, tmp_path):
    assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o600


def test_our_errors_keep_their_class_and_fields(client):
    with pytest.raises(ConfigError, match="steps = 0: must be at least 1") as caught:
        client.call("fail", 5, kind="config")
    assert (caught.value.field, caught.value.value) == ("steps", 0)
    with pytest.raises(JobFailed, match="^rollout-1 died$"):
        client.call("fail", 5, kind="job")
    with pytest.raises(WaitTimeout, match="the pull was late"):
        client.call("fail", 5, kind="late")
    with pytest.raises(RobustRLError, match="KeyError: 'x'"):
        client.call("fail", 5, kind="other")


def test_every_call_has_a_deadline_that_its_error_names(client):
    with pytest.raises(WaitTimeout, match=r"the host's answer to 'silence' \(unix:.*\): not within 0.05 s"):
        client.call("silence", 0.05)
    assert client.call("echo", 5)  # the line is still good


def test_a_subscriber_gets_the_lines_after_a_seq_in_order(client):
    got, done = [], threading.Event()

    def on_lines(lines):
        got.extend(lines)
        if got[-1] == b"5":
            done.set()

    client.subscribe(on_lines, after=1)
    assert done.wait(5)
    assert got == [b"2", b"3", b"4", b"5"]


def _events(*numbers: int) -> list[ev.Emitted]:
    return [ev.Emitted("rollout-0", 1, n, 0.5, ev.WarningRaised(text=str(n))) for n in numbers]


def test_emit_returns_when_the_host_has_acknowledged(host):
    client = wire.HostClient(host.address, kind="role")
    client.emit(_events(1, 2), timeout=5)
    assert host.emitted == _events(1, 2)
    host.acknowledge = False
    with pytest.raises(WaitTimeout, match="event 3 of rollout-0 is written"):
        client.emit(_events(3), timeout=0.05)
    client.close()


def test_an_emitter_goes_on_after_a_host_that_was_silent_for_a_while(host):
    from robustrl.runtime.emitter import Emitter

    client = wire.HostClient(host.address, kind="role")
    emitter = Emitter(client, "rollout-0", 1, deadline=0.05)
    host.acknowledge = False
    emitter.emit(ev.WarningRaised(text="1"))
    with pytest.raises(WaitTimeout, match="1 events not acknowledged"):
        emitter.flush(0.2)
    host.acknowledge = True
    emitter.emit(ev.WarningRaised(text="2"))
    emitter.flush(5)
    assert [e.n for e in host.emitted][-1] == 2
    client.close()


def test_events_of_one_call_leave_in_one_batch(host):
    from robustrl.runtime.emitter import Emitter

    client = wire.HostClient(host.address, kind="role")
    emitter, batches, send = Emitter(client, "rollout-0", 1), [], client.emit

    def counted(batch, timeout):
        batches.append([emitted.n for emitted in batch])
        send(batch, timeout)

    client.emit = counted
    emitter.emit(ev.WarningRaised(text="1"), ev.WarningRaised(text="2"), ev.WarningRaised(text="3"))
    emitter.flush(5)
    assert batches == [[1, 2, 3]]
    client.close()


def test_the_end_of_the_connection_reaches_waiting_calls_and_the_callback_once(host):
    ends, gone = [], threading.Event()

    def on_disconnect():
        ends.append(client.reason)
        gone.set()

    client = wire.HostClient(host.address, on_disconnect=on_disconnect)
    waiting = client.call_future("silence")
    with pytest.raises(HostGone, match="the job is over"):
        client.call("hang_up", 5)
    with pytest.raises(HostGone, match="the job is over"):
        waiting.result(5)
    assert gone.wait(5)
    with pytest.raises(HostGone):
        client.call("echo", 5)
    assert ends == ["the job is over"] and not client.connected


def test_closing_on_this_side_calls_nobody_back(host):
    ends = []
    client = wire.HostClient(host.address, on_disconnect=lambda: ends.append(1))
    waiting = client.call_future("silence")
    client.close()
    with pytest.raises(HostGone, match="closed on this side"):
        waiting.result(5)
    client._thread.join(5)
    assert not client._thread.is_alive() and not ends


def test_a_host_that_ends_its_loop_leaves_no_error_in_its_log(tmp_path, caplog):
    host = Host(f"unix:{tmp_path}/s")
    client = wire.HostClient(f"unix:{tmp_path}/s")
    assert client.call("echo", 5)
    host.close()
    client._thread.join(5)
    assert not client.connected and not caplog.records


def test_nobody_there_is_an_error_that_names_the_address(tmp_path):
    with pytest.raises(HostGone, match="no host answers at unix:.*/none"):
        wire.HostClient(f"unix:{tmp_path}/none")


def test_tcp_needs_the_token():
    host = Host("tcp:127.0.0.1:0", token="secret")
    try:
        good = wire.HostClient(f"tcp:127.0.0.1:{host.port}", token="secret")
        assert good.call("echo", 5) == ["client", {}]
        good.close()
        for token in (None, "wrong"):
            with pytest.raises(HostGone):
                wire.HostClient(f"tcp:127.0.0.1:{host.port}", token=token).call("echo", 5)
    finally:
        host.close()
    with pytest.raises(ConfigError, match="token"):
        asyncio.run(wire.listen("tcp:127.0.0.1:0", host._serve))


@pytest.mark.parametrize("first", [struct.pack(">I", 0xFFFFFFFF), b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", 3) + b"\xc1\xc1\xc1",
                                   wire.encode_frame(wire.Call(1, "echo"))])
def test_a_peer_without_a_hello_is_dropped_and_the_host_goes_on(host, first):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(host.address[5:])
        sock.sendall(first)
        answer = b""
        while part := sock.recv(4096):
            answer += part
    assert b"result" not in answer
    client = wire.HostClient(host.address)
    assert client.call("echo", 5)
    client.close()


def test_frames_are_bounded_on_both_sides():
    with pytest.raises(RobustRLError, match="at most 67108864"):
        wire.encode_frame(wire.Emit(b"x" * (wire.MAX_FRAME + 1)))
    with pytest.raises(RobustRLError, match="at most 67108864"):
        wire._body_length(struct.pack(">I", wire.MAX_FRAME + 1), wire.MAX_FRAME)


def test_a_frame_cut_short_is_not_mistaken_for_the_end():
    async def read(data: bytes):
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await wire.read_message(reader)

    frame = wire.encode_frame(wire.Subscribe(3))
    assert asyncio.run(read(frame)) == wire.Subscribe(3)
    assert asyncio.run(read(b"")) is None
    for cut in (2, len(frame) - 1):
        with pytest.raises(HostGone, match="inside a frame"):
            asyncio.run(read(frame[:cut]))


@pytest.mark.parametrize("address", ["unix:relative", "tcp:host", "tcp::80", "tcp:host:99999", "http://x"])
def test_addresses_that_are_none(address):
    with pytest.raises(ConfigError, match="unix:/PATH or tcp:HOST:PORT"):
        wire.parse_address(address)


def test_failures_survive_a_file():
    failure = wire.Failure.of(ConfigError("model", object, "must exist"))
    again = msgspec.json.decode(msgspec.json.encode(failure), type=wire.Failure).error()
    assert isinstance(again, ConfigError) and again.field == "model"
