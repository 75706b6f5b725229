"""Row chunks cover every row once, in order, at about equal cost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsetile.balance import RowChunks
from sparsetile.formats import Units


def pointers(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def bounds_of(indptr: Tensor, chunks: int, **options: float) -> Tensor:
    return RowChunks.make(Units.from_offsets(indptr), chunks=chunks, **options).bounds


@given(
    lengths=st.lists(st.integers(0, 50), max_size=200),
    chunks=st.integers(1, 70),
    row_cost=st.sampled_from([0.5, 4.0, 100.0]),
)
def test_chunks_cover_all_rows_and_none_exceeds_its_share_by_more_than_a_row(
    lengths: list[int], chunks: int, row_cost: float
) -> None:
    indptr = pointers(lengths)
    bounds = bounds_of(indptr, chunks, row_cost=row_cost)
    assert bounds.dtype == torch.int64
    assert bounds.numel() == chunks + 1
    assert bounds[0] == 0
    assert bounds[-1] == len(lengths)
    assert (bounds.diff() >= 0).all()
    cost = (indptr[bounds].diff() + row_cost * bounds.diff()).max()
    total = sum(lengths) + row_cost * len(lengths)
    assert cost <= total / chunks + max(lengths, default=0) + row_cost + 1e-6


def test_equal_rows_are_split_evenly() -> None:
    assert bounds_of(pointers([3] * 100), 4).tolist() == [0, 25, 50, 75, 100]


def test_empty_rows_count_so_that_they_are_shared_too() -> None:
    assert bounds_of(pointers([0] * 100), 4).tolist() == [0, 25, 50, 75, 100]


def test_a_matrix_without_rows_has_empty_chunks() -> None:
    assert bounds_of(pointers([]), 3).tolist() == [0, 0, 0, 0]


def test_one_dense_row_is_one_chunk_and_the_chunks_it_swallows_are_empty() -> None:
    bounds = bounds_of(pointers([1] * 10 + [10_000] + [1] * 10), 8)
    assert bounds.tolist() == [0, *[11] * 7, 21]


def test_fewer_rows_than_chunks_gives_each_row_its_own_chunk() -> None:
    assert bounds_of(pointers([5, 5]), 5).diff().max() == 1


def test_a_costly_row_weighs_more_than_its_entries() -> None:
    indptr = pointers([0] * 90 + [8] * 10)
    assert bounds_of(indptr, 2, row_cost=1.0)[1] == 90
    assert bounds_of(indptr, 2, row_cost=1e6)[1] in (50, 51)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"chunks": 2.0}, TypeError, "chunks must be an int, got float. Give a whole number."),
        ({"chunks": True}, TypeError, "chunks must be an int, got bool. Give a whole number."),
        ({"chunks": 0}, ValueError, "chunks must be at least 1, got 0. Ask for one chunk or more."),
        (
            {"chunks": 2, "row_cost": float("nan")},
            ValueError,
            "row_cost must be a finite number above 0, got nan. Leave it at its default.",
        ),
        (
            {"chunks": 2, "row_cost": 0.0},
            ValueError,
            "row_cost must be a finite number above 0, got 0.0. Leave it at its default.",
        ),
    ],
)
def test_a_wrong_argument_is_named(
    options: dict[str, float], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        RowChunks.make(Units.from_offsets(pointers([1, 2])), **options)
    assert str(caught.value) == f"RowChunks.make: {text}"
