"""Tasks: determinism, disjoint splits, the tool's answers, and what bad names, options and files are told."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from robustrl.errors import ConfigError
from robustrl.rl.arithmetic import solve
from robustrl.rl.models import TINY, load_tokenizer, resolve_model
from robustrl.rl.rewards import score_trajectories
from robustrl.rl.tasks import check_task, make_task
from robustrl.rl.trajectory import Trajectory


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


@pytest.fixture
def rows_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"q{i % 40}", "answer": i % 40}) for i in range(50)) + "\n\n")
    return path


def texts(task, split, start, count):
    return [p.text for p in task.prompts(split, start, count)]


@pytest.mark.parametrize("name", ["arithmetic", "arithmetic_tool", "arithmetic_long", "reasoning_gym:chain_sum", "jsonl"])
def test_prompts_are_random_access_and_splits_disjoint(name, rows_file):
    name = f"jsonl:{rows_file}" if name == "jsonl" else name
    task, again, other = make_task(name, {}, 3), make_task(name, {}, 3), make_task(name, {}, 4)
    whole = task.prompts("train", 0, 300)
    assert again.prompts("train", 200, 50) == whole[200:250]
    assert again.prompts("train", 0, 50) == whole[:50]
    assert texts(other, "train", 0, 300) != [p.text for p in whole]
    held_out = {text for t in (task, other) for text in texts(t, "held_out", 0, 300)}
    assert held_out
    assert not held_out & {text for t in (task, other) for text in texts(t, "train", 0, 300)}


def test_unknown_split():
    with pytest.raises(ConfigError, match="split = 'test': must be one of train, held_out"):
        make_task("arithmetic", {}, 0).prompts("test", 0, 1)


def test_solve():
    assert solve("3*7+5-2*4=") == ("6", "<3*7=1+5=6-2=4*4=6>6")
    assert solve("1-9+0*3-5=") == ("1", "<1-9=2+0=2*3=6-5=1>1")


def scored(task, prompt, text, finish="stop"):
    t = Trajectory(id=0, batch=0, group=0, prompt=prompt.text, prompt_tokens=[1], columns=prompt.columns, text=text, finish=finish)
    score_trajectories(task.reward, [t])
    return t.reward


def test_arithmetic_reward():
    task = make_task("arithmetic", {}, 0)
    prompt = task.prompts("train", 0, 1)[0]
    direct, scratchpad = solve(prompt.text)
    wrong = str((int(direct) + 1) % 10)
    assert [scored(task, prompt, text) for text in (direct, scratchpad, f"<nonsense>{direct}")] == [1, 1, 1]
    assert [scored(task, prompt, text) for text in (wrong, scratchpad[:-1], scratchpad[:-1] + wrong, direct * 2, "")] == [0] * 5
    assert scored(task, prompt, scratchpad, finish="length") == 0


def test_tool_evaluates_operation_by_operation():
    task = make_task("arithmetic_tool", {}, 0)
    for prompt in task.prompts("train", 0, 50):
        answer, scratchpad = solve(prompt.text)
        turns = scratchpad[:-2].split("=")[:-1]
        said = "<"
        for turn in turns:
            said += (turn if said == "<" else turn[1:]).lstrip("<") + "="
            said += task.tool(said)
        assert said + ">" + answer == scratchpad
    assert [task.tool(text) for text in ("<3*=", "3*7=", "<3*7=1+5", "<3*7=1+55=", "<a*7=", "=", "")] == [None] * 7


def test_long_form_counts_the_first_answer_only():
    task = make_task("arithmetic_long", {}, 0)
    prompt = task.prompts("train", 0, 1)[0]
    answer, scratchpad = solve(prompt.text)
    assert task.ignore_eos and task.max_tokens >= 512 and task.max_tokens * task.pace >= 5
    assert scored(task, prompt, scratchpad + "777", finish="length") == scored(task, prompt, answer + "<<", finish="length") == 1
    assert scored(task, prompt, str((int(answer) + 1) % 10) + scratchpad, finish="length") == 0


def test_arithmetic_fits_the_tiny_tokenizer(tokenizer):
    task = make_task("arithmetic", {}, 0)
    for prompt in task.prompts("train", 0, 20):
        text = prompt.text + solve(prompt.text)[1]
        ids = tokenizer.encode(text)
        assert len(ids) == len(text) and tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text
        assert task.encode(tokenizer, prompt) == ids[:len(prompt.text)]
        assert len(solve(prompt.text)[1]) < task.max_tokens


class ChatTokenizer:
    chat_template = "a template"

    def apply_chat_template(self, messages, **kwargs):
        assert kwargs == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return [f"{m['role']}:{m['content']}" for m in messages]


def test_chat_template_is_used_where_there_is_one(tmp_path):
    task = make_task("arithmetic", {}, 0)
    prompt = task.prompts("train", 0, 1)[0]
    assert task.encode(ChatTokenizer(), prompt) == [f"user:{prompt.text}"]
    path = tmp_path / "chat.jsonl"
    chats = [[{"role": "system", "content": "short"}, {"role": "user", "content": f"q{i}"}] for i in range(3)]
    path.write_text("\n".join(json.dumps({"prompt": chat, "truth": "a"}) for chat in chats))
    task = make_task(f"jsonl:{path}", {}, 0)
    prompt = task.prompts("train", 0, 1)[0]
    assert prompt.messages in chats and prompt.columns == {"truth": "a"}
    assert task.encode(ChatTokenizer(), prompt) == ["system:short", f"user:{prompt.messages[1]['content']}"]


def test_jsonl_epochs_and_columns(rows_file):
    task = make_task(f"jsonl:{rows_file}", {"held_out": 0.25}, 0)
    held_out = texts(task, "held_out", 0, 1000)
    assert len(set(held_out)) == 10
    epoch = 50 - len(held_out)
    first, second = texts(task, "train", 0, epoch), texts(task, "train", epoch, epoch)
    assert sorted(first) == sorted(second) and first != second
    assert all(p.columns == {"answer": int(p.text[1:])} for p in task.prompts("train", 0, epoch))
    assert task.reward is None


def test_hf_data_set_in_a_local_folder(rows_file):
    pytest.importorskip("datasets")
    task = make_task(f"hf:{rows_file.parent}", {}, 0)
    assert texts(task, "train", 0, 5) == texts(make_task(f"jsonl:{rows_file}", {}, 0), "train", 0, 5)


def test_reasoning_gym_scores_with_its_own_scorer():
    task = make_task("reasoning_gym:chain_sum", {"min_terms": 2, "max_terms": 2}, 0)
    prompt = task.prompts("held_out", 5, 1)[0]
    answer = prompt.columns["answer"]
    assert scored(task, prompt, answer) == scored(task, prompt, f"so it is\nAnswer: {answer}") == 1
    assert scored(task, prompt, str(int(answer) + 1)) < 1


@pytest.mark.parametrize(("name", "options", "message"), [
    ("arithmetics", {}, "task = 'arithmetics': there is no such task; there are arithmetic, arithmetic_tool, arithmetic_long"),
    ("jsonl:", {}, "there is no such task"),
    ("jsonl:/no/such", {}, r"task = 'jsonl:/no/such': .*file /no/such"),
    ("arithmetic", {"lenght": 3}, r"task_options\['lenght'\] = 3: the task 'arithmetic' has no such option; it has: max_tokens"),
    ("arithmetic", {"max_tokens": "3"}, r"task_options\['max_tokens'\] = '3': must be of type int"),
    ("arithmetic", {"max_tokens": True}, "must be of type int"),
    ("arithmetic", {"max_tokens": 0}, "must be at least 1"),
    ("arithmetic_tool", {"tool_seconds": -1}, "must not be negative"),
    ("arithmetic_tool", {"tool_seconds": float("nan")}, "must not be negative"),
])
def test_bad_names_and_options_need_no_heavy_check(name, options, message):
    for make in (check_task, lambda *args: make_task(*args, 0)):
        with pytest.raises(ConfigError, match=message):
            make(name, options)


@pytest.mark.parametrize(("name", "options", "message"), [
    ("reasoning_gym:chain_sums", {}, "has no data set 'chain_sums'; it has: .*chain_sum,"),
    ("reasoning_gym:chain_sum", {"terms": 3}, "chain_sum has the options: .*max_terms"),
    ("reasoning_gym:chain_sum", {"min_terms": -3}, "min_terms must be positive"),
    ("reasoning_gym:chain_sum", {"size": 1}, "too few different prompts"),
    ("hf:/no/such/folder", {}, "cannot be loaded"),
])
def test_bad_data_sets(name, options, message):
    pytest.importorskip("datasets" if name.startswith("hf:") else "reasoning_gym")
    with pytest.raises(ConfigError, match=message):
        task = make_task(name, options, 0)
        task.prompts("train", 0, 1), task.prompts("held_out", 0, 1)


@pytest.mark.parametrize(("lines", "options", "message"), [
    (['{"prompt": "a"}', '{"prompt": "b"'], {}, "line 2 is not JSON"),
    (['{"prompt": "a"}', "", '{"question": "b", "answer": 1}'], {}, r"line 3 has no prompt column 'prompt' \(found: question, answer\)"),
    (['{"prompt": "a"}', "[1]"], {}, r"line 2 has no prompt column 'prompt' \(found: a list\)"),
    (['{"prompt": "a"}', '{"prompt": 3}'], {}, "line 2: the prompt must be a text or a list of messages"),
    (['{"prompt": "a"}', '{"prompt": [{"role": "user"}]}'], {}, "line 2: the prompt must be a text or a list of messages"),
    (['{"prompt": "a"}', '{"prompt": "a"}'], {}, "has 1 different prompt; at least 2"),
    (['{"prompt": "a"}', r'{"prompt": "\ud800"}'], {}, "line 2 has a value that cannot be sent to the roles: .*surrogates not allowed"),
    (['{"prompt": "a"}', '{"prompt": "b", "n": 1%s}' % ("0" * 30)], {}, "line 2 has a value that cannot be sent to the roles"),
    (['{"prompt": "a"}', '{"prompt": "b", "n": %s}' % ("9" * 5000)], {}, "line 2 cannot be read: .*4300 digits"),
    (['{"prompt": "a"}', '{"prompt": "b", "n": %s}' % ("[" * 100_000)], {}, "line 2 cannot be read: .*recursion"),
    ([], {}, "has 0 different prompts"),
    (['{"prompt": "a"}', '{"prompt": "b"}'], {"held_out": 1.0}, r"task_options\['held_out'\] = 1.0: must lie between 0 and 1"),
])
def test_bad_jsonl(tmp_path, lines, options, message):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=message):
        make_task(f"jsonl:{path}", options, 0)


def lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def test_prompts_that_no_engine_takes_are_named_before_a_role_starts(tmp_path):
    from robustrl.config import make_config
    from robustrl.runtime.preflight import check

    path = tmp_path / "rows.jsonl"
    for prompts, text in ((["1+1=", "2" * 40], "max_model_len = 32: must be greater than the 40 tokens of the prompt '22222"),
                          (["", "1+1="], "the prompt '' has no tokens")):
        path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
        with pytest.raises(ConfigError, match=text):
            check(make_config({"task": f"jsonl:{path}", "reward": f"{__name__}:lengths", "max_model_len": 32}))
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in ("1+1=", "1+2+3+4+5=")))
    with pytest.raises(ConfigError, match=r"sampling.max_tokens = 30: must be at most 2[0-9]: max_model_len = 32 .* the prompt '1\+"):
        check(make_config({"task": f"jsonl:{path}", "reward": f"{__name__}:lengths", "max_model_len": 32, "sampling": {"max_tokens": 30}}))


def test_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny") == str(TINY) and (TINY / "config.json").is_file()
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    (tmp_path / "mine").mkdir()
    for name, message in [("mine", "has no config.json"), ("tinny", "no such folder"), ("./tinny", "no such folder"),
                          ("mine/tinny", "no such folder"), ("/a/b/c", "no such folder"),
                          ("~/x", "no such folder"), ("", "has no config.json")]:
        with pytest.raises(ConfigError, match=f"(?s)model = .*({message}).*must be 'tiny', a folder"):
            resolve_model(name)
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert resolve_model("mine") == str(tmp_path / "mine")


def test_checks_import_nothing_heavy():
    code = ("import sys; from robustrl.rl import rewards, tasks, models; tasks.check_task('reasoning_gym:x', {});"
            "models.resolve_model('tiny');"
            "tasks.make_task('arithmetic', {}, 0).prompts('train', 0, 3);"
            "print({'torch', 'transformers', 'ray', 'datasets', 'reasoning_gym', 'numpy'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stdout + done.stderr
