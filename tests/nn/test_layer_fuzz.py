"""Random layers, graphs and calls: results and all gradients are those of PyG's layer in float64.

A case is drawn from its layer's name and a number, and printed if it fails. What PyG or this
package does not support is not drawn; a sentence says why.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsetile import nn as ours
from tests.nn.cases import pyg

CASES = 32
F32, F64 = torch.float32, torch.float64
NEAR = {F32: 2e-4, F64: 1e-9}
FORWARD, BACK = "source_to_target", "target_to_source"
REDUCTIONS = ("add", "mean", "max", "min")


@dataclass
class Case:
    """One layer and one call."""

    name: str
    draw: random.Random = field(repr=False)
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = F64
    sources: int = 0
    targets: int | None = None  # None: of one set of nodes
    edges: str = "random"
    form: str = "edges"
    inner: str = ""  # what maps sums in GINConv and GINEConv
    pair: str = "both"  # whether targets have features, if there are two sets
    weight: str = ""  # argument with one number or row for each edge
    width: int = 0  # of the edges' features; 0: one number without a dimension
    numbers: str = ""  # x is None, or numbers of nodes
    size: bool = False
    train: bool = True
    more: dict[str, Any] = field(default_factory=dict)
    calls: int = 1
    lazy: bool = False  # the layer's widths are found at the call, or by its state dict
    strided: bool = False  # x and the edges are views
    stays: bool = False  # the graph is planned: none before it was short-lived
    fixed: bool = False  # weights of edges need no gradient, and change between calls

    @property
    def gradients(self) -> bool:
        # PyG's products of sparse tensors have a gradient for sums only.
        return self.form != "adj_t" or self.options.get("aggr", "add") == "add"


def some(draw: random.Random, **choices: tuple[Any, ...]) -> dict[str, Any]:
    """Draw a value for about half of the options."""
    return {name: draw.choice(values) for name, values in choices.items() if draw.random() < 0.5}


BOOLS = (False, True)


def drawn(name: str, number: int) -> Case:
    draw = random.Random(f"{name} {number}")
    case = Case(name, draw, dtype=draw.choice((F32, F64)), sources=draw.choice((0, 1, 2, 5, 9, 30)))
    case.edges = draw.choice(("none", "random", "random", "loops", "hub", "double", "isolated"))
    case.form = draw.choice(("edges", "edges", "int32", "EdgeIndex", "Data", "adj_t"))
    case.train, case.calls = draw.random() < 0.7, draw.choice((1, 1, 2, 3))
    case.lazy, case.strided = draw.random() < 0.2, draw.random() < 0.2
    case.fixed, case.stays = draw.random() < 0.4, draw.random() < 0.6
    if name not in ("GCNConv", "ChebConv") and draw.random() < 0.4:
        case.targets = draw.choice((1, 4, 12, 30))
        case.sources = max(case.sources, 1)
    elif draw.random() < 0.3 and case.form != "adj_t":  # rows of adj_t are targets
        case.options["flow"] = BACK
    LAYERS[name](case, draw)
    if case.form == "adj_t" and (name == "ChebConv" or case.weight in ("edge_attr", "edge_type")):
        case.form = "edges"  # rows of edges' features have no order in a matrix
    if case.form == "adj_t" and case.options.get("add_self_loops", True):
        case.options.pop("dropout", None)  # PyG sorts added self-loops among the edges
    if name.endswith("RGCNConv") or case.options.get("project") or case.inner:
        case.lazy = False  # PyG's layers need their widths
    return case


def in_channels(case: Case, draw: random.Random) -> Any:
    """Draw one width, or two for two sets of nodes."""
    if case.targets is not None and draw.random() < 0.7:
        return draw.choice(((4, 3), (3, 6), (4, 4)))
    return draw.choice((1, 4, 7))


def _gcn(case: Case, draw: random.Random) -> None:
    case.arguments = (draw.choice((1, 4, 7)), draw.choice((1, 5)))
    case.options |= some(draw, improved=BOOLS, bias=BOOLS, normalize=BOOLS)
    if case.options.get("normalize", True):
        case.options |= some(draw, add_self_loops=BOOLS)
    case.weight = draw.choice(("", "edge_weight"))
    if case.weight and case.edges in ("double", "loops", "hub"):
        case.edges = "random"  # PyG gives each of several self-loops of a node a gradient


def _two_maps(case: Case, draw: random.Random) -> None:
    case.arguments = (in_channels(case, draw), draw.choice((1, 5, 9, 32)))
    case.options |= some(draw, aggr=REDUCTIONS, bias=BOOLS)
    case.pair, case.size = draw.choice(("both", "both", "one")), draw.random() < 0.3


def _sage(case: Case, draw: random.Random) -> None:
    _two_maps(case, draw)
    case.options.setdefault("aggr", "mean")
    case.options |= some(draw, root_weight=BOOLS, project=BOOLS)
    if case.options.get("bias", True):  # else rows of 0 have gradients of 1e12
        case.options |= some(draw, normalize=BOOLS)


def _graph(case: Case, draw: random.Random) -> None:
    _two_maps(case, draw)
    case.weight = draw.choice(("", "edge_weight"))
    if case.weight and case.options.get("aggr") in ("max", "min"):
        case.edges = "none"  # weighted maxima of parallel edges raise
        case.weight = draw.choice(("", "edge_weight"))


def _gin(case: Case, draw: random.Random) -> None:
    case.inner = draw.choice(("linear", "sequential"))
    case.options |= some(draw, eps=(0.0, 0.5, -2.0), train_eps=BOOLS)
    case.pair, case.size = draw.choice(("both", "both", "one")), draw.random() < 0.3


def _gine(case: Case, draw: random.Random) -> None:
    _gin(case, draw)
    case.options |= some(draw, edge_dim=(1, 3))
    case.weight, case.width = "edge_attr", case.options.get("edge_dim", 4)


def _cheb(case: Case, draw: random.Random) -> None:
    case.arguments = (draw.choice((1, 4, 7)), draw.choice((1, 5)), draw.choice((1, 2, 3, 5)))
    case.options |= some(draw, normalization=("sym", "rw", None), bias=BOOLS)
    case.sources = max(case.sources, 2)  # PyG takes the largest of no numbers
    case.weight = draw.choice(("", "edge_weight"))
    case.more |= some(draw, lambda_max=(1.5, 3.0))
    if case.weight or case.options.get("normalization", "sym") is None:
        case.edges = "ring"  # in PyG, a node without edges has a gradient of NaN, no edges give 0/0


def _attention(case: Case, draw: random.Random) -> None:
    case.arguments = (in_channels(case, draw), draw.choice((1, 5)))
    case.options |= some(draw, heads=(1, 2, 3), concat=BOOLS, bias=BOOLS, edge_dim=(1, 3))
    if case.dtype is F64:  # float32 draws other numbers
        case.options |= some(draw, dropout=(0.3, 1.0))
    if case.options.get("edge_dim"):
        case.weight, case.width = "edge_attr", case.options["edge_dim"]
        if case.width == 1 and case.name != "TransformerConv" and draw.random() < 0.4:
            case.width = 0
    if case.form != "adj_t" and draw.random() < 0.2:
        case.more["return_attention_weights"] = True


def _loops(case: Case, draw: random.Random) -> None:
    case.options |= some(
        draw, add_self_loops=BOOLS, residual=BOOLS, negative_slope=(0.0, 0.4),
        fill_value=("mean", "add", "max", "min", "mul", 0.5),
    )  # fmt: skip
    if case.targets is not None:  # PyG reduces features of targets that have no self-loop, too
        case.options["fill_value"] = 0.5


def _gat(case: Case, draw: random.Random) -> None:
    _attention(case, draw)
    _loops(case, draw)
    case.pair, case.size = draw.choice(("both", "both", "one")), draw.random() < 0.3


def _gatv2(case: Case, draw: random.Random) -> None:
    _attention(case, draw)
    _loops(case, draw)
    case.options["share_weights"] = len(set(widths_of(case))) == 1 and draw.random() < 0.5


def _transformer(case: Case, draw: random.Random) -> None:
    _attention(case, draw)
    case.options |= some(draw, beta=BOOLS, root_weight=BOOLS)


def _rgcn(case: Case, draw: random.Random) -> None:
    relations, wide = draw.choice((1, 3, 8)), draw.choice((2, 4))
    targets = draw.choice((2, 4))
    case.arguments = (wide if case.targets is None else (wide, targets), draw.choice((2, 6)))
    case.arguments += (relations,)
    case.options |= draw.choice(({}, {"num_bases": 2}, {"num_blocks": 2}))
    fast = case.name == "FastRGCNConv"
    case.options |= some(draw, aggr=REDUCTIONS[: 2 if fast else 4], root_weight=BOOLS, bias=BOOLS)
    means = case.options.get("aggr", "mean") in ("add", "mean")
    if case.targets is None and "num_blocks" not in case.options and means:
        # PyG's FastRGCNConv reads rows of weights by numbers of nodes, whatever x is.
        case.numbers = draw.choice(("", "", "none", "" if fast else "numbers"))
        if case.numbers == "none":
            case.arguments = (max(case.sources, 1), *case.arguments[1:])
            case.sources = case.arguments[0]
    case.weight = "edge_type"


LAYERS: dict[str, Callable[[Case, random.Random], None]] = {
    "GCNConv": _gcn, "SAGEConv": _sage, "GraphConv": _graph, "GINConv": _gin, "GINEConv": _gine,
    "ChebConv": _cheb, "GATConv": _gat, "GATv2Conv": _gatv2, "TransformerConv": _transformer,
    "RGCNConv": _rgcn, "FastRGCNConv": _rgcn,
}  # fmt: skip


def widths_of(case: Case) -> tuple[int, int]:
    given = 4 if case.inner else case.arguments[0]
    return given if isinstance(given, tuple) else (given, given)


def edges_of(case: Case, generator: torch.Generator) -> Tensor:
    """Draw the edges: sources, then targets, or in reverse with the other flow."""
    sources, targets = case.sources, case.sources if case.targets is None else case.targets
    count = 0 if case.edges == "none" or not sources else 3 * sources
    ends = [torch.randint(max(n, 1), (count,), generator=generator) for n in (sources, targets)]
    if case.edges == "isolated":  # the last nodes have none
        ends = [end // 2 for end in ends]
    if case.edges == "hub":
        ends[1][: count // 2 + 1] = 0
        ends[0][count // 2 :] = sources - 1
    if case.edges == "ring":
        ends = [torch.arange(sources), (torch.arange(sources) + 1) % sources]
    made = torch.stack(ends)
    if case.edges == "double":
        made = torch.cat([made, made, made[:, : count // 2]], 1)
    if case.edges == "loops":
        made[1] = made[0].clamp(max=targets - 1)
    if case.form == "adj_t" or (case.weight == "edge_weight" and case.edges != "double"):
        made = made.unique(dim=1)  # values of several entries are one entry's
    return made.flip(0).contiguous() if case.options.get("flow") == BACK else made.contiguous()


def layers_of(case: Case) -> tuple[nn.Module, nn.Module]:
    """Both layers with the same weights, PyG's in float64."""
    made = []
    for module in (ours, pyg):
        torch.manual_seed(7)
        arguments = case.arguments
        if case.inner:
            inner: nn.Module = nn.Linear(4, 5)
            if case.inner == "sequential":
                inner = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
            arguments = (inner,)
        made.append(getattr(module, case.name)(*arguments, **case.options).train(case.train))
    mine, theirs = made
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.load_state_dict(mine.state_dict())
    if case.lazy:
        state, mine = mine.state_dict(), lazy_layer(case)
        mine.load_state_dict(state)
    return mine.to(case.dtype), theirs.double()


