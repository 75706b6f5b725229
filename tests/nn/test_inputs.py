"""Graphs in all their forms mean the same; what cannot be used is refused with a way out."""

from __future__ import annotations

import pytest
import torch

import sparsetile as st
from sparsetile.nn import GATConv, GCNConv, GINConv, SAGEConv
from tests.nn.cases import NODES, PAIRS, WIDTH, directed_graph, weights_of, without_parallel_edges

LAYERS = [
    GCNConv(WIDTH, 5),
    SAGEConv(WIDTH, 5),
    GINConv(torch.nn.Linear(WIDTH, 5)),
    GATConv(WIDTH, 5, heads=2),
]


@pytest.fixture
def x():
    return torch.randn(NODES, WIDTH)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_edge_index_classes_of_pyg_mean_what_their_tensor_means(layer, x):
    from torch_geometric import EdgeIndex
    from torch_geometric.data import Data

    edges = directed_graph()
    expected = layer(x, edges)
    assert torch.equal(layer(x, EdgeIndex(edges, sparse_size=(NODES, NODES))), expected)
    assert torch.equal(layer(x, EdgeIndex(edges)), expected)
    assert torch.equal(layer(x, Data(x=x, edge_index=edges)), expected)
    assert torch.equal(layer(x, edges.int()), expected)


def test_data_brings_its_weights_or_its_matrix(x):
    from torch_geometric.data import Data

    edges = without_parallel_edges(directed_graph())
    weight = weights_of(edges)
    layer = GCNConv(WIDTH, 5)
    data = Data(edge_index=edges, edge_weight=weight)
    assert torch.equal(layer(x, data), layer(x, edges, weight))
    assert torch.equal(layer(x, data, 2 * weight), layer(x, edges, 2 * weight))
    adj_t = torch.sparse_coo_tensor(edges.flip(0), weight, (NODES, NODES)).to_sparse_csr()
    assert torch.equal(layer(x, Data(adj_t=adj_t)), layer(x, adj_t))


def test_gradients_flow_into_the_values_of_a_sparse_tensor(x):
    edges = without_parallel_edges(directed_graph())
    for layer in (GCNConv(WIDTH, 5), SAGEConv(WIDTH, 5), GINConv(torch.nn.Linear(WIDTH, 5))):
        weight = weights_of(edges).requires_grad_()
        adj_t = torch.sparse_coo_tensor(edges.flip(0), weight, (NODES, NODES), is_coalesced=False)
        layer(x, adj_t).square().sum().backward()
        assert weight.grad is not None and bool((weight.grad != 0).any())


def test_a_plan_is_used_as_it_is(x):
    edges = without_parallel_edges(directed_graph())
    weight = weights_of(edges)
    plan = st.plan((edges.flip(0), weight, (NODES, NODES)), n=8)
    dense = torch.zeros(NODES, NODES)
    dense[edges[1], edges[0]] = weight
    gcn = GCNConv(WIDTH, 5)
    torch.testing.assert_close(gcn(x, plan), dense @ gcn.lin(x) + gcn.bias)
    gin = GINConv(torch.nn.Linear(WIDTH, 5))
    torch.testing.assert_close(gin(x, plan), gin.nn(dense @ x + x))
    sage = SAGEConv(WIDTH, 5)
    count = (dense != 0).sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(sage(x, plan), sage.lin_l(dense @ x / count) + sage.lin_r(x))
    ordered = st.plan((edges.flip(0), weight, (NODES, NODES)), n=8, reorder_columns=True)
    torch.testing.assert_close(gcn(x, ordered), gcn(x, plan))


def test_gat_takes_the_pattern_of_a_plan(x):
    edges = directed_graph()  # with parallel edges: the plan's values are one per edge
    layer = GATConv(WIDTH, 5, heads=2, add_self_loops=False)
    plan = st.plan((edges.flip(0), None, (NODES, NODES)), n=8)
    torch.testing.assert_close(layer(x, plan), layer(x, edges))


def test_csr_of_the_package_is_a_matrix_of_targets_and_sources(x):
    edges = without_parallel_edges(directed_graph())
    csr = st.plan((edges.flip(0), None, (NODES, NODES)), n=8)._csr
    layer = GINConv(torch.nn.Linear(WIDTH, 5))
    torch.testing.assert_close(layer(x, csr), layer(x, edges))


def test_plain_edges_alone_work_where_pyg_is_missing(interpreter):
    code = (
        "import sys, torch, sparsetile\n"
        "assert 'sparsetile.nn' not in sys.modules\n"
        "sys.modules['torch_geometric'] = None\n"
        "from sparsetile.nn import GATConv, GCNConv\n"
        "edges = torch.tensor([[0, 1], [1, 2]])\n"
        "print(GCNConv(2, 3)(torch.ones(3, 2), edges).shape[1])\n"
        "print(GATConv(2, 3)(torch.ones(3, 2), edges).shape[1])\n"
    )
    done = interpreter(code)
    assert done.stdout.split() == ["3", "3"], done.stderr


