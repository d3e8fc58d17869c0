"""One recovery explained: what was seen, which rule fired, what was done, what went on meanwhile. Pure words from the log."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from robustrl.core.recoveries import FAILED_AGAIN

from .episodes import Episode
from .words import LONG, PHASES, count, cut, seconds

if TYPE_CHECKING:
    from .scene import Scene

SHOWN = 6


def seen(episode: Episode, proof: bool = True) -> str:
    """What was seen, as a sentence for people. The phase is that of the fault's card, by the ``proof`` of the injector, where there
    is one: the last sample may be of the phase before.
    """
    record, evidence = episode.record, episode.evidence
    role, limit = record.role, seconds(episode.threshold)
    name = str((episode.hit_in if proof else "") or evidence.get("phase") or "")
    phase = f" in phase {PHASES.get(name, cut(name, 40))}" if name else ""
    stopped = " Its process was stopped (state T)." if evidence.get("process") in ("T", "t") else ""
    match record.rule:
        case "exited":
            return f"The process of {role} ended{phase} ({cut(evidence.get('cause') or 'no cause known')})."
        case "exception":
            return _sentence(f"{role} raised {cut(evidence.get('error', 'an error'))}{phase}: {cut(evidence.get('text', ''))}")
        case "node_lost":
            return f"Node {cut(evidence.get('node', '?'))} of {role} is gone: {cut(evidence.get('reason', ''))}."
        case "heartbeat":
            return f"{role} made no token{phase} and left {evidence.get('strikes', 1)} heartbeat(s) unanswered.{stopped}"
        case "no_compute":
            return f"{role} used no compute for {limit}{phase}.{stopped}"
        case "no_marks":
            return f"{role} was busy for {limit}{phase}, and no micro-batch ended.{stopped}"
        case "silent":
            return f"The loop of {role} did not come round for {limit}{phase}.{stopped}"
        case "" if episode.asked:
            return _sentence(f"{role} is started again: {cut(record.cause)}")
        case "":
            return _sentence(cut(f"{role} failed: {record.cause}") if record.cause else f"{role} is started anew")
        case rule:
            return f"{role} tripped rule {cut(rule)} (limit {limit}){phase}.{stopped}"


def done(episode: Episode, scene: Scene) -> str:
    record = episode.record
    if record.decided is None:
        ended = "log" if scene.broken else "job" if scene.over or not episode.stage else ""
        return f"Nothing was decided before the {ended} ended." if ended else "Nothing was decided yet."
    who = "All roles were restarted" if record.mode == "full" else f"Only {' and '.join(record.roles)} was restarted"
    how = f", {record.standby} took over" if record.standby else ""
    tries = f", in {record.attempts} attempts" if record.attempts > 1 else ""
    restored = f" It went on from {cut(episode.restored)}." if episode.restored else ""
    because = f": {cut(episode.why_all)}" if episode.why_all else ""
    return f"{who}{how}{tries}{because}.{restored}"


def moved(episode: Episode | None) -> str:
    if episode is None or not episode.moved:
        return ""
    parts = [f"{len(kept)} at {target}" for target, kept in episode.moved.items()]
    total = sum(len(kept) for kept in episode.moved.values())
    tokens = sum(sum(kept) for kept in episode.moved.values())
    kept = f", {count(tokens)} tokens are kept" if tokens else ", from the start"
    return f"{total} unfinished answers of {episode.record.role} go on: {', '.join(parts)}{kept}."


def meanwhile(episode: Episode) -> str:
    """Empty of a full restart: the others were ended."""
    if episode.record.mode == "full":
        return ""
    others = f"the others made {count(episode.meanwhile_tokens)} tokens and {episode.meanwhile_steps} optimizer steps"
    return f"Meanwhile {others}."


def full_cost(episode: Episode, scene: Scene) -> str:
    """What a full restart took, measured in this run or the ghost's; else what it would have taken, which is an estimate and says so."""
    if episode.record.mode == "full":
        return ""
    here = [other.record.total for other in scene.episodes.all if other.record.mode == "full" and other.record.total is not None]
    if here:
        took = statistics.median(here)
        return f"A full restart took {seconds(took)} in this run, measured{_of(len(here))}."
    if (ghost := scene.race.ghost) and ghost.restarts:
        took, where = statistics.median(ghost.restarts), scene.race.where(scene.state)
        return f"A full restart took {seconds(took)} in the ghost's run, measured{_of(len(ghost.restarts))}, {where}."
    if scene.episodes.startup is None:
        return ""
    lost = f", and would have thrown away {count(episode.in_flight)} unfinished answers" if episode.in_flight else ""
    return (f"Estimate, not measured: a full restart would have taken about {seconds(scene.episodes.startup)}, as long as all roles needed "
            f"when this run began{lost}.")


def standing(episode: Episode, scene: Scene) -> str:
    """What is the case with a recovery that has not ended well, in words; empty: it has. One that is open has come so far, or had come when
    the job was lost or where the log breaks off.
    """
    if episode.healed:
        return ""
    if episode.record.outcome == FAILED_AGAIN:
        return "failed again before it had trained"
    if not episode.stage:
        return "not recovered when the job ended"
    if scene.lost:
        return f"the job was lost during its {episode.stage}"
    return f"the log breaks off during its {episode.stage}" if scene.broken else f"under way: {episode.stage}"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", "\u2026")) else f"{text}."


def _of(number: int) -> str:
    return f" (median of {number})" if number > 1 else ""


def picture(episode: Episode, scene: Scene) -> dict[str, Any]:
    state, record = scene.state, episode.record
    t0 = state.t0
    times = {"onset": episode.onset, "detected": episode.detected, "ready": record.ready, "back": record.back}
    return {
        "n": record.number, "role": record.role, "roles": list(record.roles), "life": record.incarnation, "rule": cut(record.rule),
        "mode": record.mode, "standby": cut(record.standby), "outcome": record.outcome, "step": record.step,
        "standing": standing(episode, scene), "faults": list(record.faults),
        "t": {name: round(t - t0, 3) if t is not None else None for name, t in times.items()},
        "took": {name: round(took, 3) if took is not None else None for name, took in episode.seconds().items()},
        "seen": cut(f"{seen(episode)} {episode.noticed}".strip(), LONG),
        "done": cut(done(episode, scene), LONG), "meanwhile": meanwhile(episode), "moved": moved(episode),
        "full": full_cost(episode, scene), "blind": cut(episode.blind_spot, LONG),
    }


def pictures(scene: Scene, now: float) -> dict[str, Any]:
    return {"recoveries": {str(episode.record.number): picture(episode, scene) for episode in scene.episodes.all[-SHOWN:]}}
