"""SparseLinear's kernels on a GPU: small integers bit for bit, every way, graphs, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsetile as st
from sparsetile.core.device import capability
from sparsetile.layers.block_layer import BlockLayer
from sparsetile.layers.block_linear import block_layer, layer_recipe
from sparsetile.nn import SparseLinear


def _ampere() -> bool:
    return torch.cuda.is_available() and capability(0) >= (8, 0)


def _hopper() -> bool:
    return torch.cuda.is_available() and capability(0) == (9, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _ampere(), reason="no GPU of sm_80 or newer here"),
]
hopper = pytest.mark.skipif(not _hopper(), reason="no Hopper GPU here")

# (out, in, block, sparsity): gate-like, down-like, past the end, one block, no block in some rows.
SHAPES = [
    (1024, 512, 64, 0.8),
    (128, 2048, 64, 0.5),
    (200, 136, 64, 0.4),
    (64, 64, 64, 0.0),
    (512, 512, 128, 0.75),
    (640, 64, 64, 0.7),
]
TYPES = [torch.bfloat16, torch.float16]


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-2, 3, shape, device="cuda").to(dtype)


def layer_of(
    out: int,
    into: int,
    block: int,
    sparsity: float,
    dtype: torch.dtype,
    bias: bool = True,
    **options,
) -> SparseLinear:
    torch.manual_seed(out + into)
    weight = integers(out, into, dtype=dtype)
    added = integers(out, dtype=dtype) if bias else None
    generator = torch.Generator().manual_seed(1)
    return SparseLinear.from_dense(
        weight,
        added,
        block=block,
        sparsity=sparsity,
        method="random",
        generator=generator,
        **options,
    )


def exact(layer: SparseLinear, x: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.float()
    return functional.linear(x.float(), layer.to_dense().float(), bias)


def forced(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(BlockLayer, "method", lambda *_: way)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("out, into, block, sparsity", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_few_tokens_bit_for_bit(out, into, block, sparsity, bias, dtype, monkeypatch):
    forced(monkeypatch, "few")
    layer = layer_of(out, into, block, sparsity, dtype, bias)
    with torch.no_grad():
        for tokens in (1, 2, 7, 8, 9, 16):
            x = integers(tokens, into, dtype=dtype)
            for _ in range(2):
                assert torch.equal(layer(x).float(), exact(layer, x).to(dtype).float()), tokens


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("out, into", [(96, 160), (50, 40)])
def test_few_tokens_of_small_blocks(out, into, dtype, monkeypatch):
    forced(monkeypatch, "few")
    layer = layer_of(out, into, 32, 0.5, dtype)
    x = integers(11, into, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(layer(x).float(), exact(layer, x).to(dtype).float())


@hopper
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("out, into, block, sparsity", SHAPES)
def test_blocks_bit_for_bit_at_any_width(out, into, block, sparsity, dtype, monkeypatch):
    forced(monkeypatch, "blocks")
    layer = layer_of(out, into, block, sparsity, dtype)
    with torch.no_grad():
        for tokens in (1, 17, 128, 300, 1024):
            x = integers(tokens, into, dtype=dtype)
            for _ in range(2):
                assert torch.equal(layer(x).float(), exact(layer, x).to(dtype).float()), tokens


@pytest.mark.parametrize("dtype", [*TYPES, torch.float32], ids=str)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("out, into", [(1024, 512), (200, 136), (1032, 2048), (48, 16)])
def test_mma_bit_for_bit_at_any_width(out, into, block, dtype, monkeypatch):
    """All sizes of blocks, also past the end; rows of Y that are not stored 16 bytes at once."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    forced(monkeypatch, "mma")
    layer = layer_of(out, into, block, 0.6, dtype)
    with torch.no_grad():
        for tokens in (1, 17, 64, 65, 300, 1024):
            x = integers(tokens, into, dtype=dtype)
            wanted = exact(layer, x.double().float()).to(dtype)
            for _ in range(2):
                assert torch.equal(layer(x), wanted), tokens


