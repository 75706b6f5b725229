"""What ``DistributedPlan.run`` accepts on a rank, and what must be the same on all of them."""

from __future__ import annotations

import struct
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsetile.core.checks import REDUCES, real_number, reduce_name
from sparsetile.core.errors import type_error, value_error
from sparsetile.dist.agreement import Agreement
from sparsetile.dist.group import Ranks
from sparsetile.intake.csr import CSR, VALUE_DTYPES
from sparsetile.plan.operands import check_epilogue, in_plan_dtype

__all__ = ["SharedRows", "agreement_of", "check_rows", "facts_of", "values_fact"]

_NAMES = (
    "the dtype of B",
    "reduce",
    "the width of B",
    "the dimensions of B",
    "the batches of B",
    "whether B requires grad",
    "values",
    "whether bias is given",
    "relu",
    "out_dtype",
    "alpha",
)
_SIGNATURE = len(_NAMES) - 1  # all but alpha, which may be another number at every product
_BASE = 1_000_003  # of the batches' sizes as one number


class SharedRows(Protocol):
    """The part of a plan that its checks look at."""

    shape: tuple[int, int]
    local_shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    system: str
    rank: int
    _csr: CSR


def agreement_of(ranks: Ranks) -> Agreement:
    """Return what ranks agree on before each product."""
    return Agreement(ranks, "run", _NAMES, _text, _SIGNATURE)


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
    values: int,
    bias: Tensor | None,
    relu: bool,
    out_dtype: torch.dtype | None,
) -> tuple[int, ...]:
    """Return what must be the same on every rank, as numbers: ranks compare these.

    Parameters
    ----------
    values : int
        :func:`values_fact` of the values of this rank's rows; 0 where they are not exchanged.
    """
    lead = 0
    for size in B.shape[:-2]:
        lead = (lead * _BASE + size) % (1 << 62)
    tracked = torch.is_grad_enabled() and B.requires_grad
    return (
        VALUE_DTYPES.index(B.dtype), REDUCES.index(reduce), B.shape[-1], B.dim(), lead,
        int(tracked), values, int(bias is not None), int(relu),
        0 if out_dtype is None else 1 + VALUE_DTYPES.index(out_dtype),
        struct.unpack("<q", struct.pack("<d", alpha))[0],
    )  # fmt: skip


def values_fact(values: Tensor | None) -> int:
    """Return what an exchange of values depends on; 0 for the plan's own, which stay in place."""
    if values is None:
        return 0
    tracked = torch.is_grad_enabled() and values.requires_grad
    return 1 + 2 * VALUE_DTYPES.index(values.dtype) + int(tracked)


def _text(name: str, fact: int) -> str:
    if name == "the dtype of B":
        return str(VALUE_DTYPES[fact])
    if name == "reduce":
        return REDUCES[fact]
    if name == "the batches of B":
        sizes = []
        while fact:
            fact, size = divmod(fact, _BASE)
            sizes.append(str(size))
        return "x".join(reversed(sizes)) or "0"
    if name == "values":
        if fact == 0:
            return "those of the plan"
        kind, tracked = divmod(fact - 1, 2)
        return f"{VALUE_DTYPES[kind]}{' that require grad' if tracked else ''}"
    if name == "out_dtype":
        return str(VALUE_DTYPES[fact - 1]) if fact else "None"
    if name == "alpha":
        return str(struct.unpack("<d", struct.pack("<q", fact))[0])
    return str(fact) if name in ("the width of B", "the dimensions of B") else str(bool(fact))
