"""Storage formats: CSR and row order -> frozen dataclass of tensors, one file each."""

from __future__ import annotations

from sparsetile.formats.bcsr import BCSR, BLOCK_SIZES, count_blocks
from sparsetile.formats.bittcf import BitTCF
from sparsetile.formats.bmat import BMat
from sparsetile.formats.bundles import BUNDLE_ROWS, LIST_STEP, RowBundles
from sparsetile.formats.units import Units, row_units
from sparsetile.formats.wcsr import PADS, WCSR, WINDOW_HEIGHTS

__all__ = [
    "BCSR", "BLOCK_SIZES", "BUNDLE_ROWS", "LIST_STEP", "PADS", "WCSR", "WINDOW_HEIGHTS", "BMat",
    "BitTCF", "RowBundles", "Units", "count_blocks", "row_units",
]  # fmt: skip
