"""torch operators of edges for layers that are traced: edges_product and its transpose.

    edges_product    C = A·x, where A[target, source] is made of the edges, normalised if asked
    edges_product_t  D = Aᵀ·G, the gradient of x

Each is the gradient of the other. When they run they take the graph, and its plans, from the cache
of the layers, as eager code does: a graph is planned once, and changed edges are noticed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sparsetile.nn.cache import find_fresh, find_graph, find_sampled, note_loops
from sparsetile.nn.fresh import FreshGraph
from sparsetile.nn.gcn import convolution_weights
from sparsetile.nn.graph import Graph, Weights
from sparsetile.nn.inputs import Given
from sparsetile.nn.neighbours import reduction
from sparsetile.nn.traced import How

__all__ = ["edges_product", "edges_product_t"]

_LIB = torch.library.Library("sparsetile", "FRAGMENT")
# A CUDA graph would replay the graph that it was captured with, whatever the edges are by then.
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
_DEFINED = "(Tensor dense, Tensor edges, Tensor? weight, SymInt rows, str how) -> Tensor"
_LIB.define(f"edges_product{_DEFINED}", tags=_TAGS)
_LIB.define(f"edges_product_t{_DEFINED}", tags=_TAGS)
edges_product = torch.ops.sparsetile.edges_product
edges_product_t = torch.ops.sparsetile.edges_product_t

_how = functools.lru_cache(maxsize=256)(How.of)


def _sides(
    edges: Tensor, weight: Tensor | None, size: tuple[int, int], how: How, dense: Tensor
) -> tuple[Graph, str, Weights | None]:
    """Return the graph of edges, how its entries are reduced, and its values."""
    given = Given("edges", edges, weight)
    if how.reduce != "convolve":
        return reduction(how.layer, given, size, dense, how.flow, how.reduce)
    graph, key = find_graph(how.layer, given, size, edges.device, flow=how.flow, loops=how.loops)
    weights = convolution_weights(graph, given, key, how.fill, how.normalize, dense.dtype)
    return graph, "sum", weights


def _run(
    dense: Tensor, edges: Tensor, weight: Tensor | None, size: tuple[int, int], how: How,
    transposed: bool,
) -> Tensor:  # fmt: skip
    """Run without autocast: what is traced has cast already."""
    if torch.is_autocast_enabled(dense.device.type):
        with torch.autocast(dense.device.type, enabled=False):
            return _run(dense, edges, weight, size, how, transposed)
    if how.reduce == "convolve" and weight is None:
        given = Given("edges", edges)
        found = find_fresh(how.layer, given, size, dense.device, flow=how.flow, loops=how.loops)
        if found is not None and isinstance(found[0], FreshGraph):
            out = found[0].convolve(dense, how.normalize, transposed)
            if out is not None:
                return out
    if how.reduce == "convolve" and how.loops == "replace" and how.normalize:
        given = Given("edges", edges, weight)
        sampled = find_sampled(how.layer, given, size, dense.device, flow=how.flow)
        if sampled is not None:
            out = sampled.convolve(dense, None, False, transposed)
            if out is not None:
                return out
            if sampled.has_loops:
                note_loops()
    graph, reduce, weights = _sides(edges, weight, size, how, dense)
    if transposed:
        return graph.gradient(dense, weights, reduce=reduce)
    return graph.aggregate(dense, weights, reduce=reduce)


def _product(x: Tensor, edges: Tensor, weight: Tensor | None, targets: int, how: str) -> Tensor:
    return _run(x.detach(), edges, weight, (x.shape[-2], targets), _how(how), False)


def _product_t(G: Tensor, edges: Tensor, weight: Tensor | None, sources: int, how: str) -> Tensor:
    return _run(G.detach(), edges, weight, (sources, G.shape[-2]), _how(how), True)


for _name, _kernel in (("edges_product", _product), ("edges_product_t", _product_t)):
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _kernel, _key)


@torch.library.register_fake("sparsetile::edges_product", lib=_LIB)
@torch.library.register_fake("sparsetile::edges_product_t", lib=_LIB)
def _(dense, edges, weight, rows, how):  # type: ignore[no-untyped-def]
    return dense.new_empty((*dense.shape[:-2], rows, dense.shape[-1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dense, edges, weight, _, ctx.how = inputs
    ctx.rows, ctx.weighted = dense.shape[-2], weight is not None
    ctx.save_for_backward(edges, *([weight] if ctx.weighted else []))


def _backward(operator: Any, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    edges, *weight = ctx.saved_tensors
    d_dense = None
    if ctx.needs_input_grad[0]:
        d_dense = operator(grad, edges, weight[0] if ctx.weighted else None, ctx.rows, ctx.how)
    return d_dense, None, None, None, None


torch.library.register_autograd(
    "sparsetile::edges_product", functools.partial(_backward, edges_product_t),
    setup_context=_keep, lib=_LIB,
)  # fmt: skip
torch.library.register_autograd(
    "sparsetile::edges_product_t", functools.partial(_backward, edges_product),
    setup_context=_keep, lib=_LIB,
)  # fmt: skip
