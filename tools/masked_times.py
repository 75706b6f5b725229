"""Measures MaskedLinear against F.linear with the same weight, on a GPU.

    python -m tools.masked_times --out results/h200/masked.jsonl --time-limit 40
    python -m tools.masked_times --table results/h200/masked.jsonl

Layers of Llama-3-8B and Qwen2.5-7B whose weights are dropped at random: few tokens with
``prefer="speed"``; one token to many with both; a bias, odd widths and float16. Each figure is the
time of one product in a CUDA graph of products with several layers of the same sizes, one after the
other, whose weights together exceed the L2 cache: a model's next layer finds its weight in DRAM,
too. The dense product is measured in the same way. The result is compared with a float64 product.

The record has the environment in its first line, then one line for each figure. Exit code 1 if a
result was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparsetile.bench.environment import commit, describe_environment
from sparsetile.cli.console import note, print_text
from sparsetile.nn import MaskedLinear
from tools.record import parse_record, record_parser

__all__ = ["Case", "cases", "main", "measure", "table"]

SHAPES = ((14336, 4096), (4096, 14336), (18944, 3584), (3584, 18944), (4096, 4096))
SPARSITIES = (0.5, 0.6, 0.7, 0.9)
TOKENS = (1, 2, 4, 8)
# Tokens with which both preferences are compared.
_MANY = (1, 4, 16, 32, 128, 1024, 16384)
_BF16, _F16 = torch.bfloat16, torch.float16
# Weights that are read in turn: several times what an H200 keeps in L2.
_ROTATED_BYTES = 200e6
_PRODUCTS, _REPLAYS = 24, 7
# Cells times tokens from which one product of each layer is enough.
_LONG = 5e9
# Tokens of which results are compared.
_COMPARED = 64
# Error of a result rounded once, and of an order of float32 sums, over its largest element.
_ERROR = 0.01


@dataclass(frozen=True)
class Case:
    """Layers to measure."""

    shape: tuple[int, int]
    sparsity: float
    tokens: tuple[int, ...]
    dtype: torch.dtype = _BF16
    bias: bool = False
    prefer: str = "speed"
    # Both preferences are compared in a table of their own.
    modes: bool = False


def cases(
    shapes: Sequence[tuple[int, int]] = SHAPES, sparsities: Sequence[float] = SPARSITIES,
    tokens: Sequence[int] = TOKENS,
) -> list[Case]:  # fmt: skip
    """All that a record has, in order."""
    found = [Case(shape, share, tuple(tokens)) for shape in shapes for share in sparsities]
    rows, cols = shapes[0]
    for share, prefer in itertools.product((0.5, 0.7, 0.9), ("memory", "speed")):
        found.append(Case((rows, cols), share, _MANY, prefer=prefer, modes=True))
    for share in (0.5, 0.9):
        found.append(Case((rows, cols), share, (1, 4), bias=True))
        found.append(Case((rows, cols), share, (1, 4), dtype=_F16))
        found.append(Case((rows - 1, cols - 1), share, (1, 4)))
    return found


def _seconds(calls: Sequence[Callable[[], object]], products: int = _PRODUCTS) -> float:
    """Median seconds of one call, in replays of a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph, rounds = torch.cuda.CUDAGraph(), max(1, products // len(calls))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    found = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3 / (rounds * len(calls)))
    return statistics.median(found)


def _rotated(nbytes: int) -> int:
    return max(2, -int(-_ROTATED_BYTES // max(nbytes, 1)))


def _layers(weight: Tensor, case: Case, bias: Tensor | None) -> tuple[list[MaskedLinear], float]:
    """Layers of one mask whose weights exceed L2, and the seconds of packing one."""
    generator = torch.Generator(weight.device).manual_seed(1)
    mask = torch.rand(weight.shape, generator=generator, device=weight.device) >= case.sparsity

    def made() -> MaskedLinear:
        return MaskedLinear.from_dense(weight, bias, mask=mask, prefer=case.prefer).eval()

    first, x = made(), weight.new_zeros(1, weight.shape[1])
    _product(first, x)
    first.train().eval()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    _product(first, x)
    torch.cuda.synchronize()
    packing = time.perf_counter() - begun
    parts = first.memory()
    read = parts["other copies"] if first.method(1) == "entries" else parts["weight"]
    return [first, *(made() for _ in range(_rotated(read) - 1))], packing


@torch.no_grad()
def _product(layer: MaskedLinear, x: Tensor) -> Tensor:
    found: Tensor = layer(x)
    return found


def _bytes(layer: MaskedLinear) -> int:
    """All of a layer's memory but its bias."""
    return sum(part for name, part in layer.memory().items() if name != "bias")


@dataclass
class _Dense:
    """The dense layer of a case, and the seconds of its products."""

    case: Case
    device: torch.device

    def __post_init__(self) -> None:
        rows, cols = self.case.shape
        generator = torch.Generator(self.device).manual_seed(0)
        weight = torch.randn(rows, cols, generator=generator, device=self.device) / cols**0.5
        self.weight = weight.to(self.case.dtype)
        self.bias = self.weight[:, 0].clone() if self.case.bias else None
        self.seconds: dict[int, float] = {}

    def products(self, tokens: int) -> int:
        """How often to multiply."""
        return 1 if tokens * self.weight.numel() > _LONG else _PRODUCTS

    def time(self, x: Tensor) -> float:
        tokens = len(x)
        if tokens not in self.seconds:
            copies = [self.weight.clone() for _ in range(_rotated(self.weight.nbytes))]
            self.seconds[tokens] = _seconds(
                [lambda w=w: functional.linear(x, w, self.bias) for w in copies],  # type: ignore[misc]
                self.products(tokens),
            )
        return self.seconds[tokens]


def _kind(case: Case) -> tuple[Any, ...]:
    return case.shape, case.dtype, case.bias


@torch.no_grad()
def measure(device: torch.device, asked: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield one figure after another."""
    dense: _Dense | None = None
    for case in asked:
        if dense is None or _kind(dense.case) != _kind(case):
            dense = _Dense(case, device)
        weight, bias = dense.weight, dense.bias
        layers, packing = _layers(weight, case, bias)
        for n in case.tokens:
            for layer in layers:  # copies for other numbers of tokens
                layer.train().eval()
            x = torch.randn(n, weight.shape[1], device=device).to(case.dtype)
            expected = dense.time(x)
            wide, some = layers[0].to_dense().double(), x[:_COMPARED].double()
            exact = functional.linear(some, wide, None if bias is None else bias.double())
            found = _product(layers[0], x)[:_COMPARED].double()
            error = float((found - exact).abs().max() / exact.abs().max())
            del wide, exact, found
            seconds = _seconds(
                [lambda y=y, x=x: _product(y, x) for y in layers],  # type: ignore[misc]
                dense.products(n),
            )
            yield {
                "shape": list(case.shape), "sparsity": case.sparsity, "tokens": n,
                "dtype": str(case.dtype).removeprefix("torch."), "bias": case.bias,
                "prefer": case.prefer, "modes": case.modes, "method": layers[0].method(n),
                "seconds": seconds, "dense_seconds": expected, "ratio": expected / seconds,
                "bytes": _bytes(layers[0]), "dense_bytes": weight.nbytes,
                "packing_seconds": packing, "error": error,
            }  # fmt: skip
        del layers


def _rows(
    figures: Sequence[dict[str, Any]], names: Sequence[str], text: Callable[[dict[str, Any]], str],
    key: Callable[[dict[str, Any]], tuple[str, ...]],
) -> str:  # fmt: skip
    """A table in Markdown: a column for each number of tokens."""
    tokens = sorted({line["tokens"] for line in figures})
    heads = [*names, *(f"{n} token{'s' * (n > 1)}" for n in tokens)]
    rows: dict[tuple[str, ...], dict[int, str]] = {}
    for line in figures:
        rows.setdefault(key(line), {})[line["tokens"]] = text(line)
    made = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    made += [
        "| " + " | ".join([*first, *(found.get(n, "") for n in tokens)]) + " |"
        for first, found in rows.items()
    ]
    return "\n".join(made)


def _ratio(line: dict[str, Any]) -> str:
    return f"{line['ratio']:.2f}" + (" (dense)" if line["method"] == "dense" else "")


def _named(line: dict[str, Any]) -> str:
    name = "×".join(str(side) for side in line["shape"])
    other = "" if line.get("dtype", "bfloat16") == "bfloat16" else f", {line['dtype']}"
    return name + other + ", bias" * line.get("bias", False)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The ratios of a record as tables in Markdown: a row for each layer and sparsity."""
    figures = [line for line in lines if "ratio" in line]
    few = [line for line in figures if not line.get("modes")]
    made = [
        _rows(few, ("layer", "sparsity"), _ratio, lambda x: (_named(x), f"{x['sparsity']:.0%}"))
    ]
    modes = [line for line in figures if line.get("modes")]
    if modes:
        made.append(
            _rows(
                modes, ("prefer", "sparsity"),
                lambda x: f"{_ratio(x)}, {x['bytes'] / x['dense_bytes']:.2f} bytes",
                lambda x: (x["prefer"], f"{x['sparsity']:.0%}"),
            )
        )  # fmt: skip
    return "\n\n".join(made)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = record_parser("masked_times", __doc__, seconds=120.0)
    parser.add_argument("--shapes", default=",".join(f"{r}x{c}" for r, c in SHAPES))
    parser.add_argument("--sparsity", default=",".join(map(str, SPARSITIES)))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    return parse_record(parser, words)


def main(words: Sequence[str] | None = None) -> int:
    asked = _parse(words)
    if asked.table is not None:
        print_text(table([json.loads(line) for line in asked.table.read_text().splitlines()]))
        return 0
    begun, good = time.perf_counter(), True
    sides = [[int(side) for side in name.split("x")] for name in asked.shapes.split(",")]
    shapes = [(rows, cols) for rows, cols in sides]
    environment = describe_environment("cuda") | {"commit": asked.commit or commit()}
    lines: list[dict[str, Any]] = [{"schema": 1, "environment": environment}]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with open(asked.out, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(lines[0]) + "\n")
        chosen = cases(
            shapes, list(map(float, asked.sparsity.split(","))),
            list(map(int, asked.tokens.split(","))),
        )  # fmt: skip
        for line in measure(torch.device("cuda", 0), chosen):
            lines.append(line)
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            if line["error"] > _ERROR:
                good = False
                note(f"masked_times: wrong: {line}")
            if time.perf_counter() - begun > asked.time_limit:
                note("masked_times: time limit: the other figures are left out")
                break
    print_text(table(lines))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
