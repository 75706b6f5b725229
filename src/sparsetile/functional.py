"""Products of arrays, for traced code and for matrices that change: no plan to keep.

>>> import torch
>>> import sparsetile.functional as F
>>> indptr, indices = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 2])
>>> F.spmm(indptr, indices, torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, 2))
tensor([[3., 3.],
        [3., 3.]])

``torch.compile(fullgraph=True)``, ``torch.export`` and autograd see one operator, of which all
sizes may vary. Gradients flow into values and x, any number of times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.cache.complex_arrays import multiply_complex
from sparsetile.cache.operators import csr_sddmm, multiply
from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.csr import COMPLEX, PRODUCT_DTYPES

__all__ = ["sddmm", "spmm", "spmm_coo", "spmm_edges"]

_REDUCTIONS = ("sum", "mean")


def spmm(
    indptr: Tensor,
    indices: Tensor,
    values: Tensor | None,
    x: Tensor,
    reduce: str = "sum",
) -> Tensor:
    """Return A·x for CSR arrays, which need no plan.

    Parameters
    ----------
    indptr : Tensor of int32 or int64 [M + 1]
        Where each row begins in ``indices``.
    indices : Tensor of int32 or int64 [entries]
        Column of each entry, in any order. Entries of the same place count each.
    values : Tensor [entries] or None
        Of x's type; of a complex x also of the type of its parts. None: all ones.
    x : Tensor [..., K, N] or [K]
        Dense. It has as many rows as A has columns.
    reduce : {"sum", "mean"}
        How the entries of a row are combined.

    Returns
    -------
    Tensor [..., M, N] or [M]

    Raises
    ------
    TypeError, ValueError
        Types or shapes do not fit, or an index is outside of x.

    Examples
    --------
    >>> import torch
    >>> import sparsetile.functional as F
    >>> indptr, indices = torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 1])
    >>> F.spmm(indptr, indices, None, torch.tensor([[2.0], [4.0]]), reduce="mean")
    tensor([[3.],
            [0.],
            [4.]])
    """
    _check("spmm", indptr, indices, values, x)
    if reduce not in _REDUCTIONS:
        raise value_error(
            "functional.spmm", "reduce", "'sum' or 'mean'", repr(reduce),
            "Call sparsetile.spmm for 'max' and 'min'",
        )  # fmt: skip
    if x.is_complex():
        dense = x.unsqueeze(-1) if x.dim() == 1 else x
        C = multiply_complex(indptr, indices, values, dense, reduce)
        return C.squeeze(-1) if x.dim() == 1 else C
    if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, values = x.to(dtype), None if values is None else values.to(dtype)
    if x.dim() == 1:
        return multiply(indptr, indices, values, x.unsqueeze(-1), reduce).squeeze(-1)
    return multiply(indptr, indices, values, x, reduce)


def sddmm(indptr: Tensor, indices: Tensor, G: Tensor, x: Tensor) -> Tensor:
    """Return the dot product of G[row] and x[column] for each entry of a CSR pattern.

    It is summed over batches: the gradient of A's values for C = A·x, if G is that of C.

    Parameters
    ----------
    indptr, indices : Tensor
        As in :func:`spmm`.
    G : Tensor [..., M, N]
        Of x's type.
    x : Tensor [..., K, N]
        Dense.

    Returns
    -------
    Tensor [entries]

    Examples
    --------
    >>> import torch
    >>> import sparsetile.functional as F
    >>> indptr, indices = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 2])
    >>> F.sddmm(indptr, indices, torch.ones(2, 4), torch.arange(3.0)[:, None].expand(3, 4))
    tensor([0., 8., 8.])
    """
    _check("sddmm", indptr, indices, None, x)
    if x.is_complex():
        raise type_error(
            "functional.sddmm", "x", "of real numbers", x.dtype,
            "Take dot products of its real and imaginary parts",
        )  # fmt: skip
    wanted = (*x.shape[:-2], indptr.shape[0] - 1, x.shape[-1])
    if x.dim() < 2 or tuple(G.shape) != wanted:
        raise value_error(
            "functional.sddmm",
            "G",
            f"of shape {list(wanted)}",
            list(G.shape),
            "Match it to A and x",
        )
    if G.dtype is not x.dtype:
        raise type_error("functional.sddmm", "G", f"of x's type {x.dtype}", G.dtype, "Use G.to()")
    return csr_sddmm(indptr, indices, G, x)


def spmm_coo(
    row: Tensor,
    col: Tensor,
    values: Tensor | None,
    x: Tensor,
    rows: int,
    reduce: str = "sum",
) -> Tensor:
    """Return A·x for entries (row, column, value) in any order. They are sorted in each call.

    Parameters
    ----------
    row, col : Tensor of int32 or int64 [entries]
        Place of each entry.
    values : Tensor [entries] or None
        Of x's type; None: all ones.
    x : Tensor [..., K, N] or [K]
        Dense.
    rows : int
        M.
    reduce : {"sum", "mean"}
        As in :func:`spmm`.

    Returns
    -------
    Tensor [..., M, N] or [M]

    Examples
    --------
    >>> import torch
    >>> import sparsetile.functional as F
    >>> row, col = torch.tensor([1, 0, 1]), torch.tensor([0, 1, 2])
    >>> F.spmm_coo(row, col, None, torch.tensor([1.0, 2.0, 3.0]), rows=2)
    tensor([2., 4.])
    """
    _check_vector("spmm_coo", "row", row)
    if col.dim() != 1 or row.shape[0] != col.shape[0]:
        raise value_error(
            "functional.spmm_coo", "row", f"of col's shape {list(col.shape)}", list(row.shape),
            "Give one row for each column",
        )  # fmt: skip
    order = torch.sort(row, stable=True)
    numbers = torch.arange(rows + 1, dtype=row.dtype, device=row.device)
    indptr = torch.searchsorted(order.values, numbers)
    values = None if values is None else values[order.indices]
    return spmm(indptr, col[order.indices], values, x, reduce)


def spmm_edges(
    edge_index: Tensor,
    weight: Tensor | None,
    x: Tensor,
    num_nodes: int | None = None,
    reduce: str = "sum",
) -> Tensor:
    """Combine the rows of x at the sources of each target's edges, as PyG's layers do.

    Parameters
    ----------
    edge_index : Tensor of int32 or int64 [2, edges]
        Sources, then targets.
    weight : Tensor [edges] or None
        Of x's type; None: all ones.
    x : Tensor [..., sources, N]
        Features of the sources.
    num_nodes : int, optional
        Targets; as many as sources by default.
    reduce : {"sum", "mean"}
        As in :func:`spmm`.

    Returns
    -------
    Tensor [..., targets, N]

    Examples
    --------
    >>> import torch
    >>> import sparsetile.functional as F
    >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 2]])
    >>> F.spmm_edges(edge_index, None, torch.tensor([[1.0], [2.0], [4.0]]))
    tensor([[0.],
            [1.],
            [6.]])
    """
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise value_error(
            "functional.spmm_edges", "edge_index", "of shape [2, edges]", list(edge_index.shape),
            "Stack sources and targets",
        )  # fmt: skip
    nodes = x.shape[0 if x.dim() == 1 else -2] if num_nodes is None else num_nodes
    return spmm_coo(edge_index[1], edge_index[0], weight, x, nodes, reduce)


def _check(
    function: str, indptr: Tensor, indices: Tensor, values: Tensor | None, x: Tensor
) -> None:
    _check_vector(function, "indptr", indptr)
    _check_vector(function, "indices", indices)
    name = f"functional.{function}"
    if indptr.shape[0] < 1:
        raise value_error(name, "indptr", "of M + 1 elements", "none", "A without rows has a 0")
    if x.dim() < 1 or x.dtype not in (*PRODUCT_DTYPES, *COMPLEX):
        names = ", ".join(str(each) for each in (*PRODUCT_DTYPES, *COMPLEX))
        raise type_error(
            name, "x", f"a tensor of type {names}", f"{x.dtype}, {x.dim()} dimensions",
            "Cast it with x.to(torch.float32)",
        )  # fmt: skip
    if values is not None and (values.dim() != 1 or values.shape[0] != indices.shape[0]):
        raise value_error(
            name, "values", f"of shape {list(indices.shape)}", list(values.shape),
            "Give one value for each entry",
        )  # fmt: skip
    if values is not None and values.dtype not in (x.dtype, COMPLEX.get(x.dtype)):
        raise type_error(
            name, "values", f"of x's type {x.dtype}", values.dtype, "Cast one of both with .to()"
        )
    for argument, each in (("indptr", indptr), ("indices", indices), ("values", values)):
        if each is not None and each.device != x.device:
            raise value_error(
                name, argument, f"on x's device {x.device}", each.device, "Move one of both"
            )


def _check_vector(function: str, argument: str, tensor: Tensor) -> None:
    if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
        raise type_error(
            f"functional.{function}", argument, "a vector of int32 or int64",
            f"{tensor.dtype}, shape {list(tensor.shape)}", "Convert it with .to(torch.int64)",
        )  # fmt: skip
