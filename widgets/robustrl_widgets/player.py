"""The picture of the bar under which a recording is played."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .scene import Scene


def picture(scene: Scene, now: float) -> dict[str, Any]:
    return {"length": round(scene.length, 2), "name": scene.state.name, "pace": scene.pace}
