"""Host side of the kernels of graph attention: tiles, configurations, that they compile."""

from __future__ import annotations

import pytest
import torch

from sparsetile.jit import ARCHITECTURES, compile_source
from sparsetile.kernels import KERNELS
from sparsetile.kernels.csr import vector_width
from sparsetile.kernels.gat import (
    GAT_DTYPES,
    MODES,
    SPMM_GAT,
    gat_config,
    gat_fold,
    gat_tile,
    head_lanes,
    scores_config,
    slot_bytes,
    softmax_config,
    terms_config,
)
from tests.kernels.ptxas import drawn

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


def test_a_row_that_a_warp_can_hold_is_one_slab():
    assert gat_tile(F32, 256, 4).slabs(256) == 1
    assert gat_tile(BF16, 256, 8).slabs(256) == 1
    assert gat_tile(F32, 128, 4).lanes == 32 and gat_tile(BF16, 128, 8).lanes == 16
    assert gat_tile(F32, 1024, 4).slabs(1024) == 4


@pytest.mark.parametrize("width, fold", [(32, 8), (128, 32), (40, 2), (4, 1), (20, 1), (1024, 32)])
def test_lanes_of_one_head_are_added_as_far_as_they_are_a_power_of_two(width, fold):
    tile = gat_tile(F32, 2 * width, 4)
    assert gat_fold(tile, width) == min(fold, tile.lanes)
    assert width // tile.vector % gat_fold(tile, width) == 0


def test_heads_side_by_side_are_a_power_of_two_up_to_the_lanes():
    assert [head_lanes(heads) for heads in (1, 2, 3, 4, 5, 8, 9, 64)] == [1, 2, 4, 4, 8, 8, 8, 8]


def test_a_partial_sum_has_what_a_lane_holds():
    tile = gat_tile(F32, 256, 4)
    assert (tile.lanes, tile.times) == (32, 2)
    assert slot_bytes(tile, "train") == 32 * 2 * (4 + 4) * 4
    assert slot_bytes(tile, "backward") == slot_bytes(tile, "infer") == 32 * 2 * (4 + 1) * 4


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype, n", [(F32, 256), (F32, 128), (BF16, 256), (F16, 15)])
def test_it_compiles_without_spills(arch, dtype, n):
    tile = gat_tile(dtype, n, vector_width(dtype, n))
    for mode in ("train", "backward"):
        compiled = compile_source(SPMM_GAT.source(gat_config(dtype, tile, mode, True)), arch)
        assert not compiled.resources.spills and compiled.resources.registers <= 96


@pytest.mark.parametrize("name", ["gat_scores", "gat_softmax", "gat_terms"])
def test_the_small_kernels_compile_without_spills(name):
    for config in drawn(list(KERNELS[name].configs()), 4):
        assert not compile_source(KERNELS[name].source(config), "sm_90a").resources.spills
