"""Scenarios with one fault: each kind of role, in each phase that matters, ended, stopped, stuck, slowed, late.

Ranges are drawn anew with each seed. Times of a statement are thresholds, by their paths.
"""

from __future__ import annotations

from typing import Any

from detection_world import Fault, Must, Scenario

TOKENS = ("rollout.no_tokens", "rollout.heartbeat")
LOOP = ("rollout.wedged", "rollout.heartbeat")
DECODING: dict[str, Any] = {"tokens": 150, "staleness": 1, "tools": 0.0}
"""Rollouts that decode nearly all the time, so that the phase is met soon."""
ALONE: dict[str, Any] = {"ranks": 1}
PLAIN: dict[str, Any] = {"lockstep": False}
SOON = (5.0, 20.0)
TRAINED = {"at": (5.0, 12.0), "step": 1}
"""After the first optimizer step: no start-up grace stands any more."""


def single(name: str, fault: Fault, *must: Must, seconds: float = 45.0, quiet: bool = False, shape: dict[str, Any] | None = None,
           **fields: Any) -> Scenario:
    return Scenario(name, (fault,), must, quiet=quiet, seconds=seconds, shape=shape or {}, **fields)


_ENDED = (
    *(single(f"kill/{role}", Fault("kill", role, SOON), Must(role), seconds=24.0)
      for role in ("trainer-0", "task_runner", "rollout_manager", "request_manager", "agent_worker-0", "state_keeper-0", "node_agent-1")),
    single("kill/supervisor", Fault("kill", "supervisor", SOON), Must("supervisor", within=2.0), seconds=26.0),
    single("kill/rollout-decoding", Fault("kill", "rollout-0", SOON, phase="decode"), Must("rollout-0"), shape=DECODING),
    single("kill/rollout-without-work", Fault("kill", "rollout-0", SOON, phase="waiting_request"), Must("rollout-0"),
           shape={"staleness": 0, "batch": 8}),
    single("kill/trainer-in-snapshot", Fault("kill", "trainer-0", phase="snapshot", **TRAINED), Must("trainer-0"), seconds=60.0),
    single("kill/trainer-in-publish", Fault("kill", "trainer-0", phase="publish", **TRAINED), Must("trainer-0"), seconds=60.0),
    single("kill/one-rank-of-three", Fault("kill", "trainer-2", phase="train", **TRAINED), Must("trainer-2"), seconds=60.0,
           shape={"ranks": 3, "lockstep": True}),
    single("exit/rollout", Fault("exit", "rollout-0", SOON), Must("rollout-0")),
    single("exit/trainer-in-optimizer", Fault("exit", "trainer-0", phase="optimizer", **TRAINED), Must("trainer-0"), seconds=60.0),
    single("exception/trainer-in-train", Fault("exception", "trainer-0", phase="train", **TRAINED), Must("trainer-0"), seconds=60.0),
    single("exception/rollout", Fault("exception", "rollout-0", SOON), Must("rollout-0")),
    single("exception/task_runner", Fault("exception", "task_runner", SOON), Must("task_runner")),
    single("non-finite-loss", Fault("non_finite", "trainer-0", phase="train", **TRAINED), Must("trainer-0", "reported"),
           Must("trainer-0", within=0.3), seconds=60.0),
    *(single(f"node-loss/{node}", Fault("node_loss", node, SOON), *(Must(role, within=3.0) for role in roles), seconds=26.0,
             shape={"ranks": 2, "rollouts": 3})
      for node, roles in (("node-1", ("node_agent-1", "trainer-0", "trainer-1", "state_keeper-0")),
                          ("node-2", ("node_agent-2", "rollout-0", "rollout-2")), ("node-3", ("node_agent-3", "rollout-1")))),
)  # fmt: skip

