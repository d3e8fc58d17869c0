"""What callers hand to the replay API, held against what is allowed before anything is computed. Each raises ConfigError. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..core.thresholds import Thresholds
from ..errors import ConfigError, Contradiction
from .run import Run

_JUDGE = ("feed", "advance", "next_deadline")
EXAMPLE = '{"rollout.heartbeat": "2s"}'
"""Of changes: goes with the lab's other settings and with the paper's."""

_RUN = "must be the path of a run directory, an events.jsonl (also gzipped) or a Parquet file"


def path_of(value: Any, name: str = "path", allowed: str = _RUN) -> Path:
    if isinstance(value, str | Path) and str(value).strip() and "\0" not in str(value):
        try:
            return Path(value).expanduser()
        except RuntimeError:  # the home of nobody
            return Path(value)
    raise ConfigError(name, value, allowed)


def check_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ConfigError(name, value, "must be a number of seconds")


def check_run(value: Any) -> None:
    if not isinstance(value, Run):
        raise ConfigError("run", value, "must be a Run: robustrl.Run.load(path), or one of robustrl.corpus()")


def runs_of(value: Any, name: str = "runs") -> list[Run]:
    """Of one run, or of several."""
    if isinstance(value, Mapping):  # as robustrl.corpus() is one
        value = value.values()
    runs = [value] if isinstance(value, Run) else list(value) if isinstance(value, Iterable) and not isinstance(value, str) else None
    if not runs or not all(isinstance(run, Run) for run in runs):
        raise ConfigError(name, value, "must be a Run or at least one of them: robustrl.Run.load(path), or those of robustrl.corpus()")
    return runs


def check_changes(name: str, value: Any) -> None:
    """Of thresholds, by path."""
    if not isinstance(value, Mapping) or not all(isinstance(path, str) for path in value):
        raise ConfigError(name, value, f'must be a mapping from settings to values, e.g. {EXAMPLE}')


def check_thresholds(value: Any) -> None:
    if not isinstance(value, Thresholds):
        check_changes("thresholds", value)


def changed(own: Thresholds, changes: Mapping[str, Any]) -> Thresholds:
    """A run's ``own`` settings with changes; where these contradict what the run began with, the error says how to begin elsewhere."""
    try:
        return own.updated(changes)
    except Contradiction as error:
        how = "the others are those that the run began with; Thresholds.lab().updated({...}) changes the lab's instead"
        raise Contradiction(error.field, error.value, f"{error.allowed}; {how}") from None


def check_count(name: str, value: Any, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most:,}"
        raise ConfigError(name, value, f"must be a whole number of at least {least}{upper}")


def made_by(detector: Any) -> Any:
    """A fresh detector."""
    made = detector() if callable(detector) else None
    if not all(callable(getattr(made, name, None)) for name in _JUDGE):
        raise ConfigError("detector", detector, f"must make, when called, a detector: an object with {', '.join(_JUDGE)}")
    return made
