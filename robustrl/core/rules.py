"""The rules of detection, one small function each, and the table of them.

A rule looks at one life of a role and says what it sees now: a `Sign`, or nothing. It keeps no state and reads no clock. A sign whose
``due`` lies ahead is a deadline. What a sign leads to (a verdict, its end after the hysteresis, next deadlines) is core/detection.py's.
Signs from samples rest on ages that the node's own clock measured: without a sample that shows it, nobody is condemned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from .roles import MANAGEMENT, Phase, RoleKind
from .signals import GENERATING, IDLE, Life
from .thresholds import KEEP_ALIVE, OVERDUE, SECTION, Thresholds

SUSPECT, FAILED, CLEARED, WAITING, REPORTED = "suspect", "failed", "cleared", "waiting_on_peer", "reported"
_TOGETHER = 0.2
"""Seconds within which two ranks fell idle at the same time."""
_ORDER = {Phase.ADVANTAGE: 1, Phase.TRAIN: 2, Phase.OPTIMIZER: 3, Phase.SNAPSHOT: 4, Phase.PUBLISH: 5, Phase.WAITING_BATCH: 6}
_MEETING = (Phase.OPTIMIZER, Phase.SNAPSHOT)
"""Phases in which the ranks wait for each other."""
_STOPPED, _ENDED = "process stopped", "ended"
_WENT_ON = 3 * KEEP_ALIVE
"""Seconds after another's end from which on new progress was made without it: what was done before is told of by then."""
_TRAINER, _ROLLOUT = frozenset({RoleKind.TRAINER}), frozenset({RoleKind.ROLLOUT})
_LOOPS = (MANAGEMENT - {RoleKind.SUPERVISOR}) | {RoleKind.STATE_KEEPER, RoleKind.STANDBY}
"""Roles judged by their event loop. Not the supervisor: it is the judge."""


class Sign(NamedTuple):
    kind: str
    due: float
    onset: float
    threshold: float
    evidence: dict[str, Any]
    peer: str = ""
    """Who is waited for."""
    proven: bool = True
    """False: it holds only if it still does once the supervisor itself has spoken after ``due``."""


class Context(Protocol):
    """What a rule may ask beside the life that it looks at."""

    thresholds: Thresholds
    stalled: tuple[str, Sign] | None
    """Who is to blame for a stall that is due, and the sign of it."""

    def limit(self, life: Life, path: str) -> float: ...
    def of_kind(self, kind: RoleKind) -> list[Life]: ...
    def usual_pace(self, life: Life) -> tuple[float, float] | None: ...
    def untold(self, agent: str) -> float | None: ...
    def spoke(self, source: str, incarnation: int) -> float: ...


class Rule(NamedTuple):
    name: str
    kinds: Iterable[RoleKind]
    sign: Callable[[Life, Context], Sign | None]
    setting: str
    """Path of its threshold; ``*`` stands for the section of the role's kind; empty: it has none."""
    source: str
    blind_spot: str


def _non_finite(life: Life, ctx: Context) -> Sign | None:
    """A loss, gradient or metric that is not a number: the algorithm's fault, and a restart would meet it again."""
    if life.bad_number is None:
        return None
    t, text = life.bad_number
    return Sign(REPORTED, t, life.sampled, 0.0, {"text": text})


def _exception(life: Life, ctx: Context) -> Sign | None:
    """The role said itself that it cannot go on."""
    if life.error is None:
        return None
    t, error = life.error
    return Sign(FAILED, t, life.sampled, 0.0, {"error": error.error, "text": error.text, **_seen(life)})


def _exited(life: Life, ctx: Context) -> Sign | None:
    """Its process has ended, whatever the exit status: no role ends by itself."""
    if life.exit is None:
        return None
    t, exit = life.exit
    last = exit.last_lines[-5:]
    return Sign(FAILED, t, life.sampled, 0.0, {"pid": exit.pid, "cause": exit.cause, "last_lines": last, **_seen(life)})


def _node_lost(life: Life, ctx: Context) -> Sign | None:
    """Its node is gone, and the role with it."""
    if life.lost is None:
        return None
    t, lost = life.lost
    return Sign(FAILED, t, life.sampled, 0.0, {"node": lost.node, "reason": lost.reason, **_seen(life)})


