"""Products use A's values as they are now, however they were written."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.core.epoch import epoch, written
from sparsetile.nn import GCNConv, GINConv, SAGEConv, aggregate, clear_graph_cache

NODES, COUNT = 4, 6


@pytest.fixture(autouse=True)
def cold_caches() -> Iterator[None]:
    clear_graph_cache()
    st.clear_plan_cache()
    yield
    if "sparsetile.pyg" in sys.modules:
        sys.modules["sparsetile.pyg"].unpatch()


@pytest.fixture
def edges() -> Tensor:
    return torch.tensor([[0, 1, 2, 3, 3, 1], [1, 2, 0, 0, 2, 3]])


def dense(edges: Tensor, weight: Tensor) -> Tensor:
    """A[target, source]."""
    A = torch.zeros(NODES, NODES, dtype=torch.float64)
    return A.index_put((edges[1], edges[0]), weight.detach().double(), accumulate=True)


def normalised(edges: Tensor, weight: Tensor) -> Tensor:
    A = dense(edges, weight) + torch.eye(NODES, dtype=torch.float64)
    scale = A.sum(1).rsqrt()
    return scale[:, None] * A * scale


Call = Callable[[Tensor, Tensor, Tensor], Tensor]
Expected = Callable[[Tensor, Tensor], Tensor]


def gcn() -> tuple[Call, Expected]:
    conv = GCNConv(3, 3, bias=False)
    with torch.no_grad():
        conv.lin.weight.copy_(torch.eye(3))
    return lambda x, e, w: conv(x, e, w), normalised


def sums() -> tuple[Call, Expected]:
    return lambda x, e, w: aggregate(x, e, w), dense


def product() -> tuple[Call, Expected]:
    def call(x: Tensor, e: Tensor, w: Tensor) -> Tensor:
        return st.spmm((e.flip(0), w, (NODES, NODES)), x)

    return call, dense


def kept_product() -> tuple[Call, Expected]:
    """The same tensor object for the edges in each call, as a user who keeps A has it."""
    held: dict[int, Tensor] = {}

    def call(x: Tensor, e: Tensor, w: Tensor) -> Tensor:
        turned = held.setdefault(id(e), e.flip(0))
        return st.spmm((turned, w, (NODES, NODES)), x)

    return call, dense


def pyg_layer() -> tuple[Call, Expected]:
    pytest.importorskip("torch_geometric")
    from torch_geometric.nn import GraphConv

    import sparsetile.pyg

    conv = GraphConv(3, 3, bias=False)
    with torch.no_grad():
        conv.lin_rel.weight.copy_(torch.eye(3))
        conv.lin_root.weight.zero_()
    sparsetile.pyg.patch()
    return lambda x, e, w: conv(x, e, w), dense


def pyg_gcn() -> tuple[Call, Expected]:
    pytest.importorskip("torch_geometric")
    from torch_geometric.nn import GCNConv as Theirs

    import sparsetile.pyg

    conv = Theirs(3, 3, bias=False)
    with torch.no_grad():
        conv.lin.weight.copy_(torch.eye(3))
    sparsetile.pyg.patch()
    return lambda x, e, w: conv(x, e, w), normalised


CALLS = [gcn, sums, product, kept_product, pyg_layer, pyg_gcn]
OPTIMISERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
}


def check(made: tuple[Call, Expected], x: Tensor, e: Tensor, w: Tensor) -> None:
    call, expected = made
    with torch.no_grad():
        C = call(x, e, w).double()
    torch.testing.assert_close(C, expected(e, w) @ x.double(), atol=1e-5, rtol=1e-5)


def weights(seed: int = 0) -> Tensor:
    return torch.rand(COUNT, generator=torch.Generator().manual_seed(seed)) + 0.5


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("kind", ["parameter", "tensor", "detached view"])
@pytest.mark.parametrize("make", CALLS)
def test_steps_of_an_optimiser_are_seen(make, kind, optimiser, edges):
    made, x = make(), torch.randn(NODES, 3)
    w = torch.nn.Parameter(weights()) if kind == "parameter" else weights().requires_grad_()
    read = w.detach() if kind == "detached view" else w
    step = OPTIMISERS[optimiser]([w])
    for _ in range(3):
        check(made, x, edges, read)
        w.grad = torch.rand_like(w)
        step.step()
    check(made, x, edges, read)


@pytest.mark.parametrize("kind", ["parameter", "plain tensor"])
@pytest.mark.parametrize("make", CALLS)
def test_weights_assigned_through_data_are_seen(make, kind, edges):
    made, x = make(), torch.randn(NODES, 3)
    w = torch.nn.Parameter(weights()) if kind == "parameter" else weights()
    for seed in range(30):
        check(made, x, edges, w)
        w.data = weights(seed + 1)
        w.data = weights(seed + 100)  # freed memory is given out again


@pytest.mark.parametrize("make", CALLS)
def test_weights_written_by_vector_to_parameters_are_seen(make, edges):
    made, x, w = make(), torch.randn(NODES, 3), torch.nn.Parameter(weights())
    for seed in range(30):
        check(made, x, edges, w)
        torch.nn.utils.vector_to_parameters(weights(seed + 1), [w])


@pytest.mark.parametrize("make", [each for each in CALLS if each is not kept_product])
def test_edges_assigned_through_data_are_seen(make, edges):
    made, x, w = make(), torch.randn(NODES, 3), weights()
    for seed in range(30):
        check(made, x, edges, w)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(2):
            off = torch.randint(1, NODES, (6,), generator=generator)
            source = torch.randint(NODES, (6,), generator=generator)
            edges.data = torch.stack([source, (source + off) % NODES])


@pytest.mark.parametrize("make", [each for each in CALLS if each is not kept_product])
def test_new_tensors_at_reused_addresses_are_new(make):
    made, x = make(), torch.randn(NODES, 3)
    for seed in range(30):
        edges, w = torch.randint(2, (2, COUNT)) * 2, weights(seed)
        edges[1] = 3 - edges[1]
        edges[:, 0] = torch.tensor([seed % 3, 3])
        check(made, x, edges, w)
        del edges, w
        gc.collect(1)  # what is young: all that this round made


@pytest.mark.parametrize("make", CALLS)
def test_a_write_through_data_is_seen_after_changed(make, edges):
    made, x, w = make(), torch.randn(NODES, 3), weights()
    check(made, x, edges, w)
    w.data.mul_(3.0)
    st.changed()
    check(made, x, edges, w)


TRAINED = {
    "parameter": torch.nn.Parameter,
    "frozen parameter": lambda w: torch.nn.Parameter(w, requires_grad=False),
    "tensor with a gradient": lambda w: w.requires_grad_(),
}


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("make", CALLS)
def test_trained_weights_are_read_at_every_call(make, kind, edges):
    """Even writes that torch does not count are seen, without ``changed()``."""
    made, x, w = make(), torch.randn(NODES, 3), TRAINED[kind](weights())
    for _ in range(3):
        check(made, x, edges, w)
        w.data.mul_(2.0)
        w.data[0] += 1.0  # a normalised layer would not show one factor
    check(made, x, edges, w)


def test_every_optimiser_step_begins_an_epoch():
    w = torch.nn.Parameter(weights())
    w.grad = torch.ones_like(w)
    before = epoch()
    torch.optim.SGD([w], lr=0.1, fused=True).step()
    assert epoch() > before
    before = epoch()
    st.changed()
    assert epoch() > before


def test_a_matrix_whose_storage_is_replaced_is_read_again():
    A = torch.eye(4).to_sparse_csr()
    B = torch.randn(4, 2)
    assert torch.equal(st.spmm(A, B), B)
    for k in range(20):
        turned = torch.eye(4).roll(k % 4, 0)
        A = turned.to_sparse_csr()
        assert torch.equal(st.spmm(A, B), turned @ B)


@pytest.mark.parametrize("layer", [lambda: SAGEConv(3, 3), lambda: GINConv(torch.nn.Linear(3, 3))])
def test_unweighted_layers_keep_their_plans_while_an_optimiser_runs(layer, edges, calls_of):
    from sparsetile.nn import graph as module

    made = calls_of(module, "plan")
    conv, x = layer(), torch.randn(NODES, 3)
    step = torch.optim.SGD(conv.parameters(), lr=0.1)
    for _ in range(6):
        conv(x, edges).sum().backward()
        step.step()
    assert len(made) == 1


def test_plain_weights_keep_one_plan_while_an_optimiser_runs(edges, calls_of):
    from sparsetile.nn import graph as module

    made = calls_of(module, "plan")
    conv, x, w = GCNConv(3, 3), torch.randn(NODES, 3), weights()
    step = torch.optim.SGD(conv.parameters(), lr=0.1)
    for _ in range(20):
        conv(x, edges, w).sum().backward()
        step.step()
    assert len(made) == 1


def test_pyg_weights_keep_one_graph_while_an_optimiser_runs(edges, calls_of):
    pytest.importorskip("torch_geometric")
    from torch_geometric.nn import GCNConv as Theirs

    import sparsetile.pyg
    from sparsetile.nn import graph as module

    made = calls_of(module, "plan")
    conv, x = Theirs(3, 3), torch.randn(NODES, 3)
    trained = torch.nn.Parameter(weights())
    step = torch.optim.SGD([*conv.parameters(), trained], lr=1e-3)
    with sparsetile.pyg.patch():
        for w in (weights(), trained):
            made.clear()
            for _ in range(12):
                conv(x, edges, w).sum().backward()
                step.step()
            assert len(made) <= 1
    assert trained.grad is not None and trained.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["parameter", "plain tensor"])
@pytest.mark.parametrize("make", CALLS)
def test_inference_mode_reads_weights_too(make, kind, edges):
    made, x = make(), torch.randn(NODES, 3)
    w = torch.nn.Parameter(weights()) if kind == "parameter" else weights()
    call, expected = made
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            C = call(x, edges, w).double()
        torch.testing.assert_close(C.clone(), expected(edges, w) @ x.double(), atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            w.mul_(2)


def test_one_weight_of_any_stride_is_read_in_inference_mode():
    with torch.inference_mode():
        weight = torch.full((1, 2), 3.0)[:, 0]
        out = aggregate(torch.ones(2, 1), torch.tensor([[0], [1]]), weight)
    assert out.tolist() == [[0.0], [3.0]]


def test_steps_of_other_parameters_leave_plain_weights_as_they_are():
    mine, other = weights(), torch.nn.Parameter(weights())
    written(mine)  # from now on steps are told apart
    before, began = written(mine), epoch()
    other.grad = torch.ones_like(other)
    torch.optim.SGD([other], lr=0.1, fused=True).step()
    assert epoch() > began and written(mine) == before and written(other) > began
    torch.optim.SGD([mine], lr=0.1).step()  # a plain tensor may be stepped, too
    assert written(mine) > before
    st.changed()
    assert written(mine) == epoch() == written(other)


def test_values_of_plain_weights_are_computed_once_while_a_layer_trains(edges, calls_of):
    from sparsetile.nn import gcn as module

    computed = calls_of(module, "normalised_values")
    conv, x, w = GCNConv(3, 3), torch.randn(NODES, 3), weights()
    step = torch.optim.AdamW(conv.parameters(), lr=0.1, fused=True)
    for _ in range(6):
        conv(x, edges, w).sum().backward()
        step.step()
    assert len(computed) == 1
