"""Several faults at once, or a fault and something benign: hidden behind one another, in a gap of the observers, in a life just begun.

As in scenarios_incidents.py each is a function of dice, for `Thresholds.lab()`, written from the specification alone.
"""

from __future__ import annotations

import random

from detection_world import Fault, Must, Scenario
from scenarios_benign import BUSY
from scenarios_incidents import LAB, QUICK, SILENT_ROLLOUT, WEDGED_ROLLOUT, Maker

OVERLAPPING: dict[str, Maker] = {}


def scenario(make: Maker) -> Maker:
    OVERLAPPING[make.__name__.strip("_").replace("_", "-")] = make
    return make


@scenario
def _clock_offset_and_frozen_trainer(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (
            Fault("offset", "node-1", at=0.0, size=d.choice([-1, 1]) * d.uniform(4, 30)),
            Fault("freeze", "trainer-0", phase="train", step=1, at=6.0),
        ),
        must=(Must("trainer-0", within=("trainer.no_compute",), not_before=True, fault=1),),
        seconds=50,
        shape=QUICK,
    )


@scenario
def _clock_offset_and_silent_rollout(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (
            Fault("offset", "node-2", at=0.0, size=d.choice([-1, 1]) * d.uniform(4, 30)),
            Fault("hang", "rollout-0", phase="decode", at=d.uniform(6, 12)),
        ),
        must=(Must("rollout-0", within=SILENT_ROLLOUT, not_before=True, fault=1),),
        seconds=40,
        shape=BUSY,
    )


@scenario
def _starved_agent_and_silent_rollout(d: random.Random) -> Scenario:
    """Looks are rare: later by as much, and no more."""
    period = d.uniform(0.5, 1.5)
    return Scenario(
        "",
        (Fault("starved", "node_agent-2", at=4.0, size=period), Fault("freeze", "rollout-0", phase="decode", at=d.uniform(8, 12))),
        must=(Must("rollout-0", within=(*SILENT_ROLLOUT, 2 * period), fault=1),),
        seconds=40,
        shape=BUSY,
    )


@scenario
def _trainer_and_rollout_stop_together(d: random.Random) -> Scenario:
    at = d.uniform(30, 35)
    return Scenario(
        "",
        (Fault("freeze", "trainer-0", phase="train", step=1, at=at), Fault("freeze", "rollout-0", at=at)),
        must=(
            Must("trainer-0", within=("trainer.no_compute",), not_before=True, fault=0),
            Must("rollout-0", within=WEDGED_ROLLOUT, fault=1),
        ),
        seconds=60,
        shape={**BUSY, "micro_seconds": 0.6, "micro_batches": 18, "staleness": 1, "tokens": 300},
    )


@scenario
def _keeper_stops_and_trainer_waits_for_it(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("freeze", "state_keeper-0", at=d.uniform(6, 15), step=1),),
        must=(Must("state_keeper-0", within=("keeper.silent",)),),
        seconds=60,
        shape={**QUICK, "ranks": 2},
    )


@scenario
def _keeper_stops_while_trainer_publishes_then_rollout_dies(d: random.Random) -> Scenario:
    at = d.uniform(6, 12)
    return Scenario(
        "",
        (Fault("freeze", "state_keeper-0", at=at, step=1), Fault("kill", "rollout-1", at=at + d.uniform(0.0, 4.0), step=1)),
        must=(Must("state_keeper-0", within=("keeper.silent",), fault=0), Must("rollout-1", fault=1)),
        seconds=50,
        shape={**QUICK, "rollouts": 2},
    )


@scenario
def _one_of_three_ranks_in_lockstep(d: random.Random) -> Scenario:
    kind, limit = d.choice([("freeze", "trainer.no_compute"), ("hang", "trainer.no_compute")])
    return Scenario(
        "",
        (Fault(kind, "trainer-1", phase="train", step=1, at=5.0),),
        must=(
            Must("trainer-1", within=(limit,), not_before=True),
            *(Must(r, "waiting_on_peer", within=(limit, 1.0)) for r in ("trainer-0", "trainer-2")),
        ),
        seconds=45,
        shape={**QUICK, "ranks": 3, "lockstep": True, "micro_batches": 8},
    )


@scenario
def _busy_wedge_of_one_of_three_in_lockstep(d: random.Random) -> Scenario:
    """The ones that wait are idle for 3 s long before the busy one's 10 s are over: idleness must not condemn them."""
    return Scenario(
        "",
        (Fault("wedge", "trainer-2", phase="train", step=1, at=5.0),),
        must=(Must("trainer-2", within=("trainer.no_marks",)),),
        seconds=50,
        shape={**QUICK, "ranks": 3, "lockstep": True, "micro_batches": 8},
    )


