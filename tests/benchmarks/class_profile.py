"""``profile="class"`` in a container of a class (tests/live/container.py; needs root): seconds to the first optimizer step, peak memory."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks._report import Bench, Row
from tests.live.container import MEMORY, peak_pss, small_container

_TRIALS = ["start-1", "start-2", "start-3"]
_JOB = """
import json
import robustrl
job = robustrl.launch(name="bench-class", profile="class", steps=10, run_dir="/tmp/runs")
print(job.run, flush=True)
job.wait(timeout=600)
print(json.dumps({"first": job.summary()["seconds_to_first_step"], "wall": job.summary()["wall_seconds"]}), flush=True)
"""


def measure(row: str) -> Row:
    with tempfile.TemporaryDirectory() as folder, small_container(_JOB, Path(folder, "tmp")) as process:
        assert process.stdout is not None
        run = process.stdout.readline().strip()
        peak = peak_pss(run, process)
        *_, last = process.stdout.read().splitlines()
    figures = json.loads(last)
    return {"first_step_s": figures["first"], "wall_s": figures["wall"], "peak_pss_gb": peak / 1e9}


def judge(bench: Bench) -> None:
    bench.target("seconds to the first optimizer step, largest", "<=", 60, _TRIALS, lambda rows: max(r["first_step_s"] for r in rows))
    bench.target("peak PSS of the whole job (GB), largest", "<=", MEMORY / 1e9, _TRIALS, lambda rows: max(r["peak_pss_gb"] for r in rows))


def main(argv: Sequence[str]) -> int:
    return Bench("class_profile", _TRIALS, measure).run(argv, judge)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
