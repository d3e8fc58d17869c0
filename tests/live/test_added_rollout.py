"""A rollout that joins a running job: weights from a relay, nobody waits for it, and it serves only what it has checked."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.job import Job
from tests.live.conftest import wait_for


def test_it_pulls_from_a_relay_while_the_others_go_on(launch: Callable[..., Job]) -> None:
    job = launch(steps=100_000, evaluation_prompts=0, samples_per_prompt=8, prompts_per_step=8, staleness=1)
    job.wait(step=5, timeout=180)
    added = job.add_rollout(timeout=60)
    assert added.name == "rollout-2" and added.incarnation == 1
    wait_for("the added rollout to be healthy", lambda: added.state == "healthy", timeout=90)
    wait_for("work for it", lambda: any(isinstance(e.event, ev.TrajectoriesStarted) and e.event.rollout == "rollout-2" for e in job.events))
    job.wait(step=job.step + 5, timeout=60)
    for role in ("rollout-0", "rollout-1"):  # so that the log tells how long either stood still
        wait_for(f"{role} to generate after the pull", lambda role=role: generated_after_the_pull(list(job.events), role))
    job.stop()
    entries = job.events
    assert audit(entries) == []

    pulls = [e for e in entries if isinstance(e.event, ev.PullCommitted) and e.event.target == "rollout-2"]
    first = pulls[0]
    assert first.event.source in ("rollout-0", "rollout-1", "state_keeper-0") and first.event.version > 0 and first.event.probe_gap <= 1e-3
    assert any(pull.event.source in ("rollout-0", "rollout-1") for pull in pulls), "it was served by a relay"
    work = [e.seq for e in entries if isinstance(e.event, ev.TrajectoriesStarted) and e.event.rollout == "rollout-2"]
    assert min(work) > first.seq

    steps = [e.t for e in entries if isinstance(e.event, ev.OptimizerStepCommitted) and e.event.step > 0]
    gaps = [later - earlier for earlier, later in zip(steps, steps[1:], strict=False)]
    begun = next(e.t for e in entries if isinstance(e.event, ev.PullStarted) and e.event.target == "rollout-2")
    during = [gap for gap, end in zip(gaps, steps[1:], strict=True) if end > begun and end - gap < first.t]
    # three more engine threads share two cores: slower is allowed, standing still is not
    limit = 5 * statistics.median(gaps) + 1.0
    assert max(during) < limit, (max(during), statistics.median(gaps))
    for role in ("rollout-0", "rollout-1"):
        still = standing_still(entries, role, begun, first.t)
        assert still < limit, f"{role} generated nothing for {still:.2f} s while the new one pulled; limit {limit:.2f} s"


def generated_after_the_pull(entries: list[ev.Entry], role: str) -> bool:
    pulled = next(e.t for e in entries if isinstance(e.event, ev.PullCommitted) and e.event.target == "rollout-2")
    tokens = [(e.t, e.event.progress) for e in entries if isinstance(e.event, ev.RoleSample) and e.event.role == role]
    before = max((progress for t, progress in tokens if t <= pulled), default=0)
    return any(progress > before for t, progress in tokens if t > pulled)


def standing_still(entries: list[ev.Entry], role: str, begin: float, end: float) -> float:
    """The longest time between two samples with more tokens than before, of those that overlap with ``begin`` to ``end``."""
    times, tokens = [], -1
    for entry in entries:
        if isinstance(entry.event, ev.RoleSample) and entry.event.role == role and entry.event.progress > tokens:
            tokens = entry.event.progress
            times.append(entry.t)
    assert times[0] < begin and times[-1] > end
    return max(later - earlier for earlier, later in zip(times, times[1:], strict=False) if later > begin and earlier < end)
