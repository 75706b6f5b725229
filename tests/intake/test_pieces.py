"""Pieces of rows: all of them, whole, with fewer entries than the limit; wrong ones are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as some
from tests.contracts.cases import csr_of, random_matrix, with_dense_row

from sparsetile.intake import CSR, as_csr, csr, pieces
from sparsetile.intake.pieces import checked_pieces, row_pieces


def pointers(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@example([2, 0], 2)  # a row as long as the limit before an empty one
@given(some.lists(some.integers(0, 40), max_size=30), some.integers(2, 60))
def test_pieces_are_all_rows_in_order_and_keep_the_limit(lengths, limit):
    indptr = pointers(lengths)
    found = row_pieces(indptr, limit)
    assert [each.first_row for each in found] == [0, *(each.end_row for each in found)][:-1]
    assert (found[-1].end_row if found else 0) == len(lengths)
    for each in found:
        assert (each.begin, each.end) == (int(indptr[each.first_row]), int(indptr[each.end_row]))
        assert each.end - each.begin < limit or each.end_row == each.first_row + 1
        assert each.pointers(indptr).tolist() == pointers(lengths[each.rows]).tolist()


def test_pieces_are_about_equally_large():
    sizes = [each.end - each.begin for each in row_pieces(pointers([1] * 1000), 600)]
    assert sizes == [500, 500]


def test_a_row_over_the_limit_is_a_piece_of_its_own():
    assert [tuple(each.rows.indices(9))[:2] for each in row_pieces(pointers([1, 50, 1]), 10)] == [
        (0, 1), (1, 2), (2, 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "indptr, indices, message",
    [
        ([1, 2, 3], [0, 1, 1], r"row pointers must be ascending from 0 to 3.*got 1 at row 0\."),
        (
            [0, 3, 2],
            [0, 1, 1],
            r"row pointers must be ascending from 0 to 3.*got descending ones",
        ),
        ([0, 1, 2], [0, 1, 1], r"row pointers must be ascending from 0 to 3.*got 2 at the end\. "),
        ([0, 1, 3], [0, 5, 1], r"column indices must be from 0 to 4 \(rows of B - 1\), got 5\. "),
        ([0, 1, 3], [0, -2, 1], r"column indices must be from 0 to 4 \(rows of B - 1\), got -2\. "),
    ],
)
def test_wrong_arrays_are_refused(indptr, indices, message):
    with pytest.raises(ValueError, match=f"spmm: {message}"):
        checked_pieces("spmm", torch.tensor(indptr), torch.tensor(indices), 5, 3)


def test_a_row_that_no_launch_can_number_is_refused(monkeypatch):
    monkeypatch.setattr(pieces, "MAX_ENTRIES", 4)
    message = r"^spmm: row pointers must be of rows with fewer than 2\^31 entries, got 5 in one\. "
    with pytest.raises(ValueError, match=message):
        checked_pieces("spmm", torch.tensor([0, 5, 6]), torch.zeros(6).long(), 5, 4)


@pytest.fixture
def many(monkeypatch) -> None:
    """Every matrix of the test has too many entries to be handled at once."""
    monkeypatch.setenv("SPARSETILE_ENTRY_LIMIT", "50")
    monkeypatch.setattr(csr, "NUMBERED_AT_ONCE", 64)
    monkeypatch.setattr(csr, "SORTED_AT_ONCE", 32)
    monkeypatch.setattr("sparsetile.intake.canonical.NUMBERED_AT_ONCE", 7)
    monkeypatch.setattr("sparsetile.intake.canonical.SORTED_ROWS_AT_ONCE", 40)


@pytest.mark.parametrize("matrix", [random_matrix(40, 30, 0.2), with_dense_row(30, 90, 3)])
def test_rows_columns_and_the_transpose_are_those_of_a_small_matrix(matrix, many, monkeypatch):
    large = csr_of(matrix)
    expected = matrix.T.tocsr().sorted_indices()
    assert large.row_ids().tolist() == matrix.tocoo().row.tolist()
    assert large.row_ids(torch.int32).dtype is torch.int32
    assert large.column_lengths().cumsum(0).tolist() == expected.indptr[1:].tolist()
    found = large.transposed()
    assert found.indptr.tolist() == expected.indptr.tolist()
    assert found.indices.tolist() == expected.indices.tolist()
    assert found.values.tolist() == torch.tensor(expected.data).float().tolist()


def test_unsorted_rows_with_duplicates_are_sorted_some_at_a_time(many, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 12, (60,), generator=generator)
    indptr = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])
    entries = int(indptr[-1])
    indices = torch.randint(0, 9, (entries,), generator=generator, dtype=torch.int32)
    values = torch.randint(-4, 5, (entries,), generator=generator).float()
    parts = (indptr, indices, values, (60, 9))
    found = as_csr(parts)
    monkeypatch.delenv("SPARSETILE_ENTRY_LIMIT")
    expected = as_csr(parts)
    for name in ("indptr", "indices", "values", "entry_map"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_duplicates_of_a_pattern_count(many):
    found = as_csr((torch.arange(0, 202, 2), torch.zeros(200).int(), None, (100, 1)))
    assert found.nnz == 100 and found.values is not None and bool((found.values == 2).all())


@pytest.mark.parametrize("at", [1, 7, 8, 13, 14, 99])
def test_the_order_of_columns_is_checked_across_parts(at, many):
    indices = torch.arange(100, dtype=torch.int32)
    assert as_csr((torch.tensor([0, 100]), indices, None, (1, 100))).entry_map is None
    indices[at] = indices[at - 1]
    assert as_csr((torch.tensor([0, 100]), indices, None, (1, 100))).entry_map is not None
    rows = as_csr((torch.tensor([0, at, 100]), indices, None, (2, 100)))
    assert isinstance(rows, CSR) and rows.entry_map is None
