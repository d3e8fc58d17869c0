"""A run's log made up from nothing: what a healthy job of a given shape would have written, entry by entry."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable

import msgspec

from robustrl.config import GRPOConfig, JobConfig
from robustrl.core import events as ev
from robustrl.core.roles import RoleId, RoleState
from robustrl.core.run_state import RunState
from robustrl.core.thresholds import Thresholds


class Writer:
    """Gives events their place in a log, as emitters and host do."""

    def __init__(self) -> None:
        self.entries: list[ev.Entry] = []
        self._n: Counter[str] = Counter()

    def write(self, source: str, event: ev.Event) -> None:
        self._n[source] += 1
        seq = len(self.entries) + 1
        chain = self.entries[-1].chain if self.entries else ev.GENESIS
        entry = ev.Entry(seq, 100 + seq * 0.01, source, 1, self._n[source], 50 + seq * 0.01, event)
        self.entries.append(ev.seal(entry, chain)[0])


def forge(entries: Iterable[ev.Entry]) -> list[ev.Entry]:
    """The entries as a careful forger leaves them: numbered anew, by place and by source, with times that fit, and chained anew."""
    forged: list[ev.Entry] = []
    numbers: Counter[tuple[str, int]] = Counter()
    chain = ev.GENESIS
    for seq, entry in enumerate(entries, 1):
        numbers[entry.source, entry.incarnation] += 1
        number = numbers[entry.source, entry.incarnation]
        entry = msgspec.structs.replace(entry, seq=seq, t=100 + seq * 0.01, at=50 + seq * 0.01, n=number)
        forged.append(ev.seal(entry, chain)[0])
        chain = forged[-1].chain
    return forged


def digest(version: int) -> str:
    return f"{version:032x}"


PHASES = {"waiting_batch": 0.005, "advantage": 0.001, "train": 0.01, "optimizer": 0.001, "snapshot": 0.001, "publish": 0.001}
"""Seconds of each step."""
SAMPLES = [{"prompt": "1+1=", "text": text, "reward": float(text == "2")} for text in ("2", "3", "2")]
"""Of an evaluation."""


def metrics(step: int, length: float) -> dict[str, float]:
    """What the learner says of a step whose answers are all right."""
    rate = GRPOConfig().learning_rate * min(1.0, step / GRPOConfig().warmup_steps)
    means = {"reward": 1.0, "accuracy": 1.0, "length": length, "loss": -0.1, "kl": 1e-9, "entropy": 0.5, "clip_fraction": 0.0}
    return means | {"importance_weight": 1.0, "importance_weight_max": 1.1, "grad_norm": 0.7, "learning_rate": rate}


def kind_of(role: str) -> str:
    return RoleId.parse(role).kind.value


def made_log(
    *,
    steps: int = 3,
    prompts: int = 2,
    samples: int = 2,
    rollouts: int = 2,
    staleness: int = 1,
    status: str = "done",
    drop: bool = True,
    seed: int = 0,
) -> list[ev.Entry]:
    """``drop``: the first sample of batch 2 cannot be rated. A ``status`` other than done ends the run in the middle of the last step."""
    shape = {"prompts_per_step": prompts, "samples_per_prompt": samples, "rollouts": rollouts, "staleness": staleness}
    config = JobConfig(steps=steps, thresholds="lab", profile="class", agent_workers=1, **shape)
    dice = random.Random(seed)
    log = Writer()
    write = log.write
    write(
        "host",
        ev.RunStarted(
            schema=ev.SCHEMA, run="run-1", name="job", wall=1e9, host_pid=10, config=msgspec.to_builtins(config), machine={"cores": 2}
        ),
    )
    thresholds = Thresholds.named(config.thresholds)
    write("host", ev.ThresholdsChanged(thresholds=thresholds.to_dict(), changes={}))
    write("host", config.first_recovery())
    names = ["supervisor", "task_runner", "rollout_manager", "request_manager", "agent_worker-0", "trainer-0", "state_keeper-0"]
    names += [f"rollout-{i}" for i in range(rollouts)]
    write(
        "host",
        ev.NodeStarted(node="node-0", ray_node_id="abc", ip="127.0.0.1", kinds=sorted({"node_agent", *map(kind_of, names)})),
    )
    state = {}

    def change(role: str, new: RoleState, reason: str) -> None:
        write("supervisor", ev.RoleStateChanged(role=role, incarnation=1, old=state[role], new=new, reason=reason))
        state[role] = new

    for number, role in enumerate(names):
        write("host", ev.RoleStarted(role=role, incarnation=1, node="node-0", pid=100 + number, start_ticks=5))
        state[role] = RoleState.STARTING
    for role in names:
        write(role, ev.RoleReady(role=role, incarnation=1, seconds=0.5))
        change(role, RoleState.STALE if role.startswith("rollout-") else RoleState.HEALTHY, "ready")

    def commit(step: int, consumed: list[int]) -> None:
        write(
            "state_keeper-0",
            ev.OptimizerStepCommitted(
                step=step,
                version=step,
                digest=digest(step),
                snapshot_digest=f"s{step}",
                consumed=consumed,
                batch=step,
                bytes=3000,
                holder="state_keeper-0",
                incarnation=1,
            ),
        )
        write(
            "state_keeper-0",
            ev.VersionAnnounced(
                version=step, digest=digest(step), bytes=1000, chunks=1, holder="state_keeper-0", incarnation=1, address="127.0.0.1:9"
            ),
        )

        write(
            "trainer-0",
            ev.SnapshotCopied(step=step, source="trainer-0", holder="disk", digest=f"s{step}", bytes=3000, seconds=0.1),
        )

    leases = itertools.count(1)

    def pull(rollout: str, version: int) -> None:
        write(
            rollout,
            ev.PullStarted(
                source="state_keeper-0",
                source_incarnation=1,
                target=rollout,
                version=version,
                bytes=1000,
                transport="posix",
                lease=next(leases),
            ),
        )
        write(rollout, ev.PullProgress(source="state_keeper-0", target=rollout, version=version, done=500, bytes=1000, transport="posix"))
        write(
            rollout,
            ev.PullCommitted(
                source="state_keeper-0",
                target=rollout,
                incarnation=1,
                version=version,
                digest=digest(version),
                bytes=1000,
                seconds=0.01,
                commit_seconds=0.01,
                transport="posix",
                lag=1,
                probe_gap=1e-5,
                address="",
            ),
        )
        if state[rollout] is RoleState.STALE:
            change(rollout, RoleState.HEALTHY, "version committed")

    workers = [f"rollout-{i}" for i in range(rollouts)]
    batches: dict[int, list[tuple[int, list[int], str, int]]] = {}
    progress: Counter[str] = Counter()
    lengths: dict[int, int] = {}

    def dispatch(batch: int, version: int) -> None:
        batches[batch] = []
        for group in range(prompts):
            first = ((batch - 1) * prompts + group) * samples + 1
            ids, rollout = list(range(first, first + samples)), dice.choice(workers)
            batches[batch].append((group, ids, rollout, version))
            write("request_manager", ev.TrajectoriesStarted(batch=batch, group=group, ids=ids, rollout=rollout, version=version))

    def finish(batch: int, newest: int) -> list[int]:
        kept: list[int] = []
        for group, ids, rollout, version in batches[batch]:
            if drop and batch == 2 and group == 0:
                write("request_manager", ev.TrajectoriesDropped(ids=ids[:1], reason="reward error"))
                ids = ids[1:]
            runs = [[(v, 2) for v in range(version, newest + 1)] for _ in ids]
            tokens = [sum(count for _, count in run) for run in runs]
            progress[rollout] += sum(tokens)
            write(
                "node_agent-0",
                ev.RoleSample(
                    role=rollout,
                    incarnation=1,
                    phase="decode",
                    progress=progress[rollout],
                    pending=1,
                    step=batch,
                    version=newest,
                    loop_age=0.01,
                    cpu=0.01 * progress[rollout],
                ),
            )
            write("request_manager", ev.TokensJournalled(role=rollout, incarnation=1, tokens=progress[rollout]))
            write(
                "request_manager",
                ev.TrajectoriesFinished(
                    batch=batch,
                    group=group,
                    ids=ids,
                    prompt="1+1=",
                    texts=["2"] * len(ids),
                    rewards=[1.0] * len(ids),
                    tokens=tokens,
                    versions=runs,
                    tool_turns=[0] * len(ids),
                ),
            )
            kept += ids
            lengths.update(zip(ids, tokens, strict=True))
        return kept

    def length(ids: list[int]) -> float:
        return sum(lengths[i] for i in ids) / max(1, len(ids))

    write("host", ev.RoleStarted(role="node_agent-0", incarnation=1, node="node-0", pid=200, start_ticks=5))
    commit(0, [])
    for rollout in workers:
        pull(rollout, 0)
    write("task_runner", ev.EvaluationDone(version=0, prompts=10, accuracy=0.3, samples=SAMPLES))
    dispatched = 0
    for step in range(1, steps + 1):
        while dispatched < min(steps, step + staleness):
            dispatched += 1
            dispatch(dispatched, step - 1)
        consumed = finish(step, step - 1)
        commit(step, consumed)
        if status != "done" and step == steps:
            break
        write("request_manager", ev.TrajectoriesConsumed(step=step, ids=consumed))
        for rollout in workers:
            pull(rollout, step)
        write("task_runner", ev.StepMetrics(step=step, values=metrics(step, length(consumed)), phase_seconds=PHASES))
        if step == 1:
            write("task_runner", ev.Paused(step=1))
            write("task_runner", ev.Resumed(step=1))
            changed = thresholds.updated({"rollout.grace": thresholds.rollout.grace + 1})
            write("host", ev.ThresholdsChanged(thresholds=changed.to_dict(), changes=thresholds.changes(changed)))
            write("host", ev.RecoverySettings(mode="full", standbys="cold"))
    if status == "done":
        write("task_runner", ev.EvaluationDone(version=steps, prompts=10, accuracy=0.9, samples=SAMPLES))
    write("supervisor", ev.EndDecided(status=status, reason="it was time"))
    for event in RunState.of(log.entries).closing("the run ended"):
        write("host", event)
    write("host", ev.RunEnded(status=status, reason="it was time", wall=1e9 + 60))
    return log.entries
