"""`Job`: the handle that a notebook holds on a job, which lives in processes of its own.

A private thread follows the job's log. Everything shown is read from that log; commands go to the host. Every wait has a deadline;
interrupting one, or losing the handle, leaves the job running. Left out: starting a job (launching.py), and what becomes of a command.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from .async_job import AsyncJob
from .config import JobConfig, is_on_hub
from .core import events as ev
from .core.accounting import Account, account
from .core.run_state import RunState
from .errors import ConfigError, HostGone, JobFailed, RobustRLError, WaitTimeout, counted
from .live_settings import LiveRecovery, LiveThresholds
from .role_handles import RoleHandle, Roles, tail
from .runtime import processes, wire
from .runtime.registry import JobEntry
from .saving import folder_to_write, named_folder
from .tables import Events, RecoveryTable, Table, recoveries, trajectories

if TYPE_CHECKING:
    from robustrl_widgets.showing import DashboardHandle

    from .faults.catalogue import Fault
    from .faults.handle import FaultHandle, ScheduleHandle
    from .faults.schedules import Schedule

T = TypeVar("T")
_POLL = 0.1
"""Seconds between two looks where nothing can wake us: for a socket to appear, a process to end."""
_SWEEP = 15.0
"""Seconds in which everything of a run is gone after its host."""
_CONNECT = 10.0
_LOG_LINES = 20


class Job:
    """See `launch` and `attach`. As a context manager, also an async one, it stops the job at the end of the block if it still runs."""

    def __init__(self, entry: JobEntry, process: subprocess.Popen[bytes] | None = None) -> None:
        self.name, self.run, self.run_dir = entry.name, entry.run, Path(entry.run_dir)
        self.config = self._read_config()
        self.aio = AsyncJob(self)
        """The same verbs for an asyncio program: ``await job.aio.wait(step=10)``."""
        self._entry, self._process = entry, process
        self._state, self._entries = RunState(name=self.name, steps=self.config.steps), Events()
        self._changed = threading.Condition()
        self._feed: Any = None
        self._views: Any = None
        self._box: Any = None
        """Of the views in this process; robustrl_widgets fills them in."""
        self._client: wire.HostClient | None = None
        self._lost: RobustRLError | None = None
        """Why the log has no closing record although the host is gone."""
        threading.Thread(target=self._follow, name=f"robustrl-job {self.run}", daemon=True).start()

    def _read_config(self) -> JobConfig:
        """The run directory may have been removed while the job runs: then the log says it, once it comes."""
        try:
            return msgspec.json.decode((self.run_dir / "config.json").read_bytes(), type=JobConfig)
        except FileNotFoundError:
            return JobConfig(name=self.name)

    # -- what there is to see --------------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """starting, running, paused, done, stopped or failed."""
        return "failed" if self._lost else self._state.status

    @property
    def reason(self) -> str:
        """Why it ended; empty before."""
        return str(self._lost).removeprefix(f"job {self.name!r} failed: ") if self._lost else self._state.reason if self.over else ""

    @property
    def over(self) -> bool:
        return self._lost is not None or self._state.over

    @property
    def step(self) -> int:
        """Last committed optimizer step."""
        return self._state.step

    @property
    def roles(self) -> Roles:
        """Handles by role name, e.g. ``job.roles["rollout-1"]``."""
        self._check_started()
        return Roles(self)

    @property
    def events(self) -> Events:
        """The log so far, typed, in order."""
        with self._changed:
            return Events(self._entries)

    def entries_after(self, count: int) -> list[ev.Entry]:
        """The log's entries but the first ``count``: for those who follow it bit by bit."""
        with self._changed:
            return list(self._entries[count:])

    @property
    def metrics(self) -> Table:
        """A row per optimizer step: reward, accuracy, losses, and seconds per trainer phase."""
        self._check_started()
        with self._changed:
            return Table(dict(row) for row in self._state.metrics)

    @property
    def trajectories(self) -> Table:
        self._check_started()
        return trajectories(self.events)

    @property
    def evaluations(self) -> Table:
        """A row per evaluation on the held-out prompts: version, prompts, accuracy and a few samples."""
        self._check_started()
        with self._changed:
            return Table(msgspec.structs.asdict(done) for done in self._state.evaluations)

    @property
    def recoveries(self) -> RecoveryTable:
        """A row per recovery: whose, why, how long each stage took and what it cost."""
        self._check_started()
        return recoveries(self.events, self.run_dir)

    def ettr(self) -> Account:
        """Effective training time ratios so far, and what went into them."""
        self._check_started()
        return account(self.events)

    @property
    def faults(self) -> Table:
        """A row per fault that was ordered, with the stage that it has come to; of a hidden one only that it is there."""
        self._check_started()
        with self._changed:
            return Table(view.row() for view in self._state.faults.faults.values())

    @property
    def recovery(self) -> LiveRecovery:
        """How failures are answered: ``job.recovery.mode = "full"``, ``job.recovery.standbys = "cold"``; takes effect at once."""
        return LiveRecovery(self)

    @property
    def thresholds(self) -> LiveThresholds:
        """The detector's settings by section; setting one (``job.thresholds.rollout.no_tokens = "3s"``) takes effect at once."""
        self._check_started()
        return LiveThresholds(self)

    def summary(self) -> dict[str, Any]:
        """The figures of ``summary.json``, as far as the job has come."""
        from .summary import summary_of

        return summary_of(self.events)

    # -- verbs -----------------------------------------------------------------------------------------------------------------------------

    def wait(self, step: int | None = None, timeout: float | None = None) -> Self:
        """Until that optimizer step is committed, or the job has ended. ``timeout``: seconds; None: what the configured deadlines allow.

        Raises JobFailed if the job failed, or ended before ``step``; WaitTimeout. Ctrl-C ends the wait, not the job.
        """
        timeout = self._limit(timeout)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._reached(step), timeout)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the wait ended, job {self.name!r} goes on: job.wait() waits again, job.stop() ends it") from None
        return self._waited(step, timeout)

    def pause(self, timeout: float | None = None) -> None:
        """Hold the job between two optimizer steps. Raises WaitTimeout, HostGone."""
        self._call("pause", timeout)

    def resume(self, timeout: float | None = None) -> None:
        self._call("resume", timeout)

    def save_pretrained(self, path: str | Path, timeout: float | None = None) -> Path:
        """Write model and tokenizer of the newest version as transformers reads them. Returns the folder. A job that is done keeps its
        model; of one that was stopped, or failed, it is gone: save it before ``stop``.

        Raises ConfigError, before anything is done, for a path where no folder can be written; JobFailed, WaitTimeout, HostGone, also for
        a job that was stopped. On an existing cluster a job that runs writes on the trainer's machine.
        """
        here = self.over or self.config.address is None
        target = (folder_to_write if here else named_folder)(path)
        if not self._copied_model(target):
            if self.status == "stopped":
                raise HostGone(f"job {self.name!r} was stopped ({self.reason}), and only a job that is done keeps its model: save it "
                               f"before job.stop(), or go on with robustrl.launch(resume={str(self.run_dir)!r})")
            self._call("save_pretrained", timeout, path=str(target))
        return target

    def add_rollout(self, timeout: float | None = None) -> RoleHandle:
        """One more rollout, on the rollout node that has the fewest. Returns when its process is there; it becomes healthy by itself, once
        it has pulled and checked the newest version from whoever holds it. Raises JobFailed while the job is not running, WaitTimeout,
        HostGone.
        """
        return self.roles[self._call("add_rollout", timeout)]

    def inject(self, fault: Fault, *, hidden: bool = False, timeout: float | None = None) -> FaultHandle:
        """Order a fault, e.g. ``job.inject(Kill("rollout-1"))``; see `robustrl.faults`. Returns at once: the handle follows it through the
        log. ``hidden``: kind and target are shown only once it is revealed. Raises ConfigError for what this job or machine does not
        allow, RobustRLError for one that is refused at once, WaitTimeout, HostGone.
        """
        from .faults.handle import FaultHandle

        if not isinstance(fault, msgspec.Struct):
            raise ConfigError("fault", fault, "must be a fault of robustrl.faults, e.g. Kill('rollout-1')")
        if not isinstance(hidden, bool):
            raise ConfigError("hidden", hidden, "must be True or False")
        return FaultHandle(self, self._call("inject", timeout, fault=msgspec.to_builtins(fault), hidden=hidden, by=_user()))

    def schedule(self, schedule: Schedule, timeout: float | None = None) -> ScheduleHandle:
        """Order faults by a schedule, e.g. ``job.schedule(EveryNSteps(5, Kill("rollout")))``. Raises as `inject` does."""
        from .faults.handle import ScheduleHandle
        from .faults.schedules import Schedule

        if not isinstance(schedule, Schedule):
            raise ConfigError("schedule", schedule, "must be a schedule of robustrl.faults, e.g. EveryNSteps(5, Kill('rollout'))")
        return ScheduleHandle(self, self._call("schedule", timeout, schedule=msgspec.to_builtins(schedule), by=_user()))

    def stop(self, timeout: float = 30.0) -> None:
        """End the job and wait until its host has removed everything. A host that does not end within ``timeout`` seconds is killed, with a
        warning; its reaper then removes what is left.
        """
        timeout = _seconds(timeout)
        try:
            if not self.over:
                self._call("stop", timeout, reason="job.stop()")
        except RobustRLError:
            pass  # gone already, or stuck: the next lines deal with either
        if not self._host_gone(timeout):
            self._kill_host(timeout)
            self._host_gone(_SWEEP)

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether ``condition``, looked at with each change of the log, came true within ``seconds``."""
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def dashboard(self, timeout: float = 60.0) -> DashboardHandle:
        """All views of this job as a page of their own, served by a process of its own that ends with this one, or by its ``stop()``.

        Raises MissingExtra without Panel, WaitTimeout if it does not answer within ``timeout`` seconds.
        """
        from robustrl_widgets.showing import start

        return start(self, _seconds(timeout))

    def record_ghost(self, timeout: float | None = None) -> Path:
        """Run this job once more when it has ended, with the faults that struck it, each answered by a full restart, and keep that run as
        the *ghost* against which it, and later jobs like it, race in their views. Takes as long as such a run; Ctrl-C ends it. Returns
        the ghost's file. Raises ConfigError while this job runs, JobFailed, WaitTimeout after ``timeout`` seconds (None: the job's own
        deadlines).
        """
        from robustrl_widgets.ghost_files import record

        return record(self, None if timeout is None else _seconds(timeout))

    def follow(self, seconds: float) -> bool:
        """Whether the job has ended, after waiting at most ``seconds`` for that. For those who draw."""
        with self._changed:
            return self._changed.wait_for(lambda: self.over, seconds)

    def catch_up(self, seconds: float) -> None:
        """Wait at most so long for what is in the log now to be known here."""
        try:
            last = tail(self.run_dir / "events.jsonl", 2)
        except OSError:  # it was removed: whatever comes, comes
            return
        if len(last) < 2:  # the last one may be half written
            return
        newest = ev.entry_decoder.decode(last[0]).seq
        with self._changed:
            self._changed.wait_for(lambda: self.over or bool(self._entries and self._entries[-1].seq >= newest), seconds)

    def read(self, draw: Callable[[RunState], T]) -> T:
        """``draw(state)`` while nothing changes: keep it short."""
        with self._changed:
            return draw(self._state)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Live views where a notebook can show them; beside them, for everywhere else, the same as static HTML and as a line of text."""
        from robustrl_widgets.hosts import live_views, static_html

        from .display import html_job

        drawn = self.read(lambda state: html_job(state, self.status, self.reason, str(self.run_dir)))
        return {"text/plain": repr(self), "text/html": drawn + static_html(self), **live_views(self)}

    def __repr__(self) -> str:
        reason = f" ({self.reason.splitlines()[0]})" if self.reason else ""
        progress = f"step {self.step}/{self.config.steps}, {counted(len(self._state.roles), 'role')}"
        note = f" ({waits})" if self.status == "starting" and (waits := self._waits_for()) else ""
        return f"<Job {self.name!r} {self.status}{reason}, {progress}{note}, {self.run_dir}>"

    def _waits_for(self) -> str:
        """Of a job that has no node yet: what its host is at, by its settings, unless the log says more."""
        if self._state.warnings and not self._state.roles:
            return self._state.warnings[-1][1]
        if self._state.roles or self._state.nodes:
            return ""
        address = self.config.address
        steps = [f"joining the Ray cluster at {address!r}" if address else f"starting {counted(self.config.nodes, 'Ray node')}"]
        steps += [f"looking for the model {self.config.model!r}"] if is_on_hub(self.config.model) else []
        return ", ".join(steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aio.stop()

    # -- waiting ---------------------------------------------------------------------------------------------------------------------------

    def _limit(self, timeout: float | None) -> float:
        """Seconds that a wait may take. Raises ConfigError."""
        return self._patience() if timeout is None else _seconds(timeout)

    def _patience(self) -> float:
        limits = self.config.deadlines
        longest = limits.cluster_start + limits.role_start + limits.stop + self.config.steps * (limits.train_step + limits.generation)
        return min(longest, threading.TIMEOUT_MAX)

    def _reached(self, step: int | None) -> bool:
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise ConfigError("step", step, "must be a number of optimizer steps, from 0 on")
        return self.over or (step is not None and self.step >= step)

    def _waited(self, step: int | None, timeout: float) -> Self:
        if step is not None and self.step >= step:
            return self
        if not self.over:
            goal = "the end" if step is None else f"step {step}"
            raise WaitTimeout(f"job {self.name!r}: {goal} not reached within {timeout:g} s; it is {self.status}, at step {self.step} of "
                              f"{self.config.steps}, and goes on")
        if self._lost:
            raise self._lost
        if self.status == "failed" or step is not None:
            goal = f" before step {step}, at step {self.step}" if step is not None else ""
            raise JobFailed(f"job {self.name!r} {self.status}{goal}: {self.reason}\nlogs: {self.run_dir / 'logs'}")
        return self

    def _check_started(self) -> None:
        """A job that failed before its first role started has nothing to show but the reason."""
        if self.status == "failed" and not self._state.roles:
            self._waited(None, 0.0)

    def _client_now(self) -> wire.HostClient:
        with self._changed:
            self._changed.wait_for(lambda: self._client or self.over, _CONNECT)
            if self._client is None or self.over:
                self._waited(None, _CONNECT)  # raises for a failed or silent host
                raise HostGone(f"job {self.name!r} has ended ({self.status}): {self.reason}")
            return self._client

    def _call(self, verb: str, timeout: float | None, **args: Any) -> Any:
        """The host's answer; all that it wrote to the log before answering has been read when this returns."""
        timeout = self.config.deadlines.call if timeout is None else _seconds(timeout)
        return self._client_now().call(verb, timeout, **args)

    def _copied_model(self, target: Path) -> bool:
        """Whether the model that the host saved at the end of the job is now at ``target``."""
        source = self.run_dir / "model"
        if not self.over or not source.is_dir():
            return False
        try:
            shutil.copytree(source, target, dirs_exist_ok=True)
        except OSError as error:
            raise RobustRLError(f"the model could not be copied to {target}: {error}") from None
        return True

    def _host_gone(self, timeout: float) -> bool:
        gone = processes.wait_exit(self._entry.host, timeout)
        if gone and self._process:
            self._process.wait(_CONNECT)  # a zombie until then
        return gone

    def _kill_host(self, timeout: float) -> None:
        warnings.warn(f"the host of job {self.name!r} did not end within {timeout:g} s and was killed", RuntimeWarning, stacklevel=3)
        processes.kill(self._entry.host)

    # -- following the log, on a private thread --------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        while self._entry.alive and not self._state.over:
            gone = threading.Event()
            try:
                client = wire.HostClient(self._entry.address, self._entry.token, on_disconnect=gone.set)
                client.subscribe(self._take, after=self._state.seq)
            except HostGone:  # not listening yet, or no longer
                time.sleep(_POLL)
                continue
            self._set_client(client)
            gone.wait()
            self._set_client(None)
        if not self._state.over:
            self._read_rest()
        if self._process:
            self._process.poll()

    def _set_client(self, client: wire.HostClient | None) -> None:
        with self._changed:
            self._client = client
            self._changed.notify_all()

    def _take(self, lines: list[bytes]) -> None:
        self._apply([ev.entry_decoder.decode(line) for line in lines])

    def _apply(self, entries: list[ev.Entry]) -> None:
        with self._changed:
            for entry in entries:
                self._entries.append(entry)
                if isinstance(entry.event, ev.RunStarted):
                    self.config = msgspec.convert(entry.event.config, JobConfig)
                try:
                    self._state.apply(entry)
                except ValueError as error:  # shown, not fatal to the one who looks on: `robustrl audit` is the judge
                    self._state.warnings.append((entry.t, f"entry {entry.seq} of the log is not possible: {error}"))
            self._changed.notify_all()

    def _read_rest(self) -> None:
        """The host is gone without its last word having arrived: the file has it, or there is none."""
        from .runtime.event_log import read_log

        path, lost = self.run_dir / "events.jsonl", None
        if path.exists():
            try:
                self._apply([entry for entry in read_log(path, live=True) if entry.seq > self._state.seq])
            except RobustRLError as error:
                lost = error
        if not self._state.over:
            with self._changed:
                self._lost = lost or self._last_word()
                self._changed.notify_all()

    def _last_word(self) -> RobustRLError:
        path = self.run_dir / "host-error.json"
        if path.exists():
            return msgspec.json.decode(path.read_bytes(), type=wire.Failure).error()
        lines = tail(self.run_dir / "logs" / "host.log", _LOG_LINES)
        text = "".join(f"\n  | {line}" for line in lines)
        return JobFailed(f"job {self.name!r} failed: its host (process {self._entry.host_pid}) ended without a closing record{text}")


def _user() -> str:
    return f"user {os.getuid()}, process {os.getpid()}"


def _seconds(timeout: float) -> float:
    """Raises ConfigError for what is no length of time; a NaN would wait for ever, and busily."""
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not timeout >= 0:
        raise ConfigError("timeout", timeout, "must be seconds, 0 or more")
    return float(min(timeout, threading.TIMEOUT_MAX))
