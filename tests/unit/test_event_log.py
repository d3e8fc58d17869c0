"""The event log: numbered, chained, written before it is believed; duplicates, gaps, torn lines and second writers."""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from made_log import made_log

from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.runtime import event_log
from robustrl.runtime.event_log import EventGap, EventLog, LogError, UnreadableLine, audit_run, read_log


def emitted(n: int, source: str = "rollout-0", incarnation: int = 1, text: str = "") -> ev.Emitted:
    return ev.Emitted(source, incarnation, n, float(n), ev.WarningRaised(text=text or f"{source} {n}"))


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_what_is_returned_is_in_the_file_already(path: Path) -> None:
    with EventLog(path, Clock()) as log:
        for n in range(1, 4):
            entry = log.append(emitted(n))
            assert read_log(path)[-1] == entry and entry is not None and entry.seq == n == log.seq
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_entries_are_numbered_and_chained_across_sources(path: Path) -> None:
    with EventLog(path, Clock()) as log:
        log.append(emitted(1, "a-0"))
        log.append(emitted(1, "b-0"))
        log.append(emitted(1, "a-0", incarnation=2))
        log.append(emitted(2, "a-0"))
        log.record(ev.WarningRaised(text="the host itself"))
    entries = read_log(path)
    chain = ev.GENESIS
    for number, entry in enumerate(entries, 1):
        assert entry.seq == number and ev.seal(entry, chain)[0].chain == entry.chain
        chain = entry.chain
    assert (entries[-1].source, entries[-1].incarnation, entries[-1].n) == ("host", 1, 1)


def test_what_is_sent_again_is_written_once(path: Path) -> None:
    with EventLog(path, Clock()) as log:
        assert log.append(emitted(1)) and log.append(emitted(2))
        assert log.append(emitted(1)) is None and log.append(emitted(2)) is None
        assert log.append(emitted(3)) is not None
        assert log.acknowledged("rollout-0", 1) == 3 and log.acknowledged("rollout-0", 2) == 0
    with EventLog(path, Clock()) as log:
        assert log.append(emitted(3)) is None, "also after the log was opened again"
    assert [entry.n for entry in read_log(path)] == [1, 2, 3]


def test_a_gap_is_refused_and_names_what_is_due(path: Path) -> None:
    with EventLog(path, Clock()) as log:
        log.append(emitted(1))
        with pytest.raises(EventGap, match="event 3 came, 2 is next; send again from 2") as caught:
            log.append(emitted(3))
        assert pickle.loads(pickle.dumps(caught.value)).expected == 2
        assert log.append(emitted(2)) and log.append(emitted(3))


def test_nothing_follows_the_closing_record(path: Path) -> None:
    with EventLog(path, Clock()) as log:
        log.append(emitted(1))
        log.record(ev.RunEnded(status="done", reason="", wall=0.0))
        with pytest.raises(LogError, match="nothing follows its closing record"):
            log.append(emitted(2))
        assert log.append(emitted(1)) is None, "a late copy is still only a copy"
    with pytest.raises(LogError, match="line 2 is its closing record"):
        EventLog(path, Clock())


@pytest.mark.parametrize("cut", [1, 7, 60])
def test_a_torn_last_line_is_repaired_and_recorded(path: Path, cut: int) -> None:
    with EventLog(path, Clock()) as log:
        log.record(ev.WarningRaised(text="first"))
        log.append(emitted(1))
    path.write_bytes(path.read_bytes()[:-cut])
    torn = len(path.read_bytes()) - path.read_bytes().rfind(b"\n") - 1
    with pytest.raises(UnreadableLine, match="line 2: is torn"):
        read_log(path)
    assert len(read_log(path, live=True)) == 1
    with EventLog(path, Clock()) as log:
        assert log.found[-1].event == ev.LogRepaired(dropped_bytes=torn) and len(log.found) == 2
        assert log.append(emitted(1)) is not None, "the lost event is written when its emitter sends it again"
    assert not {finding.rule for finding in audit(read_log(path))} & {"chain", "sequence", "emitters"}


def test_a_whole_log_is_not_repaired(path: Path) -> None:
    with EventLog(path, Clock()) as log:
        log.append(emitted(1))
    with EventLog(path, Clock()) as log:
        assert [entry.n for entry in log.found] == [1]
    assert len(read_log(path)) == 1


def test_an_altered_log_is_not_continued(path: Path) -> None:
    with EventLog(path, Clock()) as log:
        for n in range(1, 4):
            log.append(emitted(n))
    good = path.read_bytes()
    path.write_bytes(good.replace(b"rollout-0 2", b"rollout-0 7"))
    with pytest.raises(LogError, match="line 2 breaks the chain"):
        EventLog(path, Clock())
    lines = good.splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(LogError, match="line 2 has number 3"):
        EventLog(path, Clock())
    path.write_bytes(lines[0] + b"{}\n" + lines[2])
    with pytest.raises(UnreadableLine, match="line 2: cannot be read"):
        EventLog(path, Clock())
    path.write_bytes(good)
    EventLog(path, Clock()).close()


