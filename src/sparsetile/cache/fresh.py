"""Products of CSR arrays on a GPU before there is a plan, and when a matrix gets one.

A product straight from the arrays costs nothing but itself (``launch.direct``). A plan costs as
much as hundreds of products, and saves a part of each later one. Nobody knows how many will come:
a matrix is planned when its plan is predicted to cost at most ``SHARE`` of what its products have
cost so far: whatever the number of products, little more is spent than with the best choice for
that number (renting before buying). Costs are predictions, never readings of a clock, so the same
calls give the same bits in every run. Nothing is planned during a CUDA graph's capture.

Only sums take this path: plans count entries of one place as one, which other reductions notice.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from sparsetile.cache.operators import multiply
from sparsetile.core.device import machine
from sparsetile.core.settings import entry_limit
from sparsetile.core.streams import capturing
from sparsetile.intake import CSR
from sparsetile.launch.direct import direct_product, takes_arrays
from sparsetile.launch.faults import raise_faults
from sparsetile.plan.modes import PLAIN_TYPES, any_autocast, plain_call

__all__ = ["PLAN_SECONDS", "SHARE", "direct_seconds", "fresh_product"]

# Share of what products have cost that a plan may cost.
SHARE = 0.4
# Seconds to make a plan without timing anything: fixed, and per entry (H200).
PLAN_SECONDS = (2e-3, 2e-9)
# A product and both of its gradients.
PRODUCTS_OF_A_STEP = 3
# Accounts of matrices that are kept; those of matrices that ended are dropped first.
MOST_ACCOUNTS = 1024
# Seconds before the first and after the last byte of a product.
_START = 5e-6
# Share of L2's gather rate that rows of B reach.
_GATHER = 0.7

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INDICES = (torch.int32, torch.int64)

_Arrays = tuple[Tensor, Tensor, "Tensor | None", int, int]


def direct_seconds(
    rows: int, cols: int, entries: int, n: int, itemsize: int, device: torch.device
) -> float:
    """Return the predicted seconds of one product."""
    facts, row = machine(device), n * itemsize
    gathered = row * entries / (_GATHER * facts.l2_gather)
    once = row * (rows + min(cols, entries)) + entries * (8 + itemsize) + 8 * rows
    return _START + gathered + once / facts.dram


class _Account:
    """What products of a pattern have cost, while the object that has it lives."""

    __slots__ = ("cost", "kind", "owner", "pattern", "plan", "spent")

    def __init__(self, owner: Any, pattern: tuple[int, ...]) -> None:
        self.owner, self.pattern = weakref.ref(owner), pattern
        self.spent, self.plan = 0.0, PLAN_SECONDS[0] + PLAN_SECONDS[1] * pattern[-1]
        self.kind: Any = None  # of the last product, which cost this:
        self.cost = 0.0


# By the owner's number, which may be given to another object when the owner has ended.
_accounts: dict[int, _Account] = {}


def _open_account(owner: Any, pattern: tuple[int, ...]) -> _Account:
    if len(_accounts) >= MOST_ACCOUNTS:
        over = [number for number, each in _accounts.copy().items() if each.owner() is None]
        for number in over if len(over) > MOST_ACCOUNTS // 2 else list(_accounts):
            _accounts.pop(number, None)
    account = _accounts[id(owner)] = _Account(owner, pattern)
    return account


def fresh_product(A: Any, B: Any) -> Tensor | None:
    """Return A·B of CSR arrays on a GPU; None if a plan has to compute it, or to refuse it.

    Parameters
    ----------
    A
        What :func:`sparsetile.spmm` accepts.
    B : Tensor
        Dense.
    """
    if type(B) not in PLAIN_TYPES or not B.is_cuda or B.dtype not in _DTYPES:
        return None
    if B.layout is not torch.strided or not plain_call() or any_autocast() or B.is_neg():
        return None
    wide = B.dim() == 2
    if not (wide or B.dim() == 1) or profiler._is_profiler_enabled:
        return None
    found = _arrays(A, B.dtype)
    if found is None:
        return None
    indptr, indices, values, rows, cols = found
    tracked = torch.is_grad_enabled() and (
        B.requires_grad or (values is not None and values.requires_grad)
    )
    entries, n, device = indices.shape[0], B.shape[1] if wide else 1, B.get_device()
    if (
        B.shape[0] != cols
        or indptr.shape[0] != rows + 1
        or (cols == 0 and entries)
        or not takes_arrays(indptr, indices, cols, n)
        or indptr.get_device() != device
        or indices.get_device() != device
        or (values is not None and values.get_device() != device)
    ):
        return None
    # The tensors of a sparse tensor are new objects in each call.
    owner = A if type(A) is Tensor else indptr
    pattern = (indptr.data_ptr(), indices.data_ptr(), indptr._version, indices._version, entries)
    account = _accounts.get(id(owner))
    if account is None or account.owner() is not owner or account.pattern != pattern:
        account = _open_account(owner, pattern)
    pays = account.spent * SHARE >= account.plan and not capturing(B.device)
    if pays and entries < entry_limit():  # a plan of more would double A's memory
        return None
    kind = n, B.dtype
    if account.kind != kind:
        account.kind = kind
        account.cost = direct_seconds(rows, cols, entries, n, B.element_size(), B.device)
    account.spent += account.cost * (PRODUCTS_OF_A_STEP if tracked else 1)
    raise_faults()
    dense = B if wide else B.unsqueeze(1)
    if tracked:
        C = multiply(indptr, indices, values, dense, "sum")
        return C if wide else C.squeeze(1)
    if n > 1 and dense.stride(1) != 1:
        dense = dense.contiguous()
    C = direct_product(indptr, indices, values, dense)
    return C if wide else C.squeeze(1)


def _arrays(A: Any, dtype: torch.dtype) -> _Arrays | None:
    """Return row pointers, columns, values, rows and columns as the kernels read them."""
    kind = type(A)
    if kind is Tensor:
        if A.layout is not torch.sparse_csr or A.dim() != 2 or not A.is_cuda:
            return None
        if A.requires_grad and torch.is_grad_enabled():
            return None
        values = A.values()
        if values.dtype is not dtype or not values.is_contiguous() or values.is_neg():
            return None
        return A.crow_indices(), A.col_indices(), values, *A.shape  # torch has compared their sizes
    if kind is tuple and len(A) == 4 and isinstance(A[3], (tuple, list)) and len(A[3]) == 2:
        parts, shape = A[:3], A[3]
        if type(shape[0]) is not int or type(shape[1]) is not int:
            return None
    elif kind is CSR:
        parts, shape = (A.indptr, A.indices, A.values), A.shape
    else:
        return None
    indptr, indices, values = parts
    for each in (indptr, indices):
        plain = type(each) in PLAIN_TYPES and each.dtype in _INDICES and each.dim() == 1
        if not plain or not each.is_contiguous() or each.is_inference():
            return None
    if values is not None:
        plain = type(values) in PLAIN_TYPES and values.dtype is dtype and values.dim() == 1
        if not plain or values.shape != indices.shape or not values.is_contiguous():
            return None
        if values.is_neg():
            return None
    return indptr, indices, values, shape[0], shape[1]
