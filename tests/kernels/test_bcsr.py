"""Configurations and tiles of the block kernel."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from sparsetile.jit import ARCHITECTURES
from sparsetile.kernels.bcsr import (
    FP8,
    FP8_TILES,
    LADDER,
    NARROW,
    SPMM_BCSR,
    TF32_TILES,
    TILES,
    WIDE,
    bcsr_config,
    choose_block_tile,
)
from tests.kernels.ptxas import drawn, said_by_ptxas

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# What sm_90 gives a block, and an SM for its blocks with 1 KB each of the system's.
BLOCK_SHARED, SM_SHARED = 227 * 1024, 228 * 1024


def test_the_kernel_exists_for_hopper_alone():
    assert [arch for arch in ARCHITECTURES if SPMM_BCSR.runs_on(arch)] == ["sm_90a"]
    assert not SPMM_BCSR.runs_on("sm_100a"), "wgmma is sm_90a's own"


def test_the_compiler_adds_no_waits_between_products():
    """ptxas says so where it cannot leave products under way, and then waits for each."""
    layouts = itertools.product(TILES, (BF16, F32), (False, True))
    configs = [bcsr_config(BF16, t, out_dtype=out, k_major=k_major) for t, out, k_major in layouts]
    configs += [bcsr_config(BF16, replace(t, paired=True), k_major=True) for t in TILES]
    steps = [bcsr_config(BF16, WIDE.at_step(step)) for step in (1, 2, 3, 5, 7)]
    eight = [
        bcsr_config(FP8, t, out_dtype=out, k_major=True) for t in FP8_TILES for out in (BF16, F32)
    ]
    tf32 = [bcsr_config(F32, t, k_major=True) for t in TF32_TILES]
    for config in drawn([*configs, *steps, *eight, *tf32], 1):
        source = SPMM_BCSR.source(config)
        said = said_by_ptxas(source)
        assert "Used" in said and "wgmma" not in said, source.label


def test_the_struct_is_a_multiple_of_a_tensor_maps_alignment():
    assert SPMM_BCSR.params.size % 64 == 0
    assert all(SPMM_BCSR.params.offsets[name] % 64 == 0 for name in ("a", "b", "stored"))


def test_what_changes_from_call_to_call_is_written_at_once():
    """B's map, C's map and C's address are neighbours in the struct."""
    assert len(SPMM_BCSR.params.patch("b", "stored", "c").runs) == 1


def test_every_configuration_a_runner_may_ask_for_is_listed_once():
    listed = [tuple(config.items()) for config in SPMM_BCSR.configs()]
    asked = {
        tuple(bcsr_config(dtype, tile, out_dtype=out, k_major=k_major).items())
        for dtype in (F16, BF16)
        for k_major in (False, True)
        for tile in TILES
        for out in (None, dtype, F32)
    }
    steps = {
        tuple(bcsr_config(dtype, tile.at_step(step), out_dtype=out).items())
        for dtype in (F16, BF16)
        for tile in TILES
        for step in LADDER.values()
        for out in (dtype, F32)
    }
    eight = {
        tuple(bcsr_config(FP8, tile, out_dtype=out, k_major=True).items())
        for tile in FP8_TILES
        for out in (None, BF16, F16, F32)
    }
    tf32 = {tuple(bcsr_config(F32, tile, k_major=True).items()) for tile in TF32_TILES}
    pairs = {
        tuple(bcsr_config(dtype, replace(tile, paired=True), k_major=True).items())
        for dtype in (F16, BF16)
        for tile in TILES
    }
    assert len(asked) == 16 and len(steps | asked) == 64 and len(eight) == 6 and len(tf32) == 2
    assert len(listed) == 76 and set(listed) == asked | steps | eight | tf32 | pairs


@pytest.mark.parametrize(
    "tile, blocks",
    [(WIDE, 1), (NARROW, 2), (FP8_TILES[0], 1), (FP8_TILES[1], 2), (TF32_TILES[0], 1),
     (TF32_TILES[1], 2)],
)  # fmt: skip
def test_rings_are_as_deep_as_shared_memory_allows(tile, blocks):
    assert tile.shared_bytes <= BLOCK_SHARED
    assert blocks * (tile.shared_bytes + 1024) <= SM_SHARED
    assert tile.threads == 128 + tile.columns
    deeper = tile.shared_bytes + tile.stage_bytes + 16
    assert blocks * (deeper + 1024) > SM_SHARED, "another stage would fit"


