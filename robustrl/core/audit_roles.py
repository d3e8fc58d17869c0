"""The audit's rules on roles: their lives, their states, and what became of those that failed."""

from __future__ import annotations

from robustrl.core import events as ev
from robustrl.core.audit_log import Found, Log, kind_of
from robustrl.core.recoveries import FAILED_AGAIN, recoveries_of
from robustrl.core.roles import RoleKind, RoleState, check_transition, first_state


def roles(log: Log) -> Found:
    """Roles start on nodes that are there, lives are numbered upward, each change of state is legal and follows its cause; all end. Only
    what was started says anything.
    """
    known = {(ev.HOST, 1)} | {(event.role, event.incarnation) for _, event in log.all(ev.RoleStarted)}
    nodes: set[str] = set()
    state: dict[tuple[str, int], RoleState] = {}
    life: dict[str, int] = {}
    ready: set[tuple[str, int]] = set()
    loaded: set[tuple[str, int]] = set()
    for entry in log.entries:
        if (entry.source, entry.incarnation) not in known:
            known.add((entry.source, entry.incarnation))
            yield entry.seq, f"{entry.source} incarnation {entry.incarnation} says something, and never started"
        match entry.event:
            case ev.NodeStarted(node=node):
                if node in nodes:
                    yield entry.seq, f"{node} started twice"
                nodes.add(node)
            case ev.NodeLost(node=node):
                nodes.discard(node)
            case ev.RunResumed():
                nodes.clear()
                state.clear()
            case ev.RoleStarted(role=role, incarnation=incarnation):
                if kind_of(role) is None:
                    yield entry.seq, f"{role!r} started, which is no name of a role"
                if entry.event.node not in nodes:
                    yield entry.seq, f"{role} started on {entry.event.node}, which is not there"
                if incarnation != life.get(role, 0) + 1:
                    yield entry.seq, f"{role} incarnation {incarnation} started after incarnation {life.get(role, 0)}"
                life[role] = incarnation
                state[role, incarnation] = first_state(incarnation)
            case ev.RoleReady(role=role, incarnation=incarnation):
                if (role, incarnation) not in state or (role, incarnation) in ready:
                    yield entry.seq, f"{role} incarnation {incarnation} became ready twice, or never started"
                ready.add((role, incarnation))
            case ev.PullCommitted(target=role, incarnation=incarnation):
                loaded.add((role, incarnation))
            case ev.RoleStateChanged(role=role, incarnation=incarnation, old=old, new=new):
                key = role, incarnation
                if state.get(key) != old:
                    yield entry.seq, f"{role} incarnation {incarnation}: {old} -> {new}, but it was {state.get(key, 'never started')}"
                try:
                    check_transition(role, RoleState(old), RoleState(new))
                    if new in (RoleState.STALE, RoleState.HEALTHY) and key not in ready:
                        yield entry.seq, f"{role} incarnation {incarnation} is {new} before it was ready"
                    if new == RoleState.HEALTHY and kind_of(role) is RoleKind.ROLLOUT and key not in loaded:
                        yield entry.seq, f"{role} incarnation {incarnation} is healthy without a committed version"
                    state[key] = RoleState(new)
                except ValueError as error:
                    yield entry.seq, str(error)
    for (role, incarnation), last in state.items():
        if log.status and life.get(role) == incarnation and last not in (RoleState.FAILED, RoleState.STOPPED):
            yield log.end, f"the run ended and {role} incarnation {incarnation} is left {last}"


_SETTLED = 10.0
"""Seconds in which a failure is decided about, and the end of a replaced life is in the log."""


def recoveries(log: Log) -> Found:
    """Every recovery ends: whatever failed is decided about, restarted and back, unless the run ends first or only looks on."""
    begun: dict[tuple[str, int], tuple[int, float]] = {}
    gone: set[tuple[str, int]] = set()
    nodes: dict[tuple[str, int], str] = {}
    for entry in log.entries:
        match entry.event:
            case ev.RoleStarted(role=role, incarnation=incarnation, node=node):
                begun[role, incarnation], nodes[role, incarnation] = (entry.seq, entry.t), node
            case ev.ProcessExited(role=role, incarnation=incarnation):
                gone.add((role, incarnation))
            case ev.NodeLost(node=node):
                gone.update(life for life, where in nodes.items() if where == node)
            case ev.RoleStateChanged(role=role, incarnation=incarnation, new=RoleState.STOPPED):
                gone.add((role, incarnation))  # its process may go on as another role
            case ev.RunResumed():
                gone.update(nodes)
            case ev.RestartDecided(role=role, incarnation=incarnation) if (role, incarnation) not in begun:
                yield entry.seq, f"a restart of {role} incarnation {incarnation} was decided, which never started"
    if not log.status or not all(kind_of(role) for role, _ in begun):  # the latter is told by the rule roles
        return
    ended = log.entries[-1].t
    for (role, incarnation), (seq, t) in begun.items():
        if incarnation > 1 and (role, incarnation - 1) not in gone and ended - t > _SETTLED:
            yield seq, f"{role} incarnation {incarnation} started, and the log knows of no end of incarnation {incarnation - 1}"
    observed = any(event.mode == "observe" for _, event in log.all(ev.RecoverySettings))
    limits = log.config.deadlines
    for found in recoveries_of(log.entries):
        open_for = ended - found.detected
        what = f"recovery {found.number} ({found.role} incarnation {found.incarnation})"
        if found.outcome == FAILED_AGAIN:
            continue  # the next one shows how it went on
        if found.back is None and not found.mode and open_for > _SETTLED and not observed:
            yield log.end, f"{what}: nothing was decided in the {open_for:.0f} s from its failure to the end of the run"
        elif found.back is None and found.mode and open_for > limits.role_start + limits.call:
            yield log.end, f"{what}: not back {open_for:.0f} s after its failure, when the run ended"
