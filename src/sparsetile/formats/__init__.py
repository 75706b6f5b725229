"""Storage formats: CSR + Permutation -> frozen dataclass of tensors. One file a format."""

from __future__ import annotations

from sparsetile.formats.rows import Rows, pack_rows

__all__ = ["Rows", "pack_rows"]
