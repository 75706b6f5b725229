"""``as_csr``: the entry point of every matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.arrays import refuse_complex
from sparsetile.intake.csr import CSR
from sparsetile.intake.files import read_matrix
from sparsetile.intake.foreign import from_scipy, from_torch_sparse
from sparsetile.intake.recognise import Kind, kind_of
from sparsetile.intake.torch_inputs import from_torch
from sparsetile.intake.tuples import from_csr_tuple, from_edge_index, from_edge_tuple, graph_parts

__all__ = ["as_csr"]

_ACCEPTED = (
    "Pass a torch sparse tensor, a scipy or cupyx sparse matrix, a PyG Data, EdgeIndex or "
    "SparseTensor, (edge_index, weight), (edge_index, weight, shape), "
    "(indptr, indices, values, shape), "
    "or a path to .mtx, .mtx.gz or .npz"
)


def as_csr(
    A: Any, *, function: str = "plan", device: torch.device | str | None = None,
    complex_values: bool = False,
) -> CSR:  # fmt: skip
    """Return any supported sparse matrix (docs/reference/support.md) as canonical CSR, or raise.

    Rows come out sorted, duplicates summed (half types in float32), explicit zeros kept.
    ``CSR.entry_map`` maps each entry of the input to its position. Values stay in the autograd
    graph and keep their float type; whole numbers and bools become the default float type if it
    holds them exactly, and complex ones are refused unless ``complex_values``. A pattern (no
    values) stays one, unless it has duplicates: then the values are the multiplicities. The
    result may share memory with ``A``. Errors begin with ``function``. The work runs on A's
    device; ``device`` is that of the result, A's own when None (files: CPU).
    """
    target = None if device is None else _device(function, device)
    kind = kind_of(A)
    if kind is Kind.CSR:
        csr = A if A.checked else _checked(function, A)
    elif kind is Kind.PATH:
        csr = read_matrix(A, function=function, complex_values=complex_values)
    elif kind in _READERS:
        csr = _READERS[kind](function, A)
    else:
        raise type_error(function, "A", "a sparse matrix", _describe(A), _ACCEPTED)
    if not complex_values:
        refuse_complex(function, "values", csr.values)
    return csr if target is None else csr.to(target)


_READERS: dict[Kind | None, Callable[[str, Any], CSR]] = {
    Kind.TENSOR: from_torch,
    Kind.EDGE_INDEX: from_edge_index,
    Kind.EDGE_TUPLE: from_edge_tuple,
    Kind.CSR_TUPLE: from_csr_tuple,
    Kind.SCIPY: from_scipy,
    Kind.CUPYX: from_scipy,
    Kind.TORCH_SPARSE: from_torch_sparse,
    Kind.GRAPH: lambda function, A: from_edge_tuple(function, graph_parts(function, A)),
}
_CANONICAL = "Pass the tuple (indptr, indices, values, shape) in its place, which is converted"


def _checked(function: str, A: CSR) -> CSR:
    """Return a matrix made by the caller if it is canonical: kernels rely on it."""
    for name, tensor, dtype in (
        ("indptr", A.indptr, torch.int64), ("indices", A.indices, torch.int32)
    ):  # fmt: skip
        if not isinstance(tensor, Tensor) or tensor.dtype is not dtype:
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise type_error(function, f"A.{name}", f"a tensor of {dtype}", got, _CANONICAL)
    found = from_csr_tuple(function, (A.indptr, A.indices, A.values, A.shape))
    if found.entry_map is not None:
        raise value_error(
            function, "A.indices", "strictly increasing inside each row",
            "columns out of order or twice", _CANONICAL,
        )  # fmt: skip
    return replace(A, checked=True)


def _describe(A: Any) -> str:
    if isinstance(A, (tuple, list)):
        return f"a {type(A).__name__} of {len(A)} elements"
    return type(A).__name__


def _device(function: str, device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise value_error(
            function, "device", "a torch device", repr(device), "Use 'cpu' or 'cuda'"
        ) from None
