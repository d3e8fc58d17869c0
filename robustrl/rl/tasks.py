"""What a model is trained to do: prompts, the turns that a tool answers, and a reward.

A task is deterministic and random-access: prompt i of a split depends on the task's name, options and seed alone, so a restarted process
asks for the same prompts again. The splits ``train`` and ``held_out`` never share a prompt text, whatever the seeds. Making a task reads
its files; ``check_task`` says what can be said without an import or the network.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from robustrl.errors import ConfigError, counted

RewardFunction = Callable[..., list[float]]
"""TRL's signature: ``reward(prompts, completions, **columns) -> list[float]``, one value per completion."""
SPLITS = ("train", "held_out")
_DRAWS = 2000


class Prompt(msgspec.Struct, frozen=True):
    text: str
    columns: dict[str, Any]
    messages: list[dict[str, Any]] | None = None
    """The prompt as chat messages where it is conversational; ``text`` is then what people are shown."""


class Task:
    """One task. Subclasses name their options with defaults and give ``prompts``; the rest has a meaning of "one turn, no tool"."""

    options: ClassVar[Mapping[str, Any]] = {"max_tokens": 256}
    """Option names and defaults; a value must be of its default's type."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn; they stay part of the completion. The tool is asked next."""
    ignore_eos: bool = False
    pace: float = 0.0
    """Least seconds per generated token: an engine waits where it would be faster."""
    columns: ClassVar[tuple[str, ...] | None] = None
    """Of every prompt; None: those of the data."""
    reward: RewardFunction | None = None
    """None: the user has to bring one."""

    def __init__(self, name: str, options: Mapping[str, Any], seed: int) -> None:
        self.name, self.seed = name, seed
        self.settings = check_options(name, options, self.options)
        self.max_tokens: int = self.settings["max_tokens"]
        """Generated tokens per trajectory over all turns."""

    def prompts(self, split: str, start: int, count: int) -> list[Prompt]:
        """Prompts ``start .. start + count - 1`` of a split; ``held_out`` of a finite data set ends early instead of repeating itself."""
        raise NotImplementedError

    def tool(self, completion: str) -> str | None:
        """What to append to the completion so far, which ended with one of ``stop``; None: the trajectory is over. May take its time."""
        return None

    def encode(self, tokenizer: Any, prompt: Prompt) -> list[int]:
        """Token ids of the prompt: through the tokenizer's chat template where it has one, else of the plain text."""
        if getattr(tokenizer, "chat_template", None):
            messages = prompt.messages or [{"role": "user", "content": prompt.text}]
            return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))
        return list(tokenizer.encode(prompt.text))


def encode_within(task: Task, tokenizer: Any, prompt: Prompt, max_model_len: int) -> list[int]:
    """`Task.encode`; raises ConfigError for a prompt that is empty or leaves no room for a completion."""
    tokens = task.encode(tokenizer, prompt)
    if not tokens:
        raise ConfigError("task", task.name, f"the prompt {prompt.text!r:.80} has no tokens")
    if len(tokens) >= max_model_len:
        text = f"must be greater than the {counted(len(tokens), 'token')} of the prompt {prompt.text!r:.80}"
        raise ConfigError("max_model_len", max_model_len, text)
    return tokens


class GeneratedTask(Task):
    """A task whose prompts are drawn, without end, from a seeded generator."""

    def draw(self, rng: random.Random) -> Prompt:
        raise NotImplementedError

    def prompts(self, split: str, start: int, count: int) -> list[Prompt]:
        check_split(split)
        return [self._at(split, index) for index in range(start, start + count)]

    def _at(self, split: str, index: int) -> Prompt:
        for attempt in range(_DRAWS):
            prompt = self.draw(random.Random(f"{self.seed}/{index}/{attempt}"))
            if is_held_out(prompt.text) == (split == "held_out"):
                return prompt
        raise ConfigError("task", self.name, f"makes too few different prompts: none of {_DRAWS} draws fell into the split {split}")


def is_held_out(text: str) -> bool:
    """Whether a drawn prompt belongs to the held-out split: a tenth of all texts, by checksum."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") % 10 == 0


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ConfigError("split", split, f"must be one of {', '.join(SPLITS)}")


def check_options(name: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults completed by ``options``. Raises ConfigError for an unknown name, a wrong type or a negative number."""
    for key, value in options.items():
        field = f"task_options[{key!r}]"
        if key not in known:
            raise ConfigError(field, value, f"the task {name!r} has no such option; it has: {', '.join(sorted(known))}")
        kind = type(known[key])
        if not (type(value) is kind or kind is float and type(value) is int):
            raise ConfigError(field, value, f"must be of type {kind.__name__}")
        if kind in (int, float) and not 0 <= value < 2**63:
            raise ConfigError(field, value, "must not be negative, infinite or beyond 64 bits")
    settings = {**known, **options}
    if settings["max_tokens"] < 1:
        raise ConfigError("task_options['max_tokens']", settings["max_tokens"], "must be at least 1")
    return settings


def _classes() -> dict[str, type[Task]]:
    from robustrl.rl import arithmetic, datasets

    return {"arithmetic": arithmetic.Arithmetic, "arithmetic_tool": arithmetic.ArithmeticTool, "arithmetic_long": arithmetic.ArithmeticLong,
            "reasoning_gym:": datasets.ReasoningGym, "jsonl:": datasets.JsonLines, "hf:": datasets.HuggingFace}


def task_class(name: str) -> type[Task]:
    classes = _classes()
    prefix = name.partition(":")[0] + ":"
    found = classes.get(prefix if ":" in name else name)
    if found is None or (prefix in classes and not name.removeprefix(prefix)):
        plain = ", ".join(key for key in classes if not key.endswith(":"))
        raise ConfigError("task", name, f"there is no such task; there are {plain}, reasoning_gym:NAME, jsonl:PATH and hf:DATASET")
    return found


def check_task(name: str, options: Mapping[str, Any]) -> None:
    """The checks that need neither a heavy import nor the network: names, options, and that a JSONL file is there. Raises ConfigError."""
    found = task_class(name)
    if not name.startswith("reasoning_gym:"):  # its options are the data set's own
        check_options(name, options, found.options)
    if name.startswith("jsonl:"):
        path = Path(name.removeprefix("jsonl:")).expanduser()
        if not path.is_file():
            raise ConfigError("task", name, f"there is no file {path}")


def make_task(name: str, options: Mapping[str, Any], seed: int) -> Task:
    """The task of that name. Raises ConfigError for an unknown task or option, and for data that cannot be read."""
    return task_class(name)(name, options, seed)
