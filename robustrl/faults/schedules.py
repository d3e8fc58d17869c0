"""Schedules: which fault is to come at which moment. Pure and seeded: the same schedule, seed and length give the same list.

A moment is an optimizer step (also a share of it: a quarter of the way through, by the length of the step before) or a time in seconds
after the schedule was given. Resolved against what a run's log says: planner.py.
"""

from __future__ import annotations

import itertools
import json
import random
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Union, get_args

import msgspec

from ..core.thresholds import MOST_SECONDS
from ..errors import ConfigError
from .catalogue import AnyFault, CleanExit, Fault, Hang, Kill, RaiseException, Wedge, make_fault
from .checks import MOST_SEED, MOST_STEPS, Checked, made_of, named, placed, settings_of

_LEAST_RATE, _MOST_RATE = 1e-4, 600.0
"""Faults in a minute: from one in a week on, up to ten in a second."""


class Occurrence(NamedTuple):
    """``fault`` (its own ``step`` and ``after`` say when), ``share`` of the way through its step."""

    fault: Fault
    share: float = 0.0


class Schedule(Checked, frozen=True, tag_field="schedule", forbid_unknown_fields=True, kw_only=True):
    seed: int | None = None
    """None: the job's."""
    hidden: bool = False
    """Kind and target are shown only once they are revealed: somebody is to find out."""

    endless: ClassVar[bool] = False
    """Planned one by one, each as the one before it comes."""

    def __post_init__(self) -> None:
        self._whole("seed", "a whole number", least=0, most=MOST_SEED, none=True)
        self._flags("hidden")

    def occurrences(self, steps: int, seed: int, committed: int = 0) -> Iterator[Occurrence]:
        """In the order in which they come; may be endless. ``steps``: of the job; ``committed``: those behind it by now."""
        raise NotImplementedError

    def _draw(self, seed: int) -> random.Random:
        return random.Random(f"{self.name}/{seed if self.seed is None else self.seed}")

    def _check_fault(self, field: str, fault: Any, *, stepless: bool) -> None:
        """``stepless``: the schedule says in which step it comes."""
        if not isinstance(fault, Fault):
            raise self._wrong(field, fault, "must be a fault of robustrl.faults, e.g. Kill('rollout')")
        if stepless and fault.step is not None:
            raise self._wrong(field, fault, f"must have no step of its own: {self.name} sets it")

    def _check_faults(self) -> None:
        faults: Any = getattr(self, "faults", None)
        if not isinstance(faults, list | tuple) or not faults:
            raise self._wrong("faults", faults, "must hold a fault, in a list, e.g. [Kill('rollout')]")
        for i, fault in enumerate(faults):
            self._check_fault(f"faults[{i}]", fault, stepless=False)
        msgspec.structs.force_setattr(self, "faults", list(faults))


class _Step(Schedule, frozen=True):
    step: int
    fault: AnyFault


class AtStep(_Step, frozen=True, tag="at_step"):
    """``AtStep(5, Kill("trainer"))``: once, while optimizer step 5 runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_fault("fault", self.fault, stepless=True)
        self._whole("step", "an optimizer step", least=1, most=MOST_STEPS)

    def occurrences(self, steps: int, seed: int, committed: int = 0) -> Iterator[Occurrence]:
        yield Occurrence(msgspec.structs.replace(self.fault, step=self.step))


class _EveryN(Schedule, frozen=True):
    every: int
    fault: AnyFault


class EveryNSteps(_EveryN, frozen=True, kw_only=True, tag="every_n_steps"):
    """``EveryNSteps(5, Kill("rollout"))``: in steps 5, 10, 15, ...; of a running job, in those that are still to come."""

    first: int | None = None
    """None: step ``every``."""
    endless = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("every", "a number of optimizer steps", least=1, most=MOST_STEPS)
        self._whole("first", "an optimizer step", least=1, most=MOST_STEPS, none=True)
        self._check_fault("fault", self.fault, stepless=True)

    def occurrences(self, steps: int, seed: int, committed: int = 0) -> Iterator[Occurrence]:
        for step in range(self.first or self.every, steps + 1, self.every):
            if step > committed + 1:
                yield Occurrence(msgspec.structs.replace(self.fault, step=step))


class PaperFrequency(Schedule, frozen=True, kw_only=True, tag="paper_frequency"):
    """RobustRL's "f%": round(f% x steps) faults, one at a random moment in each of as many equal stretches of the job."""

    percent: float
    fault: AnyFault = Kill("trainer")

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(percent := self._plain("percent")) not in (int, float) or not 0 < percent <= 100:
            raise self._wrong("percent", percent, "must be a number above 0 and at most 100")
        self._check_fault("fault", self.fault, stepless=True)

    def occurrences(self, steps: int, seed: int, committed: int = 0) -> Iterator[Occurrence]:
        draw, count = self._draw(seed), round(self.percent / 100 * steps)
        for i in range(count):
            moment = steps * (i + draw.random()) / count
            step = int(moment) + 1
            if step > committed + 1:
                yield Occurrence(msgspec.structs.replace(self.fault, step=step), moment - int(moment))


