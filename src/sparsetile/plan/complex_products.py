"""Products with complex numbers, by the kernels of real ones.

The real and imaginary parts of a complex B [K, N] lie side by side: in memory it is a real matrix
of 2·N columns. A real A multiplies that at once. Of a complex A = R + i·J,

    A·B = R·B + J·(i·B),

two real products of the same pattern; the second adds to the first one's result. So each element is
what complex arithmetic gives, non-finite numbers included: no zero is invented that could meet an
Inf. Autograd sees the two products, so gradients follow torch's convention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparsetile.core.checks import real_number, reduce_name
from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.csr import COMPLEX
from sparsetile.plan.modes import plain_call
from sparsetile.plan.operands import check_operand, check_out, wrong_type

__all__ = [
    "Parts", "as_columns", "as_complex", "complex_of", "complex_product", "parts_of", "times_i",
]  # fmt: skip


# A real product of columns, out, alpha, beta, the part of A's values (0 or 1) and bias.
Parts: TypeAlias = Callable[
    [Tensor, Tensor | None, float, float, int, Tensor | None], Tensor
]  # fmt: skip


def complex_of(dtype: torch.dtype) -> torch.dtype | None:
    """Return the complex type whose parts have this type, if there is one."""
    return next((kind for kind, part in COMPLEX.items() if part is dtype), None)


def as_columns(B: Tensor) -> Tensor:
    """Return a complex [..., K, N] as a real [..., K, 2·N], without a copy if rows allow it."""
    return torch.view_as_real(B.resolve_conj().resolve_neg()).flatten(-2)


def parts_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of the real and the imaginary parts of values; differentiable."""
    # Values of a sparse tensor are a view of it, of which torch makes no views of parts.
    real, imaginary = torch.view_as_real(values.resolve_conj().clone()).unbind(-1)
    return real.contiguous(), imaginary.clone()


def times_i(B: Tensor) -> Tensor:
    """Return :func:`as_columns` of i·B. Parts change places; nothing is multiplied."""
    return torch.stack((-B.imag, B.real), -1).flatten(-2)


def as_complex(C: Tensor, n: int) -> Tensor:
    """Undo :func:`as_columns` of a result with ``n`` complex columns."""
    pairs = C.unflatten(-1, (n, 2))
    if any(step % 2 for step in C.stride()[:-1]):
        pairs = pairs.contiguous()
    return torch.view_as_complex(pairs)


def complex_product(
    planned: Any, parts: Parts, two: bool, B: Tensor, out: Tensor | None, alpha: Any, beta: Any,
    reduce: str, tracked: bool, bias: Any, relu: Any, out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Return alpha · A·B (+ beta · out), or alpha · A·B + bias.

    Parameters
    ----------
    planned
        The plan: A's shape, device and type.
    parts
        The real product: see ``Parts``.
    two : bool
        Whether A has imaginary parts.
    tracked : bool
        Whether autograd follows A's values.
    """
    check_operand(planned, B)
    kind = complex_of(planned.dtype) or planned.dtype
    if B.dtype is not kind:
        raise wrong_type(kind, B, "run", "B")
    if relu is not False or out_dtype not in (None, kind):
        raise value_error(
            "run", "relu and out_dtype", "omitted in a complex product",
            "relu" if relu is not False else out_dtype, "Apply them to the result instead",
        )  # fmt: skip
    if reduce_name("run", reduce) in ("max", "min"):
        raise value_error(
            "run", "reduce", "sum or mean in a complex product", reduce,
            "Complex numbers have no order: multiply real ones",
        )  # fmt: skip
    alpha, beta = real_number("run", "alpha", alpha), real_number("run", "beta", beta)
    added = None if bias is None else _bias(bias, B)
    operands = (B, bias)
    needs_grad = torch.is_grad_enabled() and (
        tracked or any(each is not None and each.requires_grad for each in operands)
    )
    if beta != 0.0 and out is None:
        raise value_error("run", "beta", "0 when out is not given", beta, "Pass out=")
    target = None
    if out is not None:
        if bias is not None:
            raise value_error("run", "bias", "omitted with out=", "out=", "Add it to the result")
        check_out(planned.shape[0], B, out, reduce, needs_grad)
        target = out if out.stride(-1) == 1 or out.shape[-1] == 1 else out.contiguous()
    n, place = B.shape[-1], B.device.type
    # Autocast casts the columns of real products, but torch casts no complex numbers.
    cast = torch.is_autocast_enabled(place)
    with torch.autocast(place, enabled=False) if cast else contextlib.nullcontext():
        # Made first: out may be B.
        turned = times_i(B) if two else None
        view = None if target is None else torch.view_as_real(target).flatten(-2)
        C = parts(as_columns(B), view, alpha, beta, 0, added)
        if turned is not None and (target is not None or (plain_call() and not needs_grad)):
            parts(turned, C, alpha, 1.0, 1, None)
        elif turned is not None:
            C = C + parts(turned, None, alpha, 0.0, 1, None)
    if out is None:
        return as_complex(C, n)
    return out if target is out else out.copy_(target)  # type: ignore[arg-type]


def _bias(bias: Any, B: Tensor) -> Tensor:
    """Return a bias as real columns."""
    if not isinstance(bias, Tensor):
        raise type_error(
            "run", "bias", "a torch tensor", type(bias).__name__, "Convert it with torch.as_tensor"
        )
    if bias.shape != (B.shape[-1],) or bias.device != B.device:
        raise value_error(
            "run", "bias", f"of shape ({B.shape[-1]},) on {B.device}",
            f"{tuple(bias.shape)} on {bias.device}", "Give one number per column of B",
        )  # fmt: skip
    return as_columns(bias.to(B.dtype))
