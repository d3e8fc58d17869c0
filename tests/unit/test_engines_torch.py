"""The torch engine against transformers called plainly: one sequence at a time, no cache, no padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from robustrl.engines.base import Delta, Engine, Request, make_engine
from robustrl.errors import ConfigError, WeightsError
from robustrl.rl.models import load_model, load_tokenizer, resolve_model

if TYPE_CHECKING:
    import torch

pytestmark = [pytest.mark.usefixtures("with_torch"), pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")]

TINY = resolve_model("tiny")
PROMPTS = ["3*7+5-2*4=", "1+2=", "<3*7=1+5", "9-9-9-9-9-9=", "7+"]


@dataclasses.dataclass
class Answer:
    tokens: list[int]
    logprobs: list[float]
    finished: str | None = None


def collect(deltas: list[Delta], into: dict[str, Answer]) -> None:
    for delta in deltas:
        answer = into.setdefault(delta.id, Answer([], []))
        assert answer.finished is None, f"{delta.id} goes on after its end"
        answer.tokens += delta.tokens
        answer.logprobs += delta.logprobs
        answer.finished = delta.finished


def drain(engine: Engine, into: dict[str, Answer] | None = None) -> dict[str, Answer]:
    answers = {} if into is None else into
    for _ in range(2000):
        if not engine.unfinished:
            return answers
        collect(engine.step(), answers)
    raise AssertionError(f"{engine.unfinished} requests unfinished after 2000 steps")


def raw_logprobs(model, tokens: list[int]):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def greedy(model, prompt: list[int], count: int) -> Answer:
    answer = Answer([], [])
    for _ in range(count):
        logprobs = raw_logprobs(model, prompt + answer.tokens)[-1]
        answer.tokens.append(int(logprobs.argmax()))
        answer.logprobs.append(float(logprobs.max()))
    return answer


@pytest.fixture(scope="module")
def model():
    return load_model("tiny").eval()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = make_engine("torch", TINY, seed=0, max_model_len=96, max_num_seqs=4, load="model")
    yield engine
    engine.close()


def test_a_ragged_batch_that_rows_join_and_leave_answers_as_each_alone(engine: Engine, model, prompts: list[list[int]]) -> None:
    answers: dict[str, Answer] = {}
    prompts = sorted(prompts[:4], key=len) + prompts[4:]  # some join a shorter batch, the last a longer one; five for four places
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt, 8 + 5 * i, temperature=0, ignore_eos=True))
        for _ in range(3):
            collect(engine.step(), answers)
    drain(engine, answers)
    for i, prompt in enumerate(prompts):
        expected = greedy(model, prompt, 8 + 5 * i)
        assert answers[str(i)].tokens == expected.tokens
        assert answers[str(i)].logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert answers[str(i)].finished == "length"


def test_another_architecture_with_learned_positions(tmp_path, tokenizer) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(vocab_size=64, n_positions=48, n_embd=32, n_layer=2, n_head=2, eos_token_id=2, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = make_engine("torch", str(tmp_path), seed=0, max_num_seqs=4, load="model")
    for name, prompt in (("a", [5, 6, 7, 8, 9]), ("b", [4])):
        engine.add(Request(name, prompt, 12, temperature=0, ignore_eos=True))
    answers = drain(engine)
    assert answers["a"].tokens == greedy(model, [5, 6, 7, 8, 9], 12).tokens
    assert answers["b"].tokens == greedy(model, [4], 12).tokens


def test_requests_beyond_the_places_wait_and_prefill_is_told_from_decode(engine: Engine, prompts: list[list[int]]) -> None:
    for i in range(6):
        engine.add(Request(str(i), prompts[0], 3, ignore_eos=True))
    assert engine.unfinished == 6
    first = engine.step()
    assert {delta.id for delta in first} == {"0", "1", "2", "3"} and not engine.decoded
    assert {delta.id for delta in engine.step()} == {"0", "1", "2", "3"} and engine.decoded
    assert {delta.finished for delta in engine.step()} == {"length"} and engine.unfinished == 2
    assert {delta.id for delta in engine.step()} == {"4", "5"} and not engine.decoded
    drain(engine)
    assert engine.step() == [] and not engine.decoded


def test_a_request_aborted_and_continued_goes_on_as_if_uncut(engine: Engine, prompts: list[list[int]]) -> None:
    engine.add(Request("whole", prompts[0], 30, temperature=0, ignore_eos=True))
    whole = drain(engine)["whole"]
    cut: dict[str, Answer] = {}
    engine.add(Request("cut", prompts[0], 30, temperature=0, ignore_eos=True))
    engine.add(Request("other", prompts[1], 30, temperature=0, ignore_eos=True))
    for _ in range(11):
        collect(engine.step(), cut)
    engine.abort(["cut", "unknown"])
    assert engine.unfinished == 1
    head = cut["cut"]
    engine.add(Request("cut", prompts[0] + head.tokens, 30 - len(head.tokens), temperature=0, ignore_eos=True))
    drain(engine, cut)
    assert len(head.tokens) == 30 and head.tokens == whole.tokens
    assert head.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


def test_log_probabilities_are_those_of_the_distribution_drawn_from(engine: Engine, model, prompts: list[list[int]]) -> None:
    settings = {"hot": (1.7, 1.0), "cold": (0.6, 1.0), "nucleus": (1.3, 0.7), "plain": (1.0, 1.0)}
    for name, (temperature, top_p) in settings.items():
        engine.add(Request(name, prompts[2], 25, temperature, top_p, ignore_eos=True))
    answers = drain(engine)
    for name, (temperature, top_p) in settings.items():
        tokens = answers[name].tokens
        scaled = (raw_logprobs(model, prompts[2] + tokens)[len(prompts[2]) - 1 : -1] / temperature).log_softmax(-1)
        for row, token, logprob in zip(scaled, tokens, answers[name].logprobs, strict=True):
            nucleus, mass = [], 0.0
            for candidate in row.argsort(descending=True).tolist():
                if mass >= top_p:
                    break
                nucleus.append(candidate)
                mass += float(row[candidate].exp())
            assert token in nucleus
            assert logprob == pytest.approx(float(row[token]) - float(row[nucleus].exp().sum().log()), abs=1e-4)


def test_draws_follow_the_distribution(model, prompts: list[list[int]]) -> None:
    engine = make_engine("torch", TINY, seed=5, max_model_len=96, max_num_seqs=500, load="model")
    for i in range(2000):
        engine.add(Request(str(i), prompts[3], 1, temperature=1.5, ignore_eos=True, seed=i if i % 2 else None))
    counts = torch.zeros(64)
    for answer in drain(engine).values():
        counts[answer.tokens[0]] += 1
    expected = (raw_logprobs(model, prompts[3])[-1] / 1.5).softmax(-1)
    spread = (2000 * expected * (1 - expected)).sqrt()
    assert ((counts - 2000 * expected).abs() <= 4.5 * spread + 1).all()
    assert (counts > 0).sum() > 5  # the prompt is one where there is something to draw


def test_a_seed_reproduces_whatever_runs_beside(engine: Engine, prompts: list[list[int]]) -> None:
    def answer(seed: int | None, company: int) -> list[int]:
        for i in range(company):
            engine.add(Request(f"company-{i}", prompts[i], 20, seed=i if i else None))
        engine.add(Request("it", prompts[0], 20, temperature=1.5, ignore_eos=True, seed=seed))
        return drain(engine)["it"].tokens

    alone = answer(7, 0)
    assert alone == answer(7, 3)
    assert alone != answer(8, 0)
    assert answer(None, 0) != answer(None, 0)


def test_what_ends_a_request_is_told_apart(engine: Engine, tokenizer, model) -> None:
    prompt = tokenizer.encode("3*7+5-2*4=<", add_special_tokens=False)
    text = tokenizer.decode(greedy(model, prompt, 40).tokens)
    ended = text.index(tokenizer.eos_token)
    stop = text[2:4]  # two tokens that follow each other: the stop string is complete with the second
    engine.add(Request("eos", prompt, 60, temperature=0))
    engine.add(Request("ignored", prompt, 60, temperature=0, ignore_eos=True))
    engine.add(Request("stop", prompt, 60, temperature=0, stop=["never", stop]))
    engine.add(Request("max_model_len", prompt, 1000, temperature=0, ignore_eos=True))
    answers = drain(engine)
    assert {name: answer.finished for name, answer in answers.items()} == {
        "eos": "eos", "ignored": "length", "stop": "stop", "max_model_len": "length"}
    assert tokenizer.decode(answers["eos"].tokens) == text[:ended] + tokenizer.eos_token
    assert tokenizer.decode(answers["stop"].tokens) == text[: text.index(stop) + 2]
    assert len(answers["ignored"].tokens) == 60
    assert len(answers["max_model_len"].tokens) == 96 - len(prompt)


def test_score_is_the_raw_log_probability_and_leaves_running_requests_alone(engine: Engine, model, prompts: list[list[int]]) -> None:
    engine.add(Request("it", prompts[0], 20, temperature=0, ignore_eos=True))
    answers: dict[str, Answer] = {}
    collect(engine.step(), answers)
    tokens = prompts[0] + prompts[3]
    expected = raw_logprobs(model, tokens)[:-1].gather(-1, torch.tensor(tokens)[1:, None])[:, 0].tolist()
    assert engine.score(tokens) == pytest.approx(expected, abs=1e-5)
    assert engine.drop_held() == [] and engine.unfinished == 1
    drain(engine, answers)
    assert answers["it"].tokens == greedy(model, prompts[0], 20).tokens


def test_load_between_two_steps_changes_what_comes_after_and_nothing_before(engine: Engine, model, prompts: list[list[int]]) -> None:
    changed = {name: tensor + 0.2 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3))
               for name, tensor in model.state_dict().items()}
    changed["lm_head.weight"] = changed["model.embed_tokens.weight"]
    engine.add(Request("it", prompts[0], 30, temperature=0, ignore_eos=True))
    answers: dict[str, Answer] = {}
    for _ in range(10):
        collect(engine.step(), answers)
    before = engine.score(prompts[3])
    staging = {name: tensor.clone() for name, tensor in changed.items()}
    engine.load(staging)
    for tensor in staging.values():
        tensor.zero_()  # what was loaded is a copy
    other = load_model("tiny").eval()
    other.load_state_dict(changed)
    expected = raw_logprobs(other, prompts[3])[:-1].gather(-1, torch.tensor(prompts[3])[1:, None])[:, 0].tolist()
    assert engine.score(prompts[3]) == pytest.approx(expected, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(before, expected, strict=True)) > 0.1
    drain(engine, answers)
    old = greedy(model, prompts[0], 30).tokens
    assert answers["it"].tokens[:10] == old[:10] and answers["it"].tokens[10:] != old[10:]


def test_a_dummy_engine_has_no_weights_until_they_are_loaded(model, prompts: list[list[int]]) -> None:
    engine = make_engine("torch", TINY, seed=0, max_model_len=96, max_num_seqs=2)
    expected = raw_logprobs(model, prompts[0])[:-1].gather(-1, torch.tensor(prompts[0])[1:, None])[:, 0].tolist()
    assert max(abs(a - b) for a, b in zip(engine.score(prompts[0]), expected, strict=True)) > 0.1
    engine.load(model.named_parameters())  # without the tied lm_head.weight: here it shares its storage
    assert engine.score(prompts[0]) == pytest.approx(expected, abs=1e-5)


def test_an_incomplete_or_strange_load_is_refused_and_changes_nothing(engine: Engine, model, prompts: list[list[int]]) -> None:
    before = engine.score(prompts[0])
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    short = {name: tensor for name, tensor in zeros.items() if name != "model.norm.weight"}
    with pytest.raises(WeightsError, match=r"1 of \d+ tensors missing, first \['model.norm.weight'\]"):
        engine.load(short)
    with pytest.raises(WeightsError, match=r"'model.norm.weight' of shape \(3,\) does not fit"):
        engine.load(zeros | {"model.norm.weight": torch.zeros(3)})
    with pytest.raises(WeightsError, match="'extra' .*no such name"):
        engine.load(zeros | {"extra": torch.zeros(3)})
    assert engine.score(prompts[0]) == before


@pytest.mark.parametrize(("change", "message"), [
    ({"id": "taken"}, "id = 'taken': .*unique"),
    ({"tokens": []}, r"len\(tokens\) = 0: must be from 1 to 95"),
    ({"tokens": [4] * 96}, r"len\(tokens\) = 96: must be from 1 to 95"),
    ({"tokens": [4, 64, -1]}, r"tokens = \[64, -1\]: token ids must be from 0 to 63"),
    ({"max_tokens": 0}, "max_tokens = 0: must be at least 1"),
    ({"temperature": -0.1}, "temperature = -0.1: must be at least 0"),
    ({"temperature": float("nan")}, "temperature = nan: must be at least 0"),
    ({"top_p": 0.0}, "top_p = 0.0: must be above 0 and at most 1"),
    ({"stop": ["x", ""]}, "stop = .*no empty text"),
])
def test_a_request_that_cannot_be_served_names_the_field(engine: Engine, change: dict, message: str) -> None:
    engine.add(Request("taken", [4], 5))
    with pytest.raises(ConfigError, match=message):
        engine.add(Request(**{"id": "new", "tokens": [4], "max_tokens": 5} | change))
    assert engine.unfinished == 1


def test_settings_that_no_engine_can_have() -> None:
    with pytest.raises(ConfigError, match="engine = 'sglang': must be 'vllm' or 'torch'"):
        make_engine("sglang", TINY, seed=0, max_num_seqs=1)
    with pytest.raises(ConfigError, match="max_num_seqs = 0"):
        make_engine("torch", TINY, seed=0, max_num_seqs=0)
    with pytest.raises(ConfigError, match="max_model_len = 4096: must be from 2 to 1024"):
        make_engine("torch", TINY, seed=0, max_num_seqs=1, max_model_len=4096)
    with pytest.raises(ConfigError, match="load = 'none'"):
        make_engine("torch", TINY, seed=0, max_num_seqs=1, load="none")  # type: ignore[arg-type]