class Poisson(Schedule, frozen=True, kw_only=True, tag="poisson"):
    """A Poisson process: ``per_minute`` faults on average, each drawn from ``faults``."""

    per_minute: float
    faults: list[AnyFault]
    count: int | None = None
    """None: for as long as the job runs."""
    endless = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("per_minute", least=_LEAST_RATE, most=_MOST_RATE, what="a finite number of faults in a minute")
        self._whole("count", "a number of faults", least=1, most=MOST_STEPS, none=True)
        self._check_faults()

    def occurrences(self, steps: int, seed: int, committed: int = 0) -> Iterator[Occurrence]:
        draw, at = self._draw(seed), 0.0
        for _ in range(self.count) if self.count else itertools.count():
            at += draw.expovariate(self.per_minute / 60)
            fault = draw.choice(self.faults)
            if at + fault.after > MOST_SECONDS:
                return  # no job is as long
            yield Occurrence(msgspec.structs.replace(fault, after=at + fault.after))


class FaultList(Schedule, frozen=True, kw_only=True, tag="list"):
    """A list of faults, each with its own step, phase or time. ``FaultList.read("faults.toml")`` takes them from a file."""

    faults: list[AnyFault]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_faults()

    @classmethod
    def read(cls, path: str | Path, *, hidden: bool = False) -> FaultList:
        """TOML (tables ``[[faults]]``) or JSON (a list, or {"faults": [...]}), each as `make_fault` takes it. Raises ConfigError."""
        if not isinstance(path, str | Path):
            raise ConfigError("schedule file", path, "must be the path of a .toml or .json file")
        try:
            path = Path(path).expanduser()
        except RuntimeError as error:
            raise ConfigError("schedule file", str(path), f"names a home that is not there: {error}") from None
        readers: dict[str, Any] = {".toml": tomllib.loads, ".json": json.loads}
        if path.suffix not in readers:
            raise ConfigError("schedule file", str(path), "must end in .toml or .json")
        try:
            values = readers[path.suffix](path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("schedule file", str(path), f"cannot be read: {error}") from None
        except RecursionError:
            raise ConfigError("schedule file", str(path), "cannot be read: it is nested too deeply") from None
        found = values.get("faults") if isinstance(values, dict) else values
        if not isinstance(found, list) or not found:
            raise ConfigError("schedule file", str(path), "must hold a list of faults, each a table with the key fault and its settings")
        where = f"schedule file {str(path)!r}"
        if isinstance(values, dict) and (others := [key for key in values if key != "faults"]):
            raise ConfigError(f"{where}: {others[0]}", values[others[0]], "must be left out: such a file holds faults, and nothing else")
        return cls(faults=[placed(make_fault, each, f"{where}, faults[{i}]") for i, each in enumerate(found)], hidden=hidden)

    def occurrences(self, steps: int, seed: int, committed: int = 0) -> Iterator[Occurrence]:
        yield from map(Occurrence, self.faults)


class Surprise(Schedule, frozen=True, kw_only=True, tag="surprise"):
    """One fault drawn at random, at a random moment, and hidden: look at the job, find out what it was, then ``reveal()``."""

    within: float = 20.0
    """Seconds in which it comes."""
    hidden: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("within")

    def occurrences(self, steps: int, seed: int, committed: int = 0) -> Iterator[Occurrence]:
        draw = self._draw(seed)
        kind = draw.choice([Kill, Hang, Wedge, RaiseException, CleanExit])
        target = draw.choice(["trainer", "rollout", "rollout_manager", "request_manager", "task_runner"])
        yield Occurrence(kind(target, after=draw.uniform(0.0, self.within)))


AnySchedule = Union[AtStep, EveryNSteps, PaperFrequency, Poisson, FaultList, Surprise]
SCHEDULES: dict[str, type[Schedule]] = {str(kind.__struct_config__.tag): kind for kind in get_args(AnySchedule)}


def make_schedule(values: Mapping[str, Any]) -> Schedule:
    """From plain values, ``schedule`` naming the kind. Raises ConfigError."""
    name = named(values, "schedule", SCHEDULES, '{"schedule": "at_step", "step": 5, "fault": {"fault": "kill", "target": "rollout-1"}}')
    given = settings_of(values, SCHEDULES[name], name)
    if isinstance(fault := given.get("fault"), dict):
        given["fault"] = placed(make_fault, fault, f"{name}.fault")
    if isinstance(faults := given.get("faults"), list):
        given["faults"] = [placed(make_fault, each, f"{name}.faults[{i}]") for i, each in enumerate(faults)]
    return made_of(SCHEDULES[name], given)
