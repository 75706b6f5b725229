"""Host side of the kernels of graph attention: tiles, configurations, that they compile."""

from __future__ import annotations

import pytest
import torch

from sparsetile.jit import ARCHITECTURES
from sparsetile.kernels import KERNELS
from sparsetile.kernels.columns import ColumnGrid, column_grid
from sparsetile.kernels.csr import vector_width
from sparsetile.kernels.gat import (
    GAT_DTYPES,
    MODES,
    SPMM_GAT,
    gat_config,
    gat_parts,
    gat_tile,
    head_lanes,
    scores_config,
    slot_bytes,
    softmax_config,
    terms_config,
    vectors_config,
)
from tests.kernels.ptxas import recorded

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def listed(name: str) -> list[tuple[tuple[str, object], ...]]:
    return [tuple(config.items()) for config in KERNELS[name].configs()]


@pytest.mark.parametrize("dtype", GAT_DTYPES)
@pytest.mark.parametrize("heads, width", [(8, 32), (1, 128), (3, 5), (2, 6), (1, 1), (5, 1000)])
def test_every_configuration_that_is_asked_for_is_listed(dtype, heads, width):
    n, vector = heads * width, vector_width(dtype, width)
    tile = gat_tile(dtype, n, vector)
    for mode in MODES:
        for scaled in (False, True):
            assert tuple(gat_config(dtype, tile, mode, scaled).items()) in listed("spmm_gat")
    assert tuple(terms_config(dtype, vector).items()) in listed("gat_terms")
    for two in (False, True):
        assert tuple(scores_config(dtype, vector, two).items()) in listed("gat_scores")
    assert tuple(softmax_config(heads).items()) in listed("gat_softmax")
    for bias in (False, True):
        config = vectors_config(dtype, vector, column_grid(1000, n, vector).lanes, bias)
        assert tuple(config.items()) in listed("gat_vectors")


def test_a_row_that_a_warp_can_hold_is_one_slab():
    assert gat_tile(F32, 256, 4).slabs(256) == 1
    assert gat_tile(BF16, 256, 8).slabs(256) == 1
    assert gat_tile(F32, 128, 4).lanes == 32 and gat_tile(BF16, 128, 8).lanes == 16
    assert gat_tile(F32, 1024, 4).slabs(1024) == 4


@pytest.mark.parametrize(
    "heads, width, parts",
    [(8, 32, 1), (1, 128, 1), (1, 256, 1), (3, 40, 1), (8, 128, 1), (1, 1024, 4), (3, 96, 2),
     (8, 7, 2), (1, 31, 1), (1, 47, 2), (2, 500, 3)],
)  # fmt: skip
def test_heads_lie_in_as_many_slabs_as_their_gradients_have_parts(heads, width, parts):
    tile = gat_tile(F32, heads * width, vector_width(F32, width))
    assert gat_parts(tile, heads, width) == parts


def test_sums_over_nodes_fill_a_gpu_if_there_are_many():
    assert column_grid(1, 7, 1) == ColumnGrid(16, 1, 1)
    assert column_grid(2708, 64, 4) == ColumnGrid(16, 22, 1)
    assert column_grid(10**6, 256, 4) == ColumnGrid(16, 66, 4)
    assert column_grid(10**6, 8, 8) == ColumnGrid(4, 264, 1)
    assert column_grid(10**6, 256, 4).scratch(4, 3) == (66 * 4 * 3 * 64 * 4, 4)
    assert column_grid(1, 7, 1).scratch(1, 3) == (0, 0)


def test_heads_side_by_side_are_a_power_of_two_up_to_the_lanes():
    assert [head_lanes(heads) for heads in (1, 2, 3, 4, 5, 8, 9, 64)] == [1, 2, 4, 4, 8, 8, 8, 8]


def test_a_partial_sum_has_what_a_lane_holds():
    tile = gat_tile(F32, 256, 4)
    assert (tile.lanes, tile.times) == (32, 2)
    assert slot_bytes(tile, "train") == 32 * 2 * (4 + 4) * 4
    assert slot_bytes(tile, "backward") == slot_bytes(tile, "infer") == 32 * 2 * (4 + 1) * 4


@pytest.mark.parametrize(
    "dtype, n, mode", [(F32, 256, "train"), (F32, 128, "backward"), (BF16, 256, "backward"),
                       (F16, 15, "train")],
)  # fmt: skip
def test_it_compiles_without_spills(dtype, n, mode):
    tile = gat_tile(dtype, n, vector_width(dtype, n))
    for arch in ARCHITECTURES:
        for found in recorded(SPMM_GAT.source(gat_config(dtype, tile, mode, True)), arch):
            assert found["spill_store_bytes"] == found["spill_load_bytes"] == 0
            assert found["registers"] <= 96


@pytest.mark.parametrize("name", ["gat_scores", "gat_softmax", "gat_terms", "gat_vectors"])
def test_the_small_kernels_compile_without_spills(name):
    for config in KERNELS[name].configs():
        for found in recorded(KERNELS[name].source(config)):
            assert found["spill_store_bytes"] == found["spill_load_bytes"] == 0
