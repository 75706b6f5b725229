"""Perplexity of a model of transformers on a text, dense and pruned in several ways.

python examples/evaluate_pruned.py --model FOLDER_OR_NAME --text FILE
python examples/evaluate_pruned.py --tiny

The first windows of the text calibrate Wanda, the others are evaluated. Each way starts from the
dense weights again. Output heads and embeddings stay dense. With --tiny, a small model with random
weights reads this file as bytes: that shows the output, not a quality.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.nn import SparseConfig, calibrate, report, sparsify_


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One way to prune, the perplexity that is left, and bytes of the pruned layers over dense."""

    way: str
    perplexity: float
    bytes: float


@torch.no_grad()
def perplexity(model: nn.Module, windows: Tensor) -> float:
    """Perplexity per token of windows [count, length]."""
    losses = []
    for window in windows.split(1):
        logits = model(window[:, :-1], use_cache=False).logits.float()
        losses.append(functional.cross_entropy(logits[0], window[0, 1:]).item())
    return math.exp(min(sum(losses) / len(losses), 80.0))


def configurations(
    patterns: Sequence[str], methods: Sequence[str], sparsities: Sequence[float], block: int
) -> list[tuple[str, SparseConfig]]:
    """Every way to prune with a name."""
    found = []
    for pattern in patterns:
        for method in methods:
            for sparsity in [0.5] if pattern == "2:4" else sparsities:
                named = f"blocks of {block}" if pattern == "block" else pattern
                config = SparseConfig(sparsity, pattern=pattern, method=method, block=block)
                found.append((f"{named}, {sparsity:.0%}, {method}", config))
    return found


def evaluate(
    make: Callable[[], nn.Module], windows: Tensor, calibration: int,
    ways: Sequence[tuple[str, SparseConfig]],
) -> list[Outcome]:  # fmt: skip
    """Evaluate the dense model and each way; print a line for each."""
    sample, rest = windows[:calibration], windows[calibration:]
    found = [Outcome("dense", perplexity(make(), rest), 1.0)]
    print(f"{'dense':40} perplexity {found[0].perplexity:10.3f}")
    for name, config in ways:
        model = make()
        if config.method == "wanda":
            norms = calibrate(model, sample.split(1), config)
            config = dataclasses.replace(config, norms=norms)
        sparsify_(model, config)
        layers = report(model).layers
        share = sum(each.bytes for each in layers) / sum(each.dense_bytes for each in layers)
        found.append(Outcome(name, perplexity(model, rest), share))
        print(f"{name:40} perplexity {found[-1].perplexity:10.3f}, {share:.2f} of the bytes")
    return found


def _tiny() -> tuple[Callable[[], nn.Module], list[int]]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    return lambda: copy.deepcopy(model), list(Path(__file__).read_bytes())


def _given(name: str, text: str, dtype: torch.dtype) -> tuple[Callable[[], nn.Module], list[int]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def make() -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()

    tokens = AutoTokenizer.from_pretrained(name)(Path(text).read_text(encoding="utf-8"))
    return make, tokens["input_ids"]


def main(words: Sequence[str] | None = None) -> list[Outcome]:
    """Run the example; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder, or a name that transformers can load")
    parser.add_argument("--text", help="a text file in UTF-8")
    parser.add_argument("--patterns", default="unstructured,2:4,block")
    parser.add_argument("--methods", default="magnitude,wanda")
    parser.add_argument("--sparsity", default="0.5,0.7,0.9")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=64, help="windows to evaluate")
    parser.add_argument("--calibration", type=int, default=16, help="windows for Wanda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(words)
    if not given.tiny and not (given.model and given.text):
        parser.error("pass --model and --text, or --tiny")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    make, tokens = _tiny() if given.tiny else _given(given.model, given.text, dtype)
    count = min(len(tokens) // given.length, given.calibration + given.windows)
    if count <= given.calibration:
        parser.error(
            f"the text has {len(tokens)} tokens: shorten --length or --calibration, or pass more"
        )
    device = next(make().parameters()).device
    windows = torch.tensor(tokens[: count * given.length], device=device).view(count, given.length)
    ways = configurations(
        given.patterns.split(","), given.methods.split(","),
        [float(each) for each in given.sparsity.split(",")], given.block,
    )  # fmt: skip
    return evaluate(make, windows, given.calibration, ways)


if __name__ == "__main__":
    main()
