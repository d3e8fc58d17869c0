"""The files that say what is installed agree with each other: pyproject.toml, the lock, the conda environment, the make file."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NOT_IN_THE_LOCK = {"vllm", "robustrl"}
"""vllm is for GPU machines; the extras name robustrl itself."""


def pins(lines: list[str]) -> dict[str, Version]:
    found = {}
    for line in lines:
        name, separator, version = line.partition("==")
        assert separator and re.fullmatch(r"[A-Za-z0-9._-]+", name), f"{line!r}: must be NAME==VERSION"
        assert canonicalize_name(name) not in found, f"{name} is pinned twice"
        found[canonicalize_name(name)] = Version(version)
    return found


@pytest.fixture(scope="module")
def lock() -> dict[str, Version]:
    lines = (ROOT / "requirements-cpu.lock").read_text().splitlines()
    return pins([line for line in lines if line and not line.startswith("#")])


def ranges() -> Iterator[Requirement]:
    for text in [*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]:
        yield Requirement(text)


def test_every_range_admits_its_pin(lock) -> None:
    for requirement in ranges():
        name = canonicalize_name(requirement.name)
        if name in NOT_IN_THE_LOCK:
            continue
        assert name in lock, f"{requirement.name} of pyproject.toml is not pinned in the lock"
        assert requirement.specifier.contains(lock[name], prereleases=True), f"the lock's {name}=={lock[name]} lies outside {requirement}"


def test_ranges_are_wide() -> None:
    """On somebody's cluster their Ray and torch decide: lower bounds only."""
    for requirement in ranges():
        assert {specifier.operator for specifier in requirement.specifier} <= {">="}, str(requirement)


def test_conda_users_get_the_pins_of_the_lock(lock) -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (by_pip,) = [item["pip"] for item in environment["dependencies"] if isinstance(item, dict)]
    assert pins(by_pip) == lock
    assert "python=3.11" in environment["dependencies"]


def test_the_lock_leaves_out_what_breaks_transformers_and_names_no_registry(lock) -> None:
    assert not {"torchvision", "torchaudio", "torchcodec", "robustrl"} & set(lock)
    for name in ("requirements-cpu.lock", "environment.yml", "pyproject.toml", "Makefile"):
        text = (ROOT / name).read_text()
        assert not re.search(r"https?://|index-url|find-links|file:", text), f"{name} names a registry"


def test_the_lock_is_complete_for_what_it_pins(lock) -> None:
    """Every requirement of every pinned package, as installed here, is pinned too or left out on purpose."""
    program = """if True:
        import importlib.metadata as metadata, sys
        from packaging.requirements import Requirement
        from packaging.utils import canonicalize_name
        for line in sys.stdin:
            name = line.strip()
            for text in metadata.requires(name) or []:
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    print(name, canonicalize_name(requirement.name))
    """
    result = subprocess.run([sys.executable, "-c", program], input="\n".join(lock), capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    left_out = {"torchvision", "torchaudio", "torchcodec"}
    missing = {tuple(line.split()) for line in result.stdout.splitlines()} - {(name, n) for name in lock for n in [*lock, *left_out]}
    assert not missing, f"(package, requirement) that the lock lacks: {sorted(missing)}"


def test_the_light_base_imports_nothing_heavy() -> None:
    program = "import sys, robustrl; print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'ray', 'vllm', 'ucxx', 'numpy'}))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_core_is_pure() -> None:
    """Decisions import no Ray, torch, UCX, thread, clock or file."""
    allowed = {
        "__future__",
        "bisect",
        "collections",
        "dataclasses",
        "difflib",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "math",
        "msgspec",
        "numbers",
        "re",
        "robustrl",
        "statistics",
        "typing",
    }
    for path in sorted((ROOT / "robustrl" / "core").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                if node.level:
                    inside = node.level == 1 or (node.module or "").split(".")[0] in {"core", "config", "errors", ""}
                    assert inside, f"{path.name} imports {node.module}"
                    continue
                names = [node.module or ""]
                if names[0].startswith("robustrl."):
                    assert names[0].split(".")[1] in {"core", "config", "errors"}, f"{path.name} imports {names[0]}"
            for name in names:
                assert name.split(".")[0] in allowed, f"core/{path.name} imports {name}"


def test_make_refuses_an_old_python() -> None:
    old = ROOT / "tests" / "nowhere" / "python3.9"
    result = subprocess.run(["make", "--always-make", "setup", f"PYTHON={old}"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert "Python 3.11 or newer is needed" in result.stderr and "make PYTHON=" in result.stderr


@pytest.mark.parametrize(("cuda", "code"), [(False, 0), (True, 2)])
def test_make_stops_at_a_cuda_build_of_torch(tmp_path: Path, cuda: bool, code: int) -> None:
    """With an interpreter that plays pip and torch: the hint comes, and the stamp that would hide it the next time does not."""
    for name in ("Makefile", "requirements-cpu.lock", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ncase "$*" in *torch.version.cuda*) exit {int(cuda)};; esac\n')
    python.chmod(0o755)
    result = subprocess.run(["make", "setup", f"PYTHON={sys.executable}"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == code, result.stderr
    assert ("CUDA build of torch" in result.stderr) == cuda
    assert (tmp_path / ".venv" / ".installed").exists() != cuda


@pytest.mark.parametrize("bad", ["", "ruff", "mypy", "tests/unit", "tests/live", "tests/browser"])
def test_make_test_fails_when_any_part_of_it_does(tmp_path: Path, bad: str) -> None:
    for name in ("Makefile", "requirements-cpu.lock", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "tests" / "browser").mkdir(parents=True)
    (tmp_path / "tests" / "browser" / "test_it.py").touch()
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("python", "ruff", "mypy", "chromium"):
        (tools / name).write_text('#!/bin/sh\ncase "$0 $*" in *"$BAD") [ -z "$BAD" ];; esac\n')
        (tools / name).chmod(0o755)
    (tools.parent / ".installed").touch()
    what = f"bin/{bad} check ." if bad == "ruff" else f"bin/{bad} " if bad == "mypy" else bad
    environment = {**os.environ, "BAD": what, "PATH": f"{tools}:{os.environ['PATH']}"}
    result = subprocess.run(["make", "test"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (result.returncode == 0) == (bad == ""), result.stdout + result.stderr


def test_entry_points_exist() -> None:
    for group in [PROJECT["scripts"], *PROJECT.get("entry-points", {}).values()]:
        for target in group.values():
            module, _, function = target.partition(":")
            path = ROOT / (module.replace(".", "/") + ".py")
            names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
            assert function in names, f"{target}: {path.name} has no such function"
