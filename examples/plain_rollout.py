"""A plain vLLM script, without Ray and without a Job: it pulls each weight version from a plain torch trainer over UCX.

Run it first, then plain_trainer.py with the same socket and secret file. ``robustrl`` is installed, so vLLM knows the backend ``ucx``.

    head -c 32 /dev/urandom > secret && chmod 600 secret
    python examples/plain_rollout.py --socket /tmp/weights.sock --secret secret &
    python examples/plain_trainer.py --socket /tmp/weights.sock --secret secret
"""

from __future__ import annotations

import argparse
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from robustrl.rl.models import resolve_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--model", default="tiny")
    arguments = parser.parse_args()

    from vllm import LLM, SamplingParams
    from vllm.config.weight_transfer import WeightTransferConfig

    from robustrl.transport.vllm_backend import check_probe

    llm = LLM(resolve_model(arguments.model), load_format="dummy", dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=8,
              enable_prefix_caching=False, kv_cache_memory_bytes=64 << 20, weight_transfer_config=WeightTransferConfig(backend="ucx"))
    update: dict[str, Any] = {}
    with Listener(arguments.socket, "AF_UNIX", authkey=Path(arguments.secret).read_bytes()) as listener, listener.accept() as trainer:
        while True:
            call, payload = trainer.recv()
            try:
                if call == "init_weight_transfer_engine":
                    llm.init_weight_transfer_engine({"init_info": payload})
                elif call == "start_weight_update":
                    llm.start_weight_update()
                elif call == "update_weights":
                    update = payload
                    llm.update_weights({"update_info": payload})
                elif call == "finish_weight_update":
                    llm.finish_weight_update(payload)
                    gap = check_probe(llm, update)
                    text = llm.generate(["3*7+5-2*4="], SamplingParams(max_tokens=24, temperature=0), use_tqdm=False)[0].outputs[0].text
                    print(f"version {payload}: gap {gap:.1e}, 3*7+5-2*4={text}", flush=True)
                else:
                    trainer.send("")
                    return
            except Exception as error:  # the trainer has to know
                trainer.send(f"{type(error).__name__}: {error}")
            else:
                trainer.send("")


if __name__ == "__main__":
    main()
