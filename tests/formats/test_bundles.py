"""Row bundles against their own definition, bit by bit, and the rows that stay loose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsetile import CSR
from sparsetile.formats import BUNDLE_ROWS, LIST_STEP, RowBundles
from sparsetile.formats.bundles import MAX_COLUMNS, scatter_values
from tests.contracts.cases import MATRICES, csr_of, random_matrix
from tests.formats.decoding import pack_values, unpack


def walk_bundles(bundles: RowBundles) -> list[tuple[int, int, int]]:
    """Return (place in the packed values, row, column) of every bit, as the module's text says."""
    words = bundles.tagged.numpy().view(np.uint32)
    bundle = np.repeat(np.arange(bundles.bundle_count), np.diff(bundles.indptr.numpy()))
    found = []
    for member in range(BUNDLE_ROWS):
        held = np.nonzero(words >> (28 + member) & 1)[0]
        rows = bundles.rows.numpy()[bundle[held], member]
        columns = words[held] & (MAX_COLUMNS - 1)
        places = held * BUNDLE_ROWS + member
        found += zip(places.tolist(), rows.tolist(), columns.tolist(), strict=True)
    return found


def bundled(name: str, min_sharing: float, order: Tensor | None = None) -> tuple[CSR, RowBundles]:
    csr = csr_of(MATRICES[name]())
    return csr, RowBundles.pack(csr, order, min_sharing=min_sharing)


def shuffled(csr: CSR) -> Tensor:
    return torch.randperm(csr.shape[0])


@pytest.mark.parametrize("order", [None, shuffled], ids=["given order", "shuffled"])
@pytest.mark.parametrize("min_sharing", [0.0, 1.2, 2.0])
@pytest.mark.parametrize("name", MATRICES)
def test_each_row_is_in_one_bundle_or_loose(name, min_sharing, order):
    csr = csr_of(MATRICES[name]())
    bundles = RowBundles.pack(csr, order and order(csr), min_sharing=min_sharing)
    rows = bundles.rows.flatten()
    together = torch.cat([rows[rows >= 0].long(), bundles.loose])
    assert torch.equal(together.sort().values, torch.arange(csr.shape[0]))


@pytest.mark.parametrize("min_sharing", [0.0, 1.2, 2.0])
@pytest.mark.parametrize("name", MATRICES)
def test_each_entry_is_in_one_place_of_a_bundle_or_in_a_loose_row(name, min_sharing):
    csr, bundles = bundled(name, min_sharing)
    loose = torch.nonzero(torch.isin(csr.row_ids(), bundles.loose)).flatten()
    together = torch.cat([bundles.entries, loose])
    assert torch.equal(together.sort().values, torch.arange(csr.nnz))
    assert bundles.slots.unique().numel() == bundles.slots.numel()


@pytest.mark.parametrize("name", MATRICES)
def test_packed_values_follow_the_bits(name):
    csr, bundles = bundled(name, 1.5)
    packed = pack_values(bundles, csr, torch.arange(1.0, csr.nnz + 1))
    cells = packed[: BUNDLE_ROWS * bundles.element_count]
    place, row, column = torch.tensor(walk_bundles(bundles)).reshape(-1, 3).long().T
    entry = cells[place].long() - 1
    assert torch.equal(csr.row_ids()[entry], row)
    assert torch.equal(csr.indices[entry].long(), column)
    assert int(cells.count_nonzero()) == bundles.entries.numel(), "zeros elsewhere"


@pytest.mark.parametrize("name", MATRICES)
def test_bits_say_exactly_which_rows_hold_the_column(name):
    matrix = MATRICES[name]()
    csr, bundles = bundled(name, 0.0)
    present = np.zeros(csr.shape, dtype=bool)
    present[csr.row_ids().numpy(), csr.indices.numpy()] = True
    seen = np.zeros_like(present)
    for _, row, column in walk_bundles(bundles):
        assert not seen[row, column]
        seen[row, column] = True
    assert np.array_equal(seen, present)
    assert bundles.entries.numel() == matrix.nnz


