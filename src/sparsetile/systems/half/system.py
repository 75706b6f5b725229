"""``half``: float32 products on CUDA cores that gather a copy of B in 16 bits.

Most products of graphs are bound by gathers of rows of B from L2. If torch allows TF32, B may be
rounded to eleven significant bits, and float16 has as many. So each product first copies B to
float16, each row times a power of two that brings it into float16's range, and then gathers half
the bytes. A's values and all sums are float32. Rows that do not fit such a copy (elements further
apart than 2^28, or very large or small ones) are gathered from B itself, and so are rows for
entries of A that are very large or small.

Only the GPU knows which rows fit, after the copy. The host does not wait for it, and the bits must
not depend on timing, because ``csr`` does not round B. So a product whose rows do not fit also
runs here. It reads them like ``csr``, by whole accesses, and gathers the copy only for each row's
first chunk; the copy was then made in vain.

It pays if rows of B are used several times: from about ten entries per row of B.
"""

from __future__ import annotations

import torch

from sparsetile.engines.request import BuiltSystem, Request
from sparsetile.engines.rows.build import build_rows
from sparsetile.kernels.half import COPY_DTYPE
from sparsetile.systems.base import System
from sparsetile.systems.half import DEVICES, QUICK_ON
from sparsetile.systems.half.cost import predict_half
from sparsetile.systems.half.runner import HalfRunner
from sparsetile.systems.requirements import tile_reasons

__all__ = ["SYSTEM", "HalfSystem"]


class HalfSystem(System):
    """CUDA cores on rows of A and a rounded copy of B."""

    name = "half"
    summary = "CUDA cores on rows, gathering a copy of B in 16 bits"
    devices = DEVICES
    quick_on = QUICK_ON
    dtypes = (torch.float32,)
    deterministic = True
    architectures = "sm_80 and newer"
    ordered = True
    rounds_to_tf32 = True
    casts_to_exact = True  # in 16 bits no copy is needed
    kernels = ("half_rows", "spmm_half")
    runner = HalfRunner

    def further_reasons(self, request: Request) -> list[str]:
        return tile_reasons(request)

    def predict(self, request: Request) -> float:
        return predict_half(request)

    def build(self, request: Request) -> BuiltSystem:
        """Build the rows like ``csr`` for operands of 16 bits."""
        made = build_rows(request.changed(dtype=COPY_DTYPE), shares=False)
        made.choices["copy of B"] = "float16, each row times a power of two"
        return self.built_by(request, made)


SYSTEM = HalfSystem()
