"""``voltrix``: BMat tiles, packed values, shares of windows along N and their tree, decoded.

This proves the format (formats/bmat.py) and its schedule (balance/cobalance.py), not the kernel:
see decoding.py. How lanes hold rows of B and columns of C is a copy of the kernel's arithmetic.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.contracts.cases import MATRICES, random_matrix
from tests.kernels.decoding import Built, Pieces, build, damaged, row_order, whole_numbers

ROWS, CELLS = 16, 128


def registers(words: np.ndarray) -> np.ndarray:
    """Bits of one tile's four words: bool [4, 32]."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(octets, bitorder="little").astype(bool).reshape(4, 32)


# Row g + 8 (i % 2) and column t + 4 (i // 2) of register i of lane 4 g + t.
REGISTER, LANE = np.indices((4, 32))
ROW, COLUMN = LANE // 4 + REGISTER % 2 * 8, LANE % 4 + REGISTER // 2 * 4


def dense_tile(held: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[16, 8] from registers and lanes; values come register by register."""
    tile = np.zeros((ROWS, 8))
    assert values.shape == (np.count_nonzero(held),)
    tile[ROW[held], COLUMN[held]] = values
    return tile


def decode(built: Built) -> None:
    tile_ptr = built["window_tile_ptr"]
    value_ptr = built["pair_values"][tile_ptr // 2]
    width, windows, stack = built.meta["width"], len(tile_ptr) - 1, built.meta["stack"]
    pattern, dense = built.csr.values is None, built.meta["pipe"] is None
    # One column of B stands for each unit of columns.
    height = stack * ROWS
    C = np.full((width, windows, height, built.B.shape[1]), np.nan)
    pieces = [Pieces() for _ in range(width)]
    firsts = built["first_of_worker"].tolist()
    assert len(firsts) == built.meta["workers"] + 1 and firsts == sorted(firsts)
    assert (firsts[0], firsts[-1]) == (0, built.meta["items"]) and firsts[-1] == len(built["items"])
    for window, first, stop, slot, unit, end, value, zero in built["items"].tolist():
        assert tile_ptr[window] <= first <= stop <= tile_ptr[window + 1] and zero == 0
        assert (stop - first) % 2 == 0 and 0 <= unit < end <= width
        assert first > tile_ptr[window] or value == value_ptr[window]
        total = np.zeros((height, built.B.shape[1]))
        for tile, part in itertools.product(range(first, stop), range(stack)):
            held = registers(built["bitmaps"][tile * stack + part])
            assert tile % 2 or part or value == built["pair_values"][tile // 2]
            count = int(held.sum())
            if pattern:
                values = np.ones(count)
            elif dense:  # whole tiles: a lane's four registers side by side
                cells = built.packed.reshape(-1, 32, 4)[tile * stack + part].T
                assert not cells[~held].any()
                values = cells[held]
            else:
                values = built.packed[value : value + count]
            value += count
            ids = built["columns"].reshape(-1, 8)[tile]
            rows = np.where(ids[:, None] >= 0, built.B[ids], 0.0)
            assert not dense_tile(held, np.ones(count))[:, ids < 0].any()
            total[part * ROWS : (part + 1) * ROWS] += dense_tile(held, values) @ rows
        assert stop < tile_ptr[window + 1] or value == value_ptr[window + 1]
        for u in range(unit, end):
            if slot >= 0:
                pieces[u].put(slot, window, total)
            else:
                assert np.isnan(C[u, window]).all(), "a window of C is stored once"
                C[u, window] = total
    for u in range(width):
        for window, total in pieces[u].sums(built["parent_of_slot"], built["nodes"]):
            assert np.isnan(C[u, window]).all()
            C[u, window] = total
        built.check(C[u].reshape(windows * height, built.B.shape[1]), built["order"])


@pytest.mark.parametrize(
    "permuted, pattern",
    [(False, True), (True, False)],
    ids=["given, pattern", "permuted, weighted"],
)
@pytest.mark.parametrize("name", MATRICES)
def test_every_entry_is_in_the_product_once(name, permuted, pattern):
    csr = whole_numbers(MATRICES[name](), pattern=pattern)
    for n in (16, 200):
        for ablation in (None, "bits", "windows of 32"):
            order = row_order(csr, permuted)
            decode(build("voltrix", csr, n=n, order=order, ablation=ablation))


@pytest.mark.parametrize(
    "ablation", [None, "bits", "multitier", "contiguous", "greedy", "unbalanced", "windows of 32"]
)
def test_windows_that_are_shared_and_cut_are_whole_again(ablation):
    long = random_matrix(20, 4000, 0.4)
    for n in (32, 512):
        decode(build("voltrix", whole_numbers(long), n=n, ablation=ablation))


def test_a_long_window_is_cut_if_its_shares_would_be_narrow():
    built = build("voltrix", whole_numbers(random_matrix(16, 6000, 0.4)), n=32)
    assert built.meta["slots"] > 2 and built.meta["width"] == 1
    many = build("voltrix", whole_numbers(random_matrix(32_000, 300, 0.02)), n=512)
    assert many.meta["slots"] == 0 and many.meta["workers"] >= 132


def test_damage_is_noticed():
    # Row pointers are for the mean alone; which worker has an item does not change C.
    harmless = ("indptr", "first_of_worker")
    csr = whole_numbers(random_matrix(70, 90, 0.1))
    for ablation, more in (("bits", ()), (None, ("bitmaps",))):  # packing notices other bits
        for wrong in damaged(build("voltrix", csr, n=32, ablation=ablation), (*harmless, *more)):
            with pytest.raises((AssertionError, IndexError, KeyError)):
                decode(wrong)


# -- how lanes hold rows of B and columns of C


def held_b(size: int, lane: int, register: int) -> list[tuple[int, int]]:
    """(k, n) of operand B of m16n8k8 in TF32 and m16n8k16 in 16 bits (PTX ISA)."""
    g, t = divmod(lane, 4)
    if size == 4:
        return [(t + 4 * register, g)]
    return [(2 * t + 8 * register, g), (2 * t + 8 * register + 1, g)]


def held_c(lane: int, register: int) -> tuple[int, int]:
    g, t = divmod(lane, 4)
    return g + register // 2 * 8, 2 * t + register % 2


def tile_column(size: int, k: int) -> tuple[int, int]:
    """(tile, column) that k stands for."""
    if size == 4:
        return 0, k
    return k // 8, k % 8 // 2 + k % 2 * 4


@pytest.mark.parametrize("size", [2, 4])
def test_a_lane_multiplies_the_columns_that_it_stores(size):
    """The kernel's map of a piece: chunk (g % 2) * 4 + g / 2 in, chunks t and t + 4 out."""
    span = 16 // size
    b_at: dict[tuple[int, int, int], int] = {}  # (instruction, k, n) -> column of the piece
    for lane in range(32):
        g, t = divmod(lane, 4)
        chunk = g % 2 * 4 + g // 2
        for j in range(span):
            for register in range(2):
                for k, n in held_b(size, lane, register):
                    # Rows t and t + 4 of tile `register` (16 bits), or row t + 4 register.
                    tile, column = tile_column(size, k)
                    rows = (t, t + 4)
                    assert column in rows and (size == 4 or tile == register)
                    b_at[j, k, n] = chunk * span + j
    for lane in range(32):
        t = lane % 4
        for half, side, j in itertools.product(range(2), range(2), range(span)):
            row, n = held_c(lane, half * 2 + side)
            assert row == lane // 4 + 8 * half
            stored = (side * 4 + t) * span + j
            assert {b_at[j, k, n] for k in range(8 if size == 4 else 16)} == {stored}
    assert sorted(set(b_at.values())) == list(range(8 * span)), "every column once"


@pytest.mark.parametrize("size", [2, 4])
def test_eight_lanes_read_eight_groups_of_banks(size):
    """16-byte loads go eight lanes at a time: rows 16 bytes apart modulo 128 do not collide."""
    for width, rows in itertools.product((4, 8, 16), (0, 4, 8, 12)):
        stride = width * 128 + 16
        for first in range(0, 32, 8):
            lanes = [divmod(lane, 4) for lane in range(first, first + 8)]
            places = {(g % 2 * 4 + g // 2) * 16 + (t + rows) * stride for g, t in lanes}
            assert len({place % 128 // 16 for place in places}) == 8


def test_dense_operands_are_packed_for_patterns_too():
    for dtype, pattern in itertools.product((torch.float32, torch.float16), (False, True)):
        csr = whole_numbers(random_matrix(50, 70, 0.1), pattern=pattern)
        built = build("voltrix", csr, n=32, ablation="tma", dtype=dtype)
        assert built.packed.size == built["bitmaps"].shape[0] * CELLS
        assert np.count_nonzero(built.packed) == csr.nnz
        expected = np.ones(csr.nnz) if pattern else built.values[built["entries"]]
        assert sorted(built.packed[built.packed != 0]) == sorted(expected)
