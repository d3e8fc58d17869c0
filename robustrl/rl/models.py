"""Which model a job trains: ``tiny`` (bundled), a local folder, or a hub id. Finding out imports no torch and asks no network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from robustrl.errors import ConfigError

TINY = Path(__file__).parent / "tiny"
_ALLOWED = "must be 'tiny', a folder that holds a Hugging Face causal LM (config.json), or a hub id OWNER/NAME"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(name: str) -> str:
    """What ``from_pretrained`` takes: a folder's path, or the hub id unchanged. Raises ConfigError for anything else.

    Whether a hub id exists is not looked up. ``a/b`` is a path, not an id, where a folder ``a`` lies in the working directory.
    """
    if name == "tiny":
        return str(TINY)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError("model", name, f"the folder has no config.json; {_ALLOWED}")
        return str(path.resolve())
    if not _HUB_ID.fullmatch(name) or name[0] in ".~" or Path(name.partition("/")[0]).is_dir():
        raise ConfigError("model", name, f"there is no such folder; {_ALLOWED}")
    return name


def load_tokenizer(name: str) -> Any:
    """The model's Hugging Face tokenizer, with a padding token. Raises ConfigError when it cannot be loaded.

    From a folder with a tokenizer.json it imports no torch: roles that only need text stay small (68 MB instead of 420).
    """
    try:
        place = resolve_model(name)
        if (Path(place) / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(place)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("model", name, f"its tokenizer cannot be loaded ({str(error).splitlines()[0]}); {_ALLOWED}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(name: str, dtype: str = "float32") -> Any:
    """The causal LM, on the CPU. Raises ConfigError when it cannot be loaded. Imports torch and transformers."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("model", name, f"cannot be loaded ({str(error).splitlines()[0]}); {_ALLOWED}") from error
