"""vLLM stepped by hand in a thread that is not the main one, and beside it the torch engine as its cross-check."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from robustrl.engines.base import Delta, Request, make_engine
from robustrl.errors import ConfigError, WeightsError
from robustrl.rl.models import load_model, load_tokenizer, resolve_model

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

TINY = resolve_model("tiny")
PLACES = 8
PROBE = "3*7+5-2*4=<3*7=1+5=6-2=4*4=6>6"


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


def drain(engine: Any, into: dict[str, Answer] | None = None) -> dict[str, Answer]:
    answers = {} if into is None else into
    for _ in range(3000):
        if not engine.unfinished:
            return answers
        collect(engine.step(), answers)
    raise AssertionError(f"{engine.unfinished} requests unfinished after 3000 steps")


class InThread:
    """An engine made and used in one thread of its own, as in a rollout."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._engine = self._pool.submit(make_engine, *args, **kwargs).result(timeout=100)

    def __getattr__(self, name: str) -> Any:
        if name in ("unfinished", "decoded"):
            return getattr(self._engine, name)
        return lambda *args, **kwargs: self._pool.submit(getattr(self._engine, name), *args, **kwargs).result(timeout=60)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("tiny")


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model("tiny").eval()


@pytest.fixture(scope="module")
def probe(tokenizer: Any) -> list[int]:
    return tokenizer.encode(PROBE, add_special_tokens=False)


@pytest.fixture(scope="module")
def shared_vllm() -> Iterator[InThread]:
    engine = InThread("vllm", TINY, seed=0, max_model_len=128, max_num_seqs=PLACES, load="dummy")
    yield engine
    engine.close()


@pytest.fixture
def vllm(shared_vllm: InThread, model: Any) -> Iterator[InThread]:
    """The one engine, with the tiny model's weights and nothing to do."""
    shared_vllm.load(model.state_dict())
    yield shared_vllm
    shared_vllm.drop_held()
    shared_vllm.abort([str(i) for i in range(100)] + ["it", "cut", "a", "b"])
    assert shared_vllm.step() == [] and shared_vllm.unfinished == 0, "a test left work behind"


@pytest.fixture
def reference(model: Any) -> Iterator[Any]:
    engine = make_engine("torch", TINY, seed=0, max_model_len=128, max_num_seqs=PLACES, load="model")
    yield engine
    engine.close()


def prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Chains of one to six operations, half of them begun as a scratchpad."""
    draw = random.Random(0)
    texts = []
    for i in range(count):
        chain = "".join(f"{draw.randrange(10)}{draw.choice('+-*')}" for _ in range(draw.randrange(1, 7)))
        texts.append(f"{chain}{draw.randrange(10)}=" + "<" * (i % 2))
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def moved(model: Any, seed: int, size: float = 0.1) -> dict[str, Any]:
    """Weights at some distance of the model's, tied as they were."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: tensor + size * torch.randn(tensor.shape, generator=generator) for name, tensor in model.state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def scores_of(weights: dict[str, Any], tokens: list[int]) -> list[float]:
    """By transformers, of the tiny model with these weights."""
    other = load_model("tiny").eval()
    other.load_state_dict(weights)
    with torch.no_grad():
        logprobs = other(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(tokens)[1:, None])[:, 0].tolist()


