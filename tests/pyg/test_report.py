"""``report()`` says which calls ran where, how often, and why PyG ran them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sparsetile.pyg
from sparsetile import nn as ours
from sparsetile.nn import cache
from sparsetile.pyg import matrix, reporting
from sparsetile.pyg.reporting import count
from tests.locks import waits_for
from tests.nn.cases import NODES, WIDTH, directed_graph, pyg, weights_of, without_parallel_edges

EDGES = directed_graph()
X = torch.randn(NODES, WIDTH)
FEATURES = torch.randn(EDGES.shape[1], 3)


def edge_conv() -> Any:
    return pyg.EdgeConv(nn.Linear(2 * WIDTH, 5))


def test_calls_are_counted_by_outcome():
    gcn, gat = pyg.GCNConv(WIDTH, 5), pyg.GATConv(WIDTH, 5)
    with sparsetile.pyg.patch() as patched:
        for _ in range(3):
            gcn(X, EDGES)
        gcn.explain = False
        gat(X, EDGES)
        edge_conv()(X, EDGES)
    rows = patched.report().rows
    assert [(row.name, row.ran, row.calls) for row in rows] == [
        ("EdgeConv.propagate", "PyG", 1),
        ("GATConv.forward", "sparsetile", 1),
        ("GCNConv.propagate", "sparsetile", 3),
    ]
    assert [bool(row.why) for row in rows] == [True, False, False]
    assert sparsetile.pyg.report() == patched.report()


def test_a_report_prints_a_table():
    with sparsetile.pyg.patch() as patched:
        count("GCNConv.propagate")
        count("EdgeConv.propagate", "a reason")
        for _ in range(12):
            count("EdgeConv.propagate", "another one")
    assert str(patched.report()).splitlines() == [
        "call                ran on      calls  why",
        "EdgeConv.propagate  PyG            12  another one",
        "EdgeConv.propagate  PyG             1  a reason",
        "GCNConv.propagate   sparsetile      1",
    ]


def test_counts_begin_with_a_patch_and_outlive_it():
    layer = pyg.GCNConv(WIDTH, 5)
    with sparsetile.pyg.patch():
        layer(X, EDGES)
        with sparsetile.pyg.patch() as inner:  # the same patch
            layer(X, EDGES)
        assert inner.report().rows[0].calls == 2
    layer(X, EDGES)  # PyG's, which nobody counts
    assert sparsetile.pyg.report().rows[0].calls == 2
    with sparsetile.pyg.patch() as again:
        assert again.report().rows == ()


def test_a_forward_left_to_pyg_and_its_propagate_have_rows():
    layer = pyg.ChebConv(WIDTH, 5, K=3).double()
    layer.register_propagate_forward_hook(lambda *given: None)
    with sparsetile.pyg.patch() as patched:
        layer(X.double(), EDGES)
    assert [(row.name, row.ran, row.why) for row in patched.report().rows] == [
        ("ChebConv.forward", "PyG", "the layer has hooks"),
        ("ChebConv.propagate", "PyG", "the layer has hooks"),
    ]


def changed(layer: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def hooked(layer: Any) -> Any:
    layer.register_message_forward_hook(lambda *given: None)
    return layer


class Derived(pyg.GATConv):
    """A layer of a user's."""


class Plain(pyg.MessagePassing):
    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.propagate(edge_index, x=x)


class Sized(pyg.MessagePassing):
    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.propagate(edge_index, x=x, size=(NODES, NODES + 1))


class Aggregates(Plain):
    def aggregate(self, inputs: Any, index: Any) -> Any:
        return super().aggregate(inputs, index)


def sage() -> Any:
    return pyg.SAGEConv(WIDTH, 5)


