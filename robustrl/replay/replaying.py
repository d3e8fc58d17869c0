"""What a detector would have said of a recorded run: `replay`.

    robustrl.replay(run)                                            its own settings: exactly what was said live, if it is a whole run
    robustrl.replay(run, Thresholds.lab())                          other settings, the same detector
    robustrl.replay(run, {"rollout.heartbeat": "2s"})               the run's first settings with a change
    robustrl.replay(run, Thresholds.lab().updated({"rollout.no_tokens": "4s"}))
    robustrl.replay(run, detector=lambda: MyRule())                 another detector with feed, advance and next_deadline

With its own settings the log is judged as it is. With others, what the supervisor of that day said and asked is left out, and the driver of
driving.py does what it would have done. Leaves out: how the job would have gone on after another decision; the log goes on as it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from ..core import events as ev
from ..core.detection import Detector, judge
from ..core.thresholds import Thresholds
from ..errors import ConfigError, counted
from ..tables import Table
from .driving import Judge, Said, drive
from .given import changed, check_run, check_thresholds, made_by
from .outcomes import CONSEQUENCE, DETECTED, FALSE_ALARM, MISSED, Outcome, Truths, match
from .peers import JOB
from .reducing import floors, reduced, rounded
from .run import Run


@dataclass(frozen=True, eq=False)
class Replay:
    """Verdicts and what they were worth."""

    run: Run
    thresholds: Thresholds | None
    """None: the run's own, as they were at each moment, or another detector's."""
    verdicts: tuple[ev.Verdict, ...]
    outcomes: tuple[Outcome, ...]

    def of(self, outcome: str) -> list[Outcome]:
        """``detected``, ``missed``, ``false alarm``, ``consequence`` or ``left alone``."""
        return [found for found in self.outcomes if found.outcome == outcome]

    @property
    def detected(self) -> list[Outcome]:
        return self.of(DETECTED)

    @property
    def missed(self) -> list[Outcome]:
        return self.of(MISSED)

    @property
    def false_alarms(self) -> list[Outcome]:
        return self.of(FALSE_ALARM)

    @property
    def delays(self) -> list[float]:
        """Seconds, of the detected faults in the order of time."""
        return [found.delay for found in self.detected if found.delay is not None]

    @cached_property
    def as_live(self) -> bool:
        """These are exactly the verdicts that the log holds, in this order. A rule's blind spot, a text, is each version's own."""
        said, live = ([msgspec.structs.replace(verdict, blind_spot="") for verdict in each] for each in (self.verdicts, self.run.verdicts))
        return said == live

    def table(self) -> Table:
        """A row per outcome; times in seconds from the run's first entry."""
        begin = self.run.begin
        rows = []
        for found in self.outcomes:
            row = msgspec.structs.asdict(found)
            row |= {name: None if row[name] is None else round(row[name] - begin, 3) for name in ("start", "at")}
            rows.append(row | {"delay": None if found.delay is None else round(found.delay, 3), "lasted": round(found.lasted, 3)})
        return Table(rows)

    def __repr__(self) -> str:
        faults = len(self.detected) + len(self.missed)
        late = f", latest after {max(self.delays):.2f} s" if self.delays else ""
        others = f"{counted(len(self.false_alarms), 'false alarm')}, {counted(len(self.of(CONSEQUENCE)), 'consequence')}"
        return f"<Replay of {self.run.name}: {len(self.detected)} of {faults} faults detected{late}, {others}>"


def replay(run: Run, thresholds: Thresholds | Mapping[str, Any] | None = None, *, detector: Callable[[], Judge] | None = None,
           reports: bool = False) -> Replay:  # fmt: skip
    """What is said of ``run``; with neither thresholds nor detector: by the run's own settings, all of it.

    ``thresholds``: all of them, or changes by path to those that the run began with: then what is only reported is left out, unless
    ``reports``, which looks at each entry and takes its time. ``detector`` makes a fresh one. Raises ConfigError.
    """
    if thresholds is not None and detector is not None:
        raise ConfigError("thresholds", thresholds, "must not be given beside a detector")
    check_run(run)
    if thresholds is not None:
        check_thresholds(thresholds)
    own = [value for _, value in run.thresholds]
    if thresholds is not None and not isinstance(thresholds, Thresholds):
        thresholds = changed(own[0], thresholds)
    recording, costs, truths = run.recording, run.costs, Truths(run)
    if detector is None and (thresholds is None or all(value == thresholds for value in own)):
        said = Said(list(judge(Detector(own[0]), run.entries)), [])
    else:
        if detector is None:
            assert isinstance(thresholds, Thresholds)
            entries = recording if reports else reduced(recording, rounded(floors([thresholds])))
            said = drive(entries, Detector(thresholds), costs.restart, truths.excused)
            said = said if reports else Said([verdict for verdict in said.verdicts if of_failures(verdict)], said.beyond)
        else:
            said = drive(recording, made_by(detector), costs.restart, truths.excused)
    outcomes = match(truths, recording, said, costs.restart, JOB if detector else "")
    return Replay(run, thresholds, tuple(said.verdicts), tuple(outcomes))


def of_failures(verdict: ev.Verdict) -> bool:
    """It is about a failure, a suspicion, or the end of one: what a reduced recording is enough for."""
    return verdict.kind in ("failed", "suspect") or (verdict.kind == "cleared" and verdict.evidence.get("was") == "suspect")
