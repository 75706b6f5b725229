"""Matrices given as tuples, and PyG's ``EdgeIndex``, to canonical CSR.

``(edge_index, weight, shape)``: ``edge_index`` is [2, E] and entry k is
``A[edge_index[0, k], edge_index[1, k]] = weight[k]``, row first, as in torch COO and
``EdgeIndex.matmul``. In PyG's terms row = source, column = target, so ``A @ X`` gathers at each
source the features of its targets; message passing from source to target is the product with the
transpose. Without a shape the matrix is square, with as many rows as the largest number in
``edge_index`` requires, as in PyG.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsetile.core.checks import matrix_shape
from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.arrays import index_tensor, values_tensor
from sparsetile.intake.canonical import Names, from_compressed, from_coordinates
from sparsetile.intake.csr import CSR
from sparsetile.intake.recognise import Kind, kind_of

__all__ = [
    "edge_parts", "from_csr_tuple", "from_edge_index", "from_edge_tuple", "graph_parts",
    "known_shape", "plain_edges",
]  # fmt: skip


def from_csr_tuple(function: str, parts: Sequence[Any]) -> CSR:
    """Return canonical CSR of ``(indptr, indices, values or None, shape)``."""
    indptr, indices, values, shape = parts
    return from_compressed(
        Names(function),
        index_tensor(function, "indptr", indptr),
        index_tensor(function, "indices", indices),
        None if values is None else values_tensor(function, "values", values),
        matrix_shape(function, shape),
    )


def from_edge_tuple(function: str, parts: Sequence[Any]) -> CSR:
    """Return canonical CSR of ``(edge_index, weight or None, shape)``."""
    edge_index, weight, shape = edge_parts(parts)
    edges = index_tensor(function, "edge_index", plain_edges(edge_index), ndim=2)
    if edges.shape[0] != 2:
        raise value_error(
            function, "edge_index", "of shape [2, E], rows above columns",
            f"shape {list(edges.shape)}", "Transpose it with .t() when it is [E, 2]",
        )  # fmt: skip
    size = edge_shape(function, edge_index, shape)
    names = Names(function, rows="edge_index[0]", columns="edge_index[1]", values="weight")
    return from_coordinates(
        names,
        edges[0],
        edges[1],
        None if weight is None else values_tensor(function, "weight", weight),
        size,
    )


def from_edge_index(function: str, A: Any) -> CSR:
    """Return canonical CSR of a PyG ``EdgeIndex`` as a pattern."""
    return from_edge_tuple(function, (A, None, None))


def plain_edges(edge_index: Any) -> Any:
    """Return the plain tensor inside an ``EdgeIndex``; anything else as it is."""
    # An EdgeIndex refuses or redirects many operations; its data does not.
    return edge_index.as_tensor() if kind_of(edge_index) is Kind.EDGE_INDEX else edge_index


def edge_parts(parts: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return (edge_index, weight or None, shape or None) of two or three parts."""
    return (parts[0], parts[1], parts[2] if len(parts) == 3 else None)


def graph_parts(function: str, graph: Any) -> tuple[Any, Any, Any]:
    """Return (edge_index, weight or None, shape) of a PyG ``Data``."""
    edge_index = getattr(graph, "edge_index", None) if hasattr(graph, "num_nodes") else None
    if edge_index is None or hasattr(graph, "edge_types"):
        raise type_error(
            function, "A", "a graph with one edge_index", type(graph).__name__,
            "Pass (edge_index, weight, shape) of one of its parts, or its adj_t",
        )  # fmt: skip
    return edge_index, getattr(graph, "edge_weight", None), (graph.num_nodes, graph.num_nodes)


def edge_shape(function: str, edge_index: Any, shape: Any) -> tuple[int, int]:
    """Return the shape: the tuple's, the ``EdgeIndex``'s, or the one that the numbers require."""
    known: tuple[int | None, ...] = (None, None)
    if kind_of(edge_index) is Kind.EDGE_INDEX:
        known = tuple(edge_index.sparse_size())
    if shape is None:
        if None in known:
            edges = index_tensor(function, "edge_index", plain_edges(edge_index), ndim=2)
            size = max([0, *(have for have in known if have is not None)])
            size = max(size, int(edges.max()) + 1 if edges.numel() else 0)
            return matrix_shape(function, [size if have is None else have for have in known])
        return matrix_shape(function, known)
    pair = matrix_shape(function, shape)
    if any(have is not None and have != want for have, want in zip(known, pair, strict=True)):
        raise value_error(
            function, "shape", f"{known}, the sparse_size of the EdgeIndex", pair,
            "Pass None to take the size of the EdgeIndex",
        )  # fmt: skip
    return pair


def known_shape(function: str, edge_index: Any, shape: Any) -> tuple[int, int] | None:
    """Return the shape if it is known without reading the edges, else None."""
    sized = kind_of(edge_index) is Kind.EDGE_INDEX and None not in edge_index.sparse_size()
    return edge_shape(function, edge_index, shape) if sized or shape is not None else None
