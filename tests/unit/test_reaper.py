"""The reaper: hosts that are killed, in whatever state, leave nothing behind; hosts that clean up themselves are left alone."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from robustrl.runtime import processes

_HOST = """
import subprocess, sys, time
from pathlib import Path
from robustrl.runtime.reaper import start_reaper
run, folder, busy = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
reaper = start_reaper(run, [folder / "tmp", folder / "shm"])
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(120)"]
children = [subprocess.Popen(sleep, start_new_session=True) for _ in range(3)]
if busy == "forked":
    import os
    if os.fork() == 0:
        time.sleep(120)
print(reaper.pid, flush=True)
if busy == "dismiss":
    for child in children:
        child.kill(); child.wait(10)
    reaper.dismiss()
    reaper.dismiss()
    sys.exit(0)
while busy == "starting":
    subprocess.Popen(sleep)
    time.sleep(0.01)
time.sleep(120)
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("ROBUSTRL_TMP", str(tmp_path / "root"))
    name = f"t{secrets.token_hex(4)}"
    yield name
    processes.kill_marked(name, 10)


def _host(run, folder, how):
    for name in ("tmp", "shm"):
        (folder / name / "deep").mkdir(parents=True)
        (folder / name / "deep/file").write_text("x")
    command = [sys.executable, "-c", _HOST, run, str(folder), how]
    host = subprocess.Popen(command, env=os.environ | {processes.MARK: run}, stdout=subprocess.PIPE)
    return host, int(host.stdout.readline())


def _gone(run, folder, seconds=15.0):
    """Waits until neither processes nor folders are left."""
    start = time.monotonic()
    while processes.find_marked(run) or (folder / "tmp").exists() or (folder / "shm").exists():
        assert time.monotonic() - start < seconds, (processes.find_marked(run), list(folder.iterdir()))
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["resting", "starting", "forked"])
def test_a_killed_host_leaves_nothing(run, tmp_path, how):
    host, reaper = _host(run, tmp_path, how)
    time.sleep(0.5 if how == "starting" else 0)
    assert reaper in {process.pid for process in processes.find_marked(run)}
    host.kill()
    host.wait(10)
    _gone(run, tmp_path)


def test_the_whole_session_killed_leaves_nothing(run, tmp_path):
    """The terminal's Ctrl-C, a hang-up and a polite kill reach the reaper as well; it waits for the end of the host all the same."""
    host, reaper = _host(run, tmp_path, "resting")
    end = time.monotonic() + 10
    needed = sum(1 << (number - 1) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT))
    while True:  # some of them may be ignored from birth: a shell's background jobs are born so
        status = Path(f"/proc/{reaper}/status").read_text().splitlines()
        ignored = next(int(line.split()[1], 16) for line in status if line.startswith("SigIgn"))
        if ignored & needed == needed:
            break
        assert time.monotonic() < end
        time.sleep(0.02)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(reaper, number)
    time.sleep(0.3)
    assert processes.process_state(reaper) in "SR" and (tmp_path / "tmp").exists()
    assert os.getsid(reaper) == reaper
    host.kill()
    host.wait(10)
    _gone(run, tmp_path)


def test_stopped_processes_are_ended_too(run, tmp_path):
    host, reaper = _host(run, tmp_path, "resting")
    for process in processes.find_marked(run):
        if process.pid not in (host.pid, reaper):
            os.kill(process.pid, signal.SIGSTOP)
    host.kill()
    host.wait(10)
    _gone(run, tmp_path)


def test_a_dismissed_reaper_touches_nothing(run, tmp_path):
    host, reaper = _host(run, tmp_path, "dismiss")
    assert host.wait(20) == 0
    assert processes.process_state(reaper) == "X"
    assert (tmp_path / "tmp/deep/file").exists() and (tmp_path / "shm/deep/file").exists()


def test_another_run_is_left_alone(run, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    host, _ = _host(run, tmp_path / "a", "resting")
    other, _ = _host(run + "x", tmp_path / "b", "resting")
    try:
        host.kill()
        host.wait(10)
        _gone(run, tmp_path / "a")
        assert other.poll() is None and len(processes.find_marked(run + "x")) == 5 and (tmp_path / "b/tmp/deep/file").exists()
    finally:
        other.kill()
        other.wait(10)
        _gone(run + "x", tmp_path / "b")


def test_the_run_leaves_the_list_of_jobs(run, tmp_path):
    from robustrl.runtime import registry

    listed = registry._jobs() / f"{run}.json"
    listed.write_text("{}")
    host, _ = _host(run, tmp_path, "resting")
    host.kill()
    host.wait(10)
    _gone(run, tmp_path)
    assert not listed.exists()
