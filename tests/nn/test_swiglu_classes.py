"""Gate and up are joined only in classes that are known to be a SwiGLU and nothing more."""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace

import pytest
import torch
from tools.llm_decoder import TINY, Decoder
from torch import Tensor, nn

from sparsetile.nn import SparseSwiGLU, load_sparse_, sparsify_
from sparsetile.nn.swiglu import KNOWN_SWIGLUS, is_swiglu
from tests.nn.test_sparsify import MLP, joining, model_of

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))


class Scaled(MLP):
    """Computes something else by a parameter of its own that starts as 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Clamped(MLP):
    """Differs for large inputs only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-100, 100)


class Dropped(MLP):
    """Differs in training only."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Buffered(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(64))


def edited(edit) -> MLP:
    made = MLP(bias=True)
    edit(made)
    return made


@pytest.mark.parametrize("kind", [MLP, Scaled, Clamped, Dropped])
def test_a_class_that_nobody_vouches_for_is_not_joined(kind):
    model = nn.Sequential(kind()).double()
    dense = copy.deepcopy(model)
    sparsify_(model, joining(sparsity=0.0, join_gate_up=True))  # nothing is dropped
    assert type(model[0]) is kind
    assert {*model.state_dict()} >= {*dense.state_dict()}
    results = []
    for each in (model, dense):
        torch.manual_seed(1)
        results.append(each(1e4 * X.double()))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "module",
    [
        Scaled(),
        Buffered(),
        edited(lambda m: m.register_forward_pre_hook(lambda *_: None)),
        edited(lambda m: m.gate_proj.register_full_backward_hook(lambda *_: None)),
        edited(lambda m: m.up_proj.register_forward_hook(lambda *_: None)),
        edited(lambda m: m.act_fn.register_forward_hook(lambda *_: None)),
        edited(lambda m: m.register_state_dict_post_hook(lambda *_: None)),
        edited(lambda m: setattr(m, "forward", lambda x: x)),
        edited(lambda m: setattr(m.act_fn, "forward", lambda x: x)),
        edited(lambda m: setattr(m, "act_fn", nn.GELU())),
        edited(lambda m: setattr(m, "extra", nn.Dropout())),
        edited(lambda m: m.gate_proj.bias.register_hook(lambda grad: None)),
        edited(lambda m: setattr(m.gate_proj, "bias", None)),
        edited(lambda m: m.up_proj.half()),
        edited(lambda m: m.up_proj.bias.requires_grad_(False)),
        edited(lambda m: setattr(m, "up_proj", nn.Identity())),
    ],
    ids=lambda module: "",
)
def test_what_has_more_than_the_parts_is_not_joined(module):
    assert is_swiglu(MLP(bias=True), (MLP,)) and is_swiglu(MLP(), (MLP,))
    assert not is_swiglu(MLP())
    assert not is_swiglu(module, (type(module),))


def test_no_module_is_called_to_find_out():
    def refuse(x: Tensor) -> Tensor:
        raise AssertionError("called")

    MLP.forward, before = refuse, MLP.forward
    try:
        model = sparsify_(model_of(), joining(sparsity=0.5))
    finally:
        MLP.forward = before
    assert isinstance(model[0].mlp, SparseSwiGLU)


def test_the_decoder_of_the_benchmark_is_known():
    model = Decoder(TINY, torch.device("cpu"), torch.float32)
    assert all(is_swiglu(block.mlp) for block in model.blocks)


@pytest.mark.parametrize("name", sorted(n for n in KNOWN_SWIGLUS if n.startswith("transformers.")))
def test_known_classes_of_transformers_compute_a_swiglu(name):
    pytest.importorskip("transformers")
    path, _, kind = name.rpartition(".")
    try:
        known = getattr(importlib.import_module(path), kind)
    except (ImportError, AttributeError):
        pytest.skip("another version of transformers")
    config = SimpleNamespace(
        hidden_size=64, intermediate_size=96, hidden_act="silu", mlp_bias=False, use_bias=False,
        attention_bias=False, num_shared_experts=1, bias=False,
    )  # fmt: skip
    torch.manual_seed(0)
    module = known(config)
    assert is_swiglu(module)
    gate, up = module.gate_proj(X), module.up_proj(X)
    torch.testing.assert_close(module(X), module.down_proj(nn.functional.silu(gate) * up))


def test_load_sparse_refuses_a_feed_forward_layer_with_more_parts():
    state = sparsify_(nn.Sequential(MLP()), joining(sparsity=0.5)).state_dict()
    model = nn.Sequential(Scaled())
    before = [*model.modules()]
    text = "one whose 0 is a SwiGLU and nothing more, got a Scaled with parts, weights or hooks of"
    with pytest.raises(ValueError, match=text):
        load_sparse_(model, state)
    assert [*model.modules()] == before
