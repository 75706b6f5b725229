"""BRP against its own definition, entry by entry, and its rule against every choice packed."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsetile import CSR
from sparsetile.formats import BRP, FORMATS
from sparsetile.formats.brp import sort_windows
from tests.contracts.cases import MATRICES, csr_of, random_matrix
from tests.formats.matrices import dense_of, matrices

PARAMETERS = [(1, 4), (1, 1), (2, 4), (2, 1), (3, 1), (4, 2), (16, 1)]
INDEX_ARRAYS = (
    "group_window_id", "local_id", "old_col_id", "res_rows_id", "res_row_offset", "res_col_id",
)  # fmt: skip

parameters = st.tuples(st.integers(1, 5), st.integers(1, 3))
every_choice = pytest.mark.parametrize(("fixed", "group"), PARAMETERS)


@st.composite
def dense_matrices(draw: st.DrawFn) -> tuple[CSR, Tensor | None]:
    """A matrix with full columns and full rows among others, and sometimes an order."""
    rows, cols = draw(st.integers(1, 50)), draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dense = rng.random((rows, cols)) < draw(st.sampled_from([0.02, 0.2, 0.6, 1.0]))
    dense[:, rng.integers(cols)] |= draw(st.booleans())
    dense[rng.integers(rows)] |= draw(st.booleans())
    order = torch.from_numpy(rng.permutation(rows)) if draw(st.booleans()) else None
    return csr_of(dense.astype(float)), order


drawn_matrices = st.one_of(matrices(most=60), dense_matrices())


def model(csr: CSR, order: Tensor | None, fixed: int, group: int) -> dict[str, list[int]]:
    """Every array, by a walk over windows, columns and rows."""
    rows = list(range(csr.shape[0])) if order is None else order.tolist()
    indptr, indices = csr.indptr.tolist(), csr.indices.tolist()
    found: dict[str, list[int]] = {name: [] for name in INDEX_ARRAYS}
    found["res_row_offset"].append(0)
    entries, residual = [], []
    for window in range(-(-len(rows) // 16)):
        inside = rows[16 * window : 16 * window + 16]
        by_column = defaultdict(list)
        for local, row in enumerate(inside):
            for entry in range(indptr[row], indptr[row + 1]):
                by_column[indices[entry]].append((local, entry))
        slices, rest = [], []
        for column in sorted(by_column):
            cells = by_column[column]
            whole = len(cells) // fixed * fixed
            slices += [(column, cells[i : i + fixed]) for i in range(0, whole, fixed)]
            rest += [(local, column, entry) for local, entry in cells[whole:]]
        count = len(slices) // (8 * group)
        found["group_window_id"] += [window] * count
        for number, (column, cells) in enumerate(slices):
            if number < count * 8 * group:
                found["old_col_id"].append(column)
                found["local_id"] += [8 * local + number % 8 for local, _ in cells]
                entries += [entry for _, entry in cells]
            else:
                rest += [(local, column, entry) for local, entry in cells]
        for local, row in enumerate(inside):
            mine = sorted((column, entry) for place, column, entry in rest if place == local)
            if mine:
                found["res_rows_id"].append(row)
                found["res_row_offset"].append(found["res_row_offset"][-1] + len(mine))
                found["res_col_id"] += [column for column, _ in mine]
                residual += [entry for _, entry in mine]
    return {**found, "entries": entries + residual}


@settings(max_examples=300, deadline=None)
@given(drawn_matrices, parameters)
def test_every_array_is_what_its_definition_says(drawn, chosen):
    csr, order = drawn
    packed = BRP.pack(csr, order, fixed=chosen[0], group=chosen[1])
    for name, expected in model(csr, order, *chosen).items():
        assert getattr(packed, name).tolist() == expected, name
    assert (packed.fixed, packed.group, packed.shape) == (*chosen, csr.shape)


@settings(max_examples=150, deadline=None)
@given(drawn_matrices, parameters)
def test_index_arrays_alone_give_every_entry_back(drawn, chosen):
    csr, order = drawn
    packed = BRP.pack(csr, order, fixed=chosen[0], group=chosen[1])
    row, column, place = packed.decode()
    dense = torch.zeros(csr.shape)
    dense[row, column] = packed.pack_values(csr.values)[place].float()
    assert torch.equal(dense, dense_of(csr)) and row.numel() == csr.nnz


@every_choice
@pytest.mark.parametrize("name", MATRICES)
def test_a_group_holds_exactly_8fg_entries_of_one_window(name, fixed, group):
    csr = csr_of(MATRICES[name]())
    order = torch.randperm(csr.shape[0])
    packed = BRP.pack(csr, order, fixed=fixed, group=group)
    assert packed.local_id.numel() == 8 * fixed * group * packed.group_count
    assert packed.old_col_id.numel() == 8 * group * packed.group_count == 8 * packed.tile_count
    assert packed.group_entries == 8 * fixed * group
    place = torch.empty_like(order)
    place[order] = torch.arange(csr.shape[0])
    window = place[csr.row_ids()[packed.entries.long()]] // 16
    held = window[: packed.local_id.numel()].reshape(-1, packed.group_entries)
    assert torch.equal(held, packed.group_window_id.long().unsqueeze(1).expand_as(held))
    assert bool((packed.group_window_id.diff() >= 0).all())


@every_choice
@pytest.mark.parametrize("name", MATRICES)
def test_a_tile_column_holds_f_entries_of_one_column_in_distinct_rows(name, fixed, group):
    csr = csr_of(MATRICES[name]())
    packed = BRP.pack(csr, fixed=fixed, group=group)
    local = packed.local_id.long().reshape(-1, 8, fixed)
    assert torch.equal(local % 8, torch.arange(8)[:, None].expand_as(local))
    assert not local.numel() or int(local.max()) < 128
    assert bool((local.diff(dim=2) > 0).all()), "rows ascend, so none is there twice"
    columns = csr.indices[packed.entries[: packed.local_id.numel()].long()].reshape(-1, fixed)
    assert torch.equal(columns, packed.old_col_id.unsqueeze(1).expand_as(columns))


@every_choice
@pytest.mark.parametrize("name", MATRICES)
def test_only_rows_with_residual_entries_are_residual_rows(name, fixed, group):
    csr = csr_of(MATRICES[name]())
    order = torch.randperm(csr.shape[0])
    packed = BRP.pack(csr, order, fixed=fixed, group=group)
    units = packed.residual_units()
    assert bool((units.length > 0).all())
    assert units.label.unique().numel() == units.count == packed.res_row_offset.numel() - 1
    assert int(units.length.sum()) + packed.local_id.numel() == csr.nnz
    place = torch.empty_like(order)
    place[order] = torch.arange(csr.shape[0])
    assert bool((place[units.label].diff() > 0).all()), "in the plan's order"
    if fixed == 1:
        rest = torch.zeros(packed.window_count).index_add_(
            0, place[units.label] // 16, units.length.float()
        )
        assert not rest.numel() or int(rest.max()) < packed.group_entries


def test_groups_start_at_multiples_of_128_bytes():
    csr = csr_of(random_matrix(300, 400, 0.1))
    for fixed, group in [(1, 4), (1, 8), (2, 2), (2, 4), (4, 1)]:
        packed = BRP.pack(csr, fixed=fixed, group=group)
        values = packed.pack_values(csr.values)
        assert packed.group_count > 1 and packed.group_entries * values.element_size() % 128 == 0
        for array in (values, packed.local_id, packed.old_col_id):
            assert array.storage_offset() == 0 and array.is_contiguous()
    paper = BRP.pack(csr)
    assert paper.old_col_id.nbytes == 128 * paper.group_count
    assert paper.local_id.nbytes == 32 * paper.group_count


def test_the_same_matrix_gives_the_same_bits():
    csr = csr_of(MATRICES["odd sizes"]())
    order = torch.randperm(csr.shape[0])
    for fixed, group in PARAMETERS:
        first, second = (BRP.pack(csr, order, fixed=fixed, group=group) for _ in range(2))
        for name, array in first.tensors().items():
            assert torch.equal(array, second.tensors()[name]), name


def paper_example() -> np.ndarray:
    """The counts of the paper's Fig. 5: 10, 8, 5 and 13 entries in four windows.

    Its groups hold 8 entries, as ours do with g = 1. The first tile's entries are those that the
    text names: (1, 0), (0, 1), (3, 1), (1, 4); columns 1 and 11 of window 0 are split.
    """
    dense = np.zeros((64, 16))
    cells = [(1, 0), (0, 1), (3, 1), (1, 4), (2, 6), (0, 9), (0, 11), (1, 11), (2, 11), (3, 13)]
    for row, column in cells:
        dense[row, column] = 1
    dense[20, 4:12] = 1
    dense[33, :5] = 1
    dense[48:51, 0], dense[51, 3:13] = 1, 1
    return dense


def test_the_papers_example():
    packed = BRP.pack(csr_of(paper_example()), group=1)
    assert packed.group_window_id.tolist() == [0, 1, 3], "window 2 has residual entries alone"
    assert packed.old_col_id[:8].tolist() == [0, 1, 1, 4, 6, 9, 11, 11]
    rows = [1, 0, 3, 1, 2, 0, 0, 1]
    assert packed.local_id[:8].tolist() == [8 * row + c for c, row in enumerate(rows)]
    # The paper counts in tiles of four columns: 4 * row + column.
    assert [4 * row + c for c, row in enumerate(rows[:4])] == [4, 1, 14, 7]
    assert packed.res_rows_id.tolist() == [2, 3, 33, 51], "window 1 has none"
    assert packed.res_row_offset.tolist() == [0, 1, 2, 7, 12]
    assert packed.res_col_id.tolist() == [11, 13, 0, 1, 2, 3, 4, 8, 9, 10, 11, 12]
    assert packed.units().length.tolist() == [1, 1, 0, 1]
    assert packed.tile_share == 24 / 36


def test_a_dense_column_is_split_into_slices_and_what_is_left():
    csr = csr_of(np.ones((37, 1)))
    one = BRP.pack(csr, group=1)
    assert one.group_window_id.tolist() == [0, 0, 1, 1]
    assert one.res_rows_id.tolist() == [32, 33, 34, 35, 36]
    three = BRP.pack(csr_of(np.ones((16, 8))), fixed=3, group=1)
    assert three.group_count == 5 and three.res_rows_id.tolist() == [15]
    assert three.res_col_id.tolist() == list(range(8)), "16 = 5 * 3 + 1"


def test_a_dense_row_fills_groups_and_leaves_one_residual_row():
    dense = np.zeros((20, 100))
    dense[17] = 1
    packed = BRP.pack(csr_of(dense))
    assert packed.group_window_id.tolist() == [1, 1, 1]
    assert packed.local_id.tolist() == [8 + c for c in range(8)] * 12
    assert packed.res_rows_id.tolist() == [17] and packed.res_row_offset.tolist() == [0, 4]
    assert BRP.pack(csr_of(dense), fixed=2).group_count == 0, "no column has two entries"


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (40, 6)])
@every_choice
def test_a_matrix_without_entries_has_windows_alone(shape, fixed, group):
    csr = CSR(torch.zeros(shape[0] + 1, dtype=torch.int64), torch.empty(0).int(), None, shape)
    packed = BRP.pack(csr, fixed=fixed, group=group)
    assert (packed.group_count, packed.tile_count, packed.tile_share) == (0, 0, 0.0)
    assert packed.res_row_offset.tolist() == [0] and packed.res_rows_id.numel() == 0
    assert packed.units().count == packed.window_count == -(-shape[0] // 16)


@pytest.mark.parametrize("fixed", [1, 2])
def test_keys_past_32_bits_are_kept_apart(fixed):
    cols = 2**31 - 1
    rows = [[0, 5, cols - 1], [5, cols - 1], *[[] for _ in range(78)], [5, cols - 2, cols - 1]]
    indptr = torch.tensor(np.cumsum([0] + [len(row) for row in rows]))
    indices = torch.tensor([column for row in rows for column in row], dtype=torch.int32)
    csr = CSR(indptr, indices, None, (81, cols))
    assert sort_windows(csr).keys.dtype is torch.int64
    back = BRP.pack(csr, fixed=fixed, group=1).unpack()
    assert torch.equal(back.indptr, indptr) and torch.equal(back.indices, indices)


@pytest.mark.parametrize("cols", [2**24, 2**24 + 1])
def test_keys_are_narrow_up_to_31_bits(cols):
    rows = 16 * 8  # three bits of window, four of row
    columns = torch.tensor([0, 1, cols - 1], dtype=torch.int32)
    indptr = torch.arange(rows + 1) * 3
    csr = CSR(indptr, columns.repeat(rows), None, (rows, cols))
    narrow = cols == 2**24
    assert sort_windows(csr).keys.dtype is (torch.int32 if narrow else torch.int64)
    for fixed in (1, 5):
        packed = BRP.pack(csr, fixed=fixed, group=1)
        assert {k: getattr(packed, k).tolist() for k in INDEX_ARRAYS} == {
            k: v for k, v in model(csr, None, fixed, 1).items() if k in INDEX_ARRAYS
        }


@pytest.mark.parametrize("name", MATRICES)
def test_the_size_is_that_of_its_arrays(name):
    csr = csr_of(MATRICES[name]())
    packed = BRP.pack(csr)
    held, rows = packed.local_id.numel(), packed.res_rows_id.numel()
    residual = csr.nnz - held
    assert packed.bytes == held // 8 + 5 * held + 4 * (2 * rows + 1 + residual)
    assert packed.local_id.dtype is torch.uint8
    for array in packed.tensors().values():
        assert array.dtype in (torch.uint8, torch.int32) and array.is_contiguous()
    # The paper's bound: three words an entry in groups, two a residual entry, two a row.
    words = 3 * held + held // 32 + 2 * residual + 2 * rows + 1
    assert packed.bytes + 4 * csr.nnz <= 4 * words


def test_the_format_is_registered_with_the_papers_parameters_first():
    assert FORMATS["brp"] is BRP
    packed = BRP.pack(csr_of(MATRICES["odd sizes"]()), **BRP.variants["paper"])
    assert (packed.fixed, packed.group) == (1, 4)


@pytest.mark.parametrize("fixed", [0, 17])
def test_rejects_other_entries_of_a_tile_column(fixed):
    with pytest.raises(ValueError) as caught:
        BRP.pack(csr_of(MATRICES["one by one"]()), fixed=fixed)
    assert str(caught.value) == (
        f"BRP.pack: fixed must be from 1 to 16, got {fixed}. "
        "Choose how many entries each tile column holds."
    )


def test_rejects_groups_without_tiles():
    with pytest.raises(ValueError) as caught:
        BRP.pack(csr_of(MATRICES["one by one"]()), group=0)
    assert str(caught.value) == (
        "BRP.pack: group must be at least 1, got 0. Choose how many tiles each group has."
    )
