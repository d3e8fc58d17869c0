"""The picture of the RoleBoard: the job's figures, nodes with their roles, pulls, and what is being done about whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from robustrl.core.roles import RoleKind, RoleState
from robustrl.core.run_state import RoleView, RunState

from .words import GLOSSARY, LONG, STUDENT, count, cut, headline, last_live, whose

if TYPE_CHECKING:
    from .scene import Scene

_RECENT = 10.0
"""Seconds for which a recovery that is over stays on its role's card."""
_STORY = 8


def head(scene: Scene) -> dict[str, Any]:
    """The figures that every view may show."""
    state = scene.state
    balance = state.ledger.balance()
    dropped = sum(balance.dropped.values())
    rewards = [row["reward"] for row in state.metrics[-1:] if "reward" in row]
    why = scene.lost or state.reason
    reason, details = headline(why), cut(why, LONG)
    return {
        "name": cut(state.name), "run": cut(state.run), "status": scene.status, "reason": reason,
        "details": details if details != reason else "", "lost": bool(scene.lost), "closed": scene.closed,
        "recorded": scene.length > 0, "step": state.step, "steps": state.steps,
        "accuracy": round(state.evaluations[-1].accuracy, 4) if state.evaluations else None,
        "accuracy0": round(state.evaluations[0].accuracy, 4) if state.evaluations else None,
        "reward": round(rewards[0], 3) if rewards else None, "newest": state.newest, "wall": state.wall, "mode": state.recovery_mode,
        "ettr": scene.curves.ettr, "ettr_early": scene.curves.early,
        "ledger": {"started": balance.started, "consumed": balance.consumed, "dropped": dropped, "in_flight": balance.in_flight,
                   "balanced": balance.started == balance.consumed + dropped + balance.in_flight},
        "failures": sum(not episode.asked for episode in scene.episodes.all), **_standing(scene),
        "warnings": [cut(text, LONG) for _, text in state.warnings[-3:]] + list(scene.doubts)[-2:],
    }


def _standing(scene: Scene) -> dict[str, Any]:
    """Roles that are not well, each once: those that are ill or being restarted, those that have not come so far yet, and those that were
    ended on purpose, with the word for it.
    """
    roles = scene.state.roles
    ill = sorted(role for role, view in roles.items() if _is_ill(scene, view))
    starting = sorted(role for role, view in roles.items() if role not in ill and (
        view.state is RoleState.STARTING or (view.state is RoleState.STALE and view.incarnation == 1)))
    away = {role: _word(scene, view) for role, view in sorted(roles.items())
            if role not in ill and view.state is RoleState.STOPPED and not (scene.over or scene.state.ending)}
    return {"ill": ill, "starting": starting, "away": away}


def _is_ill(scene: Scene, view: RoleView) -> bool:
    return view.state in (RoleState.FAILED, RoleState.RESTARTING, RoleState.SUSPECT) or scene.episodes.open_of(view.role) is not None


def picture(scene: Scene, now: float) -> dict[str, Any]:
    state = scene.state
    rates = state.tokens_per_second()
    return {
        "head": head(scene),
        "nodes": {node: {"ip": cut(view.ip, 48), "kinds": view.kinds, "lost": cut(view.lost) if view.lost is not None else None}
                  for node, view in state.nodes.items()},
        "roles": {role: _role(scene, view, rates.get(role, 0.0), now) for role, view in state.roles.items()},
        "pulls": scene.shown_pulls(now),
        "busy": {whose(fault.by): fault.fault for fault in state.faults.faults.values()
                 if fault.by.startswith(STUDENT) and not (fault.settled or fault.masked)},
        "story": {str(index): list(line) for index, line in enumerate(list(scene.story)[-_STORY:])},
    }


