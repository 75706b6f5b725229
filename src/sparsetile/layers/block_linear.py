"""torch operators of a block-sparse linear layer: ``block_linear`` and ``block_outer``.

    block_linear   Y = X·Wᵀ + bias                            [tokens, rows]
    block_outer    of each kept block: Gᵀ·X there              [blocks, unit, unit]

Each is the other's gradient, so second derivatives need no further operator. Operators take only
tensors and a short text, as in ``plan/traced``, so torch can trace and export them. ``pattern`` is
eight small tensors, four of the weight and four of its transpose:

    row_ptr, col_idx   the kept blocks (formats/block_pattern.py)
    work               block rows, longest first, as spmm_bcsr.cu takes them
    order              the weight's block for each block of the transpose

``recipe`` is rows, columns, blocks and unit.

``layer_product`` calls the operator. Inside torch.func's transforms and in forward mode, for which
operators have no rules, it calls autograd functions of the same products that torch can batch and
differentiate in both modes. A batch of X is one product; a batch of weights is one product each.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from sparsetile.balance import LongestFirst
from sparsetile.engines.library import without_autocast
from sparsetile.formats.block_pattern import BlockPattern
from sparsetile.formats.units import Units
from sparsetile.layers.block_layer import BlockLayer
from sparsetile.layers.block_layer_cost import LayerSize
from sparsetile.plan.modes import transforming
from sparsetile.plan.traced.transforms import each_of_batch
from sparsetile.reorder.permutation import positions

__all__ = [
    "block_layer", "block_linear", "block_outer", "flat_pattern", "layer_product", "layer_recipe",
]  # fmt: skip

_LIB = torch.library.Library("sparsetile", "FRAGMENT")
_LIB.define(
    "block_linear(Tensor X, Tensor blocks, Tensor? bias, Tensor? dense, Tensor[] pattern, "
    "str recipe) -> Tensor"
)
_LIB.define("block_outer(Tensor G, Tensor X, Tensor[] pattern, str recipe) -> Tensor")

# Largest number of elements that a CPU gathers to multiply all blocks at once.
COPIED = 2**18
_ONE_SIDE = 4  # tensors of a pattern that describe the weight


def layer_recipe(pattern: BlockPattern) -> str:
    """Return the text that says how large a layer is."""
    return json.dumps([*pattern.shape, pattern.count, pattern.unit])


def flat_pattern(pattern: BlockPattern) -> list[Tensor]:
    """Return the operators' tensors of a pattern and its transpose."""
    turned, order = pattern.transposed()
    return [*_side(pattern), order, *_side(turned), positions(order)]


def _side(pattern: BlockPattern) -> tuple[Tensor, Tensor, Tensor]:
    work = LongestFirst.make(Units.from_offsets(pattern.row_ptr))
    return pattern.row_ptr, pattern.col_idx, work.items


def _transposed(pattern: Sequence[Tensor]) -> list[Tensor]:
    return [*pattern[_ONE_SIDE:], *pattern[:_ONE_SIDE]]


@functools.lru_cache(maxsize=4096)
def block_layer(recipe: str) -> BlockLayer:
    """Return the layer of this size."""
    rows, cols, blocks, unit = json.loads(recipe)
    return BlockLayer(LayerSize(rows, cols, blocks, unit))


@functools.lru_cache(maxsize=4096)
def _transposed_recipe(recipe: str) -> str:
    rows, cols, blocks, unit = json.loads(recipe)
    return json.dumps([cols, rows, blocks, unit])


