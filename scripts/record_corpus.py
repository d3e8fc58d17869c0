"""Records the runs behind ``robustrl.corpus()``: live jobs (class profile), each led through every fault that the profile allows.

    python scripts/record_corpus.py --seed 1 --part 1           into robustrl/replay/recorded; four minutes at most

    python scripts/record_corpus.py --seed 0 --part 2 --log runs/NAME       takes the log of a finished job: a stretch around each fault

Writes the whole log, and the table of contents anew: name, first and last second of each stretch. Victims that are any of a kind, and
durations, are drawn by the seed. Part 1 is recorded under thresholds of minutes, so that the live job steps in nowhere and every silence is
there in full; in part 2 it repairs what it finds. Paths of this machine in texts are cut to what follows the checkout or the environment,
and the chain is made anew.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

import robustrl
from robustrl import faults as f
from robustrl.core import events as ev
from robustrl.core.roles import RoleId
from robustrl.core.thresholds import Thresholds
from robustrl.job import Job
from robustrl.replay.corpus import CONTENTS, FOLDER, Contents, Stretch, read_log, write_log
from robustrl.replay.run import Run

_PATIENCE = 90.0
_PATH = re.compile(r"/(?:work|tmp|root|home|opt|usr)/[^\s\"\\,:)]*?((?:site-packages|lib/python[\d.]+|robustrl)/[^\s\"\\,:)]*"
                   r"|(?=[\s\"\\,:)]))")  # fmt: skip
_BEFORE, _AFTER, _GAP = 4.0, 5.0, 0.3
"""Seconds of calm around a fault, and between it and another one."""
_CALM = 1.5
"""Seconds between two faults, beside an optimizer step."""


class Recorder:
    def __init__(self, job: Job, dice: random.Random, seed: int, part: int, file: str) -> None:
        self.job, self.dice, self.seed, self.part, self.file = job, dice, seed, part, file
        self.found: list[Stretch] = []

    def stretch(self, name: str, about: str, do: Callable[[], None]) -> None:
        """One run of the corpus: what ``do`` does, and the calm before and after it."""
        begin = self.job.events[0].t
        start = time.monotonic() - begin
        do()
        self.calm()
        self.add(name, about, start, time.monotonic() - begin, str(self.seed))
        print(f"{name}: {start:.1f} to {time.monotonic() - begin:.1f} s", flush=True)

    def add(self, name: str, about: str, start: float, end: float, of: str) -> None:
        self.found.append(Stretch(name=f"{name}-{of}", about=about, file=self.file, seed=self.seed, part=self.part, start=round(start, 2),
                                  end=round(end + 0.005, 2)))

    def calm(self) -> None:
        """Another optimizer step: two failures in one step would restart everything."""
        self.job.wait(step=self.job.step + 2, timeout=_PATIENCE)
        time.sleep(_CALM)

    def let(self, *faults: f.Fault, stage: str = "over") -> None:
        """One after the other, a step between them."""
        for place, fault in enumerate(faults):
            if place:
                self.calm()
            self.job.inject(fault).wait(stage, timeout=_PATIENCE)

    def s(self, low: float, high: float) -> float:
        return round(self.dice.uniform(low, high), 2)


def patient(r: Recorder) -> None:
    s = r.s
    r.stretch("healthy", "nothing happens", lambda: time.sleep(14.0))
    for name, about, plan in (
        ("slow-tool", "two tool calls take long", [f.SlowTool("agent_worker", seconds=s(6, 9)) for _ in range(2)]),
        ("long-first-token", "no token for a while, twice, though the engine loop turns",
         [f.LongFirstToken("rollout", seconds=s(2.5, 5)) for _ in range(2)]),
        ("freezes", "short stops of a rollout, the trainer, the request manager and an agent worker",
         [f.Freeze("rollout", phase="decode", seconds=s(0.6, 1.4)), f.Freeze("trainer", phase="train", seconds=s(0.4, 1.0)),
          f.Freeze("request_manager", seconds=s(0.8, 1.8)), f.Freeze("agent_worker", seconds=s(0.8, 1.8))]),
        ("long-phases", "a long advantage phase, a long snapshot, a rollout without work",
         [f.LongAdvantage(seconds=s(2, 4)), f.LongCheckpoint(seconds=s(2, 4)), f.IdleRollout("rollout", seconds=s(3, 5))]),
        ("trainer-hang", "the trainer is stopped in its train phase", [f.Hang("trainer", phase="train", seconds=s(8, 10))]),
        ("rollout-hang", "a rollout is stopped while it decodes", [f.Hang("rollout", phase="decode", seconds=s(9, 11))]),
        ("trainer-wedge", "a micro-batch never ends, and burns a core", [f.Wedge("trainer", phase="train", seconds=s(12, 14))]),
        ("rollout-wedge", "an engine loop is stuck in a wait", [f.Wedge("rollout", phase="decode", seconds=s(9, 11), busy=False)]),
        ("manager-hang", "the rollout manager is stopped", [f.Hang("rollout_manager", seconds=s(7, 9))]),
        ("worker-hang", "an agent worker is stopped", [f.Hang("agent_worker", seconds=s(7, 9))]),
        ("slow-rollout", "a rollout runs a third of the time", [f.Slow("rollout", seconds=s(4, 6), share=0.33)]),
    ):
        r.stretch(name, about, lambda plan=plan: r.let(*plan))


def repaired(r: Recorder) -> None:
    r.stretch("healthy-again", "nothing happens", lambda: time.sleep(10.0))
    for name, about, stage, plan in (
        ("kills", "a rollout, the trainer and the task runner are killed", "confirmed",
         [f.Kill("rollout"), f.Kill("trainer"), f.Kill("task_runner")]),
        ("ends", "an exception in a rollout, an agent worker that exits", "confirmed",
         [f.RaiseException("rollout"), f.CleanExit("agent_worker")]),
        ("memory", "an agent worker runs out of memory", "confirmed", [f.MemoryExhaustion("agent_worker")]),
        ("bad-bytes", "the weights that the state keeper serves are damaged", "injected", [f.CorruptWeights("state_keeper")]),
    ):
        r.stretch(name, about, lambda plan=plan, stage=stage: r.let(*plan, stage=stage))
    r.stretch("first-compile", "a rollout's next life begins with a long compile", lambda: _compile(r))
    r.stretch("sharp-eyes", "thresholds of seconds: the live job finds a stopped trainer and rollout, and a stuck one", lambda: _sharp(r))


def _compile(r: Recorder) -> None:
    armed = r.job.inject(f.FirstCompile("rollout-0", seconds=r.s(3, 5)))
    r.let(f.Kill("rollout-0"), stage="confirmed")
    armed.wait("over", timeout=_PATIENCE)


def _sharp(r: Recorder) -> None:
    r.job.thresholds.update(dict(Thresholds.lab().items()))
    r.let(f.Hang("trainer", phase="train"), f.Hang("rollout", phase="decode"), f.Wedge("rollout", phase="decode"), stage="confirmed")


def record(folder: Path, seed: int, part: int) -> None:
    file = f"seed-{seed}.part-{part}.jsonl.xz"
    with tempfile.TemporaryDirectory() as runs, robustrl.launch(
        name=f"corpus-{seed}-{part}", profile="class", seed=seed, task="arithmetic_tool", steps=100_000, prompts_per_step=4,
        samples_per_prompt=4, rollouts=2, agent_workers=2, evaluation_prompts=0, checkpoint_every=0, restarts=100, thresholds="paper",
        run_dir=runs,
    ) as job:  # fmt: skip
        job.wait(step=3, timeout=240)
        recorder = Recorder(job, random.Random(100 * seed + part), seed, part, file)
        try:
            (patient if part == 1 else repaired)(recorder)
        finally:
            job.stop()
            keep(folder, file, seed, part, Run.load(job.run_dir), recorder.found)


def keep(folder: Path, file: str, seed: int, part: int, log: Run, found: list[Stretch]) -> None:
    whole = Stretch(name=f"whole-{seed}.{part}", about="the whole job", file=file, seed=seed, part=part, start=0.0, end=log.seconds)
    write_log(folder / file, [without_paths(entry) for entry in log.entries])
    update(folder, file, [whole, *found], read_log(folder / file)[-1].chain)
    print(file, (folder / file).stat().st_size, "bytes,", len(log.entries), "entries,", round(log.seconds), "s")


def taken(folder: Path, seed: int, part: int, path: Path) -> None:
    """The log of a finished job: a stretch around each of its faults, up to the next one, and the calm before the first."""
    log, file = Run.load(path), f"seed-{seed}.part-{part}.jsonl.xz"
    starts = [mark.start - log.begin for mark in log.truth]
    steps = [entry.t - log.begin for entry in log.entries if isinstance(entry.event, ev.OptimizerStepCommitted)]
    found = [Stretch(name=f"healthy-{seed}", about="nothing happens", file=file, seed=seed, part=part,
                     start=round(max(starts[0] - 20, steps[0]), 2), end=round(starts[0] - _GAP, 2))]  # fmt: skip
    seen: Counter[tuple[str, str]] = Counter()
    for place, mark in enumerate(log.truth):
        start, over = starts[place], mark.end - log.begin
        following = min([time for time in starts[place + 1:] if time > start + _GAP], default=log.seconds)
        if mark.role == "supervisor" and mark.kind != "kill":
            continue  # the judge does not judge itself
        kind = str(RoleId.parse(mark.role).kind)
        seen[kind, mark.kind] += 1
        number = f"-{seen[kind, mark.kind]}" if seen[kind, mark.kind] > 1 else ""
        before = max([end - log.begin for end in (each.end for each in log.truth[:place]) if end - log.begin < start], default=0.0)
        name, about = f"{mark.kind}-{kind}{number}-{seed}".replace("_", "-"), f"{mark.kind} of {mark.role}, repaired"
        found.append(Stretch(name=name, about=about, file=file, seed=seed, part=part, start=round(max(before + _GAP, start - _BEFORE), 2),
                             end=round(min(following - _GAP, over + _AFTER), 2)))  # fmt: skip
    keep(folder, file, seed, part, log, found)


def without_paths(entry: ev.Entry) -> ev.Entry:
    text = ev.encoder.encode(entry).decode()
    return ev.entry_decoder.decode(_PATH.sub(lambda match: match[1] or match[0].rpartition("/")[2], text))


def update(folder: Path, file: str, found: list[Stretch], chain: str) -> None:
    path = folder / CONTENTS
    old = msgspec.json.decode(path.read_bytes(), type=Contents) if path.exists() else Contents(files={}, runs=[])
    runs = sorted([*(run for run in old.runs if run.file != file), *found], key=lambda run: (run.seed, run.part, run.start))
    new = Contents(files=dict(sorted({**old.files, file: chain}.items())), runs=runs)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(new), indent=1) + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--part", type=int, choices=(1, 2), required=True)
    parser.add_argument("--log", type=Path, help="the directory of a finished run, instead of recording one")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.log:
        taken(options.folder, options.seed, options.part, options.log)
    else:
        record(options.folder, options.seed, options.part)


if __name__ == "__main__":
    main()
