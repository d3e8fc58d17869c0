"""The status page: what a reader sees of a writer that lives, writes at full speed, or died in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from robustrl.core.roles import Phase
from robustrl.runtime import status_page
from robustrl.runtime.status_page import StatusPage, StatusReader


def test_a_new_page_reads_back(tmp_path):
    began = time.monotonic_ns()
    StatusPage.create(tmp_path / "page", incarnation=3, pid=77)
    status = StatusPage.read(tmp_path / "page")
    assert (status.phase, status.progress, status.pending, status.step, status.version) == (Phase.RUNNING, 0, 0, 0, -1)
    assert (status.incarnation, status.pid, status.torn) == (3, 77, False)
    assert began <= status.stamp <= time.monotonic_ns() and status.loop_age() >= 0
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def test_every_setter_shows(tmp_path):
    page = StatusPage.create(tmp_path / "page", incarnation=1, pid=1)
    before = StatusPage.read(tmp_path / "page").stamp
    for phase in Phase:
        page.phase = phase
        assert StatusPage.read(tmp_path / "page").phase is phase is page.phase
    page.step, page.version = 7, 6
    page.update(progress=2**40, pending=5)
    page.stamp()
    status = StatusPage.read(tmp_path / "page")
    assert (status.step, status.version, status.progress, status.pending) == (7, 6, 2**40, 5)
    assert (page.step, page.version, page.progress, page.pending) == (7, 6, 2**40, 5)
    assert status.stamp > before


def test_an_unknown_field_is_refused_and_the_page_stays_readable(tmp_path):
    page = StatusPage.create(tmp_path / "page", incarnation=1, pid=1)
    with pytest.raises(KeyError, match="progres"):
        page.update(progres=1)
    assert not StatusPage.read(tmp_path / "page").torn


def test_no_page_and_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        StatusPage.read(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(ValueError, match="1 bytes"):
        StatusPage.read(tmp_path / "short")
    size = StatusPage.create(tmp_path / "page", 1, 1)._view.nbytes
    (tmp_path / "other").write_bytes(bytes(size))
    with pytest.raises(ValueError, match="no status page"):
        StatusPage.read(tmp_path / "other")


_WRITER = """
import sys
from robustrl.runtime.status_page import StatusPage
page = StatusPage.create(sys.argv[1], incarnation=1, pid=1)
print("up", flush=True)
n = 0
while True:
    n += 1
    page.update(progress=n, pending=2 * n, step=3 * n)
"""


def _writer(path):
    process = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    return process


def test_records_are_whole_under_a_writer_at_full_speed(tmp_path):
    writer = _writer(tmp_path / "page")
    try:
        with StatusReader(tmp_path / "page") as reader:
            end, whole, seen = time.monotonic() + 1.0, 0, set()
            while len(seen) < 2000 and time.monotonic() < end:
                status = reader.read()
                if not status.torn:
                    assert (status.pending, status.step) == (2 * status.progress, 3 * status.progress)
                    whole += 1
                    seen.add(status.progress)
        assert whole > 100 and len(seen) >= 3  # on one busy core a reader meets the writer only once per time slice
    finally:
        writer.kill()
        writer.wait(10)


def test_threads_of_one_role_write_whole_records(tmp_path):
    page = StatusPage.create(tmp_path / "page", incarnation=1, pid=1)
    stop = threading.Event()

    def write(offset):
        n = offset
        while not stop.is_set():
            n += 1
            page.update(progress=n, pending=n)
            page.stamp()

    threads = [threading.Thread(target=write, args=(i * 10**9,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        with StatusReader(tmp_path / "page") as reader:
            records = [reader.read() for _ in range(2000)]
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
    whole = [record for record in records if not record.torn]
    assert whole and all(record.progress == record.pending for record in whole)


@pytest.fixture
def rests(monkeypatch):
    """Seconds for which readers wait, one by one; they are not waited for."""
    made = []
    monkeypatch.setattr(status_page, "time", SimpleNamespace(sleep=made.append, monotonic_ns=time.monotonic_ns))
    return made


def test_a_writer_dead_in_the_middle_is_torn_at_once_not_an_endless_loop(tmp_path, rests):
    page = StatusPage.create(tmp_path / "page", incarnation=1, pid=1)
    page.phase = Phase.DECODE
    page._view[1] += 1  # the state in which SIGKILL between two stores leaves it
    status = StatusPage.read(tmp_path / "page")
    assert status.torn and status.phase is Phase.DECODE
    assert 0.0 < sum(rests) <= 0.004


def test_a_stopped_writer_never_blocks_a_reader(tmp_path, rests):
    writer = _writer(tmp_path / "page")
    try:
        os.kill(writer.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
        first, second = StatusPage.read(tmp_path / "page"), StatusPage.read(tmp_path / "page")
        assert first == second and sum(rests) <= 2 * 0.004
    finally:
        writer.kill()
        writer.wait(10)
