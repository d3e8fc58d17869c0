"""The audit's rules on weight versions: numbers only rise, one digest each, pulled from who holds them."""

from __future__ import annotations

from collections import defaultdict

from robustrl.core import events as ev
from robustrl.core.audit_log import Found, Log
from robustrl.core.roles import RoleId, RoleKind


def announced(log: Log) -> Found:
    """Version numbers only rise; a number comes again only from a later life of its holder; each is announced after its step's commit."""
    committed: set[int] = set()
    newest = -1
    lives: dict[str, int] = {}
    for entry in log.entries:
        match entry.event:
            case ev.OptimizerStepCommitted() as event:
                committed.add(event.version)
            case ev.VersionAnnounced() as event:
                again = event.version == newest and event.incarnation > lives.get(event.holder, event.incarnation)
                lives[event.holder] = event.incarnation
                if event.version <= newest and not again:
                    yield entry.seq, f"version {event.version} was announced after version {newest}"
                newest = max(newest, event.version)
                if event.version not in committed:
                    yield entry.seq, f"version {event.version} was announced before its optimizer step was committed"
    announced = {event.version for _, event in log.all(ev.VersionAnnounced)}
    for seq, step in log.all(ev.OptimizerStepCommitted):
        if step.version not in announced and not log.may_lack(step.step):
            yield seq, f"version {step.version} was committed and never announced"


def digest(log: Log) -> Found:
    """A version number has one digest, in every event that names both."""
    digests: dict[int, str] = {}
    for entry in log.entries:
        if isinstance(event := entry.event, ev.OptimizerStepCommitted | ev.VersionAnnounced | ev.PullCommitted):
            known = digests.setdefault(event.version, event.digest)
            if known != event.digest:
                yield entry.seq, f"version {event.version} has digest {event.digest} here and {known} before"


def pulls(log: Log) -> Found:
    """A version is pulled, after its announcement, from one who holds it, by a role that lives; what a rollout runs on only rises."""
    holders: dict[int, set[str]] = defaultdict(set)
    life: dict[str, int] = {}
    begun: dict[str, set[int]] = defaultdict(set)
    runs: dict[tuple[str, int], int] = {}
    for entry in log.entries:
        match entry.event:
            case ev.VersionAnnounced() as event:
                holders[event.version].add(event.holder)
            case ev.RoleStarted() as event:
                life[event.role] = event.incarnation
            case ev.PullStarted() as event:
                if event.source not in holders[event.version]:
                    yield entry.seq, f"{event.target} pulls version {event.version} from {event.source}, which does not hold it yet"
                begun[event.target].add(event.version)
            case ev.PullCommitted() as event:
                target, version = event.target, event.version
                if event.source not in holders[version]:
                    yield entry.seq, f"{target} committed version {version} from {event.source}, which does not hold it yet"
                if version not in begun.pop(target, set()):
                    yield entry.seq, f"{target} committed version {version} without a pull of it"
                if life.get(target) != event.incarnation:
                    yield entry.seq, f"{target} incarnation {event.incarnation} committed; incarnation {life.get(target)} lives"
                if version <= (before := runs.get((target, event.incarnation), -1)):
                    yield entry.seq, f"{target} committed version {version} after version {before}"
                if event.probe_gap > (limit := log.config.probe_limit):
                    yield entry.seq, f"{target} committed version {version} with probe gap {event.probe_gap:g} > {limit:g}"
                runs[target, event.incarnation] = version
                holders[version].add(target)
            case ev.RoleSample(role=role, version=version) if version >= 0:
                # a rollout that dies, or a run that ends, between commit and event is no liar
                if version not in (ran := log.ran.get(role, {version})) and (version < max(ran) or log.status == "done"):
                    yield entry.seq, f"{role} was seen to run on version {version}, which it never committed"


def serving(log: Log) -> Found:
    """Only a life that holds a version serves it on or generates with it: no stale role, and none that is gone."""
    hold: dict[tuple[str, int], set[int]] = defaultdict(set)
    for _, announced in log.all(ev.VersionAnnounced):
        hold[announced.holder, announced.incarnation].add(announced.version)
    for _, committed in log.all(ev.PullCommitted):
        hold[committed.target, committed.incarnation].add(committed.version)
    life: dict[str, int] = {}
    told: set[tuple[str, int]] = set()
    for entry in log.entries:
        match entry.event:
            case ev.RoleStarted(role=role, incarnation=incarnation):
                life[role] = incarnation
            case ev.PullStarted() as event:
                if event.version not in hold[event.source, event.source_incarnation]:
                    life_of = f"{event.source} incarnation {event.source_incarnation}"
                    yield entry.seq, f"{event.target} pulls version {event.version} from {life_of}, a life that never held it"
            case ev.RoleSample(role=role, incarnation=incarnation, version=-1, progress=progress) if progress > 0:
                if RoleId.parse(role).kind is RoleKind.ROLLOUT and (role, incarnation) not in told:
                    told.add((role, incarnation))
                    yield entry.seq, f"{role} incarnation {incarnation} has generated {progress} tokens without a committed version"
            case ev.TrajectoriesStarted(rollout=role, version=version) | ev.TrajectoriesMoved(target=role, version=version):
                # the word of a dispatch may come after that of the death that it preceded
                lives = [life.get(role, 0), life.get(role, 0) - 1]
                if not any(version in hold[role, incarnation] for incarnation in lives):
                    given = f"{role} was given work for version {version}"
                    yield entry.seq, f"{given}, which neither incarnation {lives[0]} nor the one before held"
