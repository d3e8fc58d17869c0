"""Sets of times as sorted lists of disjoint intervals (begin, end), in seconds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union; empty and reversed ones are left out."""
    found: list[Interval] = []
    for low, high in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def seconds(intervals: Iterable[Interval]) -> float:
    return sum(high - low for low, high in intervals)


def intersection(some: list[Interval], others: list[Interval]) -> list[Interval]:
    return joined((max(a, c), min(b, d)) for a, b in some for c, d in others)


def clipped(intervals: list[Interval], span: Interval) -> list[Interval]:
    return intersection(intervals, [span])


def without(some: list[Interval], others: list[Interval]) -> list[Interval]:
    """What is in ``some`` and not in ``others``."""
    left = some
    for low, high in others:
        left = joined(part for a, b in left for part in ((a, min(b, low)), (max(a, high), b)))
    return left


def seconds_until(moments: Sequence[float], weighted: Iterable[tuple[int, list[Interval]]]) -> list[float]:
    """At each of ``moments``, in order: how much of all intervals has passed, each times its weight. One pass, however many there are."""
    turns = sorted(turn for weight, times in weighted for low, high in times for turn in ((low, weight), (high, -weight)))
    found, total, slope, at, place = [], 0.0, 0, 0.0, 0
    for moment in moments:
        while place < len(turns) and turns[place][0] <= moment:
            total, at = total + slope * (turns[place][0] - at), turns[place][0]
            slope += turns[place][1]
            place += 1
        found.append(total + slope * (moment - at))
    return found
