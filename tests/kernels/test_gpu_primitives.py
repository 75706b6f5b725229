"""Each primitive of the device code by itself, on small whole numbers, exactly as NumPy has it."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsetile.jit import compile_source
from tests.kernels import primitives
from tests.kernels.primitives import BF16, F16, F32, F64, run
from tests.kernels.ptxas import drawn
from tests.kernels.strips import TILES, a_strip

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="no sm_90 GPU here")


@pytest.mark.parametrize("file", sorted({source.file for source in primitives.SOURCES}))
def test_compiles_without_spills(file):
    for source in drawn([each for each in primitives.SOURCES if each.file == file], 2):
        assert not compile_source(source, "sm_90a").resources.spills, source.label


def test_every_kernel_beside_these_tests_is_compiled():
    files = {path.name for path in primitives.DEVICE.glob("*.cu")}
    assert files == {source.file for source in primitives.SOURCES}


def whole(*shape: int, most: int = 4, seed: int = 0) -> Tensor:
    """Whole numbers from -most to most, as float64."""
    maker = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randint(-most, most + 1, shape, generator=maker).double()


def cuda(array: Tensor | np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
    return torch.as_tensor(array).to("cuda", dtype)


def bit_array(tiles: Tensor) -> np.ndarray:
    """Occupied cells of 8 x 8 tiles -> one uint64 each, bit 8r + c."""
    cells = tiles.reshape(-1, 64).numpy().astype(np.uint64)
    return (cells << np.arange(64, dtype=np.uint64)).sum(1, dtype=np.uint64)


def tiles_of(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Occupied cells and values of 8 x 8 tiles; an odd number of cells in the first."""
    maker = torch.Generator().manual_seed(seed)
    cells = torch.rand(count, 8, 8, generator=maker) < 0.4
    if int(cells[0].sum()) % 2 == 0:
        cells[0, 0, 0] = ~cells[0, 0, 0]
    return cells, whole(count, 8, 8, seed=seed) + 9.0  # no zeros


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype, weighted, stack, stored", primitives.TILE_PRODUCTS)
def test_a_tile_is_decoded_and_multiplied(dtype, weighted, stack, stored):
    tile = 1
    cells, values = tiles_of(3 * stack)
    dense = torch.where(cells, values if weighted else torch.ones_like(values), 0.0)
    dense = dense[tile * stack : (tile + 1) * stack]
    counts = cells.sum((1, 2)).reshape(3, stack).sum(1).cumsum(0)
    begin, end = int(counts[tile - 1]), int(counts[tile])
    span = 16 // dtype.itemsize
    b = whole(8, 8 * span)
    kept = torch.cat([values[cells], torch.zeros(16).double()])
    words = 2 if dtype is F32 else 1
    weights = torch.zeros(32, stack, words, dtype=torch.int32, device="cuda")
    c = torch.full((8 * stack, 8 * span), -1.0, device="cuda")
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    run(
        primitives.tile_product(dtype, weighted, stack, stored), (1, 1), 32,
        bitmaps=cuda(bit_array(cells).view(np.int64)), values=cuda(kept, dtype), b=cuda(b, dtype),
        weights=weights, c=c, count=count, tile=tile, begin=begin, end=end,
    )  # fmt: skip
    # lane = 4g + t: row g, columns 2t and 2t + 1.
    pairs = dense.reshape(stack, 8, 4, 2).permute(1, 2, 0, 3).reshape(32, stack, 2)
    expected = pairs.to(dtype).contiguous().view(torch.int32).reshape(32, stack, words)
    assert torch.equal(weights.cpu(), expected)
    assert torch.equal(c.cpu().double(), dense.reshape(8 * stack, 8) @ b)
    assert int(count) == (end - begin if weighted else 0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype, columns, stages, is_whole", primitives.COPY_RINGS)
def test_copies_bring_the_rows_of_every_tile_through_the_ring(dtype, columns, stages, is_whole):
    vector = 16 // dtype.itemsize
    n = columns if is_whole else columns - 3 * vector
    tiles, rows = 9, 50
    b = whole(rows, columns + vector)
    ids = torch.randint(0, rows, (tiles, 8), generator=torch.Generator().manual_seed(1))
    given = cuda(b, dtype)
    out = torch.full((tiles, 8, columns), -1.0, dtype=dtype, device="cuda")
    run(
        primitives.copy_ring(dtype, columns, stages, is_whole), (1, 1), 32,
        ids=cuda(ids, torch.int32), b=given, out=out, b_row_bytes=given.stride(0) * dtype.itemsize,
        tiles=tiles, n=n,
    )  # fmt: skip
    expected = b[ids][..., :columns].clone()
    expected[..., n:] = 0
    assert torch.equal(out.cpu().double(), expected)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("steps", [1, 4, 13])
@pytest.mark.parametrize("stages, bulk", primitives.BARRIER_RINGS)
def test_barriers_hand_over_every_step_of_several_turns(stages, bulk, steps):
    given = torch.arange(steps * 128, dtype=torch.int32, device="cuda").reshape(steps, 128)
    out = torch.full((2, steps, 128), -1, dtype=torch.int32, device="cuda")
    run(primitives.barrier_ring(stages, bulk), (1, 1), 96, given=given, out=out, steps=steps)
    assert torch.equal(out, given.expand(2, steps, 128))


def build_tree(pieces: int, fan_in: int) -> tuple[list[int], list[list[int]], int]:
    """Parents of slots, nodes {first child, children, own slot, 0}, slots."""
    level, parents, nodes = list(range(pieces)), [-1] * pieces, []
    while True:
        above = []
        for first in range(0, len(level), fan_in):
            children = level[first : first + fan_in]
            for child in children:
                parents[child] = len(nodes)
            is_root = len(level) <= fan_in
            nodes.append([children[0], len(children), -1 if is_root else len(parents), 0])
            if is_root:
                return parents, nodes, len(parents)
            above.append(len(parents))
            parents.append(-1)
        level = above


def joined(values: np.ndarray, fan_in: int) -> np.ndarray:
    """The root's result: children in slot order, level by level."""
    while len(values) > 1:
        values = np.stack([
            functools.reduce(lambda held, other: held * np.uint32(31) + other, group)
            for group in (values[i : i + fan_in] for i in range(0, len(values), fan_in))
        ])  # fmt: skip
    return values[0]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("pieces, fan_in", [(2, 2), (5, 2), (9, 3), (64, 8), (33, 32)])
@pytest.mark.parametrize("lanes, words", primitives.TREES)
def test_the_tree_joins_children_in_slot_order(lanes, words, pieces, fan_in):
    layers = 3
    parents, nodes, slots = build_tree(pieces, fan_in)
    leaves = np.random.default_rng(0).integers(
        0, 1000, (layers, pieces, lanes, words), dtype=np.uint32
    )
    expected = np.stack([joined(layer, fan_in) for layer in leaves])
    arrivals = torch.zeros(layers * len(nodes), dtype=torch.int32, device="cuda")
    partials = torch.empty(layers * slots * lanes * words, dtype=torch.int32, device="cuda")
    for _ in range(2):  # the second finds the counters as the first left them
        out = torch.zeros(layers, lanes, words, dtype=torch.int32, device="cuda")
        run(
            primitives.tree(lanes, words), (pieces, layers), lanes,
            leaves=cuda(leaves.view(np.int32)), out=out,
            parent_of_slot=cuda(np.array(parents, np.int32)),
            nodes=cuda(np.array(nodes, np.int32)), arrivals=arrivals, partials=partials,
            slot_count=slots, node_count=len(nodes),
        )  # fmt: skip
        assert np.array_equal(out.cpu().numpy().view(np.uint32), expected)
        assert not arrivals.any()


ALPHAS = {
    "plain": {},
    "scaled": {"alpha": -2.0},
    "mean": {"mean": 1},
    "added": {"beta": 3.0},
    "bias": {"bias": True},
    "relu": {"relu": 1},
    "all": {"alpha": 2.0, "mean": 1, "beta": -3.0, "bias": True, "relu": 1, "row_bias": True},
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("wanted", ALPHAS)
@pytest.mark.parametrize("out_dtype, vector, count, row_bias", primitives.EPILOGUES)
def test_the_epilogue_is_applied_and_stored(out_dtype, vector, count, row_bias, wanted, ordered):
    acc = F64 if out_dtype is F64 else F32
    n, rows, stride = 24 - vector, 8, 32
    order = torch.tensor([6, 2, 0, 7, 3]) if ordered else torch.arange(5)
    wants = ALPHAS[wanted]
    sums, before = 4.0 * whole(len(order), n), whole(rows, stride, seed=1)
    bias, by_row = whole(n, seed=2), whole(rows, seed=3)
    entries = torch.tensor([0, 1, 2, 4, 1, 2, 4, 0])
    indptr = torch.cat([torch.zeros(1).long(), entries.cumsum(0)])
    c = cuda(before, out_dtype)
    values = {
        "sums": cuda(sums, acc), "c": c, "c_row_stride": stride, "c_batch_stride": 0,
        "order": cuda(order, torch.int32) if ordered else 0, "rows": len(order),
        "indptr": cuda(indptr), "bias": cuda(bias, acc) if "bias" in wants else 0,
        "alpha": wants.get("alpha", 1.0), "beta": wants.get("beta", 0.0),
        "epilogue": wanted != "plain", "mean": wants.get("mean", 0), "relu": wants.get("relu", 0),
        "n": n,
    }  # fmt: skip
    if row_bias:
        values["row_bias"] = cuda(by_row, acc) if "row_bias" in wants else 0
    # Two positions more than there are: nothing may be stored for them.
    source = primitives.epilogue(out_dtype, vector, count, row_bias)
    run(source, (len(order) + 2, 1), -(-n // count), **values)
    expected = before.clone()
    result = sums * wants.get("alpha", 1.0)
    if "mean" in wants:
        result /= entries[order].clamp(min=1)[:, None]
    result += wants.get("beta", 0.0) * before[order, :n] + (bias if "bias" in wants else 0.0)
    if row_bias and "row_bias" in wants:
        result += by_row[order, None]
    expected[order, :n] = result.clamp(min=0) if "relu" in wants else result
    assert torch.equal(c.cpu().double(), expected)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype, chains", primitives.EXACTS)
@pytest.mark.parametrize("pieces", [1, 3, 8])
def test_the_redo_takes_entries_alone_and_says_what_is_not_finite(dtype, chains, pieces):
    n = pieces * 16 // dtype.itemsize
    strip = a_strip(dtype, n)
    out = torch.full((16, n), -1.0, device="cuda")
    failed = torch.full((32,), -1, dtype=torch.int32, device="cuda")
    run(
        primitives.exact(dtype, chains), (1, 1), 32,
        **{name: cuda(tensor) for name, tensor in strip.given.items()}, out=out, failed=failed,
        b_row_bytes=n * dtype.itemsize, tiles=TILES, n=n,
    )  # fmt: skip
    torch.testing.assert_close(out.cpu().double(), strip.expected, rtol=0, atol=0, equal_nan=True)
    assert failed.cpu().tolist() == strip.failed


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("bad", [0, 1 << 0, 1 << 4 | 1 << 1, (1 << 37) - 1])
def test_windows_are_stored_where_they_end_and_redone_where_not_finite(bad):
    sizes = [0, 3, 0, 0, 2, 5, *[1] * 30, 0]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    count = len(sizes)
    # Windows 0 to 4, a piece that completes window 5, 31 windows to the end. Pieces are made exact
    # before they are joined, not redone here.
    items = [[0, 0, offsets[5], -5], [5, offsets[5], offsets[6], 0],
             [6, offsets[6], offsets[-1], -(count - 6)]]  # fmt: skip
    stored = torch.full((count,), -1, dtype=torch.int32, device="cuda")
    redone = torch.zeros(count, dtype=torch.int32, device="cuda")
    run(
        primitives.windows(), (len(items), 1), 1, items=cuda(np.array(items, np.int32)),
        offsets=cuda(offsets.astype(np.int32)), stored=stored, redone=redone, bad=bad,
    )  # fmt: skip
    assert stored.tolist() == offsets[1:].tolist()
    assert redone.tolist() == [bad >> window & 1 if window != 5 else 0 for window in range(count)]


def tf32(bits: np.ndarray, ties_to_even: bool) -> np.ndarray:
    """Round float32 bits to the 11 bits of TF32; infinities and NaN stay what they are."""
    half = 0xFFF + (bits >> np.uint32(13) & np.uint32(1)) if ties_to_even else 0x1000
    rounded = bits + np.uint32(half) if np.isscalar(half) else bits + half.astype(np.uint32)
    special = (bits & np.uint32(0x7F800000)) == 0x7F800000
    return np.where(special, bits, rounded) & np.uint32(0xFFFFE000)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("out_dtype", [F16, BF16])
def test_rounding_to_tf32_transposing_four_lanes_and_pairs_of_16_bits(out_dtype):
    random = np.random.default_rng(0).uniform(-1e9, 1e9, 256 - 32).astype(np.float32)
    cases = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 4097.0, 4098.0, 4099.0, 4102.0, -4098.0]
    cases += [np.float32(1 + i * 2.0**-13) for i in range(32 - len(cases))]
    given = np.concatenate([np.array(cases, np.float32), random])
    rounded, pairs = (torch.zeros(256, dtype=torch.int32, device="cuda") for _ in range(2))
    transposed = torch.zeros(256, 4, dtype=torch.int32, device="cuda")
    run(
        primitives.registers(out_dtype), (8, 1), 32, given=cuda(given.view(np.int32)),
        rounded=rounded, transposed=transposed, pairs=pairs,
    )  # fmt: skip
    found = rounded.cpu().numpy().view(np.uint32) & np.uint32(0xFFFFE000)
    numbers = ~np.isnan(given)
    even = torch.cuda.get_device_capability() >= (9, 0)
    assert np.array_equal(found[numbers], tf32(given.view(np.uint32), even)[numbers])
    assert np.isnan(found[~numbers].view(np.float32)).all()
    before = torch.arange(1024).reshape(64, 4, 4)  # four lanes of four words
    assert torch.equal(transposed.cpu().long().reshape(64, 4, 4), before.mT)
    numbers16 = torch.arange(256).double()
    both = torch.stack([numbers16, -numbers16], 1).to(out_dtype)
    assert torch.equal(pairs.cpu(), both.view(torch.int32).flatten())


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype, k_major", primitives.WGMMA_SHARED)
def test_wgmma_multiplies_a_tile_in_the_swizzle(dtype, k_major):
    depth = 64 if dtype.itemsize <= 2 else 32
    a, b = whole(64, depth, most=2), whole(depth, 128, most=2)
    c = torch.zeros(64, 128, device="cuda")
    given = (b.mT if k_major else b).contiguous()
    run(
        primitives.wgmma_shared(dtype, k_major), (1, 1), 128,
        a=cuda(a, dtype), b=cuda(given, dtype), c=c,
    )  # fmt: skip
    assert torch.equal(c.cpu().double(), a @ b)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype, columns", primitives.WGMMA_REGISTERS)
def test_wgmma_adds_a_tile_in_registers(dtype, columns):
    depth = 8 if dtype is F32 else 16
    a, b = whole(64, depth), whole(depth, columns)
    c = torch.zeros(64, columns, device="cuda")
    run(
        primitives.wgmma_registers(dtype, columns), (1, 1), 128,
        a=cuda(a, dtype), b=cuda(b, dtype), c=c,
    )  # fmt: skip
    assert torch.equal(c.cpu().double(), a @ b + 1.0)