def lazy_layer(case: Case) -> nn.Module:
    """Our layer without widths."""
    options, (width, *others) = dict(case.options), case.arguments
    width = (-1, -1) if isinstance(width, tuple) else -1
    if "edge_dim" in options:
        options["edge_dim"] = -1
    made: nn.Module = getattr(ours, case.name)(width, *others, **options)
    return made.train(case.train)


def graph_of(case: Case, edges: Tensor, values: Tensor | None, mine: bool) -> Any:
    """Return the graph as it is passed to a layer."""
    from torch_geometric import EdgeIndex
    from torch_geometric.data import Data

    targets = case.sources if case.targets is None else case.targets
    if case.form == "adj_t":
        ones = torch.ones(edges.shape[1], dtype=F64) if values is None else values
        adj_t = torch.sparse_coo_tensor(edges.flip(0), ones, (targets, case.sources))
        return adj_t.coalesce().to_sparse_csr()
    if case.strided:
        edges = edges.t().contiguous().t()
    if not mine:  # PyG's layers do not take the others, or other integers
        return edges
    if case.form == "int32":
        return edges.int()
    if case.form == "EdgeIndex":
        size = (case.sources, targets)
        return EdgeIndex(
            edges.contiguous(), sparse_size=size[:: 1 if "flow" not in case.options else -1]
        )
    return Data(edge_index=edges) if case.form == "Data" else edges


