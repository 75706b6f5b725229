"""torch.matmul on a dense copy of A, then the repair of non-finite elements.

Products of 16-bit matrices are made in float32 and rounded once: on a GPU because torch lets cuBLAS
add them up in 16 bits, on a host if an epilogue follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsetile.engines.library import adds_in_float16, float32_product, without_autocast
from sparsetile.engines.request import part
from sparsetile.engines.runner import ExactRunner, Runner
from sparsetile.jit.loader import device_index
from sparsetile.launch.epilogue import apply_epilogue
from sparsetile.launch.geometry import ACCESS_BYTES
from sparsetile.launch.interface import PLAIN, Epilogue, Tensors
from sparsetile.systems.dense.bound import BoundDense, load_finish

__all__ = ["DenseRunner"]


class DenseRunner(Runner):
    """Tensors: those of the exact system. Packed ``A``: the dense matrix."""

    packed_names = ("A",)

    def __init__(self, meta: Mapping[str, Any], exact: ExactRunner) -> None:
        super().__init__(meta)
        self._exact = exact

    def prepare(self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
        if n and device.type == "cuda":
            load_finish(n, dtype, weighted, device_index(device), plain=True)

    def spmm(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        out: Tensor, epilogue: Epilogue = PLAIN,
    ) -> None:  # fmt: skip
        exact = part("exact", tensors)
        A = (self.pack(tensors, values, B.dtype) if packed is None else packed)["A"]
        target = out if epilogue.beta == 0.0 else None
        with without_autocast(B.device):
            whole = self._whole_columns(B.dtype)
            if 0 < whole < self.cols and _takes_two_parts(A, B):
                product = _in_two_parts(A, B, whole, target)
            elif B.dtype.itemsize == 2 and not (
                out.dtype is B.dtype and self._in_place(B, epilogue)
            ):
                product = float32_product(A, B)
            else:
                product = torch.matmul(A, B, out=target)
        self._exact.repair(exact, values, B, product)
        if product is not out or not epilogue.plain:
            apply_epilogue(product, out, exact["indptr"], epilogue)

    def bind(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None
    ) -> BoundDense | None:
        if not self.rows or packed is None or not packed["A"].is_cuda:
            return None
        dtype = packed["A"].dtype
        whole = self._whole_columns(dtype)
        return BoundDense(self, tensors, values, packed, whole if whole < self.cols else 0)

    def _whole_columns(self, dtype: torch.dtype) -> int:
        """Columns of A up to the last multiple of 16 bytes."""
        return self.cols - self.cols % (ACCESS_BYTES // dtype.itemsize)

    def _in_place(self, B: Tensor, epilogue: Epilogue) -> bool:
        """Whether torch's product is already the result."""
        return B.device.type == "cpu" and epilogue.plain

    def pack(self, tensors: Tensors, values: Tensor | None, dtype: torch.dtype) -> Tensors:
        exact = part("exact", tensors)
        indptr, columns = exact["indptr"], exact["columns"]
        # Rows begin at multiples of 16 bytes (see _in_two_parts).
        step = ACCESS_BYTES // dtype.itemsize
        width = -(-self.cols // step) * step
        A = torch.zeros(self.rows * width, dtype=dtype, device=columns.device)
        if values is None:
            values = torch.ones((), dtype=dtype, device=columns.device)
        first = torch.arange(self.rows, device=columns.device) * width
        place = torch.repeat_interleave(first, indptr.diff(), output_size=columns.numel())
        A[place.add_(columns)] = values.to(dtype)
        return {"A": A.view(self.rows, width)[:, : self.cols]}


def _takes_two_parts(A: Tensor, B: Tensor) -> bool:
    return B.is_cuda and 0 not in (*A.shape, *B.shape) and not adds_in_float16(B.dtype)


def _in_two_parts(A: Tensor, B: Tensor, whole: int, target: Tensor | None) -> Tensor:
    """Return A·B for columns of A that are no multiple of 16 bytes: those past ``whole`` first.

    cuBLAS uses its fast kernels only if that side of the product is one, however rows of A are
    aligned: 4267 x 4267 times 512 columns takes 184 us in float16 and 203 in TF32, 4264 of them
    28 and 73. Sums are float32 and begin with those of the few columns.
    """
    wide = B.dtype.itemsize == 2
    # cuBLAS rejects one row whose elements are strided like a column's.
    if target is not None and target.shape[-2] == 1 and target.stride(-2) < target.shape[-1]:
        target = None
    if target is None or (wide and target.dtype is not torch.float32):
        dtype = torch.float32 if wide else B.dtype
        target = torch.empty((*B.shape[:-2], A.shape[0], B.shape[-1]), dtype=dtype, device=B.device)
    for b, c in [(B, target)] if B.dim() == 2 else zip(B, target, strict=True):
        if wide:
            torch.mm(A[:, whole:], b[whole:], out_dtype=c.dtype, out=c)
            torch.addmm(c, A[:, :whole], b[:whole], out_dtype=c.dtype, out=c)
        else:
            torch.mm(A[:, whole:], b[whole:], out=c)
            torch.addmm(c, A[:, :whole], b[:whole], out=c)
    return target
