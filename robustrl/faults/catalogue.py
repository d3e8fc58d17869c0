"""The catalogue of faults and of benign disturbances: plain data, checked as it is made.

A fault says what is to happen, to whom (a role by name, or any of a kind; of this rank or node) and when (now, after some seconds, while an
optimizer step runs, in a phase). What is wrong in itself raises ConfigError that names it. Left out: whether it can be done in this
job on this machine (planner.py), and doing it (runtime/injecting.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Union, get_args

from ..core.roles import PHASES, SINGLE, Phase, RoleId, RoleKind
from .checks import MOST_STEPS, Checked, made_of, named, settings_of

_ALL = frozenset(RoleKind)
_KINDS = frozenset(map(str, RoleKind))
_TRAINER, _ROLLOUT = frozenset({RoleKind.TRAINER}), frozenset({RoleKind.ROLLOUT})
_WORKERS = _ALL - {RoleKind.NODE_AGENT}
NODE = re.compile(r"node-(0|[1-9][0-9]{0,6})")
_MOST_RANK = 10**6


class _Target(Checked, frozen=True, tag_field="fault", forbid_unknown_fields=True):
    target: str = ""
    """A role (``trainer-0``), or a kind of roles (``rollout``): one of them is drawn. Empty: the kind that this fault is about."""


class Fault(_Target, frozen=True, kw_only=True, tag_field="fault"):
    rank: int | None = None
    """Of a kind: the one with this index."""
    node: str = ""
    """Only a role on this node, e.g. ``node-2``."""
    phase: str = ""
    """Not before the target is in this phase."""
    step: int | None = None
    """Not before this optimizer step runs (the one before it is committed)."""
    after: float = 0.0
    """Not before this many seconds have passed."""
    force: bool = False
    """Also the last live rollout."""

    benign: ClassVar[bool] = False
    """A disturbance that a right detector does not call a failure."""
    disabling: ClassVar[bool] = True
    """The target is out of service until it is replaced or the fault is over."""
    undo: ClassVar[bool] = True
    """It can be called off while it lasts."""
    by: ClassVar[str] = "role"
    """Who does it: the target's own process (role), its node's agent from outside (agent), or the host."""
    kinds: ClassVar[frozenset[RoleKind]] = _WORKERS
    """Whom it can hit."""
    foreign: ClassVar[bool] = True
    """Allowed on a cluster that we did not start."""
    moment: ClassVar[str] = ""
    """When it strikes, in words or as a phase, where that follows from what it is: no other phase can be asked for."""

    def __post_init__(self) -> None:
        kinds = ", ".join(sorted(self.kinds))
        self._texts(target=f"the name of a role, e.g. rollout-1, or a kind of roles: {kinds}", node="a node's name, e.g. node-2",
                    phase="a phase of its target")  # fmt: skip
        self._flags("force")
        self._check_target()
        self._whole("rank", "an index", least=0, most=_MOST_RANK, none=True)
        self._whole("step", "an optimizer step", least=1, most=MOST_STEPS, none=True)
        if self.rank is not None and self.kind in SINGLE and self.rank > 0:
            raise self._wrong("rank", self.rank, f"there is one {self.kind}")
        if self.node and not NODE.fullmatch(self.node):
            raise self._wrong("node", self.node, "must be a node's name, e.g. node-2")
        self._number("after")
        if self.phase and self.phase not in PHASES[self.kind]:
            allowed = ", ".join(sorted(PHASES[self.kind]))
            raise self._wrong("phase", self.phase, f"must be a phase of a {self.kind}: {allowed}")
        if self.phase and self.moment and self.phase != self.moment:
            raise self._wrong("phase", self.phase, f"must be left out: {self.name} strikes at a moment of its own, {self.moment}")

    @property
    def kind(self) -> RoleKind:
        """Of the roles that are meant."""
        if self.target in _KINDS or not self.target:
            return RoleKind(self.target or next(iter(self.kinds)))
        return RoleId.parse(self.target).kind

    @property
    def role(self) -> str:
        """The one role that is meant; empty: any of the kind."""
        if self.kind in SINGLE:
            return self.kind.value
        if self.target and self.target not in _KINDS:
            return self.target
        return "" if self.rank is None else str(RoleId(self.kind, self.rank))

    def aim(self) -> str:
        """Whom it is for, in words."""
        return self.role or f"any {self.kind}" + (f" on {self.node}" if self.node else "")

    def when(self) -> str:
        parts = [f"at step {self.step}"] if self.step else []
        parts += [f"after {self.after:g} s"] if self.after else []
        parts += [f"in phase {self.phase}"] if self.phase else []
        return ", ".join(parts) or "now"

    def _check_target(self) -> None:
        kinds = ", ".join(sorted(self.kinds))
        if not self.target and len(self.kinds) > 1:
            raise self._wrong("target", self.target, f"must name a role, e.g. rollout-1, or a kind of roles: {kinds}")
        if self.target and self.target not in _KINDS:
            try:
                RoleId.parse(self.target)
            except ValueError as error:
                raise self._wrong("target", self.target, str(error).partition(": ")[2]) from None
            if self.rank is not None:
                raise self._wrong("rank", self.rank, f"{self.target} has its rank in its name")
        if self.kind not in self.kinds:
            raise self._wrong("target", self.target, f"{self.name} can hit {kinds}")


class _Timed(Fault, frozen=True, kw_only=True):
    seconds: float
    """How long it lasts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("seconds", least=0.01)


