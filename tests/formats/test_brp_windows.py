"""BRP's windows as the kernel reads them: every entry is in one place, windows own their rows."""

from __future__ import annotations

import pytest
import torch

from sparsetile.formats.brp import BRP, WINDOW_ROWS
from sparsetile.formats.brp_windows import BRPWindows
from tests.contracts.cases import MATRICES, csr_of, random_matrix


def entries_of(made: BRPWindows, fixed: int) -> list[tuple[int, int, int]]:
    """(row of A, column, entry) of everything that windows hold."""
    found = []
    tiles, rest = made.row_window_offset.tolist(), made.window_rest.tolist()
    for window in range(made.window_count):
        for slot in range(tiles[window] * 8 * fixed, tiles[window + 1] * 8 * fixed):
            place, column = divmod(int(made.slot_ids[slot]), 8)
            assert slot // fixed % 8 == column, "a slot is in its own tile column"
            row = int(made.rows[window * WINDOW_ROWS + place])
            column = int(made.tile_columns[slot // fixed])
            found.append((row, column, int(made.slot_entries[slot])))
        for i in range(rest[window], rest[window + 1]):
            row = int(made.rows[window * WINDOW_ROWS + int(made.rest_rows[i])])
            found.append((row, int(made.rest_columns[i]), int(made.rest_entries[i])))
    return found


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("fixed, group", [(1, 4), (2, 2), (8, 2)])
def test_windows_hold_all_entries_of_their_rows_once(fixed, group, ordered):
    csr = csr_of(random_matrix(150, 70, 0.4))
    order = torch.randperm(150) if ordered else None
    packed = BRP.pack(csr, order, fixed=fixed, group=group)
    windows = -(-150 // WINDOW_ROWS)
    grouped = torch.bincount(packed.group_window_id.to(torch.int64), minlength=windows) > 0
    for kept in (grouped, grouped & (torch.arange(windows) % 3 != 1)):
        made = BRPWindows.of(packed, kept)
        assert made.window_count == int(kept.sum())
        assert sorted([*made.rows.tolist(), *made.other_rows.tolist()]) == list(range(150))
        inside = torch.zeros(150, dtype=torch.bool)
        inside[made.rows] = True
        row_of = csr.row_ids()
        expected = [
            (int(row_of[e]), int(csr.indices[e]), e) for e in range(csr.nnz) if inside[row_of[e]]
        ]
        assert sorted(entries_of(made, fixed), key=lambda entry: entry[2]) == expected


@pytest.mark.parametrize("name", MATRICES)
def test_no_window_need_be_kept(name):
    csr = csr_of(MATRICES[name]())
    packed = BRP.pack(csr)
    kept = torch.zeros(-(-csr.shape[0] // WINDOW_ROWS), dtype=torch.bool)
    made = BRPWindows.of(packed, kept)
    assert made.window_count == made.tile_count == made.rest_entries.numel() == 0
    assert made.other_rows.tolist() == list(range(csr.shape[0]))
