"""How good the detector is, and what it costs: drawn scenarios, 24 healthy hours, the incidents of others, peers, and live jobs.

The rows `suite`, `healthy`, `peers` and `incidents` are virtual time and depend on nothing but their seeds, which are fresh in each run and
part of the row. `live` and `cost` run real jobs (profile class). A delay is counted from the injection, the threshold included; what a row
calls late is beyond the threshold.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.benchmarks._report import Bench, Row

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))  # where the virtual world is
SUITE_PARTS, PART = 4, 560
HEALTHY_PARTS, HOURS = 3, 8
TRAIN, TEST = 120, 240
PEERS = ("cluster idle", "process idle", "heartbeat", "probe", "phi accrual", "adaptive quantile")
_LIVE = [*(f"live-kills-{i}" for i in range(4)), "live-stops"]
_ROWS = [*(f"suite-{i}" for i in range(SUITE_PARTS)), *(f"healthy-{i}" for i in range(HEALTHY_PARTS)), "incidents", "peers",
         *_LIVE, "cost"]


def suite() -> Row:
    """Every scenario as often as any other, parameters and seeds drawn anew."""
    from robustrl.replay.quality import exact_bounds
    from tests.benchmarks._detect_trials import SUITE, spread_over_cores, trial

    seed = random.SystemRandom().getrandbits(32)
    dice, names = random.Random(seed), list(SUITE)
    done = spread_over_cores(trial, [(names[i % len(names)], dice.getrandbits(32)) for i in range(PART)])
    counts = {key: sum(one[key] for one in done) for key in ("stated", "found", "false")}
    late = [beyond for one in done for beyond in one["late"]]
    confusion: dict[str, Counter[str]] = {}
    for one in done:
        row = confusion.setdefault(one["name"], Counter())
        row.update(trials=1, stated=one["stated"], found=one["found"], false=one["false"], wrong=bool(one["wrong"]))
    return {
        "seed": seed, "trials": len(done), "wrong": [{k: one[k] for k in ("name", "seed", "wrong")} for one in done if one["wrong"]],
        **counts, "recall_bounds": exact_bounds(counts["found"], counts["stated"]),
        "precision_bounds": exact_bounds(counts["found"], counts["found"] + counts["false"]),
        "late_median_s": statistics.median(seconds for seconds, _ in late), "late_max_s": max(seconds for seconds, _ in late),
        "late_max_samples": max(looks for _, looks in late), "confusion": confusion,
        "rules": Counter(rule for one in done for rule in one["rules"]),
    }  # fmt: skip


def healthy() -> Row:
    from robustrl.replay.quality import poisson_upper
    from tests.benchmarks._detect_trials import noisy_hour, spread_over_cores

    seed = random.SystemRandom().getrandbits(32)
    done = spread_over_cores(noisy_hour, [seed + i for i in range(HOURS)])
    counts = {key: sum(one[key] for one in done) for key in ("failed", "suspect", "reported", "steps", "disturbances")}
    false = [text for one in done for text in one["false"]]
    return {"seed": seed, "hours": HOURS, **counts, "false": false, "failed_per_hour_upper": poisson_upper(counts["failed"]) / HOURS}


def incidents() -> Row:
    from tests.benchmarks._detect_peers import incident
    from tests.benchmarks._detect_trials import SUITE, spread_over_cores

    seed = random.SystemRandom().getrandbits(32)
    table = spread_over_cores(incident, [(name, seed) for name in SUITE if name.startswith("incident/")])
    for row in table:
        missed = ", ".join(f"{peer}: {how}" for peer, how in row["published_that_miss"].items())
        caught = "NOT CAUGHT" if row["wrong"] else "caught"
        print(f"{row['name']:52} {caught:10} {row['rule']:14} {_seconds(row['after_s']):>8}  {missed}", file=sys.stderr)
    return {"seed": seed, "caught": sum(not row["wrong"] for row in table), "of": len(table), "table": table}


def peers() -> Row:
    from tests.benchmarks._detect_peers import compare, curves, draw
    from tests.benchmarks._detect_trials import spread_over_cores

    seed = random.SystemRandom().getrandbits(32)
    done = spread_over_cores(curves, draw(TRAIN, seed) + draw(TEST, seed + 1))
    return {"seed": seed, **compare(done[:TRAIN], done[TRAIN:])}


def measure(row: str) -> Row:
    kind = row.partition("-")[0]
    if kind == "live":
        from tests.benchmarks import _detect_live

        return _detect_live.stops() if row == "live-stops" else _detect_live.kills()
    if kind == "cost":
        from tests.benchmarks._detect_cost import cost

        return cost()
    return {"suite": suite, "healthy": healthy, "incidents": incidents, "peers": peers}[kind]()


def judge(bench: Bench) -> None:
    parts = [f"suite-{i}" for i in range(SUITE_PARTS)]
    hours = [f"healthy-{i}" for i in range(HEALTHY_PARTS)]
    bench.target("drawn trials", ">=", 2000, parts, _sum("trials"))
    bench.target("drawn trials with a miss, a false alarm or anything else that was not to be said", "<=", 0, parts, _count("wrong"))
    bench.target("latest statement, in samples after its threshold", "<=", 2.0, parts, _max("late_max_samples"))
    bench.target("healthy virtual hours", ">=", 24, hours, _sum("hours"))
    bench.target("roles called failed in them", "<=", 0, hours, _sum("failed"))
    bench.target("incidents not caught", "<=", 0, ["incidents"], lambda rows: rows[0]["of"] - rows[0]["caught"])
    for peer in PEERS:
        name = f"settings of {peer} that ours does not dominate"
        bench.target(name, "<=", 0, ["peers"], lambda rows, peer=peer: len(rows[0]["not_dominated"][peer]))
    bench.target("live kills", ">=", 100, _LIVE[:-1], _sum("kills"))
    bench.target("from SIGKILL to the verdict, seconds at p95", "<=", 0.1, _LIVE[:-1], _kill_p95)
    bench.target("from SIGSTOP to the verdict, seconds beyond the threshold", "<=", 0.3, ["live-stops"], _max("late_max_s"))
    bench.target("from SIGSTOP to the verdict, seconds before the threshold", "<=", 0.0, ["live-stops"], _max("early_max_s"))
    bench.target("roles called failed that were not stopped", "<=", 0, ["live-stops"], _count("also_failed"))
    bench.target("CPU of agents and detector beyond the same actors idle, share of a core", "<=", 0.03, ["cost"], _max("cpu_share"))
    bench.target("step time with over without, median", "<=", 1.01, ["cost"], _max("step_ratio"))
    bench.target("width of its 95% bootstrap interval", "<=", 0.04, ["cost"], _max("step_ratio_width"))


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _sum(key: str) -> Callable[[list[Row]], float]:
    return lambda rows: sum(row[key] for row in rows)


def _count(key: str) -> Callable[[list[Row]], float]:
    return lambda rows: sum(len(row[key]) for row in rows)


def _kill_p95(rows: list[Row]) -> float | None:
    from robustrl.replay.quality import percentile

    return percentile([delay for row in rows for delays in row["delays_s"].values() for delay in delays], 0.95)


def _max(key: str) -> Callable[[list[Row]], float]:
    return lambda rows: max(row[key] for row in rows)


def main(argv: Sequence[str]) -> int:
    return Bench("detect", _ROWS, measure).run(argv, judge)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
