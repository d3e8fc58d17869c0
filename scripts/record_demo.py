"""Records the run that ``robustrl dashboard --demo`` plays: a small job, a rollout killed, the trainer hung. Run it from a checkout."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

import robustrl
from robustrl.faults import Hang, Kill

TARGET = Path(__file__).parents[1] / "widgets" / "robustrl_widgets" / "sample" / "demo.jsonl.gz"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = robustrl.launch(name="demo", profile="class", steps=24, thresholds="lab", run_dir=folder)
        try:
            job.wait(step=4, timeout=240)
            job.inject(Kill("rollout-1")).wait("confirmed", timeout=120)
            job.wait(step=12, timeout=120)
            job.inject(Hang("trainer-0")).wait("confirmed", timeout=120)
            job.wait(timeout=240)
        finally:
            job.stop()
        TARGET.write_bytes(gzip.compress((job.run_dir / "events.jsonl").read_bytes(), 9, mtime=0))
        print(f"{TARGET}: {TARGET.stat().st_size} bytes, {job.step} optimizer steps")


if __name__ == "__main__":
    main()
