"""Layers of single weights on a GPU: every method, CUDA graphs, training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from sparsetile.nn import MaskedLinear, SparseConfig, masked_product, report, sparsify_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="no GPU of sm_80 or newer here",
    ),
]


def layer_of(pattern: str, dtype: torch.dtype = torch.bfloat16, **options) -> MaskedLinear:
    torch.manual_seed(0)
    linear = nn.Linear(512, 1024, device="cuda", dtype=dtype)
    return MaskedLinear.from_linear(linear, sparsity=0.7, pattern=pattern, **options).eval()


def check(layer: MaskedLinear, tokens: int) -> None:
    x = torch.randn(tokens, 512, device="cuda", dtype=layer.weight.dtype)
    wide = torch.zeros(1024, 512, dtype=torch.float64, device="cuda")
    wide[layer.mask()] = layer.weight.detach().double()
    exact = functional.linear(x.double(), wide, layer.bias.detach().double())
    with torch.no_grad():
        found = layer(x)
    # Rounded once, or each part of a sum that cuBLAS splits; a wrong mask errs by 0.1 and more.
    bound = torch.finfo(layer.weight.dtype).eps * exact.abs() + 5e-3
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("prefer", ["speed", "memory"])
@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
def test_results(dtype, pattern, prefer, tokens):
    check(layer_of(pattern, dtype, prefer=prefer), tokens)


@pytest.mark.parametrize("tokens", [1, 8, 64, 300])
def test_semi_structured_kernels_of_torch_give_the_same(tokens, monkeypatch):
    monkeypatch.setattr(masked_product, "_SEMI_STRUCTURED_FLOPS", 1)
    layer = layer_of("2:4")
    assert layer.method(tokens) == "2:4"
    check(layer, tokens)
    assert layer.memory()["other copies"] > 0 and layer.memory()["dense copy"] == 0
    with torch.no_grad():
        layer.weight.mul_(2)
    check(layer, tokens)
    assert report(layer, tokens=(tokens,)).layers[0].runs == {tokens: "2:4"}


def test_long_prompts_of_two_of_four_run_them():
    layer = MaskedLinear(18944, 3584, 0, pattern="2:4", device="cuda", dtype=torch.bfloat16)
    layer.weight = nn.Parameter(torch.ones(1, device="cuda", dtype=torch.bfloat16))
    assert layer.eval().method(8192) == "2:4" and layer.method(1024) == "dense"
    layer.prefer = "memory"
    assert layer.method(8192) == "dense"


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_a_cuda_graph_reads_the_copy_which_later_calls_refresh(pattern):
    layer, x = layer_of(pattern), torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(x).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        out.zero_()
        graph.replay()
        torch.testing.assert_close(out, expected)
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        layer(x)
        graph.replay()
        torch.testing.assert_close(out, 2 * expected)


def test_masks_are_kept_through_fused_steps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()
    sparsify_(model, SparseConfig(0.7, pattern="unstructured"))
    masks = [model[0].mask(), model[2].mask()]
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, losses = torch.randn(64, 256, device="cuda"), []
    for _ in range(200):
        optimiser.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = (model(x) - x).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    for layer, mask in zip((model[0], model[2]), masks, strict=True):
        assert torch.equal(layer.to_dense() != 0, mask & (layer.to_dense() != 0))
        assert not layer.to_dense()[~mask].any()


def test_compiled_decoding_uses_the_kept_copy():
    torch._dynamo.reset()
    layer, x = layer_of("unstructured"), torch.randn(1, 512, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(x), layer(x), rtol=1e-2, atol=1e-2)
        assert layer.memory()["dense copy"] == 1024 * 512 * 2
