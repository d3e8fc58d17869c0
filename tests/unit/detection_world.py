"""A job in virtual time, healthy or not, that writes the log which a real one would write: for tests of detection.

Everything is seeded and nothing waits: a minute of a job of ten roles takes a few milliseconds. To use it:

    world = World(Shape.draw(random.Random(7)), seed=7, thresholds=Thresholds.lab())
    world.plan(Fault("freeze", "trainer-0", at=12.0, phase="train"))
    world.run(40.0)
    world.injected      [(time, fault)]: what was really hit, and when
    world.verdicts      what was said, in order (robustrl.core.events.Verdict)
    world.entries       the log

Or as data: `Scenario` says what is done, what must be said, about whom and by when; `run_scenario` gives what was wrong, as sentences.

The job: rollouts generate a batch of trajectories (some with tool turns), then the trainer ranks train on it: advantage, train
(micro-batches), optimizer (all ranks meet there), snapshot, publish; the rollouts pull the new version while they go on. Batch b may be
generated once step b - 1 - staleness is committed. Management roles have a loop that turns. On node-0: host and management; node-1: trainer
ranks and state keeper; node-2 and node-3: rollouts. Each node has a node_agent with a clock of its own that looks at its roles every 0.1 s,
with jitter, through the same `Sampler` as the real one. Words between processes take a few milliseconds. All is ready at about 3 s.

Faults (`Fault(kind, role, at, seconds, phase, size, step)`; ``seconds``: how long, None for ever; ``phase``: wait until the role is in it):

    kill         its process dies                       exit        the same, by itself, with status 0
    exception    the role says what went wrong, exits   non_finite  a loss that is no number (trainer), then exit
    freeze       SIGSTOP; also for "host", "supervisor", "node_agent-0"
    wedge        the work loop is stuck in Python, the process is alive and busy (trainer: in its learner, no more marks)
    hang         the work waits for something that does not come: idle, the control loop turns
    dry          a rollout's loop turns and answers, but makes no tokens
    slow         ``size`` times slower                  lag         the event loop is blocked ``seconds`` (management)
    node_loss    role: a node; all on it ends, the host learns it a little later
    late_start   role: is never ready (at=0 only)       peer_gone   another role loses its UCX connection to this one
    lost_group   the rollout manager loses a trajectory for good

and what is benign:

    long_phase   the next ``phase`` (advantage, optimizer, snapshot, publish, train) of a rank takes ``seconds`` more
    long_token   a rollout needs ``seconds`` for its next token, its loop turns meanwhile
    compile      the first engine step, or first micro-batch, takes ``seconds`` more (at=0 only); the loop of a rollout does not turn
    slow_tool    tools take ``seconds``                 slow_pull   the next pull takes ``seconds`` more
    idle         a rollout gets no work                 pause       by the user
    offset       role: a node; its clock is ``size`` seconds off (at=0 only)
    starved      role: a node agent that looks only every ``size`` seconds

A world with ``restarts`` starts a role anew, with the next incarnation, after it was called failed (a trainer rank: all ranks).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from robustrl.core import events as ev
from robustrl.core.detection import Detector, judge
from robustrl.core.roles import Phase, RoleId, RoleKind
from robustrl.core.sampling import Sampler
from robustrl.core.thresholds import Thresholds

TICK = 0.05


@dataclass(frozen=True)
class Shape:
    """A healthy job: seconds, tokens per second and trajectory, trajectories per batch."""

    ranks: int = 1
    rollouts: int = 2
    workers: int = 1
    lockstep: bool = False
    """Ranks meet at each micro-batch (sharded weights), not only in the optimizer."""
    staleness: int = 1
    batch: int = 32
    tokens: int = 60
    rate: float = 60.0
    concurrency: int = 64
    micro_batches: int = 6
    micro_seconds: float = 0.2
    seconds: dict[str, float] = field(
        default_factory=lambda: {"advantage": 0.05, "optimizer": 0.1, "snapshot": 0.2, "publish": 0.1, "pull": 0.2}
    )
    tools: float = 0.2
    """Share of the trajectories with a tool turn."""
    tool_seconds: float = 0.3
    delay: float = 0.005
    """Mean of the time that a word takes."""
    jitter: float = 0.01
    """Mean lateness of a node agent's look."""

    @classmethod
    def draw(cls, dice: random.Random) -> Shape:
        uniform = dice.uniform
        return cls(
            ranks=dice.choice([1, 1, 2, 3]), rollouts=dice.choice([1, 2, 2, 3]), workers=dice.choice([1, 2]), staleness=dice.choice([0, 1]),
            lockstep=dice.random() < 0.5, batch=dice.randint(8, 48), tokens=dice.randint(20, 120), rate=uniform(30, 120),
            micro_batches=dice.randint(2, 10), micro_seconds=uniform(0.05, 0.6), tools=dice.choice([0.0, 0.2, 0.5]),
            tool_seconds=uniform(0.1, 1.5), delay=uniform(0.001, 0.01), jitter=uniform(0.0, 0.02),
            seconds={"advantage": uniform(0.01, 0.5), "optimizer": uniform(0.02, 0.4), "snapshot": uniform(0.05, 0.8),
                     "publish": uniform(0.02, 0.3), "pull": uniform(0.05, 0.8)},
        )  # fmt: skip


