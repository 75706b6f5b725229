"""``cusparse``: NVIDIA's library through torch's CSR tensors. The fallback and the yardstick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetile.systems.base import (
    PLAIN,
    Epilogue,
    Laps,
    Request,
    Runner,
    Stage,
    System,
    make_recipe,
)
from sparsetile.systems.shared.epilogue import finish

__all__ = ["CuSparseSystem"]


class CuSparseRunner(Runner):
    """Parts: int32 indptr, int32 columns, int64 indptr. Packed: ones standing for a pattern."""

    packs = True

    def pack(self, parts: Sequence[Tensor], values: Tensor | None, dtype: torch.dtype) -> Tensor:
        count = self.nnz if values is None else 0
        return torch.ones(count, dtype=dtype, device=parts[0].device)

    def spmm(
        self,
        parts: Sequence[Tensor],
        values: Tensor | None,
        packed: Tensor | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        indptr32, columns, indptr = parts
        if out.numel() == 0:
            return
        weights = packed if values is None else values
        if weights is None:
            weights = self.pack(parts, None, B.dtype)
        A = torch.sparse_csr_tensor(
            indptr32, columns, weights, (self.rows, self.cols), check_invariants=False
        )
        if B.dim() == 2:
            product = A @ B if self.nnz else torch.zeros_like(out)
        else:
            product = torch.stack([A @ b for b in B]) if self.nnz else torch.zeros_like(out)
        finish(product, out, indptr, epilogue)


class CuSparseSystem(System):
    """torch.sparse CSR on CUDA.

    Not for 16-bit types: cuSPARSE rounds their partial sums to 16 bits, which breaks the promise
    of FP32 accumulation (seen on an H200: errors of 100 times the bound).
    """

    name = "cusparse"
    summary = "cuSPARSE through torch.sparse CSR"
    devices = ("cuda",)
    dtypes = (torch.float32, torch.float64)
    deterministic = False

    def further_reasons(self, request: Request) -> list[str]:
        if request.csr.nnz >= 2**31:
            return [f"is used with 32-bit offsets, A has {request.csr.nnz} entries"]
        return []

    def build(self, request: Request) -> Stage:
        csr, laps = request.csr, Laps(request)
        parts = (csr.indptr.to(torch.int32), csr.indices, csr.indptr)
        laps("format")
        choices = {"format": "torch CSR, 32-bit indices", "schedule": "cuSPARSE's own"}
        return Stage(self.name, parts, make_recipe(self.name, csr), choices, laps.seconds)

    def make_runner(self, meta: Mapping[str, Any]) -> CuSparseRunner:
        return CuSparseRunner(meta)
