"""The picture of the Trajectories view: the newest answers with text, reward, version per token, and where a fault made one move on.

Faults are rare among answers: those that one made move on are kept apart, as many again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from robustrl.core import events as ev

from .words import cut

if TYPE_CHECKING:
    from .scene import Scene

_SHOWN = 64
_TEXT = 400
_MOVES = 4096
"""Moved trajectories that are remembered until they are finished."""


class Samples:
    def __init__(self) -> None:
        self.rows: deque[dict[str, Any]] = deque(maxlen=_SHOWN)
        self.moved: deque[dict[str, Any]] = deque(maxlen=_SHOWN)
        """Those that were continued after a fault, also when they are among the newest no more."""
        self._moves: dict[int, list[list[Any]]] = {}
        self._rollout: dict[tuple[int, int], str] = {}

    def apply(self, entry: ev.Entry) -> None:
        match entry.event:
            case ev.TrajectoriesStarted(batch=batch, group=group, rollout=rollout):
                self._rollout[batch, group] = rollout
                while len(self._rollout) > _MOVES:
                    del self._rollout[next(iter(self._rollout))]
            case ev.TrajectoriesMoved(ids=ids, source=source, target=target, kept=kept):
                for number, tokens in zip(ids, kept, strict=False):
                    self._moves.setdefault(number, []).append([source, target, tokens])
                while len(self._moves) > _MOVES:
                    del self._moves[next(iter(self._moves))]
            case ev.TrajectoriesFinished() as done:
                rollout = self._rollout.pop((done.batch, done.group), "")
                for place, number in enumerate(done.ids):
                    row = {
                        "id": number, "batch": done.batch, "prompt": cut(done.prompt, _TEXT), "text": cut(done.texts[place], _TEXT),
                        "reward": round(done.rewards[place], 3), "tokens": done.tokens[place], "turns": done.tool_turns[place],
                        "versions": [[version, tokens] for version, tokens in done.versions[place]][:12], "at": rollout,
                        "moves": self._moves.pop(number, [])[:6]}
                    self.rows.append(row)
                    if row["moves"]:
                        self.moved.append(row)


def picture(scene: Scene, now: float) -> dict[str, Any]:
    rows = {str(row["id"]): row for row in scene.samples.rows}
    return {"rows": rows, "moved": {number: row for row in scene.samples.moved if (number := str(row["id"])) not in rows}}
