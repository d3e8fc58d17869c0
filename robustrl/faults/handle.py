"""What a notebook holds of a fault or of a schedule: it shows what the log says, and can call it off. It reads the book of faults alone."""

from __future__ import annotations

import html
import time
from typing import TYPE_CHECKING, Any

from ..core.fault_book import STAGES, FaultView
from ..errors import ConfigError, HostGone, RobustRLError, WaitTimeout, counted
from ..tables import Table

if TYPE_CHECKING:
    from ..job import Job

_OVER = "over"
_ECHO = 3.0
PATIENCE = 180.0
"""Seconds that `FaultHandle.wait` waits unless told otherwise."""


class FaultHandle:
    """planned -> injected -> detected -> recovered -> confirmed. Everything shown is from the log; a hidden fault shows nothing."""

    def __init__(self, job: Job, number: int) -> None:
        self._job, self.number = job, number

    @property
    def view(self) -> FaultView:
        """All that the log says of it, the secret of a hidden one included."""
        return self._job.read(lambda state: state.faults[self.number])

    @property
    def stage(self) -> str:
        """The furthest stage that it came to; ``hidden`` until a hidden one is revealed."""
        return str(self.view.row()["stage"])

    @property
    def outcome(self) -> str:
        """Empty, or how it ended: over, aborted, refused, vanished, not_fired."""
        return "" if self.view.masked else self.view.outcome

    def wait(self, stage: str = "confirmed", timeout: float = PATIENCE) -> FaultHandle:
        """Until it has come to ``stage``, or, for ``over``, has ended. Raises WaitTimeout; RobustRLError when nothing more will come of it;
        HostGone with the job.
        """
        if stage not in (*STAGES, _OVER):
            raise ConfigError("stage", stage, f"must be one of {', '.join((*STAGES, _OVER))}")

        from ..job import _seconds

        timeout = _seconds(timeout)

        def reached() -> bool:
            view = self._raw()
            return view.outcome == _OVER if stage == _OVER else STAGES.index(view.stage) >= STAGES.index(stage)

        begun = time.monotonic()
        self._job.wait_until(lambda: reached() or self._raw().settled or self._job.over, timeout)
        if not reached() and self._raw().outcome == _OVER:  # what it led to may be said a moment later
            self._job.wait_until(lambda: reached() or self._job.over, min(_ECHO, max(0.0, begun + timeout - time.monotonic())))
        if reached():
            return self
        view = self._raw()
        if view.settled:
            raise RobustRLError(f"fault {self.number} came to the stage {view.stage} and no further: {view.outcome} ({view.reason})")
        if self._job.over:
            raise HostGone(f"job {self._job.name!r} ended while fault {self.number} was {view.stage}")
        raise WaitTimeout(f"fault {self.number} ({view.kind}, {view.target}): not {stage} within {timeout:g} s; it is {view.stage}")

    def abort(self, timeout: float | None = None) -> None:
        """Undo what can be undone: one that waits does not strike, a stopped or stuck process goes on. Raises RobustRLError else."""
        self._job._call("abort_fault", timeout, fault=self.number)

    def reveal(self, guess: str = "", timeout: float | None = None) -> FaultHandle:
        """Show a hidden fault, to everyone; ``guess``, what you take it for, is kept in the log beside it.

        Raises ConfigError if it is no text.
        """
        if not isinstance(guess, str):
            raise ConfigError("guess", guess, "must be a text")
        self._job._call("reveal_fault", timeout, fault=self.number, guess=guess)
        return self

    def _raw(self) -> FaultView:
        return self._job._state.faults[self.number]

    def __repr__(self) -> str:
        view = self.view
        return f"<fault {self.number}: hidden>" if view.masked else f"<fault {self.number}: {_line(view)}>"

    def _repr_html_(self) -> str:
        return html_fault(self.view)


class ScheduleHandle:
    def __init__(self, job: Job, name: str) -> None:
        self._job, self.name = job, name

    @property
    def faults(self) -> list[FaultHandle]:
        """Those planned so far."""
        numbers = self._job.read(lambda state: [view.fault for view in state.faults.faults.values() if view.schedule == self.name])
        return [FaultHandle(self._job, number) for number in numbers]

    def abort(self, timeout: float | None = None) -> None:
        """No more faults of this schedule; those that wait are called off."""
        self._job._call("abort_schedule", timeout, schedule=self.name)

    def reveal(self, guess: str = "") -> list[FaultHandle]:
        """Show its hidden faults."""
        return [fault.reveal(guess) for fault in self.faults]

    def __repr__(self) -> str:
        return f"<{self.name}: {counted(len(self.faults), 'fault')}>" + "".join(f"\n  {fault!r}" for fault in self.faults)

    def _repr_html_(self) -> str:
        return f"<div>{html.escape(self.name)}</div>{Table(fault.view.row() for fault in self.faults)._repr_html_()}"


def html_fault(view: FaultView) -> str:
    """A self-contained piece of HTML: the stages as a line, those that it came to filled in, and what is known of each."""
    if view.masked:
        return f"<div><b>fault {view.fault}</b>: hidden. Look at the job, find out, then <code>reveal()</code>.</div>"
    start = view.injected
    detected = view.detected.t if view.detected else None
    marks = dict(zip(STAGES, (view.planned, start, detected, view.recovered, view.confirmed), strict=True))
    cells = []
    for stage, at in marks.items():
        later = stage not in ("planned", "injected") and at is not None and start is not None
        after = f" +{at - start:.2f} s" if later else ""  # type: ignore[operator]
        weight, sign = ("bold", "&#9679;") if at is not None else ("normal;opacity:.5", "&#9675;")
        cells.append(f'<span style="font-weight:{weight}">{sign} {stage}{after}</span>')
    kind = " (benign)" if view.benign else ""
    head = f"<b>fault {view.fault}</b>: {html.escape(view.kind)}{kind}, {html.escape(view.target)}, {html.escape(view.when)}"
    facts = "".join(f"<div>{html.escape(fact)}</div>" for fact in _facts(view))
    return f'<div style="font-family:sans-serif;font-size:13px"><div>{head}</div><div>{" &rarr; ".join(cells)}</div>{facts}</div>'


def _line(view: FaultView) -> str:
    ended = f", {view.outcome}" if view.outcome else ""
    return f"{view.kind}, {view.target}, {view.when}: {view.stage}{ended}" + "".join(f"; {fact}" for fact in _facts(view))


def _facts(view: FaultView) -> list[str]:
    facts = [f"hit {hit.role} (pid {hit.pid}) in phase {hit.phase or '-'}, step {hit.step}: {_proof(hit.proof)}" for hit in view.hits]
    if view.detected:
        said = f"{view.detected.kind} by rule {view.detected.rule!r}, {view.detected.delay:.2f} s after the injection"
        facts.append(("false alarm: " if view.false_alarm else "") + said)
    elif view.benign and view.outcome == "over":
        facts.append("nobody took it for a failure")
    if view.reason:
        facts.append(f"{view.outcome}: {view.reason}")
    return facts


def _proof(proof: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in proof.items() if name != "ago")