def _role(scene: Scene, view: RoleView, rate: float, now: float) -> dict[str, Any]:
    state, t0 = scene.state, scene.state.t0
    version = state.committed.get(view.role, view.version)
    weights = view.kind in (RoleKind.ROLLOUT, RoleKind.STATE_KEEPER, RoleKind.TRAINER)
    drawn: dict[str, Any] = {
        "kind": view.kind.value, "what": GLOSSARY.get(view.kind.value, ""), "node": view.node, "state": view.state.value,
        "word": _word(scene, view),
        "phase": view.phase, "life": view.incarnation, "pid": view.pid, "version": version if weights and version >= 0 else None,
        "lag": max(0, state.newest - version) if view.kind is RoleKind.ROLLOUT and version >= 0 and state.newest >= 0 else None,
        "since": round(view.state_since - t0, 1), "phase_at": round(view.phase_since - t0, 1),
        "progress_at": round(view.progress_since - t0, 1), "doing": _doing(scene, view, rate), "done": _done(scene, view),
        "last_live": last_live(state, view.role),
    }
    if view.exited or view.state is RoleState.STOPPED or scene.lost:
        drawn["dead"] = True
    if (stages := _stages(scene, view, now)) is not None:
        drawn["stages"] = stages
    return drawn


def _word(scene: Scene, view: RoleView) -> str:
    """What is the case with it: its state, but of what a full restart ends on purpose none that speaks of a failure, or of health."""
    episode = scene.episodes.open_of(view.role)
    if view.state is RoleState.STOPPED and scene.drained.get(view.role) == view.incarnation:
        return "drained"
    if episode is None:
        return view.state.value
    if episode.ended_for_it(view.role, view.incarnation):
        return "ended for the restart" if view.exited or view.state is RoleState.FAILED else "is being ended"
    up = view.state is RoleState.HEALTHY and episode.record.mode == "full" and not episode.began_with(view.role, view.incarnation)
    return "waits for the others" if up and (view.role != episode.record.role or episode.stage == "restart") else view.state.value


def _doing(scene: Scene, view: RoleView, rate: float) -> str:
    if view.state in (RoleState.FAILED, RoleState.RESTARTING, RoleState.STARTING, RoleState.STOPPED):
        return ""
    if view.kind is RoleKind.TRAINER:
        left = f", {view.pending} micro-batches left" if view.phase == "train" else ""
        return f"step {view.step}{left}"
    if view.kind is RoleKind.ROLLOUT:
        return f"{count(rate)} tok/s \u00b7 {view.pending} open"
    if view.kind is RoleKind.NODE_AGENT:
        return ""
    return f"{count(view.progress)} requests" if view.progress else ""


def _done(scene: Scene, view: RoleView) -> float | None:
    """Share of what it is at: a trainer's micro-batches of this step, a rollout's pull."""
    if pull := scene.state.pulls.get(view.role):
        return round(pull.done / pull.bytes, 2) if pull.bytes else 0.0
    if view.kind is RoleKind.TRAINER and view.phase == "train":
        total = scene.curves.micro_batches(view.role)
        return round(max(0.0, 1 - view.pending / total), 2) if total else None
    return None


def _stages(scene: Scene, view: RoleView, now: float) -> dict[str, Any] | None:
    """The recovery on a role's card: which stage is on, since when, and how long the earlier ones took. ``cut_off``: the job or its log has
    ended in that stage. ``ended_for``: the role whose failure it was; this one was ended on purpose, which is no detection, and the times
    are its own, as in its lane. ``asked``: no failure led to it.
    """
    state: RunState = scene.state
    cut_off = {"cut_off": True} if scene.over else {}
    if suspicion := scene.episodes.suspected.get(view.role):
        return {"on": "detect", "since": round(suspicion.onset - state.t0, 2), "took": {}, "rule": cut(suspicion.rule), **cut_off}
    episode = scene.episodes.open_of(view.role)
    if episode is None:
        last = scene.episodes.last_of(view.role)
        if last is None or not last.healed or now - ((last.record.back or 0.0) - state.t0) > _RECENT:
            return None
        episode = last
    drawn: dict[str, Any] = {
        "on": episode.stage_of(view.role), "since": round(episode.since_of(view.role) - state.t0, 2), "rule": cut(episode.record.rule),
        "took": {name: round(took, 2) for name, took in episode.seconds_of(view.role).items() if took is not None},
        "total": round(episode.record.total, 2) if episode.record.total is not None else None, **(cut_off if episode.stage else {})}
    if episode.was_ended(view.role):
        drawn |= {"asked": True} if episode.record.role == view.role else {"ended_for": episode.record.role, "rule": ""}
    return drawn
