"""Configurations, shared memory and registers of the window kernels."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from sparsetile.core.errors import CompileError
from sparsetile.jit import ARCHITECTURES, compile_source
from sparsetile.jit.source import DEVICE_TREE
from sparsetile.kernels import wcsr
from sparsetile.kernels.csr import out_dtypes
from sparsetile.kernels.repair import REDO_BLOCKS, REDO_THREADS
from sparsetile.kernels.wcsr import (
    ELEMENTS,
    JOIN_PARTS,
    JOIN_WCSR,
    REDO_WCSR,
    REDO_WINDOWS,
    SPMM_WCSR,
    JoinTile,
    WindowTile,
    choose_join_tile,
    choose_window_tile,
    join_config,
    redo_wcsr_config,
    redo_windows_config,
    redo_windows_pays,
    wcsr_config,
    window_tiles,
)
from sparsetile.systems.wcsr.system import MARGIN
from tests.kernels.ptxas import drawn, recorded, said_by_ptxas

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NARROW, WIDE = WindowTile(64, 128), WindowTile(64, 256)
BLOCK_SHARED = 227 * 1024  # what sm_90 gives a block
SM_REGISTERS = 64 * 1024
WINDOWS = DEVICE_TREE / "windows"
TEXT = "".join((WINDOWS / name).read_text() for name in ("wcsr.cuh", "spmm_wcsr.cu"))
JOIN_TEXT = (WINDOWS / "join_wcsr.cu").read_text()
REDO_TEXT = (WINDOWS / "redo_wcsr.cu").read_text()
WINDOWS_TEXT = (WINDOWS / "redo_windows.cu").read_text()


@pytest.mark.parametrize(
    "spec", [SPMM_WCSR, JOIN_WCSR, REDO_WCSR, REDO_WINDOWS], ids=lambda spec: spec.name
)
def test_the_kernels_exist_for_hopper_alone(spec):
    assert [arch for arch in ARCHITECTURES if spec.runs_on(arch)] == ["sm_90a"]


def test_every_configuration_a_runner_may_ask_for_is_listed_once():
    products, joins, redos, whole = set(), set(), set(), set()
    for dtype, n, weighted in itertools.product(ELEMENTS, (1, 128, 129, 4096), (True, False)):
        tile = choose_window_tile(64, n)
        for out in (None, *out_dtypes(dtype)):
            products.add(tuple(wcsr_config(dtype, tile, weighted, out_dtype=out).items()))
            redos.add(tuple(redo_wcsr_config(dtype, tile, weighted, out_dtype=out).items()))
            if redo_windows_pays(dtype, tile, 100.0, 100):
                config = redo_windows_config(dtype, tile, weighted, out_dtype=out)
                whole.add(tuple(config.items()))
            for slots in (2, 4, 5, 132):
                joined = choose_join_tile(tile, 2 if slots == 4 else 1, slots)
                config = join_config(dtype, joined, weighted, out_dtype=out)
                joins.add(tuple(config.items()))
    for spec, asked, count in (
        (SPMM_WCSR, products, 20), (JOIN_WCSR, joins, 40), (REDO_WCSR, redos, 20),
        (REDO_WINDOWS, whole, 10),
    ):  # fmt: skip
        listed = [tuple(config.items()) for config in spec.configs()]
        assert len(listed) == len(asked) == count and set(listed) == asked


def test_windows_in_many_pieces_have_several_warps_for_each_strip():
    few, many = choose_join_tile(WIDE, 10, 59), choose_join_tile(WIDE, 10, 60)
    assert (few.threads, few.blocks) == (128, 8)
    assert (many.threads, many.blocks) == (512, 32)


@pytest.mark.parametrize(
    "n, tile", [(1, NARROW), (128, NARROW), (129, WIDE), (256, WIDE), (4096, WIDE)]
)
def test_the_tile_is_wide_if_columns_need_it(n, tile):
    assert choose_window_tile(64, n) == tile
    assert (tile.slabs(n) - 1) * tile.columns < n <= tile.slabs(n) * tile.columns
    assert window_tiles() == [NARROW, WIDE]


@pytest.mark.parametrize("dtype, tiles", [(F32, 4), (F16, 8), (BF16, 8)])
@pytest.mark.parametrize("tile", [NARROW, WIDE], ids=["narrow", "wide"])
def test_a_step_is_what_the_loads_of_its_producers_bring(tile, dtype, tiles):
    assert tile.step_tiles(dtype) == tiles
    loads = wcsr.LOADS[tile.columns]
    assert tiles * 8 * tile.columns * dtype.itemsize == loads * 16 * wcsr.PRODUCERS
    # Of a half step, in the kernel; float32 takes four rows at a time.
    half = tiles * 8 * tile.columns * dtype.itemsize // 32 // wcsr.PRODUCERS
    assert half * 2 == loads and half % 4 == 0
    chunks = 2 * tiles
    assert dtype is not F32 or wcsr.PRODUCERS // 8 % chunks == 0, "whole rounds of chunks"


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "pattern"])
@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize("tile", [NARROW, WIDE], ids=["narrow", "wide"])
def test_shared_memory_holds_both_rings_their_barriers_and_the_swizzles_alignment(
    tile, dtype, weighted
):
    tiles, size = tile.step_tiles(dtype), dtype.itemsize
    ids, bits = 4 * 8 * tiles, 64 * tiles
    offsets, values = 4 * 4 * tiles + 16, 8 * tiles * 64 * size + 16
    a_step = ids + bits + (offsets + values if weighted else 0)
    b_step = 8 * tiles * tile.columns * size
    assert a_step % 16 == 0 and b_step % 1024 == 0, "copies and atoms begin where they may"
    expected = 4 * b_step + 10 * a_step + 2 * 8 * (4 + 10) + 1024
    assert tile.shared_bytes(dtype, weighted) == expected <= BLOCK_SHARED
    config = wcsr_config(dtype, tile, weighted)
    assert (config["kStages"], config["kTileStages"]) == (4, 10)
    assert config["kSharedBytes"] == expected


def test_warpgroups_ask_for_no_more_registers_than_the_block_has():
    """A block of 384 threads starts with 168 each; setmaxnreg takes multiples of eight."""
    consumer, producer = wcsr.REGISTERS
    for tile in window_tiles():
        assert tile.threads == 384
        at_start = SM_REGISTERS // tile.threads // 8 * 8
        assert at_start == 168
        assert 128 * consumer + 256 * producer <= tile.threads * at_start
        assert producer <= at_start <= consumer, "one gives, one takes"
        assert tile.sums + 32 < consumer, "sums, operands of two steps, addresses"
    assert all(24 <= count <= 256 and count % 8 == 0 for count in wcsr.REGISTERS)


def test_the_host_names_the_kernels_own_numbers():
    spelt = dict(re.findall(r"constexpr int (\w+) = (\d+);", TEXT))
    assert int(spelt["kHeight"]) in wcsr.HEIGHTS
    assert int(spelt["kProducers"]) == wcsr.PRODUCERS and int(spelt["kGroups"]) == wcsr.GROUPS
    copiers = wcsr.GROUPS * wcsr.PRODUCERS // 32
    assert copiers < wcsr.TILE_STAGES, "a warp copies into a stage that earlier steps have left"
    assert "kGroups = kCols / 32;" in JOIN_TEXT and wcsr.JOIN_COLUMNS == 32


@pytest.mark.parametrize(
    "text", [JOIN_TEXT, REDO_TEXT, WINDOWS_TEXT], ids=["join", "redo", "windows"]
)
def test_sums_are_not_read_before_the_kernel_that_left_them_has_ended(text):
    """Launches overlap: nothing of the product's is touched until it is over."""
    body = text[text.index("__global__") :]
    first = body[body.index("{") + 1 :].split(";")[0].strip()
    assert first == "ptx::wait_previous()"


