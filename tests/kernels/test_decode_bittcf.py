"""``acc``: BitTCF tiles of windows of 8 and 16 rows, packed values and work items, decoded.

This proves the format (formats/bittcf.py) and its schedule (balance/windows.py), not the kernel:
see decoding.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsetile.core import device
from tests.contracts.cases import MATRICES, random_matrix
from tests.kernels.decoding import Built, Pieces, bits, build, damaged, row_order, whole_numbers

WIDE = 256  # columns of B from which on windows of sixteen rows may be chosen


def dense_tiles(built: Built, stack: int) -> np.ndarray:
    """[tiles, rows of a window, 8]: bitmap by bitmap, values in the order of its bits."""
    first_value, values = built["tc_offset"], built.packed
    parts = bits(built["tc_local_bit"]).reshape(-1, 8, 8)
    dense = np.zeros(parts.shape)
    for part, held in enumerate(parts):
        mine = slice(first_value[part], first_value[part + 1])
        assert mine.stop - mine.start == held.sum()
        dense[part][held] = 1.0 if built.csr.values is None else values[mine]
    assert first_value[0] == 0 and first_value[-1] == built.csr.nnz
    return dense.reshape(-1, 8 * stack, 8)


def decode(built: Built) -> None:
    stack = built.meta["stack"]
    offsets, columns = built["row_window_offset"], built["sparse_a_to_b"].reshape(-1, 8)
    assert 8 * stack * (len(offsets) - 1) >= built.csr.shape[0]
    products = dense_tiles(built, stack) @ built.B[columns]
    C = np.full((len(offsets) - 1, 8 * stack, built.B.shape[1]), np.nan)
    pieces = Pieces()

    def store(window: int, total: np.ndarray) -> None:
        assert np.isnan(C[window]).all(), "a window of C is stored once"
        C[window] = total

    for window, first, end, slot in built["items"].tolist():
        if slot >= 0:  # a piece of a long window
            assert offsets[window] <= first < end <= offsets[window + 1]
            pieces.put(slot, window, products[first:end].sum(0))
            continue
        assert (first, end) == (offsets[window], offsets[window - slot]), "a run of windows"
        for w in range(window, window - slot):
            store(w, products[offsets[w] : offsets[w + 1]].sum(0))
    for window, total in pieces.sums(built["parent_of_slot"], built["nodes"]):
        store(window, total)
    for w in range(len(offsets) - 1):
        mine = columns[offsets[w] : offsets[w + 1]].ravel()
        distinct = np.unique(mine)
        padding = np.full(mine.size - distinct.size, mine.max(initial=0))
        assert np.array_equal(mine, [*distinct, *padding]), "the last column is repeated"
    assert np.array_equal(built["indptr"], built.csr.indptr)
    built.check(C.reshape(-1, C.shape[-1]), built["order"])


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("name", MATRICES)
def test_windows_of_eight_rows_decode_to_the_product(name, permuted):
    csr = whole_numbers(MATRICES[name](), pattern=permuted)
    built = build("acc", csr, order=row_order(csr, permuted))
    assert built.meta["stack"] == 1
    decode(built)


@pytest.fixture
def one_processor(constants):
    """So few that small matrices keep them busy: windows of sixteen rows need that."""
    small = device.Machine(**{**vars(device.H200), "processors": 1})
    constants(device, H200=small)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(60, 2000), (333, 1500)])
def test_windows_of_sixteen_rows_decode_to_the_product(one_processor, rows, columns, permuted):
    csr = whole_numbers(random_matrix(rows, columns, 0.2), pattern=permuted)
    built = build("acc", csr, n=WIDE, order=row_order(csr, permuted))
    assert built.meta["stack"] == 2
    decode(built)


def test_a_long_window_is_cut_and_joined_over_two_levels():
    built = build("acc", whole_numbers(random_matrix(20, 9000, 0.9)))
    assert built.meta["slots"] > built.meta["nodes"] > 3
    decode(built)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_values_of_sixteen_bits_decode_to_the_product(dtype):
    decode(build("acc", whole_numbers(MATRICES["odd sizes"]()), dtype=dtype))


def test_any_changed_element_is_noticed(one_processor):
    csr = whole_numbers(random_matrix(60, 9000, 0.2))
    built = build("acc", csr, n=WIDE, order=row_order(csr, True))
    assert built.meta["nodes"] and built.meta["stack"] == 2
    for wrong in damaged(built):
        with pytest.raises((AssertionError, IndexError, KeyError)):
            decode(wrong)
