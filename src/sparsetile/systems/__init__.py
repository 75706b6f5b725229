"""Systems: which parts each joins, what it can do, why not when it cannot, and what it costs.

One folder a system; importing this package imports every folder, and each registers its system.
Matrices on a GPU are packed, and their rows listed, by our own kernels from here on.
"""

from __future__ import annotations

from sparsetile.core.packages import import_modules
from sparsetile.formats.device_cells import offer_kernels
from sparsetile.formats.device_rows import offer_row_kernels
from sparsetile.systems.base import BuiltSystem, Epilogue, Request, Runner, System
from sparsetile.systems.registry import SYSTEMS, candidates, runner
from sparsetile.systems.shared.cell_packer import CELL_KERNELS
from sparsetile.systems.shared.row_lister import ROW_KERNELS

__all__ = [
    "SYSTEMS",
    "BuiltSystem",
    "Epilogue",
    "Request",
    "Runner",
    "System",
    "candidates",
    "runner",
]

import_modules(__name__)
offer_kernels("cuda", CELL_KERNELS)
offer_row_kernels("cuda", ROW_KERNELS)
