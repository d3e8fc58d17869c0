"""The processes of a virtual job: trainer ranks, rollouts, node agents, the supervisor and the rest. See detection_world.py.

Each is brought up to a time by `turn`, and does in `work` what it can have done meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from robustrl.core import events as ev
from robustrl.core.detection import Detector, judge
from robustrl.core.roles import Phase, RoleId, RoleKind
from robustrl.core.sampling import Sampler

if TYPE_CHECKING:
    from world_job import World


class Role:
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
        dice = self.world.dice.random  # uniform() by hand: this is done a hundred times in a second of ten roles
        self.cpu += 0.004 * dt * (0.5 + dice())
        if self.loop_turns(now):
            self.stamp = now - min(0.1, dt) * dice()
        if self.ready:
            self.work(dt * self.speed, now)

    def loop_turns(self, now: float) -> bool:
        return now >= self.blocked_until and not self.wedged

    def work(self, dt: float, now: float) -> None:
        if self.wedged:
            self.cpu += dt
            return
        self.pending = self.world.backlog(self)
        if self.hung:
            self.phase = Phase.RUNNING if self.pending else Phase.IDLE
            return
        if self.world.dice.random() < 0.3:
            self.phase = Phase.RUNNING if self.phase is Phase.IDLE else Phase.IDLE
            self.cpu += 0.01 * dt
            self.progress += 1


class Trainer(Role):
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


class Rollout(Role):
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


class EveryLook(Sampler):
    def look(self, *args: Any, **fields: Any) -> ev.RoleSample | None:
        self._key = ()
        return super().look(*args, **fields)


class Agent(Role):
    def reset(self) -> None:
        super().reset()
        self.samplers: dict[tuple[str, int], Sampler] = {}
        self.period = 0.1
        self.unreported: list[Role] = getattr(self, "unreported", [])  # a later life finds them dead

    def look(self) -> None:
        world, now = self.world, self.world.now
        if self.alive and not self.frozen and self.ready:
            for role in self.unreported:
                world.emit(self.name, ev.ProcessExited(role=role.name, incarnation=role.incarnation, pid=1, cause="pidfd", last_lines=[]))
            self.unreported.clear()
            world.looks.setdefault(self.node, []).append(now)
            for role in world.on(self.node):
                if role is not self and role.alive and role.incarnation:
                    self._sample(role, now)
        world.after(self.period + world.dice.expovariate(1 / (world.shape.jitter + 1e-9)), self.look)

    def _sample(self, role: Role, now: float) -> None:
        role.turn(now)
        sampler = self.samplers.get((role.name, role.incarnation))
        if sampler is None:
            kind = EveryLook if self.world.every_look else Sampler
            sampler = self.samplers[role.name, role.incarnation] = kind(role.name, role.incarnation)
        sampler.configure(self.world.thresholds.trainer.activity_floor, self.world.marks.get(role.name, ()))
        sample = sampler.look(now + self.world.offset(self.node), phase=role.phase, progress=role.progress, pending=role.pending,
                              step=role.step, version=role.version, loop_age=max(0.0, now - role.stamp), cpu=role.cpu,
                              process=lambda: "T" if role.frozen else "S")  # fmt: skip
        if sample is not None:
            self.world.emit(self.name, sample)


class Supervisor(Role):
    """Feeds the detector, as the real one does, and writes what it says."""

    def reset(self) -> None:
        super().reset()
        self.detector = Detector(self.world.start_thresholds)
        self.inbox: list[ev.Entry] = []
        self.ticked = self.ticked_for = self.marked = -1.0
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
            world.verdicts.append(verdict)
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
        due = deadline != self.ticked_for or world.now - self.ticked >= 0.05  # each deadline has its tick, however close they are, as live
        if self.alive and not self.frozen and due and self.detector.next_deadline() == deadline:
            self.ticked, self.ticked_for = world.now, deadline
            world.emit(self.name, ev.Tick())
