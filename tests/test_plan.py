"""Plans: what they refuse and in which words, values that change or are followed, the transpose."""

from __future__ import annotations

import gc
import itertools
import json
import weakref

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile import planner
from sparsetile.reorder import REORDERERS
from sparsetile.systems import SYSTEMS
from tests.contracts.cases import assert_close, csr_of, random_matrix

MATRIX = random_matrix(30, 20, 0.2)


def made(n: int = 4, **kwargs) -> st.Plan:
    return st.plan(csr_of(MATRIX), n, **kwargs)


def dense(rows: int = 20, cols: int = 4, **kwargs) -> torch.Tensor:
    return torch.randn(rows, cols, **kwargs)


def said(error: type[Exception], call) -> str:
    """The text of the error that ``call`` raises, which must be of exactly this class."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    return str(caught.value)


# -- planning -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, kind, text",
    [
        (-1, ValueError, "plan: n must be between 0 and 2147483647, got -1. "),
        (2.5, ValueError, "plan: n must be a whole number, got 2.5. "),
        ("4", TypeError, "plan: n must be a whole number, got '4'. "),
        (None, TypeError, "plan: n must be a whole number, got NoneType. "),
    ],
)
def test_a_width_that_is_no_size_is_refused(n, kind, text):
    assert said(kind, lambda: made(n)).startswith(text)


def test_an_unknown_system_is_refused_with_the_known_ones():
    text = said(ValueError, lambda: made(system="gpu"))
    assert text == (
        f"plan: system must be one of {['auto', *SYSTEMS]}, got 'gpu'. "
        "Choose a name from that list."
    )


def test_an_unknown_way_to_tune_is_refused():
    assert said(ValueError, lambda: made(tune="fast")) == (
        "plan: tune must be one of ['model', 'measure'], got 'fast'. Choose a name from that list."
    )


def test_an_unknown_order_is_refused_with_the_known_ones():
    assert said(ValueError, lambda: made(reorder="best")) == (
        f"plan: reorder must be one of {['auto', *REORDERERS]}, got 'best'. "
        "Choose a name from that list."
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool, "float32"])
def test_a_dtype_that_is_no_float_is_refused(dtype):
    text = said(TypeError, lambda: made(dtype=dtype))
    assert text.startswith("plan: dtype must be one of torch.float16, torch.bfloat16, ")
    assert text.endswith(f"got {dtype}. Choose one of those.")


@pytest.mark.parametrize(
    "A", [None, 5, torch.ones(3, 3), np.ones((3, 3)), (1, 2), object()], ids=lambda a: str(type(a))
)
def test_what_is_no_sparse_matrix_is_refused(A):
    assert said(TypeError, lambda: st.plan(A, 4)).startswith(
        "plan: A must be a sparse matrix, got "
    )


def test_a_system_that_cannot_serve_says_why_and_so_do_the_others():
    text = said(st.UnsupportedError, lambda: made(system="csr"))
    assert text.startswith(
        "plan: system must be able to serve this product, got csr. Each system's reason:\n"
    )
    assert "  csr: runs on cuda, A is on cpu" in text
    assert "  cusparse: runs on cuda, A is on cpu" in text


def test_a_product_no_system_can_serve_lists_every_system(monkeypatch):
    for system in SYSTEMS.values():
        monkeypatch.setattr(type(system), "further_reasons", lambda self, request: ["is away"])
    text = said(st.UnsupportedError, made)
    assert "got no system. " in text
    for name in SYSTEMS:
        assert f"  {name}: " in text
    assert text.count("is away") == len(SYSTEMS)


def test_determinism_is_torch_s_own_setting_unless_given():
    assert not made().deterministic
    assert made(deterministic=True).deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert made().deterministic and not made(deterministic=False).deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_type_of_a_pattern_is_torch_s_default():
    assert st.plan(csr_of(MATRIX, pattern=True), 4).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert st.plan(csr_of(MATRIX, pattern=True), 4).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_values_are_brought_to_the_type_asked_for():
    plan = made(dtype=torch.float64)
    B = dense(dtype=torch.float64)
    assert_close(plan @ B, csr_of(MATRIX), B)


@pytest.mark.parametrize("name", REORDERERS)
def test_every_order_gives_the_same_product(name):
    plan, B = made(reorder=name), dense()
    assert plan.reorder == name
    assert_close(plan @ B, csr_of(MATRIX), B)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_an_order_of_the_caller_s_own_is_taken(dtype):
    order = torch.randperm(30).to(dtype)
    plan, B = made(reorder=order), dense()
    assert plan.reorder == "given"
    assert_close(plan @ B, csr_of(MATRIX), B)
    order.zero_()
    assert_close(plan @ B, csr_of(MATRIX), B)


@pytest.mark.parametrize(
    "order", [torch.arange(29), torch.zeros(30), torch.arange(30) + 1, torch.arange(30).view(1, 30)]
)
def test_an_order_that_repeats_or_misses_rows_is_refused(order):
    text = said(ValueError, lambda: made(reorder=order))
    assert text.startswith("plan: reorder must be a permutation of the 30 rows of A, got a tensor ")


def test_measuring_runs_every_able_system_and_keeps_the_fastest():
    plan = made(tune="measure")
    assert plan.info["considered"].keys() == {"cpu", "dense"}
    assert plan.system == min(plan.info["considered"], key=plan.info["considered"].__getitem__)
    B = dense()
    assert_close(plan @ B, csr_of(MATRIX), B)


def test_a_plan_shares_no_memory_with_the_matrix():
    csr, B = csr_of(MATRIX), dense()
    plan = st.plan(csr, 4)
    before = plan @ B
    csr.indptr.zero_()
    csr.indices.zero_()
    csr.values.zero_()
    assert torch.equal(plan @ B, before)


def test_a_plan_keeps_neither_the_matrix_nor_the_operand_alive():
    A = torch.tensor(MATRIX.toarray(), dtype=torch.float32).to_sparse_csr()
    B = dense()
    plan = st.plan(A, 4)
    C = plan @ B
    watched = [weakref.ref(A), weakref.ref(B), weakref.ref(C)]
    del A, B, C
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


def test_files_and_scipy_matrices_go_to_the_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    target = planner._target_device
    assert target(MATRIX, None) == torch.device("cuda", 3)
    assert target("graph.mtx", None) == torch.device("cuda", 3)
    assert target(csr_of(MATRIX), None) is None, "stays where it is"
    assert target(MATRIX, "cpu") == torch.device("cpu")
    assert target(MATRIX, "cuda") == torch.device("cuda", 3)
    assert target(MATRIX, "cuda:1") == torch.device("cuda", 1)


# -- products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("B", [None, 3, np.ones((20, 4)), [[1.0]]], ids=lambda b: str(type(b)))
def test_an_operand_that_is_no_tensor_is_refused(B):
    assert said(TypeError, lambda: made().run(B)) == (
        f"run: B must be a torch tensor, got {type(B).__name__}. Convert it with torch.as_tensor."
    )


@pytest.mark.parametrize("shape", [(), (20,), (4, 20), (19, 4), (2, 4, 20)])
def test_an_operand_of_another_shape_is_refused(shape):
    assert said(ValueError, lambda: made() @ torch.ones(shape)) == (
        f"run: B must be of shape [..., 20, N], got {shape}. "
        "A is 30x20: B needs one row per column of A."
    )


def test_an_operand_on_another_device_is_refused():
    assert said(ValueError, lambda: made() @ dense(device="meta")) == (
        "run: B must be on cpu like the plan, got meta. "
        "Move it with B.to('cpu'), or plan with A on B's device."
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64], ids=str)
def test_an_operand_of_another_type_is_refused(dtype):
    assert said(TypeError, lambda: made() @ torch.ones(20, 4, dtype=dtype)) == (
        f"run: B must be torch.float32 like the plan, got {dtype}. "
        f"Cast it with B.to(torch.float32), or make a plan with dtype={dtype}."
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("convert", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_operand_is_refused(convert):
    B = getattr(dense(), convert)()
    assert said(TypeError, lambda: made() @ B) == (
        f"run: B must be a dense tensor, got {B.layout}. Call B.to_dense()."
    )


def test_an_unknown_reduction_is_refused():
    assert said(ValueError, lambda: made().run(dense(), reduce="prod")) == (
        "run: reduce must be one of ['sum', 'mean', 'max', 'min'], got 'prod'. "
        "Choose a name from that list."
    )


def test_beta_without_out_is_refused():
    assert said(ValueError, lambda: made().run(dense(), beta=0.5)) == (
        "run: beta must be 0 when out is not given, got 0.5. Pass out=."
    )


def test_an_out_that_is_no_tensor_is_refused():
    assert said(TypeError, lambda: made().run(dense(), out=[0.0])) == (
        "run: out must be a torch tensor, got list. Pass a tensor."
    )


@pytest.mark.parametrize(
    "out", [torch.empty(20, 4), torch.empty(30, 4, dtype=torch.float64), torch.empty(1, 30, 4)]
)
def test_an_out_of_another_shape_or_type_is_refused(out):
    assert said(ValueError, lambda: made().run(dense(), out=out)) == (
        "run: out must be torch.float32 of shape (30, 4) on cpu, got "
        f"{out.dtype} of shape {tuple(out.shape)} on cpu. "
        "Allocate it with torch.empty, or leave out= away."
    )


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_an_out_for_an_extremum_is_refused(reduce):
    assert said(ValueError, lambda: made().run(dense(), out=torch.empty(30, 4), reduce=reduce)) == (
        f"run: reduce must be sum or mean when out is given, got {reduce}. Leave out= away."
    )


def test_an_out_in_the_way_of_gradients_is_refused():
    B, out = dense(requires_grad=True), torch.empty(30, 4)
    assert said(ValueError, lambda: made().run(B, out=out)) == (
        "run: out must be left away when gradients are needed, got a tensor. "
        "Leave out= away, or run under torch.no_grad()."
    )
    with torch.no_grad():
        assert made().run(B, out=out) is out


@pytest.mark.parametrize("lead", [(2, 3), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("n", [0, 4])
def test_batches_may_be_empty_and_so_may_their_matrices(lead, n):
    plan = made()
    B = torch.randn(*lead, 20, n)
    assert (plan @ B).shape == (*lead, 30, n)
    out = torch.empty(*lead, 30, n)
    assert plan.run(B, out=out) is out


def test_a_plan_on_the_right_of_a_product_is_a_mistake():
    with pytest.raises(TypeError):
        dense(4, 30) @ made()
    assert said(TypeError, lambda: torch.mm(made(), dense())) == (
        "plan: operands must be plan @ B, got mm of 2 arguments. "
        "Write plan @ B, or plan.T for the transpose."
    )


def test_a_plan_times_something_that_is_no_tensor_is_python_s_own_error():
    with pytest.raises(TypeError, match="unsupported operand"):
        made() @ "B"


# -- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["update_values", "run"])
@pytest.mark.parametrize(
    "values, kind, text",
    [
        ([1.0], TypeError, "a torch tensor, got list. Convert it with torch.as_tensor."),
        (
            torch.ones(3), ValueError,
            f"of shape ({MATRIX.nnz},), got (3,). "
            "Give one value per entry of the matrix that was planned.",
        ),
        (
            torch.ones(MATRIX.nnz, device="meta"), ValueError,
            "on cpu, got meta. Call values.to('cpu').",
        ),
        (
            torch.ones(MATRIX.nnz, dtype=torch.int64), TypeError,
            "a float tensor, got torch.int64. Call values.to(torch.float32).",
        ),
    ],
    ids=["list", "length", "device", "dtype"],
)  # fmt: skip
def test_values_that_do_not_fit_are_refused(name, values, kind, text):
    plan = made()
    if name == "run":
        assert said(kind, lambda: plan.run(dense(), values=values)) == f"run: values must be {text}"
    else:
        assert said(kind, lambda: plan.update_values(values)) == (
            f"update_values: values must be {text}"
        )


def messy() -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Edges out of order, with duplicates: 8 entries at 4 places."""
    edges = torch.tensor([[2, 0, 2, 1, 0, 2, 0, 2], [1, 3, 1, 0, 3, 0, 3, 1]])
    return edges, torch.arange(1.0, 9.0), (3, 4)


