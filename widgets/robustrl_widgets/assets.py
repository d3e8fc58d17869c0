"""The pages' side of the views: one ESM file per view, with what all share in front. Nothing is fetched from anywhere."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from .words import PHASES

_FOLDER = Path(__file__).parent / "esm"
NAMES = ("board", "timeline", "faults", "thresholds", "metrics", "trajectories", "recovery", "player")
TUNING = "tuning"
"""Its pictures come from a thread of its own (tuner.py), not from the run's feed."""


@cache
def text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@cache
def esm(view: str) -> str:
    """The whole module of a view: the same text in a notebook and in the dashboard."""
    if view not in (*NAMES, TUNING):
        raise ValueError(f"view {view!r}: must be one of {', '.join((*NAMES, TUNING))}")
    tables = f"const CSS = {json.dumps(text('views.css'))};\nconst PHASES = {json.dumps(PHASES)};"
    return f"{tables}\n{text('common.js')}\n{text(f'{view}.js')}"


@cache
def bokeh_js() -> str:
    """Bokeh's own bundle, for pages that do not have it."""
    import bokeh

    return (Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js").read_text(encoding="utf-8")
