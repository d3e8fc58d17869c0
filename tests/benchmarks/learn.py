"""Does the job learn, and do faults harm it? Held-out accuracy before and after, one step off-policy and on-policy; then, seed by seed, a
run with faults against the same run without.

Equivalence: the 90% confidence interval of the mean difference (eight pairs, t with seven degrees of freedom: 1.895) must lie within five
points, which rejects at 5% both that faults cost more and that they gain more. The row ``unmarked`` takes the log of a run in which a
trajectory went on under a newer version, and hides that, as a job without marks would: the audit must reject it. On a quiet reference
machine a row takes 2 to 4 minutes, all of them somewhat more than an hour.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from tests.benchmarks._report import Bench, Row

_SEEDS = (0, 1, 2)
_PAIRS = tuple(range(8))
_T = 1.895
_HELD_OUT = 1000
_ROWS = [
    *(f"{mode}-{seed}" for mode in ("async", "on-policy") for seed in _SEEDS),
    *(f"{kind}-{seed}" for seed in _PAIRS for kind in ("clean", "faulty")),
    "unmarked",
]


def measure(row: str) -> Row:
    if row == "unmarked":
        return unmarked()
    mode, _, seed = row.rpartition("-")
    return learn(mode, int(seed))


def learn(mode: str, seed: int) -> Row:
    import robustrl
    from robustrl.faults import Kill, PaperFrequency

    settings: dict[str, Any] = {"staleness": 0 if mode == "on-policy" else 1}
    if mode in ("clean", "faulty"):
        settings |= {"evaluation_prompts": _HELD_OUT, "thresholds": "lab", "restarts": 1000}
    with robustrl.launch(name=f"learn-{seed}", seed=seed, **settings) as job:
        if mode == "faulty":
            job.wait(step=1, timeout=600)
            job.schedule(PaperFrequency(percent=10, fault=Kill("trainer"), seed=seed))
            job.schedule(PaperFrequency(percent=10, fault=Kill("rollout"), seed=100 + seed))
        job.wait(timeout=1800)
        summary = job.summary()
    accuracy = summary["accuracy"]
    before, after = accuracy["before"], accuracy["after"]
    return {
        "before": before,
        "after": after,
        "points": 100 * (after - before),
        "prompts": accuracy["prompts"],
        "steps": summary["steps"],
        "seconds": summary["wall_seconds"],
        "faults": summary["ettr"]["faults"],
    }


def unmarked() -> Row:
    """Rollouts are killed until a trajectory has tokens of two versions because of it; then its marks are taken away."""
    import msgspec

    import robustrl
    from robustrl.core import events as ev
    from robustrl.core.audit import audit

    def switched(job: Any) -> set[int]:
        moved = {i: e.event.version for e in job.events.of(ev.TrajectoriesMoved) for i in e.event.ids}
        done = {i: runs for e in job.events.of(ev.TrajectoriesFinished) for i, runs in zip(e.event.ids, e.event.versions, strict=True)}
        return {i for i in moved.keys() & done.keys() if len(done[i]) > 1 and any(version == moved[i] for version, _ in done[i][1:])}

    settings = {"task": "arithmetic_long", "prompts_per_step": 4, "evaluation_prompts": 0, "restarts": 1000, "steps": 1_000_000}
    with robustrl.launch(name="learn-unmarked", profile="class", **settings) as job:
        job.wait(step=2, timeout=600)
        for attempt in range(20):
            job.wait(step=job.step + 1, timeout=300)
            job.roles[f"rollout-{attempt % 2}"].kill()
            job.wait(step=job.step + 2, timeout=300)
            if hidden := switched(job):
                break
        job.stop()
        entries = list(job.events)

    def hide(event: Any) -> Any:
        if not isinstance(event, ev.TrajectoriesFinished):
            return event
        runs = [[(runs[0][0], sum(n for _, n in runs))] if i in hidden else runs for i, runs in zip(event.ids, event.versions, strict=True)]
        return msgspec.structs.replace(event, versions=runs)

    forged, chain = [], ev.GENESIS
    for entry in entries:
        forged.append(ev.seal(msgspec.structs.replace(entry, event=hide(entry.event)), chain)[0])
        chain = forged[-1].chain
    return {"switched": len(hidden), "honest_findings": len(audit(entries)), "findings": [str(finding) for finding in audit(forged)][:3]}


def judge(bench: Bench) -> None:
    for mode in ("async", "on-policy"):
        rows = [f"{mode}-{seed}" for seed in _SEEDS]
        name = f"smallest gain over three seeds, {mode} (points)"
        bench.target(name, ">=", 15, rows, lambda rows: min(row["points"] for row in rows))
    pairs = [f"{kind}-{seed}" for seed in _PAIRS for kind in ("clean", "faulty")]
    bench.target("end of the 90% interval of what faults change in accuracy (points)", "<=", 5, pairs, _widest)
    bench.target("faults in the faulty runs, least", ">=", 1, pairs[1::2], lambda rows: min(row["faults"] for row in rows))
    bench.target("an unmarked mixture of versions is rejected", ">=", 1, ["unmarked"], _rejected)


def _widest(rows: list[Row]) -> float:
    """The further end from zero, in points."""
    changes = [100 * (faulty["after"] - clean["after"]) for clean, faulty in zip(rows[::2], rows[1::2], strict=True)]
    return abs(statistics.fmean(changes)) + _T * statistics.stdev(changes) / math.sqrt(len(changes))


def _rejected(rows: list[Row]) -> float:
    return float(bool(rows[0]["findings"]) and not rows[0]["honest_findings"])


def main(argv: Sequence[str]) -> int:
    return Bench("learn", _ROWS, measure).run(argv, judge)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
