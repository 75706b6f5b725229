"""torch operators of CSR arrays: csr_spmm, csr_spmm_t, csr_sddmm. Nobody has to plan.

Operands are flat tensors of any sizes, so torch traces, exports and differentiates the operators.
The gradients of each are calls of the other two, so torch can differentiate them again:

    csr_spmm     C = A·X, or the mean of each row's products
    csr_spmm_t   D = Aᵀ·G
    csr_sddmm    v[e] = dot(G[row of e], X[column of e]), the gradient of A's values

On the CPU they multiply the arrays as they are; other devices and types use plans that are kept
while the tensors of the pattern live. So is the transpose of a pattern, which a stable sort finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.utils.flop_counter import register_flop_formula

from sparsetile.cache.kept import Kept
from sparsetile.core.settings import entry_limit
from sparsetile.core.streams import capturing, record_stream, refuse_capture, settle
from sparsetile.intake import CSR, as_csr
from sparsetile.intake.identity import counter_tells, tensor_key
from sparsetile.kernels.cpu.api import arrays_fit, product_of_arrays, sampled_product_of_arrays
from sparsetile.launch.direct import direct_product, direct_sddmm, takes_arrays
from sparsetile.launch.faults import raise_faults
from sparsetile.launch.grouping import transposed_arrays
from sparsetile.plan.modes import PLAIN_TYPES, outside_modes, plain_call
from sparsetile.plan.plan import Plan
from sparsetile.plan.planner import build_plan
from sparsetile.plan.traced.gradients import mean_gradient, row_scale, scaled_rows
from sparsetile.plan.traced.operators import refuse_tangents

__all__ = ["csr_sddmm", "csr_spmm", "csr_spmm_t", "multiply"]

# Whether products on the CPU need no plan.
UNPLANNED_ON_CPU = True
# Products of a pattern, about: enough to keep its plan.
EXPECTED_RUNS = 10
# Plans of one pattern, by width and type of X.
MAX_PLANS = 16
# Where a kernel of ours makes transposes: of fewer rows and columns than KEYS, and up to so many
# entries. Of 10 million torch's sort takes less (docs/explanation/notes/direct.md).
GROUPED_ON, _MOST_KEYS, _MOST_GROUPED = "cuda", 2**31 - 1, 2**21

_LIB = torch.library.Library("sparsetile", "FRAGMENT")
_LIB.define(
    "csr_spmm(Tensor indptr, Tensor indices, Tensor? values, Tensor x, str reduce) -> Tensor"
)
_LIB.define(
    "csr_spmm_t(Tensor indptr, Tensor indices, Tensor? values, Tensor G, SymInt cols) -> Tensor"
)
_LIB.define("csr_sddmm(Tensor indptr, Tensor indices, Tensor G, Tensor x) -> Tensor")
csr_spmm = torch.ops.sparsetile.csr_spmm
csr_spmm_t = torch.ops.sparsetile.csr_spmm_t
csr_sddmm = torch.ops.sparsetile.csr_sddmm

# Row pointers, columns and the order of entries of a transpose.
_Transpose = tuple[Tensor, Tensor, Tensor]


class _Pattern:
    """What is kept of a pattern while its tensors live, and are not written to."""

    def __init__(self, key: Any) -> None:
        self.key = key
        self.transposes: dict[int, _Transpose] = {}
        self.asked: set[int] = set()  # columns of transposes that were made and not kept
        self.plans: dict[Any, Plan] = {}


_patterns = Kept[_Pattern]()


def _pattern(indptr: Tensor, indices: Tensor) -> _Pattern:
    """Return what is kept of a pattern; nothing is if torch does not count its writes."""
    if not (counter_tells(indptr) and counter_tells(indices)):
        return _Pattern(None)
    owners, key = (id(indptr), id(indices)), (tensor_key(indptr), tensor_key(indices))
    with _patterns.lock:
        found = _patterns.get(owners)
        if found is None or found.key != key:
            found = _patterns.keep(owners, _Pattern(key), indptr, indices)
        return found


def _raise_wrong(indptr: Tensor, indices: Tensor, cols: int) -> None:
    """Raise the error of reading these arrays."""
    as_csr((indptr, indices, None, (indptr.shape[0] - 1, cols)), function="functional.spmm")


@outside_modes
def _plan_of(indptr: Tensor, indices: Tensor, values: Tensor | None, cols: int, x: Tensor) -> Plan:
    """Return a plan of the pattern, kept with it."""
    key = (cols, x.shape[-1], x.dtype, values is None, torch.are_deterministic_algorithms_enabled())
    kept = _pattern(indptr, indices)
    with _patterns.lock:
        made = kept.plans.get(key)
        if made is None:
            refuse_capture("functional.spmm", x.device, "Call it once with these arrays before")
            ones = None if values is None else torch.ones_like(values, dtype=x.dtype)
            shape = (indptr.shape[0] - 1, cols)
            csr = as_csr((indptr, indices, ones, shape), function="functional.spmm")
            made = build_plan(csr, x.shape[-1], dtype=x.dtype, expected_runs=EXPECTED_RUNS)
            if len(kept.plans) >= MAX_PLANS:
                kept.plans.pop(next(iter(kept.plans)))
            kept.plans[key] = made
    return made


def _as_they_are(x: Tensor) -> bool:
    return UNPLANNED_ON_CPU and x.device.type == "cpu"


def _spmm(indptr: Tensor, indices: Tensor, values: Tensor | None, x: Tensor, reduce: str) -> Tensor:
    refuse_tangents(x, values)
    x = x.detach()
    values = None if values is None else values.detach()
    if _on_gpu(indptr, indices, x):
        return _gpu_product(indptr, indices, values, x, reduce)
    if not _as_they_are(x):
        made = _plan_of(indptr, indices, values, x.shape[-2], x)
        if reduce == "sum" or made.nnz == indices.shape[0]:
            return made.run(x, reduce=reduce, values=values)
        # The plan has one entry for several of the same place, of which each counts.
        return scaled_rows(made.run(x, values=values), row_scale(indptr, x.dtype))
    wide = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    dense = x.to(wide).resolve_neg()
    if dense.shape[-1] > 1 and dense.stride(-1) != 1:
        dense = dense.contiguous()
    if values is not None:
        values = values.to(wide).resolve_neg().contiguous()
    arrays = indptr.contiguous(), indices.contiguous(), values, indices.shape[0], x.shape[-2]
    if x.dim() == 2:
        return _checked(product_of_arrays(*arrays, dense, reduce == "mean"), arrays).to(x.dtype)
    out = x.new_empty((*x.shape[:-2], indptr.shape[0] - 1, x.shape[-1]))
    for b, c in _matrices(dense, out):
        c.copy_(_checked(product_of_arrays(*arrays, b, reduce == "mean"), arrays))
    return out


def _on_gpu(indptr: Tensor, indices: Tensor, x: Tensor) -> bool:
    """Whether a GPU multiplies the arrays as they are; raises what it found wrong before."""
    if x.device.type != "cuda":
        return False
    raise_faults()
    if x.shape[-2] == 0 and indices.shape[0]:
        _raise_wrong(indptr, indices, 0)  # B has no row to read in place of a wrong one
    return takes_arrays(indptr, indices, x.shape[-2], x.shape[-1])


def _rows_in_order(dense: Tensor) -> Tensor:
    """Return a matrix, or batches in one dimension, whose columns have unit stride."""
    dense = _three(dense).resolve_neg()
    return dense if dense.shape[-1] < 2 or dense.stride(-1) == 1 else dense.contiguous()


def _gpu_product(
    indptr: Tensor, indices: Tensor, values: Tensor | None, x: Tensor, reduce: str
) -> Tensor:
    if values is not None:
        values = values.resolve_neg().contiguous()
    dense = _rows_in_order(x)
    C = direct_product(indptr.contiguous(), indices.contiguous(), values, dense, reduce)
    return C if C.dim() == x.dim() else C.reshape(*x.shape[:-2], *C.shape[-2:])


def _checked(found: Tensor | None, arrays: tuple[Any, ...]) -> Tensor:
    """Return a product, or raise the error of its arrays."""
    if found is None:
        _raise_wrong(arrays[0], arrays[1], arrays[-1])
        raise AssertionError("arrays that a kernel refuses have an error")
    return found


def multiply(
    indptr: Tensor, indices: Tensor, values: Tensor | None, x: Tensor, reduce: str
) -> Tensor:
    """Call ``csr_spmm``; without torch's dispatcher if nobody has to see an operator."""
    plain = type(x) in PLAIN_TYPES and plain_call() and not profiler._is_profiler_enabled
    if not plain or x.is_meta:
        return csr_spmm(indptr, indices, values, x, reduce)  # type: ignore[no-any-return]
    tracked = x.requires_grad or (values is not None and values.requires_grad)
    if tracked and torch.is_grad_enabled():
        return _Product.apply(values, x, indptr, indices, reduce)  # type: ignore[no-any-return]
    return _spmm(indptr, indices, values, x, reduce)


