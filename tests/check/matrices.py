"""Small matrices for the tests of pictures and tilings."""

from __future__ import annotations

import numpy as np
import torch

from sparsetile.intake.csr import CSR


def pattern_of(matrix: np.ndarray) -> CSR:
    """The nonzeros of a dense array, without values."""
    A = torch.as_tensor(matrix).to_sparse_csr()
    indices = A.col_indices().to(torch.int32)
    return CSR(A.crow_indices().long(), indices, None, tuple(matrix.shape))  # type: ignore[arg-type]