_STOPPED = (
    single("freeze/trainer-in-train", Fault("freeze", "trainer-0", phase="train", **TRAINED),
           Must("trainer-0", within=("trainer.no_compute",), not_before=True), seconds=60.0, shape=ALONE),
    single("freeze/one-rank-in-lockstep", Fault("freeze", "trainer-1", phase="train", **TRAINED),
           Must("trainer-1", within=("trainer.no_compute",)), seconds=60.0, shape={"ranks": 2, "lockstep": True}),
    single("freeze/one-rank-of-three", Fault("freeze", "trainer-1", phase="train", **TRAINED),
           Must("trainer-1", within=("trainer.no_compute",), not_before=True), seconds=60.0, shape={"ranks": 3, "lockstep": False}),
    single("freeze/trainer-in-snapshot", Fault("freeze", "trainer-0", phase="snapshot", **TRAINED),
           Must("trainer-0", within=("trainer.silent",)), seconds=60.0, shape=ALONE),
    single("freeze/trainer-without-batch", Fault("freeze", "trainer-0", phase="waiting_batch", **TRAINED),
           Must("trainer-0", within=("trainer.silent",)), seconds=60.0, shape={"ranks": 1, "staleness": 0}),
    single("freeze/rollout-decoding", Fault("freeze", "rollout-0", (4.0, 12.0), phase="decode"),
           Must("rollout-0", "suspect", TOKENS[:1], not_before=True), Must("rollout-0", within=TOKENS, not_before=True), shape=DECODING),
    single("freeze/rollout-without-work", Fault("freeze", "rollout-0", SOON, phase="waiting_request"),
           Must("rollout-0", "suspect", LOOP[:1]), Must("rollout-0", within=LOOP), shape={"staleness": 0, "batch": 8}),
    single("freeze/rollout-in-a-tool", Fault("freeze", "rollout-0", (4.0, 12.0), phase="waiting_tool"),
           Must("rollout-0", within=LOOP), seconds=60.0,
           shape={"tools": 1.0, "tool_seconds": 6.0, "batch": 8, "staleness": 0}),
    *(single(f"freeze/{role}", Fault("freeze", role, SOON), Must(role, within=("management.silent",)), seconds=28.0)
      for role in ("task_runner", "rollout_manager", "request_manager", "agent_worker-0")),
    single("freeze/state_keeper", Fault("freeze", "state_keeper-0", SOON), Must("state_keeper-0", within=("keeper.silent",)), seconds=28.0),
    single("freeze/node_agent", Fault("freeze", "node_agent-1", SOON), Must("node_agent-1", within=("node.silent",)), seconds=28.0),
    single("freeze/agent-of-management", Fault("freeze", "node_agent-0", SOON), Must("node_agent-0", within=("node.silent",)),
           seconds=28.0),
)  # fmt: skip

