"""Scenarios with several faults: at once, one within the other, one after the other in the next life, and with a watcher that is gone."""

from __future__ import annotations

from typing import Any

from detection_world import Fault, Must, Scenario

TOKENS = ("rollout.no_tokens", "rollout.heartbeat")
LOOP = ("rollout.wedged", "rollout.heartbeat")
LONG: dict[str, Any] = {"tokens": 150, "tools": 0.0, "staleness": 1, "rollouts": 2}
ALONE: dict[str, Any] = {"ranks": 1, "staleness": 1}


def several(name: str, *faults: Fault, must: tuple[Must, ...], seconds: float = 50.0, shape: dict[str, Any] | None = None,
            **fields: Any) -> Scenario:
    return Scenario(f"several/{name}", faults, must, seconds=seconds, shape=shape or {}, **fields)


SEVERAL = (
    several("two-rollouts-at-once", Fault("kill", "rollout-0", 9.0), Fault("kill", "rollout-1", 9.0),
            must=(Must("rollout-0"), Must("rollout-1")), shape={"rollouts": 2}),
    several("management-all-at-once", *(Fault("kill", role, 9.0) for role in ("task_runner", "rollout_manager", "request_manager")),
            must=tuple(Must(role) for role in ("task_runner", "rollout_manager", "request_manager"))),
    several("twice-the-same-rollout", Fault("kill", "rollout-0", (6.0, 10.0)), Fault("kill", "rollout-0", (16.0, 20.0)),
            must=(Must("rollout-0"), Must("rollout-0", fault=1)), restarts=1.0),
    several("twice-the-same-manager", Fault("kill", "request_manager", (6.0, 10.0)), Fault("freeze", "request_manager", (16.0, 20.0)),
            must=(Must("request_manager"), Must("request_manager", within=("management.silent",), fault=1)), restarts=1.0),
    several("again-in-start-up", Fault("kill", "task_runner", 8.0), Fault("kill", "task_runner", (10.05, 10.4)),
            must=(Must("task_runner"), Must("task_runner", fault=1)), restarts=2.0),
    several("trainer-stopped-and-rollout-killed", Fault("freeze", "trainer-0", (6.0, 9.0), phase="train", step=1),
            Fault("kill", "rollout-1", (0.5, 2.5), after=0),
            must=(Must("trainer-0", within=("trainer.no_compute",), fault=0), Must("rollout-1", fault=1)), shape={**ALONE, "rollouts": 3},
            seconds=60.0),
    several("killed-while-suspect", Fault("freeze", "rollout-0", 8.0, phase="decode"), Fault("kill", "rollout-0", (3.4, 5.8), after=0),
            must=(Must("rollout-0", "suspect", TOKENS[:1]), Must("rollout-0", within=7.0)), shape=LONG),
    several("stopped-in-the-middle-of-a-freeze-of-another", Fault("freeze", "rollout-1", 8.0, seconds=2.5, phase="decode"),
            Fault("freeze", "rollout-0", 9.0, phase="decode"), must=(Must("rollout-0", within=TOKENS, not_before=True, fault=1),),
           shape=LONG),
    several("a-short-freeze-then-a-wedge", Fault("freeze", "rollout-0", 8.0, seconds=(1.0, 2.5), phase="decode"),
            Fault("wedge", "rollout-0", (4.0, 7.0), phase="decode", after=0),
            must=(Must("rollout-0", within=TOKENS, not_before=True, fault=1),), shape=LONG),
    several("supervisor-dies-while-a-rollout-is-suspect", Fault("freeze", "rollout-0", 8.0, phase="decode"),
           Fault("kill", "supervisor", (3.4, 5.8), after=0),
            must=(Must("rollout-0", within=(*TOKENS, 6.0)), Must("supervisor", within=2.0, fault=1)), shape=LONG),
    several("supervisor-suspended-while-a-rollout-dies", Fault("freeze", "supervisor", 8.0, seconds=(2.0, 8.0)),
           Fault("kill", "rollout-0", 9.0),
            must=(Must("rollout-0", within=7.5, fault=1),)),
    several("supervisor-suspended-while-a-rollout-hangs", Fault("hang", "rollout-0", 8.0, phase="decode"),
            Fault("freeze", "supervisor", (1.0, 5.8), seconds=(2.0, 8.0), after=0), must=(Must("rollout-0", within=(*TOKENS, 10.0)),),
            shape=LONG),
    several("host-suspended-while-a-trainer-hangs", Fault("hang", "trainer-0", (6.0, 9.0), phase="train", step=1),
            Fault("freeze", "host", (0.2, 2.8), seconds=(2.0, 8.0), after=0),
            must=(Must("trainer-0", within=("trainer.no_compute", 9.0), fault=0),),
            shape=ALONE, seconds=60.0),
    several("host-suspended-while-a-manager-dies", Fault("freeze", "host", 8.0, seconds=(2.0, 8.0)), Fault("kill", "task_runner", 9.0),
            must=(Must("task_runner", within=7.5, fault=1),)),
    several("agent-stopped-and-its-rollout-killed", Fault("freeze", "node_agent-2", 8.0), Fault("kill", "rollout-0", 9.0),
            must=(Must("node_agent-2", within=("node.silent",)), Must("rollout-0", within=10.0, fault=1)), restarts=1.0, seconds=30.0),
    several("agent-killed-and-its-trainer-stopped", Fault("kill", "node_agent-1", 8.0, step=1), Fault("freeze", "trainer-0", 1.0, after=0),
            must=(Must("node_agent-1"), Must("trainer-0", within=12.0, fault=1)), restarts=1.0, seconds=40.0, shape=ALONE),
    several("starved-agent-and-stopped-trainer", Fault("starved", "node_agent-1", 4.0, size=(0.5, 1.5), seconds=100.0),
            Fault("freeze", "trainer-0", (6.0, 9.0), phase="train", step=1),
            must=(Must("trainer-0", within=("trainer.no_compute", 3.0), fault=1),), shape=ALONE, seconds=70.0),
    several("clock-offset-and-stopped-trainer", Fault("offset", "node-1", 0.0, size=(-5.0, 5.0)),
            Fault("freeze", "trainer-0", (6.0, 9.0), phase="train", step=1),
            must=(Must("trainer-0", within=("trainer.no_compute",), not_before=True, fault=1),), shape=ALONE, seconds=60.0),
    several("clock-offset-and-stopped-rollout", Fault("offset", "node-2", 0.0, size=(-5.0, 5.0)),
           Fault("freeze", "rollout-0", 8.0, phase="decode"),
            must=(Must("rollout-0", within=TOKENS, not_before=True, fault=1),), shape=LONG),
    several("two-ranks-stopped", Fault("freeze", "trainer-0", (6.0, 8.0), phase="train", step=1),
            Fault("freeze", "trainer-1", (0.0, 0.5), after=0),
            must=(Must("trainer-0", within=("trainer.no_compute", 1.0), fault=0),), may=("trainer-1",), seconds=60.0,
            shape={"ranks": 2, "lockstep": True}),
    several("rank-and-keeper-stopped", Fault("freeze", "state_keeper-0", 9.0), Fault("freeze", "trainer-0", 9.0),
            must=(Must("state_keeper-0", within=("keeper.silent",), fault=0),), may=("trainer-0",), shape=ALONE, seconds=60.0),
    several("node-lost-and-manager-stopped", Fault("node_loss", "node-3", 9.0), Fault("freeze", "request_manager", 9.5),
            must=(Must("rollout-1", within=3.0), Must("node_agent-3", within=3.0),
           Must("request_manager", within=("management.silent",), fault=1)),
            shape={"rollouts": 2}),
    several("pause-and-stopped-rollout", Fault("pause", at=8.0, seconds=20.0, step=1), Fault("freeze", "rollout-0", 1.0, after=0),
            must=(Must("rollout-0", within=LOOP, fault=1),)),
    several("slow-tool-and-stopped-worker", Fault("slow_tool", at=5.0, seconds=15.0), Fault("freeze", "agent_worker-0", 9.0),
            must=(Must("agent_worker-0", within=("management.silent",), fault=1),), shape={"tools": 1.0}),
    several("compile-and-killed-peer", Fault("compile", "rollout-0", 0.0, seconds=(10.0, 25.0)), Fault("kill", "rollout-1", 9.0),
            must=(Must("rollout-1", fault=1),), shape={"rollouts": 2}),
    several("compile-of-one-and-hang-of-a-peer", Fault("compile", "rollout-0", 0.0, seconds=(10.0, 25.0)),
            Fault("hang", "rollout-1", 8.0, phase="decode"), must=(Must("rollout-1", within=TOKENS, not_before=True, fault=1),),
           shape=LONG),
    several("long-token-then-hang", Fault("long_token", "rollout-0", 6.0, seconds=(6.0, 12.0)),
           Fault("hang", "rollout-0", 25.0, phase="decode"),
            must=(Must("rollout-0", within=TOKENS, not_before=True, fault=1),), shape=LONG, seconds=55.0),
    several("straggler-that-stops", Fault("slow", "trainer-0", (6.0, 9.0), size=4.0, step=1),
           Fault("freeze", "trainer-0", 20.0, phase="train"),
            must=(Must("trainer-0", within=("trainer.no_compute",), not_before=True, fault=1),), shape=ALONE, seconds=70.0),
    several("killed-during-recovery-of-another", Fault("kill", "trainer-0", 9.0), Fault("kill", "rollout-0", (9.5, 12.0)),
            must=(Must("trainer-0"), Must("rollout-0", fault=1)), restarts=3.0),
    several("thrice-a-wedge", *(Fault("wedge", "rollout-0", 8.0 + 15 * i, phase="decode") for i in range(3)),
            must=tuple(Must("rollout-0", within=TOKENS, not_before=True, fault=i) for i in range(3)), restarts=0.5, shape=LONG,
           seconds=75.0),
)  # fmt: skip
