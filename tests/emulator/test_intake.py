"""Matrices that ``check_rows`` checks and copies, run on the host thread by thread, beside intake
by tensor operations."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.intake import as_csr
from sparsetile.intake.csr import CSR
from sparsetile.plan.taken import taken
from tests.emulator.build import host_compiler
from tests.emulator.test_cells import run_on_host
from tests.formats.row_lists import LISTS, matrix
from tests.host import built_by_kernels, launch_few_blocks

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")
planner = importlib.import_module("sparsetile.plan.planner")
WIDTHS = [(torch.int64, torch.int64), (torch.int32, torch.int32), (torch.int64, torch.int32)]


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    run_on_host(monkeypatch, folder)
    with built_by_kernels("cpu"):
        yield


def tuples(csr: CSR, indptr: torch.dtype, indices: torch.dtype) -> tuple[Any, Any]:
    """The matrix as CSR arrays and as edges."""
    values = torch.arange(csr.nnz).float()
    edges = torch.stack([csr.row_ids(), csr.indices.long()]).to(indices)
    arrays = csr.indptr.to(indptr), csr.indices.to(indices), values, csr.shape
    return arrays, (edges, values, csr.shape)


def assert_same(found: CSR | None, wanted: CSR) -> None:
    assert found is not None and found.shape == wanted.shape and found.checked
    assert found.entry_map is None and wanted.entry_map is None
    for name in ("indptr", "indices", "values"):
        mine, theirs = getattr(found, name), getattr(wanted, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype is theirs.dtype and torch.equal(mine, theirs), name


def storages(*tensors: Tensor | None) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tensors if each is not None} - {0}


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_canonical_matrices_are_copied_as_they_are(name, widths):
    for A in tuples(matrix(name), *widths):
        found = taken(A, None)
        assert_same(found, as_csr(A))
        assert not storages(found.indptr, found.indices, found.values) & storages(*A[:-1])


def test_a_row_of_a_million_entries_among_empty_ones():
    entries = 10**6
    indptr = torch.tensor([0, 0, entries, entries, entries])
    A = (indptr, torch.arange(entries), None, (4, entries))
    assert_same(taken(A, None), as_csr(A))
    edges = torch.stack([torch.ones(entries, dtype=torch.int64), torch.arange(entries)])
    assert_same(taken((edges, None, (4, entries)), None), as_csr((edges, None, (4, entries))))


def test_sparse_tensors_and_unchecked_matrices_are_copied():
    csr = matrix("hubs")
    values = torch.randn(csr.nnz)
    A = torch.sparse_csr_tensor(csr.indptr, csr.indices.long(), values, csr.shape)
    assert_same(taken(A, None), as_csr(A))
    own = st.CSR(csr.indptr, csr.indices, values, csr.shape)
    assert_same(taken(own, None), as_csr(own))


def test_more_numbers_than_threads_take_turns(monkeypatch):
    launch_few_blocks(monkeypatch, 2)
    for A in tuples(matrix("hubs"), torch.int64, torch.int64):
        assert_same(taken(A, None), as_csr(A))


def arrays() -> tuple[Tensor, Tensor, Tensor, tuple[int, int]]:
    csr = matrix("some wide", 200)
    return csr.indptr, csr.indices.long(), torch.randn(csr.nnz), csr.shape


def edited(which: int, place: int, value: int) -> Any:
    parts = list(arrays())
    parts[which] = parts[which].clone()
    parts[which][place] = value
    return tuple(parts)


WRONG = {
    "a first pointer above 0": edited(0, 0, 1),
    "a pointer that falls": edited(0, 40, 3),
    "a pointer below 0": edited(0, 40, -(2**40)),
    "a pointer beyond the entries": edited(0, 40, 2**40),
    "a last pointer that is too small": edited(0, -1, arrays()[1].numel() - 1),
    "a column below 0": edited(1, 100, -1),
    "a column beyond the last": edited(1, 100, 200),
    "a column beyond 32 bits": edited(1, 100, 2**32 + 1),
    "too few pointers": (arrays()[0][:-1], *arrays()[1:]),
    "too few values": (*arrays()[:2], arrays()[2][:-1], arrays()[3]),
    "columns that are not whole": (arrays()[0], arrays()[1].float(), *arrays()[2:]),
    "a shape below 0": (*arrays()[:3], (-1, 200)),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_has_the_same_error(case):
    A = WRONG[case]
    assert taken(A, None) is None
    with pytest.raises((ValueError, TypeError)) as wanted:
        as_csr(A, function="plan")
    with pytest.raises(type(wanted.value)) as found:
        st.plan(A, 8)
    assert str(found.value) == str(wanted.value)


@pytest.mark.parametrize("axis, value", [(0, -1), (0, 10**6), (1, -1), (1, 200), (1, 2**32)])
def test_edges_out_of_range_have_the_same_error(axis, value):
    _, (edges, weight, shape) = tuples(matrix("some wide", 200), torch.int64, torch.int64)
    edges[axis, 50] = value
    with pytest.raises(ValueError) as wanted:
        as_csr((edges, weight, shape), function="plan")
    with pytest.raises(ValueError) as found:
        st.plan((edges, weight, shape), 8)
    assert str(found.value) == str(wanted.value)


def test_entries_in_any_order_are_sorted_and_duplicates_added():
    csr = matrix("some wide", 200)
    values, B = torch.randint(1, 9, (csr.nnz,)).float(), torch.randint(-4, 5, (200, 8)).float()
    turned = csr.indices.clone()
    longest = int(csr.row_lengths().argmax())
    begin, end = csr.indptr[longest : longest + 2].tolist()
    turned[begin:end] = turned[begin:end].flip(0)
    twice = csr.indices.clone()
    twice[begin + 1] = twice[begin]
    for columns in (turned, twice):
        A = (csr.indptr, columns, values, csr.shape)
        assert taken(A, None) is None
        dense = torch.zeros(csr.shape)
        dense.index_put_((csr.row_ids(), columns.long()), values, accumulate=True)
        assert torch.equal(st.plan(A, 8) @ B, dense @ B)
    edges = torch.stack([csr.row_ids(), csr.indices.long()])
    repeated = edges[:, [0, *range(csr.nnz)]]
    assert taken((repeated, None, csr.shape), None) is None
    assert taken((repeated.flip(1), None, csr.shape), None) is None


@pytest.mark.parametrize("name", LISTS)
def test_edges_in_any_order_are_sorted(name):
    csr = matrix(name)
    edges = torch.stack([csr.row_ids(), csr.indices.long()])
    order = torch.randperm(csr.nnz, generator=torch.Generator().manual_seed(3))
    for weight in (None, torch.randn(csr.nnz)):
        A = (edges[:, order].to(torch.int32), weight, csr.shape)
        wanted, found = as_csr(A), taken(A, None)
        assert found is not None
        assert (found.entry_map is None) == (wanted.entry_map is None)
        if wanted.entry_map is not None:
            assert torch.equal(found.entry_map, wanted.entry_map)
        unmapped = [replace(each, entry_map=None) for each in (found, wanted)]
        assert_same(*unmapped)


def test_new_values_of_sorted_edges_come_in_the_callers_order():
    csr = matrix("hubs", 4096)
    edges = torch.stack([csr.row_ids(), csr.indices.long()]).flip(1)
    B = torch.randint(-4, 5, (4096, 8)).float()
    plan = st.plan((edges, torch.ones(csr.nnz), csr.shape), 8)
    values = torch.randint(1, 9, (csr.nnz,)).float()
    plan.update_values(values)
    dense = torch.zeros(csr.shape).index_put_(tuple(edges), values)
    assert torch.equal(plan @ B, dense @ B)


def test_a_plan_does_not_follow_arrays_that_it_copied():
    indptr, columns, values, shape = arrays()
    B = torch.randn(200, 8)
    plan = st.plan((indptr, columns, values, shape), 8)
    wanted = plan @ B
    for each in (indptr, columns, values):
        each.zero_()
    assert torch.equal(plan @ B, wanted)


def test_values_that_are_trained_or_of_other_types_are_left_to_intake():
    indptr, columns, values, shape = arrays()
    for each in (values.requires_grad_(), values.detach().long(), values.detach().cfloat()):
        assert taken((indptr, columns, each, shape), None) is None
    trained = torch.nn.Parameter(torch.ones(columns.numel()))
    plan = st.plan((indptr, columns, trained, shape), 8)
    (plan @ torch.ones(200, 8)).sum().backward()
    assert trained.grad is not None