def plan_of(**options):
    return st.plan((directed_graph().flip(0), None, (NODES, NODES)), n=8, **options)


EDGES = directed_graph()
X = torch.randn(NODES, WIDTH)
GCN = GCNConv(WIDTH, 5)
BACK = GCNConv(WIDTH, 5, flow="target_to_source")


@pytest.mark.parametrize(
    "error, words, call",
    [
        (TypeError, "torch_geometric.nn.GCNConv", lambda: GCNConv(2, 3, decomposed_layers=2)),
        (TypeError, "node_dim", lambda: GCNConv(2, 3, node_dim=0)),
        (ValueError, "aggr must be 'add'", lambda: GCNConv(2, 3, aggr="mean")),
        (ValueError, "flow must be one of", lambda: GCNConv(2, 3, flow="forward")),
        (ValueError, "in_channels must be at least 1, or -1", lambda: GCNConv(-2, 3)),
        (ValueError, "out_channels must be at least 1", lambda: GCNConv(2, -1)),
        (ValueError, "1 with project", lambda: SAGEConv(-1, 3, project=True)),
        (TypeError, "out_channels must be a whole number", lambda: SAGEConv(2, "3")),
        (
            ValueError,
            "edge_index first",
            lambda: GCNConv(2, 3, add_self_loops=True, normalize=False),
        ),
        (ValueError, "torch_geometric.nn.SAGEConv", lambda: SAGEConv(2, 3, aggr="lstm")),
        (ValueError, "torch_geometric.nn.SAGEConv", lambda: SAGEConv(2, 3, aggr=["mean", "max"])),
        (ValueError, "edge_dim must be at least 1", lambda: GATConv(2, 3, edge_dim=0)),
        (TypeError, "nn must be a module", lambda: GINConv(3)),
        (TypeError, "SAGEConv", lambda: GCN((X, X), EDGES)),
        (TypeError, "x must be a float tensor", lambda: GCN(X.long(), EDGES)),
        (ValueError, r"x must be of shape \[..., nodes, 8\]", lambda: GCN(X[:, :3], EDGES)),
        (ValueError, r"edge_index must be of shape \[2, E\]", lambda: GCN(X, EDGES.t())),
        (TypeError, "edge_index must be int64", lambda: GCN(X, EDGES.float())),
        (TypeError, "Pass edge_index", lambda: GCN(X, [[0, 1], [1, 2]])),
        (ValueError, "one weight per column", lambda: GCN(X, EDGES, torch.ones(3))),
        (TypeError, "edge_weight must be a float", lambda: GCN(X, EDGES, EDGES[0])),
        (ValueError, r"edge_index\[1\]", lambda: GCN(X[:9], torch.tensor([[0], [9]]))),
        (ValueError, r"edge_index\[0\]", lambda: GCN(X[:9], torch.tensor([[9], [0]]))),
        (ValueError, "self-loops at 9", lambda: GCN(X[:9], torch.tensor([[9], [9]]))),
        (ValueError, "Pass the transposed", lambda: BACK(X, torch.eye(NODES).to_sparse_csr())),
        (ValueError, "Pass plan.T", lambda: BACK(X, plan_of())),
        (ValueError, "values of the matrix", lambda: GCN(X, plan_of(), weights_of(EDGES))),
        (ValueError, "40 source and 40 target", lambda: GCN(X[:39], plan_of())),
        (ValueError, "add_self_loops=False", lambda: GATConv(WIDTH, 5)(X, plan_of())),
        (
            ValueError,
            "reorder_columns",
            lambda: GATConv(WIDTH, 5, add_self_loops=False)(X, plan_of(reorder_columns=True)),
        ),
        (ValueError, "with edge_dim", lambda: GATConv(WIDTH, 5)(X, EDGES, X)),
        (ValueError, "once for each", lambda: GATConv(WIDTH, 5)(X[None], EDGES)),
        (ValueError, r"GATConv: x must be of .* 8\]", lambda: GATConv(WIDTH, 5)(X[:, :3], EDGES)),
        (ValueError, "size must be", lambda: SAGEConv(WIDTH, 5)(X, EDGES, size=(3, 4))),
        (TypeError, "a pair", lambda: SAGEConv(WIDTH, 5)("x", EDGES)),
        (
            ValueError,
            "flip",
            lambda: SAGEConv(WIDTH, 5, flow="target_to_source")((X, X), EDGES),
        ),
    ],
)
def test_errors_say_what_to_do(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_an_edge_index_of_another_size_is_refused(x):
    from torch_geometric import EdgeIndex

    with pytest.raises(ValueError, match="41 source"):
        GCN(x, EdgeIndex(EDGES, sparse_size=(NODES + 1, NODES)))


def test_every_layer_says_its_name_in_errors(x):
    for make in PAIRS.values():
        layer = make(5)[0]
        with pytest.raises(TypeError, match=f"^{type(layer).__name__}: "):
            layer(x, "edges")
