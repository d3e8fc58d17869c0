"""What a job is made of: one validated, immutable configuration, the same from a notebook, a file and the command line.

`make_config` and `load_config` build it from names and values, `check` says whether it makes sense; whether it can run here is
requirements.py's to say. All raise ConfigError with field, value and what is allowed; none imports a heavy package or asks the network.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from .core.events import RecoverySettings
from .errors import ConfigError, WaitTimeout, counted, no_such, plain


class GRPOConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300), with truncated importance weights."""

    learning_rate: float = 2e-4
    warmup_steps: int = 5
    clip: float = 0.2
    importance_cap: float = 2.0
    kl_coefficient: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch: int = 32
    """Trajectories per forward-backward, per rank."""


class SamplingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    """Generated tokens per trajectory over all turns; None: the task's own."""


class Deadlines(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds after which a wait ends with an error that names what it waited for."""

    cluster_start: float = 120.0
    role_start: float = 240.0
    call: float = 180.0
    generation: float = 600.0
    train_step: float = 600.0
    pull: float = 60.0
    stop: float = 10.0


class RecoveryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a job begins with; live: job.recovery."""

    mode: Literal["observe", "isolated", "full"] = "isolated"
    """Verdicts only; restart the failed role alone; or restart everything, the usual baseline."""
    standbys: Literal["auto", "warm", "cold"] = "auto"
    """Whether a process that is warm takes a failed role over; ``auto``: where the job keeps standbys."""


class JobConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str = "job"
    task: str = "arithmetic"
    task_options: dict[str, Any] = {}
    reward: str | None = None
    """``module:function``, or a function given to ``launch`` (then the path of its pickle); None: the task's own."""
    reward_errors: Literal["stop", "drop"] = "stop"
    model: str = "tiny"
    engine: Literal["auto", "vllm", "torch"] = "auto"
    """``auto``: the profile's own; a JobConfig never shows it."""
    profile: Literal["lab", "class"] = "lab"
    """``class``: for small containers; its own defaults where a setting says so."""
    steps: int = 60
    seed: int = 0
    prompts_per_step: int = 16
    samples_per_prompt: int = 8
    staleness: int = 1
    """How many optimizer steps a token's version may lag behind the newest when its batch is trained; 0: on-policy."""
    version_switch: Literal["continue", "drop"] = "continue"
    """What becomes of a trajectory whose rollout died when no other rollout has the version of its last token any more: it goes on with a
    newer one (each token has the version and the log-probability that its importance weight needs), or it is dropped and counted."""
    journal_tokens: bool = True
    """Unfinished trajectories are journalled while they grow. False: one whose rollout dies begins anew; for what the journal costs."""
    checkpoint_every: int = 1
    """Optimizer steps between checkpoints on disk, the newest one as soon as the one before is written; 0: none."""
    rollouts: int = 2
    trainer_ranks: int = 1
    agent_workers: int = 2
    nodes: int = 0
    """Ray nodes on this machine; 0: the profile's own number."""
    object_store_mb: int = 0
    """MiB of Ray's object store on each own node; 0: the profile's own."""
    hosts: Literal["local", "namespaces"] = "local"
    """Whether the nodes share this machine's network, or each has a namespace and an address of its own: needs root, allows partitions."""
    address: str | None = None
    """GCS address of an existing Ray cluster, or ``auto``; None: own raylets on this machine."""
    run_dir: str = "runs"
    keep_alive: bool | None = None
    """Go on when the owner dies; None: only on an existing cluster."""
    thresholds: Literal["paper", "lab", "relative"] = "paper"
    """What the detector begins with: the paper's minutes, the lab's seconds, or multiples of a role's history; live: job.thresholds."""
    witness: bool = False
    """A process outside the job keeps a log of its own of what it sees on this machine; `robustrl audit RUN --witness` compares."""
    restarts: int = 3
    """Times that one role may be restarted; 0: a failed role ends the job."""
    recovery: RecoveryConfig = RecoveryConfig()
    standbys: int | None = None
    """Warm processes that can become a trainer or a rollout, and with them one for all other roles; None: 1 in profile ``lab`` if memory
    allows, else 0."""
    evaluation_prompts: int = 256
    evaluation_every: int = 0
    """Optimizer steps between evaluations; 0: before the first and after the last only."""
    rollout_concurrency: int = 64
    max_model_len: int = 1024
    """Longest prompt plus completion, in tokens, tool answers included."""
    probe_limit: float = 1e-3
    """Largest allowed difference of the probe prompt's log-probabilities after a commit (fp32)."""
    grpo: GRPOConfig = GRPOConfig()
    sampling: SamplingConfig = SamplingConfig()
    deadlines: Deadlines = Deadlines()

    def __post_init__(self) -> None:
        for field, value in PROFILES.get(self.profile, {}).items():
            if getattr(self, field) in ("auto", 0):
                msgspec.structs.force_setattr(self, field, value)

    @property
    def outlives_owner(self) -> bool:
        return self.address is not None if self.keep_alive is None else self.keep_alive

    def first_recovery(self) -> RecoverySettings:
        standbys = self.recovery.standbys
        if standbys == "auto":
            standbys = "warm" if self.standbys else "cold"
        return RecoverySettings(mode=self.recovery.mode, standbys=standbys)

    @property
    def trainer_slots(self) -> int:
        """Trainer ranks that the one trainer node of a cluster of our own takes."""
        return _TRAINER_SLOTS[self.profile]


PROFILES: dict[str, dict[str, Any]] = {
    "lab": {"engine": "vllm", "nodes": 4, "object_store_mb": 128},
    "class": {"engine": "torch", "nodes": 1, "object_store_mb": 80},  # Ray takes no less than 75
}
_TRAINER_SLOTS = {"lab": 4, "class": 2}
LEAST_NODES = {"lab": 3, "class": 1}

TINY_POSITIONS = 1024
"""Tokens that the bundled model has positions for."""
_AT_LEAST: dict[str, float] = {
    "steps": 1, "seed": 0, "prompts_per_step": 1, "samples_per_prompt": 2, "staleness": 0, "rollouts": 1, "trainer_ranks": 1,
    "agent_workers": 1, "restarts": 0, "evaluation_prompts": 0, "evaluation_every": 0, "rollout_concurrency": 1, "max_model_len": 2,
    "object_store_mb": 75, "standbys": 0, "checkpoint_every": 0,
    "grpo.warmup_steps": 0, "grpo.importance_cap": 1, "grpo.kl_coefficient": 0, "grpo.weight_decay": 0, "grpo.micro_batch": 1,
    "sampling.max_tokens": 1,
}
_ABOVE_ZERO = ("probe_limit", "grpo.learning_rate", "grpo.clip", "grpo.max_grad_norm", "sampling.temperature", "sampling.top_p",
               *(f"deadlines.{field}" for field in Deadlines.__struct_fields__))
_AT_MOST: dict[str, float] = {
    "steps": 10**9, "seed": 2**63 - 1, "prompts_per_step": 10**6, "samples_per_prompt": 10**6, "staleness": 10**6, "rollouts": 10**4,
    "trainer_ranks": 10**4, "agent_workers": 10**4, "restarts": 10**6, "evaluation_prompts": 10**6, "evaluation_every": 10**9,
    "checkpoint_every": 10**9,
    "object_store_mb": 10**6, "rollout_concurrency": 10**6, "max_model_len": 10**9, "grpo.micro_batch": 10**9,
    "sampling.top_p": 1, "grpo.clip": 1, "standbys": 10**4,
    **{f"deadlines.{field}": 10**7 for field in Deadlines.__struct_fields__},
}
"""Beyond these a number is a slip, and would only fail later in a library that cannot hold it."""
_PYTHON = {"object": "settings by name", "array": "a list", "null": "None"}
"""Python's word for JSON's."""
ADDRESSES = "must be HOST:PORT of a Ray cluster's GCS, or 'auto'; None starts raylets of our own"
_PLACE = re.compile(r"([^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", re.ASCII)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def make_config(settings: Mapping[str, Any]) -> JobConfig:
    """The configuration with these settings, nested ones as mappings or structs. Raises ConfigError for an unknown name or a wrong type."""
    plain = {name: _plain(name, value) for name, value in settings.items()}
    _check_names(JobConfig, plain, "")
    try:
        return msgspec.convert(plain, JobConfig)
    except msgspec.ValidationError as error:
        raise _wrong_type(error, plain) from None


def load_config(path: str | Path) -> JobConfig:
    """From a TOML or JSON file with the names of JobConfig. Raises ConfigError."""
    path = Path(path)
    readers: dict[str, Any] = {".toml": tomllib.loads, ".json": json.loads}
    if path.suffix not in readers:
        raise ConfigError("config file", str(path), "must end in .toml or .json")
    try:
        settings = readers[path.suffix](path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("config file", str(path), f"cannot be read: {error}") from None
    except RecursionError:
        raise ConfigError("config file", str(path), "cannot be read: it is nested too deeply") from None
    if not isinstance(settings, dict):
        raise ConfigError("config file", str(path), f"must hold settings by name, not a {type(settings).__name__}")
    return make_config(settings)


def check(config: JobConfig) -> None:
    """Whether the settings make sense, alone and together; of files, whether they are there and a model's positions. Raises ConfigError."""
    for field, least in _AT_LEAST.items():
        value = _get(config, field)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(field, value, f"must be at least {least}")
    for field in _ABOVE_ZERO:
        if not 0 < (value := _get(config, field)) < math.inf:
            raise ConfigError(field, value, "must be greater than 0 and finite")
    for field, most in _AT_MOST.items():
        if (value := _get(config, field)) is not None and value > most:
            raise ConfigError(field, value, f"must be at most {most}")
    if not _NAME.fullmatch(config.name):
        raise ConfigError("name", config.name, "must be 1 to 32 letters, digits, - and _, the first a letter")
    if config.hosts == "namespaces" and (config.address is not None or config.nodes < 2):
        raise ConfigError("hosts", config.hosts, "is for two or more nodes of our own on this machine: not with address=, nor with nodes=1")
    if config.address is None:
        _check_cluster(config)
    elif config.address != "auto" and not is_place(config.address):
        raise ConfigError("address", config.address, ADDRESSES)
    if (total := config.prompts_per_step * config.samples_per_prompt) % config.trainer_ranks:
        raise ConfigError("trainer_ranks", config.trainer_ranks, f"must divide the {total} trajectories of a step (prompts_per_step x "
                          f"samples_per_prompt = {config.prompts_per_step} x {config.samples_per_prompt})")
    check_named(config.run_dir, "run_dir", "must be the folder in which the run gets a folder of its own")
    _check_reward(config.reward)
    check_room(config)
    _check_model(config.model)
    if (positions := _positions(config.model)) is not None and config.max_model_len > positions:
        raise ConfigError("max_model_len", config.max_model_len, f"must be from 2 to {positions}, the positions of the model")
    from .rl.tasks import check_task

    check_task(config.task, config.task_options)


def check_room(config: JobConfig, tokens: int = 1, prompt: str = "") -> None:
    """Whether completions of the length that was asked for fit behind a prompt of so many tokens. Raises ConfigError."""
    field, wanted = "sampling.max_tokens", config.sampling.max_tokens
    if wanted is None:
        field, wanted = "task_options['max_tokens']", config.task_options.get("max_tokens")
    if isinstance(wanted, int) and wanted > (most := config.max_model_len - tokens):
        why = f", and the prompt {prompt!r:.80} has {counted(tokens, 'token')}" if prompt else ""
        bound = f"max_model_len = {config.max_model_len} bounds prompt and completion"
        raise ConfigError(field, wanted, f"must be at most {most}: {bound}{why}")


def is_place(address: str) -> bool:
    """Whether it is HOST:PORT. Ray's own ray://HOST:PORT is another protocol, and its local a cluster of Ray's."""
    match = _PLACE.fullmatch(address)
    return match is not None and 0 < int(match[2]) < 1 << 16


def check_named(path: Any, field: str, allowed: str) -> None:
    """Raises ConfigError for a path without a name, which pathlib takes for the working directory, and for one that no system takes."""
    if isinstance(path, str) and not path.strip():
        raise ConfigError(field, path, f"{allowed}; the working directory is '.'")
    if isinstance(path, str | Path) and "\0" in str(path):
        raise ConfigError(field, str(path), f"{allowed}; no path holds a null byte")


def home(path: Path, field: str) -> Path:
    """``path`` with ``~`` resolved. Raises ConfigError that names ``field`` where that user has no home."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigError(field, str(path), f"names a home that is not there: {error}") from None


def _check_cluster(config: JobConfig) -> None:
    if config.nodes < (least := LEAST_NODES[config.profile]):
        raise ConfigError("nodes", config.nodes, f"must be at least {least}" + (
            ": one for management, one for the trainer, one for rollouts; profile='class' runs on one" if least > 1 else ""))
    if config.trainer_ranks > config.trainer_slots:
        raise ConfigError("trainer_ranks", config.trainer_ranks, f"must be at most {config.trainer_slots}, the trainer slots of the one "
                          f"trainer node (profile {config.profile!r}); with address= the cluster's resources decide")


def _check_model(model: str) -> None:
    allowed = "must be 'tiny', a folder with a Hugging Face causal LM, or a hub name"
    check_named(model, "model", allowed)
    folder = home(Path(model), "model")
    if model == "tiny" or (folder / "config.json").is_file():
        return
    if folder.is_dir():
        raise ConfigError("model", model, f"is a folder without config.json; {allowed}")
    if not _REPOSITORY.fullmatch(model):
        raise ConfigError("model", model, f"there is no such folder; {allowed}")


def _positions(model: str) -> int | None:
    """Tokens that the model has positions for; None: only its engine will know."""
    if model == "tiny":
        return TINY_POSITIONS
    try:
        found = json.loads((Path(model).expanduser() / "config.json").read_text()).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError, RecursionError):  # not here, or not as expected: its engine says what is wrong
        return None
    return found if isinstance(found, int) and found >= 2 else None


def _check_reward(reward: str | None) -> None:
    if reward is None or re.fullmatch(r"[\w.]+:\w+", reward):
        return
    if not reward.endswith(".pkl"):
        raise ConfigError("reward", reward, "must be module:function, or a function given to robustrl.launch")
    if not home(Path(reward), "reward").is_file():
        raise ConfigError("reward", reward, "there is no such file; must be module:function, or a function given to robustrl.launch")


def is_on_hub(model: str) -> bool:
    """Whether it may have to be fetched before it can be read."""
    return model != "tiny" and not home(Path(model), "model").is_dir()


def in_words(error: BaseException, config: JobConfig) -> str:
    """The error's text for people. Where a wait ended too soon, its first line names the deadlines that are shorter than by default."""
    first, *more = plain(str(error)).splitlines() or [""]
    usual = Deadlines()
    short = [f"deadlines.{field} = {value:g}" for field in Deadlines.__struct_fields__
             if (value := getattr(config.deadlines, field)) < getattr(usual, field)]
    if short and (isinstance(error, WaitTimeout) or isinstance(error.__cause__, WaitTimeout)):
        first += f" (shorter than by default: {', '.join(short)})"
    return "\n".join((first, *more))


def _plain(name: str, value: Any) -> Any:
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=lambda item: os.fspath(item))
    except TypeError as error:
        raise ConfigError(name, value, f"must be made of plain values: {error}") from None


def _get(config: JobConfig, field: str) -> Any:
    value: Any = config
    for name in field.split("."):
        value = getattr(value, name)
    return value


def _fields(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings."""
    for name, hint in get_type_hints(kind).items():
        if name in kind.__struct_fields__:
            yield prefix + name
            if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
                yield from _fields(hint, f"{prefix}{name}.")


def _check_names(kind: type[msgspec.Struct], settings: Mapping[str, Any], prefix: str) -> None:
    hints = get_type_hints(kind)
    for name, value in settings.items():
        if name not in kind.__struct_fields__:
            below = [field for field in _fields(kind, prefix) if field.rpartition(".")[2] == name]
            raise ConfigError(f"{prefix}{name}", value, no_such(name, kind.__struct_fields__, prefix, below))
        if isinstance(value, Mapping) and isinstance(hints[name], type) and issubclass(hints[name], msgspec.Struct):
            _check_names(hints[name], value, f"{prefix}{name}.")


def _wrong_type(error: msgspec.ValidationError, settings: Any) -> ConfigError:
    """msgspec's text, e.g. "Expected `int`, got `str` - at `$.grpo.micro_batch`", in our form."""
    text, _, path = str(error).partition(" - at `$.")
    field = path.rstrip("`")
    kind: Any = JobConfig
    for name in field.split("."):
        settings = settings[name] if isinstance(settings, Mapping) and name in settings else settings
        hints = get_type_hints(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else {}
        kind = hints.get(name, kind)
    if text.startswith("Expected `object`"):
        return ConfigError(field, settings, f"must be settings by name, {_example(kind, field, settings)}")
    choices = _choices(kind)
    if choices:
        return ConfigError(field, settings, f"must be one of {', '.join(choices)}")
    text = re.sub("|".join(_PYTHON), lambda word: _PYTHON[word[0]], text.replace("`", ""))
    return ConfigError(field, settings, text[0].lower() + text[1:])


def _choices(kind: Any) -> list[str]:
    return [choice for choice in get_args(kind) if isinstance(choice, str)]


def _example(kind: Any, field: str, given: Any) -> str:
    """What may have been meant by one value where several are named."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return f"e.g. {field}={{'max_tokens': 28}}"
    hints = get_type_hints(kind)
    name = next((name for name in kind.__struct_fields__ if given in _choices(hints[name])), None)
    meant = {name: given} if name else {kind.__struct_fields__[0]: getattr(kind(), kind.__struct_fields__[0])}
    return f"e.g. {field}={meant!r}; there are {', '.join(kind.__struct_fields__)}"