def _matrices(*tensors: Tensor) -> Any:
    """Matrices of batches, side by side."""
    if tensors[0].dim() == 2:
        return [tensors]
    return zip(*(each.reshape(-1, *each.shape[-2:]).unbind() for each in tensors), strict=True)


@outside_modes
def _transpose(indptr: Tensor, indices: Tensor, cols: int) -> _Transpose:
    """Return the transpose of a pattern; entries of a column stay in the order of rows."""
    kept, device = _pattern(indptr, indices), indptr.device
    found = kept.transposes.get(cols)
    if found is None:
        large = indices.shape[0] >= entry_limit()
        if (device.type == "cpu" or large) and not arrays_fit(indptr, indices, cols):
            _raise_wrong(indptr, indices, cols)
        found = (_merged_transpose if large else _sorted_transpose)(indptr, indices, cols)
        if device.type == "cuda":
            # Only this stream may read it now: kept for others once it asks again, with one wait.
            if capturing(device) or not (large or _asked_before(kept, cols)):
                return found
            settle(device)
        if len(kept.transposes) >= MAX_PLANS:
            kept.transposes.clear()
        kept.transposes[cols] = found
    if device.type == "cuda":
        record_stream(found, device)
    return found


def _sorted_transpose(indptr: Tensor, indices: Tensor, cols: int) -> _Transpose:
    if _groups(indptr, indices, cols):
        return transposed_arrays(indptr.contiguous(), indices.contiguous(), cols)
    # A radix sort takes time for each byte of a key; wrong columns stay wrong.
    short = torch.int16 if cols < 2**15 - 1 else torch.int32
    keys = indices.clamp(-1, cols).to(short) if cols < 2**31 - 1 else indices
    columns, order = torch.sort(keys, stable=True)
    numbers = torch.arange(cols + 1, dtype=columns.dtype, device=indices.device)
    pointers = torch.searchsorted(columns, numbers).to(indptr.dtype)
    rows = torch.searchsorted(indptr, order.to(indptr.dtype), right=True) - 1
    return pointers, rows.to(indices.dtype), order


