"""The reference engine: a plain generation loop on transformers with a batched key/value cache.

It shares no code with vLLM, which makes it a cross-check of log-probabilities, and it is light enough for small containers. Requests sit in
one left-padded batch: new ones are prefilled together (a step of its own) and joined to it, finished ones leave it at once. It copies the
cache where a paged engine would not, and serves models whose cache is keys and values of every position (no state-space layers).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any, Literal

import torch
from torch.nn.functional import pad

from robustrl.engines.base import GREEDY_BELOW, Delta, Load, Request, Tensors, check_request, check_tensors, check_tokens, set_threads

_PREFILL_TOKENS = 4096
"""Padded prompt tokens in one prefill step, at most (a single longer prompt goes alone)."""


class _Row:
    """A request and what it has so far."""

    def __init__(self, request: Request, tokenizer: Any, device: torch.device) -> None:
        self.request = request
        self.generated = 0
        self.generator = None if request.seed is None else torch.Generator(device).manual_seed(request.seed)
        self._tokenizer: Any = tokenizer.backend_tokenizer if request.stop else None
        self._tail = ""
        if request.stop:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(ids=request.tokens, skip_special_tokens=False)

    def stops_with(self, token: int) -> bool:
        """Whether this token completes a stop string in the generated text."""
        if not self.request.stop:
            return False
        piece = self._stream.step(self._tokenizer, token) or ""
        text = self._tail + piece
        self._tail = text[-max(map(len, self.request.stop)) :]
        return any(stop in text for stop in self.request.stop)


class TorchEngine:
    def __init__(self, model: str, *, seed: int, max_model_len: int, max_num_seqs: int, load: Load) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

        cuda = torch.cuda.is_available()
        if not cuda:
            set_threads()
        config = AutoConfig.from_pretrained(model)
        dtype = "auto" if cuda else torch.float32
        if load == "model":
            network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        else:
            network = AutoModelForCausalLM.from_config(config, dtype=config.dtype if cuda else torch.float32)
        self._device = torch.device("cuda" if cuda else "cpu")
        self._network = network.to(self._device).eval().requires_grad_(False)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        try:
            eos = GenerationConfig.from_pretrained(model).eos_token_id
        except OSError:  # a model folder need not have one
            eos = config.eos_token_id
        self._eos = {self._tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
        self._vocabulary = config.get_text_config(decoder=True).vocab_size
        self._max_model_len, self._max_num_seqs = max_model_len, max_num_seqs
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._cache: Any = None
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=self._device)
        """1 where the cache holds a token, 0 where it is padding; rows x positions."""
        self._last: list[int] = []
        """The newest token of each row, not in the cache yet."""
        self.decoded = False

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(self._rows)

    def add(self, request: Request) -> None:
        in_use = {row.request.id for row in (*self._waiting, *self._rows)}
        check_request(request, in_use=in_use, vocabulary=self._vocabulary, max_model_len=self._max_model_len)
        self._waiting.append(_Row(request, self._tokenizer, self._device))

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        self.decoded = False
        if self._waiting and len(self._rows) < self._max_num_seqs:
            return self._advance(*self._prefill())
        if self._rows:
            self.decoded = True
            return self._advance(0, self._decode())
        return []

    def abort(self, ids: Collection[str]) -> None:
        self._waiting = deque(row for row in self._waiting if row.request.id not in ids)
        self._keep([i for i, row in enumerate(self._rows) if row.request.id not in ids])

    @torch.no_grad()
    def load(self, tensors: Tensors) -> None:
        given, own = dict(tensors), self._network.state_dict()
        check_tensors(given, self._network)
        for name, tensor in given.items():
            own[name].copy_(tensor)

    @torch.inference_mode()
    def score(self, tokens: list[int]) -> list[float]:
        check_tokens("tokens", tokens, self._vocabulary, 2, self._max_model_len - 1)
        ids = torch.tensor([tokens], device=self._device)
        logprobs = self._network(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()

    def drop_held(self) -> list[str]:
        return []  # score() runs beside the batch: nothing is held, no request was touched

    def close(self) -> None:
        self._waiting.clear()
        self._keep([])
        del self._network

    def _prefill(self) -> tuple[int, torch.Tensor]:
        """Takes waiting requests into the batch. Returns the index of the first new row and the new rows' logits."""
        new: list[_Row] = []
        width = 0
        while self._waiting and len(self._rows) + len(new) < self._max_num_seqs:
            widest = max(width, len(self._waiting[0].request.tokens))
            if new and widest * (len(new) + 1) > _PREFILL_TOKENS:
                break
            width = widest
            new.append(self._waiting.popleft())
        lengths = [len(row.request.tokens) for row in new]
        ids = torch.tensor([[0] * (width - n) + row.request.tokens for row, n in zip(new, lengths, strict=True)], device=self._device)
        mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths], device=self._device)

        from transformers import DynamicCache

        cache = DynamicCache()
        logits = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)
        if self._rows:
            self._join(cache, mask)
        else:
            self._cache, self._mask = cache, mask
        self._rows += new
        self._last += [0] * len(new)
        return len(self._rows) - len(new), logits

    def _decode(self) -> torch.Tensor:
        position = self._mask.sum(-1, keepdim=True)
        self._mask = pad(self._mask, (0, 1), value=1)
        return self._forward(torch.tensor(self._last, device=self._device)[:, None], self._mask, position, self._cache)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits of the last position, rows x vocabulary, fp32; the cache grows by ``ids``."""
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        return self._network(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1].float()

    def _advance(self, first: int, logits: torch.Tensor) -> list[Delta]:
        """Samples one token for each row from ``first`` on, and removes the rows that end with it."""
        tokens, logprobs = _sample(logits, self._rows[first:], self._generator)
        deltas = []
        for i, (row, token, logprob) in enumerate(zip(self._rows[first:], tokens, logprobs, strict=True), first):
            row.generated += 1
            self._last[i] = token
            deltas.append(Delta(row.request.id, [token], [logprob], self._finished(row, token)))
        ended = {i for i, delta in enumerate(deltas, first) if delta.finished}
        if ended:
            self._keep([i for i in range(len(self._rows)) if i not in ended])
        return deltas

    def _finished(self, row: _Row, token: int) -> Literal["eos", "stop", "length"] | None:
        request = row.request
        if row.stops_with(token):
            return "stop"
        if token in self._eos and not request.ignore_eos:
            return "eos"
        if row.generated >= request.max_tokens or len(request.tokens) + row.generated >= self._max_model_len:
            return "length"
        return None

    def _join(self, cache: Any, mask: torch.Tensor) -> None:
        width = max(self._mask.shape[1], mask.shape[1])
        left, right = width - self._mask.shape[1], width - mask.shape[1]
        for layer, new in zip(self._cache.layers, cache.layers, strict=True):
            layer.keys = torch.cat([pad(layer.keys, (0, 0, left, 0)), pad(new.keys, (0, 0, right, 0))])
            layer.values = torch.cat([pad(layer.values, (0, 0, left, 0)), pad(new.values, (0, 0, right, 0))])
        self._mask = torch.cat([pad(self._mask, (left, 0)), pad(mask, (right, 0))])

    def _keep(self, indices: list[int]) -> None:
        if len(indices) == len(self._rows):
            return
        self._rows = [self._rows[i] for i in indices]
        self._last = [self._last[i] for i in indices]
        if not indices:
            self._cache, self._mask = None, self._mask[:0, :0]
            return
        rows = torch.tensor(indices, device=self._device)
        mask = self._mask[rows]
        start = mask.shape[1] - int(mask.sum(-1).max())  # columns that only the removed rows used
        self._mask = mask[:, start:]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[rows, :, start:], layer.values[rows, :, start:]


def _sample(logits: torch.Tensor, rows: list[_Row], shared: torch.Generator) -> tuple[list[int], list[float]]:
    """One token for each row of ``logits`` and its log-probability in the distribution that it was drawn from."""
    temperature = torch.tensor([row.request.temperature for row in rows], device=logits.device)
    greedy = temperature < GREEDY_BELOW
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    if any(row.request.top_p < 1 for row in rows):
        top_p = torch.where(greedy, 1.0, torch.tensor([row.request.top_p for row in rows], device=logits.device))
        ordered, order = scaled.sort(dim=-1, descending=True)
        probability = ordered.softmax(-1)
        outside = probability.cumsum(-1) - probability >= top_p[:, None]  # all mass before this token: the set is complete without it
        outside[:, 0] = False
        outside &= (top_p < 1)[:, None]
        scaled = scaled.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), float("-inf"))
    logprobs = scaled.log_softmax(-1)
    noise = torch.empty_like(logprobs).exponential_(generator=shared)
    for i, row in enumerate(rows):
        if row.generator is not None:
            noise[i].exponential_(generator=row.generator)
    drawn = (logprobs.exp() / noise).argmax(-1)  # the exponential form of Gumbel-max
    chosen = torch.where(greedy, logits.argmax(-1), drawn)
    return chosen.tolist(), logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
