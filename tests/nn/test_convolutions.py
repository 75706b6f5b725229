"""GraphConv, ChebConv and RGCNConv compute what PyG's layers compute, with all their options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsetile import nn as ours
from sparsetile.nn import clear_graph_cache, relations, rgcn
from tests.nn.cases import (
    FLOWS,
    NODES,
    PAIRS,
    WIDTH,
    Largest,
    assert_same,
    directed_graph,
    pyg,
    same_weights,
    weights_of,
    without_parallel_edges,
)

F32, F64 = torch.float32, torch.float64
RELATIONS = 5


def edge_types(edge_index: Tensor, relations: int = RELATIONS) -> Tensor:
    """Types with two parallel edges of one relation, and one relation without edges."""
    generator = torch.Generator().manual_seed(6)
    drawn = torch.randint(relations, (edge_index.shape[1],), generator=generator)
    drawn[drawn == 3] = 2
    drawn[1] = drawn[0]
    return drawn


def pair_of(name: str, *arguments: Any, **named: Any) -> tuple[Any, Any]:
    return getattr(ours, name)(*arguments, **named), getattr(pyg, name)(*arguments, **named)


def two_sets(sources: int = 20, targets: int = 9, edges: int = 60) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randint(each, (edges,), generator=generator) for each in (sources, targets)]
    edge_index = torch.stack(drawn)
    edge_index[:, 0] = edge_index[:, 1]
    return edge_index


# -- the same random numbers -------------------------------------------------------------------

SEEDED = [
    ("GCNConv", (WIDTH, 5), {}),
    ("SAGEConv", (WIDTH, 5), {}),
    ("SAGEConv", (WIDTH, 5), {"project": True, "bias": False}),
    ("GATConv", (WIDTH, 5), {"heads": 3, "residual": True}),
    ("GATConv", (WIDTH, 5), {"heads": 2, "edge_dim": 4}),
    ("GATv2Conv", ((WIDTH, 6), 5), {"heads": 2, "edge_dim": 4, "residual": True}),
    ("GATv2Conv", (WIDTH, 5), {"share_weights": True, "bias": False, "concat": False}),
    ("TransformerConv", ((WIDTH, 6), 5), {"heads": 2, "edge_dim": 4, "beta": True}),
    ("TransformerConv", (WIDTH, 5), {"heads": 2, "root_weight": False, "concat": False}),
    ("GraphConv", ((WIDTH, 6), 5), {}),
    ("ChebConv", (WIDTH, 5, 3), {}),
    ("RGCNConv", (WIDTH, 5, 3), {"num_bases": 2}),
    ("FastRGCNConv", (WIDTH, 6, 3), {"num_blocks": 2}),
]


@pytest.mark.parametrize("name, arguments, options", SEEDED)
def test_a_seed_gives_the_weights_that_pyg_draws(name, arguments, options):
    layers = []
    for module in (ours, pyg):
        torch.manual_seed(11)
        layers.append(getattr(module, name)(*arguments, **options))
        layers.append(torch.rand(1))  # whoever draws next gets the same
    mine, after, theirs, expected = layers
    assert list(mine.state_dict()) == list(theirs.state_dict())
    for key, value in mine.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[key]), key
    assert torch.equal(after, expected)
    torch.manual_seed(3)
    mine.reset_parameters()
    torch.manual_seed(3)
    theirs.reset_parameters()
    for key, value in mine.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[key]), key


# -- GraphConv ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("out", [5, 12])
@pytest.mark.parametrize("aggr", ["add", "mean", "max", "min"])
def test_graph_conv_with_and_without_weights(aggr, out, flow, dtype):
    edge_index = without_parallel_edges(directed_graph())
    pair = same_weights(pair_of("GraphConv", WIDTH, out, aggr, flow=flow))
    pair = pair[0].to(dtype), pair[1].to(dtype)
    x = torch.randn(NODES, WIDTH, dtype=dtype)
    assert_same(pair, x, edge_index)
    assert_same(pair, x, edge_index, weights_of(edge_index, dtype))


@pytest.mark.parametrize("aggr", ["add", "mean"])
def test_graph_conv_counts_each_parallel_edge_with_its_weight(aggr):
    edge_index = directed_graph()
    pair = same_weights(pair_of("GraphConv", WIDTH, 5, aggr, bias=False))
    assert_same(pair, torch.randn(NODES, WIDTH), edge_index, weights_of(edge_index))


@pytest.mark.parametrize("aggr", ["add", "mean", "max"])
def test_graph_conv_between_two_sets_of_nodes(aggr):
    pair = same_weights(pair_of("GraphConv", (WIDTH, 6), 5, aggr))
    x = torch.randn(20, WIDTH), torch.randn(9, 6)
    assert_same(pair, x, two_sets())
    assert_same(pair, (x[0], None), two_sets(), None, (20, 9))


def test_graph_conv_takes_every_form_of_graph():
    from torch_geometric import EdgeIndex
    from torch_geometric.data import Data

    edge_index = without_parallel_edges(directed_graph()).contiguous()
    weight, x = weights_of(edge_index), torch.randn(NODES, WIDTH)
    mine, theirs = same_weights(pair_of("GraphConv", WIDTH, 5))
    expected = mine(x, edge_index, weight)
    assert torch.equal(mine(x, EdgeIndex(edge_index), weight), expected)
    assert torch.equal(mine(x, Data(edge_index=edge_index, edge_weight=weight)), expected)
    adj_t = torch.sparse_coo_tensor(edge_index.flip(0), weight, (NODES, NODES)).to_sparse_csr()
    torch.testing.assert_close(mine(x, adj_t), expected)
    torch.testing.assert_close(theirs(x, adj_t), expected, rtol=1e-4, atol=1e-5)


# -- ChebConv ----------------------------------------------------------------------------------


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("K", [1, 2, 3, 6])
@pytest.mark.parametrize("normalization", ["sym", "rw", None])
def test_cheb_conv_of_every_laplacian_and_size(normalization, K, flow):
    edge_index = directed_graph()  # with self-loops, which are not used
    for out in (5, 12):
        pair = pair_of("ChebConv", WIDTH, out, K, normalization, flow=flow)
        pair = tuple(each.double() for each in same_weights(pair))
        assert_same(pair, torch.randn(NODES, WIDTH, dtype=F64), edge_index)


@pytest.mark.parametrize("normalization", ["sym", "rw", None])
def test_cheb_conv_with_weights_and_their_gradients(normalization):
    # PyG's gradient of a node without edges is NaN.
    edge_index = torch.cat([directed_graph(), torch.arange(NODES).expand(2, -1)], 1)
    edge_index[1, -NODES:] = (edge_index[1, -NODES:] + 1) % NODES
    pair = pair_of("ChebConv", WIDTH, 5, 3, normalization)
    pair = tuple(each.double() for each in same_weights(pair))
    x = torch.randn(NODES, WIDTH, dtype=F64)
    assert_same(pair, x, edge_index, weights_of(edge_index, F64))
    with torch.no_grad():  # weights that are kept
        weight = weights_of(edge_index, F64)
        torch.testing.assert_close(pair[0](x, edge_index, weight), pair[1](x, edge_index, weight))


@pytest.mark.parametrize("normalization", ["sym", None])
def test_cheb_conv_scales_by_the_given_eigenvalue(normalization):
    edge_index, x = directed_graph(), torch.randn(NODES, WIDTH, dtype=F64)
    pair = same_weights(pair_of("ChebConv", WIDTH, 5, 3, normalization))
    pair = tuple(each.double() for each in pair)
    batch = (torch.arange(NODES) >= 20).long()
    inside = edge_index[:, batch[edge_index[0]] == batch[edge_index[1]]]
    for given in (1.5, 3.0, torch.tensor(2.5, dtype=F64)):
        torch.testing.assert_close(
            pair[0](x, edge_index, lambda_max=given), pair[1](x, edge_index, lambda_max=given)
        )
    more = {"batch": batch, "lambda_max": torch.tensor([1.5, 3.0], dtype=F64)}
    assert_same(pair, x, inside, **more)


def test_cheb_conv_weights_of_isolated_nodes_have_finite_gradients():
    layer, weight = ours.ChebConv(WIDTH, 4, 2), torch.zeros(2, requires_grad=True)
    layer(torch.randn(3, WIDTH), torch.tensor([[0, 1], [1, 2]]), weight).sum().backward()
    assert bool(weight.grad.isfinite().all())


def test_cheb_conv_multiplies_by_a_plan_as_it_is():
    import sparsetile as st

    dense = torch.randn(NODES, NODES) * (torch.rand(NODES, NODES) < 0.2)
    layer, x = ours.ChebConv(WIDTH, 5, 2), torch.randn(NODES, WIDTH)
    expected = layer.lins[0](x) + dense @ layer.lins[1](x) + layer.bias
    found = layer(x, st.plan(dense.to_sparse_csr(), 16))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_sparse_tensor_is_the_same_graph_to_cheb_conv():
    edge_index = without_parallel_edges(directed_graph())
    weight, x = weights_of(edge_index), torch.randn(NODES, WIDTH)
    adj_t = torch.sparse_coo_tensor(edge_index.flip(0), weight, (NODES, NODES)).to_sparse_csr()
    layer = ours.ChebConv(WIDTH, 5, 3)
    torch.testing.assert_close(layer(x, adj_t), layer(x, edge_index, weight))


# -- RGCNConv ----------------------------------------------------------------------------------

DECOMPOSED: list[dict[str, Any]] = [{}, {"num_bases": 2}, {"num_blocks": 2}]


@pytest.mark.parametrize("most", [rgcn.MOST_MAPPED, 0])  # all relations at once, and one by one
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("options", DECOMPOSED, ids=["plain", "bases", "blocks"])
@pytest.mark.parametrize("aggr", ["mean", "add", "max"])
def test_rgcn_of_every_decomposition_and_reduction(monkeypatch, aggr, options, flow, most):
    monkeypatch.setattr(rgcn, "MOST_MAPPED", most)
    edge_index = directed_graph()
    for out in (6, 12):
        pair = pair_of("RGCNConv", WIDTH, out, RELATIONS, aggr=aggr, flow=flow, **options)
        assert_same(
            same_weights(pair), torch.randn(NODES, WIDTH), edge_index, edge_types(edge_index)
        )


@pytest.mark.parametrize("options", DECOMPOSED, ids=["plain", "bases", "blocks"])
@pytest.mark.parametrize("aggr", ["mean", "add"])
def test_fast_rgcn_in_double_precision(aggr, options):
    edge_index = directed_graph()
    pair = same_weights(pair_of("FastRGCNConv", WIDTH, 6, RELATIONS, aggr=aggr, **options))
    pair = tuple(each.double() for each in pair)
    x = torch.randn(NODES, WIDTH, dtype=F64)
    assert_same(pair, x, edge_index, edge_types(edge_index))


@pytest.mark.parametrize("options", [{}, {"num_bases": 2}], ids=["plain", "bases"])
@pytest.mark.parametrize("aggr", ["mean", "add"])
def test_rgcn_without_features(aggr, options):
    edge_index = directed_graph()
    pair = same_weights(pair_of("RGCNConv", NODES, 6, RELATIONS, aggr=aggr, **options))
    assert_same(pair, None, edge_index, edge_types(edge_index))
    pair = same_weights(pair_of("RGCNConv", 30, 6, RELATIONS, aggr=aggr, **options))
    assert_same(pair, torch.randint(30, (NODES,)), edge_index, edge_types(edge_index))


@pytest.mark.parametrize("root_weight, bias", [(True, False), (False, True), (False, False)])
def test_rgcn_between_two_sets_of_nodes(root_weight, bias):
    options = {"root_weight": root_weight, "bias": bias}
    pair = same_weights(pair_of("RGCNConv", (WIDTH, 6), 5, RELATIONS, **options))
    edge_index = two_sets()
    x = torch.randn(20, WIDTH), torch.randn(9, 6)
    if root_weight:
        assert_same(pair, x, edge_index, edge_types(edge_index))
    else:  # nothing depends on the targets' features
        types = edge_types(edge_index)
        torch.testing.assert_close(pair[0](x, edge_index, types), pair[1](x, edge_index, types))


def test_rgcn_without_edges_maps_the_targets():
    pair = same_weights(pair_of("RGCNConv", WIDTH, 5, RELATIONS))
    none = torch.empty(2, 0, dtype=torch.int64)
    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(pair[0](x, none, none[0]), pair[1](x, none, none[0]))
    bare = ours.RGCNConv(WIDTH, 5, RELATIONS, root_weight=False, bias=False)
    assert torch.equal(bare(x, none, none[0]), torch.zeros(4, 5))


def test_rgcn_takes_an_edge_index_and_data():
    from torch_geometric import EdgeIndex
    from torch_geometric.data import Data

    edge_index, x = directed_graph(), torch.randn(NODES, WIDTH)
    types = edge_types(edge_index)
    layer = ours.RGCNConv(WIDTH, 5, RELATIONS)
    expected = layer(x, edge_index, types)
    assert torch.equal(layer(x, EdgeIndex(edge_index, sparse_size=(NODES, NODES)), types), expected)
    assert torch.equal(layer(x, Data(edge_index=edge_index, edge_type=types)), expected)
    assert torch.equal(layer(x, edge_index.int(), types.int()), expected)


def test_rgcn_notices_changed_edges_and_types():
    edge_index, x = directed_graph(), torch.randn(NODES, WIDTH)
    types = edge_types(edge_index)
    mine, theirs = same_weights(pair_of("RGCNConv", WIDTH, 5, RELATIONS))
    for change in (lambda: None, lambda: types.fill_(1), lambda: edge_index[:, 3:9].fill_(2)):
        change()
        torch.testing.assert_close(
            mine(x, edge_index, types), theirs(x, edge_index, types), rtol=1e-4, atol=1e-5
        )


def test_rgcn_plans_its_groups_once(monkeypatch):
    monkeypatch.setattr(rgcn, "MOST_MAPPED", 0)
    clear_graph_cache()
    made = []
    find = relations.find_graph
    monkeypatch.setattr(relations, "find_graph", lambda *a, **k: made.append(1) or find(*a, **k))
    edge_index, x = directed_graph(), torch.randn(NODES, WIDTH)
    types = edge_types(edge_index, 40)  # more than the cache of graphs keeps
    layer = ours.RGCNConv(WIDTH, 5, 40)
    for _ in range(3):
        layer(x, edge_index, types)
    assert len(made) == len(types.unique()) > 32
    clear_graph_cache()
    layer(x, edge_index, types)
    assert len(made) == 2 * len(types.unique())


@pytest.mark.parametrize("name", ["graph", "graph-mean", "cheb", "rgcn"])
def test_nothing_of_edges_times_features_is_made(monkeypatch, name):
    monkeypatch.setattr(rgcn, "MOST_MAPPED", 0)
    edge_index = directed_graph(2000)
    x, more = torch.randn(NODES, WIDTH, requires_grad=True), ()
    if name == "rgcn":
        layer, more = ours.RGCNConv(WIDTH, 8, RELATIONS), (edge_types(edge_index),)
    else:
        layer = PAIRS[name](8)[0]
    with Largest() as largest:
        layer(x, edge_index, *more).sum().backward()
    assert 0 < largest.numbers < 2000 * WIDTH / 2


# -- errors ------------------------------------------------------------------------------------

EDGES, X = directed_graph(), torch.randn(NODES, WIDTH)
TYPES = edge_types(EDGES)
EYE = torch.eye(NODES).to_sparse_csr()
GRAPH_MAX = ours.GraphConv(WIDTH, 3, "max")
RGCN = ours.RGCNConv(WIDTH, 6, RELATIONS)


@pytest.mark.parametrize(
    "error, words, call",
    [
        (ValueError, "GraphConv: aggr must be add", lambda: ours.GraphConv(2, 3, aggr="lstm")),
        (ValueError, "Join them", lambda: GRAPH_MAX(X, EDGES, weights_of(EDGES))),
        (ValueError, "ChebConv: normalization must be one of", lambda: ours.ChebConv(2, 3, 2, "l")),
        (ValueError, "ChebConv: K must be at least 1", lambda: ours.ChebConv(2, 3, 0)),
        (TypeError, "Use SAGEConv", lambda: ours.ChebConv(2, 3, 2)((X, X), EDGES)),
        (ValueError, "RGCNConv: aggr must be one of", lambda: ours.RGCNConv(2, 3, 2, aggr="mul")),
        (ValueError, "FastRGCNConv: aggr", lambda: ours.FastRGCNConv(2, 3, 2, aggr="max")),
        (ValueError, "Give one of both", lambda: ours.RGCNConv(2, 4, 2, 2, 2)),
        (ValueError, "a divisor of 8 and 6", lambda: ours.RGCNConv(8, 6, 2, num_blocks=4)),
        (TypeError, "edge_type must be a tensor", lambda: RGCN(X, EDGES)),
        (TypeError, "edge_type must be int64", lambda: RGCN(X, EDGES, TYPES.float())),
        (ValueError, r"edge_type must be of shape \(160,\)", lambda: RGCN(X, EDGES, TYPES[:3])),
        (ValueError, "edge_type must be numbers of relations", lambda: RGCN(X, EDGES, TYPES + 1)),
        (ValueError, "edge_index must be numbers of nodes", lambda: RGCN(X[:9], EDGES, TYPES)),
        (TypeError, "edges with their types", lambda: RGCN(X, EYE, TYPES)),
        (ValueError, "x must be of shape", lambda: RGCN(X[:, :3], EDGES, TYPES)),
        (ValueError, "once for each", lambda: RGCN(X[None], EDGES, TYPES)),
        (TypeError, "a pair of tensors", lambda: RGCN("x", EDGES, TYPES)),
        (
            ValueError,
            "features with num_blocks",
            lambda: ours.RGCNConv(8, 6, 5, num_blocks=2)(TYPES, EDGES, TYPES),
        ),
        (
            ValueError,
            "features with num_blocks",
            lambda: ours.RGCNConv(8, 6, 5, num_blocks=2)((None, X), EDGES, TYPES),
        ),
        (
            TypeError,
            "features with aggr='max'",
            lambda: ours.RGCNConv(NODES, 6, 5, aggr="max")(None, EDGES, TYPES),
        ),
        (
            ValueError,
            "Swap the rows",
            lambda: ours.RGCNConv(8, 6, 5, flow="target_to_source")((X, X), EDGES, TYPES),
        ),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_an_edge_index_of_another_size_is_refused():
    from torch_geometric import EdgeIndex

    with pytest.raises(ValueError, match="41 source"):
        RGCN(X, EdgeIndex(EDGES, sparse_size=(NODES + 1, NODES)), TYPES)


def test_relations_of_the_same_edges_are_kept_apart_by_how_they_are_reduced():
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    kinds = edge_types(edge_index)
    for aggr in ("mean", "max", "sum", "max", "mean"):
        mine, theirs = same_weights(pair_of("RGCNConv", WIDTH, 5, RELATIONS, aggr=aggr))
        found, wanted = mine(x, edge_index, kinds), theirs(x, edge_index, kinds)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_as_many_relations_are_mapped_at_once_as_fit(monkeypatch):
    layer, x, edge_index = (
        ours.RGCNConv(WIDTH, 5, RELATIONS),
        torch.randn(NODES, WIDTH),
        directed_graph(),
    )
    taken: list[int] = []
    real = rgcn.relation_groups

    def noted(*given: Any) -> Any:
        taken.append(given[7])
        return real(*given)

    monkeypatch.setattr(rgcn, "relation_groups", noted)
    results = []
    for fits in (1, 2, RELATIONS):
        monkeypatch.setattr(rgcn, "MOST_MAPPED", fits * NODES * 5 * 4)
        results.append(layer(x, edge_index, edge_types(edge_index)))
    assert taken == [1, 2, RELATIONS]
    for each in results[1:]:
        torch.testing.assert_close(each, results[0], rtol=1e-4, atol=1e-5)
    # Only features of sources are mapped, however many targets there are.
    pair, few = (torch.randn(NODES, WIDTH), torch.randn(3 * NODES, WIDTH)), edge_index[:, :20]
    monkeypatch.setattr(rgcn, "MOST_MAPPED", 2 * NODES * 5 * 4)
    ours.RGCNConv((WIDTH, WIDTH), 5, RELATIONS)(pair, few, edge_types(few))
    assert taken[-1] == 2


def test_arguments_that_nobody_has_are_refused():
    with pytest.raises(TypeError, match="RGCNConv: "):
        ours.RGCNConv(WIDTH, 5, RELATIONS, nodes=3)
