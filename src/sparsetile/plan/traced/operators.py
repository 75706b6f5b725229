"""torch operators over flat tensors: spmm, spmm_out, linear, spmm_extremum, spmm_won, sddmm.

An operator sees nothing but tensors, numbers and a recipe text, so torch can trace, export and
differentiate it. ``tensors`` is the flat form of a plan (``flat.py``). ``packed`` are the runner's
packed values in the order of its ``packed_names``; an empty list if they are not packed.
Gradients are in ``gradients.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from sparsetile.core.errors import value_error
from sparsetile.engines.runner import Runner
from sparsetile.intake.csr import result_dtype
from sparsetile.launch.epilogue import readable
from sparsetile.launch.geometry import reachable
from sparsetile.launch.interface import Epilogue
from sparsetile.plan.traced.flat import parsed
from sparsetile.plan.traced.gradients import (
    extremum_backward,
    extremum_context,
    need_transpose,
    sddmm_backward,
    sddmm_context,
    spmm_backward,
    spmm_context,
    winning_entries,
    won_backward,
    won_context,
)

__all__ = ["product", "refuse_tangents", "row_major", "winners"]

_LIB = torch.library.Library("sparsetile", "DEF")
_LIB.define(
    "spmm(Tensor[] tensors, Tensor? values, Tensor[] packed, Tensor B, Tensor? bias, str recipe, "
    "str reduce, float alpha, bool relu, ScalarType? out_dtype) -> Tensor"
)
_LIB.define(
    "spmm_out(Tensor[] tensors, Tensor? values, Tensor[] packed, Tensor B, Tensor(a!) out, "
    "str recipe, str reduce, float alpha, float beta) -> ()"
)
_LIB.define(
    "linear(Tensor[] tensors, Tensor? values, Tensor[] packed, Tensor X, Tensor? bias, str recipe, "
    "float alpha, bool relu, ScalarType? out_dtype) -> Tensor"
)
_LIB.define(
    "spmm_extremum(Tensor[] tensors, Tensor? values, Tensor B, str recipe, str reduce, "
    "bool winners) -> (Tensor, Tensor)"
)
_LIB.define(
    "spmm_won(Tensor[] tensors, Tensor? values, Tensor grad, Tensor args, str recipe) -> Tensor"
)
_LIB.define("sddmm(Tensor[] tensors, Tensor G, Tensor B, str recipe, float alpha) -> Tensor")


def _packed_vector(values: Tensor | None) -> Tensor | None:
    """Return the values with unit stride: gradients may come as one number expanded."""
    return values if values is None or values.is_contiguous() else values.contiguous()


def row_major(tensor: Tensor) -> Tensor:
    """Return the tensor itself if its columns have unit stride, else a row-major copy.

    Rows farther apart than kernels can address are copied, too.
    """
    if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1:
        return reachable(tensor)
    return reachable(tensor.contiguous())


def refuse_tangents(*operands: Tensor | None) -> None:
    """An operator has no forward mode of its own and must not drop a tangent."""
    level = forward_ad._current_level
    if level < 0:
        return
    for tensor in operands:
        if tensor is not None and torch._VF._unpack_dual(tensor, level=level)[1] is not None:  # type: ignore[attr-defined]
            raise value_error(
                "spmm", "operands", "without forward-mode tangents inside of a gradient or an "
                "operator", "a dual tensor",
                "Call plan.run, which has a forward mode, or take both derivatives in reverse mode",
            )  # fmt: skip


def _as_taken(forward: Runner, tensor: Tensor) -> Tensor:
    """Return B or ``out`` as the runner takes it."""
    return tensor if forward.any_strides else row_major(tensor)


def spmm(
    tensors: Sequence[Tensor], values: Tensor | None, packed: Sequence[Tensor], B: Tensor,
    bias: Tensor | None, recipe: str, reduce: str, alpha: float, relu: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """relu(alpha · A·B + bias), sum or mean: the kernel, also called straight by plans."""
    refuse_tangents(B, values, bias)
    flat = parsed(recipe)
    out = flat.forward.new_output(B, out_dtype or result_dtype(B.dtype))
    if bias is not None:
        wide = torch.float64 if B.dtype is torch.float64 else torch.float32
        bias = bias.to(wide).contiguous()
    flat.forward.spmm(
        flat.forward_tensors(tensors), _packed_vector(values), flat.packed(packed),
        _as_taken(flat.forward, B), out,
        Epilogue(alpha=alpha, mean=reduce == "mean", bias=bias, relu=relu),
    )  # fmt: skip
    return out


def _share_memory(first: Tensor, second: Tensor) -> bool:
    """True when two tensors are views of one piece of memory."""
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() and bool(
        first.numel() and second.numel()
    )


def spmm_out(
    tensors: Sequence[Tensor], values: Tensor | None, packed: Sequence[Tensor], B: Tensor,
    out: Tensor, recipe: str, reduce: str, alpha: float, beta: float,
) -> None:  # fmt: skip
    """out = alpha · A·B + beta · out, in place; ``out`` may share memory with B."""
    refuse_tangents(B, values, out)
    flat = parsed(recipe)
    target = out.clone() if _share_memory(B, out) else _as_taken(flat.forward, out)
    epilogue = Epilogue(alpha=alpha, beta=beta, mean=reduce == "mean")
    flat.forward.spmm(
        flat.forward_tensors(tensors), _packed_vector(values), flat.packed(packed),
        _as_taken(flat.forward, B), target, epilogue,
    )  # fmt: skip
    if target is not out:
        out.copy_(target)


def linear(
    tensors: Sequence[Tensor], values: Tensor | None, packed: Sequence[Tensor], X: Tensor,
    bias: Tensor | None, recipe: str, alpha: float, relu: bool, out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """relu(alpha · X·Aᵀ + bias) for X [tokens, K], of runners that fuse it. Not differentiable."""
    refuse_tangents(X, values, bias)
    flat = parsed(recipe)
    if not flat.forward.fuses_linear:
        raise RuntimeError(
            "linear: recipe must be of a system that fuses linear layers, got "
            f"{type(flat.forward).__name__}. Call plan.linear, which works with every system."
        )
    Y = X.new_empty((X.shape[0], flat.rows), dtype=out_dtype or result_dtype(X.dtype))
    flat.forward.spmm(
        flat.forward_tensors(tensors), _packed_vector(values), flat.packed(packed), X.mT, Y.mT,
        Epilogue(alpha=alpha, row_bias=readable(bias), relu=relu),
    )  # fmt: skip
    return Y


def spmm_extremum(
    tensors: Sequence[Tensor], values: Tensor | None, B: Tensor, recipe: str, reduce: str,
    winners: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return max or min over each row's entries, and the winner's place in the row (-1: none).

    Gradients need the winners; without ``winners`` the second result is empty, and cheaper.
    """
    refuse_tangents(B, values)
    flat = parsed(recipe)
    shape = (*B.shape[:-2], flat.rows, B.shape[-1])
    out = B.new_empty(shape)
    args = B.new_empty(shape if winners else (0,), dtype=flat.exact.place_dtype)
    flat.exact.extremum(
        flat.exact_tensors(tensors), _packed_vector(values), row_major(B), out,
        args if winners else None, reduce == "max",
    )  # fmt: skip
    return out, args


