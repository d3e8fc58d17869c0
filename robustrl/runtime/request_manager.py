"""The request manager: the journal of trajectories (SQLite, WAL) and their ledger. A trajectory enters once and ends once.

All database work runs in one thread, in the order of the calls; each call is one transaction, committed before its event is emitted.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from ..core import events as ev
from ..core.ledger import Ledger
from ..core.roles import Phase
from ..errors import JobFailed
from ..rl.trajectory import Trajectory
from .role import Role, within

_TABLE = """create table if not exists trajectories (
    id integer primary key, batch integer not null, state text not null, reason text, body blob) strict"""


class RequestManager(Role):
    async def on_open(self) -> None:
        self._ledger = Ledger()
        self._consumed_steps: set[int] = set()
        self._batch_of: dict[int, int] = {}
        self._unsettled: Counter[int] = Counter()
        self._size = self.config.prompts_per_step * self.config.samples_per_prompt
        self._changed = asyncio.Condition()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        await self._do(self._connect, Path(self.spec.run_dir, "journal.sqlite"))

    def _connect(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=normal")
        self._db.execute(_TABLE)

    async def _do(self, function: Any, *args: Any) -> Any:
        self.page.phase = Phase.RUNNING
        try:
            return await asyncio.get_running_loop().run_in_executor(self._writer, function, *args)
        finally:
            self.page.phase = Phase.IDLE
            self.page.update(progress=self._ledger.started, pending=self._ledger.in_flight)

    def _write(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        self._db.execute("begin immediate")
        self._db.executemany(statement, rows)
        self._db.execute("commit")

    async def started(self, batch: int, group: int, ids: list[int], rollout: str, version: int) -> None:
        self._ledger.start(ids)
        self._batch_of.update(dict.fromkeys(ids, batch))
        self._unsettled[batch] += len(ids)
        await self._do(self._write, "insert into trajectories values (?, ?, 'started', null, null)", [(i, batch) for i in ids])
        self.emit(ev.TrajectoriesStarted(batch=batch, group=group, ids=ids, rollout=rollout, version=version))

    async def finished(self, bodies: list[bytes], dropped: dict[int, str]) -> None:
        """One group: its rewarded trajectories, and the reason of each that its reward function could not rate."""
        group = [msgspec.msgpack.decode(body, type=Trajectory) for body in bodies]
        kept = [t for t in group if t.id not in dropped]
        rows = [("finished", body, t.id) for t, body in zip(group, bodies, strict=True) if t.id not in dropped]
        await self._do(self._write, "update trajectories set state = ?, body = ? where id = ?", rows)
        if kept:
            first = kept[0]
            self.emit(
                ev.TrajectoriesFinished(
                    batch=first.batch,
                    group=first.group,
                    ids=[t.id for t in kept],
                    prompt=_short(first.prompt),
                    texts=[_short(t.text) for t in kept],
                    rewards=[float(t.reward or 0.0) for t in kept],
                    tokens=[len(t.tokens) for t in kept],
                    versions=[t.versions for t in kept],
                    tool_turns=[t.tool_turns for t in kept],
                )
            )
        for reason in dict.fromkeys(dropped.values()):
            await self.dropped([i for i, why in dropped.items() if why == reason], reason)
        await self._settle([t.id for t in kept])

    async def dropped(self, ids: list[int], reason: str) -> None:
        self._ledger.drop(ids, reason)
        await self._do(self._write, "update trajectories set state = 'dropped', reason = ? where id = ?", [(reason, i) for i in ids])
        self.emit(ev.TrajectoriesDropped(ids=ids, reason=reason))
        await self._settle(ids)

    async def _settle(self, ids: list[int]) -> None:
        async with self._changed:
            for i in ids:
                self._unsettled[self._batch_of[i]] -= 1
            self._changed.notify_all()

    async def wait_batch(self, batch: int, deadline: float) -> list[int]:
        """Ids of the finished trajectories of ``batch`` once each of its trajectories is finished or dropped."""

        def ready() -> bool:
            started = sum(1 for b in self._batch_of.values() if b == batch)
            return started == self._size and self._unsettled[batch] == 0

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(ready)

        await within(deadline, f"batch {batch} ({self._unsettled[batch]} of {self._size} trajectories unfinished)", wait())
        ids = [
            row[0]
            for row in await self._do(self._read, "select id from trajectories where batch = ? and state = 'finished' order by id", batch)
        ]
        if not ids:
            raise JobFailed(
                f"batch {batch}: every trajectory was dropped ({dict(self._ledger.dropped_by_reason)}); there is nothing to train on"
            )
        return ids

    async def batch(self, batch: int) -> list[bytes]:
        """Bodies of the finished trajectories of ``batch``, in the order of their ids."""
        rows = await self._do(self._read, "select body from trajectories where batch = ? and state = 'finished' order by id", batch)
        return [row[0] for row in rows]

    def _read(self, query: str, *args: Any) -> list[tuple[Any, ...]]:
        return self._db.execute(query, args).fetchall()

    async def consumed(self, step: int, ids: list[int]) -> None:
        """The optimizer step that used ``ids`` is committed outside the trainer. Asked again for the same step: no change."""
        if step in self._consumed_steps:
            return
        self._consumed_steps.add(step)
        self._ledger.consume(ids)
        await self._do(self._write, "update trajectories set state = 'consumed', body = null where id = ?", [(i,) for i in ids])
        for i in ids:
            self._batch_of.pop(i)
        self.emit(ev.TrajectoriesConsumed(step=step, ids=ids))


def _short(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