@dataclass(frozen=True)
class Fault:
    kind: str
    role: str = ""
    at: float | tuple[float, float] = 10.0
    """Virtual seconds, or a range that it is drawn from; so are the next ones."""
    seconds: float | tuple[float, float] | None = None
    phase: str = ""
    size: float | tuple[float, float] = 3.0
    step: int = 0
    """Wait until this optimizer step is committed: from step 1 on, start-up grace is over."""


class _Role:
    """A process. `work` is given the time for which it ran."""

    def __init__(self, world: World, name: str, node: str) -> None:
        self.world, self.name, self.node = world, name, node
        self.kind = RoleId.parse(name).kind
        self.incarnation = 0
        self.step, self.version = 0, -1
        self.ready = False
        self.reset()

    def reset(self) -> None:
        self.alive, self.frozen, self.wedged, self.hung = True, False, False, False
        self.speed, self.blocked_until = 1.0, 0.0
        self.progress, self.pending, self.cpu = 0, 0, 0.0
        self.phase = Phase.IDLE
        self.version = -1
        self.at = self.stamp = self.world.now
        self.questions: list[int] = []
        self.extra: dict[str, float] = {}

    @property
    def up(self) -> bool:
        return self.alive and self.ready and not self.frozen and not self.wedged and not self.hung

    def turn(self, now: float) -> None:
        """Bring it up to ``now``."""
        dt, self.at = now - self.at, now
        if not self.alive or self.frozen or dt <= 0:
            return
        self.cpu += 0.004 * dt * self.world.dice.uniform(0.5, 1.5)
        if self.loop_turns(now):
            self.stamp = now - self.world.dice.uniform(0.0, min(0.1, dt))
        if self.ready:
            self.work(dt * self.speed, now)

    def loop_turns(self, now: float) -> bool:
        return now >= self.blocked_until and not self.wedged

    def work(self, dt: float, now: float) -> None:
        if self.wedged:
            self.cpu += dt
        elif not self.hung and self.world.dice.random() < 0.3:
            self.phase = Phase.RUNNING if self.phase is Phase.IDLE else Phase.IDLE
            self.cpu += 0.01 * dt
            self.progress += 1


class _Trainer(_Role):
    def reset(self) -> None:
        super().reset()
        self.phase = Phase.WAITING_BATCH
        self.todo: list[list[Any]] = []

    def loop_turns(self, now: float) -> bool:
        return now >= self.blocked_until  # the control loop, which a stuck learner does not hold up

    def begin(self, step: int) -> None:
        shape, dice = self.world.shape, self.world.dice
        self.step = step
        length = {phase: shape.seconds[phase] * dice.uniform(0.8, 1.3) for phase in ("advantage", "optimizer", "snapshot", "publish")}
        marks = [[Phase.TRAIN, shape.micro_seconds * dice.uniform(0.7, 1.4)] for _ in range(shape.micro_batches)]
        marks[0][1] += self.extra.pop("train", 0.0)
        for phase in length:
            length[phase] += self.extra.pop(phase, 0.0)
        self.todo = [[Phase.ADVANTAGE, length["advantage"]], *marks,
                     *([phase, length[phase.value]] for phase in (Phase.OPTIMIZER, Phase.SNAPSHOT, Phase.PUBLISH))]  # fmt: skip
        self.pending = shape.micro_batches

    def work(self, dt: float, now: float) -> None:
        if self.hung:
            return
        if self.wedged:
            self.cpu += dt
            return
        if "compile" in self.extra and self.phase is Phase.TRAIN:
            self.extra["compile"] -= dt  # by child processes: this one is idle
            if self.extra["compile"] <= 0:
                del self.extra["compile"]
            return
        while self.todo and dt > 0:
            phase, left = self.todo[0]
            self.phase = phase
            if phase is Phase.OPTIMIZER and not self.world.all_at_optimizer(self.step):
                return
            if phase is Phase.TRAIN and self.world.shape.lockstep and self.world.behind(self):
                return
            if phase is Phase.PUBLISH and not self.world.roles["state_keeper-0"].up:
                return
            spent = min(left, dt)
            dt -= spent
            self.todo[0][1] -= spent
            self.cpu += spent * (0.95 if phase in (Phase.TRAIN, Phase.OPTIMIZER) else 0.5)
            if self.todo[0][1] <= 1e-9:
                self.todo.pop(0)
                if phase is Phase.TRAIN:
                    self.progress += 1
                    self.pending -= 1
        if not self.todo and self.phase is Phase.PUBLISH:
            self.phase = Phase.WAITING_BATCH
            self.version = self.step
            self.world.trained(self)


