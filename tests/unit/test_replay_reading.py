"""Odd files: every member of a gzip file is read, damage is named, and of a log in part nothing is lost but what cannot be."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from robustrl import Run, replay, sweep
from robustrl.core import events as ev
from robustrl.core.thresholds import Thresholds
from robustrl.replay.corpus import corpus
from robustrl.replay.reading import BadRun
from robustrl.replay.stress import stretch
from robustrl.runtime.event_log import LogError


@pytest.fixture(scope="module")
def run() -> Run:
    return corpus()["trainer-hang-1"]


@pytest.fixture(scope="module")
def lines(run: Run) -> list[bytes]:
    return [ev.encoder.encode(entry) + b"\n" for entry in run.entries]


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def partly(path: Path, why: str, kinds: set[str]) -> Run:
    """What is kept of a file that is refused as a whole for this reason."""
    with pytest.raises(BadRun, match=why) as caught:
        Run.load(path)
    run = Run.load(path, partial=True)
    assert {problem.kind for problem in run.problems} == kinds and run.problems == tuple(caught.value.problems)
    return run


# -- gzip ---


def test_all_members_of_a_gzip_file_are_read(tmp_path: Path, run: Run, lines: list[bytes]) -> None:
    for ways in ((100,), (1, 2, 300), (150, 150)):
        cuts = [0, *ways, len(lines)]
        members = [gzip.compress(b"".join(lines[a:b])) for a, b in zip(cuts, cuts[1:], strict=False)]
        for end in (b"", b"\0" * 512):
            assert list(Run.load(written(tmp_path / "a.jsonl.gz", b"".join(members) + end)).entries) == list(run.entries)


def test_a_damaged_member_loses_only_its_own_rest(tmp_path: Path, lines: list[bytes]) -> None:
    first, second = gzip.compress(b"".join(lines[:200])), gzip.compress(b"".join(lines[200:]))
    cut = first[:len(first) // 2]
    damaged = written(tmp_path / "a.jsonl.gz", cut + second)
    found = partly(damaged, "row .*the gzip file is cut off here", {"truncated", "unreadable", "gap"})
    assert {entry.seq for entry in found.entries} >= set(range(201, len(lines) + 1)) and found.entries[0].seq == 1
    assert 20 < sum(entry.seq <= 200 for entry in found.entries) < 200


def test_a_gzip_file_cut_off_anywhere_or_followed_by_something_else(tmp_path: Path, lines: list[bytes]) -> None:
    packed = gzip.compress(b"".join(lines))
    for size in (2, 5, 11, len(packed) // 3, len(packed) - 1):
        with pytest.raises(BadRun, match="the gzip file is cut off here|is cut off: "):
            Run.load(written(tmp_path / "a.jsonl.gz", packed[:size]))
    found = partly(written(tmp_path / "b.jsonl.gz", packed + b"something else"), "followed by 14 bytes", {"truncated"})
    assert len(found.entries) == len(lines)


def test_each_flipped_byte_of_a_gzip_file_is_noticed(tmp_path: Path, lines: list[bytes]) -> None:
    packed = gzip.compress(b"".join(lines[:60]), mtime=0)
    for place in range(0, len(packed), 97):
        if 3 < place < 10:
            continue  # time and system of the writer
        flipped = packed[:place] + bytes([packed[place] ^ 16]) + packed[place + 1:]
        with pytest.raises(BadRun):
            Run.load(written(tmp_path / "a.jsonl.gz", flipped))


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path, run: Run, lines: list[bytes]) -> None:
    assert list(Run.load(written(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + b"".join(lines))).entries) == list(run.entries)


def test_a_log_that_somebody_still_writes(tmp_path: Path, lines: list[bytes]) -> None:
    torn = written(tmp_path / "a.jsonl", b"".join(lines)[:-40])
    assert len(Run.load(torn, live=True).entries) == len(lines) - 1
    with pytest.raises(BadRun, match="cut off"):
        Run.load(written(tmp_path / "a.jsonl.gz", gzip.compress(torn.read_bytes())), live=True)


# -- rows of a log in part ---


def test_rows_of_a_role_whose_start_is_lost_are_kept(tmp_path: Path, lines: list[bytes]) -> None:
    starts = [i for i, line in enumerate(lines) if b'"type":"role_started"' in line]
    assert len(starts) > 5
    for kept in (lines[:starts[0]] + lines[starts[-1] + 1:], *(lines[:i] + lines[i + 1:] for i in starts)):
        found = partly(written(tmp_path / "a.jsonl", b"".join(kept)), "missing before it", {"gap", "role"})
        assert [entry.seq for entry in found.entries] == [ev.entry_decoder.decode(line).seq for line in kept]
        roles = [problem.text for problem in found.problems if problem.kind == "role"]
        assert all("was never started, and " in text for text in roles) and len(roles) == len(set(roles))
        replay(found), replay(found, Thresholds.lab()), stretch(found, 2.0), found.account, found.truth
        assert sweep(found, {"trainer.no_compute": [4.0]}, base=Thresholds.lab(), processes=1, progress=False).complete


def test_times_that_cannot_be_are_left_out_and_said(tmp_path: Path, run: Run, lines: list[bytes]) -> None:
    def with_time(place: int, **times: float) -> Path:
        entry = msgspec.structs.replace(run.entries[place], **times)
        return written(tmp_path / "a.jsonl", b"".join([*lines[:place], ev.encoder.encode(entry) + b"\n", *lines[place + 1:]]))

    for place in (0, 7, len(lines) - 1):
        for times in ({"t": -5.0}, {"t": 1e308}, {"at": 1e308}, {"t": 2e11}):
            found = partly(with_time(place, **times), f"row {place + 1}: its times are .*up to 1e.11", {"time"})
            assert list(found.entries) == [entry for i, entry in enumerate(run.entries) if i != place]
    for t, lost in ((run.begin - 3000.0, 1), (run.entries[-1].t + 3000.0, 1), (run.entries[40].t, 0)):
        found = Run.load(with_time(80, t=t), partial=True)
        assert len(found.entries) == len(lines) - lost and found.seconds == pytest.approx(run.seconds, abs=0.1)
        assert any("lies outside of the run" in str(problem) for problem in found.problems) == bool(lost)


def test_doubled_rows_count_once(tmp_path: Path, run: Run, lines: list[bytes]) -> None:
    found = partly(written(tmp_path / "a.jsonl", b"".join([*lines[:50], *lines[40:]])), "row 51: is row 41 once more", {"doubled"})
    assert list(found.entries) == list(run.entries)
    found = partly(written(tmp_path / "a.jsonl", 2 * b"".join(lines)), f"row {len(lines) + 1}: is row 1 once more", {"doubled"})
    assert list(found.entries) == list(run.entries)
    other = lines[50].replace(b'"seq":51,', b'"seq":50,')
    found = partly(written(tmp_path / "a.jsonl", b"".join([*lines[:50], other, *lines[51:]])), "row 51: its number 50", {"unsorted", "gap"})
    assert len(found.entries) == len(lines), "another row under a number that was used is no copy"


def test_a_phase_that_there_is_not_is_named(tmp_path: Path, lines: list[bytes]) -> None:
    place = next(i for i, line in enumerate(lines) if b'"phase":"decode"' in line)
    bad = [*lines[:place], lines[place].replace(b'"phase":"decode"', b'"phase":"dreaming"'), *lines[place + 1:]]
    found = partly(written(tmp_path / "a.jsonl", b"".join(bad)), f"row {place + 1}: phase 'dreaming': must be one of", {"unreadable"})
    assert len(found.entries) == len(lines) - 1


# -- Parquet ---


@pytest.fixture
def tables(tmp_path: Path, run: Run) -> tuple[Any, Any, Path]:
    pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "run.parquet"
    run.annotate("rollout-0", 1.0).to_parquet(path)
    return pq, pq.read_table(path), path


def test_a_mark_without_an_end_comes_back(tables: tuple[Any, Any, Path], run: Run) -> None:
    assert Run.load(tables[2]).annotations == run.annotate("rollout-0", 1.0).annotations


@pytest.mark.parametrize(("name", "kind", "why"), [
    ("t", "string", "the column t holds string, must be float64"), ("seq", "string", "the column seq holds string, must be int64"),
    ("at", "bool", "the column at holds bool"), ("n", "float64", "the column n holds double, must be int64"),
    ("source", "int64", "the column source holds int64, must be string"), ("event", "int64", "the column event holds int64"),
    ("chain", "binary", "the column chain holds binary"),
])  # fmt: skip
def test_a_column_of_another_type_is_named(tables: tuple[Any, Any, Path], name: str, kind: str, why: str) -> None:
    import pyarrow as pa

    pq, table, path = tables
    values = {"string": str, "bool": bool, "float64": float, "int64": lambda value: 5, "binary": str.encode}[kind]
    column = pa.array([values(value) for value in table.column(name).to_pylist()])  # type: ignore[operator]
    pq.write_table(table.set_column(table.column_names.index(name), name, column), path)
    with pytest.raises(BadRun, match=f"run.parquet: row 1: {why}"):
        Run.load(path)


def test_other_widths_of_a_column_and_integer_times_are_read(tables: tuple[Any, Any, Path], run: Run) -> None:
    import pyarrow as pa

    pq, table, path = tables
    shared = pa.dictionary(pa.int32(), pa.string())
    for name, kind in (("seq", pa.int32()), ("n", pa.uint64()), ("event", pa.large_string()), ("source", shared)):
        table = table.set_column(table.column_names.index(name), name, table.column(name).cast(kind))
    pq.write_table(table, path)
    assert list(Run.load(path).entries) == list(run.entries)


ILL = {"role": "rollout-0", "start": 3.0, "end": 1.0, "incarnation": 0, "kind": "", "expect": "ill"}


@pytest.mark.parametrize(("facts", "why"), [
    (b"[1,2", "'robustrl' is no JSON: Input data was truncated"), (b"[]", r"'robustrl' is \[\]: must be the JSON of"),
    (b"5", "'robustrl' is 5"), (b"\xff", "'robustrl' is no JSON"), (None, "'robustrl' is missing"),
    ({"annotations": [{"x": 1}]}, "annotation 1 = .*missing required field"), ({"annotations": 5}, "annotations = 5: must be a list"),
    ({"annotations": [None]}, "annotation 1 = None: must be a mark"), ({"annotations": [ILL]}, "annotation 1 = .*expect must be one of"),
    ({"window": None}, r"window = None: must be two numbers, \[begin, end\]"), ({"window": [1]}, r"window = \[1\]"),
    ({"window": "ab"}, "window = 'ab'"), ({"window": [5, 1]}, "window = "), ({"window": [True, 1e308]}, "window = "),
    ({"name": 5}, "name = 5"),
])  # fmt: skip
def test_bad_metadata_is_named_and_costs_no_row(tables: tuple[Any, Any, Path], run: Run, facts: Any, why: str) -> None:
    pq, table, path = tables
    data = json.dumps({"format": 1, **facts}).encode() if isinstance(facts, dict) else facts
    pq.write_table(table.replace_schema_metadata({} if data is None else {b"robustrl": data}), path)
    found = partly(path, f"run.parquet: its metadata: {why}", {"metadata"})
    assert list(found.entries) == list(run.entries) and found.truth == run.truth


@pytest.mark.parametrize("change", [lambda value: None, lambda value: "{", lambda value: "[" * 100_000, lambda value: '{"type":"martian"}'])
def test_a_bad_event_of_a_parquet_file_costs_its_row(tables: tuple[Any, Any, Path], run: Run, change: Callable[[str], str | None]) -> None:
    import pyarrow as pa

    pq, table, path = tables
    events = table.column("event").to_pylist()
    events[7] = change(events[7])
    pq.write_table(table.set_column(table.column_names.index("event"), "event", pa.array(events)), path)
    found = partly(path, "row 8: cannot be read: event", {"unreadable", "gap"})
    assert len(found.entries) == len(run.entries) - 1


@pytest.mark.parametrize("gone", [["type"], ["role"], ["role", "type"]])
def test_a_parquet_file_without_its_derived_columns_is_read_in_part_and_that_costs_no_row(tables: tuple[Any, Any, Path], run: Run,
                                                                                          gone: list[str]) -> None:  # fmt: skip
    pq, table, path = tables
    pq.write_table(table.drop_columns(gone), path)
    found = partly(path, f"row 1: the columns {', '.join(gone)} are missing", {"schema"})
    assert list(found.entries) == list(run.entries)
    pq.write_table(table.drop_columns([*gone, "chain"]), path)
    with pytest.raises(BadRun, match=f"the columns chain, {', '.join(gone)} are missing") as caught:
        Run.load(path, partial=True)
    assert not caught.value.partial


def _damaged(path: Path, group: int, column: str, share: float) -> None:
    """Two bytes of a column of a row group are turned over, at ``share`` of its length."""
    import pyarrow.parquet as pq

    facts = pq.read_metadata(path).row_group(group)
    chunk = next(chunk for chunk in map(facts.column, range(facts.num_columns)) if chunk.path_in_schema == column)
    place = (chunk.dictionary_page_offset or chunk.data_page_offset) + int(share * chunk.total_compressed_size)
    data = bytearray(path.read_bytes())
    data[place : place + 2] = bytes(255 - value for value in data[place : place + 2])
    path.write_bytes(data)


def test_a_damaged_row_group_costs_its_own_rows_and_they_are_named(tables: tuple[Any, Any, Path], run: Run) -> None:
    pq, table, path = tables
    pq.write_table(table, path, row_group_size=10)
    groups = -(-len(run.entries) // 10)
    _damaged(path, 15, "event", 0.5)
    why = f"row 151: it and all rows up to 160 cannot be read: row group 16 of {groups} is damaged: "
    found = partly(path, why, {"unreadable", "gap"})
    assert list(found.entries) == [*run.entries[:150], *run.entries[160:]] and found.truth
    _damaged(path, 0, "type", 0.5)
    assert len(Run.load(path, partial=True).entries) == len(found.entries), "it is not read at all"


def test_in_a_row_group_what_comes_before_a_damaged_page_is_kept(tables: tuple[Any, Any, Path], run: Run) -> None:
    pq, table, path = tables
    pq.write_table(table, path, data_page_size=256, write_batch_size=16, use_dictionary=False)
    _damaged(path, 0, "event", 0.95)
    found = partly(path, rf"row \d+: it and all rows up to {len(run.entries)} cannot be read: row group 1 of 1", {"unreadable"})
    assert 0 < len(found.entries) < len(run.entries) and list(found.entries) == list(run.entries[: len(found.entries)])


def test_a_turned_bit_in_a_file_of_ours_is_seen_wherever_it_lies(tables: tuple[Any, Any, Path]) -> None:
    """Without checksums of pages most of them are read as other values."""
    path = tables[2]
    whole = path.read_bytes()
    for column in ("seq", "t", "at", "chain"):
        path.write_bytes(whole)
        _damaged(path, 0, column, 0.9)
        with pytest.raises(BadRun, match="row group 1 of .* is damaged"):
            Run.load(path)


# -- what is small ---


@pytest.mark.parametrize("end", [b"\n", b"\n\n", b"  ", b" \n\r\n"])
def test_blank_lines_at_the_end_are_nothing(tmp_path: Path, run: Run, lines: list[bytes], end: bytes) -> None:
    assert list(Run.load(written(tmp_path / "a.jsonl", b"".join(lines) + end)).entries) == list(run.entries)
    partly(written(tmp_path / "b.jsonl", b"".join([*lines[:5], b"\n", *lines[5:]])), "row 6: cannot be read", {"unreadable"})
    with pytest.raises(BadRun, match="empty"):
        Run.load(written(tmp_path / "c.jsonl", end))


@pytest.mark.parametrize(("path", "value", "why"), [
    ("rollout.no_tokens", -1.0, "rollout.no_tokens = -1.0: "), ("rollout.no_tokens", None, "no_tokens"),
    ("rollout.wedged", 1.0, "does not go with"), ("rollout.x", 1.0, "no such setting"),
])  # fmt: skip
def test_settings_that_are_none_are_named_by_row_when_the_log_is_read(tmp_path: Path, run: Run, path: str, value: Any, why: str) -> None:
    """Such a log was taken without a word, and each replay of it failed without saying where."""
    place = next(i for i, entry in enumerate(run.entries) if isinstance(entry.event, ev.ThresholdsChanged))
    rows = [json.loads(ev.encoder.encode(entry)) for entry in run.entries]
    section, name = path.split(".")
    rows[place]["event"]["thresholds"][section][name] = value
    file = written(tmp_path / "a.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    found = partly(file, f"row {place + 1}: its .*{why}.*such a row is left out", {"settings"})
    assert len(found.entries) == len(run.entries) - 1 and replay(found, Thresholds.lab())


def test_a_path_may_begin_at_home(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Run.of(run.entries).save("~/a.jsonl.gz")
    assert (tmp_path / "a.jsonl.gz").exists() and Run.load("~/a.jsonl.gz").roles == run.roles
    with pytest.raises(LogError, match="~nobody_of_this_name"):
        Run.load("~nobody_of_this_name/x")
