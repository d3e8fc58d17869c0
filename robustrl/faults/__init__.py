"""Faults on demand: the catalogue, when they are to strike, and the handles that show what became of them.

    job.inject(Kill("rollout-1"))
    job.inject(Hang("trainer", phase="train", seconds=20))
    job.schedule(EveryNSteps(5, Kill("rollout")))

Everything here is light: no torch, Ray or UCX. Who carries a fault out: runtime/injecting.py.
"""

from .catalogue import (
    AnyFault,
    CleanExit,
    CorruptSnapshot,
    CorruptWeights,
    Delay,
    Fault,
    FirstCompile,
    Freeze,
    FullDisk,
    Hang,
    IdleRollout,
    Kill,
    LongAdvantage,
    LongCheckpoint,
    LongFirstToken,
    MemoryExhaustion,
    NodeLoss,
    Partition,
    RaiseException,
    Slow,
    SlowTool,
    Wedge,
    make_fault,
)
from .schedules import AtStep, EveryNSteps, FaultList, PaperFrequency, Poisson, Schedule, Surprise, make_schedule

__all__ = [
    "AnyFault",
    "AtStep",
    "CleanExit",
    "CorruptSnapshot",
    "CorruptWeights",
    "Delay",
    "EveryNSteps",
    "Fault",
    "FirstCompile",
    "Freeze",
    "FaultList",
    "FullDisk",
    "Hang",
    "IdleRollout",
    "Kill",
    "LongAdvantage",
    "LongCheckpoint",
    "LongFirstToken",
    "MemoryExhaustion",
    "NodeLoss",
    "PaperFrequency",
    "Partition",
    "Poisson",
    "RaiseException",
    "Schedule",
    "Slow",
    "SlowTool",
    "Surprise",
    "Wedge",
    "make_fault",
    "make_schedule",
]
