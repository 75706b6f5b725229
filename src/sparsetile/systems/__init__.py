"""Systems: which parts each joins, what it can do, why not when it cannot, and what it costs.

One folder a system; importing this package imports every folder, and each registers its system.
Matrices on a GPU are packed by our own kernel from here on.
"""

from __future__ import annotations

from sparsetile.core.packages import import_modules
from sparsetile.formats.device_cells import offer_kernels
from sparsetile.systems.base import BuiltSystem, Epilogue, Request, Runner, System
from sparsetile.systems.registry import SYSTEMS, candidates, runner
from sparsetile.systems.shared.cell_packer import CELL_KERNELS

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
