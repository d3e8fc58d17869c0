"""The policy for reward functions that fail, and TRL's calling convention."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import pickle
import sys

import pytest

from robustrl.config import make_config
from robustrl.errors import ConfigError, RewardError
from robustrl.rl.rewards import check_signature, load_reward, score, score_trajectories
from robustrl.rl.tasks import SPLITS, make_task
from robustrl.rl.trajectory import Trajectory
from robustrl.runtime import preflight

PROMPTS, COMPLETIONS = ["p0", "p1", "p2"], ["one", "two", "x" * 500]


def lengths(completions, **kwargs):
    return [len(c) for c in completions]


def raises_on_two(prompts, completions, **kwargs):
    if "two" in completions:
        raise KeyError("lost")
    return [1.0] * len(completions)


def raises_on_many(prompts, completions, **kwargs):
    assert len(completions) == 1, "only one"
    return [1.0]


def returning(*values):
    def fixed(prompts, completions, **kwargs):
        return list(values)
    return fixed


def test_good_rewards_of_any_number_type():
    import numpy
    import torch

    assert score(lengths, PROMPTS, COMPLETIONS, {}) == ([3, 3, 500], {})
    assert score(lambda completions, **_: numpy.array([1, 2, 3]), PROMPTS, COMPLETIONS, {}) == ([1, 2, 3], {})
    assert score(lambda completions, **_: torch.tensor([True, False, True]), PROMPTS, COMPLETIONS, {}) == ([1, 0, 1], {})
    with pytest.raises(RewardError, match=r"returned tensor\(\[0., 0.\]\), which is not a finite number; sample 0"):
        score(lambda completions, **_: torch.zeros(3, 2), PROMPTS, COMPLETIONS, {})


class _Judge:
    def __call__(self, completions, answer):
        return [1.0] * len(completions)


@pytest.mark.parametrize("reward", [
    lengths, raises_on_two, lambda completions: [], lambda prompts: [], lambda **kwargs: [], lambda completion_ids, finish: [], _Judge(),
    _Judge().__call__, lambda completions, answer, own=3: [], functools.partial(lambda scale, completions: [], 2.0),
])
def test_what_can_be_called_as_trl_does_is_taken(reward):
    check_signature(reward, "shown", ["answer"])
    check_signature(reward, "shown", None)


@pytest.mark.parametrize(("reward", "why"), [
    (lambda: [], "; it takes nothing$"),
    (lambda *texts: [], "; it takes texts$"),
    (lambda answer: [], "; it takes answer$"),
    (print, "; it takes args, sep, end, file, flush$"),
    (lambda prompts, completions, /: [], "; it takes prompts, completions by position alone$"),
    (len, "; it takes obj by position alone$"),
    (int, ", and its parameters cannot be read: "),
])
def test_what_cannot_be_called_as_trl_does_is_refused_with_what_it_takes(reward, why):
    for columns in (["answer"], None):
        with pytest.raises(ConfigError, match=rf"^reward = 'shown': must take prompts, completions and \*\*kwargs by name, as TRL.*{why}"):
            check_signature(reward, "shown", columns)


def test_what_a_reward_function_needs_beyond_the_columns_is_refused_once_they_are_known():
    check_signature(json.dumps, json.dumps, None)
    with pytest.raises(ConfigError, match="there is nothing to pass for obj, only answer, completion_ids, completions, finish, prompts$"):
        check_signature(json.dumps, json.dumps, ["answer", "prompt"])
    with pytest.raises(ConfigError, match="there is nothing to pass for prompt, solution"):
        check_signature(lambda completions, prompt, solution: [], "", ["answer", "prompt"])


@pytest.mark.parametrize("name", ["arithmetic", "arithmetic_tool", "arithmetic_long", "reasoning_gym:chain_sum"])
def test_a_task_has_the_columns_that_it_names(name):
    task = make_task(name, {}, seed=0)
    assert {tuple(prompt.columns) for split in SPLITS for prompt in task.prompts(split, 0, 3)} == {task.columns}


def test_the_checks_before_the_start_know_the_columns(monkeypatch, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{i}+1=", "solution": "x"}}\n' for i in range(4)))
    config = make_config({"task": f"jsonl:{data}", "reward": f"{__name__}:needs_solution"})
    for given, wrong in ((needs_solution, False), (json.dumps, True)):
        monkeypatch.setattr(preflight, "load_reward", lambda _, given=given: given)
        with pytest.raises(ConfigError, match="nothing to pass for obj, only .*solution") if wrong else contextlib.nullcontext():
            preflight.check(config)


def needs_solution(completions, solution, **kwargs):
    return [1.0] * len(completions)


@pytest.mark.parametrize(("reward", "message"), [
    (raises_on_two, r"raises_on_two: raised KeyError: 'lost'; sample 1 of 3: prompt 'p1', completion 'two'"),
    (raises_on_many, r"raised AssertionError: only one.*with all 3 samples at once; each alone passes.*sample 0 of 3"),
    (returning(1.0, 2.0, math.nan),
     r"fixed: returned nan, which is not a finite number; sample 2 of 3: prompt 'p2', completion 'x{120}\.\.\.'$"),
    (returning(1.0, math.inf, 0), r"returned inf.*sample 1"),
    (returning(None, 1.0, 2.0), r"returned None.*sample 0"),
    (returning("good", 1.0, 2.0), r"returned 'good'.*sample 0"),
    (returning(1.0, 2.0), r"returned 2 values for 3 completions; must be a list of 3 numbers; sample 0"),
    (lambda prompts, completions, **_: 1.0, r"returned a float for 3 completions"),
    (returning(10**400, 1.0, 2.0), r"returned 1000.*which is not a finite number; sample 0"),
    (lambda prompts, completions, **_: (1 / 0 for _ in prompts), r"returned a generator for 3 completions"),
    (lambda prompts, completions, **_: sys.exit("enough"), r"raised SystemExit: enough"),
])
def test_stop_names_function_and_sample(reward, message):
    with pytest.raises(RewardError, match=message):
        score(reward, PROMPTS, COMPLETIONS, {}, errors="stop")


@pytest.mark.parametrize(("reward", "values"), [
    (raises_on_two, [1.0, None, 1.0]), (returning(1.0, math.nan, None), [1.0, None, None]), (returning(1.0), [None] * 3),
    (raises_on_many, [None] * 3)])
def test_drop_gives_none_and_a_reason(reward, values):
    found, reasons = score(reward, PROMPTS, COMPLETIONS, {}, errors="drop")
    assert found == values
    assert set(reasons) == {i for i, value in enumerate(values) if value is None}
    assert all(reasons.values())


def test_columns_go_to_those_who_take_them():
    columns = {"answer": ["a", "b", "c"], "finish": ["stop"] * 3}
    assert score(lambda completions, answer: [answer.index(a) for a in answer], PROMPTS, COMPLETIONS, columns)[0] == [0, 1, 2]
    assert score(lambda prompts, completions, **kwargs: [len(kwargs)] * 3, PROMPTS, COMPLETIONS, columns)[0] == [2, 2, 2]


def sample(i, **changes):
    fields = {"id": 10 + i, "batch": 1, "group": 0, "prompt": "user: hi", "prompt_tokens": [1], "columns": {"truth": str(i)},
              "text": str(i), "tokens": [i], "finish": "length"} | changes
    return Trajectory(**fields)


def test_trajectories_are_scored_in_place():
    def reward(prompts, completions, completion_ids, truth, finish, **kwargs):
        assert prompts == ["user: hi"] * 3 and completions == truth == ["0", "1", "2"] and finish == ["length"] * 3 and not kwargs
        return [float(ids[0]) if ids[0] != 1 else None for ids in completion_ids]

    trajectories = [sample(i) for i in range(3)]
    reasons = score_trajectories(reward, trajectories, "drop")
    assert [t.reward for t in trajectories] == [0.0, None, 2.0]
    assert list(reasons) == [11] and "None" in reasons[11]


def test_conversations_keep_their_shape():
    messages = [{"role": "user", "content": "hi"}]

    def reward(prompts, completions, **kwargs):
        assert prompts == [messages] and completions == [[{"role": "assistant", "content": "7"}]]
        return [float(completions[0][0]["content"])]

    t = sample(7, messages=messages)
    score_trajectories(reward, [t])
    assert t.reward == 7.0
    with pytest.raises(RewardError, match="prompt 'hi', completion '7'"):
        score_trajectories(returning(math.nan), [t])


def test_load_reward_by_name_and_by_pickle(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def good(completions, **kwargs):\n    return [1.0] * len(completions)\nnumber = 3\n")
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_reward("my_rewards:good")(completions=["a"]) == [1.0]
    path = tmp_path / "reward.pkl"
    path.write_bytes(pickle.dumps(sys.modules["my_rewards"].good))
    assert load_reward(str(path))(completions=["a"]) == [1.0]
    (tmp_path / "bad.pkl").write_bytes(b"nothing")
    for reference, message in [("my_rewards:bad", "the module 'my_rewards' has no 'bad'"), ("no_such:f", "cannot be imported"),
                               ("broken_rewards:f", "cannot be imported: ZeroDivisionError"),
                               ("my_rewards:number", "is a int, not a function"),
                               ("my_rewards", "must be module:function"), (str(tmp_path / "bad.pkl"), "cannot be unpickled")]:
        with pytest.raises(ConfigError, match=message):
            load_reward(reference)


def test_load_reward_takes_a_cloudpickled_closure(tmp_path):
    cloudpickle = pytest.importorskip("cloudpickle")
    bonus = 0.5
    path = tmp_path / "closure.pkl"
    path.write_bytes(cloudpickle.dumps(lambda completions, **kwargs: [bonus] * len(completions)))
    assert score(load_reward(str(path)), PROMPTS, COMPLETIONS, {})[0] == [0.5] * 3
