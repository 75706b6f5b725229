"""Names, ties, hooks and modes of a model survive sparsify_ and densify_."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.nn import (
    SparseConfig,
    SparseLinear,
    SparseSwiGLU,
    densify_,
    load_sparse_,
    sparsify_,
)
from tests.nn.test_sparsify import Block, joining, model_of

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
HALF = SparseConfig(sparsity=0.5, block=16)


def linear(**options) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 64, **options)


# -- names and ties -----------------------------------------------------------------------------


def test_a_module_under_two_names_stays_one():
    shared = linear()
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU()), "c": linear()})
    model["b"].again = shared
    sparsify_(model, HALF)
    assert isinstance(model["a"], SparseLinear)
    assert model["a"] is model["b"][0] is model["b"].again is not model["c"]
    densify_(model)
    assert type(model["a"]) is nn.Linear
    assert model["a"] is model["b"][0] is model["b"].again is not model["c"]


def test_a_joined_layer_under_two_names_stays_one():
    block = Block()
    model = nn.ModuleList([block.mlp, block])
    sparsify_(model, joining(sparsity=0.5))
    assert isinstance(model[0], SparseSwiGLU) and model[0] is model[1].mlp
    other = load_sparse_(nn.ModuleList([(again := Block()).mlp, again]), model.state_dict())
    assert isinstance(other[0], SparseSwiGLU) and other[0] is other[1].mlp
    torch.testing.assert_close(other[1](X), model[1](X))
    densify_(model)
    assert model[0] is model[1].mlp is block.mlp


def test_a_part_that_another_module_has_is_not_joined():
    model = model_of()
    model[0].alias = model[0].mlp.up_proj
    sparsify_(model, joining(sparsity=0.5))
    assert isinstance(model[0].mlp.up_proj, SparseLinear)
    assert model[0].alias is model[0].mlp.up_proj
    assert isinstance(model[1].mlp, SparseSwiGLU)


def test_the_filter_sees_every_name_of_a_module():
    shared = linear()
    model = nn.ModuleDict({"a": shared, "b": shared, "c": linear()})
    sparsify_(model, HALF, lambda module, name: name == "b")
    assert model["a"] is model["b"] and isinstance(model["b"], SparseLinear)
    assert type(model["c"]) is nn.Linear


def test_weights_that_share_memory_are_tied():
    model = nn.Sequential(linear(), linear(), linear())
    model[1].weight = nn.Parameter(model[0].weight.data)
    sparsify_(model, HALF)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear, SparseLinear]
    assert model.sparsify_report.skipped["0"] == "it shares its weight with 1"


def test_biases_stay_the_parameters_they_were():
    model = nn.Sequential(linear(), linear())
    bias = model[1].bias = model[0].bias
    sparsify_(model, HALF)
    assert model[0].bias is model[1].bias is bias
    densify_(model)
    assert model[0].bias is model[1].bias is bias


def test_tied_sparse_weights_stay_tied_in_densify():
    model = sparsify_(nn.Sequential(linear(), nn.Tanh(), linear()), HALF)
    model[2].load_state_dict(model[0].state_dict())
    model[2].weight = model[0].weight
    expected = model(X)
    densify_(model)
    assert type(model[0]) is type(model[2]) is nn.Linear and model[0] is not model[2]
    assert model[0].weight is model[2].weight
    torch.testing.assert_close(model(X), expected)


def test_densify_refuses_ties_that_it_cannot_keep():
    text = r"densify_: model must be one whose tied sparse weights can stay tied, got 2, whose weig"
    other_blocks = sparsify_(nn.Sequential(linear(), nn.Tanh(), linear()), HALF)
    mask = other_blocks[0].pattern.mask()
    other_blocks[2] = SparseLinear.from_linear(linear(), mask=mask.flip(0), block=16)
    other_blocks[2].weight = other_blocks[0].weight
    in_a_list = sparsify_(nn.Sequential(nn.Tanh(), nn.Tanh(), linear()), HALF)
    in_a_list.append(nn.ParameterList([in_a_list[2].weight]))
    for model in (other_blocks, in_a_list):
        before = list(model)
        with pytest.raises(ValueError, match=text):
            densify_(model)
        assert list(model) == before


# -- hooks --------------------------------------------------------------------------------------

REGISTER = {
    "forward": lambda m, seen: m.register_forward_hook(lambda *_: seen.append("forward")),
    "forward, kwargs": lambda m, seen: m.register_forward_hook(
        lambda module, args, kwargs, out: seen.append("forward"), with_kwargs=True
    ),
    "pre": lambda m, seen: m.register_forward_pre_hook(lambda *_: seen.append("pre")),
    "full backward": lambda m, seen: m.register_full_backward_hook(
        lambda *_: seen.append("backward")
    ),
    "full backward pre": lambda m, seen: m.register_full_backward_pre_hook(
        lambda *_: seen.append("backward")
    ),
}


@pytest.mark.parametrize("kind", REGISTER)
def test_hooks_of_layers_stay_and_their_handles_remove_them(kind):
    seen: list[str] = []
    model = nn.Sequential(linear())
    handle = REGISTER[kind](model[0], seen)
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    for change in (lambda: sparsify_(model, HALF), lambda: densify_(model)):
        change()
        seen.clear()
        model(x).sum().backward()
        assert len(seen) == 1
    handle.remove()
    seen.clear()
    model(x).sum().backward()
    assert not seen


def test_a_hook_gets_the_sparse_layer():
    model, seen = nn.Sequential(linear()), []
    model[0].register_forward_hook(lambda module, *_: seen.append(module))
    sparsify_(model, HALF)(X)
    assert seen == [model[0]]


def test_hooks_of_joined_layers_go_back_to_the_original():
    model, seen = sparsify_(model_of(), joining(sparsity=0.5)), []
    handle = model[0].mlp.register_forward_hook(lambda module, *_: seen.append(type(module)))
    model(X)
    densify_(model)(X)
    assert [kind.__name__ for kind in seen] == ["SparseSwiGLU", "MLP"]
    handle.remove()
    model(X)
    assert len(seen) == 2


def test_hooks_on_down_stay_in_a_joined_layer():
    model, seen = model_of(), []
    model[0].mlp.down_proj.register_forward_hook(lambda *_: seen.append(0))
    sparsify_(model, joining(sparsity=0.5))(X)
    assert isinstance(model[0].mlp, SparseSwiGLU) and seen == [0]


def test_densify_refuses_hooks_on_what_disappears():
    text = r"densify_: model must be one without hooks on what disappears, got hooks of 0\.mlp"
    for attach in (
        lambda layer: layer.register_forward_hook(lambda *_: None),
        lambda layer: layer.weight.register_hook(lambda grad: None),
        lambda layer: layer.bias.register_post_accumulate_grad_hook(lambda bias: None),
    ):
        model = sparsify_(model_of(bias=True), joining(sparsity=0.5))
        attach(model[0].mlp.gate_up_proj)
        with pytest.raises(ValueError, match=text):
            densify_(model)
        assert isinstance(model[0].mlp, SparseSwiGLU) and isinstance(model[1].q_proj, SparseLinear)
    model = sparsify_(nn.Sequential(linear()), HALF)
    model[0].weight.register_hook(lambda grad: None)
    with pytest.raises(ValueError, match="got hooks of 0"):
        densify_(model)


# -- frozen parameters and modes ----------------------------------------------------------------


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_stay_frozen(frozen):
    def make() -> nn.Module:
        model = model_of(bias=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith(frozen))
        return model

    def check(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad != name.endswith(frozen), name

    model = sparsify_(make(), joining(sparsity=0.5))
    check(model)
    for assign in (True, False):
        loaded = load_sparse_(make(), model.state_dict(), assign=assign)
        check(loaded)
        check(densify_(loaded))
    check(densify_(model))


def test_a_frozen_gate_is_not_joined_with_an_up_that_trains():
    model = model_of()
    model[0].mlp.gate_proj.requires_grad_(False)
    sparsify_(model, joining(sparsity=0.5))
    assert not model[0].mlp.gate_proj.weight.requires_grad
    assert model[0].mlp.up_proj.weight.requires_grad


def test_modes_of_modules_stay():
    model = model_of().train()
    model[0].mlp.eval()
    sparsify_(model, joining(sparsity=0.5))
    assert not model[0].mlp.training and not model[0].mlp.gate_up_proj.training
    assert model[1].mlp.training
    densify_(model)
    assert not model[0].mlp.training and not model[0].mlp.up_proj.training and model[1].training


# -- activations --------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "silu", "swiglu"])
def test_densify_keeps_activations(activation):
    torch.manual_seed(0)
    layer = SparseLinear.from_linear(nn.Linear(64, 128), sparsity=0.5, activation=activation)
    model = nn.Sequential(layer.eval())
    expected, seen = model(X), []
    layer.register_forward_hook(lambda module, x, out: seen.append(out))
    densify_(model)
    assert type(model[0][0]) is nn.Linear
    assert not model[0].training and not model[0][0].training
    torch.testing.assert_close(model(X), expected)
    torch.testing.assert_close(seen[0], expected)
    other = pickle.loads(pickle.dumps(copy.deepcopy(nn.Sequential(*model[0]))))
    torch.testing.assert_close(other(X), expected)


# -- all or nothing -----------------------------------------------------------------------------


def test_a_failed_call_leaves_the_model_as_it_was():
    model = model_of()
    with torch.no_grad():
        model[1].mlp.down_proj.weight[0, 0] = torch.inf  # the last layer: FP8 cannot hold it
    parts, seen = list(model.modules()), []
    model[0].q_proj.register_forward_hook(lambda *_: seen.append(0))
    tensors = dict(model.named_parameters())
    with pytest.raises(ValueError, match="weight must be finite and at most 57344"):
        sparsify_(model, joining(sparsity=0.0, weight_dtype=torch.float8_e4m3fn))
    assert [*model.modules()] == parts
    assert {name: id(part) for name, part in model.named_parameters()} == {
        name: id(part) for name, part in tensors.items()
    }
    assert not hasattr(model, "sparsify_report")
    model(X)
    assert seen == [0]

    def broken(name: str, layer: nn.Module) -> Tensor:
        return torch.ones(3, 3) if name == "1.mlp.down_proj" else torch.ones(layer.weight.shape)

    with pytest.raises(ValueError, match=r"mask of layer 1\.mlp\.down_proj must be of shape"):
        sparsify_(model, joining(method="mask", mask=broken))
    assert [*model.modules()] == parts


def test_a_failed_densify_leaves_the_model_as_it_was():
    model = sparsify_(model_of(), joining(sparsity=0.5, weight_dtype=torch.float8_e4m3fn))
    model.append(SparseSwiGLU(*(SparseLinear.from_linear(linear()) for _ in "ab"), linear()))
    parts = list(model.modules())
    with pytest.raises(ValueError, match="got 2 made by hand"):
        densify_(model)
    assert [*model.modules()] == parts
    assert model[0].mlp.gate_up_proj.weight.dtype is torch.float8_e4m3fn


def test_splitting_leaves_a_joined_layer_as_it_was():
    made = sparsify_(model_of(), joining(sparsity=0.5, weight_dtype=torch.float8_e4m3fn))[0].mlp
    gate, up = made.split()
    assert made.gate_up_proj.weight.dtype is torch.float8_e4m3fn
    halves = [functional.linear(X, half.to_dense()) for half in (gate, up)]
    expected = made.down_proj(functional.silu(halves[0]) * halves[1])
    torch.testing.assert_close(made(X), expected, rtol=1e-4, atol=1e-5)


# -- torch's own encoder ------------------------------------------------------------------------


def encoder(**options) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.filterwarnings("ignore:sparsify_. modules with")
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_an_encoder_of_torch_works_in_evaluation(activation, padded, gradients):
    model, dense = encoder(activation=activation), encoder(activation=activation)
    x = torch.randn(3, 7, 64)
    mask = None
    if padded:  # a batch of different lengths takes the path of nested tensors
        mask = torch.arange(7)[None] >= torch.tensor([[7], [5], [2]])
    sparsify_(model, SparseConfig(sparsity=0.5, block=16))
    assert isinstance(model.layers[1].linear1, SparseLinear)
    dense.load_state_dict(densify_(copy.deepcopy(model)).state_dict())
    kept = slice(None) if mask is None else ~mask
    with torch.set_grad_enabled(gradients):
        expected = dense(x, src_key_padding_mask=mask)
        found = model(x, src_key_padding_mask=mask)
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-4, atol=1e-5)
    copied = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        torch.testing.assert_close(copied(x, src_key_padding_mask=mask)[kept], found[kept])
    loaded = load_sparse_(encoder(activation=activation), model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(loaded(x, src_key_padding_mask=mask)[kept], found[kept])


@pytest.mark.filterwarnings("ignore:sparsify_. modules with")
def test_densify_gives_an_encoder_its_fast_path_back():
    model, untouched = encoder(activation="gelu"), encoder(activation="gelu")
    densify_(sparsify_(model, HALF))
    assert model.use_nested_tensor is untouched.use_nested_tensor is True
    assert [layer.activation_relu_or_gelu for layer in model.layers] == [2, 2]
    assert {*vars(model)} == {*vars(untouched)}
