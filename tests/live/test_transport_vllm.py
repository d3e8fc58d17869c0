"""vLLM's backend ``ucx`` in a plain vLLM script and a plain torch trainer: the examples, as two processes."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.timeout(280)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def installed() -> dict[str, str]:
    """The environment of both scripts; vLLM finds the plugin by the entry point that installing robustrl made."""
    assert "robustrl_ucx" in entry_points(group="vllm.general_plugins").names
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return os.environ | settings | {"VLLM_NO_USAGE_STATS": "1"}


def run(tmp_path: Path, environment: dict[str, str], *options: str) -> tuple[str, subprocess.CompletedProcess[str]]:
    """Both examples to their end: the rollout's output, and the trainer."""
    secret = tmp_path / "secret"
    secret.write_bytes(secrets.token_bytes(32))
    secret.chmod(0o600)
    arguments = ["--socket", str(tmp_path / "s"), "--secret", str(secret)]
    with open(tmp_path / "rollout.log", "w+") as output:
        command = [sys.executable, str(EXAMPLES / "plain_rollout.py"), *arguments]
        rollout = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            command = [sys.executable, str(EXAMPLES / "plain_trainer.py"), *arguments, *options]
            trainer = subprocess.run(command, env=environment, timeout=220, capture_output=True, text=True, check=False)
            rollout.wait(30)
        except subprocess.TimeoutExpired:
            output.seek(0)
            pytest.fail(f"a time-out; the rollout said:\n{output.read()[-3000:]}")
        finally:
            rollout.kill()
            rollout.wait(10)
        output.seek(0)
        return output.read(), trainer


def test_plain_vllm_follows_a_plain_trainer(tmp_path: Path, installed: dict[str, str]) -> None:
    output, trainer = run(tmp_path, installed)
    assert trainer.returncode == 0, f"{trainer.stderr[-2000:]}\nrollout:\n{output[-2000:]}"
    assert re.findall(r"^step (\d)", trainer.stdout, re.M) == ["1", "2", "3"]
    gaps = re.findall(r"version (\d): gap (\S+),", output)
    assert [version for version, _ in gaps] == ["1", "2", "3"]
    assert all(float(gap) < 1e-3 for _, gap in gaps)


def test_probe_check_finds_that_the_tied_head_was_left_out(tmp_path: Path, installed: dict[str, str]) -> None:
    output, trainer = run(tmp_path, installed | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, "--forget-tied-head")
    assert trainer.returncode != 0
    problem = "WeightsError: version 1: log-probabilities of the probe prompt differ by"
    assert problem in trainer.stderr, f"{trainer.stderr[-2000:]}\nrollout:\n{output[-2000:]}"
    assert "version 1: gap" not in output