def check(case: Case) -> None:
    if case.stays:
        ours.clear_graph_cache()
    generator = torch.Generator().manual_seed(case.draw.randrange(2**31))
    edges = edges_of(case, generator)
    count, targets = edges.shape[1], case.sources if case.targets is None else case.targets
    features = [
        torch.randn(nodes, width, generator=generator)
        for nodes, width in zip((case.sources, targets), widths_of(case), strict=True)
    ]
    of_edges: Tensor | None = None
    if case.weight == "edge_type":
        of_edges = torch.randint(case.arguments[2], (count,), generator=generator)
    elif case.weight:
        shape = (count, case.width) if case.width else (count,)
        of_edges = torch.rand(shape, generator=generator) + 0.1
        if case.name == "GraphConv":
            of_edges -= 0.5
    if case.strided:
        features = [each.t().contiguous().t() for each in features]
    results = []
    for layer, dtype in zip(layers_of(case), (case.dtype, F64), strict=True):
        results.append(called(case, layer, dtype, edges, features, of_edges))
    compared(case, results[0], results[1])


def called(
    case: Case, layer: nn.Module, dtype: torch.dtype, edges: Tensor, features: list[Tensor],
    of_edges: Tensor | None,
) -> dict[str, Tensor | None]:  # fmt: skip
    """Return the result of a layer, and the gradients of its inputs and parameters."""
    mine = type(layer).__module__.startswith("sparsetile")
    given = [each.detach().to(dtype, copy=True).requires_grad_() for each in features]
    weight = of_edges
    if weight is not None and weight.is_floating_point():
        weight = weight.to(dtype, copy=True)
        weight.requires_grad_(case.form != "adj_t" and not case.fixed)
    named: dict[str, Any] = dict(case.more)
    graph = graph_of(case, edges, weight if case.weight == "edge_weight" else None, mine)
    if weight is not None and (case.form != "adj_t" or case.weight != "edge_weight"):
        named[case.weight] = weight
    x: Any = given[0]
    if case.targets is not None:
        x = (given[0], given[1] if case.pair == "both" else None)
    if case.numbers:
        numbers = torch.arange(case.sources).flip(0) % case.arguments[0]
        x = None if case.numbers == "none" else numbers
    known = mine and case.form in ("adj_t", "EdgeIndex")  # by the graph itself
    if case.size or (case.pair == "one" and case.targets is not None and not known):
        named["size"] = (case.sources, case.sources if case.targets is None else case.targets)
    for _ in range(case.calls - 1 if mine else 0):  # a graph that is kept
        with torch.no_grad():
            layer(x, graph, **named)
    if mine and case.fixed and weight is not None and weight.is_floating_point():
        weight.mul_(2.0)
        layer(x, graph, **named)
        weight.mul_(0.5)
    torch.manual_seed(3)
    with torch.set_grad_enabled(case.gradients):
        out = layer(x, graph, **named)
    found: dict[str, Tensor | None] = {}
    if isinstance(out, tuple):
        out, (used, attention) = out
        found = {"attention": attention.detach(), "used": used}
        out = torch.cat([out.flatten(), attention.flatten().to(out.dtype)])
    found["result"] = out.detach()
    if case.gradients and out.requires_grad:
        slope = torch.linspace(-1, 1, out.numel(), dtype=F64).view_as(out)
        (out * slope.to(out.dtype)).sum().backward()
        leaves = {"x": given[0], "x of targets": given[1], case.weight: weight}
        leaves |= dict(layer.named_parameters())
        found |= {name: each.grad for name, each in leaves.items() if each is not None}
    return found


def compared(case: Case, mine: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> None:
    assert mine["result"] is not None and mine["result"].dtype is case.dtype
    for name in mine.keys() | theirs.keys():
        found, wanted = mine.get(name), theirs.get(name)
        if wanted is None or found is None:  # of an input on which nothing depends
            other = wanted if found is None else found
            assert other is None or not other.any(), name
            continue
        assert found.shape == wanted.shape, name
        scale = max(float(wanted.abs().max()) if wanted.numel() else 0.0, 1.0)
        near = {"rtol": NEAR[case.dtype], "atol": NEAR[case.dtype] * scale}
        torch.testing.assert_close(
            found.double(), wanted.double(), **near, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", LAYERS)
def test_random_calls_give_results_and_gradients_of_pyg(name):
    ours.clear_graph_cache()  # as if this test ran alone
    failed = []
    for number in range(CASES):
        case = drawn(name, number)
        try:
            check(case)
        except Exception as error:
            failed.append(f"{number}: {case}\n{type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} of {CASES} cases differ\n\n" + "\n\n".join(failed)
