"""``dense``: A written out in full and multiplied by torch (cuBLAS on a GPU).

The right choice when A is hardly sparse. The zeros it invents may meet an Inf or NaN of B; such
elements of C are computed again from A's entries alone (``CSRRunner.repair`` on a GPU).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetile.systems.base import (
    PLAIN,
    Epilogue,
    Laps,
    PatternRunner,
    Request,
    Runner,
    Stage,
    System,
    make_recipe,
)
from sparsetile.systems.shared.epilogue import finish

__all__ = ["DenseSystem"]

# The dense copy of A may not take more than this share of the memory that is free.
MEMORY_SHARE = 0.25
CPU_LIMIT_BYTES = 2 * 1024**3


class DenseRunner(Runner):
    """Parts: row id and column of each entry (int64), then the parts of the exact system."""

    packs = True

    def __init__(self, meta: Mapping[str, Any], exact: PatternRunner) -> None:
        super().__init__(meta)
        self._exact = exact

    def spmm(
        self,
        parts: Sequence[Tensor],
        values: Tensor | None,
        packed: Tensor | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        exact_parts = parts[2:]
        A = self.pack(parts, values, B.dtype) if packed is None else packed
        if out.dtype is not B.dtype:  # 16-bit input, float32 result: nothing is rounded between
            A, B = A.to(out.dtype), B.to(out.dtype)
            values = None if values is None else values.to(out.dtype)
        plain = epilogue.beta == 0.0
        product = torch.matmul(A, B, out=out) if plain else torch.matmul(A, B)
        self._repair(exact_parts, values, B, product)
        if epilogue is not PLAIN:
            finish(product, out, exact_parts[0], epilogue)

    def pack(self, parts: Sequence[Tensor], values: Tensor | None, dtype: torch.dtype) -> Tensor:
        row_ids, columns = parts[:2]
        A = torch.zeros((self.rows, self.cols), dtype=dtype, device=row_ids.device)
        if values is None:
            values = torch.ones((), dtype=dtype, device=row_ids.device)
        A[row_ids, columns] = values.to(dtype)
        return A

    def _repair(
        self, exact_parts: Sequence[Tensor], values: Tensor | None, B: Tensor, product: Tensor
    ) -> None:
        if B.is_cuda:
            self._exact.repair(exact_parts, values, B, product)  # type: ignore[attr-defined]
        elif not bool(torch.isfinite(product).all()):
            self._exact.spmm(exact_parts, values, None, B, product)


class DenseSystem(System):
    """torch.matmul on A written out."""

    name = "dense"
    summary = "A written out in full, torch.matmul"
    devices = ("cuda", "cpu")
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    deterministic = True

    def __init__(self, exact: Mapping[str, System]) -> None:
        self._exact = exact

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
        return self._exact[request.device.type].further_reasons(request)

    def build(self, request: Request) -> Stage:
        csr = request.csr
        # What repairs non-finite results is built along; its time is its own split.
        exact = self._exact[request.device.type].build(request)
        laps = Laps(request)
        parts = (csr.row_ids(), csr.indices.to(torch.int64), *exact.parts)
        laps("format")
        seconds = {name: exact.seconds[name] + spent for name, spent in laps.seconds.items()}
        recipe = make_recipe(self.name, csr, exact=exact.recipe)
        choices = {"format": "dense", "schedule": "torch.matmul's"}
        return Stage(self.name, parts, recipe, choices, seconds)

    def make_runner(self, meta: Mapping[str, Any]) -> DenseRunner:
        from sparsetile.systems.registry import runner

        exact = runner(str(meta["exact"]))
        if not isinstance(exact, PatternRunner):
            raise TypeError(f"dense: exact must be a pattern runner, got {type(exact).__name__}.")
        return DenseRunner(meta, exact)
