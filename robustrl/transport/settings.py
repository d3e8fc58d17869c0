"""UCX's settings, made in one place before ucxx is imported, and what can be said about the UCX that is there.

UCX reads its environment once. ``apply`` is called first in every process that moves weights; variables that the user has set win:
``UCX_TLS=posix,tcp`` keeps UCX from reading another process's memory (cma). One is refused: UCX_RCACHE_ENABLE, unless it is y.

Security: where the kernel lets only a parent look into a process (``kernel.yama.ptrace_scope`` 1), every process that starts UCX permits
it to all processes of its user (PR_SET_PTRACER_ANY), whatever transports are set. ``UCX_MODULES=^cma`` leaves the kernel's rule as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from robustrl.errors import ConfigError, MissingExtra

_CACHE = "UCX_RCACHE_ENABLE"
_COMMON = {
    **{"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_LEVEL": "fatal", "UCXX_LOG_LEVEL": "FATAL"},  # a dead peer is ours to report, not UCX's
    # UCX 1.21 ends a send to a peer that is gone by means of this cache, and where it has none a segmentation fault ends the source, over
    # tcp as over shared memory: there is no transport to fall back to
    _CACHE: "y",
}
# large segments and socket buffers: half of the CPU seconds per byte of the defaults
_TCP = {"UCX_TCP_TX_SEG_SIZE": "1m", "UCX_TCP_RX_SEG_SIZE": "1m", "UCX_TCP_SNDBUF": "8m", "UCX_TCP_RCVBUF": "8m"}
# cma: the receiver has the kernel copy from the source's memory, once, and the source spends nothing; where a sandbox forbids that UCX
# leaves it out, and posix copies twice through its own small segments. With error handling UCX takes cma only if told that memory can be
# withdrawn from a peer. It cannot: who reads late reads what is there by then, and its checksum is wrong.
_SHM = {"UCX_TLS": "posix,cma,tcp", "UCX_POSIX_ERROR_HANDLING": "y", "UCX_CMA_MEMORY_INVALIDATE": "y"}
_SETTINGS: dict[str, dict[str, str]] = {"tcp": {"UCX_TLS": "tcp"} | _TCP, "shm": _SHM | _TCP, "auto": {}}
_CHOICES = "must be one of 'shm' (one machine; tcp where a peer is elsewhere), 'tcp', 'auto' (what UCX finds, RDMA and CUDA included)"
_OURS = "ROBUSTRL_UCX_SETTINGS"
"""Names what ``apply`` has set, in the environment too, so that a child process does not take it for the user's own."""
_YES = ("y", "yes", "on", "1")
_applied: dict[str, str] | None = None


def apply(transport: str = "shm", shm_dir: str | None = None, host: str | None = None) -> None:
    """Sets the ``UCX_*`` variables that ``transport`` needs.

    ``shm_dir``: folder for UCX's shared-memory files. ``host``: the node's IP; without it UCX listens on every network interface (with
    ``auto`` it does so anyway: an RDMA device has a name of its own).

    Raises ConfigError for an unknown transport or a cache that is switched off, and RuntimeError if ucxx is imported already under other
    settings.
    """
    global _applied
    if transport not in _SETTINGS:
        raise ConfigError("transport", transport, _CHOICES)
    wanted = _COMMON | _SETTINGS[transport] | ({"UCX_POSIX_DIR": shm_dir} if shm_dir else {})
    if host and transport != "auto":
        wanted["UCX_NET_DEVICES"] = _interface(host)
    if "ucxx" in sys.modules and wanted != _applied:
        raise RuntimeError(f"UCX settings {wanted} come too late: ucxx is imported already with {_applied or 'settings of its own'}; "
                           "call robustrl.transport.settings.apply before anything imports ucxx")
    for name in filter(None, os.environ.pop(_OURS, "").split(",")):
        os.environ.pop(name, None)
    if (cache := os.environ.get(_CACHE, "y")).lower() not in _YES:
        raise ConfigError(_CACHE, cache, "must be y, or not set: without it a puller that dies crashes its source, over any transport")
    ours = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in ours} | {_OURS: ",".join(ours)})
    _applied = wanted


def _interface(host: str) -> str:
    """Name of the network interface with that address. Raises ConfigError."""
    import psutil

    addresses = {one.address: name for name, listed in psutil.net_if_addrs().items() for one in listed}
    if host not in addresses:
        raise ConfigError("host", host, f"must be an address of this machine: {', '.join(sorted(addresses))}")
    return addresses[host]


def in_use() -> str:
    """Short name of the transport between two processes of this machine, as set: ``shm`` (with cma or without), ``tcp``, or ``auto``."""
    listed = os.environ.get("UCX_TLS", "all").split(",")
    if "all" in listed or not listed[0] or listed[0].startswith("^"):
        return "auto"
    return "shm" if {"posix", "sysv", "cma", "shm", "sm"}.intersection(listed) else listed[0]


def between(same_machine: bool) -> str:
    """Short name of the transport to a peer: shared memory serves one machine only."""
    name = in_use()
    return "tcp" if name == "shm" and not same_machine else name


def machine_id() -> str:
    """Equal for two processes that can share memory: boot and IPC namespace."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/ipc")
    return f"{boot.read_text().strip() if boot.exists() else ''}/{namespace.stat().st_ino if namespace.exists() else 0}"


def import_ucxx() -> Any:
    """The ucxx module; raises MissingExtra with the way to install it. Applies the default settings if nobody did."""
    if "ucxx" not in sys.modules and _applied is None:
        apply()
    try:
        import ucxx
    except ImportError as error:
        raise MissingExtra(f"ucxx cannot be imported ({error}); pip install 'robustrl[job]', or ucxx from conda-forge for RDMA") from error
    return ucxx


def describe() -> dict[str, Any]:
    """For ``doctor``: versions of UCX and ucxx, the library loaded, transports, RDMA and CUDA or not.

    Without ucxx: ``installed`` False, and ``hint`` says how to get it.
    """
    try:
        ucxx = import_ucxx()
    except MissingExtra as error:
        return {"installed": False, "hint": str(error)}
    maps = Path("/proc/self/maps")
    mapped = maps.read_text().splitlines() if maps.exists() else []
    library = next((line.split()[-1] for line in mapped if "libucp.so" in line), "unknown")
    transports = _transports(library)
    return {
        "installed": True,
        "ucxx": ucxx.__version__,
        "ucx": ".".join(map(str, ucxx.get_ucx_version())),
        "library": library,
        "transports": transports,
        "rdma": any(name.startswith(("rc", "dc", "ud")) for name in transports),
        "cuda": any(name.startswith("cuda") for name in transports),
        "in_use": in_use(),
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")},
    }


def _transports(library: str) -> list[str]:
    """Names of the transports that this UCX offers here, by its own tool; empty where the tool is missing."""
    beside = Path(library).parent.parent / "bin" / "ucx_info"
    tool = str(beside) if beside.exists() else shutil.which("ucx_info")
    if not tool:
        return []
    environment = {name: value for name, value in os.environ.items() if name != "UCX_TLS"} | {"LD_LIBRARY_PATH": str(Path(library).parent)}
    found = subprocess.run([tool, "-d"], capture_output=True, text=True, timeout=20, env=environment, check=False)
    return sorted({line.split("Transport:")[1].strip() for line in found.stdout.splitlines() if "Transport:" in line})
