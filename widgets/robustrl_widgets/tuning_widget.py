"""The TuningLab in a notebook: sliders over recorded runs, or over what a live job has recorded so far.

    TuningLab(job)      TuningLab(robustrl.corpus().of(seed=1), job=job)        TuningLab("runs/demo-...")

The page's file and its protocol are those of the other views; its pictures come from a `Tuner` of its own instead of the job's feed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import traitlets

from robustrl.core.thresholds import Thresholds
from robustrl.errors import ConfigError
from robustrl.replay.run import Run

from . import assets
from .commands import Answer, Right
from .notebook import Live, _take_clicks_while_a_cell_runs
from .static_tuning import tuning_html
from .tuner import Tuner, bundled, told

if TYPE_CHECKING:
    from robustrl.job import Job

_PATIENCE = 3.0
"""Seconds that the display of a lab waits for its first picture."""


class TuningLab(Live):
    """``runs``: a job (what it has recorded when it is loaded), runs, or the path of one. ``base``: what the sliders begin with; by default
    the job's present settings; without a job those in force at the end of the first run, or the lab's if the runs are too short for those.
    ``close()`` ends it. One that is seen nowhere any more, as its cell was run again, rests until it is looked at, or told something.
    """

    _esm = assets.esm("tuning")
    right = traitlets.Unicode("INSTRUCTOR").tag(sync=True)

    def __init__(self, runs: Job | Run | Sequence[Run] | str | Path, *, job: Job | None = None, base: Thresholds | None = None) -> None:
        if hasattr(runs, "events") and hasattr(runs, "thresholds") and not isinstance(runs, Run):
            live: Any = runs
            job, name = live, "this job, until now"
            sources: dict[str, Any] = {name: lambda: ([told(list(live.events), live.name)], None)}
        else:
            found = [Run.load(runs)] if isinstance(runs, str | Path) else [runs] if isinstance(runs, Run) else list(runs)
            if not found or not all(isinstance(run, Run) for run in found):
                raise ConfigError("runs", runs, "must be a job, a run or several, or the path of one")
            name = "these runs" if len(found) > 1 else found[0].name
            sources = {name: lambda: (found, None)}
        super().__init__(_view_count=0)  # from here on its pages count in how many places it is seen
        _take_clicks_while_a_cell_runs(self.comm)
        self.tuner = Tuner({**sources, **bundled()}, self._show, job=job, right=Right.INSTRUCTOR, base=base, load=name)
        self.observe(self._commanded, "command")
        self.observe(self._counted, "_view_count")

    def _commanded(self, change: Any) -> None:
        if change["new"]:
            self.tuner.take(change["new"], self._answer)

    def _counted(self, change: Any) -> None:
        """A page that was loaded anew has not said that it looks no more: then the lab is taken for one that is seen."""
        self.tuner.rest(change["new"] == 0)

    def _answer(self, answer: Answer) -> None:
        if self.comm is not None and answer["id"]:
            self.answer = msgspec.json.encode(answer).decode()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """As the other views. A saved notebook shows what the cell ended with, so the first judgement is awaited, for a moment."""
        self.tuner.judged.wait(_PATIENCE)
        bundle = super()._repr_mimebundle_(**options)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
        return {**data, "text/plain": "<TuningLab>", "text/html": tuning_html(self.tuner.last)}, metadata

    def close(self) -> None:
        if (tuner := getattr(self, "tuner", None)) is not None:
            tuner.close()
        layout = self.layout
        super().close()
        layout.close()
