"""Scenes of a log, for the tests of what views tell."""

from __future__ import annotations

import dataclasses

from robustrl_widgets.scene import Scene

from robustrl.core import events as ev


def scene_of(entries: list[ev.Entry]) -> Scene:
    scene = Scene()
    for entry in entries:
        scene.apply(entry)
    return scene


def bars_of(scene: Scene, role: str) -> list[tuple]:
    return [dataclasses.astuple(bar) for bar in scene.lanes.lanes[role].bars]
