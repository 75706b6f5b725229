"""One product to measure, and a prepared one: shared by workers, baselines and the check."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR, result_dtype

__all__ = ["Operands", "Order", "Prepared", "matrix_hash"]


@dataclass(frozen=True, eq=False)
class Operands:
    """One product: A (already transposed if requested), B, and G for SDDMM.

    In the layout ``linear``, B is X.T of a row-major X, and C is Y.T of a row-major Y.
    """

    csr: CSR
    B: Tensor
    G: Tensor | None
    op: str
    reduce: str
    layout: str = "rows"

    @property
    def dtype(self) -> torch.dtype:
        return self.B.dtype

    @property
    def device(self) -> torch.device:
        return self.B.device

    @property
    def result_dtype(self) -> torch.dtype:
        """Type of C: B's own, bfloat16 for FP8."""
        return result_dtype(self.dtype)

    def values(self) -> Tensor:
        """A's values in B's dtype; ones for a pattern."""
        if self.csr.values is None:
            return torch.ones(self.csr.nnz, dtype=self.dtype, device=self.device)
        return self.csr.values.to(self.dtype)


@dataclass(eq=False)
class Prepared:
    """A product ready to run, and the cost of its preparation."""

    run: Callable[[], Any]
    planning: dict[str, float] = field(default_factory=dict)
    format_bytes: int = 0
    reorder: str = "identity"
    chosen: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    uses_tf32: bool = False


@dataclass(frozen=True, eq=False)
class Order:
    """A row order: its algorithm, ``perm[i]`` the row at position i, and seconds to find it."""

    name: str
    perm: Tensor
    seconds: float


def matrix_hash(csr: CSR) -> str:
    """Return 16 hex digits over shape, pattern and values of a matrix on the host."""
    digest = hashlib.sha256(repr(csr.shape).encode())
    for tensor in (csr.indptr, csr.indices, csr.values):
        if tensor is not None and tensor.numel():  # torch refuses to view some empty ones
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
