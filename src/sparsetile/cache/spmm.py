"""``spmm(A, B)``: one call. Plans once per matrix, keeps the plan while the matrix lives.

CSR arrays on the CPU are multiplied as they are (``cache.arrays``): planning would save nothing,
and nothing kept can be stale. On a GPU they are until a plan pays (``cache.fresh``). Other
matrices, and products with gradients, are planned.

A plan is found again by the identity of the objects that make up A, watched through weak
references: the cache never keeps a matrix alive. Each call compares the matrix's fingerprint, so
values or patterns changed in place are noticed (``intake.fingerprint`` says how). New values are
written into the kept plans, in the order of the one stream that uses them. Trained values, and new
ones of a matrix that several streams use, are read in every product instead.

If the kept plan reads values as they are given, in their order and type, a product is bound to the
caller's own memory. Then nothing is compared but the places of A's parts and torch's counts of
writes to its pattern: values are read in place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from sparsetile.cache.arrays import product_as_it_is
from sparsetile.cache.complex_arrays import holds_complex, spmm_complex
from sparsetile.cache.fresh import fresh_product
from sparsetile.cache.kept import Kept
from sparsetile.core.checks import reduce_name
from sparsetile.core.errors import type_error, value_error
from sparsetile.intake import CSR, as_csr, current_values, fingerprint
from sparsetile.intake.csr import COMPLEX, PRODUCT_DTYPES
from sparsetile.intake.identity import counter_tells, is_trained
from sparsetile.intake.recognise import Kind, kind_of
from sparsetile.intake.tuples import edge_parts, graph_parts
from sparsetile.jit.loader import current_stream_handle
from sparsetile.plan.arrays import array_like, as_operand, is_array
from sparsetile.plan.complex_products import as_columns, as_complex
from sparsetile.plan.devices import usable_device
from sparsetile.plan.eager import general_product
from sparsetile.plan.modes import PLAIN_TYPES, any_autocast, outside_modes, plain_call, untraced
from sparsetile.plan.operands import check_operand
from sparsetile.plan.plan import Plan
from sparsetile.plan.planner import build_plan, refuse_traced, refuse_wrapped
from sparsetile.systems.registry import exact_system

__all__ = ["clear_plan_cache", "spmm"]

# Paths cannot be watched for their end of life, so only the most recent ones are kept.
MAX_PATHS = 8
# Plans of one matrix, one for each width, type and device of B: the most recent ones are kept.
MAX_PLANS = 16


class _InPlace:
    """The product of a matrix whose values are read from the caller's own memory.

    Parameters
    ----------
    places : tuple
        What :func:`_places` returned for the matrix.
    parts : list of Tensor
        Its tensors under other names. Keeping them stops other tensors from getting
        their addresses.
    columns : int
        Of A.
    product : callable
        B -> C.
    """

    def __init__(
        self,
        places: Hashable,
        parts: list[Tensor],
        columns: int,
        product: Callable[[Tensor], Tensor],
    ) -> None:
        self.places, self.columns, self.product = places, columns, product
        self._parts = parts


@dataclass
class _Entry:
    """What is kept of one pattern: plans, each with the key of the values that it holds, and
    products that read values in place."""

    pattern_key: Hashable
    plans: OrderedDict[tuple[Any, ...], tuple[Plan, Hashable]] = field(default_factory=OrderedDict)
    in_place: dict[tuple[Any, ...], _InPlace] = field(default_factory=dict)
    streams: set[int] = field(default_factory=set)  # that products were launched on

    def keep(self, key: tuple[Any, ...], made: Plan, values_key: Hashable) -> None:
        self.plans[key] = made, values_key
        while len(self.plans) > MAX_PLANS:
            self.in_place.pop(self.plans.popitem(last=False)[0], None)


_entries = Kept[_Entry]()
_paths = Kept[_Entry](MAX_PATHS)


def clear_plan_cache() -> None:
    """Forget every plan that :func:`spmm` keeps.

    Examples
    --------
    >>> import sparsetile as st
    >>> st.clear_plan_cache()
    """
    _entries.clear()
    _paths.clear()


def _components(A: Any) -> list[Any]:
    """The objects whose lives bound the life of the plan."""
    return [part for part in A if part is not None] if isinstance(A, (tuple, list)) else [A]


@outside_modes
def _entry(A: Any) -> tuple[_Entry, Hashable]:
    """Return what is kept for A, and the key of A's current values. Needs the lock."""
    prints = fingerprint(A)
    pattern_key, values_key = prints if prints is not None else (None, None)
    watched = [part for part in _components(A) if hasattr(type(part), "__weakref__")]
    key: Hashable = tuple(id(part) for part in watched) if watched else pattern_key
    entries = _entries if watched else _paths
    entry = entries.get(key)
    if entry is None or entry.pattern_key != pattern_key or prints is None:
        entry = entries.keep(key, _Entry(pattern_key), *watched)
    return entry, values_key