def spmm_won(
    tensors: Sequence[Tensor], values: Tensor | None, grad: Tensor, args: Tensor, recipe: str
) -> Tensor:  # fmt: skip
    """Return the gradient of ``spmm_extremum`` for B, by Aᵀ; ``args`` are the winners' places."""
    refuse_tangents(grad, values)
    flat = parsed(recipe)
    need_transpose(flat)
    back, order = parsed(flat.mirrored), flat.entry_order(tensors)
    out = grad.new_empty((*grad.shape[:-2], flat.cols, grad.shape[-1]))
    back.exact.won(
        back.exact_tensors(flat.mirror(tensors)),
        None if values is None else values.detach().index_select(0, order),
        grad.detach().resolve_neg().contiguous(), args.contiguous(), order, tensors[0], out,
    )  # fmt: skip
    return out


def sddmm(tensors: Sequence[Tensor], G: Tensor, B: Tensor, recipe: str, alpha: float) -> Tensor:
    """Return alpha · dot(G[row], B[column]) per entry of A, summed over batches, rounded once."""
    refuse_tangents(G, B)
    flat = parsed(recipe)
    sums = flat.exact.sddmm(flat.exact_tensors(tensors), row_major(G), row_major(B))
    return (sums if alpha == 1.0 else sums * alpha).to(B.dtype)


def product(
    flat: tuple[list[Tensor], str], values: Tensor | None, packed: list[Tensor], B: Tensor,
    bias: Tensor | None, reduce: str, alpha: float, relu: bool, out_dtype: torch.dtype | None,
    needs_grad: bool,
) -> Tensor:  # fmt: skip
    """Multiply through torch's dispatcher; B may have any number of batch dimensions."""
    tensors, recipe = flat
    lead = B.shape[:-2]
    B = B if len(lead) in (0, 1) else B.flatten(0, -3)
    if reduce in ("max", "min"):
        dtype = B.dtype
        if alpha != 1.0 and dtype.itemsize == 2:  # rounded once, after alpha
            B, values = B.float(), None if values is None else values.float()
        C, _ = torch.ops.sparsetile.spmm_extremum(tensors, values, B, recipe, reduce, needs_grad)
        C = C if alpha == 1.0 else (C * alpha).to(dtype)
    else:
        C = torch.ops.sparsetile.spmm(
            tensors, values, packed, B, bias, recipe, reduce, alpha, relu, out_dtype
        )
    return C.reshape(*lead, *C.shape[-2:]) if len(lead) > 1 else C


