"""Choices of the RS-Tile kernel's host side: slabs, groups, row tiles, configurations."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from sparsetile.core.errors import CompileError
from sparsetile.jit import ARCHITECTURES, compile_source
from sparsetile.kernels import KERNELS
from sparsetile.kernels.csr import RowTile, out_dtypes
from sparsetile.kernels.rstile import (
    ELEMENTS,
    GROUP,
    SPMM_RSTILE,
    STAGES,
    THREADS,
    WIDTHS,
    choose_slabs,
    rstile_config,
)
from tests.kernels.ptxas import drawn, said_by_ptxas

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SM_REGISTERS, SM_SHARED = 65536, 228 * 1024
every_type = pytest.mark.parametrize("dtype", ELEMENTS, ids=str)


def whole_widths(dtype: torch.dtype) -> list[int]:
    """Widths that are multiples of 16 bytes: the runner brings others there."""
    return [n for n in (*range(1, 601), 1000, 4096, 5000) if n * dtype.itemsize % 16 == 0]


def test_the_kernel_is_registered_for_every_architecture():
    assert KERNELS["spmm_rstile"] is SPMM_RSTILE
    assert all(SPMM_RSTILE.runs_on(arch) for arch in ARCHITECTURES)


@every_type
@pytest.mark.parametrize(
    "n, columns, shift",
    [(1, 32, 0), (32, 32, 0), (33, 64, 0), (64, 64, 0), (65, 128, 0), (128, 128, 0), (129, 128, 1),
     (256, 128, 1), (257, 128, 1), (1000, 128, 1)],
)  # fmt: skip
def test_a_warp_covers_as_many_columns_as_the_product_needs(dtype, n, columns, shift):
    slabs = choose_slabs(dtype, n)
    assert (slabs.columns, slabs.shift) == (columns, shift)


@every_type
def test_groups_cover_every_column_and_none_is_beside_them(dtype):
    for n in whole_widths(dtype):
        slabs = choose_slabs(dtype, n)
        assert slabs.columns in WIDTHS and slabs.group <= GROUP == 256
        assert (slabs.groups(n) - 1) * slabs.group < n <= slabs.groups(n) * slabs.group
        if slabs.groups(n) == 1:
            assert slabs.columns == WIDTHS[0] or slabs.group < 2 * n, "no slab is idle"


@every_type
def test_row_slabs_cover_their_group_and_never_reach_into_the_next(dtype):
    for n in whole_widths(dtype):
        slabs = choose_slabs(dtype, n)
        assert slabs.row_slabs * slabs.rows.slab == slabs.group, "slabs are numbered by group"
        assert 32 % slabs.rows.lanes == 0
        if slabs.rows.times > 1:
            assert n % slabs.rows.slab == 0, "a lane's vectors are all inside, or none is"


@pytest.mark.parametrize(
    "dtype, n, tile",
    [
        (F32, 8, RowTile(4, 4)), (F32, 16, RowTile(4, 4)), (F32, 20, RowTile(4, 8)),
        (F32, 32, RowTile(4, 8)), (F32, 40, RowTile(4, 16)), (F32, 64, RowTile(4, 8, 2)),
        (F32, 128, RowTile(4, 8, 4)), (F32, 192, RowTile(4, 8, 2)), (F32, 200, RowTile(4, 16)),
        (F16, 8, RowTile(8, 4)), (F16, 64, RowTile(8, 8)), (F16, 72, RowTile(8, 16)),
        (BF16, 128, RowTile(8, 8, 2)), (BF16, 192, RowTile(8, 16)), (F16, 512, RowTile(8, 8, 2)),
    ],
)  # fmt: skip
def test_few_lanes_take_several_vectors_each_if_they_fit_exactly(dtype, n, tile):
    assert choose_slabs(dtype, n).rows == tile


@every_type
def test_constants_say_what_was_chosen(dtype):
    config = rstile_config(dtype, choose_slabs(dtype, 128), True)
    vector = 16 // dtype.itemsize
    assert config == {
        "ELEMENT": ELEMENTS[dtype], "OUTPUT": ELEMENTS[dtype], "kCols": 128, "kStages": STAGES,
        "kRowVec": vector, "kRowLanes": 8, "kRowTimes": 16 // vector,
        "kRowUnroll": 4 if dtype is F32 else 8, "kThreads": THREADS, "kMinBlocks": 4,
        "kWeighted": True,
    }  # fmt: skip
    other = rstile_config(dtype, choose_slabs(dtype, 128), False, out_dtype=F32)
    assert other["OUTPUT"] == "F32" and not other["kWeighted"]


def asked_for() -> set[tuple[tuple[str, object], ...]]:
    """Every configuration that a product of 1 to 600 columns may lead the runner to."""
    found = set()
    for dtype in ELEMENTS:
        for n, weighted in itertools.product(whole_widths(dtype), (True, False)):
            slabs = choose_slabs(dtype, n)
            for out in out_dtypes(dtype):
                config = rstile_config(dtype, slabs, weighted, out_dtype=out)
                found.add(tuple(sorted(config.items())))
    return found


def test_every_configuration_a_runner_may_ask_for_is_listed_once_and_no_other():
    listed = [tuple(sorted(config.items())) for config in SPMM_RSTILE.configs()]
    assert len(set(listed)) == len(listed)
    assert set(listed) == asked_for()


def test_batches_are_whole_and_wide_sums_leave_registers_to_them():
    blocks: dict[int, int] = {}
    for config in SPMM_RSTILE.configs():
        assert config["kRowLanes"] % config["kRowUnroll"] == 0
        in_flight = config["kRowUnroll"] * config["kRowTimes"] * config["kRowVec"]
        assert in_flight * (4 if config["ELEMENT"] == "F32" else 2) <= 256, "bytes a lane"
        assert blocks.setdefault(config["kCols"], config["kMinBlocks"]) == config["kMinBlocks"]
    counts = [blocks[columns] for columns in WIDTHS]
    assert counts == sorted(counts, reverse=True), "more sums, fewer blocks"


SAMPLE = [
    (F32, 192, F32), (F32, 128, F32), (F32, 8, F32),
    (F16, 64, F16), (F16, 72, F32), (BF16, 512, BF16), (BF16, 40, F32),
]  # fmt: skip


def test_hardly_anything_spills_and_an_sm_holds_its_blocks():
    for dtype, n, out in drawn(SAMPLE, 1):
        config = rstile_config(dtype, choose_slabs(dtype, n), True, out_dtype=out)
        said = said_by_ptxas(SPMM_RSTILE.source(config))
        functions = (
            "spmm_rstile", "block_of_rows", "join_warps", "join_piece", "store_with_terms",
            "store_again", "exact_sums",
        )  # fmt: skip
        for function in functions:
            assert re.search(rf"Function properties for \w*{function}", said), "not inlined"
        found = re.findall(
            r"properties for (\w+)\D+\d+ bytes stack.*?(\d+) bytes spill s.*?(\d+) bytes spill l",
            said,
        )
        assert len(found) == len(functions)
        spills = {name: max(int(stores), int(loads)) for name, stores, loads in found}
        assert spills.pop("spmm_rstile") <= 8, "around the loop over steps"
        assert sum(spills.values()) <= 68, "once an item"
        registers = int(re.search(r"Used (\d+) registers", said).group(1))
        assert config["kMinBlocks"] * registers * THREADS <= SM_REGISTERS
        shared = int(re.search(r"(\d+) bytes smem", said).group(1))
        assert config["kMinBlocks"] * (shared + 1024) <= SM_SHARED, "with the system's 1 KB a block"


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("kCols", 40, "whole rows of lanes"),
        ("kCols", 48, "whole groups of instructions"),
        ("kThreads", 144, "a warp an item"),
        ("kRowLanes", 12, "groups must not straddle warps"),
        ("kRowUnroll", 3, "a chunk is a whole number of batches"),
    ],
)
def test_numbers_that_the_kernel_could_not_work_with_do_not_compile(name, value, said):
    config = rstile_config(F32, choose_slabs(F32, 64), True)
    with pytest.raises(CompileError, match=said):
        compile_source(SPMM_RSTILE.source({**config, name: value}), "sm_90a")
