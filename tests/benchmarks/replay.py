"""How fast a recorded run is replayed: an hour of 64 roles, a virtual one (tests/unit/detection_world.py), with a fault every five minutes.

`load` reads it from a gzipped file and makes it ready, once; `replay` asks one setting of it, on one core, by process time; `sweep` a
thousand, on two cores, by the clock. `memory_bytes` is the largest resident size of this process (workers share the run with it).
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.benchmarks._report import Bench, Row

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))  # where the virtual world is
SECONDS, EVERY, SETTINGS = 3600.0, 300.0, 1000
_RANGES = {"rollout.no_tokens": (2.0, 9.0), "rollout.heartbeat": (0.5, 2.0), "trainer.no_compute": (1.0, 9.0),
           "management.silent": (2.0, 9.0), "node.silent": (3.0, 9.0)}  # fmt: skip


def record(path: Path, seconds: float = SECONDS, every: float = EVERY) -> int:
    """Writes the run, and gives its number of roles."""
    from detection_world import Fault, Shape, World

    from robustrl.core.thresholds import Thresholds
    from robustrl.replay.run import Run

    world = World(Shape(ranks=8, rollouts=43, workers=4, batch=256, tokens=120), 5, Thresholds.lab(), restarts=3.0)
    kinds = [("freeze", "rollout-3", "decode"), ("freeze", "trainer-2", "train"), ("kill", "rollout-7", ""),
             ("freeze", "rollout_manager", "")]  # fmt: skip
    for i in range(int(seconds / every)):
        kind, role, phase = kinds[i % len(kinds)]
        world.plan(Fault(kind, role, at=every * (i + 0.5), phase=phase))
    world.run(seconds)
    Run.of(world.entries).save(path)
    path.with_suffix(".faults").write_text("\n".join(f"{fault.role} {at}" for at, fault in world.injected))
    return len(world.roles)


def loaded(path: Path) -> Any:
    from robustrl.replay.run import Run

    run = Run.load(path)
    for line in path.with_suffix(".faults").read_text().splitlines():
        role, at = line.split()
        run = run.annotate(role, float(at) - run.begin)
    return run


@cache
def _hour() -> tuple[Any, Row]:
    path = Path("runs", "bench", "hour.jsonl.gz")
    path.parent.mkdir(parents=True, exist_ok=True)
    record(path)
    begun = time.process_time()
    run = loaded(path)
    read = time.process_time()
    run.recording, run.costs  # noqa: B018
    ready = time.process_time()
    size = path.stat().st_size
    path.unlink()
    path.with_suffix(".faults").unlink()
    return run, {"roles": len(run.roles), "entries": len(run.entries), "seconds": run.seconds, "file_bytes": size,
                 "load_s": read - begun, "ready_s": ready - read, "memory_bytes": _memory()}  # fmt: skip


def measure(row: str) -> Row:
    from robustrl.core.thresholds import Thresholds
    from robustrl.replay.replaying import replay
    from robustrl.replay.sweeping import sweep

    run, facts = _hour()
    if row == "load":
        return facts
    if row == "replay":
        times = []
        for i in range(5):
            begun = time.process_time()
            found = replay(run, Thresholds.lab().replace("job.start", 200.0 + i))
            times.append(time.process_time() - begun)
        return {"roles": len(run.roles), "seconds": run.seconds, "first_s": times[0], "cpu_s": sorted(times)[2], "outcome": repr(found)}
    begun = time.monotonic()
    swept = sweep(run, _RANGES, samples=2 * SETTINGS, seed=1, processes=2, progress=False)
    took = time.monotonic() - begun
    done = len(swept.settings)
    return {"settings": done, "wall_s": took, "for_1000_s": took / done * SETTINGS, "memory_bytes": _memory(),
            "recommended": repr(swept.recommended)}  # fmt: skip


def _memory() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def judge(bench: Bench) -> None:
    bench.target("one hour of 64 roles under one setting, first time, CPU seconds", "<=", 1.0, ["replay"], _get("first_s"))
    bench.target("1,000 settings on two cores, seconds", "<=", 60.0, ["sweep"], _get("for_1000_s"))


def _get(key: str) -> Callable[[list[Row]], float]:
    return lambda rows: rows[0][key]


def main(argv: Sequence[str]) -> int:
    return Bench("replay", ["load", "replay", "sweep"], measure).run(argv, judge)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
