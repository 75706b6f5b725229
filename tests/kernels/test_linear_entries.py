"""linear_entries.cu: how work is divided, and that it compiles without spills."""

from __future__ import annotations

import pytest
import torch

from sparsetile.kernels.linear_entries import (
    LINEAR_ENTRIES,
    EntryTile,
    choose_entry_tile,
    entries_config,
    entry_zeros,
)
from tests.kernels.ptxas import recorded


@pytest.mark.parametrize(
    "tokens, parts, blocks, cols, expected",
    [
        (1, 8, 448, 4096, EntryTile(8, 1, 2, 4)),
        (3, 8, 448, 4096, EntryTile(8, 4, 2, 4)),
        (8, 8, 448, 4096, EntryTile(8, 8, 2, 3)),
        # One wave of five blocks an SM, if registers suffice; two waves of four.
        (1, 8, 592, 3584, EntryTile(8, 1, 2, 5)),
        (8, 8, 592, 3584, EntryTile(8, 8, 2, 3)),
        (1, 8, 896, 4096, EntryTile(8, 1, 2, 4)),
        # The next kernel's blocks find a place beside these.
        (1, 16, 128, 4096, EntryTile(16, 1, 2, 2, True)),
        (1, 16, 192, 4096, EntryTile(16, 1, 2, 2)),
        (1, 16, 128, 14336, EntryTile(16, 1, 2, 2, True)),
        (4, 16, 128, 14336, EntryTile(16, 4, 4, 1)),
        (8, 16, 300, 14336, EntryTile(16, 8, 4, 1)),
    ],
)
def test_tiles_follow_tokens_and_columns(tokens, parts, blocks, cols, expected):
    found = choose_entry_tile(tokens, parts, blocks, cols, 16, 132, 228 * 1024)
    assert found == expected and found.threads == 32 * parts


def test_many_steps_are_loaded_further_ahead():
    found = choose_entry_tile(1, 16, 128, 14336, 17, 132, 228 * 1024)
    assert found == EntryTile(16, 1, 4, 1)


def test_inputs_are_kept_in_float32_or_as_they_are():
    zeros = entry_zeros(10)
    assert zeros == 96
    assert EntryTile(8, 1, 2, 4).shared_bytes(4096, zeros) == 32 + 4 * (4096 + zeros)
    assert EntryTile(8, 4, 2, 4).shared_bytes(4096, zeros) == 32 + 8 * (4096 + zeros)
    # At least as much as the parts' sums.
    assert EntryTile(16, 8, 2, 2).shared_bytes(8, zeros) == 32 + 4 * 32 * 16 * 8


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize(
    "dtype, tile",
    [(torch.bfloat16, EntryTile(8, 1, 2, 4)), (torch.float16, EntryTile(16, 8, 4, 1)),
     (torch.float16, EntryTile(8, 4, 2, 4)), (torch.bfloat16, EntryTile(16, 2, 2, 2))],
)  # fmt: skip
def test_compiles_without_spills(arch, dtype, tile):
    for found in recorded(LINEAR_ENTRIES.source(entries_config(dtype, tile)), arch):
        assert found["spill_store_bytes"] == found["spill_load_bytes"] == 0
