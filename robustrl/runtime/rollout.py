"""A rollout: one engine replica. Tokens come from the engine's own loop, weights from a puller beside it; neither waits for the other.

The engine loop is one thread that owns the engine. Everything else reaches it as a command between two engine steps: new trajectories, the
answer of a tool, a pulled version. A commit loads the pulled weights, scores the probe prompt, and only then lets tokens of the new version
leave; a version that fails the check is refused, its tokens are discarded and the old weights are loaded again. Every token is recorded
with the version that made it.

The journal hears of unfinished trajectories while they grow: one blob for all of them, at the latest after 32 new tokens of any or 0.25 s,
and at each tool turn. The asyncio loop makes and sends it; the engine thread only says how far each trajectory is.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ..core import events as ev
from ..core.roles import Phase
from ..core.weights import Ask, Lease
from ..engines.base import Delta, Engine, Request, make_engine
from ..errors import PeerDied, RobustRLError, WaitTimeout
from ..rl.models import resolve_model
from ..rl.tasks import make_task
from ..rl.trajectory import IN_TOOL, Trajectory, part_of
from .role import Role

if TYPE_CHECKING:
    from ..transport.puller import Pulled

_FLUSH_TOKENS, _FLUSH_SECONDS = 24, 0.2
"""After how many engine steps, and how long after the flush before, the next one is made: the call to the journal takes its time too."""
_HELD_TURN = 0.01
"""Seconds of a round of the engine loop in which a disturbance holds its tokens back."""


class Rollout(Role):
    _retired = False
    _reclaims = 0
    """How often a rollout manager in a later life has asked for everything."""

    async def on_open(self) -> None:
        self.choose_transport()
        self._loop = asyncio.get_running_loop()
        self._out: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unacknowledged: dict[int, bytes] = {}
        self._version = -1
        self._target = self._refused = -1
        self._pulled: Pulled | None = None
        self._target_changed = asyncio.Condition()
        self._supervisor = await self.peer("supervisor")
        self._journal = await self.peer("request_manager")
        self._grown: dict[int, tuple[int, int, str]] = {}
        """Written by the engine thread: how many tokens and tool turns each trajectory has, and its state (see rl/trajectory.py)."""
        self._growing: dict[int, Trajectory] = {}
        """The trajectories of `_grown`. One that has ended is forgotten once the journal has all of it."""
        self._flushed: dict[int, tuple[int, str]] = {}
        """Tokens and state that the journal knows of each."""
        self._flush_due = asyncio.Event()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run_engine, args=(started,), name="engine", daemon=True)
        self._thread.start()
        await started
        self.stop_stamping()
        self._open_plane()
        self.spawn(self._follow_versions())
        self.spawn(self._keep_journal())
        await self.sync(0)

    async def stop_work(self) -> None:
        """No token is made from here on, and the journal has all that were: others go on from there."""
        self._retired = True
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join, self.deadlines.call)
        await self._flush()

    # -- calls ---

    async def submit(self, bodies: list[bytes]) -> None:
        """Trajectories to generate: from their prompts, or on from the tokens that they have."""
        trajectories = [msgspec.msgpack.decode(body, type=Trajectory) for body in bodies]
        if self.config.journal_tokens:
            self._flushed.update({t.id: (len(t.tokens), "") for t in trajectories if t.id > 0})
        self._commands.put(lambda: self._begin(trajectories))

    async def resume(self, trajectory: int, tokens: list[int] | None) -> None:
        """A tool answered with ``tokens``; None: the trajectory is over."""
        self._commands.put(lambda: self._resume(trajectory, tokens))

    async def reclaim(self) -> tuple[int, list[tuple[int, bytes]], list[bytes], list[int]]:
        """For a rollout manager in a later life: as `collect`, but all that was not acknowledged, and the ids that are running."""
        held: asyncio.Future[tuple[int, list[tuple[int, bytes]], list[bytes], list[int]]] = self._loop.create_future()

        def look() -> None:
            found = [msgspec.msgpack.encode(t) for t in self._in_tool.values()], list(self._live)
            self._loop.call_soon_threadsafe(answer, *found)

        def answer(tools: list[bytes], running: list[int]) -> None:
            while not self._out.empty():
                self._out.get_nowait()  # posted before the look: it is in the answer, and nothing that came after it is here yet
            held.set_result((self._version, list(self._unacknowledged.items()), tools, running))

        self._commands.put(look)
        self._reclaims += 1
        return await held

    async def heartbeat(self, incarnation: int, number: int) -> None:
        """Answered by the engine loop itself, as it comes round."""
        answer = ev.HeartbeatAnswered(role=self.spec.role, incarnation=self.spec.incarnation, number=number)
        if incarnation == self.spec.incarnation:
            self._commands.put(lambda: self.emit(answer))

    async def abort(self, ids: list[int]) -> None:
        self._commands.put(lambda: self._abort(ids))

    async def collect(self, wait: float, acknowledged: list[int]) -> tuple[int, list[tuple[int, bytes]], list[bytes]]:
        """(committed version, finished trajectories by id, trajectories that wait for a tool); an empty one comes after ``wait`` s.

        Finished ones are kept until they are ``acknowledged``: the journal has them.
        """
        finished: list[tuple[int, bytes]] = []
        tools: list[bytes] = []
        if not hasattr(self, "_out"):
            await asyncio.sleep(wait)
            return -1, finished, tools
        for number in acknowledged:
            self._unacknowledged.pop(number, None)
        asked = self._reclaims
        try:
            items = [await asyncio.wait_for(self._out.get(), wait)]
        except TimeoutError:
            items = []
        if asked != self._reclaims:  # whoever asked is dead, and nothing may be lost with it
            for item in items:
                self._out.put_nowait(item)
            return self._version, finished, tools
        while not self._out.empty():
            items.append(self._out.get_nowait())
        for kind, value in items:
            if kind == "finished":
                finished.append(value)
            elif kind == "tool":
                tools.append(value)
        return self._version, finished, tools

    async def sync(self, version: int) -> None:
        """``version`` is announced: pull it, or a newer one, beside the running engine."""
        async with self._target_changed:
            self._target = max(self._target, version)
            self._target_changed.notify_all()

    # -- the journal ---

    async def _keep_journal(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._flush_due.wait(), _FLUSH_SECONDS)
            except TimeoutError:
                pass
            self._flush_due.clear()
            try:
                await self._flush()
            except (PeerDied, WaitTimeout) as error:
                self.log.warning("what was generated is not journalled: %s", error)

    async def _flush(self) -> None:
        """What all trajectories gained since the last time, in one blob. Asked to, it sends one again from its start."""
        parts = []
        for number, (end, turns, state) in self._grown.copy().items():
            sent, told = self._flushed.get(number, (0, ""))
            if (trajectory := self._growing.get(number)) and (end > sent or state != told):
                parts.append(part_of(trajectory, sent, end, turns, state))
        if not parts:
            return
        body = msgspec.msgpack.encode(parts)
        life = self.spec.role, self.spec.incarnation
        again = await self._journal.call("grown", *life, body, self._evaluated, deadline=self.deadlines.call, again=True)
        if again is None and self._retired:
            return
        if again is None:
            self.die(PeerDied(f"{self.spec.role} incarnation {self.spec.incarnation} was replaced: others go on with its trajectories"))
            return
        for part in parts:
            self._flushed[part.id] = part.end, part.state
            if part.id in again:
                self._flushed[part.id] = 0, ""
            elif part.state not in ("", IN_TOOL):
                self._forget(part.id)

    def _forget(self, number: int) -> None:
        for known in (self._grown, self._growing, self._flushed):
            known.pop(number, None)

    # -- the weight plane ---

    def _open_plane(self) -> None:
        from ..transport.puller import Puller
        from ..transport.server import WeightServer

        secret = self.spec.secret()
        self._server = WeightServer(
            self.spec.ip, secret, role=self.spec.role, incarnation=self.spec.incarnation, on_event=self.emit
        )
        self._puller = Puller(secret, role=self.spec.role, incarnation=self.spec.incarnation, on_event=self.emit)

    async def _follow_versions(self) -> None:
        while True:
            async with self._target_changed:
                await self._target_changed.wait_for(lambda: self._target > max(self._version, self._refused))
            try:
                await self._update(self._target)
            except PeerDied:
                if self._retired:
                    return
                raise

    async def _update(self, version: int) -> None:
        """Pull ``version`` or a newer one, commit it between two engine steps, and serve it on."""
        before_version = self._version
        deadline = self.deadlines.role_start if self._version < 0 else self.deadlines.pull
        if self._version < 0:
            self.page.phase = Phase.PULL
        pulled = await asyncio.to_thread(self._puller.pull, lambda ask: self._next_source(ask, version), deadline_s=deadline)
        before = self._pulled
        done: asyncio.Future[tuple[float, float]] = self._loop.create_future()
        self._commands.put(lambda: self._commit(pulled, done))
        seconds, gap = await done
        manifest = pulled.manifest
        if not gap <= self.config.probe_limit:
            self.emit(
                ev.VersionRefused(
                    role=self.spec.role,
                    incarnation=self.spec.incarnation,
                    version=manifest.version,
                    probe_gap=gap,
                    limit=self.config.probe_limit,
                )
            )
            self._refused = manifest.version
            return
        await asyncio.to_thread(self._serve, pulled, before)
        host, port = self._server.address
        self.emit(
            ev.PullCommitted(
                source=pulled.source,
                target=self.spec.role,
                incarnation=self.spec.incarnation,
                version=manifest.version,
                digest=manifest.digest,
                bytes=pulled.bytes_received,
                seconds=pulled.seconds,
                commit_seconds=seconds,
                transport=pulled.transport,
                lag=manifest.version - before_version,
                probe_gap=gap,
                address=f"{host}:{port}",
            )
        )

    def _next_source(self, ask: Ask, version: int) -> Lease | None:
        if self._retired:
            raise PeerDied(f"{self.spec.role} incarnation {self.spec.incarnation} has ended: it pulls nothing more")
        call = self._supervisor.call("ask", msgspec.msgpack.encode(ask), version, deadline=self.deadlines.role_start, again=True)
        body = asyncio.run_coroutine_threadsafe(call, self._loop).result()
        return None if body is None else msgspec.msgpack.decode(body, type=Lease)

    def _serve(self, pulled: Pulled, before: Pulled | None) -> None:
        """The committed version replaces the one before as what this relay offers; the buffer before is free once its sends have ended."""
        self._server.stage(pulled.manifest, pulled.buffer)
        if before is not None:
            self._server.retire(before.manifest.version)
            self._puller.recycle(before.buffer)

    def stored(self, fault: str) -> memoryview:
        """What this relay serves."""
        if self._pulled is None:
            raise RobustRLError(f"{self.spec.role} serves no version yet")
        return memoryview(self._pulled.buffer).cast("B")

    # -- the engine thread ---

    def _run_engine(self, started: asyncio.Future[None]) -> None:
        try:
            task = make_task(self.config.task, self.config.task_options, seed=self.config.seed)
            self._stop, self._pace, self._ignore_eos = task.stop, task.pace, task.ignore_eos
            self._engine: Engine = self.inherited.pop("engine", None) or make_engine(
                self.config.engine,
                resolve_model(self.config.model),
                seed=(self.config.seed * 1000 + self.role.index) % 2**32,  # NumPy, which vLLM seeds too, takes no more
                load="dummy",
                max_model_len=self.config.max_model_len,
                max_num_seqs=self.config.rollout_concurrency,
            )
            self._live: dict[int, Trajectory] = {}
            self._in_tool: dict[int, Trajectory] = {}
            self._budget = self.config.sampling.max_tokens or task.max_tokens
            self._generated = self._evaluated = self._since_flush = 0
            self._loop.call_soon_threadsafe(started.set_result, None)
            while not self._retired:
                self._turn()
            self._engine.close()
        except BaseException as error:  # the thread is the role: its end is the process's
            self._loop.call_soon_threadsafe(self.die, error)

    def _turn(self) -> None:
        """One round of the engine loop: the commands that wait, then one engine step if there is work."""
        self.page.stamp()
        idle = not self._live
        if idle and self._version >= 0:
            self.page.phase = Phase.WAITING_TOOL if self._in_tool else Phase.WAITING_REQUEST
        try:
            self._commands.get(block=idle, timeout=0.2 if idle else None)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            pass
        self.disturbance.pass_by(self.page.phase, working=bool(self._live))
        if not self._live:
            self.disturbance.release(self.spec.role)
        if self._live and self.disturbance.holds(self.spec.role):
            self.page.phase = Phase.PREFILL
            time.sleep(_HELD_TURN)
        elif self._live:
            if idle:  # said before the step, which may be the first one and compile for long
                self.page.phase = Phase.PREFILL
                self.page.update(pending=len(self._live) + len(self._in_tool))
            began = time.monotonic()
            deltas = self._engine.step()
            self.page.phase = Phase.DECODE if self._engine.decoded else Phase.PREFILL
            self._take(deltas)
            self._since_flush += 1
            if self._since_flush >= _FLUSH_TOKENS:
                self._call_flush()
            if self._pace:
                time.sleep(max(0.0, self._pace - (time.monotonic() - began)))
        self.page.update(progress=self._generated, pending=len(self._live) + len(self._in_tool))

    def _call_flush(self) -> None:
        self._since_flush = 0
        self._loop.call_soon_threadsafe(self._flush_due.set)

    def _begin(self, trajectories: list[Trajectory]) -> None:
        for trajectory in trajectories:
            self._live[trajectory.id] = trajectory
            self._engine.add(self._request(trajectory))
            self._note(trajectory, "")

    def _note(self, trajectory: Trajectory, state: str) -> None:
        """For the flush: all of the trajectory that it may read. Evaluations are no part of the journal."""
        if trajectory.id > 0 and self.config.journal_tokens:
            self._growing[trajectory.id] = trajectory
            self._grown[trajectory.id] = len(trajectory.tokens), trajectory.tool_turns, state

    def _request(self, trajectory: Trajectory) -> Request:
        """What is left to generate, from the prompt and the tokens so far."""
        sampling = self.config.sampling
        return Request(
            id=str(trajectory.id),
            tokens=trajectory.prompt_tokens + trajectory.tokens,
            max_tokens=self._budget - sum(trajectory.mask),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=list(self._stop),
            ignore_eos=self._ignore_eos,
            # evaluations draw the same random numbers for every version, each prompt its own
            seed=-trajectory.id if trajectory.batch == 0 else None,
        )

    def _take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            trajectory = self._live[int(delta.id)]
            trajectory.generated(delta.tokens, delta.logprobs, self._version)
            self._generated += len(delta.tokens)
            self._evaluated += len(delta.tokens) if trajectory.id < 0 else 0
            if delta.finished:
                del self._live[trajectory.id]
                self._end_turn(trajectory, delta.finished)
            else:
                self._note(trajectory, "")

    def _end_turn(self, trajectory: Trajectory, finished: str) -> None:
        if finished == "stop" and sum(trajectory.mask) < self._budget:
            self._in_tool[trajectory.id] = trajectory
            self._note(trajectory, IN_TOOL)
            self._call_flush()
            self._post("tool", msgspec.msgpack.encode(trajectory))
            return
        self._finish(trajectory, "stop" if finished == "eos" else "length")

    def _finish(self, trajectory: Trajectory, how: str) -> None:
        trajectory.finish = how
        self._note(trajectory, how)
        self._post("finished", (trajectory.id, msgspec.msgpack.encode(trajectory)))

    def _abort(self, ids: list[int]) -> None:
        self._engine.abort([str(number) for number in ids if number in self._live])
        for number in ids:
            self._live.pop(number, None)
            self._in_tool.pop(number, None)
            self._forget(number)

    def _resume(self, number: int, tokens: list[int] | None) -> None:
        trajectory = self._in_tool.pop(number, None)
        if trajectory is None:
            return  # answered already, to a rollout manager in an earlier life
        if tokens is None:
            self._finish(trajectory, "stop")
            return
        trajectory.answered(tokens, self._version)
        self._begin([trajectory])
        self._call_flush()

    def _commit(self, pulled: Pulled, done: asyncio.Future[tuple[float, float]]) -> None:
        """Between two engine steps: load, check, then take the version as this rollout's own, or take the old one up again."""
        began = time.monotonic()
        self.page.phase = Phase.PULL
        self.disturbance.pass_by(Phase.PULL)
        gap = self._load(pulled)
        if gap <= self.config.probe_limit:
            self._version = self.page.version = pulled.manifest.version
            self._pulled = pulled
        else:
            ended = self._engine.drop_held()
            if self._pulled is not None:
                self._load(self._pulled)
                self._engine.drop_held()
            for number in map(int, ended):
                self._engine.add(self._request(self._live[number]))
        self._post("version", self._version)
        self._loop.call_soon_threadsafe(done.set_result, (time.monotonic() - began, gap))

    def _load(self, pulled: Pulled) -> float:
        """Largest difference of the probe prompt's log-probabilities under the weights just loaded; infinite if any is not a number."""
        from ..transport.manifest import tensors

        self._engine.load(tensors(pulled.manifest, pulled.buffer))
        scores = self._engine.score(pulled.manifest.probe_tokens)
        gaps = [abs(a - b) for a, b in zip(scores, pulled.manifest.probe_logprobs, strict=True)]
        return max(gaps) if all(map(math.isfinite, gaps)) else math.inf

    def _post(self, kind: str, value: Any) -> None:
        self._loop.call_soon_threadsafe(self._posted, kind, value)

    def _posted(self, kind: str, value: Any) -> None:
        if kind == "finished":
            self._unacknowledged[value[0]] = value[1]
        self._out.put_nowait((kind, value))
