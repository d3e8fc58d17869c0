"""Everything that can be observed in a run, as typed records, and the chained log entry that carries each.

An emitter (a role or the host) numbers its events; the host, the only writer, gives each a place in the run's log. Times named ``at``
are seconds of the emitter's own monotonic clock, ``t`` of the host's. Byte counts are bytes, durations seconds, versions the number of
the optimizer step whose weights they are (0: the weights before the first step).
"""

from __future__ import annotations

import hashlib
from typing import Any, Union

import msgspec

SCHEMA = 1
GENESIS = "0" * 32
HOST = "host"
"""Source of the events that the host itself emits (incarnation 1, always)."""


class _Event(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    pass


class RunStarted(_Event, tag="run_started"):
    schema: int
    run: str
    name: str
    wall: float
    """Unix time."""
    host_pid: int
    config: dict[str, Any]
    machine: dict[str, Any]


class NodeStarted(_Event, tag="node_started"):
    node: str
    """Short name in this run, e.g. ``node-0``."""
    ray_node_id: str
    ip: str
    kinds: list[str]
    """The role kinds placed there."""


class NodeLost(_Event, tag="node_lost"):
    node: str
    reason: str


class RoleStarted(_Event, tag="role_started"):
    role: str
    incarnation: int
    node: str
    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: with the pid it names the process for good."""


class RoleReady(_Event, tag="role_ready"):
    """The role finished its set-up and can be called. A rollout is then still without weights."""

    role: str
    incarnation: int
    seconds: float
    """From the start of its process's own code to here."""


class RoleStateChanged(_Event, tag="role_state_changed"):
    role: str
    incarnation: int
    old: str
    new: str
    reason: str


class RoleSample(_Event, tag="role_sample"):
    """What a node_agent read of one role in one go: its status page and its CPU time. Logged on change and at 1 Hz."""

    role: str
    incarnation: int
    phase: str
    progress: int
    """Trainer: micro-batches done; rollout: tokens generated; others: requests handled."""
    pending: int
    """Trainer: micro-batches left in this step; rollout: unfinished trajectories; others: requests waiting."""
    step: int
    version: int
    """-1: none yet."""
    loop_age: float
    """Seconds since the role's main loop last came round."""
    cpu: float
    """CPU seconds used so far."""
    phase_age: float = 0.0
    """Seconds since the phase was entered; prefill and decode count as one, running and idle too."""
    active_age: float = 0.0
    """Seconds since the process last used more of a core than the activity floor."""
    progress_age: float = 0.0
    """Seconds in which there was work and the progress counter stood still."""
    lag: float = 0.0
    """Largest loop_age seen since the sample logged before."""
    process: str = ""
    """State letter of the process in /proc, e.g. R, S, T."""


_SIGNS_OF_AN_END = ("pidfd", "its address space is gone", "memory")
"""Causes that say how an end was noticed and no more; ``memory`` in logs of earlier versions."""


class ProcessExited(_Event, tag="process_exited", omit_defaults=True):
    """``omit_defaults``: the chain of a log that was written before ``progress`` was added stays whole."""

    role: str
    incarnation: int
    pid: int
    cause: str
    """What is known of the end, e.g. ``pidfd`` or Ray's text."""
    last_lines: list[str]
    progress: int = -1
    """What its status page says in the end (see RoleSample); -1: not known."""

    @property
    def in_words(self) -> str:
        """For people, to whom it is the same which sign of the end was seen first."""
        return "its process ended" if self.cause in _SIGNS_OF_AN_END else f"its process ended ({self.cause})"


class ErrorRaised(_Event, tag="error_raised"):
    """An error that the role cannot go on after; its process exits."""

    role: str
    incarnation: int
    error: str
    """Class name."""
    text: str


class RestartDecided(_Event, tag="restart_decided"):
    """The supervisor's action on a failed role: a new incarnation of it, and of it alone."""

    role: str
    incarnation: int
    """The one that failed."""
    reason: str
    mode: str = "isolated"
    """isolated, or full: every role process is ended and started anew (one such event for each)."""
    standby: str = ""
    """Name of the warm standby that takes the role over; empty: a cold start."""


class RecoverySettings(_Event, tag="recovery_settings"):
    """In force from this entry on. The first one of a log says what the run began with."""

    mode: str
    """observe (verdicts only), isolated, or full."""
    standbys: str
    """warm or cold."""


class RoleOrdered(_Event, tag="role_ordered"):
    """The user wants something of this life of a role."""

    role: str
    incarnation: int
    action: str
    """restart, or drain: its work goes to others, and it ends."""


class RunResumed(_Event, tag="run_resumed"):
    """A new host goes on where the one before ended without a closing record. Every life that a role had before has ended."""

    wall: float
    """Unix time."""
    host_pid: int


class SnapshotCopied(_Event, tag="snapshot_copied"):
    """A second copy of a committed optimizer step's state is complete and checked."""

    step: int
    source: str
    holder: str
    """The peer state_keeper, or ``disk``."""
    digest: str
    bytes: int
    seconds: float


class SnapshotRestored(_Event, tag="snapshot_restored"):
    """A role's new life runs on this committed state."""

    role: str
    incarnation: int
    step: int
    source: str
    """local (its node's keeper), peer, or disk."""
    digest: str
    seconds: float


class SnapshotRefused(_Event, tag="snapshot_refused"):
    """A copy failed its check while a role was being restored; the next one in the order local, peer, disk is tried."""

    role: str
    incarnation: int
    step: int
    source: str
    reason: str


class RolledBack(_Event, tag="rolled_back"):
    """State newer than what could be restored is gone: steps above ``to`` are done again. Version numbers go on upward."""

    old: int
    to: int
    reason: str


class TokensJournalled(_Event, tag="tokens_journalled", omit_defaults=True):
    """At 1 Hz and at a role's last flush: what the request_manager holds of one life of a rollout.

    ``omit_defaults``: the chain of a log that was written before ``evaluated`` was added stays whole.
    """

    role: str
    incarnation: int
    tokens: int
    """Generated tokens that the journal has received from this life so far."""
    evaluated: int = 0
    """Tokens that it had generated for evaluations, which are not journalled."""


class FaultPlanned(_Event, tag="fault_planned"):
    """A fault, or a benign disturbance, that somebody ordered."""

    fault: int
    """From 1, in the order of planning."""
    kind: str
    target: str
    """What was asked for, e.g. ``trainer-0`` or ``a rollout``."""
    when: str
    """Human words, e.g. ``now``, ``at step 5``, ``in phase train``."""
    benign: bool
    options: dict[str, Any]
    schedule: str = ""
    hidden: bool = False
    by: str = ""
    """Who ordered it, where several can."""


class FaultInjected(_Event, tag="fault_injected"):
    """It was done, and this is what it really hit. Several for one fault that hits several roles."""

    fault: int
    role: str
    incarnation: int
    node: str
    pid: int
    phase: str
    """Of the target, read from its status page at the moment of injection."""
    step: int
    proof: dict[str, Any]
    """What shows that it took effect, e.g. {"signal": "SIGKILL", "process": "gone"} or {"process": "T"}."""


class FaultEnded(_Event, tag="fault_ended"):
    """No more will come of it: undone (a time-limited one is over, or aborted), refused, or its target vanished before it fired."""

    fault: int
    outcome: str
    """over, aborted, refused, vanished, or not_fired (ordered, yet without the effect: this fails the audit)."""
    reason: str


class FaultRevealed(_Event, tag="fault_revealed"):
    """A hidden fault may be shown from here on."""

    fault: int
    guess: str
    """What the one who looked for it took it for; empty: nothing was said."""


class VersionAnnounced(_Event, tag="version_announced"):
    version: int
    digest: str
    bytes: int
    chunks: int
    holder: str
    incarnation: int
    address: str
    """``ip:port`` of the holder's weight server."""


class PullStarted(_Event, tag="pull_started", omit_defaults=True):
    """``omit_defaults``: the chain of a log that was written before ``lease`` was added stays whole."""

    source: str
    source_incarnation: int
    target: str
    version: int
    bytes: int
    transport: str
    lease: int = 0
    """Number of the right under which it is done, each given once in a run; 0: not known."""


class PullProgress(_Event, tag="pull_progress"):
    source: str
    target: str
    version: int
    done: int
    bytes: int
    transport: str


class PullSourceSwitched(_Event, tag="pull_source_switched"):
    target: str
    version: int
    old_source: str
    new_source: str
    kept: int
    reason: str


class PullCommitted(_Event, tag="pull_committed"):
    """The target's engine runs on this version from here on and passed the probe check."""

    source: str
    target: str
    incarnation: int
    version: int
    digest: str
    bytes: int
    """Bytes received over UCX for it."""
    seconds: float
    commit_seconds: float
    transport: str
    lag: int
    """Versions that the target was behind when the pull began."""
    probe_gap: float
    address: str
    """``ip:port`` at which the target serves this version on as a relay; empty: it does not."""


class PullDiscarded(_Event, tag="pull_discarded"):
    target: str
    version: int
    bytes: int
    reason: str


class VersionRefused(_Event, tag="version_refused"):
    role: str
    incarnation: int
    version: int
    probe_gap: float
    limit: float


class TrajectoriesStarted(_Event, tag="trajectories_started"):
    """One group: the samples of one prompt."""

    batch: int
    group: int
    ids: list[int]
    rollout: str
    version: int
    """Stamped at dispatch."""


class TrajectoriesMoved(_Event, tag="trajectories_moved"):
    """Unfinished trajectories whose rollout died, sent to another one (or to its next life)."""

    ids: list[int]
    source: str
    target: str
    version: int
    """Of the target, stamped at dispatch."""
    kept: list[int]
    """Tokens of each, in the order of ``ids``, that need not be generated again."""


class TrajectoriesFinished(_Event, tag="trajectories_finished"):
    """One group, complete and rewarded. Lists run in the order of ``ids``."""

    batch: int
    group: int
    ids: list[int]
    prompt: str
    texts: list[str]
    rewards: list[float]
    tokens: list[int]
    versions: list[list[tuple[int, int]]]
    """Per trajectory: runs of (version, number of tokens), in order."""
    tool_turns: list[int]


class TrajectoriesConsumed(_Event, tag="trajectories_consumed"):
    step: int
    ids: list[int]


class TrajectoriesDropped(_Event, tag="trajectories_dropped"):
    ids: list[int]
    reason: str


class OptimizerStepCommitted(_Event, tag="optimizer_step_committed"):
    """The snapshot of this optimizer step is complete outside the trainer."""

    step: int
    version: int
    digest: str
    snapshot_digest: str
    consumed: list[int]
    batch: int
    """Data position: the last batch that is part of the state; 0 before the first step."""
    bytes: int
    holder: str
    incarnation: int


class StepMetrics(_Event, tag="step_metrics"):
    step: int
    values: dict[str, float]
    phase_seconds: dict[str, float]
    """Seconds of the step in each trainer phase, waiting_batch included."""


class EvaluationDone(_Event, tag="evaluation_done"):
    version: int
    prompts: int
    accuracy: float
    samples: list[dict[str, Any]]
    """A few of {prompt, text, reward}."""


class Paused(_Event, tag="paused"):
    step: int


class Resumed(_Event, tag="resumed"):
    step: int


class WarningRaised(_Event, tag="warning_raised"):
    text: str


class PeerGone(_Event, tag="peer_gone"):
    """A UCX connection broke: the other side's process, or the way to it, is gone."""

    role: str
    incarnation: int
    peer: str
    peer_incarnation: int
    error: str


class HeartbeatSent(_Event, tag="heartbeat_sent"):
    """Emitted by the supervisor after the call to the suspect was handed over."""

    role: str
    incarnation: int
    number: int


class HeartbeatAnswered(_Event, tag="heartbeat_answered"):
    """Emitted by the role's own work loop (a rollout: its engine loop), as it comes round."""

    role: str
    incarnation: int
    number: int


class Tick(_Event, tag="tick"):
    """Of the supervisor: a deadline of the detector has come, and only an entry of that time can show that nothing happened."""


class ClockGap(_Event, tag="clock_gap"):
    """The emitter (host or supervisor) itself did not run for this long, just before. Emitted ahead of anything else it says."""

    seconds: float


class ThresholdsChanged(_Event, tag="thresholds_changed"):
    """In force from this entry on. The first one of a log says what the run began with."""

    thresholds: dict[str, Any]
    """All of them, by section and name; see core/thresholds.py."""
    changes: dict[str, list[Any]]
    """Path -> [old, new]; empty for the first."""


class Verdict(_Event, tag="verdict"):
    """What the detector says of one life of a role."""

    role: str
    incarnation: int
    kind: str
    """suspect, failed, cleared, waiting_on_peer, reported."""
    rule: str
    evidence: dict[str, Any]
    threshold: float
    """The limit that was passed: seconds, or the rule's own unit; 0 for a rule without one."""
    due: float
    """Host time from which on this could be said."""
    seen: float
    """Host time of the entry that showed it."""
    onset: float
    """Host time of the last sign to the contrary: what is wrong began no earlier."""
    blind_spot: str
    """What this rule cannot see or may take for a fault."""


class EndDecided(_Event, tag="end_decided"):
    """The supervisor's verdict that the job is over."""

    status: str
    reason: str


class LogRepaired(_Event, tag="log_repaired"):
    dropped_bytes: int


class RunEnded(_Event, tag="run_ended"):
    """The closing record; nothing follows it."""

    status: str
    """``done``, ``stopped`` or ``failed``."""
    reason: str
    wall: float


Event = Union[
    RunStarted,
    NodeStarted,
    NodeLost,
    RoleStarted,
    RoleReady,
    RoleStateChanged,
    RoleSample,
    ProcessExited,
    ErrorRaised,
    RestartDecided,
    VersionAnnounced,
    PullStarted,
    PullProgress,
    PullSourceSwitched,
    PullCommitted,
    PullDiscarded,
    VersionRefused,
    TrajectoriesStarted,
    TrajectoriesMoved,
    TrajectoriesFinished,
    TrajectoriesConsumed,
    TrajectoriesDropped,
    OptimizerStepCommitted,
    StepMetrics,
    EvaluationDone,
    Paused,
    Resumed,
    WarningRaised,
    EndDecided,
    LogRepaired,
    RunEnded,
    PeerGone,
    HeartbeatSent,
    HeartbeatAnswered,
    Tick,
    ClockGap,
    ThresholdsChanged,
    Verdict,
    RecoverySettings,
    SnapshotCopied,
    SnapshotRestored,
    SnapshotRefused,
    RolledBack,
    TokensJournalled,
    FaultPlanned,
    FaultInjected,
    FaultEnded,
    FaultRevealed,
    RoleOrdered,
    RunResumed,
]


class Emitted(msgspec.Struct, frozen=True):
    """An event as its emitter sends it: kept and sent again until the host acknowledges (source, incarnation, n)."""

    source: str
    incarnation: int
    n: int
    """From 1, without gaps, within one incarnation of the source."""
    at: float
    event: Event


class Entry(msgspec.Struct, frozen=True):
    """One line of ``events.jsonl``."""

    seq: int
    """From 1, without gaps."""
    t: float
    source: str
    incarnation: int
    n: int
    at: float
    event: Event
    chain: str = ""
    """First 32 hex digits of sha256(previous chain + this line with an empty chain)."""


encoder = msgspec.json.Encoder()
entry_decoder = msgspec.json.Decoder(Entry)
emitted_decoder = msgspec.msgpack.Decoder(list[Emitted])


def seal(entry: Entry, previous_chain: str) -> tuple[Entry, bytes]:
    """The entry with its chain value, and its line for the log (no newline)."""
    bare = msgspec.structs.replace(entry, chain="")
    chain = hashlib.sha256(previous_chain.encode() + encoder.encode(bare)).hexdigest()[:32]
    sealed = msgspec.structs.replace(bare, chain=chain)
    return sealed, encoder.encode(sealed)