def messy_dense(weight: torch.Tensor) -> torch.Tensor:
    edges, _, shape = messy()
    return torch.zeros(shape).index_put(tuple(edges), weight, accumulate=True)


def test_values_are_given_in_the_order_of_the_input_and_duplicates_add_up():
    edges, weight, shape = messy()
    plan, B = st.plan((edges, weight, shape), 3), torch.randn(4, 3)
    assert plan.nnz == 4
    assert torch.allclose(plan @ B, messy_dense(weight) @ B)
    fresh = torch.tensor([5.0, -1.0, 2.0, 0.5, 3.0, 7.0, 1.0, -2.0])
    assert torch.allclose(plan.run(B, values=fresh), messy_dense(fresh) @ B)
    assert torch.allclose(plan @ B, messy_dense(weight) @ B), "for that product only"
    plan.update_values(fresh)
    assert torch.allclose(plan @ B, messy_dense(fresh) @ B)
    assert torch.allclose(plan.T @ torch.eye(3), messy_dense(fresh).T)


def test_gradients_reach_every_one_of_several_duplicates():
    edges, weight, shape = messy()
    plan, B = st.plan((edges, weight, shape), 3), torch.randn(4, 3)
    one, other = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    (plan.run(B, values=one) ** 2).sum().backward()
    ((messy_dense(other) @ B) ** 2).sum().backward()
    assert torch.allclose(one.grad, other.grad)


