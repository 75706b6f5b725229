"""A's tiles as MMA operands, against the register layouts that the PTX ISA gives for mma.sync."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsetile.formats import BitTCF
from sparsetile.formats.fragments import (
    STEP_BYTES,
    entry_cells,
    fragment_elements,
    fragment_places,
    step_tiles,
)
from sparsetile.formats.rstile import RSTile
from sparsetile.formats.window_split import count_columns, split_by_threshold
from tests.contracts.cases import MATRICES, csr_of
from tests.formats.matrices import dense_of, matrices

SIZES = [2, 4]  # bytes of an element
CELLS = {2: 256, 4: 128}  # of a step: sixteen rows by sixteen columns, or by eight


def held_by(size: int, lane: int, word: int) -> list[tuple[int, int]]:
    """(row, k) of the elements in one register of a lane, operand A of m16n8k16 or m16n8k8."""
    g, t = divmod(lane, 4)
    if size == 2:
        first = {0: (g, 2 * t), 1: (g + 8, 2 * t), 2: (g, 2 * t + 8), 3: (g + 8, 2 * t + 8)}[word]
        return [first, (first[0], first[1] + 1)]
    return [{0: (g, t), 1: (g + 8, t), 2: (g, t + 4), 3: (g + 8, t + 4)}[word]]


def registers(window: np.ndarray, size: int) -> np.ndarray:
    """A window of A, sixteen rows by its tiles' columns, as all lanes hold it step by step."""
    depth = CELLS[size] // 16
    return np.array(
        [
            window[row, first + k]
            for first in range(0, window.shape[1], depth)
            for lane in range(32)
            for word in range(4)
            for row, k in held_by(size, lane, word)
        ]
    )


def windows_of(dense: Tensor, tiles: BitTCF) -> list[np.ndarray]:
    """Sixteen rows of A by the columns of their tiles; zeros in slots that repeat a column."""
    rows = np.zeros((16 * tiles.window_count, dense.shape[1]))
    rows[: dense.shape[0]] = dense.numpy()
    ends, columns = tiles.row_window_offset.tolist(), tiles.sparse_a_to_b.numpy()
    found = []
    for window, (begin, end) in enumerate(itertools.pairwise(ends)):
        mine = columns[8 * begin : 8 * end]
        block = rows[16 * window : 16 * window + 16][:, mine].copy()
        block[:, np.unique(mine).size :] = 0
        found.append(block)
    return found


def scattered(tiles: BitTCF, values: Tensor, size: int) -> np.ndarray:
    """The fragments, from packed values and their cells."""
    fragments = np.zeros(fragment_elements(tiles.tile_count, size))
    fragments[fragment_places(entry_cells(tiles), size).numpy()] = values.double().numpy()
    return fragments


@settings(max_examples=80, deadline=None)
@given(matrices(), st.sampled_from(SIZES))
def test_lanes_find_the_operand_that_the_instruction_wants(drawn, size):
    csr, order = drawn
    tiles = BitTCF.pack(csr, order, stack=2, even=True)
    expected = [registers(block, size) for block in windows_of(dense_of(csr, order), tiles)]
    found = scattered(tiles, csr.values[tiles.entries.long()], size)
    np.testing.assert_array_equal(found, np.concatenate([np.empty(0), *expected]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MATRICES)
def test_windows_that_begin_at_any_row_become_operands_too(name, size):
    csr = csr_of(MATRICES[name]())
    csr = csr.with_values(torch.arange(1.0, csr.nnz + 1))
    packed = RSTile.pack(csr, None, split_by_threshold(count_columns(csr, height=16), 3, 3))
    tiles = packed.tiles
    dense = dense_of(csr)[packed.tile_rows]
    expected = [registers(block, size) for block in windows_of(dense, tiles)]
    found = scattered(tiles, csr.values[tiles.entries.long()], size)
    np.testing.assert_array_equal(found, np.concatenate([np.empty(0), *expected]))


@settings(max_examples=60, deadline=None)
@given(matrices())
def test_cells_are_the_numbers_of_the_set_bits_in_the_order_of_values(drawn):
    csr, order = drawn
    tiles = BitTCF.pack(csr, order, stack=2, even=True)
    words = tiles.tc_local_bit.numpy().view(np.uint64).tolist()
    bits = [
        64 * part + bit for part, word in enumerate(words) for bit in range(64) if word >> bit & 1
    ]
    cells = entry_cells(tiles)
    assert cells.tolist() == bits and cells.numel() == csr.nnz
    assert cells.dtype is torch.int32, "half of the memory of int64 where numbers fit"


@pytest.mark.parametrize("size", SIZES)
def test_every_cell_of_a_step_has_a_place_of_its_own_in_that_step(size):
    step = CELLS[size]
    places = fragment_places(torch.arange(3 * step, dtype=torch.int32), size).reshape(3, step)
    for number, mine in enumerate(places):
        assert sorted(mine.tolist()) == list(range(number * step, (number + 1) * step))


@pytest.mark.parametrize("size", SIZES)
def test_places_of_very_many_cells_do_not_overflow(size):
    step, last = CELLS[size], torch.tensor([2**31 - 1], dtype=torch.int32)
    assert int(fragment_places(last, size)) == 2**31 - 1, "the last lane's last element"
    far = torch.arange(step) + 2**33
    assert torch.equal(fragment_places(far, size) - 2**33, fragment_places(far - 2**33, size))


@pytest.mark.parametrize("size, tiles, steps", [(2, 6, 3), (4, 6, 6), (2, 0, 0), (4, 0, 0)])
def test_a_step_is_sixteen_bytes_for_each_lane(size, tiles, steps):
    assert fragment_elements(tiles, size) * size == steps * STEP_BYTES == steps * 32 * 16
    assert step_tiles(size) * steps == tiles
