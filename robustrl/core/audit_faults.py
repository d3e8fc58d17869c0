"""The audit's rules on faults and verdicts: a fault was really done, and nobody was condemned without evidence.

Pure, like all of core/audit.py, which has them in its table. A fault that did not fire, or whose effect is nowhere in the log, is a
violation: what was measured with it would be worth nothing. So is a verdict whose cause the log does not hold. Leaves out: whether a
verdict is right.
"""

from __future__ import annotations

import math

from robustrl.core import events as ev
from robustrl.core.audit_log import Found, Log, kind_of
from robustrl.core.audit_proofs import BENIGN, PROOFS, is_number, is_text, lacks, undone
from robustrl.core.fault_book import FATAL
from robustrl.core.roles import PHASES

_OUTCOMES = ("over", "aborted", "refused", "vanished", "not_fired")
_VERDICTS = ("suspect", "failed", "cleared", "waiting_on_peer", "reported")
_CUT_OFF = 5.0
"""Seconds before a run's end in which a fault's effect may not have reached the log any more."""
_EPSILON = 1e-6


_ENDLESS = ("first_compile", "full_disk")
"""Kinds that are over only once their target comes to something again."""
_AHEAD = 2
"""Optimizer steps by which a target may be ahead of the log."""
_EVIDENCE = {
    "non_finite": "text", "exception": "error", "exited": "cause", "node_lost": "node", "no_compute": "active_age",
    "no_marks": "progress_age", "silent": "loop_age", "heartbeat": "heartbeat", "unproductive": "answers", "agent_silent": "node",
    "stall": "step", "no_tokens": "progress_age", "wedged": "loop_age", "loop_lag": "lag", "overdue": "phase_age", "slow_pull": "version",
    "straggler": "rate", "peer_gone": "seen_by", "slow_checkpoint": "last_on_disk",
}  # fmt: skip
"""Rule -> what its evidence must show."""
_EVIDENCE_OF = {"cleared": "was", "waiting_on_peer": "peer"}
"""The same by kind of verdict."""
_IN_WORDS = ("text", "error", "cause", "node", "seen_by", "was", "peer")
"""Evidence that is a text; all other is a number."""
OF_NODE = ("node_loss", "partition", "delay")
"""Kinds that hit every role of a node; the phase is the target's."""


def faults(log: Log) -> Found:
    """Each fault was planned once, done with a proof to a life that was there, in the phase it was meant for, and showed; or ended."""
    planned: dict[int, ev.FaultPlanned] = {}
    for seq, order in log.all(ev.FaultPlanned):
        if order.fault != len(planned) + 1:
            yield seq, f"fault {order.fault} was planned after fault {len(planned)}"
        planned[order.fault] = order
        if order.kind not in PROOFS:
            yield seq, f"fault {order.fault} is of the kind {order.kind!r}: must be one of {', '.join(PROOFS)}"
        elif order.benign != (order.kind in BENIGN):
            yield seq, f"fault {order.fault} ({order.kind}) was planned as {'benign' if order.benign else 'a fault'}"
    ended = {event.fault for _, event in log.all(ev.FaultEnded)}
    hit = {event.fault for _, event in log.all(ev.FaultInjected)}
    so_far: set[int] = set()
    for entry in log.entries:
        if isinstance(event := entry.event, ev.FaultPlanned):
            so_far.add(event.fault)
        elif isinstance(event, ev.FaultInjected | ev.FaultEnded | ev.FaultRevealed) and event.fault not in so_far:
            yield entry.seq, f"fault {event.fault} was {'not planned by then' if event.fault in planned else 'never planned'}"
    for seq, end in log.all(ev.FaultEnded):
        if end.outcome not in _OUTCOMES:
            yield seq, f"outcome {end.outcome!r} of fault {end.fault}: must be one of {', '.join(_OUTCOMES)}"
        elif end.outcome == "not_fired" or (end.outcome == "vanished" and log.status == "done"):
            yield seq, f"fault {end.fault} did not fire: {end.reason}"
        elif end.outcome == "over" and end.fault not in hit:
            yield seq, f"fault {end.fault} is called over and was never done"
    if log.status:
        for seq, order in log.all(ev.FaultPlanned):
            if order.fault not in hit | ended:
                yield seq, f"fault {order.fault} ({order.kind}) was ordered, and the log does not say what became of it"
    yield from _hits(log, planned)
    yield from undone(log, planned)