def _groups(indptr: Tensor, indices: Tensor, cols: int) -> bool:
    """Whether a kernel of ours makes the transpose."""
    return (
        indices.device.type == GROUPED_ON
        and 0 < indices.shape[0] <= _MOST_GROUPED
        and 0 < cols < _MOST_KEYS
        and 1 < indptr.shape[0] <= _MOST_KEYS
    )


def _merged_transpose(indptr: Tensor, indices: Tensor, cols: int) -> _Transpose:
    """The same of so many entries that to sort them at once would take most of the memory."""
    csr = CSR(indptr.long(), indices, None, (indptr.shape[0] - 1, cols))
    order = csr.transpose_order()
    flipped = csr.transposed(order)
    return flipped.indptr.to(indptr.dtype), flipped.indices.to(indices.dtype), order


def _asked_before(kept: _Pattern, cols: int) -> bool:
    """Whether a transpose was asked for before; notes that it is now."""
    before = cols in kept.asked
    kept.asked.add(cols)
    return before


def _spmm_t(indptr: Tensor, indices: Tensor, values: Tensor | None, G: Tensor, cols: int) -> Tensor:
    refuse_tangents(G, values)
    pointers, rows, order = _transpose(indptr, indices, cols)
    if values is not None:
        values = values.detach().index_select(0, order)  # half the host's time of an index
    return _spmm(pointers, rows, values, G, "sum")


def _sddmm(indptr: Tensor, indices: Tensor, G: Tensor, x: Tensor) -> Tensor:
    refuse_tangents(G, x)
    G, x = G.detach(), x.detach()
    if _on_gpu(indptr, indices, x):
        dense = (_rows_in_order(G), _rows_in_order(x))
        return direct_sddmm(indptr.contiguous(), indices.contiguous(), *dense).to(x.dtype)
    if not _as_they_are(x):
        made = _plan_of(indptr, indices, None, x.shape[-2], x)
        tensors, recipe = made.flat
        sums = torch.ops.sparsetile.sddmm(tensors, *map(_three, (G, x)), recipe, 1.0)
        entries = made._family.forward.csr.entry_map
        return sums if entries is None else sums[entries]
    total: Tensor | None = None
    for g, b in _matrices(G, x):
        arrays = indptr.contiguous(), indices.contiguous()
        found = _checked(sampled_product_of_arrays(*arrays, g, b), (*arrays, x.shape[-2]))
        total = found if total is None else total + found
    return x.new_zeros(indices.shape[0]) if total is None else total.to(x.dtype)


