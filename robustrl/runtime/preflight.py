"""What must hold before any role starts, as far as it needs heavy imports: run as a process, prints the error, exits 1."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from ..config import JobConfig, check_room
from ..errors import ConfigError, RobustRLError
from ..rl.models import load_tokenizer
from ..rl.rewards import check_signature, load_reward
from ..rl.tasks import encode_within, make_task

_FIRST_PROMPTS = 256
"""Prompts of each split that are looked at; the task runner looks at each."""


def check(config: JobConfig) -> None:
    """Raises ConfigError, naming the field."""
    task = make_task(config.task, config.task_options, seed=config.seed)
    reward = load_reward(config.reward) if config.reward else None
    if reward is not None:
        check_signature(reward, config.reward, task.columns)
    elif task.reward is None:
        raise ConfigError(
            "reward", None, f"the task {config.task!r} has no reward of its own; give a function reward(prompts, completions, **columns)"
        )
    tokenizer = load_tokenizer(config.model)
    for split, count in (("train", config.steps * config.prompts_per_step), ("held_out", config.evaluation_prompts)):
        prompts = task.prompts(split, 0, min(count, _FIRST_PROMPTS))
        if count and not prompts:
            raise ConfigError("task", config.task, f"gives no prompt for the split {split!r}")
        if prompts and reward is not None:
            check_signature(reward, config.reward, {name for prompt in prompts for name in prompt.columns})
        for prompt in prompts:
            tokens = encode_within(task, tokenizer, prompt, config.max_model_len)
            check_room(config, len(tokens), prompt.text)


def main() -> None:
    try:
        check(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=JobConfig))
    except RobustRLError as error:
        print(error)
        sys.exit(1)
    except Exception as error:  # of somebody's tokenizer, chat template or data: anything; its traceback goes to the host's log
        print(f"the checks before the start: {type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