class _ForATime(Fault, frozen=True, kw_only=True):
    seconds: float = 0.0
    """How long it lasts; 0: until its target is replaced, or it is called off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("seconds")


# -- faults -


class Kill(Fault, frozen=True, kw_only=True, tag="kill"):
    """SIGKILL."""

    by, kinds, undo = "agent", _ALL, False


class Hang(_ForATime, frozen=True, kw_only=True, tag="hang"):
    """SIGSTOP: the process is there, and nothing in it runs."""

    by, kinds = "agent", _ALL


class Slow(_Timed, frozen=True, kw_only=True, tag="slow"):
    """SIGSTOP and SIGCONT in turns: the process runs only part of the time."""

    share: float = 0.2
    """Of the time in which it runs."""
    period: float = 0.2
    """Seconds of one turn."""
    by, disabling = "agent", False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("share", least=0.01, most=0.99, what="a share")
        self._number("period", least=0.02, most=60.0)


class Wedge(_ForATime, frozen=True, kw_only=True, tag="wedge"):
    """Its work loop is stuck in Python: a rollout's engine loop, a trainer's step, any other role's event loop."""

    busy: bool = True
    """Stuck in a loop that burns a core; else in a wait."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._flags("busy")


class RaiseException(Fault, frozen=True, kw_only=True, tag="exception"):
    """An exception out of its work."""

    text: str = "raised by a fault"
    undo = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._texts(text="what the exception says")


class CleanExit(Fault, frozen=True, kw_only=True, tag="clean_exit"):
    """The process ends by itself, with exit status 0."""

    undo = False


class MemoryExhaustion(Fault, frozen=True, kw_only=True, tag="memory_exhaustion"):
    """Its address space is limited to what it has and ``room_mb`` MiB more (RLIMIT_AS); it allocates until that is used up."""

    room_mb: int = 64
    foreign, undo = False, False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("room_mb", "a number of MiB", least=16, most=1024)


class OfNode(Fault, frozen=True, kw_only=True, tag="of_node"):
    """A whole node is its target: by its name, or that of a role on it. Not the one with the head of Ray."""

    by, kinds, foreign = "host", _ALL, False
    moment = "as soon as it is due, whatever is done on the node"

    @property
    def kind(self) -> RoleKind:
        return RoleKind.NODE_AGENT if NODE.fullmatch(self.target) else super().kind

    @property
    def role(self) -> str:
        return "" if NODE.fullmatch(self.target) else super().role

    def aim(self) -> str:
        return self.target if NODE.fullmatch(self.target) else f"the node of {super().aim()}"

    def _check_target(self) -> None:
        if not NODE.fullmatch(self.target):
            super()._check_target()
        elif self.rank is not None or self.node:
            field = "node" if self.node else "rank"
            raise self._wrong(field, getattr(self, field), f"must be left out: {self.target} is the node that is meant")


class NodeLoss(OfNode, frozen=True, kw_only=True, tag="node_loss"):
    """The raylet of the target's node, every process there, and that node's memory snapshots and files."""

    undo = False


class CorruptWeights(Fault, frozen=True, kw_only=True, tag="corrupt_weights"):
    """Bytes of the weights that the target serves to others are flipped in its memory."""

    kinds, disabling, undo = frozenset({RoleKind.ROLLOUT, RoleKind.STATE_KEEPER}), False, False


class CorruptSnapshot(Fault, frozen=True, kw_only=True, tag="corrupt_snapshot"):
    """Bytes of the trainer's committed recovery state are flipped in the state keeper's memory."""

    kinds, disabling, undo = frozenset({RoleKind.STATE_KEEPER}), False, False


class FullDisk(_Timed, frozen=True, kw_only=True, tag="full_disk"):
    """For the trainer that writes checkpoints, their folder is a full little tmpfs. Needs root."""

    kinds, disabling, foreign = _TRAINER, False, False
    moment = "the next writing of a checkpoint"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, value in (("target", self.target), ("rank", self.rank)):
            if value not in ("", None, 0, RoleKind.TRAINER, self.role):
                raise self._wrong(field, value, f"must be left out: {self.role} writes the checkpoints")

    @property
    def role(self) -> str:
        return str(RoleId(RoleKind.TRAINER, 0))


class Partition(OfNode, frozen=True, kw_only=True, tag="partition"):
    """The target's node is cut off from the others: packets vanish, and nobody is told. Needs hosts="namespaces"."""

    seconds: float
    """How long it lasts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("seconds", least=0.01)


class Delay(Partition, frozen=True, kw_only=True, tag="delay"):
    """Every packet of the target's node is late. Needs hosts="namespaces" and the kernel's netem."""

    milliseconds: float = 100.0
    """There and back together."""
    disabling = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("milliseconds", least=0.1, most=60_000.0, what="a finite number of milliseconds")


# -- benign disturbances -


class _Benign(_Timed, frozen=True, kw_only=True):
    benign, disabling = True, False


class SlowTool(_Benign, frozen=True, kw_only=True, tag="slow_tool"):
    """The next tool call takes this long."""

    kinds = frozenset({RoleKind.AGENT_WORKER})
    moment = "the next tool call"


class LongAdvantage(_Benign, frozen=True, kw_only=True, tag="long_advantage"):
    """The trainer's next advantage phase takes this long."""

    kinds = _TRAINER
    moment = Phase.ADVANTAGE.value


