"""What a notebook user waits for: ``import robustrl`` and ``launch()``; medians of fresh processes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from tests.benchmarks._report import Bench, Row

_IMPORT = "import time; t = time.perf_counter(); import robustrl; robustrl.launch; print(time.perf_counter() - t)"
_LAUNCH = """
import time, robustrl
t = time.perf_counter()
job = robustrl.launch(name="bench-api", profile="class", steps=1, run_dir={folder!r})
print(time.perf_counter() - t)
job.stop()
"""


def _seconds(code: str) -> float:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return float(done.stdout.split()[-1])


def measure(row: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        code, trials = (_IMPORT, 10) if row == "import" else (_LAUNCH.format(folder=folder), 5)
        times = [_seconds(code) for _ in range(trials)]
    return {"median_s": statistics.median(times), "max_s": max(times), "trials": trials}


def judge(bench: Bench) -> None:
    bench.target("import robustrl, median seconds", "<=", 0.2, ["import"], lambda rows: rows[0]["median_s"])
    bench.target("launch() returns, median seconds", "<=", 1.0, ["launch"], lambda rows: rows[0]["median_s"])


def main(argv: Sequence[str]) -> int:
    return Bench("api", ["import", "launch"], measure).run(argv, judge)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
