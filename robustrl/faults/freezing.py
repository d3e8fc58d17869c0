"""How long a process may be frozen and nobody call it failed: by the thresholds in force, and by how old its last sign of life may be."""

from __future__ import annotations

from ..core.roles import RoleKind
from ..core.thresholds import KEEP_ALIVE, LEAST, SECTION, Thresholds
from ..errors import ConfigError
from .catalogue import Freeze

_LIMITS = {"trainer": ("no_compute", "silent"), "rollout": ("no_tokens", "wedged")}
"""Section -> its limits on a stopped process; of the others: silent."""
LEAST_FREEZE = 0.01
"""Seconds."""


def longest_freeze(kind: RoleKind, limits: Thresholds) -> float:
    """Seconds for which a role of this kind may be frozen; below LEAST_FREEZE: not at all."""
    limit, margin = _limit(kind, limits)
    return round(limit - margin, 6)


def check_freeze(fault: Freeze, limits: Thresholds) -> None:
    """Frozen right after a sign of life, it must be back, and seen to be, before that sign is too old. Raises ConfigError."""
    if fault.seconds <= (most := longest_freeze(fault.kind, limits)):
        return
    limit, margin = _limit(fault.kind, limits)
    allowed = f"must be at most {most:g}" if most >= LEAST_FREEZE else "must not be at all with limits so short"
    why = f"the limit in force is {limit:g} s, and the last sign of life may be {margin:g} s old; longer would be a Hang"
    raise ConfigError(f"{fault.name}.seconds", fault.seconds, f"{allowed}: {why}")


def _limit(kind: RoleKind, limits: Thresholds) -> tuple[float, float]:
    """The limit on a stopped process, and how old its last sign of life may be when it is stopped; seconds."""
    section = SECTION.get(kind, "management")
    values = [limits.get(f"{section}.{name}") for name in _LIMITS.get(section, ("silent",))]
    return (min(value if isinstance(value, float) else value.floor for value in values),
            LEAST + (KEEP_ALIVE if kind is RoleKind.NODE_AGENT else 0.0))