def test_a_log_has_one_writer(path: Path) -> None:
    with EventLog(path, Clock()) as log:
        with pytest.raises(LogError, match="another process writes this log"):
            EventLog(path, Clock())
        log.append(emitted(1))
    log.close()
    with EventLog(path, Clock()) as log:
        assert log.seq == 1


def test_the_log_of_a_killed_writer_holds_all_that_it_returned(path: Path) -> None:
    program = """if True:
        import sys, time
        from robustrl.core import events as ev
        from robustrl.runtime.event_log import EventLog
        log = EventLog(sys.argv[1], time.monotonic)
        for n in range(1, 10**9):
            print(log.append(ev.Emitted("rollout-0", 1, n, 0.0, ev.WarningRaised(text="x"))).seq, flush=True)
    """
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        told = "".join(child.stdout.readline() for _ in range(200))
    finally:
        child.send_signal(signal.SIGKILL)
        told += child.stdout.read()
        child.wait(10)
        child.stdout.close()
    with EventLog(path, Clock()) as log:
        assert log.seq >= int(told[: told.rindex("\n")].split()[-1]) >= 200


def test_an_event_that_json_cannot_hold_becomes_a_warning(path: Path) -> None:
    with EventLog(path, Clock()) as log:
        log.append(ev.Emitted("trainer-0", 1, 1, 0.0, ev.StepMetrics(step=1, values={"kl": math.nan}, phase_seconds={})))
        log.append(emitted(2, "trainer-0"))
    first, second = read_log(path)
    assert isinstance(first.event, ev.WarningRaised) and "StepMetrics of trainer-0 was not logged" in first.event.text
    assert (first.n, second.n) == (1, 2)


def test_synced_once_a_second_with_the_closing_record_and_on_close(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = []
    monkeypatch.setattr(event_log.os, "fdatasync", syncs.append)
    clock = Clock()
    with EventLog(path, clock) as log:
        for n in range(1, 31):
            clock.now += 0.125
            log.append(emitted(n))
        assert len(syncs) == 3
        log.record(ev.RunEnded(status="done", reason="", wall=0.0))
        assert len(syncs) == 4
    assert len(syncs) == 5


def test_a_full_disk_leaves_no_half_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with EventLog(path, Clock()) as log:
        log.append(emitted(1))

        def half(fd: int, data: bytes) -> int:
            if len(data) < 20:
                raise OSError(28, "No space left on device")
            return write(fd, data[:-19])

        monkeypatch.setattr(event_log.os, "write", half)
        with pytest.raises(LogError, match="entry 2 could not be written: .*No space left"):
            log.append(emitted(2))
        monkeypatch.undo()
        assert log.append(emitted(2)) is not None
    assert [entry.n for entry in read_log(path)] == [1, 2]


def test_a_log_that_was_removed_goes_on_and_says_so(path: Path) -> None:
    with EventLog(path, Clock()) as log:
        log.append(emitted(1))
        assert not log.removed
        path.unlink()
        assert log.append(emitted(2)) is not None and log.removed
        assert [ev.entry_decoder.decode(line).n for line in log.lines(0)] == [1, 2] and len(log.lines(1)) == 1
        log.append(emitted(3))
        assert len(log.lines(0)) == 3 and not path.exists()


def test_audit_of_a_run_directory(path: Path) -> None:
    def store(entries: list[ev.Entry]) -> None:
        path.write_bytes(b"".join(ev.encoder.encode(entry) + b"\n" for entry in entries))

    store(made_log())
    assert audit_run(path.parent) == audit_run(path) == []
    store(made_log()[:-1])
    assert [finding.rule for finding in audit_run(path.parent)] == ["closing"]
    store(made_log())
    path.write_bytes(path.read_bytes().replace(b'{"seq":3,', b'{"seq":3,"x":1,'))
    assert len(read_log(path)) == len(made_log()), "to read it is one thing, to believe it another"
    assert [(finding.rule, finding.seq) for finding in audit_run(path)] == [("chain", 3)]
    store(made_log()[:-1])
    path.write_bytes(path.read_bytes() + b'{"seq": "three"}\n')
    (finding,) = audit_run(path)
    assert (finding.rule, finding.seq) == ("schema", len(made_log())) and "Expected `int`" in str(finding)
    with pytest.raises(LogError, match="nowhere.*cannot be read"):
        audit_run(path.parent / "nowhere")
