"""join_projections_: stacked projections give what they gave apart, and stay apart where needed."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import Tensor, nn

from sparsetile.nn import MaskedLinear, join_projections_
from sparsetile.nn.joined import JoinedPart

NAMES = ("q_proj", "k_proj", "v_proj")
X = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    def __init__(self, bias: bool = True, sizes: tuple[int, ...] = (32, 8, 8)) -> None:
        super().__init__()
        torch.manual_seed(1)
        for name, outputs in zip(NAMES, sizes, strict=True):
            linear = nn.Linear(24, outputs, bias=bias)
            self.add_module(name, MaskedLinear.from_linear(linear, sparsity=0.5))

    def forward(self, x: Tensor, other: Tensor | None = None) -> tuple[Tensor, ...]:
        other = x if other is None else other
        return self.q_proj(x), self.k_proj(other), self.v_proj(other)


def apart(x: Tensor, bias: bool = True, other: Tensor | None = None) -> tuple[Tensor, ...]:
    return Attention(bias).eval()(x, other)


def same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))


def products(model: nn.Module) -> list[int]:
    """Rows of x of each product of the stacked layer from now on."""
    seen: list[int] = []
    stacked = model.q_proj.joined.stacked
    stacked.register_forward_hook(lambda module, x, y: seen.append(len(x[0])))
    return seen


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_gives_all_projections(bias):
    model = join_projections_(Attention(bias).eval())
    seen = products(model)
    assert same(model(X), apart(X, bias)) and seen == [5]
    assert same(model(X[:2]), apart(X[:2], bias)) and seen == [5, 2]
    assert model.q_proj.joined.left is None
    assert sum(each.numel() for each in model.parameters()) == sum(
        each.numel() for each in Attention(bias).parameters()
    )


def test_another_input_is_multiplied_again():
    model = join_projections_(Attention().eval())
    seen = products(model)
    assert same(model(X, X + 1), apart(X, other=X + 1)) and seen == [5, 5, 5]
    q, x = model.q_proj(X), X.clone()
    assert torch.allclose(model.k_proj(x), apart(X)[1], atol=1e-6)
    model.q_proj(x)
    x.add_(1)
    assert torch.allclose(model.k_proj(x), apart(x)[1], atol=1e-6)
    assert torch.allclose(q, apart(X)[0], atol=1e-6)


def test_copies_and_files_share_nothing():
    model = join_projections_(Attention().eval())
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert made.k_proj._shared[0] is made.q_proj.joined
        assert made.q_proj.joined is not model.q_proj.joined
        assert same(made(X), apart(X))


def test_gradients_reach_the_stacked_weight():
    model = join_projections_(Attention())
    sum(each.sum() for each in model(X)).backward()
    wanted = Attention()
    sum(each.sum() for each in wanted(X)).backward()
    parts = [getattr(wanted, name).weight.grad for name in NAMES]
    assert torch.allclose(model.q_proj.joined.stacked.weight.grad, torch.cat(parts), atol=1e-6)


@torch.no_grad()
def test_a_compiled_module_has_one_product():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    model = join_projections_(Attention().eval())
    assert same(torch.compile(model, backend=backend, fullgraph=True)(X), apart(X))
    (graph,) = graphs
    calls = [node for node in graph.graph.nodes if "masked_linear" in str(node.target)]
    assert len(calls) == 1


@pytest.mark.parametrize("why", ["dense", "hook", "shared", "input", "bias"])
def test_other_layers_stay_as_they_are(why):
    model = Attention().eval()
    if why == "dense":
        model.k_proj = nn.Linear(24, 8)
    elif why == "hook":
        model.v_proj.register_forward_hook(lambda *_: None)
    elif why == "shared":
        model.again = model.k_proj
    elif why == "input":
        model.k_proj = MaskedLinear.from_linear(nn.Linear(16, 8), sparsity=0.5).eval()
    else:
        model.k_proj = MaskedLinear.from_linear(nn.Linear(24, 8, bias=False), sparsity=0.5).eval()
    before = dict(model.named_children())
    assert dict(join_projections_(model).named_children()) == before
    assert not any(isinstance(each, JoinedPart) for each in model.modules())


def test_rejects_wrong_arguments():
    with pytest.raises(
        TypeError,
        match=re.escape(
            "join_projections_: model must be a torch.nn.Module, got int. Pass the model."
        ),
    ):
        join_projections_(3)
    with pytest.raises(
        ValueError,
        match=re.escape(
            "join_projections_: names must be at least two different names, got ('q_proj',). Pass "
            "the names of projections of one module."
        ),
    ):
        join_projections_(Attention(), ("q_proj",))
