"""Products of CSR arrays with complex numbers, by real ones of the same arrays: no plan.

See ``plan.complex_products``: complex columns are pairs of real ones, and a complex A is two real
ones of one pattern.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetile.cache.operators import multiply
from sparsetile.core.checks import reduce_name
from sparsetile.core.errors import type_error, value_error
from sparsetile.intake import CSR, as_csr
from sparsetile.intake.csr import COMPLEX
from sparsetile.intake.recognise import Kind, is_scipy, kind_of
from sparsetile.plan.complex_products import as_columns, as_complex, parts_of, times_i

__all__ = ["holds_complex", "multiply_complex", "spmm_complex"]


def multiply_complex(
    indptr: Tensor, indices: Tensor, values: Tensor | None, x: Tensor, reduce: str
) -> Tensor:
    """Return A·x of a complex x [..., K, N] and values of its type, or of that of its parts."""
    columns = as_columns(x)
    if values is None or not values.is_complex():
        C = multiply(indptr, indices, values, columns, reduce)
    else:
        real, imaginary = parts_of(values)
        C = multiply(indptr, indices, real, columns, reduce)
        C = C + multiply(indptr, indices, imaginary, times_i(x), reduce)
    return as_complex(C, x.shape[-1])


def holds_complex(A: Any) -> bool:
    """Whether the values of a matrix are complex; files are not read."""
    kind = kind_of(A)
    if kind is Kind.SCIPY or kind is Kind.CUPYX:
        return bool(A.dtype.kind == "c")
    if kind is Kind.TENSOR:
        return bool(A.is_complex())
    values = A.values if kind is Kind.CSR else None
    if kind is Kind.CSR_TUPLE:
        values = A[2]
    elif kind is Kind.EDGE_TUPLE:
        values = A[1]
    return "complex" in str(getattr(values, "dtype", ""))


def spmm_complex(A: Any, B: Tensor, reduce: str) -> Tensor:
    """Return A·B of a complex A as :func:`sparsetile.spmm` does; nothing is kept."""
    if B.dtype not in COMPLEX:
        raise type_error(
            "spmm", "B", "complex like A", B.dtype, "Cast it with B.to(torch.complex64)"
        )
    if reduce_name("spmm", reduce) not in ("sum", "mean"):
        raise value_error(
            "spmm", "reduce", "sum or mean of complex numbers", reduce,
            "Complex numbers have no order: multiply real ones",
        )  # fmt: skip
    csr = _arrays(A, B.device)
    assert csr.values is not None
    dense = B.unsqueeze(-1) if B.dim() == 1 else B
    if B.dim() == 0 or dense.shape[-2] != csr.shape[1]:
        raise value_error(
            "spmm", "B", f"of shape [..., {csr.shape[1]}, N]", tuple(B.shape),
            f"A is {csr.shape[0]}x{csr.shape[1]}: B needs one row per column of A",
        )  # fmt: skip
    if csr.device != B.device:
        raise value_error(
            "spmm", "B", f"on {csr.device} like A", B.device,
            f"Move it with B.to({str(csr.device)!r})",
        )  # fmt: skip
    C = multiply_complex(csr.indptr, csr.indices, csr.values.to(B.dtype), dense, reduce)
    return C.squeeze(-1) if B.dim() == 1 else C


def _arrays(A: Any, device: torch.device) -> CSR:
    """Return CSR arrays: as they are if A has such, which the kernels check as they read them."""
    if kind_of(A) is Kind.TENSOR and A.layout is torch.sparse_csr and A.dim() == 2:
        rows, cols = A.shape
        return CSR(A.crow_indices(), A.col_indices(), A.values(), (rows, cols))
    if is_scipy(A) and A.format == "csr" and A.ndim == 2 and A.data.flags.writeable:
        used = int(A.indptr[-1])
        read = torch.from_numpy
        csr = CSR(read(A.indptr), read(A.indices[:used]), read(A.data[:used]), A.shape)
        return csr.to(device)
    owned = isinstance(A, Tensor) or kind_of(A) in (Kind.CSR_TUPLE, Kind.EDGE_TUPLE)
    return as_csr(A, function="spmm", device=None if owned else device, complex_values=True)
