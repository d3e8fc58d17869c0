"""Facts about this machine and its processes, read from /proc and /sys: memory under the control group's limit, shared memory, cores.

Every function takes its paths as arguments with the real ones as defaults, so that tests give files of their own.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

_UNLIMITED = 1 << 60
"""Bytes; control groups of version 1 say "no limit" with a number above it."""


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """(bytes, where the bound comes from): what the host has free, or what the control group's limit leaves, whichever is less.

    Page cache counts as free, as the kernel gives it back. Versions 1 and 2 of control groups; every level up to the root bounds.
    """
    bounds = [(_meminfo(proc)["MemAvailable"], "free memory of the machine")]
    for folder, current, limit, stat in _memory_groups(proc, cgroups):
        if limit < _UNLIMITED:
            used = current - stat.get("total_inactive_file", stat.get("inactive_file", 0))
            bounds.append((max(0, limit - used), f"control group {folder}, limit {limit / 2**30:.2f} GiB"))
    return min(bounds)


def total_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of the machine, or of the tightest control group."""
    return min([_meminfo(proc)["MemTotal"], *(limit for _, _, limit, _ in _memory_groups(proc, cgroups))])


def shared_memory(path: str = "/dev/shm") -> tuple[int, int]:
    """(size, free) in bytes of the shared-memory mount; (0, 0) without one."""
    if not os.path.isdir(path):
        return 0, 0
    found = os.statvfs(path)
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def describe() -> dict[str, Any]:
    """For the log's first record and for benchmarks."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory": total_memory(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "user": os.getuid(),
    }


def _meminfo(proc: Path) -> dict[str, int]:
    pairs = (line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    return {key: int(value.split()[0]) * 1024 for key, value in pairs}


def _memory_groups(proc: Path, cgroups: Path) -> list[tuple[str, int, int, dict[str, int]]]:
    """(folder, bytes used, limit, memory.stat) of each control group above this process that has a limit file.

    In a container the path that /proc names may lie outside the mount: then the mount's own top is the group.
    """
    found = []
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, names = cgroups, ("memory.current", "memory.max")
        elif "memory" in controllers.split(","):
            mount, names = cgroups / "memory", ("memory.usage_in_bytes", "memory.limit_in_bytes")
        else:
            continue
        folder = mount / path.lstrip("/")
        for level in [folder, *folder.parents]:
            if level.is_relative_to(mount) and (level / names[1]).is_file():
                limit = (level / names[1]).read_text().strip()
                used = int((level / names[0]).read_text())
                found.append((str(level), used, _UNLIMITED if limit == "max" else int(limit), _stat(level / "memory.stat")))
    return found


def _stat(path: Path) -> dict[str, int]:
    return {key: int(value) for key, value in (line.split() for line in path.read_text().splitlines())} if path.is_file() else {}
