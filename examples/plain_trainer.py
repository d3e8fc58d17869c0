"""A plain torch trainer that serves its weights to plain_rollout.py over UCX, without Ray and without a Job. See there how to run it.

``--forget-tied-head`` lists named_parameters, which leave the tied lm_head.weight out: vLLM loads that in silence and answers with garbage;
the probe check turns it into an error.
"""

from __future__ import annotations

import argparse
import time
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from robustrl.rl.models import load_model, load_tokenizer
from robustrl.transport import vllm_plugin
from robustrl.transport.vllm_backend import StateDictSource, UCXTrainerInitInfo


class Rollout:
    """vLLM's VLLMWeightSyncClient over a socket; it could as well be vLLM's own HTTP client."""

    def __init__(self, address: str, secret: bytes, patience: float = 120.0) -> None:
        end = time.monotonic() + patience
        while not Path(address).exists():
            if time.monotonic() > end:
                raise TimeoutError(f"no rollout at {address} after {patience:g} s")
            time.sleep(0.1)
        self._connection = Client(address, "AF_UNIX", authkey=secret)

    def _call(self, name: str, payload: Any = None) -> None:
        self._connection.send((name, payload))
        if problem := self._connection.recv():
            raise RuntimeError(f"{name}: {problem}")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version)

    def close(self) -> None:
        self._call("close")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--forget-tied-head", action="store_true")
    arguments = parser.parse_args()

    model, tokens = load_model(arguments.model), load_tokenizer(arguments.model)("3*7+5-2*4=6")["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def logprobs() -> torch.Tensor:
        """Of each token of the prompt but the first."""
        scores = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return scores.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]

    def probe() -> tuple[list[int], list[float]]:
        with torch.no_grad():
            return tokens, logprobs().tolist()

    vllm_plugin.register()
    rollout = Rollout(arguments.socket, Path(arguments.secret).read_bytes())
    source = ModuleSource(model) if arguments.forget_tied_head else StateDictSource(model)
    info = UCXTrainerInitInfo(arguments.secret, probe=probe, rank=0)
    sender = WeightTransferTrainerFactory.trainer_init(info, client=rollout, source=source)
    try:
        for step in range(arguments.steps):
            optimizer.zero_grad()
            loss = -logprobs().mean()
            loss.backward()
            optimizer.step()
            began = time.monotonic()
            sender.send_weights()
            print(f"step {step + 1}: loss {loss.item():.3f}, weights sent in {time.monotonic() - began:.2f} s", flush=True)
    finally:
        rollout.close()
        sender.shutdown()


if __name__ == "__main__":
    main()
