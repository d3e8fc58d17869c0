"""What live tests share: jobs of their own in a folder of their own, and the proof that nothing of a run is left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import robustrl
from robustrl.job import Job
from robustrl.runtime import registry
from robustrl.runtime.processes import find_marked

CLEAN_WITHIN = 15.0
"""Seconds after its end in which everything of a run is gone."""


def leftovers(run: str) -> list[str]:
    """Processes with the run's mark, and the folders and shared memory of the run."""
    found = [f"process {process.pid}" for process in find_marked(run)]
    return found + [str(path) for path in (registry.temp_dir(run), registry.shm_dir(run)) if path.exists()]


def assert_clean(run: str, within: float = CLEAN_WITHIN) -> None:
    deadline = time.monotonic() + within
    while (left := leftovers(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"left {within} s after the end of {run}: {left}"


def wait_for(what: str, condition: Callable[[], Any], timeout: float = 60.0) -> Any:
    """The first true value of ``condition``; fails naming ``what``."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    pytest.fail(f"{what}: not within {timeout} s")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """``launch(**settings)``: a small job (profile class by default); stopped and checked for leftovers at the end of the test."""
    jobs: list[Job] = []

    def start(**settings: Any) -> Job:
        defaults = {
            "profile": "class",
            "name": f"t{os.getpid()}-{len(jobs)}",
            "steps": 3,
            "evaluation_prompts": 16,
            "prompts_per_step": 4,
            "run_dir": str(tmp_path),
        }
        jobs.append(robustrl.launch(**defaults | settings))
        return jobs[-1]

    yield start
    for job in jobs:
        job.stop()
        assert_clean(job.run)
