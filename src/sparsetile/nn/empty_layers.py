"""Sparse layers without weights in place of dense ones, to load a pruned model into them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from sparsetile.core.errors import value_error
from sparsetile.intake.csr import FP8
from sparsetile.intake.identity import counter_tells
from sparsetile.nn.dense_copy import KeepsDense
from sparsetile.nn.experts import SPLIT, SplitExperts, split_experts_
from sparsetile.nn.layer_choice import why_not_pruned
from sparsetile.nn.linear import SparseLinear
from sparsetile.nn.replacement import Replacements
from sparsetile.nn.swiglu import GATE_UP, SparseSwiGLU, has_swiglu_parts

__all__ = [
    "block_like",
    "linear_of",
    "own_weights",
    "put_joined",
    "put_swiglu",
    "split_where_named",
]


def split_where_named(model: nn.Module, names: Iterable[str]) -> None:
    """Split the experts of a model if layers have names that only split experts have."""
    if not any(f".{SPLIT}." in name for name in names):
        return
    if not any(isinstance(module, SplitExperts) for module in model.modules()):
        split_experts_(model)


def linear_of(model: nn.Module, name: str) -> nn.Linear:
    """The dense layer of this name, which a sparse one can replace."""
    try:
        linear = model.get_submodule(name)
    except AttributeError:
        linear = None
    reason = why_not_pruned(linear) if isinstance(linear, nn.Linear) else type(linear).__name__
    if reason or not isinstance(linear, nn.Linear):
        raise value_error(
            "load_sparse_", "model", f"one with a linear layer {name}", reason,
            "Build the model that was saved",
        )  # fmt: skip
    return linear


def block_like(linear: nn.Linear, block: int, dtype: torch.dtype, blocks: int) -> SparseLinear:
    """A replacement for a dense layer with this many blocks; FP8 weights are loaded into it."""
    made = SparseLinear.of_size(
        linear.in_features, linear.out_features, blocks, block=block,
        bias=linear.bias is not None, device=linear.weight.device,
        dtype=linear.weight.dtype if dtype is FP8 else dtype,
    )  # fmt: skip
    return made._train_like(linear)


def put_joined(
    change: Replacements, model: nn.Module, parent: str, block: int, dtype: torch.dtype | None
) -> SparseSwiGLU:
    """Replace a SwiGLU by one whose gate and up are joined, without blocks: loading adds them."""
    gate, up = (linear_of(model, f"{parent}.{part}") for part in GATE_UP)
    origin = model.get_submodule(parent)
    if not has_swiglu_parts(origin):
        raise value_error(
            "load_sparse_", "model", f"one whose {parent} is a SwiGLU and nothing more",
            f"a {type(origin).__name__} with parts, weights or hooks of its own",
            "Build the model that was saved",
        )  # fmt: skip
    halves = [block_like(each, block, dtype or each.weight.dtype, 0) for each in (gate, up)]
    return put_swiglu(change, origin, *halves)


def put_swiglu(
    change: Replacements, origin: nn.Module, gate: nn.Module, up: nn.Module
) -> SparseSwiGLU:
    """Replace a feed-forward layer by a SparseSwiGLU."""
    assert isinstance(gate, SparseLinear) and isinstance(up, SparseLinear)
    down = origin.get_submodule("down_proj")
    made = SparseSwiGLU(gate, up, change[down])
    made.training = origin.training
    made._origin = (origin,)
    change[origin] = made
    for part in GATE_UP:
        change.pop(origin.get_submodule(part), None)
    # The module that densify_ restores.
    change.parts.append((origin, {part: nn.Identity() for part in (*GATE_UP, "down_proj")}))
    return made


def own_weights(model: nn.Module) -> None:
    """Copy weights of sparse layers out of a mapped file.

    torch does not count the writes to such memory, so layers would keep nothing that is made of it.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, KeepsDense)]
    for weight in (layer.weight for layer in layers):
        if weight.device.type != "meta" and not weight.is_inference() and not counter_tells(weight):
            weight.data = weight.data.clone()
