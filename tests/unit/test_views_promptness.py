"""Small messages to a page are not held back: each end of a websocket of ours has TCP_NODELAY, in Jupyter and in the dashboard."""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from robustrl_widgets import jupyter_extension
from tornado.httpserver import HTTPServer
from tornado.web import Application
from tornado.websocket import WebSocketHandler, websocket_connect

CONFIG = Path(__file__).resolve().parents[2] / "widgets" / "jupyter" / "robustrl_widgets.json"


class Connection:
    """As jupyter_server's: made with the handler, connected once its websocket is open."""

    def __init__(self, websocket_handler: Any) -> None:
        self.websocket_handler = websocket_handler

    def connect(self) -> str:
        return "connected"


def _no_delay_of_a_page(extended: bool, prompt: bool) -> tuple[str, int]:
    """What the connection says and the socket has when a page has connected."""
    found: list[tuple[str, int]] = []
    server = SimpleNamespace(web_app=SimpleNamespace(settings={"kernel_websocket_connection_class": Connection}))
    if extended:
        jupyter_extension._load_jupyter_server_extension(server)
    made = server.web_app.settings["kernel_websocket_connection_class"]

    class Handler(WebSocketHandler):
        def open(self, *_: str) -> None:
            said = made(websocket_handler=self).connect()
            assert self.ws_connection is not None
            stream: Any = self.ws_connection.stream  # type: ignore[attr-defined]
            found.append((said, stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))

    async def connect() -> None:
        app = Application([("/", Handler)])
        if prompt:
            from robustrl_widgets.dashboard import send_at_once  # it brings Panel

            send_at_once(app)
        http = HTTPServer(app)
        http.listen(0, "127.0.0.1")
        port = next(iter(http._sockets.values())).getsockname()[1]
        page = await websocket_connect(f"ws://127.0.0.1:{port}/")
        while not found:
            await asyncio.sleep(0.01)
        page.close()
        http.stop()

    asyncio.run(asyncio.wait_for(connect(), 20))
    return found[0]


@pytest.mark.parametrize(("extended", "prompt"), [(False, False), (True, False), (False, True)])
def test_only_a_server_of_ours_sends_at_once(extended: bool, prompt: bool) -> None:
    said, no_delay = _no_delay_of_a_page(extended, prompt)
    assert said == "connected" and bool(no_delay) is (extended or prompt)


def test_the_configuration_that_is_installed_names_an_extension() -> None:
    (name,) = json.loads(CONFIG.read_text())["ServerApp"]["jpserver_extensions"]
    (point,) = importlib.import_module(name)._jupyter_server_extension_points()
    assert callable(importlib.import_module(point["module"])._load_jupyter_server_extension)


def test_a_server_without_kernels_is_left_alone() -> None:
    settings: dict[str, Any] = {}
    jupyter_extension._load_jupyter_server_extension(SimpleNamespace(web_app=SimpleNamespace(settings=settings)))
    assert settings == {}
