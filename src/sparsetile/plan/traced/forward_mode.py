"""Forward-mode derivatives: the tangent of a product is a sum of products.

torch's custom operators know nothing of tangents and would drop them. So ``Plan.run`` takes dual
tensors apart, multiplies with their parts, and joins the results. Operators refuse dual tensors
that reach them through other operators (``operators``), such as in the backward of a product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsetile.core.errors import value_error
from sparsetile.plan.traced import operators

__all__ = ["Dual", "duals", "product_of_duals", "refuse_out"]


@dataclass(frozen=True)
class Dual:
    """B, A's values and the bias, each as its primal and its tangent; None if there is none."""

    B: Tensor
    values: Tensor | None
    bias: Tensor | None
    d_B: Tensor | None
    d_values: Tensor | None
    d_bias: Tensor | None


def duals(B: Tensor, values: Tensor | None, bias: Tensor | None) -> Dual | None:
    """Take operands apart; None if none of them has a tangent."""
    if forward_ad._current_level < 0:
        return None
    pairs = [
        (None, None) if one is None else tuple(forward_ad.unpack_dual(one))
        for one in (B, values, bias)
    ]
    primals, tangents = zip(*pairs, strict=True)
    return None if all(each is None for each in tangents) else Dual(*primals, *tangents)


def refuse_out(out: object) -> None:
    """A result written in place has no tangent."""
    if out is not None:
        raise value_error(
            "run", "out", "omitted in forward-mode differentiation", "a tensor", "Omit out="
        )


def product_of_duals(
    flat: tuple[list[Tensor], str], dual: Dual, reduce: str, alpha: float, relu: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Return the product with its tangent, as one dual tensor."""
    B, values = dual.B, dual.values
    needs_grad = torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (B, values, dual.bias)
    )
    C = operators.product(
        flat, values, [], B, dual.bias, reduce, alpha, relu, out_dtype, needs_grad
    )
    if reduce in ("max", "min"):
        return forward_ad.make_dual(C, _extremum_tangent(flat, dual, reduce, alpha).to(C.dtype))
    # Parts are added in float32 and rounded once.
    wide = torch.float32 if C.dtype.itemsize == 2 else C.dtype
    tangent = torch.zeros_like(C, dtype=wide)
    for part, weights in ((dual.d_B, values), (B, dual.d_values)):
        if part is not None and (part is not B or weights is not None):
            tangent = tangent + operators.product(
                flat, weights, [], part, None, reduce, alpha, False, wide, needs_grad
            )
    if dual.d_bias is not None:
        tangent = tangent + dual.d_bias.to(wide)
    if relu:
        tangent = torch.where(C <= 0, torch.zeros_like(tangent), tangent)
    return forward_ad.make_dual(C, tangent.to(C.dtype))


def _extremum_tangent(
    flat: tuple[list[Tensor], str], dual: Dual, reduce: str, alpha: float
) -> Tensor:
    """The tangent of the entry that won; 0 in empty rows."""
    wide = torch.float32 if dual.B.dtype.itemsize == 2 else dual.B.dtype
    entry, winner, empty = operators.winners(flat, dual.values, dual.B, reduce)
    tangent = torch.zeros(entry.shape, dtype=wide, device=entry.device)
    if winner is None:
        return tangent
    if dual.d_B is not None:
        moved = torch.gather(dual.d_B.to(wide), -2, winner)
        tangent = moved if dual.values is None else moved * dual.values.to(wide)[entry]
    if dual.d_values is not None:
        moved = torch.gather(dual.B.to(wide), -2, winner)
        tangent = tangent + moved * dual.d_values.to(wide)[entry]
    return torch.where(empty, torch.zeros_like(tangent), tangent) * alpha