def _three(tensor: Tensor) -> Tensor:
    """Return a tensor with at most one dimension of batches."""
    return tensor.flatten(0, -3) if tensor.dim() > 3 else tensor


for _name, _kernel in (("csr_spmm", _spmm), ("csr_spmm_t", _spmm_t), ("csr_sddmm", _sddmm)):
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _kernel, _key)


@torch.library.register_fake("sparsetile::csr_spmm", lib=_LIB)
def _(indptr, indices, values, x, reduce):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-2], indptr.shape[0] - 1, x.shape[-1]))


@torch.library.register_fake("sparsetile::csr_spmm_t", lib=_LIB)
def _(indptr, indices, values, G, cols):  # type: ignore[no-untyped-def]
    return G.new_empty((*G.shape[:-2], cols, G.shape[-1]))


@torch.library.register_fake("sparsetile::csr_sddmm", lib=_LIB)
def _(indptr, indices, G, x):  # type: ignore[no-untyped-def]
    return x.new_empty((indices.shape[0],))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the operands; the last one is no tensor, or None."""
    *tensors, ctx.last = inputs
    ctx.weighted = tensors[2] is not None
    ctx.save_for_backward(*(each for each in tensors if each is not None))


def _kept_operands(ctx: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    indptr, indices, *values, dense = ctx.saved_tensors
    return indptr, indices, values[0] if ctx.weighted else None, dense


def _spmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    _, _, *needed, _ = ctx.needs_input_grad
    return None, None, *_gradients(ctx, grad, needed, csr_sddmm, csr_spmm_t), None


def _gradients(
    ctx: Any, grad: Tensor, needed: Sequence[bool], sddmm: Any, spmm_t: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a product for values and x, by operators or by what they call."""
    indptr, indices, values, x = _kept_operands(ctx)
    if ctx.last == "mean":
        grad = mean_gradient(indptr, grad)
    d_values = sddmm(indptr, indices, grad, x) if needed[0] else None
    d_x = spmm_t(indptr, indices, values, grad, x.shape[-2]) if needed[1] else None
    return d_values, d_x


class _Product(torch.autograd.Function):
    """``csr_spmm`` in eager mode: a node of torch.library takes twice as long on the host."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, values: Tensor | None, x: Tensor, indptr: Tensor, indices: Tensor, reduce: str
    ) -> Tensor:
        C = _spmm(indptr, indices, values, x, reduce)
        _keep(ctx, (indptr, indices, values, x, reduce), C)
        return C

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        # Gradients of gradients, and whoever traces, need the operators.
        eager = not torch.is_grad_enabled() and plain_call()
        calls = (_sddmm, _spmm_t) if eager else (csr_sddmm, csr_spmm_t)
        return *_gradients(ctx, grad, ctx.needs_input_grad[:2], *calls), None, None, None


def _spmm_t_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    indptr, indices, values, G = _kept_operands(ctx)
    d_values = d_G = None
    if ctx.needs_input_grad[2]:
        d_values = csr_sddmm(indptr, indices, G, grad)
    if ctx.needs_input_grad[3]:
        d_G = csr_spmm(indptr, indices, values, grad, "sum")
    return None, None, d_values, d_G, None


def _sddmm_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _sddmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    indptr, indices, G, x = ctx.saved_tensors
    d_G = d_x = None
    if ctx.needs_input_grad[2]:
        d_G = csr_spmm(indptr, indices, grad, x, "sum")
    if ctx.needs_input_grad[3]:
        d_x = csr_spmm_t(indptr, indices, grad, G, x.shape[-2])
    return None, None, d_G, d_x


torch.library.register_autograd(
    "sparsetile::csr_spmm", _spmm_backward, setup_context=_keep, lib=_LIB
)
torch.library.register_autograd(
    "sparsetile::csr_spmm_t", _spmm_t_backward, setup_context=_keep, lib=_LIB
)
torch.library.register_autograd(
    "sparsetile::csr_sddmm", _sddmm_backward, setup_context=_sddmm_context, lib=_LIB
)


@register_flop_formula(
    [torch.ops.sparsetile.csr_spmm, torch.ops.sparsetile.csr_spmm_t, torch.ops.sparsetile.csr_sddmm]
)
def _(indptr, indices, third, dense, *_, out_shape=None, **__):  # type: ignore[no-untyped-def]
    batches = 1
    for size in dense[:-2]:
        batches *= size
    return 2 * indices[0] * dense[-1] * batches
