"""What a live job lets one change: how it recovers, and the detector's thresholds. Reading shows what is in force, by the log; setting
checks here what the host would check, and applies at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from .core.recovery import MODES, STANDBYS
from .core.thresholds import Thresholds
from .errors import ConfigError, no_such

if TYPE_CHECKING:
    from .job import Job


class LiveRecovery:
    """How a live job recovers; reading shows what is in force, setting checks and applies. Raises ConfigError.

    ``mode``: observe (verdicts only), isolated (the failed role alone) or full (everything, the usual baseline). ``standbys``: warm (a warm
    process takes over, where there is one) or cold.
    """

    __slots__ = ("_job",)
    _NAMES: ClassVar = ("mode", "standbys")

    def __init__(self, job: Job) -> None:
        object.__setattr__(self, "_job", job)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._NAMES:
            raise ConfigError(f"recovery.{name}", value, no_such(name, self._NAMES, "recovery."))
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"recovery has no {name!r}; there are {', '.join(self._NAMES)}")

    def __dir__(self) -> list[str]:
        return [*self._NAMES]

    @property
    def mode(self) -> str:
        return self._job._state.recovery_mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._set("mode", mode, MODES)

    @property
    def standbys(self) -> str:
        return self._job._state.recovery_standbys

    @standbys.setter
    def standbys(self, standbys: str) -> None:
        self._set("standbys", standbys, STANDBYS)

    def _set(self, field: str, value: str, allowed: tuple[str, ...]) -> None:
        if value not in allowed:
            raise ConfigError(f"recovery.{field}", value, f"must be one of {', '.join(allowed)}")
        self._job._call("set_recovery", None, **{field: value})

    def __repr__(self) -> str:
        return f"mode {self.mode}, standbys {self.standbys}"


class LiveThresholds:
    """Sections of the thresholds of a live job; reading shows what is in force, setting checks and applies. Raises ConfigError."""

    def __init__(self, job: Job, section: str = "") -> None:
        object.__setattr__(self, "_job", job)
        object.__setattr__(self, "_section", section)

    @property
    def now(self) -> Thresholds:
        """What is in force."""
        with self._job._changed:
            return Thresholds.from_dict(self._job._state.thresholds)

    def update(self, changes: Mapping[str, Any]) -> None:
        """Several at once, by path (``{"rollout.heartbeat": "2s"}``): all of them, or none."""
        now = self.now
        now.updated(changes)  # raises here what the host would raise
        plain = {path: value if isinstance(value, str) else msgspec.to_builtins(now.parse(path, value)) for path, value in changes.items()}
        self._job._call("set_thresholds", None, changes=plain)

    def __getattr__(self, name: str) -> Any:
        if self._section:
            return self.now.get(f"{self._section}.{name}")
        if name not in Thresholds.__struct_fields__:
            raise AttributeError(f"thresholds have no section {name!r}; there are {', '.join(Thresholds.__struct_fields__)}")
        return LiveThresholds(self._job, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.update({f"{self._section}.{name}" if self._section else name: value})

    def __dir__(self) -> list[str]:
        if self._section:
            return [*type(getattr(self.now, self._section)).__struct_fields__]
        return [*Thresholds.__struct_fields__, "update", "now"]

    def __repr__(self) -> str:
        items = [(path, value) for path, value in self.now.items() if path.startswith(f"{self._section}." if self._section else "")]
        return "\n".join(f"{path:26} {value}" for path, value in items)
