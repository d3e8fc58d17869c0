"""When a fault strikes and whom: resolved against a log told by hand, with time passed in."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from story import ROLES, Story

from robustrl.config import JobConfig
from robustrl.core import events as ev
from robustrl.core.roles import RoleState
from robustrl.core.run_state import RunState
from robustrl.core.thresholds import Thresholds
from robustrl.errors import ConfigError, RobustRLError
from robustrl.faults import (
    AtStep,
    CleanExit,
    CorruptSnapshot,
    Delay,
    EveryNSteps,
    Fault,
    FaultList,
    FirstCompile,
    Freeze,
    FullDisk,
    Hang,
    IdleRollout,
    Kill,
    MemoryExhaustion,
    NodeLoss,
    PaperFrequency,
    Partition,
    Poisson,
    Slow,
    SlowTool,
)
from robustrl.faults.planner import Planner, Strike


class Stage:
    """A planner beside the story that it is told."""

    def __init__(self, story: Story | None = None, *, root: bool = True, **settings: Any) -> None:
        self.story = story or Story(steps=20)
        self.story.at(100.0, ev.ThresholdsChanged(thresholds=Thresholds.lab().to_dict(), changes={}))
        self.planner = Planner(config=JobConfig(**{"steps": 20} | settings), root=root, state=RunState())
        self.read = 0
        self.ended: list[ev.FaultEnded] = []
        self.catch_up()

    def catch_up(self) -> None:
        for entry in self.story.entries[self.read :]:
            self.planner.state.apply(entry)
        self.read = len(self.story.entries)

    def plan(self, fault: Fault, t: float, **options: Any) -> int:
        self.catch_up()
        planned = self.planner.plan(fault, t, **options)
        self.story.at(t, planned)
        self.catch_up()
        return planned.fault

    def strikes(self, t: float) -> list[tuple[int, str]]:
        """Those that are due at ``t``; ends are kept, and written."""
        self.catch_up()
        done = self.planner.decide(t)
        for end in (each for each in done if isinstance(each, ev.FaultEnded)):
            self.ended.append(end)
            self.story.at(t, end)
        self.catch_up()
        return [(each.fault, each.role) for each in done if isinstance(each, Strike)]

    def hit(self, t: float, number: int, role: str) -> None:
        event = ev.FaultInjected(
            fault=number, role=role, incarnation=self.story.life[role], node="node-0", pid=7, phase="decode", step=1, proof={"process": "T"}
        )
        self.story.at(t, event)
        self.catch_up()


def test_now_means_at_once_and_once() -> None:
    stage = Stage()
    stage.plan(Kill("rollout-1"), 101.0)
    assert stage.strikes(101.0) == [(1, "rollout-1")]
    assert stage.strikes(101.1) == [] and not stage.planner.idle, "it waits for its proof"
    stage.hit(101.2, 1, "rollout-1")
    assert stage.strikes(101.3) == [] and stage.planner.idle


def test_after_some_seconds_and_at_a_step() -> None:
    stage = Stage()
    stage.plan(Kill("rollout-1", after=2.0), 101.0)
    stage.plan(Kill("agent_worker-0") if "agent_worker-0" in stage.planner.state.roles else Kill("trainer-0", step=3), 101.0)
    assert stage.strikes(102.9) == []
    assert stage.strikes(103.0) == [(1, "rollout-1")]
    for step in (0, 1):
        stage.story.commit(103.0 + step, step)
    assert stage.strikes(105.0) == []
    stage.story.commit(106.0, 2)
    assert stage.strikes(106.0) == [(2, "trainer-0")]


def test_an_order_for_a_phase_of_a_trainers_step_is_there_before_the_step_begins() -> None:
    stage = Stage()
    stage.plan(Hang("trainer", phase="advantage", step=3), 101.0)
    stage.story.commit(102.0, 0)
    assert stage.strikes(102.0) == []
    stage.story.commit(103.0, 1)
    assert stage.strikes(103.0) == [(1, "trainer-0")], "the status page says when step 3 runs"


def test_a_share_of_a_step_is_measured_by_the_step_before() -> None:
    stage = Stage()
    stage.plan(Kill("trainer", step=3), 101.0, share=0.5)
    for t, step in ((102.0, 0), (104.0, 1), (108.0, 2)):
        stage.story.commit(t, step)
        assert stage.strikes(t) == []
    assert stage.strikes(109.9) == [] and stage.strikes(110.0) == [(1, "trainer-0")]


def test_never_the_last_live_rollout_unless_asked() -> None:
    stage = Stage()
    first = stage.plan(Hang("rollout"), 101.0)
    [(_, victim)] = stage.strikes(101.0)
    stage.hit(101.0, first, victim)
    second = stage.plan(Kill("rollout"), 102.0)
    assert stage.strikes(102.0) == []
    assert stage.ended[0].fault == second and stage.ended[0].outcome == "refused" and "last live rollout" in stage.ended[0].reason
    slow = stage.plan(Slow("rollout", seconds=2), 103.0)
    [(_, slowed)] = stage.strikes(103.0)
    stage.hit(103.0, slow, slowed)
    assert slowed != victim, "one that is under no other fault"
    stage.plan(Kill("rollout", force=True), 104.0)
    assert len(stage.strikes(104.0)) == 1
    stage = Stage()
    stage.plan(Kill("rollout-0"), 101.0)
    stage.plan(Kill("rollout-1"), 101.0)
    assert stage.strikes(101.0) == [(1, "rollout-0")] and stage.ended[0].fault == 2, "two at once are no way around it"


def test_the_victim_of_a_kind_is_drawn_by_the_seed_and_by_what_was_asked_for() -> None:
    def drawn(seed: int) -> list[str]:
        story = Story(tuple(f"rollout-{i}" for i in range(8)), steps=20)
        stage = Stage(story, seed=seed)
        for _ in range(3):
            stage.plan(Hang("rollout"), 101.0)
        return [role for _, role in stage.strikes(101.0)]

    assert drawn(1) == drawn(1) and drawn(1) != drawn(2) and len(set(drawn(1))) == 3, "not one that is under a fault already"
    stage = Stage(Story(tuple(f"rollout-{i}" for i in range(4)), steps=20))
    for i, phase in enumerate(("decode", "decode", "waiting_tool", "decode")):
        stage.story.sample(101.0, f"rollout-{i}", phase)
    stage.plan(Hang("rollout", phase="waiting_tool"), 102.0)
    assert stage.strikes(102.0) == [(1, "rollout-2")], "who is in the phase already comes first"


def test_a_role_that_is_down_is_waited_for_and_one_that_comes_back_can_be_hit_again() -> None:
    stage = Stage()
    stage.story.exits(101.0, "trainer-0")
    stage.plan(Kill("trainer-0"), 101.5)
    assert stage.strikes(102.0) == []
    stage.story.starts(103.0, "trainer-0")
    assert stage.strikes(103.0) == [(1, "trainer-0")], "a fault during a recovery: it is there, though not healthy"


def test_first_compile_waits_for_a_new_life_that_has_done_nothing() -> None:
    stage = Stage()
    stage.story.sample(101.0, "rollout-1", "decode", progress=50)
    stage.plan(FirstCompile("rollout-1", seconds=2), 101.0)
    assert stage.strikes(102.0) == []
    stage.story.exits(103.0, "rollout-1")
    stage.story.starts(104.0, "rollout-1")
    assert stage.strikes(104.0) == []
    stage.story.at(105.0, ev.RoleReady(role="rollout-1", incarnation=2, seconds=1.0))
    assert stage.strikes(105.0) == [(1, "rollout-1")]


def test_what_the_rollout_manager_holds_back_is_over_with_it() -> None:
    stage = Stage(Story((*ROLES, "rollout_manager"), steps=20))
    number = stage.plan(IdleRollout("rollout-0", seconds=60), 101.0)
    stage.strikes(101.0)
    stage.hit(101.2, number, "rollout-0")
    assert stage.strikes(101.3) == [] and not stage.planner.idle, "its carrier may end"
    stage.story.exits(105.0, "rollout_manager")
    for t in (105.0, 106.9, 107.1):
        assert stage.ended == []
        stage.strikes(t)
    reason = "rollout_manager incarnation 1 ended, which held the requests back"
    assert [(end.outcome, end.reason) for end in stage.ended] == [("over", reason)] and stage.planner.idle
    assert stage.planner.closing("done") == []


def test_nothing_stays_stuck_when_the_target_vanishes() -> None:
    stage = Stage()
    stage.plan(CleanExit("trainer", phase="optimizer"), 101.0)
    assert stage.strikes(101.0) == [(1, "trainer-0")]
    stage.story.exits(102.0, "trainer-0")
    assert stage.strikes(102.0) == [] == stage.ended, "its proof may still come"
    stage.strikes(104.5)
    assert stage.ended[0].outcome == "vanished" and "trainer-0 incarnation 1 ended before it struck" in stage.ended[0].reason
    assert stage.planner.idle


def test_a_proof_is_on_its_way_while_its_giver_lives() -> None:
    stage = Stage(Story(("supervisor", "trainer-0", "rollout-0", "rollout-1", "node_agent-0"), steps=20))
    stage.plan(Kill("rollout-1"), 101.0)
    assert stage.planner.unreported() == []
    stage.strikes(101.0)
    assert stage.planner.unreported() == [], "it may wait for its moment for long"
    stage.story.exits(102.0, "rollout-1")
    stage.catch_up()
    assert stage.planner.unreported() == [1]
    stage.hit(102.1, 1, "rollout-1")
    assert stage.planner.unreported() == []
    stage.plan(Kill("rollout-0", force=True), 103.0)
    assert stage.strikes(103.0) == [(2, "rollout-0")]
    for role in ("rollout-0", "node_agent-0"):
        stage.story.exits(104.0, role)
    stage.catch_up()
    assert stage.planner.unreported() == [], "nobody is left to give it"


def test_an_order_is_lost_with_who_has_it() -> None:
    stage = Stage(Story(("supervisor", "trainer-0", "rollout-0", "rollout-1", "node_agent-0"), steps=20))
    stage.plan(Hang("trainer", phase="publish"), 101.0)
    assert stage.strikes(101.0) == [(1, "trainer-0")]
    stage.story.exits(102.0, "node_agent-0")
    for t in (102.0, 104.5):
        assert stage.strikes(t) == []
    assert stage.ended[0].outcome == "vanished" and "node_agent-0 incarnation 1 ended" in stage.ended[0].reason


def test_damage_is_over_once_it_is_overwritten() -> None:
    stage = Stage(Story(("supervisor", "trainer-0", "rollout-0", "rollout-1", "state_keeper-0"), steps=20))
    stage.story.commit(101.0, 0)
    stage.plan(CorruptSnapshot("state_keeper"), 101.0)
    assert stage.strikes(101.0) == [(1, "state_keeper-0")]
    stage.hit(101.1, 1, "state_keeper-0")
    for step in (1, 2):
        assert stage.strikes(101.0 + step) == [] == stage.ended
        stage.story.commit(101.0 + step, step)
    stage.strikes(104.0)
    assert (stage.ended[0].outcome, stage.ended[0].reason) == ("over", "step 2 was written over the damage") and stage.planner.idle


def test_calling_off() -> None:
    stage = Stage()
    waiting = stage.plan(Kill("rollout-1", after=50.0), 101.0)
    assert stage.planner.call_off(waiting) is None and stage.strikes(200.0) == []
    hung = stage.plan(Hang("rollout-0"), 101.0)
    stage.strikes(101.0)
    assert stage.planner.call_off(hung) == ("rollout-0", 1), "the order is on its way"
    stage.hit(101.1, hung, "rollout-0")
    stage.strikes(101.2)
    assert stage.planner.call_off(hung) == ("rollout-0", 1)
    stage.story.exits(103.0, "rollout-0")
    stage.catch_up()
    with pytest.raises(RobustRLError, match="has done its work: rollout-0 incarnation 1 has ended"):
        stage.planner.call_off(hung)
    with pytest.raises(ConfigError, match="fault = 9"):
        stage.planner.call_off(9)


def test_calling_off_twice_is_named_whatever_has_been_written_meanwhile() -> None:
    stage = Stage()
    waiting = stage.plan(Kill("rollout-1", after=50.0), 101.0)
    assert stage.planner.call_off(waiting) is None
    with pytest.raises(RobustRLError, match=r"fault 1 \(kill\) is called off already"):
        stage.planner.call_off(waiting)
    stage.story.at(102.0, ev.FaultEnded(fault=waiting, outcome="aborted", reason="called off"))
    stage.catch_up()
    with pytest.raises(RobustRLError, match="has ended already: aborted"):
        stage.planner.call_off(waiting)


@pytest.mark.parametrize("target, most", [("rollout-0", 2.7), ("trainer-0", 2.7), ("supervisor", None), ("task_runner", 4.7),
                                          ("state_keeper-0", 4.7), ("node_agent-0", 3.7)])  # fmt: skip
def test_the_longest_freeze_leaves_room_for_the_last_sign_of_life(target: str, most: float | None) -> None:
    stage = Stage(Story(("supervisor", "trainer-0", "rollout-0", "task_runner", "state_keeper-0", "node_agent-0"), steps=20))
    if most is None:
        with pytest.raises(ConfigError, match="freeze can hit"):
            Freeze(target, seconds=1)
        return
    stage.plan(Freeze(target, seconds=most), 101.0)
    with pytest.raises(ConfigError, match=rf"freeze.seconds = {most + 0.1:g}: must be at most {most:g}: the limit in force is"):
        stage.plan(Freeze(target, seconds=round(most + 0.1, 6)), 101.0)


def test_limits_may_be_too_short_for_any_freeze() -> None:
    stage = Stage()
    short = Thresholds.lab().updated({"rollout.heartbeat": 0.305, "rollout.no_tokens": 0.305, "job.hysteresis": 0.1})
    stage.story.at(101.0, ev.ThresholdsChanged(thresholds=short.to_dict(), changes={}))
    with pytest.raises(ConfigError, match="freeze.seconds = 0.01: must not be at all with limits so short"):
        stage.plan(Freeze("rollout-0", seconds=0.01), 102.0)


def test_what_is_left_at_the_end() -> None:
    for status, outcomes in (
        ("stopped", {1: "aborted", 2: "aborted", 3: "aborted"}),
        ("done", {1: "aborted", 2: "not_fired", 3: "not_fired"}),
    ):
        stage = Stage()
        stage.plan(Kill("rollout-1", after=500.0), 101.0)
        stage.plan(Hang("trainer", phase="publish"), 101.0)
        stage.story.exits(101.0, "supervisor")
        stage.plan(Kill("supervisor"), 101.0)
        assert stage.strikes(101.0) == [(2, "trainer-0")]
        assert {end.fault: end.outcome for end in stage.planner.closing(status)} == outcomes


REFUSED: list[tuple[Fault, dict[str, Any], str]] = [
    (Kill("rollout-7"), {}, r"kill.target = 'rollout-7': this job has supervisor, trainer-0"),
    (Kill("rollout", node="node-9"), {}, r"kill.node = 'node-9': this job has node-0"),
    (Kill("trainer", step=21), {}, r"kill.step = 21: must be one of the steps to come, 1 to 20"),
    (NodeLoss("node-0"), {}, r"node_loss = 'node-0': needs a job of several nodes"),
    (NodeLoss("node-1"), {"address": "auto"}, r"node_loss = 'node-1': is refused on a cluster that this job did not start"),
    (MemoryExhaustion("trainer"), {"address": "auto"}, r"memory_exhaustion = 'trainer': is refused on a cluster"),
    (FullDisk(seconds=3), {"address": "auto"}, r"full_disk = .* is refused on a cluster"),
    (Kill("node_agent-0"), {"address": "auto"}, r"kill.target = 'node_agent-0': is refused with address="),
    (Partition("rollout", seconds=3), {}, r'partition = .* needs hosts="namespaces"'),
    (Delay("node-0", seconds=3), {}, r'delay = .* needs hosts="namespaces"'),
    (FullDisk(seconds=3), {"root": False}, r"full_disk = .* needs root"),
    (SlowTool(seconds=3), {}, r"slow_tool.target = '': the task 'arithmetic' has no tool"),
    (Freeze("rollout-0", seconds=3), {}, r"freeze.seconds = 3: must be at most 2.7: the limit in force is 3 s"),
]


@pytest.mark.parametrize("fault, settings, message", REFUSED, ids=[message[:50] for *_, message in REFUSED])
def test_what_this_job_or_machine_does_not_allow_is_refused_aloud(fault: Fault, settings: dict[str, Any], message: str) -> None:
    stage = Stage(**settings)
    with pytest.raises(ConfigError, match=message):
        stage.planner.plan(fault, 101.0)
    assert stage.planner.idle


def test_with_one_rollout_nobody_does_the_work_of_an_idle_one() -> None:
    stage = Stage(Story(("rollout-0",), steps=20))
    with pytest.raises(ConfigError, match="with one rollout alone"):
        stage.planner.plan(IdleRollout(seconds=2), 101.0)


def test_the_head_of_ray_is_no_target_and_a_lost_node_is_not_lost_twice() -> None:
    story = Story(steps=20)
    story.at(100.0, ev.NodeStarted(node="node-1", ray_node_id="y", ip="127.0.0.1", kinds=[]))
    story.at(100.0, ev.RoleStarted(role="rollout-2", incarnation=1, node="node-1", pid=8, start_ticks=8))
    stage = Stage(story)
    with pytest.raises(ConfigError, match="node-0 has the head of Ray"):
        stage.plan(NodeLoss("trainer-0"), 101.0)
    stage.plan(NodeLoss("node-1"), 101.0)
    assert stage.strikes(101.0) == [(1, "rollout-2")]
    story.at(102.0, ev.NodeLost(node="node-1", reason="so"))
    stage.plan(NodeLoss("node-1"), 103.0)
    stage.strikes(103.0)
    assert stage.ended[-1].outcome == "refused" and "lost already" in stage.ended[-1].reason


def test_a_node_of_ones_own_can_be_cut_off_but_not_that_of_ray_s_head() -> None:
    story = Story(steps=20)
    story.at(100.0, ev.NodeStarted(node="node-1", ray_node_id="y", ip="10.77.0.2", kinds=[]))
    story.at(100.0, ev.RoleStarted(role="rollout-2", incarnation=1, node="node-1", pid=8, start_ticks=8))
    story.life["rollout-2"] = 1
    stage = Stage(story, hosts="namespaces")
    stage.planner.why_no_delay = "no netem"
    with pytest.raises(ConfigError, match="node-0 has the head"):
        stage.plan(Partition("supervisor", seconds=3), 101.0)
    with pytest.raises(ConfigError, match="not possible here: no netem"):
        stage.plan(Delay("node-1", seconds=3), 101.0)
    stage.plan(Partition("node-1", seconds=3), 101.0)
    assert stage.strikes(101.0) == [(1, "rollout-2")]
    stage.hit(101.0, 1, "rollout-2")
    assert stage.planner.call_off(1) == ("rollout-2", 1)


def series(stage: Stage, t: float) -> list[tuple[str, int | None]]:
    events = stage.planner.extend(t)
    for event in events:
        stage.story.at(t, event)
    stage.catch_up()
    return [(event.target, event.options["step"]) for event in events if isinstance(event, ev.FaultPlanned)]


def test_a_schedule_without_end_is_planned_as_it_comes() -> None:
    stage = Stage()
    assert stage.planner.begin(EveryNSteps(5, Hang("rollout", seconds=1)), 101.0) == "schedule-1"
    assert series(stage, 101.0) == [("any rollout", 5)] and series(stage, 101.0) == []
    for step in range(5):
        stage.story.commit(102.0 + step, step)
    [(number, role)] = stage.strikes(106.0)
    stage.hit(106.0, number, role)
    assert series(stage, 106.1) == [("any rollout", 10)]
    assert stage.planner.stop_series("schedule-1") == [2] and series(stage, 107.0) == []
    with pytest.raises(ConfigError, match="schedule = 'schedule-7': there are schedule-1"):
        stage.planner.stop_series("schedule-7")


def test_a_poisson_process_is_planned_as_its_moments_come() -> None:
    stage = Stage()
    stage.planner.begin(Poisson(per_minute=60, faults=[Slow("rollout", seconds=1)]), 101.0)
    moments = []
    t = 101.0
    while t < 121.0:
        moments += [t for _ in series(stage, t)]
        for number, role in stage.strikes(t):
            stage.hit(t, number, role)
        t += 0.05
    assert 10 < len(moments) < 35


def test_a_schedule_with_an_end_is_planned_at_once_in_its_own_name() -> None:
    stage = Stage()
    stage.planner.begin(PaperFrequency(percent=10, seed=1), 101.0)
    assert [target for target, _ in series(stage, 101.0)] == ["any trainer"] * 2
    stage.planner.begin(FaultList(faults=[Kill("rollout-1", step=9), Kill("rollout-0", step=2)], hidden=True), 101.0)
    assert series(stage, 101.0) == [("rollout-1", 9), ("rollout-0", 2)]
    views = [stage.planner.state.faults[number] for number in (1, 2, 3, 4)]
    assert [view.schedule for view in views] == ["schedule-1"] * 2 + ["schedule-2"] * 2 and [view.hidden for view in views] == [
        False
    ] * 2 + [True] * 2


def test_a_schedule_that_cannot_be_is_refused_before_anything_is_planned() -> None:
    stage = Stage()
    with pytest.raises(ConfigError, match="this job has"):
        stage.planner.begin(AtStep(3, Kill("rollout-9")), 101.0)
    with pytest.raises(ConfigError, match="has no fault for the 20 steps that are left"):
        stage.planner.begin(EveryNSteps(50, Kill("rollout")), 101.0)
    assert stage.planner.idle and not stage.planner.state.faults.faults


def test_a_fault_out_of_the_schedules_reach_is_left_out_when_its_step_has_gone_by() -> None:
    stage = Stage()
    stage.planner.begin(EveryNSteps(2, Hang("agent_worker", seconds=1)), 101.0)
    assert series(stage, 101.0) == [("any agent_worker", 2)]
    for step in range(8):
        stage.story.commit(102.0 + step, step)
    assert stage.strikes(110.0) == [], "there is no agent worker in this story"
    assert series(stage, 110.0) == [("any agent_worker", 8)]


def test_the_options_in_the_log_are_the_fault_itself() -> None:
    stage = Stage()
    fault = Hang("rollout", seconds=2.5, phase="decode")
    planned = stage.planner.plan(fault, 101.0, by="user 7")
    assert (planned.kind, planned.target, planned.when, planned.by) == ("hang", "any rollout", "in phase decode", "user 7")
    assert planned.options == msgspec.to_builtins(fault)
    assert stage.planner.state.roles["rollout-0"].state == RoleState.HEALTHY


@pytest.mark.parametrize("hidden", [1, "yes", None])
def test_whether_a_fault_is_hidden_is_yes_or_no(hidden: Any) -> None:
    """Its plan could not be read back from the log, and it would strike without one."""
    stage = Stage()
    with pytest.raises(ConfigError, match="hidden = .* must be True or False"):
        stage.planner.plan(Kill("rollout-1"), 101.0, hidden=hidden)
    assert stage.planner.idle
