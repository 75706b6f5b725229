"""Trains a small decoder, prunes it in every way, and measures what is left of it.

    python -m tools.pruned_quality --out quality.jsonl

Text: the Python standard library's sources (Python Software Foundation License), as bytes; the last
twentieth of its files is held out. The decoder (28 million parameters) is trained once, dense. Then
each criterion, pattern and sparsity prunes a copy of it at once (one shot), and a copy is
fine-tuned for a fixed number of steps with its mask. A record has the perplexity per byte of both
beside the bytes of the pruned layers. ``--parts speed`` times a layer of Llama-3-8B's up projection
that was pruned in the same way. On a CPU the sizes are tiny: they test the tool.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import platform
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.bench.environment import commit, describe_environment
from sparsetile.cli.console import note, print_table
from sparsetile.nn import MaskedLinear, SparseConfig, SparseLinear, calibrate, sparsify_
from sparsetile.nn.dense_copy import KeepsDense
from tools.llm_decoder import Decoder, DecoderSize, Rotary, _causal
from tools.record import command_of

_SPARSITIES = (0.5, 0.7, 0.8, 0.9)
_LLAMA_UP = (14336, 4096)
_TOKENS = (1, 16, 128, 2048)
# Rotated copies of a weight of this many bytes do not fit in any L2 cache.
_PAST_L2 = 180e6


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of a run."""

    size: DecoderSize
    length: int  # bytes of a sequence
    batch: int  # sequences of a step
    train_seconds: float
    most_steps: int
    tune_steps: int
    test_bytes: int
    calibration: int  # sequences
    text_bytes: int
    rate: float = 1.5e-3


FULL = Scale(DecoderSize(512, 1536, 8, 8, 8, 256), 512, 64, 28.0, 10_000, 100, 2**20, 128, 2**26)
TINY = Scale(DecoderSize(64, 128, 2, 4, 4, 256), 64, 8, 600.0, 30, 4, 2**13, 8, 2**18, 3e-3)


class Language(Decoder):
    """The decoder with logits of every position."""

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed_tokens(tokens)
        rotary = Rotary.of(positions, self.size.head_width, torch.float32)
        for block in self.blocks:
            x = block(x, positions, rotary, _attention, None)
        return self.lm_head(self.norm(x))


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _causal(q.to(v.dtype), k.to(v.dtype), v)


def corpus(limit: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Bytes to train on, bytes held out, and what they are."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib"} & {*path.parts}
    )
    texts, count = [], 0
    # By digest of the name, so that what is held out is not one package.
    for path in sorted(files, key=lambda path: hashlib.sha256(path.name.encode()).digest()):
        texts.append(path.read_bytes())
        count += len(texts[-1])
        if count > limit:
            break
    split = max(len(texts) * 19 // 20, 1)
    parts = [b"\n".join(texts[:split]), b"\n".join(texts[split:])]
    facts = {
        "text": f"Python {platform.python_version()} standard library, .py files",
        "license": "Python Software Foundation License",
        "text_bytes": [len(part) for part in parts],
        "sha256": hashlib.sha256(b"".join(parts)).hexdigest(),
    }
    train, test = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, test, facts


def _sequences(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - length - 1, (count, 1), generator=generator)
    places = starts + torch.arange(length + 1)
    return text[places.to(text.device)].long()


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: nn.Module, text: Tensor, scale: Scale) -> float:
    """Perplexity per byte of held-out text, in windows of one length."""
    model.eval()
    used = min(len(text), scale.test_bytes) // (scale.length + 1)
    windows = text[: used * (scale.length + 1)].view(used, -1).long()
    losses = [float(_loss(model, part)) * len(part) for part in windows.split(scale.batch)]
    return math.exp(min(sum(losses) / used, 50.0))


