"""Products of a family's variants, as eager code, tracers and transforms ask for them.

Eager products of fixed values skip torch's operators: an operator sees tensors alone, so that torch
can trace it, and each call carries tens of tensors through the dispatcher. Here autograd is handed
the variants themselves. The forward product is the bound one of a variant. Its gradient is that of
the opposite variant, whose values and packed copies are kept, or of the variant itself if A is
symmetric. Trained values, batches, tracing and transforms of torch.func take the operators
(:func:`general_product`). So do gradients of gradients.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.autograd.graph import increment_version

from sparsetile.core.checks import real_number, reduce_name
from sparsetile.core.errors import value_error
from sparsetile.core.streams import capturing
from sparsetile.intake.csr import FP8
from sparsetile.launch.interface import Tensors
from sparsetile.plan.family import Family, Flat
from sparsetile.plan.modes import any_autocast, maybe_wrapped, transforming
from sparsetile.plan.operands import (
    check_epilogue,
    check_fp8,
    check_operand,
    check_out,
    wrong_type,
)
from sparsetile.plan.traced import gradients, operators
from sparsetile.plan.traced.flat import flat_packed
from sparsetile.plan.traced.forward_mode import duals, product_of_duals, refuse_out
from sparsetile.plan.traced.transforms import refuse_in_transform, transformed_product
from sparsetile.plan.valued import before_epilogue, takes_valued, valued_product
from sparsetile.plan.variant import Variant

__all__ = [
    "apply_of", "differentiable_product", "eager_product", "extremum_product", "general_product",
    "gradient_of_operand", "gradient_product", "operand_values", "plain_product", "same_values",
    "tracked_extremum",
]  # fmt: skip

# Family, the variants of product and gradient, the version of the values; reduce, alpha, relu; the
# bias that another node differentiates, and whether one does.
_Call: TypeAlias = tuple[Family, Variant, Variant, int, str, float, bool, Tensor | None, bool]
# From this size on ReLU and bias have a node of their own in autograd's graph, though one kernel
# computes them: it lets go of C and of C's gradient before the transposed product allocates. Below,
# a second node costs more time on the host than memory is worth.
APART_BYTES = 2**23


# -- without the dispatcher ------------------------------------------------------------------------


def eager_product(
    family: Family, variant: Variant, B: Tensor, out: Tensor | None, bias: Tensor | None,
    reduce: str, alpha: float, relu: bool,
) -> Tensor | None:  # fmt: skip
    """Return relu(alpha · A·B + bias) of a plain tensor B; None if operators have to."""
    shape = B.shape
    if (
        len(shape) != 2
        or (shape[0] == variant.shape[1]) is not True  # torch.jit.trace has tensors for sizes
        or B.layout is not torch.strided
        or B.device != variant.device
        or B.is_neg()
    ):
        return None
    if B.dtype is not variant.dtype or any_autocast():
        found = family.for_type(variant, B.dtype)
        if found is None:
            return None
        variant, B = found, B.to(found.dtype)
    if bias is None and relu is False:
        if out is None and reduce == "sum" and alpha == 1.0 and type(alpha) is float:
            bound = variant.bound
            if (
                bound is not None
                and not (B.requires_grad and torch.is_grad_enabled())
                and (B.is_contiguous() or B.stride(1) == 1)
                and not profiler._is_profiler_enabled
            ):
                return bound(B)
        if reduce in ("max", "min"):
            plain = out is None and alpha == 1.0 and type(alpha) is float
            return _extremum(family, variant, B, reduce) if plain else None
        if reduce != "sum" and (reduce != "mean" or variant.dtype is FP8):
            return None
        tracked = B.requires_grad
    elif variant.dtype is FP8 or reduce not in ("sum", "mean") or out is not None:
        return None
    else:
        check_epilogue(B, None, reduce, bias, relu, None)
        if bias is not None:
            bias = bias.resolve_neg()
        tracked = B.requires_grad or (bias is not None and bias.requires_grad)
    if tracked and torch.is_grad_enabled():
        if out is not None or variant.dtype is FP8:
            return None
        return differentiable_product(family, variant, B, bias, reduce, alpha, relu)
    if out is None:
        return plain_product(variant, B, bias, reduce, alpha, relu)
    if reduce != "sum" or alpha != 1.0 or not _fits(variant, B, out):
        return None
    _count_write(out)
    return plain_product(variant, B, None, "sum", 1.0, False, out)


def _count_write(out: Tensor) -> None:
    """Raise torch's count of writes: a kernel of ours writes, which torch does not see."""
    if not out.is_inference():
        increment_version(out)


