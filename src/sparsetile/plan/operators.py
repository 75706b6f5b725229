"""torch operators over flat tensors: spmm, spmm_out, linear, spmm_extremum, sddmm.

An operator sees nothing but tensors, numbers and a recipe text, so torch can trace, export and
differentiate it. ``tensors`` is the flat form of a plan:

    indptr, forward tensors…, exact tensors…          what a product needs
    order, inverse, t_indptr, t_forward…, t_exact…    what its gradients need (may be missing)

*Forward* is the chosen system; *exact* is the exact system of the device (``csr`` or ``cpu``) that
serves max, min and the values' gradient, omitted when forward is that system already. The recipe
names every tensor, so that runners see them by name. ``order`` brings values from A's order to
Aᵀ's. Swapping the two directions gives the flat plan of Aᵀ: gradients of gradients need nothing
more. ``packed`` are the runner's packed values in the order of its ``packed_names``; an empty list
where nobody has packed them.

Longer than a file should be: torch wants definition, kernel, fake and gradient of each operator,
and all of them read the same flat form.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from sparsetile.core.errors import value_error
from sparsetile.intake.csr import result_dtype
from sparsetile.systems import BuiltSystem, runner
from sparsetile.systems.base import Epilogue, ExactRunner, Runner, Tensors
from sparsetile.systems.shared.geometry import reachable

__all__ = [
    "Direction",
    "FlatPlan",
    "flat_packed",
    "flatten",
    "gradient_product",
    "mean_gradient",
    "parsed",
    "product",
    "refuse_tangents",
    "relu_gradient",
    "row_major",
    "row_scale",
    "scaled_rows",
    "winners",
    "without_exact",
]

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
_LIB.define("sddmm(Tensor[] tensors, Tensor G, Tensor B, str recipe, float alpha) -> Tensor")


@dataclass(frozen=True, eq=False)
class Direction:
    """A or its transpose: row pointers, the chosen system's build, the exact system's build."""

    indptr: Tensor
    forward: BuiltSystem
    exact: BuiltSystem

    def tensors(self) -> list[Tensor]:
        same = self.exact is self.forward
        exact = () if same else self.exact.tensors.values()
        return [self.indptr, *self.forward.tensors.values(), *exact]

    def recipes(self) -> list[str | None]:
        return [self.forward.recipe, None if self.exact is self.forward else self.exact.recipe]


def flatten(
    direction: Direction,
    transposed: Direction | None,
    order: Tensor | None,
    inverse: Tensor | None,
) -> tuple[list[Tensor], str]:
    """Return the operators' ``tensors`` and ``recipe``."""
    tensors = direction.tensors()
    recipes = [direction.recipes()]
    if transposed is not None and order is not None and inverse is not None:
        tensors += [order, inverse, *transposed.tensors()]
        recipes.append(transposed.recipes())
    return tensors, json.dumps(recipes)


def without_exact(indptr: Tensor, built: BuiltSystem) -> tuple[list[Tensor], str]:
    """The same of a plan that keeps nothing for max, min and gradients."""
    return [indptr, *built.tensors.values()], json.dumps([[built.recipe, ""]])


def flat_packed(packed: Tensors | None) -> list[Tensor]:
    """Return packed values as operators take them."""
    return [] if packed is None else list(packed.values())


