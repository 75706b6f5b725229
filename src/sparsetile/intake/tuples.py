"""Matrices given as tuples, and PyG's ``EdgeIndex``, to canonical CSR.

``(edge_index, weight, shape)``: ``edge_index`` is [2, E] and entry k is
``A[edge_index[0, k], edge_index[1, k]] = weight[k]``, row first, as torch COO and
``EdgeIndex.matmul`` have it. In PyG's terms row = source, column = target, so that ``A @ X``
gathers at each source what its targets hold; message passing from source to target is the
product with the transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsetile.core.checks import matrix_shape
from sparsetile.core.errors import value_error
from sparsetile.intake.arrays import index_tensor, values_tensor
from sparsetile.intake.canonical import Names, from_compressed, from_coordinates
from sparsetile.intake.csr import CSR
from sparsetile.intake.recognise import Kind, kind_of

__all__ = ["edge_shape", "from_csr_tuple", "from_edge_index", "from_edge_tuple", "plain_edges"]


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
    edge_index, weight, shape = parts
    size = edge_shape(function, edge_index, shape)
    edges = index_tensor(function, "edge_index", plain_edges(edge_index), ndim=2)
    if edges.shape[0] != 2:
        raise value_error(
            function,
            "edge_index",
            "of shape [2, E], rows above columns",
            f"shape {list(edges.shape)}",
            "Transpose it with .t() when it is [E, 2]",
        )
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
    # An EdgeIndex is a wrapper that refuses or redirects many operations; its data does not.
    return edge_index.as_tensor() if kind_of(edge_index) is Kind.EDGE_INDEX else edge_index


def edge_shape(function: str, edge_index: Any, shape: Any) -> tuple[int, int]:
    """Return the matrix shape: the tuple's, or the ``EdgeIndex``'s where the tuple has None."""
    if kind_of(edge_index) is not Kind.EDGE_INDEX:
        return matrix_shape(function, shape)
    known = tuple(edge_index.sparse_size())
    if shape is None and None in known:
        raise value_error(
            function,
            "A",
            "an EdgeIndex of known sparse_size",
            f"sparse_size {known}",
            "Build it with EdgeIndex(..., sparse_size=(M, K)) or pass (edge_index, weight, shape)",
        )
    pair = matrix_shape(function, known if shape is None else shape)
    if any(have is not None and have != want for have, want in zip(known, pair, strict=True)):
        raise value_error(
            function,
            "shape",
            f"{known}, the sparse_size of the EdgeIndex",
            pair,
            "Pass None to take the size of the EdgeIndex",
        )
    return pair
