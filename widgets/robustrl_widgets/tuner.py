"""The thread behind a TuningLab: it judges the setting that the sliders show, and, while nobody moves them, draws further ones as points.

Promised: of settings that come while one is judged only the last is judged; a move waits for at most one other judgement, on a server for
those of other pages (tuning_stock.py), and never for a point; nothing that a page sends is trusted; applying a setting to the live job
needs the instructor's right; of a hidden fault nothing is told. The thread begins with a command, and ends when nothing is left to do,
nobody looks any more, or the tuner is closed; no callback is called under a lock. Left out: drawing, how a picture travels (channel.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from robustrl.core import events as ev
from robustrl.core.thresholds import Relative, Thresholds
from robustrl.errors import RobustRLError
from robustrl.replay.run import Run
from robustrl.replay.scoring import Score
from robustrl.replay.sweeping import drawn_settings

from . import tuning
from .channel import Channel
from .commands import Answer, Command, Refused, Right, number, parse, whole
from .tuning_stock import GivenUp, Loaded, Stock
from .words import LONG, closed, cut, headline

POINTS = 160
"""Settings drawn as points, at most: of `_DRAWN` most contradict themselves."""
_DRAWN = 8 * POINTS
_SEED = 1
_POINTS_EVERY = 0.5
"""Seconds between two pictures that only bring points."""
_JOB_EVERY = 1.0
"""Seconds between two looks at whether the job is still there, at most."""
_QUIET = 0.4
"""Seconds without a command before a further point is made: a hand that moves a slider pauses for less, and would find it half made."""
_IDLE = 5.0
"""Seconds after which the thread ends when there is nothing to do."""
log = logging.getLogger(__name__)

Sources = Mapping[str, Callable[[], tuple[Sequence[Run], Thresholds | None]]]
"""Name -> what gives the runs, and the setting that sliders begin with (None: see `tuning.first_setting`). Asked on the tuner's thread,
when somebody wants them."""


def bundled() -> Sources:
    """The runs that come with the package, by seed."""
    from robustrl.replay.corpus import corpus

    def source(seed: int) -> Callable[[], tuple[Sequence[Run], Thresholds | None]]:
        return lambda: (corpus().of(seed=seed), Thresholds.lab())

    return {f"bundled runs, seed {seed}": source(seed) for seed in corpus().seeds}


def told(entries: Sequence[ev.Entry], name: str) -> Run:
    """A run without the hidden faults that nobody has revealed: its truth would name them to whoever loads it."""
    secret = {entry.event.fault for entry in entries if isinstance(entry.event, ev.FaultPlanned) and entry.event.hidden}
    secret -= {entry.event.fault for entry in entries if isinstance(entry.event, ev.FaultRevealed)}
    faults = (ev.FaultPlanned, ev.FaultInjected, ev.FaultEnded)
    shown = [entry for entry in entries if not (isinstance(entry.event, faults) and entry.event.fault in secret)]
    return Run.of(shown, f"{name}, without {len(secret)} hidden" if secret else name)


def fate(job: Any) -> tuple[str, float | None]:
    """(why nothing can be done to it any more, empty while something can; of one that is gone, the Unix time up to which it is known): as
    the other views say it, see scene.py."""
    if job is None or not job.over:
        return "", None
    words = closed(job._lost is not None, job.over, job.status)
    if job._lost is None:
        return words, None
    state = job._state
    return words, round(state.wall + state.t - state.t0, 1) if state.wall else None


class Tuner:
    """``show(what, channel)`` is called from the tuner's thread whenever there is a new picture. ``load``: the source to begin with.
    ``stock``: shared with other tuners of a server. ``may_load`` False: it takes from there what another one has loaded.
    """

    def __init__(self, sources: Sources, show: Callable[[str, Channel], None], *, job: Any = None, right: Right = Right.READ,
                 base: Thresholds | None = None, load: str = "", stock: Stock | None = None, may_load: bool = True) -> None:  # fmt: skip
        self.channel = Channel()
        self._sources, self._show, self._job, self._right, self._base = dict(sources), show, job, right, base
        self._stock, self._may_load, self._guest = stock or Stock(), may_load, stock is not None and right < Right.INSTRUCTOR
        self._orders: deque[tuple[Command, Callable[[Answer], None]]] = deque()
        self._wake = threading.Condition()
        self._closed = self._resting = False
        self._thread: threading.Thread | None = None
        self._done = 0.0
        """When the last command had been carried out."""
        self.judged = threading.Event()
        """What was first ordered has been tried."""
        self.last: tuning.Picture = {}
        """What was sent last; any thread may read it."""
        self._loaded: Loaded | None = None
        self._still: tuning.Picture = {}
        self.shown = 0
        self.now: tuning.Trial | None = None
        self.other: tuning.Trial | None = None
        self._dots: list[list[Any]] = []
        """The points as drawn; found anew when some come, not with each move."""
        self._fate: tuple[str, float | None] = ("", None)
        """Of the job, as it is shown."""
        self._seen, self._told = 0, 0.0
        """How many points are drawn, and since when."""
        self.push()
        if load:
            self._order(Command(id="", verb="load", args={"source": load}), lambda answer: None)

    @property
    def material(self) -> tuning.Material | None:
        return None if self._loaded is None else self._loaded.material

    @property
    def points(self) -> list[tuple[dict[str, float], Score]]:
        return [] if self._loaded is None else self._loaded.points

    def _behind(self) -> bool:
        """There are points to be made, or that another one made and this page does not show."""
        return self._loaded is not None and bool(self._loaded.todo or self._seen < len(self._loaded.points))

    def take(self, raw: Any, answer: Callable[[Answer], None]) -> None:
        """Queues what a page sent; ``answer`` is called once, from the tuner's thread or at once."""
        try:
            command = parse(raw)
        except Refused as error:
            answer({"id": "", "error": cut(error, LONG)})
            return
        if not self._order(command, answer):
            answer({"id": command.id, "error": "too many commands are waiting: try again"})

    def _order(self, command: Command, answer: Callable[[Answer], None]) -> bool:
        """False: too many wait."""
        with self._wake:
            if len(self._orders) >= 64:
                return False
            self._orders.append((command, answer))
            self._wake.notify()
        self._begin()
        return True

    def _begin(self) -> None:
        needed = None
        with self._wake:
            if self._thread is None and not self._closed:
                needed = self._thread = threading.Thread(target=self._run, name="robustrl-tuner", daemon=True)
        if needed is not None:  # outside the lock: whoever starts a thread waits for its first steps
            needed.start()

    def rest(self, resting: bool) -> None:
        """Whether nobody looks at the page: then no further point is made, and the job is not watched. Commands are carried out as ever."""
        with self._wake:
            begin = self._resting and not resting
            self._resting = resting
            self._wake.notify()
        if begin:
            self._begin()

    def close(self, wait: float = 10.0) -> None:
        """Ends the thread; waits for its end for at most ``wait`` seconds. A second time takes no lock: the garbage collector may call."""
        if self._closed:
            return
        with self._wake:
            self._closed = True
            self.judged.set()
            self._wake.notify()
            thread = self._thread
        if thread is not None and wait > 0 and thread is not threading.current_thread():
            thread.join(wait)

    # -- the thread ---

    def _orders_or_leisure(self) -> list[tuple[Command, Callable[[Answer], None]]] | None:
        """What is to be carried out; none: there is leisure for a point, or news of the job; None: the thread is to end."""
        with self._wake:
            idle = False
            while not self._closed and not self._orders:
                behind, watched = self._behind(), self._job is not None and not self._fate[0]
                pause = self._done + _QUIET - time.monotonic() if behind else _JOB_EVERY
                if self._resting or not (behind or watched):
                    if idle:
                        self._thread = None
                        return None
                    idle = not self._wake.wait(_IDLE)
                elif pause <= 0 or fate(self._job) != self._fate:
                    break
                else:
                    self._wake.wait(min(_JOB_EVERY, pause) if watched else pause)
            orders = list(self._orders)
            self._orders.clear()
            return None if self._closed else orders

    def _run(self) -> None:
        while (orders := self._orders_or_leisure()) is not None:
            last = max((i for i, (command, _) in enumerate(orders) if command.verb == "set"), default=-1)
            for i, (command, answer) in enumerate(orders):
                stale = command.verb == "set" and i < last
                found: Answer = {"value": {"stale": True}} if stale else self._carry_out(command)
                self.judged.set()
                if not self._closed:
                    self._safely(partial(answer, {"id": command.id, **found}))
            if orders:
                self._done = time.monotonic()
            elif fate(self._job) != self._fate:
                self._safely(self.push)
            elif not self._safely(self._further_point) and self._loaded is not None:
                self._loaded.todo.clear()
                self._seen = len(self.points)

    def _safely(self, step: Callable[[], None]) -> bool:
        """A defect, or a page that went away, must not end the thread: the next command would wait for ever."""
        try:
            step()
        except Exception:
            log.exception("the tuning lab failed")
            return False
        return True

    def _carry_out(self, command: Command) -> Answer:
        try:
            verb = _VERBS.get(command.verb)
            if verb is None:
                raise Refused(f"{cut(command.verb, 40)!r} is no command here; there are {', '.join(_VERBS)}")
            if command.verb != "load" and self.material is None:
                raise Refused("no run is loaded yet")
            with self._stock.turn(self._guest):
                began = time.perf_counter()
                value = verb(self, command.args)
            self.push()
            return {"value": {"ms": round(1000 * (time.perf_counter() - began), 1), **(value or {})}}
        except (RobustRLError, ValueError, OSError) as error:
            return {"error": headline(str(error), LONG) or type(error).__name__}
        except Exception:  # a defect: the thread goes on, and whoever asked hears of it
            log.exception("a command of the tuning lab failed")
            return {"error": "this failed: see the log of whoever shows this page"}

    def push(self) -> None:
        """Sends the present picture, if it is new; nothing once it is closed."""
        self.last = self.picture()
        if self._closed:
            return
        if what := self.channel.push(self.last, 0.0, 0.0):
            self._show(what, self.channel)

    def picture(self) -> tuning.Picture:
        live = self._job is not None and self._right is Right.INSTRUCTOR
        over, gone = self._fate = fate(self._job)
        found: tuning.Picture = {"sources": list(self._sources), "live": live, "job": self._job is not None, "closed": over}
        found |= self._still
        if gone is not None:
            found["gone"] = gone
        if self.material is not None and self.now is not None:
            run = self.material.runs[self.shown]
            found["a"] = tuning.side(self.now, run, self.shown)
            if self.other is not None:
                found["b"] = tuning.side(self.other, run, self.shown)
            found["points"] = self._dots
            found["todo"] = len(self._loaded.todo) if self._loaded else 0
        return found

    def _further_point(self) -> None:
        assert self._loaded is not None
        try:
            with self._stock.turn(self._guest, point=True):
                self._loaded.further_point(lambda: bool(self._orders) or self._closed or self._stock.wanted)
                now = time.monotonic()
                news = now - self._told >= _POINTS_EVERY or not self._loaded.todo
                if news:
                    self._told = now
                    self._draw_points()
        except GivenUp:
            self._done = time.monotonic()  # no sooner than if somebody had moved here
            return
        if news:
            self.push()

    # -- verbs ---

    def _load(self, args: Mapping[str, Any]) -> None:
        name = args.get("source")
        if name not in self._sources:
            raise Refused(f"there is no source {cut(name, 60)!r}; there are {', '.join(self._sources)}")
        loaded = self._stock.get(str(name), partial(self._make, str(name)) if self._may_load else None)
        if loaded is None:
            raise Refused(f"{cut(name, 60)} is not loaded here: this page may only tune on what an instructor's page has loaded "
                          f"({', '.join(self._stock.names) or 'nothing so far'})")  # fmt: skip
        shown = tuning.first_shown(loaded.material.runs)
        still = tuning.still(loaded.material, shown)
        self._loaded, self.shown, self.now, self.other, self._still = loaded, shown, loaded.first, None, still  # all, or what was stays
        self._draw_points()

    def _draw_points(self) -> None:
        self._dots, self._seen = tuning.points(self.points), len(self.points)

    def _make(self, name: str) -> Loaded:
        runs, base = self._sources[name]()
        if not runs:
            raise Refused(f"{name}: there is no run yet")
        base = self._base or base or tuning.first_setting(runs, self._job)
        material = tuning.Material(runs, base)
        first = material.trial({})
        drawn, _, _ = drawn_settings(base, tuning.ranges(material), _DRAWN, _SEED)
        return Loaded(material, first, deque(drawn[1 : POINTS + 1]), [({}, first.score)])

    def _set(self, args: Mapping[str, Any]) -> None:
        assert self.material is not None
        self.now = self.material.trial(_changes(args, self.material))

    def _look(self, args: Mapping[str, Any]) -> None:
        assert self.material is not None
        self.shown = whole("run", args.get("run"), len(self.material.runs) - 1)
        self._still = tuning.still(self.material, self.shown)

    def _point(self, args: Mapping[str, Any]) -> None:
        assert self.material is not None
        self.now = self.material.trial(self.points[whole("point", args.get("point"), len(self.points) - 1)][0])

    def _compare(self, args: Mapping[str, Any]) -> None:
        self.other = self.now if args.get("on") else None

    def _apply(self, args: Mapping[str, Any]) -> dict[str, Any]:
        if self._job is None:
            raise Refused("this is a recording: there is no job to apply it to")
        if self._right is not Right.INSTRUCTOR:
            raise Refused("this page may not change the job: it was opened without the instructor's token")
        if over := fate(self._job)[0]:
            raise Refused(f"{over}: nothing can be applied to it any more")
        assert self.now is not None
        values = {path: self.now.thresholds.get(path) for path in tuning.SLIDERS}
        began = time.monotonic()
        self._job.thresholds.update({path: value for path, value in values.items() if not isinstance(value, Relative)})
        return {"said": f"in force after {1000 * (time.monotonic() - began):.0f} ms"}


_VERBS: dict[str, Callable[[Tuner, Mapping[str, Any]], dict[str, Any] | None]] = {
    "load": Tuner._load, "set": Tuner._set, "look": Tuner._look, "point": Tuner._point, "compare": Tuner._compare, "apply": Tuner._apply,
}  # fmt: skip


def _changes(args: Mapping[str, Any], material: tuning.Material) -> dict[str, float]:
    """What a page's sliders show, as changes to the base; kept within the sliders."""
    found: dict[str, float] = {}
    for slider in material.sliders:
        value = args.get(slider.path)
        if value is None:
            continue
        seconds = min(slider.high, max(slider.low, number(slider.path, value)))
        if abs(seconds - slider.base) > 1e-3 * slider.base:
            found[slider.path] = round(seconds, 4)
    return found
