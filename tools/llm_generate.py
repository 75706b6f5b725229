"""Measures decoding by a whole Llama of random weights, dense and with single weights pruned.

    python -m tools.llm_generate --out results/h200/generate.jsonl --time-limit 90

A ``LlamaForCausalLM`` of transformers with the sizes of Llama-3-8B, in BF16. Its weights are made
and pruned on the GPU. Prompts are read by the eager model into a static cache. A new token is then
one replay of a CUDA graph: embedding, all layers, head, and the choice of the most likely token.
What lies between the linear layers of a decoder layer is compiled by ``torch.compile`` in its
default mode, once for all layers, in the dense model and in the pruned ones. Embedding and head are
dense in both.

The record has the environment in its first line, then one line for each sparsity and batch. The
logits of a step are compared with those of a model that multiplies the dense weights. Exit code 1
if they differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsetile.bench.environment import commit, describe_environment
from sparsetile.cli.console import note, print_text
from sparsetile.nn import MaskedLinear, join_projections_
from sparsetile.nn.joined import JoinedPart
from tools.record import parse_record, record_parser

__all__ = ["LLAMA_8B", "TINY", "Decoding", "LlamaSize", "main", "make_model", "measure"]


@dataclass(frozen=True)
class LlamaSize:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int


LLAMA_8B = LlamaSize(4096, 14336, 32, 32, 8, 128256)
TINY = LlamaSize(64, 128, 2, 4, 2, 256)
# Length of the cache, and of the prompt in it.
CACHE, PROMPT = 256, 128
_STEPS, _ROUNDS = 16, 5
# Largest difference of logits over the largest one: two orders of sums through 32 layers in BF16.
_ERROR = 0.05


@torch.no_grad()
def make_model(size: LlamaSize, device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama of random weights, made on its device."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    options: dict[str, Any] = {
        "vocab_size": size.vocabulary, "hidden_size": size.hidden,
        "intermediate_size": size.inner, "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": 8192, "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }  # fmt: skip
    config = LlamaConfig(**options)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    generator = torch.Generator(device).manual_seed(0)
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
    return model


@torch.no_grad()
def prune(model: Any, sparsity: float) -> None:
    """Drop weights of all projections of the decoder layers, at random; join q, k and v."""
    for decoder in model.model.layers:
        for module in (decoder.self_attn, decoder.mlp):
            for name, linear in list(module.named_children()):
                if isinstance(linear, nn.Linear):
                    mask = _mask(linear.weight, sparsity)
                    made = MaskedLinear.from_dense(linear.weight, mask=mask)
                    setattr(module, name, made.requires_grad_(False).eval())
    join_projections_(model)


def _mask(weight: Tensor, sparsity: float) -> Tensor:
    """A random mask that keeps an exact number of weights: layers of a size share a graph."""
    mask = torch.rand(weight.shape, device=weight.device) >= sparsity
    flat = mask.view(-1)
    more = int(mask.sum()) - round(weight.numel() * (1 - sparsity))
    places = (flat if more > 0 else ~flat).nonzero().flatten()
    flat[places[torch.randperm(len(places), device=weight.device)[: abs(more)]]] = more < 0
    return mask


def _leave_out_linear(decoder: nn.Module) -> None:
    """Let linear layers run outside of compiled graphs, which then hold for all decoder layers."""
    for module in decoder.modules():
        if isinstance(module, (nn.Linear, JoinedPart)) or (
            isinstance(module, MaskedLinear) and "forward" not in vars(module)
        ):
            vars(module)["forward"] = torch.compiler.disable(module.forward)


class _LayerCache:
    """Keys and values of one decoder layer, as its attention asks for them."""

    def __init__(self, size: LlamaSize, batch: int, like: Tensor, position: Tensor) -> None:
        shape = (batch, size.kv_heads, CACHE, size.hidden // size.heads)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.positions = position

    def update(self, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.positions, keys)
        self.values.index_copy_(2, self.positions, values)
        return self.keys, self.values


class Decoding:
    """Greedy decoding of a model with a static cache."""

    def __init__(self, model: Any, size: LlamaSize, batch: int, compiled: bool) -> None:
        self.model, self.size, self.batch = model, size, batch
        like = model.lm_head.weight
        self.position = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.token = torch.zeros((batch, 1), dtype=torch.int64, device=like.device)
        self.logits = like.new_zeros(batch, size.vocabulary)
        self.caches = [
            _LayerCache(size, batch, like, self.position) for _ in range(size.layers)
        ]  # fmt: skip
        forward = type(model.model.layers[0]).forward
        self._layer = torch.compile(forward, dynamic=False) if compiled else forward
        for decoder in model.model.layers:
            decoder.self_attn.layer_idx = 0  # so that layers share a compiled graph
            if compiled:
                _leave_out_linear(decoder)
        self._graph: torch.cuda.CUDAGraph | None = None

    def _forward(self, layer: Callable[..., Tensor], tokens: Tensor, positions: Tensor) -> Tensor:
        inner = self.model.model
        x = inner.embed_tokens(tokens)
        rotary = inner.rotary_emb(x, position_ids=positions[None])
        seen = (torch.arange(CACHE, device=x.device) <= positions[:, None])[None, None]
        for decoder, cache in zip(inner.layers, self.caches, strict=True):
            cache.positions = positions
            x = layer(
                decoder, x, attention_mask=seen, past_key_values=cache, position_embeddings=rotary
            )
        logits: Tensor = self.model.lm_head(inner.norm(x[:, -1]))
        return logits

    @torch.no_grad()
    def read(self, prompt: Tensor) -> None:
        """Fill the cache with a prompt [batch, tokens]; the next token is chosen."""
        positions = torch.arange(prompt.shape[1], device=prompt.device)
        forward = type(self.model.model.layers[0]).forward
        self.token.copy_(self._forward(forward, prompt, positions).argmax(-1, keepdim=True))
        self.position.fill_(prompt.shape[1])

    @torch.no_grad()
    def step(self) -> None:
        """One more token."""
        self.logits.copy_(self._forward(self._layer, self.token, self.position))
        self.token.copy_(self.logits.argmax(-1, keepdim=True))
        self.position.add_(1)

    def capture(self) -> None:
        """Let :meth:`replay` run the step as one CUDA graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self.step()

    def replay(self) -> None:
        if self._graph is None:
            self.step()
        else:
            self._graph.replay()