class FlatPlan:
    """The parsed recipe: where each tensor lies in the flat list. One object per recipe text."""

    def __init__(self, recipe: str) -> None:
        recipes = json.loads(recipe)
        forward, exact = recipes[0]
        self.forward: Runner = runner(forward)
        exact_runner = self.forward if exact is None else runner(exact) if exact else None
        if exact_runner is not None and not isinstance(exact_runner, ExactRunner):
            raise TypeError(f"spmm: recipe must name an exact system, got {recipe}.")
        self._exact = exact_runner
        end = 1 + len(self.forward.tensor_names)
        self._forward_slice = slice(1, end)
        self._exact_slice = self._forward_slice
        if exact is not None:
            names = () if exact_runner is None else exact_runner.tensor_names
            self._exact_slice = slice(end, end + len(names))
        self.size = self._exact_slice.stop
        self.rows, self.cols, self.nnz = self.forward.rows, self.forward.cols, self.forward.nnz
        self.differentiable = len(recipes) == 2
        self.mirrored = json.dumps(recipes[::-1]) if self.differentiable else ""

    @property
    def exact(self) -> ExactRunner:
        """The exact system's runner."""
        if self._exact is None:
            raise RuntimeError(
                "spmm: tensors must hold A's entries for max, min and the values' gradient, got a "
                "plan of keep='inference'. Plan with keep='all'."
            )
        return self._exact

    def forward_tensors(self, tensors: Sequence[Tensor]) -> Tensors:
        """Return the chosen system's tensors by name."""
        return dict(zip(self.forward.tensor_names, tensors[self._forward_slice], strict=True))

    def exact_tensors(self, tensors: Sequence[Tensor]) -> Tensors:
        """Return the exact system's tensors by name."""
        return dict(zip(self.exact.tensor_names, tensors[self._exact_slice], strict=True))

    def packed(self, packed: Sequence[Tensor]) -> Tensors | None:
        """Return packed values by name; None where nobody has packed them."""
        if not packed:
            return None
        return dict(zip(self.forward.packed_names, packed, strict=True))

    def mirror(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the flat list of the transpose."""
        order, inverse = tensors[self.size], tensors[self.size + 1]
        return [*tensors[self.size + 2 :], inverse, order, *tensors[: self.size]]


@functools.lru_cache(maxsize=4096)
def _flat_plan(recipe: str) -> FlatPlan:
    return FlatPlan(recipe)


def parsed(recipe: str) -> FlatPlan:
    """Return the parsed recipe."""
    return _flat_plan(recipe)


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
    tensors: Sequence[Tensor],
    values: Tensor | None,
    packed: Sequence[Tensor],
    B: Tensor,
    bias: Tensor | None,
    recipe: str,
    reduce: str,
    alpha: float,
    relu: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """relu(alpha · A·B + bias), sum or mean: the kernel, also called straight by plans."""
    refuse_tangents(B, values, bias)
    flat = _flat_plan(recipe)
    out = flat.forward.new_output(B, out_dtype or result_dtype(B.dtype))
    if bias is not None:
        wide = torch.float64 if B.dtype is torch.float64 else torch.float32
        bias = bias.to(wide).contiguous()
    flat.forward.spmm(
        flat.forward_tensors(tensors),
        _packed_vector(values),
        flat.packed(packed),
        _as_taken(flat.forward, B),
        out,
        Epilogue(alpha=alpha, mean=reduce == "mean", bias=bias, relu=relu),
    )
    return out


def _share_memory(first: Tensor, second: Tensor) -> bool:
    """True when two tensors are views of one piece of memory."""
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() and bool(
        first.numel() and second.numel()
    )


def spmm_out(
    tensors: Sequence[Tensor],
    values: Tensor | None,
    packed: Sequence[Tensor],
    B: Tensor,
    out: Tensor,
    recipe: str,
    reduce: str,
    alpha: float,
    beta: float,
) -> None:
    """out = alpha · A·B + beta · out, in place; ``out`` may share memory with B."""
    refuse_tangents(B, values, out)
    flat = _flat_plan(recipe)
    target = out.clone() if _share_memory(B, out) else _as_taken(flat.forward, out)
    epilogue = Epilogue(alpha=alpha, beta=beta, mean=reduce == "mean")
    flat.forward.spmm(
        flat.forward_tensors(tensors),
        _packed_vector(values),
        flat.packed(packed),
        _as_taken(flat.forward, B),
        target,
        epilogue,
    )
    if target is not out:
        out.copy_(target)


def linear(
    tensors: Sequence[Tensor],
    values: Tensor | None,
    packed: Sequence[Tensor],
    X: Tensor,
    bias: Tensor | None,
    recipe: str,
    alpha: float,
    relu: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """relu(alpha · X·Aᵀ + bias) for X [tokens, K], of runners that fuse it. Not differentiable."""
    refuse_tangents(X, values, bias)
    flat = _flat_plan(recipe)
    if not flat.forward.fuses_linear:
        raise RuntimeError(
            "linear: recipe must be of a system that fuses linear layers, got "
            f"{type(flat.forward).__name__}. Call plan.linear, which takes another way then."
        )
    Y = X.new_empty((X.shape[0], flat.rows), dtype=out_dtype or result_dtype(X.dtype))
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
    flat.forward.spmm(
        flat.forward_tensors(tensors),
        _packed_vector(values),
        flat.packed(packed),
        X.mT,
        Y.mT,
        Epilogue(alpha=alpha, row_bias=bias, relu=relu),
    )
    return Y


def spmm_extremum(
    tensors: Sequence[Tensor],
    values: Tensor | None,
    B: Tensor,
    recipe: str,
    reduce: str,
    winners: bool,
) -> tuple[Tensor, Tensor]:
    """Return max or min over each row's entries, and the entry that won (-1 on empty rows).

    Gradients need the winners; without ``winners`` the second result is empty, and cheaper.
    """
    refuse_tangents(B, values)
    flat = _flat_plan(recipe)
    shape = (*B.shape[:-2], flat.rows, B.shape[-1])
    out = B.new_empty(shape)
    args = torch.empty(shape if winners else (0,), dtype=torch.int64, device=B.device)
    flat.exact.extremum(
        flat.exact_tensors(tensors),
        _packed_vector(values),
        row_major(B),
        out,
        args if winners else None,
        reduce == "max",
    )
    return out, args


def sddmm(tensors: Sequence[Tensor], G: Tensor, B: Tensor, recipe: str, alpha: float) -> Tensor:
    """Return alpha · dot(G[row], B[column]) per entry of A, summed over batches, rounded once."""
    refuse_tangents(G, B)
    flat = _flat_plan(recipe)
    sums = flat.exact.sddmm(flat.exact_tensors(tensors), row_major(G), row_major(B))
    return (sums if alpha == 1.0 else sums * alpha).to(B.dtype)


def product(
    flat: tuple[list[Tensor], str],
    values: Tensor | None,
    packed: list[Tensor],
    B: Tensor,
    bias: Tensor | None,
    reduce: str,
    alpha: float,
    relu: bool,
    out_dtype: torch.dtype | None,
    needs_grad: bool,
) -> Tensor:
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
    """Return which entry and which row of B won each element of C, and where no entry is.

    The row of B is None where A has no entries at all.
    """
    tensors, recipe = flat
    batched = B.flatten(0, -3) if B.dim() > 3 else B
    _, args = torch.ops.sparsetile.spmm_extremum(tensors, values, batched, recipe, reduce, True)
    args = args.reshape(*B.shape[:-2], *args.shape[-2:])
    columns = _flat_plan(recipe).exact_tensors(tensors)["columns"]
    entry = args.clamp(min=0)
    return entry, columns.to(torch.int64)[entry] if columns.numel() else None, args < 0


for _name, _kernel in (
    ("spmm", spmm),
    ("spmm_out", spmm_out),
    ("linear", linear),
    ("spmm_extremum", spmm_extremum),
    ("sddmm", sddmm),
):
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _kernel, _key)


@torch.library.register_fake("sparsetile::spmm", lib=_LIB)
def _(tensors, values, packed, B, bias, recipe, reduce, alpha, relu, out_dtype):  # type: ignore[no-untyped-def]
    shape = (*B.shape[:-2], _flat_plan(recipe).rows, B.shape[-1])
    return B.new_empty(shape, dtype=out_dtype or result_dtype(B.dtype))


@torch.library.register_fake("sparsetile::spmm_out", lib=_LIB)
def _(tensors, values, packed, B, out, recipe, reduce, alpha, beta):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("sparsetile::linear", lib=_LIB)
def _(tensors, values, packed, X, bias, recipe, alpha, relu, out_dtype):  # type: ignore[no-untyped-def]
    shape = (X.shape[0], _flat_plan(recipe).rows)
    return X.new_empty(shape, dtype=out_dtype or result_dtype(X.dtype))


@torch.library.register_fake("sparsetile::spmm_extremum", lib=_LIB)
def _(tensors, values, B, recipe, reduce, winners):  # type: ignore[no-untyped-def]
    shape = (*B.shape[:-2], _flat_plan(recipe).rows, B.shape[-1])
    return B.new_empty(shape), B.new_empty(shape if winners else (0,), dtype=torch.int64)


@torch.library.register_fake("sparsetile::sddmm", lib=_LIB)
def _(tensors, G, B, recipe, alpha):  # type: ignore[no-untyped-def]
    return B.new_empty((_flat_plan(recipe).nnz,))


@register_flop_formula([torch.ops.sparsetile.spmm, torch.ops.sparsetile.spmm_out])
def _(tensors, values, packed, B, fifth, recipe, *_, out_shape=None, **__):  # type: ignore[no-untyped-def]
    return _flops(recipe, B)


@register_flop_formula(torch.ops.sparsetile.linear)
def _(tensors, values, packed, X, bias, recipe, *_, out_shape=None, **__):  # type: ignore[no-untyped-def]
    return 2 * _flat_plan(recipe).nnz * X[0]


@register_flop_formula(torch.ops.sparsetile.spmm_extremum)
def _(tensors, values, B, recipe, *_, out_shape=None, **__):  # type: ignore[no-untyped-def]
    return _flops(recipe, B)


@register_flop_formula(torch.ops.sparsetile.sddmm)
def _(tensors, G, B, recipe, *_, out_shape=None, **__):  # type: ignore[no-untyped-def]
    return _flops(recipe, B)


def _flops(recipe: str, shape: Sequence[int]) -> int:
    """A multiplication and an addition for each entry of A and column of B, batch by batch."""
    return 2 * _flat_plan(recipe).nnz * shape[-1] * math.prod(shape[:-2])


def _need_transpose(flat: FlatPlan) -> None:
    if not flat.differentiable:
        raise RuntimeError(
            "spmm: tensors must hold the planned transpose to compute gradients, got the forward "
            "half only. Call plan.run, which plans the transpose when gradients are needed."
        )


def relu_gradient(C: Tensor, grad: Tensor) -> Tensor:
    """As torch.relu has it: what is NaN passes its gradient on."""
    return torch.ops.aten.threshold_backward(grad, C, 0)


def row_scale(indptr: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 / entries of each row, [M, 1]; in float32, as a length may exceed float16."""
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    lengths = torch.clamp(indptr[1:] - indptr[:-1], min=1)
    return lengths.to(wide).reciprocal().unsqueeze(-1)


def scaled_rows(grad: Tensor, scale: Tensor) -> Tensor:
    """Multiply in the scale's type and round once."""
    return (grad * scale).to(grad.dtype)


def mean_gradient(indptr: Tensor, grad: Tensor) -> Tensor:
    """Divide each row by its entries."""
    return scaled_rows(grad, row_scale(indptr, grad.dtype))


def _reordered(values: Tensor | None, order: Tensor) -> Tensor | None:
    return None if values is None else values[order]


def gradient_product(
    tensors: Sequence[Tensor], values: Tensor | None, grad: Tensor, recipe: str, alpha: float
) -> Tensor:
    """Return alpha · Aᵀ·grad through the operator, which torch can differentiate again."""
    flat = _flat_plan(recipe)
    _need_transpose(flat)
    return torch.ops.sparsetile.spmm(
        flat.mirror(tensors), _reordered(values, tensors[flat.size]), [], grad, None,
        flat.mirrored, "sum", alpha, False, None,
    )  # fmt: skip


def _spmm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, values, packed, B, _, ctx.recipe, ctx.reduce, ctx.alpha, ctx.relu, _ = inputs
    ctx.weighted, ctx.packed = values is not None, len(packed)
    ctx.count = len(tensors)
    kept = [*([values] if ctx.weighted else []), *([output] if ctx.relu else [])]
    ctx.save_for_backward(*tensors, B, *kept)


def _spmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    tensors, B = list(saved[: ctx.count]), saved[ctx.count]
    values = saved[ctx.count + 1] if ctx.weighted else None
    flat = _flat_plan(ctx.recipe)
    _need_transpose(flat)
    if ctx.relu:
        grad = relu_gradient(saved[-1], grad)
    d_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[4] else None
    grad = grad.to(B.dtype)
    if ctx.reduce == "mean":
        grad = mean_gradient(tensors[0], grad)
    d_values = d_B = None
    if ctx.needs_input_grad[1]:
        d_values = torch.ops.sparsetile.sddmm(tensors, grad, B, ctx.recipe, ctx.alpha)
    if ctx.needs_input_grad[3]:
        d_B = gradient_product(tensors, values, grad, ctx.recipe, ctx.alpha)
    lists = [None] * ctx.count, [None] * ctx.packed
    return lists[0], d_values, lists[1], d_B, d_bias, None, None, None, None, None


torch.library.register_autograd(
    "sparsetile::spmm", _spmm_backward, setup_context=_spmm_context, lib=_LIB
)


def _sddmm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, G, B, ctx.recipe, ctx.alpha = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, G, B)