def _hits(log: Log, planned: dict[int, ev.FaultPlanned]) -> Found:
    lives = {(event.role, event.incarnation): event for _, event in log.all(ev.RoleStarted)}
    commits = [(seq, event.step) for seq, event in log.all(ev.OptimizerStepCommitted)]
    ended = {event.fault for _, event in log.all(ev.FaultEnded)}
    times = {entry.seq: entry.t for entry in log.entries}
    gone: dict[tuple[str, int], float] = {}
    lost: dict[str, float] = {}
    for seq, exited in log.all(ev.ProcessExited):
        gone.setdefault((exited.role, exited.incarnation), times[seq])
    for seq, event in log.all(ev.NodeLost):
        lost.setdefault(event.node, times[seq])
    unwatched = {life.node for (role, number), life in lives.items() if (role, number) in gone and role.startswith("node_agent")}
    for seq, hit in log.all(ev.FaultInjected):
        if (order := planned.get(hit.fault)) is None:
            continue
        what = f"fault {hit.fault} ({order.kind}) on {hit.role} incarnation {hit.incarnation}"
        if lacking := lacks(order, hit.proof):
            yield seq, f"{what} has no proof ({lacking}): {hit.proof}"
        life = lives.get((hit.role, hit.incarnation))
        if life is None or life.pid != hit.pid:
            yield seq, f"{what} hit pid {hit.pid}, which is not that life's"
        elif life.node != hit.node:
            yield seq, f"{what} struck on {hit.node}, and that life is on {life.node}"
        if not 0 <= hit.step <= max((step for at, step in commits if at < seq), default=0) + _AHEAD:
            yield seq, f"{what} struck in step {hit.step}, which had not come"
        if (phase := order.options.get("phase")) and hit.phase != phase and order.kind not in OF_NODE:
            yield seq, f"{what} was meant for the phase {phase} and struck in {hit.phase}"
        if (kind := kind_of(hit.role)) and hit.phase not in PHASES[kind]:
            yield seq, f"{what} struck in {hit.phase!r}; its phases are {', '.join(sorted(PHASES[kind]))}"
        over = min(gone.get((hit.role, hit.incarnation), math.inf), lost.get(hit.node, math.inf))
        shown = over < math.inf
        cut_off = bool(log.status) and times[log.entries[-1].seq] - times[seq] <= _CUT_OFF
        if order.kind in FATAL and log.status and not shown and not cut_off:
            yield seq, f"{what}: the log knows of no end of that process"
        late = times[log.entries[-1].seq] > times[seq] + (seconds := _lasts(order)) + _CUT_OFF
        still_there = over > times[seq] + seconds + _CUT_OFF
        if seconds and late and log.status and still_there and hit.fault not in ended and hit.node not in unwatched:
            yield seq, f"{what} was to last {seconds:g} s, and the log knows of no end of it"


def _lasts(order: ev.FaultPlanned) -> float:
    """Seconds after which it ends by itself; 0: it does not."""
    seconds = order.options.get("seconds", 0.0)
    return float(seconds) if isinstance(seconds, int | float) and order.kind not in _ENDLESS else 0.0


def verdicts(log: Log) -> Found:
    """Each verdict is about a life that was started, keeps the order onset, due, seen, and rests on something that the log holds."""
    started: set[tuple[str, int]] = set()
    causes: dict[str, set[tuple[str, int] | str]] = {}
    """Rule -> the lives (or nodes) of which its cause was seen."""
    node_of: dict[tuple[str, int], str] = {}
    said: set[tuple[str, int, str, str]] = set()
    for entry in log.entries:
        match entry.event:
            case ev.RoleStarted(role=role, incarnation=incarnation, node=node):
                started.add((role, incarnation))
                node_of[role, incarnation] = node
            case ev.ProcessExited(role=role, incarnation=incarnation):
                causes.setdefault("exited", set()).add((role, incarnation))
            case ev.ErrorRaised(role=role, incarnation=incarnation):
                causes.setdefault("exception", set()).add((role, incarnation))
            case ev.HeartbeatSent(role=role, incarnation=incarnation):
                causes.setdefault("heartbeat", set()).add((role, incarnation))
            case ev.NodeLost(node=node):
                causes.setdefault("node_lost", set()).add(node)
            case ev.Verdict() as verdict:
                life = verdict.role, verdict.incarnation
                what = f"{verdict.kind} by rule {verdict.rule}, about {verdict.role} incarnation {verdict.incarnation}"
                if verdict.kind not in _VERDICTS:
                    yield entry.seq, f"{what}: must be one of {', '.join(_VERDICTS)}"
                if life not in started:
                    yield entry.seq, f"{what}, which was never started"
                if not verdict.onset - _EPSILON <= verdict.due <= verdict.seen + _EPSILON <= entry.t + 2 * _EPSILON:
                    yield entry.seq, f"{what}: onset {verdict.onset:.3f}, due {verdict.due:.3f}, seen {verdict.seen:.3f} are out of order"
                shown = _EVIDENCE_OF.get(verdict.kind) or _EVIDENCE.get(verdict.rule, "")
                if not verdict.evidence or (shown and not _shows(shown, verdict.evidence.get(shown))):
                    yield entry.seq, f"{what}: without evidence" + (f" ({shown})" if verdict.evidence else "")
                elif verdict.kind == "cleared" and (*life, verdict.rule, verdict.evidence["was"]) not in said:
                    yield entry.seq, f"{what}: that it was {verdict.evidence['was']} by that rule was not said before"
                said.add((*life, verdict.rule, verdict.kind))
                if verdict.kind == "failed":
                    subject = node_of.get(life, "") if verdict.rule == "node_lost" else life
                    if verdict.rule in _CAUSED and subject not in causes.get(verdict.rule, ()):
                        yield entry.seq, f"{what}: the log does not hold what it rests on"


def _shows(name: str, value: object) -> bool:
    return is_text(value) if name in _IN_WORDS else is_number(value)


_CAUSED = ("exited", "exception", "heartbeat", "node_lost")
