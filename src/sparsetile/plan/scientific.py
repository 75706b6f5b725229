"""Plans as SciPy's linear operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator

from sparsetile.core.errors import type_error

__all__ = ["PlanOperator"]


class PlanOperator(LinearOperator):
    """A plan as SciPy's solvers take it: NumPy arrays in, NumPy arrays of the plan's type out."""

    def __init__(self, plan: Any) -> None:
        if plan.dtype is torch.bfloat16:
            raise type_error(
                "as_linear_operator", "the plan", "of a type that NumPy has", plan.dtype,
                "Plan A in float32 or float64",
            )  # fmt: skip
        if plan.column_order is not None:
            raise type_error(
                "as_linear_operator", "the plan", "one whose columns keep their order",
                "reorder_columns=True", "Plan A without it",
            )  # fmt: skip
        self.plan = plan
        super().__init__(np.dtype(str(plan.dtype).removeprefix("torch.")), plan.shape)

    def _matvec(self, x: Any) -> Any:
        return self._product(self.plan, x.reshape(-1, 1)).reshape(-1)

    def _matmat(self, X: Any) -> Any:
        return self._product(self.plan, X)

    def _rmatvec(self, x: Any) -> Any:
        return self._product(self.plan.H, x.reshape(-1, 1)).reshape(-1)

    def _rmatmat(self, X: Any) -> Any:
        return self._product(self.plan.H, X)

    def _product(self, plan: Any, X: Any) -> Any:
        dtype = self.dtype
        if np.iscomplexobj(X) and dtype.kind != "c":
            if dtype.itemsize < 4:  # no complex type has such parts
                return self._product(plan, X.real) + 1j * self._product(plan, X.imag)
            dtype = np.result_type(dtype, np.complex64)
        with torch.no_grad():
            dense = torch.from_numpy(np.ascontiguousarray(X, dtype=dtype)).to(plan.device)
            return (plan @ dense).cpu().numpy()
