"""The Ray clusters of this machine, and which of them an address stands for: never one that is private to a RobustRL job.

Ray's own "auto" takes any raylet's cluster, also a job's, whose token nobody else has: its driver then waits for many minutes.
A private cluster is known by the mark in its raylets' environment or, where that cannot be read, by the name of their temporary folder.
Imports no Ray.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ..config import ADDRESSES, is_place
from ..errors import ConfigError
from .processes import MARK

AUTO = "auto"
_VARIABLE = "RAY_ADDRESS"
"""Which Ray takes before it looks around."""
_TEMPORARY = re.compile(r"/robustrl-\d+/([A-Za-z0-9_-]+)/")
_LOOPBACK = {"localhost": "127.0.0.1", "::1": "127.0.0.1", "[::1]": "127.0.0.1"}


def found_here() -> dict[str, str]:
    """GCS address of each cluster that has a raylet on this machine -> the run to which it is private; empty: to none."""
    clusters: dict[str, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        address = next((part.partition("=")[2] for part in command if part.startswith("--gcs-address=")), "")
        if address and Path(command[0]).name == "raylet":
            clusters[address] = clusters.get(address, "") or _run_of(folder, command)
    return clusters


def _run_of(folder: Path, command: list[str]) -> str:
    mark = f"{MARK}=".encode()
    try:
        marks = [part.removeprefix(mark).decode() for part in (folder / "environ").read_bytes().split(b"\0") if part.startswith(mark)]
    except OSError:  # another user's, or it has ended
        marks = []
    named = _TEMPORARY.search(" ".join(command))
    return marks[0] if marks else named[1] if named else ""


def choose(address: str, clusters: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """The HOST:PORT that ``address`` stands for, or ``auto`` where no private cluster is in Ray's way to find out.

    ``clusters``: as of `found_here`. Raises ConfigError that names a private cluster, or those of which one has to be named.
    """
    field = "address"
    if address == AUTO and (named := environment.get(_VARIABLE)):
        field, address = _VARIABLE, named
    if address != AUTO:
        if not is_place(address):
            raise ConfigError(field, address, ADDRESSES)
        if run := next((run for place, run in clusters.items() if run and _place(place) == _place(address)), ""):
            raise ConfigError(field, address, f"is the private cluster of another RobustRL job, run {run}; {ADDRESSES}")
        return address
    private = ", ".join(sorted(f"run {run} at {place}" for place, run in clusters.items() if run))
    others = sorted(place for place, run in clusters.items() if not run)
    if not private:
        return AUTO
    if not others:
        raise ConfigError(field, AUTO, f"no Ray cluster is here but the private one of another RobustRL job ({private}); {ADDRESSES}")
    if len(others) > 1:
        raise ConfigError(field, AUTO, f"one of {', '.join(others)} has to be named; {ADDRESSES}")
    return others[0]


def _place(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{_LOOPBACK.get(host, host)}:{port}"
