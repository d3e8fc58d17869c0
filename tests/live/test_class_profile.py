"""``profile="class"`` in a container of a class: 3 GB of memory, 64 MB of /dev/shm, two cores, no right at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.core.run_state import RunState
from robustrl.runtime.event_log import read_log
from tests.live.container import MEMORY, UID, NoContainer, peak_pss, small_container

_FIRST_STEP = 3 * 60.0
"""Seconds; a third of it is the benchmark's target."""
_JOB = """
import json, os, pathlib
import robustrl
job = robustrl.launch(name="class", profile="class", steps=4, evaluation_prompts=64, run_dir="/tmp/runs")
print(json.dumps({"run": job.run, "run_dir": str(job.run_dir), "status": pathlib.Path("/proc/self/status").read_text()}), flush=True)
job.wait(step=2, timeout=240)
job.pause()
maps = {name: pathlib.Path(f"/proc/{role.pid}/maps").read_text() for name, role in job.roles.items()}
print(json.dumps({name: "libtorch" in text for name, text in maps.items()}), flush=True)
job.resume()
job.wait(timeout=120)
job.stop()
print(json.dumps({"end": job.status, "left": os.listdir("/dev/shm") + os.listdir(f"/tmp/robustrl-{os.getuid()}")}), flush=True)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the job in the container printed, its peak memory and its run directory."""
    tmp = tmp_path_factory.mktemp("class") / "tmp"
    try:
        with small_container(_JOB, tmp) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith("{"), first + process.stdout.read()
            started = json.loads(first)
            peak = peak_pss(started["run"], process)
            rest = process.stdout.read()
            assert process.wait(20) == 0, rest
    except NoContainer as missing:
        pytest.skip(str(missing))
    lines = [json.loads(line) for line in rest.splitlines() if line.startswith("{")]
    assert len(lines) == 2, rest
    folder = tmp / Path(started["run_dir"]).relative_to("/tmp")
    print((folder / "logs" / "host.log").read_text())
    yield {"status": started["status"], "torch": lines[0], "end": lines[1], "peak": peak, "folder": folder}


@pytest.mark.timeout(420)
def test_it_runs_to_its_end_as_an_ordinary_user(ended: dict[str, Any]) -> None:
    status = dict(line.split(":\t", 1) for line in ended["status"].splitlines())
    assert status["Uid"].split() == [str(UID)] * 4 and int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert ended["end"]["end"] == "done"
    entries = read_log(ended["folder"] / "events.jsonl")
    assert audit(entries) == []
    assert {e.event.machine["user"] for e in entries if isinstance(e.event, ev.RunStarted)} == {UID}


def test_its_memory_stays_below_three_gigabytes(ended: dict[str, Any]) -> None:
    assert 10**9 < ended["peak"] <= MEMORY, f"{ended['peak'] / 1e9:.2f} GB"


def test_its_first_optimizer_step_comes_soon(ended: dict[str, Any]) -> None:
    seconds = RunState.of(read_log(ended["folder"] / "events.jsonl")).seconds_to_first_step
    assert seconds is not None and seconds <= _FIRST_STEP


def test_weights_go_over_ucx_through_the_small_shared_memory(ended: dict[str, Any]) -> None:
    entries = [e.event for e in read_log(ended["folder"] / "events.jsonl")]
    pulls = [event for event in entries if isinstance(event, ev.PullCommitted)]
    assert {pull.target for pull in pulls} == {"rollout-0", "rollout-1"} and all(pull.bytes > 0 for pull in pulls)
    warnings = [event.text for event in entries if isinstance(event, ev.WarningRaised)]
    assert {pull.transport for pull in pulls} == {"shm"} and not warnings


def test_light_roles_load_no_torch_and_shared_memory_is_given_back(ended: dict[str, Any]) -> None:
    with_torch = {name for name, loaded in ended["torch"].items() if loaded}
    assert with_torch == {"trainer-0", "rollout-0", "rollout-1"}
    assert ended["end"]["left"] == ["jobs"]


_TINY_SHM_JOB = """
import robustrl
job = robustrl.launch(name="class", profile="class", steps=2, evaluation_prompts=0, rollouts=1, agent_workers=1, run_dir="/tmp/runs")
print(job.run_dir, flush=True)
job.wait(timeout=240)
job.stop()
"""


@pytest.mark.soak
@pytest.mark.timeout(420)
def test_without_room_in_shared_memory_weights_go_over_tcp_and_the_log_says_so(tmp_path: Path) -> None:
    with small_container(_TINY_SHM_JOB, tmp_path / "tmp", shm=4 << 20) as process:
        assert process.stdout is not None
        run_dir = process.stdout.readline().strip()
        rest = process.stdout.read()
        assert process.wait(20) == 0, rest
    entries = [e.event for e in read_log(tmp_path / "tmp" / Path(run_dir).relative_to("/tmp") / "events.jsonl")]
    assert {event.transport for event in entries if isinstance(event, ev.PullCommitted)} == {"tcp"}
    warnings = [event.text for event in entries if isinstance(event, ev.WarningRaised)]
    for role in ("state_keeper-0", "rollout-0"):
        assert any(text.startswith(role) and "over tcp" in text for text in warnings), warnings
    assert any("on disk" in text for text in warnings), warnings
