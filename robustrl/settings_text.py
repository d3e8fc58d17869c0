"""All settings of a job as a config file of ``robustrl run``: each with its default, its choices and what JobConfig's source says of it."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec

from .config import JobConfig

_WIDTH = 120


def settings_text(config: JobConfig) -> str:
    """TOML that `load_config` reads back to the same configuration. What is not set is a comment."""
    nested = [name for name in config.__struct_fields__ if isinstance(getattr(config, name), msgspec.Struct)]
    lines = [f'# The settings of a job with their defaults, profile "{config.profile}"; `robustrl run FILE.toml` takes any of them.', ""]
    lines += _section(config, [name for name in config.__struct_fields__ if name not in nested])
    for name in nested:
        section = getattr(config, name)
        said = inspect.cleandoc(vars(type(section)).get("__doc__") or "")
        lines += ["", *_comment(said), f"[{name}]", *_section(section, list(section.__struct_fields__))]
    return "\n".join(lines) + "\n"


def _section(settings: msgspec.Struct, names: list[str]) -> Iterator[str]:
    said, hints = _docstrings(type(settings)), get_type_hints(type(settings))
    for name in names:
        yield from _comment(said.get(name, ""))
        choices = [choice for choice in get_args(hints[name]) if isinstance(choice, str)]
        value = getattr(settings, name)
        line = f"# {name} is not set" if value is None else f"{name} = {_toml(value)}"
        yield line + (f"  # {' | '.join(choices)}" if choices else "")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return repr(value) if isinstance(value, float) else json.dumps(value)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text.replace("``", "`"), _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _docstrings(kind: type) -> dict[str, str]:
    """Field -> the string below it in the source of its class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    pairs = zip(body, body[1:], strict=False)
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }
