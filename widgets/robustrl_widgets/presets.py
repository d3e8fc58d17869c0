"""Faults and schedules that the FaultPanel offers by name: schedules, and incidents of other systems that a fault can stage.

What a preset asks for and this job or machine does not have is refused by the planner, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

Plain = dict[str, Any]


class Preset(msgspec.Struct, frozen=True):
    words: str
    """What happened to others and what a right system does; of a schedule, what it does."""
    schedule: Plain
    """As `robustrl.faults.make_schedule` takes it."""
    needs: str = ""
    """A role without which it makes no sense, and is not offered."""


def _staged(words: str, *faults: Plain, needs: str = "") -> Preset:
    return Preset(words, {"schedule": "list", "faults": list(faults)}, needs)


def _on(target: str, fault: str, **options: Any) -> Plain:
    return {"fault": fault, "target": target, **options}


SCHEDULES: dict[str, Preset] = {
    "paper: 10 % trainer faults": Preset(
        "As many trainer deaths as a tenth of the steps, one at a random moment of each stretch: the paper's evaluation.",
        {"schedule": "paper_frequency", "percent": 10.0}),
    "a rollout dies every 5 steps": Preset(
        "In steps 5, 10, 15, ... of the job.", {"schedule": "every_n_steps", "every": 5, "fault": _on("rollout", "kill")}),
    "surprise (hidden)": Preset(
        "One fault, drawn and hidden, within 20 s: find out what it was, then reveal it.", {"schedule": "surprise"}),
}
INCIDENTS: dict[str, Preset] = {
    "engine-dies-late": _staged(
        "One engine died after six good hours and took the whole job with it. Right: one replica is lost, its requests move.",
        _on("rollout", "kill", phase="decode")),
    "everyone-waits": _staged(
        "All processes waited for each other, no error. Right: the role that all wait for is named.",
        _on("task_runner", "wedge", busy=False)),
    "silent-server": _staged(
        "One server stopped answering and wedged the job for 43 h. Right: no call without a deadline.",
        _on("rollout", "hang", phase="decode")),
    "dead-on-first-call": _staged(
        "A worker that died on a call surfaced after 20 minutes. Right: liveness is looked at in every empty wait.",
        _on("agent_worker", "clean_exit")),
    "sync-stall": _staged(
        "Weight sync stalled until a watchdog killed the process. Right: it fails by itself, early, and names the peer.",
        _on("rollout", "hang", phase="pull")),
    "trainer-stuck-engines-fine": _staged(
        "The trainer was stuck while every engine answered probes. Right: progress is watched per role.",
        _on("trainer", "wedge", phase="train", busy=False)),
    "shot-at-first-compile": _staged(
        "An engine was shot for its slow first compile and never restored. Right: start-up has grace.",
        _on("rollout", "kill"), _on("rollout", "first_compile", seconds=6.0, after=0.5)),
    "wedged-passes-probe": _staged(
        "A wedged engine passed a probe that the process is alive. Right: the engine loop itself has to answer.",
        _on("rollout", "wedge", phase="decode")),
    "dead-member-in-quorum": _staged(
        "Survivors sat out a full time-out although the death was known. Right: they are told at once.",
        _on("trainer-1", "kill", phase="train"), needs="trainer-1"),
    "restarted-stays-dead": _staged(
        "A restarted engine stayed on the dead list. Right: a new life clears history, also the second time.",
        _on("rollout-1", "kill"), _on("rollout-1", "kill", after=25.0), needs="rollout-1"),
    "broadcast-to-a-ghost": _staged(
        "Weights were sent over the connection of a dead life. Right: each connection names the life that it is for.",
        _on("rollout", "kill", phase="pull")),
    "dead-rank-blocks-refit": _staged(
        "A dead rank blocked the next weight sync while all looked healthy. Right: membership is looked at before each sync.",
        _on("trainer", "kill", phase="publish")),
    "half-rebound-peer": _staged(
        "Peers were set up anew only by half after a restart. Right: only the replaced peer is bound again.", _on("state_keeper", "kill")),
    "paused-for-ever": _staged(
        "An engine stayed paused after a failed update. Right: it is released if and only if what it waited for succeeded.",
        _on("state_keeper", "corrupt_weights")),
    "trained-twice": _staged(
        "A resume trained the same data again. Right: the position in the data is part of the committed state.",
        _on("trainer", "kill", phase="optimizer")),
    "samples-skipped": _staged(
        "A resume skipped samples. Right: the ledger balances across it.", _on("task_runner", "kill")),
    "shrunk-batch": _staged(
        "One failed generation silently shrank a batch. Right: drop, replace or fail by a stated policy, and count.",
        _on("rollout", "exception", phase="decode")),
    "hours-thrown-away": _staged(
        "A crash threw away thousands of seconds of generation. Right: finished and half-finished answers survive.",
        _on("request_manager", "kill")),
    "poisoned-source": _staged(
        "A reader that left without a goodbye poisoned the source for later ones. Right: it costs the others nothing.",
        _on("rollout", "clean_exit", phase="pull")),
    "progress-never-ends": _staged(
        "A stalled transfer reported progress for ever. Right: a deadline of its own; buffers are not used again.",
        _on("state_keeper", "hang")),
}
NOT_STAGED = frozenset({"group-init-hang", "control-behind-data", "unschedulable-role", "child-died-at-start", "probe-asks-too-much",
                        "read-twice", "wrong-victim", "late-message"})
"""Incidents that no fault of the catalogue makes."""
PRESETS: dict[str, Preset] = SCHEDULES | {f"incident/{name}": preset for name, preset in INCIDENTS.items()}


def offered(roles: Mapping[str, object]) -> dict[str, str]:
    """Name -> words, of those that fit a job with these roles."""
    return {name: preset.words for name, preset in PRESETS.items() if not preset.needs or preset.needs in roles}
