"""PyG's layers give the same results and gradients under the patch, and are given back after it."""

from __future__ import annotations

import copy
import gc
import pickle
import sys

import pytest
import torch
from torch import nn

import sparsetile.pyg
from sparsetile.nn import cache, clear_graph_cache
from sparsetile.nn import graph as graphs
from sparsetile.nn.sampled import SampledGraph
from sparsetile.pyg import matrix, norms, patching
from tests.locks import Slow, at_once, waits_for
from tests.nn.cases import FLOWS, NODES, WIDTH, directed_graph, pyg, weights_of
from tests.nn.cases import without_parallel_edges as simple

utils = pytest.importorskip("torch_geometric.utils")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def mlp(width=WIDTH, out=5):
    return nn.Sequential(nn.Linear(width, 12), nn.ReLU(), nn.Linear(12, out))


# Layers of PyG that are a product of A and the features. Those whose ``forward`` takes weights are
# in WEIGHTED too.
FUSED = {
    "APPNP": lambda **m: pyg.APPNP(3, 0.2, **m),
    "ARMAConv": lambda **m: pyg.ARMAConv(WIDTH, 5, num_layers=2, **m),
    "ClusterGCNConv": lambda **m: pyg.ClusterGCNConv(WIDTH, 5, **m),
    "GatedGraphConv": lambda **m: pyg.GatedGraphConv(WIDTH, 2, **m),
    "GCN2Conv": lambda **m: pyg.GCN2Conv(WIDTH, 0.3, **m),
    "GCNConv": lambda **m: pyg.GCNConv(WIDTH, 5, **m),
    "GINConv": lambda **m: pyg.GINConv(mlp(), train_eps=True, **m),
    "GraphConv": lambda **m: pyg.GraphConv(WIDTH, 5, **m),
    "GraphConv-max": lambda **m: pyg.GraphConv(WIDTH, 5, aggr="max", **m),
    "GraphConv-mean": lambda **m: pyg.GraphConv(WIDTH, 5, aggr="mean", **m),
    "LGConv": lambda **m: pyg.LGConv(**m),
    "MFConv": lambda **m: pyg.MFConv(WIDTH, 5, **m),
    "MixHopConv": lambda **m: pyg.MixHopConv(WIDTH, 5, powers=[0, 1, 2], **m),
    "SAGEConv": lambda **m: pyg.SAGEConv(WIDTH, 5, **m),
    "SAGEConv-max": lambda **m: pyg.SAGEConv(WIDTH, 5, aggr="max", **m),
    "SAGEConv-min": lambda **m: pyg.SAGEConv(WIDTH, 5, aggr="min", **m),
    "SAGEConv-project": lambda **m: pyg.SAGEConv(WIDTH, 5, normalize=True, project=True, **m),
    "SGConv": lambda **m: pyg.SGConv(WIDTH, 5, K=2, **m),
    "SSGConv": lambda **m: pyg.SSGConv(WIDTH, 5, alpha=0.1, K=2, **m),
    "SimpleConv": lambda **m: pyg.SimpleConv(**m),
    "SimpleConv-mean": lambda **m: pyg.SimpleConv("mean", "cat", **m),
    "TAGConv": lambda **m: pyg.TAGConv(WIDTH, 5, K=2, **m),
    "WLConvContinuous": lambda **m: pyg.WLConvContinuous(**m),
}
WEIGHTED = (
    "APPNP", "ARMAConv", "GatedGraphConv", "GCN2Conv", "GCNConv", "GraphConv", "GraphConv-mean",
    "GraphConv-max", "LGConv", "MixHopConv", "SGConv", "SSGConv", "SimpleConv", "SimpleConv-mean",
    "TAGConv",
)  # fmt: skip
# Layers whose messages or aggregation are more than that: PyG's own code must run.
OWN = {
    "AGNNConv": lambda: pyg.AGNNConv(),
    "EdgeConv": lambda: pyg.EdgeConv(mlp(2 * WIDTH)),
    "EGConv": lambda: pyg.EGConv(WIDTH, 8, aggregators=["sum", "var"]),
    "FeaStConv": lambda: pyg.FeaStConv(WIDTH, 5),
    "GENConv": lambda: pyg.GENConv(WIDTH, 5),
    "LEConv": lambda: pyg.LEConv(WIDTH, 5),
    "ResGatedGraphConv": lambda: pyg.ResGatedGraphConv(WIDTH, 5),
    "SAGEConv-mean-and-max": lambda: pyg.SAGEConv(WIDTH, 5, aggr=["mean", "max"]),
    "SAGEConv-median": lambda: pyg.SAGEConv(WIDTH, 5, aggr="median"),
}