@pytest.mark.parametrize("name", ["odd sizes", "equal rows", "one dense column", "one column"])
def test_a_bundle_lists_each_column_once_in_ascending_order(name):
    _, bundles = bundled(name, 0.0)
    for bundle in range(bundles.bundle_count):
        begin, end = bundles.indptr[bundle : bundle + 2].tolist()
        words = bundles.tagged[begin:end].long() & (2**32 - 1)
        columns, bits = (words % MAX_COLUMNS).tolist(), (words // MAX_COLUMNS).tolist()
        held = [column for column, bit in zip(columns, bits, strict=True) if bit]
        assert held == sorted(set(held)) and held
        padding = columns[len(held) :]
        assert len(columns) % LIST_STEP == 0 and len(padding) < LIST_STEP
        assert set(padding) <= {held[-1]}, "padding reads what was read before"


@pytest.mark.parametrize("min_sharing", [1.2, 1.9, 4.0])
def test_a_window_is_bundled_exactly_when_it_shares_enough(min_sharing):
    csr = csr_of(random_matrix(130, 40, 0.2))
    bundles = RowBundles.pack(csr, min_sharing=min_sharing)
    chosen = {min(row for row in window if row >= 0) // 4 for window in bundles.rows.tolist()}
    dense = torch.zeros(132, 40, dtype=torch.int64)
    dense[csr.row_ids(), csr.indices.long()] = 1
    windows = dense.reshape(33, 4, 40)
    entries, distinct = windows.sum((1, 2)), windows.amax(1).sum(1)
    expected = {
        window
        for window in range(33)
        if distinct[window] and entries[window] >= min_sharing * distinct[window]
    }
    assert chosen == expected


def test_windows_are_cut_from_the_order_given():
    csr = csr_of(MATRICES["equal rows"]())
    order = torch.arange(csr.shape[0]).flip(0)
    bundles = RowBundles.pack(csr, order)
    assert bundles.rows[0].tolist() == order[:4].tolist()
    assert bundles.rows[-1].tolist() == [*order[64:].tolist(), -1]


def test_the_last_of_the_columns_that_28_bits_can_name_is_kept():
    last = MAX_COLUMNS - 1
    csr = CSR(
        torch.tensor([0, 2, 3, 4, 6]),
        torch.tensor([0, last, last, 5, 5, last], dtype=torch.int32),
        torch.arange(1.0, 7.0),
        (4, MAX_COLUMNS),
    )
    back = unpack(RowBundles.pack(csr), csr)
    assert torch.equal(back.indptr, csr.indptr) and torch.equal(back.indices, csr.indices)


def test_rejects_columns_that_28_bits_cannot_name():
    csr = CSR(torch.tensor([0, 0]), torch.empty(0, dtype=torch.int32), None, (1, MAX_COLUMNS + 1))
    with pytest.raises(ValueError) as caught:
        RowBundles.pack(csr)
    assert str(caught.value) == (
        f"RowBundles.pack: csr must be a matrix of at most {MAX_COLUMNS} columns, "
        f"got {MAX_COLUMNS + 1}. Multiply single rows."
    )


@pytest.mark.parametrize("min_sharing", [1.0, 1.5, 100.0])
def test_the_size_is_that_of_lists_and_rows(min_sharing):
    _, bundles = bundled("odd sizes", min_sharing)
    count = bundles.bundle_count
    assert bundles.bytes == 4 * bundles.element_count + 8 * (count + 1) + 4 * BUNDLE_ROWS * count


def test_loose_rows_values_lie_behind_the_bundles_in_the_order_of_the_rows():
    csr, bundles = bundled("odd sizes", 1.2)
    assert bundles.loose.numel() and bundles.bundle_count, "the case must have both"
    packed = pack_values(bundles, csr, csr.values)
    cells = BUNDLE_ROWS * bundles.element_count
    rows = [csr.values[csr.indptr[r] : csr.indptr[r + 1]] for r in bundles.loose.tolist()]
    assert torch.equal(packed[cells:], torch.cat(rows))
    given = scatter_values(csr.values, bundles.entries, bundles.slots, bundles.element_count)
    assert torch.equal(packed[:cells], given)


def test_units_are_bundles_and_then_loose_rows():
    csr, bundles = bundled("odd sizes", 1.2)
    units, count = bundles.units(), bundles.bundle_count
    assert units.bundled.tolist() == [True] * count + [False] * bundles.loose.numel()
    assert torch.equal(units.label, torch.cat([torch.arange(count), bundles.loose]))
    assert torch.equal(units.begin[:count], bundles.indptr[:-1])
    assert torch.equal(units.begin[count:], csr.indptr[bundles.loose])
    assert torch.equal(units.length[count:], csr.row_lengths()[bundles.loose])
    assert not bool((units.length[:count] % LIST_STEP).any())
