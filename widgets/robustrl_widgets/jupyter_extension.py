"""An extension of the Jupyter server: what a kernel says reaches the page at once.

Jupyter's websockets leave Nagle's algorithm on: a small message waits until the browser has acknowledged the one before it, and the browser
acknowledges after 40 ms. A kernel answers each command of a widget with three small messages, so every answer came 40 ms late. Installed
with the package (pyproject.toml: etc/jupyter/jupyter_server_config.d); without it all works, only later.
"""

from __future__ import annotations

from typing import Any

_SETTING = "kernel_websocket_connection_class"


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(server: Any) -> None:
    settings = server.web_app.settings
    if (connection := settings.get(_SETTING)) is not None:
        settings[_SETTING] = without_delay(connection)


def without_delay(connection: type) -> type:
    """The class of a kernel's websocket connections, Jupyter's or another one in its place (a gateway's), that sends at once."""

    class WithoutDelay(connection):
        def connect(self) -> Any:
            self.websocket_handler.set_nodelay(True)
            return super().connect()

    return WithoutDelay
