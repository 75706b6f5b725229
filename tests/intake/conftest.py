"""Shared by the intake tests: devices, and the plain meaning of a canonical matrix."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from sparsetile.intake import CSR

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _torch_sparse_is_quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse .* support is in beta state")
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly")
        yield


def _dense(csr: CSR) -> Tensor:
    """Check every promise of the canonical form, then return the matrix as dense, on the CPU."""
    rows, columns = csr.shape
    assert csr.indptr.dtype == torch.int64
    assert csr.indices.dtype == torch.int32
    assert csr.indptr.shape == (rows + 1,)
    assert csr.indptr.is_contiguous() and csr.indices.is_contiguous()
    assert len({part.device for part in (csr.indptr, csr.indices)}) == 1
    indptr, indices = csr.indptr.tolist(), csr.indices.tolist()
    assert indptr[0] == 0 and indptr[-1] == len(indices)
    for begin, end in itertools.pairwise(indptr):
        line = indices[begin:end]
        assert all(0 <= column < columns for column in line)
        assert all(left < right for left, right in itertools.pairwise(line))
    if csr.values is None:
        values = torch.ones(csr.nnz)
    else:
        assert csr.values.shape == (csr.nnz,)
        assert csr.values.device == csr.device
        assert csr.values.is_contiguous()
        values = csr.values.detach().cpu()
    out = torch.zeros(rows, columns, dtype=values.dtype)
    out[csr.row_ids().cpu(), csr.indices.long().cpu()] = values
    return out


@pytest.fixture(scope="session")
def dense() -> Callable[[CSR], Tensor]:
    return _dense