def _start(life: Life, ctx: Context) -> Sign | None:
    """The process lives, but the role was not ready in time."""
    if life.ready is not None or life.down:
        return None
    limit = ctx.thresholds.job.start
    return Sign(FAILED, life.started + limit, life.started, limit, _seen(life))


def _no_compute(life: Life, ctx: Context) -> Sign | None:
    """A trainer in the train phase without compute activity. Of several idle ranks, the one that the others wait for."""
    sample = life.sample
    if sample is None or sample.phase != Phase.TRAIN or not life.armed:
        return None
    limit = _graced(life, ctx, "trainer.no_compute")
    if min(sample.active_age, sample.phase_age) < limit:
        return None
    onset = max(life.since("active_age"), life.since("phase_age"))
    return _blamed(life, ctx, onset, limit)


def _no_marks(life: Life, ctx: Context) -> Sign | None:
    """A trainer in the train phase that is active while no micro-batch ends."""
    sample = life.sample
    if sample is None or sample.phase != Phase.TRAIN or not life.armed:
        return None
    limit = _graced(life, ctx, "trainer.no_marks")
    if sample.progress_age < limit or sample.active_age >= _graced(life, ctx, "trainer.no_compute"):
        return None
    return _blamed(life, ctx, life.since("progress_age"), limit, busy=True)


def _silent(life: Life, ctx: Context) -> Sign | None:
    """The event loop of a role does not come round."""
    if life.sample is None or not life.armed:
        return None
    path = f"{SECTION.get(life.kind, 'management')}.silent"
    limit = _graced(life, ctx, path) if life.kind is RoleKind.TRAINER else ctx.limit(life, path)
    if life.sample.loop_age < limit:
        return None
    onset = life.since("loop_age")
    return Sign(FAILED, onset + limit, onset, limit, _seen(life))


def _heartbeat(life: Life, ctx: Context) -> Sign | None:
    """A suspect rollout whose engine loop did not answer in time, as often as it takes."""
    beat, limits = life.beat, ctx.thresholds.rollout
    suspicions = sorted(life.suspicions())
    if beat is None or not suspicions or not (_no_tokens(life, ctx) or _wedged(life, ctx)):
        return None
    due = beat.sent + limits.heartbeat
    if life.misses + 1 < limits.strikes:
        return None
    onset = max(life.since("progress_age"), life.since("loop_age")) if "wedged" not in suspicions else life.since("loop_age")
    evidence = {"suspected_by": suspicions, "heartbeat": beat.number, "sent": round(beat.sent, 6), "strikes": limits.strikes, **_seen(life)}
    proven = ctx.spoke(beat.source, beat.source_incarnation) >= due
    return Sign(FAILED, due, onset, limits.heartbeat, evidence, proven=proven)


def _unproductive(life: Life, ctx: Context) -> Sign | None:
    """A rollout that answers one heartbeat after the other and makes no token: it passes every probe and serves nobody."""
    most = ctx.thresholds.rollout.answers
    if life.answers < most or (sign := _no_tokens(life, ctx)) is None:
        return None
    return sign._replace(kind=FAILED, threshold=float(most), evidence={"answers": life.answers, **sign.evidence})


def _no_tokens(life: Life, ctx: Context) -> Sign | None:
    """A rollout with runnable work that makes no token."""
    sample = life.sample
    if sample is None or not life.armed or sample.phase not in GENERATING or not sample.pending:
        return None
    limit = _graced(life, ctx, "rollout.no_tokens")
    if sample.progress_age < limit:
        return None
    onset = life.since("progress_age")
    return Sign(SUSPECT, max(onset, life.answered) + limit, onset, limit, _seen(life))


def _wedged(life: Life, ctx: Context) -> Sign | None:
    """A rollout whose engine loop does not come round, whatever the phase."""
    if life.sample is None or not life.armed:
        return None
    limit = _graced(life, ctx, "rollout.wedged")
    if life.sample.loop_age < limit:
        return None
    onset = life.since("loop_age")
    return Sign(SUSPECT, max(onset, life.answered) + limit, onset, limit, _seen(life))