class LongFirstToken(_Benign, frozen=True, kw_only=True, tag="long_first_token"):
    """The engine loop comes round, and for this long no token comes of it."""

    kinds = _ROLLOUT
    moment = "as soon as it is due, for all tokens alike"


class FirstCompile(_Benign, frozen=True, kw_only=True, tag="first_compile"):
    """The first work of the target's next life takes this long."""

    kinds = _TRAINER | _ROLLOUT
    moment = "the first work of a life"


class Freeze(_Benign, frozen=True, kw_only=True, tag="freeze"):
    """SIGSTOP for less than the thresholds that are in force."""

    by, kinds = "agent", _ALL - {RoleKind.SUPERVISOR}


class IdleRollout(_Benign, frozen=True, kw_only=True, tag="idle_rollout"):
    """The rollout manager sends this rollout no work for this long."""

    kinds = _ROLLOUT
    moment = "as soon as it is due, for all requests alike"


class LongCheckpoint(_Benign, frozen=True, kw_only=True, tag="long_checkpoint"):
    """The trainer's next snapshot takes this long."""

    kinds = _TRAINER
    moment = Phase.SNAPSHOT.value


AnyFault = Union[
    Kill,
    Hang,
    Slow,
    Wedge,
    RaiseException,
    CleanExit,
    MemoryExhaustion,
    NodeLoss,
    CorruptWeights,
    CorruptSnapshot,
    FullDisk,
    Partition,
    Delay,
    SlowTool,
    LongAdvantage,
    LongFirstToken,
    FirstCompile,
    Freeze,
    IdleRollout,
    LongCheckpoint,
]
CATALOGUE: dict[str, type[Fault]] = {str(kind.__struct_config__.tag): kind for kind in get_args(AnyFault)}


def make_fault(values: Mapping[str, Any]) -> AnyFault:
    """From plain values, ``fault`` naming the kind: ``{"fault": "kill", "target": "rollout-1", "step": 5}``. Raises ConfigError."""
    name = named(values, "fault", CATALOGUE, '{"fault": "kill", "target": "rollout-1"}')
    return made_of(CATALOGUE[name], settings_of(values, CATALOGUE[name], name))
