"""BCSR against its own definition, block by block, on matrices of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsetile import CSR
from sparsetile.balance import WindowSchedule
from sparsetile.formats.bcsr import BCSR, BLOCK_SIZES, count_blocks
from tests.contracts.cases import MATRICES, csr_of
from tests.formats.decoding import decode, pack_values
from tests.formats.matrices import dense_of, matrices

SIZES = st.sampled_from(BLOCK_SIZES)


def check(csr: CSR, order: Tensor | None, blocks: BCSR) -> None:
    """Compare every array with a walk over the blocks of the padded dense matrix."""
    size = blocks.block
    rows, cols = (-(-side // size) * size for side in csr.shape)
    padded = torch.zeros(rows, cols)
    padded[: csr.shape[0], : csr.shape[1]] = dense_of(csr, order)
    ptr, idx, kept = [0], [], []
    for top in range(0, rows, size):
        for left in range(0, cols, size):
            cells = padded[top : top + size, left : left + size]
            if cells.any():
                idx.append(left // size)
                kept.append(cells)
        ptr.append(len(idx))
    assert blocks.block_row_ptr.tolist() == ptr
    assert blocks.block_col_idx.tolist() == idx
    expected = torch.stack(kept) if kept else torch.zeros(0, size, size)
    assert torch.equal(pack_values(blocks, csr, csr.values), expected), "row-major inside a block"
    assert torch.equal(expected.flatten()[blocks.places], csr.values)
    if blocks.bitmaps is not None:
        words = blocks.bitmaps.numpy().view(np.uint64)
        bits = (words[:, :, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
        assert np.array_equal(bits.reshape(expected.shape) == 1, expected.numpy() != 0)


@settings(max_examples=120, deadline=None)
@given(matrices(), SIZES)
def test_every_array_is_what_its_definition_says(drawn, size):
    csr, order = drawn
    blocks = BCSR.pack(csr, order, block=size)
    check(csr, order, blocks)
    assert count_blocks(csr, size, order) == blocks.block_count


@settings(max_examples=80, deadline=None)
@given(matrices(), SIZES)
def test_lists_and_bits_alone_give_every_entry_back(drawn, size):
    csr, order = drawn
    blocks = BCSR.pack(csr, order, block=size)
    row, column, place = decode(blocks, csr)
    assert row.numel() == csr.nnz
    dense = torch.zeros(csr.shape)
    dense[row, column] = pack_values(blocks, csr, csr.values).flatten()[place]
    assert torch.equal(dense, dense_of(csr))


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("order", [None, "shuffled"])
@pytest.mark.parametrize("name", MATRICES)
def test_matrices_of_every_kind_are_cut_into_blocks(name, order, size):
    csr = csr_of(MATRICES[name]())
    rows = None if order is None else torch.randperm(csr.shape[0])
    check(csr, rows, BCSR.pack(csr, rows, block=size))


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("name", MATRICES)
def test_the_size_is_the_formulas(name, size):
    csr = csr_of(MATRICES[name]())
    blocks = BCSR.pack(csr, block=size)
    count = blocks.block_count
    assert blocks.block_row_count == -(-csr.shape[0] // size)
    bits = 0 if blocks.bitmaps is None else size * size // 8 * count
    assert blocks.bytes == 4 * (blocks.block_row_count + 1 + count) + bits
    assert blocks.value_bytes(torch.float16) == 2 * size * size * count
    assert pack_values(blocks, csr, csr.values).nbytes == blocks.value_bytes(torch.float32)
    assert blocks.fill == csr.nnz / max(count * size * size, 1)
    for part in (blocks.block_row_ptr, blocks.block_col_idx):
        assert part.dtype is torch.int32 and part.is_contiguous()
    assert blocks.places.dtype is torch.int64


@pytest.mark.parametrize("shape", [(128, 192), (100, 70), (64, 1), (1, 200)])
def test_a_matrix_that_fills_its_blocks_needs_no_bits(shape):
    csr = csr_of(np.arange(1.0, shape[0] * shape[1] + 1).reshape(shape))
    blocks = BCSR.pack(csr, block=64)
    assert blocks.bitmaps is None
    row, column, place = decode(blocks, csr)
    assert row.numel() == csr.nnz
    dense = torch.zeros(csr.shape)
    dense[row, column] = pack_values(blocks, csr, csr.values).flatten()[place]
    assert torch.equal(dense, dense_of(csr))


def test_one_missing_entry_brings_the_bits_back():
    dense = np.ones((128, 64))
    dense[70, 5] = 0
    blocks = BCSR.pack(csr_of(dense), block=64)
    assert blocks.bitmaps.shape == (2, 64)
    assert blocks.bitmaps[0].tolist() == [-1] * 64
    assert blocks.bitmaps[1].tolist() == [-1] * 6 + [-1 & ~(1 << 5)] + [-1] * 57


def test_stored_zeros_are_entries():
    csr = CSR(torch.tensor([0, 2]), torch.tensor([3, 90], dtype=torch.int32), None, (1, 100))
    blocks = BCSR.pack(csr.with_values(torch.zeros(2)), block=64)
    assert blocks.block_col_idx.tolist() == [0, 1]
    assert decode(blocks, csr)[1].tolist() == [3, 90]


def test_block_rows_are_cut_from_the_order_given():
    csr = csr_of(MATRICES["equal rows"]())
    order = torch.arange(csr.shape[0]).flip(0)
    blocks = BCSR.pack(csr, order)
    assert torch.equal(blocks.order, order.int())
    rows, _, _ = decode(blocks, csr)
    last = rows[decode(blocks, csr)[2] // 64**2 >= int(blocks.block_row_ptr[1])]
    assert sorted(last.unique().tolist()) == [0, 1, 2], "the last block row holds what is left"


def test_columns_past_31_bits_of_keys_are_kept_apart():
    cols = 2**31 - 1
    indices = torch.tensor([0, cols - 1, cols - 1], dtype=torch.int32)
    csr = CSR(torch.tensor([0, *[2] * 200, 3]), indices, None, (201, cols))
    row, column, _ = decode(BCSR.pack(csr, block=32), csr)
    assert list(zip(row.tolist(), column.tolist(), strict=True)) == [
        (0, 0), (0, cols - 1), (200, cols - 1),
    ]  # fmt: skip


def test_offsets_are_what_the_balancer_takes():
    csr = csr_of(MATRICES["one dense row"]())
    blocks = BCSR.pack(csr, block=32)
    items = WindowSchedule.make(blocks.units(), workers=4).items.tolist()
    covered = sorted(at for _, first, end, _ in items for at in range(first, end))
    assert covered == list(range(blocks.block_count))


@pytest.mark.parametrize("size", [0, 16, 63, 256])
def test_other_block_sizes_are_refused(size):
    text = f"BCSR.pack: block must be one of \\(32, 64, 128\\), got {size}. Choose a size from that"
    with pytest.raises(ValueError, match=text):
        BCSR.pack(csr_of(MATRICES["one by one"]()), block=size)
