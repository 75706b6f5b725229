"""MaskedLinear is a dense layer with a mask in every respect but what it holds."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.nn import MaskedLinear

# (out, in): whole bytes of bits, a part of one, less than one.
SHAPES = [(48, 64), (20, 36), (3, 4)]


def layer_of(out: int = 48, into: int = 64, **options) -> MaskedLinear:
    torch.manual_seed(out + into)
    return MaskedLinear.from_linear(nn.Linear(into, out), **{"sparsity": 0.6, **options})


@pytest.mark.parametrize("out, into", SHAPES)
@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
@pytest.mark.parametrize("lead", [(), (0,), (3,), (2, 5)])
def test_results_and_gradients_are_those_of_the_masked_dense_layer(out, into, pattern, lead):
    layer = layer_of(out, into, pattern=pattern).double()
    x = torch.randn(*lead, into, dtype=torch.float64, requires_grad=True)
    dense = (layer.to_dense().detach() * layer.mask()).requires_grad_()
    expected = functional.linear(x, dense, layer.bias)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.eval()(x.detach()), expected.detach())
    mine = torch.autograd.grad(layer(x).sin().sum(), [x, layer.weight, layer.bias])
    theirs = torch.autograd.grad(expected.sin().sum(), [x, dense, layer.bias])
    torch.testing.assert_close(mine[0], theirs[0])
    torch.testing.assert_close(mine[1], theirs[1][layer.mask()])
    torch.testing.assert_close(mine[2], theirs[2])


def test_gradients_can_be_differentiated_again():
    layer = layer_of(6, 8).double()
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        state = {"weight": weight, "bias": layer.bias, "mask_bits": layer.mask_bits}
        return torch.func.functional_call(layer, state, (x,))

    assert torch.autograd.gradcheck(product, (x, layer.weight))
    assert torch.autograd.gradgradcheck(product, (x, layer.weight))
    assert torch.autograd.gradcheck(product, (x, layer.weight), check_forward_ad=True)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_transforms_of_torch_func(mode):
    layer = layer_of()
    getattr(layer, mode)()
    x = torch.randn(5, 64)
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x))
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    both = {name: torch.stack([part.detach()] * 2) for name, part in parameters.items()}
    several = torch.func.vmap(torch.func.functional_call, (None, 0, None))(layer, both, (x,))
    torch.testing.assert_close(several[1], layer(x))
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    torch.testing.assert_close(
        each["weight"].sum(0), torch.func.grad(loss)(parameters, x)["weight"]
    )


def test_two_of_four_keeps_the_largest_two_of_each_four():
    weight = torch.tensor([[1.0, -2.0, 3.0, 0.5, 5.0, 5.0, 5.0, 5.0]])
    layer = MaskedLinear.from_dense(weight, sparsity=0.5, pattern="2:4")
    assert layer.mask().tolist() == [[False, True, True, False, True, True, False, False]]


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.999])
def test_the_number_of_kept_weights_is_exact_also_with_ties(sparsity):
    for weight in (torch.ones(16, 32), torch.randn(16, 32)):
        layer = MaskedLinear.from_dense(weight, sparsity=sparsity)
        assert layer.weight.numel() == max(1, round(512 * (1 - sparsity)))
        assert int(layer.mask().sum()) == layer.weight.numel()


def test_the_largest_weights_are_kept():
    weight = torch.randn(16, 32)
    layer = MaskedLinear.from_dense(weight, sparsity=0.75)
    dropped = weight[~layer.mask()].abs().max()
    assert weight[layer.mask()].abs().min() >= dropped


def test_wanda_keeps_weights_by_row_and_input():
    weight, norms = torch.randn(16, 32), torch.rand(32)
    layer = MaskedLinear.from_dense(weight, sparsity=0.75, method="wanda", norms=norms)
    assert layer.mask().sum(1).tolist() == [8] * 16
    for row, kept in zip(weight.abs() * norms, layer.mask(), strict=True):
        assert row[kept].min() >= row[~kept].max()


@pytest.mark.parametrize("prefer", ["speed", "memory"])
def test_memory_is_values_and_bits_and_copies_are_said(prefer):
    layer = layer_of(64, 128, sparsity=0.5, prefer=prefer).bfloat16().eval()
    parts = layer.memory()
    assert parts["weight"] + parts["mask"] == (0.5 + 1 / 16) * 64 * 128 * 2
    with torch.no_grad():
        layer(torch.randn(3, 128).bfloat16())
    assert layer.memory()["dense copy"] == (64 * 128 * 2 if prefer == "speed" else 0)


def test_the_copy_follows_the_weight():
    layer, x = layer_of().eval(), torch.randn(3, 64)
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        torch.testing.assert_close(layer(x), 2 * before)
        layer.train().eval()
        torch.testing.assert_close(layer(x), 2 * before)


def test_a_plan_multiplies_large_sparse_weights_on_a_cpu(constants):
    from sparsetile.nn import host_choice

    constants(host_choice, _PLAN_CELLS=1)
    layer = layer_of(sparsity=0.95).eval()
    x = torch.randn(7, 64)
    expected = functional.linear(x, layer.to_dense(), layer.bias)
    assert layer.method(7) == "plan"
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)
        assert layer.memory()["other copies"] > 0 and layer.memory()["dense copy"] == 0
        layer.weight.mul_(3)
        torch.testing.assert_close(layer(x) - layer.bias, 3 * (expected - layer.bias))
    assert layer.train().memory()["other copies"] == 0


def test_a_capture_multiplies_the_dense_copy_which_replays_rewrite(constants, monkeypatch):
    from sparsetile.nn import host_choice, masked_product

    constants(host_choice, _PLAN_CELLS=1)
    layer, x = layer_of(sparsity=0.95).eval(), torch.randn(7, 64)
    with torch.no_grad():
        layer(x)
        assert layer.memory()["other copies"] > 0 and layer.memory()["dense copy"] == 0
        monkeypatch.setattr(masked_product, "capturing", lambda device: True)
        torch.testing.assert_close(layer(x), functional.linear(x, layer.to_dense(), layer.bias))
    assert layer.memory()["dense copy"] > 0


def test_a_plan_that_is_dense_is_not_kept(constants, monkeypatch):
    from sparsetile.nn import host_choice, masked_product

    class Dense:
        system = "dense"

    constants(host_choice, _PLAN_CELLS=1)
    monkeypatch.setattr(masked_product, "plan", lambda matrix, n: Dense())
    layer, x = layer_of(sparsity=0.95).eval(), torch.randn(7, 64)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), functional.linear(x, layer.to_dense(), layer.bias))
    assert layer.method(7) == "dense"
    assert layer.memory()["other copies"] == 0 and layer.memory()["dense copy"] > 0


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state dict", "assigned"])
def test_copies_have_the_same_results(way):
    layer, x = layer_of().eval(), torch.randn(3, 64)
    with torch.no_grad():
        expected = layer(x)
        if way == "deepcopy":
            other = copy.deepcopy(layer)
        elif way == "pickle":
            other = pickle.loads(pickle.dumps(layer))
        else:
            other = MaskedLinear(64, 48, 0).eval()
            other.load_state_dict(layer.state_dict(), assign=way == "assigned")
        assert torch.equal(other(x), expected)


def test_a_dense_state_dict_fills_the_kept_weights():
    layer, dense = layer_of(), nn.Linear(64, 48)
    mask = layer.mask()
    layer.load_state_dict(dense.state_dict())
    assert torch.equal(layer.to_dense(), dense.weight * mask)
    assert torch.equal(layer.mask(), mask)


def test_dtype_and_device_follow():
    layer = layer_of().half()
    assert layer.weight.dtype is torch.float16 and layer.mask_bits.dtype is torch.uint8
    assert layer(torch.randn(2, 64).half()).dtype is torch.float16
    assert layer.to("meta").mask_bits.device.type == "meta"


def test_autocast_casts_both():
    layer, x = layer_of(), torch.randn(3, 64)
    for one in (layer, layer.eval()):
        with torch.autocast("cpu", torch.bfloat16):
            assert one(x).dtype is torch.bfloat16
            with torch.no_grad():
                assert one(x).dtype is torch.bfloat16


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_compiles_without_graph_breaks(mode):
    torch._dynamo.reset()
    layer = layer_of()
    getattr(layer, mode)()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 64, requires_grad=True)
    torch.testing.assert_close(compiled(x), layer(x))
    (mine,) = torch.autograd.grad(compiled(x).sum(), layer.weight)
    (theirs,) = torch.autograd.grad(layer(x).sum(), layer.weight)
    torch.testing.assert_close(mine, theirs)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
        layer.weight.mul_(2)
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_traces_and_inference_mode(mode):
    layer, x = layer_of(), torch.randn(5, 64)
    getattr(layer, mode)()
    expected = layer(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.trace(layer, x)(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)
    layer.requires_grad_(False)
    y = x.clone().requires_grad_()
    layer(y).sum().backward()
    torch.testing.assert_close(y.grad, layer.to_dense().sum(0).expand(5, 64))


def test_exports():
    layer, x = layer_of().eval(), torch.randn(5, 64)
    with torch.no_grad():
        program = torch.export.export(layer, (x,))
        torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: MaskedLinear(6, 2, 0, pattern="2:4"),
         "MaskedLinear: in_features must be a multiple of 4"),
        (lambda: MaskedLinear.from_linear(torch.ones(2, 2)),
         "MaskedLinear.from_linear: linear must be a torch.nn.Linear, got Tensor"),
        (lambda: MaskedLinear.from_dense(torch.ones(2, 4), mask=torch.ones(2, 2)),
         r"mask must be of shape \(2, 4\), one value per weight, got \(2, 2\)"),
        (lambda: MaskedLinear.from_dense(torch.ones(2, 4), mask=[1]),
         "mask must be a tensor, got list"),
        (lambda: MaskedLinear.from_dense(torch.ones(2, 4), pattern="2:4"),
         "weight must be 2:4: at most two of each four weights of a row kept, got 100%"),
        (lambda: MaskedLinear.from_dense(torch.ones(2, 4), sparsity=0.5, method="wanda"),
         'norms must be given with method="wanda", got none for this layer'),
        (lambda: MaskedLinear.from_dense(
            torch.ones(2, 4), sparsity=0.5, method="wanda", norms=torch.ones(3)),
         r"norms must be of shape \(4,\), one for each input, got \(3,\)"),
        (lambda: MaskedLinear.from_dense(torch.ones(2, 4), sparsity=0.5, method="wanda", norms=1),
         r"norms must be a tensor \[in_features\], got int"),
        (lambda: layer_of(pattern="2:4").prune_(0.9),
         'prune_: pattern must be "unstructured", got "2:4", which keeps two of each four'),
        (lambda: layer_of().prune_(0.9, torch.optim.SGD([torch.ones(1)], lr=1)),
         "MaskedLinear.prune_: optimizer must be one that has the layer's weight"),
        (lambda: layer_of()(torch.randn(2, 63)),
         r"MaskedLinear: x must be of shape \[..., 64\], got \(2, 63\)"),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(call, text):
    with pytest.raises((ValueError, TypeError), match=text):
        call()


@pytest.mark.parametrize(
    "change, text",
    [
        ({"mask_bits": torch.zeros(48, 8, dtype=torch.uint8)}, "1229 weights for a mask of 0"),
        ({"mask_bits": torch.zeros(48, 7, dtype=torch.uint8)}, r"torch.uint8 \(48, 7\)"),
        ({"weight": torch.zeros(2, 3)}, r"a weight of shape \(2, 3\)"),
    ],
)
def test_a_damaged_mask_is_refused(change, text):
    layer = layer_of()
    with pytest.raises(RuntimeError, match=text):
        layer.load_state_dict({**layer.state_dict(), **change})


def test_a_mask_that_is_not_two_of_four_is_refused():
    state = layer_of(sparsity=0.0).state_dict()
    with pytest.raises(RuntimeError, match="more than 2 of 4 weights kept"):
        layer_of(pattern="2:4").load_state_dict(state)
