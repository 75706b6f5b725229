"""Measurements of tools.llm_study: pruned linear layers and a pruned decoder against dense ones.

Two tables. *Layers*: every projection of a decoder block, with and without a bias, full and with
some zeros among the kept weights, by sparsity and tokens, by ``SparseLinear`` and by ``F.linear``
in the same run. *Models*: prefill and decode of a decoder with random weights whose feed-forward
layers are pruned; ``prefill-sparse`` also has sparse attention. Times on a GPU are of CUDA graphs;
host time is that of a call without one.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.bench.record import Record
from sparsetile.core.checks import one_of
from sparsetile.core.errors import DataError, describe, value_error
from sparsetile.core.timer import time_product
from sparsetile.layers.block_linear import block_layer
from sparsetile.nn import SparseConfig, SparseLinear, sparse_attention, sparsify_
from tools.host_time import host_microseconds
from tools.llm_decoder import QWEN_7B, TINY, Cache, Decoder, DecoderSize

PARTS = ("layers", "prefill", "prefill-sparse", "decode")
# Share of the attention's blocks that ``prefill-sparse`` keeps.
_KEEP = 0.1
_TOKENS = {
    "cuda": {"layers": (1, 16, 128, 1024, 8192, 65536), "prefill": (1024, 4096, 16384, 65536)},
    "cpu": {"layers": (1, 16, 128), "prefill": (64,)},
}
# Share of zeros among kept weights, as in real models.
_ZEROS = (0.0, 0.001)
_HOST_CALLS = 200
# Seconds of measured work aimed at for one prefill or decoded token.
_MODEL_BUDGET = 0.1
# Fields that identify a record.
_IDENTITY = ("part", "name", "dtype", "zeros", "bias", "sparsity", "tokens")
# Largest error of a 16-bit result over its largest element: rounding, and another order of sums.
_ERROR = 0.02


@dataclass(frozen=True)
class LlmSelection:
    """What to measure. Empty tuples mean the device's defaults."""

    device: str
    dtype: torch.dtype = torch.bfloat16
    parts: Sequence[str] = PARTS
    projections: Sequence[str] = ()
    sparsities: Sequence[float] = (0.8, 0.9, 0.95)
    tokens: Sequence[int] = ()
    block: int = 64
    time_limit: float | None = None  # seconds after which no measurement begins

    @property
    def size(self) -> DecoderSize:
        return QWEN_7B if self.device == "cuda" else TINY

    def widths(self, part: str) -> Sequence[int]:
        return self.tokens or _TOKENS[self.device][part.removesuffix("-sparse")]


class _Progress:
    """Earlier records, and whether there is time for more."""

    def __init__(self, selection: LlmSelection, known: Iterable[dict[str, Any]]) -> None:
        self._end = time.monotonic() + (selection.time_limit or math.inf)
        self.known = {_identity(record): record for record in known}
        self.left_out = 0

    def wants(self, facts: dict[str, Any]) -> bool:
        """Whether something is to be measured now."""
        if _identity(facts) in self.known:
            return False
        if time.monotonic() < self._end:
            return True
        self.left_out += 1
        return False


def _identity(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in _IDENTITY)


def validate_llm(found: object) -> Record:
    """Return ``found`` if it is a record of this suite, else raise DataError saying why not."""
    needed = {"environment", "commit", "part", "tokens", "seconds", "status"}
    if not isinstance(found, dict) or found.get("suite") != "llm" or needed - set(found):
        raise DataError(
            describe("llm", "line", "an llm record", f"{str(found)[:40]!r}", "Remove the line")
        )
    return found