@scenario
def _two_ranks_stop_a_moment_apart(d: random.Random) -> Scenario:
    at = d.uniform(6, 9)
    return Scenario(
        "",
        (Fault("freeze", "trainer-1", phase="train", step=1, at=at), Fault("freeze", "trainer-2", step=1, at=at, phase="train")),
        must=(Must("trainer-1", within=("trainer.silent", 0.5)), Must("trainer-2", within=("trainer.silent", 0.5))),
        seconds=30,
        shape={**QUICK, "ranks": 3, "micro_batches": 8, "lockstep": True},
    )


@scenario
def _all_rollouts_stop_together(d: random.Random) -> Scenario:
    """A mount hangs under all of them: the trainer that runs dry is not to blame."""
    names = ["rollout-0", "rollout-1", "rollout-2"]
    return Scenario(
        "",
        tuple(Fault("freeze", name, at=d.uniform(8, 8.2), step=2) for name in names),
        must=tuple(Must(name, within=(*WEDGED_ROLLOUT, 0.2)) for name in names),
        seconds=60,
        shape={**BUSY, "rollouts": 3},
    )


@scenario
def _death_just_after_a_freeze(d: random.Random) -> Scenario:
    victim = d.choice(["trainer-0", "rollout-0", "request_manager"])
    at, seconds = d.uniform(8, 14), d.uniform(1.5, 2.6)
    return Scenario(
        "",
        (Fault("freeze", victim, at=at, seconds=seconds), Fault("kill", victim, at=at + seconds + d.uniform(0.0, 0.3))),
        must=(Must(victim, fault=1),),
        seconds=35,
        shape=BUSY,
    )


@scenario
def _death_while_frozen(d: random.Random) -> Scenario:
    victim = d.choice(["trainer-0", "rollout-0", "request_manager"])
    at = d.uniform(8, 14)
    return Scenario(
        "",
        (Fault("freeze", victim, at=at), Fault("kill", victim, at=at + d.uniform(0.1, 2.6))),
        must=(Must(victim, fault=1),),
        seconds=35,
        shape=BUSY,
    )


@scenario
def _the_restarted_one_dies_again(d: random.Random) -> Scenario:
    victim = d.choice(["rollout-0", "trainer-0", "request_manager", "state_keeper-0"])
    at = d.uniform(8, 12)
    return Scenario(
        "",
        (Fault("kill", victim, at=at), Fault("kill", victim, at=at + 1.0 + d.uniform(0.1, 4.0))),
        must=(Must(victim), Must(victim, fault=1)),
        restarts=1.0,
        seconds=45,
        shape={**QUICK, "rollouts": 2},
    )


@scenario
def _the_restarted_rollout_stops_before_its_first_token(d: random.Random) -> Scenario:
    at = d.uniform(8, 10)
    return Scenario(
        "",
        (Fault("kill", "rollout-1", at=at), Fault("freeze", "rollout-1", at=at + 4.0, phase="waiting_request")),
        must=(Must("rollout-1"), Must("rollout-1", within=("rollout.grace", "rollout.heartbeat"), fault=1)),
        restarts=1.0,
        seconds=80,
        shape={**QUICK, "rollouts": 2},
    )


@scenario
def _node_agent_stopped_while_its_rollout_dies(d: random.Random) -> Scenario:
    """The witness is away for less than its limit, and tells when it is back."""
    at, seconds = d.uniform(8, 12), d.uniform(2.0, 3.4)
    return Scenario(
        "",
        (Fault("freeze", "node_agent-3", at=at, seconds=seconds), Fault("kill", "rollout-1", at=at + d.uniform(0.1, 1.0))),
        must=(Must("rollout-1", within=seconds, fault=0),),
        seconds=35,
        shape=BUSY,
    )


@scenario
def _node_agent_dies_then_its_rollout_stops(d: random.Random) -> Scenario:
    at = d.uniform(8, 12)
    return Scenario(
        "",
        (Fault("kill", "node_agent-2", at=at), Fault("freeze", "rollout-0", at=at + d.uniform(0.2, 2.0))),
        must=(Must("node_agent-2"), Must("rollout-0", within=(*WEDGED_ROLLOUT, 3.2), fault=1)),
        restarts=1.0,
        seconds=50,
        shape=BUSY,
    )


@scenario
def _trainer_stops_while_the_host_does_not_run(d: random.Random) -> Scenario:
    """The gap condemns nobody, and excuses nobody for long: counted from the stop, for that waits for its phase, maybe beyond the gap."""
    at, gap = d.uniform(10, 12), d.uniform(4, 20)
    return Scenario(
        "",
        (Fault("freeze", "host", at=at, seconds=gap), Fault("freeze", "trainer-0", at=at + d.uniform(0.2, 3.0), phase="train")),
        must=(Must("trainer-0", within=(gap, "trainer.no_compute", 0.2), fault=1),),
        seconds=55,
        shape={**QUICK, "micro_batches": 20, "staleness": 1},
    )