def _seconds(decoding: Decoding) -> float:
    """Median seconds of a token."""
    found = []
    for _ in range(_ROUNDS):
        decoding.position.fill_(PROMPT)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_STEPS):
            decoding.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3 / _STEPS)
    return statistics.median(found)


def _masked(model: nn.Module) -> list[MaskedLinear]:
    return [each for each in model.modules() if isinstance(each, MaskedLinear)]


@torch.no_grad()
def _error(decoding: Decoding) -> float:
    """Difference of a step's logits from those of dense products, over the largest."""
    token, position = decoding.token.clone(), decoding.position.clone()
    decoding.replay()
    found = decoding.logits.float().clone()
    decoding.token.copy_(token)
    decoding.position.copy_(position)
    layers = _masked(decoding.model)
    for layer in layers:
        layer.prefer = "memory"
    forward = type(decoding.model.model.layers[0]).forward
    exact = decoding._forward(forward, decoding.token, decoding.position).float()
    for layer in layers:
        layer.prefer = "speed"
    return float((found - exact).abs().max() / exact.abs().max())


def measure(
    size: LlamaSize, device: torch.device, sparsities: Sequence[float], batches: Sequence[int],
    late: Callable[[], bool], compiled: bool = True,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield one figure after another, the dense ones first."""
    dense: dict[int, float] = {}
    for sparsity in (0.0, *sparsities):
        if late():
            note(f"llm_generate: time limit: {sparsity:.0%} is left out")
            continue
        begun = time.perf_counter()
        model = make_model(size, device, torch.bfloat16)
        if sparsity:
            prune(model, sparsity)
        torch.cuda.synchronize()
        made = time.perf_counter() - begun
        for batch in batches:
            begun = time.perf_counter()
            decoding = Decoding(model, size, batch, compiled)
            prompt = torch.arange(batch * PROMPT, device=device).view(batch, PROMPT)
            decoding.read(prompt % size.vocabulary)
            decoding.capture()
            error = _error(decoding) if sparsity else 0.0
            prepared = time.perf_counter() - begun
            seconds = _seconds(decoding)
            dense.setdefault(batch, seconds)
            parts = [sum(layer.memory().values()) for layer in _masked(model)]
            yield {
                "model": "Llama-3-8B's sizes" if size == LLAMA_8B else "tiny", "batch": batch,
                "sparsity": sparsity, "seconds": seconds, "dense_seconds": dense[batch],
                "ratio": dense[batch] / seconds, "error": error, "layer_bytes": sum(parts),
                "making_seconds": made, "preparing_seconds": prepared,
            }  # fmt: skip
            del decoding
        del model


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The figures of a record as a table in Markdown."""
    rows = ["| sparsity | batch | ms a token | over dense |", "| ---: | ---: | ---: | ---: |"]
    rows += [
        f"| {line['sparsity']:.0%} | {line['batch']} | {line['seconds'] * 1e3:.3f} | "
        f"{line['ratio']:.2f} |"
        for line in lines
        if "ratio" in line
    ]
    return "\n".join(rows)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = record_parser("llm_generate", __doc__, seconds=90.0)
    parser.add_argument("--sparsity", default="0.5,0.7")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--layers", type=int, default=LLAMA_8B.layers)
    return parse_record(parser, words)


def main(words: Sequence[str] | None = None) -> int:
    asked = _parse(words)
    if asked.table is not None:
        print_text(table([json.loads(line) for line in asked.table.read_text().splitlines()]))
        return 0
    begun = time.perf_counter()
    environment = describe_environment("cuda") | {"commit": asked.commit or commit()}
    lines: list[dict[str, Any]] = [{"schema": 1, "environment": environment}]
    size = LlamaSize(**{**vars(LLAMA_8B), "layers": asked.layers})
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with open(asked.out, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(lines[0]) + "\n")
        for line in measure(
            size, torch.device("cuda", 0), list(map(float, asked.sparsity.split(","))),
            list(map(int, asked.batch.split(","))),
            lambda: time.perf_counter() - begun > 0.7 * asked.time_limit,
        ):  # fmt: skip
            lines.append(line)
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            note(f"llm_generate: {line}")
    print_text(table(lines))
    wrong = [line for line in lines if line.get("error", 0.0) > _ERROR]
    for line in wrong:
        note(f"llm_generate: wrong: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
