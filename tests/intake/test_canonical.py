"""Canonical form as such: random matrices against dense sums, and what only parts can get wrong."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsetile.intake import as_csr
from sparsetile.intake.canonical import Names, from_compressed, from_coordinates


@st.composite
def coordinates(draw):
    """Entries in any order, with duplicates; small whole values, so that sums are exact."""
    rows, columns = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    count = draw(st.integers(0, 40)) if rows and columns else 0
    cells = st.tuples(
        st.integers(0, max(rows - 1, 0)), st.integers(0, max(columns - 1, 0)), st.integers(-8, 8)
    )
    entries = draw(st.lists(cells, min_size=count, max_size=count))
    table = np.array(entries, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2], (rows, columns)


def dense_sum(row, column, value, shape):
    out = torch.zeros(shape, dtype=torch.float64)
    for r, c, v in zip(row.tolist(), column.tolist(), value.tolist(), strict=True):
        out[r, c] += v
    return out


def as_input(kind, row, column, value, shape):
    """The same matrix in another kind of input; its entries may come in another order."""
    edges = torch.from_numpy(np.stack([row, column]))
    value = torch.from_numpy(value).double()
    if kind == "edges":
        return (edges, value, shape), value
    if kind == "torch coo":
        return torch.sparse_coo_tensor(edges, value, shape), value
    if kind == "scipy coo":
        return sp.coo_array((value.numpy(), (row, column)), shape=shape), value
    major, minor = (column, row) if kind == "scipy csc" else (row, column)
    order = np.argsort(major, kind="stable")
    count = shape[1] if kind == "scipy csc" else shape[0]
    indptr = np.searchsorted(major[order], np.arange(count + 1))
    parts = (value.numpy()[order], minor[order], indptr)
    if kind == "parts":
        return (torch.from_numpy(indptr), parts[1], parts[0], shape), torch.from_numpy(parts[0])
    return sp.csc_array(parts, shape=shape), torch.from_numpy(parts[0])


@pytest.mark.parametrize("kind", ["edges", "parts", "torch coo", "scipy coo", "scipy csc"])
@given(matrix=coordinates())
@settings(max_examples=60, deadline=None)
def test_any_entries_in_any_order_sum_to_their_dense_matrix(kind, dense, matrix):
    A, stored = as_input(kind, *matrix)
    csr = as_csr(A)
    assert torch.equal(dense(csr).double(), dense_sum(*matrix))
    assert torch.equal(csr.canonical_values(stored), csr.values)
    if csr.entry_map is None:
        assert stored.numel() == csr.nnz
    else:
        assert csr.entry_map.dtype == torch.int64
        assert csr.entry_map.shape == stored.shape


@given(matrix=coordinates())
@settings(max_examples=60, deadline=None)
def test_the_entry_map_points_each_entry_at_its_own_cell(matrix):
    row, column, value, shape = matrix
    csr = as_csr((np.stack([row, column]), value.astype(np.float64), shape))
    place = torch.arange(len(row)) if csr.entry_map is None else csr.entry_map
    assert csr.row_ids()[place].tolist() == row.tolist()
    assert csr.indices[place].tolist() == column.tolist()


@given(matrix=coordinates())
@settings(max_examples=60, deadline=None)
def test_reading_twice_changes_nothing(matrix):
    row, column, value, shape = matrix
    once = as_csr((np.stack([row, column]), value.astype(np.float32), shape))
    twice = as_csr((once.indptr, once.indices, once.values, once.shape))
    assert twice.entry_map is None
    assert torch.equal(once.indptr, twice.indptr)
    assert torch.equal(once.indices, twice.indices)
    assert torch.equal(once.values, twice.values)


@given(matrix=coordinates())
@settings(max_examples=60, deadline=None)
def test_a_pattern_keeps_no_values_unless_it_has_duplicates(dense, matrix):
    row, column, _, shape = matrix
    csr = as_csr((np.stack([row, column]), None, shape))
    distinct = len(set(zip(row.tolist(), column.tolist(), strict=True)))
    assert csr.nnz == distinct
    assert (csr.values is None) == (distinct == len(row))
    assert torch.equal(dense(csr).double(), dense_sum(row, column, np.ones_like(row), shape))


def test_a_wide_matrix_does_not_overflow_its_sort_keys(dense):
    last = 2**31 - 2
    edges = torch.tensor([[3, 3, 0], [last, 0, last]])
    csr = as_csr((edges, torch.tensor([1.0, 2.0, 3.0]), (4, 2**31 - 1)))
    assert csr.indices.tolist() == [last, 0, last]
    assert csr.values.tolist() == [3.0, 2.0, 1.0]
    assert csr.indptr.tolist() == [0, 1, 1, 1, 3]


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ([2**24], True),
        ([2**24 + 1], False),
        ([2**60, -(2**60)], True),
        ([2**63 - 1], False),
        ([-(2**63)], True),
        ([1, 2, 3, -(2**24) - 1], False),
    ],
)
def test_accepts_whole_numbers_only_if_float32_holds_them(values, fits):
    count = len(values)
    edges = torch.arange(count).repeat(2, 1)
    A = (edges, torch.tensor(values), (count, count))
    if fits:
        assert [int(value) for value in as_csr(A).values.tolist()] == values
        return
    with pytest.raises(TypeError) as refused:
        as_csr(A)
    assert str(refused.value) == (
        "plan: weight must be whole numbers that float32 holds exactly, "
        f"got int64 that it would round (entry {count - 1}). "
        "Convert it to the float type you want, for instance with .to(torch.float64)."
    )


def test_unsigned_numbers_beyond_int64_are_refused():
    A = sp.csr_array(np.array([[2**63]], dtype=np.uint64))
    with pytest.raises(TypeError, match=r"^plan: values must be whole numbers that float32 holds"):
        as_csr(A)


def test_the_default_float_type_decides_which_whole_numbers_fit():
    A = (torch.tensor([[0], [0]]), torch.tensor([2**24 + 1]), (1, 1))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert as_csr(A).values.tolist() == [2.0**24 + 1]
        torch.set_default_dtype(torch.float16)
        for value in (2**24, -(2**63)):  # infinite in float16
            with pytest.raises(TypeError, match="whole numbers that float16 holds exactly"):
                as_csr((A[0], torch.tensor([value]), (1, 1)))
    finally:
        torch.set_default_dtype(before)


def test_parts_on_two_devices_are_refused():
    indptr, indices = torch.tensor([0, 1]), torch.tensor([0])
    elsewhere = torch.ones(1, device="meta")
    with pytest.raises(ValueError) as refused:
        from_compressed(Names("plan"), indptr, indices, elsewhere, (1, 1))
    assert str(refused.value) == (
        "plan: A must be on one device, got indptr on cpu, indices on cpu, values on meta. "
        "Move all parts to the same device with .to(device)."
    )
    with pytest.raises(ValueError, match=r"^plan: A must be on one device, got row indices on cpu"):
        from_coordinates(Names("plan"), indices, indices, elsewhere, (1, 1))


def test_rows_and_columns_of_different_length_are_refused():
    with pytest.raises(ValueError) as refused:
        from_coordinates(Names("plan"), torch.tensor([0, 1]), torch.tensor([0]), None, (2, 2))
    assert str(refused.value) == (
        "plan: column indices must be of length 2, as row indices, got length 1. "
        "Give one row and one column for each entry."
    )


def test_blocks_that_do_not_divide_the_matrix_are_refused():
    with pytest.raises(ValueError) as refused:
        from_compressed(
            Names("plan"),
            torch.tensor([0, 1]),
            torch.tensor([0]),
            torch.ones(1, 2, 2),
            (3, 2),
            block=(2, 2),
        )
    assert str(refused.value) == (
        "plan: A must be of a shape that its blocks of 2 x 2 divide, got shape (3, 2). "
        "Pad the matrix or choose another block size."
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_summed_duplicates_are_differentiated_twice(dtype):
    edges = torch.tensor([[1, 0, 1, 1, 0], [2, 1, 2, 0, 1]])
    csr = as_csr((edges, torch.ones(5, dtype=dtype), (2, 3)))
    values = torch.randn(5, dtype=dtype, requires_grad=True)
    summed = csr.canonical_values(values)
    (first,) = torch.autograd.grad((summed**3).sum(), values, create_graph=True)
    assert torch.allclose(first, (3 * summed**2)[csr.entry_map])
    (second,) = torch.autograd.grad(first.sum(), values)
    counts = torch.bincount(csr.entry_map).to(dtype)
    assert torch.allclose(second, (6 * summed * counts)[csr.entry_map])
    if dtype is torch.float64:
        assert torch.autograd.gradgradcheck(csr.canonical_values, (values,))