def test_a_pattern_can_be_given_values_later():
    csr, B = csr_of(MATRIX, pattern=True), dense()
    plan = st.plan(csr, 4)
    assert plan.values is None
    assert_close(plan.T @ torch.ones(30, 4), csr.transposed(), torch.ones(30, 4))
    fresh = torch.randn(csr.nnz)
    plan.update_values(fresh)
    assert_close(plan @ B, csr.with_values(fresh), B)
    assert_close(plan.T @ torch.ones(30, 4), csr.with_values(fresh).transposed(), torch.ones(30, 4))
    fresh.zero_()
    assert float(plan.values.abs().max()) > 0, "the plan must hold a copy"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_values_of_another_float_type_are_converted(dtype):
    plan, B = made(), dense()
    fresh = torch.randn(plan.nnz).to(dtype)
    plan.update_values(fresh)
    assert plan.values.dtype is torch.float32
    assert_close(plan @ B, csr_of(MATRIX).with_values(fresh.float()), B)


def train(
    plan: st.Plan, weight: torch.nn.Parameter, B: torch.Tensor, goal: torch.Tensor
) -> list[float]:
    optimiser = torch.optim.SGD([weight], lr=0.05)
    losses = []
    for _ in range(8):
        optimiser.zero_grad()
        loss = ((plan @ B - goal) ** 2).mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("how", ["planned", "updated"])
