"""Disturbances that look like faults: quiet just below a threshold, gaps of the observers themselves, honest slowness.

Nobody may be called failed in them, nor, where the scenario is quiet, suspected. As in scenarios_incidents.py each is a function of dice,
for `Thresholds.lab()`, written from the specification alone.
"""

from __future__ import annotations

import random

from detection_world import Fault, Must, Scenario
from scenarios_incidents import LAB, QUICK, Maker

BENIGN: dict[str, Maker] = {}
MANAGERS = ["task_runner", "rollout_manager", "request_manager"]
BUSY = {**QUICK, "rollouts": 2, "tokens": 200, "tools": 0.0}
"""Rollouts decode nearly all the time."""


def benign(make: Maker) -> Maker:
    BENIGN[make.__name__.strip("_").replace("_", "-")] = make
    return make


def just_below(d: random.Random, limit: float) -> float:
    """A look and the lateness of one below it."""
    return limit - d.uniform(0.35, 0.7)


@benign
def _freeze_below_in_train(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("freeze", "trainer-0", phase="train", step=1, at=5.0, seconds=just_below(d, LAB.trainer.no_compute)),),
        quiet=True,
        seconds=45,
        shape={**QUICK, "ranks": 1},
    )


@benign
def _freeze_below_in_decode(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("freeze", "rollout-0", phase="decode", at=d.uniform(6, 14), seconds=just_below(d, LAB.rollout.no_tokens)),),
        quiet=True,
        seconds=30,
        shape=BUSY,
    )


@benign
def _two_freezes_across_a_boundary(d: random.Random) -> Scenario:
    """Each below the limit, both together far above: one in train, the next as soon as the optimizer has begun."""
    seconds = just_below(d, LAB.trainer.no_compute)
    return Scenario(
        "",
        (
            Fault("freeze", "trainer-0", phase="train", step=1, at=5.0, seconds=seconds),
            Fault("freeze", "trainer-0", phase="optimizer", step=1, at=6.0, seconds=seconds),
        ),
        seconds=50,
        shape={**QUICK, "ranks": 1},
    )


@benign
def _freeze_from_decode_into_idleness(d: random.Random) -> Scenario:
    """Short stops in a row, with tokens between them."""
    at, seconds = d.uniform(8, 10), just_below(d, LAB.rollout.no_tokens)
    stops = tuple(Fault("freeze", "rollout-0", at=at + i * (seconds + d.uniform(0.6, 1.2)), seconds=seconds) for i in range(4))
    return Scenario("", stops, seconds=40, shape=BUSY)


@benign
def _thaw_within_the_heartbeat(d: random.Random) -> Scenario:
    """Long enough to be suspected, too short to be condemned: the answer comes with the thaw."""
    seconds = LAB.rollout.no_tokens + d.uniform(0.6, LAB.rollout.heartbeat - 0.6)
    return Scenario(
        "",
        (Fault("freeze", "rollout-0", phase="decode", at=d.uniform(6, 12), seconds=seconds),),
        must=(
            Must("rollout-0", "suspect", within=("rollout.no_tokens",), not_before=True),
            Must("rollout-0", "cleared", within=(seconds, 1.0, "job.hysteresis")),
        ),
        seconds=40,
        shape=BUSY,
    )


@benign
def _tool_wait_of_a_minute(d: random.Random) -> Scenario:
    return Scenario(
        "", (Fault("slow_tool", at=d.uniform(5, 12), seconds=d.uniform(30, 50)),), quiet=True, seconds=110, shape={**QUICK, "tools": 1.0}
    )


@benign
def _tool_wait_of_minutes(d: random.Random) -> Scenario:
    """Beyond the stall's time it may be said that no step is committed, but nobody is dead."""
    return Scenario("", (Fault("slow_tool", at=d.uniform(5, 12), seconds=d.uniform(120, 170)),), seconds=240, shape={**QUICK, "tools": 1.0})


@benign
def _long_first_token(d: random.Random) -> Scenario:
    return Scenario("", (Fault("long_token", "rollout-0", at=0.6, seconds=d.uniform(8, 24)),), quiet=True, seconds=45, shape=QUICK)


@benign
def _long_later_token(d: random.Random) -> Scenario:
    """A long prefill: suspect is right, failed is not, since the engine answers."""
    return Scenario(
        "",
        (Fault("long_token", "rollout-0", phase="decode", at=d.uniform(6, 12), seconds=d.uniform(5, 20)),),
        must=(Must("rollout-0", "suspect", within=("rollout.no_tokens",), not_before=True),),
        seconds=50,
        shape=BUSY,
    )


