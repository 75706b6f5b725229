"""``rsh``: windows as MMA operands and residual rows beside them, with their work items, decoded.

This proves the format (formats/rstile.py, formats/fragments.py) and its schedules
(balance/windows.py, balance/segments.py), not the kernel: see decoding.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from tests.case_names import case_of
from tests.contracts.cases import MATRICES, random_matrix
from tests.kernels.decoding import Built, Pieces, bits, build, damaged, row_order, whole_numbers

ABLATIONS = ("tiles", "mixed", "threshold")
F32, F16 = torch.float32, torch.float16


def dense_tiles(built: Built, dtype: torch.dtype) -> np.ndarray:
    """[tiles, 16, 8]: what each lane's registers hold of operand A, put back in its place."""
    tiles = np.zeros((built.meta["tiles"], 16, 8))
    half = dtype.itemsize == 2
    lanes = built.packed.reshape(-1, 32, 4, 2 if half else 1)  # step, lane, register, element
    assert len(lanes) * (2 if half else 1) == len(tiles)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for register in range(4):
            row = g + 8 * (register % 2)
            mine = lanes[:, lane, register]
            if half:  # the upper registers are columns 8 to 15, the second tile of a step
                tiles[register // 2 :: 2, row, 2 * t : 2 * t + 2] = mine
            else:
                tiles[:, row, t + 4 * (register // 2)] = mine[:, 0]
    held = bits(built["bitmaps"]).reshape(-1, 16, 8)
    assert np.array_equal(tiles != 0, held), "entries are where bits are"
    return tiles


class Rows:
    """C: every row is stored once."""

    def __init__(self, built: Built) -> None:
        self.C = np.full_like(built.C, np.nan)

    def store(self, row: int, total: np.ndarray) -> None:
        assert np.isnan(self.C[row]).all(), "a row of C has one owner"
        self.C[row] = total


def decode_windows(built: Built, dtype: torch.dtype, C: Rows) -> None:
    meta, order = built.meta, built["order"]
    offsets, columns = built["row_window_offset"], built["tile_columns"].reshape(-1, 8)
    assert len(order) == meta["positions"] <= 16 * (len(offsets) - 1)
    assert len(columns) == meta["tiles"] == offsets[-1] and not (offsets % 2).any()
    products = dense_tiles(built, dtype) @ built.B[columns]

    def store(window: int, total: np.ndarray) -> None:
        mine = order[16 * window : 16 * window + 16]
        assert not total[len(mine) :].any(), "rows past the end of A have entries"
        for row, line in zip(mine, total, strict=False):
            C.store(row, line)

    pieces = Pieces()
    assert len(built["window_items"]) == meta["items"]
    for window, first, end, slot in built["window_items"].tolist():
        assert first % 2 == end % 2 == 0, "two tiles are multiplied at once"
        if slot >= 0:  # a piece of a long window
            assert offsets[window] <= first < end <= offsets[window + 1]
            pieces.put(slot, window, products[first:end].sum(0))
            continue
        assert (first, end) == (offsets[window], offsets[window - slot]), "a run of windows"
        for w in range(window, window - slot):
            store(w, products[offsets[w] : offsets[w + 1]].sum(0))
    assert len(built["window_parent_of_slot"]) == meta["slots"]
    assert len(built["window_nodes"]) == meta["nodes"]
    for window, total in pieces.sums(built["window_parent_of_slot"], built["window_nodes"]):
        store(window, total)
    for w in range(len(offsets) - 1):
        mine = columns[offsets[w] : offsets[w + 1]].ravel()
        distinct = np.unique(mine)
        padding = np.full(mine.size - distinct.size, mine.max(initial=0))
        assert np.array_equal(mine, [*distinct, *padding]), "the last column is repeated"
        assert padding.size < 16, "a tile at most fills the window up"


def decode_rows(built: Built, C: Rows) -> None:
    columns, pieces, sizes = built["columns"], Pieces(), built.meta["residual"]
    assert np.array_equal(columns, built.csr.indices), "entries are numbered as in A"
    assert len(built["items"]) == sum(sizes["sections"]) and not any(sizes["sections"][1::2])
    for row, begin, end, slot in built["items"].tolist():
        total = built.values[begin:end] @ built.B[columns[begin:end]]
        if slot >= 0:
            pieces.put(slot, row, total)
        else:
            C.store(row, total)
    assert (len(built["parent_of_slot"]), len(built["nodes"])) == (sizes["slots"], sizes["nodes"])
    for row, total in pieces.sums(built["parent_of_slot"], built["nodes"]):
        C.store(row, total)


def decode(built: Built, dtype: torch.dtype = F32) -> None:
    C = Rows(built)
    decode_windows(built, dtype, C)
    decode_rows(built, C)
    assert np.array_equal(built["indptr"], built.csr.indptr)
    built.check(C.C)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("ablation", ABLATIONS)
@pytest.mark.parametrize("permuted", [False, True])
def test_windows_and_rows_decode_to_the_product(permuted, ablation, dtype):
    for name, matrix in MATRICES.items():
        with case_of(name):
            csr = whole_numbers(matrix(), pattern=permuted)
            order = row_order(csr, permuted)
            decode(build("rsh", csr, order=order, dtype=dtype, ablation=ablation), dtype)


def shared_and_alone() -> sp.csr_array:
    """Rows that share columns, a few short ones, and two long rows with columns of their own."""
    long = [sp.csr_array(np.ones((1, 4000))) for _ in range(2)]
    shared = sp.csr_array(np.ones((40, 5000)))
    parts = [random_matrix(5, 5000, 0.001), shared, random_matrix(9, 5000, 0.002)]
    return sp.block_diag([sp.vstack(parts), *long], format="csr")


def test_long_windows_and_long_rows_of_one_product_are_cut_and_joined():
    built = build("rsh", whole_numbers(shared_and_alone()), n=128, ablation="mixed")
    assert built.meta["slots"] > built.meta["nodes"] > 0
    assert built.meta["residual"]["slots"] > built.meta["residual"]["nodes"] > 0
    decode(built)


def test_a_long_window_is_joined_over_two_levels():
    built = build("rsh", whole_numbers(random_matrix(20, 60_000, 0.2)), ablation="tiles")
    assert built.meta["nodes"] > 2
    decode(built)


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_bfloat16_lies_where_float16_does(ablation):
    csr = whole_numbers(MATRICES["equal rows"]())
    one, other = (
        build("rsh", csr, dtype=dtype, ablation=ablation) for dtype in (F16, torch.bfloat16)
    )
    assert np.array_equal(one.packed, other.packed) and one.packed.any()
    decode(other, torch.bfloat16)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_any_changed_element_is_noticed(dtype):
    csr = whole_numbers(shared_and_alone())
    built = build("rsh", csr, n=128, order=row_order(csr, True), dtype=dtype, ablation="mixed")
    plain = build("rsh", csr, n=128, dtype=dtype, ablation="mixed")
    assert plain.meta["nodes"] and plain.meta["residual"]["nodes"]
    for wrong in (*damaged(built), *damaged(plain)):
        with pytest.raises((AssertionError, IndexError, KeyError)):
            decode(wrong, dtype)