def _agent_silent(life: Life, ctx: Context) -> Sign | None:
    """A node agent that watches roles has said nothing, be it from its first look on: nobody sees what becomes of that node's roles."""
    if life.down or (since := ctx.untold(life.role)) is None:
        return None
    limit = ctx.thresholds.node.silent
    return Sign(FAILED, since + limit, since, limit, {"node": life.node, "unseen": True})


def _stall(life: Life, ctx: Context) -> Sign | None:
    """Optimizer steps remain and none is committed: whom all wait for."""
    return ctx.stalled[1] if ctx.stalled is not None and ctx.stalled[0] == life.role else None


def _loop_lag(life: Life, ctx: Context) -> Sign | None:
    """The event loop of a role came round late."""
    if life.sample is None or not life.armed:
        return None
    limit = ctx.limit(life, f"{SECTION.get(life.kind, 'management')}.lag")
    if life.sample.lag < limit:
        return None
    return Sign(REPORTED, life.sampled, life.sampled - life.sample.lag, limit, {"lag": life.sample.lag, **_seen(life)})


def _overdue(life: Life, ctx: Context) -> Sign | None:
    """A trainer phase that has no rule of its own lasts far longer than it should."""
    sample = life.sample
    if sample is None or not life.armed or sample.phase not in OVERDUE:
        return None
    limit = ctx.limit(life, f"trainer.{sample.phase}")
    onset = life.since("phase_age")
    if sample.phase in _MEETING:
        onset = max(onset, _joined_by_all(life, ctx))
    if min(sample.phase_age, life.sampled - onset) < limit:
        return None
    return Sign(REPORTED, onset + limit, onset, limit, _seen(life))


def _slow_pull(life: Life, ctx: Context) -> Sign | None:
    """A pull of weights takes far longer than it should."""
    if life.pull is None or life.down:
        return None
    t, pull = life.pull
    limit = ctx.limit(life, "rollout.pull")
    return Sign(REPORTED, t + limit, t, limit, {"source": pull.source, "version": pull.version, "transport": pull.transport})


def _slow_checkpoint(life: Life, ctx: Context) -> Sign | None:
    """A checkpoint is on its way to the disk for far longer than it should be."""
    if life.unsaved is None or life.down:
        return None
    limit = ctx.limit(life, "keeper.checkpoint")
    return Sign(REPORTED, life.unsaved + limit, life.unsaved, limit, {"last_on_disk": life.saved, **_seen(life)})


def _straggler(life: Life, ctx: Context) -> Sign | None:
    """A rank or replica much slower than its peers, in all and for each piece of work that it has."""
    mine = life.pace.rates()
    if mine is None or not life.armed:
        return None
    usual = ctx.usual_pace(life)
    if usual is None:
        return None
    limit = ctx.limit(life, f"{SECTION[life.kind]}.straggler")
    if any(mine[i] * limit > usual[i] or not usual[i] for i in (0, 1)):
        return None
    evidence = {"rate": round(mine[0], 4), "peers": round(usual[0], 4), **_seen(life)}
    return Sign(REPORTED, life.sampled, life.sampled, limit, evidence)


def _peer_gone(life: Life, ctx: Context) -> Sign | None:
    """Another role's UCX connection to this one broke."""
    if life.gone_peer is None or life.down:
        return None
    t, gone = life.gone_peer
    return Sign(REPORTED, t, life.sampled, 0.0, {"seen_by": gone.role, "error": gone.error, **_seen(life)})


def _joined_by_all(life: Life, ctx: Context) -> float:
    """When the last rank came as far as this one; infinite: one has not, or has ended."""
    joined = -math.inf
    for other in ctx.of_kind(life.kind):
        if other is life:
            continue
        if not other.armed or other.error or _position(other) < _position(life):
            return math.inf
        if _position(other) == _position(life):
            joined = max(joined, other.since("phase_age"))
    return joined


def _graced(life: Life, ctx: Context, path: str) -> float:
    """The limit at ``path``, or the start-up grace of the kind while a life is at its first work."""
    limit = ctx.limit(life, path)
    return max(limit, ctx.limit(life, f"{SECTION[life.kind]}.grace")) if life.warming else limit