def test_an_optimiser_s_steps_are_followed(how):
    edges, weight, shape = messy()
    parameter = torch.nn.Parameter(weight.clone())
    plan = st.plan((edges, parameter if how == "planned" else weight, shape), 3)
    if how == "updated":
        plan.update_values(parameter)
    B = torch.randn(4, 3)
    losses = train(plan, parameter, B, messy_dense(torch.ones(8)) @ B)
    assert all(after < before for before, after in itertools.pairwise(losses))
    with torch.no_grad():
        assert torch.allclose(plan @ B, messy_dense(parameter) @ B, atol=1e-6)
    assert torch.allclose(plan.values.detach(), messy_dense(parameter)[messy_dense(weight) != 0])


def test_a_plan_stops_following_when_it_is_given_plain_values():
    parameter = torch.nn.Parameter(torch.ones(MATRIX.nnz))
    csr, B = csr_of(MATRIX), dense()
    plan = st.plan(csr.with_values(parameter), 4)
    plan.update_values(torch.full((MATRIX.nnz,), 2.0))
    with torch.no_grad():
        parameter.zero_()
    assert not (plan @ B).requires_grad
    assert_close(plan @ B, csr.with_values(torch.full((MATRIX.nnz,), 2.0)), B)


@pytest.mark.xfail(strict=True, reason="plan.T keeps the values it was planned with")
def test_the_transpose_follows_too():
    parameter = torch.nn.Parameter(torch.ones(MATRIX.nnz))
    csr, G = csr_of(MATRIX), dense(30)
    plan = st.plan(csr.with_values(parameter), 4)
    plan.T @ G
    with torch.no_grad():
        parameter.mul_(3)
        assert_close(plan.T @ G, csr.with_values(parameter.detach()).transposed(), G)


def test_two_products_may_wait_for_one_backward():
    parameter = torch.nn.Parameter(torch.ones(MATRIX.nnz))
    plan = st.plan(csr_of(sp.csr_array(MATRIX)).with_values(parameter), 4)
    first, second = dense(), dense()
    ((plan @ first).sum() + (plan @ second).sum()).backward()
    rows = csr_of(MATRIX).indices.long()
    assert torch.allclose(parameter.grad, (first + second).sum(1)[rows], atol=1e-5)


# -- words --------------------------------------------------------------------------------------


def test_info_is_plain_data_about_everything_that_was_decided():
    plan = made(system="cpu")
    info = plan.info
    assert info["shape"] == [30, 20] and info["nnz"] == MATRIX.nnz and info["n"] == 4
    assert (info["dtype"], info["device"], info["system"]) == ("float32", "cpu", "cpu")
    assert info["weighted"] is True and info["reorder"] == "identity"
    assert info["format_bytes"] == sum(
        part.numel() * part.element_size() for part in plan._stage.parts
    )
    assert list(info["seconds"]) == ["intake", "reorder", "build", "compile"]
    assert all(seconds >= 0 for seconds in info["seconds"].values())
    assert info["rejected"].keys() == {"csr", "cusparse"}
    assert json.loads(json.dumps(info)) == info


def test_a_plan_s_own_text_says_what_it_is():
    assert repr(made(system="cpu")) == (
        f"Plan(30x20, {MATRIX.nnz} entries, weighted, n=4, float32, cpu, system=cpu)"
    )
    pattern = st.plan(csr_of(MATRIX, pattern=True), 4, system="dense")
    assert "pattern, n=4, float32, cpu, system=dense)" in repr(pattern)


def test_the_transpose_is_planned_once_and_kept():
    plan = made()
    assert plan.T is plan.T
    assert plan.T.shape == (20, 30) and plan.T.T.shape == (30, 20)
