"""Operands of the replays: small whole numbers, on which every order of additions is exact.

Rows of B that no entry of A refers to are NaN: whatever is read by mistake shows.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from sparsetile import CSR
from tests.contracts.cases import MATRICES, csr_of

__all__ = ["operand", "reference", "whole_numbers"]


def whole_numbers(name: str, dtype: torch.dtype, pattern: bool = False) -> CSR:
    matrix = MATRICES[name]()
    random = np.random.default_rng(3)
    matrix.data = random.integers(1, 4, matrix.nnz).astype(float) * random.choice(
        [-1, 1], matrix.nnz
    )
    return csr_of(matrix, pattern=pattern, dtype=dtype)


def operand(csr: CSR, n: int, dtype: torch.dtype, batch: tuple[int, ...] = ()) -> Tensor:
    B = torch.randint(0, 4, (*batch, csr.shape[1], n)).to(dtype)
    unused = torch.ones(csr.shape[1], dtype=torch.bool)
    unused[csr.indices.long()] = False
    B[..., unused, :] = float("nan")
    return B


def reference(csr: CSR, B: Tensor) -> Tensor:
    """A·B by scipy in float64, exact on whole numbers; rows of NaN meet no entry."""
    values = np.ones(csr.nnz) if csr.values is None else csr.values.double().numpy()
    A = sp.csr_array((values, csr.indices.numpy(), csr.indptr.numpy()), shape=csr.shape)
    layers = B.double().nan_to_num().reshape(B.shape[:-2].numel(), *B.shape[-2:]).numpy()
    C = np.stack([A @ layer for layer in layers])
    return torch.from_numpy(C).reshape(*B.shape[:-2], *C.shape[-2:])