def _sddmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *tensors, G, B = ctx.saved_tensors
    flat = _flat_plan(ctx.recipe)
    _need_transpose(flat)
    d_G = d_B = None
    if ctx.needs_input_grad[1]:
        d_G = torch.ops.sparsetile.spmm(
            tensors, grad, [], B, None, ctx.recipe, "sum", ctx.alpha, False, None
        )
    if ctx.needs_input_grad[2]:
        t_grad = grad[tensors[flat.size]]
        d_B = torch.ops.sparsetile.spmm(
            flat.mirror(tensors), t_grad, [], G, None, flat.mirrored, "sum", ctx.alpha, False, None
        )
    return [None] * ctx.count, d_G, d_B, None, None


torch.library.register_autograd(
    "sparsetile::sddmm", _sddmm_backward, setup_context=_sddmm_context, lib=_LIB
)


def _extremum_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, values, B, ctx.recipe, _, ctx.winners = inputs
    ctx.weighted = values is not None
    ctx.mark_non_differentiable(output[1])
    columns = _flat_plan(ctx.recipe).exact_tensors(tensors)["columns"]
    ctx.count = len(tensors)
    ctx.save_for_backward(columns, output[1], B, *([values] if ctx.weighted else []))


def _add_at(size: int, index: Tensor, source: Tensor) -> Tensor:
    """Return zeros with ``source`` added at ``index``, in a fixed order: torch sorts."""
    wide = torch.float32 if source.dtype.itemsize == 2 else source.dtype
    zeros = torch.zeros(size, dtype=wide, device=source.device)
    total = zeros.index_put((index.reshape(-1),), source.to(wide).reshape(-1), accumulate=True)
    return total.to(source.dtype)