class _Rollout(_Role):
    def reset(self) -> None:
        super().reset()
        self.phase = Phase.WAITING_REQUEST
        self.live: list[list[Any]] = []
        """[batch, tokens left, tool turn to come]"""
        self.in_tool: list[tuple[float, list[Any]]] = []
        self.pulling: list[Any] | None = None
        self.made = 0.0
        self.dry = False

    def loop_turns(self, now: float) -> bool:
        return super().loop_turns(now) and not self.hung and not ("compile" in self.extra and self.live)

    def work(self, dt: float, now: float) -> None:
        world = self.world
        self._pull(dt)
        if self.wedged or self.hung:
            self.cpu += dt if self.wedged else 0.0
            return
        while self.questions and self.loop_turns(now):
            world.emit(self.name, ev.HeartbeatAnswered(role=self.name, incarnation=self.incarnation, number=self.questions.pop(0)))
        if any(w.up for w in world.of(RoleKind.AGENT_WORKER)):
            for back in [item for item in self.in_tool if item[0] <= now]:
                self.in_tool.remove(back)
                self.live.append(back[1])
        self.pending = len(self.live) + len(self.in_tool)
        if not self.live:
            self.phase = Phase.WAITING_TOOL if self.in_tool else Phase.WAITING_REQUEST
            return
        self.cpu += 0.9 * dt
        for wait in ("compile", "token"):
            if wait in self.extra:
                self.phase = Phase.PREFILL
                self.extra[wait] -= dt
                if self.extra[wait] <= 0:
                    del self.extra[wait]
                return
        self.phase = Phase.DECODE if world.dice.random() < 0.9 else Phase.PREFILL
        if self.dry:
            return
        quota = world.shape.rate * dt
        for trajectory in self.live[: world.shape.concurrency]:
            made = min(quota, trajectory[1])
            trajectory[1] -= made
            self.made += made
        self.progress = int(self.made)
        for trajectory in [t for t in self.live if t[1] <= 1e-9]:
            self.live.remove(trajectory)
            if trajectory[2]:
                back = now + world.tool_seconds * world.dice.uniform(0.5, 1.5)
                self.in_tool.append((back, [trajectory[0], world.shape.tokens / 2, False]))
            else:
                world.finished(trajectory[0])
        self.pending = len(self.live) + len(self.in_tool)

    def _pull(self, dt: float) -> None:
        world, newest = self.world, self.world.step
        if self.pulling is None and newest > self.version and world.roles["state_keeper-0"].up:
            self.pulling = [newest, world.shape.seconds["pull"] * world.dice.uniform(0.7, 1.5) + self.extra.pop("pull", 0.0)]
            self.pull_seconds = self.pulling[1]
            world.emit(self.name, ev.PullStarted(source="state_keeper-0", source_incarnation=1, target=self.name, version=newest,
                                                 bytes=1000, transport="tcp"))  # fmt: skip
        if self.pulling is not None and not self.wedged and not self.hung:
            self.pulling[1] -= dt
            if self.pulling[1] <= 0:
                self.version, self.pulling = self.pulling[0], None
                world.emit(self.name, ev.PullCommitted(
                    source="state_keeper-0", target=self.name, incarnation=self.incarnation, version=self.version, digest="d", bytes=1000,
                    seconds=self.pull_seconds, commit_seconds=0.01, transport="tcp", lag=1, probe_gap=0.0, address=""))  # fmt: skip


