"""Kept weights in FP8: rounding, copies and files, products of every type on a host."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional

from sparsetile.nn import (
    SparseConfig,
    SparseLinear,
    SparseSwiGLU,
    densify_,
    load_sparse_,
    sparsify_,
)
from tests.nn.test_sparsify import joining, model_of

FP8 = torch.float8_e4m3fn
TYPES = [torch.bfloat16, torch.float16, torch.float32]


def layer_of(dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> SparseLinear:
    torch.manual_seed(0)
    linear = nn.Linear(192, 256).to(dtype)
    with torch.no_grad():
        linear.weight.mul_(scale)
        linear.weight[:64] *= 2.0**-7  # blocks of another size need another power
    return SparseLinear.from_linear(linear, sparsity=0.5, method="random")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**-6, 2.0**6])
def test_weights_are_rounded_to_four_bits_in_each_block(dtype, scale):
    plain = layer_of(dtype, scale)
    eight = layer_of(dtype, scale).quantize_()
    assert eight.weight.dtype is FP8 and not eight.weight.requires_grad
    assert eight.weight_exponent.dtype is torch.int8
    exact, got = plain.weight.float(), eight.dequantize_().weight.float()
    assert got.dtype is torch.float32 and eight.weight.dtype is dtype
    # Half a unit in the last of four bits; below a block's smallest normal half of its step.
    step = exact.abs().amax((1, 2), keepdim=True) * 2.0**-13
    assert bool(((got - exact).abs() <= exact.abs() * 2.0**-4 + step).all())
    assert not torch.equal(got, exact)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("lead", [(), (1,), (3, 5)])
def test_products_are_those_of_the_rounded_weights(dtype, lead):
    layer = layer_of().quantize_()
    layer.bias.data = layer.bias.data.to(dtype)
    x = torch.randn(*lead, 192, dtype=dtype)
    expected = functional.linear(x.float(), layer.to_dense().float(), layer.bias.float())
    torch.testing.assert_close(layer(x), expected.to(dtype))


def test_gradients_reach_inputs_and_bias():
    layer = layer_of(torch.float32).quantize_()
    x = torch.randn(4, 192, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.to_dense().sum(0).expand(4, -1))
    assert layer.bias.grad is not None and layer.weight.grad is None


def test_memory_is_half():
    layer = layer_of()
    before = layer.memory()["weight"]
    assert layer.quantize_().memory()["weight"] <= 0.501 * before
    assert layer.quantize_() is layer


@pytest.mark.parametrize("way", ["copy", "pickle", "state", "assign"])
def test_copies_and_state_dicts_keep_fp8(way):
    layer, x = layer_of().quantize_(), torch.randn(3, 192).bfloat16()
    if way == "copy":
        again = copy.deepcopy(layer)
    elif way == "pickle":
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    else:
        again = SparseLinear.of_size(192, 256, 1, dtype=torch.bfloat16)
        again.load_state_dict(layer.state_dict(), assign=way == "assign")
    assert again.weight.dtype is FP8 and torch.equal(again(x), layer(x))


def test_a_state_dict_of_sixteen_bits_ends_fp8():
    eight, plain = layer_of().quantize_(), layer_of()
    eight.load_state_dict(plain.state_dict())
    assert eight.weight.dtype is torch.bfloat16 and eight.weight_exponent is None
    assert torch.equal(eight.weight, plain.weight)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_another_type_widens_for_good(dtype):
    layer = layer_of().quantize_()
    expected = layer.to_dense().float()
    wide = layer.to(dtype)
    assert wide.weight.dtype is dtype and wide.weight_exponent is None
    assert torch.equal(wide.to_dense().float(), expected.to(dtype).float())


def test_compiles_without_graph_breaks():
    layer, x = layer_of().quantize_(), torch.randn(20, 192).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_models_are_pruned_rounded_saved_and_given_back():
    torch.manual_seed(0)
    model = model_of()
    sparsify_(model, joining(sparsity=0.5, weight_dtype=FP8))
    layers = [part for part in model.modules() if isinstance(part, SparseLinear)]
    assert layers and all(layer.weight.dtype is FP8 for layer in layers)
    assert any(isinstance(part, SparseSwiGLU) for part in model.modules())
    x = torch.randn(2, 3, next(iter(layers)).in_features)
    expected = model(x)
    again = load_sparse_(model_of(), model.state_dict())
    assert torch.equal(again(x), expected)
    densify_(model)
    assert not any(isinstance(part, SparseLinear) for part in model.modules())
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_rejects_what_cannot_be_rounded():
    layer = layer_of()
    with torch.no_grad():
        layer.weight[0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"weight must be finite and at most 57344, got a kept"):
        layer.quantize_()
    for wrong in (torch.nan, 60000.0):
        layer = layer_of()
        with torch.no_grad():
            layer.weight[1, 2, 3] = wrong
        with pytest.raises(ValueError, match=r"weight must be finite and at most 57344, got a"):
            layer.quantize_()
    with pytest.raises(ValueError, match=r"weight must be of 16 bits or more, got torch\.float8"):
        layer_of().quantize_().prune_(0.9)
    with pytest.raises(
        TypeError, match="weight must be float16, bfloat16, float32 or float64, got"
    ):
        SparseLinear.from_dense(torch.ones(64, 64).to(FP8))
    with pytest.raises(
        TypeError, match="weight must be float16, bfloat16, float32 or float64, got"
    ):
        SparseLinear.from_dense(torch.ones(64, 64, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"weight_dtype must be None or torch\.float8_e4m3fn"):
        SparseConfig(weight_dtype=torch.float8_e5m2)
