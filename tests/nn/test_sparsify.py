"""sparsify_, densify_ and load_sparse_: models keep their results, names and files."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from safetensors.torch import save_file
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


class MLP(nn.Module):
    """The feed-forward layer of Llama."""

    def __init__(self, width: int = 64, inner: int = 192, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 64)
        self.mlp = MLP(**options)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.q_proj(x))


def joining(**options) -> SparseConfig:
    """A configuration that joins gate and up of the MLP above."""
    return SparseConfig(**{"join_gate_up": (MLP,), **options})


def model_of(**options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(**options), Block(**options))


def masked(model: nn.Module, pruned: nn.Module) -> nn.Module:
    """``model`` with the weights that ``pruned`` has kept."""
    dense = densify_(copy.deepcopy(pruned))
    model.load_state_dict(dense.state_dict())
    return model


X = torch.randn(5, 64)


@pytest.mark.parametrize("method", ["magnitude", "random"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("join", [False, True])
def test_a_pruned_model_computes_what_the_masked_one_does(method, bias, join):
    config = joining(sparsity=0.5, method=method, join_gate_up=(MLP,) if join else False)
    model = model_of(bias=bias)
    assert sparsify_(model, config) is model
    kinds = {type(module) for module in model.modules()}
    assert (SparseSwiGLU in kinds) == join and SparseLinear in kinds and nn.Linear not in kinds
    torch.testing.assert_close(model(X), masked(model_of(bias=bias), model)(X))


def test_densify_gives_the_modules_back():
    model = sparsify_(model_of(), joining(sparsity=0.5))
    expected = model(X)
    assert densify_(model) is model
    assert [*model.state_dict()] == [*model_of().state_dict()]
    assert repr(model) == repr(model_of())
    assert type(model[0].mlp) is MLP
    torch.testing.assert_close(model(X), expected)


def test_gradients_flow_through_joined_layers():
    model = sparsify_(model_of(bias=True), joining(sparsity=0.5))
    dense = masked(model_of(bias=True), model)
    x = X.clone().requires_grad_()
    (mine,) = torch.autograd.grad(model(x).sum(), x)
    (theirs,) = torch.autograd.grad(dense(x).sum(), x)
    torch.testing.assert_close(mine, theirs)
    model(x).sum().backward()
    dense(x).sum().backward()
    layer = model[1].mlp.gate_up_proj
    both = torch.cat([dense[1].mlp.gate_proj.weight.grad, dense[1].mlp.up_proj.weight.grad])
    kept = SparseLinear.from_dense(both, mask=layer.pattern.mask()).weight
    torch.testing.assert_close(layer.weight.grad, kept)


def test_the_filter_chooses_by_module_and_name():
    model = sparsify_(model_of(), filter_fn=lambda module, name: name.endswith("down_proj"))
    assert isinstance(model[0].mlp, MLP)
    assert isinstance(model[0].mlp.down_proj, SparseLinear)
    assert type(model[0].mlp.up_proj) is type(model[0].q_proj) is nn.Linear


def test_other_activations_and_watched_layers_stay_apart():
    gelu, hooked, odd = Block(), Block(), Block(inner=100)
    gelu.mlp.act_fn = nn.GELU()
    hooked.mlp.gate_proj.register_forward_hook(lambda *_: None)
    model = nn.Sequential(gelu, hooked, odd)
    expected = [type(block.mlp) for block in model]
    sparsify_(model, joining(sparsity=0.0))
    assert [type(block.mlp) for block in model] == expected
    assert isinstance(odd.mlp.gate_proj, SparseLinear)


def test_masks_by_name_and_by_function():
    keep = torch.tensor([[True, False], [False, False]])
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    sparsify_(model, SparseConfig(method="mask", mask={"0": keep}))
    assert model[0].weight.shape[0] == 1
    assert model[1].weight.shape[0] == 4  # no mask: whatever is not zero
    other = nn.Sequential(nn.Linear(128, 128))
    sparsify_(other, SparseConfig(method="mask", mask=lambda name, layer: keep))
    assert other[0].weight.shape[0] == 1


def test_the_seed_of_a_layer_is_the_model_s_plus_its_number():
    """So that a model pruned again, with other layers first, can be made the same."""

    def masks(seed: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
        sparsify_(model, SparseConfig(method="random", seed=seed))
        return [layer.to_dense() != 0 for layer in model]

    assert torch.equal(masks(3)[1], masks(4)[0])


def test_random_blocks_differ_from_layer_to_layer_and_repeat_with_the_seed():
    def columns(seed: int) -> list[list[int]]:
        model = nn.Sequential(nn.Linear(640, 640), nn.Linear(640, 640))
        sparsify_(model, SparseConfig(method="random", seed=seed))
        return [layer.block_col_idx.tolist() for layer in model]

    first = columns(3)
    assert first[0] != first[1]
    assert columns(3) == first != columns(4)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_joined_models_can_be_copied_and_made_dense(way):
    model = sparsify_(model_of(), joining(sparsity=0.5))
    other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(other(X), model(X))
    torch.testing.assert_close(densify_(other)(X), model(X))


@pytest.mark.parametrize("meta", [False, True])
def test_files_bring_their_structure(tmp_path, meta):
    model = sparsify_(model_of(bias=True), joining(sparsity=0.5))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for source in (tmp_path, tmp_path / "model.safetensors", model.state_dict()):
        with torch.device("meta" if meta else "cpu"):
            other = nn.Sequential(Block(bias=True), Block(bias=True))
        load_sparse_(other, source, assign=True)
        assert torch.equal(other(X), model(X))
        torch.testing.assert_close(densify_(other)(X), model(X))


def test_tied_weights_stay_dense():
    model = nn.ModuleDict({"embed": nn.Embedding(128, 64), "head": nn.Linear(64, 128, bias=False)})
    model["body"] = nn.Linear(64, 64)
    model["head"].weight = model["embed"].weight
    sparsify_(model)
    assert type(model["head"]) is nn.Linear and isinstance(model["body"], SparseLinear)
    text = r"false for layers that cannot be pruned, got head: it shares its weight with embed\. Ch"
    with pytest.raises(ValueError, match=text):
        sparsify_(model, filter_fn=lambda module, name: True)


def test_a_block_that_does_not_divide_is_padded_and_said():
    """Once for each shape: no other test has this one."""
    model = nn.Sequential(nn.Linear(100, 70))
    with pytest.warns(UserWarning, match="blocks of 64 do not divide a weight of 70x100; the last"):
        sparsify_(model, SparseConfig(sparsity=0.0))
    x = torch.randn(2, 100)
    expected = functional.linear(x, model[0].to_dense(), model[0].bias)
    torch.testing.assert_close(model(x), expected)


def test_a_model_is_pruned_further_on_a_schedule():
    layer = SparseLinear.from_linear(nn.Linear(256, 256), sparsity=0.0)
    optimiser = torch.optim.Adam(layer.parameters())
    for sparsity in (0.25, 0.5, 0.75, 0.5):
        layer(torch.randn(3, 256)).sum().backward()
        optimiser.step()
        before = layer.to_dense()
        layer.prune_(sparsity, optimiser)
        after = layer.to_dense()
        assert torch.equal(after, torch.where(after == 0, after, before))
        assert optimiser.param_groups[0]["params"][0] is layer.weight
        assert {id(part) for part in optimiser.state} == {id(layer.weight), id(layer.bias)}
        assert optimiser.state[layer.weight]["exp_avg"].shape == layer.weight.shape
    assert layer.sparsity == 0.75


BAD = [
    (lambda: SparseConfig(sparsity=1.0), ValueError, "SparseConfig: sparsity must be at least 0"),
    (lambda: SparseConfig(sparsity=-0.5), ValueError, r"at least 0 and below 1, got -0\.5"),
    (lambda: SparseConfig(sparsity=float("nan")), ValueError, "at least 0 and below 1, got nan"),
    (lambda: SparseConfig(sparsity="90%"), TypeError, "SparseConfig: sparsity must be a number"),
    (lambda: SparseConfig(block=100), ValueError, "SparseConfig: block must be 16, 32"),
    (lambda: SparseConfig(method="best"), ValueError, "SparseConfig: method must be"),
    (lambda: SparseConfig(mask={}), ValueError, 'mask must be None unless method="mask"'),
    (lambda: sparsify_(3), TypeError, r"model must be a torch\.nn\.Module, got int"),
    (lambda: sparsify_(model_of(), 0.9), TypeError, "config must be a SparseConfig, got float"),
    (
        lambda: sparsify_(model_of(), filter_fn=lambda module, name: False),
        ValueError,
        r"true for at least one of the model's 8 linear layers, got none\. Its layers are 0\.q",
    ),
    (
        lambda: sparsify_(nn.ReLU(), filter_fn=lambda module, name: True),
        ValueError,
        "true for at least one of the model's 0 linear layers, got none. Its layers are none",
    ),
    (lambda: sparsify_(nn.ReLU()), ValueError, "can be pruned, got none. Its modules: none has w"),
    (lambda: sparsify_(nn.Linear(64, 64)), ValueError, "is a layer: call SparseLinear.from_linear"),
    (
        lambda: SparseConfig(join_gate_up="LlamaMLP"),
        TypeError,
        "join_gate_up must be True, False or a tuple of classes, got 'LlamaMLP'",
    ),
    (lambda: densify_(3), TypeError, r"densify_: model must be a torch\.nn\.Module, got int"),
    (lambda: densify_(sparse(64, 64)), ValueError, "one that holds sparse layers, got a SparseLin"),
    (
        lambda: load_sparse_(model_of(), model_of().state_dict()),
        ValueError,
        "weights of a pruned model, got dense weights only",
    ),
    (lambda: load_sparse_(model_of(), "nowhere"), ValueError, "source must be a state dict, a"),
    (
        lambda: load_sparse_(nn.Sequential(nn.ReLU()), sparsify_(model_of()).state_dict()),
        ValueError,
        "one with a linear layer 0",
    ),
    (
        lambda: load_sparse_(
            nn.Sequential(*model_of(), nn.Linear(2, 2)), sparsify_(model_of()).state_dict()
        ),
        ValueError,
        r"the weights of this model, got no weights 2\.weight",
    ),
    (lambda: densify_(nn.Sequential(by_hand())), ValueError, "got 0 made by hand"),
    (
        lambda: SparseSwiGLU(sparse(64, 64), sparse(64, 128), nn.Linear(64, 64)),
        ValueError,
        "gate and up must be of the same sizes, block, bias, dtype and requires_grad, with out",
    ),
]


def sparse(into: int, out: int) -> SparseLinear:
    return SparseLinear.from_linear(nn.Linear(into, out))


def by_hand() -> SparseSwiGLU:
    return SparseSwiGLU(sparse(64, 64), sparse(64, 64), nn.Linear(64, 64))


@pytest.mark.parametrize("call, error, text", BAD)
def test_rejects_bad_arguments(call, error, text):
    with pytest.raises(error, match=text):
        call()
