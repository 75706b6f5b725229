"""``cpu``: numba kernels on the host. What runs where there is no GPU, with the same API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetile.balance.row_chunks import row_chunks
from sparsetile.intake.csr import VALUE_DTYPES
from sparsetile.systems.base import (
    PLAIN,
    Epilogue,
    Laps,
    PatternRunner,
    Request,
    Stage,
    System,
    make_recipe,
)
from sparsetile.systems.shared.epilogue import finish

__all__ = ["CPUSystem"]

# Chunks of rows: many more than cores, so that a slow chunk is made up for by the others.
CHUNKS = 64


def _batches(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 3 else tensor.unsqueeze(0)


class CPURunner(PatternRunner):
    """Parts: indptr int64, columns int32, chunk bounds int64."""

    def spmm(
        self,
        parts: Sequence[Tensor],
        values: Tensor | None,
        packed: Tensor | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        from sparsetile.kernels.cpu import api as cpu_api

        indptr, columns, bounds = parts
        if out.dtype is not B.dtype:  # 16-bit input, float32 result: nothing is rounded between
            B = B.to(out.dtype)
            values = None if values is None else values.to(out.dtype)
        tail = epilogue.bias is not None or epilogue.relu
        beta = 0.0 if tail else epilogue.beta
        target = torch.empty_like(out) if tail else out
        for b, c in zip(_batches(B), _batches(target), strict=True):
            cpu_api.spmm_sum(
                indptr, columns, values, b, c, epilogue.alpha, beta, bounds, mean=epilogue.mean
            )
        if tail:
            rest = Epilogue(beta=epilogue.beta, bias=epilogue.bias, relu=epilogue.relu)
            finish(target, out, indptr, rest)

    def new_output(self, B: Tensor, dtype: torch.dtype) -> Tensor:
        if B.dim() != 2:
            return super().new_output(B, dtype)
        from sparsetile.kernels.cpu import api as cpu_api

        return cpu_api.empty_output(self.rows, B.shape[-1], dtype)

    def extremum(
        self,
        parts: Sequence[Tensor],
        values: Tensor | None,
        B: Tensor,
        out: Tensor,
        args: Tensor | None,
        maximum: bool,
    ) -> None:
        from sparsetile.kernels.cpu import api as cpu_api

        indptr, columns, bounds = parts
        if args is None:
            args = torch.empty(out.shape, dtype=torch.int64)
        for b, c, arg in zip(_batches(B), _batches(out), _batches(args), strict=True):
            cpu_api.spmm_extremum(indptr, columns, values, b, c, arg, maximum, bounds)

    def sddmm(self, parts: Sequence[Tensor], G: Tensor, B: Tensor) -> Tensor:
        from sparsetile.kernels.cpu import api as cpu_api

        indptr, columns, bounds = parts
        total = torch.zeros(self.nnz, dtype=B.dtype)
        for g, b in zip(_batches(G), _batches(B), strict=True):
            out = torch.empty(self.nnz, dtype=B.dtype)
            cpu_api.sddmm(indptr, columns, g, b, out, bounds)
            total += out
        return total


class CPUSystem(System):
    """numba on the host's cores, deterministic for any number of threads."""

    name = "cpu"
    summary = "numba on the host's cores"
    devices = ("cpu",)
    dtypes = VALUE_DTYPES
    deterministic = True

    def build(self, request: Request) -> Stage:
        csr, laps = request.csr, Laps(request)
        bounds = row_chunks(csr.indptr, CHUNKS)
        laps("schedule")
        choices = {
            "format": "rows",
            "schedule": f"{bounds.numel() - 1} chunks of rows of equal cost",
        }
        parts = (csr.indptr, csr.indices, bounds)
        return Stage(self.name, parts, make_recipe(self.name, csr), choices, laps.seconds)

    def make_runner(self, meta: Mapping[str, Any]) -> CPURunner:
        return CPURunner(meta)
