"""Products by torch's own libraries, in the precision that this package guarantees."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

__all__ = ["adds_in_float16", "float32_product", "without_autocast"]


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Keep operands in their type: operators run with the caller's autocast still on."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def adds_in_float16(dtype: torch.dtype) -> bool:
    """Whether torch lets cuBLAS add up in float16, whose results cannot be stored in float32."""
    return dtype is torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation


def float32_product(A: Tensor, B: Tensor) -> Tensor:
    """Return A·B of 16-bit matrices [M, K] and [..., K, N] with its sums in float32.

    By default torch lets cuBLAS add up a product stored in 16 bits in 16 bits. A product stored in
    float32 loses no more than float32 does.
    """
    if adds_in_float16(A.dtype) or A.device.type != "cuda" or 0 in (*A.shape, *B.shape):
        return torch.matmul(A.float(), B.float())
    if B.dim() == 2:
        return torch.mm(A, B, out_dtype=torch.float32)
    return torch.bmm(A.expand(B.shape[0], *A.shape), B, out_dtype=torch.float32)
