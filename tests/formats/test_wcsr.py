"""WCSR against its own definition, tile by tile, on matrices of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsetile import CSR
from sparsetile.balance import WindowSchedule
from sparsetile.formats import BitTCF
from sparsetile.formats.wcsr import PADS, WCSR, WINDOW_HEIGHTS
from tests.contracts.cases import MATRICES, csr_of, random_matrix
from tests.formats.decoding import decode, pack_values
from tests.formats.matrices import dense_of, matrices

HEIGHTS, WIDTHS = st.sampled_from(WINDOW_HEIGHTS), st.sampled_from(PADS)


def check(csr: CSR, order: Tensor | None, tiles: WCSR) -> None:
    """Compare every array with a walk over the windows, one after the other."""
    height, pad = tiles.height, tiles.pad
    rows = dense_of(csr, order)
    ptr, idx, slabs, distinct = [0], [], [], 0
    for first in range(0, csr.shape[0], height):
        window = torch.zeros(height, csr.shape[1])
        mine = rows[first : first + height]
        window[: mine.shape[0]] = mine
        columns = torch.nonzero(window.any(0)).flatten().tolist()
        distinct += len(columns)
        for at in range(0, len(columns), pad):
            of_tile = columns[at : at + pad]
            slab = torch.zeros(height, pad)
            slab[:, : len(of_tile)] = window[:, of_tile]
            slabs.append(slab)
            idx += of_tile + [columns[-1]] * (pad - len(of_tile))
        ptr.append(len(slabs))
    expected = torch.stack(slabs) if slabs else torch.zeros(0, height, pad)
    assert tiles.window_row_ptr.tolist() == ptr
    assert tiles.window_col_idx.tolist() == idx, "ascending, the last one repeated as padding"
    assert tiles.distinct == distinct
    assert torch.equal(expected.flatten()[tiles.places], csr.values), "row-major inside a tile"
    held = expected.reshape(expected.shape[0], height * pad) != 0
    words = tiles.bitmaps.numpy().view(np.uint64)
    bits = (words[:, :, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.array_equal(bits.reshape(held.shape) == 1, held.numpy())
    assert torch.equal(pack_values(tiles, csr, csr.values), expected.flatten()[held.flatten()])


@settings(max_examples=120, deadline=None)
@given(matrices(), HEIGHTS, WIDTHS)
def test_every_array_is_what_its_definition_says(drawn, height, pad):
    csr, order = drawn
    check(csr, order, WCSR.pack(csr, order, height=height, pad=pad))


@settings(max_examples=80, deadline=None)
@given(matrices(), HEIGHTS, WIDTHS)
def test_columns_and_bits_alone_give_every_entry_back(drawn, height, pad):
    csr, order = drawn
    tiles = WCSR.pack(csr, order, height=height, pad=pad)
    row, column, place = decode(tiles, csr)
    assert row.numel() == csr.nnz
    dense = torch.zeros(csr.shape)
    dense[row, column] = pack_values(tiles, csr, csr.values)[place]
    assert torch.equal(dense, dense_of(csr))


@pytest.mark.parametrize("height", WINDOW_HEIGHTS)
@pytest.mark.parametrize("order", [None, "shuffled"])
@pytest.mark.parametrize("name", MATRICES)
def test_matrices_of_every_kind_are_cut_into_tiles(name, order, height):
    csr = csr_of(MATRICES[name]())
    rows = None if order is None else torch.randperm(csr.shape[0])
    for pad in PADS:
        check(csr, rows, WCSR.pack(csr, rows, height=height, pad=pad))


@settings(max_examples=60, deadline=None)
@given(matrices())
def test_sixteen_rows_and_eight_columns_are_stacked_bittcf(drawn):
    csr, order = drawn
    tiles, other = WCSR.pack(csr, order, height=16), BitTCF.pack(csr, order, stack=2)
    assert torch.equal(tiles.window_row_ptr, other.row_window_offset)
    assert torch.equal(tiles.window_col_idx, other.sparse_a_to_b)
    assert torch.equal(tiles.bitmaps.flatten(), other.tc_local_bit)
    assert torch.equal(tiles.entries, other.entries)


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("height", WINDOW_HEIGHTS)
@pytest.mark.parametrize("name", MATRICES)
def test_sizes_are_the_formulas(name, height, pad):
    csr = csr_of(MATRICES[name]())
    tiles = WCSR.pack(csr, height=height, pad=pad)
    count = tiles.tile_count
    assert tiles.window_count == -(-csr.shape[0] // height)
    assert tiles.bytes == 4 * (tiles.window_count + 1 + pad * count)
    assert tiles.bitmaps.shape == (count, height * pad // 64)
    for part in (tiles.window_row_ptr, tiles.window_col_idx, tiles.entries):
        assert part.dtype is torch.int32 and part.is_contiguous()
    assert tiles.places.dtype is tiles.bitmaps.dtype is torch.int64


def test_full_tiles_have_all_bits():
    full = WCSR.pack(csr_of(np.ones((64, 64))))
    assert full.entries_per_pair == 64 and full.bitmaps.tolist() == [[-1] * 8] * 8
    assert WCSR.pack(csr_of(np.eye(64))).entries_per_pair == 1


def test_pairs_are_counted_without_padding():
    dense = np.zeros((20, 30))
    dense[:4, :9] = 1  # nine columns in the first window of 16, none padded to 16
    dense[19, 29] = 1
    tiles = WCSR.pack(csr_of(dense), height=16)
    assert tiles.tiles_per_window().tolist() == [2, 1]
    assert tiles.distinct == 10 and tiles.entries_per_pair == 37 / 10


def test_a_matrix_without_entries_has_no_tiles():
    tiles = WCSR.pack(csr_of(MATRICES["no entries"]()), height=16)
    assert tiles.tile_count == 0 and tiles.window_row_ptr.tolist() == [0, 0]
    assert tiles.entries_per_pair == 0.0 and tiles.entries.numel() == 0


def test_windows_are_cut_from_the_order_given():
    csr = csr_of(MATRICES["equal rows"]())
    order = torch.arange(csr.shape[0]).flip(0)
    tiles = WCSR.pack(csr, order, height=32)
    assert torch.equal(tiles.order, order.int())
    rows, _, place = decode(tiles, csr)
    first = rows[tiles.places[tiles.entries[place]] < int(tiles.window_row_ptr[1]) * 32 * 8]
    assert sorted(first.unique().tolist()) == sorted(order[:32].tolist())


def test_columns_past_32_bits_of_keys_are_kept_apart():
    cols = 2**31 - 1
    indices = torch.tensor([0, cols - 1, cols - 1], dtype=torch.int32)
    csr = CSR(torch.tensor([0, *[2] * 200, 3]), indices, None, (201, cols))
    row, column, _ = decode(WCSR.pack(csr), csr)
    assert list(zip(row.tolist(), column.tolist(), strict=True)) == [
        (0, 0), (0, cols - 1), (200, cols - 1),
    ]  # fmt: skip


@pytest.mark.parametrize("pad", PADS)
def test_the_balancer_cuts_long_windows_and_loses_no_tile(pad):
    csr = csr_of(MATRICES["one dense row"]())
    tiles = WCSR.pack(csr, height=16, pad=pad)
    assert int(tiles.tiles_per_window().max()) > 32
    schedule = WindowSchedule.make(tiles.units(), workers=4)
    items = schedule.items.tolist()
    assert max(end - first for _, first, end, _ in items) <= 32
    covered = sorted(at for _, first, end, _ in items for at in range(first, end))
    assert covered == list(range(tiles.tile_count))


def test_a_product_from_tiles_is_the_matrix_product():
    csr = csr_of(random_matrix(150, 300, 0.05), dtype=torch.float64)
    B = torch.randn(300, 5, dtype=torch.float64)
    order = torch.randperm(150)
    tiles = WCSR.pack(csr, order, height=32)
    rows_of_b = B[tiles.window_col_idx.long()].reshape(tiles.tile_count, 8, 5)
    dense = torch.zeros(tiles.tile_count * 32 * 8, dtype=torch.float64)
    dense[tiles.places] = csr.values
    parts = dense.reshape(-1, 32, 8) @ rows_of_b  # what each tile adds to its window's rows
    window = torch.repeat_interleave(torch.arange(5), tiles.tiles_per_window())
    sums = torch.zeros(5, 32, 5, dtype=torch.float64).index_add_(0, window, parts)
    C = torch.empty(150, 5, dtype=torch.float64)
    C[tiles.order.long()] = sums.reshape(160, 5)[:150]
    expected = torch.zeros(csr.shape, dtype=torch.float64)
    expected[csr.row_ids(), csr.indices.long()] = csr.values
    assert torch.allclose(C, expected @ B, rtol=0, atol=1e-12)


def test_other_heights_are_refused():
    text = "WCSR.pack: height must be one of \\(16, 32, 64, 128\\), got 8. Choose a height from"
    with pytest.raises(ValueError, match=text):
        WCSR.pack(csr_of(MATRICES["one by one"]()), height=8)


def test_other_pads_are_refused():
    text = "WCSR.pack: pad must be one of \\(8, 16\\), got 4. Choose a pad from that list."
    with pytest.raises(ValueError, match=text):
        WCSR.pack(csr_of(MATRICES["one by one"]()), pad=4)


def test_more_entries_than_32_bits_can_count_are_refused():
    indices = torch.zeros(1, dtype=torch.int32).expand(2**31)  # one element of memory
    csr = CSR(torch.tensor([0, 2**31]), indices, None, (1, 2**31 - 1))
    text = (
        "WCSR.pack: csr must be a matrix of fewer than 2\\^31 entries, got 2147483648. "
        "Cut A into parts by rows."
    )
    with pytest.raises(ValueError, match=text):
        WCSR.pack(csr)
