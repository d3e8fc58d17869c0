"""The picture of the ThresholdPanel: each setting of the detector, what it is for, and how near its signal is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from robustrl.core.levels import levels
from robustrl.core.thresholds import PATHS

from .words import cut

if TYPE_CHECKING:
    from .scene import Scene

WORDS = {
    "job.stall": "no optimizer step although work is left",
    "job.start": "a process lives, its role is not ready",
    "trainer.no_compute": "training, but no compute activity",
    "trainer.no_marks": "busy, but no micro-batch ends",
    "trainer.silent": "the control loop does not come round",
    "trainer.advantage": "phase lasts too long: reported",
    "trainer.optimizer": "phase lasts too long: reported",
    "trainer.snapshot": "phase lasts too long: reported",
    "trainer.publish": "phase lasts too long: reported",
    "rollout.no_tokens": "work is there, no token comes: suspect",
    "rollout.wedged": "the engine loop does not come round: suspect",
    "rollout.heartbeat": "a suspect's time to answer",
    "rollout.pull": "a pull takes too long: reported",
    "management.silent": "the event loop does not come round",
    "management.lag": "the event loop was that late: reported",
    "keeper.silent": "the event loop does not come round",
    "keeper.lag": "the event loop was that late: reported",
    "node.silent": "no word from a node agent",
}
"""Settings that have a signal. The others are numbers behind it."""


def picture(scene: Scene, now: float) -> dict[str, Any]:
    nearest = levels(scene.detector, max(scene.state.t, now + scene.state.t0))
    settings = scene.detector.thresholds
    rows: dict[str, dict[str, Any]] = {}
    for path in PATHS:
        row: dict[str, Any] = {"set": cut(settings.get(path), 40), "words": WORDS.get(path, "")}
        if path in nearest:
            level = nearest[path]
            row |= {"role": level.role, "value": round(level.value, 2), "limit": round(level.limit, 3)}
        rows[path] = row
    return {"rows": rows, "over": scene.over, "closed": scene.closed}
