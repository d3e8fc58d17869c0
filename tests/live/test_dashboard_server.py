"""The dashboard's server, attacked from outside: origins, sizes, tokens, and what a page that may only look tries to do."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from robustrl_widgets.feed import Feed
from robustrl_widgets.showing import SAMPLE
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from tests.benchmarks._made_up_run import READY

_COMMAND = [sys.executable, "-m", "robustrl", "dashboard", "--demo", "--json", "--until-eof"]
with gzip.open(SAMPLE, "rt") as _log:
    _SHOWN = json.loads(_log.readline())["event"]["run"]
"""The recorded run's own name: in its first picture, and in nothing that a page without a picture has."""


def test_an_answer_waits_neither_for_a_picture_nor_for_the_end_of_a_judgement() -> None:
    """Without a server: one page's session, while the feed's lock is held as it is when all pictures are drawn."""
    from bokeh.document import Document
    from panel.io.state import set_curdoc
    from robustrl_widgets.commands import Right
    from robustrl_widgets.dashboard import _Session
    from robustrl_widgets.showing import SAMPLE
    from robustrl_widgets.sources import RecordedRun, load_entries

    document, ticks = Document(), threading.Event()
    document.add_next_tick_callback = lambda callback: ticks.set()  # type: ignore[method-assign, assignment, return-value]
    feed = Feed(RecordedRun(load_entries(SAMPLE)))
    with set_curdoc(document):
        session = _Session(feed, Right.READ, "", may_play=False)
        assert [len(view.full) > 2 for view in session.views.values()].count(True) == len(session.views)
        with feed.lock:
            session._page_drawn(None)
            session._scheduled = False
            ticks.clear()
            session.views["tuning"].command = json.dumps({"id": "1", "verb": "apply", "args": {}})
            assert ticks.wait(5.0), "the answer is on its way"
            session._flush()
            assert json.loads(session.views["tuning"].answer) == {"id": "1", "error": "no run is loaded yet"}
        began = time.monotonic()
        session.close()
    assert time.monotonic() - began < 2.0