def _padded(X: Tensor, unit: int) -> Tensor:
    """X [tokens, columns] as [tokens, block columns, unit], zeros past its end."""
    wide = -(-X.shape[1] // unit)
    X = functional.pad(X, (0, wide * unit - X.shape[1]))
    return X.reshape(X.shape[0], wide, unit)


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _small(tokens: int, size: LayerSize) -> bool:
    """Whether the inputs of all blocks may be gathered at once."""
    return tokens * size.blocks * size.unit <= COPIED


def _block_rows(pattern: Sequence[Tensor]) -> Tensor:
    """Block row of each block: block columns of the transpose, in the weight's order."""
    return pattern[_ONE_SIDE + 1][pattern[_ONE_SIDE + 3]].long()


def linear_on_host(
    X: Tensor, blocks: Tensor, bias: Tensor | None, pattern: Sequence[Tensor], size: LayerSize
) -> Tensor:
    """One product per block, or per block row if there are many tokens; rounded once."""
    idx, high = pattern[1].long(), pattern[0].numel() - 1
    unit, wide = size.unit, _sum_type(X.dtype)
    inputs, tokens = _padded(X, unit).to(wide), X.shape[0]
    if _small(tokens, size):
        met = inputs.transpose(0, 1)[idx]
        parts = torch.bmm(met, blocks.to(wide).mT)
        Y = torch.zeros((high, tokens, unit), dtype=wide, device=X.device)
        Y = Y.index_add_(0, _block_rows(pattern), parts).transpose(0, 1).flatten(1)
    else:
        Y = torch.zeros((tokens, high * unit), dtype=wide, device=X.device)
        for row, (begin, end) in enumerate(itertools.pairwise(pattern[0].tolist())):
            if begin < end:
                met = inputs.index_select(1, idx[begin:end]).flatten(1)
                weight = blocks[begin:end].to(wide).transpose(0, 1).reshape(unit, -1)
                Y[:, row * unit : (row + 1) * unit] = met @ weight.mT
    Y = Y[:, : size.rows]
    if bias is not None:
        Y = Y + bias.to(wide)
    return Y.to(X.dtype).contiguous()


def block_linear(
    X: Tensor, blocks: Tensor, bias: Tensor | None, dense: Tensor | None,
    pattern: Sequence[Tensor], recipe: str,
) -> Tensor:  # fmt: skip
    """X·Wᵀ + bias for X [tokens, columns]. See the module's docstring."""
    layer = block_layer(recipe)
    with without_autocast(X.device):  # the caller has cast what it wants cast
        if X.device.type == "cuda":
            lists = (pattern[0], pattern[1], pattern[2])
            return layer.run(lists, blocks, X, bias, dense)
        return linear_on_host(X, blocks, bias, pattern, layer.size)


def block_outer(G: Tensor, X: Tensor, pattern: Sequence[Tensor], recipe: str) -> Tensor:
    """Gᵀ·X of each kept block, for G [tokens, rows] and X [tokens, columns].

    On a GPU one dense product computes all of Gᵀ·X, in temporary memory of the dense weight's size,
    and the kept blocks are copied from it.
    """
    with without_autocast(X.device):
        size = block_layer(recipe).size
        if X.device.type == "cpu":
            return _outer_on_host(G, X, pattern, size)
        grads, inputs = _padded(G, size.unit), _padded(X, size.unit)
        full = grads.flatten(1).mT @ inputs.flatten(1)
        cells = full.reshape(grads.shape[1], size.unit, inputs.shape[1], size.unit).transpose(1, 2)
        return cells[_block_rows(pattern), pattern[1].long()].contiguous()


def _outer_on_host(G: Tensor, X: Tensor, pattern: Sequence[Tensor], size: LayerSize) -> Tensor:
    """One product per block, or per block row if there are many tokens."""
    unit, idx, wide = size.unit, pattern[1].long(), _sum_type(X.dtype)
    grads, inputs = _padded(G, unit).to(wide), _padded(X, unit).to(wide)
    if _small(X.shape[0], size):
        met = inputs.transpose(0, 1)[idx]
        return torch.bmm(grads.transpose(0, 1)[_block_rows(pattern)].mT, met).to(X.dtype)
    made = X.new_empty((size.blocks, unit, unit))
    for row, (begin, end) in enumerate(itertools.pairwise(pattern[0].tolist())):
        if begin < end:
            met = inputs.index_select(1, idx[begin:end]).flatten(1)
            sums = grads[:, row].mT @ met
            made[begin:end] = sums.reshape(unit, end - begin, unit).transpose(0, 1)
    return made


for _name, _kernel in (("block_linear", block_linear), ("block_outer", block_outer)):
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _kernel, _key)