def run_llm(
    selection: LlmSelection, say: Callable[[str], None], known: Iterable[dict[str, Any]] = ()
) -> Iterator[dict[str, Any]]:
    """Yield one record after another; ``say`` is called with what comes next.

    ``known`` are those of an earlier run on the same device, which are not measured again.
    """
    for part in selection.parts:
        one_of("llm_study", "--settings", part, PARTS)
    for name in selection.projections:
        one_of("llm_study", "--matrices", name, selection.size.projections())
    for share in selection.sparsities:
        if not 0.0 <= share < 1.0:
            raise value_error(
                "llm_study", "--sparsity", "at least 0 and below 1", share, "Write --sparsity 0.9"
            )
    progress = _Progress(selection, known)
    if "layers" in selection.parts:
        yield from _layers(selection, say, progress)
    if set(selection.parts) - {"layers"}:
        yield from _models(selection, say, progress)
    if progress.left_out:
        say(
            f"time limit: {progress.left_out} measurements left out; the same command with --out "
            "goes on with them"
        )


# -- layers -------------------------------------------------------------------------------------


def _weight(shape: tuple[int, int], zeros: float, selection: LlmSelection) -> Tensor:
    generator = torch.Generator(selection.device).manual_seed(shape[0])
    made = torch.randn(shape, generator=generator, device=selection.device) / shape[1] ** 0.5
    if zeros:
        made[torch.rand(shape, generator=generator, device=selection.device) < zeros] = 0.0
    return made.to(selection.dtype)


def _layers(
    selection: LlmSelection, say: Callable[[str], None], progress: _Progress
) -> Iterator[dict[str, Any]]:
    device, dtype = torch.device(selection.device), selection.dtype
    shapes = selection.size.projections()
    for name in selection.projections or shapes:
        shape = shapes[name]
        for zeros in _ZEROS:
            weight: Tensor | None = None
            for has_bias in (False, True):
                bias = torch.randn(shape[0], device=device, dtype=dtype) if has_bias else None
                dense: dict[int, float] = {}
                for sparsity in selection.sparsities:
                    facts = {
                        "part": "layers", "name": name, "shape": list(shape), "zeros": zeros,
                        "bias": has_bias, "sparsity": sparsity, "dtype": _name(dtype),
                    }  # fmt: skip
                    widths = [
                        n
                        for n in selection.widths("layers")
                        if progress.wants({**facts, "tokens": n})
                    ]
                    if not widths:
                        continue
                    say(f"{name} {shape[0]}x{shape[1]}, {sparsity:.0%}")
                    weight = _weight(shape, zeros, selection) if weight is None else weight
                    layer = SparseLinear.from_dense(
                        weight, bias, sparsity=sparsity, method="random", block=selection.block,
                        generator=torch.Generator().manual_seed(1),
                    ).requires_grad_(False)  # fmt: skip
                    for tokens in widths:
                        if progress.wants({**facts, "tokens": tokens}):
                            yield facts | _layer_times(layer, weight, bias, tokens, dense)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def _layer_times(
    layer: SparseLinear, weight: Tensor, bias: Tensor | None, tokens: int, dense: dict[int, float]
) -> dict[str, Any]:
    """Times of one layer. ``dense``: tokens -> seconds of the dense one; missing ones are added."""
    device = weight.device
    x = torch.randn(tokens, weight.shape[1], device=device, dtype=weight.dtype)
    if tokens not in dense:
        dense[tokens] = time_product(lambda: functional.linear(x, weight, bias), device).median
    got = layer(x)
    error = _error(layer, x, got)
    sparse = time_product(lambda: layer(x), device)
    method, host = "host", None
    if device.type == "cuda":
        host = host_microseconds({"layer": lambda: layer(x)}, _HOST_CALLS, 1)["layer"] / 1e6
        taken = block_layer(layer._recipe)
        has_bias, prefers = bias is not None, layer.prefer == "speed"
        method = taken.method(tokens, weight.dtype, device, has_bias, prefers)
    return {
        "tokens": tokens, "way": method, "seconds": sparse.median, "dense_seconds": dense[tokens],
        "over_dense": dense[tokens] / sparse.median, "method": sparse.method,
        "host_seconds": host,
        "bytes": sum(layer.memory().values()), "dense_bytes": weight.nbytes,
        "status": "ok" if error <= _ERROR else "wrong", "error": error,
    }  # fmt: skip