def _blamed(life: Life, ctx: Context, onset: float, limit: float, busy: bool = False) -> Sign | None:
    peer, how = _culprit(life, ctx, busy, limit)
    if busy and how == _ENDED and life.idled > onset and life.sampled >= life.idled + limit:
        return Sign(FAILED, life.idled + limit, life.idled, limit, {"chosen_by": "at work after its wait", **_seen(life)})
    evidence = {"chosen_by": how, **_seen(life)}
    if peer:
        return Sign(WAITING, onset + limit, onset, limit, {"peer": peer, **evidence}, peer=peer)
    if how == _STOPPED:
        onset = max(onset, life.since("loop_age"))
        if life.sample is not None and life.sample.loop_age < limit:
            return None
    elif life.waited > onset:
        onset = life.waited
        if life.sampled < onset + limit:
            return None  # what it waited for has come: from there on it has as long again
    return Sign(FAILED, onset + limit, onset, limit, evidence)


def _culprit(life: Life, ctx: Context, busy: bool, limit: float) -> tuple[str, str]:
    """(the rank that this one waits for, or empty if it waits for none; how that was told)."""
    ranks = sorted((other for other in ctx.of_kind(RoleKind.TRAINER) if other is not life), key=lambda other: other.role)
    if not ranks:
        return "", "only rank"
    if not (others := [other for other in ranks if _may_need(life, other)]):
        return "", "on its own since the others ended"
    sample = life.sample
    if life.stopped and sample is not None and sample.loop_age >= min(limit, sample.active_age) - _TOGETHER:
        return "", _STOPPED  # all this time, not only while it waited
    if gone := [other for other in others if other.down or other.error]:
        return gone[0].role, _ENDED
    if starting := [other for other in others if not other.armed]:
        return starting[0].role, "starting"
    mine = _position(life)
    idle = [other for other in others if other.sample is not None and other.sample.active_age >= IDLE]
    if stopped := [other for other in idle if other.stopped and _position(other) <= mine]:
        return stopped[0].role, _STOPPED
    last = min(others, key=_position)
    if _position(last) < mine:
        return last.role, "micro-batch counter"
    level = [other for other in others if _position(other) == mine]
    if not busy and (working := [other for other in level if other not in idle]):
        return working[0].role, "peer at work"  # in lockstep all wait for the slowest
    if level:
        first = min(level, key=lambda other: other.since("active_age"))
        if first.since("active_age") < life.since("active_age") - _TOGETHER:
            return first.role, "idle first"
        return "", "idle first" if life.since("active_age") < first.since("active_age") - _TOGETHER else "idle together"
    return "", "micro-batch counter"


def _may_need(life: Life, other: Life) -> bool:
    """Whether it may wait for that rank: for one that has ended, unless that one had come further, or it went on without it."""
    if other.ended == math.inf:
        return True
    if life.advanced > other.ended + _WENT_ON > other.advanced:
        return False
    return other.sample is None or life.sample is None or _position(other) <= _position(life)


def _position(life: Life) -> tuple[int, int, int]:
    """How far a rank has come: (step, phase, micro-batches done, counted back from the end of the step)."""
    sample = life.sample
    assert sample is not None
    phase = Phase(sample.phase)
    return sample.step, _ORDER.get(phase, 0), -sample.pending if phase is Phase.TRAIN else 0


def _seen(life: Life) -> dict[str, Any]:
    """What the last sample showed."""
    sample = life.sample
    if sample is None:
        return {"phase": "", "process": ""}
    return {
        "phase": sample.phase, "process": sample.process, "step": sample.step, "progress": sample.progress, "pending": sample.pending,
        "phase_age": sample.phase_age, "active_age": sample.active_age, "progress_age": sample.progress_age, "loop_age": sample.loop_age,
    }  # fmt: skip


