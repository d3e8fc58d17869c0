"""The timeline of a run: one lane per role, its phases and recoveries as bars, faults and steps as marks. Fed from the log, pure, bounded.

The last bar of a lane is open and reaches to now. A detection reaches back to the last sign of
life, which is known only afterwards: bars behind that moment are replaced. Where bars become too many, old ones are joined (bars.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from robustrl.core import events as ev
from robustrl.core.roles import QUIET, Phase, RoleState
from robustrl.core.run_state import RunState

from .bars import DETECT, IDLE, OFF, RECONNECT, RESTART, START, WORK, Bar, Stretch, thinned
from .episodes import Episode, Episodes
from .words import PHASES

BARS = 6000
"""In all lanes together, at most."""
_LEAST_PER_LANE = 60
_MARKS = 300
_BEFORE, _AFTER = 3.0, 4.0
"""Seconds around a recovery that stay whole as well."""
_CHUNK = 16
"""Bars that travel together: a delta resends those of the last chunk."""


class Lane:
    def __init__(self) -> None:
        self.bars: list[Bar] = []
        self._whole: dict[int, list[list[float | str]]] = {}
        """Chunks in which nothing changes any more, as they are drawn: most of a long run's."""

    def begin(self, t: float, code: str, phase: str) -> None:
        """From ``t`` on this is what the role does; nothing happens where it did that already."""
        if self.bars and (self.bars[-1].code, self.bars[-1].phase, self.bars[-1].end) == (code, phase, -1.0):
            return
        self.end(t)
        if code != OFF:
            self.bars.append(Bar(t, -1.0, code, phase))

    def end(self, t: float) -> None:
        if self.bars and self.bars[-1].end == -1.0:
            self.bars[-1].end = t
            if self.bars[-1].start >= t:
                self.bars.pop()

    def replace_from(self, onset: float, t: float, code: str, phase: str) -> None:
        """What was drawn after ``onset`` was none: it was this, until ``t``."""
        while self.bars and self.bars[-1].start >= onset:
            self.bars.pop()
        touched = (len(self.bars) - 1) // _CHUNK
        self._whole = {number: chunk for number, chunk in self._whole.items() if number < touched}
        self.end(t)
        if self.bars and self.bars[-1].end > onset:
            self.bars[-1].end = onset
        if t > onset:
            self.bars.append(Bar(onset, t, code, phase))

    def move(self, code: str, before: float, start: float) -> None:
        """The bar of this code that began at ``before`` begins at ``start``; the one in front of it reaches that far."""
        for place, bar in enumerate(self.bars):
            if bar.code == code and abs(bar.start - before) < 0.01 and (bar.end < 0 or start <= bar.end):
                bar.start = start
                if place and abs(self.bars[place - 1].end - before) < 0.01:
                    self.bars[place - 1].end = start
                self._whole.clear()
                return

    def keep(self, most: int, stretches: Sequence[Stretch] = ()) -> None:
        """No more than ``most`` bars. All chunks are new then, so there is room for the next quarter of them."""
        if len(self.bars) > most:
            self.bars = thinned(self.bars, max(1, most * 3 // 4), stretches)
            self._whole.clear()

    def drawn(self) -> dict[str, list[list[float | str]]]:
        """As `chunked` draws its bars."""
        chunks: dict[str, list[list[float | str]]] = {}
        for number in range(-(-len(self.bars) // _CHUNK)):
            if (chunk := self._whole.get(number)) is None:
                bars = self.bars[number * _CHUNK : (number + 1) * _CHUNK]
                chunk = [_row(bar.start, bar.end, bar.code, bar.phase) for bar in bars]
                if len(bars) == _CHUNK and bars[-1].end != -1.0:
                    self._whole[number] = chunk
            chunks[str(number)] = chunk
        return chunks


class Lanes:
    def __init__(self, bars: int | None = BARS) -> None:
        """``bars``: how many there may be; None: all of a log that is at hand whole, with all of its marks."""
        self._bars, marks = bars, None if bars is None else _MARKS
        self.lanes: dict[str, Lane] = {}
        self.marks: deque[list[float | str]] = deque(maxlen=marks)
        """[time, role, kind, words]; kind: fault or verdict."""
        self.steps: deque[list[float]] = deque(maxlen=marks)
        """[time, optimizer step]."""
        self._hidden: set[int] = set()

    def apply(self, entry: ev.Entry, state: RunState, episodes: Episodes) -> None:
        """Takes the next entry in; ``state`` and ``episodes`` have it already."""
        t = entry.t - state.t0
        for ended in episodes.closed:  # a node agent gives no samples of itself
            for role in ended.record.roles:
                self._follow(role, t, state, episodes)
        match entry.event:
            case ev.RoleSample(role=role) | ev.RoleReady(role=role):
                self._follow(role, t, state, episodes)
            case ev.RoleStarted(role=role):
                self.lanes.setdefault(role, Lane())
                for lane in self.lanes.values():
                    self._keep(lane, t, state, episodes)
                self._follow(role, t, state, episodes)
            case ev.Verdict(role=role, kind="suspect", onset=onset) if role in self.lanes:
                self._detected(role, onset - state.t0, t, DETECT)
            case ev.RoleStateChanged(role=role, new="failed", incarnation=life) if (
                    role in self.lanes and (episode := episodes.last_of(role))
                    and episode.began_with(role, life) and not episode.was_ended(role)):
                onset = episode.onset - state.t0
                self._detected(role, onset, t, RESTART)
                self._mark(onset, role, "verdict", f"rule {episode.record.rule}" if episode.record.rule else "failed")
            case ev.RestartDecided(role=role) if (episode := episodes.open_of(role)) and episode.asked:
                self._follow(role, t, state, episodes)
            case ev.RoleStateChanged(role=role) | ev.RestartDecided(role=role, mode="full"):
                self._follow(role, t, state, episodes)
            case ev.FaultPlanned(fault=fault, hidden=True):
                self._hidden.add(fault)
            case ev.FaultInjected(role=role, phase=phase, fault=fault):
                for episode, before in episodes.dated:
                    self._date(episode, before - state.t0, episode.onset - state.t0)
                if fault not in self._hidden:
                    view = state.faults.faults.get(fault)
                    done = view.hits[-1].t - state.t0 if view and view.hits else t
                    self._mark(done, role, "fault", f"fault {fault} in phase {PHASES.get(phase, phase)}" if phase else f"fault {fault}")
            case ev.OptimizerStepCommitted(step=step):
                self.steps.append([t, step])
            case ev.RunEnded():
                for lane in self.lanes.values():
                    lane.end(t)

    def _detected(self, role: str, onset: float, t: float, then: str) -> None:
        self.lanes[role].replace_from(max(0.0, min(onset, t)), t, DETECT, "")
        self.lanes[role].begin(t, then, "")

    def _date(self, episode: Episode, before: float, onset: float) -> None:
        """Detection was drawn from the last sign of life on; now it is known when the fault was done."""
        for role in episode.record.roles:
            if role in self.lanes:
                self.lanes[role].move(DETECT, before, onset)
        for mark in self.marks:
            if mark[1:3] == [episode.record.role, "verdict"] and abs(float(mark[0]) - before) < 0.01:
                mark[0] = round(onset, 3)

    def _mark(self, t: float, role: str, kind: str, words: str) -> None:
        near = [mark for mark in self.marks if mark[1] == role and abs(float(mark[0]) - t) < 1.0]
        if kind == "verdict" and near:  # the fault that it found stands there already
            return
        for mark in near if kind == "fault" else ():
            if mark[2] == "verdict":
                self.marks.remove(mark)
        self.marks.append([round(t, 3), role, kind, words])

    def _follow(self, role: str, t: float, state: RunState, episodes: Episodes) -> None:
        view, lane = state.roles.get(role), self.lanes.get(role)
        if view is None or lane is None:
            return
        phase, episode = view.phase, episodes.open_of(role)
        match view.state:
            case _ if episode and episode.ended_for_it(role, view.incarnation):
                code, phase = RESTART, ""
            case RoleState.STARTING:
                code, phase = START, ""
            case RoleState.FAILED | RoleState.RESTARTING:
                code, phase = RESTART, ""
            case RoleState.STALE:
                code = RECONNECT if view.incarnation > 1 else START
            case RoleState.SUSPECT:
                code = DETECT
            case RoleState.STOPPED:
                code = OFF
            case _:
                code = RECONNECT if phase == Phase.PULL or episode else IDLE if not phase or phase in QUIET else WORK
        lane.begin(t, code, phase)
        self._keep(lane, t, state, episodes)

    def _keep(self, lane: Lane, t: float, state: RunState, episodes: Episodes) -> None:
        if self._bars is None:
            return
        most = max(_LEAST_PER_LANE, self._bars // max(1, len(self.lanes)))
        if len(lane.bars) > most:
            lane.keep(most, [_stretch(episode, t, state.t0) for episode in episodes.all])

    def picture(self) -> dict[str, object]:
        return {
            "lanes": {role: lane.drawn() for role, lane in self.lanes.items()},
            "marks": {str(index): mark for index, mark in enumerate(self.marks)},
            "steps": [[round(t, 3), step] for t, step in self.steps],
        }


def _stretch(episode: Episode, t: float, t0: float) -> Stretch:
    """A recovery, with a little of before and after."""
    over = episode.record.until if episode.record.until is not None else t + t0
    return episode.onset - t0 - _BEFORE, over - t0 + _AFTER


def chunked(bars: Iterable[tuple[float, float, str, str]]) -> dict[str, list[list[float | str]]]:
    """Chunk number, counted from the first bar -> its bars."""
    chunks: dict[str, list[list[float | str]]] = {}
    for place, bar in enumerate(bars):
        chunks.setdefault(str(place // _CHUNK), []).append(_row(*bar))
    return chunks


def _row(start: float, end: float, code: str, phase: str) -> list[float | str]:
    return [round(start, 2), round(end, 2), code, phase]