def _error(layer: SparseLinear, x: Tensor, got: Tensor) -> float:
    """Largest error of some tokens, over the largest element."""
    some = slice(0, 64)
    bias = None if layer.bias is None else layer.bias.float()
    expected = functional.linear(x[some].float(), layer.to_dense().float(), bias)
    return float((got[some].float() - expected).abs().max() / expected.abs().max())


# -- models -------------------------------------------------------------------------------------


@torch.no_grad()
def _models(
    selection: LlmSelection, say: Callable[[str], None], progress: _Progress
) -> Iterator[dict[str, Any]]:
    device = torch.device(selection.device)
    measured = {
        (record["sparsity"], record["part"], record["tokens"]): record["seconds"]
        for record in progress.known.values()
        if record["part"] != "layers"
    }
    for sparsity in (None, *selection.sparsities):
        wanted = [facts for facts in _model_facts(sparsity, selection) if progress.wants(facts)]
        if not wanted:
            continue
        say("dense decoder" if sparsity is None else f"decoder at {sparsity:.0%}")
        before = _allocated(device)
        torch.manual_seed(0)
        model = Decoder(
            selection.size, device, selection.dtype, _pruner(sparsity, selection)
        ).eval()
        used = _allocated(device) - before
        if device.type != "cuda":
            used = sum(part.nbytes for part in (*model.parameters(), *model.buffers()))
        for facts in wanted:
            # Sparse attention is compared with the dense model with dense attention.
            baseline = (None, facts["part"].removesuffix("-sparse"), facts["tokens"])
            dense = measured.get(baseline)
            if not progress.wants(facts) or (dense is None and sparsity is not None):
                continue
            call = _model_call(model, facts, selection)
            call()
            seconds = time_product(call, device, budget=_MODEL_BUDGET).median
            measured[sparsity, facts["part"], facts["tokens"]] = seconds
            dense = measured[baseline]
            yield facts | {
                "seconds": seconds, "bytes": used, "dense_seconds": dense,
                "over_dense": dense / seconds, "status": "ok", "peak_bytes": _peak(device),
            }  # fmt: skip
            del call
        del model


def _pruner(
    sparsity: float | None, selection: LlmSelection
) -> Callable[[nn.Module], object] | None:
    if sparsity is None:
        return None
    config = SparseConfig(sparsity=sparsity, block=selection.block, method="random")
    return lambda block: sparsify_(block, config, lambda _, name: "mlp." in name)


def _model_facts(sparsity: float | None, selection: LlmSelection) -> list[dict[str, Any]]:
    """The measurements of a decoder, in order: baselines first."""
    sparse = "prefill-sparse" in selection.parts
    asked: list[tuple[str, int]] = []
    for tokens in selection.widths("prefill") if sparse or "prefill" in selection.parts else ():
        asked.append(("prefill", tokens))
        if sparse:
            asked.append(("prefill-sparse", tokens))
    if "decode" in selection.parts:
        asked.append(("decode", 1))
    alike = {"name": "decoder", "sparsity": sparsity, "dtype": _name(selection.dtype)}
    return [{"part": part, "tokens": tokens, **alike} for part, tokens in asked]


def _model_call(
    model: Decoder, facts: dict[str, Any], selection: LlmSelection
) -> Callable[[], object]:
    device, size = torch.device(selection.device), selection.size
    if facts["part"] == "decode":
        cache = Cache.empty(size, 1024, model.norm.weight)
        token = torch.zeros((1, 1), dtype=torch.int64, device=device)
        position = torch.full((1,), 512, device=device)
        return lambda: model.decode(token, position, cache)
    prompt = torch.arange(facts["tokens"], device=device)[None] % size.vocabulary
    if facts["part"] == "prefill":
        return functools.partial(model.prefill, prompt)
    attention = functools.partial(sparse_attention, keep=_KEEP)
    return functools.partial(model.prefill, prompt, attention)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    found = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return found
