"""What linear_few.cu is launched with, seen by a kernel that keeps it: no GPU is needed."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import struct

import pytest
import torch

from sparsetile.core.device import H200, shared_bytes
from sparsetile.formats.block_pattern import BlockPattern
from sparsetile.kernels.bcsr import SPMM_BCSR, choose_block_tile
from sparsetile.kernels.linear_blocks import LINEAR_BLOCKS
from sparsetile.kernels.linear_few import LINEAR_FEW
from sparsetile.launch.interface import Epilogue
from sparsetile.layers import block_layer as layer
from sparsetile.layers.block_layer import BlockLayer, BoundLayer
from sparsetile.layers.block_layer_cost import LayerSize
from sparsetile.layers.block_linear import flat_pattern
from sparsetile.systems.bcsr import few, launch, layer_blocks, runner
from sparsetile.systems.bcsr.few import FewTokens
from sparsetile.systems.bcsr.launch import Launch
from sparsetile.systems.bcsr.layer_blocks import LayerBlocks
from tests.host import answer_on_host, h200

BF16 = torch.bfloat16


class Kept:
    """A kernel that packs its parameters, as one would, and keeps them."""

    def __init__(self, spec) -> None:
        self.spec, self.calls = spec, []

    def _pack(self, params) -> None:
        self.spec.params.pack_into(ctypes.create_string_buffer(self.spec.params.size), params)

    def launch(self, grid, threads, stream, params) -> None:
        self._pack(params)
        self.calls.append((grid, threads, dict(params)))

    def prepare(self, grid, threads, params, patch, rare=()):
        self._pack(params)
        kept = self

        class Prepared:
            def launch_with(self, stream, rarely, *values) -> None:
                params.update(zip(rare, rarely, strict=True))
                self.launch(stream, *values)

            def launch(self, stream, *values) -> None:
                patched = {
                    name: struct.unpack("=16Q", value) if isinstance(value, bytes) else value
                    for name, value in zip(patch, values, strict=True)
                }
                kept.launch(grid, threads, stream, {**params, **patched})

        return Prepared()


@pytest.fixture(autouse=True)
def _no_gpu_is_asked(monkeypatch):
    answer_on_host(monkeypatch, few, layer, stream=7)


def pattern_of(rows: int = 192, cols: int = 128) -> BlockPattern:
    keep = torch.tensor([[1, 0], [0, 0], [1, 1]]).bool()
    return BlockPattern.from_mask(keep, (rows, cols), 64)


@pytest.fixture
def method(monkeypatch) -> list[str]:
    """The method that layers choose: the last of this list."""
    chosen = ["few"]
    monkeypatch.setattr(BlockLayer, "method", lambda *_: chosen[-1])
    return chosen


@pytest.fixture
def kernel(monkeypatch, method) -> Kept:
    kept = Kept(LINEAR_FEW)

    def load(self, config, device):
        kept.config = config
        return kept

    answer_on_host(monkeypatch, few, stream=7, load=load, machine=h200)
    return kept


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_every_parameter_is_given(kernel, bias, silu):
    pattern = pattern_of()
    X, Y = torch.zeros(5, 128, dtype=BF16), torch.zeros(5, 192, dtype=BF16)
    blocks = torch.zeros(3, 64, 64, dtype=BF16)
    row_bias = torch.zeros(192) if bias else None
    lists = (pattern.row_ptr, pattern.col_idx)
    FewTokens(192, 128, 3, 64).run(lists, blocks, X, Y, Epilogue(row_bias=row_bias), silu=silu)
    ((grid, threads, params),) = kernel.calls
    assert grid == (12, 1, 1) and threads == 128
    assert set(params) == {field.name for field in LINEAR_FEW.params.fields}
    expected = {
        "b": X.data_ptr(), "c": Y.data_ptr(), "blocks": blocks.data_ptr(),
        "block_row_ptr": pattern.row_ptr.data_ptr(), "block_col_idx": pattern.col_idx.data_ptr(),
        "exponents": 0,
        "row_bias": row_bias.data_ptr() if bias else 0, "row_bias_type": 0, "spoilt": 0,
        "order": 0, "rows": 192,
        "cols": 128, "n": 5, "x_stride": 128, "c_stride": 192, "silu": silu, "pair_block_rows": 0,
        "epilogue": bias or silu, "alpha": 1.0, "beta": 0.0, "mean": False, "relu": False,
        "bias": 0, "indptr": 0,
    }  # fmt: skip
    assert params == expected


def test_a_bound_layer_launches_with_the_addresses_of_each_call(kernel):
    pattern = pattern_of()
    flat = flat_pattern(pattern)
    made = BlockLayer(LayerSize(192, 128, 3, 64))
    blocks = torch.zeros(3, 64, 64, dtype=BF16)
    bound = BoundLayer(made, tuple(flat[:3]), blocks, torch.zeros(192, dtype=BF16), "relu")
    for tokens in (1, 1, 16):
        X = torch.zeros(tokens, 128, dtype=BF16)
        Y = bound(X)
        assert Y.shape == (tokens, 192)
        _, _, params = kernel.calls[-1]
        assert (params["b"], params["c"], params["n"]) == (X.data_ptr(), Y.data_ptr(), tokens)
        assert params["relu"] and params["row_bias"]
    assert len(kernel.calls) == 3


@pytest.mark.parametrize("lead", [(), (1,), (4,), (2, 3), (2, 1, 3)])
def test_a_bound_layer_takes_tokens_of_any_dimensions_as_they_lie(kernel, lead):
    flat = flat_pattern(pattern_of())
    made = BlockLayer(LayerSize(192, 128, 3, 64))
    blocks = torch.zeros(3, 64, 64, dtype=BF16)
    bound = BoundLayer(made, tuple(flat[:3]), blocks, None, "none")
    for X in (torch.zeros(*lead, 128, dtype=BF16), torch.zeros(*lead, 256, dtype=BF16)[..., :128]):
        Y = bound(X)
        assert Y.shape == (*lead, 192) and Y.is_contiguous()
        _, _, params = kernel.calls[-1]
        assert (params["b"], params["c"]) == (X.data_ptr(), Y.data_ptr())
        assert params["n"] == torch.Size(lead).numel()
        assert params["x_stride"] == X.reshape(params["n"], 128).stride(0)
    assert len(kernel.calls) == 2


def test_tokens_at_no_one_distance_are_copied(kernel):
    flat = flat_pattern(pattern_of())
    made = BlockLayer(LayerSize(192, 128, 3, 64))
    blocks = torch.zeros(3, 64, 64, dtype=BF16)
    bound = BoundLayer(made, tuple(flat[:3]), blocks, None, "none")
    apart = torch.zeros(3, 2, 128, dtype=BF16).transpose(0, 1)
    odd = torch.zeros(2, 3, 129, dtype=BF16)[..., 1:]
    for X in (apart, odd):
        for _ in range(2):
            assert bound(X).shape == (2, 3, 192)
            _, _, params = kernel.calls[-1]
            assert params["b"] != X.data_ptr() and params["x_stride"] == 128


def test_a_bound_layer_keeps_a_bounded_number_of_launches(kernel):
    flat = flat_pattern(pattern_of())
    made = BlockLayer(LayerSize(192, 128, 3, 64))
    blocks = torch.zeros(3, 64, 64, dtype=BF16)
    bound = BoundLayer(made, tuple(flat[:3]), blocks, None, "none")
    X = torch.zeros(600, 128, dtype=BF16)
    for tokens in (*range(1, 600), 1):
        bound(X[:tokens])
        assert kernel.calls[-1][2]["n"] == tokens
        assert len(bound._launches) <= 256 and len(bound._methods) <= 256


def test_what_a_bound_layer_leaves_to_its_caller(kernel, method):
    flat = flat_pattern(pattern_of())
    made = BlockLayer(LayerSize(192, 128, 3, 64))
    blocks = torch.zeros(3, 64, 64, dtype=BF16)
    bound = BoundLayer(made, tuple(flat[:3]), blocks, None, "none")
    assert bound(torch.zeros(5, 127, dtype=BF16)) is None, "of another width"
    assert bound(torch.tensor(0.0, dtype=BF16)) is None
    assert bound(torch.zeros(0, 128, dtype=BF16)).shape == (0, 192)
    method.append("dense")
    bound = BoundLayer(made, tuple(flat[:3]), blocks, None, "none", dense=True)
    for _ in range(2):
        assert bound(torch.zeros(5, 128, dtype=BF16)) is None
    assert kernel.calls == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_a_bound_layer_reads_its_bias_where_and_as_it_lies(kernel, dtype):
    flat = flat_pattern(pattern_of())
    made = BlockLayer(LayerSize(192, 128, 3, 64))
    blocks, bias = torch.zeros(3, 64, 64, dtype=BF16), torch.zeros(192, dtype=dtype)
    BoundLayer(made, tuple(flat[:3]), blocks, bias, "none")(torch.zeros(2, 128, dtype=BF16))
    params = kernel.calls[-1][2]
    numbers = {torch.float32: 0, torch.float16: 1, BF16: 2}
    assert (params["row_bias"], params["row_bias_type"]) == (bias.data_ptr(), numbers[dtype])


def test_a_bound_layer_of_fp8_gives_the_powers_of_its_blocks(kernel):
    flat = flat_pattern(pattern_of())
    made = BlockLayer(LayerSize(192, 128, 3, 64))
    blocks = torch.zeros(3, 64, 64).to(torch.float8_e4m3fn)
    exponents = torch.zeros(3, dtype=torch.int8)
    bound = BoundLayer(made, tuple(flat[:3]), blocks, None, "none", BF16, exponents)
    Y = bound(torch.zeros(5, 128, dtype=BF16))
    _, _, params = kernel.calls[-1]
    assert kernel.config["kEight"] and Y.shape == (5, 192) and Y.dtype is BF16
    assert params["exponents"] == exponents.data_ptr()
    assert params["blocks"] == blocks.data_ptr()


@pytest.mark.parametrize("bound", [False, True])
def test_gate_and_up_are_one_launch_that_makes_half_of_the_rows(kernel, bound):
    keep = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 1]]).bool()
    flat = flat_pattern(BlockPattern.from_mask(keep, (256, 128), 64))
    made = BlockLayer(LayerSize(256, 128, 5, 64))
    blocks, X = torch.zeros(5, 64, 64, dtype=BF16), torch.zeros(3, 128, dtype=BF16)
    lists = (flat[0], flat[1], flat[2])
    if bound:
        Y = BoundLayer(made, lists, blocks, None, "swiglu")(X)
    else:
        Y = made.run(lists, blocks, X, None, None, "swiglu")
    assert Y.shape == (3, 128)
    ((grid, _, params),) = kernel.calls
    assert grid == (8, 1, 1)
    assert (params["rows"], params["pair_block_rows"], params["c_stride"]) == (128, 2, 128)
    assert made.run(lists, blocks, X[:0], None, None, "swiglu").shape == (0, 128)


@pytest.mark.parametrize("queued", [False, True])
def test_a_bound_layer_of_many_tokens_launches_the_block_kernel(monkeypatch, method, queued):
    pattern = pattern_of()
    flat = flat_pattern(pattern)
    method.append("blocks")
    kept, maps = Kept(SPMM_BCSR), []

    def encode(pointer, dtype, shape, row_bytes, box):
        maps.append((pointer, shape, row_bytes, box))
        return (pointer, *range(15))

    answer_on_host(monkeypatch, runner, encode_matrix=encode)
    made = BlockLayer(LayerSize(192, 128, 3, 64))
    tile = choose_block_tile(40, 3, 132)
    grid = tile.grid(40, 3, 132)
    monkeypatch.setattr(made.runner, "_launch_for", lambda *_: Launch(kept, tile, grid, queued))
    queue = torch.zeros(2, dtype=torch.int32)
    answer_on_host(monkeypatch, launch, scratch=lambda device, stream, *sizes: (None, queue))
    blocks = torch.zeros(3, 64, 64, dtype=BF16)
    bound = BoundLayer(made, tuple(flat[:3]), blocks, None, "none")
    X = torch.zeros(40, 128, dtype=BF16)
    Y = bound(X)
    ((_, threads, params),) = kept.calls
    assert threads == tile.threads
    assert set(params) == {field.name for field in SPMM_BCSR.params.fields}
    assert params["c"] == Y.data_ptr() and params["c_stride"] == 192 and params["n"] == 40
    assert params["queue"] == (queue.data_ptr() if queued else 0)
    assert (blocks.data_ptr(), (192, 64), 128, tile.block_box) in maps
    assert (X.data_ptr(), (40, 128), 256, tile.box(True)) in maps
    assert (Y.data_ptr(), (40, 192), 384, (128, 64)) in maps
    assert params["b"][0] == X.data_ptr() and params["stored"][0] == Y.data_ptr()
    known = len(maps)
    again = bound(X)
    assert [one for one in maps[known:] if one[0] != again.data_ptr()] == [], "kept ready"
    assert kept.calls[1][2]["stored"][0] == again.data_ptr() != Y.data_ptr()


def test_a_launch_keeps_a_bounded_number_of_maps():
    seen = []

    class Noted:
        def launch_with(self, stream, rarely, *values):
            raise AssertionError("it has no queue")

        def launch(self, stream, b, c, at):
            seen.append((struct.unpack("=16Q", b)[0], struct.unpack("=16Q", c)[0], at))

    prepared = launch.PreparedBlocks(
        Noted(), lambda at: (at, *range(15)), lambda at: (at + 1, *range(15)), None
    )
    for at in (*range(16, 160), 16):
        prepared.launch(7, at, 2 * at)
        assert seen[-1] == (at, 2 * at + 1, 2 * at)
        assert len(prepared._ready_b) <= 64 and len(prepared._ready_c) <= 64


@pytest.fixture
def block_kernel(monkeypatch, method) -> Kept:
    """The kernel of many tokens, and tensor maps that are numbers."""
    kept = Kept(SPMM_BCSR)

    def load(self, config, device, shared=0):
        assert config in list(SPMM_BCSR.configs())
        kept.config = config
        return kept

    answer_on_host(
        monkeypatch, runner, stream=7, load=load, machine=h200,
        encode_matrix=lambda *facts: (hash(facts) % 2**32, *range(15)),
    )  # fmt: skip
    method.append("blocks")
    return kept


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("odd", [False, True])
def test_gate_and_up_of_many_tokens_are_one_launch_too(block_kernel, bound, odd):
    keep = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 1]]).bool()
    flat = flat_pattern(BlockPattern.from_mask(keep, (256, 128), 64))
    made = BlockLayer(LayerSize(256, 128, 5, 64))
    blocks = torch.zeros(5, 64, 64, dtype=BF16)
    X = torch.zeros(40, 129, dtype=BF16)[:, 1:] if odd else torch.zeros(40, 128, dtype=BF16)
    lists, bias = (flat[0], flat[1], flat[2]), torch.zeros(256, dtype=BF16)
    if bound:
        Y = BoundLayer(made, lists, blocks, bias, "swiglu")(X)
    else:
        Y = made.run(lists, blocks, X, bias, None, "swiglu")
    assert Y.shape == (40, 128) and Y.is_contiguous()
    ((_, _, params),) = block_kernel.calls
    assert block_kernel.config["kPaired"] and block_kernel.config["kKMajor"]
    assert (params["rows"], params["block_rows"], params["c_stride"]) == (128, 2, 128)
    assert params["row_bias"] and params["c"] == Y.data_ptr()


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_activations_of_many_tokens_are_part_of_the_launch(block_kernel, activation):
    flat = flat_pattern(pattern_of())
    made = BlockLayer(LayerSize(192, 128, 3, 64))
    blocks, X = torch.zeros(3, 64, 64, dtype=BF16), torch.zeros(40, 128, dtype=BF16)
    lists = (flat[0], flat[1], flat[2])
    made.run(lists, blocks, X, None, None, activation)
    BoundLayer(made, lists, blocks, None, activation)(X)
    assert len(block_kernel.calls) == 2 and not block_kernel.config["kPaired"]
    for _, _, params in block_kernel.calls:
        assert params["relu"] == (activation == "relu")
        assert params["silu"] == (activation == "silu")
        assert params["epilogue"] == (activation != "none")


def test_pairs_are_block_rows_of_gate_and_up_longest_first():
    keep = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0], [1, 1, 1], [0, 0, 0]]).bool()
    pattern = BlockPattern.from_mask(keep, (384, 192), 64)
    flat = flat_pattern(pattern)
    lists = (flat[0], flat[1], flat[2])
    pairs = layer.work_of(lists, "swiglu", BF16)
    assert pairs.dtype is torch.int32 and pairs.is_contiguous()
    assert pairs.tolist() == [
        [1, 1, 2, 0], [1, 4, 3, 0],
        [0, 0, 1, 0], [0, 3, 1, 0],
        [2, 3, 0, 0], [2, 7, 0, 0],
    ]  # fmt: skip
    for activation, dtype in (("none", BF16), ("swiglu", torch.float32)):
        assert layer.work_of(lists, activation, dtype) is flat[2]


@pytest.mark.parametrize(
    "dtype, cols, unit, reason",
    [
        (torch.float32, 128, 64, "takes 16 bits, not float32"),
        (BF16, 130, 64, "takes inputs of a multiple of 8 features, not 130"),
        (BF16, 128, 16, r"takes blocks of \(32, 64\), not 16"),
        (BF16, 128, 64, "needs a GPU of sm_80 or newer"),
    ],
)
def test_reasons_against_the_kernel_for_few_tokens(dtype, cols, unit, reason):
    found = FewTokens(64, cols, 1, unit).reasons(dtype, torch.device("cpu"))
    assert any(re.fullmatch(reason, text) for text in found)


@pytest.mark.parametrize(
    "dtype, unit, reason",
    [
        (torch.float64, 64, "takes 16 bits and TF32, not float64"),
        (BF16, 48, "takes blocks of (16, 32, 64), not 48"),
        (BF16, 64, "needs a GPU of sm_80 or newer"),
    ],
)
def test_reasons_against_the_kernels_for_any_number_of_tokens(dtype, unit, reason):
    made = BlockLayer(LayerSize(64, 96, 1, unit))
    assert reason in made.reasons(dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    "dtype, cols, least", [(BF16, 100, 8), (torch.float16, 12, 8), (torch.float32, 66, 4)]
)
def test_mma_needs_inputs_that_are_copied_sixteen_bytes_at_a_time(dtype, cols, least):
    (reason,) = [
        each
        for each in LayerBlocks(64, cols, 32).reasons(dtype, torch.device("cpu"))
        if "features" in each
    ]
    assert reason == f"takes inputs of a multiple of {least} features, not {cols}"
    assert not any(
        "features" in each
        for each in LayerBlocks(64, 4 * cols, 32).reasons(dtype, torch.device("cpu"))
    )


@pytest.mark.parametrize(
    "found, unit, dtype, tokens, methods",
    [
        ((9, 0), 64, BF16, 100, ("blocks",)),
        ((9, 0), 64, BF16, 16, ("blocks", "few")),
        ((9, 0), 32, BF16, 16, ("mma", "few")),
        ((9, 0), 16, BF16, 16, ("mma",)),
        ((8, 0), 64, BF16, 100, ("mma",)),
        ((8, 9), 64, BF16, 9, ("mma", "few")),
        ((12, 0), 64, BF16, 17, ("mma",)),
        ((8, 6), 64, torch.float64, 17, ()),
        ((7, 5), 64, BF16, 17, ()),
    ],
)
def test_what_a_gpu_offers(monkeypatch, found, unit, dtype, tokens, methods):
    for module in (layer, few, layer_blocks):
        monkeypatch.setattr(module, "capability", lambda device: found)
    made = BlockLayer(LayerSize(192, 128, 3, unit))
    assert made.methods(tokens, dtype, torch.device("cuda", 0)) == methods
    assert bool(made.reasons(dtype, torch.device("cuda", 0))) == (not methods)


@pytest.mark.parametrize("found", [(8, 0), (8, 9)])
@pytest.mark.parametrize("shape", [(18944, 3584), (3584, 18944), (3584, 3584), (512, 3584)])
@pytest.mark.parametrize("tokens", [1024, 8192])
def test_without_wgmma_many_tokens_are_dense_in_blocks_of_16_alone(
    monkeypatch, found, shape, tokens
):
    """There ``mma`` reaches 0.85 of the dense product, with 90 % of the blocks dropped."""
    for module in (layer, few, layer_blocks):
        monkeypatch.setattr(module, "capability", lambda device: found)
    shared = shared_bytes(found)
    as_found = dataclasses.replace(H200, shared_block=shared - 1024, shared_processor=shared)
    monkeypatch.setattr(layer, "machine", lambda device: as_found)
    for unit, expected in ((16, "dense"), (32, "mma"), (64, "mma")):
        kept = shape[0] * shape[1] // unit**2 // 10
        made, device = BlockLayer(LayerSize(*shape, kept, unit)), torch.device("cuda", 0)
        assert made.method(tokens, BF16, device, bias=False, dense=True) == expected
        # Without a dense copy, while it trains or to save memory, blocks are multiplied.
        assert made.method(tokens, BF16, device, bias=False, dense=False) == "mma"


@pytest.fixture
def mma_kernel(monkeypatch, method) -> Kept:
    """The kernel of any number of tokens, on a GPU of sm_80."""
    kept = Kept(LINEAR_BLOCKS)

    def load(self, config, device, shared):
        assert config in list(LINEAR_BLOCKS.configs())
        kept.config, kept.shared = config, shared
        return kept

    a100 = dataclasses.replace(H200, shared_block=163 * 1024, shared_processor=164 * 1024)
    answer_on_host(monkeypatch, layer_blocks, stream=7, load=load, machine=lambda device: a100)
    method.append("mma")
    return kept


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_every_parameter_of_mma_is_given(mma_kernel, activation, bound):
    flat = flat_pattern(pattern_of())
    made = BlockLayer(LayerSize(192, 128, 3, 64))
    blocks, X = torch.zeros(3, 64, 64, dtype=BF16), torch.zeros(130, 256, dtype=BF16)[:, :128]
    lists, bias = (flat[0], flat[1], flat[2]), torch.zeros(192, dtype=BF16)
    if bound:
        Y = BoundLayer(made, lists, blocks, bias, activation)(X)
    else:
        Y = made.run(lists, blocks, X, bias, None, activation)
    ((grid, threads, params),) = mma_kernel.calls
    tokens = mma_kernel.config["kTokens"]
    assert grid == (3, -(-130 // tokens), 1) and threads == 128
    assert params == {
        "b": X.data_ptr(), "c": Y.data_ptr(), "blocks": blocks.data_ptr(),
        "work": flat[2].data_ptr(), "block_col_idx": flat[1].data_ptr(),
        "row_bias": bias.data_ptr(), "row_bias_type": 2, "x_stride": 256, "c_stride": 192,
        "indptr": 0, "bias": 0, "alpha": 1.0, "beta": 0.0, "epilogue": True, "mean": False,
        "relu": activation == "relu", "silu": activation == "silu", "rows": 192, "n": 130,
        "cols": 128,
    }  # fmt: skip
    assert set(params) == {field.name for field in LINEAR_BLOCKS.params.fields}


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_mma_joins_gate_and_up_in_16_bits(mma_kernel, monkeypatch, bound, dtype):
    keep = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 1]]).bool()
    flat = flat_pattern(BlockPattern.from_mask(keep, (256, 128), 64))
    made = BlockLayer(LayerSize(256, 128, 5, 64))
    blocks, X = torch.zeros(5, 64, 64, dtype=dtype), torch.zeros(40, 128, dtype=dtype)
    lists = (flat[0], flat[1], flat[2])
    if bound and dtype is BF16:
        Y = BoundLayer(made, lists, blocks, None, "swiglu")(X)
    else:
        Y = made.run(lists, blocks, X, None, None, "swiglu")
    assert Y.shape == (40, 128)
    ((grid, _, params),) = mma_kernel.calls
    joined = dtype is BF16
    assert mma_kernel.config["kPaired"] == joined
    assert (grid[0], params["rows"], params["c_stride"]) == (
        (2, 128, 128) if joined else (4, 256, 256)
    )


def test_mma_copies_inputs_that_it_cannot_read(mma_kernel):
    flat = flat_pattern(pattern_of())
    made = BlockLayer(LayerSize(192, 128, 3, 64))
    blocks, X = torch.zeros(3, 64, 64, dtype=BF16), torch.zeros(40, 129, dtype=BF16)[:, 1:]
    made.run((flat[0], flat[1], flat[2]), blocks, X, None)
    ((_, _, params),) = mma_kernel.calls
    assert params["b"] != X.data_ptr() and params["x_stride"] == 128


def test_float32_needs_tf32():
    made = BlockLayer(LayerSize(64, 64, 1, 64))
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            found = made.reasons(torch.float32, torch.device("cpu"))
            assert any(text.startswith("rounds float32 to TF32") for text in found) != allowed
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_inputs_that_the_kernel_reads_as_they_lie():
    wide = torch.zeros(16, 600, dtype=BF16)
    assert FewTokens.takes(wide[:, :128]) and FewTokens.takes(wide[:1, :128].expand(9, 128))
    assert not FewTokens.takes(wide[:, 1:129])
    assert not FewTokens.takes(wide[:, :256:2])
    assert not FewTokens.takes(torch.zeros(17, 128, dtype=BF16))
    assert not FewTokens.takes(torch.zeros(0, 128, dtype=BF16))
