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

import functools
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


@functools.lru_cache(maxsize=256)
def direct_seconds(
    rows: int, cols: int, entries: int, n: int, itemsize: int, device: torch.device
) -> float:
    """Return the predicted seconds of one product."""
    facts, row = machine(device), n * itemsize
    gathered = row * entries / (_GATHER * facts.l2_gather)
    once = row * (rows + min(cols, entries)) + entries * (8 + itemsize) + 8 * rows
    return _START + gathered + once / facts.dram


class _Account:
    """What products of a pattern have cost, while all that it is made of lives."""

    __slots__ = ("owners", "pattern", "spent")

    def __init__(self, owners: tuple[Any, ...], pattern: tuple[int, ...]) -> None:
        self.owners = [weakref.ref(each) for each in owners]
        self.pattern, self.spent = pattern, 0.0

    def belongs_to(self, owners: tuple[Any, ...], pattern: tuple[int, ...]) -> bool:
        for owner, each in zip(self.owners, owners, strict=True):
            if owner() is not each:
                return False
        return self.pattern == pattern


# By the owners' numbers, which may be given to other objects when these have ended.
_accounts: dict[tuple[int, ...], _Account] = {}


def _open_account(
    key: tuple[int, ...], owners: tuple[Any, ...], pattern: tuple[int, ...]
) -> _Account:
    if len(_accounts) >= MOST_ACCOUNTS:
        over = [
            key for key, each in _accounts.copy().items() if any(o() is None for o in each.owners)
        ]
        for each in over if len(over) > MOST_ACCOUNTS // 2 else list(_accounts):
            _accounts.pop(each, None)
    account = _accounts[key] = _Account(owners, pattern)
    return account


def _pays(account: _Account, entries: int) -> bool:
    """Whether a plan pays; one of too many entries would double A's memory."""
    plan = PLAN_SECONDS[0] + PLAN_SECONDS[1] * entries
    return account.spent * SHARE >= plan and entries < entry_limit()


def fresh_product(A: Any, B: Any) -> Tensor | None:
    """Return A·B of CSR arrays on a GPU; None if a plan has to compute it, or to refuse it.

    Parameters
    ----------
    A
        What :func:`sparsetile.spmm` accepts.
    B : Tensor
        Dense.
    """
    if type(B) not in PLAIN_TYPES or not B.is_cuda or B.layout is not torch.strided:
        return None
    if not plain_call() or any_autocast() or B.is_neg() or profiler._is_profiler_enabled:
        return None
    found = _arrays(A, B)
    if found is None:
        return None
    indptr, indices, values, rows, cols = found
    shape, entries = B.shape, indices.shape[0]
    wide = len(shape) == 2
    n = shape[1] if wide else 1
    if not (wide or len(shape) == 1) or not takes_arrays(indptr, indices, cols, n):
        return None
    tracked = torch.is_grad_enabled() and (
        B.requires_grad or (values is not None and values.requires_grad)
    )
    # What spmm watches of a matrix that it has planned: all that callers may pass anew.
    owners = (A,) if type(A) is not tuple else A[: 2 if values is None else 3]
    key = tuple(map(id, owners))
    pattern = (indptr.data_ptr(), indices.data_ptr(), indptr._version, indices._version, entries)
    account = _accounts.get(key)
    if account is not None:
        if not account.belongs_to(owners, pattern):
            account = None
        elif _pays(account, entries) and not capturing(B.device):
            return None
    raise_faults()
    dense = B if wide else B.unsqueeze(1)
    if tracked:
        C = multiply(indptr, indices, values, dense, "sum")
    else:
        if n > 1 and dense.stride(1) != 1:
            dense = dense.contiguous()
        C = direct_product(indptr, indices, values, dense)
    # While the GPU is at work.
    if account is None:
        account = _open_account(key, owners, pattern)
    cost = direct_seconds(rows, cols, entries, n, B.element_size(), B.device)
    account.spent += cost * PRODUCTS_OF_A_STEP if tracked else cost
    return C if wide else C.squeeze(1)


def _arrays(A: Any, B: Tensor) -> _Arrays | None:
    """Return row pointers, columns, values, rows and columns as the kernels read them.

    torch compares the parts of a sparse tensor with each other only if it is asked to.
    """
    indptr: Any
    indices: Any
    values: Any
    if type(A) is Tensor:
        if A.layout is not torch.sparse_csr or A.dim() != 2 or not A.is_cuda:
            return None
        if A.requires_grad and torch.is_grad_enabled():
            return None
        indptr, indices, values, (rows, cols) = (
            A.crow_indices(), A.col_indices(), A.values(), A.shape
        )  # fmt: skip
    else:
        if type(A) is CSR:
            indptr, indices, values, shape = A.indptr, A.indices, A.values, A.shape
        elif type(A) is tuple and len(A) == 4 and isinstance(A[3], (tuple, list)):
            indptr, indices, values, shape = A
        else:
            return None
        if len(shape) != 2 or type(shape[0]) is not int or type(shape[1]) is not int:
            return None
        rows, cols = shape
        for each in (indptr, indices):
            plain = type(each) in PLAIN_TYPES and each.dtype in _INDICES and each.dim() == 1
            if not plain or each.is_inference():
                return None
    device, dtype = B.get_device(), B.dtype
    if values is not None and (
        type(values) not in PLAIN_TYPES
        or values.dtype is not dtype
        or values.shape != indices.shape
        or not values.is_contiguous()
        or values.is_neg()
        or values.get_device() != device
    ):
        return None
    if (
        dtype not in _DTYPES
        or B.shape[0] != cols
        or indptr.shape[0] != rows + 1
        or (cols == 0 and indices.shape[0])
        or not indptr.is_contiguous()
        or not indices.is_contiguous()
        or indptr.get_device() != device
        or indices.get_device() != device
    ):
        return None
    return indptr, indices, values, rows, cols