@benign
def _first_compile_on_all_at_once(d: random.Random) -> Scenario:
    limit = min(LAB.trainer.grace, LAB.rollout.grace)
    names = ["rollout-0", "rollout-1", "trainer-0", "trainer-1"]
    return Scenario(
        "",
        tuple(Fault("compile", name, at=0.0, seconds=d.uniform(0.4, 0.9) * limit) for name in names),
        seconds=90,
        shape={**QUICK, "ranks": 2, "rollouts": 2},
    )


@benign
def _idle_at_the_staleness_bound(d: random.Random) -> Scenario:
    """Every trainer phase long, though within its limit: rollouts have nothing to do for half a minute."""
    phases = ["advantage", "train", "optimizer", "snapshot", "publish"]
    return Scenario(
        "",
        tuple(Fault("long_phase", "trainer-0", phase=p, at=4.0, step=1, seconds=d.uniform(5.0, 8.5)) for p in phases),
        quiet=True,
        seconds=80,
        shape={**QUICK, "ranks": 1, "staleness": 0, "micro_seconds": 0.1},
    )


@benign
def _long_checkpoint(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("long_phase", "trainer-0", phase="snapshot", at=d.uniform(5, 10), step=1, seconds=d.uniform(14, 30)),),
        must=(Must("trainer-0", "reported", within=("trainer.snapshot", 20.0)),),
        seconds=70,
        shape=QUICK,
    )


@benign
def _slow_rank(d: random.Random) -> Scenario:
    """Reported, not restarted; the fast ones wait for it in each step and are not blamed."""
    return Scenario(
        "",
        (Fault("slow", "trainer-1", at=d.uniform(8, 12), size=d.uniform(5, 7)),),
        must=(Must("trainer-1", "reported", within=60.0),),
        seconds=80,
        shape={**QUICK, "ranks": 3, "micro_seconds": 0.2, "micro_batches": 8, "lockstep": False},
    )


@benign
def _slightly_slow_rank(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("slow", "trainer-1", at=d.uniform(8, 12), size=d.uniform(1.3, 1.9)),),
        quiet=True,
        seconds=60,
        shape={**QUICK, "ranks": 3},
    )


@benign
def _noisy_neighbour(d: random.Random) -> Scenario:
    """Everything on the machine gets slower at once: nobody is slower than its peers."""
    size = d.uniform(2.0, 4.0)
    names = ["trainer-0", "trainer-1", "rollout-0", "rollout-1"]
    return Scenario(
        "",
        tuple(Fault("slow", name, at=10.0, size=size, seconds=25.0) for name in names),
        quiet=True,
        seconds=60,
        shape={**QUICK, "ranks": 2, "rollouts": 2},
    )


@benign
def _host_freeze(d: random.Random) -> Scenario:
    return Scenario("", (Fault("freeze", "host", at=d.uniform(6, 14), seconds=d.uniform(2, 60)),), quiet=True, seconds=90, shape=QUICK)


@benign
def _supervisor_freeze(d: random.Random) -> Scenario:
    return Scenario(
        "", (Fault("freeze", "supervisor", at=d.uniform(6, 14), seconds=d.uniform(2, 40)),), may=("supervisor",), seconds=75, shape=QUICK
    )


@benign
def _host_freezes_twice_in_short_order(d: random.Random) -> Scenario:
    at = d.uniform(8, 12)
    return Scenario(
        "",
        (Fault("freeze", "host", at=at, seconds=d.uniform(4, 8)), Fault("freeze", "host", at=at + 8.5, seconds=d.uniform(4, 8))),
        seconds=40,
        shape=QUICK,
    )


@benign
def _node_agent_freeze_below(d: random.Random) -> Scenario:
    agent = d.choice([1, 2, 3])
    return Scenario(
        "",
        (Fault("freeze", f"node_agent-{agent}", at=d.uniform(6, 14), seconds=d.uniform(2.0, LAB.node.silent - 1.5)),),
        quiet=True,
        seconds=35,
        shape={"rollouts": 2},
    )


@benign
def _starved_node_agent(d: random.Random) -> Scenario:
    agent = d.choice([1, 2, 3])
    return Scenario("", (Fault("starved", f"node_agent-{agent}", at=d.uniform(5, 8), size=d.uniform(1.0, 2.2)),), seconds=50, shape=QUICK)