@torch.library.register_fake("sparsetile::block_linear", lib=_LIB)
def _(X, blocks, bias, dense, pattern, recipe):  # type: ignore[no-untyped-def]
    return X.new_empty((X.shape[0], json.loads(recipe)[0]))


@torch.library.register_fake("sparsetile::block_outer", lib=_LIB)
def _(G, X, pattern, recipe):  # type: ignore[no-untyped-def]
    _, _, blocks, unit = json.loads(recipe)
    return X.new_empty((blocks, unit, unit))


def _turned(blocks: Tensor, pattern: Sequence[Tensor]) -> Tensor:
    """Blocks of the transpose."""
    return blocks[pattern[_ONE_SIDE - 1]].mT.contiguous()


def _linear_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    X, blocks, bias, dense, pattern, ctx.recipe = inputs
    ctx.count, ctx.dense = len(pattern), dense is not None
    ctx.bias_dtype = None if bias is None else bias.dtype
    kept = [X] if ctx.needs_input_grad[1] else []
    ctx.save_for_backward(*pattern, blocks, *([dense] if ctx.dense else []), *kept)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    pattern, blocks = list(saved[: ctx.count]), saved[ctx.count]
    dense = saved[ctx.count + 1] if ctx.dense else None
    d_X = d_blocks = d_bias = None
    if ctx.needs_input_grad[0]:
        dense = None if dense is None else dense.mT
        d_X = _transposed_product(grad, blocks, dense, pattern, ctx.recipe)
    if ctx.needs_input_grad[1]:
        d_blocks = _outer_product(grad, saved[-1], pattern, ctx.recipe)
    if ctx.needs_input_grad[2]:
        d_bias = grad.sum(0).to(ctx.bias_dtype)
    return d_X, d_blocks, d_bias, None, [None] * ctx.count, None


torch.library.register_autograd(
    "sparsetile::block_linear", _linear_backward, setup_context=_linear_context, lib=_LIB
)


def _outer_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    G, X, pattern, ctx.recipe = inputs
    ctx.count = len(pattern)
    ctx.save_for_backward(*pattern, G, X)


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *pattern, G, X = ctx.saved_tensors
    d_G = d_X = None
    if ctx.needs_input_grad[0]:
        d_G = layer_product(X, grad, None, None, pattern, ctx.recipe)
    if ctx.needs_input_grad[1]:
        d_X = _transposed_product(G, grad, None, pattern, ctx.recipe)
    return d_G, d_X, [None] * ctx.count, None


torch.library.register_autograd(
    "sparsetile::block_outer", _outer_backward, setup_context=_outer_context, lib=_LIB
)


class _Frozen:
    """A pattern as one object, so that transforms do not wrap its tensors."""

    def __init__(self, tensors: Sequence[Tensor], recipe: str) -> None:
        self.tensors, self.recipe = list(tensors), recipe

    def transposed(self) -> _Frozen:
        return _Frozen(_transposed(self.tensors), _transposed_recipe(self.recipe))


