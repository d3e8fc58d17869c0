"""The bench of the detector: each row has what the targets read, a trial depends on its seed alone, and the comparison is fair to peers."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from robustrl.core import events as ev
from robustrl.replay.peers import PUBLISHED
from robustrl.runtime.processes import process_state
from tests.benchmarks import _detect_cost, detect
from tests.benchmarks._detect_peers import OURS, SCALES, compare, curves, draw, incident, ours
from tests.benchmarks._detect_trials import trial
from tests.benchmarks._report import Bench


def test_targets_have_no_value_until_their_rows_are_there_and_then_they_do():
    bench = Bench("detect", detect._ROWS, detect.measure)
    detect.judge(bench)
    assert all(target["value"] is None and not target["met"] for target in bench.targets)
    suite = {"trials": 560, "wrong": [], "late_max_samples": 1.5}
    healthy = {"hours": 8, "failed": 0}
    kills = {"kills": 26, "delays_s": {"trainer": [0.05] * 26}}
    rows = {"incidents": {"of": 29, "caught": 29}, "peers": {"not_dominated": {peer: [] for peer in detect.PEERS}},
            "live-stops": {"late_max_s": 0.2, "early_max_s": 0.0, "also_failed": []},
            "cost": {"cpu_share": 0.01, "step_ratio": 1.0, "step_ratio_width": 0.02}}  # fmt: skip
    kinds = {"suite": suite, "healthy": healthy, "live": kills}
    bench.done = {name: kinds.get(name.partition("-")[0], {}) for name in detect._ROWS} | rows
    bench.targets.clear()
    detect.judge(bench)
    assert [target["name"] for target in bench.targets if not target["met"]] == []


def test_a_trial_depends_on_its_seed_alone():
    first = trial(("freeze/rollout-decoding", 7))
    assert first == trial(("freeze/rollout-decoding", 7))
    assert first["wrong"] == [] and (first["stated"], first["found"], first["false"]) == (1, 1, 0)
    assert first["rules"] == ["heartbeat"] and len(first["late"]) == 2


def test_one_drawn_job_is_given_to_all_detectors_and_compared():
    (found,) = [curves(("freeze/state_keeper", 5))]
    published = {f"published: {name}" for name in PUBLISHED}
    assert {name for name, _ in found} == {OURS, "ours, suspicions", *detect.PEERS, *published}
    assert found[OURS, 1.0].delays[0] == pytest.approx(5.1, abs=0.3) and found[OURS, 1.0].mistakes == 0
    assert found["process idle", 3.0].faults == 1
    result = compare([found], [found, {}])
    assert result["trials"] == [1, 1] and result["tuned"]["heartbeat"]["recall"] == 1.0 and result["tuned"]["process idle"]["recall"] == 0.0
    assert set(result["published"]) == set(PUBLISHED) and result["published"]["heartbeat (TRL, 300 s)"]["recall"] == 0.0
    assert [row[0] for row in result["curves"][OURS]] == sorted(SCALES)


def test_calling_a_role_failed_that_is_down_for_good_is_nobodys_mistake():
    """Of a trainer that hangs while it publishes the suite expects a report; that it stalls the job comes later, and is as true."""
    found = curves(("incident/dead-rank-blocks-refit", 406435863))
    assert found[OURS, 1.0].faults == 0 and found[OURS, 1.0].mistakes == found[OURS, 2.0].mistakes == 0
    assert not any(found["cluster idle", setting].mistakes for name, setting in found if name == "cluster idle" and setting >= 12.0)


def test_each_multiple_of_the_thresholds_is_free_of_contradictions():
    for scale in SCALES:
        assert ours(scale).trainer.no_compute == pytest.approx(max(0.3, 3.0 * scale))


def test_peers_are_compared_where_no_watcher_is_disturbed():
    names = {name for name, _ in draw(500, 1)}
    assert len(names) > 60 and not any("supervisor" in name or "node_agent" in name or name.startswith("node-loss") for name in names)
    assert draw(5, 2) == draw(5, 2) != draw(5, 3)


def test_the_width_of_a_ratio_shrinks_with_its_sample():
    few, many = (_detect_cost.bootstrap([1.0, 1.1, 0.9] * n) for n in (3, 50))
    assert few[0] < many[0] <= 1.0 <= many[1] < few[1]
    drift = [[1.0, 1.2], [1.5, 1.7], [3.0, 3.2]]
    assert _detect_cost.pair_ratios(drift, drift) == [1.0] * 3, "what both blocks of a pair met alike is no difference"
    assert _detect_cost.pair_ratios([[2.0, 4.0]], [[1.0, 2.0]]) == [2.0]


@pytest.mark.soak
def test_an_incident_has_its_row():
    row = incident(("incident/trainer-stuck-engines-fine", 3))
    assert row["wrong"] == [] and row["rule"] == "no_compute" and row["after_s"] < 3.5
    assert "probe (slime)" in row["published_that_miss"]


class _Job:
    """A job whose steps take as long as it is told, in a log that only has commits."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.roles = {role: SimpleNamespace(pid=pid) for role, pid in pids.items()}
        self.thresholds = SimpleNamespace(node=SimpleNamespace(silent=5.0))
        self.step, self.events = 0, []

    def wait(self, step: int, timeout: float) -> None:
        while self.step < step:
            self.step += 1
            commit = ev.OptimizerStepCommitted(step=self.step, version=1, digest="d", snapshot_digest="s", consumed=[], batch=1, bytes=1,
                                               holder="k", incarnation=1)  # fmt: skip
            self.events.append(ev.Entry(self.step, 0.5 * self.step, "k", 1, 1, 0.0, commit))

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_the_cost_is_taken_in_turns_and_the_agent_goes_on_in_the_end(monkeypatch):
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    try:
        job = _Job({"node_agent-0": sleepers[0].pid, "supervisor": sleepers[1].pid})
        monkeypatch.setattr(_detect_cost.robustrl, "launch", lambda **settings: job)
        monkeypatch.setattr(_detect_cost, "idle_actor", lambda job: nullcontext(sleepers[2].pid))
        row = _detect_cost.cost()
        states = [process_state(sleeper.pid) for sleeper in sleepers]
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
    assert row["steps"] == [300, 300] and row["step_ratio"] == 1.0 and row["step_ratio_width"] == 0.0
    assert job.thresholds.node.silent == "10h" and "T" not in states
    assert {"cpu_share", "step_ratio", "step_ratio_width"} <= set(row)
