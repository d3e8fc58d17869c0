"""A vLLM weight-transfer backend that takes tensors from a table of this process.

Beside the backend ``ucx`` of transport/vllm_backend.py, and not instead of it: that one pulls inside ``update_weights``, while vLLM stands
still. In a job the rollout has pulled and checked the version beside the running engine before, may have it from a relay, and may refuse
it after the probe; what is left for the engine is to load tensors that are there, and a test without UCX can do the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NAME = "robustrl-staged"
_table: dict[str, Mapping[str, torch.Tensor]] = {}


@contextmanager
def staged(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """Gives the ``update_info`` for vLLM's ``update_weights``, valid inside the block."""
    _table["staged"] = tensors
    try:
        yield {"key": "staged"}
    finally:
        del _table["staged"]


def register() -> str:
    """Makes the backend known to vLLM, once in a process; returns its name."""
    from dataclasses import dataclass

    from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    if _NAME in WeightTransferEngineFactory._registry:
        return _NAME

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        pass

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        key: str

    class Staged(WeightTransferEngine):
        init_info_cls, update_info_cls = InitInfo, UpdateInfo

        def init_transfer_engine(self, init_info: Any) -> None:
            pass

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Any) -> None:
            self.model.load_weights(_table[update_info.key].items())

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine(_NAME, Staged)
    return _NAME
