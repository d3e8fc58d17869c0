"""Memory under control groups of both versions, read from made-up files."""

from __future__ import annotations

from pathlib import Path

import pytest

from robustrl.runtime import machine

MIB = 1 << 20


@pytest.fixture
def files(tmp_path: Path):
    """``files(available, groups, self_cgroup)`` makes /proc and /sys/fs/cgroup; sizes in MiB."""

    def make(available: int, own: str, groups: dict[str, dict[str, str]]) -> tuple[Path, Path]:
        proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        cgroups.mkdir()
        (proc / "meminfo").write_text(f"MemTotal: {8192 * 1024} kB\nMemAvailable: {available * 1024} kB\nHugePages_Total: 0\n")
        (proc / "self" / "cgroup").write_text(own)
        for folder, contents in groups.items():
            (cgroups / folder).mkdir(parents=True, exist_ok=True)
            for name, text in contents.items():
                (cgroups / folder / name).write_text(text)
        return proc, cgroups

    return make


def v2(limit: str, used: int, cache: int = 0) -> dict[str, str]:
    return {"memory.max": limit + "\n", "memory.current": f"{used * MIB}\n", "memory.stat": f"anon 5\ninactive_file {cache * MIB}\n"}


def test_without_a_limit_the_machine_decides(files):
    proc, cgroups = files(4000, "0::/a\n", {"a": v2("max", 100)})
    assert machine.available_memory(proc, cgroups) == (4000 * MIB, "free memory of the machine")
    assert machine.total_memory(proc, cgroups) == 8192 * MIB


def test_version_2_limit_less_use_and_page_cache_counts_as_free(files):
    proc, cgroups = files(4000, "0::/a\n", {"a": v2(str(3072 * MIB), 1000, cache=400)})
    free, bound = machine.available_memory(proc, cgroups)
    assert free == (3072 - 1000 + 400) * MIB and bound == f"control group {cgroups}/a, limit 3.00 GiB"
    assert machine.total_memory(proc, cgroups) == 3072 * MIB


def test_a_parent_may_be_tighter(files):
    proc, cgroups = files(4000, "0::/a/b\n", {"a": v2(str(1024 * MIB), 1000), "a/b": v2(str(3072 * MIB), 10)})
    assert machine.available_memory(proc, cgroups)[0] == 24 * MIB


def test_in_a_container_the_mount_is_the_group(files):
    proc, cgroups = files(4000, "0::/docker/abc\n", {"": v2(str(512 * MIB), 100)})
    assert machine.available_memory(proc, cgroups)[0] == 412 * MIB


def test_use_above_the_limit_leaves_nothing(files):
    proc, cgroups = files(4000, "0::/\n", {"": v2(str(512 * MIB), 600)})
    assert machine.available_memory(proc, cgroups)[0] == 0


def v1(limit: int, used: int) -> dict[str, str]:
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used * MIB}\n",
            "memory.stat": f"total_inactive_file {50 * MIB}\n"}


def test_version_1_and_its_word_for_no_limit(files):
    own = "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n"
    proc, cgroups = files(4000, own, {"memory/job": v1(1024 * MIB, 100), "memory": v1(0x7FFFFFFFFFFFF000, 5000)})
    assert machine.available_memory(proc, cgroups)[0] == (1024 - 100 + 50) * MIB


def test_this_machine():
    free, bound = machine.available_memory()
    assert 0 < free <= machine.total_memory() and bound
    size, available = machine.shared_memory()
    assert size >= available >= 0 and machine.shared_memory("/no/such/mount") == (0, 0)
    assert machine.describe()["cores"] >= 1