def gap(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.3, 0.8)])
def test_both_engines_agree_on_a_hundred_prompts(vllm: InThread, reference: Any, tokenizer: Any, temperature: float, top_p: float) -> None:
    """Greedy: text and log-probabilities equal. Drawn: the log-probabilities of what vLLM drew are recomputed from plain logits."""
    asked = prompts(tokenizer, 100)
    for i, prompt in enumerate(asked):
        vllm.add(Request(str(i), prompt, 28, temperature, top_p))
    answers = drain(vllm)
    assert len(answers) == 100
    assert sum(answer.finished == "eos" for answer in answers.values()) > 50
    if temperature == 0:
        for i, prompt in enumerate(asked):
            reference.add(Request(str(i), prompt, 28, temperature, top_p))
        expected = drain(reference)
        for name, answer in answers.items():
            assert answer.tokens == expected[name].tokens and answer.finished == expected[name].finished
            assert gap(answer.logprobs, expected[name].logprobs) < 1e-3
        return
    network = load_model("tiny").eval()
    for i, prompt in enumerate(asked):
        answer = answers[str(i)]
        with torch.no_grad():
            logits = network(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
        for row, token, logprob in zip((logits / temperature).log_softmax(-1), answer.tokens, answer.logprobs, strict=True):
            ordered, order = row.exp().sort(descending=True)
            nucleus = order[ordered.cumsum(0) - ordered < top_p]
            assert token in nucleus
            assert logprob == pytest.approx(float(row[token] - row[nucleus].logsumexp(0)), abs=1e-3)


def test_scores_agree_on_a_hundred_prompts(vllm: InThread, reference: Any, tokenizer: Any) -> None:
    for prompt in prompts(tokenizer, 100):
        assert gap(vllm.score(prompt), reference.score(prompt)) < 1e-3


def test_a_request_aborted_and_continued_goes_on_as_if_uncut(vllm: InThread, reference: Any, tokenizer: Any) -> None:
    prompt = prompts(tokenizer, 2)[1]
    vllm.add(Request("it", prompt, 40, temperature=0, ignore_eos=True))
    whole = drain(vllm)["it"]
    cut: dict[str, Answer] = {}
    vllm.add(Request("cut", prompt, 40, temperature=0, ignore_eos=True))
    vllm.add(Request("a", prompt[:3], 40, temperature=0, ignore_eos=True))
    for _ in range(15):
        collect(vllm.step(), cut)
    vllm.abort(["cut", "unknown"])
    assert vllm.unfinished == 1
    head = cut.pop("cut")
    reference.add(Request("cut", prompt + head.tokens, 40 - len(head.tokens), temperature=0, ignore_eos=True))
    on_the_other = drain(reference)["cut"]
    vllm.add(Request("cut", prompt + head.tokens, 40 - len(head.tokens), temperature=0, ignore_eos=True))
    drain(vllm, cut)
    assert len(head.tokens) == 15 and cut["a"].finished == "length"
    assert head.tokens + cut["cut"].tokens == whole.tokens == head.tokens + on_the_other.tokens
    assert gap(head.logprobs + cut["cut"].logprobs, whole.logprobs) < 1e-3


def test_weights_loaded_between_two_steps_count_from_the_next_token_on(vllm: InThread, reference: Any, model: Any, tokenizer: Any,
                                                                       probe: list[int]) -> None:
    asked = prompts(tokenizer, PLACES)
    new = moved(model, 1)
    answers: dict[Any, dict[str, Answer]] = {}
    for engine in (vllm, reference):
        answers[engine] = {}
        for i, prompt in enumerate(asked):
            engine.add(Request(str(i), prompt, 40, temperature=0, ignore_eos=True))
        while not answers[engine] or len(answers[engine]["0"].tokens) < 12:
            collect(engine.step(), answers[engine])
        staging = {name: tensor.clone() for name, tensor in new.items()}
        engine.load(staging)
        for tensor in staging.values():
            tensor.zero_()  # what was loaded is a copy
        drain(engine, answers[engine])
    for name, answer in answers[vllm].items():
        assert answer.tokens == answers[reference][name].tokens  # old keys, new weights: in both alike
        assert gap(answer.logprobs, answers[reference][name].logprobs) < 1e-3
    vllm.load(model.state_dict())
    vllm.add(Request("it", asked[0], 40, temperature=0, ignore_eos=True))
    unmoved = drain(vllm)["it"].tokens
    assert answers[vllm]["0"].tokens[:12] == unmoved[:12] and answers[vllm]["0"].tokens[12:] != unmoved[12:]
    vllm.load(new)
    assert gap(vllm.score(probe), scores_of(new, probe)) < 1e-3


def test_score_sees_new_weights_at_once_and_a_tied_head_left_out(vllm: InThread, model: Any, probe: list[int]) -> None:
    for seed in range(3):
        new = moved(model, seed)
        vllm.load(new.items())
        assert gap(vllm.score(probe), scores_of(new, probe)) < 1e-3
    headless = {name: tensor for name, tensor in moved(model, 9).items() if name != "lm_head.weight"}
    vllm.load(headless)
    assert gap(vllm.score(probe), scores_of(moved(model, 9), probe)) > 0.1


def test_tokens_of_refused_weights_never_leave(vllm: InThread, model: Any, tokenizer: Any, probe: list[int]) -> None:
    asked = prompts(tokenizer, PLACES + 2)  # two wait: no refused weights touch them
    for i, prompt in enumerate(asked):
        vllm.add(Request(str(i), prompt, 40, temperature=0, ignore_eos=True))
    expected = drain(vllm)
    answers: dict[str, Answer] = {}
    for i, prompt in enumerate(asked):
        vllm.add(Request(str(i), prompt, 40, temperature=0, ignore_eos=True))
    for _ in range(7):
        collect(vllm.step(), answers)
    vllm.load({name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()})
    assert gap(vllm.score(probe), scores_of(model.state_dict(), probe)) > 1
    with pytest.raises(RuntimeError, match="held"):
        vllm.load(model.state_dict())
    dropped = vllm.drop_held()
    assert dropped == [str(i) for i in range(PLACES)] and vllm.unfinished == 2
    vllm.load(model.state_dict())
    assert gap(vllm.score(probe), scores_of(model.state_dict(), probe)) < 1e-3
    assert vllm.drop_held() == []
    for name in dropped:
        assert len(answers[name].tokens) == 7
        vllm.add(Request(name, asked[int(name)] + answers[name].tokens, 33, temperature=0, ignore_eos=True))
    drain(vllm, answers)
    assert {name: answer.tokens for name, answer in answers.items()} == {name: answer.tokens for name, answer in expected.items()}


def test_what_comes_up_during_a_score_is_returned_by_the_next_step(vllm: InThread, tokenizer: Any, probe: list[int]) -> None:
    prompt = prompts(tokenizer, 2)[1]
    vllm.add(Request("it", prompt, 20, temperature=0, ignore_eos=True))
    whole = drain(vllm)["it"]
    answers: dict[str, Answer] = {}
    vllm.add(Request("it", prompt, 20, temperature=0, ignore_eos=True))
    collect(vllm.step(), answers)
    vllm.score(probe)
    held = vllm.step()
    assert held and {delta.id for delta in held} == {"it"}
    collect(held, answers)
    vllm.score(probe)
    drain(vllm, answers)
    assert answers["it"].tokens == whole.tokens and answers["it"].finished == "length"
    for told in (True, False):
        vllm.add(Request("it", prompt, 2, temperature=0, ignore_eos=True))
        vllm.step()
        vllm.score(probe)
        assert vllm.unfinished == 1  # its end is held
        with pytest.raises(ConfigError, match="unique"):
            vllm.add(Request("it", prompt, 2))
        if told:
            assert [delta.finished for delta in vllm.step()] == ["length"]
        else:
            vllm.abort(["it"])
            assert vllm.step() == []
        assert vllm.unfinished == 0


def test_what_ends_a_request_is_told_apart_as_by_the_reference(vllm: InThread, reference: Any, tokenizer: Any) -> None:
    prompt = tokenizer.encode("3*7+5-2*4=<", add_special_tokens=False)
    results = []
    for engine in (vllm, reference):
        engine.add(Request("0", prompt, 60, temperature=0))
        engine.add(Request("1", prompt, 60, temperature=0, ignore_eos=True))
        engine.add(Request("2", prompt, 60, temperature=0, stop=["never", "=1+"]))
        engine.add(Request("3", prompt, 60, temperature=0, stop=["<eo"]))
        engine.add(Request("4", prompt, 1000, temperature=0, ignore_eos=True))
        results.append(drain(engine))
    ours, theirs = results
    assert {name: answer.finished for name, answer in ours.items()} == {"0": "eos", "1": "length", "2": "stop", "3": "stop", "4": "length"}
    assert tokenizer.decode(ours["0"].tokens).endswith(tokenizer.eos_token)
    assert tokenizer.decode(ours["2"].tokens).endswith("=1+")
    assert len(ours["1"].tokens) == 60 and len(ours["4"].tokens) == 128 - len(prompt)
    for name in ours:
        assert ours[name].tokens == theirs[name].tokens and ours[name].finished == theirs[name].finished


def test_a_seed_reproduces_whatever_runs_beside(vllm: InThread, tokenizer: Any) -> None:
    prompt, *others = prompts(tokenizer, 6)

    def answer(seed: int | None, company: int) -> list[int]:
        for i in range(company):
            vllm.add(Request(str(i), others[i], 30, seed=i if i else None))
        vllm.add(Request("it", prompt, 30, temperature=1.5, ignore_eos=True, seed=seed))
        return drain(vllm)["it"].tokens

    alone = answer(7, 0)
    assert alone == answer(7, 5)
    assert alone != answer(8, 0)
    assert answer(None, 0) != answer(None, 0)


def test_requests_beyond_the_places_wait_and_prefill_is_told_from_decode(vllm: InThread, probe: list[int]) -> None:
    for i in range(PLACES + 2):
        vllm.add(Request(str(i), probe, 12, ignore_eos=True))
    assert vllm.unfinished == PLACES + 2
    assert len(vllm.step()) == PLACES and not vllm.decoded
    vllm.score(probe)
    held = vllm.step()
    assert held and not any(delta.finished for delta in held)  # it found a place although all were taken
    while vllm.unfinished > 2:
        vllm.step()
        assert vllm.decoded
    assert {delta.id for delta in vllm.step()} == {str(PLACES), str(PLACES + 1)} and not vllm.decoded
    drain(vllm)


def test_a_load_that_does_not_fit_is_refused_and_changes_nothing(vllm: InThread, model: Any, probe: list[int]) -> None:
    before, weights = vllm.score(probe), model.state_dict()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with pytest.raises(WeightsError, match=r"k_proj.weight' of shape \(3, 3\) does not fit the model \(\(64, 128\)\)"):
        vllm.load(zeros | {"model.layers.0.self_attn.k_proj.weight": torch.zeros(3, 3)})
    with pytest.raises(WeightsError, match="model.stranger.weight.*no such name"):
        vllm.load(zeros | {"model.stranger.weight": torch.zeros(3)})
    with pytest.raises(WeightsError, match="1 of .* missing, first .'model.norm.weight'"):
        vllm.load({name: tensor for name, tensor in zeros.items() if name != "model.norm.weight"})
    assert vllm.score(probe) == before


def test_a_request_that_cannot_be_served_names_the_field(vllm: InThread) -> None:
    vllm.add(Request("it", [4], 5))
    for change, message in [({"id": "it"}, "unique"), ({"tokens": [4] * 128}, "must be from 1 to 127"), ({"tokens": [64]}, "from 0 to 63")]:
        with pytest.raises(ConfigError, match=message):
            vllm.add(Request(**{"id": "new", "tokens": [4], "max_tokens": 5} | change))
    assert vllm.unfinished == 1
    drain(vllm)


@pytest.mark.parametrize("kind", ["torch", "vllm"])
def test_engines_in_sequence_do_not_leak(kind: str) -> None:
    program = f"""
import gc, threading, torch
from robustrl.engines.base import Request, make_engine

def megabytes_of_tensors():
    gc.unfreeze()  # vLLM hides its objects from the collector
    gc.collect()
    storages = [found.untyped_storage() for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    return sum({{storage.data_ptr(): storage.nbytes() for storage in storages}}.values()) / 1e6

found = []
for life in range(2):
    engine = make_engine({kind!r}, {TINY!r}, seed=0, max_model_len=1024, max_num_seqs=64, load="dummy")
    for i in range(64):
        engine.add(Request(str(i), [4] * 200, 8, ignore_eos=True))
    for _ in range(4):
        engine.step()
    found.append(megabytes_of_tensors())
    engine.close()
    found.append(megabytes_of_tensors())
print("found", *found, threading.active_count())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    alive, first, _, second, threads = map(float, done.stdout.split("found")[1].split())
    assert alive > first + 10  # MB: weights, and the cache of 64 requests
    assert second < first + 0.5
    assert threads <= 3