class _Agent(_Role):
    def reset(self) -> None:
        super().reset()
        self.samplers: dict[tuple[str, int], Sampler] = {}
        self.period = 0.1
        self.unreported: list[_Role] = []

    def look(self) -> None:
        world, now = self.world, self.world.now
        if self.alive and not self.frozen and self.ready:
            for role in self.unreported:
                world.emit(self.name, ev.ProcessExited(role=role.name, incarnation=role.incarnation, pid=1, cause="pidfd", last_lines=[]))
            self.unreported.clear()
            for role in world.on(self.node):
                if role is not self and role.alive and role.incarnation:
                    self._sample(role, now)
        world.after(self.period + world.dice.expovariate(1 / (world.shape.jitter + 1e-9)), self.look)

    def _sample(self, role: _Role, now: float) -> None:
        role.turn(now)
        sampler = self.samplers.get((role.name, role.incarnation))
        if sampler is None:
            sampler = self.samplers[role.name, role.incarnation] = Sampler(role.name, role.incarnation)
        marks = self.world.marks.get(role.name, ())
        sampler.configure(self.world.thresholds.trainer.activity_floor, marks)
        sample = sampler.look(now + self.world.offset(self.node), phase=role.phase, progress=role.progress, pending=role.pending,
                              step=role.step, version=role.version, loop_age=max(0.0, now - role.stamp), cpu=role.cpu,
                              process=lambda: "T" if role.frozen else "S")  # fmt: skip
        if sample is not None:
            self.world.emit(self.name, sample)


class _Supervisor(_Role):
    """Feeds the detector, as the real one does, and writes what it says."""

    def reset(self) -> None:
        super().reset()
        self.detector = Detector(self.world.start_thresholds)
        self.inbox: list[ev.Entry] = []
        self.ticked = self.marked = -1.0
        self.suspended = 0.0
        self.reading_history = True

    def wake(self) -> None:
        world = self.world
        if not self.alive or self.frozen or not self.ready:
            return
        if self.suspended > 0.5:
            world.emit(self.name, ev.ClockGap(seconds=self.suspended))
        self.suspended = 0.0
        entries, self.inbox = self.inbox, []
        verdicts = list(judge(self.detector, entries))
        if self.reading_history:
            self.reading_history = False
            verdicts = self.detector.unrecorded()
        for verdict in verdicts:
            world.emit(self.name, verdict)
            world.said(verdict)
        for role, incarnation, number in self.detector.heartbeats_due():
            if (role, incarnation, number) in world.asked:
                continue
            world.asked.add((role, incarnation, number))
            world.after(world.lag(), lambda role=role, incarnation=incarnation, number=number: world.ask(role, incarnation, number))
            world.emit(self.name, ev.HeartbeatSent(role=role, incarnation=incarnation, number=number))
        if world.now >= self.marked + 0.1:
            self.marked, world.marks = world.now, self.detector.marks()
        deadline = self.detector.next_deadline()
        if deadline is not None:
            world.after(max(0.0, deadline - world.now), lambda: self.tick(deadline))

    def tick(self, deadline: float) -> None:
        world = self.world
        if self.alive and not self.frozen and world.now - self.ticked >= 0.05 and self.detector.next_deadline() == deadline:
            self.ticked = world.now
            world.emit(self.name, ev.Tick())