@outside_modes
def _refresh(kept: Plan, A: Any, write: bool) -> bool:
    """Whether a kept plan can take A's new values; with ``write`` it does."""
    family = kept._family
    values = current_values(A, family.forward.csr)
    family.forward.note_stream()
    if (values is None) != (family.forward.values is None):
        return False
    if write:
        family.set_values(None if values is None else values.detach())
    return True


_values_now = outside_modes(current_values)  # torch.func cannot read a sparse tensor


@outside_modes
def _planned(A: Any, n: int, dtype: torch.dtype, device: torch.device | None) -> Plan:
    """Return a plan that holds a copy of A's values.

    That of CSR arrays on a GPU reads them in place afterwards, and the values of any sparse tensor
    there count as new in each call: no system that would copy or pack them for each product pays.
    """
    # Read here, so that errors about A name spmm.
    csr = as_csr(A, function="spmm", device=device)
    in_place = csr.device.type == "cuda" and (type(A) is CSR or _parts(A) is not None)
    sparse = isinstance(A, Tensor) and A.layout is not torch.strided
    each_time = in_place or (sparse and csr.device.type == "cuda")
    system = exact_system("cuda").name if each_time else "auto"
    made = build_plan(csr, n, dtype=dtype, system=system, in_place=in_place)
    made._family.follow = None  # it would keep A alive
    return made


def _trained(A: Any) -> bool:
    """Whether A's values must be read in every product: autograd or an optimiser knows them."""
    parts = [A.values] if isinstance(A, CSR) else _components(A)
    return any(is_trained(part) for part in parts)


# -- values in place -------------------------------------------------------------------------------


def _parts(A: Any) -> list[Tensor] | None:
    """The tensors that A is made of, the values last if there are some; None of other inputs."""
    if type(A) is Tensor:
        if A.layout is not torch.sparse_csr:
            return None
        return [A.crow_indices(), A.col_indices(), A.values()]
    if type(A) is not tuple or not isinstance(A[-1], (tuple, list)):
        return None  # the shape comes last
    parts = [part for part in A[:-1] if part is not None]
    return parts if all(type(part) is Tensor for part in parts) else None


def _places(A: Any, parts: list[Tensor]) -> tuple[Any, ...]:
    """Where A's parts are, and torch's counts of writes to them.

    The count of a sparse tensor is that of all its parts. Values are read in every product.
    """
    if type(A) is Tensor:
        return A._version, [part.data_ptr() for part in parts], parts[-1].stride()
    counts = [part._version for part in parts if not part.is_floating_point()]
    return counts, [(part.data_ptr(), part.shape, part.stride()) for part in parts], tuple(A[-1])


