"""The detector's settings: validated, immutable, by section. Durations are seconds.

A limit may be *relative*: a multiple of the median of a role's own history, once that is long enough. `Thresholds.paper()` holds what the
RobustRL paper publishes (300 s and 60 s), and our choices where it publishes nothing; `lab()` is the same in seconds; `relative()` adapts.
`replace` and `parse` raise ConfigError that names the field, the value and what is allowed; so do settings that contradict each other.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from ..errors import ConfigError, no_such
from .contradictions import TOGETHER, Together, contradiction
from .roles import Phase, RoleKind

SAMPLING = 0.1
"""Seconds between two looks of a node agent."""
KEEP_ALIVE = 1.0
"""Longest time without a logged sample of a role that is watched."""
LEAST = 0.3
"""Three looks; as text says it, not as 3 * SAMPLING comes out. No limit is shorter: a single late look must not pass it."""
MOST_SECONDS = 10.0**7
"""No duration is longer (116 days): beyond it a number is a slip, and would only fail later in a clock that cannot hold it."""
_MOST_TIMES = 10.0**6
_MOST_COUNT = 10**6
_EXACT = 2**53
_UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0}
_TEXT = re.compile(r" *([0-9]*\.?[0-9]+(?:e-?[0-9]+)?) *(ms|s|min|h|x|) *", re.IGNORECASE | re.ASCII)
"""Blanks and no other white space: a line break in a setting is a slip. ASCII: else there are letters beyond it that match an s."""


def plain_number(value: Any) -> Any:
    """Python's own number for one of another library (numpy's, say); anything else as it is."""
    if isinstance(value, bool) or type(value) in (int, float) or not isinstance(value, numbers.Real):
        return value
    try:
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    except (TypeError, OverflowError):  # numpy's spans of time count as numbers, and a fraction may be larger than any float
        return value


class Relative(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``times`` x the median of the role's own history, at least ``floor``; ``floor`` alone until there are ``least`` observations."""

    times: float
    floor: float
    least: int = 5

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = plain_number(getattr(self, field))
            if type(value) is int and field != "least" and abs(value) < _EXACT:
                value = float(value)
            if type(value) is not (int if field == "least" else float):
                what = "a whole number of observations" if field == "least" else "a number"
                raise ConfigError(f"multiple.{field}", value, f"must be {what}, e.g. Relative(times=4, floor=3, least=5)")
            msgspec.structs.force_setattr(self, field, value)

    def seconds(self, history: list[float]) -> float:
        """``history``: durations, sorted."""
        if len(history) < self.least:
            return self.floor
        return max(self.floor, self.times * history[len(history) // 2])

    def __str__(self) -> str:
        return f"{self.times:g}x (at least {self.floor:g} s)"


Limit = float | Relative


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class JobLimits(_Section, frozen=True, kw_only=True):
    stall: Limit
    """Work remains and no optimizer step is committed. History: times between commits."""
    start: float
    """From a process's start until its role is ready."""
    hysteresis: float
    """How long a sign must be gone before it is cleared."""
    process_group: float
    """Time-out of the trainer ranks' process group, taken as the ranks' lives begin."""


class TrainerLimits(_Section, frozen=True, kw_only=True):
    no_compute: Limit
    """Activity below the floor in the train phase. History: durations of the train phase."""
    no_marks: Limit
    """Active in the train phase, but no micro-batch ends. History: durations of the train phase."""
    silent: float
    """The control loop does not come round, in any phase."""
    grace: float
    """Stands for no_compute and no_marks until the first micro-batch of a life."""
    activity_floor: float
    """Fraction of a core (or of an accelerator) that counts as activity."""
    advantage: Limit
    """Reported when the phase lasts longer; so are the next three."""
    optimizer: Limit
    snapshot: Limit
    publish: Limit
    straggler: float
    """How many times slower than its peers' median a role is reported."""


class RolloutLimits(_Section, frozen=True, kw_only=True):
    no_tokens: float
    """Runnable work and no token: suspect, and a heartbeat is sent."""
    wedged: float
    """The engine loop does not come round, in any phase: suspect, and a heartbeat is sent."""
    heartbeat: float
    """The engine loop's time to answer one."""
    strikes: int
    """Heartbeats in a row that must go unanswered."""
    answers: int
    """Heartbeats that may be answered in a row without a token made."""
    grace: float
    """Stands for no_tokens and wedged until the first token of a life."""
    pull: Limit
    """Reported when a pull takes longer. History: this rollout's pulls."""
    straggler: float


class LoopLimits(_Section, frozen=True, kw_only=True):
    silent: float
    """The event loop does not come round."""
    lag: float
    """Reported when the loop was that late."""


class KeeperLimits(LoopLimits, frozen=True, kw_only=True):
    checkpoint: Limit = 600.0
    """Reported when a checkpoint is so long on its way to the disk. History: this keeper's checkpoints."""


class NodeLimits(_Section, frozen=True, kw_only=True):
    silent: float
    """No word from a node agent."""


CHECKPOINT = "checkpoint"
HISTORY = {
    "job.stall": "step", "trainer.no_compute": Phase.TRAIN, "trainer.no_marks": Phase.TRAIN, "trainer.advantage": Phase.ADVANTAGE,
    "trainer.optimizer": Phase.OPTIMIZER, "trainer.snapshot": Phase.SNAPSHOT, "trainer.publish": Phase.PUBLISH, "rollout.pull": Phase.PULL,
    "keeper.checkpoint": CHECKPOINT,
}  # fmt: skip
"""Path of each setting that may be relative -> the durations it is a multiple of."""
OVERDUE = (Phase.ADVANTAGE, Phase.OPTIMIZER, Phase.SNAPSHOT, Phase.PUBLISH)
"""Trainer phases that have a limit of their own name."""


class Thresholds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    job: JobLimits
    trainer: TrainerLimits
    rollout: RolloutLimits
    management: LoopLimits
    keeper: KeeperLimits
    node: NodeLimits

    def __post_init__(self) -> None:
        for path, value in self.items():
            _check_value(path, value)
        if error := contradiction(_TOGETHER, dict(self.items())):
            raise error

    @classmethod
    def paper(cls) -> Self:
        return cls(
            job=JobLimits(stall=1800.0, start=1800.0, hysteresis=10.0, process_group=1800.0),
            trainer=TrainerLimits(no_compute=300.0, no_marks=600.0, silent=300.0, grace=900.0, activity_floor=0.05, advantage=600.0,
                                  optimizer=600.0, snapshot=600.0, publish=600.0, straggler=3.0),
            rollout=RolloutLimits(no_tokens=60.0, wedged=90.0, heartbeat=30.0, strikes=1, answers=20, grace=600.0, pull=300.0,
                                  straggler=3.0),
            management=LoopLimits(silent=60.0, lag=5.0),
            keeper=KeeperLimits(silent=60.0, lag=10.0, checkpoint=600.0),
            node=NodeLimits(silent=30.0),
        )  # fmt: skip

    @classmethod
    def lab(cls) -> Self:
        return cls(
            job=JobLimits(stall=90.0, start=240.0, hysteresis=0.5, process_group=60.0),
            trainer=TrainerLimits(no_compute=3.0, no_marks=10.0, silent=5.0, grace=30.0, activity_floor=0.05, advantage=10.0,
                                  optimizer=10.0, snapshot=10.0, publish=10.0, straggler=3.0),
            rollout=RolloutLimits(no_tokens=3.0, wedged=5.0, heartbeat=3.0, strikes=1, answers=10, grace=30.0, pull=10.0, straggler=3.0),
            management=LoopLimits(silent=5.0, lag=1.0),
            keeper=KeeperLimits(silent=5.0, lag=2.0, checkpoint=10.0),
            node=NodeLimits(silent=5.0),
        )  # fmt: skip

    @classmethod
    def named(cls, name: str) -> Self:
        """``paper``, ``lab`` or ``relative``."""
        known = {"paper": cls.paper, "lab": cls.lab, "relative": cls.relative}
        if not isinstance(name, str) or name not in known:
            raise ConfigError("thresholds", name, f"must be one of {', '.join(known)}")
        return known[name]()

    @classmethod
    def relative(cls, times: float = 4.0) -> Self:
        """As `lab`, with multiples of a role's own history wherever there is one; the lab's seconds are their floors."""
        made = cls.lab()
        values = {path: Relative(times, made.get(path)) for path in HISTORY}
        return made._with({**values, "trainer.no_marks": Relative(2 * times, made.get("trainer.no_marks"))})

    def get(self, path: str) -> Any:
        """The value at ``section.name``. Raises ConfigError for an unknown path."""
        section, name = _known(path)
        return getattr(getattr(self, section), name)

    def items(self) -> list[tuple[str, Any]]:
        return [(path, self.get(path)) for path in PATHS]

    def replace(self, path: str, value: Any) -> Self:
        """With the setting at ``path`` (e.g. ``rollout.no_tokens``) replaced; ``value``: as `parse` takes it."""
        return self._with({path: self.parse(path, value)})

    def updated(self, changes: Mapping[str, Any]) -> Self:
        """With all of ``changes`` (path -> value as `parse` takes it) made at once; only the result has to be free of contradictions."""
        if not isinstance(changes, Mapping):
            raise ConfigError("thresholds", changes, 'must be settings by path, e.g. {"rollout.heartbeat": "2s"}')
        return self._with({path: self.parse(path, value) for path, value in changes.items()})

    def parse(self, path: str, value: Any) -> Any:
        """``value`` as the setting at ``path`` takes it: seconds, "3s", "250ms", "2min", "1h", or "4x": relative, with today's as floor.
        Also a `Relative`, or its fields by name.
        """
        _known(path)
        if not isinstance(value, str):
            value = plain_number(value)
            if type(value) is int and path not in _COUNTS and abs(value) <= MOST_SECONDS:
                value = float(value)
            if isinstance(value, Mapping) and path in HISTORY:
                value = _relative(path, value)
            _check_value(path, value)
            return value
        match = _TEXT.fullmatch(value)
        if not match:
            raise ConfigError(path, value, _allowed(path))
        number, unit = float(match[1]), match[2].lower()
        present = self.get(path)
        if unit == "x":
            floor = present.floor if isinstance(present, Relative) else present
            made: Any = Relative(number, floor) if path in HISTORY else math.nan
            if path in _FACTORS:
                made = number
        elif path in _COUNTS:
            made = int(number) if unit == "" and number.is_integer() else math.nan
        elif path in _FACTORS or path in _FRACTIONS:
            made = number if unit == "" else math.nan
        else:
            made = number * _UNITS[unit]
        if made is math.nan:
            raise ConfigError(path, value, _allowed(path))
        try:
            _check_value(path, made)
        except ConfigError as error:
            raise ConfigError(path, value, error.allowed) from None  # as it was given, not as it came out
        return made

    def changes(self, other: Thresholds) -> dict[str, list[Any]]:
        """Path -> [value here, value there], plain, where they differ: the ``changes`` of a ThresholdsChanged."""
        return {path: msgspec.to_builtins([a, b]) for (path, a), (_, b) in zip(self.items(), other.items(), strict=True) if a != b}

    def to_dict(self) -> dict[str, Any]:
        """Plain: the ``thresholds`` of a ThresholdsChanged."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`. Raises ConfigError for unknown names, wrong types and contradictions."""
        try:
            return msgspec.convert(dict(values) if isinstance(values, Mapping) else None, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise _what_is_wrong(values) or ConfigError("thresholds", values, f"must hold every section and setting: {error}") from None

    def _with(self, values: Mapping[str, Any]) -> Self:
        sections: dict[str, dict[str, Any]] = {}
        for path, value in values.items():
            section, name = _known(path)
            sections.setdefault(section, {})[name] = value
        made = {name: msgspec.structs.replace(getattr(self, name), **changes) for name, changes in sections.items()}
        present = dict(self.items())
        if error := contradiction(_TOGETHER, present | dict(values), [path for path in values if values[path] != present[path]]):
            raise error
        return msgspec.structs.replace(self, **made)


PATHS = tuple(
    f"{section.name}.{name}" for section in msgspec.structs.fields(Thresholds) for name in section.type.__struct_fields__
)
SECTION = {RoleKind.TRAINER: "trainer", RoleKind.ROLLOUT: "rollout", RoleKind.STATE_KEEPER: "keeper", RoleKind.NODE_AGENT: "node"}
"""Section of a role kind; all others: management."""
_COUNTS = {"rollout.strikes", "rollout.answers"}
_FACTORS = {"trainer.straggler", "rollout.straggler"}
_FRACTIONS = {"trainer.activity_floor"}
_MAY_BE_ZERO = {"job.hysteresis"}


def _what_is_wrong(values: Any) -> ConfigError | None:
    """The first thing in plain ``values`` that is no setting, is missing, or is not what its setting takes."""
    sections = {field.name: field.type for field in msgspec.structs.fields(Thresholds)}
    if not isinstance(values, Mapping):
        return ConfigError("thresholds", values, f"must be settings by section and name; the sections are {', '.join(sections)}")
    for section, found in values.items():
        if section not in sections:
            return ConfigError("thresholds", section, no_such(str(section), sections))
        if not isinstance(found, Mapping):
            return ConfigError(f"thresholds.{section}", found, f"must be settings by name: {', '.join(_names(section))}")
        for name in found:
            if name not in _names(section):
                return ConfigError(f"thresholds.{section}", name, no_such(str(name), _names(section), f"{section}."))
    for section, kind in sections.items():
        for field in msgspec.structs.fields(kind):
            path, of_section = f"{section}.{field.name}", values.get(section, {})
            if field.name not in of_section and not field.required and of_section:
                continue
            value = of_section.get(field.name)
            try:
                _check_value(path, _relative(path, value) if isinstance(value, Mapping) and path in HISTORY else plain_number(value))
            except ConfigError as error:
                if type(value) is not int or path in _COUNTS:
                    return error
    return None


def _names(section: str) -> list[str]:
    return [path.partition(".")[2] for path in PATHS if path.startswith(f"{section}.")]


def _relative(path: str, values: Mapping[str, Any]) -> Relative:
    try:
        return msgspec.convert(dict(values), Relative)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        allowed = 'must be a time, a multiple such as "4x", or the fields of one by name: times, floor and, if wanted, least'
        raise ConfigError(path, values, f"{allowed} ({error})") from None


def _known(path: str) -> tuple[str, str]:
    if not isinstance(path, str):
        raise ConfigError("threshold", path, "must be the path of a setting as text, e.g. rollout.no_tokens")
    section, _, name = path.partition(".")
    if path not in PATHS:
        here = _names(section)
        below = [known for known in PATHS if known.partition(".")[2] == path]
        said = no_such(name, here, f"{section}.") if here else no_such(path, PATHS, below=below)
        raise ConfigError("threshold", path, said)
    return section, name


def _allowed(path: str) -> str:
    if path in _COUNTS:
        return f"must be a whole number from 1 on, and at most {_MOST_COUNT}"
    if path in _FACTORS:
        return f'must be a factor above 1 and at most {_MOST_TIMES:.10g}, e.g. 3 or "3x"'
    if path in _FRACTIONS:
        return "must be a fraction of a core, above 0 and at most 1"
    least = 0.0 if path in _MAY_BE_ZERO else LEAST
    relative = ', or a multiple of its own history such as "4x"' if path in HISTORY else ""
    return f'must be a finite time of at least {least:g} s and at most {MOST_SECONDS:.10g} s, e.g. 3, "3s", "250ms" or "2min"{relative}'


def _check_value(path: str, value: Any) -> None:
    if path in _COUNTS:
        good = type(value) is int and 1 <= value <= _MOST_COUNT
    elif not isinstance(value, Relative):
        good = type(value) is float and math.isfinite(value)
        if good and path in _FACTORS:
            good = 1 < value <= _MOST_TIMES
        elif good and path in _FRACTIONS:
            good = 0 < value <= 1
        elif good:
            good = (0.0 if path in _MAY_BE_ZERO else LEAST) <= value <= MOST_SECONDS
    else:
        good = path in HISTORY and 1 <= value.times <= _MOST_TIMES and LEAST <= value.floor <= MOST_SECONDS
        good = good and 1 <= value.least <= _MOST_COUNT
        if path in HISTORY and not good:
            most = f"and at most {_MOST_TIMES:.10g}x, {MOST_SECONDS:.10g} s and {_MOST_COUNT}"
            raise ConfigError(path, str(value), f"a multiple must be at least 1x, its floor {LEAST:g} s, its observations 1, {most}")
    if not good:
        raise ConfigError(path, str(value) if isinstance(value, Relative) else value, _allowed(path))


_TOGETHER = [
    *TOGETHER,
    Together(("node.silent",), lambda t: t["node.silent"] >= 2 * KEEP_ALIVE,
             lambda t: f"must be at least {2 * KEEP_ALIVE:g} s: a healthy agent may say nothing for {KEEP_ALIVE:g} s"),
]  # fmt: skip
