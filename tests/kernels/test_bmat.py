"""Configurations, shared memory and registers of the BMat kernel."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from sparsetile.core.errors import CompileError
from sparsetile.jit import ARCHITECTURES, compile_source
from sparsetile.jit.source import DEVICE_TREE
from sparsetile.kernels import bmat
from sparsetile.kernels.bmat import (
    ELEMENTS,
    LADDER,
    PIECE_BYTES,
    PIPES,
    SPMM_BMAT,
    STACKED_PIPES,
    Pipe,
    bmat_config,
    choose_pipe,
    row_pieces,
    slab_width,
    widest_slab,
)
from sparsetile.kernels.csr import out_dtypes
from tests.kernels.ptxas import recorded

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
BLOCK_SHARED, SM_SHARED, RESERVED = 227 * 1024, 228 * 1024, 1024
TEXT = (DEVICE_TREE / "windows/spmm_bmat.cu").read_text()
VARIANTS = (None, *LADDER)


def test_the_kernel_exists_for_hopper_alone():
    assert [arch for arch in ARCHITECTURES if SPMM_BMAT.runs_on(arch)] == ["sm_90a"]


def test_every_configuration_a_runner_may_ask_for_is_listed_once():
    asked = set()
    for dtype, weighted, variant in itertools.product(ELEMENTS, (True, False), VARIANTS):
        for n, out in itertools.product((1, 128, 256, 512, 1000, 1024), (None, *out_dtypes(dtype))):
            for stack in (1, 2) if variant in (None, "bits") else (1,):
                width = slab_width(dtype, n, widest_slab(dtype, stack))
                pipe = choose_pipe(dtype, width, variant, stack)
                asked.add(tuple(bmat_config(dtype, pipe, weighted, out_dtype=out).items()))
    listed = [tuple(config.items()) for config in SPMM_BMAT.configs()]
    assert len(listed) == len(set(listed)) and asked <= set(listed)


@pytest.mark.parametrize(
    "dtype, n, width, slabs",
    [
        (F32, 1, 1, 1), (F32, 128, 4, 1), (F32, 129, 5, 1), (F32, 512, 16, 1), (F32, 513, 9, 2),
        (F32, 768, 12, 2), (F32, 1024, 16, 2), (F16, 512, 8, 1), (BF16, 1024, 16, 1),
    ],
)  # fmt: skip
def test_slabs_are_few_and_even(dtype, n, width, slabs):
    assert slab_width(dtype, n) == width
    assert -(-row_pieces(dtype, n) // width) == slabs
    assert row_pieces(dtype, n) == -(-n * dtype.itemsize // PIECE_BYTES)
    pipe = choose_pipe(dtype, width)
    assert width <= pipe.width and pipe in PIPES.values()


def test_rejects_a_slab_wider_than_every_pipeline():
    with pytest.raises(ValueError) as caught:
        choose_pipe(F32, 17)
    assert str(caught.value) == "choose_pipe: width must be at most 16, got 17. Use several slabs."


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    "key, stack", [*((key, 1) for key in PIPES), *((key, 2) for key in STACKED_PIPES)], ids=str
)
def test_an_sm_holds_the_blocks_that_the_schedule_counts_on(key, stack, variant):
    size, width = key
    dtype = F32 if size == 4 else F16
    pipe = choose_pipe(dtype, width, variant, stack)
    assert pipe.width == width and pipe.stack == stack
    if stack > 1 and variant not in (None, "bits"):
        return  # the paper's breakdown has windows of sixteen rows
    for weighted in (True, False):
        shared = pipe.shared_bytes(dtype, weighted)
        assert shared <= BLOCK_SHARED and pipe.blocks * (shared + RESERVED) <= SM_SHARED
        rows = 8 * pipe.step_tiles * (width * PIECE_BYTES + 16)
        values = 128 * size * pipe.step_tiles * stack
        if not pipe.dense:
            values = 16 * pipe.step_tiles * stack + (values + 16 if weighted else 0)
        assert shared == pipe.stages * (rows + values + 2 * 8), "rows, A's part, two barriers"
    # Registers come by warp: 512 of 32 for each quarter of an SM.
    warps = -(-pipe.blocks * pipe.threads // 32 // 4)
    assert 16384 // (warps * 32) >= 72, "registers"


def test_the_ladder_changes_one_part_after_the_other():
    table = choose_pipe(F32, 16)
    sync, tma, bmat = (choose_pipe(F32, 16, name) for name in ("sync", "tma", "bmat"))
    assert (sync.bulk, sync.dense, sync.stages) == (False, True, 1)
    assert (tma.bulk, tma.dense, tma.stages) == (True, True, 2)
    assert (bmat.bulk, bmat.dense, bmat.stages) == (True, False, 2)
    for single in (sync, tma, bmat):
        assert (single.pieces, single.producers, single.consumers) == (1, 1, 16)
    assert table.bulk and table.dense and table.stages > 2 and table.pieces > 1
    assert not choose_pipe(F32, 16, "bits").dense


@pytest.mark.parametrize(
    "change, said",
    [
        ({"kSharedBytes": 16}, "host and device disagree on shared memory"),
        ({"kThreads": 32}, "a warp a role"),
        ({"kStepTiles": 1}, "16-bit types take two tiles an instruction"),
    ],
)
def test_numbers_that_the_kernel_could_not_work_with_do_not_compile(change, said):
    config = bmat_config(F32, choose_pipe(F32, 4), False)
    (name, by), *_ = change.items()
    config[name] += by
    with pytest.raises(CompileError, match=said):
        compile_source(SPMM_BMAT.source(config), "sm_90a")


def test_a_producer_with_more_rows_than_lanes_does_not_compile():
    pipe = Pipe(pieces=1, consumers=4, producers=1, stages=2, blocks=1, step_tiles=6)
    with pytest.raises(CompileError, match="a lane a row"):
        compile_source(SPMM_BMAT.source(bmat_config(F32, pipe, False)), "sm_90a")


@pytest.mark.parametrize("dtype, width", [(F32, 16), (F32, 8), (BF16, 16), (F16, 4)])
def test_the_compiler_spills_nothing(dtype, width):
    config = bmat_config(dtype, choose_pipe(dtype, width), True)
    for found in recorded(SPMM_BMAT.source(config)):
        assert found["spill_store_bytes"] == found["spill_load_bytes"] == 0


def test_rows_are_copied_after_a_wait_and_a_fence():
    """The copy engine must not write what consumers still read: see notes/wcsr.md."""
    body = TEXT[TEXT.index("void produce(") : TEXT.index("// ---- consumers")]
    wait, fence = body.index("wait_for_room(ring, turn)"), body.index("wg::fence_shared()")
    assert wait < fence < body.index("wg::barrier_expect(full") < body.index("wg::copy_bytes(")
    kernel = TEXT[TEXT.index("__global__") :]
    order = ["make_uint4(0, 0, 0, 0)", "barriers.init", "barrier_init_done", "fence_shared",
             "__syncthreads", "wait_previous", "p.first_items"]  # fmt: skip
    places = [kernel.index(each) for each in order]
    assert places == sorted(places)


def test_host_and_kernel_agree_on_a_piece():
    shared = (DEVICE_TREE / "windows/bmat_windows.cuh").read_text()
    assert int(re.search(r"kPieceBytes = (\d+);", shared).group(1)) == PIECE_BYTES
    assert int(re.search(r"kUnitPieces = (\d+);", shared).group(1)) == bmat.UNIT_PIECES
    assert bmat.redo_units(33, 5, 2) == 2 * 2 * 3, "parts of two windows by three pairs of pieces"


@pytest.mark.parametrize(
    "dtype, variant, stack",
    [(F32, None, 1), (F16, None, 2), (BF16, None, 1), (F32, "bits", 2), (BF16, "bits", 2)],
    ids=str,
)
def test_the_redo_of_whole_tiles_spills_nothing(dtype, variant, stack):
    """Bits of stacked windows may: three words of them tell where values begin."""
    config = bmat.redo_bmat_config(dtype, choose_pipe(dtype, 4, variant, stack), True)
    assert config in list(bmat.REDO_BMAT.configs())
    for found in recorded(bmat.REDO_BMAT.source(config)):
        allowed = bmat.REDO_BMAT.allowed_spills if variant else 0
        assert found["spill_store_bytes"] <= allowed
