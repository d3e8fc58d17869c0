"""The views as a page of their own: a Panel server that shows a running job, or plays a finished one, to any number of people.

Every page gets rights from the token that it was opened with; what it sends is a command to `commands.py`, or nothing. The server listens
on this machine alone unless told otherwise, takes websockets from its own origin only, lets no page of another origin read its answers, and
sends nothing out. Each session gets the whole picture when it comes, then what changes. Left out: encryption (put it behind a proxy that
has it), and being embedded into other pages by a script.
"""

from __future__ import annotations

import asyncio
import html
import logging
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import panel as pn
import param
from bokeh.document import Document
from bokeh.server.server import Server
from bokeh.server.views.autoload_js_handler import AutoloadJsHandler
from tornado.httputil import HTTPHeaders
from tornado.web import Application, OutputTransform
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from robustrl.replay.run import Run

from . import assets
from .access import Access, argument, in_url, student_name
from .channel import Channel
from .commands import Answer, Commander, Right
from .feed import Feed, Gone, Subscription
from .figure import timeline_json
from .sources import RecordedRun
from .tuner import Tuner, bundled, told
from .tuning_stock import Stock

MAX_MESSAGE = 128 << 10
"""Bytes of one message from a page."""
_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0; background: light-dark(#e9edf1, #0b0d0f); font-family: system-ui, sans-serif; }
"""
_TITLE = "RobustRL"
_SHADOW = ":host { display: block; }"
_UNTIL_NOW, _WHOLE = "this run, until now", "this run"
_ORIGIN = re.compile(r"[A-Za-z0-9.*:\[\]-]+")
log = logging.getLogger(__name__)


class _View(pn.custom.AnyWidgetComponent):
    full = param.String("{}")
    delta = param.String("{}")
    command = param.String("")
    answer = param.String("{}")
    right = param.String("READ")
    me = param.String("")
    figure = param.String("")

    _stylesheets = [_SHADOW]

    @property
    def _linked_properties(self) -> tuple[str, ...]:
        """All that is taken from a page."""
        return ("command",)

    def show(self, values: dict[str, str]) -> None:
        """Straight to the page's model: by way of Panel's parameters each picture costs four times as much, which many viewers feel."""
        if not self._models:  # not drawn yet: they are what it is drawn with
            self.param.update(**values)
        for model, _ in self._models.values():
            model.data.update(**values)


_CLASSES = {view: type(f"View{view.capitalize()}", (_View,), {"_esm": assets.esm(view)}) for view in (*assets.NAMES, assets.TUNING)}


class _Session:
    """One page: its views, and what is on its way to them."""

    def __init__(self, feed: Feed, right: Right, name: str, may_play: bool, stock: Stock | None = None) -> None:
        self._document: Document = pn.state.curdoc
        self._commander = Commander(feed, right, name, may_play)
        self._waiting: dict[str, dict[str, str]] = {}
        """View -> the newest values that its page has not got."""
        self._answers: list[Answer] = []
        self._scheduled = self._gone = self._drawn = False
        """``_drawn``: the page has its document. What changes between its writing and that, Panel would drop without a word."""
        self._lock = threading.Lock()
        """Its own: the feed's is held while all pictures are drawn, for which neither an answer nor the server's loop should wait."""
        recorded = isinstance(feed.source, RecordedRun)
        names = [view for view in assets.NAMES if view != "player" or (recorded and may_play)]
        offered = right.name if feed.source.job is not None else Right.READ.name
        self.views = {view: _CLASSES[view](sizing_mode="stretch_width", right=offered, me=self._commander.me) for view in names}
        self.views["timeline"].figure = timeline_json()
        self._subscriptions: list[Subscription] = []
        try:
            for view in names:
                self._subscriptions.append(feed.subscribe(view, self._sink(view)))
        except Exception:
            for subscription in self._subscriptions:
                subscription.close()
            raise
        self._tuner = self._tuning_lab(feed, right, offered, stock or stock_of(feed))
        for view in self.views.values():
            view.param.watch(self._commanded, "command")
        self._hand_over()
        self._document.on_event("document_ready", self._page_drawn)

    def close(self) -> None:
        for subscription in self._subscriptions:
            subscription.close()
        self._tuner.close(wait=0.0)  # this is the server's own thread: whatever is being judged ends without it

    def _tuning_lab(self, feed: Feed, right: Right, offered: str, stock: Stock) -> Tuner:
        """It loads nothing until somebody asks: beside a live job an instructor. A recording has only viewers, and each source is made
        ready once for all of them.
        """
        self.views[assets.TUNING] = _CLASSES[assets.TUNING](sizing_mode="stretch_width", right=offered)

        name, live = _own(feed), feed.source.job is not None

        def recorded() -> tuple[list[Run], None]:
            with feed.lock:
                entries = list(feed.source.entries() if live else feed.source.all())
            return [told(entries, name)] if entries else [], None

        def lab(what: str, channel: Channel) -> None:
            with suppress(Gone):  # it is closed with the session
                self._later(assets.TUNING, what, channel)

        return Tuner({name: recorded, **bundled()}, lab, job=feed.source.job, right=right, stock=stock,
                     may_load=not live or right is Right.INSTRUCTOR)

    def _sink(self, view: str) -> Callable[[str, Channel], None]:
        return lambda what, channel: self._later(view, what, channel)

    def _later(self, view: str, what: str, channel: Channel) -> None:
        """Pictures come from the thread that made them, the only one that writes to their channel: the document takes them on its own, all
        of one round in one go.
        """
        news = {"delta": channel.delta, **({"full": channel.full} if what == "full" else {})}
        with self._lock:
            self._waiting[view] = self._waiting.get(view, {}) | news
        self._schedule()

    def _schedule(self) -> None:
        with self._lock:
            gone, needed, self._scheduled = self._gone, not self._scheduled, True
        if gone:
            raise Gone("its session is over")
        if needed:
            try:
                self._document.add_next_tick_callback(self._flush)
            except AttributeError as error:  # Bokeh takes a document apart before it tells anybody that its session is over
                self._gone = True
                raise Gone(str(error)) from error

    def _page_drawn(self, event: Any) -> None:
        self._drawn = True
        with suppress(Gone):
            self._schedule()  # after all that Panel itself does about it

    def _flush(self) -> None:
        if self._drawn:
            self._hand_over()
            return
        with self._lock:
            self._scheduled = False

    def _hand_over(self) -> None:
        with self._lock:
            waiting, self._waiting, self._scheduled = self._waiting, {}, False
            answers, self._answers = self._answers, []
        with pn.io.hold():
            for view, values in waiting.items():
                self.views[view].show(values)
            for answer in answers:
                self.views[answer.pop("view")].show({"answer": msgspec.json.encode(answer).decode()})

    def _commanded(self, event: Any) -> None:
        if not event.new:
            return
        view = next(name for name, component in self.views.items() if component is event.obj)

        def answered(answer: Answer) -> None:
            with self._lock:
                self._answers.append({**answer, "view": view})
            with suppress(Gone):  # nobody waits for it any more
                self._schedule()

        (self._tuner if view == assets.TUNING else self._commander).take(event.new, answered)


def _own(feed: Feed) -> str:
    """What the tuning lab calls the run that the page shows."""
    return _WHOLE if feed.source.job is None else _UNTIL_NOW


def stock_of(feed: Feed) -> Stock:
    """For the tuning labs of all pages: of its sources only a live job's own log grows."""
    return Stock({*bundled(), _own(feed)} - {_UNTIL_NOW})


def application(feeds: Callable[[], Feed], access: Access, shared: bool, title: str = _TITLE) -> Callable[[], Any]:
    """What the server runs for each page. ``feeds``: the feed for a page; ``shared``: all pages have the same one, and nobody winds it;
    ``title``: of the pages of those who may look, as it has the job's name.
    """

    stocks: list[Stock] = []

    def page() -> Any:
        pn.state.curdoc.title = _TITLE
        try:
            return drawn()
        except Exception:  # Panel would show its text as HTML, with all that a log put into it
            log.exception("a page could not be made")
            return pn.pane.Str("This page cannot be shown: the log of the dashboard's process says why.")

    def drawn() -> Any:
        arguments = pn.state.session_args or {}
        right = access.right(argument(arguments, "token"))
        if right is None:
            return pn.pane.Str("This page needs a token: open the address that the dashboard printed when it was started.")
        pn.state.curdoc.title = title
        name = student_name(arguments)
        if right is Right.STUDENT and not name:
            return _who_are_you(argument(arguments, "token"))
        feed = feeds()
        if not stocks:
            stocks.append(stock_of(feed))
        session = _Session(feed, right, name, may_play=not shared, stock=stocks[0])
        pn.state.on_session_destroyed(lambda _: session.close())
        views = session.views
        side = pn.Column(views["faults"], views["recovery"], views["thresholds"], sizing_mode="stretch_width",
                         styles={"flex": "1 1 380px", "gap": "10px"})
        main = pn.Column(views["board"], views["timeline"], views["metrics"], sizing_mode="stretch_width",
                         styles={"flex": "3 1 720px", "gap": "10px", "min-width": "0"})
        body = pn.FlexBox(main, side, sizing_mode="stretch_width", align_items="flex-start", gap="10px", flex_wrap="wrap")
        return pn.Column(*([views["player"]] if "player" in views else []), body, views["trajectories"], views[assets.TUNING],
                         sizing_mode="stretch_width", styles={"padding": "10px", "gap": "10px", "max-width": "1900px", "margin": "0 auto"})

    return page


def _who_are_you(token: str) -> Any:
    """Asks a student for the name under which the faults will stand, and comes back with it."""
    return pn.pane.HTML(
        f'<form method="get"><input type="hidden" name="token" value="{html.escape(token, quote=True)}">'
        '<label>Your name, under which your faults will stand: '
        '<input name="name" required maxlength="40" autofocus autocomplete="off"></label> <button>Open the page</button></form>',
        styles={"padding": "30px"}, stylesheets=[":host { font-size: 16px; } input, button { font: inherit; padding: 4px 8px; }"])


def serve(feeds: Callable[[], Feed], access: Access, *, shared: bool, title: str, address: str = "127.0.0.1", port: int = 0,
          origins: tuple[str, ...] = (), ready: Callable[[int], None] | None = None) -> None:
    """Serves until it is interrupted. ``port`` 0: a free one, told to ``ready``. ``origins``: further hosts (``name:port``) whose pages may
    connect, for proxies.
    """
    port = port or _free_port(address)
    server = server_of(application(feeds, access, shared, title), address, port, origins)
    server.io_loop.asyncio_loop.set_exception_handler(_but_closed_pages)
    server.start()
    if ready:
        server.io_loop.add_callback(ready, port)
    try:
        server.io_loop.start()
    finally:
        server.stop()


def server_of(page: Callable[[], Any], address: str, port: int, origins: tuple[str, ...]) -> Server:
    """Not started yet, on the present event loop. See `serve`."""
    pn.config.raw_css = [_STYLE]
    known = _origins(address, port, origins)
    server: Server = pn.serve(
        {"/": page}, port=port, address=address, show=False, start=False, title={"/": ""}, verbose=False,
        location=False,  # Panel's own model of the page's address, which nobody needs here, cannot be made of an IPv6 one
        websocket_origin=[each for each in known if "[" not in each], websocket_max_message_size=MAX_MESSAGE, autoreload=False)
    server._tornado.websocket_origins.update(each for each in known if "[" in each)  # as options Bokeh takes none with more than one colon
    server._tornado.add_transform(_headers(origins))
    _embed_nowhere(server._tornado)
    send_at_once(server._tornado)
    return server


def _embed_nowhere(app: Application) -> None:
    """Bokeh offers each page as a script too, with a session in it, that any other page may load and read."""
    rules = app.wildcard_router.rules
    rules[:] = [rule for rule in rules if not (isinstance(rule.target, type) and issubclass(rule.target, AutoloadJsHandler))]


def send_at_once(app: Application) -> None:
    """Of a tornado application's websockets: no small message waits until the browser has acknowledged the one before it, which takes 40 ms
    (Nagle's algorithm)."""
    for rule in app.wildcard_router.rules:
        if isinstance(rule.target, type) and issubclass(rule.target, WebSocketHandler):
            rule.target = _at_once(rule.target)


def _at_once(handler: type[WebSocketHandler]) -> type[WebSocketHandler]:
    class AtOnce(handler):  # type: ignore[valid-type, misc]
        def open(self, *args: str, **named: str) -> Any:
            self.set_nodelay(True)
            return super().open(*args, **named)

    return AtOnce


def _but_closed_pages(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A page that is closed while something is on its way to it leaves a future behind that nobody waits for any more: Panel forgets those
    of a session that has ended. That is no error; all else is said as ever.
    """
    if isinstance(context.get("exception"), WebSocketClosedError) and "future" in context:
        log.debug("a page was closed while a message was on its way to it")
        return
    loop.default_exception_handler(context)


def _headers(origins: tuple[str, ...]) -> type[OutputTransform]:
    """What each answer says to the browser: who may put the page into a frame (its own origin, which is a proxy's where one is used, and
    those that were configured), and that nothing is to be taken for what it is not called. Nothing lets pages of another origin read it:
    behind a proxy too it is the page's own.
    """
    framing = " ".join(["frame-ancestors 'self'", *(origin for origin in origins if _ORIGIN.fullmatch(origin))])

    class Headers(OutputTransform):
        def transform_first_chunk(self, status_code: int, headers: HTTPHeaders, chunk: bytes, finishing: bool
                                  ) -> tuple[int, HTTPHeaders, bytes]:  # fmt: skip
            for name in [name for name in headers if name.startswith("Access-Control-")]:
                del headers[name]
            headers["Content-Security-Policy"] = framing
            headers["X-Content-Type-Options"] = "nosniff"
            if not origins:  # it knows no list, and old browsers know nothing else
                headers["X-Frame-Options"] = "SAMEORIGIN"
            return status_code, headers, chunk

    return Headers


def _free_port(address: str) -> int:
    """The server must know its port before it starts, for its own origin."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((address, 0))
        return int(free.getsockname()[1])


def _origins(address: str, port: int, more: tuple[str, ...]) -> list[str]:
    own = in_url(address)
    hosts = dict.fromkeys([own, "[::1]" if own.startswith("[") else "127.0.0.1", "localhost"])
    bare = [own] if own.startswith("[") and port == 80 else []  # browsers leave that port out, and Bokeh adds it to names alone
    return [*(f"{host}:{port}" for host in hosts), *bare, *more]
