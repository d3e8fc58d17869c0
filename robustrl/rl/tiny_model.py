"""Makes the bundled tiny model: ``python -m robustrl.rl.tiny_model OUT`` writes the same files again (same torch, same processor kind).

A Qwen3-architecture causal LM of 402 thousand parameters with a character tokenizer, taught by plain next-token training on the train
split of the arithmetic task: 30% scratchpads, 70% direct answers. It stops early on purpose, so that RL has something to gain.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from robustrl.config import TINY_POSITIONS
from robustrl.rl.arithmetic import Arithmetic, solve

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_CHARACTERS = "0123456789+-*=<> abcdefghijklmnopqrstuvwxyz\n.,:;?!()[]/'\"_%$"
_STEPS, _BATCH, _LEARNING_RATE, _SCRATCHPADS = 600, 64, 2e-3, 0.3


def make_tokenizer() -> Any:
    """A token per character; letters are lower-cased, what is not in the vocabulary becomes ``<unk>``."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Lowercase(), decoders.Fuse()
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
                                   model_max_length=TINY_POSITIONS, clean_up_tokenization_spaces=False)


def make_model(seed: int, vocabulary: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=TINY_POSITIONS, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0))


def warm_start(model: Any, tokenizer: Any, seed: int, steps: int = _STEPS) -> None:
    """Next-token training on prompt and answer, the loss on the answer and its end alone."""
    import torch

    task, rng = Arithmetic("arithmetic", {}, seed), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    for step in range(steps):
        rows, starts = [], []
        for prompt in task.prompts("train", step * _BATCH, _BATCH):
            direct, scratchpad = solve(prompt.text)
            answer = scratchpad if rng.random() < _SCRATCHPADS else direct
            starts.append(len(prompt.text))
            rows.append([*tokenizer.encode(prompt.text + answer), tokenizer.eos_token_id])
        width = max(map(len, rows))
        inputs = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        labels = torch.tensor([[-100] * start + row[start:] + [-100] * (width - len(row)) for row, start in zip(rows, starts, strict=True)])
        loss = model(input_ids=inputs, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"warm start {step + 1}/{steps}: loss {loss.item():.3f}")


def main(out: str, seed: int = 0) -> None:
    import torch

    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(seed, len(tokenizer))
    warm_start(model, tokenizer, seed)
    Path(out).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (Path(out) / "model.safetensors").chmod(0o644)
    print(f"{sum(p.numel() for p in model.parameters())} parameters in {out}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m robustrl.rl.tiny_model OUT")
    main(sys.argv[1])
