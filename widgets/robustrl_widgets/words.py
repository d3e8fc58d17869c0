"""The words and limits that all views share. Nothing of a run is trusted: texts are cut here and escaped where they are drawn."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from datetime import UTC, datetime
from functools import lru_cache

from robustrl.core import events as ev
from robustrl.core.roles import Phase, RoleKind, RoleState
from robustrl.core.run_state import RunState
from robustrl.replay.reading import LATEST

_UP = (RoleState.HEALTHY, RoleState.SUSPECT)
SHORT, LONG = 160, 2000
"""Characters of a cell, and of a text that somebody opened."""
GLOSSARY = {
    "supervisor": "decides who is ill and what is done about it",
    "task_runner": "keeps the order of the training steps",
    "rollout_manager": "spreads the prompts over the rollouts",
    "request_manager": "journal of all answers, finished or not",
    "agent_worker": "tools, environments and rewards",
    "trainer": "learns from the answers",
    "rollout": "generates answers with the newest weights it has",
    "state_keeper": "keeps the trainer's last committed state and serves the weights",
    "standby": "a warm process that takes over a role that failed",
    "node_agent": "watches the processes of its node from outside",
}
PHASES = {phase.value: phase.value.replace("_", " ") for phase in Phase} | {
    "waiting_batch": "waiting for a batch",
    "waiting_request": "waiting for requests",
    "waiting_tool": "waiting for a tool",
}
"""What each phase is called, in all views: the pages have this table too (assets.py)."""
BROKEN = "the log breaks off"
STUDENT = "student "
"""Before the name of who ordered a fault."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""With which a terminal is told to colour, to move, or what to call itself."""
_PLUMBING = re.compile(r"ray::|Traceback \(most recent call last\)")
"""Where the text of an error goes on with who passed it on."""
_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Failed|Gone|Died|Timeout)\b")


def cut(text: object, limit: int = SHORT) -> str:
    """At most ``limit`` characters, without what could disturb a page or a terminal. Blanks at the end are nothing that was left out."""
    whole = str(text).rstrip()
    plain = _ESCAPES.sub("", whole[: 4 * limit])
    if not plain.isprintable():
        plain = plain.replace("\r\n", "\n").replace("\t", "    ")
        plain = "".join(sign if sign.isprintable() or sign == "\n" or unicodedata.category(sign) == "Zs" else "\ufffd" for sign in plain)
    plain = plain.rstrip()
    return plain if len(plain) <= limit and len(whole) <= 4 * limit else plain[: limit - 1] + "\u2026"


def person(name: str) -> str:
    """A name as it is compared: whatever looks the same, or is written in another case or spacing, is one person."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    shown = "".join(sign for sign in folded if sign != "\ufffd" and unicodedata.category(sign)[0] not in "MC")
    return " ".join(shown.split())


def whose(by: str) -> str:
    """A short key: the same for two texts that name one person (`person`)."""
    return hashlib.sha256(person(by).encode()).hexdigest()[:16]


@lru_cache(maxsize=64)
def headline(text: str, limit: int = SHORT) -> str:
    """The cause that a text begins with, as one plain line: what follows it (logs, tracebacks) is for who wants to know more."""
    lines = [line for line in (line.strip(" |") for line in cut(text, 10 * LONG).splitlines()) if line]
    if not lines:
        return ""
    said, passed_on = lines[0], _PLUMBING.search(lines[0])
    if passed_on is not None:
        cause = next((line for line in lines if _ERROR.match(line)), "")
        said = ": ".join(part for part in (said[: passed_on.start()].strip(" :,("), cause) if part) or said
    return cut(said.rstrip(" :"), limit)


def in_phases(text: str) -> str:
    """A text in which phases have their names in the log, in words."""
    for name, words in PHASES.items():
        text = re.sub(rf"\b{name}\b", words, text) if name != words else text
    return text


def seconds(value: float) -> str:
    """As `span` in esm/common.js says it."""
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 99.5:
        return f"{value:.0f} s"
    whole = round(value)
    return f"{whole // 60} min {whole % 60:02d} s" if value < 5970 else f"{value / 3600:.1f} h"


def count(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u2009")


def last_live(state: RunState, role: str) -> bool:
    """Whether it is the only rollout that is up: without it nothing is generated."""
    view = state.roles.get(role)
    if view is None or view.kind is not RoleKind.ROLLOUT or view.state not in _UP:
        return False
    return not any(other.kind is RoleKind.ROLLOUT and other.state in _UP and other is not view for other in state.roles.values())


def broken_off(last: ev.Entry, state: RunState) -> str:
    """Of a log that ends with ``last``, and not with the job."""
    passed, role, event = last.t - state.t0, getattr(last.event, "role", None), last.event.__struct_config__.tag
    wall = state.wall + passed
    clock = f" ({datetime.fromtimestamp(wall, UTC):%Y-%m-%d %H:%M:%S} UTC)" if state.wall > 0 and wall <= LATEST else ""
    decided = f" That it should end as {cut(state.ending, 40)} had been decided." if state.ending else ""
    return (f"The log breaks off here, {seconds(passed)} after its first entry{clock}: its last entry is {event}"
            f"{f' of {cut(role, 40)}' if role else ''}.{decided} What became of the job is not known.")


def closed(lost: bool, over: bool, status: str) -> str:
    """Why nothing can be done to a job any more; empty while something can."""
    return "the job is gone" if lost else f"the job is {status}" if over else ""