class Server:
    def __init__(self, *options: str) -> None:
        self._process = subprocess.Popen([*_COMMAND, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout
        self.links: dict[str, Any] = json.loads(self._process.stdout.readline())
        self.port = int(self.links["port"])

    def page(self, query: str = "") -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{query}", timeout=20) as answer:
            return answer.read().decode()

    async def connect(self, origin: str, query: str = "") -> WebSocketClientConnection:
        token = re.search(r'"token":"([^"]+)"', self.page(query))
        assert token
        request = HTTPRequest(f"ws://127.0.0.1:{self.port}/ws", headers={"Origin": origin}, request_timeout=20)
        socket = await websocket_connect(request, subprotocols=["bokeh", token[1]])
        for _ in range(3):  # the server speaks first: ACK
            await asyncio.wait_for(socket.read_message(), 20)
        return socket

    async def document(self, socket: WebSocketClientConnection, drawing: float = 0.0) -> str:
        """What the server shows to this page, as it was sent. ``drawing``: seconds that the page takes for it."""
        for part in ('{"msgid":"1","msgtype":"PULL-DOC-REQ"}', "{}", "{}"):
            await socket.write_message(part)
        for _ in range(30):
            text = await asyncio.wait_for(socket.read_message(), 20)
            if isinstance(text, str) and '"roots"' in text:
                await asyncio.sleep(drawing)
                for part in READY:
                    await socket.write_message(part)
                return text
        raise AssertionError("no document came")

    def stop(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def _own(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_its_own_pages_are_served_and_nothing_in_them_points_elsewhere(server: Server) -> None:
    text = server.page()
    assert not re.search(r'(?:src|href)="(?:https?:)?//', text)
    document = asyncio.run(_document(server, _own(server)))
    assert '"full"' in document and _SHOWN in document


async def _document(server: Server, origin: str, query: str = "") -> str:
    socket = await server.connect(origin, query)
    try:
        return await server.document(socket)
    finally:
        socket.close()


def test_a_page_that_takes_long_to_draw_itself_misses_nothing() -> None:
    """What changed between the writing of its document and the page's word, keyframes above all, comes with that word."""

    async def look() -> dict[str, dict[str, Any]]:
        """Model -> what its page has in the end: the newest keyframe and the newest difference."""
        socket = await server.connect(_own(server))
        has = {model["id"]: model["attributes"] for model in _models(json.loads(await server.document(socket, drawing=2.5)))}
        end = time.monotonic() + 4.0
        while (left := end - time.monotonic()) > 0:
            with suppress(TimeoutError):
                text = await asyncio.wait_for(socket.read_message(), left)
                for event in json.loads(text).get("events", []) if isinstance(text, str) else ():
                    if event.get("kind") == "ModelChanged" and event["model"]["id"] in has:
                        has[event["model"]["id"]] |= {event["attr"]: event["new"]}
        socket.close()
        return has

    server = Server("--speed", "60")
    try:
        shown = [{name: json.loads(model[name]) for name in ("full", "delta")} for model in asyncio.run(look()).values()]
    finally:
        server.stop()
    assert len(shown) > 7 and max(view["delta"].get("now", 0) for view in shown) > 60, "the recording is over"
    assert [view["delta"] for view in shown if view["delta"].get("key") != view["full"].get("key")] == []


def _models(part: Any) -> Iterator[dict[str, Any]]:
    """Those of the views, anywhere in a document."""
    if isinstance(part, dict):
        if isinstance(attributes := part.get("attributes"), dict) and {"full", "delta"} <= set(attributes):
            yield part
        part = list(part.values())
    for inner in part if isinstance(part, list) else ():
        yield from _models(inner)


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:1", "https://127.0.0.1.evil.example", "null"])
def test_a_page_of_another_origin_gets_no_connection(server: Server, origin: str) -> None:
    with pytest.raises(HTTPClientError, match="403"):
        asyncio.run(server.connect(origin))


def test_an_oversized_message_ends_that_connection_and_no_other(server: Server) -> None:
    async def attack() -> None:
        socket, other = await server.connect(_own(server)), await server.connect(_own(server))
        await server.document(socket)
        await socket.write_message('{"msgid":"2","msgtype":"PATCH-DOC"}')
        await socket.write_message("x" * (1 << 20))
        while await asyncio.wait_for(socket.read_message(), 20) is not None:
            pass
        assert "roots" in await server.document(other)
        other.close()

    asyncio.run(attack())


def test_a_page_that_may_only_look_is_refused_whatever_it_says_of_itself(server: Server) -> None:
    """It sets its own right and sends commands past the buttons: the answer is no."""

    async def attack() -> str:
        socket = await server.connect(_own(server))
        document = await server.document(socket)
        found = re.findall(r'"name":"View[A-Z][a-z]+\d*","id":"([^"]+)"', document)
        assert len(found) > 5
        for number, each in enumerate(found):
            order = {"id": f"a{number}", "verb": "inject", "args": {"kind": "kill", "target": "rollout-0"}}
            for attribute, value in (("right", "INSTRUCTOR"), ("command", json.dumps(order))):
                change = {"kind": "ModelChanged", "model": {"id": each}, "attr": attribute, "new": value}
                header = {"msgid": f"m{number}{attribute}", "msgtype": "PATCH-DOC"}
                for part in (json.dumps(header), "{}", json.dumps({"events": [change]})):
                    await socket.write_message(part)
        for _ in range(200):
            text = await asyncio.wait_for(socket.read_message(), 20)
            if isinstance(text, str) and "may only look" in text:
                socket.close()
                return text
        raise AssertionError("no refusal came")

    assert "may only look" in asyncio.run(attack())


def test_an_address_that_others_reach_shows_nothing_without_a_token() -> None:
    server = Server("--address", "0.0.0.0")
    try:
        origin, token = _own(server), server.links["look"].partition("?")[2]
        for query in ("", "?token=", "?token=wrong-wrong-wrong"):
            document = asyncio.run(_document(server, origin, query))
            assert "needs a token" in document and _SHOWN not in document
            assert "<title>RobustRL</title>" in server.page(query)
        assert _SHOWN in asyncio.run(_document(server, origin, f"?{token}"))
    finally:
        server.stop()
