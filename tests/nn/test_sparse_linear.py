"""SparseLinear is a masked dense layer in every respect but its cost."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.layers import block_linear
from sparsetile.nn import SparseLinear
from sparsetile.nn import linear as module
from tests.locks import at_once, slowed

# (out, in, block): whole blocks, blocks that reach past the end, one block, small blocks.
SHAPES = [(256, 192, 64), (200, 130, 64), (40, 24, 64), (256, 384, 128), (96, 80, 32), (50, 70, 16)]


def layer_of(
    out: int = 256, into: int = 192, block: int = 64, dtype: torch.dtype = torch.float32, **options
) -> SparseLinear:
    torch.manual_seed(out + into)
    options = {"sparsity": 0.6, "method": "random", **options}
    generator = torch.Generator().manual_seed(1)
    return SparseLinear.from_linear(
        nn.Linear(into, out, dtype=dtype), block=block, generator=generator, **options
    )


def dense_result(layer: SparseLinear, x: Tensor) -> Tensor:
    return functional.linear(x, layer.to_dense(), layer.bias)


@pytest.mark.parametrize("out, into, block", SHAPES)
@pytest.mark.parametrize("lead", [(), (0,), (1,), (3,), (2, 5)])
def test_results_are_those_of_the_masked_dense_layer(out, into, block, lead):
    layer = layer_of(out, into, block, dtype=torch.float64)
    x = torch.randn(*lead, into, dtype=torch.float64)
    assert layer.weight.shape[0] > 0
    assert layer(x).shape == (*lead, out)
    torch.testing.assert_close(layer(x), dense_result(layer, x))


@pytest.fixture(params=["block by block", "row by row"], autouse=True)
def _both_ways_on_a_host(request, constants):
    if request.param == "row by row":
        constants(block_linear, COPIED=0)


@pytest.mark.parametrize("out, into, block", SHAPES)
def test_gradients_are_those_of_the_masked_dense_layer(out, into, block):
    layer = layer_of(out, into, block, dtype=torch.float64)
    x = torch.randn(7, into, dtype=torch.float64, requires_grad=True)
    mine = torch.autograd.grad(layer(x).sin().sum(), [x, layer.weight, layer.bias])
    theirs = torch.autograd.grad(dense_result(layer, x).sin().sum(), [x, layer.weight, layer.bias])
    for got, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, expected)


def test_cells_past_the_end_stay_zero_in_training():
    layer = layer_of(70, 90)
    optimiser = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(3):
        layer(torch.randn(4, 90)).square().sum().backward()
        optimiser.step()
    pattern = layer.pattern
    ones = torch.ones(70, 90)
    from sparsetile.formats.block_pattern import blocks_of

    outside = blocks_of(ones, pattern.row_ptr, pattern.col_idx, 64) == 0
    assert outside.any()
    assert not layer.weight[outside].any()


def test_gradgradcheck_and_gradcheck():
    layer = layer_of(20, 40, 16, dtype=torch.float64)
    x = torch.randn(2, 40, dtype=torch.float64, requires_grad=True)
    layer._ready()

    def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.ops.sparsetile.block_linear(x, weight, bias, None, layer._flat, layer._recipe)

    inputs = (x, layer.weight, layer.bias)
    assert torch.autograd.gradcheck(product, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(product, inputs, fast_mode=True)


def test_operators_pass_opcheck():
    layer = layer_of(40, 70, 16)
    layer._ready()
    x = torch.randn(3, 70, requires_grad=True)
    torch.library.opcheck(
        torch.ops.sparsetile.block_linear,
        (x, layer.weight, layer.bias, None, layer._flat, layer._recipe),
    )
    torch.library.opcheck(
        torch.ops.sparsetile.block_outer,
        (torch.randn(3, 40), torch.randn(3, 70), layer._flat, layer._recipe),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_round_once(dtype):
    layer = layer_of().to(dtype)
    x = torch.randn(9, 192).to(dtype)
    exact = functional.linear(x.double(), layer.to_dense().double(), layer.bias.double())
    torch.testing.assert_close(layer(x), exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_to_half_and_back_moves_parameters_and_keeps_the_pattern():
    layer = layer_of()
    layer(torch.randn(2, 192))
    assert layer.half() is layer
    assert layer.weight.dtype is layer.bias.dtype is torch.float16
    assert layer.block_col_idx.dtype is torch.int32
    assert layer(torch.randn(2, 192).half()).dtype is torch.float16
    meta = copy.deepcopy(layer).to("meta")
    assert meta.block_row_ptr.device.type == "meta"
    assert layer.double()(torch.randn(2, 192).double()).dtype is torch.float64


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_have_the_same_results_and_memory_of_their_own(way):
    layer = layer_of(activation="silu")
    x = torch.randn(3, 192)
    expected = layer(x).detach()
    if way == "deepcopy":
        other = copy.deepcopy(layer)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(other(x), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_brings_its_pattern(assign):
    source, target = layer_of(sparsity=0.6), layer_of(sparsity=0.3)
    x = torch.randn(3, 192)
    target(x)
    assert source.weight.shape != target.weight.shape
    target.load_state_dict(source.state_dict(), assign=assign)
    assert torch.equal(target(x), source(x))
    assert torch.equal(target.to_dense(), source.to_dense())
    # Same number of blocks, other places.
    other = layer_of(method="magnitude", sparsity=0.6)
    target.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(target(x), other(x))


@pytest.mark.parametrize("assign", [False, True])
def test_dense_checkpoints_load_into_a_pruned_layer_and_back(assign):
    layer, dense = layer_of(), nn.Linear(192, 256)
    layer.load_state_dict(dense.state_dict(), assign=assign)
    kept = layer.to_dense() != 0
    assert torch.equal(layer.to_dense(), dense.weight * kept)
    assert torch.equal(layer.bias, dense.bias)
    dense.load_state_dict(layer.to_linear().state_dict(), assign=assign)
    x = torch.randn(2, 192)
    torch.testing.assert_close(dense(x), layer(x))


def test_a_damaged_pattern_is_refused():
    layer = layer_of()
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    state["block_col_idx"][0] = 99
    with pytest.raises(RuntimeError, match="must be the kept blocks of a 4x3 grid"):
        layer.load_state_dict(state)
    assert int(layer.block_col_idx.max()) < 3


def test_of_size_loads_on_the_meta_device_first():
    source = layer_of()
    empty = SparseLinear.of_size(192, 256, source.weight.shape[0], device="meta")
    empty.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(3, 192)
    assert torch.equal(empty(x), source(x))


@pytest.mark.parametrize("tokens", [1, 5])
def test_compiles_without_graph_breaks(tokens):
    torch._dynamo.reset()
    layer = layer_of(activation="relu")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(tokens, 192, requires_grad=True)
    assert torch.equal(compiled(x), layer(x))
    (mine,) = torch.autograd.grad(compiled(x).sum(), x)
    (theirs,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.equal(mine, theirs)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))


def test_one_compiled_layer_takes_any_number_of_tokens():
    torch._dynamo.reset()
    layer = layer_of()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (1, 2, 17, 64):
        x = torch.randn(2, tokens, 192)
        torch.testing.assert_close(compiled(x), layer(x))


def test_autocast_lowers_the_product():
    layer = layer_of()
    x = torch.randn(3, 192, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype is torch.bfloat16
    lowered = [part.bfloat16().double() for part in (x, layer.to_dense())]
    exact = functional.linear(*lowered, layer.bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-6, check_dtype=False)
    y.float().sum().backward()
    assert x.grad.dtype is torch.float32
    assert layer.weight.grad.dtype is torch.float32
    torch.testing.assert_close(y.float(), layer(x), rtol=0.02, atol=0.02)


def test_weights_that_change_in_place_are_seen():
    layer = layer_of()
    x = torch.randn(2, 192)
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(2.0)
        layer.bias.mul_(2.0)
        torch.testing.assert_close(layer(x), 2 * before)


def test_inference_mode_then_training():
    layer = layer_of()
    x = torch.randn(2, 192)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_non_finite_inputs_reach_only_blocks_that_meet_them():
    keep = torch.tensor([[True, False], [False, True]])
    layer = SparseLinear(128, 128, keep, bias=False)
    x = torch.zeros(1, 128)
    x[0, 0] = torch.inf
    y = layer(x)
    assert not y[0, :64].isfinite().any()
    assert torch.equal(y[0, 64:], torch.zeros(64))


@pytest.mark.parametrize("block", [64, 128])
def test_magnitude_keeps_the_largest_blocks(block):
    weight = torch.ones(256, 256)
    weight[128:, :128] = 3.0
    layer = SparseLinear.from_dense(weight, sparsity=0.75, block=block)
    assert torch.equal(layer.to_dense(), torch.where(weight == 3.0, weight, 0.0))


@pytest.mark.parametrize("lead", [(3,), (2, 3), (0,)])
def test_swiglu_joins_the_halves_of_the_result(lead):
    layer = layer_of(256, 192, activation="swiglu")
    x = torch.randn(*lead, 192, requires_grad=True)
    gate, up = dense_result(layer, x).chunk(2, -1)
    torch.testing.assert_close(layer(x), functional.silu(gate) * up, rtol=1e-4, atol=1e-5)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    with pytest.raises(ValueError, match='out_features must be a multiple of 128 with "swiglu"'):
        layer_of(192, 128, activation="swiglu")


def test_layers_without_blocks_give_the_bias():
    layer = SparseLinear.from_dense(torch.zeros(64, 64), torch.ones(64))
    x = torch.randn(2, 64, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, torch.ones(2, 64))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros(2, 64))


def test_ninety_percent_takes_at_most_twelve_percent_of_the_dense_bytes():
    linear = nn.Linear(1280, 2560, bias=False, dtype=torch.bfloat16)
    layer = SparseLinear.from_linear(linear, sparsity=0.9)
    layer(torch.randn(2, 1280, dtype=torch.bfloat16))  # whatever a first call makes
    held = layer.memory()
    assert held["dense copy"] == 0
    assert sum(held.values()) <= 0.12 * linear.weight.nbytes
    seen = [*layer.state_dict().values(), *layer._flat[2:]]
    assert sum(held.values()) == sum(tensor.nbytes for tensor in seen)


def test_requires_grad_and_mode_come_from_the_linear_layer():
    linear = nn.Linear(64, 64).requires_grad_(False).eval()
    layer = SparseLinear.from_linear(linear, sparsity=0.0)
    assert not layer.weight.requires_grad and not layer.bias.requires_grad
    assert not layer.training
    assert not layer.to_linear().weight.requires_grad


BAD = [
    ({"sparsity": 1.0}, ValueError, "sparsity must be at least 0 and below 1, got 1.0"),
    ({"sparsity": -0.1}, ValueError, "at least 0 and below 1"),
    ({"sparsity": 90}, ValueError, "not a percentage"),
    ({"sparsity": "much"}, TypeError, "sparsity must be a number"),
    ({"sparsity": 0.5, "block": 48}, ValueError, "block must be 16, 32 or a multiple of 64"),
    ({"sparsity": 0.5, "block": 64.0}, TypeError, "block must be a whole number"),
    ({"sparsity": 0.5, "method": "lottery"}, ValueError, "method must be"),
    ({"mask": torch.ones(3, 3)}, ValueError, r"of shape \(128, 128\) \(weights\) or \(2, 2\)"),
    ({"mask": "all"}, TypeError, "mask must be a tensor"),
    ({"sparsity": 0.5, "prefer": "luck"}, ValueError, "prefer must be"),
    ({"sparsity": 0.5, "activation": "gelu"}, ValueError, "activation must be"),
]


@pytest.mark.parametrize("options, error, text", BAD)
def test_rejects_bad_options(options, error, text):
    with pytest.raises(error, match=text):
        SparseLinear.from_linear(nn.Linear(128, 128), **options)


def test_rejects_bad_inputs():
    layer = layer_of()
    with pytest.raises(TypeError, match="x must be a torch tensor"):
        layer([1.0])
    with pytest.raises(ValueError, match=r"x must be of shape \[\.\.\., 192\], got \(2, 3\)"):
        layer(torch.randn(2, 3))
    with pytest.raises(TypeError, match=r"x must be torch.float32 like the weight"):
        layer(torch.randn(2, 192).half())
    with pytest.raises(ValueError, match="x must be on cpu"):
        layer(torch.randn(2, 192, device="meta"))
    with pytest.raises(TypeError, match=r"linear must be a torch\.nn\.Linear"):
        SparseLinear.from_linear(nn.Conv1d(1, 1, 1))
    with pytest.raises(TypeError, match=r"weight must be a dense tensor \[out_features"):
        SparseLinear.from_dense(torch.ones(3))
    with pytest.raises(ValueError, match=r"keep must be of shape \(2, 2\)"):
        SparseLinear(128, 128, torch.ones(3, 3))
    with pytest.raises(TypeError, match="keep must be a tensor"):
        SparseLinear(128, 128, None)


def test_rows_changed_in_place_are_noticed():
    layer, x = SparseLinear(128, 128, torch.tensor([[1, 0], [0, 0]])), torch.randn(3, 128)
    before = layer(x)
    layer.block_row_ptr.copy_(torch.tensor([0, 0, 1]))  # the block goes to the second row
    assert not torch.equal(layer(x), before)
    torch.testing.assert_close(layer(x), dense_result(layer, x))


def check_with_gradients(layer: SparseLinear) -> None:
    """The product reads the pattern, the gradient of x what was derived from it."""
    x = torch.randn(3, layer.in_features, requires_grad=True)
    found, expected = layer(x), dense_result(layer, x)
    torch.testing.assert_close(found, expected)
    (mine,), (theirs,) = (torch.autograd.grad(out.sum(), x) for out in (found, expected))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_pattern_in_new_memory_is_noticed(mode):
    layer, x = SparseLinear(128, 128, torch.tensor([[1, 0], [0, 0]])), torch.randn(3, 128)
    for number in range(8):
        with mode():
            torch.testing.assert_close(layer(x), dense_result(layer, x))
        check_with_gradients(layer)
        if number % 2:
            layer.block_col_idx.data = 1 - layer.block_col_idx
        else:
            layer.block_row_ptr.data = torch.tensor([0, number // 2 % 2, 1], dtype=torch.int32)


@pytest.mark.parametrize("name", ["block_row_ptr", "block_col_idx"])
def test_another_tensor_of_the_same_memory_is_noticed(name):
    """torch does not count what is written to an array of NumPy's."""
    layer = SparseLinear(128, 128, torch.tensor([[1, 0], [0, 0]]))
    memory = getattr(layer, name).numpy().copy()
    setattr(layer, name, torch.from_numpy(memory))
    check_with_gradients(layer)
    memory[:] = [0, 0, 1] if name == "block_row_ptr" else [1]
    setattr(layer, name, torch.from_numpy(memory))
    check_with_gradients(layer)