class World:
    def __init__(self, shape: Shape, seed: int, thresholds: Thresholds, steps: int = 10_000, restarts: float | None = None) -> None:
        """``restarts``: seconds that a restart takes; None: nothing is restarted but the supervisor."""
        self.shape, self.thresholds, self.start_thresholds = shape, thresholds, thresholds
        self.dice = random.Random(seed)
        self.now = 0.0
        self.entries: list[ev.Entry] = []
        self.verdicts: list[ev.Verdict] = []
        self.injected: list[tuple[float, Fault]] = []
        self.step, self.training, self.dispatched = 0, 0, 0
        self.left: dict[int, int] = {}
        self.tool_seconds = shape.tool_seconds
        self.paused = False
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
        self.roles: dict[str, _Role] = {}
        for i in range(4):
            self._make(_Agent, f"node_agent-{i}", f"node-{i}")
        self._make(_Supervisor, "supervisor", "node-0")
        for name in ["task_runner", "rollout_manager", "request_manager", *(f"agent_worker-{i}" for i in range(shape.workers))]:
            self._make(_Role, name, "node-0")
        self._make(_Role, "state_keeper-0", "node-1")
        for i in range(shape.ranks):
            self._make(_Trainer, f"trainer-{i}", "node-1")
        for i in range(shape.rollouts):
            self._make(_Rollout, f"rollout-{i}", f"node-{2 + i % 2}")
        config = {"steps": steps}
        self._log(ev.HOST, 1, 0.0, ev.RunStarted(schema=ev.SCHEMA, run="r", name="n", wall=0.0, host_pid=1, config=config, machine={}))
        self._log(ev.HOST, 1, 0.0, ev.ThresholdsChanged(thresholds=thresholds.to_dict(), changes={}))
        for name in self.roles:
            self.after(self.dice.uniform(0.0, 0.5), lambda name=name: self._start(name, self.dice.uniform(0.5, 2.0)))
        for agent in self.of(RoleKind.NODE_AGENT):
            self.after(self.dice.uniform(0.0, 0.1), agent.look)  # type: ignore[attr-defined]
        self.after(TICK, self._tick)

    # -- for tests ---

    def plan(self, *faults: Fault) -> None:
        for fault in faults:
            drawn = Fault(fault.kind, fault.role, self._draw(fault.at), None if fault.seconds is None else self._draw(fault.seconds),
                          fault.phase, self._draw(fault.size), fault.step)  # fmt: skip
            if fault.role and fault.role != "host" and fault.role not in self.roles and not fault.role.startswith("node-"):
                raise ValueError(f"{fault.role}: there is no such role; there are {', '.join(self.roles)}")
            self.after(drawn.at - self.now, lambda drawn=drawn: self._try(drawn))  # type: ignore[operator]

    def set_threshold(self, at: float, path: str, value: Any) -> None:
        def change() -> None:
            new = self.thresholds.replace(path, value)
            self._log(ev.HOST, 1, self.now, ev.ThresholdsChanged(thresholds=new.to_dict(), changes=self.thresholds.changes(new)))
            self.thresholds = new

        self.after(at - self.now, change)

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = until

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
        assert isinstance(supervisor, _Supervisor)
        if supervisor.ready:
            supervisor.inbox.append(entry)
            self.after(self.lag(), supervisor.wake)

    # -- the job ---

    def of(self, kind: RoleKind) -> list[_Role]:
        return [role for role in self.roles.values() if role.kind is kind]

    def on(self, node: str) -> list[_Role]:
        return [role for role in self.roles.values() if role.node == node]

    def _make(self, cls: type[_Role], name: str, node: str) -> None:
        self.roles[name] = cls(self, name, node)

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

    def _ready(self, role: _Role, incarnation: int) -> None:
        if role.alive and role.incarnation == incarnation:
            role.ready = True
            if isinstance(role, _Supervisor):
                role.inbox = list(self.entries)
            self.emit(role.name, ev.RoleReady(role=role.name, incarnation=incarnation, seconds=1.0))

    def _tick(self) -> None:
        self.after(TICK, self._tick)
        for rollout in self.of(RoleKind.ROLLOUT):
            if rollout.questions:
                rollout.turn(self.now)
        managers = [self.roles[name] for name in ("task_runner", "rollout_manager", "request_manager")]
        for rank in self.of(RoleKind.TRAINER):
            rank.turn(self.now)
        if not all(role.up for role in managers) or self.paused:
            return
        if self.dispatched < self.step + 1 + self.shape.staleness:
            self._dispatch(self.dispatched + 1)
        ranks = self.of(RoleKind.TRAINER)
        workers = self.of(RoleKind.AGENT_WORKER)
        batch = self.step + 1
        if not (self.training < batch <= self.dispatched and self.left[batch] == 0 and any(w.up for w in workers)):
            return
        if all(rank.ready and rank.alive and not rank.todo for rank in ranks):  # type: ignore[attr-defined]
            self.training = batch
            for rank in ranks:
                if isinstance(rank, _Trainer):
                    self._begin(rank, batch)

    def _begin(self, rank: _Trainer, step: int) -> None:
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
            assert isinstance(rollout, _Rollout)
            tokens = max(2.0, self.shape.tokens * self.dice.uniform(0.3, 1.7))
            rollout.live.append([batch, tokens, self.dice.random() < self.shape.tools])

    def finished(self, batch: int) -> None:
        self.left[batch] = max(0, self.left[batch] - 1)

    def all_at_optimizer(self, step: int) -> bool:
        ranks = self.of(RoleKind.TRAINER)
        return all(r.alive and r.ready and r.step >= step and not (r.todo and r.todo[0][0] in (Phase.ADVANTAGE, Phase.TRAIN))  # type: ignore[attr-defined]
                   for r in ranks)  # fmt: skip

    def behind(self, rank: _Trainer) -> bool:
        """Another rank has not ended the micro-batch that this one has."""
        return any(r.step < rank.step or (r.todo and r.pending > rank.pending) for r in self.of(RoleKind.TRAINER))  # type: ignore[attr-defined]

    def trained(self, rank: _Role) -> None:
        if rank.name != "trainer-0" or rank.step <= self.step:
            return
        self.step = rank.step
        keeper = self.roles["state_keeper-0"]
        self.emit(keeper.name, ev.OptimizerStepCommitted(step=self.step, version=self.step, digest="d", snapshot_digest="s", consumed=[],
                                                         batch=self.step, bytes=1, holder=keeper.name, incarnation=1))  # fmt: skip
        self.emit("task_runner", ev.StepMetrics(step=self.step, values={"loss": 0.1}, phase_seconds={}))

    def ask(self, role: str, incarnation: int, number: int) -> None:
        asked = self.roles[role]
        if asked.incarnation == incarnation and asked.alive:
            asked.questions.append(number)

    def said(self, verdict: ev.Verdict) -> None:
        self.verdicts.append(verdict)
        if verdict.kind == "failed" and self._restarts is not None and verdict.role != "supervisor":
            role = self.roles[verdict.role]
            if role.incarnation == verdict.incarnation:
                self._restart(role)

    def _restart(self, role: _Role) -> None:
        group = self.of(RoleKind.TRAINER) if role.kind is RoleKind.TRAINER else [role]
        for member in group:
            if member is not role:
                self._log(ev.HOST, 1, self.now, ev.RoleStateChanged(role=member.name, incarnation=member.incarnation, old="healthy",
                                                                    new="restarting", reason="its peer failed"))  # fmt: skip
            if member.alive:
                self._die(member)
            if isinstance(member, _Rollout):
                self._take_back(member)
            self.after(self._restarts or 0.0, lambda name=member.name: self._start(name, self.dice.uniform(0.5, 2.0)))
        if role.kind is RoleKind.TRAINER:
            self.training = self.step

    def _take_back(self, rollout: _Rollout) -> None:
        orphans = [*rollout.live, *(item[1] for item in rollout.in_tool)]
        rollout.live, rollout.in_tool = [], []
        others = [r for r in self.of(RoleKind.ROLLOUT) if r is not rollout and r.alive]
        for i, trajectory in enumerate(orphans):
            if others:
                others[i % len(others)].live.append(trajectory)  # type: ignore[attr-defined]
            else:
                self.finished(trajectory[0])

    # -- faults ---

    def _draw(self, value: float | tuple[float, float]) -> float:
        return self.dice.uniform(*value) if isinstance(value, tuple) else value

    def _try(self, fault: Fault) -> None:
        role = self.roles.get(fault.role)
        if self.step < fault.step:
            self.after(TICK, lambda: self._try(fault))
            return
        if role is not None and fault.phase and fault.kind != "long_phase":
            role.turn(self.now)
            done = fault.phase in ("prefill", "decode") and not role.pending
            if role.phase.value != fault.phase or not role.up or done:
                self.after(0.01, lambda: self._try(fault))
                return
        self.injected.append((self.now, fault))
        if role is not None:
            role.turn(self.now)
        getattr(self, f"_do_{fault.kind}")(fault, role)

    def _later(self, fault: Fault, undo: Callable[[], Any]) -> None:
        if fault.seconds is not None:
            self.after(fault.seconds, undo)  # type: ignore[arg-type]

    def _flag(self, fault: Fault, role: _Role, name: str, value: Any, before: Any) -> None:
        incarnation = role.incarnation
        setattr(role, name, value)
        self._later(fault, lambda: (role.turn(self.now), setattr(role, name, before)) if role.incarnation == incarnation else None)

    def _die(self, role: _Role) -> None:
        role.alive = False
        if role.node in self._lost:
            return
        agent = next(r for r in self.on(role.node) if r.kind is RoleKind.NODE_AGENT)
        if role is agent or role.kind is RoleKind.SUPERVISOR:
            event = ev.ProcessExited(role=role.name, incarnation=role.incarnation, pid=1, cause="Ray: ActorDiedError", last_lines=[])
            self.after(0.01 + self.lag(), lambda: self._arrive(ev.HOST, 1, self.now, event))
            if role.kind is RoleKind.SUPERVISOR:
                self.after(1.0, lambda: self._start(role.name, 1.0))
        elif isinstance(agent, _Agent) and agent.alive and not agent.frozen:
            incarnation = role.incarnation
            self.after(0.002, lambda: self.emit(agent.name, ev.ProcessExited(
                role=role.name, incarnation=incarnation, pid=1, cause="pidfd", last_lines=[])))  # fmt: skip
        elif isinstance(agent, _Agent):
            agent.unreported.append(role)

    def _do_kill(self, fault: Fault, role: _Role) -> None:
        self._die(role)

    _do_exit = _do_kill

    def _do_exception(self, fault: Fault, role: _Role, error: str = "RuntimeError") -> None:
        self.emit(role.name, ev.ErrorRaised(role=role.name, incarnation=role.incarnation, error=error, text="injected"))
        role.hung = True
        self.after(0.2, lambda: self._die(role))

    def _do_non_finite(self, fault: Fault, role: _Role) -> None:
        self._do_exception(fault, role, "TrainingError")

    def _do_freeze(self, fault: Fault, role: _Role | None) -> None:
        if role is None:
            if self._host_frozen_since is None:
                self._host_frozen_since = self.now
            self._later(fault, self._thaw_host)
            return
        role.frozen = True
        incarnation = role.incarnation
        self._later(fault, lambda: self._thaw(role, incarnation, fault.seconds))  # type: ignore[arg-type]

    def _thaw(self, role: _Role, incarnation: int, seconds: float) -> None:
        if role.incarnation != incarnation or not role.alive:
            return
        role.turn(self.now)
        role.frozen = False
        if isinstance(role, _Supervisor):
            role.suspended = seconds
            role.wake()

    def _thaw_host(self) -> None:
        if self._host_frozen_since is None:
            return
        seconds, self._host_frozen_since = self.now - self._host_frozen_since, None
        self._log(ev.HOST, 1, self.now, ev.ClockGap(seconds=seconds))
        inbox, self._host_inbox = self._host_inbox, []
        for word in inbox:
            self.now += 1e-6
            self._log(*word)

    def _do_wedge(self, fault: Fault, role: _Role) -> None:
        self._flag(fault, role, "wedged", True, False)

    def _do_hang(self, fault: Fault, role: _Role) -> None:
        self._flag(fault, role, "hung", True, False)

    def _do_dry(self, fault: Fault, role: _Role) -> None:
        self._flag(fault, role, "dry", True, False)

    def _do_slow(self, fault: Fault, role: _Role) -> None:
        self._flag(fault, role, "speed", 1 / fault.size, 1.0)  # type: ignore[operator]

    def _do_lag(self, fault: Fault, role: _Role) -> None:
        role.blocked_until = self.now + (fault.seconds or 1e9)  # type: ignore[operator]

    def _do_node_loss(self, fault: Fault, role: None) -> None:
        self._lost.add(fault.role)
        for victim in self.on(fault.role):
            victim.alive = False
        event = ev.NodeLost(node=fault.role, reason="injected")
        self.after(self.dice.uniform(1.0, 3.0), lambda: self._arrive(ev.HOST, 1, self.now, event))

    def _do_late_start(self, fault: Fault, role: _Role) -> None:
        self._never_ready.add(role.name)

    def _do_peer_gone(self, fault: Fault, role: _Role) -> None:
        other = next(r for r in self.of(RoleKind.ROLLOUT) if r is not role and r.alive)
        self.emit(other.name, ev.PeerGone(role=other.name, incarnation=other.incarnation, peer=role.name, peer_incarnation=role.incarnation,
                                          error="UCXXConnectionResetError"))  # fmt: skip

    def _do_lost_group(self, fault: Fault, role: _Role) -> None:
        if self.dispatched > self.training:
            self.left[self.dispatched] += 1
        else:
            self.after(TICK, lambda: self._do_lost_group(fault, role))

    def _do_long_phase(self, fault: Fault, role: _Role) -> None:
        role.extra[fault.phase] = fault.seconds  # type: ignore[assignment]

    def _do_long_token(self, fault: Fault, role: _Role) -> None:
        role.extra["token"] = fault.seconds  # type: ignore[assignment]

    def _do_compile(self, fault: Fault, role: _Role) -> None:
        self._compiles[role.name] = fault.seconds  # type: ignore[assignment]

    def _do_slow_tool(self, fault: Fault, role: None) -> None:
        self.tool_seconds = fault.seconds  # type: ignore[assignment]

    def _do_slow_pull(self, fault: Fault, role: _Role) -> None:
        role.extra["pull"] = fault.seconds  # type: ignore[assignment]

    def _do_idle(self, fault: Fault, role: _Role) -> None:
        self._idle.add(role.name)
        self._later(fault, lambda: self._idle.discard(role.name))

    def _do_pause(self, fault: Fault, role: None) -> None:
        self.paused = True
        self.emit("task_runner", ev.Paused(step=self.step))

        def resume() -> None:
            self.paused = False
            self.emit("task_runner", ev.Resumed(step=self.step))

        self._later(fault, resume)

    def _do_offset(self, fault: Fault, role: None) -> None:
        self._offsets[fault.role] = fault.size  # type: ignore[assignment]

    def _do_starved(self, fault: Fault, role: _Role) -> None:
        self._flag(fault, role, "period", fault.size, 0.1)


