"""A ghost is recorded for a job that has ended: the same job once more, with its fault, answered by a full restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from robustrl_widgets.ghost_files import find, folder_of
from robustrl_widgets.hosts import feed_of

import robustrl
from robustrl.core.audit import audit
from robustrl.errors import ConfigError
from robustrl.faults import FaultList, Kill
from robustrl.runtime.event_log import read_log


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_the_ghost_of_a_job_meets_the_same_fault_and_is_found_by_its_views(tmp_path: Path) -> None:
    with robustrl.launch(name="raced", profile="class", steps=6, evaluation_prompts=0, run_dir=str(tmp_path)) as job:
        job.wait(step=1, timeout=200)
        with pytest.raises(ConfigError, match="slow each other down"):
            job.record_ghost()
        job.schedule(FaultList(faults=[Kill("rollout", step=4)]))
        job.wait(timeout=200)
    hit = job.faults[0]["hit"]
    path = job.record_ghost(timeout=300)
    ghost = find(job.events[0].event.config, folder_of(job.run_dir))  # type: ignore[attr-defined]
    assert ghost is not None and path.parent == folder_of(job.run_dir)
    assert [(kind, role, step) for _, kind, role, step in ghost.faults] == [("kill", hit, 4)]
    assert len(ghost.restarts) == 1 and ghost.mode == "full" and ghost.commits[-1][1] == 6
    with (feed := feed_of(job)).lock:
        scene, now = feed.still()
        assert "the ghost" in scene.picture("timeline", now)["ghost"]["words"]
    (log,) = folder_of(job.run_dir).glob("raced-ghost-*/events.jsonl")
    assert audit(read_log(log)) == []
