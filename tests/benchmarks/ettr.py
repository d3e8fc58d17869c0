"""What share of the time counts? Whole runs with the paper's fault frequencies, under isolated and full recovery, warm and cold.

First the batch is sized for optimizer steps of about 4 s. Then, for each way to recover, a run of half the length with three faults
measures the stages of a recovery; from them the loss of the long runs is predicted before they are made: faults x (detect + restart +
reconnect + mean work redone). All runs have the same seed and the same schedules. On a quiet reference machine a long run takes about five
minutes, all rows about an hour and three quarters.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from tests.benchmarks._report import Bench, Row

_STEPS, _STEP_SECONDS = 60, 4.0
_WAYS = ("isolated-warm", "full-cold", "full-warm", "isolated-cold")
_MAIN = _WAYS[:2]
_PERCENT = (0, 2, 5, 10)
_ROWS = [
    "calibrate",
    *(f"probe-{way}" for way in _WAYS),
    *(f"{way}-{percent}" for percent in (10, 0, 5, 2) for way in _MAIN),
    *(f"{way}-10" for way in _WAYS[2:]),
    "isolated-warm-mixed",
]
_PROBE_STEPS = 30
"""With the faults as far apart as in the long runs at most, so that a warm standby is ready again in time, as there."""


class _Ettr(Bench):
    def __init__(self) -> None:
        super().__init__("ettr", _ROWS, self._measure)

    def _measure(self, row: str) -> Row:
        if row == "calibrate":
            return calibrate()
        if "calibrate" not in self.done:
            self.done["calibrate"] = calibrate()
        prompts = self.done["calibrate"]["prompts_per_step"]
        if row.startswith("probe-"):
            return long_run(row.removeprefix("probe-"), 10, prompts, steps=_PROBE_STEPS)
        way, _, kind = row.rpartition("-")
        if kind == "mixed":
            return long_run(way, 10, prompts, mixed=True)
        return long_run(way, int(kind), prompts)


def calibrate() -> Row:
    """Prompts per step that make a step of about four seconds, from the time that a step of 64 takes."""
    import robustrl

    with robustrl.launch(name="bench-size", steps=8, evaluation_prompts=0, prompts_per_step=64) as job:
        job.wait(timeout=900)
        seconds = job.summary()["seconds_per_step"]
    return {"seconds_with_64": seconds, "prompts_per_step": max(16, round(64 * _STEP_SECONDS / seconds))}


def long_run(way: str, percent: float, prompts: int, *, steps: int = _STEPS, mixed: bool = False) -> Row:
    from robustrl.faults import Hang, Kill, PaperFrequency
    from tests.benchmarks._faulty import job_with

    with job_with(*way.split("-"), name="bench-ettr", steps=steps, seed=0, prompts_per_step=prompts, first_step=1) as job:
        if percent:
            job.schedule(PaperFrequency(percent=percent, fault=Kill("trainer"), seed=0))
        if mixed:
            job.schedule(PaperFrequency(percent=percent, fault=Kill("rollout"), seed=1))
            job.schedule(PaperFrequency(percent=percent / 2, fault=Hang("rollout"), seed=2))
            job.schedule(PaperFrequency(percent=percent / 2, fault=Kill("request_manager"), seed=3))
        job.wait(timeout=3600)
        account, recoveries, summary = job.ettr(), job.recoveries, job.summary()
    done = [row for row in recoveries if row["outcome"] == "recovered" and row["faults"]]
    loss = account.lost + account.redone
    found: Row = {
        "recovery": way,
        "faults": account.faults,
        "recovered": account.recovered,
        "span_s": round(account.span, 2),
        "seconds_per_step": summary["seconds_per_step"],
        "ettr_strict": account.ettr_strict,
        "ettr_paper": account.ettr_paper,
        "lost_s": round(account.lost, 2),
        "redone_s": round(account.redone, 2),
        "goodput": account.goodput,
        "mttr": {stage: round(spread.mean, 3) for stage, spread in account.mttr.items()},
    }
    if account.faults:
        found["loss_per_fault_s"] = loss / account.faults
        found["model_loss_per_fault_s"] = sum(row["total"] + row["redone"] for row in done) / account.faults
    return found


def judge(bench: Bench) -> None:
    bench.target("ettr_strict, isolated warm at 10%", ">=", 0.88, ["isolated-warm-10"], lambda rows: rows[0]["ettr_strict"])
    name = "end to end at 10%: isolated warm faster than full cold (%)"
    bench.target(name, ">=", 20, ["isolated-warm-10", "full-cold-10"], lambda rows: 100 * (1 - rows[0]["span_s"] / rows[1]["span_s"]))
    for way in _MAIN:
        rows = [f"probe-{way}", *(f"{way}-{percent}" for percent in _PERCENT if percent)]
        name = f"{way}: measured loss off the predicted one, largest (share of the span)"
        bench.target(name, "<=", 0.05, rows, _off)
    bench.target("at 0% the two differ by at most (share)", "<=", 0.05, ["isolated-warm-0", "full-cold-0"], _apart)
    print(_line(bench), file=sys.stderr)


def _off(rows: list[Row]) -> float:
    """The prediction is the probe's, the first row's, alone."""
    per_fault = rows[0]["model_loss_per_fault_s"]
    return max(abs(row["lost_s"] + row["redone_s"] - row["faults"] * per_fault) / row["span_s"] for row in rows[1:])


def _apart(rows: list[Row]) -> float:
    return abs(rows[0]["span_s"] - rows[1]["span_s"]) / statistics.fmean(row["span_s"] for row in rows)


def _line(bench: Bench) -> str:
    """In words what the gain at 2% is: small, as a job of this length has one fault then."""
    rows = [bench.done.get(f"{way}-2") for way in _MAIN]
    if None in rows:
        return "at 2%: not measured yet"
    isolated, full = rows[0]["span_s"], rows[1]["span_s"]
    gain = 100 * (1 - isolated / full)
    return f"at 2% (one fault) isolated warm takes {isolated:.0f} s and full cold {full:.0f} s: a gain of {gain:.1f}%, small"


def main(argv: Sequence[str]) -> int:
    return _Ettr().run(argv, judge)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
