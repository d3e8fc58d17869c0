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
    assert max(during) < 5 * statistics.median(gaps) + 1.0, (max(during), statistics.median(gaps))
