"""What the journal knows of unfinished trajectories: who holds each, and the tokens that it has so far.

A flush of a rollout is one row, kept until every trajectory in it has ended. Pure but for the SQL that it hands to its caller; the caller's
writes run in the order in which they were handed out. A trajectory's part is only ever added to by the life of a rollout that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec

from ..rl.trajectory import Part, parts_decoder

Write = tuple[str, list[tuple[Any, ...]]]
"""A statement and the rows that it is executed with."""
_Life = tuple[str, int]
_DELETE = "delete from flushes where n = ?"


class Parts:
    TABLES: ClassVar[tuple[str, ...]] = (
        "create table if not exists flushes (n integer primary key, body blob not null) strict",
        "create table if not exists received (rollout text, incarnation integer, tokens integer not null, "
        "primary key (rollout, incarnation)) strict",
    )
    QUERIES: ClassVar[tuple[str, str]] = (
        "select n, body from flushes order by n",
        "select rollout, incarnation, tokens from received",
    )

    def __init__(self) -> None:
        self.received: dict[_Life, int] = {}
        """Generated tokens that came from each life."""
        self._holders: dict[int, _Life] = {}
        self._parts: dict[int, Part] = {}
        self._fenced: dict[str, int] = {}
        self._row = 0
        self._open: dict[int, int] = {}
        """Flush -> trajectories in it that have not ended."""
        self._flushes_of: dict[int, list[int]] = {}

    def hold(self, ids: Iterable[int], rollout: str, incarnation: int) -> None:
        self._holders.update(dict.fromkeys(ids, (rollout, incarnation)))

    def holder(self, trajectory: int) -> _Life | None:
        return self._holders.get(trajectory)

    def fence(self, rollout: str, incarnation: int) -> None:
        self._fenced[rollout] = max(incarnation, self._fenced.get(rollout, 0))

    def fenced(self, rollout: str, incarnation: int) -> bool:
        return incarnation <= self._fenced.get(rollout, 0)

    def of(self, ids: Iterable[int]) -> list[Part]:
        return [self._parts[i] for i in ids if i in self._parts]

    def take(self, rollout: str, incarnation: int, parts: list[Part]) -> tuple[list[Write], list[int]]:
        """What to write, and the trajectories whose part does not fit to what is known: all of them is wanted again."""
        life = rollout, incarnation
        kept: list[Part] = []
        again: list[int] = []
        tokens = 0
        for part in parts:
            holder = self._holders.get(part.id)
            if holder is None:  # it has ended meanwhile
                tokens += sum(part.mask)
            elif holder == life:
                known = self._parts.setdefault(part.id, Part(part.id, 0))
                before = len(known.mask)
                if not known.join(part):
                    again.append(part.id)
                    continue
                tokens += sum(known.mask[before:])
                kept.append(part)
        if not tokens and not kept:
            return [], again
        self.received[life] = self.received.get(life, 0) + tokens
        writes: list[Write] = [("insert or replace into received values (?, ?, ?)", [(rollout, incarnation, self.received[life])])]
        if kept:
            self._row += 1
            self._enter(self._row, kept)
            writes.append(("insert into flushes values (?, ?)", [(self._row, msgspec.msgpack.encode(kept))]))
        return writes, again

    def _enter(self, row: int, parts: list[Part]) -> None:
        self._open[row] = len(parts)
        for part in parts:
            self._flushes_of.setdefault(part.id, []).append(row)

    def forget(self, ids: Iterable[int]) -> Write:
        """These trajectories have ended: the flushes that nobody needs any more go."""
        rows = []
        for i in ids:
            self._holders.pop(i, None)
            self._parts.pop(i, None)
            for row in self._flushes_of.pop(i, []):
                self._open[row] -= 1
                if not self._open[row]:
                    del self._open[row]
                    rows.append((row,))
        return _DELETE, rows

    def restore(self, flushes: list[tuple[int, bytes]], received: list[tuple[str, int, int]]) -> Write:
        """From the rows of an earlier life's `QUERIES`, once the holders are known; what to write for those that nobody needs."""
        idle = []
        self.received = {(rollout, incarnation): tokens for rollout, incarnation, tokens in received}
        for row, body in flushes:
            parts = [part for part in parts_decoder.decode(body) if part.id in self._holders]
            for part in parts:
                self._parts.setdefault(part.id, Part(part.id, 0)).join(part)
            if parts:
                self._enter(row, parts)
            else:
                idle.append((row,))
            self._row = row
        return _DELETE, idle
