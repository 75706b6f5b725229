"""Checks of ``DistributedPlan.run``'s arguments, and what must be the same on all ranks."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from sparsetile.core.checks import real_number, reduce_name
from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.csr import CSR
from sparsetile.plan.operands import check_epilogue, in_plan_dtype

__all__ = ["SharedRows", "check_rows", "facts_of"]


class SharedRows(Protocol):
    """The attributes of a plan that the checks read."""

    shape: tuple[int, int]
    local_shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    system: str
    rank: int
    _csr: CSR


def check_rows(
    plan: SharedRows,
    B: Any,
    alpha: Any,
    reduce: str,
    bias: Tensor | None,
    relu: bool,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, float, str]:
    """Return this rank's rows of B in the product's type, alpha, and the canonical reduction."""
    own = plan.local_shape[1]
    if not isinstance(B, Tensor):
        raise type_error(
            "run", "B", "a torch tensor", type(B).__name__, "Convert it with torch.as_tensor"
        )
    if B.dim() < 2 or B.shape[-2] != own:
        raise value_error(
            "run", "B", f"of shape [..., {own}, N] on rank {plan.rank}", tuple(B.shape),
            "Pass this rank's rows of B: plan.shard(B) takes them from a whole B",
        )  # fmt: skip
    if B.device != plan.device or B.layout is not torch.strided:
        raise value_error(
            "run", "B", f"a dense tensor on {plan.device} like the plan",
            f"{B.layout} on {B.device}", f"Move it with B.to({str(plan.device)!r})",
        )  # fmt: skip
    reduce = reduce_name("run", reduce)
    B = in_plan_dtype(plan, B, "run", "B")
    check_epilogue(B, None, reduce, bias, relu, out_dtype)
    return B, real_number("run", "alpha", alpha), reduce


def facts_of(
    B: Tensor,
    alpha: float,
    reduce: str,
    bias: Tensor | None,
    relu: bool,
    out_dtype: torch.dtype | None,
) -> dict[str, Any]:
    """Return what must be the same on every rank, by the names that errors use."""
    return {
        "the dtype of B": B.dtype,
        "reduce": reduce,
        "the width of B": B.shape[-1],
        "the dimensions of B": B.dim(),
        "the batches of B": "x".join(map(str, B.shape[:-2])) or "0",
        "whether B requires grad": torch.is_grad_enabled() and B.requires_grad,
        "whether bias is given": bias is not None,
        "relu": bool(relu),
        "out_dtype": out_dtype,
        "alpha": alpha,
    }
