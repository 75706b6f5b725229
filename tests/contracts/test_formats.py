"""What every format must do: hold each entry of A exactly once, and give its bits back.

The suite runs on every format of ``tests/formats/decoding.py`` with every one of its options.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparsetile import CSR, formats
from sparsetile.formats import Units
from sparsetile.formats.base import Format
from tests.case_names import case_of
from tests.contracts.cases import MATRICES, csr_of, derived, random_matrix
from tests.formats.decoding import FORMATS, VARIANTS, decode, pack_values, packed, unpack

Case = tuple[str, str]


@functools.cache
def matrix(name: str) -> CSR:
    return csr_of(MATRICES[name]())


every_format = pytest.mark.parametrize(
    "case", [(name, each) for name, variants in VARIANTS.items() for each in variants],
    ids=" ".join,
)  # fmt: skip

ORDERS: dict[str, Callable[[CSR], Tensor | None]] = {
    "given": lambda csr: None,
    "reversed": lambda csr: torch.arange(csr.shape[0]).flip(0),
    "shuffled": lambda csr: torch.randperm(csr.shape[0]),
}


def same_bits(found: Tensor, expected: Tensor) -> bool:
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[expected.itemsize]
    return found.dtype is expected.dtype and torch.equal(found.view(kind), expected.view(kind))


def check_same(found: CSR, expected: CSR) -> None:
    """Both matrices are the same, bit for bit, in canonical form."""
    assert found.shape == expected.shape
    assert found.indptr.dtype is torch.int64 and found.indices.dtype is torch.int32
    assert torch.equal(found.indptr, expected.indptr)
    assert torch.equal(found.indices, expected.indices)
    if expected.values is None:
        assert found.values is None
    else:
        assert same_bits(found.values, expected.values)


def check_round_trip(case: Case, csr: CSR, order: Tensor | None) -> None:
    form = packed(*case, csr, order)
    check_same(unpack(form, csr, pack_values(form, csr, csr.values)), csr)
    check_same(unpack(form, csr), csr.with_values(None))


@every_format
def test_gives_the_matrix_back_in_any_row_order(case):
    for name in MATRICES:
        csr = matrix(name)
        for order in ORDERS.values():
            with case_of(name):
                check_round_trip(case, csr, order(csr))


@every_format
def test_names_every_entry_once_with_a_place_of_its_own(case):
    for name in MATRICES:
        with case_of(name):
            csr = matrix(name)
            form = packed(*case, csr, torch.randperm(csr.shape[0]))
            row, column, place = decode(form, csr)
            assert row.dtype is column.dtype is place.dtype is torch.int64
            cells = (row * csr.shape[1] + column).sort().values
            assert torch.equal(cells, csr.row_ids() * csr.shape[1] + csr.indices)
            size = pack_values(form, csr, csr.values).numel()
            assert place.unique().numel() == csr.nnz
            assert not csr.nnz or (int(place.min()) >= 0 and int(place.max()) < size)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
@every_format
def test_keeps_negative_zeros_denormals_infinities_and_stored_zeros(case, dtype):
    csr = csr_of(random_matrix(70, 90, 0.3), dtype=dtype)
    tiny = torch.finfo(dtype).smallest_normal / 2
    special = [0.0, -0.0, float("inf"), -float("inf"), tiny, -tiny, -3.0]
    csr.values[:] = torch.tensor((special * csr.nnz)[: csr.nnz], dtype=dtype)
    check_round_trip(case, csr, torch.randperm(70))


@every_format
def test_counts_the_bytes_of_its_index_arrays(case):
    for name in MATRICES:
        form = packed(*case, matrix(name))
        arrays = [getattr(form, name) for name in form.index_arrays]
        counted = [array for array in arrays if array is not None]
        assert form.bytes == sum(t.numel() * t.element_size() for t in counted)
        assert counted and not any(t.is_floating_point() for t in counted)
        assert all(t.is_contiguous() for t in counted)


@every_format
def test_units_are_distinct_and_name_disjoint_parts_of_their_lists(case):
    for name in MATRICES:
        csr = matrix(name)
        check_units(packed(*case, csr, torch.randperm(csr.shape[0])).units())


def check_units(units: Units) -> None:
    labels = list(zip(units.bundled.tolist(), units.label.tolist(), strict=True))
    assert len(set(labels)) == units.count and bool((units.length >= 0).all())
    for bundled in (False, True):
        mine = units.bundled == bundled
        begin, order = units.begin[mine & (units.length > 0)].sort()
        end = begin + units.length[mine & (units.length > 0)][order]
        assert bool((end[:-1] <= begin[1:]).all())
    if units.offsets is not None:
        assert torch.equal(units.offsets[:-1], units.begin)
        assert torch.equal(units.offsets[1:], units.begin + units.length)
        assert torch.equal(units.label, torch.arange(units.count))


def test_every_format_of_the_package_has_a_decoder_here():
    for module in pkgutil.iter_modules(formats.__path__):
        importlib.import_module(f"{formats.__name__}.{module.name}")
    defined = {each for each in derived(Format) if "index_arrays" in vars(each)}
    assert {each for each in defined if each.__module__.startswith(formats.__name__)} == {
        *FORMATS.values()
    }
