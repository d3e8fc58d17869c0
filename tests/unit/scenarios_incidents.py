"""The incidents that happened to others, as scenarios: what was seen, what has to be said here, whose published default misses it.

Written from the specification and the incident reports alone, without a look at the detector. Each scenario is a function of dice; `drawn`
gives one with its parameters. Times of a statement come from the thresholds (`Thresholds.lab()`) and from the promise of "threshold + two
samples". Incidents that only concern recovery, transport or the ledger have no scenario here.
Who misses them by design: incidents_missed.py.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from detection_world import Fault, Must, Scenario

from robustrl.core.thresholds import Thresholds

LAB = Thresholds.lab()
Maker = Callable[[random.Random], Scenario]
INCIDENTS: dict[str, Maker] = {}

QUICK = {"batch": 12, "tokens": 40, "rate": 60.0, "micro_batches": 4, "micro_seconds": 0.3, "tools": 0.2, "tool_seconds": 0.3}
"""Steps of about three seconds, for scenarios that need many of them."""
SILENT_ROLLOUT = ("rollout.no_tokens", "rollout.heartbeat")
WEDGED_ROLLOUT = ("rollout.wedged", "rollout.heartbeat")


def incident(make: Maker) -> Maker:
    """Two underscores in the function's name part the incident from the variant."""
    INCIDENTS["incident/" + make.__name__.strip("_").replace("__", "+").replace("_", "-")] = make
    return make


def drawn(makers: dict[str, Maker], name: str, seed: int) -> Scenario:
    return dataclasses.replace(makers[name](random.Random(f"{name} {seed}")), name=name)


@incident
def _group_init_hang(d: random.Random) -> Scenario:
    late = d.choice(["trainer-0", "trainer-1"])
    return Scenario(
        "",
        (Fault("late_start", late, at=0.0),),
        must=(Must(late, within=("job.start", 0.5)),),
        seconds=LAB.job.start + 8,
        shape={"ranks": 2},
    )


@incident
def _engine_dies_late(d: random.Random) -> Scenario:
    at = d.uniform(150, 250)
    return Scenario(
        "", (Fault("kill", "rollout-1", at=at),), must=(Must("rollout-1"),), seconds=at + 15, shape={**QUICK, "rollouts": 3}, restarts=2.0
    )


@incident
def _control_behind_data(d: random.Random) -> Scenario:
    """Overlapping pauses while an engine is too busy to make its next token, but not to answer."""
    first, wait = d.uniform(8, 12), d.uniform(6, 15)
    return Scenario(
        "",
        (
            Fault("pause", at=first, seconds=d.uniform(5, 9)),
            Fault("pause", at=first + d.uniform(0.0, 2.0), seconds=wait),
            Fault("long_token", "rollout-0", at=first - d.uniform(0, 1), seconds=wait),
        ),
        seconds=45,
        shape=QUICK,
    )


@incident
def _unschedulable_role(d: random.Random) -> Scenario:
    late = d.choice(["rollout-1", "agent_worker-1", "state_keeper-0"])
    return Scenario(
        "",
        (Fault("late_start", late, at=0.0),),
        must=(Must(late, within=("job.start", 0.5)),),
        seconds=LAB.job.start + 8,
        shape={**QUICK, "workers": 2, "rollouts": 2},
        may=("task_runner",) if late == "state_keeper-0" else (),
    )


@incident
def _everyone_waits(d: random.Random) -> Scenario:
    """Minutes of a late event loop, then all wait for a trajectory that no one holds."""
    at = d.uniform(8, 14)
    return Scenario(
        "",
        (Fault("lag", "rollout_manager", at=at, seconds=d.uniform(1.5, 4.0)), Fault("lost_group", at=at + d.uniform(5, 8))),
        must=(
            Must("rollout_manager", "reported", within=("management.lag",)),
            Must("rollout_manager", "reported", within=("job.stall", 12.0), fault=1),
        ),
        seconds=at + LAB.job.stall + 25,
        shape=QUICK,
    )


@incident
def _silent_server(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault(d.choice(["hang", "freeze"]), "rollout-1", phase="decode", at=d.uniform(6, 15)),),
        must=(Must("rollout-1", within=SILENT_ROLLOUT, not_before=True),),
        seconds=45,
        shape={"rollouts": 2},
    )


@incident
def _child_died_at_start(d: random.Random) -> Scenario:
    victim = d.choice(["rollout-0", "trainer-0", "request_manager", "state_keeper-0"])
    return Scenario("", (Fault(d.choice(["kill", "exit"]), victim, at=d.uniform(0.6, 2.0)),), must=(Must(victim, within=2.2),), seconds=20)