@benign
def _clocks_far_apart(d: random.Random) -> Scenario:
    return Scenario("", tuple(Fault("offset", f"node-{i}", at=0.0, size=d.uniform(-90, 90)) for i in (1, 2, 3)), quiet=True, seconds=45)


@benign
def _management_lag_below(d: random.Random) -> Scenario:
    return Scenario(
        "", (Fault("lag", d.choice(MANAGERS), at=d.uniform(6, 20), seconds=d.uniform(1.5, LAB.management.silent - 0.7)),), seconds=40
    )


@benign
def _the_end_is_no_stall(d: random.Random) -> Scenario:
    """After the last step nothing is committed any more, and that is right."""
    return Scenario("", (), quiet=True, seconds=LAB.job.stall + 60, steps=d.randint(2, 5), shape=QUICK)


@benign
def _heartbeat_answered_in_the_hosts_gap(d: random.Random) -> Scenario:
    """Suspected, asked, and the answer lies in an inbox that nobody reads for longer than the heartbeat's deadline."""
    at = d.uniform(8, 12)
    asked = at + LAB.rollout.no_tokens + d.uniform(0.05, 0.4)
    return Scenario(
        "",
        (
            Fault("long_token", "rollout-0", at=at, seconds=d.uniform(10, 14)),
            Fault("freeze", "host", at=asked, seconds=LAB.rollout.heartbeat + d.uniform(0.5, 6)),
        ),
        seconds=45,
        shape=BUSY,
    )


@benign
def _heartbeat_answered_between_two_supervisors(d: random.Random) -> Scenario:
    at = d.uniform(8, 12)
    return Scenario(
        "",
        (
            Fault("long_token", "rollout-0", at=at, seconds=d.uniform(10, 14)),
            Fault("kill", "supervisor", at=at + LAB.rollout.no_tokens + d.uniform(0.0, 0.4)),
        ),
        may=("supervisor",),
        seconds=45,
        shape=BUSY,
    )


@benign
def _clock_jumps_in_the_middle(d: random.Random) -> Scenario:
    node = d.choice([1, 2, 3])
    return Scenario("", (Fault("offset", f"node-{node}", at=d.uniform(8, 14), size=d.choice([-5.0, 5.0])),), seconds=40, shape=BUSY)


@benign
def _whole_machine_stands_still_briefly(d: random.Random) -> Scenario:
    """A virtual machine is moved: its roles and their witness stop together."""
    at, seconds = d.uniform(8, 14), just_below(d, LAB.trainer.no_compute)
    names = ["node_agent-1", "trainer-0", "trainer-1", "state_keeper-0"]
    return Scenario(
        "", tuple(Fault("freeze", name, at=at, seconds=seconds) for name in names), quiet=True, seconds=40, shape={**QUICK, "ranks": 2}
    )


@benign
def _duty_cycle(d: random.Random) -> Scenario:
    """Stopped for half of each second or two: slow, not dead."""
    victim, period = d.choice(["trainer-0", "rollout-0"]), d.uniform(1.0, 2.5)
    stops = tuple(Fault("freeze", victim, at=8 + i * period, seconds=period * d.uniform(0.4, 0.7)) for i in range(12))
    return Scenario("", stops, quiet=True, seconds=50, shape={**BUSY, "ranks": 1})


@benign
def _trickle(d: random.Random) -> Scenario:
    """A rollout at a thirtieth of its pace still makes tokens."""
    return Scenario(
        "", (Fault("slow", "rollout-0", at=d.uniform(8, 12), size=d.uniform(15, 30)),), seconds=50, shape={**BUSY, "rollouts": 3}
    )


@benign
def _slow_micro_batches_just_below_the_limit(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("slow", "trainer-0", at=d.uniform(8, 12), size=LAB.trainer.no_marks / 0.5 / 1.6),),
        seconds=80,
        shape={**QUICK, "ranks": 1, "micro_seconds": 0.5, "micro_batches": 2},
    )


@benign
def _keeper_and_managers_freeze_below(d: random.Random) -> Scenario:
    seconds = just_below(d, LAB.keeper.silent)
    names = ["state_keeper-0", *MANAGERS]
    return Scenario(
        "", tuple(Fault("freeze", name, at=d.uniform(8, 20), seconds=seconds) for name in names), quiet=True, seconds=45, shape=QUICK
    )


@benign
def _a_peer_stops_briefly_in_lockstep(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("freeze", "trainer-1", phase="train", step=1, at=5.0, seconds=just_below(d, LAB.trainer.no_compute)),),
        quiet=True,
        seconds=40,
        shape={**QUICK, "ranks": 3, "lockstep": True},
    )
