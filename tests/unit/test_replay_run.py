"""Recorded runs: what is wrong with a log is named by row, what can be read is kept, and nothing is lost on the way to a file and back."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from detection_world import Fault, Shape, World
from story import Story

import robustrl
from robustrl import Run
from robustrl.core import events as ev
from robustrl.core.detection import Detector, judge
from robustrl.core.roles import RoleState
from robustrl.core.thresholds import Thresholds
from robustrl.errors import ConfigError
from robustrl.replay.driving import Said
from robustrl.replay.given import runs_of
from robustrl.replay.outcomes import Truths, match
from robustrl.replay.reading import BadRun
from robustrl.runtime.event_log import LogError, read_log


@pytest.fixture(scope="module")
def world() -> World:
    world = World(Shape(), 3, Thresholds.lab(), restarts=1.0)
    world.plan(Fault("freeze", "rollout-1", at=8.0, phase="decode"))
    world.set_threshold(5.0, "rollout.no_tokens", 4.0)
    world.run(22.0)
    return world


@pytest.fixture(scope="module")
def lines(world: World) -> list[bytes]:
    chain, found = ev.GENESIS, []
    for entry in with_fault(world):
        sealed, line = ev.seal(entry, chain)
        chain = sealed.chain
        found.append(line)
    return found


def with_fault(world: World) -> list[ev.Entry]:
    """The world's log with the words of the injector in it."""
    (at, fault), = world.injected
    plan = ev.FaultPlanned(fault=1, kind="hang", target=fault.role, when="now", benign=False, options={"seconds": 0.0})
    hit = ev.FaultInjected(fault=1, role=fault.role, incarnation=1, node="node-3", pid=1, phase="decode", step=3, proof={})
    place = next(i for i, entry in enumerate(world.entries) if entry.t > at)
    extra = [ev.Entry(0, at, ev.HOST, 1, 0, at, event) for event in (plan, hit)]
    entries = [*world.entries[:place], *extra, *world.entries[place:]]
    return [msgspec.structs.replace(entry, seq=number) for number, entry in enumerate(entries, 1)]


def write(path: Path, lines: list[bytes], end: bytes = b"\n") -> Path:
    path.write_bytes(b"\n".join(lines) + end)
    return path


def test_a_run_loads_from_directory_file_and_gzip(tmp_path: Path, lines: list[bytes]) -> None:
    file = write(tmp_path / "events.jsonl", lines)
    run = Run.load(tmp_path)
    assert list(run.entries) == read_log(file) and not run.problems and not run.complete
    packed = tmp_path / "small.jsonl.gz"
    run.save(packed)
    assert list(Run.load(packed).entries) == list(run.entries)
    assert packed.stat().st_size < file.stat().st_size / 4
    assert gzip.decompress(packed.read_bytes()) == file.read_bytes()
    assert ", 1 fault>" in repr(run) and robustrl.Run is Run
    assert ", 0 roles, 1 entry, 0 faults>" in repr(Run.of(run.entries[:1])) and " 1 false alarm" not in repr(robustrl.replay(run))


def test_injected_faults_are_truth_and_somebody_can_mark_more(world: World, lines: list[bytes], tmp_path: Path) -> None:
    run = Run.load(write(tmp_path / "events.jsonl", lines))
    (mark,) = run.truth
    assert (mark.role, mark.kind, mark.expect, mark.fault) == ("rollout-1", "hang", "failed", 1)
    assert mark.start == world.injected[0][0] and mark.end == next(
        entry.t for entry in world.entries if isinstance(entry.event, ev.RoleStarted) and entry.event.incarnation == 2)
    more = run.annotate("rollout-0", 1.5, 2.5, expect="well", note="a long tool")
    assert [m.role for m in more.truth] == ["rollout-0", "rollout-1"] and len(run.truth) == 1
    assert more.table()[0] == {"role": "rollout-0", "kind": "marked", "expect": "well", "fault": None, "start": 1.5, "end": 2.5,
                               "note": "a long tool"}  # fmt: skip
    assert [value.rollout.no_tokens for _, value in run.thresholds] == [3.0, 4.0]


