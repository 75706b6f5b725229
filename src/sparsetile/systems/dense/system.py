"""``dense``: a dense copy of A, multiplied by torch (cuBLAS on a GPU).

The right choice if A is hardly sparse. Its explicit zeros may meet an Inf or NaN of B; such
elements of C are recomputed only from A's entries (:meth:`ExactRunner.repair`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparsetile.engines.request import BuiltSystem, Request, prefixed
from sparsetile.systems.base import System
from sparsetile.systems.dense import DEVICES, QUICK_ON
from sparsetile.systems.dense.cost import predict_dense
from sparsetile.systems.dense.runner import DenseRunner
from sparsetile.systems.registry import exact_runner, exact_system

__all__ = ["SYSTEM", "DenseSystem"]

# The dense copy of A may take at most this share of the free memory.
MEMORY_SHARE = 0.25
CPU_LIMIT_BYTES = 2 * 1024**3


class DenseSystem(System):
    """torch.matmul on a dense copy of A."""

    name = "dense"
    summary = "A written out in full, torch.matmul"
    devices = DEVICES
    quick_on = QUICK_ON
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    deterministic = True
    kernels = ("spmm_csr", "finish_dense")  # repairs
    follows_tf32 = True  # cuBLAS rounds float32 operands if torch allows it

    def further_reasons(self, request: Request) -> list[str]:
        rows, cols = request.csr.shape
        needed = rows * cols * request.dtype.itemsize
        if request.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(request.device)
            limit = int(MEMORY_SHARE * free)
        else:
            limit = CPU_LIMIT_BYTES
        if needed > limit:
            return [f"would write A out in {needed / 2**30:.1f} GiB, over {limit / 2**30:.1f} GiB"]
        return exact_system(request.device.type).further_reasons(request)

    def predict(self, request: Request) -> float:
        return predict_dense(request)

    def build(self, request: Request) -> BuiltSystem:
        """Also builds the exact system that repairs non-finite results, and adds its timings."""
        exact = exact_system(request.device.type).build(request.changed(ablation=None))
        tensors = prefixed("exact", exact.tensors)
        choices = {"format": "dense", "schedule": "torch.matmul's"}
        return self.built(request, tensors, choices, exact.seconds, exact=exact.recipe)

    def make_runner(self, meta: Mapping[str, Any]) -> DenseRunner:
        return DenseRunner(meta, exact_runner(str(meta["exact"]), self.name))


SYSTEM = DenseSystem()
