"""BMat against the register layout that the PTX ISA gives for mma.m16n8k8, cell by cell."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from sparsetile import CSR
from sparsetile.formats import BMat, bmat
from sparsetile.formats.bmat import CELLS, fragment_cells
from tests.contracts.cases import MATRICES, csr_of
from tests.formats.decoding import pack_values
from tests.formats.matrices import dense_of, matrices


def held_by(lane: int, register: int) -> tuple[int, int]:
    """(row, k) of operand A of m16n8k8 in one register of a lane."""
    g, t = divmod(lane, 4)
    return {0: (g, t), 1: (g + 8, t), 2: (g, t + 4), 3: (g + 8, t + 4)}[register]


def reference(csr: CSR, order, stack: int = 1):
    """(columns, registers [parts][4][32]) of each tile of each window, by loops over the matrix."""
    dense = dense_of(csr, order).numpy()
    windows, height = [], 16 * stack
    for top in range(0, dense.shape[0], height):
        rows = np.zeros((height, dense.shape[1]))
        rows[: min(height, dense.shape[0] - top)] = dense[top : top + height]
        used = [c for c in range(dense.shape[1]) if rows[:, c].any()]
        group = 16
        used += [-1] * (-len(used) % group)
        tiles = []
        for first in range(0, len(used), 8):
            mine = used[first : first + 8]
            registers = np.zeros((stack, 4, 32))
            for part, register, lane in itertools.product(range(stack), range(4), range(32)):
                row, k = held_by(lane, register)
                if mine[k] >= 0:
                    registers[part, register, lane] = rows[16 * part + row, mine[k]]
            tiles.append((mine, registers))
        windows.append(tiles)
    return windows


def check(csr: CSR, order, stack: int = 1) -> None:
    bmat = BMat.pack(csr, order, stack=stack)
    expected = reference(csr, order, stack)
    assert bmat.window_count == len(expected)
    ends = np.cumsum([0] + [len(tiles) for tiles in expected])
    assert bmat.window_tile_ptr.tolist() == ends.tolist()
    flat = [tile for tiles in expected for tile in tiles]
    assert bmat.columns.tolist() == [c for mine, _ in flat for c in mine]
    values = []
    for tile, (_, registers) in enumerate(flat):
        for part, word in itertools.product(range(stack), range(4)):
            bits = int(bmat.bitmaps[tile * stack + part, word]) & 0xFFFFFFFF
            held = registers[part, word]
            assert [bits >> lane & 1 for lane in range(32)] == (held != 0).tolist()
            values += held[held != 0].tolist()
    assert pack_values(bmat, csr, csr.values).tolist() == values
    # A window's values begin where those of its first tile do.
    counts = [int((registers != 0).sum()) for _, registers in flat]
    firsts = np.concatenate([[0], np.cumsum(counts)]).astype(int)
    assert bmat.window_value_ptr.tolist() == firsts[ends].tolist()
    every = torch.arange(bmat.tile_count + 1)
    assert bmat.first_values(every).tolist() == firsts.tolist()
    assert not any(count % 2 for count in bmat.tiles_per_window().tolist())


@settings(max_examples=60, deadline=None)
@given(matrices(most=70))
def test_bits_values_and_columns_are_those_of_the_registers(drawn):
    csr, order = drawn
    for stack in (1, 2):
        check(csr, order, stack)


@pytest.mark.parametrize("name", ["one dense row", "one dense column", "odd sizes"])
def test_hard_matrices_are_packed_as_the_plain_reference_does(name):
    csr = csr_of(MATRICES[name]())
    check(csr.with_values(torch.arange(1.0, csr.nnz + 1)), None)


@pytest.mark.parametrize("stack", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_dense_operands_hold_each_value_in_its_lanes_register(size, stack):
    generator = torch.Generator().manual_seed(3)
    dense = torch.randint(1, 100, (40, 90), generator=generator).float()
    dense *= torch.rand(40, 90, generator=generator) < 0.1
    row, column = torch.nonzero(dense, as_tuple=True)
    indptr = torch.zeros(41, dtype=torch.int64)
    indptr[1:] = torch.cumsum(torch.bincount(row, minlength=40), 0)
    csr = CSR(indptr, column.int(), dense[row, column], (40, 90))
    bmat = BMat.pack(csr, stack=stack)
    operands = torch.zeros(bmat.tile_count * stack * CELLS)
    operands[fragment_cells(bmat.bitmaps, size, stack)] = pack_values(bmat, csr, csr.values)
    flat = [registers for tiles in reference(csr, None, stack) for _, registers in tiles]
    if size == 4:
        expected = [part.T for tile in flat for part in tile]  # lane by lane, its four registers
    else:  # of two tiles: registers {w0, w2} {w1, w3} of the first, then of the second
        expected = [
            np.stack([x[0], x[2], x[1], x[3], y[0], y[2], y[1], y[3]], 1)
            for first, second in zip(flat[::2], flat[1::2], strict=True)
            for x, y in zip(first, second, strict=True)
        ]
    assert operands.tolist() == np.concatenate([e.ravel() for e in expected]).tolist()


def test_counts_rows_of_b_and_how_often_they_are_used():
    csr = csr_of(MATRICES["one dense column"]())
    bmat = BMat.pack(csr)
    assert bmat.distinct == int((bmat.columns >= 0).sum())
    assert bmat.entries_per_pair == csr.nnz / bmat.distinct
    assert bmat.bytes == sum(getattr(bmat, name).nbytes for name in BMat.index_arrays)


def test_rejects_a_matrix_of_too_many_entries(constants):
    csr = csr_of(MATRICES["odd sizes"]())
    constants(bmat, MAX_ENTRIES=3)
    with pytest.raises(ValueError) as caught:
        BMat.pack(csr)
    assert str(caught.value) == (
        f"BMat.pack: csr must be a matrix of fewer than 2^31 entries, got {csr.nnz}. "
        "Cut A into parts by rows."
    )