def _fits(variant: Variant, B: Tensor, out: Tensor) -> bool:
    """Whether a bound product can write into ``out``; else operators do, or say what is wrong."""
    return (
        variant.bound is not None
        and type(out) is Tensor
        and out.dtype is B.dtype
        and out.shape == (variant.shape[0], B.shape[1])
        and out.device == B.device
        and out.stride() == (B.shape[1], 1)  # "contiguous" allows any stride of one element
        and not out.data_ptr() & 15
        and not out.is_neg()
        and (B.is_contiguous() or B.stride(1) == 1)
        and out.untyped_storage().data_ptr() != B.untyped_storage().data_ptr()
    )


def plain_product(
    variant: Variant, B: Tensor, bias: Tensor | None, reduce: str, alpha: float, relu: bool,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return relu(alpha · A·B + bias) of a matrix B, without gradients; a plain sum may be written
    into ``out`` that fits."""
    if profiler._is_profiler_enabled:  # no operator is called that torch would name
        with profiler.record_function("sparsetile::spmm"):
            return _product(variant, B, bias, reduce, alpha, relu, out)
    return _product(variant, B, bias, reduce, alpha, relu, out)


def _product(
    variant: Variant, B: Tensor, bias: Tensor | None, reduce: str, alpha: float, relu: bool,
    out: Tensor | None,
) -> Tensor:  # fmt: skip
    bound = variant.bound
    if bound is not None and type(alpha) is float:  # a tensor may require a gradient
        rows = B.is_contiguous() or B.stride(1) == 1  # the first is cheaper to ask
        if rows or not variant.runner.any_strides:
            B = B if rows else B.contiguous()
            if bias is None and not relu and alpha == 1.0 and reduce == "sum":
                return bound(B, out)
            return bound.fused(B, bias, alpha, reduce == "mean", relu)
    variant.note_stream()
    tensors, recipe = variant.flat
    return operators.spmm(
        tensors, variant.values, flat_packed(variant.packed), B, bias, recipe, reduce,
        real_number("run", "alpha", alpha), relu, None,
    )  # fmt: skip


class _Product(torch.autograd.Function):
    """relu(alpha · A·B + bias) and its gradients for B and the bias.

    Arguments that are not tensors come as one tuple: autograd handles each argument.
    """

    @staticmethod
    def forward(ctx: Any, B: Tensor, bias: Tensor | None, call: _Call) -> Tensor:  # type: ignore[override]
        _, variant, _, _, reduce, alpha, relu, added, apart = ctx.call = call
        C = plain_product(variant, B, added if apart else bias, reduce, alpha, relu)
        if apart:  # _Relu marks C as written to, which autograd refuses of a view of padded rows
            return C.data if C._is_view() else C
        if relu:
            ctx.save_for_backward(C)
        return C

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        family, variant, other, version, reduce, alpha, relu, _, apart = ctx.call
        for_B, for_bias, _ = ctx.needs_input_grad
        C = ctx.saved_tensors[0] if relu and not apart else None
        d_bias = d_B = None
        if for_bias or C is not None:
            grad, d_bias = before_epilogue(C, grad, for_bias)
        if for_B:
            same_values(family, version)
            if reduce == "mean":
                scale = family.row_scale(variant)
                variant.note_stream()
                grad = gradients.scaled_rows(grad, scale)
            d_B = gradient_product(family, variant, other, grad, alpha)
        return d_B, d_bias, None


def same_values(family: Family, version: int) -> None:
    """Raise if A got new values after the product whose gradient is computed."""
    if version != family.version:
        raise RuntimeError(
            "run: A's values must stay as they are between a product and its gradient, got new "
            "ones since. Call backward before update_values, or give values= to each product."
        )


class _Relu(torch.autograd.Function):
    """The gradients of ReLU and bias for a C that already has both."""

    @staticmethod
    def forward(ctx: Any, C: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.mark_dirty(C)
        ctx.save_for_backward(C)
        return C

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (C,) = ctx.saved_tensors
        for_C, for_bias = ctx.needs_input_grad
        grad, d_bias = before_epilogue(C, grad, for_bias)
        return grad if for_C else None, d_bias


class _Extremum(torch.autograd.Function):
    """The max or min of each row's products, and its gradient for B: rows of Aᵀ collect what they
    won. Keeps the winners' places and no operand."""

    @staticmethod
    def forward(ctx: Any, B: Tensor, call: tuple[Family, Variant, int, Flat, str]) -> Tensor:  # type: ignore[override]
        ctx.call = call
        _, variant, _, (tensors, recipe), reduce = call
        C, args = extremum_product(variant, (tensors, recipe), B, reduce, True)
        ctx.save_for_backward(args)
        return C

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        family, variant, version, (tensors, recipe), _ = ctx.call
        (args,) = ctx.saved_tensors
        same_values(family, version)
        again = torch.is_grad_enabled() and grad.requires_grad
        won = torch.ops.sparsetile.spmm_won if again else operators.spmm_won
        return won(tensors, variant.values, grad, args, recipe), None


def _extremum(family: Family, variant: Variant, B: Tensor, reduce: str) -> Tensor | None:
    """Return a max or min of each row's products of a matrix B; None if operators have to."""
    if variant.dtype is FP8 or profiler._is_profiler_enabled or maybe_wrapped(B):
        return None
    if B.requires_grad and torch.is_grad_enabled():
        return tracked_extremum(family, variant, B, reduce)
    return extremum_product(variant, variant.flat, B, reduce, False)[0]


def extremum_product(
    variant: Variant, flat: Flat, B: Tensor, reduce: str, winners: bool
) -> tuple[Tensor, Tensor]:
    """Return a max or min of each row's products and, if asked for, the winners' places."""
    operators.refuse_tangents(B)
    found = variant.extremum(B, reduce, winners)
    if found is not None:
        return found
    variant.note_stream()
    return operators.spmm_extremum(flat[0], variant.values, B, flat[1], reduce, winners)


def tracked_extremum(family: Family, variant: Variant, B: Tensor, reduce: str) -> Tensor:
    """Return a max or min of each row's products of a matrix B, with its gradient."""
    call = (family, variant, family.version, family.differentiable(variant), reduce)
    return _apply_extremum(B, call)  # type: ignore[no-any-return]


def apply_of(function: Any) -> Any:
    """What Function.apply calls when nothing is left of a transform of torch.func, which it looks
    for in all arguments."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


_apply, _apply_relu = apply_of(_Product), apply_of(_Relu)
_apply_extremum = apply_of(_Extremum)


def gradient_product(
    family: Family, variant: Variant, other: Variant, grad: Tensor, alpha: float
) -> Tensor:
    """Return alpha · Aᵀ·grad; differentiable if gradients of gradients are asked for."""
    if torch.is_grad_enabled() and grad.requires_grad:
        tensors, recipe = family.differentiable(variant)
        variant.note_stream()
        return gradients.gradient_product(tensors, variant.values, grad, recipe, alpha)
    operators.refuse_tangents(grad)
    if other.later is not None and capturing(other.device):
        family.settled(other)  # a graph reads its memory at every replay
    if grad.is_neg():  # asking takes a fifth of the dispatcher's time
        grad = grad.resolve_neg()
    return plain_product(other, grad, None, "sum", alpha, False)


def gradient_of_operand(
    family: Family, variant: Variant, grad: Tensor, given: Tensor | None, mean: bool
) -> Tensor:
    """See :meth:`sparsetile.Plan.gradient`; ``given`` are values in the order of A's entries."""
    if grad.dim() < 2 or grad.shape[-2] != variant.shape[0] or grad.device != variant.device:
        rows, place = variant.shape[0], variant.device
        raise value_error(
            "gradient", "grad", f"of shape [..., {rows}, N] on {place}",
            f"{tuple(grad.shape)} on {grad.device}", "Pass the gradient of run's result",
        )  # fmt: skip
    found = family.for_type(variant, grad.dtype)
    if found is None:
        raise wrong_type(variant.dtype, grad, "gradient", "grad")
    variant, grad = found, grad.to(found.dtype)
    if mean:
        grad = gradients.scaled_rows(grad, family.row_scale(variant))
    if given is None and family.follow is None and grad.dim() == 2:
        return gradient_product(family, variant, family.for_gradients(variant), grad, 1.0)
    values, _ = operand_values(family, variant, given)
    tensors, recipe = family.differentiable(variant)
    variant.note_stream()
    return gradients.gradient_product(tensors, values, grad, recipe, 1.0)


def differentiable_product(
    family: Family, variant: Variant, B: Tensor, bias: Tensor | None, reduce: str, alpha: float,
    relu: bool,
) -> Tensor:  # fmt: skip
    """Return relu(alpha · A·B + bias) of a matrix B, with gradients for B and the bias.

    The transpose is planned here, where a caller expects planning, and not in the backward pass.
    """
    if type(alpha) is not float:
        alpha = real_number("run", "alpha", alpha)
    other = family.for_gradients(variant)
    if reduce == "mean" and not capturing(variant.device):
        family.row_scale(variant)
    wraps = maybe_wrapped(B) or (bias is not None and maybe_wrapped(bias))
    apply = _Product.apply if wraps else _apply
    size = variant.shape[0] * B.shape[1] * B.element_size() if relu else 0
    apart = size >= APART_BYTES
    added = bias if apart else None
    call: _Call = (family, variant, other, family.version, reduce, alpha, relu, added, apart)
    if not apart:
        return apply(B, bias, call)  # type: ignore[no-any-return]
    C = apply(B, None, call)
    return (_Relu.apply if wraps else _apply_relu)(C, bias)  # type: ignore[no-any-return]


# -- through torch's operators ---------------------------------------------------------------------


def operand_values(
    family: Family, variant: Variant, given: Tensor | None
) -> tuple[Tensor | None, Tensors | None]:
    """Return ``given`` values, trained ones, or the variant's own with their packed copies."""
    if given is None and family.follow is not None:
        given = family.followed(variant)
    return (variant.values, variant.packed) if given is None else (given.to(variant.dtype), None)


def general_product(
    family: Family, variant: Variant, B: Tensor, out: Tensor | None, alpha: float, beta: float,
    reduce: str, given: Tensor | None, bias: Tensor | None = None, relu: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """See :meth:`sparsetile.Plan.run`; ``given`` are values in the order of A's entries."""
    check_operand(variant, B)
    reduce = reduce_name("run", reduce)
    alpha, beta = real_number("run", "alpha", alpha), real_number("run", "beta", beta)
    found = family.for_type(variant, B.dtype)
    if found is None:
        raise wrong_type(variant.dtype, B, "run", "B")
    variant, B = found, B.to(found.dtype)
    values, named = operand_values(family, variant, given)
    variant.note_stream()
    packed = flat_packed(named)
    if beta != 0.0 and out is None:
        raise value_error("run", "beta", "0 when out is not given", beta, "Pass out=")
    check_epilogue(B, out, reduce, bias, relu, out_dtype)
    tracked = any(t is not None and t.requires_grad for t in (B, values, bias))
    needs_grad = torch.is_grad_enabled() and tracked
    if B.dtype is FP8:
        check_fp8(reduce, needs_grad)
    if transforming():
        if out is not None:
            raise refuse_in_transform("run", "out", "Omit out=")
        flat = variant.flat if B.dtype is FP8 else family.differentiable(variant)
        return transformed_product(flat, values, B, bias, reduce, alpha, relu, out_dtype)
    dual = duals(B, values, bias)
    if dual is not None:
        refuse_out(out)
    if out is not None:
        check_out(variant.shape[0], B, out, reduce, needs_grad)
        return _into(variant, values, packed, B, out, reduce, alpha, beta)
    flat = _flat(family, variant, needs_grad)
    if dual is not None:
        return product_of_duals(flat, dual, reduce, alpha, relu, out_dtype)
    if (
        needs_grad
        and values is not None
        and not packed
        and out_dtype is None
        and takes_valued(B, values, bias, reduce)
    ):
        return valued_product(flat, values, B, bias, reduce, alpha, relu)
    return operators.product(
        flat, values, packed, B, bias, reduce, alpha, relu, out_dtype, needs_grad
    )


def _flat(family: Family, variant: Variant, needs_grad: bool) -> Flat:
    if torch.compiler.is_compiling():
        # A tracer reads the flat form once, whether or not the first product needs a gradient.
        if torch.is_grad_enabled():
            family.prepare(variant.transposed, variant.dtype, variant.n, True)
        return variant.flat if variant.both is None else variant.both
    if not needs_grad:
        return variant.flat
    flat = family.differentiable(variant)
    variant.note_stream()
    return flat


def _into(
    variant: Variant, values: Tensor | None, packed: list[Tensor], B: Tensor, out: Tensor,
    reduce: str, alpha: float, beta: float,
) -> Tensor:  # fmt: skip
    lead = B.shape[:-2]
    batch = B if len(lead) in (0, 1) else B.flatten(0, -3)
    apart = len(lead) > 1  # many batch dimensions cannot be seen as one in place
    target = out.flatten(0, -3).clone() if apart else out
    tensors, recipe = variant.flat
    if not (apart or torch.compiler.is_compiling()):
        _count_write(target)
    torch.ops.sparsetile.spmm_out(
        tensors, values, packed, batch, target, recipe, reduce, alpha, beta
    )
    return out.copy_(target.reshape(out.shape)) if apart else out
