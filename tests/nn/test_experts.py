"""Experts of a mixture become layers, which are pruned like others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsetile.nn import (
    MaskedLinear,
    SparseConfig,
    SparseSwiGLU,
    calibrate,
    densify_,
    load_sparse_,
    sparsify_,
    split_experts_,
)

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
KINDS = {
    "Mixtral": {"intermediate_size": 128, "num_local_experts": 3},
    "Qwen3Moe": {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2,
                 "head_dim": 16},
}  # fmt: skip
TOKENS = torch.arange(40).reshape(4, 10)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind])
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def in_experts(module: nn.Module, name: str) -> bool:
    return ".experts." in name


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    model = model_of(request.param)
    if not any(part.dim() == 3 for part in model.parameters()):
        pytest.skip("this transformers stores experts as layers")
    return request.param


def test_split_experts_compute_the_same_in_the_same_memory(kind):
    model = model_of(kind)
    expected, pointers = logits(model), {part.data_ptr() for part in model.parameters()}
    split = split_experts_(model)
    torch.testing.assert_close(logits(split), expected, rtol=1e-4, atol=1e-5)
    assert sum(part.dim() == 3 for part in split.parameters()) == 0
    layers = [part for name, part in split.named_parameters() if "expert_layers" in name]
    assert layers and any(part.data_ptr() in pointers for part in layers)


def test_gradients_are_those_of_the_joint_weights(kind):
    whole, split = model_of(kind), split_experts_(model_of(kind))
    for model in (whole, split):
        model(TOKENS, labels=TOKENS).loss.backward()
    experts = whole.model.layers[0].mlp.experts
    mine = split.model.layers[0].mlp.experts.expert_layers
    for number, expert in enumerate(mine):
        gate, up = experts.gate_up_proj.grad[number].chunk(2)
        for layer, expected in ((expert.gate_proj, gate), (expert.up_proj, up),
                                (expert.down_proj, experts.down_proj.grad[number])):  # fmt: skip
            found = torch.zeros_like(expected) if layer.weight.grad is None else layer.weight.grad
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pattern", ["unstructured", "block"])
def test_experts_are_pruned_saved_and_loaded(kind, pattern, tmp_path):
    model = split_experts_(model_of(kind))
    sparsify_(model, SparseConfig(0.5, pattern=pattern, block=32), in_experts)
    experts = model.model.layers[0].mlp.experts.expert_layers
    assert (
        isinstance(experts[0], SparseSwiGLU)
        if pattern == "block"
        else isinstance(experts[0].up_proj, MaskedLinear)
    )
    assert isinstance(model.lm_head, nn.Linear)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-5)
    third = load_sparse_(model_of(kind), model.state_dict())
    torch.testing.assert_close(logits(third), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(densify_(model)), expected, rtol=1e-4, atol=1e-5)


def test_wanda_of_experts(kind):
    model = split_experts_(model_of(kind))
    config = SparseConfig(0.5, pattern="unstructured", method="wanda")
    norms = calibrate(model, [TOKENS, TOKENS + 50], config, in_experts)
    layers = [name for name in norms if ".expert_layers." in name]
    assert layers and all(norms[name].min() > 0 for name in layers)


def test_sparsify_says_that_experts_can_be_split(kind):
    with pytest.warns(UserWarning, match="call split_experts_ first"):
        sparsify_(model_of(kind), SparseConfig(0.5, pattern="2:4"))


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 32, 32))


@pytest.mark.parametrize(
    "model, text",
    [
        (nn.Sequential(nn.Linear(2, 2)), "in three dimensions, got none"),
        (nn.Sequential(Strange()), "got 0: its class is not one of transformers' experts"),
        (Strange(), "it is the model itself"),
    ],
)
def test_models_without_such_experts_are_refused(model, text):
    with pytest.raises(ValueError, match=text):
        split_experts_(model)


def test_experts_of_another_layout_are_refused(kind):
    model = model_of(kind)
    for layer in model.model.layers:
        layer.mlp.experts.is_transposed = True
    with pytest.raises(ValueError, match="its class has is_transposed=True"):
        split_experts_(model)


def test_only_models_are_split():
    with pytest.raises(TypeError, match=r"split_experts_: model must be a torch\.nn\.Module"):
        split_experts_(None)
