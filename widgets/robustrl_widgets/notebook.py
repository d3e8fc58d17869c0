"""The views in a notebook: the shared ESM files as anywidgets, fed by the run's `Feed`.

They are alive while a cell runs: pictures come from a plain thread, and clicks are taken on the comm's own subshell where the kernel has
one. A widget that is closed leaves nothing behind. Left out: what is drawn, and what a click does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import ipywidgets
import msgspec
import traitlets

from . import assets, static
from .channel import Channel
from .commands import Answer, Commander, Refused, Right, parse
from .feed import Feed
from .hosts import feed_of

if TYPE_CHECKING:
    from robustrl.job import Job
    from robustrl.replay.run import Run


class Live(anywidget.AnyWidget):
    """A widget with a channel: pictures to the page, commands from it and answers to them."""

    full = traitlets.Unicode("{}").tag(sync=True)
    delta = traitlets.Unicode("{}").tag(sync=True)
    command = traitlets.Unicode("").tag(sync=True, echo_update=False)
    answer = traitlets.Unicode("{}").tag(sync=True)
    right = traitlets.Unicode("READ").tag(sync=True)
    """What the page may offer; what it may do is not the page's to say."""
    me = traitlets.Unicode("").tag(sync=True)

    def _show(self, what: str, channel: Channel) -> None:
        if self.comm is None:  # closed
            return
        with self.hold_sync():
            if what == "full":
                self.full = channel.full
            self.delta = channel.delta


class View(Live):
    """One view of one run: a job, or a recorded one (its path, or as `robustrl.Run` loaded it). ``close()`` ends it."""

    view = ""

    def __init__(self, run: Job | Feed | Run | str | Path, right: Right = Right.INSTRUCTOR) -> None:
        feed = feed_of(run)
        super().__init__()
        _take_clicks_while_a_cell_runs(self.comm)
        self.feed = feed
        self.right = right.name if feed.source.job is not None else Right.READ.name
        self._commander = Commander(feed, right, may_play=True)
        self.me = self._commander.me
        self.observe(self._commanded, "command")
        self._subscription = feed.subscribe(self.view, self._show)

    def _commanded(self, change: Any) -> None:
        if change["new"]:
            self._commander.take(change["new"], self._answer)

    def _answer(self, answer: Answer) -> None:
        if self.comm is not None:
            self.answer = msgspec.json.encode(answer).decode()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The live view, and beside it what a saved notebook still shows where there is no kernel."""
        with self.feed.lock:
            scene, now = self.feed.whole()
            form = static.form(self.view, scene, now)
        bundle = super()._repr_mimebundle_(**options)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
        return {**data, "text/plain": f"<{type(self).__name__} of {scene.state.name or 'a job'}>", "text/html": form}, metadata

    def close(self) -> None:
        if (subscription := getattr(self, "_subscription", None)) is not None:
            subscription.close()
        layout = self.layout  # a widget of its own, which ipywidgets forgets to close
        super().close()
        layout.close()


class RoleBoard(View):
    view, _esm = "board", assets.esm("board")


class FaultPanel(View):
    view, _esm = "faults", assets.esm("faults")


class ThresholdPanel(View):
    view, _esm = "thresholds", assets.esm("thresholds")


class Metrics(View):
    view, _esm = "metrics", assets.esm("metrics")


class Trajectories(View):
    view, _esm = "trajectories", assets.esm("trajectories")


class RecoveryReport(View):
    view, _esm = "recovery", assets.esm("recovery")

    def save_html(self, path: str | Path, number: int | None = None) -> Path:
        """One recovery (None: the last) as one self-contained file with a time scrubber; see report.py."""
        from .report import html_of

        with self.feed.lock:
            entries, ghost, job = list(self.feed.source.entries()), self.feed.scene.race.ghost, self.feed.source.job
        target = Path(path).expanduser()
        target.write_text(html_of(entries, number, ghost, live=job is not None and not job.over), encoding="utf-8")
        return target


class Player(View):
    """Of a recording: give it the feed that the other views have, ``Player(board.feed)``."""

    view, _esm = "player", assets.esm("player")


class Timeline(View):
    view, _esm = "timeline", assets.esm("timeline")
    figure = traitlets.Unicode().tag(sync=True)

    def __init__(self, run: Job | Feed | Run | str | Path, right: Right = Right.INSTRUCTOR) -> None:
        from .figure import timeline_json

        self.set_trait("figure", timeline_json())
        super().__init__(run, right)

    def _commanded(self, change: Any) -> None:
        if change["new"] and _verb(change["new"]) == "bokeh":
            self._answer({"id": parse(change["new"]).id, "value": assets.bokeh_js()})
            self.answer = "{}"  # the view's state is what a page that is reloaded waits for: it stays small
        else:
            super()._commanded(change)


def _verb(raw: str) -> str:
    try:
        return parse(raw).verb
    except Refused:
        return ""


def _take_clicks_while_a_cell_runs(comm: Any) -> None:
    """ipykernel 7 sends a comm's messages to the subshell of its last *reply*, and a view has none: it would wait for the running cell. The
    message's own subshell, which JupyterLab makes for each comm, is the right one. Elsewhere clicks wait until the cell has ended.
    """
    if comm is not None and callable(getattr(comm, "_reply_subshell_for", None)):
        comm._reply_subshell_for = lambda data, default: default


def stacked(views: list[View]) -> ipywidgets.VBox:
    return ipywidgets.VBox(views, layout={"width": "100%"})