@pytest.mark.parametrize(
    "n, block_rows, tile",
    [(8, 1000, NARROW), (128, 1000, NARROW), (129, 1000, WIDE), (512, 66, WIDE), (512, 65, NARROW)],
)
def test_tiles_are_wide_if_columns_fill_them_and_every_sm_has_one(n, block_rows, tile):
    assert choose_block_tile(n, block_rows, 132) == tile
    assert tile.slabs(n) == -(-n // tile.columns)
    eight = choose_block_tile(n, block_rows, 132, FP8)
    assert eight in FP8_TILES and eight.columns == tile.columns
    full = choose_block_tile(n, block_rows, 132, F32)
    assert full in TF32_TILES and full.columns == tile.columns


@pytest.mark.parametrize("columns", [128, 256])
def test_a_width_that_is_asked_for_is_taken_whatever_b_has(columns):
    for n, dtype in itertools.product((8, 4096), (F32, F16, FP8)):
        tile = choose_block_tile(n, 5, 132, dtype, columns)
        assert tile.columns == columns and tile.item == dtype.itemsize


@pytest.mark.parametrize(
    "tile, n, block_rows, blocks",
    [(WIDE, 4096, 296, 132), (WIDE, 300, 66, 132), (WIDE, 256, 5, 5), (NARROW, 128, 296, 264),
     (NARROW, 129, 100, 200)],
)  # fmt: skip
def test_the_grid_fills_the_gpu_once_and_no_further(tile, n, block_rows, blocks):
    assert tile.grid(n, block_rows, 132) == (blocks, 1, 1)


def test_steps_of_the_ladder_differ_in_threads_stages_and_grid():
    assert WIDE.at_step(LADDER["opt6"]) == WIDE
    found = {name: WIDE.at_step(step) for name, step in LADDER.items()}
    assert {name: (tile.threads, tile.stages) for name, tile in found.items()} == {
        "opt0": (256, 1), "opt1": (256, 1), "opt2": (256, 1),
        "opt3": (384, 4), "opt5": (384, 4), "opt6": (384, 4), "opt7": (384, 4),
    }  # fmt: skip
    grids = {name: tile.grid(4096, 296, 132)[0] for name, tile in found.items()}
    assert grids.pop("opt6") == grids.pop("opt7") == 132 and set(grids.values()) == {296 * 16}


def test_clusters_have_two_slabs_and_half_a_block_each():
    tile = WIDE.at_step(LADDER["opt7"])
    assert tile.cluster == 2 and tile.block_box == (32, 64) and WIDE.block_box == (64, 64)
    assert [tile.slabs(n) for n in (1, 256, 512, 513, 1025)] == [1, 1, 1, 2, 3]
    assert tile.grid(256, 5, 132) == (10, 1, 1) and tile.grid(4096, 296, 1) == (2, 1, 1)
    assert tile.grid(4096, 296, 133)[0] == 132, "whole clusters"
    assert bcsr_config(F16, tile)["CLUSTERED"] == "1" and "CLUSTERED" not in bcsr_config(F16, WIDE)


L2 = 60 * 2**20


@pytest.mark.parametrize(
    "n, rows, cols, queued",
    [
        (65536, 56, 18944, True),  # down: a slab of B has 9.7 MB, and three of them are in use
        (16384, 56, 18944, True),
        (4096, 56, 18944, False),  # a block has too few items to drift
        (16384, 296, 3584, False),  # gate: L2 holds many slabs
        (65536, 296, 3584, True),
        (16384, 8, 3584, False),  # key
    ],
)
def test_thread_blocks_take_items_from_a_queue_if_they_would_drift(n, rows, cols, queued):
    tile = choose_block_tile(n, rows, 132)
    assert tile.queues(n, rows, cols, 132, L2) == queued
    for step in (5, 7):
        assert not tile.at_step(step).queues(n, rows, cols, 132, L2)
