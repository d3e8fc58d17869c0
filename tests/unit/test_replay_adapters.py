"""Logs of others: what their numbers mean to the detector, and which row is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from robustrl import replay, sweep
from robustrl.core.thresholds import Thresholds
from robustrl.errors import ConfigError
from robustrl.replay.adapters import from_csv, from_prometheus


def write(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows) + "\n")
    return path


def utilisation(path: Path, idle_from: int, step: int = 5, scale: float = 1.0) -> Path:
    rows = [f"{1000 + t},{rank},{scale * (0.0 if rank == 1 and t >= idle_from else 0.9)}" for t in range(0, 120, step) for rank in (0, 1)]
    return write(path, "t,rank,utilisation", *rows)


def test_an_idle_rank_of_a_csv_is_found_under_each_setting(tmp_path: Path) -> None:
    failures = write(tmp_path / "f.csv", "rank,start,end", "1,1060,")
    run = from_csv(utilisation(tmp_path / "u.csv", 60), failures)
    assert run.roles == ("node_agent-0", "supervisor", "trainer-0", "trainer-1") and len(run.truth) == 1
    for limit in (5.0, 20.0):
        said = replay(run, Thresholds.lab().updated({"trainer.no_compute": limit, "trainer.silent": 20.0, "trainer.no_marks": 20.0}))
        (found,) = said.detected
        assert found.rule == "no_compute" and found.delay == pytest.approx(limit, abs=1.01) and not said.false_alarms
    percent = from_csv(utilisation(tmp_path / "p.csv", 60, scale=100.0), failures)
    assert replay(percent, {"trainer.no_compute": 4.0}).delays == replay(run, {"trainer.no_compute": 4.0}).delays
    assert sweep(run, {"trainer.no_compute": [2.0, 6.0]}, processes=1, progress=False).recommended.score.faults == 1


def test_a_series_that_stops_is_not_an_idle_rank(tmp_path: Path) -> None:
    rows = [f"{t},0,0.9" for t in [*range(0, 40, 2), *range(70, 90, 2)]]
    run = from_csv(write(tmp_path / "u.csv", "t,rank,utilisation", *rows))
    assert {verdict.rule for verdict in replay(run, {"node.silent": 6.0}).verdicts if verdict.kind == "failed"} == {"agent_silent"}


def series(name: str, labels: dict[str, str], values: list[tuple[float, float]]) -> dict[str, Any]:
    return {"metric": {"__name__": name, **labels}, "values": [[t, str(value)] for t, value in values]}


def export(path: Path, *found: dict[str, Any], status: str = "success") -> Path:
    path.write_text(json.dumps({"status": status, "data": {"resultType": "matrix", "result": list(found)}}))
    return path


def test_prometheus_exports_with_the_names_of_dcgm_and_vllm(tmp_path: Path) -> None:
    times = [1.7e9 + 5 * i for i in range(30)]
    gpu = export(tmp_path / "gpu.json", *(series("DCGM_FI_DEV_GPU_UTIL", {"gpu": str(i), "Hostname": "n"}, [(t, 80.0) for t in times])
                                          for i in range(2)))  # fmt: skip
    stuck = [(t, 1000.0 * min(i, 12)) for i, t in enumerate(times)]
    fine = [(t, 1000.0 * i) for i, t in enumerate(times)]
    vllm = export(tmp_path / "vllm.json", series("vllm:generation_tokens_total", {"instance": "a"}, fine),
                  series("vllm:generation_tokens_total", {"instance": "b"}, stuck), series("up", {"instance": "b"}, fine),
                  series("vllm:num_requests_running", {"instance": "b"}, [(t, 4.0) for t in times]))  # fmt: skip
    failures = write(tmp_path / "f.csv", "role,start,end", f"rollout-1,{times[12]},")
    run = from_prometheus([gpu, vllm], failures)
    assert [role for role in run.roles if role[-1].isdigit()] == ["node_agent-0", "rollout-0", "rollout-1", "trainer-0", "trainer-1"]
    found = replay(run, Thresholds.lab().updated({"rollout.no_tokens": 8.0, "rollout.wedged": 9.0, "rollout.heartbeat": 2.0}))
    assert [(o.role, o.rule) for o in found.detected] == [("rollout-1", "heartbeat")] and not found.false_alarms
    assert found.delays[0] == pytest.approx(10.0, abs=1.5)


@pytest.mark.parametrize(("rows", "why"), [
    (["t,rank", "1,0"], "row 1.*utilisation are missing"), (["t,rank,utilisation", "1,0,0.5", "x,0,0.5"], "row 3: t.*finite"),
    (["t,rank,utilisation", "1,0,0.5", "1,0,0.5"], "row 3.*must come after 1"), (["t,rank,utilisation", "1,0"], "row 2.*3 values"),
    (["t,rank,utilisation", "1,0,101"], "row 2.*between 0 and 100"), (["t,rank,utilisation", "1,-1,0.1"], "row 2.*from 0 on"),
    (["t,rank,utilisation"], "at least one row"),
])  # fmt: skip
def test_bad_rows_are_named(tmp_path: Path, rows: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        from_csv(write(tmp_path / "u.csv", *rows))


@pytest.mark.parametrize(("make", "why"), [
    (lambda path: path.write_text("{"), "no answer of"), (lambda path: path.write_text('{"status": "success"}'), "KeyError"),
    (lambda path: export(path, status="error"), "successful answer"), (lambda path: export(path, series("up", {}, [(1.0, 1.0)])), "DCGM"),
    (lambda path: export(path, series("DCGM_FI_DEV_GPU_UTIL", {}, [(1.0, float("nan"))])), "value 1.*finite"),
])  # fmt: skip
def test_bad_exports_are_named(tmp_path: Path, make: Callable[[Path], object], why: str) -> None:
    make(tmp_path / "x.json")
    with pytest.raises(ConfigError, match=why):
        from_prometheus(tmp_path / "x.json")


def test_a_failure_of_nobody_is_named(tmp_path: Path) -> None:
    failures = write(tmp_path / "f.csv", "rank,start,end", "1,1060,", "7,1060,")
    with pytest.raises(ConfigError, match="row 3: role"):
        from_csv(utilisation(tmp_path / "u.csv", 60), failures)
    with pytest.raises(ConfigError, match="cannot be read"):
        from_csv(tmp_path / "none.csv")
