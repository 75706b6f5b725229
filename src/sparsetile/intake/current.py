"""The current values of a known matrix, in canonical order, without reading its pattern again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetile.intake.arrays import float_values, values_tensor
from sparsetile.intake.convert import as_csr
from sparsetile.intake.csr import CSR
from sparsetile.intake.recognise import Kind, kind_of
from sparsetile.intake.torch_inputs import components

__all__ = ["current_values"]


def current_values(A: Any, known: CSR, *, function: str = "spmm") -> Tensor | None:
    """Return A's values in the order of ``known``, the canonical form of A's pattern.

    Differentiable. Does not wait for the GPU if A's values are a tensor that can be used as it is;
    other inputs are read again through :func:`as_csr`.
    """
    kind = kind_of(A)
    values: Any = None
    if kind is Kind.TENSOR and A.layout != torch.sparse_coo:
        values = components(A)[2].reshape(-1)
    elif kind is Kind.CSR_TUPLE:
        values = A[2]
    elif kind is Kind.EDGE_TUPLE:
        values = A[1]
    if values is None:
        return as_csr(A, function=function, device=known.device).values
    plain = float_values(function, "values", values_tensor(function, "values", values))
    return known.canonical_values(plain.to(known.device))
