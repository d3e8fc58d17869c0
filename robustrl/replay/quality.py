"""How good a detector is, in the terms of Chen, Toueg and Aguilera (2002), and exact bounds on what was counted.

*Detection time*: from a fault to the verdict that stands; a fault that is never named counts as the whole time it was watched (restricted
mean), so that missing one is never cheaper than being late. *Mistake*: a verdict ``failed`` on a role that was well. *Mistake rate*: per
watched hour. *Mistake duration*: until it is taken back, or to the end. *Query accuracy*: share of the healthy role-time in which the
detector, if asked, is right. All times in seconds. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..core import events as ev


class Truth(NamedTuple):
    """What a log really holds. ``faults``: role -> time from which on it is to be called failed; ``excused``: roles of which anything may
    be said. The log is read from ``start`` up to ``end``; ``roles``: how many are watched."""

    faults: Mapping[str, float]
    excused: frozenset[str]
    roles: int
    start: float
    end: float


class Quality(NamedTuple):
    """What one detector made of some logs; add them up with `total`."""

    trials: int = 0
    faults: int = 0
    delays: tuple[float, ...] = ()
    """Of each fault that was found."""
    restricted: tuple[float, ...] = ()
    """Of each fault: the delay, or the whole time it was watched."""
    mistakes: int = 0
    wrong_trials: int = 0
    """Trials with a mistake."""
    mistaken: float = 0.0
    """Role-seconds."""
    healthy: float = 0.0
    """Role-seconds in which the role was well."""
    watched: float = 0.0
    """Seconds."""

    def table(self) -> dict[str, float | int | None | list[float]]:
        found, said = len(self.delays), len(self.delays) + self.mistakes
        hours = self.watched / 3600
        return {
            "trials": self.trials, "faults": self.faults, "found": found, "mistakes": self.mistakes,
            "detection_time_mean": _mean(self.delays), "detection_time_p95": percentile(self.delays, 0.95),
            "restricted_mean": _mean(self.restricted), "mistake_rate_per_hour": self.mistakes / hours if hours else None,
            "mistake_rate_upper_per_hour": poisson_upper(self.mistakes) / hours if hours else None,
            "mistake_duration_mean": self.mistaken / self.mistakes if self.mistakes else None,
            "query_accuracy": 1 - self.mistaken / self.healthy if self.healthy else None,
            "recall": found / self.faults if self.faults else None, "recall_bounds": list(exact_bounds(found, self.faults)),
            "precision": found / said if said else None, "precision_bounds": list(exact_bounds(found, said)),
        }  # fmt: skip


def judge_quality(verdicts: Iterable[ev.Verdict], truth: Truth, anybody: str = "") -> Quality:
    """Reads the verdicts ``failed`` and ``cleared`` of one log up to the first fault that is found: what a recovery makes of a job after
    that is no longer this log. A role that stands condemned when its fault comes is found at once. ``anybody``: a name that stands for
    whoever it was."""
    wrongly: dict[str, float] = {}
    """Who stands condemned by mistake, since when."""
    mistakes, mistaken, end = 0, 0.0, truth.end
    found: dict[str, float] = {}
    onsets = {anybody: min(truth.faults.values()), **truth.faults} if anybody and truth.faults else dict(truth.faults)

    def known(until: float) -> bool:
        for role, since in onsets.items():
            if role in wrongly and since <= until:
                found[role] = since
        return anybody in found or (bool(found) and len(found) >= len(truth.faults))

    for verdict in verdicts:
        if known(verdict.seen) or verdict.seen > truth.end:
            break
        role = verdict.role
        if verdict.kind == "cleared" and role in wrongly:
            mistaken += verdict.seen - wrongly.pop(role)
        elif verdict.kind == "failed" and verdict.seen >= truth.start:
            if verdict.seen >= onsets.get(role, math.inf):
                found.setdefault(role, verdict.seen)
            elif role not in truth.excused and role not in wrongly:
                mistakes += 1
                wrongly[role] = verdict.seen
    if known(truth.end):
        end = max(found.values())
    mistaken += sum(max(0.0, end - since) for since in wrongly.values())
    delays = tuple(at - onsets[role] for role, at in found.items())
    missed = tuple(truth.end - at for role, at in truth.faults.items() if role not in found) if anybody not in found else ()
    return Quality(1, len(delays) + len(missed), delays, delays + missed, mistakes, int(mistakes > 0), mistaken,
                   truth.roles * (end - truth.start), end - truth.start)  # fmt: skip


def total(parts: Sequence[Quality]) -> Quality:
    if not parts:
        return Quality()
    return Quality(*(sum(column, () if isinstance(column[0], tuple) else 0) for column in zip(*parts, strict=True)))  # type: ignore[arg-type]


def dominates(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points (mistake rate, delay) of ``theirs`` to which no point of ``ours`` is as good or better in both."""
    return [point for point in theirs if not any(mine[0] <= point[0] and mine[1] <= point[1] for mine in ours)]


def exact_bounds(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson: bounds of a share of which ``k`` of ``n`` were seen. 0 of n is not zero."""
    if not 0 <= k <= n:
        raise ValueError(f"{k} of {n}: must be between 0 and all")
    if n == 0:
        return 0.0, 1.0
    alpha = (1 - confidence) / 2
    lower = 0.0 if k == 0 else _solve(lambda p: 1 - _binomial_cdf(k - 1, n, p), alpha)
    upper = 1.0 if k == n else 1 - _solve(lambda p: 1 - _binomial_cdf(n - k - 1, n, p), alpha)
    return lower, upper


def poisson_upper(k: int, confidence: float = 0.95) -> float:
    """Upper bound of the mean of a count of which ``k`` was seen (0 seen: 3.69 at 95%, two-sided)."""
    alpha = (1 - confidence) / 2
    low, high = 0.0, 10.0 * (k + 2)
    for _ in range(100):
        middle = (low + high) / 2
        term, cdf = math.exp(-middle), 0.0
        for i in range(k + 1):
            cdf += term
            term *= middle / (i + 1)
        low, high = (middle, high) if cdf > alpha else (low, middle)
    return high


def poisson_lower(k: int, confidence: float = 0.95) -> float:
    """Lower bound of the mean of a count of which ``k`` was seen."""
    if k == 0:
        return 0.0
    alpha, low, high = (1 - confidence) / 2, 0.0, float(k)
    for _ in range(100):
        middle = (low + high) / 2
        below = sum(math.exp(i * math.log(middle) - middle - math.lgamma(i + 1)) for i in range(k))
        low, high = (middle, high) if 1 - below < alpha else (low, middle)
    return low


def percentile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that at least the share ``q`` does not exceed; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _solve(rising, alpha: float) -> float:  # type: ignore[no-untyped-def]
    """p in [0, 1] at which the rising function is alpha."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < alpha else (low, middle)
    return (low + high) / 2


def _binomial_cdf(k: int, n: int, p: float) -> float:
    if p <= 0 or p >= 1:
        return 1.0 if p <= 0 or k >= n else 0.0
    logs = math.log(p), math.log1p(-p)
    whole = math.lgamma(n + 1)
    return min(1.0, math.fsum(math.exp(whole - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * logs[0] + (n - i) * logs[1])
                              for i in range(k + 1)))  # fmt: skip