_STUCK = (
    single("wedge/trainer", Fault("wedge", "trainer-0", phase="train", **TRAINED), Must("trainer-0", within=("trainer.no_marks",)),
           seconds=70.0, shape=PLAIN),
    single("wedge/one-rank-in-lockstep", Fault("wedge", "trainer-1", phase="train", **TRAINED),
           Must("trainer-1", within=("trainer.no_marks",)), seconds=70.0, shape={"ranks": 2, "lockstep": True}),
    single("wedge/rollout-decoding", Fault("wedge", "rollout-0", (4.0, 12.0), phase="decode"),
           Must("rollout-0", within=TOKENS, not_before=True), shape=DECODING),
    single("wedge/rollout-without-work", Fault("wedge", "rollout-0", SOON, phase="waiting_request"), Must("rollout-0", within=LOOP),
           shape={"staleness": 0, "batch": 8}),
    single("wedge/request_manager", Fault("wedge", "request_manager", SOON), Must("request_manager", within=("management.silent",))),
    single("hang/trainer-in-train", Fault("hang", "trainer-0", phase="train", **TRAINED),
           Must("trainer-0", within=("trainer.no_compute",), not_before=True), seconds=60.0, shape=ALONE),
    single("hang/one-rank-of-three", Fault("hang", "trainer-2", phase="train", **TRAINED),
           Must("trainer-2", within=("trainer.no_compute",), not_before=True), seconds=60.0, shape={"ranks": 3, "lockstep": False}),
    single("hang/rollout-decoding", Fault("hang", "rollout-0", (4.0, 12.0), phase="decode"),
           Must("rollout-0", within=TOKENS, not_before=True),
           shape=DECODING),
    single("hang/trainer-in-snapshot", Fault("hang", "trainer-0", phase="snapshot", **TRAINED),
           Must("trainer-0", "reported", ("trainer.snapshot",)), Must("trainer-0", within=("job.stall", 2.0)), seconds=75.0, shape=ALONE,
           thresholds={"job.stall": "25s"}),
    single("hang/trainer-in-advantage", Fault("hang", "trainer-0", phase="advantage", **TRAINED),
           Must("trainer-0", "reported", ("trainer.advantage",)), Must("trainer-0", within=("job.stall", 2.0)), seconds=75.0, shape=ALONE,
           thresholds={"job.stall": "25s"}),
    single("dry/rollout", Fault("dry", "rollout-0", (4.0, 12.0), phase="decode"), Must("rollout-0", "suspect", TOKENS[:1]),
           Must("rollout-0", within=38.0), seconds=60.0, shape=DECODING),
    single("lost-trajectory", Fault("lost_group", at=SOON), Must("rollout_manager", "reported", ("job.stall", 12.0)), seconds=70.0,
           thresholds={"job.stall": "25s"}),
    single("agent-worker-stuck", Fault("hang", "agent_worker-0", (4.0, 9.0)),
           Must("agent_worker-0", within=("job.stall", "job.stall", 15.0)),
           seconds=85.0, shape={"workers": 1, "tools": 1.0, "tool_seconds": 0.5}, thresholds={"job.stall": "25s"}, may=("agent_worker-0",)),
)  # fmt: skip

_LATE = (
    *(single(f"late-start/{role}", Fault("late_start", role, 0.0), Must(role, within=("job.start", 0.5)), seconds=32.0,
             thresholds={"job.start": "20s"})
      for role in ("rollout-0", "trainer-0", "request_manager", "node_agent-2")),
    single("slow/one-rank", Fault("slow", "trainer-0", phase="train", size=(6.0, 10.0), **TRAINED),
           Must("trainer-0", "reported", 95.0), seconds=125.0,
           shape={"ranks": 3, "lockstep": False, "micro_batches": 6, "micro_seconds": 0.2, "staleness": 1}),
    single("slow/one-replica", Fault("slow", "rollout-0", (6.0, 12.0), phase="decode", size=(8.0, 12.0)),
           Must("rollout-0", "reported", 95.0), seconds=125.0,
           shape={"rollouts": 3, "tokens": 500, "batch": 30, "rate": 30.0, "tools": 0.0}),
    single("lag/reported", Fault("lag", "task_runner", SOON, seconds=(1.3, 4.0)), Must("task_runner", "reported", 4.3), seconds=30.0),
    single("lag/for-ever", Fault("lag", "rollout_manager", SOON, seconds=30.0), Must("rollout_manager", within=("management.silent",)),
           seconds=30.0),
    single("slow-pull", Fault("slow_pull", "rollout-0", (5.0, 10.0), seconds=(14.0, 25.0)),
           Must("rollout-0", "reported", ("rollout.pull", 12.0)), seconds=60.0, shape={"staleness": 1}),
    single("slow-disk", Fault("slow_disk", "state_keeper-0", (5.0, 10.0), seconds=(13.0, 25.0), step=2),
           Must("state_keeper-0", "reported", ("keeper.checkpoint", 15.0)), seconds=70.0, shape={"staleness": 1, "ranks": 1}),
    single("connection-lost", Fault("peer_gone", "state_keeper-0", SOON), Must("state_keeper-0", "reported")),
    *(single(f"overdue/{phase}", Fault("long_phase", "trainer-0", (3.0, 8.0), seconds=(12.0, 20.0), phase=phase),
             Must("trainer-0", "reported", (f"trainer.{phase}", 30.0)), seconds=75.0, shape=ALONE)
      for phase in ("advantage", "optimizer", "snapshot", "publish")),
)  # fmt: skip

SINGLE = (*_ENDED, *_STOPPED, *_STUCK, *_LATE)