@pytest.mark.parametrize("out, into", [(100, 64), (203, 136)])
def test_mma_stores_rows_of_any_length(out, into, monkeypatch):
    forced(monkeypatch, "mma")
    layer = layer_of(out, into, 32, 0.3, torch.bfloat16)
    x = integers(70, into, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(layer(x).float(), exact(layer, x).bfloat16().float())


@pytest.mark.parametrize("block", [16, 32, 64])
def test_mma_agrees_with_float64_within_rounding(block, monkeypatch):
    forced(monkeypatch, "mma")
    weight = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    layer = SparseLinear.from_dense(weight, block=block, sparsity=0.7, method="random")
    x = torch.randn(333, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        wide = layer.to_dense().double()
        wanted = x.double() @ wide.T
        error = (layer(x).double() - wanted).abs()
        # Sums are in float32, of 1024 products at most; Tensor Cores truncate them.
        bound = 2**-8 * wanted.abs() + 2**-16 * (x.double().abs() @ wide.abs().T)
        assert bool((error <= bound).all())


@pytest.mark.parametrize("block", [16, 32, 64])
def test_mma_rounds_x_to_the_nearest_tf32(block, monkeypatch):
    """Truncated, 1 + 2^-11 + 2^-12 would be 1."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    forced(monkeypatch, "mma")
    layer = SparseLinear.from_dense(torch.ones(64, 64, device="cuda"), block=block)
    x = torch.full((70, 64), 1 + 2.0**-11 + 2.0**-12, device="cuda")
    with torch.no_grad():
        assert torch.equal(layer(x), torch.full_like(x, 64 * (1 + 2.0**-10)))


@pytest.mark.parametrize("block", [16, 32, 64])
def test_blocks_without_wgmma_are_never_a_masked_dense_weight(block):
    layer = layer_of(256, 256, block, 0.5, torch.bfloat16)
    device = torch.device("cuda", 0)
    assert block_layer(layer_recipe(layer.pattern)).reasons(torch.bfloat16, device) == []


@pytest.mark.parametrize("way", ["few", "mma", pytest.param("blocks", marks=hopper), "dense"])
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_activations(way, activation, monkeypatch):
    forced(monkeypatch, way)
    layer = layer_of(256, 256, 64, 0.5, torch.bfloat16, activation=activation)
    x = torch.randn(9, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        y = exact(layer, x)
        y = (
            torch.relu(y)
            if activation == "relu"
            else functional.silu(y)
            if activation == "silu"
            else y
        )
        torch.testing.assert_close(layer(x).float(), y, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("way", ["few", "mma", pytest.param("blocks", marks=hopper), "dense"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_swiglu_is_part_of_the_product(way, bias, tokens, monkeypatch):
    if way == "few" and tokens > 16:
        pytest.skip("the kernel for few tokens takes 16")
    forced(monkeypatch, way)
    for out, sparsity in ((2048, 0.9), (256, 0.5), (128, 0.0)):
        layer = layer_of(out, 512, 64, sparsity, torch.bfloat16, bias, activation="swiglu")
        x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16) / 16
        with torch.no_grad():
            gate, up = exact(layer, x).chunk(2, -1)
            got = layer(x)
        assert got.shape == (tokens, out // 2)
        torch.testing.assert_close(got.float(), functional.silu(gate) * up, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_weights_in_fp8_are_multiplied_as_they_are(dtype, activation):
    layer = layer_of(1024, 512, 64, 0.8, dtype, activation=activation)  # whole numbers up to 2
    x = {n: integers(n, 512, dtype=dtype) for n in (1, 16, 300)}
    with torch.no_grad():
        expected = {n: layer(x[n]) for n in x}
        layer.quantize_()
        for n in x:
            got = layer(x[n])
            if activation == "none":
                assert torch.equal(got, expected[n]), n
            torch.testing.assert_close(got.float(), expected[n].float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("way", ["few", "mma", pytest.param("blocks", marks=hopper)])
def test_inputs_of_any_strides(way, monkeypatch):
    forced(monkeypatch, way)
    layer = layer_of(256, 256, 64, 0.5, torch.bfloat16)
    wide = integers(16, 600, dtype=torch.bfloat16)
    with torch.no_grad():
        for x in (
            wide[:, 3:259],
            wide[:, 0:512:2],
            wide[::2, 8:264],
            wide[:1, :256].expand(9, 256),
        ):
            assert torch.equal(layer(x).float(), exact(layer, x).bfloat16().float())


@pytest.mark.parametrize("way", ["few", "mma", pytest.param("blocks", marks=hopper)])
def test_non_finite_inputs_stay_in_the_blocks_that_meet_them(way, monkeypatch):
    forced(monkeypatch, way)
    keep = torch.tensor([[True, False], [False, True]])
    layer = SparseLinear(128, 128, keep, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(2, 128, device="cuda", dtype=torch.bfloat16)
    x[0, 0] = torch.inf
    with torch.no_grad():
        y = layer(x)
    assert not y[0, :64].isfinite().any()
    assert torch.equal(y[0, 64:], torch.zeros_like(y[0, 64:]))
    assert torch.equal(y[1], torch.zeros_like(y[1]))


@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_graphs_replay_with_new_inputs_and_new_weights(tokens):
    layer = layer_of(512, 512, 64, 0.9, torch.bfloat16, prefer="memory")
    x = integers(tokens, 512, dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(integers(tokens, 512, dtype=torch.bfloat16))
        layer.weight.mul_(2)
        graph.replay()
        assert torch.equal(y.float(), exact(layer, x).bfloat16().float())


@pytest.mark.parametrize("tokens", [3, 130])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_those_of_the_masked_dense_layer(tokens, dtype):
    layer = layer_of(320, 200, 64, 0.6, dtype)
    x = integers(tokens, 200, dtype=dtype).requires_grad_()
    grad = integers(tokens, 320, dtype=dtype)
    wanted = [x, layer.weight, layer.bias]
    mine = torch.autograd.grad(layer(x), wanted, grad)
    dense = functional.linear(x, layer.to_dense(), layer.bias)
    theirs = torch.autograd.grad(dense, wanted, grad)
    for got, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


def test_compiles_without_graph_breaks():
    torch._dynamo.reset()
    layer = layer_of(256, 256, 64, 0.8, torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for tokens in (1, 40):
        x = integers(tokens, 256, dtype=torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))


def test_the_dense_copy_follows_the_weights_and_is_made_only_where_it_pays():
    layer = layer_of(512, 512, 64, 0.1, torch.bfloat16).eval()
    x = integers(4096, 512, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(layer(x).float(), exact(layer, x).bfloat16().float())
        assert layer.memory()["dense copy"] == 512 * 512 * 2
        layer.weight.mul_(2)
        assert torch.equal(layer(x).float(), exact(layer, x).bfloat16().float())
        small = layer_of(512, 512, 64, 0.1, torch.bfloat16, prefer="memory").eval()
        small(x)
        assert small.memory()["dense copy"] == 0
        layer.train()
        assert torch.equal(layer(x).float(), exact(layer, x).bfloat16().float())
        assert layer.memory()["dense copy"] == 0


@pytest.mark.parametrize("training", [False, True])
def test_validation_after_a_fused_step_uses_the_new_weights(training):
    layer = layer_of(512, 512, 64, 0.1, torch.bfloat16).train(training)
    step = torch.optim.AdamW(layer.parameters(), lr=1.0, fused=True)
    for tokens in (4, 4096):
        x = integers(tokens, 512, dtype=torch.bfloat16)
        for _ in range(2):
            with torch.no_grad():
                dense = functional.linear(x.float(), layer.to_dense().float(), layer.bias.float())
                torch.testing.assert_close(layer(x).float(), dense, rtol=0.01, atol=0.5)
            for each in layer.parameters():
                each.grad = torch.ones_like(each)
            step.step()


def test_inference_adds_nothing_to_the_memory():
    torch.cuda.synchronize()
    linear = nn.Linear(3584, 18944, bias=False, device="cuda", dtype=torch.bfloat16)
    dense_bytes = linear.weight.nbytes
    layer = SparseLinear.from_linear(linear, sparsity=0.9, method="random")
    del linear
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        for tokens in (1, 16, 1024):
            layer(torch.zeros(tokens, 3584, device="cuda", dtype=torch.bfloat16))
    held = sum(layer.memory().values())
    assert held <= 0.12 * dense_bytes
    assert torch.cuda.memory_allocated() - before <= 0.005 * dense_bytes


def test_other_streams_and_the_way_are_reported():
    layer = layer_of(512, 512, 64, 0.9, torch.bfloat16)
    x = integers(8, 512, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        y = layer(x)
    stream.synchronize()
    assert torch.equal(y.float(), exact(layer, x).bfloat16().float())
    methods = block_layer(layer._recipe).methods(8, torch.bfloat16, x.device)
    assert "few" in methods


@hopper
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("lead", [(1,), (16,), (3, 2)])
def test_plans_of_bcsr_take_the_kernel_for_few_tokens(dtype, zero, lead):
    weight = layer_of(200, 136, 64, 0.4, dtype).to_dense().detach()
    weight[weight == 0] = 0.0
    if zero:
        weight[0, 0] = 0.0
    A = weight.to_sparse_csr()
    order = torch.randperm(200, device="cuda")
    for options in ({}, {"reorder": order}):
        plan = st.plan(A, n=16, system="bcsr", **options)
        x = integers(*lead, 136, dtype=dtype)
        bias = integers(200, dtype=torch.float32)
        got = plan.linear(x, bias=bias, relu=True)
        expected = torch.relu(functional.linear(x.float(), weight.float(), bias))
        assert torch.equal(got.float(), expected.to(dtype).float())
        x[..., 0] = torch.inf
        got, met = plan.linear(x), (weight[:, 0] != 0)
        assert not got[..., met].isfinite().any()
        assert got[..., ~met].isfinite().all()
        wide = plan.linear(integers(*lead, 136, dtype=dtype), out_dtype=torch.float32)
        assert wide.dtype is torch.float32


def test_weights_at_odd_addresses_and_replaced_ones_are_right():
    layer = layer_of(512, 512, 64, 0.5, torch.bfloat16)
    x = integers(8, 512, dtype=torch.bfloat16)
    with torch.no_grad():
        for tokens in (8, 4096):
            x = integers(tokens, 512, dtype=torch.bfloat16)
            for _ in range(3):
                room = torch.empty(layer.weight.numel() + 1, device="cuda", dtype=torch.bfloat16)
                odd = (
                    room[1:]
                    .view_as(layer.weight)
                    .copy_(integers(*layer.weight.shape, dtype=x.dtype))
                )
                layer.weight = nn.Parameter(odd, requires_grad=False)
                assert torch.equal(layer(x).float(), exact(layer, x).bfloat16().float())
