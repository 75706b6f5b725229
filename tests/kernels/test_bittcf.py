"""Choices of the tile kernel's host side: slabs, accesses, registers, policies."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparsetile.kernels import KERNELS
from sparsetile.kernels.bittcf import (
    ABLATED,
    DEFAULT,
    ELEMENTS,
    STACKS,
    STAGES,
    Policy,
    Slab,
    bittcf_config,
    choose_slab,
    slabs,
)
from sparsetile.kernels.csr import MANY_RELOADS

MANY = {"items": 10**6, "processors": 132}


@pytest.mark.parametrize(
    "dtype, n, columns",
    [
        (torch.float32, 1, 32), (torch.float32, 32, 32), (torch.float32, 40, 64),
        (torch.float32, 64, 64), (torch.float32, 96, 128), (torch.float32, 128, 128),
        (torch.float32, 160, 64), (torch.float32, 512, 128),
        (torch.float16, 24, 32), (torch.float16, 64, 64), (torch.float16, 128, 128),
        (torch.float16, 256, 256), (torch.float16, 512, 256), (torch.bfloat16, 264, 128),
    ],
)  # fmt: skip
def test_the_slab_is_as_wide_as_the_product_needs(dtype, n, columns):
    vector = 16 // dtype.itemsize
    assert choose_slab(dtype, n, vector, **MANY).columns == columns


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize("n", [1, 33, 128, 1000])
def test_slabs_cover_every_column_and_none_is_beside_them(dtype, n):
    for vector in (16 // dtype.itemsize, 1):
        slab = choose_slab(dtype, n, vector, **MANY)
        assert (slab.count(n) - 1) * slab.columns < n <= slab.count(n) * slab.columns


def test_few_items_are_spread_over_narrow_slabs():
    wide = choose_slab(torch.float32, 512, 4, items=10**5, processors=132)
    narrow = choose_slab(torch.float32, 512, 4, items=100, processors=132)
    assert (wide.columns, narrow.columns) == (128, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("row_bytes, chosen", [(128, 128), (256, 256), (512, 512), (4096, 512)])
def test_rows_of_B_in_no_order_are_walked_in_the_widest_slab_that_fits_the_cache(
    dtype, row_bytes, chosen
):
    l2 = 50 * 2**20
    vector = 16 // dtype.itemsize
    cache = {"l2": l2, "cols": int(0.85 * l2) // row_bytes}
    if row_bytes == 4096:
        cache["cols"] = l2  # not even 128 bytes of each row fit
    slab = choose_slab(dtype, 512, vector, reloads=MANY_RELOADS, **cache, **MANY)
    assert slab.columns * dtype.itemsize == chosen
    local = choose_slab(dtype, 512, vector, reloads=MANY_RELOADS - 0.1, **cache, **MANY)
    assert local.columns * dtype.itemsize == 512, "near rows are in the cache anyway"


def test_sums_of_a_lane_are_its_columns_for_two_of_each_eight_rows():
    assert Slab(4, 4).sums == 32 and Slab(8, 2).columns == 128
    assert Slab(4, 4, 2).sums == 64 and Slab(8, 2, 2).columns == 128


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
def test_narrow_accesses_have_narrow_slabs(dtype):
    full = 16 // dtype.itemsize
    for stack, widest in ((1, 2), (2, 1)):
        narrow = slabs(dtype, 1, stack)
        assert max(slab.pieces for slab in narrow) == widest
        assert [s.columns for s in narrow] == sorted(s.columns for s in narrow)
    assert max(slab.pieces for slab in slabs(dtype, full)) == 4


@pytest.mark.parametrize("n", [1, 36, 128, 512])
@pytest.mark.parametrize("vector", [4, 2, 1])
def test_slabs_of_sixteen_rows_are_chosen_as_those_of_eight_are(n, vector):
    for items in (10, 10**6):
        wanted = {"items": items, "processors": 132}
        eight = choose_slab(torch.float32, n, vector, **wanted)
        sixteen = choose_slab(torch.float32, n, vector, stack=2, **wanted)
        assert (eight.stack, sixteen.stack) == (1, 2)
        widest = slabs(torch.float32, vector, 2)[-1].columns
        assert sixteen.columns == min(eight.columns, widest)


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
def test_every_slab_bounds_its_registers_and_more_sums_get_more(dtype):
    full = 16 // dtype.itemsize
    blocks: dict[int, dict[int, int]] = {}
    for stack in STACKS:
        for vector in (full, full // 2, 1):
            for slab in slabs(dtype, vector, stack):
                config = bittcf_config(dtype, slab, vector, True)
                assert config["kStack"] == stack
                of_ring = blocks.setdefault(config["kStages"], {})
                assert of_ring.setdefault(slab.sums, config["kMinBlocks"]) == config["kMinBlocks"]
    for of_ring in blocks.values():
        by_sums = [of_ring[sums] for sums in sorted(of_ring)]
        assert by_sums == sorted(by_sums, reverse=True) and by_sums[-1] >= 1
        assert by_sums[0] * 2 <= 64, "warps that an SM can hold"


def test_aligned_rows_go_through_a_ring_and_others_straight_to_registers():
    for dtype in ELEMENTS:
        full = 16 // dtype.itemsize
        for slab in slabs(dtype, full):
            assert bittcf_config(dtype, slab, full, True)["kStages"] == STAGES
        for vector in (full // 2, 1):
            for slab in slabs(dtype, vector):
                assert bittcf_config(dtype, slab, vector, True)["kStages"] == 0


def test_without_the_pipeline_one_tile_is_in_the_ring():
    slab = Slab(4, 4)
    found = [bittcf_config(torch.float32, slab, 4, True, policy=p) for p in (DEFAULT, *ABLATED)]
    assert [(c["kStages"], c["kAheadA"], c["kCacheB"], c["kStreamC"]) for c in found] == [
        (STAGES, False, True, True),
        (1, False, False, False),
        (1, False, True, True),
        (1, True, True, True),  # DTC-SpMM's pipeline
    ]


def test_only_aligned_products_of_their_own_type_are_ablated():
    off = Policy(pipelined=False, cached=False)
    plain = bittcf_config(torch.float16, Slab(8, 1), 8, True, policy=off)
    assert plain["kStages"] == 1 and not plain["kCacheB"] and not plain["kStreamC"]
    for vector, out, stages in ((1, torch.float16, 0), (8, torch.float32, STAGES)):
        config = bittcf_config(torch.float16, Slab(8, 1), vector, True, out_dtype=out, policy=off)
        assert config["kStages"] == stages and config["kCacheB"] and config["kStreamC"]


def test_every_configuration_a_runner_may_ask_for_is_listed_once():
    listed = [tuple(sorted(c.items())) for c in KERNELS["spmm_bittcf"].configs()]
    assert len(set(listed)) == len(listed)
    for dtype in ELEMENTS:
        full = 16 // dtype.itemsize
        for stack, vector, weighted in itertools.product(
            STACKS, (full, full // 2, 1), (True, False)
        ):
            policies = (DEFAULT, *ABLATED) if stack == 1 else (DEFAULT,)
            for slab, policy, out in itertools.product(
                slabs(dtype, vector, stack), policies, {dtype, torch.float32}
            ):
                config = bittcf_config(dtype, slab, vector, weighted, out_dtype=out, policy=policy)
                assert tuple(sorted(config.items())) in listed
