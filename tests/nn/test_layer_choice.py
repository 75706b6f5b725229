"""Which layers sparsify_ prunes, which it leaves dense, and what it says about them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

from sparsetile.nn import SparseConfig, SparseLinear, densify_, load_sparse_, sparsify_
from sparsetile.nn.layer_choice import SparsifyReport

HALF = SparseConfig(sparsity=0.5, block=16)


def linear(into: int = 64, out: int = 64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(into, out)


def with_layer(layer: nn.Module) -> nn.Sequential:
    """A model of this layer and of one that can be pruned."""
    return nn.Sequential(layer, linear())


def always(module: nn.Module, name: str) -> bool:
    return True


# -- output heads and embeddings ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["lm_head", "head", "classifier", "score", "embed_out"])
def test_output_heads_stay_dense_unless_a_filter_asks_for_them(name):
    def make() -> nn.ModuleDict:
        return nn.ModuleDict({"tokens": nn.Embedding(96, 64), "body": linear(), name: linear()})

    model = sparsify_(make(), HALF)
    assert type(model[name]) is nn.Linear and isinstance(model["body"], SparseLinear)
    assert model.sparsify_report.skipped == {
        "tokens": "an embedding",
        name: "an output head: pass a filter_fn that is true for it to prune it",
    }
    assert isinstance(sparsify_(make(), HALF, always)[name], SparseLinear)
    mask = torch.ones(4, 4)
    asked = sparsify_(make(), SparseConfig(method="mask", mask={name: mask}, block=16))
    assert isinstance(asked[name], SparseLinear)


def test_what_get_output_embeddings_returns_stays_dense():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = linear(), linear()

        def get_output_embeddings(self) -> nn.Module:
            return self.last

    class Without(nn.Sequential):
        def get_output_embeddings(self) -> nn.Module:
            raise NotImplementedError

    model = sparsify_(Without(Model()), HALF)
    assert type(model[0].last) is nn.Linear and isinstance(model[0].body, SparseLinear)


def test_a_model_of_transformers_keeps_its_head():
    transformers = pytest.importorskip("transformers")
    from tests.nn.test_transformers import model_of

    for tied in (False, True):
        model = sparsify_(model_of("Llama", tied), SparseConfig(sparsity=0.5))
        assert type(model.lm_head) is nn.Linear
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert isinstance(model.model.layers[0].self_attn.q_proj, SparseLinear)
        reason = model.sparsify_report.skipped["lm_head"]
        assert reason.startswith("it shares its weight with model.embed" if tied else "an output h")
    assert transformers


# -- what cannot be pruned ----------------------------------------------------------------------


def hooked() -> nn.Linear:
    layer = linear()
    layer.weight.register_hook(lambda grad: grad)
    return layer


def accumulating() -> nn.Linear:
    layer = linear()
    layer.weight.register_post_accumulate_grad_hook(lambda weight: None)
    return layer


def replaced() -> nn.Linear:
    layer = linear()
    layer.forward = lambda x: 2 * x
    return layer


def watched_state() -> nn.Linear:
    layer = linear()
    layer.register_state_dict_post_hook(lambda *_: None)
    return layer


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.fixture
def old_weight_norm() -> nn.Linear:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(linear())


CANNOT = {
    "tensor hook": (hooked, "its weight has a tensor hook, which expects a dense gradient"),
    "accumulation hook": (accumulating, "its weight has a tensor hook"),
    "weight_norm": (
        lambda: parametrizations.weight_norm(linear()),
        "its weight is computed by a parametrization: call torch.nn.utils.parametrize.remove",
    ),
    "spectral_norm": (lambda: spectral_norm(linear()), "its weight is computed before each call"),
    "prune": (
        lambda: prune.l1_unstructured(linear(), "weight", 0.5),
        "its weight is computed before each call, as by weight_norm, spectral_norm or torch.nn.uti",
    ),
    "forward": (replaced, "its forward method was replaced"),
    "state dict": (watched_state, "it has hooks that read or change its state dict"),
    "meta": (lambda: linear().to("meta"), "its weight is on the meta device: load it first"),
    "complex": (
        lambda: nn.Linear(64, 64, dtype=torch.complex64),
        "its weight is torch.complex64, not a float of 16 bits or more",
    ),
    "empty": (lambda: nn.Linear(0, 64), "it has no weights"),
    "subclass": (lambda: Doubled(64, 64), "a subclass of torch.nn.Linear: Doubled"),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("kind", CANNOT)
def test_a_layer_that_would_change_stays_and_is_reported(kind):
    make, reason = CANNOT[kind]
    model = with_layer(make())
    layer = model[0]
    with pytest.warns(UserWarning, match=r"sparsify_: modules with \d+ % of the model's weights"):
        sparsify_(model, HALF)
    assert model[0] is layer and isinstance(model[1], SparseLinear)
    assert model.sparsify_report.skipped["0"].startswith(reason)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("kind", [kind for kind in CANNOT if kind != "subclass"])
def test_a_layer_that_was_asked_for_and_would_change_is_refused(kind):
    make, reason = CANNOT[kind]
    model = with_layer(make())
    before = [*model.modules()]
    for config, given in (
        (HALF, {"filter_fn": always}),
        (SparseConfig(method="mask", mask={"0": torch.ones(4, 4)}, block=16), {}),
    ):
        with pytest.raises(
            ValueError, match=r"sparsify_: (filter_fn|mask) must be .* got 0: "
        ) as e:
            sparsify_(model, config, **given)
        assert f"got 0: {reason}" in str(e.value)
        assert str(e.value).endswith("Change the layer, or leave it dense.")
        assert [*model.modules()] == before


def test_old_weight_norm_keeps_working(old_weight_norm):
    model, x = with_layer(old_weight_norm), torch.randn(3, 64)
    with pytest.warns(UserWarning, match="its weight is computed before each call"):
        sparsify_(model, HALF)
    with torch.no_grad():
        before = model[0](x)
        model[0].weight_g.mul_(2)
        torch.testing.assert_close(model[0](x) - model[0].bias, 2 * (before - model[0].bias))


def test_a_layer_can_be_pruned_after_its_parametrization_was_removed():
    layer = parametrizations.weight_norm(linear())
    parametrize.remove_parametrizations(layer, "weight")
    assert isinstance(sparsify_(nn.Sequential(layer), HALF)[0], SparseLinear)


def test_load_sparse_refuses_layers_that_would_change():
    state = sparsify_(with_layer(linear()), HALF).state_dict()
    model = with_layer(spectral_norm(linear()))
    before = [*model.modules()]
    with pytest.raises(ValueError, match="one with a linear layer 0, got its weight is computed b"):
        load_sparse_(model, state)
    assert [*model.modules()] == before


# -- other modules ------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 64, 64))


def test_experts_and_convolutions_of_transformers_are_reported():
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Experts(), Conv1D(64, 64), linear(), Experts())
    text = (
        r"sparsify_: modules with 90 % of the model's weights cannot be pruned and stay dense: "
        r"0 and 1 more: weights of three dimensions, as experts of a mixture have \(Experts\); "
        r"1: a Conv1D of transformers: replace it by a torch\.nn\.Linear first\. Print model\.spars"
    )
    with pytest.warns(UserWarning, match=text):
        sparsify_(model, HALF)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsify_(nn.Sequential(Experts(), linear()), HALF, always)


def test_a_model_of_convolutions_says_why_nothing_is_pruned():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=96)
    model = transformers.GPT2LMHeadModel(config)
    with pytest.raises(ValueError, match=r"can be pruned, got none\. Its modules: .*") as error:
        sparsify_(model)
    assert "transformer.h.0.attn.c_attn and 7 more: a Conv1D of transformers" in str(error.value)
    assert "lm_head: it shares its weight with transformer.wte" in str(error.value)


def test_usual_models_are_pruned_without_a_warning():
    model = nn.Sequential(
        nn.Conv2d(1, 1, 3), nn.LSTM(4, 4), nn.Embedding(4, 4), nn.LayerNorm(4), linear()
    )
    model.place = nn.Parameter(torch.zeros(1, 20, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsify_(model, HALF)
    assert model.sparsify_report.skipped == {
        "": "its class is Sequential, not torch.nn.Linear",
        "0": "its class is Conv2d, not torch.nn.Linear",
        "1": "its class is LSTM, not torch.nn.Linear",
        "2": "an embedding",
    }


# -- the report ---------------------------------------------------------------------------------


def test_the_report_names_every_layer_and_goes_with_densify():
    model = nn.Sequential(linear(), linear(), linear(), linear())
    sparsify_(model, HALF, lambda module, name: name in "03")
    report = model.sparsify_report
    assert isinstance(report, SparsifyReport)
    assert str(report).splitlines() == [
        "pruned: 2 layers",
        "  0: kept 8 of 16 blocks of 16",
        "  3: kept 8 of 16 blocks of 16",
        "skipped: 2 modules",
        "  1 and 1 more: filter_fn is false",
    ]
    sparsify_(model, HALF)
    assert model.sparsify_report.skipped == {name: "it is sparse already" for name in "03"}
    assert not hasattr(densify_(model), "sparsify_report")


@pytest.mark.filterwarnings("ignore:SparseLinear. blocks of 16 do not divide")
def test_the_report_says_which_layers_are_padded():
    model = sparsify_(nn.Sequential(linear(40, 64), linear(64, 64)), HALF)
    assert model.sparsify_report.pruned == {
        "0": "kept 6 of 12 blocks of 16, the last padded with zeros",
        "1": "kept 8 of 16 blocks of 16",
    }


def test_a_filter_of_name_and_module_is_told_the_order():
    model = nn.Sequential(nn.Linear(64, 64))
    for swapped in (lambda name, module: "0" in name, lambda name, module: name.endswith("0")):
        with pytest.raises(TypeError, match="filter_fn must be a function of a module and its na"):
            sparsify_(model, HALF, swapped)
    assert type(model[0]) is nn.Linear
