"""What the tests of generated matrices share."""

from __future__ import annotations

import numpy as np
import torch

from sparsetile.intake.csr import CSR


def assert_canonical(matrix: CSR) -> None:
    """Check the whole contract of the canonical CSR."""
    rows, cols = matrix.shape
    indptr, indices = matrix.indptr.numpy(), matrix.indices.numpy()
    assert matrix.indptr.dtype == torch.int64 and matrix.indices.dtype == torch.int32
    assert indptr.shape == (rows + 1,) and indptr[0] == 0 and indptr[-1] == indices.size
    assert (np.diff(indptr) >= 0).all()
    if indices.size:
        assert indices.min() >= 0 and indices.max() < cols
    keys = row_of(matrix) * cols + indices
    assert (np.diff(keys) > 0).all(), "columns must rise strictly inside each row"
    if matrix.values is not None:
        assert matrix.values.shape == (indices.size,)
    assert matrix.entry_map is None


def row_of(matrix: CSR) -> np.ndarray:
    return np.repeat(np.arange(matrix.shape[0]), matrix.row_lengths().numpy())


def dense(matrix: CSR) -> np.ndarray:
    """The pattern as booleans."""
    out = np.zeros(matrix.shape, dtype=bool)
    out[row_of(matrix), matrix.indices.numpy()] = True
    return out


def same(first: CSR, second: CSR) -> bool:
    return (
        first.shape == second.shape
        and torch.equal(first.indptr, second.indptr)
        and torch.equal(first.indices, second.indices)
        and (first.values is None) == (second.values is None)
        and (first.values is None or torch.equal(first.values, second.values))
    )


def is_symmetric(matrix: CSR) -> bool:
    return same(matrix.with_values(None), matrix.with_values(None).transposed())


def degrees(matrix: CSR) -> np.ndarray:
    return matrix.row_lengths().numpy()
