"""Windows, tiles and row lengths of a matrix, counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsetile.check.tiling import (
    TILES,
    WINDOWS,
    length_bins,
    sample_rows,
    sharing,
    tile_stats,
)
from sparsetile.data.generators import generate
from sparsetile.formats.column_pairs import distinct_pairs
from tests.check.matrices import pattern_of


def test_bins_double_and_begin_at_the_shortest_row():
    lengths = torch.tensor([0, 0, 1, 2, 3, 4, 7, 8, 1024])
    bins = {(item["from"], item["to"]): item["rows"] for item in length_bins(lengths)}
    assert bins[0, 0] == 2 and bins[1, 1] == 1 and bins[2, 3] == 2 and bins[4, 7] == 2
    assert bins[8, 15] == 1 and bins[16, 31] == 0 and bins[1024, 2047] == 1
    assert sum(bins.values()) == lengths.numel()
    assert length_bins(torch.tensor([5, 6]))[0] == {"from": 4, "to": 7, "rows": 2}


def test_tiles_are_counted_as_the_formats_count_them() -> None:
    dense = np.zeros((32, 40))
    dense[:16, 3::4] = 1  # ten distinct columns in the first window: two condensed tiles
    dense[20, 7] = 1
    found = tile_stats(sample_rows(pattern_of(dense)), "16x8", 16, 8, True)
    assert found.tiles == 3 and found.mean_entries == pytest.approx(161 / 3)
    assert found.fill == pytest.approx((1 + 32 / 128 + 1 / 128) / 3)
    blocks = tile_stats(sample_rows(pattern_of(dense)), "16x8", 16, 8, False)
    assert blocks.tiles == 6  # five blocks of the first window, one of the second


def test_an_empty_matrix_has_no_tiles() -> None:
    for shape in TILES:
        assert tile_stats(sample_rows(pattern_of(np.zeros((5, 5)))), *shape).tiles == 0
    assert sharing(sample_rows(pattern_of(np.zeros((5, 0))))) == dict.fromkeys(WINDOWS, 0.0)


def test_a_row_order_changes_tiles_as_if_the_rows_had_moved() -> None:
    rng = np.random.default_rng(3)
    dense = (rng.random((200, 70)) < 0.1).astype(np.float64)
    perm = torch.from_numpy(rng.permutation(200))
    moved, ordered = (
        sample_rows(pattern_of(dense[perm.numpy()])),
        sample_rows(pattern_of(dense), perm),
    )
    for shape in TILES:
        one, other = tile_stats(moved, *shape), tile_stats(ordered, *shape)
        assert (one.tiles, one.mean_entries, one.fill) == (
            other.tiles, other.mean_entries, other.fill,
        )  # fmt: skip
        assert np.array_equal(one.fills, other.fills, equal_nan=True)
    assert sharing(moved) == sharing(ordered)


def test_shared_columns_are_counted_as_the_library_counts_them() -> None:
    csr = generate("power_law", rows=700, nnz=9000, seed=2)
    perm = torch.randperm(700, generator=torch.Generator().manual_seed(1))
    for order in (None, perm):
        found = sharing(sample_rows(csr, order))
        for window in WINDOWS:
            assert found[window] == csr.nnz / distinct_pairs(csr, window, order)


def test_blocks_spread_over_a_large_matrix_stand_for_it() -> None:
    csr = generate("power_law", rows=64_000, nnz=600_000, seed=2)
    whole, part = sample_rows(csr), sample_rows(csr, most=60_000)
    assert part.partial and not whole.partial and 0.05 < part.share < 0.2
    assert part.rows.max() >= 64 * 90  # about a hundred blocks, not the first rows alone
    assert sharing(part)[8] == pytest.approx(sharing(whole)[8], rel=0.02)
    for shape in TILES:
        found, expected = tile_stats(part, *shape), tile_stats(whole, *shape)
        assert found.tiles == pytest.approx(expected.tiles, rel=0.1) and found.partial
