"""Scenarios in which nobody is to be condemned: noise, slowness and rests, each up to just below the limit that would make it a fault."""

from __future__ import annotations

from typing import Any

from detection_world import Fault, Must, Scenario

SOON = (5.0, 20.0)
TRAINED = {"at": (5.0, 12.0), "step": 1}
LONG = {"tokens": 150, "tools": 0.0}


def benign(name: str, *faults: Fault, must: tuple[Must, ...] = (), quiet: bool = True, seconds: float = 45.0,
           shape: dict[str, Any] | None = None, **fields: Any) -> Scenario:
    return Scenario(f"benign/{name}", faults, must, quiet=quiet, seconds=seconds, shape=shape or {}, **fields)


HARMLESS = (
    benign("nothing", seconds=90.0),
    benign("nothing-and-much-jitter", shape={"jitter": 0.04, "delay": 0.02}, seconds=60.0),
    benign("one-of-each", shape={"ranks": 1, "rollouts": 1, "workers": 1, "staleness": 0}),
    benign("long-advantage", Fault("long_phase", "trainer-0", (3.0, 9.0), seconds=(3.0, 9.0), phase="advantage"), shape={"ranks": 1}),
    benign("long-checkpoint", Fault("long_phase", "trainer-0", (3.0, 9.0), seconds=(3.0, 9.0), phase="snapshot"), shape={"ranks": 1}),
    benign("long-advantage-of-one-rank", Fault("long_phase", "trainer-1", (3.0, 9.0), seconds=(4.0, 9.0), phase="advantage"),
           quiet=False, shape={"ranks": 2, "lockstep": True}),
    benign("long-micro-batch", Fault("long_phase", "trainer-0", (3.0, 9.0), seconds=(3.0, 8.0), phase="train"), shape={"ranks": 1}),
    benign("long-first-token", Fault("long_token", "rollout-0", (4.0, 12.0), seconds=(4.0, 25.0)), quiet=False, shape=LONG),
    benign("first-compile-of-a-rollout", Fault("compile", "rollout-0", 0.0, seconds=(5.0, 26.0))),
    benign("first-compile-of-a-trainer", Fault("compile", "trainer-0", 0.0, seconds=(5.0, 18.0)), seconds=70.0, shape={"ranks": 1}),
    benign("slow-tool", Fault("slow_tool", at=(3.0, 9.0), seconds=(8.0, 25.0)), shape={"tools": 1.0}, seconds=70.0),
    benign("idle-rollout", Fault("idle", "rollout-0", SOON, seconds=(5.0, 30.0)), shape={"rollouts": 2}, seconds=70.0),
    benign("rollout-that-never-worked", Fault("idle", "rollout-0", 0.0), shape={"rollouts": 2}, seconds=60.0),
    benign("pause", Fault("pause", at=SOON, seconds=(5.0, 30.0)), seconds=60.0),
    benign("pause-longer-than-a-stall", Fault("pause", at=SOON, seconds=(30.0, 40.0)), seconds=75.0, thresholds={"job.stall": "25s"}),
    benign("short-freeze/trainer", Fault("freeze", "trainer-0", seconds=(0.2, 2.6), phase="train", **TRAINED), quiet=False,
           shape={"ranks": 1}, seconds=60.0),
    benign("short-freeze/one-rank-in-lockstep", Fault("freeze", "trainer-1", seconds=(0.2, 2.6), phase="train", **TRAINED), quiet=False,
           shape={"ranks": 3, "lockstep": True}, seconds=60.0),
    benign("short-freeze/rollout", Fault("freeze", "rollout-0", (4.0, 12.0), seconds=(0.2, 2.7), phase="decode"), shape=LONG),
    benign("short-freeze/rollout-that-is-suspected", Fault("freeze", "rollout-0", (4.0, 12.0), seconds=(3.3, 5.5), phase="decode"),
           must=(Must("rollout-0", "suspect", ("rollout.no_tokens",), not_before=True),
                 Must("rollout-0", "cleared", ("rollout.no_tokens", 4.0))), shape=LONG),
    benign("short-freeze/management", Fault("freeze", "request_manager", SOON, seconds=(1.0, 4.7))),
    benign("short-freeze/keeper", Fault("freeze", "state_keeper-0", SOON, seconds=(0.5, 4.7))),
    benign("short-freeze/node_agent", Fault("freeze", "node_agent-2", SOON, seconds=(0.5, 3.6))),
    benign("host-suspended", Fault("freeze", "host", SOON, seconds=(1.0, 20.0)), seconds=60.0),
    benign("supervisor-suspended", Fault("freeze", "supervisor", SOON, seconds=(1.0, 20.0)), seconds=60.0),
    benign("supervisor-suspended-again-and-again", *(Fault("freeze", "supervisor", 5.0 + 7 * i, seconds=(0.7, 6.0)) for i in range(4))),
    *(benign(f"clock-offset/{node}", Fault("offset", node, 0.0, size=(-86400.0, 86400.0))) for node in ("node-0", "node-1", "node-2")),
    benign("starved-agent", Fault("starved", "node_agent-1", SOON, seconds=20.0, size=(0.5, 2.5)), Fault("starved", "node_agent-2", SOON,
           seconds=20.0, size=(0.5, 2.5))),
    benign("slow-pull-below-the-limit", Fault("slow_pull", "rollout-0", (4.0, 10.0), seconds=(2.0, 8.5))),
    benign("slow-disk-below-the-limit", Fault("slow_disk", "state_keeper-0", (4.0, 10.0), seconds=(2.0, 8.5)),
           never=(("state_keeper-0", "reported"),)),
    benign("half-as-fast/trainer", Fault("slow", "trainer-0", SOON, seconds=15.0, size=(1.2, 2.0)), quiet=False, shape={"ranks": 3}),
    benign("half-as-fast/rollout", Fault("slow", "rollout-0", SOON, seconds=15.0, size=(1.2, 2.0)), shape={"rollouts": 3}),
    benign("all-at-once", Fault("freeze", "rollout-0", SOON, seconds=(0.2, 2.5)), Fault("freeze", "trainer-0", SOON, seconds=(0.2, 2.5)),
           Fault("freeze", "task_runner", SOON, seconds=(0.2, 4.0)), Fault("starved", "node_agent-2", SOON, size=(0.2, 1.0), seconds=5.0),
           Fault("slow_tool", at=SOON, seconds=3.0), Fault("offset", "node-1", 0.0, size=5.0), quiet=False),
)  # fmt: skip
