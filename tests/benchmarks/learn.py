"""Does the job learn? Held-out accuracy before and after, three seeds, one step off-policy and on-policy."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.benchmarks._report import Bench, Row

_SEEDS = (0, 1, 2)
_ROWS = [f"{mode}-{seed}" for mode in ("async", "on-policy") for seed in _SEEDS]


def measure(row: str) -> Row:
    import robustrl

    mode, _, seed = row.rpartition("-")
    with robustrl.launch(name=f"learn-{seed}", seed=int(seed), staleness=1 if mode == "async" else 0) as job:
        job.wait(timeout=900)
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
    }


def judge(bench: Bench) -> None:
    bench.target(
        "smallest gain over three seeds, async (points)",
        ">=",
        15,
        [f"async-{s}" for s in _SEEDS],
        lambda rows: min(r["points"] for r in rows),
    )
    bench.target(
        "smallest gain over three seeds, on-policy (points)",
        ">=",
        15,
        [f"on-policy-{s}" for s in _SEEDS],
        lambda rows: min(r["points"] for r in rows),
    )


def main(argv: Sequence[str]) -> int:
    return Bench("learn", _ROWS, measure).run(argv, judge)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