def train(
    model: nn.Module, text: Tensor, scale: Scale, steps: int | None, rate: float, seed: int
) -> int:
    """Train for some steps, or for the seconds of ``scale``; return the steps."""
    model.train()
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )  # fmt: skip
    generator, begin, first = torch.Generator().manual_seed(seed), time.perf_counter(), 20
    number = 0
    while steps is None or number < steps:
        if steps is None and number == first:  # the first steps also warm up
            _wait(text.device)
            each = (time.perf_counter() - begin) / first
            steps = min(max(int(scale.train_seconds / each), first + 1), scale.most_steps)
        share = number / (steps or scale.most_steps)
        warm = min(1.0, (number + 1) / 50)
        for group in optimiser.param_groups:
            group["lr"] = rate * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))
        tokens = _sequences(text, scale.batch, scale.length, generator)
        optimiser.zero_grad(set_to_none=True)
        _loss(model, tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        number += 1
    return number


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ways() -> Iterator[dict[str, Any]]:
    """Every way to prune: pattern, block, criterion, sparsity; the most telling first."""
    kinds = [("unstructured", 0, "magnitude"), ("unstructured", 0, "wanda"), ("block", 64, "wanda"),
             ("block", 64, "magnitude"), ("block", 16, "wanda")]  # fmt: skip
    for method in ("magnitude", "wanda"):
        yield {"pattern": "2:4", "block": 0, "method": method, "sparsity": 0.5}
    for (pattern, block, method), sparsity in itertools.product(kinds, _SPARSITIES):
        yield {"pattern": pattern, "block": block, "method": method, "sparsity": sparsity}


def _config(way: dict[str, Any]) -> SparseConfig:
    block = {"block": way["block"]} if way["block"] else {}
    return SparseConfig(
        way["sparsity"], pattern=way["pattern"], method=way["method"], **block
    )  # fmt: skip


def pruned_bytes(model: nn.Module, item: int) -> tuple[int, int]:
    """Bytes of the pruned layers and of the same layers dense, with weights of ``item`` bytes."""
    kept = dense = 0
    for layer in model.modules():
        if isinstance(layer, KeepsDense):
            lists = [part for part in layer._buffers.values() if part is not None]
            kept += layer.weight.numel() * item + sum(part.nbytes for part in lists)
            dense += int(layer.to_dense().numel()) * item
    return kept, dense


def qualities(
    scale: Scale, device: torch.device, seconds_left: Callable[[], float], seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Train, then prune and tune in each way."""
    torch.manual_seed(seed)
    train_text, test_text, facts = corpus(scale.text_bytes)
    train_text, test_text = train_text.to(device), test_text.to(device)
    model = Language(scale.size, device, torch.float32)
    nn.init.normal_(model.embed_tokens.weight, std=0.02)
    begin = time.perf_counter()
    steps = train(model, train_text, scale, None, scale.rate, seed)
    _wait(device)
    seconds = time.perf_counter() - begin
    base = {
        **facts, "parameters": sum(part.numel() for part in model.parameters()),
        "size": dataclasses.asdict(scale.size), "length": scale.length, "batch": scale.batch,
        "steps": steps, "train_seconds": seconds, "seed": seed,
    }  # fmt: skip
    dense = perplexity(model, test_text, scale)
    # Dense weights with the same further steps: what of a tuned result is due to the steps alone.
    longer = copy.deepcopy(model)
    train(longer, train_text, scale, scale.tune_steps, scale.rate / 3, seed + 1)
    tuned = perplexity(longer, test_text, scale)
    del longer
    yield {
        "setting": "dense", **base, "perplexity": dense, "tuned_perplexity": tuned,
        "tune_steps": scale.tune_steps,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed + 2)
    sample = _sequences(train_text, scale.calibration, scale.length, generator)[:, :-1]
    for way in ways():
        if seconds_left() <= 0:
            note("the time is over; the other ways are left out")
            return
        config, other = _config(way), copy.deepcopy(model)
        if way["method"] == "wanda":
            with torch.autocast(device.type, torch.bfloat16):
                norms = calibrate(other, sample.split(scale.batch), config)
            config = dataclasses.replace(config, norms=norms)
        sparsify_(other, config)
        kept, full = pruned_bytes(other, 2)
        once = perplexity(other, test_text, scale)
        begin = time.perf_counter()
        train(other, train_text, scale, scale.tune_steps, scale.rate / 3, seed + 1)
        _wait(device)
        tune_seconds = time.perf_counter() - begin
        yield {
            "setting": "pruned", **way, "perplexity": once,
            "tuned_perplexity": perplexity(other, test_text, scale),
            "dense_perplexity": dense, "tune_steps": scale.tune_steps,
            "tune_seconds": tune_seconds, "bytes": kept, "dense_bytes": full,
        }  # fmt: skip


# -- speed -------------------------------------------------------------------------------------


def _graph_seconds(
    layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor, rounds: int = 3
) -> float:
    """Median seconds of one of several layers that run in turn, by replays of a CUDA graph."""

    def call() -> None:
        for layer in layers:
            layer(x)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    times = []
    for _ in range(rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(layers))
    return sorted(times[2:])[rounds // 2]


def speeds(shape: tuple[int, int], tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Time the pruned layer beside the dense one; weights rotate so that none stays in L2."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    seen = set()
    for way in ways():
        key = (way["pattern"], way["block"], way["sparsity"])
        if key in seen:
            continue
        seen.add(key)
        copies = int(_PAST_L2 // (shape[0] * shape[1] * 2)) + 2
        dense, pruned = [], []
        for seed in range(copies):
            weight = torch.randn(shape, device=device, dtype=dtype) / shape[1] ** 0.5
            dense.append(weight)
            pruned.append(_pruned_layer(weight, way, seed))
        for count in tokens:
            x = torch.randn(count, shape[1], device=device, dtype=dtype)

            plain = [functools.partial(_dense_layer, weight) for weight in dense]
            with torch.no_grad():
                _check(pruned[0], x)
                runs = pruned[0].method(count)
                # What such a layer runs, without the writing of its copy that a graph would repeat.
                timed = [each.to_linear() for each in pruned] if runs == "dense" else pruned
                ours = _graph_seconds(timed, x)
                theirs = _graph_seconds(plain, x)
            yield {
                "setting": "speed", "shape": list(shape), "tokens": count, **way,
                "seconds": ours, "dense_seconds": theirs, "runs": runs,
                "bytes": sum(pruned[0].memory().values()), "dense_bytes": dense[0].nbytes,
            }  # fmt: skip


def _dense_layer(weight: Tensor, x: Tensor) -> Tensor:
    return functional.linear(x, weight)


def _pruned_layer(weight: Tensor, way: dict[str, Any], seed: int) -> SparseLinear | MaskedLinear:
    generator = torch.Generator(weight.device).manual_seed(seed)
    made: SparseLinear | MaskedLinear
    if way["pattern"] == "block":
        rows, cols = (side // way["block"] for side in weight.shape)
        chances = torch.rand(rows, cols, generator=generator, device=weight.device)
        kept = chances >= way["sparsity"]
        made = SparseLinear.from_dense(weight, mask=kept, block=way["block"])
    else:
        made = MaskedLinear.from_dense(
            weight, sparsity=way["sparsity"], pattern=way["pattern"], method="random",
            generator=generator,
        )  # fmt: skip
    return made.eval()


def _check(layer: SparseLinear | MaskedLinear, x: Tensor) -> None:
    """Raise if a layer is wrong: a time of a wrong result is none."""
    exact = functional.linear(x.float(), layer.to_dense().float())
    error = float((layer(x).float() - exact).abs().max() / exact.abs().max())
    if not error < 0.02:
        raise ValueError(f"pruned_quality: the layer must be right, got an error of {error}.")


def _show(records: list[dict[str, Any]]) -> None:
    rows = [
        [
            _named(found), f"{found['perplexity']:.3f}", f"{found['tuned_perplexity']:.3f}",
            f"{found['bytes'] / found['dense_bytes']:.2f}" if "bytes" in found else "1",
        ]
        for found in records
        if found["setting"] != "speed"
    ]  # fmt: skip
    if rows:
        print_table(["pruned", "perplexity", "fine-tuned", "bytes"], rows)
    rows = [
        [_named(found), str(found["tokens"]), found["runs"], f"{found['seconds'] * 1e6:.1f}",
         f"{found['dense_seconds'] / found['seconds']:.2f}"]
        for found in records
        if found["setting"] == "speed"
    ]  # fmt: skip
    if rows:
        print_table(["layer", "tokens", "runs", "us", "over dense"], rows)


def _named(found: dict[str, Any]) -> str:
    if found["setting"] == "dense":
        return "dense"
    pattern = f"blocks of {found['block']}" if found["block"] else found["pattern"]
    method = "" if found["setting"] == "speed" else f", {found['method']}"
    return f"{pattern}, {found['sparsity']:.0%}{method}"


def main(arguments: Sequence[str]) -> int:
    """Measure, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="pruned_quality", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default="quality,speed", help="quality, speed")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="the GPU, if there is one")
    parser.add_argument("--out", type=Path, help="file to which records are appended")
    parser.add_argument("--time-limit", type=float, default=150.0, help="seconds")
    parser.add_argument("--commit", default="", help="commit to record if git is missing")
    asked = parser.parse_args(list(arguments))
    device = torch.device(asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    end = time.perf_counter() + asked.time_limit
    head = {
        "suite": "pruned_quality", "commit": asked.commit or commit(),
        "command": command_of("pruned_quality", arguments),
        "environment": describe_environment(device.type),
    }  # fmt: skip
    parts: list[Iterator[dict[str, Any]]] = []
    if "speed" in asked.parts and device.type == "cuda":
        parts.append(speeds(_LLAMA_UP, _TOKENS))
    if "quality" in asked.parts:
        scale = FULL if device.type == "cuda" else TINY
        parts.append(qualities(scale, device, lambda: end - time.perf_counter()))
    records = []
    for found in itertools.chain(*parts):
        records.append(found)
        note(json.dumps(found))
        if asked.out is not None:
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**head, **found}) + "\n")
    _show(records)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
