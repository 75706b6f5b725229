"""Measures MaskedLinear with few tokens against F.linear with the same weight, on a GPU.

    python -m tools.masked_times --out results/h200/masked.jsonl --time-limit 120
    python -m tools.masked_times --table results/h200/masked.jsonl

Layers of Llama-3-8B and Qwen2.5-7B whose weights are dropped at random. Each figure is the time of
one product in a CUDA graph of products with several layers of the same sizes, one after the other,
whose weights together exceed the L2 cache: a model's next layer finds its weight in DRAM, too. The
dense product is measured in the same way. The result is compared with a float64 product.

The record has the environment in its first line, then one line for each figure. Exit code 1 if a
result was wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparsetile.bench.environment import commit, describe_environment
from sparsetile.cli.console import note, print_text
from sparsetile.nn import MaskedLinear

__all__ = ["main", "table"]

SHAPES = ((14336, 4096), (4096, 14336), (18944, 3584), (3584, 18944), (4096, 4096))
SPARSITIES = (0.5, 0.6, 0.7, 0.9)
TOKENS = (1, 2, 4, 8)
# Weights that are read in turn: several times what an H200 keeps in L2.
_ROTATED_BYTES = 200e6
_PRODUCTS, _REPLAYS = 24, 7
# Error of a result rounded once, and of an order of float32 sums, over its largest element.
_ERROR = 0.01


def _seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median seconds of one call, in replays of a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph, rounds = torch.cuda.CUDAGraph(), max(1, _PRODUCTS // len(calls))
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


def _layers(weight: Tensor, sparsity: float) -> tuple[list[MaskedLinear], float]:
    """Layers of one mask whose packed weights exceed L2, and the seconds of packing one."""
    generator = torch.Generator(weight.device).manual_seed(1)
    mask = torch.rand(weight.shape, generator=generator, device=weight.device) >= sparsity
    first = MaskedLinear.from_dense(weight, mask=mask).eval()
    _product(first, weight.new_zeros(1, weight.shape[1]))
    first.train().eval()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    _product(first, weight.new_zeros(1, weight.shape[1]))
    torch.cuda.synchronize()
    packing = time.perf_counter() - begun
    nbytes = first.memory()["other copies"] or first.memory()["dense copy"]
    others = [
        MaskedLinear.from_dense(weight, mask=mask).eval() for _ in range(_rotated(nbytes) - 1)
    ]
    for layer in others:
        _product(layer, weight.new_zeros(1, weight.shape[1]))
    return [first, *others], packing


@torch.no_grad()
def _product(layer: MaskedLinear, x: Tensor) -> Tensor:
    found: Tensor = layer(x)
    return found


@torch.no_grad()
def measure(
    device: torch.device, shapes: Sequence[tuple[int, int]], sparsities: Sequence[float],
    tokens: Sequence[int], dtype: torch.dtype,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield one figure after another."""
    for rows, cols in shapes:
        generator = torch.Generator(device).manual_seed(0)
        weight = torch.randn(rows, cols, generator=generator, device=device) / cols**0.5
        weight = weight.to(dtype)
        inputs = {n: torch.randn(n, cols, device=device).to(dtype) for n in tokens}
        copies = [weight.clone() for _ in range(_rotated(weight.nbytes))]
        dense = {
            n: _seconds([lambda w=w, x=x: functional.linear(x, w) for w in copies])  # type: ignore[misc]
            for n, x in inputs.items()
        }
        del copies
        for sparsity in sparsities:
            layers, packing = _layers(weight, sparsity)
            wide = layers[0].to_dense().double()
            for n, x in inputs.items():
                exact = x.double() @ wide.T
                error = float((_product(layers[0], x).double() - exact).abs().max())
                seconds = _seconds([lambda y=y, x=x: _product(y, x) for y in layers])  # type: ignore[misc]
                parts = layers[0].memory()
                yield {
                    "shape": [rows, cols], "sparsity": sparsity, "tokens": n,
                    "dtype": str(dtype).removeprefix("torch."), "method": layers[0].method(n),
                    "seconds": seconds, "dense_seconds": dense[n], "ratio": dense[n] / seconds,
                    "packed_bytes": parts["other copies"], "dense_bytes": weight.nbytes,
                    "packing_seconds": packing, "error": error / float(exact.abs().max()),
                }  # fmt: skip
            del layers, wide


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The ratios of a record as a table in Markdown: a row for each layer and sparsity."""
    figures = [line for line in lines if "ratio" in line]
    tokens = sorted({line["tokens"] for line in figures})
    heads = ["layer", "sparsity", *(f"{n} token{'s' * (n > 1)}" for n in tokens)]
    rows: dict[tuple[Any, ...], dict[int, str]] = {}
    for line in figures:
        shape = "×".join(str(side) for side in line["shape"])
        text = f"{line['ratio']:.2f}" + (" (dense)" if line["method"] == "dense" else "")
        rows.setdefault((shape, line["sparsity"]), {})[line["tokens"]] = text
    made = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    for (shape, sparsity), found in rows.items():
        cells = [shape, f"{sparsity:.0%}", *(found.get(n, "") for n in tokens)]
        made.append("| " + " | ".join(cells) + " |")
    return "\n".join(made)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="masked_times", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file of the record")
    parser.add_argument("--table", type=Path, help="print the table of a record, measure nothing")
    parser.add_argument("--shapes", default=",".join(f"{r}x{c}" for r, c in SHAPES))
    parser.add_argument("--sparsity", default=",".join(map(str, SPARSITIES)))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds in all")
    parser.add_argument("--commit", default="", help="commit to record if git is missing")
    asked = parser.parse_args(words)
    if asked.table is None and asked.out is None:
        parser.error("--out must be the file of the record. Pass --out or --table")
    if asked.table is None and not torch.cuda.is_available():
        parser.error("a GPU is needed, none is here. Pass --table for the table of a record")
    return asked


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
        for line in measure(
            torch.device("cuda", 0), shapes, list(map(float, asked.sparsity.split(","))),
            list(map(int, asked.tokens.split(","))), getattr(torch, asked.dtype),
        ):  # fmt: skip
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
