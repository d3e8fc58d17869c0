"""The bundled tasks: a chain of four operations modulo 10, applied left to right, as in ``3*7+5-2*4=``.

The model answers directly (``6``) or by a scratchpad that restates each operation and its result (``<3*7=1+5=6-2=4*4=6>6``). The tiny
model starts with both habits; its direct answers are poor and its scratchpads good, so what RL teaches it is to choose the scratchpad. In
the tool form each ``=`` ends a turn and an agent_worker supplies the result: the same language, with the sums done by somebody else.
"""

from __future__ import annotations

import random
import re
import time
from typing import Any

from robustrl.rl.rewards import completion_text
from robustrl.rl.tasks import GeneratedTask, Prompt

_OPERATIONS = 4
_CALL = re.compile(r"(?:<|=)(\d)([-+*])(\d)=$")
_FIRST_ANSWER = re.compile(r"(?:<[^>]*>)?(\d)")


def evaluate(left: int, operation: str, right: int) -> int:
    """One operation, modulo 10."""
    return {"+": left + right, "-": left - right, "*": left * right}[operation] % 10


def solve(prompt: str) -> tuple[str, str]:
    """The direct answer and the scratchpad answer to a prompt."""
    value, steps = int(prompt[0]), []
    for operation, operand in zip(prompt[1:-1:2], prompt[2:-1:2], strict=True):
        value = evaluate(value, operation, int(operand))
        steps.append(f"{operation}{operand}={value}")
    return str(value), f"<{prompt[0]}{''.join(steps)}>{value}"


def answer_reward(prompts: list[Any], completions: list[Any], *, answer: list[str], finish: list[str] | None = None,
                  **_: Any) -> list[float]:
    """1.0 where the sequence ended by itself and what follows its last ``>`` is the answer, else 0.0."""
    ends = finish or ["stop"] * len(completions)
    return [float(end == "stop" and completion_text(completion).rpartition(">")[2].strip() == right)
            for completion, right, end in zip(completions, answer, ends, strict=True)]


def first_answer_reward(prompts: list[Any], completions: list[Any], *, answer: list[str], **_: Any) -> list[float]:
    """1.0 where the first digit, a scratchpad before it set aside, is the answer; whatever comes later does not count."""
    found = [_FIRST_ANSWER.match(completion_text(completion)) for completion in completions]
    return [float(match is not None and match[1] == right) for match, right in zip(found, answer, strict=True)]


class Arithmetic(GeneratedTask):
    options = {"max_tokens": 28}
    columns = ("answer",)
    reward = staticmethod(answer_reward)

    def draw(self, rng: random.Random) -> Prompt:
        digits = [str(rng.randrange(10)) for _ in range(_OPERATIONS + 1)]
        text = digits[0] + "".join(rng.choice("+-*") + digit for digit in digits[1:]) + "="
        return Prompt(text, {"answer": solve(text)[0]})


class ArithmeticTool(Arithmetic):
    """A scratchpad whose results come from a tool; a malformed operation ends the trajectory."""

    options = {"max_tokens": 28, "tool_seconds": 0.0}
    stop = ("=",)

    def tool(self, completion: str) -> str | None:
        call = _CALL.search(completion)
        if call is None or not completion.startswith("<"):
            return None
        time.sleep(self.settings["tool_seconds"])
        return str(evaluate(int(call[1]), call[2], int(call[3])))


class ArithmeticLong(Arithmetic):
    """Trajectories of at least five seconds: the end-of-sequence token is ignored and decoding is paced. Nothing for a model to gain."""

    options = {"max_tokens": 512, "pace": 0.01}
    ignore_eos = True
    reward = staticmethod(first_answer_reward)

    @property
    def pace(self) -> float:  # type: ignore[override]
        return self.settings["pace"]
