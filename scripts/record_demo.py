"""Records what ``robustrl dashboard --demo`` plays, and the ghost that it races: a small job whose rollout is killed and whose trainer
hangs, and the same job once more with a full restart after each failure. Run it from a checkout; it takes about four minutes.
"""

from __future__ import annotations

import contextlib
import gzip
import tempfile
from pathlib import Path

import robustrl
from robustrl.core.audit import audit
from robustrl.faults import FaultList, Hang, Kill

SAMPLE = Path(__file__).resolve().parents[1] / "widgets" / "robustrl_widgets" / "sample"
FAULTS = FaultList(faults=[Kill("rollout-1", step=6, phase="decode"), Hang("trainer-0", step=14, phase="train")])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # so that no path of this machine is in the log
        job = robustrl.launch(name="demo", profile="class", steps=24, thresholds="lab")
        try:
            job.wait(step=1, timeout=240)
            job.schedule(FAULTS)
            job.wait(timeout=240)
        finally:
            job.stop()
        healed = [recovery for recovery in job.recoveries if recovery["outcome"] == "recovered"]
        findings = audit(job.events)
        if findings or len(healed) != len(FAULTS.faults):
            raise SystemExit(f"not a run to show: {len(healed)} recoveries, audit: {findings or 'clean'}")
        (SAMPLE / "demo.jsonl.gz").write_bytes(gzip.compress((job.run_dir / "events.jsonl").read_bytes(), 9, mtime=0))
        (SAMPLE / "ghost.json").write_bytes(job.record_ghost(timeout=400).read_bytes())
    for path in sorted(SAMPLE.iterdir()):
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