@pytest.mark.parametrize(
    "change, said",
    [
        ({"kSharedBytes": 16}, "host and device disagree on shared memory"),
        ({"kConsumerRegisters": 8}, "warpgroups would wait for registers"),
        ({"kThreads": 128}, "three warpgroups"),
        ({"kTileStages": -2}, "a copy waits for earlier steps alone"),
    ],
)
def test_numbers_that_the_kernel_could_not_work_with_do_not_compile(change, said):
    config = wcsr_config(F32, NARROW, False)
    (name, by), *_ = change.items()
    config[name] += by
    with pytest.raises(CompileError, match=said):
        compile_source(SPMM_WCSR.source(config), "sm_90a")


def test_a_join_of_other_threads_than_a_warp_a_strip_does_not_compile():
    config = join_config(F32, JoinTile(NARROW, 1), False)
    config["kThreads"] *= 2
    with pytest.raises(CompileError, match="a warp a strip"):
        compile_source(JOIN_WCSR.source(config), "sm_90a")


@pytest.mark.parametrize("parts", [1, JOIN_PARTS])
@pytest.mark.parametrize("dtype, tile, out", [(F32, WIDE, F32), (BF16, NARROW, F32)])
def test_the_join_keeps_all_but_its_place_in_registers_and_fills_an_sm(dtype, tile, out, parts):
    config = join_config(dtype, JoinTile(tile, parts), True, out_dtype=out)
    for found in recorded(JOIN_WCSR.source(config)):
        assert found["spill_store_bytes"] <= 8
        assert SM_REGISTERS // (found["registers"] * 32) >= 32, "warps"


