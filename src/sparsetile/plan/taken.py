"""Matrices that a plan copies in few launches: sorted CSR arrays, and edges, on a GPU.

Everything else, and everything that is wrong, is for ``intake.as_csr``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetile.formats.device_intake import canonical_edges, canonical_rows
from sparsetile.intake.csr import CSR, VALUE_DTYPES
from sparsetile.intake.recognise import Kind, kind_of
from sparsetile.launch.staged import built_by_kernels
from sparsetile.plan.modes import PLAIN_TYPES

__all__ = ["taken"]


def taken(A: Any, device: torch.device | None) -> CSR | None:
    """Return a canonical copy of a matrix; None if intake has to look at it.

    The copy shares no memory with the caller's. ``device`` is where it is wanted, A's own when
    None.
    """
    kind = kind_of(A)
    if kind is Kind.TENSOR:
        if type(A) is not Tensor or A.layout is not torch.sparse_csr or A.dim() != 2:
            return None
        if not built_by_kernels(A.device) or A.requires_grad or A.dense_dim():
            return None
        rows, columns, values, shape = A.crow_indices(), A.col_indices(), A.values(), A.shape
    elif kind is Kind.CSR_TUPLE:
        rows, columns, values, shape = A
    elif kind is Kind.CSR and not A.checked and A.entry_map is None:
        rows, columns, values, shape = A.indptr, A.indices, A.values, A.shape
        if getattr(rows, "dtype", None) is not torch.int64:
            return None
        if getattr(columns, "dtype", None) is not torch.int32:
            return None
    elif kind is Kind.EDGE_TUPLE and len(A) == 3:
        edges, values, shape = A
        if type(edges) not in PLAIN_TYPES or edges.dim() != 2 or edges.shape[0] != 2:
            return None
        rows, columns = edges[0], edges[1]
    else:
        return None
    if not (_plain(rows) and _plain(columns)):
        return None
    if device is not None and columns.device != device:
        return None
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        return None
    if any(type(size) is not int or size < 0 for size in shape):
        return None
    size: tuple[int, int] = (shape[0], shape[1])
    if values is not None and not _copies(values, columns):
        return None
    canonical = canonical_edges if kind is Kind.EDGE_TUPLE else canonical_rows
    found = canonical(rows, columns, size)
    if found is None:
        return None
    own: Tensor | None = None
    if values is not None:
        own = values.detach()
        own = own.clone() if found.order is None else own[found.order]
    return CSR(found.indptr, found.indices, own, size, found.entry_map, checked=True)


def _plain(numbers: Any) -> bool:
    return type(numbers) in PLAIN_TYPES and numbers.layout is torch.strided


def _copies(values: Any, columns: Tensor) -> bool:
    """Whether a plan may copy values as they are: one for each entry, and not trained."""
    return (
        _plain(values)
        and values.dtype in VALUE_DTYPES
        and values.shape == columns.shape
        and values.device == columns.device
        and values.is_contiguous()
        and not values.requires_grad
        and not values.is_neg()
    )
