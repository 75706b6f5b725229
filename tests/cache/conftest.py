from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsetile.cache import arrays, fresh, operators
from sparsetile.launch import faults
from tests.host import OnGPU, answer_on_host, h200


@pytest.fixture
def planned_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan CSR arrays on the CPU as those of other devices."""
    monkeypatch.setattr(arrays, "UNPLANNED_ON_CPU", False)


class SparseOnGPU:
    """A sparse tensor that says so: torch makes no subclasses of these."""

    is_cuda = True

    def __init__(self, sparse: Tensor) -> None:
        self._sparse = sparse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sparse, name)


def _product(
    indptr: Tensor, indices: Tensor, values: Tensor | None, B: Tensor, reduce: str = "sum"
) -> Tensor:
    """What the kernels compute: of a matrix, or of one dimension of batches."""
    assert B.dim() in (2, 3) and (B.shape[-1] < 2 or B.stride(-1) == 1)
    assert values is None or values.is_contiguous()
    rows = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff())
    each = B[..., indices.long(), :]
    each = each if values is None else values[:, None] * each
    C = each.new_zeros((*B.shape[:-2], len(indptr) - 1, B.shape[-1])).index_add(-2, rows, each)
    return C / indptr.diff().clamp(min=1)[:, None] if reduce == "mean" else C


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, torch_cuda: Any) -> Callable[[Tensor], Any]:
    """Call it with a tensor of the host: products then go where those of a GPU's arrays go. torch
    multiplies in place of kernels."""
    for module in (fresh, operators):
        monkeypatch.setattr(module, "PLAIN_TYPES", (Tensor, OnGPU))
        monkeypatch.setattr(module, "direct_product", _product)
    monkeypatch.setattr(fresh, "Tensor", SparseOnGPU)
    monkeypatch.setattr(fresh, "_accounts", {})
    answer_on_host(monkeypatch, fresh, machine=h200)
    torch_cuda(is_current_stream_capturing=False, synchronize=None)

    def wrap(tensor: Tensor) -> Any:
        dense = tensor.layout is torch.strided
        return tensor.as_subclass(OnGPU) if dense else SparseOnGPU(tensor)

    return wrap


@pytest.fixture
def wrong_column(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to let a product that has ended have found column 9 of 5 at entry 3."""
    words = (ctypes.c_int64 * 4)()
    monkeypatch.setattr(faults, "_words", [words])

    def found() -> None:
        words[:] = [1, 3, 9, 5]

    return found
