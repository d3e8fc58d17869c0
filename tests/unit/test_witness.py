"""The witness as a process: it sees births, deaths, CPU time and weights of a run that somebody else plays, and ends with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from made_log import made_log

from robustrl import cli
from robustrl.core import events as ev
from robustrl.core.testimony import Born, Died, Ended, Line, Read, Weights, seal
from robustrl.core.weights import Manifest
from robustrl.errors import RobustRLError
from robustrl.runtime import registry
from robustrl.runtime.processes import ProcessId, read_start_ticks
from robustrl.runtime.status_page import StatusPage
from robustrl.runtime.witness import FILE, Witness, hashed_weights, read_testimony


@pytest.fixture
def temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rr-"))
    monkeypatch.setenv(registry.TMP_VARIABLE, str(folder / "top"))
    registry.make_folders("run-1")
    (registry.temp_dir("run-1") / "status").mkdir()
    yield registry.temp_dir("run-1")
    registry.remove_folders("run-1")
    shutil.rmtree(folder)


@pytest.fixture
def sleeper() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def note(temp: Path, data: bytes, said: bytes | None = None) -> Path:
    """What a keeper leaves beside a slot with ``data``; its manifest is that of ``said``."""
    import xxhash

    slot = temp / "slot-1"
    slot.write_bytes(data + b"recovery state")
    chunks = [xxhash.xxh3_128_hexdigest((said or data)[first : first + 1024]) for first in range(0, len(data), 1024)]
    manifest = Manifest.build(version=4, tensors=[], nbytes=len(data), chunk_bytes=1024, chunks=chunks)
    path = temp / "state_keeper-0.kept"
    kept = {"snapshot": {"slot": 1}, "manifest": manifest}
    path.write_bytes(msgspec.msgpack.encode({"slots": [{"path": "/nowhere"}, {"path": str(slot)}], "kept": kept}))
    return path


def test_it_sees_what_happens_and_ends_with_the_run(temp: Path, tmp_path: Path, sleeper: Callable[[], subprocess.Popen[bytes]]) -> None:
    host, role = sleeper(), sleeper()
    witness = Witness("run-1", tmp_path, ProcessId(host.pid, read_start_ticks(host.pid)))
    thread = threading.Thread(target=witness.watch)
    thread.start()
    StatusPage.create(temp / "status" / "rollout-1.3", incarnation=3, pid=role.pid)
    note(temp, os.urandom(3000))

    def seen(kind: type) -> list[Line]:
        return [line for line in read_testimony(tmp_path) if isinstance(line.sight, kind)]

    wait_for(lambda: bool(seen(Born) and seen(Weights) and any(line.sight.lives for line in seen(Read))))
    os.kill(role.pid, signal.SIGSTOP)
    wait_for(lambda: any(line.sight.lives.get("rollout-1.3", (0, ""))[1] == "T" for line in seen(Read)))
    role.kill()
    wait_for(lambda: bool(seen(Died)))
    host.kill()
    thread.join(10)
    (born,), (died,), (ended,) = (seen(kind) for kind in (Born, Died, Ended))
    assert (born.sight.role, born.sight.incarnation, born.sight.pid, born.sight.start_ticks > 0) == ("rollout-1", 3, role.pid, True)
    assert (died.sight.role, died.sight.incarnation) == ("rollout-1", 3) and ended.sight.left == []
    chain = ev.GENESIS
    for line in read_testimony(tmp_path):
        assert seal(line, chain).chain == line.chain
        chain = line.chain


def test_weights_are_hashed_where_they_lie(temp: Path) -> None:
    data = np.arange(5000, dtype=np.uint8).tobytes()
    whole = hashed_weights(note(temp, data))
    assert whole.version == 4 and whole.digest == whole.computed_digest()
    damaged = bytearray(data)
    damaged[4321] ^= 1
    assert hashed_weights(note(temp, bytes(damaged), said=data)).digest != whole.digest
    assert hashed_weights(note(temp, data, said=bytes(damaged))).digest == whole.digest, "whatever the keeper claims"


def test_a_run_without_a_witness_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RobustRLError, match="witness=True"):
        read_testimony(tmp_path)
    (tmp_path / "events.jsonl").write_bytes(b"".join(ev.encoder.encode(entry) + b"\n" for entry in made_log()))
    assert cli.main(["audit", str(tmp_path), "--witness"]) == 1
    assert "the run had no witness" in capsys.readouterr().err
    (tmp_path / FILE).write_bytes(b"nonsense\n")
    with pytest.raises(RobustRLError, match="line 1"):
        read_testimony(tmp_path)
    (tmp_path / FILE).write_bytes(b"")
    assert cli.main(["audit", str(tmp_path), "--witness"]) == 1
    assert "it was cut short" in capsys.readouterr().out


def test_the_command_refuses_a_host_that_has_ended(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "robustrl.runtime.witness", "run-1", str(tmp_path), "1", "0"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "has ended already" in done.stderr
