"""Sums of relu(x[source] + edge) by target, whose messages are stored nowhere.

``edge_rows.cu`` computes them, and the gradient of x, with one gather per entry each. An edge's
part is its own row of features, or their map: features · weights + bias. Gradients of features and
weights are computed by torch for as many entries at a time as keep their memory that of the nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsetile.kernels.edge_attention import RELU, RELU_GRADIENT
from sparsetile.layers.attention_operators import packed
from sparsetile.layers.edge_attention import Entries, Mapped, launch_rows, wide

__all__ = ["relu_sums"]

# Entries of a chunk: as many as nodes, and no fewer than this.
LEAST_CHUNK = 2**14


class _ReluSums(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, features: Tensor, weights: Tensor | None, bias: Tensor | None,
        entries: Entries,
    ) -> Tensor:  # fmt: skip
        x = packed(x)
        direct = packed(features) if weights is None else None
        mapped = Mapped(None, None, None)
        if weights is not None:
            mapped = Mapped(wide(bias), wide(features), wide(weights))
        runner, tensors = entries.forward()
        out = launch_rows(
            runner, tensors, None, None, x, x, mapped, RELU, 0.0, None, heads=1, direct=direct
        )
        ctx.entries = entries
        ctx.save_for_backward(x, direct, *mapped)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, direct, *rest = ctx.saved_tensors
        mapped, grad = Mapped(*rest), packed(grad.to(x.dtype))
        for_x, for_features, for_weights, for_bias, _ = ctx.needs_input_grad
        d_x = d_bias = None
        if for_x or for_bias:
            other, others, order = ctx.entries.backward()
            d_x = launch_rows(
                other, others, order, None, grad, x, mapped, RELU_GRADIENT, 0.0, None, heads=1,
                direct=direct,
            )  # fmt: skip
            # The bias and x get the same gradients, summed over all entries.
            d_bias = d_x.sum(0, dtype=torch.float32) if for_bias else None
        d_features = d_weights = None
        if for_features or for_weights:
            d_features, d_weights = _of_edges(ctx.entries, x, grad, direct, mapped, for_weights)
        return d_x if for_x else None, d_features, d_weights, d_bias, None


def _of_edges(
    entries: Entries, x: Tensor, grad: Tensor, direct: Tensor | None, mapped: Mapped,
    for_weights: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of features and weights."""
    _, tensors = entries.forward()
    rows, columns = entries.rows, tensors["columns"]
    features = mapped.features if direct is None else direct
    assert features is not None
    d_features = torch.empty_like(features)
    d_weights = (
        torch.zeros_like(mapped.weights) if for_weights and mapped.weights is not None else None
    )
    step = max(LEAST_CHUNK, len(x))
    for begin in range(0, rows.numel(), step):
        chosen = slice(begin, begin + step)
        total = x.index_select(0, columns[chosen]).float()
        if mapped.weights is None:
            total += features[chosen]
        else:
            total.addmm_(features[chosen], mapped.weights)
            if mapped.vector is not None:
                total += mapped.vector
        pull = grad.index_select(0, rows[chosen])
        pull = pull.masked_fill_(total <= 0, 0.0)
        if mapped.weights is None:
            d_features[chosen] = pull
            continue
        pull = pull.float()
        torch.mm(pull, mapped.weights.t(), out=d_features[chosen])
        if d_weights is not None:
            d_weights.addmm_(features[chosen].t(), pull)
    return d_features, d_weights


def relu_sums(
    entries: Entries, x: Tensor, features: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return the sums of relu(x[source] + edge) over each target's entries, [targets, n].

    ``features`` are [entries, n] of x's type. With a ``weight`` [n, dims] and a ``bias`` [n] that
    map them, they are [entries, dims].
    """
    turned = None if weight is None else weight.t()
    return _ReluSums.apply(x, features, turned, bias, entries)  # type: ignore[no-any-return]
