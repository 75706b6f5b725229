"""Storage formats: CSR + Permutation -> frozen dataclass of tensors. One file a format."""

from __future__ import annotations

from sparsetile.formats.bittcf import BitTCF, pack_bittcf
from sparsetile.formats.bundles import BUNDLE_ROWS, LIST_STEP, RowBundles, pack_bundles
from sparsetile.formats.rows import Rows, pack_rows

__all__ = [
    "BUNDLE_ROWS",
    "LIST_STEP",
    "BitTCF",
    "RowBundles",
    "Rows",
    "pack_bittcf",
    "pack_bundles",
    "pack_rows",
]