@dataclass(frozen=True)
class Must:
    """Something that has to be said."""

    role: str
    kind: str = "failed"
    within: tuple[str, ...] | float = 0.1
    """Seconds after the first fault was injected, or thresholds (paths) that add up; two looks and the words' way come on top."""
    not_before: bool = False
    """Nor may it be said earlier than that."""


@dataclass(frozen=True)
class Scenario:
    """What is done to a job of a drawn shape, and what must be said. Whatever is not in ``must`` or ``may`` must not be said as failed
    (nor, where ``quiet``, as suspect or waiting_on_peer)."""

    name: str
    faults: tuple[Fault, ...]
    must: tuple[Must, ...] = ()
    may: tuple[str, ...] = ()
    """Roles of which anything may be said."""
    quiet: bool = False
    seconds: float = 40.0
    shape: dict[str, Any] = field(default_factory=dict)
    """Fields of Shape that are not drawn."""
    restarts: float | None = None


def run_scenario(scenario: Scenario, seed: int, thresholds: Thresholds | None = None) -> tuple[World, list[str]]:
    """The world after it, and what was wrong, in sentences; an injection that did not happen is wrong too."""
    thresholds = thresholds or Thresholds.lab()
    drawn = Shape.draw(random.Random(seed))
    world = World(Shape(**{**drawn.__dict__, **scenario.shape}), seed, thresholds, restarts=scenario.restarts)
    world.plan(*scenario.faults)
    world.run(scenario.seconds)
    wrong = []
    if len(world.injected) < len(scenario.faults):
        done = [fault.kind for _, fault in world.injected]
        wrong.append(f"only {done} of {len(scenario.faults)} faults were injected within {scenario.seconds} s")
        return world, wrong
    start = world.injected[0][0] if world.injected else 0.0
    for must in scenario.must:
        said = [v for v in world.verdicts if v.role == must.role and v.kind == must.kind and v.seen >= start - 0.02]
        limit = sum(thresholds.get(path) for path in must.within) if isinstance(must.within, tuple) else must.within
        if not said:
            wrong.append(f"{must.role} was never called {must.kind}")
            continue
        after = said[0].seen - start
        late = after > limit + 0.2 + 20 * world.shape.delay + 5 * world.shape.jitter
        if late or (must.not_before and after < limit):
            wrong.append(f"{must.role} was called {must.kind} ({said[0].rule}) {after:.3f} s after the fault; the limit is {limit:g} s")
    stated = {(must.role, must.kind) for must in scenario.must}
    bad = {"failed"} | ({"suspect", "waiting_on_peer"} if scenario.quiet else set())
    for v in world.verdicts:
        if v.kind in bad and (v.role, v.kind) not in stated and v.role not in scenario.may:
            wrong.append(f"{v.role} was called {v.kind} by rule {v.rule} at {v.seen:.2f} s: {v.evidence}")
    return world, wrong