_ALL = frozenset(RoleKind)
RULES: tuple[Rule, ...] = (
    Rule("non_finite", _TRAINER, _non_finite, "", "RFT-FM: algorithmic failures are no machine's",
         "a number that is finite and wrong"),
    Rule("exception", _ALL, _exception, "", "RobustRL: an exception caught around the step",
         "an error that the role handles itself, or that kills it before it can speak (rule exited)"),
    Rule("exited", _ALL, _exited, "", "pidfd on the node, else Ray's word", "a process that lives and does nothing"),
    Rule("node_lost", _ALL, _node_lost, "", "Ray's health check of nodes", "a node that is slow or cut off but answers Ray"),
    Rule("start", _ALL, _start, "job.start", "verl#7382, prime-rl PR#3139: bounded waits at the start",
         "cannot tell a slow start from one that never ends before the limit"),
    Rule("no_compute", _TRAINER, _no_compute, "trainer.no_compute", "RobustRL: zero compute activity in the train phase, 300 s",
         "a loop that burns CPU without progress (rule no_marks); other phases; a micro-batch that waits for disk or network that long; "
         "beside a rank that has ended and is not replaced, idleness of its own at a micro-batch at which it may wait for that one"),
    Rule("no_marks", _TRAINER, _no_marks, "trainer.no_marks", "slime#1487: progress per role, not only liveness",
         "a micro-batch that honestly takes longer than the limit looks the same; "
         "beside a rank that has ended and is not replaced, a loop stuck from where it may wait for that one, and never seen idle"),
    Rule("silent", _LOOPS | _TRAINER, _silent, "*.silent", "prime-rl PR#2230: one server stops answering",
         "a loop that turns while its work is stuck (rule stall); a call that blocks the loop longer than the limit looks the same"),
    Rule("heartbeat", _ROLLOUT, _heartbeat, "rollout.heartbeat", "RobustRL: heartbeat to the suspect after its tokens stop",
         "one engine step longer than both limits together looks the same"),
    Rule("unproductive", _ROLLOUT, _unproductive, "rollout.answers", "NeMo-RL PR#3613: a wedged engine passes the probe",
         "a first token that takes longer than all those heartbeats looks the same"),
    Rule("agent_silent", frozenset({RoleKind.NODE_AGENT}), _agent_silent, "node.silent", "torchft: heartbeat of the watcher itself",
         "says nothing about the roles of that node, and nothing before one of them is ready; a network that is cut looks the same"),
    Rule("stall", _ALL, _stall, "job.stall", "prime-rl#1713, NeMo-RL: stall watchdog",
         "a step that honestly takes longer; evaluation after the last step"),
    Rule("no_tokens", _ROLLOUT, _no_tokens, "rollout.no_tokens", "RobustRL: token throughput is zero, 60 s, suspect only",
         "a rollout without runnable work; tokens of which nobody gets any"),
    Rule("wedged", _ROLLOUT, _wedged, "rollout.wedged", "NeMo-RL PR#3613: process alive, loop does not come round",
         "a loop that turns without serving (rule unproductive); a long engine step looks the same until it ends"),
    Rule("loop_lag", _LOOPS, _loop_lag, "*.lag", "prime-rl#1713: loop lag of minutes before the hang",
         "cannot tell a busy machine from a blocking call"),
    Rule("overdue", _TRAINER, _overdue, "trainer.{phase}", "trl#2923, OpenRLHF#411: a sync that stalls",
         "work that grew (a longer batch, a slower disk) looks the same: reported, never restarted"),
    Rule("slow_pull", _ROLLOUT, _slow_pull, "rollout.pull", "nixl PR#2047: a stalled transfer reports progress for ever",
         "a pull slow because its source serves many looks the same: reported, never restarted"),
    Rule("slow_checkpoint", frozenset({RoleKind.STATE_KEEPER}), _slow_checkpoint, "keeper.checkpoint",
         "RobustRL: host to storage is asynchronous, so nobody waits for it",
         "the first checkpoint of a life: nothing says that any is written at all; a slow disk and a full one look the same"),
    Rule("straggler", _TRAINER | _ROLLOUT, _straggler, "*.straggler", "FALCON, ByteRobust: slow is not dead",
         "all slow alike; a rank that sets the pace of all in lockstep, or idles as if it waited for one; too little work seen"),
    Rule("peer_gone", _ALL, _peer_gone, "", "UCX error handling: connection reset in 7-20 ms",
         "a stopped or partitioned peer: UCX says nothing, ever"),
)  # fmt: skip
"""In order of precedence: of several signs of one life that are due at the same time, the first counts."""
