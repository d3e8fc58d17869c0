"""A virtual job from its start on: time, words between its processes, the order of its work, restarts. See detection_world.py.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from world_faults import Faults
from world_roles import Agent, Role, Rollout, Supervisor, Trainer
from world_shape import TICK, Fault, Shape

from robustrl.core import events as ev
from robustrl.core.roles import Phase, RoleKind
from robustrl.core.thresholds import Thresholds


class World(Faults):
    def __init__(self, shape: Shape, seed: int, thresholds: Thresholds, steps: int = 10_000, restarts: float | None = None,
                 every_look: bool = False) -> None:  # fmt: skip
        """``restarts``: seconds that a restart takes; None: nothing is restarted but the supervisor. ``every_look``: the log holds each
        look of the node agents, not only what changed: for detectors that were not asked what they want to see."""
        self.every_look = every_look
        self.shape, self.thresholds, self.start_thresholds = shape, thresholds, thresholds
        self.dice = random.Random(seed)
        self.now = 0.0
        self.entries: list[ev.Entry] = []
        self.verdicts: list[ev.Verdict] = []
        self.injected: list[tuple[float, Fault]] = []
        self.looks: dict[str, list[float]] = {}
        """Node -> when its agent looked at its roles."""
        self.step, self.training, self.dispatched = 0, 0, 0
        self.left: dict[int, int] = {}
        self.tool_seconds = shape.tool_seconds
        self.planned: list[Fault] = []
        self._steps = steps
        self.paused = False
        self.saved, self._saving = 0, False
        self._waited = 0.0
        self.marks: dict[str, tuple[float, ...]] = {}
        self.asked: set[tuple[str, int, int]] = set()
        self._restarts = restarts
        self._heap: list[tuple[float, int, Callable[[], Any]]] = []
        self._count = count()
        self._last_arrival: dict[str, float] = {}
        self._n: dict[tuple[str, int], int] = {}
        self._offsets: dict[str, float] = {}
        self._host_frozen_since: float | None = None
        self._host_inbox: list[tuple[str, int, float, ev.Event]] = []
        self._idle: set[str] = set()
        self._lost: set[str] = set()
        self._never_ready: set[str] = set()
        self._compiles: dict[str, float] = {}
        self.roles: dict[str, Role] = {}
        self._of: dict[RoleKind, list[Role]] = {}
        self._on: dict[str, list[Role]] = {}
        for i in range(4):
            self._make(Agent, f"node_agent-{i}", f"node-{i}")
        self._make(Supervisor, "supervisor", "node-0")
        for name in ["task_runner", "rollout_manager", "request_manager", *(f"agent_worker-{i}" for i in range(shape.workers))]:
            self._make(Role, name, "node-0")
        self._make(Role, "state_keeper-0", "node-1")
        for i in range(shape.ranks):
            self._make(Trainer, f"trainer-{i}", "node-1")
        for i in range(shape.rollouts):
            self._make(Rollout, f"rollout-{i}", f"node-{2 + i % 2}")
        config = {"steps": steps, "checkpoint_every": 1}
        self._log(ev.HOST, 1, 0.0, ev.RunStarted(schema=ev.SCHEMA, run="r", name="n", wall=0.0, host_pid=1, config=config, machine={}))
        self._log(ev.HOST, 1, 0.0, ev.ThresholdsChanged(thresholds=thresholds.to_dict(), changes={}))
        for name in self.roles:
            self.after(self.dice.uniform(0.0, 0.5), lambda name=name: self._start(name, self.dice.uniform(0.5, 2.0)))
        for agent in self.of(RoleKind.NODE_AGENT):
            self.after(self.dice.uniform(0.0, 0.1), agent.look)  # type: ignore[attr-defined]
        self.after(TICK, self._tick)

    # -- for tests ---

    def plan(self, *faults: Fault) -> None:
        first = len(self.planned)
        for fault in faults:
            if fault.role and fault.role != "host" and fault.role not in self.roles and not fault.role.startswith("node-"):
                raise ValueError(f"{fault.role}: there is no such role; there are {', '.join(self.roles)}")
            seconds = None if fault.seconds is None else self._draw(fault.seconds)
            after = None if fault.after is None else first + fault.after
            drawn = replace(fault, at=self._draw(fault.at), seconds=seconds, size=self._draw(fault.size), after=after)
            self.planned.append(drawn)
            if after is None:
                self.after(drawn.at - self.now, lambda drawn=drawn: self._try(drawn))  # type: ignore[operator]

    def set_threshold(self, at: float, path: str, value: Any) -> None:
        def change() -> None:
            new = self.thresholds.replace(path, value)
            self._log(ev.HOST, 1, self.now, ev.ThresholdsChanged(thresholds=new.to_dict(), changes=self.thresholds.changes(new)))
            self.thresholds = new

        self.after(at - self.now, change)

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            at, _, action = heapq.heappop(self._heap)
            self.now = max(self.now, at)  # a host that thaws logs its inbox one microsecond after the other
            action()
        self.now = max(self.now, until)

    # -- time and words ---

    def after(self, seconds: float, action: Callable[[], Any]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._count), action))

    def lag(self) -> float:
        return self.dice.expovariate(1 / self.shape.delay)

    def offset(self, node: str) -> float:
        return self._offsets.get(node, 0.0)

    def emit(self, source: str, event: ev.Event) -> None:
        """A role's word: it reaches the host a little later, in order."""
        role = self.roles[source]
        at, incarnation = self.now + self.offset(role.node), role.incarnation
        arrival = max(self.now + self.lag(), self._last_arrival.get(source, 0.0) + 1e-6)
        self._last_arrival[source] = arrival
        self.after(arrival - self.now, lambda: self._arrive(source, incarnation, at, event))

    def _arrive(self, source: str, incarnation: int, at: float, event: ev.Event) -> None:
        if self._host_frozen_since is not None:
            self._host_inbox.append((source, incarnation, at, event))
        else:
            self._log(source, incarnation, at, event)

    def _log(self, source: str, incarnation: int, at: float, event: ev.Event) -> None:
        n = self._n[source, incarnation] = self._n.get((source, incarnation), 0) + 1
        entry = ev.Entry(len(self.entries) + 1, self.now, source, incarnation, n, at, event)
        self.entries.append(entry)
        supervisor = self.roles["supervisor"]
        assert isinstance(supervisor, Supervisor)
        if supervisor.ready:
            supervisor.inbox.append(entry)
            self.after(self.lag(), supervisor.wake)
        if isinstance(event, ev.Verdict) and event.kind == "failed" and self._restarts is not None and event.role != "supervisor":
            role = self.roles[event.role]
            if role.incarnation == event.incarnation:
                self._restart(role)

    # -- the job ---

    def of(self, kind: RoleKind) -> list[Role]:
        return self._of.get(kind, [])

    def on(self, node: str) -> list[Role]:
        return self._on.get(node, [])

    def _make(self, cls: type[Role], name: str, node: str) -> None:
        role = self.roles[name] = cls(self, name, node)
        self._of.setdefault(role.kind, []).append(role)
        self._on.setdefault(node, []).append(role)

    def _start(self, name: str, seconds: float) -> None:
        role = self.roles[name]
        if role.node in self._lost:
            return
        role.ready = False
        role.incarnation += 1
        role.reset()
        if name in self._compiles:
            role.extra["compile"] = self._compiles[name]
        self._log(ev.HOST, 1, self.now, ev.RoleStarted(role=name, incarnation=role.incarnation, node=role.node, pid=1, start_ticks=1))
        if name not in self._never_ready:
            self.after(seconds, lambda incarnation=role.incarnation: self._ready(role, incarnation))

    def _ready(self, role: Role, incarnation: int) -> None:
        if role.alive and role.incarnation == incarnation:
            role.ready = True
            if isinstance(role, Supervisor):
                role.inbox = list(self.entries)
            self.emit(role.name, ev.RoleReady(role=role.name, incarnation=incarnation, seconds=1.0))

    def _tick(self) -> None:
        self.after(TICK, self._tick)
        for rollout in self.of(RoleKind.ROLLOUT):
            if rollout.questions or not self._looked_at(rollout):
                rollout.turn(self.now)
        managers = [self.roles[name] for name in ("task_runner", "rollout_manager", "request_manager")]
        for rank in self.of(RoleKind.TRAINER):
            rank.turn(self.now)
        if not all(role.up for role in managers) or self.paused:
            return
        if self.dispatched < min(self._steps, self.step + 1 + self.shape.staleness):
            self._dispatch(self.dispatched + 1)
        ranks = self.of(RoleKind.TRAINER)
        workers = self.of(RoleKind.AGENT_WORKER)
        batch = self.step + 1
        if not (self.training < batch <= self.dispatched and self.left[batch] == 0 and any(w.up for w in workers)):
            return
        if all(rank.ready and rank.alive and not rank.todo for rank in ranks):  # type: ignore[attr-defined]
            self.training = batch
            for rank in ranks:
                if isinstance(rank, Trainer):
                    self._begin(rank, batch)

    def _begin(self, rank: Trainer, step: int) -> None:
        """A call to a stopped rank waits at its door."""
        if rank.frozen:
            self.after(TICK, lambda: self._begin(rank, step) if rank.alive and self.training == step else None)
        else:
            rank.begin(step)

    def _dispatch(self, batch: int) -> None:
        least = batch - 1 - self.shape.staleness
        wanted = [r for r in self.of(RoleKind.ROLLOUT) if r.alive and r.ready and r.name not in self._idle]
        able = [r for r in wanted if r.version >= least]
        self._waited += TICK
        if not able or (able != wanted and self._waited < 2.0):
            return
        self.dispatched, self.left[batch], self._waited = batch, self.shape.batch, 0.0
        for i in range(self.shape.batch):
            rollout = able[i % len(able)]
            assert isinstance(rollout, Rollout)
            tokens = max(2.0, self.shape.tokens * self.dice.uniform(0.3, 1.7))
            rollout.live.append([batch, tokens, self.dice.random() < self.shape.tools])

    def finished(self, batch: int) -> None:
        self.left[batch] = max(0, self.left[batch] - 1)

    def backlog(self, role: Role) -> int:
        """What a management role has on its status page: steps, unfinished trajectories, tools."""
        if role.name == "task_runner":
            return self._steps - self.step
        if role.name in ("rollout_manager", "request_manager"):
            return sum(self.left.values())
        if role.name != "agent_worker-0":
            return 0
        in_tool = sum(len(r.in_tool) for r in self.of(RoleKind.ROLLOUT))  # type: ignore[attr-defined]
        unrewarded = 0 if role.up else sum(left == 0 for batch, left in self.left.items() if batch > self.training)
        return in_tool + unrewarded

    def all_at_optimizer(self, step: int) -> bool:
        ranks = self.of(RoleKind.TRAINER)
        return all(r.alive and r.ready and r.step >= step and not (r.todo and r.todo[0][0] in (Phase.ADVANTAGE, Phase.TRAIN))  # type: ignore[attr-defined]
                   for r in ranks)  # fmt: skip

    def behind(self, rank: Trainer) -> bool:
        """Another rank has not ended the micro-batch that this one has."""
        return any(r.step < rank.step or (r.todo and r.pending > rank.pending) for r in self.of(RoleKind.TRAINER))  # type: ignore[attr-defined]

    def trained(self, rank: Role) -> None:
        if rank.name != "trainer-0" or rank.step <= self.step:
            return
        self.step = rank.step
        keeper = self.roles["state_keeper-0"]
        self.emit(keeper.name, ev.OptimizerStepCommitted(step=self.step, version=self.step, digest="d", snapshot_digest="s", consumed=[],
                                                         batch=self.step, bytes=1, holder=keeper.name, incarnation=1))  # fmt: skip
        self.emit("task_runner", ev.StepMetrics(step=self.step, values={"loss": 0.1}, phase_seconds={}))
        self._save()

    def _save(self) -> None:
        """The newest step to disk, when the one before is written."""
        if self._saving or self.saved >= self.step:
            return
        keeper, step = self.roles["state_keeper-0"], self.step
        incarnation, self._saving = keeper.incarnation, True

        def done() -> None:
            self._saving = False
            if keeper.up and keeper.incarnation == incarnation:
                self.saved = step
                copied = ev.SnapshotCopied(step=step, source=keeper.name, holder="disk", digest="d", bytes=1, seconds=seconds)
                self.emit(keeper.name, copied)
            self._save()

        seconds = self.dice.uniform(0.05, 0.4) + keeper.extra.pop("disk", 0.0)
        self.after(seconds, done)

    def ask(self, role: str, incarnation: int, number: int) -> None:
        asked = self.roles[role]
        if asked.incarnation == incarnation and asked.alive:
            asked.questions.append(number)

    def _restart(self, role: Role) -> None:
        group = self.of(RoleKind.TRAINER) if role.kind is RoleKind.TRAINER else [role]
        for member in group:
            if member is not role:
                self._log(ev.HOST, 1, self.now, ev.RoleStateChanged(role=member.name, incarnation=member.incarnation, old="healthy",
                                                                    new="restarting", reason="its peer failed"))  # fmt: skip
            if member.alive:
                self._die(member)
            if isinstance(member, Rollout):
                self._take_back(member)
            self.after(self._restarts or 0.0, lambda name=member.name: self._start(name, self.dice.uniform(0.5, 2.0)))
        if role.kind is RoleKind.TRAINER:
            self.training = self.step

    def _take_back(self, rollout: Rollout) -> None:
        orphans = [*rollout.live, *(item[1] for item in rollout.in_tool)]
        rollout.live, rollout.in_tool = [], []
        others = [r for r in self.of(RoleKind.ROLLOUT) if r is not rollout and r.alive]
        for i, trajectory in enumerate(orphans):
            if others:
                others[i % len(others)].live.append(trajectory)  # type: ignore[attr-defined]
            else:
                self.finished(trajectory[0])
