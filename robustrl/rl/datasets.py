"""Tasks over other people's data: a JSONL file, a Hugging Face data set, or any ``reasoning_gym`` data set.

A prompt is a text or, for chat models, a list of messages; every other column goes to the reward function as it is.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from robustrl.errors import ConfigError, MissingExtra, counted
from robustrl.rl.rewards import completion_text
from robustrl.rl.tasks import GeneratedTask, Prompt, Task, check_split


class _Rows(Task):
    """A finite set of rows, told apart by prompt text. ``train`` goes on for ever, in an order that is new in each epoch."""

    options = {"max_tokens": 256, "prompt_column": "prompt", "held_out": 0.1}

    def __init__(self, name: str, options: Mapping[str, Any], seed: int) -> None:
        super().__init__(name, options, seed)
        fraction = self.settings["held_out"]
        if not 0 < fraction < 1:
            raise ConfigError("task_options['held_out']", fraction, "must lie between 0 and 1: the share of the prompts that is held out")
        prompts = [self._prompt(where, row) for where, row in self.rows()]
        texts = sorted({p.text for p in prompts}, key=lambda text: hashlib.blake2b(text.encode()).digest())
        if len(texts) < 2:
            found = counted(len(texts), "different prompt")
            raise ConfigError("task", name, f"has {found}; at least 2 are needed, one to train on and one held out")
        held_out = set(texts[:min(max(1, round(fraction * len(texts))), len(texts) - 1)])
        self._splits = {"train": [p for p in prompts if p.text not in held_out], "held_out": [p for p in prompts if p.text in held_out]}
        self._order: tuple[int, list[int]] = (-1, [])

    def rows(self) -> list[tuple[str, Any]]:
        """All rows, each with a word on where it stands, for errors."""
        raise NotImplementedError

    def prompts(self, split: str, start: int, count: int) -> list[Prompt]:
        check_split(split)
        rows = self._splits[split]
        if split == "held_out":
            return rows[start:start + count]
        return [rows[self._shuffled(index // len(rows), len(rows))[index % len(rows)]] for index in range(start, start + count)]

    def _shuffled(self, epoch: int, count: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(count))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def _prompt(self, where: str, row: Any) -> Prompt:
        column = self.settings["prompt_column"]
        if not isinstance(row, dict) or column not in row:
            found = ", ".join(map(str, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
            raise ConfigError("task", self.name, f"{where} has no prompt column {column!r} (found: {found}); "
                                                 f"name the right one in task_options['prompt_column']")
        try:
            msgspec.msgpack.encode(row)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # half a surrogate pair is a ValueError
            raise ConfigError("task", self.name, f"{where} has a value that cannot be sent to the roles: {error}") from error
        value, columns = row[column], {key: item for key, item in row.items() if key != column}
        if isinstance(value, str):
            return Prompt(value, columns)
        if isinstance(value, list) and value and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value):
            return Prompt("\n".join(f"{m['role']}: {m['content']}" for m in value), columns, value)
        raise ConfigError("task", self.name, f"{where}: the prompt must be a text or a list of messages with role and content, "
                                             f"not {value!r:.80}")


class JsonLines(_Rows):
    """``jsonl:PATH``: one JSON object a line; empty lines are skipped."""

    def rows(self) -> list[tuple[str, Any]]:
        path = Path(self.name.removeprefix("jsonl:")).expanduser()
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("task", self.name, f"the file {path} cannot be read: {error}") from error
        rows = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    rows.append((f"line {number}", json.loads(line)))
                except json.JSONDecodeError as error:
                    raise ConfigError("task", self.name, f"line {number} is not JSON: {error.msg} at column {error.colno}") from error
                except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
                    raise ConfigError("task", self.name, f"line {number} cannot be read: {error}") from error
        return rows


class HuggingFace(_Rows):
    """``hf:DATASET``: one split of a data set on the hub or in a local folder."""

    options = {**_Rows.options, "split": "train", "config": ""}

    def rows(self) -> list[tuple[str, Any]]:
        try:
            import datasets
        except ImportError as error:
            raise MissingExtra(f"task {self.name!r} needs the package datasets: pip install datasets ({error})") from error
        source = self.name.removeprefix("hf:")
        try:
            found = datasets.load_dataset(source, self.settings["config"] or None, split=self.settings["split"])
        except Exception as error:  # a loader raises whatever its file format, cache and network raise
            raise ConfigError("task", self.name, f"the data set cannot be loaded: {type(error).__name__}: {str(error):.300}") from error
        return [(f"row {number}", row) for number, row in enumerate(found)]


class ReasoningGym(GeneratedTask):
    """``reasoning_gym:NAME``; options besides ``max_tokens`` are the data set's own. Rewarded by the data set's own scorer."""

    columns = ("row", "answer")

    def __init__(self, name: str, options: Mapping[str, Any], seed: int) -> None:
        super().__init__(name, {key: value for key, value in options.items() if key in self.options}, seed)
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise MissingExtra(f"task {name!r} needs the package reasoning-gym: pip install reasoning-gym ({error})") from error
        kind = name.removeprefix("reasoning_gym:")
        if kind not in DATASETS:
            raise ConfigError("task", name, f"reasoning_gym has no data set {kind!r}; it has: {', '.join(sorted(DATASETS))}")
        own = {key: value for key, value in options.items() if key not in self.options}
        try:
            self._data = reasoning_gym.create_dataset(kind, **({"size": 10_000, "seed": seed} | own))
        except (AssertionError, TypeError, ValueError) as error:
            fields = ", ".join(sorted(DATASETS[kind][1].__dataclass_fields__))
            raise ConfigError("task_options", own, f"reasoning_gym refuses this ({error}); {kind} has the options: {fields}") from error
        self.reward = self._score

    def draw(self, rng: random.Random) -> Prompt:
        row = rng.randrange(len(self._data))
        entry = self._data[row]
        return Prompt(entry["question"], {"row": row, "answer": str(entry["answer"])})

    def _score(self, prompts: list[Any], completions: list[Any], *, row: list[int], **_: Any) -> list[float]:
        """The data set's score, 0 to 1, of the last line's text after ``Answer:`` or, without it, of the whole completion."""
        texts = [completion_text(completion).rpartition("Answer:")[2].strip() for completion in completions]
        return [float(self._data.score_answer(text, self._data[number])) for text, number in zip(texts, row, strict=True)]