class _Linear(torch.autograd.Function):
    """X·Wᵀ + bias for X [..., columns]."""

    @staticmethod
    def forward(X: Tensor, blocks: Tensor, bias: Tensor | None, pattern: _Frozen) -> Tensor:  # type: ignore[override]
        Y = torch.ops.sparsetile.block_linear(
            X.flatten(0, -2), blocks, bias, None, pattern.tensors, pattern.recipe
        )
        return Y.reshape(*X.shape[:-1], Y.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        X, blocks, bias, ctx.pattern = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(X, blocks)
        ctx.save_for_forward(X, blocks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        X, blocks = ctx.saved_tensors
        pattern: _Frozen = ctx.pattern
        d_X = d_blocks = d_bias = None
        if ctx.needs_input_grad[0]:
            d_X = _linear(grad, _turned(blocks, pattern.tensors), None, pattern.transposed())
        if ctx.needs_input_grad[1]:
            d_blocks = _outer_of(grad, X, pattern)
        if ctx.needs_input_grad[2]:
            d_bias = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return d_X, d_blocks, d_bias, None

    @staticmethod
    def jvp(ctx: Any, d_X: Tensor | None, d_blocks: Tensor | None, d_bias: Any, _: Any) -> Tensor:  # type: ignore[override]
        X, blocks = ctx.saved_tensors
        parts = []
        if d_X is not None:
            parts.append(_linear(d_X, blocks, None, ctx.pattern))
        if d_blocks is not None:
            parts.append(_linear(X, d_blocks, None, ctx.pattern))
        if d_bias is not None:
            rows = json.loads(ctx.pattern.recipe)[0]
            parts.append(d_bias.to(X.dtype).expand(*X.shape[:-1], rows))
        return functools.reduce(torch.add, parts)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Tensor, int]:  # type: ignore[override]
        if in_dims[1] is None and in_dims[2] is None:
            X, *rest = operands
            return _linear(X.movedim(in_dims[0], 0), *rest), 0
        return each_of_batch(_linear, info.batch_size, in_dims, operands), 0


class _Outer(torch.autograd.Function):
    """Gᵀ·X of each kept block, for G [..., rows] and X [..., columns]."""

    @staticmethod
    def forward(G: Tensor, X: Tensor, pattern: _Frozen) -> Tensor:  # type: ignore[override]
        return torch.ops.sparsetile.block_outer(
            G.flatten(0, -2), X.flatten(0, -2), pattern.tensors, pattern.recipe
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        G, X, ctx.pattern = inputs
        ctx.save_for_backward(G, X)
        ctx.save_for_forward(G, X)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        G, X = ctx.saved_tensors
        pattern: _Frozen = ctx.pattern
        d_G = d_X = None
        if ctx.needs_input_grad[0]:
            d_G = _linear(X, grad, None, pattern)
        if ctx.needs_input_grad[1]:
            d_X = _linear(G, _turned(grad, pattern.tensors), None, pattern.transposed())
        return d_G, d_X, None

    @staticmethod
    def jvp(ctx: Any, d_G: Tensor | None, d_X: Tensor | None, _: Any) -> Tensor:  # type: ignore[override]
        G, X = ctx.saved_tensors
        parts = [
            _outer_of(g, x, ctx.pattern)
            for g, x in ((d_G, X), (G, d_X))
            if g is not None and x is not None
        ]
        return functools.reduce(torch.add, parts)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Tensor, int]:  # type: ignore[override]
        return each_of_batch(_outer_of, info.batch_size, in_dims, operands), 0


def _linear(*operands: Any) -> Tensor:
    return _Linear.apply(*operands)  # type: ignore[no-untyped-call, no-any-return]


def _outer_of(*operands: Any) -> Tensor:
    return _Outer.apply(*operands)  # type: ignore[no-untyped-call, no-any-return]


def _beyond_operators() -> bool:
    """Whether a transform of torch.func or forward mode is active: operators have no rules."""
    if torch.compiler.is_compiling():
        return False
    return transforming() or forward_ad._current_level >= 0


def layer_product(
    X: Tensor, blocks: Tensor, bias: Tensor | None, dense: Tensor | None,
    pattern: Sequence[Tensor], recipe: str,
) -> Tensor:  # fmt: skip
    """X·Wᵀ + bias, also inside torch.func's transforms and in forward mode."""
    if _beyond_operators():
        return _linear(X, blocks, bias, _Frozen(pattern, recipe))
    return torch.ops.sparsetile.block_linear(X, blocks, bias, dense, pattern, recipe)


def _transposed_product(
    G: Tensor, blocks: Tensor, dense: Tensor | None, pattern: Sequence[Tensor], recipe: str
) -> Tensor:
    """G·W; ``dense`` is Wᵀ."""
    other, size = _transposed(pattern), _transposed_recipe(recipe)
    return layer_product(G, _turned(blocks, pattern), None, dense, other, size)


def _outer_product(G: Tensor, X: Tensor, pattern: Sequence[Tensor], recipe: str) -> Tensor:
    if _beyond_operators():
        return _outer_of(G, X, _Frozen(pattern, recipe))
    return torch.ops.sparsetile.block_outer(G, X, pattern, recipe)
