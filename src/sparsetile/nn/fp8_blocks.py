"""Blocks of a weight in FP8 (E4M3), each with a power of two as its scale."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.intake.csr import FP8

__all__ = ["quantized", "scaled"]

_LARGEST = 448.0  # finite value of E4M3
_EXPONENT_LIMIT = 7  # of linear_few.cu


def quantized(function: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks [blocks, unit, unit] in FP8, and each one's exponent in int8."""
    largest = weight.abs().amax((1, 2)).to(torch.float32)
    if not bool((largest <= _LARGEST * 2.0**_EXPONENT_LIMIT).all()):
        raise value_error(
            function, "weight", "finite and at most 57344",
            f"a kept block with {float(largest.max()):g}", "Clip the weights first",
        )  # fmt: skip
    # The largest weight of a block lies in the upper half of E4M3's range.
    exponent = torch.ceil(torch.log2(largest.clamp(min=2.0**-60) / _LARGEST)).clamp(min=-100)
    whole = exponent.to(torch.int8)
    return scaled(weight, -whole, torch.float32).to(FP8), whole


def scaled(blocks: Tensor, exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks times two to the power of each one's exponent, in ``dtype``; rounded once at most."""
    # Float16 has too few powers of two; the other types have all that occur.
    wide = torch.float32 if dtype is torch.float16 else dtype
    # The bits of a float32 that is a power of two: pow and exp2 need not be exact.
    power = ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
    return blocks.to(wide).mul(power.to(wide).view(-1, 1, 1)).to(dtype)
