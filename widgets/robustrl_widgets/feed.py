"""The thread between a run and its views: folds entries, draws the pictures that somebody looks at, and hands them to the pages' sinks.

Promised: at most `RATE` messages a second and view, whatever the run does, and none while nothing changes but one a second as a sign of
life; whoever subscribes gets the whole picture at once; the thread is there while somebody looks, and no longer. Sinks are called from this
thread: they hand over and return; one that fails touches no other. Commands run on a thread of their own, one after the other.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from robustrl.core.accounting import ratios

from .channel import Channel
from .ghost import Ghost
from .ghost_files import find
from .metrics import POINTS
from .scene import Scene
from .sources import RecordedRun, Source

RATE = 4.0
"""Pictures a second."""
_SIGN_OF_LIFE = 1.0
_IDLE = 1.0
"""Seconds after which the thread for commands ends when there are none."""
_SLOWER = {"metrics": 1.0, "trajectories": 1.0, "recovery": 0.5, "thresholds": 0.5}
"""Seconds between two pictures of views that nobody watches for the moment itself."""
_ACCOUNT_EVERY = 3.0
log = logging.getLogger(__name__)

Sink = Callable[[str, Channel], None]
"""Called with what is new (``full`` or ``delta``) and the channel that holds it."""


class Gone(Exception):
    """Raised by a sink whose page is no more: it is not called again."""


class Subscription:
    def __init__(self, feed: Feed, view: str, sink: Sink) -> None:
        self.view, self.sink = view, sink
        self.missed = self.blamed = False
        """Whether its sink failed the last time, and whether that was ever said."""
        self._feed: Feed | None = feed

    def close(self) -> None:
        """Once; a second time takes no lock, as whatever collects garbage may be the one who calls, in the middle of anything."""
        feed, self._feed = self._feed, None
        if feed is not None:
            feed._unsubscribe(self)


class Feed:
    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic, ghosts: Path | None = None) -> None:
        """``ghosts``: a folder where there may be one for this run, beside the one of the package."""
        self.source, self._ghosts = source, ghosts
        self._ghost: Ghost | None = None
        self.scene = self._blank()
        self._sought = False
        self.lock = threading.RLock()
        """Held while the scene changes and while a picture is drawn."""
        self._clock = clock
        self._generation = source.generation
        self._subscriptions: list[Subscription] = []
        self._channels: dict[str, tuple[Channel, float]] = {}
        """View -> its channel, and when it was last sent."""
        self._thread: threading.Thread | None = None
        self._tasks: queue.Queue[Callable[[], None]] = queue.Queue(maxsize=64)
        self._worker: threading.Thread | None = None
        self._drawn: dict[str, float] = {}
        self._end: Scene | None = None
        self._complaint = ""
        self._race = ""
        self._account_at, self._unaccounted = 0.0, False

    def subscribe(self, view: str, sink: Sink) -> Subscription:
        """From now on ``sink`` is called for this view, at once with all there is."""
        subscription = Subscription(self, view, sink)
        with self.lock:
            if view not in self._channels:  # else the picture that the others have: what has changed since comes to all of them
                self._fold()
                self._draw(view)
            self._subscriptions.append(subscription)
            try:
                sink("full", self._channels[view][0])
            except Exception:
                self._unsubscribe(subscription)
                raise
            needed = None
            if self._thread is None:
                needed = self._thread = threading.Thread(target=self._run, name="robustrl-views", daemon=True)
        if needed is not None:  # outside the lock: whoever starts a thread waits for its first steps
            needed.start()
        return subscription

    def later(self, task: Callable[[], None]) -> None:
        """Runs ``task`` on the thread for commands. Raises queue.Full if too many wait already."""
        self._tasks.put_nowait(task)
        needed = None
        with self.lock:
            if self._worker is None:
                needed = self._worker = threading.Thread(target=self._work, name="robustrl-view-commands", daemon=True)
        if needed is not None:
            needed.start()

    def still(self) -> tuple[Scene, float]:
        """The scene with all that came so far, and what time it is in it. Hold the lock while you look at it."""
        with self.lock:
            self._fold()
            return self.scene, self.source.now()

    def whole(self) -> tuple[Scene, float]:
        """What a saved notebook shows. As `still`, but of a recording, which would be at its start, the scene at its end."""
        if self.source.job is not None:
            return self.still()
        with self.lock:
            if self._end is None:
                self._fold()  # a ghost may be found
                self._end = self._blank()
                entries = self.source.all()
                for entry in entries:
                    self._end.apply(entry)
                if self._end.state.step:
                    self._end.curves.take_ratios(ratios(entries, POINTS), self._end.state.t0)
            return self._end, self.source.length

    def step(self) -> None:
        """Folds what came and sends what changed."""
        with self.lock:
            self._fold()
            if (race := self.scene.race.said(self.scene.state, self.source.now())) != self._race:
                self._race = race  # the timeline says it at once: no other view may say something else meanwhile
                self._drawn.pop("metrics", None)
            views = {subscription.view for subscription in self._subscriptions}
            news = {view: self._draw(view) for view in views if self._due(view)}
            subscriptions = list(self._subscriptions)
        for subscription in subscriptions:
            what, channel = news.get(subscription.view, ("", None))
            if what and channel is not None:
                _send(subscription, what, channel)

    # -- inside ----------------------------------------------------------------------------------------------------------------------------

    def _unsubscribe(self, subscription: Subscription) -> None:
        with self.lock:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)
            views = {other.view for other in self._subscriptions}
            self._channels = {view: item for view, item in self._channels.items() if view in views}

    def _blank(self) -> Scene:
        scene = Scene()
        scene.length, scene.race.ghost = self.source.length, self._ghost
        return scene

    def race_against(self, ghost: Ghost) -> None:
        """From now on this is the ghost of the run."""
        with self.lock:
            self._ghost = self.scene.race.ghost = ghost

    def _fold(self) -> None:
        entries = self.source.take()
        if self.source.generation != self._generation:
            self._generation, self.scene, self._account_at = self.source.generation, self._blank(), 0.0
        for entry in entries:
            self.scene.apply(entry)
        self.scene.lost = self.source.lost
        if isinstance(self.source, RecordedRun):
            self.scene.pace = self.source.pace
        if not self._sought and self.scene.state.config:
            self._sought = True
            self._ghost = self.scene.race.ghost = find(self.scene.state.config, self._ghosts)
        self._account(bool(entries))

    def _account(self, news: bool) -> None:
        """The effective training time ratios need the whole log: they are computed as seldom as keeps that below 2% of the time."""
        began = self._clock()
        self._unaccounted = news or self._unaccounted  # until it is its turn: nothing may come after the last word of a run
        if self._unaccounted and began >= self._account_at and self.scene.state.step:
            self.scene.curves.take_ratios(ratios(self.source.entries(), POINTS), self.scene.state.t0)
            self._account_at = self._clock() + max(_ACCOUNT_EVERY, 50 * (self._clock() - began))
            self._unaccounted = False

    def _due(self, view: str) -> bool:
        now, period = self._clock(), _SLOWER.get(view, 0.0)
        if now - self._drawn.get(view, -period) < period:
            return False
        self._drawn[view] = now
        return True

    def _draw(self, view: str) -> tuple[str, Channel]:
        channel, sent = self._channels.get(view, (Channel(), 0.0))
        now = self.source.now()
        what = channel.push(self.scene.picture(view, now), now, self.source.speed)
        if not what and self.source.speed and self._clock() - sent >= _SIGN_OF_LIFE:
            what = "delta"
        self._channels[view] = (channel, self._clock() if what else sent)
        return what, channel

    def _run(self) -> None:
        while True:
            began = self._clock()
            with self.lock:
                if not self._subscriptions:
                    self._thread = None
                    return
            try:
                self.step()
            except Exception as error:  # a view that cannot be drawn must not end all others, and is said in the log of whoever shows it
                if repr(error) != self._complaint:
                    self._complaint = repr(error)
                    log.exception("a view could not be drawn")
            time.sleep(max(0.05, 1 / RATE - (self._clock() - began)))

    def _work(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_IDLE)
            except queue.Empty:
                with self.lock:
                    if self._tasks.empty():
                        self._worker = None
                        return
                continue
            try:
                task()
            except Exception:  # what a command raises for people is its answer; this is a defect
                log.exception("a command of a view failed")


def _send(subscription: Subscription, what: str, channel: Channel) -> None:
    """Whoever missed something gets all the next time: without the keyframe differences draw nothing."""
    try:
        subscription.sink("full" if subscription.missed else what, channel)
        subscription.missed = False
    except Gone as error:
        log.debug("a page is gone: %s", error)
        subscription.close()
    except Exception:  # of whatever kind: the pages of the others know nothing of it
        subscription.missed = True
        if not subscription.blamed:
            subscription.blamed = True
            log.warning("a picture of view %s could not be handed to its page; said once for this page", subscription.view, exc_info=True)