SPARSE = torch.eye(NODES).to_sparse_csr()
# Layer, what it is given, the function that gives the reason, and words of it.
WHY: dict[str, tuple[Callable[[], Any], tuple[Any, ...], str, str]] = {
    "messages": (edge_conv, (X, EDGES), "propagate", "messages are not neighbours"),
    "fuse": (lambda: changed(sage(), fuse=False), (X, EDGES), "propagate", "fuse is off"),
    "aggregate": (Aggregates, (X, EDGES), "propagate", "aggregate of its own"),
    "aggr": (lambda: pyg.SAGEConv(WIDTH, 5, "median"), (X, EDGES), "propagate", "the reduction is"),
    "hooks": (lambda: hooked(sage()), (X, EDGES), "propagate", "hooks"),
    "decomposed": (
        lambda: pyg.SAGEConv(WIDTH, 5, decomposed_layers=2), (X, EDGES), "propagate", "decomposed",
    ),
    "explain": (
        lambda: changed(sage(), explain=True, _edge_mask=torch.ones(EDGES.shape[1]),
                        _loop_mask=None, _apply_sigmoid=False),
        (X, EDGES), "propagate", "explain is on",
    ),
    "matrix": (sage, (X, SPARSE), "propagate", "passes to utils.spmm"),
    "integers": (lambda: Plain("sum"), (X.long(), EDGES), "propagate", "dtype int64"),
    "sizes": (lambda: Sized("sum"), ((X, X), EDGES), "propagate", "sizes"),
    "a maximum over parallel edges": (
        lambda: pyg.GraphConv(WIDTH, 5, "max"), (X, EDGES, weights_of(EDGES)), "propagate",
        "without parallel edges",
    ),
    "weights of another type": (
        lambda: pyg.GraphConv(WIDTH, 5), (X, EDGES, weights_of(EDGES).double()), "propagate",
        "different types",
    ),
    "node_dim": (lambda: Plain("sum", node_dim=1), (X, EDGES), "propagate", "node_dim"),
    "a derived class": (lambda: Derived(WIDTH, 5), (X, EDGES), "forward", "derived from GATConv"),
    "ignored features": (
        lambda: pyg.GATConv(WIDTH, 5), (X, EDGES, FEATURES), "forward", "ignores edge_attr",
    ),
    "matrix of attention": (
        lambda: pyg.TransformerConv(WIDTH, 5), (X, SPARSE), "forward", "sparse matrix",
    ),
    "a method of its own": (
        lambda: changed(pyg.GATConv(WIDTH, 5), message=None), (X, EDGES), "forward",
        "methods of its own",
    ),
    "features of another type": (
        lambda: pyg.GATConv(WIDTH, 5), (X.double(), EDGES), "forward", "different types",
    ),
    "missing": (lambda: pyg.GATConv(WIDTH, 5), (X,), "forward", "missing a required argument"),
    "edges without a node": (
        lambda: pyg.GATv2Conv(WIDTH, 5), (X[:9], EDGES), "forward", "edge_index",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHY)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_every_call_that_pyg_runs_has_its_reason(name):
    make, given, function, words = WHY[name]
    with sparsetile.pyg.patch() as patched:
        layer = make()
        try:
            layer(*given)
        except Exception as error:  # PyG's own
            assert "sparsetile" not in str(error)
    (row,) = (r for r in patched.report().rows if r.name == f"{type(layer).__name__}.{function}")
    assert row.ran == "PyG" and row.calls == 1
    assert words in row.why and row.why and "\n" not in row.why and len(row.why) < 160


def test_the_reason_that_a_layer_here_gives_is_kept(monkeypatch):
    def refuses(*given: Any, **named: Any) -> None:
        raise ValueError("GATConv: x must be round, got a square. Make it round")

    monkeypatch.setattr(ours.GATConv, "forward", refuses)
    with sparsetile.pyg.patch() as patched:
        pyg.GATConv(WIDTH, 5)(X, EDGES)
    assert patched.report().rows[0].why == "GATConv: x must be round, got a square"


def test_arguments_by_position_are_a_reason():
    with sparsetile.pyg.patch() as patched:
        sage().propagate(EDGES, (X, X))
    (row,) = patched.report().rows
    assert (row.name, row.why) == ("SAGEConv.propagate", "arguments were given by position")


@pytest.mark.filterwarnings("ignore")
def test_autocast_and_tracing_are_reasons():
    layer = pyg.GATConv(WIDTH, 5)
    with sparsetile.pyg.patch() as patched:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(X, EDGES)
        torch.jit.trace(layer, (X, EDGES), check_trace=False)
    why = [row.why for row in patched.report().rows if row.name == "GATConv.forward"]
    assert sorted(why) == ["autocast is on", "inside torch.jit.trace"]


def test_graphs_that_pass_by_have_a_reason(constants):
    constants(matrix, LEFT_TO_PYG=("cpu",))
    layer = pyg.GraphConv(WIDTH, 5)
    with sparsetile.pyg.patch() as patched:
        cache._Regime.short_lived = True
        layer(X, EDGES.clone(), weights_of(EDGES))
    assert "new in each step" in patched.report().rows[0].why


@pytest.mark.filterwarnings("ignore:Sparse")
def test_spmm_of_matrices_is_counted():
    from torch_geometric import utils

    edges = without_parallel_edges(EDGES)
    other = torch.sparse_coo_tensor(edges, weights_of(edges), (NODES, NODES)).to_sparse_csr()
    with sparsetile.pyg.patch() as patched:
        utils.spmm(other, X)
        sage()(X, other)  # its propagate gives the matrix to spmm
        with pytest.raises(ValueError, match="not supported"):
            utils.spmm(other, X, "std")
        with pytest.raises(RuntimeError):
            utils.spmm(other.double(), X)
    assert [(row.name, row.ran, row.calls) for row in patched.report().rows] == [
        ("SAGEConv.propagate", "PyG", 1),
        ("utils.spmm", "sparsetile", 2),
        ("utils.spmm", "PyG", 1),
        ("utils.spmm", "PyG", 1),
    ]


def test_rows_are_few_even_if_reasons_differ_at_every_call(constants):
    constants(reporting, MAX_ROWS=3)
    with sparsetile.pyg.patch() as patched:
        for number in range(10):
            count("GATConv.forward", f"wrong number {number}")
    rows = patched.report().rows
    assert len(rows) == 4 and sum(row.calls for row in rows) == 10
    assert (rows[0].why, rows[0].calls) == ("other reasons", 7)


def test_counting_and_reading_wait_for_other_threads():
    assert waits_for(reporting._lock, lambda: count("GCNConv.propagate"))
    assert waits_for(reporting._lock, sparsetile.pyg.report)
    assert waits_for(reporting._lock, reporting.clear_counts)
