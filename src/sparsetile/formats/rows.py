"""Plain rows: the format of the CUDA-core and CPU systems.

32-bit row pointers and column ids. Nothing is packed, so values stay in canonical order and
replacing them costs a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR

__all__ = ["Rows", "pack_rows"]


@dataclass(frozen=True, eq=False)
class Rows:
    """``indptr`` int64 [M+1], ``columns`` int32 [nnz]."""

    indptr: Tensor
    columns: Tensor
    shape: tuple[int, int]

    @property
    def format_bytes(self) -> int:
        """Bytes of the index arrays, values not counted."""
        return sum(t.numel() * t.element_size() for t in (self.indptr, self.columns))

    def unpack(self, values: Tensor | None) -> CSR:
        """Return the matrix this format holds (round trip)."""
        return CSR(self.indptr, self.columns, values, self.shape)


def pack_rows(csr: CSR) -> Rows:
    """CSR -> Rows."""
    return Rows(csr.indptr, csr.indices.to(torch.int32), csr.shape)
