"""The audit's rules on what is counted, copied and set: counts only rise, copies are of what was committed, settings change as they say.

Pure, like all of core/audit.py, which has them in its table. Where two processes may tell of the same thing in either order, each rule
compares only what one life of one emitter said. Leaves out: a count that was altered to a value between its neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from robustrl.core import audit_told
from robustrl.core import events as ev
from robustrl.core.audit_log import Found, Log, kind_of
from robustrl.core.recovery import MODES, STANDBYS
from robustrl.core.roles import PHASES, RoleKind
from robustrl.core.thresholds import Thresholds
from robustrl.errors import ConfigError

_WITH_VERSION = (RoleKind.TRAINER, RoleKind.ROLLOUT, RoleKind.STATE_KEEPER)
_COUNTING = (RoleKind.TRAINER, RoleKind.ROLLOUT)
"""Kinds whose progress counts what they have done in this life."""
_Life = tuple[str, int]


def _lives(log: Log) -> set[_Life]:
    return {(event.role, event.incarnation) for _, event in log.all(ev.RoleStarted)}


def samples(log: Log) -> Found:
    """A sample is of a life that was started, in a phase of its kind; within it CPU time, what it has done and its version never fall."""
    lives = _lives(log)
    # then a trainer and its keeper may go back; a node may take a step along of which the log had not heard, so that nothing is rolled back
    restored = any(log.all(kind) for kind in (ev.RolledBack, ev.SnapshotRefused, ev.NodeLost))
    before: dict[tuple[_Life, _Life], ev.RoleSample] = {}
    for entry in log.entries:
        if not isinstance(now := entry.event, ev.RoleSample):
            continue
        kind, life = kind_of(now.role), (now.role, now.incarnation)
        what = f"{now.role} incarnation {now.incarnation}"
        if life not in lives:
            yield entry.seq, f"{what} was seen, and never started"
        if kind is None:
            continue
        if now.phase not in PHASES[kind]:
            yield entry.seq, f"{what} was seen in the phase {now.phase}, which a {kind} does not have"
        if now.version >= 0 and kind not in _WITH_VERSION:
            yield entry.seq, f"{what} was seen with version {now.version}, and a {kind} has none"
        if last := before.get(((entry.source, entry.incarnation), life)):
            if now.cpu < last.cpu:
                yield entry.seq, f"{what} had used {last.cpu:.3f} s of CPU time, and then {now.cpu:.3f} s"
            if kind in _COUNTING and now.progress < last.progress:
                yield entry.seq, f"{what} had done {last.progress}, and then {now.progress}"
            if now.version < last.version and (kind is RoleKind.ROLLOUT or not restored):
                yield entry.seq, f"{what} had version {last.version}, and then {now.version}"
        before[(entry.source, entry.incarnation), life] = now


def journalled(log: Log) -> Found:
    """What the journal has received of a life of a rollout only rises, and is no more than that life has generated, or was given to it."""
    lives = _lives(log)
    before: dict[tuple[_Life, _Life], int] = {}
    made = {(event.role, event.incarnation): event.progress for _, event in log.all(ev.ProcessExited) if event.progress >= 0}
    again = any(event.role == "request_manager" and event.incarnation > 1 for _, event in log.all(ev.RoleStarted))
    for entry in log.entries:
        if not isinstance(now := entry.event, ev.TokensJournalled):
            continue
        life = now.role, now.incarnation
        what = f"tokens of {now.role} incarnation {now.incarnation}"
        if life not in lives or kind_of(now.role) is not RoleKind.ROLLOUT:
            yield entry.seq, f"{what} were journalled, which is no rollout's life that was started"
        if now.tokens <= (last := before.get(((entry.source, entry.incarnation), life), 0)):
            yield entry.seq, f"{now.tokens} {what} were journalled, after {last}"
        # a flush that is sent again to a later life of the journal may count twice; the last engine step may be on no status page
        if not again and now.tokens > (most := made.get(life, now.tokens)) + log.config.rollout_concurrency:
            yield entry.seq, f"{now.tokens} {what} were journalled, and it generated {most}"
        before[(entry.source, entry.incarnation), life] = now.tokens
    if not again:
        yield from _more_than_given(log)
        yield from audit_told.journalled(log)


def _more_than_given(log: Log) -> Found:
    """A rollout has no more tokens journalled, over all its lives, than those trajectories have that were ever sent to it.

    Not asked where a flush may count twice: one whose answer was late is sent again, and so is all of what a tool has answered.
    """
    stood = {role for role, ages in _longest(log).items() if ages >= log.config.deadlines.call / 2}
    if "request_manager" in stood or any(turns > 0 for _, event in log.all(ev.TrajectoriesFinished) for turns in event.tool_turns):
        return
    tokens = {i: n for _, event in log.all(ev.TrajectoriesFinished) for i, n in zip(event.ids, event.tokens, strict=False)}
    given: dict[str, set[int]] = defaultdict(set)
    for _, started in log.all(ev.TrajectoriesStarted):
        given[started.rollout].update(started.ids)
    for _, moved in log.all(ev.TrajectoriesMoved):
        given[moved.target].update(moved.ids)
    newest = {(event.role, event.incarnation): (seq, event.tokens) for seq, event in log.all(ev.TokensJournalled)}
    for role in sorted({role for role, _ in newest} - stood):
        of_role = [told for (name, _), told in newest.items() if name == role]
        had, most = sum(count for _, count in of_role), sum(tokens.get(i, log.config.max_model_len) for i in given[role])
        if had > most:
            yield max(seq for seq, _ in of_role), f"{had} tokens of {role} were journalled, and what was sent to it has {most}"


def _longest(log: Log) -> dict[str, float]:
    """Role -> the longest time in which its loop did not come round, as its samples show."""
    longest: dict[str, float] = defaultdict(float)
    for _, sample in log.all(ev.RoleSample):
        longest[sample.role] = max(longest[sample.role], sample.loop_age, sample.lag)
    return longest


def copies(log: Log) -> Found:
    """What was copied, or restored from, is the state of a committed step, to the digest; a holder's copies are of ever later steps, but
    that what a life has taken from the disk goes there again.
    """
    states: dict[int, dict[str, int]] = defaultdict(dict)
    said: dict[int, int] = {}
    for seq, committed in log.all(ev.OptimizerStepCommitted):
        states[committed.step][committed.snapshot_digest] = committed.bytes
        said.setdefault(committed.step, seq)
    lost = [seq for seq, _ in log.all(ev.NodeLost)]
    roles = {role for role, _ in _lives(log)}
    rolled_back = bool(log.all(ev.RolledBack))
    newest: dict[tuple[_Life, str], int] = {}
    for entry in log.entries:
        event = entry.event
        if not isinstance(event, ev.SnapshotCopied | ev.SnapshotRestored):
            continue
        what = f"a copy of step {event.step}" if isinstance(event, ev.SnapshotCopied) else f"{event.role}, restored to step {event.step},"
        if event.step not in states:
            # the commit of the last step may have been under way to the log when the run ended
            if log.status == "done" or event.step != max(states, default=-1) + 1:
                yield entry.seq, f"{what} has a state that was never committed"
        elif event.digest not in states[event.step] and not rolled_back and not any(entry.seq < seq < said[event.step] for seq in lost):
            # else the node of its keeper was lost before the log heard of that commit, and the step was made again
            yield entry.seq, f"{what} has digest {event.digest}; committed was {', '.join(states[event.step])}"
        if isinstance(event, ev.SnapshotRestored):
            if event.source == "disk":
                newest[(entry.source, entry.incarnation), "disk"] = event.step - 1
            continue
        if event.bytes != states.get(event.step, {}).get(event.digest, event.bytes):
            yield entry.seq, f"{what} has {event.bytes} bytes; committed were {states[event.step][event.digest]}"
        if event.source not in roles or event.holder not in ("disk", entry.source):
            yield entry.seq, f"{what} went from {event.source} to {event.holder}, says {entry.source}"
        if event.step <= (last := newest.get(((entry.source, entry.incarnation), event.holder), -1)) and not rolled_back:
            yield entry.seq, f"{what} reached {event.holder} after one of step {last}"
        newest[(entry.source, entry.incarnation), event.holder] = event.step


def settings(log: Log) -> Found:
    """Thresholds and recovery settings are the host's to tell, are possible, begin as configured, and each change is the one it names."""
    thresholds: dict[str, Any] | None = None
    recovery: ev.RecoverySettings | None = None
    told: set[str] = set()
    named = {"thresholds", "recovery"} & {name for _, event in log.all(ev.RunStarted)[:1] for name in event.config}
    """What the configuration speaks of: earlier versions had neither."""
    for entry in log.entries:
        event = entry.event
        if isinstance(event, ev.NodeStarted) and (lacking := named - told):
            yield entry.seq, f"a node started, and nothing said with what settings of {' and '.join(sorted(lacking))} the run began"
            named = set()
        told |= {"thresholds"} if isinstance(event, ev.ThresholdsChanged) else set()
        told |= {"recovery"} if isinstance(event, ev.RecoverySettings) else set()
        if isinstance(event, ev.ThresholdsChanged | ev.RecoverySettings) and entry.source != ev.HOST:
            yield entry.seq, f"{entry.source} told of settings, which are the host's to tell"
        match event:
            case ev.ThresholdsChanged():
                yield from ((entry.seq, text) for text in _impossible(event.thresholds))
                now = _flat(event.thresholds)
                if thresholds is None:
                    changed: dict[str, list[Any]] = {}
                    yield from ((entry.seq, text) for text in _not_configured(log, now))
                else:
                    paths = sorted(thresholds.keys() | now.keys())
                    changed = {path: [thresholds.get(path), now.get(path)] for path in paths if thresholds.get(path) != now.get(path)}
                    if not changed:
                        yield entry.seq, "thresholds were changed to what they were"
                if event.changes != changed:
                    yield entry.seq, f"thresholds changed by {changed}, and the event says {event.changes}"
                thresholds = now
            case ev.RecoverySettings():
                if event.mode not in MODES or event.standbys not in STANDBYS:
                    yield entry.seq, f"recovery {event.mode!r}, {event.standbys!r}: must be of {', '.join(MODES)} and {', '.join(STANDBYS)}"
                if recovery is None and event != (first := log.config.first_recovery()):
                    yield entry.seq, f"recovery began as {event.mode}, {event.standbys}; asked for was {first.mode}, {first.standbys}"
                if event == recovery:
                    yield entry.seq, "recovery settings were changed to what they were"
                recovery = event


def _not_configured(log: Log, now: dict[str, Any]) -> list[str]:
    """What differs from the configured set, where the names are today's: other names are another version's of this program."""
    asked = _flat(Thresholds.named(log.config.thresholds).to_dict())
    if log.broken_config or now.keys() != asked.keys():
        return []
    return [f"{path} began as {now[path]}; {log.config.thresholds!r} has {asked[path]}" for path in now if now[path] != asked[path]]


def _impossible(thresholds: dict[str, Any]) -> list[str]:
    try:
        Thresholds.from_dict(thresholds)
    except ConfigError as error:
        # other names than today's are another version's of this program, and no contradiction
        return [] if error.field == "thresholds" else [str(error)]
    return []


def _flat(thresholds: dict[str, Any]) -> dict[str, Any]:
    """By path, as in the ``changes`` of the event."""
    sections = {section: values for section, values in thresholds.items() if isinstance(values, dict)}
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
