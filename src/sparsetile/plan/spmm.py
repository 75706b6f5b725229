"""``spmm(A, B)``: one call. Plans once per matrix, keeps the plan while the matrix lives.

A plan is found again by the identity of the objects that make up A, watched through weak
references: the cache never keeps a matrix alive. Each call compares the matrix's fingerprint, so
values or patterns changed in place are noticed (``intake.fingerprint`` says how). New values are
written into the kept plans, in the order of the one stream that uses them. Trained values, and new
ones of a matrix that several streams use, are read in every product instead.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.errors import type_error, value_error
from sparsetile.intake import CSR, as_csr, current_values, fingerprint
from sparsetile.intake.csr import PRODUCT_DTYPES
from sparsetile.intake.identity import is_trained
from sparsetile.intake.recognise import Kind, kind_of
from sparsetile.intake.tuples import edge_parts, graph_parts
from sparsetile.jit.loader import current_stream_handle
from sparsetile.plan.devices import usable_device
from sparsetile.plan.dispatch import lasting, untraced
from sparsetile.plan.operands import check_operand
from sparsetile.plan.plan import Plan
from sparsetile.plan.planner import plan, refuse_traced, refuse_wrapped
from sparsetile.plan.products import general_product
from sparsetile.plan.updates import set_values

__all__ = ["clear_plan_cache", "spmm"]

# Products of a matrix that is given to spmm, about: enough to keep its plan.
EXPECTED_RUNS = 10

# Paths cannot be watched for their end of life, so only the most recent ones are kept.
MAX_PATHS = 8
# Plans of one matrix, one for each width, type and device of B: the most recent ones are kept.
MAX_PLANS = 16


@dataclass
class _Entry:
    """What is kept of one pattern: plans, each with the key of the values that it holds."""

    pattern_key: Hashable
    plans: OrderedDict[tuple[Any, ...], tuple[Plan, Hashable]] = field(default_factory=OrderedDict)
    streams: set[int] = field(default_factory=set)  # that products were launched on

    def keep(self, key: tuple[Any, ...], made: Plan, values_key: Hashable) -> None:
        self.plans[key] = made, values_key
        while len(self.plans) > MAX_PLANS:
            self.plans.popitem(last=False)


_entries: dict[Hashable, _Entry] = {}
_paths: OrderedDict[Hashable, None] = OrderedDict()
_lock = threading.RLock()


def clear_plan_cache() -> None:
    """Forget every plan that :func:`spmm` keeps.

    Examples
    --------
    >>> import sparsetile as st
    >>> st.clear_plan_cache()
    """
    with _lock:
        _entries.clear()
        _paths.clear()


def _components(A: Any) -> list[Any]:
    """The objects whose lives bound the life of the plan."""
    return [part for part in A if part is not None] if isinstance(A, (tuple, list)) else [A]


def _forget(key: Hashable) -> None:
    with _lock:
        _entries.pop(key, None)


@lasting
def _entry(A: Any) -> tuple[_Entry, Hashable]:
    """Return what is kept for A, and the key of A's current values."""
    prints = fingerprint(A)
    pattern_key, values_key = prints if prints is not None else (None, None)
    watched = [part for part in _components(A) if hasattr(type(part), "__weakref__")]
    key: Hashable = tuple(id(part) for part in watched) if watched else ("path", pattern_key)
    held = _entries.get(key)
    if held is None or held.pattern_key != pattern_key or prints is None:
        _forget(key)
        held = _entries[key] = _Entry(pattern_key)
        for part in watched:
            weakref.finalize(part, _forget, key).atexit = False
        if not watched:
            _paths[key] = None
            while len(_paths) > MAX_PATHS:
                _forget(_paths.popitem(last=False)[0])
    if not watched:
        _paths.move_to_end(key)
    return held, values_key


@lasting
def _refresh(kept: Plan, A: Any, write: bool) -> bool:
    """Whether a kept plan can take A's new values; with ``write`` it does."""
    values = current_values(A, kept._csr)
    kept._note_stream()
    if (values is None) != (kept.values is None):
        return False
    if write:
        set_values(kept, None if values is None else values.detach())
    return True


_values_now = lasting(current_values)  # torch.func cannot read a sparse tensor


@lasting
def _planned(A: Any, n: int, dtype: torch.dtype, device: torch.device | None) -> Plan:
    """Return a plan that holds a copy of A's values."""
    # Read here, so that what is wrong with A is said of spmm.
    # Few products: the model's choice will do, nothing is timed.
    made = plan(
        as_csr(A, function="spmm", device=device), n, dtype=dtype, expected_runs=EXPECTED_RUNS
    )
    made._held.follow = None  # it would keep A alive
    return made


def _trained(A: Any) -> bool:
    """Whether A's values must be read in every product: autograd or an optimiser knows them."""
    parts = [A.values] if isinstance(A, CSR) else _components(A)
    return any(is_trained(part) for part in parts)


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


@untraced("sparsetile.spmm looks for changes of A. Use plan @ B, with a plan made outside")
def spmm(A: Any, B: Tensor, reduce: str = "sum") -> Tensor:
    """Return A·B for a sparse A and a dense B; plans A once and keeps the plan.

    Parameters
    ----------
    A : sparse matrix [M, K]
        Anything that :func:`sparsetile.plan` accepts. Gradients flow into its values.
    B : Tensor [..., K, N] or [K]
        Dense, on the device that computes the product.
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
    if not isinstance(B, Tensor):
        raise type_error("spmm", "B", "a torch tensor", type(B).__name__, "Use torch.as_tensor")
    usable_device("spmm", B.device, "B")
    if B.dtype not in PRODUCT_DTYPES:
        names = ", ".join(str(each) for each in PRODUCT_DTYPES)
        parts = "Multiply B.real and B.imag one after the other"
        raise type_error(
            "spmm", "B", f"of type {names}", B.dtype,
            parts if B.is_complex() else "Cast it with B.to(torch.float32)",
        )  # fmt: skip
    refuse_traced("spmm", "Plan A outside, and call plan @ B inside")
    refuse_wrapped("spmm", A)
    n = B.shape[-1] if B.dim() > 1 else 1
    dtype = B.dtype
    if torch.is_autocast_enabled(B.device.type) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(B.device.type)
    if kind_of(A) is Kind.GRAPH:  # its tensors are what is watched
        A = graph_parts("spmm", A)
    device = B.device if not isinstance(A, Tensor) else None
    trained = _trained(A)
    stream = current_stream_handle(B.device.index) if B.is_cuda else 0
    with _lock:
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
            entry.keep(key, kept, values_key)
        entry.plans.move_to_end(key)
    rows = B.shape[-2] if B.dim() > 1 else B.numel() if B.dim() == 1 else None
    if rows != kept.shape[1]:
        _check_rows(A, kept, B)
    # Autograd keeps what a product read. It must be A's own values: the plan's copy of a sparse
    # tensor's is written again at each call on a GPU, which autograd would take for a change.
    kept_by_autograd = isinstance(A, Tensor) and B.requires_grad and torch.is_grad_enabled()
    if trained or kept_by_autograd or not current:
        values = _values_now(A, kept._csr)
        if B.dim() == 1:
            return general_product(kept, B[:, None], None, 1.0, 0.0, reduce, values).squeeze(-1)
        return general_product(kept, B, None, 1.0, 0.0, reduce, values)
    return kept.run(B, reduce=reduce)
