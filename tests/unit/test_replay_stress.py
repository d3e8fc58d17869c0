"""Excerpts and stressed copies of runs: still logs that a detector takes, and what becomes of delays and of false alarms in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from detection_world import Fault, Shape, World

from robustrl import Run, replay
from robustrl.core import events as ev
from robustrl.core.thresholds import KEEP_ALIVE, Thresholds
from robustrl.errors import ConfigError
from robustrl.replay.stress import jitter, splice, stretch

LAB = Thresholds.lab()
PATIENT = Thresholds.paper()


def recorded(seed: int, *faults: Fault, seconds: float = 30.0) -> Run:
    """A virtual job that nobody steps into; its faults are marked."""
    world = World(Shape.draw(random.Random(seed)), seed, PATIENT)
    world.plan(*faults)
    world.run(seconds)
    run = Run.of(world.entries)
    for at, fault in world.injected:
        run = run.annotate(fault.role, at - run.begin, at - run.begin + fault.seconds if fault.seconds else None)
    return run


@cache
def hung() -> Run:
    return recorded(3, Fault("freeze", "rollout-0", seconds=12.0, phase="decode"))


@cache
def dead_trainer() -> Run:
    return recorded(4, Fault("freeze", "trainer-0", seconds=12.0, phase="train"))


@cache
def healthy() -> Run:
    return recorded(5, seconds=20.0)


def is_sound(run: Run, path: Path) -> None:
    """What a file of it gives back is the same log, without a problem."""
    Run.of(run.entries).save(path)
    again = Run.load(path)
    assert list(again.entries) == list(run.entries) and not again.problems


@pytest.mark.parametrize("made", [hung, dead_trainer], ids=["rollout", "trainer"])
def test_an_excerpt_says_what_the_cut_says(made: Callable[[], Run], tmp_path: Path) -> None:
    run = made()
    (mark,) = run.truth
    start, end = mark.start - run.begin - 3.0, min(run.seconds, mark.end - run.begin + 3.0)
    part, small = run.cut(start, end), run.excerpt(start, end, "small")
    assert len(small.entries) < len(part.entries) and small.name == "small"
    is_sound(small, tmp_path / "small.jsonl.gz")
    for changes in ({}, {"rollout.no_tokens": 1.5, "rollout.heartbeat": 1.0, "trainer.no_compute": 1.0}):
        one, other = replay(part, LAB.updated(changes)), replay(small, LAB.updated(changes))
        assert [(o.outcome, o.role, o.rule) for o in one.outcomes] == [(o.outcome, o.role, o.rule) for o in other.outcomes]
        assert one.delays == pytest.approx(other.delays, abs=0.02) and one.delays


def test_an_excerpt_knows_who_lives_and_which_settings_hold() -> None:
    small = healthy().excerpt(10.0, 15.0)
    assert small.roles == healthy().roles and small.thresholds[-1][1] == PATIENT
    assert small.begin >= healthy().begin + 10.0 - 2.0 and [entry.seq for entry in small.entries] == list(range(1, len(small.entries) + 1))
    assert not replay(small, LAB).outcomes


@pytest.mark.parametrize("factor", [0.5, 10.0, 100.0])
def test_a_stretched_run_is_a_log_and_its_node_agents_speak_at_their_usual_pace(factor: float, tmp_path: Path) -> None:
    run = stretch(hung(), factor)
    is_sound(run, tmp_path / "long.jsonl.gz")
    assert run.seconds == pytest.approx(factor * hung().seconds) and run.truth[0].lasts == pytest.approx(12.0 * factor)
    times = [entry.t for entry in run.entries if isinstance(entry.event, ev.RoleSample) and entry.event.role == "rollout-0"]
    assert max(b - a for a, b in zip(times, times[1:], strict=False)) <= 1.5 * KEEP_ALIVE


def test_a_fault_is_found_after_as_many_seconds_however_slow_the_job() -> None:
    settings = LAB.updated({"rollout.grace": 300.0})
    usual = replay(hung(), settings).delays
    for factor in (10.0, 100.0):
        assert replay(stretch(hung(), factor), settings).delays == pytest.approx(usual, abs=2.5)


def test_seconds_that_fit_a_fast_job_cry_wolf_in_a_slow_one_and_multiples_do_not() -> None:
    slow = stretch(healthy(), 100.0)
    assert not replay(healthy(), LAB).false_alarms
    assert replay(slow, LAB).false_alarms
    scaled = LAB.updated({path: 100.0 * LAB.get(path) for path in ("job.stall", "trainer.no_compute", "trainer.no_marks", "trainer.silent",
                          "trainer.grace", "rollout.no_tokens", "rollout.wedged", "rollout.grace", "job.process_group")})  # fmt: skip
    assert not replay(slow, scaled).false_alarms


def test_jitter_is_seeded_and_keeps_what_happened(tmp_path: Path) -> None:
    one, again, other = jitter(hung(), 1), jitter(hung(), 1), jitter(hung(), 2)
    assert list(one.entries) == list(again.entries) != list(other.entries)
    is_sound(one, tmp_path / "jittered.jsonl.gz")
    assert [mark.role for mark in one.truth] == ["rollout-0"] and len(replay(one, LAB).detected) == 1
    assert 0.5 * hung().seconds <= one.seconds <= 2.0 * hung().seconds
    assert jitter(hung(), 7, most=1.0).seconds == pytest.approx(hung().seconds)


def test_spliced_pieces_are_one_log_with_all_their_truth(tmp_path: Path) -> None:
    pieces = [run.excerpt(4.0, 28.0) for run in (hung(), dead_trainer())] + [healthy().excerpt(4.0, 12.0)]
    run = splice(pieces, 6, seed=3)
    is_sound(run, tmp_path / "spliced.jsonl.gz")
    assert list(run.entries) == list(splice(pieces, 6, seed=3).entries)
    faults = [mark for mark in run.truth if mark.expect == "failed"]
    assert faults and len(replay(run, LAB).detected) == len(faults)


def test_what_makes_no_sense_is_refused() -> None:
    for wrong in (0.0, -1.0, float("inf")):
        with pytest.raises(ConfigError, match="factor"):
            stretch(healthy(), wrong)
    with pytest.raises(ConfigError, match="most"):
        jitter(healthy(), 1, most=0.5)
    with pytest.raises(ConfigError, match="pieces"):
        splice([], 3, seed=1)


def test_what_would_not_end_is_refused_before_it_begins() -> None:
    for factor in (1e9, 1e300, 2e6):
        with pytest.raises(ConfigError, match=r"factor = .*: must be at most \d.* for this run: more than 2,500,000 samples are not made"):
            stretch(healthy(), factor)
    with pytest.raises(ConfigError, match="most = 1e.300: could make .* and more than 2,500,000"):
        jitter(healthy(), 1, most=1e300)
    with pytest.raises(ConfigError, match="count = 1000000000: must be a whole number of at least 1 and at most 10,000"):
        splice([healthy()], 10**9, seed=1)
    with pytest.raises(ConfigError, match="count = 10000: would make"):
        splice([healthy()], 10_000, seed=1)


@pytest.mark.parametrize("value", ["2", None, True, [2], float("nan")])
def test_what_is_no_number_is_named(value: object) -> None:
    with pytest.raises(ConfigError, match="factor = "):
        stretch(healthy(), value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="most = "):
        jitter(healthy(), 1, most=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="count = "):
        splice([healthy()], value, seed=1)  # type: ignore[arg-type]
