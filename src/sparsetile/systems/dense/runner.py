"""torch.matmul on A written out, then the repair of what is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsetile.systems.base import PLAIN, Epilogue, ExactRunner, Runner, Tensors, part
from sparsetile.systems.shared.epilogue import apply_epilogue

__all__ = ["DenseRunner"]


class DenseRunner(Runner):
    """Tensors: ``row_ids`` and ``columns`` of each entry (int64), and those of the exact system.

    Packed ``A``: the dense matrix.
    """

    packed_names = ("A",)

    def __init__(self, meta: Mapping[str, Any], exact: ExactRunner) -> None:
        super().__init__(meta)
        self._exact = exact

    def spmm(
        self,
        tensors: Tensors,
        values: Tensor | None,
        packed: Tensors | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        exact = part("exact", tensors)
        A = (self.pack(tensors, values, B.dtype) if packed is None else packed)["A"]
        if out.dtype is not B.dtype:  # 16-bit input, float32 result: nothing is rounded between
            A, B = A.to(out.dtype), B.to(out.dtype)
            values = None if values is None else values.to(out.dtype)
        plain = epilogue.beta == 0.0
        product = torch.matmul(A, B, out=out) if plain else torch.matmul(A, B)
        self._exact.repair(exact, values, B, product)
        if epilogue is not PLAIN:
            apply_epilogue(product, out, exact["indptr"], epilogue)

    def pack(self, tensors: Tensors, values: Tensor | None, dtype: torch.dtype) -> Tensors:
        row_ids, columns = tensors["row_ids"], tensors["columns"]
        A = torch.zeros((self.rows, self.cols), dtype=dtype, device=row_ids.device)
        if values is None:
            values = torch.ones((), dtype=dtype, device=row_ids.device)
        A[row_ids, columns] = values.to(dtype)
        return {"A": A}
