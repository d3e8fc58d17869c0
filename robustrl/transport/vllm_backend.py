"""vLLM's weight-transfer backend ``ucx``: a plain vLLM script pulls versions from a plain torch trainer, without Ray and without a Job.

Both sides follow vLLM's base classes: the trainer is built by ``WeightTransferTrainerFactory.trainer_init(UCXTrainerInitInfo(...))`` and
sends by ``send_weights()``; the worker's engine is chosen by ``WeightTransferConfig(backend="ucx")``. Each version is complete and checked
before vLLM's model is touched. ``check_probe`` then compares log-probabilities, because vLLM loads a state dict without its tied head in
silence and answers with garbage. Leaves out relays and recovery: a worker here knows one source, the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from robustrl.core.weights import Ask, Lease
from robustrl.errors import WeightsError
from robustrl.transport import wire
from robustrl.transport.manifest import Layout, build_manifest, fill, layout_of, tensors
from robustrl.transport.puller import Puller
from robustrl.transport.server import WeightServer

_TRAINER = "trainer-0"


@dataclass
class UCXInitInfo(WeightTransferInitInfo):
    """Where the trainer serves, and the file (mode 0600) with the secret that both know."""

    host: str
    port: int
    secret_file: str
    incarnation: int = 1
    deadline_seconds: float = 120.0


@dataclass
class UCXUpdateInfo(WeightTransferUpdateInfo):
    """Which version to pull. The probe is for ``check_probe``, in the process that drives vLLM."""

    version: int
    digest: str
    nbytes: int
    chunks: int
    probe_tokens: list[int] = field(default_factory=list)
    probe_logprobs: list[float] = field(default_factory=list)


class UCXWeightTransferEngine(WeightTransferEngine[UCXInitInfo, UCXUpdateInfo]):
    """In each vLLM worker: pulls the whole version, then loads it."""

    init_info_cls, update_info_cls = UCXInitInfo, UCXUpdateInfo
    _info: UCXInitInfo
    _puller: Puller | None = None
    _loading = False

    def init_transfer_engine(self, init_info: UCXInitInfo) -> None:
        self.shutdown()
        self._info = init_info
        role = f"vllm-{self.parallel_config.rank}"
        self._puller = Puller(wire.read_secret(init_info.secret_file), role=role, incarnation=1)

    def start_weight_update(self) -> None:
        """Nothing yet: the model stays as it is until a complete version is here."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Raises WeightsError, before any weight is changed, if the version cannot be had complete and checked within the deadline."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UCXUpdateInfo) -> None:
        if self._puller is None:
            raise WeightsError("backend ucx: update_weights came before init_weight_transfer_engine")
        info = self._info

        def trainer(ask: Ask) -> Lease:
            return Lease(id=0, puller=ask.puller, puller_incarnation=1, source=_TRAINER, incarnation=info.incarnation,
                         address=(info.host, info.port), version=update_info.version, digest=update_info.digest, nbytes=update_info.nbytes,
                         start=0, stop=update_info.chunks, expires=float("inf"))

        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        pulled = self._puller.pull(trainer, deadline_s=info.deadline_seconds)
        initialize_layerwise_reload(self.model)
        self._loading = True
        self.model.load_weights(tensors(pulled.manifest, pulled.buffer))
        self._puller.recycle(pulled.buffer)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._loading:
            finalize_layerwise_reload(self.model, self.model_config)
            self._loading = False

    def shutdown(self) -> None:
        if self._puller is not None:
            self._puller.close()
            self._puller = None


class StateDictSource(WeightSource):
    """A module's state dict as vLLM's WeightSource. vLLM's own ModuleSource lists named_parameters, which leave a tied head out."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._module.state_dict().items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._module.state_dict().items()


@dataclass
class UCXTrainerInitInfo(TrainerInitInfo):
    """``host``: the IP of this machine that vLLM's workers reach. ``probe``: gives a prompt and the log-probabilities of all its tokens but
    the first under the present weights; asked once per version."""

    backend: ClassVar[str] = "ucx"
    secret_file: str
    host: str = "127.0.0.1"
    incarnation: int = 1
    probe: Callable[[], tuple[list[int], list[float]]] | None = None


class UCXTrainerWeightTransferEngine(TrainerWeightTransferEngine[UCXTrainerInitInfo]):
    """In the trainer: copies the source's tensors into one buffer per version and serves it while vLLM pulls."""

    init_info_cls = UCXTrainerInitInfo

    def __init__(self, info: UCXTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource) -> None:
        super().__init__(client=client, source=source, is_sender=info.rank == 0)
        self._info, self.version = info, 0
        self._layout: Layout | None = None
        self._buffer = np.empty(0, np.uint8)
        self._server: WeightServer | None = None
        if self.is_sender:
            secret = wire.read_secret(info.secret_file)
            self._server = WeightServer(info.host, secret, role=_TRAINER, incarnation=info.incarnation)

    @classmethod
    def trainer_init(cls, init_info: UCXTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None) -> Self:
        if source is None:
            raise ValueError("backend ucx: trainer_init needs a WeightSource, e.g. StateDictSource(model)")
        engine = cls(init_info, client=client, source=source)
        if engine._server is not None:
            host, port = engine._server.address
            client.init_weight_transfer_engine({"host": host, "port": port, "secret_file": init_info.secret_file,
                                                "incarnation": init_info.incarnation})
        return engine

    def send_weights(self) -> None:
        """The next version, loaded by vLLM when this returns. Every rank iterates the source; rank 0 serves."""
        assert self.source is not None
        named = dict(self.source)
        if self._server is None:
            return
        if self._layout is None:
            self._layout = layout_of(named)
            self._buffer = np.empty(self._layout.nbytes, np.uint8)
        self._server.retire(self.version)
        self.version += 1
        fill(self._layout, named, self._buffer)
        tokens, logprobs = self._info.probe() if self._info.probe else ([], [])
        manifest = build_manifest(self.version, self._layout, self._buffer, probe_tokens=tokens, probe_logprobs=logprobs)
        self._server.stage(manifest, self._buffer)
        self.client.start_weight_update()
        self.client.update_weights({"version": manifest.version, "digest": manifest.digest, "nbytes": manifest.nbytes,
                                    "chunks": len(manifest.chunks), "probe_tokens": tokens, "probe_logprobs": logprobs})
        self.client.finish_weight_update(str(self.version))

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def check_probe(llm: Any, update_info: dict[str, Any], limit: float = 1e-3) -> float:
    """Largest difference between vLLM's and the trainer's log-probabilities of the version's probe prompt, in the process of the ``LLM``.

    Raises WeightsError if it is above ``limit`` (right for fp32 on both sides) or not a number: do not serve these weights.
    """
    from vllm import SamplingParams

    tokens, expected = update_info["probe_tokens"], update_info["probe_logprobs"]
    if not tokens:
        raise WeightsError(f"version {update_info['version']}: its trainer sent no probe prompt to check it with")
    parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    scored = llm.generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)[0].prompt_logprobs
    found = [position[token].logprob for token, position in zip(tokens[1:], scored[1:], strict=True)]
    gaps = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    gap = max(gaps) if all(map(math.isfinite, gaps)) else math.inf
    if gap > limit:
        raise WeightsError(f"version {update_info['version']}: log-probabilities of the probe prompt differ by {gap:.2g}, allowed is "
                           f"{limit:g}; is a tied tensor missing in the source?")
    return gap
