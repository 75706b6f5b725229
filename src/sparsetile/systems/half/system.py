"""``half``: float32 products on CUDA cores that gather a copy of B in 16 bits.

Most products of graphs wait for rows of B to come from L2. Where torch allows TF32, B may be
rounded to eleven significant bits, and float16 holds as many: each product first writes B out in
float16, each row times a power of two that brings it into float16's range, and then gathers half
the bytes. A's values and all sums are float32. Rows that do not fit such a copy (elements further
apart than 2^28, or very large or small ones) are gathered as they are, and so are rows for entries
of A that are themselves very large or small.

Which rows fit is known to the GPU alone, after B was copied. The host does not ask: an answer that
comes late would make bits depend on when it came, because ``csr`` does not round B. So a product
whose rows do not fit stays here. It reads them as ``csr`` does, by whole accesses, and does not
gather the copy as well, except in each row's first chunk; the copy is what it has made in vain.

It pays where rows of B are used several times: from about ten entries a row of B on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparsetile.kernels.half import COPY_DTYPE
from sparsetile.systems.base import BuiltSystem, Request, System, prefixed
from sparsetile.systems.half.cost import predict_half
from sparsetile.systems.half.runner import HalfRunner
from sparsetile.systems.registry import SYSTEMS
from sparsetile.systems.shared.requirements import tile_reasons

__all__ = ["HalfSystem"]


class HalfSystem(System):
    """CUDA cores on rows of A and a rounded copy of B."""

    name = "half"
    summary = "CUDA cores on rows, gathering a copy of B in 16 bits"
    devices = ("cuda",)
    dtypes = (torch.float32,)
    deterministic = True
    architectures = "sm_80 and newer"
    ordered = True
    rounds_to_tf32 = True
    casts_to_exact = True  # in 16 bits there is nothing to copy
    kernels = ("half_rows", "spmm_half")

    def further_reasons(self, request: Request) -> list[str]:
        return tile_reasons(request)

    def predict(self, request: Request) -> float:
        return predict_half(request)

    def build(self, request: Request) -> BuiltSystem:
        """Build the rows as ``csr`` does for operands of 16 bits."""
        rows = SYSTEMS["csr"].build(request.changed(dtype=COPY_DTYPE, ablation=None))
        choices = {**rows.choices, "copy of B": "float16, each row times a power of two"}
        tensors = prefixed("rows", rows.tensors)
        return self.built(request, tensors, choices, rows.seconds, recipe=rows.recipe)

    def make_runner(self, meta: Mapping[str, Any]) -> HalfRunner:
        return HalfRunner(meta)
