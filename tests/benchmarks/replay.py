"""How fast a recorded run is replayed: an hour of 64 roles, a virtual one (tests/unit/detection_world.py), with a fault every five minutes.

`load` reads it from a gzipped file and makes it ready, once; `replay` asks one setting of it, on one core, by process time; `sweep` a
thousand, on two cores, by the clock. `memory_bytes` is the largest resident size of this process (workers share the run with it). `slider`
is the kernel's half of a slider of the TuningLab, by the clock: ten minutes of the bundled runs, one move after the other. `held-out`
chooses a setting on the bundled runs of some jobs and compares it with the lab's on those of another, jittered copies included. `live`
holds predictions against a live job (five minutes; see _replay_live.py).
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from tests.benchmarks._report import Bench, Row

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))  # where the virtual world is
SECONDS, EVERY, SETTINGS = 3600.0, 300.0, 1000
ROWS = ("load", "replay", "sweep", "slider", "held-out", "live")
HELD_OUT = {"rollout.no_tokens": (0.6, 4.0), "rollout.heartbeat": (0.4, 3.0), "rollout.wedged": (1.0, 6.0),
            "trainer.no_compute": (0.6, 4.0), "trainer.no_marks": (1.0, 12.0), "trainer.silent": (1.0, 6.0),
            "management.silent": (1.2, 6.0)}  # fmt: skip
"""Ranges from which settings are drawn."""
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


def slider(moves: int = 200) -> Row:
    from robustrl_widgets import tuning
    from robustrl_widgets.channel import Channel

    from robustrl.core.thresholds import Thresholds
    from robustrl.replay.corpus import corpus
    from robustrl.replay.stress import splice

    run = splice(corpus().of(part=1), 40, seed=1)
    run = run.cut(0.0, min(run.seconds, 600.0))
    begun = time.monotonic()
    material, channel, dice, took = tuning.Material([run], Thresholds.lab()), Channel(), random.Random(1), []
    ready = time.monotonic() - begun
    still = tuning.still(material, 0)
    for _ in range(moves):
        begun = time.monotonic()
        trial = material.trial({"trainer.no_compute": dice.uniform(0.5, 5.0), "rollout.no_tokens": dice.uniform(3.0, 5.0),
                                "management.silent": dice.uniform(1.2, 9.0)})  # fmt: skip
        channel.push({**still, "a": tuning.side(trial, run, 0)}, 0.0, 0.0)
        took.append(time.monotonic() - begun)
    took.sort()
    return {"seconds": run.seconds, "entries": len(run.entries), "ready_s": ready, "moves": moves, "median_s": took[moves // 2],
            "p95_s": took[int(0.95 * moves)], "max_s": took[-1]}  # fmt: skip


def held_out(samples: int = 1500, processes: int = 2) -> Row:
    """Chosen on the runs of all seeds but the last, held against the lab's settings on the last one's. Copies are jittered."""
    from robustrl.core.thresholds import Thresholds
    from robustrl.replay.corpus import corpus
    from robustrl.replay.proof import prove
    from robustrl.replay.stress import jitter
    from robustrl.replay.sweeping import sweep

    *others, last = corpus().seeds
    train = [run for seed in others for found in corpus().of(seed=seed) for run in (found, *(jitter(found, dice) for dice in (1, 2)))]
    test = [run for found in corpus().of(seed=last) for run in (found, *(jitter(found, dice) for dice in (11, 12)))]
    found = sweep(train, HELD_OUT, base=Thresholds.lab(), samples=samples, seed=3, processes=processes, progress=False)
    proof = prove(found.recommended.thresholds, Thresholds.lab(), test)
    return {"settings": len(found.settings), "train_runs": len(train), **msgspec.structs.asdict(proof),
            "recommended": repr(found.recommended)}  # fmt: skip


def measure(row: str) -> Row:
    if row == "slider":
        return slider()
    if row == "held-out":
        return held_out()
    if row == "live":
        from tests.benchmarks._replay_live import cross_check, draw

        return cross_check(draw(20), "bench-replay")
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
    bench.target("kernel's half of a slider on ten minutes, p95, seconds", "<=", 0.1, ["slider"], _get("p95_s"))
    bench.target("faults of held-out runs that the recommended setting misses", "<=", 0, ["held-out"], _get("missed"))
    bench.target("seconds that it saves against the lab's on them, lower end of the interval", ">=", 0.01, ["held-out"], _get("low"))
    bench.target("live verdicts off by more than a sample and the noise, of 20", "<=", 0, ["live"],
                 lambda rows: rows[0]["settings"] - rows[0]["within"])


def _get(key: str) -> Callable[[list[Row]], float]:
    return lambda rows: rows[0][key]


def main(argv: Sequence[str]) -> int:
    return Bench("replay", ROWS, measure).run(argv, judge)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
