"""What every format must do: hold each entry of A exactly once, and give its bits back.

The suite runs on every format in ``FORMATS`` with every one of its ``variants``.
"""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Iterator
from typing import Self

import pytest
import torch
from torch import Tensor

from sparsetile import CSR, formats
from sparsetile.core.packages import import_modules
from sparsetile.formats import FORMATS, Format, Rows, Units
from tests.case_names import case_of
from tests.contracts.cases import MATRICES, csr_of, random_matrix

Case = tuple[str, str]


def cases() -> list[Case]:
    """(format, variant) of everything registered."""
    return [(name, variant) for name, form in FORMATS.items() for variant in form.variants]


def packed(case: Case, csr: CSR, order: Tensor | None = None) -> Format:
    form, variant = FORMATS[case[0]], case[1]
    return form.pack(csr, order, **form.variants[variant])


@functools.cache
def matrix(name: str) -> CSR:
    return csr_of(MATRICES[name]())


every_format = pytest.mark.parametrize("case", cases(), ids=" ".join)

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
    form = packed(case, csr, order)
    check_same(form.unpack(form.pack_values(csr.values)), csr)
    check_same(form.unpack(), csr.with_values(None))


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
            form = packed(case, csr, torch.randperm(csr.shape[0]))
            row, column, place = form.decode()
            assert row.dtype is column.dtype is place.dtype is torch.int64
            cells = (row * csr.shape[1] + column).sort().values
            assert torch.equal(cells, csr.row_ids() * csr.shape[1] + csr.indices)
            size = form.pack_values(csr.values).numel()
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
def test_packs_values_in_the_type_asked_for_and_ones_for_a_pattern(case):
    csr = csr_of(MATRICES["odd sizes"](), dtype=torch.float64)
    form = packed(case, csr)
    half = form.pack_values(csr.values, torch.float16)
    assert half.dtype is torch.float16
    check_same(form.unpack(half), csr.with_values(csr.values.to(torch.float16)))
    ones = form.pack_values(None, torch.bfloat16)
    check_same(form.unpack(ones), csr.with_values(torch.ones(csr.nnz, dtype=torch.bfloat16)))
    assert form.pack_values(None).dtype is torch.float32


@every_format
def test_rejects_values_of_another_matrix(case):
    form = packed(case, csr_of(MATRICES["odd sizes"]()))
    with pytest.raises(ValueError, match=r"pack_values: values must be a tensor of \d+ values"):
        form.pack_values(torch.ones(3))


@every_format
def test_decodes_without_the_maps_that_values_are_packed_by(case):
    csr = matrix("odd sizes")
    form = packed(case, csr, torch.randperm(csr.shape[0]))
    values = form.pack_values(csr.values)
    assert set(form.value_maps) <= form.tensors().keys()
    lost = {name: torch.zeros_like(form.tensors()[name]) for name in form.value_maps}
    check_same(dataclasses.replace(form, **lost).unpack(values), csr)


@every_format
def test_counts_the_bytes_of_its_index_arrays(case):
    for name in MATRICES:
        form = packed(case, matrix(name))
        arrays = form.tensors()
        counted = [arrays[name] for name in form.index_arrays if name in arrays]
        assert form.bytes == sum(t.numel() * t.element_size() for t in counted)
        assert counted and not any(t.is_floating_point() for t in counted)
        assert not set(form.index_arrays) & set(form.value_maps)


@every_format
def test_names_all_its_tensors(case):
    csr = matrix("odd sizes")
    form = packed(case, csr, torch.randperm(csr.shape[0]))
    arrays = form.tensors()
    held = [f.name for f in dataclasses.fields(form) if torch.is_tensor(getattr(form, f.name))]
    assert list(arrays) == held
    for name, array in arrays.items():
        assert array is getattr(form, name) and array.is_contiguous()


@every_format
def test_units_are_distinct_and_name_disjoint_parts_of_their_lists(case):
    for name in MATRICES:
        csr = matrix(name)
        check_units(packed(case, csr, torch.randperm(csr.shape[0])).units())


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


@pytest.fixture
def registry() -> Iterator[None]:
    """Formats that a test registers are forgotten behind it."""
    before = dict(FORMATS)
    yield
    FORMATS.clear()
    FORMATS.update(before)


@pytest.mark.usefixtures("registry")
def test_a_format_joins_this_suite_by_being_defined():
    @dataclasses.dataclass(frozen=True, eq=False)
    class Columns(Format):
        name = "columns"
        index_arrays = ("indptr", "rows", "order")

        indptr: Tensor
        rows: Tensor
        order: Tensor
        shape: tuple[int, int]

        @classmethod
        def pack(cls, csr: CSR, order: Tensor | None = None) -> Self:
            turned = csr.transposed()
            return cls(turned.indptr, turned.indices, csr.transpose_order(), csr.shape)

        def pack_values(self, values: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
            return torch.ones(self.rows.numel()) if values is None else values[self.order]

        def decode(self) -> tuple[Tensor, Tensor, Tensor]:
            turned = CSR(self.indptr, self.rows, None, self.shape[::-1])
            return self.rows.long(), turned.row_ids(), torch.arange(self.rows.numel())

        def units(self) -> Units:
            return Units.from_offsets(self.indptr)

    case = ("columns", "default")
    assert case in cases()
    test_gives_the_matrix_back_in_any_row_order(case)
    test_names_every_entry_once_with_a_place_of_its_own(case)
    test_counts_the_bytes_of_its_index_arrays(case)
    test_units_are_distinct_and_name_disjoint_parts_of_their_lists(case)


@pytest.mark.usefixtures("registry")
def test_rejects_two_formats_of_one_name():
    with pytest.raises(ValueError) as caught:
        type("Other", (Rows,), {"name": "rows"})
    assert str(caught.value) == "Format: name must be new, got 'rows'. Rows has it."
    assert FORMATS["rows"] is Rows


@pytest.mark.usefixtures("registry")
def test_a_file_in_the_package_is_enough(tmp_path, monkeypatch):
    source = """
        from sparsetile.formats.rows import Rows
        class Dropped(Rows):
            name = "dropped in"
    """
    (tmp_path / "dropped_in.py").write_text(textwrap.dedent(source))
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    import_modules("sparsetile.formats")
    assert ("dropped in", "default") in cases()
