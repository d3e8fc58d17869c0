"""What a raylet of ours runs for each role: Ray's own worker, minus one import that costs more than all the others together.

Ray imports jsonschema, and jsonschema, where the package rfc3987_syntax is installed (JupyterLab brings it), builds that package's grammar
at once: 1.3 s of CPU time in each process, for a check of international URIs that Ray never asks for. jsonschema does without it.
"""

from __future__ import annotations

import runpy
import sys


def skip_slow_import() -> None:
    """For a process that is about to import ray for the first time: the package counts as not installed."""
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose module names are not for everybody
    skip_slow_import()
    runpy.run_module("ray._private.workers.default_worker", run_name="__main__", alter_sys=True)
