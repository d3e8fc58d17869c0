"""Everything of a job is killed at once; launch(resume=) goes on from what its run directory and shared memory hold."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest

import robustrl
from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.errors import ConfigError
from robustrl.job import Job
from robustrl.runtime.processes import find_marked, kill
from tests.live.conftest import assert_clean, wait_for

pytestmark = pytest.mark.timeout(600)


def test_no_committed_step_is_lost_and_no_data_is_trained_twice(launch: Callable[..., Job]) -> None:
    job = launch(steps=12, agent_workers=1)
    job.wait(step=4, timeout=240)
    with pytest.raises(ConfigError, match="goes on"):
        robustrl.launch(resume=job.run_dir)
    for process in find_marked(job.run):
        kill(process)
    wait_for("the handle to see it", lambda: job.over or job.status == "failed", 30)
    with robustrl.launch(resume=job.run_dir) as second:
        second.wait(timeout=300)
        assert (second.status, second.step) == ("done", 12)
    entries = second.events
    assert audit(entries) == []
    [resumed] = [e.seq for e in entries if isinstance(e.event, ev.RunResumed)]
    before = max(e.event.step for e in entries if isinstance(e.event, ev.OptimizerStepCommitted) and e.seq < resumed)
    after = [e.event.step for e in entries if isinstance(e.event, ev.OptimizerStepCommitted) and e.seq > resumed]
    assert before >= 4 and after[0] == before + 1, "no committed step is lost"
    trained = Counter(i for e in entries if isinstance(e.event, ev.TrajectoriesConsumed) for i in e.event.ids)
    assert set(trained.values()) == {1}
    assert_clean(job.run)


@pytest.mark.soak
def test_a_stopped_run_goes_on_and_an_ended_one_says_that_there_is_nothing_to_do(launch: Callable[..., Job]) -> None:
    job = launch(steps=6, evaluation_prompts=0, agent_workers=1)
    job.wait(step=2, timeout=240)
    job.stop()
    time.sleep(1.0)
    with robustrl.launch(resume=job.run_dir) as second:
        second.wait(timeout=300)
        assert audit(second.events) == []
    with pytest.raises(ConfigError, match="all 6"):
        robustrl.launch(resume=job.run_dir)
