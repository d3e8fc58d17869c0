"""This user's live jobs on this machine, and the private folders of each run.

A job is one small file in a folder of mode 0700; it counts while its host process lives, whatever the file says. Promised: two jobs never
hold the same name at once, a folder that another user could have planted is refused. Left out: other machines, and who may stop what.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ..errors import ConfigError, RobustRLError
from .processes import MARK, ProcessId, is_alive

TMP_VARIABLE = "ROBUSTRL_TMP"
RUN_VARIABLE = MARK
"""Set to the run id in the environment of every process of a run."""
_MAX_SOCKET_PATH = 100
"""Bytes; the kernel takes 107."""
_RUN = re.compile(r"[A-Za-z0-9_-]+")


class JobEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    run: str
    run_dir: str
    host_pid: int
    host_ticks: int
    owner_pid: int
    owner_ticks: int
    address: str
    token: str | None = None
    """Needed at a TCP address."""

    @property
    def host(self) -> ProcessId:
        return ProcessId(self.host_pid, self.host_ticks)

    @property
    def owner(self) -> ProcessId:
        return ProcessId(self.owner_pid, self.owner_ticks)

    @property
    def alive(self) -> bool:
        return is_alive(self.host)


class HostFile(msgspec.Struct, frozen=True, kw_only=True):
    """``job.json`` in the run directory: what the launcher leaves for the host besides the configuration."""

    run: str
    owner_pid: int
    owner_ticks: int
    keep_alive: bool
    replaces: str | None = None
    """Run id of an older job of this name and owner that is being replaced."""


def root() -> Path:
    """This user's folder for all runs, made if needed. Raises RobustRLError where somebody else holds its name."""
    path = Path(os.environ.get(TMP_VARIABLE) or f"/tmp/robustrl-{os.getuid()}")
    private_folder(path)
    return path


def new_run_id(name: str) -> str:
    """Short, as Ray puts a socket with a long name below it: at most 10 characters of the job's name and 6 random ones."""
    return f"{name[:10]}-{secrets.token_hex(3)}"


def temp_dir(run: str) -> Path:
    return root() / _checked(run)


def shm_dir(run: str) -> Path:
    """In shared memory where the machine has it."""
    base = Path("/dev/shm")
    return (base if base.is_dir() else root()) / f"robustrl-{_checked(run)}"


def socket_path(run: str) -> Path:
    """Of the host's socket. Raises ConfigError where the folder's path is too long for one."""
    path = temp_dir(run) / "host.sock"
    if len(os.fsencode(path)) >= _MAX_SOCKET_PATH:
        raise ConfigError(TMP_VARIABLE, str(root()), f"too long: the socket {path} must stay below {_MAX_SOCKET_PATH} bytes")
    return path


def make_folders(run: str) -> None:
    """The run's private folders, in /tmp and in shared memory, mode 0700."""
    private_folder(temp_dir(run))
    private_folder(shm_dir(run))


def remove_folders(run: str) -> None:
    """Both folders and all in them; done again, it does nothing."""
    for path in (temp_dir(run), shm_dir(run)):
        shutil.rmtree(path, ignore_errors=True)


def clear_for_resume(run: str) -> None:
    """What the processes of a dead run left behind goes, but for the trainer's state in shared memory and the notes of where it lies."""
    for path in temp_dir(run).glob("*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix != ".kept":
            path.unlink(missing_ok=True)


def claim(entry: JobEntry, replaces: str | None = None) -> None:
    """Enter a job. Raises ConfigError, naming its owner, if a live job other than the run ``replaces`` has the name."""
    with locked():
        check_name(entry.name, entry.run, replaces)
        write(entry)


def check_name(name: str, *allowed: str | None) -> None:
    """Raises ConfigError unless no live job has this name, those with an ``allowed`` run id aside."""
    if (other := find(name)) and other.run not in allowed:
        owner = f"owned by process {other.owner_pid}" if is_alive(other.owner) else "whose owner has ended"
        raise ConfigError("name", name, f"in use by the live run {other.run} (host {other.host_pid}), {owner}: "
                          f"robustrl.attach({name!r}) connects to it, `robustrl stop {name}` ends it, or choose another name")


def write(entry: JobEntry) -> None:
    """Write the entry's file in one piece, replacing an earlier one of the run (e.g. once a TCP address is known)."""
    path = _jobs() / f"{_checked(entry.run)}.json"
    draft = path.with_suffix(f".{os.getpid()}.{secrets.token_hex(2)}")
    draft.touch(mode=0o600, exist_ok=False)
    draft.write_bytes(msgspec.json.encode(entry))
    draft.replace(path)


def release(run: str) -> None:
    """Take a run off the list."""
    (_jobs() / f"{_checked(run)}.json").unlink(missing_ok=True)


def live_jobs() -> list[JobEntry]:
    """The jobs whose host lives, oldest first; entries of dead ones are dropped."""
    found: list[tuple[float, JobEntry]] = []
    for path in _jobs().glob("*.json"):
        try:
            entry, written = msgspec.json.decode(path.read_bytes(), type=JobEntry), path.stat().st_mtime
        except (OSError, msgspec.DecodeError):  # its host ended just now; or it is of another version of this program, or no entry
            continue
        if entry.alive:
            found.append((written, entry))
        else:
            path.unlink(missing_ok=True)
    return [entry for _, entry in sorted(found, key=lambda item: item[0])]


def find(name: str) -> JobEntry | None:
    """The newest live job of this name."""
    return next((entry for entry in reversed(live_jobs()) if entry.name == name), None)


@contextmanager
def locked(timeout: float = 5.0) -> Iterator[None]:
    """Alone among this user's processes, from looking at the list to changing it. Raises RobustRLError after ``timeout`` seconds."""
    handle = os.open(_jobs() / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RobustRLError(f"{_jobs()} has been locked by another process for more than {timeout:g} s") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def _jobs() -> Path:
    path = root() / "jobs"
    private_folder(path)
    return path


def _checked(run: str) -> str:
    if not _RUN.fullmatch(run):
        raise ConfigError("run", run, "must be letters, digits, - and _")
    return run


def private_folder(path: Path) -> None:
    """Make it, or accept one that is already there, a folder of ours and open to nobody else."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # not a folder: named below
    except OSError as error:
        raise RobustRLError(f"{path} cannot be made: {error.strerror}; {TMP_VARIABLE} names another folder to use") from None
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RobustRLError(f"{path} must be a folder of user {os.getuid()} with mode 0700; it is owned by {found.st_uid}, "
                            f"mode {stat.filemode(found.st_mode)}: choose another, {TMP_VARIABLE} names it")
