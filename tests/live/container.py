"""A small container for one command, as a class has them: bounded memory, a small /dev/shm of its own, two cores, a user without any right.

Made of a memory control group (version 1 or 2), a private mount namespace and `setpriv`, so it needs root to be set up; inside there is
none of it left: another uid, no capability, no way to get one, a home that does not exist, and a /tmp of its own. An interpreter or
checkout below a folder that only root may enter (say /root) is shown at its own path by bind mounts, in that namespace alone. Left out:
process ids and the network are the machine's.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from robustrl.runtime.processes import find_marked, pss_bytes

CHECKOUT = Path(__file__).resolve().parents[2]
MEMORY = 3 * 10**9
"""Bytes."""
SHM = 64 << 20
UID = 65534
_CGROUPS = Path("/sys/fs/cgroup")


class NoContainer(Exception):
    """Says what is missing here."""


@contextmanager
def small_container(code: str, tmp: Path, memory: int = MEMORY, shm: int = SHM, uid: int = UID) -> Iterator[subprocess.Popen[str]]:
    """``python -c code`` inside, its output piped as text; ``tmp`` is what it sees as /tmp. All of it is killed at the end.

    Raises NoContainer where one cannot be made.
    """
    missing = [tool for tool in ("unshare", "mount", "setpriv", "taskset") if not shutil.which(tool)]
    if os.getuid() or missing:
        raise NoContainer(f"a container needs root (this is uid {os.getuid()}) and unshare, mount, setpriv, taskset (missing: {missing})")
    tmp.mkdir(parents=True, exist_ok=True)
    tmp.chmod(0o1777)
    group = _make_group(memory)
    try:
        script = "\n".join([
            "set -e",
            f"echo $$ > {group}/cgroup.procs",
            f"mount -t tmpfs -o size={shm},mode=1777 tmpfs /dev/shm",
            *_show([Path(sys.base_prefix), Path(sys.prefix), CHECKOUT]),
            *_show_below_tmp([Path(sys.base_prefix), Path(sys.prefix), CHECKOUT], tmp),
            f"mount --rbind '{tmp}' /tmp",
            f"cd '{CHECKOUT}'",
            f"exec taskset -c {','.join(map(str, sorted(os.sched_getaffinity(0))[:2]))} setpriv --reuid {uid} --regid {uid} --clear-groups "
            "--no-new-privs --inh-caps=-all --ambient-caps=-all --bounding-set=-all \"$@\"",
        ])  # fmt: skip
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", sys.executable, "-u", "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "LANG": "C.UTF-8"},
        )
        with process:
            yield process
            process.kill()
    finally:
        _empty(group)


def peak_pss(run: str, until: subprocess.Popen[str]) -> int:
    """Largest PSS of the whole job, in bytes, asked twice a second until the process ends or the job is gone."""
    peak = 0
    while until.poll() is None and find_marked(run):
        peak = max(peak, pss_bytes(run))
        time.sleep(0.5)
    return peak


def _show(paths: list[Path]) -> list[str]:
    """Shell lines that make each path reachable for everybody where a folder above it is not."""
    closed: dict[Path, list[Path]] = {}
    for path in paths:
        above = next((folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), None)
        if above:
            closed.setdefault(above, []).append(path)
    lines = []
    for folder, wanted in closed.items():
        lines += ["hold=$(mktemp -d)", f"mount --bind '{folder}' $hold", f"mount -t tmpfs -o mode=755 tmpfs '{folder}'"]
        for path in wanted:
            lines += [f"mkdir -p '{path}'", f"mount --bind $hold/'{path.relative_to(folder)}' '{path}'"]
        lines += ["umount $hold", "rmdir $hold"]
    return lines


def _show_below_tmp(paths: list[Path], tmp: Path) -> list[str]:
    """Shell lines that keep what lies below /tmp where it is when ``tmp`` takes its place: a clone may be anywhere."""
    below = [path for path in paths if path.is_relative_to("/tmp")]
    return [
        line
        for path in below
        if (place := tmp / path.relative_to("/tmp"))
        for line in (f"mkdir -p '{place}'", f"mount --bind '{path}' '{place}'")
    ]


def _make_group(memory: int) -> Path:
    name = f"robustrl-test-{secrets.token_hex(3)}"
    old = _CGROUPS / "memory"
    folder, limit = (old / name, "memory.limit_in_bytes") if old.is_dir() else (_CGROUPS / name, "memory.max")
    try:
        folder.mkdir()
        (folder / limit).write_text(str(memory))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        raise NoContainer(f"no memory control group can be made: {error}") from error
    return folder


def _empty(group: Path, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while pids := (group / "cgroup.procs").read_text().split():
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} of {group} survive SIGKILL")
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    group.rmdir()