def test_the_pattern_s_memory_is_kept_while_its_address_is_compared():
    layer, x = layer_of(), torch.randn(3, 192)
    layer(x)
    parts = layer.block_row_ptr, layer.block_col_idx
    memory = [weakref.ref(part.untyped_storage()) for part in parts]
    for part in parts:
        part.data = part.clone()
    assert [ref() is None for ref in memory] == [False, False], "new memory could get the address"
    layer(x)
    assert [ref() for ref in memory] == [None, None]


def test_threads_that_call_together_prepare_the_pattern_once(monkeypatch):
    layer, x = layer_of(), torch.randn(3, 192)
    slow = slowed(monkeypatch, block_linear, "flat_pattern")
    for found in at_once(lambda: layer(x)):
        torch.testing.assert_close(found, dense_result(layer, x))
    assert slow.calls == 1


def test_columns_at_the_same_address_with_another_stride_are_noticed():
    layer = SparseLinear(256, 64, torch.tensor([[1, 1, 0, 0]]))
    columns = torch.tensor([0, 1, 3], dtype=torch.int32)
    for part in (columns[:2], columns[::2]):
        layer.block_col_idx.data = part
        check_with_gradients(layer)


def test_each_new_pattern_says_why_it_falls_back(calls_of):
    asked = calls_of(SparseLinear, "_explain_fallback")
    layer, x = layer_of(), torch.randn(3, 192)
    layer(x), layer(x)
    assert [call.given[0] for call in asked] == [layer]
    with torch.no_grad():
        layer.block_col_idx.copy_(layer.block_col_idx.clone())
    layer(x)
    assert [call.given[0] for call in asked] == [layer, layer]


def test_the_fallback_says_why_once():
    module._warned.clear()
    layer = SparseLinear(64, 64, torch.ones(1, 1), device="meta")
    layer._recipe = module.operators.layer_recipe(layer.pattern)
    with pytest.warns(
        UserWarning, match=r"masked dense weight on meta, because .* needs a GPU of sm_80"
    ):
        layer._explain_fallback()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer._explain_fallback()
