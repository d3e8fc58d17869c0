"""The interface between a rollout and the engine that generates its tokens.

What every engine promises:

- It is stepped by its owner: nothing moves between two calls. All calls come from the thread that made it; that need not be the main one.
- Requests are token ids in, tokens out as they come. A request continued elsewhere from prompt + tokens so far goes on as if it had not
  been cut: greedy text is equal. (A seeded request starts its random stream anew, and a stop string is not found across the cut.)
- ``load`` swaps all weights between two steps; running requests keep their cache and go on with the new weights. So each token that
  ``step`` returns was sampled from exactly one version's weights.
- Log-probabilities in a ``Delta`` are those of the distribution that the token was drawn from, temperature and top_p applied: the behaviour
  log-probabilities of an importance ratio. Greedy requests (temperature 0) give the raw ones (temperature 1, all tokens).

Left out: chat templates, versions and their checks (the rollout's), transport (robustrl/transport).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from robustrl.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    import torch

GREEDY_BELOW = 1e-5
"""Temperatures below it mean greedy (vLLM's own bound)."""

Tensors = Mapping[str, "torch.Tensor"] | Iterable[tuple[str, "torch.Tensor"]]
Load = Literal["dummy", "model"]


class Request(msgspec.Struct, frozen=True):
    id: str
    tokens: list[int]
    """The prompt, at least one token."""
    max_tokens: int
    """Tokens to generate at most; the engine's ``max_model_len`` bounds prompt + generated as well."""
    temperature: float = 1.0
    top_p: float = 1.0
    stop: list[str] = []
    """Texts that end the generation; the tokens that complete one are part of the answer."""
    ignore_eos: bool = False
    seed: int | None = None
    """Own random stream of this request; None: the engine's."""


class Delta(msgspec.Struct, frozen=True):
    """What one request gained."""

    id: str
    tokens: list[int]
    logprobs: list[float]
    finished: Literal["eos", "stop", "length"] | None
    """``eos``: the end token, which is the last of ``tokens``; ``stop``: a stop string; ``length``: max_tokens or max_model_len."""


class Engine(Protocol):
    decoded: bool
    """Whether the last ``step`` (or the steps under ``score``) gave a token to a request that had one already; False: prefill only."""

    @property
    def unfinished(self) -> int:
        """Requests added and neither finished nor aborted. Those beyond ``max_num_seqs`` wait their turn inside."""

    def add(self, request: Request) -> None:
        """Raises ConfigError for values that cannot be served and for an id that is in use."""

    def step(self) -> list[Delta]:
        """One engine step: at most one token for each running request, several only where ``score`` held some back; [] if nothing is
        unfinished. An id can occur more than once: append in order."""

    def abort(self, ids: Collection[str]) -> None:
        """Ends these requests and discards what is held of them; ids that are not unfinished are ignored."""

    def load(self, tensors: Tensors) -> None:
        """Replaces all weights: names and shapes of the Hugging Face state dict, a tied ``lm_head.weight`` included (vLLM answers with
        garbage without it, which ``score`` shows). The tensors are copied. Raises WeightsError, and changes nothing, if one is missing,
        unknown or of another shape; RuntimeError while deltas are held, since they belong to the weights before."""

    def score(self, tokens: list[int]) -> list[float]:
        """log p(tokens[i] | tokens[:i]) for i >= 1, at temperature 1, from the weights as they are: len(tokens) - 1 values.
        2 <= len(tokens) < max_model_len, else ConfigError. Other requests may go on meanwhile: ``step`` returns their deltas first."""

    def drop_held(self) -> list[str]:
        """Undoes ``score`` for a refused version: discards the held deltas and ends every request that the refused weights touched.
        Returns the ids so ended; their owner loads the weights before and adds them again from the tokens that it has."""

    def close(self) -> None:
        """Frees the engine's memory; nothing may be called after it."""


def make_engine(kind: str, model: str, *, seed: int, max_num_seqs: int, max_model_len: int | None = None, load: Load = "dummy") -> Engine:
    """An engine for the Hugging Face model folder ``model``.

    ``load="dummy"`` gives it the architecture without the weights, which come by ``load()`` later. At most ``max_num_seqs`` requests run at
    once, each of ``max_model_len`` tokens at most (None: the model's positions). fp32 on a CPU, the model's own dtype on a GPU.
    """
    if kind not in ("vllm", "torch"):
        raise ConfigError("engine", kind, "must be 'vllm' or 'torch'")
    if load not in ("dummy", "model"):
        raise ConfigError("load", load, "must be 'dummy' or 'model'")
    if max_num_seqs < 1:
        raise ConfigError("max_num_seqs", max_num_seqs, "must be at least 1")
    max_model_len = _model_len(model, max_model_len)
    if kind == "vllm":
        from robustrl.engines.vllm import VLLMEngine

        return VLLMEngine(model, seed=seed, max_model_len=max_model_len, max_num_seqs=max_num_seqs, load=load)
    from robustrl.engines.torch import TorchEngine

    return TorchEngine(model, seed=seed, max_model_len=max_model_len, max_num_seqs=max_num_seqs, load=load)


def _model_len(model: str, wanted: int | None) -> int:
    from transformers import AutoConfig

    positions = AutoConfig.from_pretrained(model).get_text_config(decoder=True).max_position_embeddings
    if wanted is not None and not 2 <= wanted <= positions:
        raise ConfigError("max_model_len", wanted, f"must be from 2 to {positions}, the positions of the model")
    return wanted or positions


def check_tokens(field: str, tokens: list[int], vocabulary: int, shortest: int, longest: int) -> None:
    if not shortest <= len(tokens) <= longest:
        raise ConfigError(f"len({field})", len(tokens), f"must be from {shortest} to {longest}")
    wrong = [token for token in tokens if not 0 <= token < vocabulary]
    if wrong:
        raise ConfigError(field, wrong[:5], f"token ids must be from 0 to {vocabulary - 1}")


def check_request(request: Request, *, in_use: Collection[str], vocabulary: int, max_model_len: int) -> None:
    """Raises ConfigError that names the field, the value and what is allowed."""
    if request.id in in_use:
        raise ConfigError("id", request.id, "is the id of an unfinished request; ids must be unique")
    check_tokens("tokens", request.tokens, vocabulary, 1, max_model_len - 1)
    if request.max_tokens < 1:
        raise ConfigError("max_tokens", request.max_tokens, "must be at least 1")
    if not 0 <= request.temperature < float("inf"):
        raise ConfigError("temperature", request.temperature, "must be at least 0")
    if not 0 < request.top_p <= 1:
        raise ConfigError("top_p", request.top_p, "must be above 0 and at most 1")
    if "" in request.stop:
        raise ConfigError("stop", request.stop, "must hold no empty text")


def check_tensors(given: Mapping[str, torch.Tensor], network: torch.nn.Module) -> None:
    """Raises WeightsError unless ``given`` fills ``network``: no name or shape that it lacks; of tied tensors the first will do."""
    own = network.state_dict()
    for name, tensor in given.items():
        if name not in own or own[name].shape != tensor.shape:
            wanted = tuple(own[name].shape) if name in own else "no such name"
            raise WeightsError(f"load: tensor {name!r} of shape {tuple(tensor.shape)} does not fit the model ({wanted})")
    first_names = {name for name, _ in (*network.named_parameters(), *network.named_buffers())}
    missing = [name for name in own if name in first_names and name not in given]
    if missing:
        raise WeightsError(f"load: {len(missing)} of {len(own)} tensors missing, first {missing[:3]}")


def set_threads() -> None:
    """One intra-op thread unless ``OMP_NUM_THREADS`` says otherwise: several processes share the cores. Acts on the calling thread."""
    import os

    threads = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))

    import torch

    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
