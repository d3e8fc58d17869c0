"""Entry point of vLLM's plugin group ``vllm.general_plugins``: makes the weight-transfer backend ``ucx`` known in each vLLM process."""

from __future__ import annotations

BACKEND = "ucx"
_MODULE = "robustrl.transport.vllm_backend"


def register() -> None:
    """Idempotent, as vLLM asks of plugins; the engine's module is imported when the backend is used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _MODULE, "UCXWeightTransferEngine")
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, _MODULE, "UCXTrainerWeightTransferEngine")
