"""BitTCF against its own definition, entry by entry, on matrices of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsetile import CSR
from sparsetile.formats import BitTCF
from tests.contracts.cases import MATRICES, csr_of
from tests.formats.decoding import decode, pack_values


@st.composite
def matrices(draw: st.DrawFn) -> tuple[CSR, Tensor | None]:
    """A small matrix and, sometimes, an order of its rows."""
    rows, cols = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    cells = st.integers(0, max(rows * cols - 1, 0))
    chosen = sorted(draw(st.sets(cells, max_size=200))) if rows * cols else []
    row = torch.tensor([cell // cols for cell in chosen], dtype=torch.int64)
    column = torch.tensor([cell % cols for cell in chosen], dtype=torch.int32)
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    indptr[1:] = torch.cumsum(torch.bincount(row, minlength=rows), 0)
    order = draw(st.one_of(st.none(), st.permutations(range(rows))))
    csr = CSR(indptr, column, torch.arange(1.0, len(chosen) + 1), (rows, cols))
    return csr, None if order is None else torch.tensor(order, dtype=torch.int64)


def check(csr: CSR, order: Tensor | None, tiles: BitTCF, stack: int, *, even: bool = False) -> None:
    """Compare every array with a walk over the windows, one after the other."""
    rows = list(range(csr.shape[0])) if order is None else order.tolist()
    columns_of = [
        csr.indices[csr.indptr[r] : csr.indptr[r + 1]].tolist() for r in range(csr.shape[0])
    ]
    offset, values, bitmaps, ids, entries = [0], [0], [], [], []
    for first in range(0, csr.shape[0], 8 * stack):
        window = rows[first : first + 8 * stack]
        columns = sorted({c for row in window for c in columns_of[row]})
        count = -(-len(columns) // 8)
        for at in range(0, 8 * (count + count % 2 if even else count), 8):
            mine = columns[at : at + 8]
            ids += mine + [columns[-1]] * (8 - len(mine))
            for s in range(stack):
                bits = 0
                for r, row in enumerate(window[8 * s : 8 * s + 8]):
                    for c, column in enumerate(mine):
                        if column in columns_of[row]:
                            bits |= 1 << (8 * r + c)
                            entries.append(int(csr.indptr[row]) + columns_of[row].index(column))
                bitmaps.append(bits)
                values.append(values[-1] + bits.bit_count())
        offset.append(len(ids) // 8)
    assert tiles.row_window_offset.tolist() == offset
    assert tiles.tc_offset.tolist() == values
    assert tiles.sparse_a_to_b.tolist() == ids
    assert tiles.tc_local_bit.numpy().view(np.uint64).tolist() == bitmaps
    assert tiles.entries.tolist() == entries, "values lie in tile order, in bit order inside"
    assert (tiles.stack, tiles.even, tiles.shape) == (stack, even, csr.shape)


STACKS = st.sampled_from([1, 2])


@settings(max_examples=200, deadline=None)
@given(matrices(), STACKS)
def test_every_array_is_what_its_definition_says(drawn, stack):
    csr, order = drawn
    check(csr, order, BitTCF.pack(csr, order, stack=stack), stack)


@settings(max_examples=200, deadline=None)
@given(matrices(), STACKS)
def test_even_adds_a_tile_to_windows_with_an_odd_number(drawn, stack):
    csr, order = drawn
    check(csr, order, BitTCF.pack(csr, order, stack=stack, even=True), stack, even=True)


@settings(max_examples=100, deadline=None)
@given(matrices(), STACKS)
def test_tiles_that_fill_windows_up_hold_no_entries(drawn, stack):
    csr, order = drawn
    plain = BitTCF.pack(csr, order, stack=stack)
    even = BitTCF.pack(csr, order, stack=stack, even=True)
    assert torch.equal(even.entries, plain.entries)
    assert all(
        torch.equal(a, b) for a, b in zip(decode(even, csr), decode(plain, csr), strict=True)
    )
    assert even.tiles_of_eight() == plain.tiles_of_eight()
    tiles = plain.tiles_per_window()
    assert torch.equal(even.tiles_per_window(), tiles + tiles % 2), "none where there was none"


@settings(max_examples=100, deadline=None)
@given(matrices())
def test_tiles_of_eight_rows_are_counted_without_packing_them(drawn):
    csr, order = drawn
    expected = BitTCF.pack(csr, order).tile_count
    assert BitTCF.pack(csr, order, stack=2).tiles_of_eight() == expected
    assert BitTCF.pack(csr, order).tiles_of_eight() == expected


@settings(max_examples=150, deadline=None)
@given(matrices(), STACKS)
def test_bits_alone_give_every_entry_back(drawn, stack):
    csr, order = drawn
    tiles = BitTCF.pack(csr, order, stack=stack)
    row, column, _ = decode(tiles, csr)
    packed = pack_values(tiles, csr, csr.values)
    dense = torch.zeros(csr.shape)
    dense[row, column] = packed
    expected = torch.zeros(csr.shape)
    expected[csr.row_ids(), csr.indices.long()] = csr.values
    assert torch.equal(dense, expected)
    assert row.numel() == csr.nnz


@pytest.mark.parametrize("order", [None, "shuffled"])
@pytest.mark.parametrize("name", MATRICES)
def test_the_size_is_the_papers(name, order):
    csr = csr_of(MATRICES[name]())
    tiles = BitTCF.pack(csr, None if order is None else torch.randperm(csr.shape[0]))
    assert tiles.bytes == 4 * (-(-csr.shape[0] // 8) + 11 * tiles.tile_count + 2)
    assert tiles.window_count == -(-csr.shape[0] // 8)
    assert tiles.tc_local_bit.dtype is torch.int64
    for part in (tiles.row_window_offset, tiles.tc_offset, tiles.sparse_a_to_b, tiles.entries):
        assert part.dtype is torch.int32 and part.is_contiguous()


@pytest.mark.parametrize("order", [None, "shuffled"])
@pytest.mark.parametrize("name", MATRICES)
def test_a_tile_of_sixteen_rows_has_a_bitmap_and_an_offset_more(name, order):
    csr = csr_of(MATRICES[name]())
    perm = None if order is None else torch.randperm(csr.shape[0])
    tiles = BitTCF.pack(csr, perm, stack=2)
    assert tiles.bytes == 4 * (-(-csr.shape[0] // 16) + 14 * tiles.tile_count + 2)
    assert tiles.window_count == -(-csr.shape[0] // 16)
    assert tiles.tc_offset.numel() == 2 * tiles.tile_count + 1
    assert tiles.tc_local_bit.numel() == 2 * tiles.tile_count
    assert tiles.tiles_of_eight() == BitTCF.pack(csr, perm).tile_count
    assert tiles.tile_count <= tiles.tiles_of_eight()
    for part in (tiles.row_window_offset, tiles.tc_offset, tiles.sparse_a_to_b, tiles.entries):
        assert part.dtype is torch.int32 and part.is_contiguous()
    assert tiles.tc_local_bit.dtype is torch.int64 and tiles.tc_local_bit.is_contiguous()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (40, 6)])
@pytest.mark.parametrize("stack", [1, 2])
@pytest.mark.parametrize("even", [False, True])
def test_a_matrix_without_entries_has_windows_and_no_tiles(shape, stack, even):
    csr = CSR(torch.zeros(shape[0] + 1, dtype=torch.int64), torch.empty(0).int(), None, shape)
    tiles = BitTCF.pack(csr, stack=stack, even=even)
    windows = -(-shape[0] // (8 * stack))
    assert tiles.row_window_offset.tolist() == [0] * (windows + 1)
    assert (tiles.tile_count, tiles.tiles_of_eight(), tiles.mean_tile_entries) == (0, 0, 0.0)
    assert tiles.tc_offset.tolist() == [0]
    assert [part.numel() for part in decode(tiles, csr)] == [0, 0, 0]


def test_a_tile_that_fills_a_window_up_repeats_its_last_column():
    dense = np.zeros((64, 30))
    dense[3, :3], dense[40, 4:14], dense[50, 5:29] = 1, 1, 1
    tiles = BitTCF.pack(csr_of(dense), stack=2, even=True)
    assert tiles.tiles_per_window().tolist() == [2, 0, 2, 4], "of 1, 0, 2 and 3"
    columns = tiles.sparse_a_to_b.reshape(-1, 8).tolist()
    assert columns[1] == [2] * 8 and columns[-1] == [28] * 8
    bitmaps = tiles.tc_local_bit.reshape(-1, 2)
    assert [bool(tile.any()) for tile in bitmaps] == [True, False, *[True] * 5, False]
    ends = tiles.tc_offset.reshape(-1)[::2].tolist()
    assert ends == [0, 3, 3, 11, 13, 21, 29, 37, 37]


@pytest.mark.parametrize("rows", [17, 24, 25, 31, 32])
def test_rows_past_the_last_leave_their_bits_empty(rows):
    csr = csr_of(np.ones((rows, 9)))
    tiles = BitTCF.pack(csr, stack=2)
    assert tiles.tiles_per_window().tolist() == [2, 2]
    bitmaps = tiles.tc_local_bit.numpy().view(np.uint64).reshape(2, 2, 2).tolist()
    for window, first in enumerate((0, 16)):
        for s in range(2):
            held = min(max(rows - first - 8 * s, 0), 8)
            full, one = 2 ** (8 * held) - 1, sum(1 << (8 * r) for r in range(held))
            assert [bitmaps[window][tile][s] for tile in range(2)] == [full, one]
    assert tiles.sparse_a_to_b.tolist() == ([*range(8)] + [8] * 8) * 2


def test_halves_of_a_stack_lie_one_after_the_other_in_the_values():
    csr = csr_of(np.arange(1.0, 16 * 10 + 1).reshape(16, 10))
    tiles = BitTCF.pack(csr, stack=2)
    values = pack_values(tiles, csr, csr.values)
    dense = csr.values.reshape(16, 10)
    parts = [dense[:8, :8], dense[8:, :8], dense[:8, 8:], dense[8:, 8:]]
    assert tiles.tc_offset.tolist() == [0, 64, 128, 144, 160]
    assert torch.equal(values, torch.cat([part.flatten() for part in parts]))


def test_columns_of_one_half_only_leave_the_other_halfs_bitmap_empty():
    dense = np.zeros((16, 20))
    dense[3, :9], dense[12, 9:] = 1, 1
    tiles = BitTCF.pack(csr_of(dense), stack=2)
    assert tiles.tile_count == 3 and tiles.tiles_of_eight() == 4
    assert tiles.tc_offset.tolist() == [0, 8, 8, 9, 16, 16, 20]
    assert [bool(bits) for bits in tiles.tc_local_bit] == [True, False, True, True, False, True]


def test_a_full_window_uses_all_64_bits():
    csr = csr_of(torch.ones(8, 16).numpy())
    tiles = BitTCF.pack(csr)
    assert tiles.tc_local_bit.tolist() == [-1, -1] and tiles.mean_tile_entries == 64
    assert tiles.tc_offset.tolist() == [0, 64, 128]
    stacked = BitTCF.pack(csr_of(np.ones((16, 16))), stack=2)
    assert stacked.tc_local_bit.tolist() == [-1] * 4 and stacked.mean_tile_entries == 128
    assert stacked.tiles_of_eight() == 4, "all bits set is a negative number"


@pytest.mark.parametrize("stack", [1, 2])
def test_windows_are_cut_from_the_order_given(stack):
    csr = csr_of(MATRICES["equal rows"]())
    order = torch.arange(csr.shape[0]).flip(0)
    tiles = BitTCF.pack(csr, order, stack=stack)
    assert torch.equal(tiles.order, order.int())
    rows, _, _ = decode(tiles, csr)
    first = rows[: int(tiles.tc_offset[stack * int(tiles.row_window_offset[1])])]
    assert sorted(first.unique().tolist()) == sorted(order[: 8 * stack].tolist())


def test_equal_columns_in_far_windows_do_not_mix():
    indptr = torch.tensor([0, 1, *[1] * 15, 2])
    csr = CSR(indptr, torch.tensor([4, 4], dtype=torch.int32), None, (17, 5))
    tiles = BitTCF.pack(csr)
    assert tiles.tiles_per_window().tolist() == [1, 0, 1]
    assert tiles.tc_local_bit.tolist() == [1, 1]


@pytest.mark.parametrize("stack", [1, 2])
def test_columns_past_32_bits_of_keys_are_kept_apart(stack):
    cols = 2**31 - 1
    indices = torch.tensor([0, cols - 1, cols - 1], dtype=torch.int32)
    csr = CSR(torch.tensor([0, *[2] * 40, 3]), indices, None, (41, cols))
    tiles = BitTCF.pack(csr, stack=stack)
    rows, columns, _ = decode(tiles, csr)
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == [
        (0, 0), (0, cols - 1), (40, cols - 1),
    ]  # fmt: skip


@pytest.mark.parametrize("stack", [0, 3])
def test_rejects_other_stacks(stack):
    with pytest.raises(ValueError) as caught:
        BitTCF.pack(csr_of(MATRICES["one by one"]()), stack=stack)
    assert str(caught.value) == (
        f"BitTCF.pack: stack must be one of (1, 2), got {stack}. Choose one of these."
    )
