"""One product to measure, and one that is ready: what workers, baselines and the check share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR, result_dtype

__all__ = ["Operands", "Prepared"]


@dataclass(frozen=True, eq=False)
class Operands:
    """One product: A (already transposed where asked), B, and G for SDDMM.

    In the layout ``linear`` B is X.T of a row-major X, and C belongs into Y.T of a row-major Y.
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
    """A product ready to run, and what making it cost."""

    run: Callable[[], Any]
    planning: dict[str, float] = field(default_factory=dict)
    format_bytes: int = 0
    reorder: str = "identity"
    chosen: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    uses_tf32: bool = False
