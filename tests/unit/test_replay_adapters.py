"""Logs of others: what their numbers mean to the detector, and which row is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from robustrl import replay, sweep
from robustrl.core import events as ev
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
    (["t,rank", "1,0"], "row 1.*utilisation are missing"),
    (["t,rank,utilisation", "1,0,0.5", "x,0,0.5"], "row 3: t = 'x': must be a number from 0"),
    (["t,rank,utilisation", "1,0,0.5", "1,0,0.5"], "row 3.*must come after 1"), (["t,rank,utilisation", "1,0"], "row 2.*3 values"),
    (["t,rank,utilisation", "1,0,101"], "row 2: utilisation = '101': .*from 0 to 100"),
    (["t,rank,utilisation", "1,-1,0.1"], "row 2: rank = '-1': .*from 0 to"),
    (["t,rank,utilisation"], "at least one row"),
])  # fmt: skip
def test_bad_rows_are_named(tmp_path: Path, rows: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        from_csv(write(tmp_path / "u.csv", *rows))


@pytest.mark.parametrize(("make", "why"), [
    (lambda path: path.write_text("{"), "no answer of"), (lambda path: path.write_text('{"status": "success"}'), "successful answer"),
    (lambda path: export(path, status="error"), "successful answer"), (lambda path: export(path, series("up", {}, [(1.0, 1.0)])), "DCGM"),
    (lambda path: export(path, series("DCGM_FI_DEV_GPU_UTIL", {}, [(1.0, math.nan)])), "must have a value that is a number: .*series 1"),
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


DCGM = {"__name__": "DCGM_FI_DEV_GPU_UTIL", "gpu": "0"}
VLLM = {"__name__": "vllm:generation_tokens_total", "instance": "a"}


@pytest.mark.parametrize(("result", "why"), [
    (None, "result = None: must be a list of series"), ([5], "series 1 = 5: must be an object with metric and values"),
    ([{"metric": None, "values": [[1, "5"]]}], "series 1: metric = None: must be an object of labels"),
    ([{"metric": "x", "values": []}], "series 1: metric = 'x'"), ([{"values": [[1, "5"]]}], "series 1: metric = None"),
    ([{"metric": DCGM, "values": None}], r"series 1: values = None: must be a list of at least one \[time, value\]"),
    ([{"metric": DCGM, "values": [[0, "5"]]}, {"metric": DCGM, "values": []}], r"series 2: values = \[\]: must be a list of at least one"),
    ([{"metric": DCGM, "values": [[0, "5"], 5]}], r"GPU_UTIL\{gpu=0\}, value 2 = 5: must be a pair"),
    ([{"metric": DCGM, "values": [[0]]}], r"value 1 = \[0\]: must be a pair"), ([{"metric": DCGM, "values": ["ab"]}], "value 1 = 'ab'"),
    ([{"metric": DCGM, "values": [[None, "5"]]}], "value 1: time = None: must be a number from 0"),
    ([{"metric": DCGM, "values": [["x", "5"]]}], "value 1: time = 'x'"), ([{"metric": DCGM, "values": [[1.7e15, "5"]]}], "time = 17000"),
    ([{"metric": DCGM, "values": [[0, None]]}], "value 1 = None: must be a number from 0 to 100"),
    ([{"metric": DCGM, "values": [[0, "-5"]]}], "value 1 = '-5': must be a number from 0 to 100"),
    ([{"metric": DCGM, "values": [[0, "5"], [1, "500"]]}], "value 2 = '500': must be a number from 0 to 100"),
    ([{"metric": DCGM | {"__name__": "DCGM_FI_PROF_SM_ACTIVE"}, "values": [[0, "1.5"]]}], "value 1 = '1.5': must be a number from 0 to 1"),
    ([{"metric": DCGM, "values": [[0, "+Inf"]]}], "value 1 = .*Inf"), ([{"metric": VLLM, "values": [[0, "-1"]]}], "value 1 = '-1'"),
    ([{"metric": DCGM, "values": [[0, "5"], [1e9, "5"]]}], "trainer-0: seconds between its values = 1000000000.0: must usually be at most"),
    ([{"metric": DCGM, "values": [[3000 * i, "5"] for i in range(4000)]}], "seconds that the series cover = .*at most 10,000,000"),
])  # fmt: skip
def test_what_is_wrong_in_an_export_is_named_by_series_and_value(tmp_path: Path, result: Any, why: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}))
    with pytest.raises(ConfigError, match=why):
        from_prometheus(file)


@pytest.mark.parametrize("text", ["[]", '"x"', "5", "null", '{"data": 5, "status": "success"}', "[" * 100_000, "\x00"])
def test_what_is_no_export(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="must be a successful answer to a range query|is no answer of"):
        from_prometheus(tmp_path / "x.json")


@pytest.mark.parametrize("hole", ["", "nan", "NaN", " "])
def test_a_hole_in_a_csv_is_a_time_in_which_nothing_was_measured(tmp_path: Path, hole: str) -> None:
    lines = [f"{5 * i},0,{hole if 10 <= i < 20 else 0.8}" for i in range(30)]
    (tmp_path / "holes.csv").write_text("\n".join(["t,rank,utilisation", *lines]))
    (tmp_path / "bare.csv").write_text("\n".join(["t,rank,utilisation", *(lines[:10] + lines[20:])]))
    holes, bare = from_csv(tmp_path / "holes.csv"), from_csv(tmp_path / "bare.csv")
    assert [(e.t, e.event) for e in holes.entries[1:]] == [(e.t, e.event) for e in bare.entries[1:]]


def test_a_nan_of_prometheus_is_a_time_in_which_the_series_was_not_there(tmp_path: Path) -> None:
    values = [(5.0 * i, math.nan if 10 <= i < 20 else 80.0) for i in range(30)]
    bare = [(t, value) for t, value in values if not math.isnan(value)]
    stale, gone = (from_prometheus(export(tmp_path / "x.json", series("DCGM_FI_DEV_GPU_UTIL", {}, found))) for found in (values, bare))
    assert list(stale.entries) == list(gone.entries)
    samples = [entry.t for entry in stale.entries if isinstance(entry.event, ev.RoleSample)]
    assert not [t for t in samples if 45.0 < t < 100.0] and len(samples) > 80


def test_an_idle_gpu_is_idle_though_one_per_cent_is_the_most_it_shows(tmp_path: Path) -> None:
    names = {"DCGM_FI_DEV_GPU_UTIL": 1.0, "DCGM_FI_PROF_SM_ACTIVE": 0.01}
    for name, value in names.items():
        run = from_prometheus(export(tmp_path / "x.json", series(name, {}, [(float(t), value) for t in range(20)])))
        (last,) = [entry.event for entry in run.entries if entry.t == 19.0 and isinstance(entry.event, ev.RoleSample)]
        assert last.active_age == 19.0 and last.progress == 0


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    plain, marked = utilisation(tmp_path / "u.csv", 60), tmp_path / "b.csv"
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert [entry.event for entry in from_csv(marked).entries[1:]] == [entry.event for entry in from_csv(plain).entries[1:]]
    file = export(tmp_path / "x.json", series("DCGM_FI_DEV_GPU_UTIL", {}, [(1.0, 1.0)]))
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert from_prometheus(file).roles


@pytest.mark.parametrize("value", [None, 5, b"x", "", [5], {}])
def test_what_is_no_file_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="utilisation = .*must be the path of a file"):
        from_csv(value)
    with pytest.raises(ConfigError, match="exports = .*must be the path of a file"):
        from_prometheus(value)
    if value is not None:
        with pytest.raises(ConfigError, match="failures = .*must be the path of a file"):
            from_csv(utilisation(tmp_path / "u.csv", 60), value)


@pytest.mark.parametrize("floor", [math.nan, -1, 0, 1.01, "x", None, True])
def test_what_is_no_floor_is_named(tmp_path: Path, floor: Any) -> None:
    for call in (lambda: from_csv(utilisation(tmp_path / "u.csv", 60), floor=floor), lambda: from_prometheus(tmp_path / "x", floor=floor)):
        with pytest.raises(ConfigError, match="floor = .*must be a share above 0 and at most 1"):
            call()


@pytest.mark.parametrize(("row", "why"), [
    ("1,0," + "9" * 200_000, "row 2 = '': is no row of a CSV"), ("1,0.5,1", "row 2: rank = '0.5': must be a whole number"),
    ("1,999999999999999,1", "row 2: rank = .*from 0 to 999999"), ("-1,0,1", "row 2: t = '-1': must be a number from 0"),
    ("1,0,-5", "row 2: utilisation = '-5'"), ("1,0,nan", "must hold at least one row with a value"),
    ("1,0,inf", "row 2: utilisation = 'inf': must be a number from 0 to 100"),
])  # fmt: skip
def test_odd_values_of_a_csv_are_named(tmp_path: Path, row: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        from_csv(write(tmp_path / "u.csv", "t,rank,utilisation", row))


def test_of_two_metrics_of_one_gpu_the_one_that_tells_most_counts_and_a_series_without_numbers_is_left_out(tmp_path: Path) -> None:
    times = [1.7e9 + 5 * i for i in range(30)]
    idle, busy, none = [(t, 0.0) for t in times], [(t, 90.0) for t in times], [(t, float("nan")) for t in times]
    one, two = {"gpu": "0", "Hostname": "n"}, {"gpu": "1", "Hostname": "n"}
    util, active = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_SM_ACTIVE"
    both = [series(util, one, busy), series(active, one, idle), series(util, two, busy), series(active, two, none)]
    for found in (both, both[::-1]):
        run = from_prometheus(export(tmp_path / "x.json", *found))
        last = {e.event.role: e.event.active_age for e in run.entries if isinstance(e.event, ev.RoleSample)}
        assert last["trainer-0"] > 100 and last["trainer-1"] == 0.0, "SM_ACTIVE where it has values, else GPU_UTIL"
        (problem,) = run.problems
        assert f"{active}{{Hostname=n, gpu=1}}: holds no number" in problem.text and "1 problem" in repr(run)
    tokens = series("vllm:generation_tokens_total", {"instance": "a"}, [(t, 10.0 * i) for i, t in enumerate(times)])
    run = from_prometheus(export(tmp_path / "y.json", tokens, series("vllm:generation_tokens_total", {"instance": "b"}, none)))
    assert "rollout-0" in run.roles and "rollout-1" not in run.roles and len(run.problems) == 1


def test_unix_times_are_told_with_all_their_digits(tmp_path: Path) -> None:
    twice = [(1700000000.25, 5.0), (1700000000.25, 5.0)]
    with pytest.raises(ConfigError, match=r"must come after 1700000000\.25:"):
        from_prometheus(export(tmp_path / "x.json", series("DCGM_FI_DEV_GPU_UTIL", {}, twice)))
    with pytest.raises(ConfigError, match="must come after 1700000005:"):
        from_csv(write(tmp_path / "u.csv", "t,rank,utilisation", "1700000005,0,0.5", "1700000001,0,0.5"))
    good = write(tmp_path / "g.csv", "t,rank,utilisation", *(f"{1700000000 + i},0,0.5" for i in range(20)))
    for row, why in (("0,1600000000,", "row 2: start = '1600000000': must lie in the run, from 1700000000 to 1700000019"),
                     ("0,1700000005,1700000002", "row 2: end = '1700000002': must lie after its start, 1700000005, .* up to 1700000019")):
        with pytest.raises(ConfigError, match=why):
            from_csv(good, write(tmp_path / "f.csv", "rank,start,end", row))


def test_a_byte_that_is_no_text_and_a_row_after_blank_lines_are_named(tmp_path: Path) -> None:
    (tmp_path / "u.csv").write_bytes(b"t,rank,utilisation\n1,0,0.5\n2,0,0.\xff5\n3,0,0.5\n")
    with pytest.raises(ConfigError, match="row 3 = .*must be UTF-8.* byte 7"):
        from_csv(tmp_path / "u.csv")
    with pytest.raises(ConfigError, match="row 5: utilisation = '500'"):
        from_csv(write(tmp_path / "b.csv", "t,rank,utilisation", "1,0,0.5", "", "2,0,0.5", "3,0,500"))
    assert from_csv(write(tmp_path / "e.csv", "t,rank,utilisation", "1,0,0.5", "2,0,0.5", "", "")).seconds == 1.0
