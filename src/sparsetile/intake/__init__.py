"""Intake: any supported sparse matrix -> canonical CSR."""

from __future__ import annotations

from sparsetile.intake.convert import as_csr
from sparsetile.intake.csr import CSR, VALUE_DTYPES
from sparsetile.intake.current import current_values
from sparsetile.intake.files import read_matrix, write_npz
from sparsetile.intake.identity import fingerprint

__all__ = [
    "CSR", "VALUE_DTYPES", "as_csr", "current_values", "fingerprint", "read_matrix", "write_npz",
]  # fmt: skip
