"""Products of matrices and ``EdgeIndex`` on sparsetile, and what fused layers pass to ``spmm``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile.intake.csr import VALUE_DTYPES
from sparsetile.intake.recognise import Kind, kind_of
from sparsetile.nn.cache import is_short_lived
from sparsetile.nn.fresh import GROUPED_ON
from sparsetile.nn.graph import Graph, Weights
from sparsetile.nn.inputs import read_input
from sparsetile.nn.neighbours import reduction
from sparsetile.pyg import reasons
from sparsetile.pyg.reporting import count
from sparsetile.pyg.wrapping import take_place

__all__ = ["REDUCES", "Edges", "new_edges_product", "new_matmul", "new_spmm", "refusal"]

# Devices on which PyG's own products of short-lived graphs are faster than planning.
LEFT_TO_PYG = ("cuda",)
# Edges of a short-lived graph on a GPU below which PyG computes sums and means: two layers, a new
# graph in each step, took PyG 0.91 to 1.03 of ours with 4 and 88 thousand edges, and 0.99 to 1.17
# with 496 thousand (H200).
LEAST_NEW = 300_000
# Edges × columns below which PyG's ``EdgeIndex.matmul`` is faster on a CPU: it takes the host 35 to
# 60 us where ours takes 70 to 200, and with gradients of values 380 where ours takes 480 (200
# edges, 16 columns; 550 and 850 with 1,000). The second is for maxima and minima with gradients
# (one thread of a Xeon, 100 to 64,000 edges).
LEAST_ON_CPU, LEAST_EXTREMUM = 200_000, 10_000
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
        cls, function: str, edge_index: Any, weight: Tensor | None, size: tuple[int, int],
        x: Tensor, reduce: str, flow: str,
    ) -> Edges | str:  # fmt: skip
        """Return the matrix, or why PyG must compute.

        PyG raises the error about edges that name no node, and computes weighted maxima over
        parallel edges, which are one entry here. On a GPU it also computes short-lived graphs with
        weights, which ``gcn_norm`` makes anew in each layer, and sums and means of few edges. Of x
        only device and type matter; ``size`` is (sources, targets).
        """
        reduce = REDUCES[reduce]
        given = read_input(function, edge_index, weight, flow)
        extremum = reduce in ("max", "min")
        if x.device.type == GROUPED_ON:
            slower = weight is not None or not (extremum or edge_index.shape[1] >= LEAST_NEW)
        else:
            slower = weight is not None or extremum
        left = type(edge_index) is Tensor and slower and x.device.type in LEFT_TO_PYG
        if left and is_short_lived(given.pattern):
            return reasons.SHORT_LIVED
        try:
            return cls(reduce, *reduction(function, given, size, x, flow, reduce))
        except ValueError as error:
            return reasons.first_sentence(error)

    def multiply(self, x: Tensor) -> Tensor:
        return self.graph.aggregate(x, self.weights, reduce=self.over_entries)


def refusal(x: Any, values: Any = None) -> str:
    """Return why sparsetile does not compute the product of ``x`` and weights as PyG, or "".

    PyG promotes types, sparsetile does not. Under autocast everything has autocast's type.
    """
    if type(x) not in (Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
        return "features are not a plain tensor"
    if x.dtype not in VALUE_DTYPES:
        return f"features have dtype {str(x.dtype).removeprefix('torch.')}"
    if x.dim() < 2:
        return "features have one dimension"
    if x.device.type not in ("cpu", "cuda"):
        return f"features are on {x.device.type}"
    if values is None:
        return ""
    if not isinstance(values, Tensor) or values.dtype not in VALUE_DTYPES:
        return "weights are not a float tensor"
    if values.device != x.device:
        return "weights and features are on different devices"
    if values.dtype is not x.dtype and not torch.is_autocast_enabled(x.device.type):
        return "weights and features have different types"
    return ""


def _matrix_product(src: Any, other: Tensor, reduce: str) -> Tensor | str:
    """Return src · other of a torch sparse tensor, or why PyG must compute it."""
    if why := reasons.traced():
        return why
    if reduce not in REDUCES:
        return reasons.OTHER_REDUCE
    kind = kind_of(src)
    if kind is not Kind.TENSOR or src.layout is torch.strided:
        return "the matrix is not a torch sparse tensor"
    if why := refusal(other, src):
        return why
    if src.dim() != 2 or src.dense_dim():
        return "the matrix is batched or has dense dimensions"
    shape = tuple(src.shape)
    if shape[1] != other.shape[-2]:
        return reasons.SIZES
    flow, size = "source_to_target", (shape[1], shape[0])
    given = read_input("spmm", src, None, flow)
    graph, over_entries, weights = reduction("spmm", given, size, other, flow, REDUCES[reduce])
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
        edges = kind_of(src) is Kind.EDGE_INDEX
        if edges and src.is_sorted_by_row:  # PyG calls its ``matmul``
            return original(src, other, reduce)
        # PyG's ``matmul`` refuses edges in another order.
        product = (
            _edges_product(src, other, None, reduce, False, in_order=False)
            if edges
            else _matrix_product(src, other, reduce)
        )
        if isinstance(product, Tensor):
            count("utils.spmm")
            return product
        count("utils.spmm", product)
        return original(src, other, reduce)

    return take_place(original, spmm)


def _edges_product(
    edges: Any, other: Tensor, value: Tensor | None, reduce: str, transpose: bool,
    in_order: bool = True,
) -> Tensor | str:  # fmt: skip
    """Return A · other of A[edges[0], edges[1]] or of its transpose, or why PyG must compute it.

    ``in_order``: whether edges have to be sorted as PyG's product requires.
    """
    if why := reasons.traced():
        return why
    reduce = reduce.removeprefix("a") if reduce in ("amax", "amin") else reduce
    if reduce not in REDUCES:
        return reasons.OTHER_REDUCE
    if other.dim() != 2:
        return "features do not have two dimensions"
    if in_order and _is_small(edges, other, value, reduce, transpose):
        return "few edges: PyG is faster on a CPU"
    if in_order and not (edges.is_sorted_by_col if transpose else edges.is_sorted_by_row):
        return "edges are not sorted as matmul requires"
    if why := refusal(other, value):
        return why
    if value is not None and (value.shape != edges.shape[1:] or value.layout is not torch.strided):
        return reasons.WEIGHT_SHAPE
    rows, columns = edges.get_sparse_size()
    size = (rows, columns) if transpose else (columns, rows)
    if size[0] != other.shape[0]:
        return reasons.SIZES
    if edges.device != other.device:
        return reasons.DEVICES
    flow = "source_to_target" if transpose else "target_to_source"
    found = Edges.read("EdgeIndex.matmul", edges.as_tensor(), value, size, other, reduce, flow)
    return found if isinstance(found, str) else found.multiply(other)


def _is_small(
    edges: Any, other: Tensor, value: Tensor | None, reduce: str, transpose: bool
) -> bool:
    """Whether PyG's product ends sooner on a CPU, and works."""
    trained = value is not None and value.requires_grad
    differentiated = trained or other.requires_grad
    extremum = differentiated and reduce in ("max", "min")
    least = LEAST_EXTREMUM if extremum else LEAST_ON_CPU
    if not other.is_cpu or edges.as_tensor().shape[1] * other.shape[-1] >= least:
        return False
    # Where PyG 2.8 raises an error: its own values have torch's default type, and it gives the
    # transpose's gradient the shape of the matrix.
    if other.dtype is not torch.get_default_dtype() and (
        value is None or other.dtype not in (torch.float32, torch.float64)
    ):
        return False
    if not transpose or trained or not other.requires_grad:
        return True
    rows, columns = edges.get_sparse_size()
    return bool(rows == columns)


def new_edges_product(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the replacement of the product in ``EdgeIndex.matmul``, which ``utils.spmm`` calls."""

    def _spmm(
        original: Callable[..., Tensor], input: Any, other: Tensor, value: Tensor | None = None,
        reduce: str = "sum", transpose: bool = False,
    ) -> Tensor:  # fmt: skip
        product = _edges_product(input, other, value, reduce, transpose)
        if isinstance(product, Tensor):
            count("EdgeIndex.matmul")
            return product
        count("EdgeIndex.matmul", product)
        return original(input, other, value, reduce, transpose)

    return take_place(original, _spmm)


def new_matmul(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``EdgeIndex.__matmul__``: torch's own has no gradient for features."""

    @functools.wraps(original)
    def matmul(self: Any, other: Any) -> Any:
        if torch.compiler.is_compiling() or type(other) not in (Tensor, torch.nn.Parameter):
            return original(self, other)
        return self.matmul(other)

    return matmul
