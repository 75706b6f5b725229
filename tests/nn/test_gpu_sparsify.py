"""Pruned layers and models on a GPU: kernels, dense copies and fast paths see what has changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional

from sparsetile.core.device import capability
from sparsetile.nn import SparseConfig, SparseLinear, densify_, sparsify_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or capability(0) < (8, 0),
        reason="no GPU of sm_80 or newer here",
    ),
]


def layer_of(sparsity: float = 0.0) -> SparseLinear:
    torch.manual_seed(0)
    linear = nn.Linear(512, 1024, device="cuda", dtype=torch.bfloat16)
    return SparseLinear.from_linear(linear, sparsity=sparsity)


@pytest.mark.parametrize("prefer", ["speed", "memory"])
@pytest.mark.parametrize("fused", [False, True])
def test_inference_between_pruning_and_training_uses_the_kept_blocks(prefer, fused):
    layer = layer_of()
    layer.prefer = prefer
    weight, optimiser = layer.weight, torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=fused)
    for sparsity in (0.25, 0.5, 0.9):
        for tokens in (1, 16, 64, 2048):
            x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
            with torch.no_grad():
                expected = functional.linear(x, layer.to_dense(), layer.bias)
                torch.testing.assert_close(layer(x), expected, rtol=2e-2, atol=2e-2)
        layer(x).float().square().sum().backward()
        optimiser.step()
        layer.prune_(sparsity)
        optimiser.zero_grad()
        assert layer.weight is weight
    optimiser.step()
    assert optimiser.state[weight]["exp_avg"].shape == weight.shape


@pytest.mark.filterwarnings("ignore:sparsify_. modules with")
@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_of_torch_works_in_evaluation(padded):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2).eval().cuda().half()
    sparsify_(model, SparseConfig(sparsity=0.5))
    dense = densify_(copy.deepcopy(model))
    x = torch.randn(3, 7, 256, device="cuda", dtype=torch.float16)
    mask = (torch.arange(7)[None] >= torch.tensor([[7], [5], [2]])).cuda() if padded else None
    kept = slice(None) if mask is None else ~mask
    with torch.no_grad():
        found = model(x, src_key_padding_mask=mask)[kept]
        torch.testing.assert_close(
            found, dense(x, src_key_padding_mask=mask)[kept], rtol=1e-2, atol=1e-2
        )


def test_transforms_of_torch_func():
    layer = layer_of(0.75)
    x = torch.randn(4, 33, 512, device="cuda", dtype=torch.bfloat16)
    dense = functional.linear(x, layer.to_dense(), layer.bias).detach()
    close = {"rtol": 2e-2, "atol": 2e-2}
    with torch.no_grad():
        torch.testing.assert_close(vmap(layer)(x), dense, **close)
        torch.testing.assert_close(vmap(layer, in_dims=1, out_dims=1)(x), dense, **close)
    tangent = jvp(layer, (x,), (x,))[1]
    torch.testing.assert_close(tangent, dense - layer.bias, rtol=2e-2, atol=5e-2)
    params = dict(layer.named_parameters())

    def loss(given, x):
        return functional_call(layer, given, (x,)).float().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(params, x)["weight"]
    for number, sample in enumerate(x):
        (expected,) = torch.autograd.grad(layer(sample).float().sum(), layer.weight)
        torch.testing.assert_close(each[number], expected, rtol=2e-2, atol=0.2)
