"""`Job.aio`: the verbs of a job for a program on an asyncio loop. Left out: what they do (job.py)."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .faults.catalogue import Fault
    from .faults.handle import FaultHandle, ScheduleHandle
    from .faults.schedules import Schedule
    from .job import Job
    from .role_handles import RoleHandle

_POLL = 0.1
"""Seconds between two looks."""


class AsyncJob:
    """The verbs of a job for code that runs on an asyncio loop; each can be cancelled, and none blocks the loop."""

    def __init__(self, job: Job) -> None:
        self._job = job

    async def wait(self, step: int | None = None, timeout: float | None = None) -> Job:
        """As `Job.wait`."""
        job = self._job
        timeout = job._limit(timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not job._reached(step):
                    await asyncio.sleep(_POLL)
        return job._waited(step, timeout)

    async def pause(self, timeout: float | None = None) -> None:
        await asyncio.to_thread(self._job.pause, timeout)

    async def resume(self, timeout: float | None = None) -> None:
        await asyncio.to_thread(self._job.resume, timeout)

    async def save_pretrained(self, path: str | Path, timeout: float | None = None) -> Path:
        return await asyncio.to_thread(self._job.save_pretrained, path, timeout)

    async def add_rollout(self, timeout: float | None = None) -> RoleHandle:
        return await asyncio.to_thread(self._job.add_rollout, timeout)

    async def inject(self, fault: Fault, *, hidden: bool = False, timeout: float | None = None) -> FaultHandle:
        return await asyncio.to_thread(self._job.inject, fault, hidden=hidden, timeout=timeout)

    async def schedule(self, schedule: Schedule, timeout: float | None = None) -> ScheduleHandle:
        return await asyncio.to_thread(self._job.schedule, schedule, timeout)

    async def stop(self, timeout: float = 30.0) -> None:
        await asyncio.to_thread(self._job.stop, timeout)
