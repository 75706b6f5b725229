"""Storage formats: CSR + Permutation -> frozen dataclass of tensors. One file a format."""

from __future__ import annotations

from sparsetile.formats.bundles import BUNDLE_ROWS, RowBundles, pack_bundles
from sparsetile.formats.rows import Rows, pack_rows

__all__ = ["BUNDLE_ROWS", "RowBundles", "Rows", "pack_bundles", "pack_rows"]
