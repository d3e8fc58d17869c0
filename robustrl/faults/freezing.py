"""How long a process may be frozen and nobody call it failed: by the thresholds in force, and by how old its last sign of life may be."""

from __future__ import annotations

from ..core.roles import RoleKind
from ..core.thresholds import KEEP_ALIVE, LEAST, SECTION, Thresholds
from ..errors import ConfigError
from .catalogue import Freeze

_LIMITS = {"trainer": ("no_compute", "silent"), "rollout": ("no_tokens", "wedged")}
"""Section -> its limits on a stopped process; of the others: silent."""
_LEAST_FREEZE = 0.01


def check_freeze(fault: Freeze, limits: Thresholds) -> None:
    """Frozen right after a sign of life, it must be back, and seen to be, before that sign is too old. Raises ConfigError."""
    section = SECTION.get(fault.kind, "management")
    values = [limits.get(f"{section}.{name}") for name in _LIMITS.get(section, ("silent",))]
    limit = min(value if isinstance(value, float) else value.floor for value in values)
    margin = LEAST + (KEEP_ALIVE if fault.kind is RoleKind.NODE_AGENT else 0.0)
    if fault.seconds <= (most := round(limit - margin, 6)):
        return
    allowed = f"must be at most {most:g}" if most >= _LEAST_FREEZE else "must not be at all with limits so short"
    why = f"the limit in force is {limit:g} s, and the last sign of life may be {margin:g} s old; longer would be a Hang"
    raise ConfigError(f"{fault.name}.seconds", fault.seconds, f"{allowed}: {why}")