@incident
def _dead_on_first_call(d: random.Random) -> Scenario:
    victim, phase = d.choice([("trainer-0", "train"), ("trainer-0", "advantage"), ("rollout-0", "decode")])
    return Scenario("", (Fault(d.choice(["kill", "exit"]), victim, at=0.0, phase=phase),), must=(Must(victim),), seconds=45)


@incident
def _sync_stall(d: random.Random) -> Scenario:
    """The transfer hangs, both ends live: said aloud at its own limit, and nobody is shot for it."""
    return Scenario(
        "",
        (Fault("slow_pull", "rollout-1", at=d.uniform(5, 12), seconds=d.uniform(20, 60)),),
        must=(Must("rollout-1", "reported", within=("rollout.pull", 15.0)),),
        seconds=50,
        shape={**QUICK, "rollouts": 2},
    )


@incident
def _sync_stall__source_hangs(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("freeze", "state_keeper-0", at=d.uniform(6, 20), step=1),),
        must=(Must("state_keeper-0", within=("keeper.silent",)),),
        seconds=45,
        shape=QUICK,
    )


@incident
def _trainer_stuck_engines_fine(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("hang", "trainer-0", phase="train", step=1, at=d.uniform(5, 12)),),
        must=(Must("trainer-0", within=("trainer.no_compute",), not_before=True),),
        seconds=60,
    )


@incident
def _trainer_stuck_engines_fine__busy(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("wedge", "trainer-0", phase="train", step=1, at=d.uniform(5, 12)),),
        must=(Must("trainer-0", within=("trainer.no_marks",)),),
        seconds=65,
        shape=QUICK,
    )


@incident
def _shot_at_first_compile(d: random.Random) -> Scenario:
    return Scenario(
        "",
        (Fault("compile", "rollout-0", at=0.0, seconds=d.uniform(8, 24)), Fault("compile", "trainer-0", at=0.0, seconds=d.uniform(8, 26))),
        quiet=True,
        seconds=60,
        shape={**QUICK, "ranks": 1},
    )


@incident
def _wedged_passes_probe(d: random.Random) -> Scenario:
    """Again in the life after: each life is judged by itself."""
    at = d.uniform(8, 14)
    return Scenario(
        "",
        (Fault("wedge", "rollout-1", at=at, phase="decode"), Fault("wedge", "rollout-1", at=at + 12, phase="decode")),
        must=(
            Must("rollout-1", within=SILENT_ROLLOUT, not_before=True),
            Must("rollout-1", within=SILENT_ROLLOUT, not_before=True, fault=1),
        ),
        restarts=1.0,
        seconds=55,
        shape={**QUICK, "rollouts": 2, "tokens": 200},
    )


@incident
def _probe_asks_too_much(d: random.Random) -> Scenario:
    """A server that never had a request has nothing to show for itself, and is well."""
    return Scenario("", (Fault("idle", "rollout-1", at=0.0),), quiet=True, seconds=d.uniform(60, 100), shape={**QUICK, "rollouts": 2})


@incident
def _dead_member_in_quorum(d: random.Random) -> Scenario:
    """The others wait for the dead rank: known at once, without their time-outs, and not held against them."""
    return Scenario(
        "",
        (Fault("kill", "trainer-1", phase="train", step=1, at=d.uniform(5, 12)),),
        must=(Must("trainer-1"),),
        seconds=60,
        shape={"ranks": 3, "lockstep": d.random() < 0.5},
    )


@incident
def _restarted_stays_dead(d: random.Random) -> Scenario:
    victim = d.choice(["rollout-1", "state_keeper-0", "task_runner", "trainer-0"])
    return Scenario(
        "",
        (Fault("kill", victim, at=d.uniform(6, 20)),),
        must=(Must(victim),),
        restarts=d.uniform(0.5, 5.0),
        seconds=70,
        shape={**QUICK, "rollouts": 2},
    )


@incident
def _broadcast_to_a_ghost(d: random.Random) -> Scenario:
    """What is known of a dead life says nothing of the next one."""
    victim = d.choice(["rollout-0", "trainer-0", "state_keeper-0"])
    at = d.uniform(6, 12)
    return Scenario(
        "",
        (Fault("kill", victim, at=at), Fault("late_word", victim, at=at + d.uniform(2.0, 15.0))),
        must=(Must(victim),),
        restarts=d.uniform(0.5, 2.0),
        seconds=45,
        shape={**QUICK, "rollouts": 2},
    )


@incident
def _broadcast_to_a_ghost__watch_left_paused(d: random.Random) -> Scenario:
    """A pause silences nobody's death and no engine's silence."""
    at = d.uniform(8, 14)
    return Scenario(
        "",
        (Fault("pause", at=at, seconds=60.0), Fault("freeze", "rollout-0", at=at + d.uniform(0.5, 20))),
        must=(Must("rollout-0", within=WEDGED_ROLLOUT, fault=1),),
        seconds=60,
        shape={**QUICK, "rollouts": 2},
    )


