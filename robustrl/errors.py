"""The errors that a user of RobustRL can meet, each naming what was wrong and what is allowed, and what they are worded with."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def plain(text: str) -> str:
    """Without the escape sequences with which Ray and others colour what they print."""
    return _COLOURS.sub("", text)


def counted(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


_LEAST_PREFIX = 3


def no_such(name: str, names: Iterable[str], prefix: str = "", below: Iterable[str] = ()) -> str:
    """What to say of a setting that is none of ``names``: which is near, if any is, and all that there are. ``below``: where one of exactly
    this name is."""
    there = list(names)
    near = list(below) or [prefix + known for known in _near(name, there)]
    hint = f"did you mean {' or '.join(near)}? There" if near else "there"
    return f"there is no such setting; {hint} are: {', '.join(there)}"


def _near(name: str, there: list[str]) -> list[str]:
    if len(name) >= _LEAST_PREFIX and (longer := [known for known in there if known.startswith(name)]):
        return longer
    if close := difflib.get_close_matches(name, there, n=1, cutoff=0.7):
        return close
    return sorted((known for known in there if len(known) >= _LEAST_PREFIX and name.startswith(known)), key=len)[-1:]


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes no number of more than some thousand digits
        return f"<{type(value).__name__}>"


class RobustRLError(Exception):
    """Base of every error raised by this package."""


class ConfigError(RobustRLError, ValueError):
    """A setting that cannot be accepted: names the field, the value given, and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} = {_shown(value)}: {allowed}")
        self.field, self.value, self.allowed = field, value, allowed

    def __reduce__(self):
        return type(self), (self.field, self.value, self.allowed)


class Contradiction(ConfigError):
    """Settings, each of which can be accepted, that do not go together: the text names the others."""


class MissingExtra(RobustRLError, ImportError):
    """A package from an optional extra is needed and not installed: names the extra and the reason of the failed import."""


class JobFailed(RobustRLError):
    """The job ended before it was done; the text says which role failed, in which phase, and shows its last log lines."""


class PeerDied(RobustRLError):
    """The role that was called died during the call; what becomes of it is the supervisor's to decide."""


class WaitTimeout(RobustRLError, TimeoutError):
    """A deadline passed; the text names what was waited for and how far it had come."""


class HostGone(RobustRLError, ConnectionError):
    """The connection to a job's host has ended or could not be made; the text says why."""


class RewardError(RobustRLError):
    """A reward function raised, returned a wrong length or a value that is not finite: names the function and the sample."""


class WeightsError(RobustRLError):
    """A weight pull or commit failed; the text names peer, version, chunk and transport."""


class SnapshotError(RobustRLError):
    """No copy of the trainer's state can be restored; the text names each and what is wrong with it."""


class TrainingError(RobustRLError):
    """An optimizer step met a loss or gradient that is not finite; the text names the step and which of them."""
