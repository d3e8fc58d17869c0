"""Curves over the run: reward, accuracy, tokens per second, step time by phase, version lag, both ETTRs. Pure, and of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from robustrl.core import events as ev
from robustrl.core.roles import Phase, RoleKind
from robustrl.core.run_state import RunState
from robustrl.errors import counted

from .words import seconds

if TYPE_CHECKING:
    from robustrl.core.accounting import Ratio

    from .scene import Scene

POINTS = 300
_EARLY = 20
"""Optimizer steps before which a ratio of effective training time says little."""
_EVERY = 1.0
"""Seconds between two points of a curve over time, at first; doubled each time the curve is full."""


class Curves:
    """What is sampled along the log because the state does not remember it."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: dict[str, list[float]] = {}
        self.lag: list[int] = []
        self.ettr: dict[str, float] | None = None
        self.ettrs: list[list[float]] = []
        """[time, strict, paper]."""
        self._began: float | None = None
        self._steps = 0
        """Committed since the log began, those that were rolled back as well."""
        self._every, self._next = _EVERY, 0.0
        self._most: dict[str, tuple[int, int]] = {}

    def apply(self, entry: ev.Entry, state: RunState) -> None:
        if isinstance(entry.event, ev.RoleSample) and entry.event.phase == Phase.TRAIN:
            role, step, pending = entry.event.role, entry.event.step, entry.event.pending
            known, most = self._most.get(role, (step, 0))
            self._most[role] = (step, max(most, pending) if known == step else pending)
        t = entry.t - state.t0
        match entry.event:
            case ev.TrajectoriesStarted() if self._began is None:
                self._began = t
            case ev.OptimizerStepCommitted(step=step) if step > 0:
                self._steps += 1
        if t >= self._next:
            self._next = t + self._every
            self._point(t, state)

    def micro_batches(self, role: str) -> int:
        """The most that were left in this step of the trainer."""
        return self._most.get(role, (0, 0))[1]

    def take_ratios(self, found: Sequence[Ratio], t0: float) -> None:
        """Both effective training time ratios over the whole run so far: they need the whole log, so whoever has it computes them now and
        then, from its beginning on. So who comes late, and who opens a recording, sees the curve that the others see.
        """
        self.ettrs = [[round(each.t - t0, 1), round(each.strict, 4), round(each.paper, 4)] for each in found]
        self.ettr = {"strict": self.ettrs[-1][1], "paper": self.ettrs[-1][2]} if self.ettrs else None

    @property
    def early(self) -> str:
        """Why the newest ratios say little, in words; empty once they say something."""
        if not self.ettrs or self._steps >= _EARLY:
            return ""
        span = seconds(max(0.0, self.ettrs[-1][0] - (self._began or 0.0)))
        return (f"ETTR says little before {_EARLY} optimizer steps: this is of {span} and {counted(self._steps, 'step')}, in which the "
                "start-up or one outage weighs nearly all.")

    def _point(self, t: float, state: RunState) -> None:
        rates = state.tokens_per_second()
        lags = [state.newest - state.committed[role] for role, view in state.roles.items()
                if view.kind is RoleKind.ROLLOUT and role in state.committed]
        self.times.append(round(t, 1))
        self.lag.append(max(lags, default=0))
        for role in {*rates, *self.tokens}:
            curve = self.tokens.setdefault(role, [0.0] * (len(self.times) - 1))
            curve.append(round(rates.get(role, 0.0), 1))
        if len(self.times) > POINTS:
            self._every *= 2
            self.times, self.lag = self.times[::2], self.lag[::2]
            self.tokens = {role: curve[::2] for role, curve in self.tokens.items()}


def thin(rows: list[Any]) -> list[Any]:
    """At most `POINTS` of them, evenly, the last one always."""
    step = -(-len(rows) // POINTS)
    return rows if step <= 1 else rows[:-1][::step] + rows[-1:]


def picture(scene: Scene, now: float) -> dict[str, Any]:
    from .board import head

    state, curves = scene.state, scene.curves
    phases = sorted({name for row in state.metrics[-POINTS:] for name in row if name.startswith("seconds_")})
    rows = thin(state.metrics)
    return {
        "head": head(scene),
        "steps": [int(row["step"]) for row in rows],
        "at": [round(row["t"], 1) for row in rows],
        "reward": [_round(row.get("reward")) for row in rows],
        "phases": {name.removeprefix("seconds_"): [_round(row.get(name, 0.0)) for row in rows] for name in phases},
        "accuracy": [[done.version, round(done.accuracy, 4)] for done in thin(state.evaluations)],
        "times": list(curves.times), "tokens": {role: list(curve) for role, curve in curves.tokens.items()}, "lag": list(curves.lag),
        "ettrs": list(curves.ettrs), "race": scene.race.picture(state, now),
        "ledger": msgspec.to_builtins(state.ledger.balance()),
        "outages": [[round(episode.onset - state.t0, 1),
                     round((episode.record.until if episode.record.until is not None else state.t) - state.t0, 1), episode.record.role]
                    for episode in scene.episodes.all],
    }


def _round(value: float | None) -> float | None:
    return None if value is None or value != value or abs(value) == float("inf") else float(f"{value:.4g}")
