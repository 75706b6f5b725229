"""Device kernels and the CPU's numba kernels.

Every KernelSpec of a module of this package is in KERNELS: a new kernel is one .py here and one .cu
in a folder of cuda/. Folders may include from those above them in this list; the last four do not
include each other, nor do pipeline and epilogue.

    ptx            names over PTX instructions, element types, exchanges among lanes
    mma            Tensor Core instructions, A's tiles as operands, their non-finite values
    pipeline       stages of shared memory: filled ahead, handed over, used
    epilogue       from a row's sum to C: scale, bias, ReLU, store; the gradient of that
    rows           CSR rows on CUDA cores: items, the tree that joins split work, products, SDDMM
    windows        windows of rows on Tensor Cores, and the exact recomputation of their sums
    block_sparse   blocks of 64 x 64: products for many and for few columns
    attention      graph attention: scores, softmax, product, gradients
    pack           work before a product: lists, tiles and values of A, copies of B
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
