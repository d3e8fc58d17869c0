"""From a job, or a recording, to its feed; and what a notebook shows for a job. Imports no widget library until one is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robustrl.errors import ConfigError
from robustrl.replay.run import Run

from . import static
from .feed import Feed
from .ghost_files import folder_of
from .sources import LiveRun, RecordedRun

if TYPE_CHECKING:
    from robustrl.job import Job

    from .notebook import View


def feed_of(run: Job | Feed | Run | str | Path) -> Feed:
    """The one feed of a job in this process; of a recording (run directory, events.jsonl, or a loaded `robustrl.Run`) a new one, which
    plays from its start. Raises ConfigError for anything else."""
    if isinstance(run, Feed):
        return run
    if isinstance(run, str | Path):
        return Feed(RecordedRun.load(run), ghosts=folder_of(run))
    if isinstance(run, Run):
        return Feed(RecordedRun(run.entries))
    if not hasattr(run, "entries_after"):
        raise ConfigError("run", run, "must be a job, a run directory, an events.jsonl, or a robustrl.Run")
    feed: Feed | None = getattr(run, "_feed", None)
    if feed is None:
        feed = run._feed = Feed(LiveRun(run), ghosts=folder_of(run.run_dir))
    return feed


def static_html(job: Job) -> str:
    """Timeline and recoveries of a job as they stand."""
    feed = feed_of(job)
    with feed.lock:
        scene, now = feed.still()
        return static.form("timeline", scene, now) + static.recoveries_html(scene)


def live_views(job: Job) -> dict[str, Any]:
    """The display of a job in a notebook: RoleBoard and Timeline, the same ones each time. Empty without a kernel or ipywidgets."""
    if not _in_kernel():
        return {}
    try:
        from .notebook import RoleBoard, Timeline, stacked
    except ImportError:
        return {}
    views: list[View] | None = getattr(job, "_views", None)
    if views is None or any(view.comm is None for view in views):
        if job._box is not None:
            job._box.layout.close()
            job._box.close()
        views = job._views = [RoleBoard(job), Timeline(job)]
        job._box = stacked(views)
    return {"application/vnd.jupyter.widget-view+json": {"version_major": 2, "version_minor": 0, "model_id": job._box.model_id}}


def _in_kernel() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")