def winners(
    flat: tuple[list[Tensor], str], values: Tensor | None, B: Tensor, reduce: str
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return which entry and which row of B won each element of C, and which have none.

    The row of B is None if A has no entries at all.
    """
    tensors, recipe = flat
    batched = B.flatten(0, -3) if B.dim() > 3 else B
    _, args = torch.ops.sparsetile.spmm_extremum(tensors, values, batched, recipe, reduce, True)
    args = args.reshape(*B.shape[:-2], *args.shape[-2:])
    columns = parsed(recipe).exact_tensors(tensors)["columns"]
    entry = winning_entries(tensors[0], args)
    return entry, columns.to(torch.int64)[entry] if columns.numel() else None, args < 0


for _name, _kernel in (
    ("spmm", spmm), ("spmm_out", spmm_out), ("linear", linear), ("spmm_extremum", spmm_extremum),
    ("spmm_won", spmm_won), ("sddmm", sddmm),
):  # fmt: skip
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _kernel, _key)


@torch.library.register_fake("sparsetile::spmm", lib=_LIB)
def _(tensors, values, packed, B, bias, recipe, reduce, alpha, relu, out_dtype):  # type: ignore[no-untyped-def]
    shape = (*B.shape[:-2], parsed(recipe).rows, B.shape[-1])
    return B.new_empty(shape, dtype=out_dtype or result_dtype(B.dtype))


@torch.library.register_fake("sparsetile::spmm_out", lib=_LIB)
def _(tensors, values, packed, B, out, recipe, reduce, alpha, beta):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("sparsetile::linear", lib=_LIB)
def _(tensors, values, packed, X, bias, recipe, alpha, relu, out_dtype):  # type: ignore[no-untyped-def]
    shape = (X.shape[0], parsed(recipe).rows)
    return X.new_empty(shape, dtype=out_dtype or result_dtype(X.dtype))


@torch.library.register_fake("sparsetile::spmm_extremum", lib=_LIB)
def _(tensors, values, B, recipe, reduce, winners):  # type: ignore[no-untyped-def]
    shape = (*B.shape[:-2], parsed(recipe).rows, B.shape[-1])
    places = parsed(recipe).exact.place_dtype
    return B.new_empty(shape), B.new_empty(shape if winners else (0,), dtype=places)


@torch.library.register_fake("sparsetile::spmm_won", lib=_LIB)
def _(tensors, values, grad, args, recipe):  # type: ignore[no-untyped-def]
    return grad.new_empty((*grad.shape[:-2], parsed(recipe).cols, grad.shape[-1]))


@torch.library.register_fake("sparsetile::sddmm", lib=_LIB)
def _(tensors, G, B, recipe, alpha):  # type: ignore[no-untyped-def]
    return B.new_empty((parsed(recipe).nnz,))


@register_flop_formula([torch.ops.sparsetile.spmm, torch.ops.sparsetile.spmm_out])
def _(tensors, values, packed, B, fifth, recipe, *_, out_shape=None, **__):  # type: ignore[no-untyped-def]
    return _flops(recipe, B)


@register_flop_formula(torch.ops.sparsetile.linear)
def _(tensors, values, packed, X, bias, recipe, *_, out_shape=None, **__):  # type: ignore[no-untyped-def]
    return 2 * parsed(recipe).nnz * X[0]


@register_flop_formula([torch.ops.sparsetile.spmm_extremum, torch.ops.sparsetile.sddmm])
def _(tensors, second, B, recipe, *_, out_shape=None, **__):  # type: ignore[no-untyped-def]
    return _flops(recipe, B)


@register_flop_formula(torch.ops.sparsetile.spmm_won)
def _(tensors, values, grad, args, recipe, *, out_shape=None, **__):  # type: ignore[no-untyped-def]
    return 2 * math.prod(grad)  # each element is added once


def _flops(recipe: str, shape: Sequence[int]) -> int:
    """A multiplication and an addition for each entry of A and column of B, batch by batch."""
    return 2 * parsed(recipe).nnz * shape[-1] * math.prod(shape[:-2])


for _name, _backward, _context in (
    ("spmm", spmm_backward, spmm_context),
    ("spmm_extremum", extremum_backward, extremum_context),
    ("spmm_won", won_backward, won_context),
    ("sddmm", sddmm_backward, sddmm_context),
):
    torch.library.register_autograd(
        f"sparsetile::{_name}", _backward, setup_context=_context, lib=_LIB
    )