def _bind_in_place(entry: _Entry, key: tuple[Any, ...], A: Any, kept: Plan) -> None:
    """Bind a product to A's own values if the kept plan can read them as they are."""
    if not plain_call():
        return
    variant, parts = kept._family.forward, _parts(A)
    bound = variant.bound
    if parts is None or bound is None:
        return
    pattern = parts if variant.values is None else parts[:-1]
    counted = not A.is_inference() if type(A) is Tensor else all(map(counter_tells, pattern))
    if not counted:
        return
    if variant.values is not None:
        values = parts[-1].detach()
        as_they_are = (
            variant.csr.entry_map is None
            and not variant.runner.needs_packed_values
            and values.dtype is variant.dtype
            and values.shape == variant.values.shape
            and values.is_contiguous()
            and values.device == variant.device
            and not values.is_neg()
        )
        if not as_they_are:
            return
        bound = variant.runner.bind(variant.built.tensors, values, None)
    if bound is not None:
        aliases = [part.detach() for part in parts]
        entry.in_place[key] = _InPlace(_places(A, parts), aliases, variant.shape[1], bound)


def _product_in_place(A: Any, B: Any) -> Tensor | None:
    """Return A·B if a product is bound to A's parts as they are; None if not, or if torch has to
    see more of it than the result."""
    if type(A) is Tensor:
        entry = _entries.peek((id(A),))
    elif type(A) is tuple:
        entry = _entries.peek(tuple([id(part) for part in A if isinstance(part, Tensor)]))
    else:
        return None
    if entry is None or not entry.in_place or type(B) not in PLAIN_TYPES:
        return None
    shape, device = B.shape, B.device
    if len(shape) != 2:
        return None
    key = (shape[1], B.dtype, device, torch.are_deterministic_algorithms_enabled())
    found = entry.in_place.get(key)
    if (
        found is None
        or shape[0] != found.columns
        or B.layout is not torch.strided
        or not (B.is_contiguous() or B.stride(1) == 1)
        or B.is_neg()
        or not plain_call()
        or any_autocast()
        or profiler._is_profiler_enabled
    ):
        return None
    parts = _parts(A)
    if parts is None or _places(A, parts) != found.places:
        return None
    if torch.is_grad_enabled():
        values = A if type(A) is Tensor else parts[-1]
        if B.requires_grad or values.requires_grad:
            return None
    return found.product(B)


def _check_rows(A: Any, kept: Plan, B: Tensor) -> None:
    """Refuse a B that does not fit A, whose size may be no more than a guess from its edges."""
    edges = kind_of(A) is Kind.EDGE_TUPLE and kind_of(A[0]) is not Kind.EDGE_INDEX
    if edges and edge_parts(A)[2] is None:
        raise value_error(
            "spmm", "B", f"of shape [..., {kept.shape[1]}, N]", tuple(B.shape),
            f"The largest number in edge_index makes A {kept.shape[0]}x{kept.shape[1]}: "
            "pass (edge_index, weight, shape) if A is larger",
        )  # fmt: skip
    check_operand(kept, B, "spmm")


def _product_of_array(A: Any, B: Any, reduce: str) -> Any:
    """Return the product with an array of NumPy or cupy, as such an array; computed on A's device
    if A has torch's tensors."""
    if not is_array(B):
        raise type_error(
            "spmm", "B", "a torch tensor or an array of NumPy or cupy", type(B).__name__,
            "Use torch.as_tensor",
        )  # fmt: skip
    tensors = [part for part in _components(A) if isinstance(part, (Tensor, CSR))]
    device = tensors[0].device if tensors else torch.device("cpu")
    return array_like(spmm(A, as_operand(B, device), reduce), B)


def _product_of_complex(A: Any, B: Tensor, reduce: str) -> Tensor:
    """Return the product of a real A: pairs of columns of a real product."""
    dense = B.unsqueeze(-1) if B.dim() == 1 else B
    if dense.dim() < 2 or reduce_name("spmm", reduce) not in ("sum", "mean"):
        raise value_error(
            "spmm", "B", "a vector or matrix for sum or mean if it is complex",
            f"shape {tuple(B.shape)} for {reduce}", "Multiply real numbers",
        )  # fmt: skip
    C = as_complex(spmm(A, as_columns(dense), reduce), dense.shape[-1])
    return C.squeeze(-1) if B.dim() == 1 else C


