"""One fault where it is hard to see: in start-up, at a phase boundary, in idleness, at the last step.

As in scenarios_incidents.py each is a function of dice, for `Thresholds.lab()`, written from the specification alone.
"""

from __future__ import annotations

import random

from detection_world import Fault, Must, Scenario
from scenarios_benign import BUSY, MANAGERS
from scenarios_incidents import LAB, QUICK, WEDGED_ROLLOUT, Maker

ADVERSARY: dict[str, Maker] = {}


def scenario(make: Maker) -> Maker:
    ADVERSARY[make.__name__.strip("_").replace("_", "-")] = make
    return make


# -- single faults, in bad places ---


@scenario
def _before_the_first_micro_batch(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("hang", "trainer-0", phase="train", at=0.0),),
        must=(Must("trainer-0", within=("trainer.grace",)),),
        seconds=65,
        shape={**QUICK, "micro_seconds": d.uniform(0.3, 0.6)},
    )


@scenario
def _at_the_last_step(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault(d.choice(["freeze", "hang"]), "trainer-0", phase="train", step=3, at=5.0),),
        must=(Must("trainer-0", within=("trainer.no_compute",), not_before=True),),
        seconds=70,
        steps=4,
        shape=QUICK,
    )


@scenario
def _in_a_tool_wait(d: random.Random) -> Scenario:
    """No token is expected, yet the loop has to turn."""
    return Scenario(
        "",
        (Fault("slow_tool", at=4.0, seconds=30.0), Fault(d.choice(["wedge", "freeze"]), "rollout-0", at=10.0, phase="waiting_tool")),
        must=(Must("rollout-0", within=WEDGED_ROLLOUT, fault=1),),
        seconds=70,
        shape={**QUICK, "tools": 1.0, "rollouts": 2},
    )


@scenario
def _idle_engine_wedges(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault(d.choice(["wedge", "freeze", "hang"]), "rollout-0", phase="waiting_request", at=d.uniform(6, 12), step=1),),
        must=(Must("rollout-0", within=WEDGED_ROLLOUT),),
        seconds=60,
        shape={**QUICK, "micro_seconds": 0.6, "staleness": 0},
    )


@scenario
def _answers_but_makes_nothing(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("dry", "rollout-0", phase="decode", at=d.uniform(6, 12)),),
        must=(
            Must("rollout-0", "suspect", within=("rollout.no_tokens",), not_before=True),
            Must("rollout-0", within=(LAB.rollout.answers + 1) * (LAB.rollout.no_tokens + 0.2)),
        ),
        seconds=55,
        shape=BUSY,
    )


@scenario
def _exception_in_any_phase(d: random.Random) -> Scenario:
    phase = d.choice(["advantage", "train", "optimizer", "snapshot", "publish"])
    return Scenario(
        "",
        (Fault("exception", "trainer-0", phase=phase, at=0.0, step=d.choice([0, 1])),),
        must=(Must("trainer-0"),),
        seconds=50,
        shape=QUICK,
    )


@scenario
def _a_manager_stops(d: random.Random) -> Scenario:
    """All wait for it; it alone is named."""
    victim = d.choice(MANAGERS)
    return Scenario(
        "", (Fault("freeze", victim, at=d.uniform(6, 20)),), must=(Must(victim, within=("management.silent",)),), seconds=45, shape=QUICK
    )


@scenario
def _all_agent_workers_stop_with_tools_out(d: random.Random) -> Scenario:
    at = d.uniform(6, 12)
    return Scenario(
        "",
        (Fault("slow_tool", at=3.0, seconds=3.0), Fault("freeze", "agent_worker-0", at=at), Fault("kill", "agent_worker-1", at=at)),
        must=(Must("agent_worker-0", within=("management.silent",), fault=1), Must("agent_worker-1", fault=2)),
        seconds=40,
        shape={**QUICK, "workers": 2, "tools": 1.0},
    )


@scenario
def _loss_that_is_no_number(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("non_finite", "trainer-0", phase="train", step=1, at=5.0),),
        must=(Must("trainer-0", "reported"),),
        may=("trainer-0",),
        seconds=40,
        shape=QUICK,
    )


@scenario
def _whole_trainer_node(d: random.Random) -> Scenario:
    roles = ["trainer-0", "trainer-1", "state_keeper-0", "node_agent-1"]
    return Scenario(
        "",
        (Fault("node_loss", "node-1", at=d.uniform(6, 20)),),
        must=tuple(Must(r, within=3.2) for r in roles),
        seconds=40,
        shape={"ranks": 2},
    )


# -- what the detector did not do when these were written ---


@scenario
def _two_stopped_ranks_are_both_culprits(d: random.Random) -> Scenario:
    at = d.uniform(6, 9)
    return Scenario(
        "",
        (Fault("freeze", "trainer-1", phase="train", step=1, at=at), Fault("freeze", "trainer-2", step=1, at=at, phase="train")),
        must=(Must("trainer-1", within=("trainer.no_compute", 0.5)), Must("trainer-2", within=("trainer.no_compute", 0.5))),
        never=(("trainer-1", "waiting_on_peer"), ("trainer-2", "waiting_on_peer")),
        seconds=30,
        shape={**QUICK, "ranks": 3, "micro_batches": 8, "lockstep": True},
    )


@scenario
def _those_who_wait_for_a_slow_rank_are_not_reported(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("slow", "trainer-1", at=d.uniform(8, 12), size=d.uniform(5, 7)),),
        must=(Must("trainer-1", "reported", within=60.0),),
        never=(("trainer-0", "reported"), ("trainer-2", "reported")),
        seconds=80,
        shape={**QUICK, "ranks": 3, "micro_seconds": 0.2, "micro_batches": 8, "lockstep": False},
    )


@scenario
def _stopped_as_train_begins(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("slow", "trainer-0", at=4.0, size=d.uniform(3.5, 5)), Fault("freeze", "trainer-0", at=5.0, phase="train", step=1)),
        must=(Must("trainer-0", within=("trainer.no_compute",), not_before=True, fault=1),),
        seconds=50,
        shape={**QUICK, "ranks": 1, "delay": 0.0005, "jitter": 0.001, "staleness": 0},
    )


@scenario
def _a_trickle_is_reported(d: random.Random) -> Scenario:
    """Where its peers have some seconds of work to compare it with; without that the rule is blind, and says so."""
    return Scenario(
        "",
        (Fault("slow", "rollout-0", at=d.uniform(8, 12), size=d.uniform(15, 30), phase="decode"),),
        must=(Must("rollout-0", "reported", within=60.0),),
        seconds=90,
        shape={**BUSY, "rollouts": 3, "tokens": 500, "batch": 30},
    )
