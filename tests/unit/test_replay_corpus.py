"""The bundled runs: whole logs that an audit passes, stretches of them with their truth, and what our detector makes of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import robustrl
from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.core.thresholds import Thresholds
from robustrl.errors import ConfigError
from robustrl.replay.corpus import FOLDER, Corpus, read_log, write_log

RUNS = robustrl.corpus()
KINDS = {"kill", "hang", "wedge", "slow", "exception", "clean_exit", "memory_exhaustion", "corrupt_weights", "slow_tool", "freeze",
         "long_first_token", "long_advantage", "long_checkpoint", "idle_rollout", "first_compile"}  # fmt: skip
HARMLESS = ("healthy", "slow-tool", "freezes", "long-")


def test_there_are_runs_of_every_kind_and_they_are_small() -> None:
    assert len(RUNS) >= 12 and len(RUNS.seeds) >= 2, "some seeds can be held out"
    assert {mark.kind for run in RUNS.of(whole=True) for mark in run.truth} >= KINDS
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_000_000
    assert any(run.seconds > 100 for run in RUNS.of(whole=True)), "a long one"
    assert "trainer-hang-1" in RUNS and "trainer-hang-1" in repr(RUNS)


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("whole")])
def test_each_whole_log_passes_the_audit_and_gives_its_own_verdicts(name: str) -> None:
    run = RUNS[name]
    assert not run.problems and audit(list(run.entries)) == []
    assert robustrl.replay(run).as_live


def test_each_stretch_has_the_truth_that_its_log_has_there() -> None:
    for found in RUNS.contents.runs:
        run = RUNS[found.name]
        whole = next(each for each in RUNS.of(seed=found.seed, part=found.part, whole=True))
        low, high = whole.begin + found.start, whole.begin + found.end
        assert [(mark.role, mark.kind) for mark in run.truth] == [(m.role, m.kind) for m in whole.truth if low <= m.start <= high]
        inside = {entry.chain for entry in whole.entries if low <= entry.t <= high}
        kept = [msgspec.structs.replace(entry, seq=0, chain="") for entry in run.entries if entry.t >= low]
        assert len(kept) == len(inside), found.name
    assert not any(mark.expect == "failed" for name in RUNS if name.startswith(HARMLESS) for mark in RUNS[name].truth)


def test_the_labs_settings_find_every_fault_and_leave_the_healthy_alone() -> None:
    for run in RUNS.of():
        found = robustrl.replay(run, Thresholds.lab())
        assert not found.missed, f"{run.name}: {found.missed}"
        if run.name.startswith("healthy"):
            assert not found.false_alarms, f"{run.name}: {found.false_alarms}"


def test_a_file_that_was_changed_is_refused_and_so_is_an_unknown_name(tmp_path: Path) -> None:
    for path in FOLDER.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damaged = Corpus(tmp_path)
    file = damaged.contents.runs[0].file
    write_log(tmp_path / file, read_log(tmp_path / file)[:40])
    with pytest.raises(ConfigError, match="chain"):
        damaged[damaged.contents.runs[0].name]
    (tmp_path / file).write_bytes((FOLDER / file).read_bytes()[:-9])
    with pytest.raises(ConfigError, match="cannot be read"):
        damaged[damaged.contents.runs[0].name]
    with pytest.raises(ConfigError, match="trainer-hang-1"):
        RUNS["nobody"]


def test_live_verdicts_of_the_last_part_are_there_to_compare_with() -> None:
    said = [entry.event for run in RUNS.of(part=2, whole=True) for entry in run.entries if isinstance(entry.event, ev.Verdict)]
    assert {verdict.rule for verdict in said if verdict.kind == "failed"} >= {"exited", "exception", "no_compute", "no_marks", "heartbeat"}
