"""``csr``: rows, bundles of four rows, and their work items with the sum tree, decoded.

This proves the format (formats/bundles.py), rows as they are, and their schedules
(balance/segments.py), not the kernels: see decoding.py. ``decode_rows`` also reads the rows by
which ``bcsr`` repairs C.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from tests.contracts.cases import MATRICES, equal_rows, random_matrix, with_dense_row
from tests.kernels.decoding import Built, Pieces, build, damaged, row_order, whole_numbers


def decode_rows(built: Built, prefix: str = "") -> None:
    """Every row by itself: what max, min, SDDMM and repairs use, and sums where none is bundled."""
    columns, values = built[f"{prefix}columns"], built.values
    assert np.array_equal(built[f"{prefix}indptr"], built.csr.indptr)
    C, pieces = np.full_like(built.C, np.nan), Pieces()
    for row, begin, end, slot in built[f"{prefix}items"].tolist():
        mine = slice(begin, end)
        total = values[mine] @ built.B[columns[mine]]
        store(C, [row], total[None], pieces, row, slot)
    for row, total in pieces.sums(built[f"{prefix}parent_of_slot"], built[f"{prefix}nodes"]):
        store(C, [row], total, pieces, row, -1)
    built.check(C)
    if f"{prefix}heads" in built.tensors:
        meta = json.loads(built.meta["exact"].partition(":")[2]) if prefix else built.meta
        sections = meta["plain"]["sections"]
        decode_heads(built[f"{prefix}items"], sections, columns, built[f"{prefix}heads"])


def decode_heads(
    items: np.ndarray, sections: list[int], columns: np.ndarray, heads: np.ndarray
) -> None:
    """A block of 128 threads has one shared item, four wide ones, or sixteen rows."""
    assert not sections[1] and not sections[3], "no bundles"
    blocks = heads.reshape(-1, 128)
    block, first = 0, 0
    for number, per_block in zip(sections[::2], (1, 4, 16), strict=True):
        for item in range(number):
            lanes = 128 // per_block
            begin, end = items[first + item, 1:3].tolist()
            found = blocks[block + item // per_block].reshape(per_block, lanes)[item % per_block]
            mine = columns[begin : min(begin + lanes, end)]
            assert np.array_equal(found, np.pad(mine, (0, lanes - len(mine))))
        if rest := number % per_block:
            past = blocks[block + number // per_block, rest * (128 // per_block) :]
            assert not past.any(), "threads past the last item"
        block, first = block - (-number // per_block), first + number
    assert first == len(items) and block == len(blocks)


def store(C: np.ndarray, rows: list[int], total: np.ndarray, pieces: Pieces, label: int, slot: int):
    """Keep a piece, or write the rows of a whole unit; a row is written once."""
    if slot >= 0:
        pieces.put(slot, label, total.reshape(len(rows), -1))
        return
    for row, mine in zip(rows, total.reshape(len(rows), -1), strict=True):
        if row < 0:
            assert not mine.any(), "a bundle's place past the last row has entries"
            continue
        assert np.isnan(C[row]).all()
        C[row] = mine


def decode_bundles(built: Built) -> None:
    """Shared rows, wide bundles, wide rows, bundles, and the rows that are in none."""
    tagged = built["tagged"].view(np.uint32)
    held = (tagged[:, None] >> (28 + np.arange(4))) & 1 == 1
    columns, rows = tagged & (2**28 - 1), built["bundle_rows"]
    packed = held * 1.0 if built.csr.values is None else built.packed.reshape(-1, 4)
    assert not packed[~held].any()
    C, pieces = np.full_like(built.C, np.nan), Pieces()
    bundled = np.repeat([False, True, False, True, False], built.meta["mixed"]["sections"])
    # Labels of bundles and rows are numbers of their own: keep them apart.
    for (label, begin, end, slot), is_bundle in zip(
        built["mixed_items"].tolist(), bundled, strict=True
    ):
        mine = slice(begin, end)
        if is_bundle:
            assert begin % 4 == end % 4 == 0, "lists are taken four elements at a time"
            total = packed[mine].T @ built.B[columns[mine]]
            store(C, rows[label].tolist(), total, pieces, -1 - label, slot)
        else:
            total = built.values[mine] @ built.B[built["columns"][mine]]
            store(C, [label], total, pieces, label, slot)
    for label, total in pieces.sums(built["mixed_parent_of_slot"], built["mixed_nodes"]):
        store(C, [label] if label >= 0 else rows[-1 - label].tolist(), total, pieces, label, -1)
    built.check(C)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("name", MATRICES)
def test_rows_decode_to_the_product(name, permuted):
    csr = whole_numbers(MATRICES[name](), pattern=permuted)
    decode_rows(build("csr", csr, order=row_order(csr, permuted)))


def test_a_long_row_is_cut_and_joined_over_three_levels():
    built = build("csr", whole_numbers(with_dense_row(9, 40_000, 5)), n=128)
    assert built.meta["plain"]["slots"] > 256
    decode_rows(built)


BUNDLED = {
    "equal rows": lambda: equal_rows(67, 400),
    "long shared rows": lambda: equal_rows(30, 5000),
    "three of four shared": lambda: random_matrix(250, 150, 0.75),
    "some rows in no bundle": lambda: sp.vstack(
        [random_matrix(90, 3000, 0.01, seed=1), equal_rows(41, 3000), random_matrix(8, 3000, 0.2)]
    ),
}


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("name", BUNDLED)
def test_bundles_decode_to_the_product(name, permuted):
    csr = whole_numbers(BUNDLED[name](), pattern=permuted)
    built = build("csr", csr, n=32, order=row_order(csr, permuted and name[:4] != "some"))
    decode_bundles(built)
    decode_rows(built)


def test_a_bundle_is_cut_and_joined_and_packed_in_sixteen_bits():
    built = build("csr", whole_numbers(equal_rows(30, 5000)), n=128, dtype=torch.float16)
    assert built.meta["mixed"]["slots"] > 0
    decode_bundles(built)


def test_any_changed_element_is_noticed():
    built = build("csr", whole_numbers(equal_rows(31, 5000)), n=128)
    for wrong in damaged(built):
        with pytest.raises((AssertionError, IndexError, KeyError)):
            decode_bundles(wrong)
            decode_rows(wrong)
