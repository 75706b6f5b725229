"""Copies of B for products in TF32: rounded and K-major, in scratch memory per stream and thread.

A product multiplies its copy before the thread makes the next one on that stream, so all share one.
A wide B is copied in parts of its columns, to keep the scratch small.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from sparsetile.jit import LoadedKernel
from sparsetile.jit.workspace import scratch
from sparsetile.kernels.tf32_operand import (
    OPERAND_THREADS,
    TF32_OPERAND,
    VECTOR,
    operand_config,
    operand_grid,
)
from sparsetile.launch.geometry import ACCESS_BYTES

__all__ = ["OperandCopies", "columns_at_once", "copy_stride"]

# Approximate bytes of a copy, and its fewest columns: one slab of a product.
MOST_BYTES = 2**28
LEAST_COLUMNS = 256


def copy_stride(k: int) -> int:
    """Row stride of the copy, whose rows are columns of B, in elements."""
    return -(-k // VECTOR) * VECTOR


def columns_at_once(k: int) -> int:
    """Columns of B that are copied and multiplied at once: whole slabs."""
    fitting = MOST_BYTES // (4 * max(copy_stride(k), 1))
    return max(fitting // LEAST_COLUMNS, 1) * LEAST_COLUMNS


def _whole_accesses(B: Tensor, k_major: bool) -> bool:
    """Whether groups of four along B's contiguous side begin at multiples of 16 bytes."""
    along, across = B.stride()[::-1] if not k_major else B.stride()
    address = B.data_ptr() | across * B.element_size()
    return along == 1 and address % ACCESS_BYTES == 0


class OperandCopies:
    """Makes copies on any device; kernels are loaded once."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[bool, int, int], LoadedKernel] = {}

    def load(self, k_major: bool, vector: int, device: int) -> LoadedKernel:
        """Return the kernel for B along k, or along n, with this many elements per access."""
        key = (k_major, vector, device)
        found = self._kernels.get(key)
        if found is None:
            found = TF32_OPERAND.load(operand_config(k_major, vector), device)
            self._kernels[key] = found
        return found

    def copy(self, B: Tensor, device: int, stream: int) -> int:
        """Copy B [K, N], of any strides; the address is valid until this thread's next call.

        Its rows are columns of B, :func:`copy_stride` elements apart.
        """
        k, n = B.shape
        k_major = B.stride(0) == 1 and B.stride(1) != 1
        kernel = self.load(k_major, VECTOR if _whole_accesses(B, k_major) else 1, device)
        stride = copy_stride(k)
        size = n * stride * torch.float32.itemsize
        memory, _ = scratch(device, stream, size, 0, threading.get_ident())
        params = {
            "b": B.data_ptr(), "to": memory.data_ptr(),
            "k_stride": B.stride(0), "n_stride": B.stride(1), "to_stride": stride, "k": k, "n": n,
        }  # fmt: skip
        kernel.launch(operand_grid(k, n), OPERAND_THREADS, stream, params)
        return memory.data_ptr()