@pytest.mark.parametrize(("call", "field"), [
    (lambda run: run.annotate("rollout-9", 1.0), "role"), (lambda run: run.annotate("rollout-0", -1.0), "start"),
    (lambda run: run.annotate("rollout-0", 5.0, 4.0), "end"), (lambda run: run.annotate("rollout-0", 5.0, expect="ill"), "expect"),
    (lambda run: run.cut(5.0, 4.0), "start, end"), (lambda run: run.cut(0.0, 999.0), "start, end"),
    (lambda run: Run.concatenate(run, run.cut(5.0)), "runs"), (lambda run: run.cut(5.0).save("x.jsonl.gz"), "path"),
    (lambda run: Run.of([]), "entries"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_name(world: World, call: Callable[[Run], object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call(Run.of(world.entries))
    assert caught.value.field == field


def swapped(lines: list[bytes]) -> list[bytes]:
    return [*lines[:50], lines[51], lines[50], *lines[52:]]


def retold(lines: list[bytes], row: int, old: bytes, new: bytes) -> list[bytes]:
    assert old in lines[row - 1]
    return [*lines[:row - 1], lines[row - 1].replace(old, new), *lines[row:]]


@pytest.mark.parametrize(("damage", "row", "kind", "lost"), [
    (lambda lines: swapped(lines), 51, "gap", 0),
    (lambda lines: [*lines[:40], *lines[43:]], 41, "gap", 3),
    (lambda lines: [*lines[:40], b'{"seq": 41, "t": nonsense', *lines[41:]], 41, "unreadable", 1),
    (lambda lines: retold(lines, 1, b'"schema":1', b'"schema":2'), 1, "schema", 0),
    (lambda lines: retold(lines, 3, b'"type":"role_started"', b'"type":"role_begun"'), 3, "unreadable", 1),
    (lambda lines: [*lines[:60], b"\xff\xfe", *lines[61:]], 61, "unreadable", 1),
])  # fmt: skip
def test_a_bad_log_names_the_row_and_the_rest_is_kept(tmp_path: Path, lines: list[bytes], damage: Callable[[list[bytes]], list[bytes]],
                                                      row: int, kind: str, lost: int) -> None:  # fmt: skip
    file = write(tmp_path / "events.jsonl", damage(lines))
    with pytest.raises(BadRun, match=f"row {row}: ") as caught:
        Run.load(file)
    assert caught.value.problems[0][:2] == (row, kind) and caught.value.partial
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    run = Run.load(file, partial=True)
    assert run.problems == tuple(caught.value.problems)
    seqs = {entry.seq for entry in run.entries}
    dropped = {entry.seq for entry in map(ev.entry_decoder.decode, lines)} - seqs
    assert len(dropped) == lost
    assert [entry.t for entry in run.entries] == sorted(entry.t for entry in run.entries)
    list(judge(Detector(Thresholds.lab()), run.entries))


def test_times_out_of_order_and_roles_that_are_none(tmp_path: Path, lines: list[bytes]) -> None:
    entries = [ev.entry_decoder.decode(line) for line in lines]
    late = msgspec.structs.replace(entries[80], t=entries[79].t - 1.0)
    file = write(tmp_path / "a.jsonl", [*lines[:80], ev.encoder.encode(late), *lines[81:]])
    with pytest.raises(BadRun, match=r"row 81: its time .* lies before"):
        Run.load(file)
    sample = next(entry for entry in entries if isinstance(entry.event, ev.RoleSample) and entry.seq > 80)
    for role, why, lost in (("dreamer-1", "must be one of", 1), ("rollout-7", "was never started", 0)):
        stranger = msgspec.structs.replace(sample, event=msgspec.structs.replace(sample.event, role=role))
        file = write(tmp_path / "b.jsonl", [*lines[:sample.seq - 1], ev.encoder.encode(stranger), *lines[sample.seq:]])
        with pytest.raises(BadRun, match=f"row {sample.seq}: role '{role}'.*{why}"):
            Run.load(file)
        assert len(Run.load(file, partial=True).entries) == len(lines) - lost


def test_empty_cut_off_and_missing_files(tmp_path: Path, lines: list[bytes]) -> None:
    with pytest.raises(BadRun, match="row 1: the log is empty"):
        Run.load(write(tmp_path / "a.jsonl", [], b""), partial=True)
    torn = write(tmp_path / "b.jsonl", [*lines[:30], lines[30][:40]], b"")
    with pytest.raises(BadRun, match="row 31: is cut off: 40 bytes"):
        Run.load(torn)
    assert len(Run.load(torn, partial=True).entries) == 30
    half = tmp_path / "c.jsonl.gz"
    half.write_bytes(gzip.compress(b"\n".join(lines) + b"\n")[:9000])
    with pytest.raises(BadRun, match="is cut off"):
        Run.load(half)
    assert 30 < len(Run.load(half, partial=True).entries) < len(lines)
    with pytest.raises(LogError, match="cannot be read"):
        Run.load(tmp_path / "nowhere")
    with pytest.raises(BadRun) as caught:
        Run.load(write(tmp_path / "d.jsonl", [b"no log", b"at all"]), partial=True)
    assert not caught.value.partial


def test_a_cut_knows_what_came_before_it(world: World) -> None:
    run = Run.of(with_fault(world))
    part = run.cut(2.0, 10.0)
    assert part.seconds == pytest.approx(8.0) and part.entries[0] == run.entries[0]
    assert part.entries[-1].t <= run.begin + 10.0 < run.entries[len(part.entries)].t
    assert len(part.truth) == 1 and not run.cut(10.0).truth, "only what begins in the window counts"


def test_concatenated_runs_are_one_log_that_a_detector_can_take(world: World) -> None:
    run = Run.of(with_fault(world)).annotate("rollout-0", 1.0, 2.0, expect="well")
    both = Run.concatenate(run, run, run)
    assert [entry.seq for entry in both.entries] == list(range(1, len(both.entries) + 1))
    assert [entry.t for entry in both.entries] == sorted(entry.t for entry in both.entries)
    assert [m.role for m in both.truth] == 3 * ["rollout-0", "rollout-1"]
    assert [m.fault for m in both.truth if m.fault] == [1, 2, 3]
    said = [(v.role, v.kind, v.rule) for v in judge(Detector(Thresholds.lab()), both.entries)]
    once = [(v.role, v.kind, v.rule) for v in judge(Detector(Thresholds.lab()), run.entries)]
    assert once and said == 3 * once


def test_parquet_loses_nothing(tmp_path: Path, world: World) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    run = Run.of(with_fault(world), "mine").annotate("rollout-0", 1.0, 2.0, expect="well").cut(0.5, 15.0)
    path = tmp_path / "run.parquet"
    run.to_parquet(path)
    again = Run.load(path)
    assert list(again.entries) == list(run.entries)
    assert (again.truth, again.window, again.name) == (run.truth, run.window, run.name)
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    columns["event"][6] = "{}"
    pq.write_table(pyarrow.table(columns, schema=table.schema), path)
    with pytest.raises(BadRun, match="row 7: cannot be read"):
        Run.load(path)
    pq.write_table(table.drop_columns(["event"]), path)
    with pytest.raises(BadRun, match="row 1: the columns event are missing"):
        Run.load(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(LogError, match="no Parquet file"):
        Run.load(path)


def test_what_is_no_run_is_named_and_a_corpus_is_runs() -> None:
    run = next(iter(robustrl.corpus().values()))
    with pytest.raises(ConfigError, match="runs = 3: must be runs"):
        Run.concatenate(run, 3)  # type: ignore[arg-type]
    assert runs_of({"a": run}) == [run]


@pytest.mark.parametrize(("after", "expect"), [(0.2, "anything"), (8.0, "failed")])
def test_that_the_target_of_a_hang_was_killed_is_no_detection_of_the_hang(after: float, expect: str) -> None:
    story = Story()
    for number, (kind, t) in enumerate((("hang", 110.0), ("kill", 110.0 + after)), 1):
        story.at(t, ev.FaultPlanned(fault=number, kind=kind, target="rollout-0", when="now", benign=False, options={}))
        story.at(t, ev.FaultInjected(fault=number, role="rollout-0", incarnation=1, node="node-0", pid=7, phase="decode", step=1, proof={}))
    t = 110.02 + after
    story.at(t, ev.ProcessExited(role="rollout-0", incarnation=1, pid=7, cause="pidfd", last_lines=[]))
    story.verdict(t + 0.03, "rollout-0", "exited", onset=t)
    story.becomes(t + 0.03, "rollout-0", RoleState.FAILED)
    story.starts(t + 1.0, "rollout-0")
    story.ends(150.0)
    run = Run.of(story.entries)
    hang, kill = run.truth
    assert (hang.expect, hang.end, hang.lasts) == (expect, pytest.approx(t), pytest.approx(after + 0.02)) and kill.expect == "failed"
    found = match(Truths(run), run.recording, Said(list(run.verdicts), []), lambda role: 1.0)
    outcomes = {each.kind: each.outcome for each in found}
    assert outcomes == {"kill": "detected"} | ({"hang": "missed"} if expect == "failed" else {})
