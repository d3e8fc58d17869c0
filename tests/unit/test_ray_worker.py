"""What a role's process imports before it is a role."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

for _name in ("ray", "rfc3987_syntax"):  # looked for, not imported: that takes a second and a half of every worker of the tests
    if importlib.util.find_spec(_name) is None:
        pytest.skip(f"without {_name} there is nothing to skip", allow_module_level=True)


def _modules(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_rays_worker_goes_without_the_grammar_that_costs_more_than_the_rest() -> None:
    loaded = _modules(
        "from robustrl.runtime import ray_worker; ray_worker.skip_slow_import(); import ray._private.workers.default_worker, jsonschema"
    )
    assert {"ray", "jsonschema"} <= loaded
    assert not {"lark", "torch", "pandas", "pyarrow"} & loaded


def test_scalars_for_tensorboard_need_no_torch() -> None:
    loaded = _modules(
        "import tempfile, pathlib; from robustrl.runtime.task_runner import _summary_writer\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    writer = _summary_writer(pathlib.Path(folder)); writer.add_scalar('a', 1.0, 1); writer.close()\n"
        "    assert list(pathlib.Path(folder).glob('events.out*'))"
    )
    assert "tensorboardX" in loaded and "torch" not in loaded
