"""The error bound: the largest rounding error of a correct product.

Let ``u`` be the unit roundoff of the accumulator (2^-24 for FP32, 2^-53 for FP64), ``L`` the number
of products in a sum and ``m = Σ|a·b|`` its magnitude. A product is correct if

    |C - reference| ≤ accumulation + operands + rounding of C

**Accumulation.** Every sum, in any order, is a chain of L multiplications and additions, and each
adds a relative error δ of a partial sum, which is at most m.

- Default: ``(4 + 4·√L)·u·m``. If they round to nearest, the δ have no preferred sign, and their
  sum grows as √L whatever the data: about √L·u·m/3 if all products have one sign, about u·m/2 if
  they change sign. Tensor Cores truncate: |δ| ≤ 2u towards zero. With products of random
  sign the partial sums grow as √k, and the errors add up to about 0.7·√L·u·m. The bound is six
  times the largest of these, so a correct product of random data exceeds it with negligible
  probability. A dropped or doubled entry of average size m/L exceeds it in rows of up to 26,000
  entries in FP32, and in longer rows if the entry is larger than the average, which it is in some
  column of B.
- ``worst_case``: ``(L + 2)·2u·m``. The first-order bound of any chain of L products and sums with a
  multiplication by alpha and a division (mean), each truncated. It holds for every input, also for
  rows of equal sign and equal rounding errors, and is loose by about √L for random data.

Underflow adds ``L·tiny``: a product or sum below the accumulator's smallest normal number may be
flushed to zero.

**Operands.** TF32 rounds both factors to 11 bits, (1 + 2^-11)² - 1 ≤ 2^-10 + 2^-20, times m. Sums
of FP8 products keep about 14 bits in Tensor Cores: 2^-10·m. The operands of an FP8 product are
exact: the reference takes them as they were rounded.

**Rounding of C** to its type with unit roundoff ``v``: ``v·(|reference| + all of the above)``, and
at least half a step of the subnormal numbers, ``v·smallest normal``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.intake.csr import FP8

__all__ = ["error_bound"]

_TF32_OPERANDS = 2.0**-10 + 2.0**-20
_FP8_SUMS = 2.0**-10


def error_bound(
    result: Tensor, magnitude: Tensor, terms: Tensor | int, *, dtype: torch.dtype,
    out_dtype: torch.dtype | None = None, tf32: bool = False, worst_case: bool = False,
) -> Tensor:  # fmt: skip
    """Return the largest |C - result| of a correct product, element by element.

    ``result`` and ``magnitude`` come from :func:`sparsetile.check.reference.reference`; ``terms``
    are the products in each sum, such that they broadcast (1 for max and min). ``dtype`` is that of
    A and B, ``out_dtype`` that of C, the same by default. ``tf32``: float32 operands may have been
    rounded to TF32. ``worst_case``: the bound must hold for every input instead of random ones, see
    above.
    """
    accumulator = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32)
    count = torch.as_tensor(terms, dtype=torch.float64, device=result.device)
    if worst_case:
        relative = (count + 2) * accumulator.eps
    else:
        relative = (4 + 4 * count.sqrt()) * (accumulator.eps / 2)
    if tf32 and dtype is torch.float32:
        relative = relative + _TF32_OPERANDS
    if dtype is FP8:
        relative = relative + _FP8_SUMS
    bound = relative * magnitude + count * accumulator.tiny
    stored = torch.finfo(out_dtype or dtype)
    return bound + stored.eps / 2 * (result.abs() + bound + stored.tiny)
