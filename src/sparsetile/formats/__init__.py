"""Storage formats: CSR and row order -> frozen dataclass of tensors, registered in ``FORMATS``.

A format is one file here; every module is imported, so this file needs no line for it. Names below
are for convenience.
"""

from __future__ import annotations

from sparsetile.core.packages import import_modules
from sparsetile.formats.base import FORMATS, Format
from sparsetile.formats.bcsr import BCSR, BLOCK_SIZES, count_blocks
from sparsetile.formats.bittcf import BitTCF
from sparsetile.formats.bmat import BMat
from sparsetile.formats.brp import BRP
from sparsetile.formats.bundles import BUNDLE_ROWS, LIST_STEP, RowBundles
from sparsetile.formats.rows import Rows
from sparsetile.formats.units import Units, row_units
from sparsetile.formats.wcsr import PADS, WCSR, WINDOW_HEIGHTS

__all__ = [
    "BCSR", "BLOCK_SIZES", "BRP", "BUNDLE_ROWS", "FORMATS", "LIST_STEP", "PADS", "WCSR",
    "WINDOW_HEIGHTS", "BMat", "BitTCF", "Format", "RowBundles", "Rows", "Units", "count_blocks",
    "row_units",
]  # fmt: skip

import_modules(__name__)
