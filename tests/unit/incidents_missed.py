"""Which published default misses an incident, and why: read off published settings and reports; nothing was run."""

from __future__ import annotations

_PROBE = "probes only ask an engine whether it lives"
MISSED_BY: dict[str, dict[str, str]] = {
    "group-init-hang": {
        "RobustRL paper": "its trainer rule is armed in the train phase only",
        "slime": "first wait 300 s, and of engines only",
        "verl recipe": "an idle chip for 30 s at start-up is also every healthy start",
    },
    "engine-dies-late": {"verl": "one engine's death ends the whole job", "torchft": "replicas of the trainer only"},
    "control-behind-data": {
        "NeMo-RL": "a probe with 2 s behind queued calls gets three misses: a busy engine is condemned",
        "slime": "5 s and one strike: the same",
    },
    "unschedulable-role": {
        "RobustRL paper": "no rule before the first step",
        "slime": "nothing to probe before the engine exists",
        "NeMo-RL": "said by the stall watchdog only, after 600 s",
    },
    "everyone-waits": {
        "RobustRL paper": "no rule is armed while all wait",
        "torchft": "all heartbeats go on",
        "slime": _PROBE,
        "miles": _PROBE,
        "rLLM": _PROBE,
        "NeMo-RL": "said after 600 s, and no role is named",
    },
    "silent-server": {
        "verl recipe": "a wait for a lost answer looks like any idle chip",
        "TRL": "heartbeat stale after 300 s only",
        "torchft": "replicas of the trainer only",
    },
    "child-died-at-start": {
        "slime": "first wait 300 s",
        "miles": "looks every 30 s, answers may take 30 s",
        "RobustRL paper": "60 s without tokens, then a heartbeat",
    },
    "dead-on-first-call": {"TRL": "300 s, and 20 min were seen", "slime": "first wait 300 s; trainers are not looked at"},
    "sync-stall": {"RobustRL paper": "not armed while weights are synced", "slime": _PROBE, "torchft": "only the collective's time-out"},
    "trainer-stuck-engines-fine": {
        "slime": "every engine answers, the trainer is not asked",
        "NeMo-RL": "said by the stall watchdog only, after 600 s",
        "torchft": "the heartbeat comes from a thread of its own",
        "miles": "300 s first wait, then a liveness probe",
    },
    "shot-at-first-compile": {
        "slime": "a compile beyond 300 s is shot at the first miss",
        "verl recipe": "30 s idle: a long compile is shot",
        "NeMo-RL": "three misses at 5 s each; no grace is published",
    },
    "wedged-passes-probe": {
        "NeMo-RL": "the process-alive probe passes a wedged engine",
        "torchft": "the heartbeat comes from a thread of its own",
    },
    "probe-asks-too-much": {
        "prime-rl": "the probe asked for weights that a new server does not have",
        "verl recipe": "a rollout without requests is an idle chip",
    },
    "dead-member-in-quorum": {"torchft": "survivors sit out the collective's time-out", "RobustRL paper": "300 s without compute"},
    "restarted-stays-dead": {"miles": "the address stays on the dead list"},
    "broadcast-to-a-ghost": {"miles": "no incarnation on the connection; the monitor stays paused after a failed sync"},
    "dead-rank-blocks-refit": {
        "NeMo-RL": "every actor answers; the stall watchdog speaks after 600 s",
        "RobustRL paper": "not armed outside the train phase",
        "slime": "the trainer is not asked",
    },
    "read-twice": {"NeMo-RL": "membership was read twice in one sync"},
    "paused-for-ever": {"AReaL": "the pause outlived the update that it waited for"},
    "wrong-victim": {"miles": "the injector hit another process of the same name"},
    "late-message": {"ucx-py": "a re-used handle takes the message of its predecessor", "miles": "history is kept by address"},
    "poisoned-source": {"modelexpress": "a reader without goodbye marks the source as bad"},
    "progress-never-ends": {"nixl": "reports progress for ever", "RobustRL paper": "not armed while weights are synced", "slime": _PROBE},
}
"""Incident -> published default that misses it, raises a false alarm on it or names nobody -> why."""