@scenario
def _rollout_stops_while_the_supervisor_does_not_run(d: random.Random) -> Scenario:
    at, gap = d.uniform(8, 12), d.uniform(3, 20)
    return Scenario(
        "",
        (Fault("freeze", "supervisor", at=at, seconds=gap), Fault("freeze", "rollout-0", at=at + 0.1, phase="decode")),
        must=(Must("rollout-0", within=(gap, *SILENT_ROLLOUT, 0.2), fault=1),),
        may=("supervisor",),
        seconds=60,
        shape=BUSY,
    )


@scenario
def _supervisor_dies_while_a_trainer_stops(d: random.Random) -> Scenario:
    """The next supervisor reads the log and knows what the dead one knew."""
    at = d.uniform(8, 10)
    return Scenario(
        "",
        (Fault("freeze", "trainer-0", at=at, phase="train", step=1), Fault("kill", "supervisor", at=at + 0.5, step=1)),
        must=(Must("trainer-0", within=("trainer.no_compute", 2.6), fault=0),),
        may=("supervisor",),
        seconds=50,
        shape={**QUICK, "micro_batches": 16},
    )


@scenario
def _trainer_hangs_and_the_user_pauses(d: random.Random) -> Scenario:
    at = d.uniform(6, 10)
    return Scenario(
        "",
        (Fault("hang", "trainer-0", phase="train", step=1, at=at), Fault("pause", step=1, at=at + 1.0, seconds=30.0)),
        must=(Must("trainer-0", within=("trainer.no_compute",), not_before=True, fault=0),),
        seconds=60,
        shape=QUICK,
    )


@scenario
def _benign_and_faulty_overlap(d: random.Random) -> Scenario:
    """A rollout in a long prefill answers and lives; the other one, silent from the same moment, does not."""
    at = d.uniform(8, 12)
    return Scenario(
        "",
        (Fault("long_token", "rollout-0", at=at, seconds=d.uniform(8, 16)), Fault("hang", "rollout-1", at=at, phase="decode")),
        must=(Must("rollout-1", within=SILENT_ROLLOUT, not_before=True, fault=1),),
        seconds=50,
        shape=BUSY,
    )


@scenario
def _slow_rank_then_stopped(d: random.Random) -> Scenario:
    """Slow is no fault; stopped is, and the slow one's own pace is no excuse."""
    at = d.uniform(8, 12)
    return Scenario(
        "",
        (Fault("slow", "trainer-0", at=at, size=d.uniform(3.5, 5)), Fault("freeze", "trainer-0", at=at + 10, phase="train")),
        must=(Must("trainer-0", within=("trainer.no_compute",), not_before=True, fault=1),),
        seconds=60,
        shape={**QUICK, "ranks": 2, "lockstep": False},
    )


@scenario
def _two_rollouts_one_node(d: random.Random) -> Scenario:
    """The node goes, then the only rollout that is left stops: both, each by its own."""
    at = d.uniform(8, 10)
    lost = ["rollout-0", "rollout-2", "node_agent-2"]
    return Scenario(
        "",
        (Fault("node_loss", "node-2", at=at, step=1), Fault("freeze", "rollout-1", at=at + d.uniform(0.0, 2.5), step=1)),
        must=(*(Must(r, within=3.2, fault=0) for r in lost), Must("rollout-1", within=WEDGED_ROLLOUT, fault=1)),
        seconds=40,
        shape={**BUSY, "rollouts": 3},
    )


@scenario
def _supervisor_dies_between_question_and_deadline(d: random.Random) -> Scenario:
    """No answer comes: the next supervisor says so, once."""
    at = d.uniform(8, 12)
    dies = at + LAB.rollout.no_tokens + d.uniform(0.3, 2.5)
    return Scenario(
        "",
        (Fault("freeze", "rollout-0", at=at, step=1), Fault("kill", "supervisor", at=dies, step=1)),
        must=(Must("rollout-0", within=(*WEDGED_ROLLOUT, 2.6), fault=0),),
        may=("supervisor",),
        seconds=45,
        shape=BUSY,
    )


@scenario
def _node_agent_stops(d: random.Random) -> Scenario:
    """What it does not see is nobody's fault."""
    agent = d.choice([1, 2, 3])
    return Scenario(
        "",
        (Fault("freeze", f"node_agent-{agent}", at=d.uniform(6, 14)),),
        must=(Must(f"node_agent-{agent}", within=("node.silent",)),),
        seconds=40,
        shape={**QUICK, "rollouts": 2},
    )


