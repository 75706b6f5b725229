"""BRP's windows against their own definition, entry by entry."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsetile import CSR
from sparsetile.formats.brp import sort_windows
from sparsetile.formats.brp_windows import BRPWindows
from tests.contracts.cases import MATRICES, csr_of, random_matrix
from tests.formats.matrices import matrices

PARAMETERS = [(1, 4), (1, 1), (2, 4), (2, 1), (3, 1), (4, 2), (16, 1)]
ARRAYS = (
    "rows", "other_rows", "row_window_offset", "tile_columns", "slot_ids", "slot_entries",
    "window_rest", "rest_rows", "rest_columns", "rest_entries",
)  # fmt: skip
BYTES = ("slot_ids", "rest_rows")

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


def packed(
    csr: CSR, order: Tensor | None, fixed: int, group: int, kept: Tensor | None = None
) -> BRPWindows:
    """The windows marked by ``kept``; all of them when None."""
    if kept is None:
        kept = torch.ones(-(-csr.shape[0] // 16), dtype=torch.bool)
    return BRPWindows.pack(csr, order, sort_windows(csr, order), fixed, group, kept)


def model(
    csr: CSR, order: Tensor | None, fixed: int, group: int, kept: list[bool]
) -> dict[str, list[int]]:
    """Every array, by a walk over windows, columns and rows."""
    rows = list(range(csr.shape[0])) if order is None else order.tolist()
    indptr, indices = csr.indptr.tolist(), csr.indices.tolist()
    found: dict[str, list[int]] = {name: [] for name in ARRAYS}
    found["row_window_offset"].append(0)
    found["window_rest"].append(0)
    for window, keep in enumerate(kept):
        inside = rows[16 * window : 16 * window + 16]
        found["rows" if keep else "other_rows"] += inside
        if not keep:
            continue
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
        found["row_window_offset"].append(found["row_window_offset"][-1] + count * group)
        for number, (column, cells) in enumerate(slices):
            if number < count * 8 * group:
                found["tile_columns"].append(column)
                found["slot_ids"] += [8 * local + number % 8 for local, _ in cells]
                found["slot_entries"] += [entry for _, entry in cells]
            else:
                rest += [(local, column, entry) for local, entry in cells]
        for local, column, entry in sorted(rest):
            found["rest_rows"].append(local)
            found["rest_columns"].append(column)
            found["rest_entries"].append(entry)
        found["window_rest"].append(len(found["rest_rows"]))
    return found


@settings(max_examples=300, deadline=None)
@given(drawn_matrices, parameters, st.randoms(use_true_random=False))
def test_every_array_is_what_its_definition_says(drawn, chosen, random):
    csr, order = drawn
    kept = [random.random() < 0.8 for _ in range(-(-csr.shape[0] // 16))]
    made = packed(csr, order, *chosen, torch.tensor(kept, dtype=torch.bool))
    for name, expected in model(csr, order, *chosen, kept).items():
        array = getattr(made, name)
        assert array.tolist() == expected, name
        kind = torch.uint8 if name in BYTES else torch.int32
        assert array.dtype is (torch.int64 if name == "other_rows" else kind), name
        assert array.is_contiguous(), name


@every_choice
@pytest.mark.parametrize("name", MATRICES)
def test_windows_hold_each_entry_once(name, fixed, group):
    csr = csr_of(MATRICES[name]())
    made = packed(csr, torch.randperm(csr.shape[0]), fixed, group)
    entries = torch.cat([made.slot_entries, made.rest_entries])
    assert torch.equal(entries.sort().values, torch.arange(csr.nnz, dtype=torch.int32))
    assert made.slot_ids.numel() == made.tile_count * 8 * fixed
    assert not bool((made.row_window_offset % group).any())


@every_choice
@pytest.mark.parametrize("name", MATRICES)
def test_a_tile_column_holds_f_entries_of_one_column_in_distinct_rows(name, fixed, group):
    csr = csr_of(MATRICES[name]())
    made = packed(csr, None, fixed, group)
    local = made.slot_ids.long().reshape(-1, 8, fixed)
    assert torch.equal(local % 8, torch.arange(8)[:, None].expand_as(local))
    assert not local.numel() or int(local.max()) < 128
    assert bool((local.diff(dim=2) > 0).all()), "rows ascend, so none is there twice"
    columns = csr.indices[made.slot_entries.long()].reshape(-1, fixed)
    assert torch.equal(columns, made.tile_columns.unsqueeze(1).expand_as(columns))


def test_the_same_matrix_gives_the_same_bits():
    csr = csr_of(MATRICES["odd sizes"]())
    order = torch.randperm(csr.shape[0])
    for fixed, group in PARAMETERS:
        first, second = (packed(csr, order, fixed, group) for _ in range(2))
        for name in ARRAYS:
            assert torch.equal(getattr(first, name), getattr(second, name)), name


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
    made = packed(csr_of(paper_example()), None, 1, 1)
    assert made.row_window_offset.tolist() == [0, 1, 2, 2, 3], "window 2 fills no group"
    assert made.tile_columns[:8].tolist() == [0, 1, 1, 4, 6, 9, 11, 11]
    rows = [1, 0, 3, 1, 2, 0, 0, 1]
    assert made.slot_ids[:8].tolist() == [8 * row + c for c, row in enumerate(rows)]
    # The paper counts in tiles of four columns: 4 * row + column.
    assert [4 * row + c for c, row in enumerate(rows[:4])] == [4, 1, 14, 7]
    assert made.window_rest.tolist() == [0, 2, 2, 7, 12], "nothing is left over in window 1"
    assert made.rest_rows.tolist() == [2, 3, *[1] * 5, *[3] * 5]
    assert made.rest_columns.tolist() == [11, 13, 0, 1, 2, 3, 4, 8, 9, 10, 11, 12]


def test_a_dense_column_is_split_into_slices_and_what_is_left():
    one = packed(csr_of(np.ones((37, 1))), None, 1, 1)
    assert one.row_window_offset.tolist() == [0, 2, 4, 4]
    assert one.rest_rows.tolist() == [0, 1, 2, 3, 4] and one.window_rest.tolist() == [0, 0, 0, 5]
    three = packed(csr_of(np.ones((16, 8))), None, 3, 1)
    assert three.tile_count == 5 and three.rest_rows.tolist() == [15] * 8
    assert three.rest_columns.tolist() == list(range(8)), "16 = 5 * 3 + 1"


def test_a_dense_row_fills_groups_and_leaves_a_rest():
    dense = np.zeros((20, 100))
    dense[17] = 1
    made = packed(csr_of(dense), None, 1, 4)
    assert made.row_window_offset.tolist() == [0, 0, 12]
    assert made.slot_ids.tolist() == [8 + c for c in range(8)] * 12
    assert made.rest_rows.tolist() == [1] * 4
    assert packed(csr_of(dense), None, 2, 4).tile_count == 0, "no column has two entries"


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (40, 6)])
@every_choice
def test_a_matrix_without_entries_has_windows_alone(shape, fixed, group):
    csr = CSR(torch.zeros(shape[0] + 1, dtype=torch.int64), torch.empty(0).int(), None, shape)
    made = packed(csr, None, fixed, group)
    assert made.tile_count == made.rest_entries.numel() == 0
    assert made.units().count == made.window_count == -(-shape[0] // 16)


@pytest.mark.parametrize("fixed", [1, 2])
def test_keys_past_32_bits_are_kept_apart(fixed):
    cols = 2**31 - 1
    rows = [[0, 5, cols - 1], [5, cols - 1], *[[] for _ in range(78)], [5, cols - 2, cols - 1]]
    indptr = torch.tensor(np.cumsum([0] + [len(row) for row in rows]))
    indices = torch.tensor([column for row in rows for column in row], dtype=torch.int32)
    csr = CSR(indptr, indices, None, (81, cols))
    assert sort_windows(csr).keys.dtype is torch.int64
    made = packed(csr, None, fixed, 1)
    for name, expected in model(csr, None, fixed, 1, [True] * 6).items():
        assert getattr(made, name).tolist() == expected, name


@pytest.mark.parametrize("cols", [2**24, 2**24 + 1])
def test_keys_are_narrow_up_to_31_bits(cols):
    rows = 16 * 8  # three bits of window, four of row
    columns = torch.tensor([0, 1, cols - 1], dtype=torch.int32)
    indptr = torch.arange(rows + 1) * 3
    csr = CSR(indptr, columns.repeat(rows), None, (rows, cols))
    narrow = cols == 2**24
    assert sort_windows(csr).keys.dtype is (torch.int32 if narrow else torch.int64)
    for fixed in (1, 5):
        made = packed(csr, None, fixed, 1)
        for name, expected in model(csr, None, fixed, 1, [True] * 8).items():
            assert getattr(made, name).tolist() == expected, name


@pytest.mark.parametrize("name", MATRICES)
def test_no_window_need_be_kept(name):
    csr = csr_of(MATRICES[name]())
    none = torch.zeros(-(-csr.shape[0] // 16), dtype=torch.bool)
    made = packed(csr, None, 1, 4, none)
    assert made.window_count == made.tile_count == made.rest_entries.numel() == 0
    assert made.other_rows.tolist() == list(range(csr.shape[0]))


def test_windows_in_no_order_own_their_rows():
    csr = csr_of(random_matrix(150, 70, 0.4))
    kept = torch.arange(10) % 3 != 1
    made = packed(csr, torch.randperm(150), 1, 4, kept)
    assert made.window_count == int(kept.sum())
    assert sorted([*made.rows.tolist(), *made.other_rows.tolist()]) == list(range(150))
