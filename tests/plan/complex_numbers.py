"""Complex matrices and operands for the tests of complex products."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

TYPES = [torch.complex64, torch.complex128]
# Units in the last place that a sum of a few hundred products may be off by.
TOLERANCE = {torch.complex64: 2e-5, torch.complex128: 1e-13}


def matrix(rows: int = 60, cols: int = 35, density: float = 0.2, seed: int = 3) -> sp.csr_array:
    """A matrix of whole complex numbers with an empty row and entries that lack one part."""
    rng = np.random.default_rng(seed)
    real, imaginary = (
        sp.random_array((rows, cols), density=density, rng=rng, format="csr") for _ in range(2)
    )
    made = (real + 1j * imaginary) * 8
    made.data = np.round(made.data.real) + 1j * np.round(made.data.imag)
    made.eliminate_zeros()
    lengths = np.diff(made.indptr)
    kept = np.repeat(np.arange(rows) != 7, lengths)
    indptr = np.concatenate([[0], np.cumsum(np.where(np.arange(rows) == 7, 0, lengths))])
    return sp.csr_array((made.data[kept], made.indices[kept], indptr), shape=(rows, cols))


def whole(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 1) -> Tensor:
    """Whole complex numbers: sums of their products are exact in every type."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(-8, 9, shape, generator=generator) for _ in range(2)]
    return torch.complex(*(part.double() for part in parts)).to(dtype).to(device)


def dense(A: sp.csr_array, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.from_numpy(A.toarray()).to(dtype).to(device)


def as_tensor(A: sp.csr_array, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """The same as a torch sparse CSR tensor."""
    parts = (torch.from_numpy(A.indptr).long(), torch.from_numpy(A.indices).long())
    made = torch.sparse_csr_tensor(*parts, torch.from_numpy(A.data.copy()).to(dtype), A.shape)
    return made.to(device)
