"""Settings of the detector that are allowed each and not together: which, and how that is said. Pure.

The error names the setting that was changed, its value, the others with theirs, and what they must be like together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import ConfigError, Contradiction

Settings = Mapping[str, Any]
"""By path."""


class Together(NamedTuple):
    """A condition on several settings."""

    paths: tuple[str, ...]
    """Those it is about; the first is to blame where nobody changed any."""
    holds: Callable[[Settings], bool]
    says: Callable[[Settings], str]
    """What is allowed, and why."""


def contradiction(rules: Iterable[Together], settings: Settings, changed: Iterable[str] = ()) -> ConfigError | None:
    """Of the first rule that does not hold. It names the first of ``changed`` that takes part."""
    for rule in rules:
        if not rule.holds(settings):
            blamed = next((path for path in changed if path in rule.paths), rule.paths[0])
            others = [f"{path} ({_shown(settings[path])})" for path in rule.paths if path != blamed]
            goes = f"does not go with {' and '.join(others)}: " if others else ""
            kind = Contradiction if others else ConfigError
            return kind(blamed, settings[blamed], f"{goes}{rule.says(settings)}")
    return None


def _floor(limit: Any) -> float:
    """Of a multiple, the seconds below which it never is."""
    return float(getattr(limit, "floor", limit))


def _shown(limit: Any) -> str:
    return f"{limit:g} s" if type(limit) is float else str(limit)


def _beats(t: Settings) -> float:
    return float(t["rollout.no_tokens"] + t["rollout.heartbeat"] * t["rollout.strikes"])


def _not_below(path: str, other: str, why: str) -> Together:
    return Together((path, other), lambda t: _floor(t[path]) >= _floor(t[other]),
                     lambda t: f"{path} must not be shorter than {other} ({_shown(t[other])}): {why}")  # fmt: skip


def _below(path: str, other: str, why: str) -> Together:
    return Together((path, other), lambda t: _floor(t[path]) < _floor(t[other]),
                     lambda t: f"{path} must be shorter than {other} ({_shown(t[other])}): {why}")  # fmt: skip


_SPEAKS_FIRST = "the rule that knows the role must speak first"
_ITS_END = "a second fault would fall into the first one's end"
TOGETHER: list[Together] = [
    Together(
        ("rollout.heartbeat", "rollout.no_tokens"),
        lambda t: t["rollout.heartbeat"] <= t["rollout.no_tokens"],
        lambda t: f"rollout.heartbeat must not be longer than rollout.no_tokens ({_shown(t['rollout.no_tokens'])}): "
                  "the next suspicion would fall into the wait",
    ),
    _below("job.hysteresis", "rollout.no_tokens", _ITS_END),
    _below("job.hysteresis", "trainer.no_compute", _ITS_END),
    Together(
        ("job.process_group", "trainer.no_compute"),
        lambda t: t["job.process_group"] > _floor(t["trainer.no_compute"]),
        lambda t: f"job.process_group must be longer than trainer.no_compute ({_shown(t['trainer.no_compute'])}): "
                  "else the ranks that wait break first, and the one they wait for is never named",
    ),
    _not_below("trainer.no_marks", "trainer.no_compute", "a rank at work would be given less time than an idle one"),
    _not_below("trainer.silent", "trainer.no_compute", "a rank stopped in the train phase is that rule's to judge"),
    _not_below("trainer.grace", "trainer.no_compute", "grace stands for it at the start"),
    _not_below("trainer.grace", "trainer.no_marks", "grace stands for it at the start"),
    _not_below("rollout.wedged", "rollout.no_tokens", "an engine that stops while it decodes is that rule's to judge"),
    _not_below("rollout.grace", "rollout.no_tokens", "grace stands for it at the start"),
    _not_below("rollout.grace", "rollout.wedged", "grace stands for it at the start"),
    _not_below("job.stall", "trainer.no_marks", _SPEAKS_FIRST),
    _not_below("job.stall", "trainer.silent", _SPEAKS_FIRST),
    Together(
        ("job.stall", "rollout.no_tokens", "rollout.heartbeat", "rollout.strikes"),
        lambda t: _floor(t["job.stall"]) >= _beats(t),
        lambda t: "job.stall must not be shorter than rollout.no_tokens and the heartbeats after it, rollout.heartbeat x rollout.strikes "
                  f"({_beats(t):g} s): {_SPEAKS_FIRST}",
    ),
    _below("management.lag", "management.silent", "a loop that is late is reported before it is taken for dead"),
    _below("keeper.lag", "keeper.silent", "a loop that is late is reported before it is taken for dead"),
]  # fmt: skip
