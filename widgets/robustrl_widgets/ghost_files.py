"""Where ghosts come from: recorded for a job that has ended, kept beside its run directory, found again for jobs like it.

A ghost is one small JSON file, ``ghosts/KEY.json`` beside the run directories; one comes with the package, for the class profile's own
settings.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from robustrl.core import events as ev
from robustrl.core.roles import RoleKind
from robustrl.core.run_state import RunState
from robustrl.errors import ConfigError, WaitTimeout
from robustrl.faults import AnyFault, FaultList, make_fault
from robustrl.faults.catalogue import NODE

from .ghost import Ghost, ghost_of, key_of

if TYPE_CHECKING:
    from robustrl.job import Job

BUNDLED = Path(__file__).parent / "sample" / "ghost.json"
_NAME = 26
log = logging.getLogger(__name__)


def run_dir_of(run: str | Path) -> Path:
    """``run``: a run's directory, or its file in there, whatever can be read."""
    place = Path(run).expanduser().absolute()
    return place.parent if place.name.endswith((".jsonl", ".jsonl.gz", ".parquet")) else place


def folder_of(run: str | Path) -> Path:
    """Where the ghosts of the runs beside this one are. ``run``: see `run_dir_of`."""
    return run_dir_of(run).parent / "ghosts"


def read(path: Path) -> Ghost:
    """Raises OSError, msgspec.DecodeError."""
    return msgspec.json.decode(path.read_bytes(), type=Ghost)


def write(ghost: Ghost, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path, draft = folder / f"{ghost.key}.json", folder / f".{ghost.key}.json"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(ghost), indent=0))
    draft.replace(path)
    return path


def find(config: Mapping[str, Any], folder: Path | None) -> Ghost | None:
    """For a job with this configuration: the one that was recorded here, else the bundled one if it fits."""
    key = key_of(config)
    for path in ([folder / f"{key}.json"] if folder else []) + [BUNDLED]:
        if not path.is_file():
            continue
        try:
            ghost = read(path)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("the ghost %s cannot be read: %s", path, error)
            continue
        if ghost.key == key:
            return ghost
    return None


def record(job: Job, timeout: float | None) -> Path:
    """See `Job.record_ghost`."""
    if not job.over:
        raise ConfigError("job", job.name, f"is {job.status}: two jobs at once slow each other down; record its ghost when it has ended")
    deadline = None if timeout is None else time.monotonic() + timeout
    ghost = ghost_of(_run(job, deadline).events)
    path = write(ghost, folder_of(job.run_dir))
    if job._feed is not None:
        job._feed.race_against(ghost)
    return path


def _run(job: Job, deadline: float | None) -> Job:
    """The same job once more, its faults included, in mode full; ended when this returns."""
    from robustrl.config import RecoveryConfig
    from robustrl.launching import launch

    faults = faults_of(job.events)
    steps = max([1, job.step, *(fault.step or 0 for fault in faults)])
    again = launch(msgspec.structs.replace(
        job.config, name=f"{job.name[:_NAME]}-ghost", recovery=RecoveryConfig(mode="full", standbys="cold"), standbys=0, witness=False,
        keep_alive=False, run_dir=str(folder_of(job.run_dir)), steps=steps, restarts=job.config.restarts + len(faults)))
    try:
        targets, limits = {fault.role for fault in faults} - {""}, again.config.deadlines
        patience = _left(deadline, limits.cluster_start + limits.role_start)
        if not again.wait_until(lambda: again.over or targets <= set(again._state.roles), patience):
            raise WaitTimeout(f"the ghost of job {job.name!r}: its roles did not start within {patience:g} s")
        if changes := _changed_limits(job, again):
            again.thresholds.update(changes)
        if faults:
            again.schedule(FaultList(faults=faults))
        again.wait(timeout=None if deadline is None else _left(deadline))
    finally:
        again.stop()
    return again


def faults_of(entries: list[ev.Entry]) -> list[AnyFault]:
    """Those that struck, each in the step in which it did and at the role that it hit; of roles that were added later, none."""
    state, first, found = RunState(), set[str](), dict[int, AnyFault]()
    for entry in entries:
        state.apply(entry)
        match entry.event:
            case ev.RoleStarted(role=role) if state.status == "starting" and state.roles[role].kind is not RoleKind.STANDBY:
                first.add(role)
            case ev.FaultInjected(fault=fault, role=role) if role in first and fault not in found and fault in state.faults.faults:
                options = state.faults.faults[fault].options
                target = options["target"] if NODE.fullmatch(options["target"]) else role
                values = {**options, "target": target, "rank": None, "node": "", "after": 0.0, "step": state.step + 1}
                found[fault] = make_fault(values)
    return list(found.values())


def _changed_limits(job: Job, again: Job) -> dict[str, Any]:
    begun = dict(again.thresholds.now.items())
    return {path: value for path, value in job.thresholds.now.items() if value != begun.get(path)}


def _left(deadline: float | None, most: float = float("inf")) -> float:
    return most if deadline is None else max(0.0, min(most, deadline - time.monotonic()))
