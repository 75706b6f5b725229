"""Prefill of a pruned Qwen2.5 with random weights against the dense one, by transformers.

python examples/sparse_prefill.py --tokens 4096

The feed-forward layers are pruned to 90 % in blocks of 64. Dense attention, one prompt. Weights are
random, so the text means nothing: what is shown are time, memory, and that pruned and masked dense
models agree. Without a GPU, or with --tiny, a small configuration runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sparsetile.nn import SparseConfig, densify_, sparsify_

FULL = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip
TINY = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Seconds and bytes of both models, and how far their logits are apart."""

    dense_seconds: float
    sparse_seconds: float
    dense_bytes: int
    sparse_bytes: int
    difference: float


def model_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(part.nbytes for part in (*model.parameters(), *model.buffers()))


@torch.inference_mode()
def prefill(model: nn.Module, tokens: torch.Tensor, repeats: int = 3) -> tuple[float, torch.Tensor]:
    """Seconds of the fastest of some prefills, and the logits of the last token."""
    seconds, logits = [], torch.empty(0)
    for _ in range(repeats + 1):  # the first one compiles and plans
        if tokens.is_cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        logits = model(tokens, use_cache=False, logits_to_keep=1).logits
        if tokens.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:]), logits.float()


def main(words: Sequence[str] | None = None) -> Outcome:
    """Run the example; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(words)
    try:
        from transformers import Qwen2Config, Qwen2ForCausalLM
    except ImportError:
        raise SystemExit(
            "sparse_prefill: transformers must be installed, got none. "
            "Run pip install transformers."
        ) from None
    on_gpu = torch.cuda.is_available()
    sizes = dict(TINY if given.tiny or not on_gpu else FULL)
    if given.layers:
        sizes["num_hidden_layers"] = given.layers
    config = Qwen2Config(**sizes, max_position_embeddings=max(given.tokens, 32))
    torch.manual_seed(0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with torch.device("cuda" if on_gpu else "cpu"):
        model = Qwen2ForCausalLM(config).to(dtype).eval().requires_grad_(False)
        tokens = torch.randint(config.vocab_size, (1, given.tokens))

    pruning = SparseConfig(sparsity=given.sparsity, block=64)
    sparsify_(model, pruning, lambda module, name: ".mlp." in name)
    sparse_bytes = model_bytes(model)
    sparse_seconds, sparse_logits = prefill(model, tokens)
    densify_(model)  # the same weights, zeros written out
    dense_bytes = model_bytes(model)
    dense_seconds, dense_logits = prefill(model, tokens)
    difference = float((sparse_logits - dense_logits).abs().max() / dense_logits.abs().max())

    ratio = dense_seconds / sparse_seconds
    print(f"dense   {dense_seconds * 1e3:9.1f} ms  {dense_bytes / 1e6:9.0f} MB")
    print(f"pruned  {sparse_seconds * 1e3:9.1f} ms  {sparse_bytes / 1e6:9.0f} MB")
    print(f"{ratio:.2f} x over dense at {given.tokens} tokens; logits differ by {difference:.1e}")
    return Outcome(dense_seconds, sparse_seconds, dense_bytes, sparse_bytes, difference)


if __name__ == "__main__":
    main()
