"""Device kernels and the CPU's numba kernels.

Every KernelSpec of a module of this package is in KERNELS: a new kernel is one .py here and one .cu
in a folder of cuda/, whose content and order docs/explanation/architecture.md lists.
"""

from __future__ import annotations

import importlib
import pkgutil

from sparsetile.kernels.spec import KernelSpec

__all__ = ["KERNELS", "KernelSpec"]


def _specs() -> dict[str, KernelSpec]:
    """Name -> spec over all modules; subpackages hold no device kernels."""
    found: dict[str, KernelSpec] = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.ispkg:
            members = vars(importlib.import_module(f"{__name__}.{module.name}"))
            specs = [member for member in members.values() if isinstance(member, KernelSpec)]
            found.update({spec.name: spec for spec in specs})
    return found


KERNELS: dict[str, KernelSpec] = _specs()
