"""Plain rows: the format of the CUDA-core and CPU systems.

64-bit row pointers and 32-bit column ids. Nothing is packed: values stay in canonical order, and
replacing them costs a copy. A row order changes only the order of the units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sparsetile.formats.base import Format
from sparsetile.formats.cells import checked_values
from sparsetile.formats.units import Units, row_units
from sparsetile.intake.csr import CSR

__all__ = ["Rows"]


@dataclass(frozen=True, eq=False)
class Rows(Format):
    """``indptr`` int64 [M+1], ``columns`` int32 [nnz]; ``order`` int64 [M] or None."""

    name = "rows"
    index_arrays = ("indptr", "columns")

    indptr: Tensor
    columns: Tensor
    shape: tuple[int, int]
    order: Tensor | None = None

    @classmethod
    def pack(cls, csr: CSR, order: Tensor | None = None) -> Self:
        """CSR -> Rows."""
        return cls(csr.indptr, csr.indices.to(torch.int32), csr.shape, order)

    def pack_values(self, values: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Canonical values unchanged; ones for a pattern."""
        return checked_values(values, self.columns.numel(), dtype, self.columns.device)

    def _csr(self) -> CSR:
        return CSR(self.indptr, self.columns, None, self.shape)

    def decode(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (row, column, place) of every entry, row by row."""
        place = torch.arange(self.columns.numel(), device=self.columns.device)
        return self._csr().row_ids(), self.columns.to(torch.int64), place

    def units(self) -> Units:
        """Rows in their order; a unit's list is the row's entries."""
        return row_units(self._csr(), self.order)
