"""Reward functions with TRL's signature: how they are found, called and checked.

``score`` promises that what comes back is one finite float per completion, or, under ``drop``, None and a reason. When a call raises, the
samples are tried one by one to find which of them is at fault; the others then keep the value of their own call.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pickle
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from robustrl.errors import ConfigError, RewardError, counted
from robustrl.rl.tasks import RewardFunction
from robustrl.rl.trajectory import Trajectory

_SHOWN = 120
_RESERVED = ("prompt", "prompts", "completion", "completions", "completion_ids")
_JUDGED = {"prompts", "completions", "completion_ids"}
"""Of which a reward function has to take one: what else is passed says nothing of what the model did."""
_PASSED = _JUDGED | {"finish"}
_TRLS = "must take prompts, completions and **kwargs by name, as TRL's reward functions do"


def completion_text(completion: Any) -> str:
    """The text of a completion, plain or conversational (a list of messages)."""
    return completion if isinstance(completion, str) else "".join(str(message["content"]) for message in completion)


def load_reward(reference: str) -> RewardFunction:
    """The function behind ``module:function`` or the path of a pickle. Raises ConfigError when there is none or it cannot be called."""
    path = Path(reference).expanduser()
    if path.is_file():
        try:
            reward = pickle.loads(path.read_bytes())
        except Exception as error:  # unpickling runs arbitrary code: anything can come out of it
            raise ConfigError("reward", reference, f"cannot be unpickled: {error!r}") from error
    else:
        module, colon, function = reference.partition(":")
        if not (colon and module and function):
            raise ConfigError("reward", reference, "must be module:function or the path of a pickled function")
        try:
            reward = getattr(importlib.import_module(module), function)
        except AttributeError as error:
            raise ConfigError("reward", reference, f"the module {module!r} has no {function!r}") from error
        except Exception as error:  # importing runs arbitrary code
            raise ConfigError("reward", reference, f"the module {module!r} cannot be imported: {error!r}") from error
    if not callable(reward):
        raise ConfigError("reward", reference, f"is a {type(reward).__name__}, not a function")
    return reward


def check_signature(reward: RewardFunction, shown: object, columns: Collection[str] | None) -> None:
    """Whether it takes what it will be called with. ``columns``: those of the task; None: not known, and whatever it asks for may be one.

    Raises ConfigError with ``shown`` as the value of ``reward``.
    """
    try:
        accepted = list(inspect.signature(reward).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError("reward", shown, f"{_TRLS}, and its parameters cannot be read: {error}") from None
    needed = [p for p in accepted if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if unnamed := [p.name for p in needed if p.kind is p.POSITIONAL_ONLY]:
        raise ConfigError("reward", shown, f"{_TRLS}; it takes {', '.join(unnamed)} by position alone")
    names = {p.name for p in accepted if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not names & _JUDGED and all(p.kind is not p.VAR_KEYWORD for p in accepted):
        raise ConfigError("reward", shown, f"{_TRLS}; it takes {', '.join(p.name for p in accepted) or 'nothing'}")
    passed = _PASSED | (set(columns) - set(_RESERVED) if columns is not None else names)
    if missing := [p.name for p in needed if p.name not in passed]:
        raise ConfigError("reward", shown, f"{_TRLS}; there is nothing to pass for {', '.join(missing)}, only {', '.join(sorted(passed))}")


def score(reward: RewardFunction, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]],
          errors: Literal["stop", "drop"] = "stop") -> tuple[list[float | None], dict[int, str]]:
    """One value per completion, and the reasons for each that is None (by position; empty under ``stop``).

    ``columns`` holds one list per name, each as long as ``completions``. A column that the function does not take is not passed to it.
    Under ``stop`` raises RewardError that names the function and the first sample at fault; under ``drop`` a call that goes wrong as a
    whole (a wrong length, say) drops all its samples.
    """
    values, reasons = _call(reward, prompts, completions, columns)
    if reasons and errors == "stop":
        index = min(reasons)
        shown = completion_text(completions[index])
        raise RewardError(f"reward function {_name(reward)}: {reasons[index]}; sample {index} of {len(completions)}: prompt "
                          f"{_short(completion_text(prompts[index]))}, completion {_short(shown)}")
    return values, reasons


def score_trajectories(reward: RewardFunction, trajectories: Sequence[Trajectory],
                       errors: Literal["stop", "drop"] = "stop") -> dict[int, str]:
    """Sets ``reward`` of each trajectory (None: dropped) and returns the reasons of the dropped by trajectory id.

    Besides the task's columns the function gets TRL's ``completion_ids`` and ``finish`` (``stop`` or ``length``). Prompts and completions
    are messages where the prompt is conversational. Raises as ``score``.
    """
    chat = bool(trajectories) and trajectories[0].messages is not None
    prompts = [t.messages if chat else t.prompt for t in trajectories]
    completions = [[{"role": "assistant", "content": t.text}] if chat else t.text for t in trajectories]
    names = sorted({name for t in trajectories for name in t.columns} - set(_RESERVED))
    columns: dict[str, list[Any]] = {name: [t.columns.get(name) for t in trajectories] for name in names}
    columns |= {"completion_ids": [t.tokens for t in trajectories], "finish": [t.finish for t in trajectories]}
    values, reasons = score(reward, prompts, completions, columns, errors)
    for trajectory, value in zip(trajectories, values, strict=True):
        trajectory.reward = value
    return {trajectories[index].id: reason for index, reason in reasons.items()}


def _call(reward: RewardFunction, prompts: Sequence[Any], completions: Sequence[Any],
          columns: Mapping[str, Sequence[Any]]) -> tuple[list[float | None], dict[int, str]]:
    count = len(completions)
    arguments = {"prompts": prompts, "completions": completions, **columns}
    accepted = inspect.signature(reward).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        arguments = {name: column for name, column in arguments.items() if name in accepted}
    try:
        returned = reward(**{name: list(column) for name, column in arguments.items()})
    except (Exception, SystemExit) as error:  # a user's function may raise anything; the policy decides what becomes of it
        reason = f"raised {type(error).__name__}: {_short(' '.join(str(error).split()), quote=False)}"
        if count == 1:
            return [None], {0: reason}
        return _one_by_one(reward, prompts, completions, columns, reason)
    try:
        found = list(returned)
    except Exception:  # not iterable, or an iterator that raises
        found = None
    if found is None or len(found) != count:
        got = f"a {type(returned).__name__}" if found is None else counted(len(found), "value")
        text = f"returned {got} for {counted(count, 'completion')}; must be a list of {counted(count, 'number')}"
        return [None] * count, dict.fromkeys(range(count), text)
    values: list[float | None] = []
    reasons = {}
    for index, item in enumerate(found):
        try:
            value = float(item)
        except Exception:  # float() of a tensor of two, of an int beyond 1e308: each type has errors of its own
            value = math.nan
        values.append(value if math.isfinite(value) else None)
        if values[-1] is None:
            reasons[index] = f"returned {_short(repr(item), quote=False)}, which is not a finite number"
    return values, reasons


def _one_by_one(reward: RewardFunction, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]],
                reason: str) -> tuple[list[float | None], dict[int, str]]:
    count = len(completions)
    values: list[float | None] = []
    reasons: dict[int, str] = {}
    for i in range(count):
        value, why = _call(reward, prompts[i:i + 1], completions[i:i + 1], {name: c[i:i + 1] for name, c in columns.items()})
        values += value
        reasons |= {i: why[0]} if why else {}
    if not reasons:
        return [None] * count, dict.fromkeys(range(count), f"{reason} (with all {count} samples at once; each alone passes)")
    return values, reasons


def _name(reward: RewardFunction) -> str:
    module, name = getattr(reward, "__module__", None), getattr(reward, "__qualname__", None)
    return f"{module}.{name}" if name else repr(reward)


def _short(text: str, quote: bool = True) -> str:
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return repr(text) if quote else text
