"""``torch_geometric.utils.spmm`` on sparsetile, and the matrix that fused layers hand to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile.intake.csr import VALUE_DTYPES
from sparsetile.intake.recognise import Kind, kind_of
from sparsetile.nn.cache import is_short_lived
from sparsetile.nn.graph import Graph, Weights
from sparsetile.nn.inputs import Given, read_input
from sparsetile.nn.neighbours import reduction
from sparsetile.pyg.wrapping import take_place

__all__ = ["REDUCES", "Edges", "new_spmm", "takes"]

# Devices on which PyG's own products of short-lived graphs are faster than planning.
LEFT_TO_PYG = ("cuda",)
REDUCES = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "min": "min"}


@dataclass(frozen=True, eq=False)
class Edges:
    """A[target, source] of an ``edge_index``: what a layer's ``message_and_aggregate`` is given.

    The layer passes it on to ``spmm``, as it would a sparse tensor ``adj_t``.
    """

    reduce: str  # over the edges, as the layer will ask for
    graph: Graph
    over_entries: str
    weights: Weights | None

    @classmethod
    def read(
        cls, edge_index: Any, weight: Tensor | None, size: tuple[int, int], x: Tensor, reduce: str,
        flow: str,
    ) -> Edges | None:  # fmt: skip
        """Return the matrix, or None if PyG must compute.

        PyG raises the error about edges that name no node, and computes weighted maxima over
        parallel edges, which are one entry here. On a GPU it also computes short-lived graphs with
        weights or with a maximum: planning takes longer than PyG's own few products. Of x only the
        device matters; ``size`` is (sources, targets).
        """
        reduce = REDUCES[reduce]
        given = read_input("propagate", edge_index, weight, flow)
        # The plain tensor of an EdgeIndex is a new object each time: its calls cannot be counted.
        planned = type(edge_index) is Tensor and (weight is not None or reduce in ("max", "min"))
        if planned and x.device.type in LEFT_TO_PYG and is_short_lived(given.pattern):
            return None
        try:
            return cls(reduce, *reduction("propagate", given, size, x.device, flow, reduce))
        except ValueError:
            return None

    def multiply(self, x: Tensor) -> Tensor:
        return self.graph.aggregate(x, self.weights, reduce=self.over_entries)


def takes(x: Any, values: Any = None) -> bool:
    """Whether sparsetile computes the same product of ``x`` and weights as PyG.

    PyG promotes types, sparsetile does not. Under autocast everything has autocast's type.
    """
    if type(x) not in (Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
        return False
    if x.dtype not in VALUE_DTYPES or x.dim() < 2 or x.device.type not in ("cpu", "cuda"):
        return False
    if values is None:
        return True
    if not isinstance(values, Tensor) or values.dtype not in VALUE_DTYPES:
        return False
    cast = torch.is_autocast_enabled(x.device.type)
    return values.device == x.device and (cast or values.dtype is x.dtype)


def _matrix_product(src: Any, other: Tensor, reduce: str) -> Tensor | None:
    """Return src · other, or None if PyG must compute it."""
    if not takes(other) or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    flow = "source_to_target"
    kind = kind_of(src)
    if kind is Kind.EDGE_INDEX:
        # As a matrix an EdgeIndex is A[edge_index[0], edge_index[1]], the transpose.
        flow, shape = "target_to_source", tuple(src.sparse_size())
    elif kind is Kind.TENSOR and src.layout is not torch.strided:
        if not takes(other, src) or src.dim() != 2 or src.dense_dim():
            return None
        shape = tuple(src.shape)
    else:
        return None
    if None in shape or shape[1] != other.shape[-2] or src.device != other.device:
        return None
    given = read_input("spmm", src, None, flow)
    if given.kind == "edges":
        given = Given("edges", given.pattern)
    size = (shape[1], shape[0])
    graph, over_entries, weights = reduction("spmm", given, size, other.device, flow, reduce)
    return graph.aggregate(other, weights, reduce=over_entries)


def new_spmm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the replacement of PyG's ``spmm``: products on sparsetile, the rest as before."""

    def spmm(
        original: Callable[..., Tensor], src: Any, other: Tensor, reduce: str = "sum"
    ) -> Tensor:
        if isinstance(src, Edges):
            if REDUCES.get(reduce) != src.reduce:
                raise RuntimeError(
                    f"spmm: reduce must be {src.reduce!r} like the layer's aggr, got {reduce!r}. "
                    "Call the layer outside of sparsetile.pyg.patch()."
                )
            return src.multiply(other)
        if reduce in REDUCES:
            product = _matrix_product(src, other, REDUCES[reduce])
            if product is not None:
                return product
        return original(src, other, reduce)

    return take_place(original, spmm)
