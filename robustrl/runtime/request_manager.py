"""The request manager: the journal of trajectories (SQLite, WAL) and their ledger. A trajectory enters once and ends once.

All database work runs in one thread, in the order of the calls; each call is one transaction, committed before its event is emitted. Where
the disk does not take it any more, the journal goes on in memory, aloud: the job survives, a later life of this role would not know of it.
What unfinished trajectories have so far is in journal_parts.py.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from ..core import events as ev
from ..core.ledger import Ledger, TrajectoryState
from ..core.roles import Phase
from ..errors import JobFailed
from ..rl.trajectory import Trajectory, parts_decoder
from .journal_parts import Parts, Write
from .role import Role, within

_TABLE = """create table if not exists trajectories (
    id integer primary key, batch integer not null, grp integer not null, rollout text not null, incarnation integer not null,
    version integer not null, state text not null, reason text, step integer, body blob) strict"""
KEPT_STEPS = 16
"""Optimizer steps whose consumed trajectories are kept, in case the trainer comes back from an older state."""
_SAY_EVERY = 1.0
"""Seconds between two words on how many tokens the journal has received."""
_ORDER = ("started", "finished", "consumed", "dropped")
"""In which the log hears of what it has missed."""
_QUEUED, _STARTED, _FINISHED, _CONSUMED, _DROPPED = "queued", "started", "finished", "consumed", "dropped"


class RequestManager(Role):
    async def on_open(self) -> None:
        self._ledger = Ledger()
        self._consumed_steps: set[int] = set()
        self._batch_of: dict[int, int] = {}
        self._settled: Counter[int] = Counter()
        """Trajectories per batch that are finished or dropped."""
        self._size = self.config.prompts_per_step * self.config.samples_per_prompt
        self._parts = Parts()
        self._said: dict[tuple[str, int], int] = {}
        self._evaluated: dict[tuple[str, int], int] = {}
        self._changed = asyncio.Condition()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        await self._do(self._connect, Path(self.spec.run_dir, "journal.sqlite"))
        if self.spec.incarnation > 1:
            await self._recover()
        self.spawn(self._say_tokens())

    def _connect(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, timeout=self.deadlines.call)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=normal")
        self._db.execute(_TABLE)
        for statement in ("create index if not exists by_batch on trajectories (batch)", *Parts.TABLES):
            self._db.execute(statement)

    async def _recover(self) -> None:
        """The ledger from the journal; and the log is told what was written here but not said there any more."""
        known = await self.ask_host("known")
        if self.spec.fresh:
            await self._discard(known["step"], known["started"])
        logged, finished = known["started"], set(known["finished"])
        columns = "id, batch, grp, rollout, version, state, reason, step, incarnation"
        rows = await self._do(self._read, f"select {columns} from trajectories where state != 'queued' order by id")
        unsaid: dict[tuple[str, Any], list[int]] = {}
        for number, batch, group, rollout, version, state, reason, step, incarnation in rows:
            self._ledger.start([number])
            if state == _STARTED:
                self._parts.hold([number], rollout, incarnation)
            self._batch_of[number] = batch
            if number not in logged:
                unsaid.setdefault((_STARTED, (abs(batch), group, rollout, version)), []).append(number)
            if state == _CONSUMED:
                self._ledger.consume([number])
                self._consumed_steps.add(step)
            elif state == _DROPPED:
                self._ledger.drop([number], reason)
            self._settled[batch] += state != _STARTED
            if state == _FINISHED and number not in finished:
                unsaid.setdefault((_FINISHED, (batch, group)), []).append(number)
            if state == _CONSUMED and logged.get(number) != "consumed":
                unsaid.setdefault((_CONSUMED, step), []).append(number)
            if state == _DROPPED and logged.get(number) != "dropped":
                unsaid.setdefault((_DROPPED, reason), []).append(number)
        idle = self._parts.restore(*[await self._do(self._read, query) for query in Parts.QUERIES])
        await self._do(self._write, idle)
        for (state, about), ids in sorted(unsaid.items(), key=lambda item: _ORDER.index(item[0][0])):
            match state:
                case "started":
                    batch, group, rollout, version = about
                    self.emit(ev.TrajectoriesStarted(batch=batch, group=group, ids=ids, rollout=rollout, version=version))
                case "finished":
                    bodies = [row[0] for i in ids for row in await self._do(self._read, "select body from trajectories where id = ?", i)]
                    self._emit_finished([msgspec.msgpack.decode(body, type=Trajectory) for body in bodies])
                case "consumed":
                    self.emit(ev.TrajectoriesConsumed(step=about, ids=ids))
                case "dropped":
                    self.emit(ev.TrajectoriesDropped(ids=ids, reason=about))

    async def _discard(self, step: int, logged: Collection[int]) -> None:
        """A full restart: what no committed optimizer step has consumed is dropped, under no batch, and the batches are generated again.

        Of what the log has never heard nothing is kept. Consumed, by a step that it has not heard of, is as good as not consumed.
        """
        query = "select id from trajectories where batch > ? and state in ('started', 'finished', 'consumed')"
        ids = [row[0] for row in await self._do(self._read, query, step)]
        await self._do(
            self._write,
            ("delete from trajectories where batch > ? and state = 'queued'", [(step,)]),
            ("delete from trajectories where id = ?", [(i,) for i in ids if i not in logged]),
            (
                "update trajectories set state = 'dropped', reason = 'full restart', step = null, batch = -batch where id = ?",
                [(i,) for i in ids if i in logged],
            ),
        )

    async def _do(self, function: Any, *args: Any) -> Any:
        self.page.phase = Phase.RUNNING
        try:
            return await asyncio.get_running_loop().run_in_executor(self._writer, function, *args)
        finally:
            self.page.phase = Phase.IDLE
            self.page.update(progress=self._ledger.started, pending=self._ledger.in_flight)

    def _write(self, *writes: Write) -> None:
        """All of ``writes`` (statement, rows) in one transaction."""
        try:
            self._transact(writes)
        except sqlite3.OperationalError as error:
            self.emit(
                ev.WarningRaised(
                    text=f"the journal {self.spec.run_dir}/journal.sqlite cannot be written ({error}): it goes on in memory, and "
                    f"trajectories under way are lost if {self.spec.role} dies"
                )
            )
            memory = sqlite3.connect(":memory:", isolation_level=None)
            self._db.backup(memory)
            self._db = memory
            self._transact(writes)

    def _transact(self, writes: tuple[Write, ...]) -> None:
        self._db.execute("begin immediate")
        try:
            for statement, rows in writes:
                self._db.executemany(statement, rows)
            self._db.execute("commit")
        except sqlite3.Error:
            if self._db.in_transaction:
                self._db.execute("rollback")
            raise

    async def queued(self, bodies: list[bytes]) -> None:
        """A batch that waits for its dispatch; nothing of it is in the ledger yet. Asked again for the same batch: no change."""
        rows = []
        for body in bodies:
            t = msgspec.msgpack.decode(body, type=Trajectory)
            rows.append((t.id, t.batch, t.group, "", 0, -1, _QUEUED, None, None, body))
        await self._do(self._write, ("insert or ignore into trajectories values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows))

    async def started(self, batch: int, group: int, ids: list[int], rollout: str, incarnation: int, version: int) -> None:
        """Trajectories of one group, at their first dispatch. Asked again: no change."""
        if all(map(self._ledger.knows, ids)):
            return
        self._ledger.start(ids)
        self._batch_of.update(dict.fromkeys(ids, batch))
        self._parts.hold(ids, rollout, incarnation)
        statement = "update trajectories set state = 'started', rollout = ?, incarnation = ?, version = ? where id = ?"
        await self._do(self._write, (statement, [(rollout, incarnation, version, i) for i in ids]))
        self.emit(ev.TrajectoriesStarted(batch=batch, group=group, ids=ids, rollout=rollout, version=version))

    async def grown(self, rollout: str, incarnation: int, body: bytes, evaluated: int = 0) -> list[int] | None:
        """One flush of one life of a rollout: msgpack of the parts by which its trajectories have grown. Made twice: no change.
        ``evaluated``: tokens that it has generated for evaluations so far.

        Answers with the trajectories of which it wants all again; None: this life has been replaced, and its word does not count.
        """
        parts = parts_decoder.decode(body)
        if self._parts.fenced(rollout, incarnation):
            return None
        self._evaluated[rollout, incarnation] = evaluated
        writes, again = self._parts.take(rollout, incarnation, parts)
        if writes:
            await self._do(self._write, *writes)
        return again

    async def taken_back(self, rollout: str, incarnation: int, ids: list[int], died: bool) -> bytes:
        """What the journal has of these trajectories: msgpack of a part from token 0 for each of which it has any. Of a life that ``died``
        no later word counts. Asked again: the same.
        """
        if died:
            self._parts.fence(rollout, incarnation)
            self._say(rollout, incarnation)
        return msgspec.msgpack.encode(self._parts.of(ids))

    async def moved(self, ids: list[int], source: str, target: str, incarnation: int, version: int, kept: list[int]) -> None:
        """These unfinished trajectories go on at this life of ``target``. Asked again: no change."""
        moving = [(i, tokens) for i, tokens in zip(ids, kept, strict=True) if self._parts.holder(i) != (target, incarnation)]
        if not moving:
            return
        ids = [i for i, _ in moving]
        self._parts.hold(ids, target, incarnation)
        statement = "update trajectories set rollout = ?, incarnation = ? where id = ?"
        await self._do(self._write, (statement, [(target, incarnation, i) for i in ids]))
        tokens = [tokens for _, tokens in moving]
        self.emit(ev.TrajectoriesMoved(ids=ids, source=source, target=target, version=version, kept=tokens))

    async def _say_tokens(self) -> None:
        while True:
            await asyncio.sleep(_SAY_EVERY)
            for rollout, incarnation in list(self._parts.received):
                self._say(rollout, incarnation)

    def _say(self, rollout: str, incarnation: int) -> None:
        life = rollout, incarnation
        if (tokens := self._parts.received.get(life, 0)) > self._said.get(life, 0):
            self._said[life] = tokens
            evaluated = self._evaluated.get(life, 0)
            self.emit(ev.TokensJournalled(role=rollout, incarnation=incarnation, tokens=tokens, evaluated=evaluated))

    async def finished(self, bodies: list[bytes], dropped: dict[int, str]) -> None:
        """One group: its rewarded trajectories, and the reason of each that its reward function could not rate. Asked again: no change."""
        pairs = [(msgspec.msgpack.decode(body, type=Trajectory), body) for body in bodies]
        states = dict(await self._do(self._read, "select id, state from trajectories where batch = ?", pairs[0][0].batch))
        kept = [(t, body) for t, body in pairs if t.id not in dropped and states[t.id] == _STARTED]
        statement = "update trajectories set state = 'finished', body = ? where id = ?"
        await self._do(self._write, (statement, [(body, t.id) for t, body in kept]), self._parts.forget([t.id for t, _ in kept]))
        if kept:
            self._emit_finished([t for t, _ in kept])
        await self._settle([t.id for t, _ in kept])
        lost = {i: reason for i, reason in dropped.items() if states[i] == _STARTED}
        for reason in dict.fromkeys(lost.values()):
            await self.dropped([i for i, why in lost.items() if why == reason], reason)

    def _emit_finished(self, group: list[Trajectory]) -> None:
        first = group[0]
        self.emit(
            ev.TrajectoriesFinished(
                batch=first.batch,
                group=first.group,
                ids=[t.id for t in group],
                prompt=_short(first.prompt),
                texts=[_short(t.text) for t in group],
                rewards=[float(t.reward or 0.0) for t in group],
                tokens=[len(t.tokens) for t in group],
                versions=[t.versions for t in group],
                tool_turns=[t.tool_turns for t in group],
            )
        )

    async def dropped(self, ids: list[int], reason: str) -> None:
        """Asked again: no change."""
        if not (ids := [i for i in ids if self._ledger.state(i) is TrajectoryState.IN_FLIGHT]):
            return
        self._ledger.drop(ids, reason)
        statement = "update trajectories set state = 'dropped', reason = ? where id = ?"
        await self._do(self._write, (statement, [(reason, i) for i in ids]), self._parts.forget(ids))
        self.emit(ev.TrajectoriesDropped(ids=ids, reason=reason))
        await self._settle(ids)

    async def _settle(self, ids: list[int]) -> None:
        async with self._changed:
            for i in ids:
                self._settled[self._batch_of[i]] += 1
            self._changed.notify_all()

    async def unfinished(self) -> list[tuple[bytes, str, int, int]]:
        """Body, as queued, rollout (empty: none yet), its incarnation, and the version stamped at the first dispatch, of all that are
        neither finished nor dropped, for a rollout manager in a later life."""
        query = "select body, rollout, incarnation, version from trajectories where state in ('queued', 'started') order by id"
        return await self._do(self._read, query)

    async def newest_batch(self) -> int:
        """The last batch that was queued; 0: none."""
        [[newest]] = await self._do(self._read, "select coalesce(max(batch), 0) from trajectories")
        return max(newest, 0)  # discarded ones are under no batch

    async def wait_batch(self, batch: int, deadline: float) -> list[int]:
        """Ids of the finished trajectories of ``batch`` once each of its trajectories is finished or dropped."""

        def ready() -> bool:
            return self._settled[batch] == self._size

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(ready)

        await within(deadline, f"batch {batch} ({self._size - self._settled[batch]} of {self._size} trajectories unfinished)", wait())
        ids = [
            row[0]
            for row in await self._do(self._read, "select id from trajectories where batch = ? and state = 'finished' order by id", batch)
        ]
        if not ids:
            raise JobFailed(
                f"batch {batch}: every trajectory was dropped, so there is nothing to train on; dropped so far: "
                + "; ".join(f"{count} ({reason})" for reason, count in self._ledger.dropped_by_reason.items())
            )
        return ids

    async def batch_ids(self, batch: int) -> list[int]:
        """Ids of the trajectories of ``batch`` that are finished, or consumed by now."""
        query = "select id from trajectories where batch = ? and state in ('finished', 'consumed') order by id"
        return [row[0] for row in await self._do(self._read, query, batch)]

    async def batch(self, batch: int) -> list[bytes]:
        """Bodies of the trajectories of ``batch`` that are finished, or consumed by now (of the last KEPT_STEPS steps: for a trainer that
        has to do them again), in the order of their ids."""
        query = "select body from trajectories where batch = ? and state in ('finished', 'consumed') order by id"
        rows = await self._do(self._read, query, batch)
        if any(row[0] is None for row in rows):
            raise JobFailed(f"batch {batch} was consumed more than {KEPT_STEPS} optimizer steps ago: its trajectories are gone")
        return [row[0] for row in rows]

    def _read(self, query: str, *args: Any) -> list[tuple[Any, ...]]:
        return self._db.execute(query, args).fetchall()

    async def consumed(self, step: int, ids: list[int]) -> None:
        """The optimizer step that used ``ids`` is committed outside the trainer. Asked again for the same step: no change."""
        if step in self._consumed_steps:
            return
        self._consumed_steps.add(step)
        self._ledger.consume(ids)
        consumed = "update trajectories set state = 'consumed', step = ? where id = ?", [(step, i) for i in ids]
        forgotten: Write = "update trajectories set body = null where batch = ? and state = 'consumed'", [(step - KEPT_STEPS,)]
        await self._do(self._write, consumed, forgotten)
        self.emit(ev.TrajectoriesConsumed(step=step, ids=ids))


def _short(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
