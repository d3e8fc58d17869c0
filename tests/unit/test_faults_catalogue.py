"""The catalogue and the schedules: what is accepted, what is refused and how that is named, and that a seed gives the same list."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from robustrl.core.roles import RoleId, RoleKind
from robustrl.errors import ConfigError
from robustrl.faults import (
    AtStep,
    EveryNSteps,
    FaultList,
    FirstCompile,
    Freeze,
    Hang,
    Kill,
    NodeLoss,
    PaperFrequency,
    Poisson,
    RaiseException,
    Slow,
    SlowTool,
    Surprise,
    Wedge,
    make_fault,
    make_schedule,
)
from robustrl.faults.catalogue import CATALOGUE
from robustrl.faults.schedules import SCHEDULES


def test_who_and_when_in_words() -> None:
    assert Kill("rollout-1").role == "rollout-1" == Kill("rollout", rank=1).role
    assert (Kill("supervisor").role, Kill("trainer").role) == ("supervisor", "")
    assert Kill("rollout", node="node-2", step=5, phase="decode").aim() == "any rollout on node-2"
    assert Kill("rollout", step=5, after=2, phase="decode").when() == "at step 5, after 2 s, in phase decode"
    assert (Kill("rollout").when(), SlowTool(seconds=3).aim()) == ("now", "any agent_worker")
    assert (NodeLoss("node-2").aim(), NodeLoss("rollout-1").aim()) == ("node-2", "the node of rollout-1")


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: Kill("rolout"), r"kill.target = 'rolout': must be one of .*KIND-INDEX"),
    (lambda: Kill(), r"kill.target = '': must name a role"),
    (lambda: Kill("rollout-1", phase="train"), r"kill.phase = 'train': must be a phase of a rollout: decode, prefill"),
    (lambda: Kill("trainer", step=0), r"kill.step = 0: must be an optimizer step"),
    (lambda: Kill("trainer", after=-1.0), r"kill.after = -1.0: must be a finite number of seconds, at least 0 and at most 10000000"),
    (lambda: Kill("trainer", after=float("nan")), r"kill.after = nan: must be a finite number"),
    (lambda: Kill("rollout-1", rank=1), r"kill.rank = 1: rollout-1 has its rank in its name"),
    (lambda: Kill("rollout", rank=-1), r"kill.rank = -1: must be an index"),
    (lambda: Kill("rollout", node="host"), r"kill.node = 'host': must be a node's name"),
    (lambda: Hang("trainer", seconds=-1), r"hang.seconds = -1: must be a finite number"),
    (lambda: Hang("trainer", seconds="3s"), r"hang.seconds = '3s': must be a finite number"),
    (lambda: Slow("trainer", seconds=3, share=1.5), r"slow.share = 1.5: .* at most 0.99"),
    (lambda: Wedge("node_agent-0"), r"wedge.target = 'node_agent-0': wedge can hit"),
    (lambda: SlowTool("trainer", seconds=1), r"slow_tool.target = 'trainer': slow_tool can hit agent_worker"),
    (lambda: FirstCompile("state_keeper-0", seconds=1), r"first_compile can hit rollout, trainer"),
    (lambda: Freeze("supervisor", seconds=1), r"freeze.target = 'supervisor'"),
    (lambda: make_fault({"fault": "explode"}), r"fault = 'explode': must be one of kill, hang"),
    (lambda: make_fault({"fault": "kill", "target": "x"}), r"kill.target = 'x'"),
    (lambda: make_fault({"fault": "kill", "target": "trainer", "stp": 3}),
     r"kill.stp = 3: there is no such setting; did you mean step\? There are: target, rank"),
    (lambda: make_fault({"fault": "hang", "target": "trainer", "seconds": "long"}), r"hang.seconds = 'long': must be a finite number"),
    (lambda: make_fault({"fault": "slow", "target": "trainer"}), r"slow.seconds = None: must be a finite number of seconds, at least 0.01"),
    (lambda: make_fault({"fault": "kill", "target": "trainer", "step": "5"}), r"kill.step = '5': must be an optimizer step, from 1 on"),
    (lambda: make_fault({"fault": "kill", "target": "trainer", 3: 1}), r"kill.3 = 1: there is no such setting; there are: target, rank"),
    (lambda: make_schedule({"schedule": "poisson", "per_minute": 1, "fault": {}}),
     r"poisson.fault = \{\}: .*did you mean faults\? There are: "),
    (lambda: make_schedule({"schedule": "poisson", "per_minute": "x", "faults": [{"fault": "kill", "target": "rollout"}]}),
     r"poisson.per_minute = 'x': must be a finite number of faults"),
    (lambda: make_schedule({"schedule": "at_step", "step": 3}), r"at_step.fault = None: must be a fault of robustrl.faults"),
    (lambda: make_schedule({"schedule": "list", "faults": [{"fault": "kill", "target": "trainer"}, {"fault": "kil"}]}),
     r"list.faults\[1\]: fault = 'kil': must be one of kill, hang"),
    (lambda: EveryNSteps(0, Kill("trainer")), r"every_n_steps.every = 0"),
    (lambda: AtStep(0, Kill("trainer")), r"at_step.step = 0: must be an optimizer step"),
    (lambda: PaperFrequency(percent=0), r"paper_frequency.percent = 0"),
    (lambda: Poisson(per_minute=float("inf"), faults=[Kill("rollout")]), r"poisson.per_minute = inf"),
    (lambda: Poisson(per_minute=1, faults=[]), r"poisson.faults = \[\]"),
    (lambda: Surprise(within=-1.0), r"surprise.within = -1.0"),
    (lambda: make_schedule({"schedule": "daily"}), r"schedule = 'daily': must be one of at_step"),
    (lambda: make_schedule({"schedule": "at_step", "step": 3, "fault": {"fault": "kill", "target": "x"}}), r"kill.target = 'x'"),
]  # fmt: skip


@pytest.mark.parametrize("make, message", BAD, ids=[message[:40] for _, message in BAD])
def test_what_is_wrong_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_each_fault_survives_the_way_over_the_socket() -> None:
    timed = {"slow", "slow_tool", "long_advantage", "long_first_token", "first_compile", "freeze", "idle_rollout", "long_checkpoint"}
    timed |= {"full_disk", "partition", "delay"}
    for name, kind in CATALOGUE.items():
        target = sorted(kind.kinds)[0]
        fault = kind(target, **({"seconds": 2.0} if name in timed else {}))
        plain = json.loads(json.dumps(msgspec.to_builtins(fault)))
        assert plain["fault"] == name and make_fault(plain) == fault
    assert {name for name, kind in CATALOGUE.items() if kind.benign} >= {"freeze", "slow_tool", "long_checkpoint", "idle_rollout"}


@pytest.mark.parametrize("steps, percent, count", [(100, 10, 10), (60, 10, 6), (60, 5, 3), (7, 10, 1)])
def test_the_papers_frequency(steps: int, percent: float, count: int) -> None:
    """round(f% x steps) faults, one in each of as many equal stretches."""
    schedule = PaperFrequency(percent=percent)
    moments = [(o.fault.step or 0) - 1 + o.share for o in schedule.occurrences(steps, seed=3)]
    assert len(moments) == count
    assert [int(moment * count / steps) for moment in moments] == list(range(count))
    assert moments == [(o.fault.step or 0) - 1 + o.share for o in schedule.occurrences(steps, seed=3)]
    assert moments != [(o.fault.step or 0) - 1 + o.share for o in schedule.occurrences(steps, seed=4)]
    assert all(o.fault.kind == "trainer" for o in schedule.occurrences(steps, seed=3))


def test_every_n_steps_leaves_out_what_is_behind_the_job() -> None:
    schedule = EveryNSteps(5, Kill("rollout"))
    assert [o.fault.step for o in schedule.occurrences(22, 0)] == [5, 10, 15, 20]
    assert [o.fault.step for o in schedule.occurrences(22, 0, committed=9)] == [15, 20]
    assert [o.fault.step for o in EveryNSteps(5, Kill("rollout"), first=2).occurrences(13, 0)] == [2, 7, 12]


def test_a_poisson_process_has_its_rate_and_its_seed() -> None:
    schedule = Poisson(per_minute=6, faults=[Kill("rollout"), Hang("trainer", phase="train")], count=2000, seed=1)
    times = [o.fault.after for o in schedule.occurrences(10, 0)]
    assert times == sorted(times) and 2000 / 6 * 0.9 < times[-1] / 60 < 2000 / 6 * 1.1
    assert times == [o.fault.after for o in schedule.occurrences(10, 99)], "its own seed, not the job's"
    assert {o.fault.name for o in schedule.occurrences(10, 0)} == {"kill", "hang"}
    endless = Poisson(per_minute=6, faults=[Kill("rollout")]).occurrences(10, 0)
    assert len([next(endless) for _ in range(5000)]) == 5000


def test_a_list_from_a_file(tmp_path: Path) -> None:
    toml = tmp_path / "faults.toml"
    toml.write_text(
        '[[faults]]\nfault = "kill"\ntarget = "trainer"\nstep = 3\n[[faults]]\nfault = "hang"\ntarget = "rollout-1"\nafter = 2.5\n'
    )
    wanted = [Kill("trainer", step=3), Hang("rollout-1", after=2.5)]
    assert FaultList.read(toml).faults == wanted
    as_json = tmp_path / "faults.json"
    as_json.write_text(json.dumps([msgspec.to_builtins(fault) for fault in wanted]))
    assert [o.fault for o in FaultList.read(as_json).occurrences(10, 0)] == wanted
    for text, message in [
        ('[{"fault": "kill"}]', "kill.target"),
        ("{}", "must hold a list"),
        ("[3]", r"faults.json', faults\[0\]: fault = 3: must be its settings by name"),
        ('[{"fault": "kill", "target": "trainer"}, {"fault": "kill", "target": "rollout", "stp": 3}]',
         r"faults.json', faults\[1\]: kill.stp = 3: there is no such setting; did you mean step"),
        ('{"faults": [{"fault": "hang", "target": "trainer", "seconds": "3s"}]}',
         r"faults.json', faults\[0\]: hang.seconds = '3s': must be a finite number of seconds"),
        ('{"faults": [{"fault": "kill", "target": "trainer"}], "sede": 3}', r"faults.json': sede = 3: must be left out"),
        ("[", "cannot be read"),
    ]:
        as_json.write_text(text)
        with pytest.raises(ConfigError, match=message):
            FaultList.read(as_json)
    with pytest.raises(ConfigError, match="must end in .toml or .json"):
        FaultList.read(tmp_path / "faults.yaml")


def test_each_schedule_survives_the_way_over_the_socket() -> None:
    made = [
        AtStep(5, Wedge("trainer")),
        EveryNSteps(5, Kill("rollout"), seed=3),
        PaperFrequency(percent=10),
        Poisson(per_minute=2, faults=[RaiseException("rollout")]),
        FaultList(faults=[Kill("rollout")], hidden=True),
        Surprise(),
    ]
    assert {schedule.name for schedule in made} == set(SCHEDULES)
    for schedule in made:
        assert make_schedule(json.loads(json.dumps(msgspec.to_builtins(schedule)))) == schedule
    [surprise] = Surprise(seed=5).occurrences(10, 0)
    assert Surprise().hidden and [surprise] == list(Surprise(seed=5).occurrences(10, 1))


ODD_NAMES = ["rollout-01", "rollout-00", "rollout-\u0663", "rollout-1 ", "rollout-1\n", "rollout--1", "rollout-+1", "rollout-", "Rollout-1"]
ODD_NAMES += ["rollout-" + "9" * 5000, "rollout-1_0", "rollout-1.0"]


@pytest.mark.parametrize("name", ODD_NAMES, ids=range(len(ODD_NAMES)))
def test_a_role_has_one_name(name: str) -> None:
    with pytest.raises(ValueError, match="KIND-INDEX"):
        RoleId.parse(name)
    with pytest.raises(ConfigError, match=r"kill.target = .*must be one of .*KIND one of agent_worker, .*e.g. rollout-1"):
        Kill(name)
    with pytest.raises(ConfigError, match="node_loss.target"):
        NodeLoss(name.replace("rollout", "node"))
    for kind in RoleKind:
        assert str(RoleId.parse(str(RoleId(kind, 0)))) == str(RoleId(kind, 0))
