"""linear_few.cu: which lane reads what, in NumPy; its tiles; that it compiles without spills.

The arithmetic is a copy of the kernel's: it proves the numbering of k and the join, not the kernel.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsetile.kernels.linear_few import (
    FEW_TOKENS,
    LINEAR_FEW,
    FewTile,
    choose_few_tile,
    few_config,
)
from tests.kernels.ptxas import recorded

RNG = np.random.default_rng(3)


def mma(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """m16n8k16 from what each lane holds: a [32, 4, 2], b [32, 2, 2] -> c [32, 4]."""
    A, B = np.zeros((16, 16)), np.zeros((16, 8))
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for word, (row, k) in enumerate(
            [(g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8)]
        ):
            A[row, k : k + 2] = a[lane, word]
        for word, k in enumerate([2 * t, 2 * t + 8]):
            B[k : k + 2, g] = b[lane, word]
    C = A @ B
    return np.array(
        [
            [C[g, 2 * t], C[g, 2 * t + 1], C[g + 8, 2 * t], C[g + 8, 2 * t + 1]]
            for g in range(8)
            for t in range(4)
        ]
    )


def strip_by_lanes(block: np.ndarray, first_row: int, X: np.ndarray, first_k: int) -> np.ndarray:
    """A strip of 16 rows times eight tokens, as load_piece and multiply_piece do: [16, 8]."""
    unit = block.shape[0]
    sums = np.zeros((32, 4))
    for half in range(unit // 32):
        a, x = np.zeros((32, 2, 8)), np.zeros((32, 8))
        for lane in range(32):
            g, t = lane // 4, lane % 4
            k = 8 * t + 32 * half
            for lower in range(2):
                a[lane, lower] = block[first_row + g + 8 * lower, k : k + 8]
            if g < X.shape[0] and first_k + k < X.shape[1]:
                x[lane] = X[g, first_k + k : first_k + k + 8]
        words, tokens = a.reshape(32, 2, 4, 2), x.reshape(32, 4, 2)
        for first in (0, 2):
            held = np.stack(
                [
                    words[:, 0, first],
                    words[:, 1, first],
                    words[:, 0, first + 1],
                    words[:, 1, first + 1],
                ],
                1,
            )
            sums += mma(held, tokens[:, first : first + 2])
    made = np.zeros((16, 8))
    for lane in range(32):
        for i in range(4):
            made[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] = sums[lane, i]
    return made


@pytest.mark.parametrize("unit", [32, 64])
@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_lanes_agree_on_the_numbering_of_k(unit, tokens):
    block = RNG.integers(-4, 5, (unit, unit)).astype(float)
    X = RNG.integers(-4, 5, (tokens, 2 * unit)).astype(float)
    for first_row in range(0, unit, 16):
        got = strip_by_lanes(block, first_row, X, unit)
        expected = block[first_row : first_row + 16] @ X[:, unit:].T
        assert np.array_equal(got[:, :tokens], expected)
        assert not got[:, tokens:].any()


def test_inputs_past_the_last_column_are_zeros():
    block, X = np.ones((64, 64)), np.ones((1, 40))
    assert np.array_equal(strip_by_lanes(block, 0, X, 0)[:, 0], np.full(16, 40.0))


@pytest.mark.parametrize(
    "tokens, rows, blocks, expected",
    [
        (1, 18944, 1657, FewTile(2, 4, 1, 64)),
        (16, 18944, 1657, FewTile(2, 4, 2, 64)),
        (1, 3584, 1657, FewTile(1, 16, 1, 64)),
        (9, 512, 45, FewTile(1, 4, 2, 64)),
        (1, 0, 0, FewTile(1, 4, 1, 64)),
    ],
)
def test_tiles_follow_tokens_rows_and_blocks(tokens, rows, blocks, expected):
    assert choose_few_tile(tokens, rows, blocks, 64, 132) == expected


@pytest.mark.parametrize(
    "tile", [FewTile(1, 4, 1, 64), FewTile(2, 16, 2, 64), FewTile(2, 8, 1, 32)]
)
def test_every_row_has_a_thread_block(tile):
    for rows in (1, 64, 100, 512):
        (count, _, _) = tile.grid(rows)
        assert count * 16 * tile.strips >= rows
        assert count * 16 * tile.strips == -(-rows // tile.unit) * tile.unit


@pytest.mark.parametrize(  # any two of the four in every combination
    "arch, dtype, paired, eight",
    [
        ("sm_80", torch.bfloat16, False, False),
        ("sm_80", torch.float16, True, True),
        ("sm_89", torch.float16, False, True),
        ("sm_89", torch.bfloat16, True, False),
        ("sm_90a", torch.bfloat16, True, True),
        ("sm_90a", torch.float16, False, False),
    ],
)
def test_compiles_without_spills(arch, dtype, paired, eight):
    tile = FewTile(2, 4, FEW_TOKENS // 8, 64, paired)
    config = few_config(dtype, tile, eight=eight)
    for found in recorded(LINEAR_FEW.source(config), arch):
        assert found["spill_store_bytes"] == found["spill_load_bytes"] == 0
