"""Names of live jobs and private folders: nothing is claimed twice, nothing of another user's is trusted."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from robustrl.errors import ConfigError, RobustRLError
from robustrl.runtime import processes, registry
from robustrl.runtime.registry import JobEntry


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rr-"))
    monkeypatch.setenv(registry.TMP_VARIABLE, str(folder / "top"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def entry(name: str, host: int, run: str = "") -> JobEntry:
    me = os.getpid()
    ticks = processes.read_start_ticks
    return JobEntry(name=name, run=run or registry.new_run_id(name), run_dir="/x", host_pid=host, host_ticks=ticks(host), owner_pid=me,
                    owner_ticks=ticks(me), address="unix:/x")


def test_a_claimed_job_is_found_until_its_host_dies(process):
    mine = entry("a", process.pid)
    registry.claim(mine)
    assert registry.find("a") == mine and registry.live_jobs() == [mine] and registry.find("b") is None
    process.kill()
    process.wait()
    assert registry.live_jobs() == [] and not list((registry.root() / "jobs").glob("*.json"))
    registry.claim(entry("a", os.getpid()))


def test_a_pid_that_was_used_again_is_not_the_host(process):
    registry.claim(msgspec.structs.replace(entry("a", process.pid), host_ticks=1))
    assert registry.live_jobs() == []


def test_a_name_is_claimed_once(process):
    first = entry("a", process.pid)
    registry.claim(first)
    text = (rf"name = 'a': in use by the live run {first.run} \(host {process.pid}\), owned by process {os.getpid()}: "
            r"robustrl.attach\('a'\) connects to it, `robustrl stop a` ends it")
    with pytest.raises(ConfigError, match=text):
        registry.claim(entry("a", os.getpid()))
    registry.claim(first)  # again, e.g. with an address that is now known
    registry.claim(entry("b", os.getpid()))
    newer = entry("a", os.getpid())
    registry.claim(newer, replaces=first.run)
    assert registry.find("a") == newer and first in registry.live_jobs()
    registry.release(first.run)
    registry.release(first.run)
    assert first not in registry.live_jobs()


def test_of_many_claims_at_once_one_wins(process):
    results: list[str] = []
    barrier = threading.Barrier(8)

    def claim() -> None:
        mine = entry("a", process.pid)
        barrier.wait()
        try:
            registry.claim(mine)
            results.append("won")
        except ConfigError:
            results.append("lost")

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["lost"] * 7 + ["won"]


def test_a_lock_that_is_never_given_back_is_an_error():
    with registry.locked(), pytest.raises(RobustRLError, match="locked by another process for more than 0.1 s"), registry.locked(0.1):
        pass


def test_folders_are_private_and_removed(home):
    run = registry.new_run_id("a-long-name-of-a-job")
    assert run.startswith("a-long-nam-") and len(run) == 17
    registry.make_folders(run)
    for path in (registry.root(), registry.temp_dir(run), registry.shm_dir(run)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (registry.temp_dir(run) / "file").write_text("x")
    registry.remove_folders(run)
    registry.remove_folders(run)
    assert not registry.temp_dir(run).exists() and not registry.shm_dir(run).exists()


@pytest.mark.parametrize("plant", ["open", "link", "file"])
def test_a_folder_that_another_could_have_planted_is_refused(home, plant):
    top = home / "top"
    if plant == "open":
        top.mkdir()
        top.chmod(0o755)
    elif plant == "link":
        (home / "elsewhere").mkdir(mode=0o700)
        top.symlink_to(home / "elsewhere")
    else:
        top.write_text("")
    with pytest.raises(RobustRLError, match=rf"{top} must be a folder of user {os.getuid()} with mode 0700.*: choose another") as caught:
        registry.root()
    assert "remove" not in str(caught.value)  # whatever lies there may be somebody's, or the system's


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a folder to another user")
def test_entries_that_nobody_can_read_hide_no_others(process):
    registry.claim(mine := entry("alpha", process.pid))
    jobs = registry.root() / "jobs"
    (jobs / "garbage.json").write_text("garbage")
    (jobs / "other-version.json").write_text('{"name": "a"}')
    (jobs / "folder.json").mkdir()
    assert registry.live_jobs() == [mine]


def test_a_folder_that_cannot_be_made_is_named(home, monkeypatch):
    monkeypatch.setenv(registry.TMP_VARIABLE, str(home / "not" / "there"))
    with pytest.raises(RobustRLError, match=f"not/there cannot be made: No such file.*{registry.TMP_VARIABLE}"):
        registry.root()


def test_a_folder_of_another_user_is_refused(home):
    (home / "top").mkdir(mode=0o700)
    os.chown(home / "top", 12345, 12345)
    with pytest.raises(RobustRLError, match="it is owned by 12345"):
        registry.root()


def test_paths_that_leave_the_folder_or_outgrow_a_socket_are_refused(home, monkeypatch):
    with pytest.raises(ConfigError, match="run = '../x': must be letters"):
        registry.temp_dir("../x")
    deep = home / ("d" * 60)
    deep.mkdir()
    monkeypatch.setenv(registry.TMP_VARIABLE, str(deep / "top"))
    with pytest.raises(ConfigError, match=r"ROBUSTRL_TMP = .*too long: the socket .* must stay below 100 bytes"):
        registry.socket_path("a-very-long-run-id-123456")
