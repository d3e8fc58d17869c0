"""The words and limits that all views share. Nothing of a run is trusted: texts are cut here and escaped where they are drawn."""

from __future__ import annotations

import unicodedata

from robustrl.core.roles import RoleKind, RoleState
from robustrl.core.run_state import RunState

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


def cut(text: object, limit: int = SHORT) -> str:
    """At most ``limit`` characters, without control characters that could disturb a page or a terminal."""
    plain = str(text)[: limit + 1]
    if not plain.isprintable():
        plain = "".join(sign if sign.isprintable() or sign == "\n" or unicodedata.category(sign) == "Zs" else "\ufffd" for sign in plain)
    return plain if len(plain) <= limit else plain[: limit - 1] + "\u2026"


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
