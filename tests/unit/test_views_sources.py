"""What the dashboard plays is read as `Run.load` reads it: with every check, from every kind of file, and a bad one costs one line."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from robustrl_widgets import report, showing
from robustrl_widgets.sources import RecordedRun, load_entries

from robustrl import Run, cli
from robustrl.replay.reading import BadRun

LOG = gzip.decompress(showing.SAMPLE.read_bytes())
LINES = LOG.splitlines(keepends=True)


def retold(old: bytes, new: bytes) -> bytes:
    assert old in LOG
    return LOG.replace(old, new, 1)


BAD: dict[str, tuple[bytes, str]] = {
    "role": (retold(b'"role":"rollout-1"', b'"role":"<img src=x onerror=alert(1)>"'), "role '<img src=x .*must be one of"),
    "schema": (retold(b'"schema":1', b'"schema":9999'), "row 1: the run was written with schema 9999, this is 1"),
    "time": (b"".join([*LINES[:-1], LINES[-1].replace(b'"t":', b'"t":1e308,"was":')]), "its times are t = 1e.308"),
    "gap": (b"".join(LINES[:60] + LINES[70:]), "row 61: .* 10 rows are missing before it"),
    "empty": (b"", "row 1: the log is empty"), "rubbish": (b"\x07no log\nat all\n", "row 1: cannot be read"),
    "cursor": (retold(b'"type":"role_ready"', b'"type":"\\u001b[2J\\n"'), "cannot be read: Invalid value"),
    "cut off": (gzip.compress(LOG)[:20000], "is cut off"), "flipped": (gzip.compress(LOG)[:-6] + b"abcdef", "damaged, here or before"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, why = BAD[name]
    path = tmp_path / ("run.jsonl.gz" if data.startswith(b"\x1f\x8b") else "run.jsonl")
    path.write_bytes(data)
    calls: list[Callable[[], object]] = [lambda: load_entries(path), lambda: RecordedRun.load(path), lambda: report.save_html(path, "x")]
    for call in calls:
        with pytest.raises(BadRun, match=why):
            call()
    assert cli.main(["dashboard", str(path)]) == 1
    said = capsys.readouterr()
    assert not said.out and said.err.startswith(f"robustrl: {path}: row ") and said.err.count("\n") == 1
    assert said.err.rstrip("\n").isprintable()


def test_whatever_run_load_reads_is_played(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    run = Run.load(showing.SAMPLE)
    run.to_parquet(tmp_path / "run.parquet")
    half = len(LINES) // 2
    (tmp_path / "members.jsonl.gz").write_bytes(gzip.compress(b"".join(LINES[:half])) + gzip.compress(b"".join(LINES[half:])))
    (tmp_path / "events.jsonl").write_bytes(LOG)
    for path in (tmp_path / "run.parquet", tmp_path / "members.jsonl.gz", tmp_path / "events.jsonl", tmp_path):
        assert list(load_entries(path)) == list(run.entries) == list(RecordedRun.load(str(path)).all())
        feeds, _, _ = showing._feeds(path, None, False, 1.0)
        assert len(feeds().source.all()) == len(LINES)
    assert report.save_html(tmp_path / "run.parquet", tmp_path / "x.html").stat().st_size > 10_000


def test_a_log_that_is_still_written_is_played_to_its_last_whole_row(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(LOG[:-20])
    assert len(load_entries(tmp_path)) == len(LINES) - 1


def test_the_demo_imports_no_table_library_to_read_its_run() -> None:
    code = ("import sys; from robustrl_widgets import showing, sources; sources.load_entries(showing.SAMPLE); "
            "print([name for name in ('pyarrow', 'pandas', 'numpy', 'panel', 'torch') if name in sys.modules])")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
