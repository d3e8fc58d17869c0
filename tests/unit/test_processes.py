"""Processes by identity, mark and CPU time, with real ones."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time

import pytest

from robustrl.errors import WaitTimeout
from robustrl.runtime import processes
from robustrl.runtime.processes import ProcessId


@pytest.fixture
def run():
    name = f"t{secrets.token_hex(4)}"
    yield name
    processes.kill_marked(name, 10)


def _start(run, code="import time; print(1, flush=True); time.sleep(60)"):
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {processes.MARK: run}, stdout=subprocess.PIPE)
    assert process.stdout.readline()
    return process


def _identity(process):
    return ProcessId(process.pid, processes.read_start_ticks(process.pid))


def test_marked_ones_are_found_and_others_are_not(run):
    mine, other = _start(run), _start(run + "x")
    assert processes.find_marked(run) == [_identity(mine)]
    processes.kill_marked(run + "x", 10)
    assert other.wait(10) == -signal.SIGKILL
    assert mine.poll() is None


def test_own_process_is_never_found(run):
    code = f"from robustrl.runtime.processes import *; print(find_marked({run!r}), kill_marked({run!r}, 5))"
    out = subprocess.run([sys.executable, "-c", code], env=os.environ | {processes.MARK: run}, capture_output=True, text=True, timeout=30)
    assert out.stdout.split() == ["[]", "0"]


def test_children_born_during_the_killing_go_too(run):
    code = """
import subprocess, sys, time
print(1, flush=True)
while True:
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
    time.sleep(0.01)
"""
    parent = _start(run, code)
    end = time.monotonic() + 20
    while len(processes.find_marked(run)) < 5 and time.monotonic() < end:
        time.sleep(0.05)
    assert processes.kill_marked(run, 10) >= 5
    parent.wait(10)
    assert processes.find_marked(run) == []


def test_stopped_ones_die_and_spared_ones_live(run):
    stopped, spared = _start(run), _start(run)
    os.kill(stopped.pid, signal.SIGSTOP)
    assert processes.kill_marked(run, 10, spare={spared.pid}) == 1
    assert stopped.wait(10) == -signal.SIGKILL and spared.poll() is None


def test_survivors_are_named(run, monkeypatch):
    process = _start(run)
    monkeypatch.setattr(processes, "kill", lambda process: False)
    with pytest.raises(WaitTimeout, match=rf"run {run} .*{process.pid} \("):
        processes.kill_marked(run, 0.1)
    monkeypatch.undo()


def test_identity_outlives_the_pid(run):
    process = _start(run)
    identity = _identity(process)
    assert processes.is_alive(identity)
    impostor = ProcessId(identity.pid, identity.start_ticks - 1)
    assert not processes.is_alive(impostor) and not processes.kill(impostor)
    with pytest.raises(ProcessLookupError):
        processes.open_pidfd(impostor)
    assert process.poll() is None
    assert not processes.wait_exit(identity, 0.05)
    assert processes.kill(identity)
    assert processes.wait_exit(identity, 10)
    assert processes.process_state(process.pid) == "Z" and not processes.is_alive(identity)
    process.wait(10)
    assert processes.process_state(process.pid) == "X" and not processes.kill(identity)
    with pytest.raises(ProcessLookupError, match=str(process.pid)):
        processes.read_start_ticks(process.pid)


def test_state_of_a_stopped_process(run):
    process = _start(run)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert processes.process_state(process.pid) == "T"


def test_cpu_time_counts_every_thread_and_ended_ones(run):
    code = """
import threading, time
def burn():
    end = time.thread_time() + 0.2
    while time.thread_time() < end: pass
threads = [threading.Thread(target=burn) for _ in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
print(1, flush=True)
time.sleep(60)
"""
    process = _start(run, code)
    used = processes.cpu_seconds(process.pid)
    assert 0.4 <= used < 2.0
    time.sleep(0.2)
    assert processes.cpu_seconds(process.pid) - used < 0.05
    assert processes.cpu_seconds(os.getpid()) == pytest.approx(time.process_time(), abs=0.05)
    process.kill()
    process.wait(10)
    with pytest.raises(ProcessLookupError):
        processes.cpu_seconds(process.pid)


def test_memory_of_a_run(run):
    assert processes.pss_bytes(run) == 0
    _start(run, "import time; x = bytearray(64 << 20); print(1, flush=True); time.sleep(60)")
    assert 64 << 20 < processes.pss_bytes(run) < 128 << 20


_YIELDS = """
import os, time
from pathlib import Path
from robustrl.runtime.processes import yield_to_others
group = Path("/proc/self/autogroup")
for start in (0, 0, 11):
    os.nice(start)
    time.sleep(0.2)  # the kernel takes one such order in 0.1 s from users without rights
    yield_to_others()
    print(os.getpriority(os.PRIO_PROCESS, 0), group.read_text().split()[-1] if group.exists() else "-")
"""


def test_who_yields_does_so_with_its_session_and_never_comes_forward(run):
    said = subprocess.run([sys.executable, "-c", _YIELDS], start_new_session=True, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in said.splitlines()]
    yields = max(5, os.getpriority(os.PRIO_PROCESS, 0))  # these tests may be run by somebody who yields already
    assert [int(row[0]) for row in rows] == [yields, yields, min(19, yields + 11)]
    assert all(row[1] in (row[0], "-") for row in rows)


def test_a_number_that_is_now_a_threads_names_no_process():
    """Numbers are given anew to threads as to processes, and the kernel opens none of those."""
    going, number = threading.Event(), []
    thread = threading.Thread(target=lambda: (number.append(threading.get_native_id()), going.wait(10)))
    thread.start()
    while not number:
        time.sleep(0.001)
    try:
        before = ProcessId(number[0], 1)
        assert processes.wait_exit(before, 1.0) and not processes.kill(before)
    finally:
        going.set()
        thread.join()
