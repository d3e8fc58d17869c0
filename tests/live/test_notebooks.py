"""Every lesson runs from top to bottom as a reader would run it, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from robustrl.core.audit import audit
from robustrl.runtime.event_log import read_log
from tests.live.conftest import assert_clean

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
_SETTINGS = {
    "02_weight_resync": {"ROBUSTRL_PROFILE": "class", "ROBUSTRL_STEPS": "8"},
    "03_detect_and_inject": {"ROBUSTRL_PROFILE": "class", "ROBUSTRL_STEPS": "2"},
    "04_recovery_and_ettr": {"ROBUSTRL_PROFILE": "class", "ROBUSTRL_STEPS": "20"},
}
_OTHERS = {"ROBUSTRL_STEPS": "20"}
"""The engine is the reader's own, except where a lesson starts rollouts and starts them again."""
_CELL_DEADLINE = 300
_START_DEADLINE = 60


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a notebook's kernel runs; when its kernel has ended, nothing of the runs that it started is left, nor what a library of theirs
    put into the folder for temporary files.
    """
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    yield tmp_path
    assert [path.name for path in temporary.iterdir() if not path.name.startswith(("ipykernel", "torchinductor_"))] == []  # a cache is kept
    runs = {json.loads(path.read_text())["run"] for path in tmp_path.glob("runs/*/job.json")}
    assert runs, "no run was started here"
    for run in runs:
        assert_clean(run)


def client(cells: list[Any], folder: Path) -> NotebookClient:
    notebook = nbformat.v4.new_notebook(cells=cells)
    return NotebookClient(notebook, timeout=_CELL_DEADLINE, startup_timeout=_START_DEADLINE, kernel_name="python3",
                          resources={"metadata": {"path": str(folder)}})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.timeout(600)
def test_a_lesson_runs_without_an_error(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _SETTINGS.get(path.stem, _OTHERS).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    assert [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")] == [], "committed without outputs"
    lesson = client(notebook.cells, folder)
    lesson.execute()
    outputs = [output for cell in lesson.nb.cells for output in cell.get("outputs", [])]
    assert [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"] == []
    live = [output.data for output in outputs if "application/vnd.jupyter.widget-view+json" in output.get("data", {})]
    bare = [data["text/plain"] for data in live if "text/html" not in data and not data["text/plain"].startswith("Loading weights")]
    assert bare == [], "what is live has a form that a saved notebook still shows; the bar of transformers is not ours"
    logs = list(folder.glob("runs/*/events.jsonl"))
    assert logs and [finding for log in logs for finding in audit(read_log(log))] == []


_LAUNCH = """
import robustrl
job = robustrl.launch(name="interrupted", profile="class", steps=100_000, evaluation_prompts=0)
job.wait(step=1, timeout=200)
"""
_INTERRUPTED = """
import os, signal, threading
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()  # what the stop button does
job.wait(timeout=200)
"""
_LOOK = """
step = job.step
job.wait(step=step + 1, timeout=60)
print("status:", job.status)
"""
_STOP = """
job.stop()
old.wait(timeout=60)
print("status:", old.status)
"""


@pytest.mark.timeout(600)
def test_interrupting_a_wait_leaves_the_job_running_and_a_new_launch_replaces_it(folder: Path) -> None:
    sources = (_LAUNCH, _INTERRUPTED, _LOOK, "old = job\n" + _LAUNCH, _STOP)
    kernel = client([nbformat.v4.new_code_cell(source) for source in sources], folder)
    with kernel.setup_kernel():
        cells = list(enumerate(kernel.nb.cells))
        kernel.execute_cell(cells[0][1], 0)
        with pytest.raises(CellExecutionError, match="job 'interrupted' goes on"):
            kernel.execute_cell(cells[1][1], 1)
        for index, cell in cells[2:]:
            kernel.execute_cell(cell, index)
    printed = [output.text for _, cell in cells for output in cell.outputs if output.output_type == "stream"]
    assert printed == ["status: running\n", "status: stopped\n"]
