"""`launch` and `attach`: how a job gets its run directory, its name and its host process, and a kernel its handle.

Promised: `launch` returns within a second and either raises, or leaves one host process that knows all it needs from the run directory. Two
live jobs never have the same name. Left out: anything that needs a heavy import or the network; the host checks that before a role starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from . import config as configuration
from . import requirements
from .config import JobConfig
from .core.events import RunEnded
from .core.lifecycle import DONE
from .errors import ConfigError, HostGone, MissingExtra, RobustRLError, WaitTimeout
from .job import Job
from .rl.rewards import check_signature
from .rl.tasks import task_class
from .runtime import processes, ray_clusters, registry, wire
from .runtime.event_log import read_log
from .runtime.registry import JobEntry

_HOST = ("-m", "robustrl.runtime.host")
_WITNESS = ("-m", "robustrl.runtime.witness")
_EARLIER = "must be the directory of an earlier run"
_STOP_CALL = 10.0
_POLL = 0.1
_LEFT_OVER = 10.0
"""Seconds in which processes of a run that is resumed have to go."""


def launch(config: JobConfig | None = None, *, reward: Callable[..., list[float]] | str | None = None,
           resume: str | Path | None = None, **settings: Any) -> Job:
    """Start a job and return its handle, within a second; the job starts up in the background.

    Settings are those of JobConfig, by name, or one JobConfig. ``reward``: a function with TRL's signature, or ``module:function``. An
    earlier job of this process with the same name is replaced in the background; with ``address=`` a live job with an equal configuration
    is attached to. ``resume``: the directory of a run whose host has ended, on this machine, before its steps were done; it goes on there,
    with its own settings, from its last state, journal and log.

    Raises ConfigError or MissingExtra for what can be seen without heavy imports or the network; the rest raises from the first wait or
    access.
    """
    if resume is not None:
        if config is not None or settings or reward is not None:
            raise ConfigError("resume", str(resume), "takes no other settings: the run has its own")
        if not isinstance(resume, str | Path):
            raise ConfigError("resume", resume, _EARLIER)
        configuration.check_named(resume, "resume", _EARLIER)
        return _resume(configuration.home(Path(resume), "resume").resolve())
    if config is not None and not isinstance(config, JobConfig):
        raise ConfigError("config", config, "must be a JobConfig, or settings by name, e.g. launch(steps=20)")
    if config is not None and settings:
        raise ConfigError("settings", sorted(settings), "give one JobConfig or settings by name, not both")
    if reward is not None and not callable(reward) and not isinstance(reward, str):
        raise ConfigError("reward", reward, "must be a function with TRL's signature, or module:function")
    given = msgspec.structs.asdict(config) if config is not None else settings
    config = configuration.make_config(given | ({"reward": reward} if isinstance(reward, str) else {}))
    configuration.check(config)
    pickled = None
    if callable(reward):
        check_signature(reward, reward, task_class(config.task).columns)
        pickled = _pickle(reward)
    config = requirements.settle_standbys(config)
    requirements.check_machine(config)
    with registry.locked():
        live = registry.find(config.name)
        mine = live is not None and live.owner == _me()
        if live and config.address is not None and _same_job(live, config, pickled):
            return Job(live)
        if config.address is not None:
            ray_clusters.choose(config.address, ray_clusters.found_here(), os.environ)
        registry.check_name(config.name, live.run if live and mine else None)
        job = _start(config, pickled, live.run if live and mine else None)
    if live:
        threading.Thread(target=_end_replaced, args=(live, job.run), name=f"robustrl-replace {live.run}", daemon=True).start()
    return job


_HISTORY_SECONDS = 10.0
"""For a long log to be read; longer than that nobody waits for a handle, and the rest comes behind it."""


def attach(name: str) -> Job:
    """A handle on this user's live job of that name, from any process, which knows what has happened until now.

    Raises ConfigError that names the jobs there are.
    """
    if entry := registry.find(name):
        job = Job(entry)
        job.catch_up(_HISTORY_SECONDS)
        return job
    names = ", ".join(sorted(entry.name for entry in registry.live_jobs())) or "none"
    raise ConfigError("name", name, f"no live job has this name on this machine; there are: {names}")


def _me() -> processes.ProcessId:
    return processes.ProcessId(os.getpid(), processes.read_start_ticks(os.getpid()))


def _start(config: JobConfig, pickled: bytes | None, replaces: str | None) -> Job:
    run = registry.new_run_id(config.name)
    registry.socket_path(run)  # its path may be too long
    folder = configuration.home(Path(config.run_dir), "run_dir").absolute() / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}-{run[-6:]}"
    me = _me()
    try:
        (folder / "logs").mkdir(parents=True)
        if pickled is not None:
            _write_private(folder / "reward.pkl", pickled)
            config = msgspec.structs.replace(config, reward=str(folder / "reward.pkl"))
        (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
        note = registry.HostFile(run=run, owner_pid=me.pid, owner_ticks=me.start_ticks, keep_alive=config.outlives_owner, replaces=replaces)
        (folder / "job.json").write_bytes(msgspec.json.encode(note))
        _point_latest(folder)
        output = os.open(folder / "logs" / "host.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except (OSError, ValueError) as error:  # ValueError: a NUL in it
        raise ConfigError("run_dir", config.run_dir, f"cannot be written: {error}") from None
    return _start_host(config, run, folder, output, me)


def _start_host(config: JobConfig, run: str, folder: Path, output: int, me: processes.ProcessId) -> Job:
    try:
        process = subprocess.Popen(
            [sys.executable, *_HOST, str(folder)], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, env=os.environ | {registry.RUN_VARIABLE: run})
    finally:
        os.close(output)
    entry = JobEntry(name=config.name, run=run, run_dir=str(folder), host_pid=process.pid,
                     host_ticks=processes.read_start_ticks(process.pid), owner_pid=me.pid, owner_ticks=me.start_ticks,
                     address=f"unix:{registry.socket_path(run)}")
    registry.write(entry)
    if config.witness:
        _start_witness(entry)
    return Job(entry, process)


def _start_witness(entry: JobEntry) -> None:
    """Without the run's mark: what cleans up after the job leaves it alone; it ends by itself."""
    arguments = (entry.run, entry.run_dir, str(entry.host_pid), str(entry.host_ticks))
    environment = {name: value for name, value in os.environ.items() if name != registry.RUN_VARIABLE}
    with open(Path(entry.run_dir, "logs", "witness.log"), "ab") as output:
        witness = subprocess.Popen([sys.executable, *_WITNESS, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                   start_new_session=True, env=environment)  # fmt: skip
    threading.Thread(target=witness.wait, name=f"robustrl-witness {entry.run}", daemon=True).start()


def _resume(folder: Path) -> Job:
    """The next part of the run in ``folder``: its processes, if any is left, are ended first."""
    try:
        note = msgspec.json.decode((folder / "job.json").read_bytes(), type=registry.HostFile)
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=JobConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError("resume", str(folder), f"{_EARLIER}: {error}") from None
    with registry.locked():
        if live := next((entry for entry in registry.live_jobs() if entry.run == note.run), None):
            raise ConfigError("resume", str(folder), f"goes on: its host is process {live.host_pid}; "
                              f"robustrl.attach({config.name!r}) connects to it")
        try:
            last = read_log(folder / "events.jsonl", live=True)[-1].event
        except (IndexError, RobustRLError) as error:
            raise ConfigError("resume", str(folder), f"has no log that can be continued: {error}") from None
        if isinstance(last, RunEnded) and last.status == DONE:
            raise ConfigError("resume", str(folder), f"is done: {last.reason}")
        requirements.check_machine(config)
        registry.check_name(config.name)
        processes.kill_marked(note.run, _LEFT_OVER)
        registry.clear_for_resume(note.run)
        me = _me()
        note = msgspec.structs.replace(note, owner_pid=me.pid, owner_ticks=me.start_ticks, replaces=None)
        (folder / "job.json").write_bytes(msgspec.json.encode(note))
        output = os.open(folder / "logs" / "host.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return _start_host(config, note.run, folder, output, me)


def _write_private(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _point_latest(folder: Path) -> None:
    draft = folder.parent / f".latest-{folder.name}"
    draft.symlink_to(folder.name)
    draft.replace(folder.parent / "latest")


def _pickle(function: Callable[..., Any]) -> bytes:
    """By value, so that a function of a notebook or a local module reaches the job's processes. Raises ConfigError, MissingExtra."""
    try:
        import cloudpickle
    except ImportError as error:
        raise MissingExtra(f"a reward function needs cloudpickle ({error}): pip install 'robustrl[job]'") from error
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    by_value = module is not None and module.__name__ not in ("__main__", *cloudpickle.list_registry_pickle_by_value())
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        pickled: bytes = cloudpickle.dumps(function)
        return pickled
    except Exception as error:  # whatever the function drags along may refuse in its own way
        raise ConfigError("reward", function, f"cannot be sent to the job's processes: {error}") from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _same_job(live: JobEntry, config: JobConfig, pickled: bytes | None) -> bool:
    folder = Path(live.run_dir)
    if not (folder / "config.json").exists():
        return False  # its run directory was removed
    other = msgspec.json.decode((folder / "config.json").read_bytes(), type=JobConfig)
    stored = folder / "reward.pkl"
    if (stored.read_bytes() if stored.exists() else None) != pickled:
        return False
    return msgspec.structs.replace(other, reward=None if pickled else other.reward) == config


def _end_replaced(entry: JobEntry, successor: str, patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while entry.alive and time.monotonic() < deadline:
        try:
            client = wire.HostClient(entry.address, entry.token)
            client.call("stop", _STOP_CALL, reason=f"replaced by {successor}")
            client.close()
            return
        except (HostGone, WaitTimeout):  # it may not listen yet
            time.sleep(_POLL)
    processes.kill(entry.host)