@pytest.fixture
def products(monkeypatch):
    """Shapes of the features that sparsetile multiplied with."""
    seen = []
    original = graphs.Graph.aggregate

    def counted(self, x, *arguments, **options):
        seen.append(tuple(x.shape))
        return original(self, x, *arguments, **options)

    monkeypatch.setattr(graphs.Graph, "aggregate", counted)
    return seen


def run(layer, x, graph, weight=None, **options):
    """Return the result, and gradients of x, of the weights and of every parameter."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    given = {} if weight is None else {"edge_weight": weight.clone().requires_grad_()}
    features = (x, x) if isinstance(layer, pyg.GCN2Conv) else (x,)
    torch.manual_seed(1)
    out = layer(*features, graph, **given, **options)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    out.backward(slope)
    parts = [out.detach(), x.grad, *(w.grad for w in given.values())]
    return parts + [p.grad for p in layer.parameters() if p.grad is not None]


def assert_same(layer, x, graph, weight=None, **options):
    expected = run(layer, x, graph, weight, **options)
    with sparsetile.pyg.patch():
        found = run(layer, x, graph, weight, **options)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", FUSED)
def test_layers_give_the_same_from_edges_without_messages(name, flow, products):
    assert_same(FUSED[name](flow=flow), torch.randn(NODES, WIDTH), directed_graph())
    assert products


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_and_their_gradients_are_the_same(name, products):
    edge_index = directed_graph()
    edge_index[:, 30] = torch.tensor([9, 10])  # PyG gives each of two self-loops a gradient
    if name.endswith("max"):
        edge_index = simple(edge_index)
    assert_same(FUSED[name](), torch.randn(NODES, WIDTH), edge_index, weights_of(edge_index))
    assert products


def test_a_weighted_maximum_over_parallel_edges_is_pyg_s(products):
    edge_index = directed_graph()
    layer = pyg.GraphConv(WIDTH, 5, aggr="max")
    assert_same(layer, torch.randn(NODES, WIDTH), edge_index, weights_of(edge_index))
    assert not products


def test_graphs_that_pass_by_are_left_to_pyg_where_they_would_be_planned(products, constants):
    """As on a GPU: weights and maxima of a block; a graph that stays is taken after all."""
    constants(matrix, LEFT_TO_PYG=("cpu",))
    clear_graph_cache()
    layer, x = pyg.GraphConv(WIDTH, 5), torch.randn(NODES, WIDTH)
    edge_index = directed_graph()
    weight = weights_of(edge_index)
    want = layer(x, edge_index, weight)
    with sparsetile.pyg.patch():
        cache._Regime.short_lived = True
        for _ in range(graphs.SHORT_LIVED_CALLS):
            torch.testing.assert_close(layer(x, edge_index, weight), want, **CLOSE)
        assert not products
        torch.testing.assert_close(layer(x, edge_index, weight), want, **CLOSE)
        assert products, "this one stays"
    clear_graph_cache()
    assert not cache._graphs.owners()
    cache._Regime.short_lived = True
    passing = edge_index.clone()
    assert cache.is_short_lived(passing) and len(cache._graphs.owners()) == 1
    del passing
    assert not cache._graphs.owners()


@pytest.mark.parametrize("name", OWN)
def test_other_layers_run_as_pyg_has_them(name, products):
    assert_same(OWN[name]().eval(), torch.randn(NODES, WIDTH), directed_graph())
    assert not products


SPARSE = ("GCNConv", "GINConv", "GraphConv", "SAGEConv", "SAGEConv-max", "SGConv", "TAGConv")


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.filterwarnings("ignore:Converting sparse tensor")
def test_sparse_tensors_give_the_same(name, layout, products):
    edge_index = simple(directed_graph())
    dense = torch.zeros(NODES, NODES)
    dense[edge_index[1], edge_index[0]] = weights_of(edge_index)
    assert_same(FUSED[name](), torch.randn(NODES, WIDTH), dense.to_sparse(layout=layout))
    assert products


@pytest.mark.parametrize("order", [None, "row", "col"])
@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GraphConv", "GraphConv-mean"])
def test_an_edge_index_object_gives_the_same(name, order, products):
    from torch_geometric import EdgeIndex

    edges = directed_graph()
    if order is not None:
        edges = edges[:, edges[0 if order == "row" else 1].argsort()]
    graph = EdgeIndex(edges, sparse_size=(NODES, NODES), sort_order=order)
    x, layer = torch.randn(NODES, WIDTH), FUSED[name]()
    expected = layer(x, graph)
    with sparsetile.pyg.patch():
        torch.testing.assert_close(layer(x, graph), expected, **CLOSE)
    assert products


@pytest.mark.parametrize("targets", [True, False])
@pytest.mark.parametrize("name", ["SAGEConv", "SAGEConv-max", "GINConv", "GraphConv"])
def test_two_sets_of_nodes_give_the_same(name, targets, products):
    edge_index = torch.stack([torch.randint(20, (60,)), torch.randint(9, (60,))])
    x = torch.randn(20, WIDTH), torch.randn(9, WIDTH) if targets else None
    layer = FUSED[name]()
    expected = layer(x, edge_index, size=(20, 9))
    with sparsetile.pyg.patch():
        torch.testing.assert_close(layer(x, edge_index, size=(20, 9)), expected, **CLOSE)
    assert products == [(20, WIDTH)]


def test_static_graphs_of_batched_features_give_the_same(products):
    layer, x = pyg.GCNConv(WIDTH, 5), torch.randn(3, NODES, WIDTH)
    assert_same(layer, x, directed_graph())
    assert products == [(3, NODES, 5)]


def test_errors_of_wrong_sizes_are_pyg_s():
    layer, edge_index = pyg.SAGEConv(WIDTH, 5), directed_graph()
    x = torch.randn(NODES, WIDTH), torch.randn(7, WIDTH)
    with sparsetile.pyg.patch(), pytest.raises(ValueError, match="Encountered tensor with size"):
        layer(x, edge_index, size=(NODES, 9))


@pytest.mark.parametrize("node", [-1, NODES])
def test_errors_of_edges_without_a_node_are_pyg_s(node):
    layer, edge_index = pyg.SAGEConv(WIDTH, 5), directed_graph()
    edge_index[0, 5] = node
    with sparsetile.pyg.patch(), pytest.raises(IndexError, match="valid indices"):
        layer(torch.randn(NODES, WIDTH), edge_index)


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GraphConv", "GINConv"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_models_are_scripted_under_the_patch_as_pyg_has_them(name):
    layer, x, edge_index = FUSED[name](), torch.randn(NODES, WIDTH), directed_graph()
    expected = layer(x, edge_index)
    with sparsetile.pyg.patch():
        scripted = torch.jit.script(layer)
        torch.testing.assert_close(scripted(x, edge_index), expected, **CLOSE)
    torch.testing.assert_close(scripted(x, edge_index), expected, **CLOSE)


def pickled(layer):
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_layers_are_copied_and_pickled_under_the_patch(copied, products):
    layer, x, edge_index = pyg.GCNConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    with sparsetile.pyg.patch():
        torch.testing.assert_close(copied(layer)(x, edge_index), layer(x, edge_index), **CLOSE)
    assert len(products) == 2
    torch.testing.assert_close(copied(layer)(x, edge_index), layer(x, edge_index), **CLOSE)
    assert len(products) == 2


def test_a_layer_told_not_to_fuse_makes_messages(products):
    layer, x, edge_index = pyg.GCNConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    layer.fuse = False
    assert_same(layer, x, edge_index)
    assert not products


def test_layers_of_one_s_own_with_plain_messages_are_fused(products):
    class Plain(pyg.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

    class Scaled(Plain):
        def message(self, x_j):
            return 2 * x_j

    class Updated(Plain):
        def update(self, inputs, x):
            return inputs + x

    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    assert_same(Plain("mean"), x, edge_index)
    assert len(products) == 1
    assert_same(Scaled("mean"), x, edge_index)  # a message that PyG alone knows
    assert len(products) == 1
    assert_same(Updated("max"), x, edge_index)
    assert len(products) == 2


def test_hooks_see_pyg_s_messages(products):
    layer, x, edge_index = pyg.SAGEConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    shapes = []
    handle = layer.register_message_forward_hook(lambda _, __, out: shapes.append(out.shape))
    with sparsetile.pyg.patch():
        layer(x, edge_index)
        assert shapes == [(edge_index.shape[1], WIDTH)] and not products
        handle.remove()
        layer(x, edge_index)
        assert len(shapes) == 1 and len(products) == 1


def test_explanations_mask_pyg_s_messages(products):
    layer, x, edge_index = pyg.SAGEConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    with sparsetile.pyg.patch():
        plain = layer(x, edge_index)
        layer.explain, layer._apply_sigmoid = True, False
        layer._edge_mask = torch.zeros(edge_index.shape[1])
        masked = layer(x, edge_index)
        torch.testing.assert_close(masked, layer.lin_l.bias + layer.lin_r(x), **CLOSE)
        layer.explain = False
        torch.testing.assert_close(layer(x, edge_index), plain, **CLOSE)
    assert products and not torch.allclose(masked, plain)


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo, torch.sparse_csc])
@pytest.mark.parametrize("reduce", ["sum", "add", "mean", "max", "min"])
@pytest.mark.filterwarnings("ignore:Converting sparse tensor")
def test_spmm_of_matrices_is_the_same(reduce, layout, products):
    edge_index = simple(directed_graph())
    dense = torch.zeros(NODES, 50)
    dense[edge_index[0], edge_index[1]] = weights_of(edge_index)
    src, other = dense.to_sparse(layout=layout), torch.randn(50, WIDTH)
    expected = utils.spmm(src, other, reduce)
    with sparsetile.pyg.patch():
        torch.testing.assert_close(utils.spmm(src, other, reduce), expected, **CLOSE)
    assert products == [(50, WIDTH)]


def test_gradients_of_a_matrix_s_values_are_the_same(products):
    edge_index = simple(directed_graph())
    dense = torch.zeros(NODES, NODES)
    dense[edge_index[0], edge_index[1]] = weights_of(edge_index)
    other, slope, found = torch.randn(NODES, WIDTH), torch.randn(NODES, WIDTH), []
    for on in (False, True):
        src = dense.to_sparse_csr().requires_grad_()
        if on:
            sparsetile.pyg.patch()
        utils.spmm(src, other).backward(slope)
        found.append(src.grad.to_dense())
    torch.testing.assert_close(found[1], found[0], **CLOSE)
    assert len(products) == 1


def test_what_spmm_refuses_is_refused_as_before():
    dense = torch.eye(4)
    with sparsetile.pyg.patch():
        with pytest.raises(ValueError, match="'src' must be"):
            utils.spmm(dense, dense)
        with pytest.raises(ValueError, match="not supported"):
            utils.spmm(dense.to_sparse_csr(), dense, "std")
        with pytest.raises(RuntimeError):
            utils.spmm(dense.double().to_sparse_csr(), dense)


def test_unpatch_restores_every_function():
    from torch_geometric.nn.conv import gcn_conv, message_passing, sage_conv

    pyg.SAGEConv(4, 4), pyg.GCNConv(4, 4)

    def bound():
        return (
            utils.spmm, sys.modules["torch_geometric.utils._spmm"].spmm, sage_conv.spmm,
            gcn_conv.spmm, gcn_conv.gcn_norm, pyg.SAGEConv.propagate, pyg.GCNConv.propagate,
            message_passing.MessagePassing._set_jittable_templates,
            message_passing.MessagePassing.propagate,
        )  # fmt: skip

    before = bound()
    sparsetile.pyg.patch()
    during = bound()
    # All but the general ``propagate``, whose place the generated ones take.
    assert [old is new for old, new in zip(before, during, strict=True)] == [False] * 8 + [True]
    sparsetile.pyg.unpatch()
    assert all(old is new for old, new in zip(before, bound(), strict=True))


def test_classes_first_made_under_the_patch_are_given_back_too(products):
    class Late(pyg.GCNConv):
        pass

    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    with sparsetile.pyg.patch():
        layer = Late(WIDTH, 5)
        found = layer(x, edge_index)
        assert len(products) == 1
    torch.testing.assert_close(layer(x, edge_index), found, **CLOSE)
    assert len(products) == 1
    for name in ("propagate", "_orig_propagate", "_jinja_propagate"):
        assert not hasattr(getattr(Late, name), "_sparsetile_original")


def test_patches_nest():
    assert not sparsetile.pyg.is_patched()
    with sparsetile.pyg.patch():
        with sparsetile.pyg.patch():
            assert sparsetile.pyg.is_patched()
        assert sparsetile.pyg.is_patched()
    assert not sparsetile.pyg.is_patched()
    sparsetile.pyg.unpatch()
    sparsetile.pyg.patch()
    assert sparsetile.pyg.is_patched()


def test_a_patch_waits_for_a_thread_that_makes_or_undoes_one():
    assert waits_for(patching._lock, sparsetile.pyg.unpatch)
    with sparsetile.pyg.patch():
        assert waits_for(patching._lock, sparsetile.pyg.patch)
        assert sparsetile.pyg.is_patched()


def test_edges_are_normalised_once_for_threads_that_ask_together():
    from torch_geometric.nn.conv import gcn_conv

    slow, edge_index = Slow(gcn_conv.gcn_norm), directed_graph()
    norm = norms.new_gcn_norm(lambda *given, **named: slow(*given, **named), lambda: True)
    (one, _), (other, _) = at_once(lambda: norm(edge_index, None, NODES))
    assert one is other and slow.calls == 1


def test_normalised_edges_are_kept_while_the_graph_lives():
    layer, x, edge_index = pyg.GCNConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    with sparsetile.pyg.patch():
        first = layer(x, edge_index)
        layer(x, edge_index)
        assert len(cache._graphs) == 1 and len(norms._norms) == 1
        edge_index[1, 3:9] = 20
        changed = layer(x, edge_index)
        torch.testing.assert_close(changed, layer(x, edge_index.clone()), **CLOSE)
        assert not torch.allclose(changed, first)
        del edge_index
        gc.collect()
        assert not len(cache._graphs) and not norms._norms.owners()


def test_a_graph_that_normalising_leaves_as_it_is_does_not_stay():
    layer = pyg.GCNConv(WIDTH, 5, add_self_loops=False)
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    with sparsetile.pyg.patch():
        layer(x, edge_index), layer(x, edge_index)
        assert len(norms._norms) == 1
        del edge_index
        gc.collect()
        assert not len(cache._graphs) and not len(norms._norms)


@pytest.mark.parametrize("form", ["EdgeIndex", "matrix"])
def test_only_plain_edges_are_normalised_once(form):
    """Others are new objects at each call, or have values of their own."""
    from torch_geometric import EdgeIndex
    from torch_geometric.nn.conv import gcn_conv

    edges = simple(directed_graph()).contiguous()
    size = (NODES, NODES)
    if form == "EdgeIndex":
        given = EdgeIndex(edges)
    else:
        given = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), size).to_sparse_csr()
    expected = gcn_conv.gcn_norm(given, None, NODES)
    with sparsetile.pyg.patch():
        found = gcn_conv.gcn_norm(given, None, NODES)
        assert not len(norms._norms)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is theirs is None or torch.equal(mine.to_dense(), theirs.to_dense())


def test_graphs_that_pass_by_are_multiplied_as_blocks(monkeypatch):
    monkeypatch.setattr(cache._Regime, "short_lived", True)
    layer, x, edge_index = pyg.SAGEConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    expected = layer(x, edge_index)
    with sparsetile.pyg.patch():
        torch.testing.assert_close(layer(x, edge_index), expected, **CLOSE)
    (entry,) = cache._graphs.values()
    assert isinstance(entry.graph, SampledGraph)


@pytest.mark.parametrize("aggr, taken", [("mean", False), ("sum", False), ("max", True)])
def test_few_new_edges_of_a_gpu_are_left_to_pyg(aggr, taken, monkeypatch, constants):
    constants(matrix, LEFT_TO_PYG=("cpu",), GROUPED_ON="cpu")
    layer, x = pyg.SAGEConv(WIDTH, 5, aggr=aggr), torch.randn(NODES, WIDTH)
    for least, expected in ((10**6, taken), (1, True)):
        constants(matrix, LEAST_NEW=least)
        clear_graph_cache()
        monkeypatch.setattr(cache._Regime, "short_lived", True)
        edge_index = directed_graph()
        want = layer(x, edge_index)
        with sparsetile.pyg.patch():
            torch.testing.assert_close(layer(x, edge_index), want, **CLOSE)
        assert bool(cache._graphs.values()) == expected


def test_normalised_edges_that_someone_changed_are_made_again():
    from torch_geometric.nn.conv import gcn_conv

    edge_index = directed_graph()
    with sparsetile.pyg.patch():
        _, weights = gcn_conv.gcn_norm(edge_index, None, NODES)
        expected = weights.clone()
        weights.zero_()
        assert torch.equal(gcn_conv.gcn_norm(edge_index, None, NODES)[1], expected)


def test_weights_that_learn_are_normalised_at_every_call():
    layer, x, edge_index = pyg.GCNConv(WIDTH, 5), torch.randn(NODES, WIDTH), directed_graph()
    weight = weights_of(edge_index).requires_grad_()
    with sparsetile.pyg.patch():
        for _ in range(2):
            layer(x, edge_index, weight).sum().backward()
    assert not len(norms._norms) and bool(weight.grad.any())


@pytest.mark.parametrize("trained", [False, True])
def test_normalising_in_a_capture_is_refused(trained, capturing):
    from torch_geometric.nn.conv import gcn_conv

    edge_index = directed_graph()
    weight = weights_of(edge_index).requires_grad_(trained)
    text = r"^gcn_norm: the call must be outside of a CUDA graph's capture .* normalize=False\.$"

    def normalised(captured):
        capturing(captured)
        return gcn_conv.gcn_norm(edge_index, weight, NODES)[1]

    with sparsetile.pyg.patch():
        with pytest.raises(ValueError, match=text):
            normalised(captured=True)
        expected = normalised(captured=False)
        if trained:  # normalised at every call
            with pytest.raises(ValueError, match=text):
                normalised(captured=True)
        else:
            assert normalised(captured=True) is expected


def test_a_model_trains_alike():
    x, edge_index = torch.randn(NODES, WIDTH), directed_graph()
    labels = torch.arange(NODES) % 3
    losses = []
    for on in (False, True):
        torch.manual_seed(0)
        model = pyg.models.GCN(WIDTH, 16, 2, 3)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        if on:
            sparsetile.pyg.patch()
        history = []
        for _ in range(10):
            loss = nn.functional.cross_entropy(model(x, edge_index), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            history.append(loss.item())
        losses.append(history)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


_WITHOUT_PYG = """
import sys, sparsetile.pyg
print("torch_geometric" in sys.modules)
sys.modules["torch_geometric"] = None
try:
    sparsetile.pyg.patch()
except ModuleNotFoundError as error:
    print(error)
print(sparsetile.pyg.is_patched())
"""


def test_pyg_is_imported_by_patch_alone_and_missed_clearly(interpreter):
    done = interpreter(_WITHOUT_PYG)
    imported, error, patched = done.stdout.splitlines()
    assert (imported, patched) == ("False", "False")
    assert error.startswith("patch: torch_geometric must be installed, got no such package. Run")
