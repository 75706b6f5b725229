"""Rounding of values before they are packed."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["round_tf32"]


def round_tf32(values: Tensor) -> Tensor:
    """Round float32 to TF32 (10 bits after the point): to nearest, ties to even.

    The same as ``cvt.rn.tf32.f32`` on the device. Infinities and NaN stay. A NaN is kept in the
    bits that Tensor Cores read: with only lower bits set it would be an infinity to them.
    """
    bits = values.view(torch.int32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    rounded = torch.where(torch.isfinite(values), rounded, values)
    return torch.where(torch.isnan(values), torch.full_like(values, torch.nan), rounded)
