"""The vLLM engine: vLLM's V1 core in this process and thread, stepped by hand.

Weights enter through vLLM's own weight-transfer machinery. Prefix caching is off, so no cached key outlives its weights beyond the requests
that run across a ``load``; scheduling is synchronous, so no step is in flight between two calls. vLLM gets one place more than
``max_num_seqs``, and a priority rule, so that ``score`` never waits for a running request. Settings of the process that vLLM insists on
(environment, thread count, seeds of the global generators, the default process group) are changed: one engine at a time in a process.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection
from typing import Any

from robustrl.engines.base import Delta, Load, Request, Tensors, check_request, check_tensors, check_tokens, set_threads

_SCORE = "score"
_BLOCK = 128
"""Tokens in a block of vLLM's cache on CPUs."""


class VLLMEngine:
    def __init__(self, model: str, *, seed: int, max_model_len: int, max_num_seqs: int, load: Load) -> None:
        _set_environment()
        import torch

        cuda = torch.cuda.is_available()
        if not cuda:
            set_threads()

        from transformers import AutoConfig, AutoModelForCausalLM
        from vllm import EngineArgs, LLMEngine
        from vllm.config.weight_transfer import WeightTransferConfig

        from robustrl.engines import _weights

        device_settings: dict[str, Any] = {}
        if not cuda:
            size = _cache_bytes(model, max_num_seqs + 1, max_model_len)
            device_settings = {"dtype": "float32", "enforce_eager": True, "block_size": _BLOCK, "kv_cache_memory_bytes": size}
        self._engine: Any = LLMEngine.from_engine_args(
            EngineArgs(
                model,
                load_format="dummy" if load == "dummy" else "auto",
                seed=seed,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs + 1,
                enable_prefix_caching=False,
                async_scheduling=False,
                scheduling_policy="priority",
                logprobs_mode="processed_logprobs",
                distributed_executor_backend="uni",
                weight_transfer_config=WeightTransferConfig(backend=_weights.register()),
                disable_log_stats=True,
                **device_settings,
            )
        )
        self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        self._staged = _weights.staged
        with torch.device("meta"):
            self._skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
            """The Hugging Face model without storage: names and shapes that a ``load`` must have."""
        self._vocabulary = self._engine.model_config.get_vocab_size()
        self._max_model_len, self._max_num_seqs = max_model_len, max_num_seqs
        self._waiting: deque[Request] = deque()
        self._running: dict[str, bool] = {}
        """Requests inside vLLM: whether each has a token already."""
        self._held: list[Delta] = []
        self._touched: set[str] = set()
        """Requests that ran under ``score`` since the last ``step``: their keys come from the weights that were scored."""
        self.decoded = False
        self._warm_up()

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(self._inside())

    def add(self, request: Request) -> None:
        in_use = {*self._inside(), *(waiting.id for waiting in self._waiting), _SCORE}
        check_request(request, in_use=in_use, vocabulary=self._vocabulary, max_model_len=self._max_model_len)
        self._waiting.append(request)

    def step(self) -> list[Delta]:
        self._touched.clear()
        if self._held:
            held, self._held = self._held, []
            return held
        self._admit()
        self.decoded = False
        return self._step()[0] if self._running else []

    def abort(self, ids: Collection[str]) -> None:
        self._waiting = deque(request for request in self._waiting if request.id not in ids)
        self._held = [delta for delta in self._held if delta.id not in ids]
        self._touched -= set(ids)
        self._end([name for name in self._running if name in ids])

    def load(self, tensors: Tensors) -> None:
        if self._held:
            raise RuntimeError("load: deltas of the weights before are held; take them with step() or discard them with drop_held()")
        given = dict(tensors)
        check_tensors(given, self._skeleton)
        with self._staged(given) as update_info:
            self._engine.collective_rpc("start_weight_update")
            self._engine.collective_rpc("update_weights", kwargs={"update_info": update_info})
            self._engine.collective_rpc("finish_weight_update")

    def score(self, tokens: list[int]) -> list[float]:
        from vllm import SamplingParams

        check_tokens("tokens", tokens, self._vocabulary, 2, self._max_model_len - 1)
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        self._engine.add_request(_SCORE, {"prompt_token_ids": tokens}, params, priority=-1)
        self._touched |= self._running.keys()
        scores: list[Any] | None = None
        self.decoded = False
        while scores is None:
            deltas, scores = self._step()
            self._held += deltas
        return [position[token].logprob for token, position in zip(tokens[1:], scores[1:], strict=True)]

    def drop_held(self) -> list[str]:
        touched = sorted(self._touched)
        self.abort(touched)
        return touched

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._waiting.clear()
        self._end(list(self._running))
        self._engine.engine_core.shutdown()
        del self._engine
        cleanup_dist_env_and_memory()

    def _inside(self) -> set[str]:
        """Requests given to vLLM whose end was not told yet."""
        return {*self._running, *(delta.id for delta in self._held)}

    def _admit(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        while self._waiting and len(self._running) < self._max_num_seqs:
            request = self._waiting.popleft()
            params = SamplingParams(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                stop=request.stop,
                include_stop_str_in_output=True,
                skip_special_tokens=False,
                detokenize=bool(request.stop),
                ignore_eos=request.ignore_eos,
                seed=request.seed,
                logprobs=0,
                output_kind=RequestOutputKind.DELTA,
            )
            self._engine.add_request(request.id, {"prompt_token_ids": request.tokens}, params)
            self._running[request.id] = False

    def _step(self) -> tuple[list[Delta], list[Any] | None]:
        """One step of vLLM: the deltas, and the prompt's log-probabilities if the ``score`` request came out with it."""
        deltas: list[Delta] = []
        scores = None
        for output in self._engine.step():
            if output.request_id == _SCORE:
                scores = output.prompt_logprobs
                continue
            part = output.outputs[0]
            tokens = list(part.token_ids)
            logprobs = [position[token].logprob for token, position in zip(tokens, part.logprobs, strict=True)]
            finished = _finished(output.request_id, part) if output.finished else None
            deltas.append(Delta(output.request_id, tokens, logprobs, finished))
            self.decoded |= self._running[output.request_id]
            self._running[output.request_id] = True
            if finished:
                del self._running[output.request_id]
        return deltas, scores

    def _end(self, ids: list[str]) -> None:
        self._engine.abort_request(ids)
        for name in ids:
            del self._running[name]

    def _warm_up(self) -> None:
        """Runs every kind of step once: what vLLM compiles at first use must not look like a stall later."""
        for seed in (None, 0):
            self.add(Request(f"warm-up-{seed}", [0, 0], 2, top_p=0.9, ignore_eos=True, seed=seed))
        self.add(Request("warm-up-greedy", [0, 0], 2, temperature=0, ignore_eos=True))
        while self.unfinished:
            self.step()
        self.score([0, 0])
        self.decoded = False


def _finished(name: str, part: Any) -> Any:
    if part.finish_reason == "length":
        return "length"
    if part.finish_reason == "stop":
        return "stop" if isinstance(part.stop_reason, str) else "eos"
    raise RuntimeError(f"request {name}: vLLM ended it with {part.finish_reason!r}; 'stop' or 'length' was expected")


def _set_environment() -> None:
    """Before the first import of vllm. In-process is what stepping by hand needs; the rest may be set otherwise by the user."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}.items():
        os.environ.setdefault(name, value)


def _cache_bytes(model: str, sequences: int, max_model_len: int) -> int:
    """Bytes of an fp32 key/value cache in which ``sequences`` of full length fit; above 4 GiB, that or two of them (vLLM then preempts)."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block = _BLOCK * config.num_hidden_layers * 2 * heads * head_dim * 4
    sequence = -(-max_model_len // _BLOCK) * block
    return max(min(sequences * sequence, 4 << 30), 2 * sequence) + block