def _extremum_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    columns, args, B, *rest = ctx.saved_tensors
    values = rest[0] if rest else None
    if not ctx.winners:
        raise RuntimeError(
            "spmm_extremum: winners must be True to compute gradients, got False. Call plan.run, "
            "which asks for them when gradients are needed."
        )
    d_values = d_B = None
    if columns.numel() == 0:
        d_B = torch.zeros_like(B) if ctx.needs_input_grad[2] else None
        d_values = torch.zeros_like(values) if values is not None else None
        return [None] * ctx.count, d_values, d_B, None, None, None
    entry = args.clamp(min=0)
    # An empty row has no winner: neither its gradient nor the entry it points at may count.
    empty, nothing = args < 0, torch.zeros_like(grad)
    grad = torch.where(empty, nothing, grad)
    winner = columns.to(torch.int64)[entry]  # row of B behind each element of C
    rows, width = B.shape[-2:]
    batches = B.shape[:-2].numel()
    if ctx.needs_input_grad[2]:
        weighted = grad if values is None else grad * torch.where(empty, nothing, values[entry])
        batch = torch.arange(batches, device=B.device).reshape(*B.shape[:-2], 1, 1)
        place = (batch * rows + winner) * width + torch.arange(width, device=B.device)
        d_B = _add_at(batches * rows * width, place, weighted).reshape(B.shape)
    if values is not None and ctx.needs_input_grad[1]:
        products = grad * torch.where(empty, nothing, torch.gather(B, -2, winner))
        d_values = _add_at(values.numel(), entry, products)
    return [None] * ctx.count, d_values, d_B, None, None, None


torch.library.register_autograd(
    "sparsetile::spmm_extremum",
    _extremum_backward,
    setup_context=_extremum_context,
    lib=_LIB,
)