@incident
def _dead_rank_blocks_refit(d: random.Random) -> Scenario:
    phase = d.choice(["publish", "snapshot", "optimizer"])
    return Scenario(
        "",
        (Fault("hang", "trainer-0", phase=phase, step=1, at=d.uniform(5, 12)),),
        must=(Must("trainer-0", "reported", within=(f"trainer.{phase}", 0.5), not_before=False),),
        seconds=60,
        shape={**QUICK, "ranks": 2},
    )


@incident
def _dead_rank_blocks_refit__stopped(d: random.Random) -> Scenario:
    phase = d.choice(["publish", "snapshot", "optimizer"])
    return Scenario(
        "",
        (Fault("freeze", "trainer-1", phase=phase, step=1, at=d.uniform(5, 12)),),
        must=(Must("trainer-1", within=("trainer.silent",)),),
        seconds=60,
        shape={**QUICK, "ranks": 2},
    )


@incident
def _read_twice(d: random.Random) -> Scenario:
    """One role comes back from its restart just as another one dies."""
    at = d.uniform(8, 14)
    return Scenario(
        "",
        (Fault("kill", "rollout-1", at=at), Fault("kill", "trainer-0", at=at + d.uniform(0.9, 3.2))),
        must=(Must("rollout-1"), Must("trainer-0", fault=1)),
        restarts=0.6,
        seconds=50,
        shape={**QUICK, "rollouts": 2},
    )


@incident
def _paused_for_ever(d: random.Random) -> Scenario:
    """A long pause by the user is no stall; but what is lost in it shows after it, once the stall's time has passed anew."""
    at = d.uniform(8, 12)
    pause = LAB.job.stall + d.uniform(10, 30)
    return Scenario(
        "",
        (Fault("pause", at=at, seconds=pause), Fault("lost_group", at=at + pause + d.uniform(4, 8))),
        must=(Must("rollout_manager", "reported", within=("job.stall", 12.0), fault=1),),
        seconds=at + pause + LAB.job.stall + 25,
        shape=QUICK,
    )


@incident
def _wrong_victim(d: random.Random) -> Scenario:
    """Two of the same kind on one node: the name says which."""
    victim = d.choice(["rollout-0", "rollout-2", "agent_worker-0", "agent_worker-1"])
    return Scenario(
        "", (Fault("kill", victim, at=d.uniform(6, 20)),), must=(Must(victim),), seconds=30, shape={"rollouts": 3, "workers": 2}
    )


@incident
def _late_message(d: random.Random) -> Scenario:
    """An answer of the dead life must not save the next one from its verdict, nor its exit end it."""
    at = d.uniform(8, 12)
    return Scenario(
        "",
        (
            Fault("kill", "rollout-1", at=at),
            Fault("freeze", "rollout-1", at=at + 9, phase="decode"),
            Fault("late_word", "rollout-1", at=at + 9 + d.uniform(3.2, 5.5)),
        ),
        must=(Must("rollout-1"), Must("rollout-1", within=SILENT_ROLLOUT, not_before=True, fault=1)),
        restarts=1.0,
        seconds=50,
        shape={**QUICK, "rollouts": 2, "tokens": 200, "tools": 0.0},
    )


@incident
def _poisoned_source(d: random.Random) -> Scenario:
    """The reader died; the source that lost its connection is well, and so are the readers that complain of it."""
    at = d.uniform(8, 14)
    return Scenario(
        "",
        (Fault("kill", "rollout-1", at=at), Fault("peer_gone", "rollout-1", at=at + d.uniform(0.01, 0.3))),
        must=(Must("rollout-1"),),
        seconds=30,
        shape={**QUICK, "rollouts": 3},
    )


@incident
def _poisoned_source__living_peer(d: random.Random) -> Scenario:
    """A broken connection alone is no death of the other side."""
    peer = d.choice(["state_keeper-0", "rollout-1"])
    return Scenario("", (Fault("peer_gone", peer, at=d.uniform(8, 14)),), seconds=40, shape={**QUICK, "rollouts": 3})


@incident
def _progress_never_ends(d: random.Random) -> Scenario:
    """The newcomer's first pull: no history to compare with, and a loop that turns all the while."""
    return Scenario(
        "",
        (Fault("slow_pull", "rollout-0", at=0.6, seconds=500.0),),
        must=(Must("rollout-0", "reported", within=("rollout.pull", 6.0)),),
        seconds=30,
        shape={**QUICK, "rollouts": 2},
    )