def test_the_compiler_neither_spills_nor_adds_waits_between_products():
    """ptxas says so where it cannot leave products under way, and then waits for each."""
    kinds = [(F32, WIDE, F32), (BF16, WIDE, F32), (F16, NARROW, F16)]
    sources = [SPMM_WCSR.source(wcsr_config(d, t, True, out_dtype=out)) for d, t, out in kinds]
    for source in sources:
        for found in recorded(source):
            assert found["registers"] == 168, source.label
            assert found["spill_store_bytes"] == found["spill_load_bytes"] == 0, source.label
    for source in drawn(sources, 1):
        assert "wgmma" not in said_by_ptxas(source), source.label


@pytest.mark.parametrize("dtype, weighted", [(F32, True), (F16, True), (BF16, False)], ids=str)
def test_the_redo_spills_outside_its_loop_alone_and_fills_an_sm(dtype, weighted):
    for found in recorded(REDO_WCSR.source(redo_wcsr_config(dtype, WIDE, weighted))):
        assert found["spill_store_bytes"] <= REDO_WCSR.allowed_spills
        assert found["registers"] * REDO_THREADS * REDO_BLOCKS <= SM_REGISTERS


@pytest.mark.parametrize("dtype, weighted", [(F32, True), (F16, True), (BF16, False)], ids=str)
def test_the_redo_of_whole_windows_spills_next_to_nothing(dtype, weighted):
    for found in recorded(REDO_WINDOWS.source(redo_windows_config(dtype, WIDE, weighted))):
        assert found["spill_store_bytes"] <= REDO_WINDOWS.allowed_spills
        assert found["registers"] * wcsr.WINDOW_REDO_THREADS <= SM_REGISTERS
        assert found["static_shared_bytes"] <= 48 << 10, "without asking for more"


def test_steps_of_whole_windows_stay_inside_the_margin_of_tiles():
    """Words of the step after the next are loaded with the last one."""
    step = wcsr.WINDOW_REDO_THREADS // 32 // 2 // 4
    assert 3 * step <= MARGIN
    with pytest.raises(CompileError, match="flags are one word"):
        config = redo_windows_config(F32, NARROW, True)
        compile_source(REDO_WINDOWS.source(config), "sm_90a")


@pytest.mark.parametrize("dtype, tile, units", [(F32, NARROW, 8), (F32, WIDE, 16), (F16, WIDE, 8)])
def test_a_unit_is_a_strip_of_256_bytes_of_columns(dtype, tile, units):
    assert tile.units(64, dtype) == units and tile.units(65, dtype) == 2 * units
    assert "kUnitCols = 256 / kSize" in TEXT and wcsr.UNIT_BYTES == 256
