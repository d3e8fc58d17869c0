"""The audit's rules on weight versions: numbers only rise, one digest each, pulled from who holds them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from robustrl.core import events as ev
from robustrl.core.audit_log import Found, Log, kind_of
from robustrl.core.audit_told import followed, reached
from robustrl.core.roles import RoleKind

_Life = tuple[str, int]


def announced(log: Log) -> Found:
    """Version numbers only rise; a number comes again only from a later life of its holder; each is announced after its step's commit, and
    as many bytes are in as many chunks.
    """
    chunks: dict[int, int] = {}
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
                if event.chunks != (known := chunks.setdefault(event.bytes, event.chunks)):
                    what = f"version {event.version} has {event.bytes} bytes in {event.chunks} chunks"
                    yield entry.seq, f"{what}; before they were in {known}"
    announced = {event.version for _, event in log.all(ev.VersionAnnounced)}
    for seq, step in log.all(ev.OptimizerStepCommitted):
        if step.version not in announced and not log.may_lack(step.step):
            yield seq, f"version {step.version} was committed and never announced"
    yield from followed(log)


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
            case ev.RoleSample(role=role, incarnation=incarnation, version=version) if version >= 0 and role in log.ran:
                if version not in log.ran[role] and not log.may_have_run(role, version, entry.t, lives=[incarnation]):
                    yield entry.seq, f"{role} was seen to run on version {version}, which it never committed"
    yield from reached(log)


@dataclass
class _Pull:
    """What one life told of its pull since it committed a version, or began."""

    version: int = -1
    sources: set[str] = field(default_factory=set)
    done: int = 0
    sizes: list[int] = field(default_factory=list)
    """Of each beginning, of an older version too: what had come is kept."""
    transports: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def transfers(log: Log) -> Found:
    """Each pull has a lease of its own, is of a version newer than what that life runs on, as large as announced, and only comes nearer;
    two lives have one transport between them, and what was received, and how far behind it was, is what was begun. A life serves at one
    place, on its node.
    """
    yield from _places(log)
    sizes: dict[int, set[int]] = defaultdict(set)
    for _, announced in log.all(ev.VersionAnnounced):
        sizes[announced.version].add(announced.bytes)
    leases: set[int] = set()
    runs: dict[_Life, int] = {}
    pulls: dict[_Life, _Pull] = defaultdict(_Pull)
    between: dict[tuple[_Life, _Life], str] = {}
    for entry in log.entries:
        life, event = (entry.source, entry.incarnation), entry.event
        if not isinstance(event, ev.PullStarted | ev.PullProgress | ev.PullCommitted):
            continue
        if event.target != entry.source:
            yield entry.seq, f"{entry.source} told of a pull of {event.target}"
        if not isinstance(event, ev.PullCommitted) and event.bytes not in (size := sizes[event.version]) and size:
            yield entry.seq, f"{event.target} pulls {event.bytes} bytes of version {event.version}, which has {min(size)}"
        pull = pulls[life]
        match event:
            case ev.PullStarted():
                if event.lease and event.lease in leases:
                    yield entry.seq, f"{event.target} pulls version {event.version} under lease {event.lease}, which was used before"
                leases.add(event.lease)
                if event.version <= (running := runs.get(life, -1)):
                    yield entry.seq, f"{event.target} pulls version {event.version}, and runs on version {running}"
                if pull.version != event.version:
                    pull.version, pull.sources, pull.done = event.version, set(), 0
                pull.sources.add(event.source)
                pull.sizes.append(event.bytes)
                pull.transports[event.source].add(event.transport)
                pair = life, (event.source, event.source_incarnation)
                if event.transport != (known := between.setdefault(pair, event.transport)):
                    yield entry.seq, f"{event.target} pulls from {event.source} over {event.transport}, and did over {known}"
                continue
            case ev.PullProgress():
                if event.version != pull.version or event.source not in pull.sources:
                    yield entry.seq, f"{event.target} got bytes of version {event.version} from {event.source}, and had not begun that pull"
                elif not pull.done <= event.done <= event.bytes:
                    what = f"{event.target} had {pull.done} of {event.bytes} bytes of version {pull.version}"
                    yield entry.seq, f"{what}, and then {event.done}"
                pull.done = event.done
            case ev.PullCommitted():
                if event.lag != event.version - (running := runs.get(life, -1)):
                    what = f"{event.target} committed version {event.version} after version {running}"
                    yield entry.seq, f"{what}, and says that it lagged by {event.lag}"
                runs[life] = event.version
                if text := _received(event.bytes, pull.sizes):
                    yield entry.seq, f"{event.target} received {event.bytes} bytes for version {event.version}; {text}"
                del pulls[life]
        begun = pull.transports.get(event.source, {event.transport})  # the last to be asked may have refused, and was never pulled from
        if event.transport not in begun:
            yield entry.seq, f"{event.target} pulled from {event.source} over {event.transport}, and began over {min(begun)}"


def _places(log: Log) -> Found:
    """Where a life says that it serves: a host and a port, those of its node, and the same ones each time."""
    ips: dict[str, str] = {}
    ip_of: dict[_Life, str] = {}
    known: dict[_Life, str] = {}
    for entry in log.entries:
        match entry.event:
            case ev.NodeStarted() as event:  # one that takes the place of a lost one has its name, and may have another address
                ips[event.node] = event.ip
            case ev.RoleStarted() as event:
                ip_of[event.role, event.incarnation] = ips.get(event.node, "")
            case (
                ev.VersionAnnounced(holder=role, incarnation=incarnation, address=address)
                | ev.PullCommitted(target=role, incarnation=incarnation, address=address)
            ):
                life, who = (role, incarnation), f"{role} incarnation {incarnation}"
                if address != (before := known.setdefault(life, address)):
                    yield entry.seq, f"{who} serves at {address!r} here and at {before!r} before"
                elif address:
                    host, _, port = address.rpartition(":")
                    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
                        yield entry.seq, f"{who} serves at {address!r}, which is no host:port"
                    elif host != (ip := ip_of.get(life) or host):
                        yield entry.seq, f"{who} serves at {address!r}, and its node is {ip}"


def _received(count: int, sizes: list[int]) -> str:
    """One source sends each byte once; with several, one may have sent again what came damaged, or what came before a pull gave up."""
    if len(sizes) == 1 and count != sizes[0]:
        return f"its one source had {sizes[0]}"
    if sizes and not 0 <= count <= sum(sizes):
        return f"its {len(sizes)} sources had {sum(sizes)}"
    return ""


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
                if kind_of(role) is RoleKind.ROLLOUT and (role, incarnation) not in told:
                    told.add((role, incarnation))
                    yield entry.seq, f"{role} incarnation {incarnation} has generated {progress} tokens without a committed version"
            case ev.TrajectoriesStarted(rollout=role, version=version) | ev.TrajectoriesMoved(target=role, version=version):
                # the word of a dispatch may come after that of the death that it preceded
                lives = [life.get(role, 0), life.get(role, 0) - 1]
                held = any(version in hold[role, incarnation] for incarnation in lives)
                if not held and not log.may_have_run(role, version, entry.t, lives=lives):
                    given = f"{role} was given work for version {version}"
                    yield entry.seq, f"{given}, which neither incarnation {lives[0]} nor the one before held"
