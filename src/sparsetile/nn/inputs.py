"""Recognises the inputs that layers accept as a graph, without reading them or importing PyG.

Features are those of one set of nodes, or a pair of sources and targets (:func:`pair_of`). Every
graph becomes A[target, source]:

- ``edge_index`` [2, E], a tensor or PyG's ``EdgeIndex``: messages flow from ``edge_index[0]`` to
  ``edge_index[1]``, or in reverse with ``flow="target_to_source"``;
- PyG's ``Data``: its ``edge_index`` and ``edge_weight``, or its ``adj_t``;
- a torch sparse tensor or :class:`sparsetile.CSR`: PyG's ``adj_t``, rows are targets;
- a :class:`sparsetile.Plan` of that matrix, used unchanged, or a distributed one
  (:mod:`sparsetile.dist`): x then holds this process's nodes.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sparsetile.core.errors import type_error, value_error
from sparsetile.core.protocols import SharedPlan
from sparsetile.intake import CSR
from sparsetile.intake.identity import is_trained
from sparsetile.intake.recognise import Kind, kind_of
from sparsetile.intake.tuples import plain_edges
from sparsetile.plan.plan import Plan

__all__ = ["Given", "pair_of", "read_input"]

_ACCEPTED = (
    "Pass edge_index [2, E], a PyG EdgeIndex or Data, a torch sparse tensor adj_t[target, source], "
    "or a sparsetile.Plan of that matrix"
)


class Given(NamedTuple):
    """One recognised input."""

    kind: Literal["edges", "matrix", "plan"]
    pattern: Any  # Tensor [2, E], sparse matrix [targets, sources], Plan or SharedPlan
    weight: Tensor | None = None  # [E], of edges; a matrix and a plan have their own values
    # (sources, targets) as far as an ``EdgeIndex`` knows them.
    size: tuple[int | None, int | None] = (None, None)

    def without_weight(self) -> Given:
        """Return the same graph without the weights of its edges."""
        return self if self.weight is None else self._replace(weight=None)

    @property
    def trained(self) -> bool:
        """Whether the weights must be read in this call: autograd or an optimiser knows them."""
        values = self.weight if self.kind == "edges" else self.pattern
        return is_trained(values.values if isinstance(values, CSR) else values)


def read_input(layer: str, graph: Any, weight: Tensor | None, flow: str) -> Given:
    """Return what kind of graph ``graph`` is, or raise one clear error."""
    if isinstance(graph, Plan):
        _check_matrix(layer, graph, weight, flow, planned=True)
        return Given("plan", graph)
    if type(graph) is not Tensor and any(
        base.__name__ == "Data" and base.__module__.startswith("torch_geometric.data")
        for base in type(graph).__mro__
    ):
        if weight is None:
            weight = getattr(graph, "edge_weight", None)
        edges = graph.edge_index
        if edges is None:  # a transformed Data, whose adj_t has the weights
            edges, weight = getattr(graph, "adj_t", None), None
        graph = edges
    kind = kind_of(graph)
    if kind is Kind.EDGE_INDEX:
        return _edges(layer, plain_edges(graph), weight, tuple(graph.sparse_size()), flow)
    if kind is Kind.TENSOR and graph.layout is torch.strided:
        return _edges(layer, graph, weight, (None, None), flow)
    planned = isinstance(graph, SharedPlan)
    if planned or kind in (Kind.TENSOR, Kind.CSR):
        _check_matrix(layer, graph, weight, flow, planned)
        return Given("plan" if planned else "matrix", graph)
    if kind is Kind.TORCH_SPARSE:
        raise type_error(
            layer, "edge_index", "edges or a torch sparse tensor", "a torch_sparse.SparseTensor",
            "Call adj_t.to_torch_sparse_csr_tensor()",
        )  # fmt: skip
    raise type_error(layer, "edge_index", "a graph", type(graph).__name__, _ACCEPTED)


def _edges(
    layer: str, edges: Tensor, weight: Tensor | None, size: tuple[Any, ...], flow: str
) -> Given:
    if edges.dim() != 2 or edges.shape[0] != 2:
        raise value_error(
            layer, "edge_index", "of shape [2, E]", tuple(edges.shape),
            "Transpose it with .t() when it is [E, 2]; a dense matrix needs A.to_sparse_csr()",
        )  # fmt: skip
    if edges.dtype not in (torch.int32, torch.int64):
        raise type_error(
            layer, "edge_index", "int64 or int32", edges.dtype, "Convert it with .long()"
        )
    if weight is not None:
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            got = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
            raise type_error(
                layer, "edge_weight", "a float tensor", got, "Convert it with .float()"
            )
        if weight.shape != edges.shape[1:] or weight.device != edges.device:
            raise value_error(
                layer, "edge_weight", f"of shape ({edges.shape[1]},) on {edges.device}",
                f"{tuple(weight.shape)} on {weight.device}",
                "Give one weight per column of edge_index",
            )  # fmt: skip
    return Given("edges", edges, weight, size if flow == "source_to_target" else size[::-1])  # type: ignore[arg-type]


def _check_matrix(layer: str, graph: Any, weight: Tensor | None, flow: str, planned: bool) -> None:
    name = "a Plan" if planned else "a sparse matrix"
    if weight is not None:
        raise value_error(
            layer, "edge_weight", f"None with {name}", "a tensor",
            "Store the weights as the values of the matrix",
        )  # fmt: skip
    if flow != "source_to_target":
        raise value_error(
            layer, "flow", f"'source_to_target' with {name} (rows are targets)", repr(flow),
            "Pass plan.T" if isinstance(graph, Plan) else "Pass the transposed matrix",
        )  # fmt: skip


def pair_of(
    layer: str, x: Any, size: tuple[int, int] | None, flow: str, given: Given
) -> tuple[Tensor, Tensor | None, tuple[int, int]]:
    """Return the features of sources and of targets, and how many there are of each.

    If targets have no features, ``size`` (sources, targets) or the graph says how many there are;
    if neither does, as many as sources, as in PyG.
    """
    if isinstance(x, Tensor):
        if size is None:
            nodes = _node_count(x) or 0
            return x, x, (nodes, nodes)
        sources, targets = x, x
    elif isinstance(x, (tuple, list)) and len(x) == 2 and isinstance(x[0], Tensor):
        if flow != "source_to_target":
            raise value_error(
                layer, "flow", "'source_to_target' with a pair of features", repr(flow),
                "Swap the rows of edge_index with .flip(0)",
            )  # fmt: skip
        sources, targets = x
    else:
        raise type_error(
            layer, "x", "a tensor, or a pair (sources, targets)", type(x).__name__,
            "Pass x, or (x_sources, x_targets)",
        )  # fmt: skip
    counts = _node_count(sources), None if targets is None else _node_count(targets)
    if size is None:
        known = counts[1] if targets is not None else _target_count(given)
        return sources, targets, (counts[0] or 0, (counts[0] if known is None else known) or 0)
    if len(size) != 2 or any(
        have is not None and have != want for have, want in zip(counts, size, strict=True)
    ):
        raise value_error(
            layer, "size", f"{counts}, the nodes of x", size, "Omit size=, or correct it"
        )
    return sources, targets, (size[0] or 0, size[1] or 0)


def _target_count(given: Given) -> int | None:
    """Targets of a graph; None if it does not say."""
    if given.kind == "edges":
        return given.size[1]
    pattern = given.pattern
    shape = pattern.local_shape if isinstance(pattern, SharedPlan) else pattern.shape
    return int(shape[0])


def _node_count(x: Tensor) -> int | None:
    """Rows of features; None if x has none."""
    return x.shape[-2] if x.dim() > 1 else None
