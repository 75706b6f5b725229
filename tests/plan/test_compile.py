"""torch.compile: what is traced whole, and what breaks the graph but works."""

from __future__ import annotations

import pytest
import torch

import sparsetile as st
from sparsetile.intake import as_csr

ROWS, COLS, N = 6, 5, 4


@pytest.fixture(autouse=True)
def fresh_tracer():
    torch._dynamo.reset()
    st.clear_plan_cache()


@pytest.fixture
def dense():
    values = torch.arange(1.0, ROWS * COLS + 1).reshape(ROWS, COLS)
    return values * (torch.arange(ROWS * COLS).reshape(ROWS, COLS) % 3 == 0)


@pytest.fixture
def x():
    return torch.randn(COLS, N, generator=torch.Generator().manual_seed(0))


def whole(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def broken(function):
    return torch.compile(function, backend="aot_eager")


def test_spmm_and_plan_of_a_sparse_tensor_break_the_graph_and_work(dense, x):
    A = dense.to_sparse_csr()
    for function in (
        lambda B: st.spmm(A, B) + 1,
        lambda B: st.plan(A, N) @ B + 1,
    ):
        torch.testing.assert_close(broken(function)(x), dense @ x + 1)
    given = broken(lambda matrix, B: st.spmm(matrix, B) + 1)
    torch.testing.assert_close(given(A, x), dense @ x + 1)


def test_spmm_sees_changes_of_the_matrix_between_compiled_calls(dense, x):
    A = dense.to_sparse_csr()
    function = broken(lambda B: st.spmm(A, B) * 2)
    torch.testing.assert_close(function(x), 2 * dense @ x)
    A.values().mul_(3)
    torch.testing.assert_close(function(x), 6 * dense @ x)


@pytest.mark.parametrize("called", ["spmm", "plan"])
def test_a_graph_that_must_not_break_says_what_to_do(dense, x, called):
    csr = as_csr(dense.to_sparse_csr())
    function = whole(lambda B: st.spmm(csr, B) if called == "spmm" else st.plan(csr, N) @ B)
    advice = "a plan made outside" if called == "spmm" else "outside of what is compiled"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=advice):
        function(x)


def test_exporting_a_call_that_looks_for_changes_says_what_to_do(dense, x):
    class OneCall(torch.nn.Module):
        def forward(self, B):
            return st.spmm(csr, B)

    csr = as_csr(dense.to_sparse_csr())
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a plan made outside"):
        torch.export.export(OneCall(), (x,), strict=True)
    exported = torch.export.export(OneCall(), (x,), strict=False).module()
    torch.testing.assert_close(exported(2 * x), 2 * dense @ x)


def test_a_loaded_plan_breaks_the_graph_and_works(tmp_path, dense, x):
    st.plan(dense.to_sparse_csr(), N).save(tmp_path / "a.safetensors")
    function = broken(lambda B: st.load_plan(tmp_path / "a.safetensors") @ B + 1)
    torch.testing.assert_close(function(x), dense @ x + 1)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_a_product_into_out_is_traced_whole(dense, lead):
    plan = st.plan(dense.to_sparse_csr(), N)
    B, C = torch.randn(*lead, COLS, N), torch.ones(*lead, ROWS, N)
    returned = whole(lambda b, c: plan.run(b, out=c, alpha=2.0, beta=3.0))(B, C)
    torch.testing.assert_close(C, 2 * dense @ B + 3)
    torch.testing.assert_close(returned, C)


def test_an_out_made_inside_is_traced_whole(dense, x):
    plan = st.plan(dense.to_sparse_csr(), N)

    def function(B):
        C = torch.empty(ROWS, N)
        plan.run(B, out=C)
        return C + 1

    torch.testing.assert_close(whole(function)(x), dense @ x + 1)


def test_an_out_that_shares_memory_with_b_is_right_when_compiled(dense, x):
    square = st.plan(dense[:COLS].to_sparse_csr(), N)
    expected = dense[:COLS] @ x
    given = x.clone()
    whole(lambda b: square.run(b, out=b))(given)
    torch.testing.assert_close(given, expected)


def test_the_first_use_of_the_transpose_is_traced_whole(dense):
    plan = st.plan(dense.to_sparse_csr(), N)
    G = torch.ones(ROWS, N)
    assert len(plan._family.variants()) == 1
    torch.testing.assert_close(whole(lambda g: plan.T @ g)(G), dense.T @ G)
    transposed = plan.T
    torch.testing.assert_close(whole(lambda b: transposed.T @ b)(G[:COLS]), dense @ G[:COLS])


@pytest.mark.parametrize("kind", ["csr tuple", "edge tuple", "update_values"])
def test_a_plan_that_follows_trainable_values_is_traced_whole(dense, x, kind):
    csr = as_csr(dense.to_sparse_csr())
    leaf = csr.values.clone().requires_grad_()
    if kind == "csr tuple":
        plan = st.plan((csr.indptr, csr.indices, leaf, csr.shape), N)
    elif kind == "edge tuple":
        edges = dense.to_sparse_coo().coalesce().indices()
        plan = st.plan((edges, leaf, csr.shape), N)
    else:
        plan = st.plan(csr, N).update_values(leaf)
    function = whole(lambda B: plan @ B)
    C = function(x)
    torch.testing.assert_close(C, dense @ x)
    C.sum().backward()
    plan.run(x, values=(again := csr.values.clone().requires_grad_())).sum().backward()
    torch.testing.assert_close(leaf.grad, again.grad)
    with torch.no_grad():
        leaf.mul_(2)
    torch.testing.assert_close(function(x), 2 * dense @ x)


def test_a_plan_that_follows_a_sparse_tensor_breaks_the_graph_and_works(dense, x):
    A = dense.to_sparse_csr().requires_grad_()
    plan = st.plan(A, N)
    C = broken(lambda B: plan @ B)(x)
    torch.testing.assert_close(C, dense @ x)
    C.sum().backward()
    assert A.grad is not None
