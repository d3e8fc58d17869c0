"""`job.roles`: a handle on each role, with what it does now and the verbs that act on it. What they show is as fresh as the log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .core.run_state import RoleView
from .core.thresholds import MOST_SECONDS, plain_number
from .errors import ConfigError, HostGone

if TYPE_CHECKING:
    from .job import Job


class RoleHandle:
    """One role of a job, whatever life it is in; what it shows is as fresh as the log."""

    def __init__(self, job: Job, name: str) -> None:
        self._job, self.name = job, name

    @property
    def _view(self) -> RoleView:
        return self._job._state.roles[self.name]

    @property
    def state(self) -> str:
        return str(self._view.state)

    @property
    def phase(self) -> str:
        """Empty before its first sample."""
        return self._view.phase

    @property
    def incarnation(self) -> int:
        return self._view.incarnation

    @property
    def version(self) -> int:
        """Weight version it works with; -1: none."""
        return self._view.version

    @property
    def node(self) -> str:
        return self._view.node

    @property
    def pid(self) -> int:
        return self._view.pid

    @property
    def progress(self) -> int:
        """Trainer: micro-batches done; rollout: tokens generated; others: requests handled."""
        return self._view.progress

    @property
    def pending(self) -> int:
        """Work that it has and has not finished; rollout: trajectories."""
        return self._view.pending

    def kill(self) -> int:
        """SIGKILL to its process; returns the pid. Raises RobustRLError, HostGone."""
        return int(self._job._call("signal", None, role=self.name, signal="kill"))

    def hang(self, seconds: float = 0.0) -> int:
        """SIGSTOP to its process, which after ``seconds`` goes on; 0: never by itself. Returns the pid."""
        plain = plain_number(seconds)
        if type(plain) not in (int, float) or not 0 <= plain <= MOST_SECONDS:
            raise ConfigError("seconds", seconds, f"must be finite and not negative, at most {MOST_SECONDS:.10g}; 0: for good")
        return int(self._job._call("signal", None, role=self.name, signal="hang", seconds=float(plain)))

    def restart(self) -> int:
        """End this life and begin the next one, as a recovery would; returns the incarnation that ends. Raises JobFailed, HostGone."""
        return int(self._job._call("order", None, role=self.name, action="restart"))

    def drain(self) -> int:
        """A rollout: its unfinished work goes to others, it gets no more, and it ends; `restart` brings it back. Returns the incarnation
        that ends. Raises ConfigError for other roles, JobFailed for the last rollout that serves.
        """
        return int(self._job._call("order", None, role=self.name, action="drain"))

    def logs(self, lines: int = 50) -> list[str]:
        """Last lines of the log of its present life."""
        if not self._job.over:
            with contextlib.suppress(HostGone):  # it ends just now: the file is there
                found: list[str] = self._job._call("logs", None, role=self.name, lines=lines)
                return found
        return tail(self._job.run_dir / "logs" / f"{self.name}.{self.incarnation}.log", lines)

    def __repr__(self) -> str:
        return (f"<{self.name} {self.state}, {self.phase or 'no phase yet'}, version {self.version}, incarnation {self.incarnation}, "
                f"{self.node}, pid {self.pid}>")


class Roles(Mapping[str, RoleHandle]):
    """The roles that have been started so far, by name."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __getitem__(self, name: str) -> RoleHandle:
        if name not in self._job._state.roles:
            raise KeyError(f"{name!r}: this job has {', '.join(self) or 'no roles yet'}")
        return RoleHandle(self._job, name)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._job._state.roles))

    def __len__(self) -> int:
        return len(self._job._state.roles)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.values())) or "<no roles yet>"


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a file; none where it is missing."""
    return path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []
