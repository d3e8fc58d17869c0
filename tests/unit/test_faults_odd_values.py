"""Whatever is handed to a public constructor or function of faults and thresholds: it works, or the error of this house names the field."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from test_fault_planner import Stage

from robustrl.core.roles import Phase, RoleKind
from robustrl.core.thresholds import HISTORY, MOST_SECONDS, PATHS, Relative, Thresholds
from robustrl.errors import ConfigError
from robustrl.faults import (
    AtStep,
    EveryNSteps,
    Fault,
    FaultList,
    Freeze,
    FullDisk,
    Hang,
    IdleRollout,
    Kill,
    LongAdvantage,
    LongCheckpoint,
    NodeLoss,
    PaperFrequency,
    Partition,
    Poisson,
    Schedule,
    SlowTool,
    Surprise,
    make_fault,
    make_schedule,
)
from robustrl.faults.catalogue import CATALOGUE
from robustrl.faults.schedules import SCHEDULES

LAB = Thresholds.lab()
NAN, INF, HUGE = float("nan"), float("inf"), 10**400
ODD: list[Any] = [
    None, [], {}, "", "x", "kill", "rollout", "3s", "1e15s", "4x", -1, 0, 1, 0.5, NAN, INF, -INF, 1e308, -1e308, 1e-320, HUGE, -HUGE,
    10**5000, 2**63, True, False, object(), object, b"x", (), ("rollout",), {"x": 1}, {1: 2}, ["x"], [None], {"fault": ["kill"]}, 3 + 0j,
    set(), range(3), np.float64(0.5), np.float32(3), np.int64(3), np.bool_(True), np.str_("rollout"), np.array([1.0]), np.float64(NAN),
    Kill("trainer"), Kill("trainer", step=3), Relative(4.0, 3.0), Phase.DECODE, RoleKind.ROLLOUT,
]  # fmt: skip


def _fields() -> list[tuple[type, str]]:
    return [(kind, field) for kind in (*CATALOGUE.values(), *SCHEDULES.values()) for field in kind.__struct_fields__]


def _good(kind: type) -> dict[str, Any]:
    """What a kind cannot be made without."""
    need = {field.name for field in msgspec.structs.fields(kind) if field.required}
    target = {"target": sorted(kind.kinds)[-1]} if issubclass(kind, Fault) else {}
    kill = Kill("rollout")
    many = {"seconds": 2.0, "step": 5, "every": 5, "percent": 10.0, "per_minute": 1.0, "fault": kill, "faults": [kill]}
    return target | {name: many[name] for name in need if name in many}


def works_or_is_named(make: Callable[[], Any], *names: str) -> Any:
    try:
        return make()
    except ConfigError as error:
        assert any(name in error.field for name in names), error
        assert error.allowed and str(error)


@pytest.mark.parametrize("kind, field", _fields(), ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_any_value_of_any_field_is_taken_or_named(kind: type, field: str) -> None:
    stage = Stage()
    for value in ODD:
        made = works_or_is_named(lambda value=value: kind(**_good(kind) | {field: value}), field, *("target", "step") * (field == "rank"))
        if made is None:
            continue
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.to_builtins(made)))
        assert (make_fault if isinstance(made, Fault) else make_schedule)(sent) == made, "what is taken survives the way to the host"
        hash(made) if isinstance(made, Fault) else None
        order: Callable[..., Any] = stage.planner.begin if isinstance(made, Schedule) else stage.planner.plan
        works_or_is_named(partial(order, made, 101.0), "")


@pytest.mark.parametrize("value", ODD, ids=[f"{i}-{type(value).__name__}" for i, value in enumerate(ODD)])
def test_any_value_given_to_a_function_is_taken_or_named(value: Any) -> None:
    planner = Stage().planner
    for path in PATHS:
        works_or_is_named(lambda path=path: LAB.replace(path, value), path, "multiple", *PATHS)
    for use, names in [
        (lambda: LAB.replace(value, "3s"), ["threshold"]),
        (lambda: LAB.get(value), ["threshold"]),
        (lambda: LAB.updated(value), ["threshold"]),
        (lambda: LAB.updated({"job.stall": value}), ["job.stall", "multiple"]),
        (lambda: Thresholds.named(value), ["thresholds"]),
        (lambda: Thresholds.relative(value), ["multiple", *HISTORY]),
        (lambda: Thresholds.from_dict(value), ["thresholds", *PATHS]),
        (lambda: Relative(value, 3.0), ["multiple.times"]),
        (lambda: Relative(4.0, value), ["multiple.floor"]),
        (lambda: Relative(4.0, 3.0, value), ["multiple.least"]),
        (lambda: make_fault(value), ["fault", "kill"]),
        (lambda: make_fault({"fault": value}), ["fault", "kill"]),
        (lambda: make_fault({"fault": "kill", "target": "rollout", "after": value}), ["kill.after"]),
        (lambda: make_schedule(value), ["schedule"]),
        (lambda: make_schedule({"schedule": value}), ["schedule"]),
        (lambda: make_schedule({"schedule": "at_step", "step": 5, "fault": value}), ["at_step.fault", "fault", "kill"]),
        (lambda: FaultList.read(value), ["schedule file"]),
        (lambda: planner.call_off(value), ["fault"]),
        (lambda: planner.stop_series(value), ["schedule"]),
    ]:  # fmt: skip
        works_or_is_named(use, *names)


@pytest.mark.parametrize("path", PATHS)
def test_each_setting_has_an_upper_bound(path: str) -> None:
    for value in (1e15, 1e300, "1e15s", 10**18, "1e9x", Relative(4.0, 1e9), Relative(1e9, 3.0), Relative(4.0, 3.0, 10**9)):
        with pytest.raises(ConfigError, match="at most") as caught:
            LAB.replace(path, value)
        assert path == caught.value.field


def test_numbers_of_numpy_are_numbers() -> None:
    for four in (np.float64(4), np.float32(4), np.int64(4)):
        assert LAB.replace("rollout.no_tokens", four) == LAB.replace("rollout.no_tokens", 4)
    assert LAB.replace("rollout.strikes", np.int32(2)).rollout.strikes == 2
    assert Hang("rollout", seconds=np.float32(3), step=np.int64(2)) == Hang("rollout", seconds=3, step=2)
    assert [type(AtStep(step, Kill("rollout")).step) for step in np.arange(1, 3)] == [int, int]


def test_a_multiple_survives_as_its_plain_fields() -> None:
    multiple = Relative(4.0, 90.0, 7)
    assert LAB.replace("job.stall", msgspec.to_builtins(multiple)) == LAB.replace("job.stall", multiple)


IGNORED: list[tuple[Callable[[], Any], str]] = [
    (lambda: LongAdvantage("trainer-0", phase="train", seconds=1), "long_advantage.phase = 'train': must be left out: .* of its own"),
    (lambda: LongCheckpoint(phase="train", seconds=1), "long_checkpoint.phase = 'train'"),
    (lambda: IdleRollout("rollout-0", phase="decode", seconds=1), "idle_rollout.phase = 'decode'"),
    (lambda: SlowTool(phase="running", seconds=1), "slow_tool.phase = 'running': .* the next tool call"),
    (lambda: FullDisk(phase="train", seconds=1), "full_disk.phase = 'train'"),
    (lambda: NodeLoss("rollout-1", phase="decode"), "node_loss.phase = 'decode'"),
    (lambda: FullDisk("trainer-1", seconds=1), "full_disk.target = 'trainer-1': must be left out: trainer-0 writes"),
    (lambda: FullDisk(rank=1, seconds=1), "full_disk.rank = 1"),
    (lambda: NodeLoss("node-1", rank=1), "node_loss.rank = 1: must be left out: node-1 is the node"),
    (lambda: Partition("node-1", node="node-2", seconds=1), "partition.node = 'node-2': must be left out"),
    (lambda: Kill("supervisor", rank=1), "kill.rank = 1: there is one supervisor"),
    (lambda: AtStep(5, Kill("rollout", step=3)), "at_step.fault = .*must have no step of its own"),
    (lambda: EveryNSteps(5, Kill("rollout", step=3)), "every_n_steps.fault = .*must have no step of its own"),
    (lambda: PaperFrequency(percent=5, fault=Kill("rollout", step=3)), "paper_frequency.fault = .*must have no step of its own"),
]  # fmt: skip


@pytest.mark.parametrize("make, message", IGNORED, ids=[message[:30] for _, message in IGNORED])
def test_what_would_be_ignored_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_phase_that_is_its_own_may_be_named() -> None:
    assert LongAdvantage(phase="advantage", seconds=1).phase == "advantage"
    assert LongCheckpoint(phase="snapshot", seconds=1).phase == "snapshot"
    assert Freeze("rollout", phase="decode", seconds=1).phase == "decode"


def test_a_rare_fault_that_comes_after_any_job_ends_its_schedule() -> None:
    times = [occurrence.fault.after for occurrence in Poisson(per_minute=1e-4, faults=[Kill("rollout")]).occurrences(10, 0)]
    assert times and times[-1] <= MOST_SECONDS
    assert Surprise(within=5).within == 5
