"""``bcsr``: dense blocks of 64x64 cells and the list of block rows, decoded.

This proves the format (formats/bcsr.py), not the kernel: see decoding.py. Cells without an entry
are multiplied, too, so that B is finite here; rows that repair C are decoded beside the blocks.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from tests.contracts.cases import MATRICES, random_matrix
from tests.kernels.decoding import Built, build, damaged, row_order, whole_numbers
from tests.kernels.test_decode_csr import decode_rows

BLOCK = 64


def decode(built: Built) -> None:
    rows, cols = built.csr.shape
    block_rows, block_cols = -(-rows // BLOCK), -(-cols // BLOCK)
    work, columns = built["work"], built["block_col_idx"]
    # Loads past the end of B give zeros.
    B = np.pad(np.nan_to_num(built.B), [(0, block_cols * BLOCK - cols), (0, 0)])
    blocks = built.packed.reshape(-1, BLOCK, BLOCK)
    products = blocks @ B.reshape(block_cols, BLOCK, B.shape[1])[columns]
    C = np.full((block_rows, BLOCK, B.shape[1]), np.nan)
    for block_row, first, count, _ in work.tolist():
        assert np.isnan(C[block_row]).all(), "a block row of C is stored once"
        assert (np.diff(columns[first : first + count]) > 0).all()
        C[block_row] = products[first : first + count].sum(0)
    assert (np.diff(work[:, 2]) <= 0).all(), "longest first"
    by_row = work[np.argsort(work[:, 0])]
    ptr = built["block_row_ptr"]
    assert np.array_equal(ptr, [*by_row[:, 1], len(columns)]), "linear_few reads offsets instead"
    assert work[:, 2].sum() == len(columns) == len(blocks) == built.meta["blocks"]
    assert np.array_equal(built["indptr"], built.csr.indptr)
    built.check(C.reshape(-1, C.shape[-1]), built["order"])
    full = (
        np.count_nonzero(blocks)
        == built.csr.nnz
        == sum(
            min(BLOCK, rows - BLOCK * i) * min(BLOCK, cols - BLOCK * j)
            for i, first, count, _ in work.tolist()
            for j in columns[first : first + count].tolist()
        )
    )
    assert (built.meta["exact"] is None) == full, "rows repair C where a cell holds no entry"
    if not full:
        decode_rows(built, "exact.")


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("name", MATRICES)
def test_blocks_decode_to_the_product(name, permuted):
    csr = whole_numbers(MATRICES[name](), pattern=permuted)
    decode(build("bcsr", csr, order=row_order(csr, permuted)))


@pytest.mark.parametrize("shape", [(128, 192), (100, 90)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_full_blocks_decode_to_the_product_without_repair(shape, dtype):
    dense = np.ones(shape)
    dense[64:, :64] = 0.0
    built = build("bcsr", whole_numbers(sp.csr_array(dense)), dtype=dtype)
    assert not any(name.startswith("exact.") for name in built.tensors)
    decode(built)


def test_any_changed_element_is_noticed():
    csr = whole_numbers(random_matrix(300, 900, 0.01))
    built = build("bcsr", csr, order=row_order(csr, True))
    for wrong in damaged(built):
        with pytest.raises((AssertionError, IndexError, KeyError)):
            decode(wrong)
