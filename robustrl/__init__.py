"""RobustRL: a live, role-isolated RL post-training job, driven from a notebook.

    job = robustrl.launch(steps=60)     # returns at once
    job.wait(step=10)
    job.metrics.to_pandas()

Importing it is cheap: names are loaded when they are first used, heavy packages never in this process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .config import Deadlines, GRPOConfig, JobConfig, SamplingConfig
    from .errors import ConfigError, HostGone, JobFailed, MissingExtra, RewardError, RobustRLError, WaitTimeout, WeightsError
    from .job import Job
    from .launching import attach, launch
    from .replay.corpus import corpus
    from .replay.run import Run
    from .replay.sweeping import sweep

_HOMES = {
    "config": ("JobConfig", "GRPOConfig", "SamplingConfig", "Deadlines"),
    "errors": ("RobustRLError", "ConfigError", "MissingExtra", "JobFailed", "HostGone", "WaitTimeout", "RewardError", "WeightsError"),
    "job": ("Job",),
    "launching": ("launch", "attach"),
    "replay": ("replay",),
    "replay.corpus": ("corpus",),
    "replay.run": ("Run",),
    "replay.sweeping": ("sweep",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = [
    "ConfigError", "Deadlines", "GRPOConfig", "HostGone", "Job", "JobConfig", "JobFailed", "MissingExtra", "RewardError", "RobustRLError",
    "Run", "SamplingConfig", "WaitTimeout", "WeightsError", "attach", "corpus", "launch", "replay", "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'robustrl' has no attribute {name!r}")
    import importlib

    home = importlib.import_module(f".{_HOME[name]}", __name__)
    value = home if name == "replay" else getattr(home, name)  # the package replay is itself what one calls
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
