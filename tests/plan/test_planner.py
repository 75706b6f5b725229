"""Planning: what is refused and in which words, what is chosen, what a plan holds on to."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

import sparsetile as st
from sparsetile.plan import planner
from sparsetile.reorder import REORDERERS
from sparsetile.systems import SYSTEMS
from tests.contracts.cases import assert_close, csr_of
from tests.plans import MATRIX, dense, made, said


@pytest.mark.parametrize(
    "n, kind, text",
    [
        (-1, ValueError, "plan: n must be between 0 and 2147483647, got -1. "),
        (2.5, ValueError, "plan: n must be a whole number, got 2.5. "),
        ("4", TypeError, "plan: n must be a whole number, got '4'. "),
        ([], TypeError, "plan: n must be a whole number, got list. "),
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
        "plan: tune must be one of ['model', 'measure', 'none'], got 'fast'. "
        "Choose a name from that list."
    )


def test_an_unknown_order_is_refused_with_the_known_ones():
    assert said(ValueError, lambda: made(reorder="best")) == (
        f"plan: reorder must be one of {['auto', *REORDERERS]}, got 'best'. "
        "Choose a name from that list."
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex32, torch.bool, "float32"])
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


def test_a_system_that_cannot_serve_says_why():
    text = said(st.UnsupportedError, lambda: made(system="csr"))
    assert text.startswith(
        "plan: system must support this product, got csr. Each system's reason:\n"
    )
    assert text.endswith("  csr: runs on cuda, A is on cpu")


def test_a_product_no_system_can_serve_lists_every_system_of_the_device(monkeypatch):
    on_cpu = SYSTEMS.on("cpu")
    for system in map(SYSTEMS.__getitem__, on_cpu):
        monkeypatch.setattr(type(system), "further_reasons", lambda self, request: ["is away"])
    text = said(st.UnsupportedError, made)
    assert "got no system. " in text
    for name in on_cpu:
        assert f"  {name}: " in text
    assert text.count("is away") == len(on_cpu) < len(SYSTEMS)


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
    "options",
    [
        {"reorder": "rcm", "tune": "measure"},
        {"reorder": "identity", "keep": "inference"},
        {"system": "cpu"},
        {"tune": "none"},
    ],
)
def test_no_other_order_is_looked_for_where_one_is_given_or_the_system_is(options, calls_of):
    looked = calls_of(planner, "order_that_pays")
    made(**options)
    assert not looked
    made(tune="measure")
    assert len(looked) == 1


def test_a_plan_that_starts_quickly_looks_for_no_order(monkeypatch, calls_of):
    monkeypatch.setattr(type(SYSTEMS["cpu"]), "quick_on", ("cpu",))
    looked = calls_of(planner, "order_that_pays")
    assert made().info["account"] and not looked
    made(expected_runs=10**9)
    assert len(looked) == 1


@pytest.mark.parametrize(
    "order",
    [
        torch.arange(29),
        torch.zeros(30, dtype=torch.int64),
        torch.arange(30) + 1,
        torch.arange(30).view(1, 30),
    ],
)
def test_an_order_that_repeats_or_misses_rows_is_refused(order):
    text = said(ValueError, lambda: made(reorder=order))
    assert text.startswith("plan: reorder must be a permutation of the 30 rows of A, got a tensor ")


def test_an_order_of_complex_numbers_is_refused():
    order = torch.arange(30).to(torch.complex64)
    assert said(TypeError, lambda: made(reorder=order)).startswith(
        "plan: reorder must be whole row numbers, got torch.complex64. "
    )


def test_a_device_that_is_no_name_is_refused():
    assert said(ValueError, lambda: made(device=1.5)).startswith(
        "plan: device must be a device such as cpu or cuda:0, got 1.5. "
    )


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


def test_files_and_scipy_matrices_go_to_the_gpu_where_there_is_one(torch_cuda):
    torch_cuda(is_available=True, current_device=3, device_count=4)
    target = planner._target_device
    assert target(MATRIX, None) == torch.device("cuda", 3)
    assert target("graph.mtx", None) == torch.device("cuda", 3)
    assert target(csr_of(MATRIX), None) is None, "stays where it is"
    assert target(MATRIX, "cpu") == torch.device("cpu")
    assert target(MATRIX, "cuda") == torch.device("cuda", 3)
    assert target(MATRIX, "cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"^plan: device must be below cuda:4, got cuda:4"):
        target(MATRIX, "cuda:4")


@pytest.mark.parametrize("strange", [torch.inf, torch.nan, 1e30])
def test_auto_takes_the_exact_system_where_values_are_often_not_finite(strange: float):
    """Others would recompute most of C; 1e30 is Inf in float16."""
    full = torch.ones(64, 64)
    able = st.plan(full.to_sparse_csr(), 64, dtype=torch.float16)
    assert able.info["system"] == "dense", "what the case is about"
    full[3, 5] = strange
    A = full.to_sparse_csr()
    made = st.plan(A, 64, dtype=torch.float16)
    assert made.info["system"] == "cpu"
    assert "A often has Inf or NaN in float16" in made.explain()
    C = made @ torch.ones(64, 64, dtype=torch.float16)
    assert (~torch.isfinite(C)).any(1).nonzero().flatten().tolist() == [3]
    # Asked for by name it is taken.
    assert st.plan(A, 64, dtype=torch.float16, system="dense").info["system"] == "dense"
    # One in thousands of rows is no reason.
    tall = torch.ones(4000, 64)
    tall[3, 5] = strange
    assert st.plan(tall.to_sparse_csr(), 64, dtype=torch.float16).info["system"] == "dense"


@pytest.fixture
def many(monkeypatch):
    """The matrix of the tests has too many entries for one schedule."""
    monkeypatch.setenv("SPARSETILE_ENTRY_LIMIT", "3")


@pytest.mark.parametrize("name", [name for name in REORDERERS if name != "identity"])
def test_no_order_is_searched_for_in_too_many_entries(name, many):
    assert said(ValueError, lambda: made(reorder=name)) == (
        "plan: reorder must be 'identity' or a permutation for 3 entries or more, "
        f"got {name!r}. Find an order of a part of A, or omit reorder=."
    )


def test_columns_of_too_many_entries_are_not_renumbered(many):
    assert said(ValueError, lambda: made(reorder_columns=True)) == (
        "plan: reorder_columns must be False for 3 entries or more, got True. "
        "Renumber the columns of A before planning."
    )


@pytest.mark.parametrize("order", ["auto", "identity", "given"])
def test_too_many_entries_for_a_schedule_are_planned_in_pieces(order, many):
    rows = MATRIX.shape[0]
    plan = made(system="cpu", reorder=torch.arange(rows).flip(0) if order == "given" else order)
    assert "pieces of fewer than 3 entries" in plan.explain()
    B = torch.randn(plan.shape[1], 4, dtype=plan.dtype)
    assert_close(plan @ B, csr_of(MATRIX, dtype=plan.dtype), B)


def test_a_plan_in_pieces_is_saved_and_loaded(many, tmp_path):
    plan = made(system="cpu")
    plan.save(tmp_path / "a.safetensors")
    B = torch.randn(plan.shape[1], 4, dtype=plan.dtype)
    assert torch.equal(st.load_plan(tmp_path / "a.safetensors") @ B, plan @ B)
