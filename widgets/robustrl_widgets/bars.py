"""Bars of a timeline, and how many of them become few: what is small on the picture of the whole run is joined. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from .words import PHASES

WORK, IDLE, DETECT, RESTART, RECONNECT, START, OFF = "w", "i", "d", "r", "c", "s", "x"
CODES = {WORK: "working", IDLE: "waiting (normal)", DETECT: "detect", RESTART: "restart", RECONNECT: "reconnect / pull",
         START: "starting up", OFF: "ended"}
_STAGES = (DETECT, RESTART)
_PIXELS = 1000
"""Of a picture of the whole run."""
_MOSTLY = "mostly "

Stretch = tuple[float, float]


@dataclass(slots=True)
class Bar:
    start: float
    end: float
    """-1 while it goes on."""
    code: str
    phase: str


def thinned(bars: Sequence[Bar], most: int, stretches: Sequence[Stretch] = ()) -> list[Bar]:
    """At most ``most`` bars over the same time: neighbours become one, which is what they mostly were, first those that are together below
    a pixel of the whole run. As long as there is room the newest, those in ``stretches`` (newest last), and detections and restarts stay.
    """
    if len(bars) <= most:
        return list(bars)
    span = max(1e-3, max(bars[-1].start, bars[-1].end) - bars[0].start)
    stages = [bar.code in _STAGES for bar in bars]
    fresh = [place >= len(bars) - max(1, most // 4) for place in range(len(bars))]
    within = _within(bars, stretches, most // 2)
    last = [False] * (len(bars) - 1) + [True]  # it may go on
    found = list(bars)
    for alone in (_any(stages, fresh, within), _any(stages, last), last):
        width = span / _PIXELS
        while width < 3 * span:
            found = _joined(bars, width, alone)
            if len(found) <= most:
                return found
            width *= 1.5
    return found[-most:]


def _any(*flags: Sequence[bool]) -> list[bool]:
    return [any(each) for each in zip(*flags, strict=True)]


def _within(bars: Sequence[Bar], stretches: Sequence[Stretch], most: int) -> list[bool]:
    """Those of the newest stretches that have not more than ``most`` in all."""
    found, left, starts = [False] * len(bars), most, [bar.start for bar in bars]
    for low, high in reversed(stretches):
        first, end = bisect_left(starts, low), bisect_left(starts, high)
        if first and (bars[first - 1].end > low or bars[first - 1].end < 0):
            first -= 1
        left -= end - first
        if left < 0:
            break
        found[first:end] = [True] * (end - first)
    return found


def _joined(bars: Sequence[Bar], width: float, alone: Sequence[bool]) -> list[Bar]:
    found: list[Bar] = []
    cell: list[Bar] = []
    for bar, stays in zip(bars, alone, strict=True):
        if cell and (stays or bar.end - cell[0].start > width):
            found.append(_one(cell))
            cell = []
        if stays:
            found.append(bar)
        else:
            cell.append(bar)
    return [*found, _one(cell)] if cell else found


def _one(cell: Sequence[Bar]) -> Bar:
    """What they mostly were; a failure in it is not lost."""
    if len(cell) == 1:
        return cell[0]
    times: dict[tuple[str, str], float] = {}
    codes: dict[str, float] = {}
    for bar in cell:
        kind = bar.code, bar.phase.removeprefix(_MOSTLY)
        kind = kind if bar.phase.startswith(_MOSTLY) else (bar.code, PHASES.get(bar.phase, bar.phase))
        times[kind] = times.get(kind, 0.0) + bar.end - bar.start
        codes[bar.code] = codes.get(bar.code, 0.0) + bar.end - bar.start
    code = max(codes, key=lambda code: (code in _STAGES, codes[code]))
    phase = max((kind for kind in times if kind[0] == code), key=lambda kind: times[kind])[1]
    same = len(times) == 1 and len({bar.phase for bar in cell}) == 1
    return Bar(cell[0].start, cell[-1].end, code, cell[0].phase if same else _MOSTLY + (phase or CODES.get(code, code)))