@scenario
def _restart_of_a_minute(d: random.Random) -> Scenario:
    """While a role is being restarted nobody else is to blame for the quiet, and it is not called failed again."""
    victim = d.choice(["trainer-0", "rollout-0", "state_keeper-0", "request_manager"])
    return Scenario(
        "",
        (Fault("kill", victim, at=d.uniform(8, 12)),),
        must=(Must(victim),),
        restarts=d.uniform(30, 70),
        seconds=110,
        shape={**QUICK, "rollouts": 2},
    )


@scenario
def _half_the_job_dies_at_once(d: random.Random) -> Scenario:
    victims = ["trainer-0", "rollout-1", "request_manager", "state_keeper-0"]
    at = d.uniform(8, 14)
    return Scenario(
        "",
        tuple(Fault("kill", v, at=at + d.uniform(0, 0.02)) for v in victims),
        must=tuple(Must(v, within=0.15) for v in victims),
        restarts=1.0,
        seconds=40,
        shape={**QUICK, "rollouts": 2, "ranks": 1},
    )


@scenario
def _killed_while_suspected(d: random.Random) -> Scenario:
    """The exit is the better proof: no waiting for the heartbeat's deadline."""
    at = d.uniform(8, 12)
    return Scenario(
        "",
        (Fault("freeze", "rollout-0", at=at, phase="decode"), Fault("kill", "rollout-0", at=LAB.rollout.no_tokens + 0.6, after=0)),
        must=(Must("rollout-0", fault=1),),
        seconds=30,
        shape={**BUSY, "rollouts": 3, "tokens": 300},
    )


@scenario
def _freeze_below_then_busy_wedge(d: random.Random) -> Scenario:
    """Idle for less than one limit, then busy without a mark: the second rule's time counts from the last mark."""
    at = d.uniform(6, 9)
    return Scenario(
        "",
        (
            Fault("freeze", "trainer-0", phase="train", step=1, at=at, seconds=2.2),
            Fault("wedge", "trainer-0", phase="train", step=1, at=1.0, after=0),
        ),
        must=(Must("trainer-0", within=("trainer.no_marks", 0.5), fault=1),),
        seconds=50,
        shape={**QUICK, "ranks": 1, "micro_batches": 8},
    )


@scenario
def _death_at_the_end_of_the_hosts_gap(d: random.Random) -> Scenario:
    victim = d.choice(["trainer-0", "rollout-0", "task_runner"])
    at, gap = d.uniform(8, 12), d.uniform(3, 15)
    return Scenario(
        "",
        (Fault("freeze", "host", at=at, seconds=gap), Fault("kill", victim, at=at + gap - d.uniform(-0.1, 2.0))),
        must=(Must(victim, within=(gap, 0.2), fault=0),),
        seconds=40,
        shape=BUSY,
    )


@scenario
def _pause_and_death(d: random.Random) -> Scenario:
    victim = d.choice(["trainer-0", "rollout-0", "request_manager", "state_keeper-0"])
    at = d.uniform(8, 12)
    return Scenario(
        "",
        (Fault("pause", at=at, seconds=25.0), Fault("kill", victim, at=at + d.uniform(0.5, 20))),
        must=(Must(victim, fault=1),),
        restarts=1.0,
        seconds=50,
        shape={**QUICK, "rollouts": 2},
    )


@scenario
def _agent_stops_while_its_only_role_is_replaced(d: random.Random) -> Scenario:
    """It has told of the life before, and nobody tells of the next one: the watcher is named, not first the stall of the job."""
    return Scenario(
        "",
        (Fault("kill", "rollout-1", at=d.uniform(7, 9)), Fault("freeze", "node_agent-3", at=d.uniform(0.1, 1.0), after=0)),
        must=(Must("rollout-1"), Must("node_agent-3", within=("node.silent", 5.0), fault=1)),
        restarts=2.0,
        seconds=40,
        shape={**BUSY, "rollouts": 2},
    )


@scenario
def _to_wait_for_a_peer_is_not_to_be_slow(d: random.Random) -> Scenario:
    """One rank has long advantages; the others wait for it in their first micro-batches, and are none of them stragglers."""
    return Scenario(
        "",
        tuple(Fault("long_phase", "trainer-0", at=at, seconds=d.uniform(5, 9), phase="advantage") for at in (6.0, 20.0, 34.0)),
        never=(("trainer-1", "reported"), ("trainer-2", "reported")),
        seconds=75,
        shape={**QUICK, "ranks": 3, "lockstep": True, "micro_batches": d.randint(2, 6), "micro_seconds": d.uniform(0.1, 0.4)},
    )
