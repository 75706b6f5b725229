"""torch.matmul on A written out, then the repair of what is not finite.

Products of 16-bit matrices are made in float32 and rounded once: on a GPU because torch lets cuBLAS
add them up in 16 bits, elsewhere where something happens to a sum before it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsetile.systems.base import PLAIN, Epilogue, ExactRunner, Runner, Tensors, part
from sparsetile.systems.shared.epilogue import apply_epilogue
from sparsetile.systems.shared.geometry import ACCESS_BYTES
from sparsetile.systems.shared.library import float32_product, without_autocast

__all__ = ["DenseRunner"]


class DenseRunner(Runner):
    """Tensors: ``row_ids`` and ``columns`` of each entry (int64), and those of the exact system.

    Packed ``A``: the dense matrix.
    """

    packed_names = ("A",)
    pack_only = ("row_ids", "columns")

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
        with without_autocast(B.device):
            if B.dtype.itemsize == 2 and not (out.dtype is B.dtype and self._in_place(B, epilogue)):
                product = float32_product(A, B)
            else:
                product = torch.matmul(A, B, out=out if epilogue.beta == 0.0 else None)
        self._exact.repair(exact, values, B, product)
        if product is not out or not epilogue.plain:
            apply_epilogue(product, out, exact["indptr"], epilogue)

    def _in_place(self, B: Tensor, epilogue: Epilogue) -> bool:
        """Whether torch's product is the result."""
        return B.device.type == "cpu" and epilogue.plain

    def pack(self, tensors: Tensors, values: Tensor | None, dtype: torch.dtype) -> Tensors:
        row_ids, columns = tensors["row_ids"], tensors["columns"]
        # Rows begin at multiples of 16 bytes: without, cuBLAS takes 4 to 8 times as long
        # (4267 x 4267 times 512 columns: 194 us in float16, 210 in TF32).
        step = ACCESS_BYTES // dtype.itemsize
        width = -(-self.cols // step) * step
        A = torch.zeros((self.rows, width), dtype=dtype, device=row_ids.device)[:, : self.cols]
        if values is None:
            values = torch.ones((), dtype=dtype, device=row_ids.device)
        A[row_ids, columns] = values.to(dtype)
        return {"A": A}
