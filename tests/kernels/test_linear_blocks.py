"""linear_blocks.cu: its tiles, and what an SM holds of them; that it compiles without spills."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from sparsetile.jit import compile_source
from sparsetile.kernels.linear_blocks import (
    BLOCKS_TYPES,
    BLOCKS_UNITS,
    LINEAR_BLOCKS,
    BlocksTile,
    blocks_config,
    choose_layer_tile,
)
from tests.kernels.ptxas import drawn

# Shared memory of an SM of sm_80, sm_86 and sm_90.
MEMORIES = (164 * 1024, 100 * 1024, 228 * 1024)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("unit", BLOCKS_UNITS)
@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("paired", [False, True])
def test_thread_blocks_fit_an_sm(memory, unit, tokens, paired):
    tile = BlocksTile(unit, tokens, 4, paired).fitting(memory)
    assert tile.shared_bytes <= memory - 1024, "what one thread block may use"
    blocks = memory // (tile.shared_bytes + 1024)
    assert blocks >= 2, "one hides the other's start and store"
    more = dataclasses.replace(tile, stages=tile.stages + 1)
    least = min(blocks, tile.resident)
    assert tile.stages == 4 or least * (more.shared_bytes + 1024) > memory, "a stage more fits, too"


def test_a_gpu_with_hardly_any_memory_still_gets_a_tile():
    assert BlocksTile(64, 128, 4).fitting(50 * 1024).stages == 2


@pytest.mark.parametrize(
    "tokens, block_rows, columns",
    [(17, 296, 64), (64, 296, 64), (65, 296, 128), (8192, 56, 128), (256, 56, 64), (1024, 8, 64)],
)
def test_wide_tiles_need_tokens_and_enough_items(tokens, block_rows, columns):
    assert choose_layer_tile(tokens, 64, block_rows, 132, MEMORIES[2]).tokens == columns


def test_every_tile_that_may_be_chosen_is_listed_once():
    listed = [tuple(config.items()) for config in LINEAR_BLOCKS.configs()]
    asked = {
        tuple(
            blocks_config(dtype, choose_layer_tile(tokens, unit, 300, 132, memory, paired)).items()
        )
        for dtype, unit, tokens, memory in itertools.product(
            BLOCKS_TYPES, BLOCKS_UNITS, (20, 2000), MEMORIES
        )
        for paired in ((False, True) if dtype.itemsize == 2 else (False,))
    }
    assert len(listed) == len(set(listed)) and asked == set(listed)


def test_compiles_for_every_architecture_without_spills():
    jobs = itertools.product(LINEAR_BLOCKS.configs(), ("sm_80", "sm_86", "sm_90a", "sm_120"))
    for config, arch in drawn(list(jobs), 4):
        found = compile_source(LINEAR_BLOCKS.source(config), arch)
        assert not found.resources.spills, found.source.label
        # Thread blocks that the launch bounds promise, of 65,536 registers.
        assert config["kResident"] * 128 * found.resources.registers <= 65536


def test_what_changes_from_call_to_call_is_written_at_once():
    assert len(LINEAR_BLOCKS.params.patch("b", "c").runs) == 1


def test_float32_has_no_pairs():
    pairs = [config for config in LINEAR_BLOCKS.configs() if config["kPaired"]]
    assert pairs and all(config["ELEMENT"] != "F32" for config in pairs)
    assert torch.float32 in BLOCKS_TYPES
