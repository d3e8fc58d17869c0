"""The audit's rules on processes: whose they are and where they run, and that a life that follows another one was decided.

Pure, like all of core/audit.py, which has them in its table. A process may be two lives, one after the other: a standby, or a rollout that
gives its place, becomes the role whose restart names it. Leaves out where a later life runs: roles go to other nodes.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from robustrl.core import events as ev
from robustrl.core.audit_log import Found, Log, kind_of
from robustrl.core.recovery import FULL, ISOLATED
from robustrl.core.roles import RoleId, RoleKind, RoleState

_Life = tuple[str, int]
_NO_FAILURE = ("ordered by the user", "its process became ")
"""How reasons begin of restarts that no verdict calls for."""
_TRIES = 3
"""Times that all roles are started by one decision, should some die as they start."""


def processes(log: Log) -> Found:
    """Each life has a process of its own, on a node for its kind, seen by that node's agent; nodes are apart; an end names the pid."""
    pids: dict[_Life, int] = {}
    node_of: dict[_Life, str] = {}
    owner: dict[tuple[str, int, int], str] = {}
    kinds: dict[str, list[str]] = {}
    ids: dict[str, str] = {}
    host = 0
    given: set[tuple[str, str]] = set()
    told: set[tuple[_Life, _Life]] = set()
    for entry in log.entries:
        life = (entry.source, entry.incarnation)
        match entry.event:
            case ev.RunStarted(host_pid=pid):
                host = pid
            case ev.RunResumed(host_pid=pid):
                host = pid
                ids.clear()
            case ev.NodeStarted() as event:
                kinds[event.node] = event.kinds
                if (other := ids.setdefault(event.ray_node_id, event.node)) != event.node:
                    yield entry.seq, f"{event.node} and {other} are the same node of Ray, {event.ray_node_id}"
            case ev.RestartDecided() as event if event.standby:
                given.add((event.standby, event.role))
            case ev.RoleStarted() as event:
                pids[event.role, event.incarnation], node_of[event.role, event.incarnation] = event.pid, event.node
                what = f"{event.role} incarnation {event.incarnation}"
                before = owner.get(process := (event.node, event.pid, event.start_ticks))
                if before is not None and (before, event.role) not in given:
                    yield entry.seq, f"{what} has the process {event.pid} of {before}, which did not become it"
                owner[process] = event.role
                if event.pid == host and log.config.address is None:
                    yield entry.seq, f"{what} has the pid {event.pid} of the host"
                if _placed(log, event) and event.node in kinds and kind_of(event.role) not in kinds[event.node]:
                    yield entry.seq, f"{what} started on {event.node}, which is for {', '.join(kinds[event.node])}"
            case ev.ProcessExited() as event:
                if event.pid != (known := pids.get((event.role, event.incarnation), event.pid)):
                    yield entry.seq, f"{event.role} incarnation {event.incarnation} ended as pid {event.pid}, and was {known}"
            case ev.RoleSample() as event if (where := node_of.get(life)) and kind_of(entry.source) is RoleKind.NODE_AGENT:
                seen = event.role, event.incarnation
                if node_of.get(seen, where) != where and (life, seen) not in told:
                    told.add((life, seen))
                    yield entry.seq, f"{entry.source} on {where} saw {event.role}, which is on {node_of[seen]}"


def _placed(log: Log, event: ev.RoleStarted) -> bool:
    """Whether its node said at its own start that it is for this kind."""
    kind = kind_of(event.role)
    added = kind is RoleKind.ROLLOUT and RoleId.parse(event.role).index >= log.config.rollouts
    return event.incarnation == 1 and kind is not None and not added


def succession(log: Log) -> Found:
    """A second life follows a decision or a resumption, a decision on a failure follows a verdict; nobody says one of these twice."""
    begun: dict[_Life, int] = {}
    full: list[int] = []
    decided: set[_Life] = set()
    resumed = 0
    for entry in log.entries:
        match entry.event:
            case ev.RunResumed():
                resumed = entry.seq
            case ev.RestartDecided() as event:
                decided.add((event.role, event.incarnation))
                if event.mode == FULL:
                    full.append(entry.seq)
            case ev.RoleStarted(role=role, incarnation=incarnation):
                begun[role, incarnation] = entry.seq
                before = begun.get((role, incarnation - 1), 0)
                oldest = begun.get((role, max(1, incarnation - _TRIES)), 0)
                if before > resumed and (role, incarnation - 1) not in decided and not any(seq > oldest for seq in full):
                    what = f"{role} incarnation {incarnation} started"
                    yield entry.seq, f"{what}, and nobody decided to restart incarnation {incarnation - 1}"
    yield from _unfounded(log)
    yield from _doubled(log)


def _unfounded(log: Log) -> Found:
    """Restarts by the supervisor of what failed, without a verdict. Of a role that is stopped, or about which the user has given an order,
    the detector says nothing any more; in earlier versions it said nothing at all.
    """
    if not any("thresholds" in event.config for _, event in log.all(ev.RunStarted)):
        return
    failed = {(event.role, event.incarnation) for _, event in log.all(ev.Verdict) if event.kind == "failed"}
    failed |= {(event.role, event.incarnation) for _, event in log.all(ev.RoleOrdered)}
    failed |= {(event.role, event.incarnation) for _, event in log.all(ev.RoleStateChanged) if event.new == RoleState.STOPPED}
    for entry in log.entries:
        event = entry.event
        if not isinstance(event, ev.RestartDecided) or event.reason.startswith(_NO_FAILURE):
            continue
        if kind_of(entry.source) is RoleKind.SUPERVISOR and event.mode == ISOLATED and (event.role, event.incarnation) not in failed:
            yield entry.seq, f"a restart of {event.role} incarnation {event.incarnation} was decided, and no verdict calls it failed"


def _doubled(log: Log) -> Found:
    """Two may tell of the same, and a user may order twice; what one emitter says of one moment, it says once."""
    orders = Counter((event.role, event.incarnation) for _, event in log.all(ev.RoleOrdered))
    ends: set[tuple[_Life, _Life]] = set()
    said: Counter[tuple[_Life, bytes]] = Counter()
    for entry in log.entries:
        source, event = (entry.source, entry.incarnation), entry.event
        match event:
            case ev.ProcessExited(role=role, incarnation=incarnation):
                if (source, (role, incarnation)) in ends:
                    yield entry.seq, f"{entry.source} told twice that {role} incarnation {incarnation} ended"
                ends.add((source, (role, incarnation)))
            case ev.Verdict(role=role, incarnation=incarnation) | ev.RestartDecided(role=role, incarnation=incarnation):
                what = source, msgspec.json.encode(event)
                said[what] += 1
                if said[what] > 1 + (0 if isinstance(event, ev.Verdict) else orders[role, incarnation]):
                    yield entry.seq, f"{entry.source} said the same of {role} incarnation {incarnation} twice"
