"""What a view may ask for, and who may ask: the one place where clicks turn into calls of a job.

Nothing that a page sends is trusted: every command is a verb of the table below with checked arguments, and rights are those that the host
of the view gives, never what the page claims. Answers are plain JSON values. Reading needs no right; faults and settings need the
instructor's; a student may have one fault under way at a time, under a name.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from robustrl.core.recovery import MODES, STANDBYS
from robustrl.core.thresholds import PATHS
from robustrl.errors import RobustRLError

from .faults import catalogue
from .feed import Feed
from .sources import RecordedRun
from .words import LONG, STUDENT, cut, last_live, person, whose

MAX_COMMAND = 4096
"""Bytes of one command."""
_LOG_LINES = 60
_LINE = 400
_RECOVERY = {"mode": MODES, "standbys": STANDBYS}
_SEEN = 5.0
"""Seconds until an ordered fault is in the log that this side reads."""
_FURTHEST = 1_000_000
"""Optimizer steps that a fault may be ordered ahead."""
_LONGEST = 86_400.0
"""Seconds of a fault that a page may order."""
log = logging.getLogger(__name__)


class Right(IntEnum):
    READ = 0
    STUDENT = 1
    INSTRUCTOR = 2


class Refused(RobustRLError):
    """A command that is not carried out; the text says why."""


class Command(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    verb: str
    args: dict[str, str | float | bool | None] = {}


Answer = dict[str, Any]


class Commander:
    """Carries out the commands of one page."""

    def __init__(self, feed: Feed, right: Right, name: str = "", may_play: bool = False) -> None:
        self._feed, self._right, self._name, self._may_play = feed, right, cut(name, 40), may_play
        self._busy = threading.Lock()

    def take(self, raw: Any, answer: Callable[[Answer], None]) -> None:
        """Queues what a page sent; ``answer`` is called once, from another thread, if it was a command at all."""
        try:
            command = parse(raw)
        except Refused as error:
            answer({"id": "", "error": cut(error, LONG)})
            return
        try:
            self._feed.later(lambda: answer({"id": command.id, **self._carry_out(command)}))
        except queue.Full:  # said, not waited for
            answer({"id": command.id, "error": "too many commands are waiting: try again"})

    def _carry_out(self, command: Command) -> Answer:
        try:
            verb = _VERBS.get(command.verb)
            if verb is None:
                raise Refused(f"{cut(command.verb, 40)!r} is no command; there are {', '.join(_VERBS)}")
            right, run = verb
            if self._right < right:
                raise Refused(f"this page may only {'look' if self._right is Right.READ else 'queue a fault'}: it was opened without the "
                              f"{right.name.lower()}'s token")
            return {"value": run(self, command.args)}
        except _Confirm as question:
            return {"confirm": str(question)}
        except (RobustRLError, ValueError, KeyError, OSError) as error:
            return {"error": cut(error.args[0] if isinstance(error, KeyError) and error.args else error, LONG)}
        except Exception:  # a defect: whoever asked hears of it all the same
            log.exception("a command of a view failed")
            return {"error": f"{cut(command.verb, 40)} failed: the log of the kernel, or of the dashboard's process, says why"}

    # -- verbs -----------------------------------------------------------------------------------------------------------------------------

    def _job(self) -> Any:
        if self._feed.source.job is None:
            raise Refused("this is a recording: nothing can be done to it any more")
        return self._feed.source.job

    def _open_job(self) -> Any:
        """The job, to which something is to be done."""
        job = self._job()
        with self._feed.lock:
            closed = self._feed.still()[0].closed
        if closed:
            raise Refused(f"{closed}: nothing can be done to it any more")
        return job

    def _role(self, args: dict[str, Any]) -> str:
        role = args.get("role")
        with self._feed.lock:
            if not isinstance(role, str) or role not in self._feed.scene.state.roles:
                raise Refused(f"there is no role {cut(role, 60)!r}")
        return role

    def _inspect(self, args: dict[str, Any]) -> Any:
        role = self._role(args)
        with self._feed.lock:
            found = self._feed.scene.inspect(role)
        if self._right is Right.STUDENT:
            found["faults"] = [kind for kind in found["faults"] if catalogue()[kind]["for_students"]]
        return found | {"right": int(self._right), "live": self._feed.source.job is not None}

    def _not_here(self, kept: str, folder: str) -> None:
        """A recording is its event log; what else its run left behind lies where it was. Raises Refused for one."""
        source = self._feed.source
        if isinstance(source, RecordedRun):
            place = source.run_dir / folder if source.run_dir else None
            there = place is not None and place.is_dir() and any(place.iterdir())
            raise Refused(f"a recording: its {kept} are in {place}" if there else f"a recording: there are no {kept} beside it")

    def _logs(self, args: dict[str, Any]) -> Any:
        self._not_here("logs", "logs")
        lines = self._job().roles[self._role(args)].logs(_LOG_LINES)
        return [cut(line, _LINE) for line in lines]

    def _stack(self, args: dict[str, Any]) -> Any:
        """The evidence of each life that was killed because it hung; newest last."""
        self._not_here("stacks", "evidence")
        role, folder = self._role(args), Path(self._job().run_dir, "evidence")
        found = sorted(folder.glob(f"{role}.*.txt"), key=lambda path: path.stat().st_mtime)
        return [{"life": path.name.split(".")[-2], "text": cut(path.read_text(errors="replace"), 4 * LONG)} for path in found[-2:]]

    def _inject(self, args: dict[str, Any]) -> Any:
        """One fault, from its kind, target, phase, seconds, and how many steps ahead. ``sure``: also the last live rollout."""
        from robustrl.faults import make_fault

        job, role = self._open_job(), args.get("target")
        with self._feed.lock:
            state = self._feed.still()[0].state
            alone, step = last_live(state, str(role)), state.step
        values = {"fault": args.get("kind"), "target": role, "force": alone}
        values |= {"phase": args["phase"]} if args.get("phase") else {}
        if args.get("seconds"):
            values["seconds"] = seconds = number("seconds", args["seconds"])
            if not seconds <= _LONGEST:
                raise Refused(f"seconds = {seconds:g}: must be at most {_LONGEST:g}, a day")
        if args.get("ahead"):
            values["step"] = step + 1 + whole("ahead", args["ahead"], _FURTHEST)
        fault = make_fault(values)
        if self._right is Right.STUDENT:
            self._check_student(fault, bool(args.get("hidden")))
        if alone and not args.get("sure"):
            raise _Confirm(f"{cut(role, 60)} is the last live rollout: until it is back, nobody generates.")
        ordered = job._call("inject", None, fault=msgspec.to_builtins(fault), hidden=bool(args.get("hidden")), by=self._by)
        job.wait_until(lambda: ordered in job._state.faults.faults, _SEEN)
        said = "" if args.get("hidden") else f"fault {ordered} is ordered: {fault.name}, {fault.aim()}, {fault.when()}"
        return {"fault": ordered, "said": said}

    @property
    def _by(self) -> str:
        return f"{STUDENT}{self._name}" if self._right is Right.STUDENT else f"instructor {self._name}".strip()

    @property
    def me(self) -> str:
        """The key of whoever looks, as the cards of faults have it. Only what is offered hangs on it."""
        return whose(self._by)

    def _is_mine(self, by: str) -> bool:
        """Another spelling of a name is no other person, who could have a fault of their own."""
        return person(by) == person(self._by)

    def _check_student(self, fault: Any, hidden: bool) -> None:
        if not self._name:
            raise Refused("say who you are first: open the page with &name= and your name in its address")
        if hidden or fault.by == "host":
            raise Refused("a student's fault hits one role's process, and is not hidden")
        under_way = [view.fault for view in self._feed.scene.state.faults.faults.values() if self._is_mine(view.by) and not view.settled]
        if under_way:
            raise Refused(f"one at a time: fault {under_way[0]} of {self._name} is not over yet")

    def _schedule(self, args: dict[str, Any]) -> Any:
        from robustrl.faults import make_schedule

        from .presets import PRESETS

        name = args.get("name")
        if name not in PRESETS:
            raise Refused(f"there is no schedule {cut(name, 60)!r}; there are {', '.join(PRESETS)}")
        schedule = make_schedule(PRESETS[str(name)].schedule)
        self._open_job()._call("schedule", None, schedule=msgspec.to_builtins(schedule), by=self._by)
        return {"said": f"scheduled: {name}"}

    def _abort(self, args: dict[str, Any]) -> Any:
        number = self._fault(args)
        self._open_job()._call("abort_fault", None, fault=number)
        return {"said": f"fault {number} is called off"}

    def _reveal(self, args: dict[str, Any]) -> Any:
        self._open_job()._call("reveal_fault", None, fault=self._fault(args), guess=cut(args.get("guess") or ""))
        return {"said": ""}

    def _fault(self, args: dict[str, Any]) -> int:
        wanted = whole("fault", args.get("fault"))
        with self._feed.lock:
            view = self._feed.scene.state.faults.faults.get(wanted)
        if view is None or (self._right is Right.STUDENT and not self._is_mine(view.by)):
            whose = " of yours" if self._right is Right.STUDENT else ""
            raise Refused(f"there is no such fault{whose}")
        return view.fault

    def _set_threshold(self, args: dict[str, Any]) -> Any:
        path, value = args.get("path"), args.get("value")
        if not isinstance(path, str):
            raise Refused("path: must be the name of a threshold")
        job, before = self._open_job(), self._limit(path)
        job.thresholds.update({path: value})
        return {"said": f"{path} is {self._limit(path)} now; it was {before}"}

    def _limit(self, path: str) -> str:
        """A threshold as it is in force; of what is none, nothing: the job says what there is."""
        with self._feed.lock:
            scene = self._feed.still()[0]
            return cut(scene.detector.thresholds.get(path), 40) if path in PATHS else ""

    def _set_recovery(self, args: dict[str, Any]) -> Any:
        """``mode``, ``standbys`` or both: all that is given is set, or nothing."""
        if not args or set(args) - set(_RECOVERY):
            raise Refused(f"set_recovery takes {' and '.join(_RECOVERY)}")
        for field, value in args.items():
            if value not in _RECOVERY[field]:
                raise Refused(f"recovery.{field} = {cut(value, 40)!r}: must be one of {', '.join(_RECOVERY[field])}")
        self._open_job()._call("set_recovery", None, **args)
        return {"said": "from now on: " + ", ".join(f"{field} {value}" for field, value in args.items())}

    def _pause(self, args: dict[str, Any]) -> Any:
        self._open_job().pause()
        return {"said": "paused"}

    def _resume(self, args: dict[str, Any]) -> Any:
        self._open_job().resume()
        return {"said": "goes on"}

    def _play(self, args: dict[str, Any]) -> Any:
        source = self._feed.source
        if not isinstance(source, RecordedRun) or not self._may_play:
            raise Refused("only a recording that is yours can be wound")
        speed, at = args.get("speed"), args.get("at")
        source.play(None if speed is None else number("speed", speed), None if at is None else number("at", at))
        return {"speed": source.speed, "at": source.now(), "length": source.length}


class _Confirm(Exception):
    """The command is carried out once it is repeated with ``sure``."""


_VERBS: dict[str, tuple[Right, Callable[[Commander, dict[str, Any]], Any]]] = {
    "inspect": (Right.READ, Commander._inspect),
    "logs": (Right.READ, Commander._logs),
    "stack": (Right.READ, Commander._stack),
    "play": (Right.READ, Commander._play),
    "inject": (Right.STUDENT, Commander._inject),
    "abort": (Right.STUDENT, Commander._abort),
    "reveal": (Right.INSTRUCTOR, Commander._reveal),
    "schedule": (Right.INSTRUCTOR, Commander._schedule),
    "set_threshold": (Right.INSTRUCTOR, Commander._set_threshold),
    "set_recovery": (Right.INSTRUCTOR, Commander._set_recovery),
    "pause": (Right.INSTRUCTOR, Commander._pause),
    "resume": (Right.INSTRUCTOR, Commander._resume),
}


def number(name: str, value: Any) -> float:
    """An argument that is a number. Raises Refused."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(f"{name} = {cut(repr(value), 40)}: must be a number")
    return float(value)


def whole(name: str, value: Any, most: int = 2**53) -> int:
    """An argument that is a whole number from 0 to ``most``: neither fraction nor NaN, nor what no message to the host can carry."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most or value != int(value):
        raise Refused(f"{name} = {cut(repr(value), 40)}: must be a whole number from 0 to {most}")
    return int(value)


def parse(raw: Any) -> Command:
    """Raises Refused."""
    if not isinstance(raw, str) or len(raw.encode(errors="replace")) > MAX_COMMAND:
        raise Refused(f"a command is a text of at most {MAX_COMMAND} bytes")
    try:
        command = msgspec.json.decode(raw, type=Command)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refused(f"this is no command: {cut(error)}") from None
    if len(command.id) > 64:
        raise Refused("the id of a command has at most 64 characters")
    return command