@untraced("sparsetile.spmm looks for changes of A. Use plan @ B, with a plan made outside")
def spmm(A: Any, B: Tensor, reduce: str = "sum") -> Tensor:
    """Return A·B for a sparse A and a dense B; plans A once and keeps the plan.

    Parameters
    ----------
    A : sparse matrix [M, K]
        Anything that :func:`sparsetile.plan` accepts. Gradients flow into its values.
    B : Tensor [..., K, N] or [K]
        Dense, real or complex, on the device that computes the product. An array of NumPy or cupy
        gives an array.
    reduce : {"sum", "mean", "max", "min"}
        How the entries of a row are combined.

    Returns
    -------
    Tensor [..., M, N] or [M]

    Examples
    --------
    >>> import torch
    >>> import sparsetile as st
    >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
    >>> st.spmm(A, torch.ones(3, 2))
    tensor([[3., 3.],
            [3., 3.]])
    >>> st.spmm(A, torch.ones(3, 2), reduce="max")
    tensor([[2., 2.],
            [3., 3.]])
    """
    C = product_as_it_is(A, B, reduce)
    if C is None and reduce == "sum":
        C = _product_in_place(A, B)
    if C is None and reduce == "sum":
        C = fresh_product(A, B)
    if C is not None:
        return C
    if not isinstance(B, Tensor):
        return _product_of_array(A, B, reduce)
    usable_device("spmm", B.device, "B")
    if B.dtype not in PRODUCT_DTYPES and B.dtype not in COMPLEX:
        names = ", ".join(str(each) for each in (*PRODUCT_DTYPES, *COMPLEX))
        raise type_error(
            "spmm", "B", f"of type {names}", B.dtype, "Cast it with B.to(torch.float32)"
        )
    refuse_traced("spmm", "Plan A outside, and call plan @ B inside")
    refuse_wrapped("spmm", A)
    if holds_complex(A):
        return spmm_complex(A, B, reduce)
    if B.dtype in COMPLEX:
        return _product_of_complex(A, B, reduce)
    n = B.shape[-1] if B.dim() > 1 else 1
    dtype = B.dtype
    if torch.is_autocast_enabled(B.device.type) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(B.device.type)
    if kind_of(A) is Kind.GRAPH:  # its tensors are what is watched
        A = graph_parts("spmm", A)
    device = B.device if not isinstance(A, Tensor) else None
    trained = _trained(A)
    stream = current_stream_handle(B.device.index) if B.is_cuda else 0
    with _entries.lock:
        entry, values_key = _entry(A)
        entry.streams.add(stream)
        key = (n, dtype, B.device, torch.are_deterministic_algorithms_enabled())
        kept, held_key = entry.plans.get(key, (None, None))
        current = trained or held_key == values_key
        if kept is not None and not current:
            current = len(entry.streams) == 1  # only the order of one stream makes writing safe
            kept = kept if _refresh(kept, A, write=current) else None
        if kept is None:
            kept, current = _planned(A, n, dtype, device), True
        if current:
            entry.in_place.pop(key, None)
            entry.keep(key, kept, values_key)
            _bind_in_place(entry, key, A, kept)
        entry.plans.move_to_end(key)
    rows = B.shape[-2] if B.dim() > 1 else B.numel() if B.dim() == 1 else None
    if rows != kept.shape[1]:
        _check_rows(A, kept, B)
    # Autograd keeps what a product read. It must be A's own values: the plan's copy of a sparse
    # tensor's is written again at each call on a GPU, which autograd would take for a change.
    kept_by_autograd = isinstance(A, Tensor) and B.requires_grad and torch.is_grad_enabled()
    if trained or kept_by_autograd or not current:
        family = kept._family
        dense = B[:, None] if B.dim() == 1 else B
        values = _values_now(A, family.forward.csr)
        C = general_product(family, family.forward, dense, None, 1.0, 0.0, reduce, values)
        return C.squeeze(-1) if B.dim() == 1 else C
    return kept.run(B, reduce=reduce)
