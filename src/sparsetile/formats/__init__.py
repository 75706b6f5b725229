"""Storage formats: CSR + Permutation -> frozen dataclass of tensors. One file a format."""

from __future__ import annotations

from sparsetile.formats.bcsr import BCSR, BLOCK_SIZES, count_blocks, pack_bcsr
from sparsetile.formats.bittcf import BitTCF, pack_bittcf
from sparsetile.formats.bundles import BUNDLE_ROWS, LIST_STEP, RowBundles, pack_bundles
from sparsetile.formats.rows import Rows, pack_rows
from sparsetile.formats.wcsr import PADS, WCSR, WINDOW_HEIGHTS, pack_wcsr

__all__ = [
    "BCSR",
    "BLOCK_SIZES",
    "BUNDLE_ROWS",
    "LIST_STEP",
    "PADS",
    "WCSR",
    "WINDOW_HEIGHTS",
    "BitTCF",
    "RowBundles",
    "Rows",
    "count_blocks",
    "pack_bcsr",
    "pack_bittcf",
    "pack_bundles",
    "pack_rows",
    "pack_wcsr",
]
